"""The worker of a client: serves jobs, starts what is assigned, stops what must stop, and reports how it ended.

Rules:

* A run is started once in this process, however often it is told of: by a push, or by the list with which a stream
  attaches. A run that the list leaves out is over in the cluster; its handler is cancelled and nothing is reported.
* What a handler returned is reported, also after an interrupt: it has happened. A handler that was cancelled and did
  end is reported as stopped. A handler that does not end (a thread that does not look) is not reported as stopped: it
  keeps its slot here, and the cluster goes by the grace.
* Reports are repeated until they are answered or the session has ended.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from tenure import errors
from tenure.connection import Connection
from tenure.run import Permanent, Retry, Run, SyncRun, encoded
from tenure.session import ACKNOWLEDGE, COMPLETE_RUN, FAIL_RUN, SERVE, Kind, Session
from tenure.switches import Guard
from tenure.v1 import job_pb2, session_pb2

__all__ = ["Handler", "Worker", "job_name"]

log = logging.getLogger("tenure")

Handler = Callable[[Any], Any]

SLOTS_MAX = 1_000
RESULT_BYTES_MAX = 16_384
ERROR_BYTES_MAX = 4_096
REPORT_RETRY_S = 0.2
# A run whose time is over is cancelled by the sidecar's interrupt; by the clock alone only so much later.
DEADLINE_SLACK = 0.5
# Cancelled handlers are waited for so long; a thread that does not look at ``run.cancelled`` cannot be ended.
STUBBORN_S = 30.0
# Keepalives in the time after which nothing is known of the switches any more.
KEEPALIVES_PER_STALENESS = 4


class Defines(Protocol):
    """Creates the job that a handler is for, if it asked for that."""

    async def __call__(self) -> None: ...


@dataclass(eq=False)
class _Running:
    run: Run
    handler: Handler
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    body: asyncio.Future[Any] | None = None
    lost: bool = False  # over in the cluster, or the session is


def job_name(name: str, tenant: str) -> str:
    """The name alone of NAME or TENANT/NAME. Raises ValueError when the tenant is not the client's."""
    said, slash, rest = name.rpartition("/")
    if not rest or "/" in said:
        raise ValueError(f"a job is written NAME or TENANT/NAME, not {name!r}")
    if slash and said != tenant:
        raise ValueError(f"job {name!r} is of tenant {said!r}, this client of tenant {tenant!r}: connect(tenant=...)")
    return rest


class Worker:
    """See the rules at the top of this file. There is one of each client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._switches = connection.switches
        self._handlers: dict[str, Handler] = {}
        self.definitions: dict[str, Defines] = {}
        self._runs: dict[str, _Running] = {}
        self.guards: set[Guard] = set()
        self._serving: asyncio.Event | None = None  # set: work() is to end
        self._slots = 0
        # What the present session was told: its id, the jobs, the slots.
        self._announced: tuple[str, tuple[str, ...], int] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closing = False
        self._switches.on_change = self._look_at_guards

    # ---- what is served ----------------------------------------------------------------------------------------

    def register(self, name: str, handler: Handler) -> None:
        if name in self._handlers:
            raise ValueError(f"job {name!r} has a handler already")
        self._handlers[name] = handler
        if self._serving is not None:
            self._announce()

    def _handler_of(self, job: str) -> Handler | None:
        exact = self._handlers.get(job)
        if exact is not None:
            return exact
        fitting = [name for name in self._handlers if name.endswith("*") and job.startswith(name[:-1])]
        return self._handlers[max(fitting, key=len)] if fitting else None

    async def work(self, slots: int, stop: asyncio.Event | None, finish_timeout: float) -> None:
        self._check(slots, finish_timeout)
        self._serving, self._slots = asyncio.Event(), slots
        self._renew_often()
        try:
            for name in list(self.definitions):
                await self.definitions[name]()
            announced = self._announce()
            if announced is not None:
                await announced  # raises what can never be served
            await self._until_stopped(stop)
        finally:
            self._serving = None
            await self._finish(finish_timeout)

    def _check(self, slots: int, finish_timeout: float) -> None:
        self._connection.check_usable()
        if not 1 <= slots <= SLOTS_MAX:
            raise ValueError(f"slots must be 1 to {SLOTS_MAX}, not {slots}")
        if not finish_timeout >= 0:
            raise ValueError(f"finish_timeout must be 0 or more seconds, not {finish_timeout}")
        if not self._handlers:
            raise ValueError("no handler: decorate a function with client.job(...) first")
        if self._serving is not None:
            raise RuntimeError("this client works already")

    async def _until_stopped(self, stop: asyncio.Event | None) -> None:
        assert self._serving is not None
        waits = [asyncio.ensure_future(event.wait()) for event in (self._serving, stop) if event is not None]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def stop(self) -> None:
        if self._serving is not None:
            self._serving.set()

    async def _finish(self, timeout: float) -> None:
        """No new runs; those that go on may end. Cancelling this, or the end of the time, cancels them."""
        self._slots = 0
        if not self._closing and self._connection.owner.here:
            self._announce()
        try:
            if not self._closing:
                await self._all_ended(timeout)
        finally:
            self._cancel_all("stopped")
            await self._all_ended(STUBBORN_S)
            self._say_stubborn()
            self._renew_often()

    async def _all_ended(self, timeout: float) -> None:
        """Until no handler runs any more, or the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._runs:
            left = max(deadline - loop.time(), 0)
            waits = [loop.create_task(each.ended.wait()) for each in self._runs.values()]
            try:
                done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not done:
                return

    async def close(self) -> None:
        """Cancels every handler and waits for it: nothing is reported, the session's end says enough."""
        self._closing = True
        self.stop()
        self._cancel_all("client_closed")
        await self._all_ended(STUBBORN_S)
        self._say_stubborn()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _say_stubborn(self) -> None:
        for running in self._runs.values():
            log.error("the handler of run %s of %s does not end", running.run.run_id, running.run.job)

    # ---- the announcement --------------------------------------------------------------------------------------

    def _wanted(self) -> tuple[str, tuple[str, ...], int]:
        stuck = sum(each.lost for each in self._runs.values())
        return self._connection.session.id, tuple(self._handlers), max(self._slots - stuck, 0)

    def _announce(self) -> asyncio.Task[None] | None:
        """Tells the cluster what is served, as often as that changes, until it is known there."""
        if (self._announcing is None or self._announcing.done()) and not self._closing:
            self._announcing = self._connection.spawn(self._announce_until_known())
        return self._announcing

    async def _announce_until_known(self) -> None:
        while not self._closing and self._wanted() != self._announced:
            session, wanted = self._connection.session, self._wanted()
            if not session.id:
                return  # attached() begins anew
            try:
                await self._serve(session, wanted[1], wanted[2])
                self._announced = wanted
            except errors.SessionLost:
                return
            except (errors.Unavailable, errors.Overloaded, errors.Indefinite) as error:
                log.warning("the cluster does not know yet what this client serves: %s", error)
                await asyncio.sleep(REPORT_RETRY_S)

    async def _serve(self, session: Session, jobs: tuple[str, ...], slots: int) -> None:
        request = job_pb2.ServeJobsRequest(jobs=jobs, slots=slots)
        await self._connection.call(SERVE, lambda: request, timeout=self._connection.options.timeout, session=session)

    # ---- told by the session -----------------------------------------------------------------------------------

    def attached(self, session: Session, attached: session_pb2.Attached) -> None:
        self._switches.told(session, attached.switches)
        self._renew_often()
        listed = {message.run_id for message in attached.runs}
        for run_id, running in list(self._runs.items()):
            if running.run._session is session and run_id not in listed:
                self._lose(running, "lost")
        for message in attached.runs:
            self._assigned(session, message)
        if self._serving is not None:
            self._announce()

    def pushed(self, session: Session, push: session_pb2.Push) -> None:
        kind = push.WhichOneof("kind")
        if kind == "run_assigned":
            self._assigned(session, push.run_assigned.run)
        elif kind == "switches":
            self._switches.told(session, push.switches)
        elif kind == "run_interrupted":
            running = self._runs.get(push.run_interrupted.run_id)
            if running is not None:
                running.run._interrupted(push.run_interrupted)
        elif kind == "run_lost":
            running = self._runs.get(push.run_lost.run_id)
            if running is not None:
                self._lose(running, push.run_lost.cause or "lost")

    def tick(self, session: Session, now: float) -> float:
        """Cancels what may not go on by the clock."""
        mine = [each.run for each in self._runs.values() if each.run._session is session]
        nearest = float("inf")
        if mine or self.guards:
            if self._switches.stops(session):
                for run in mine:
                    run._cancel("switch_state_unknown")
                self._look_at_guards()
            elif not self._switches.fail_open:
                nearest = self._switches.stale_at(session)
        for run in mine:
            if now >= session.validity.cancel_at:
                run._cancel("session_in_danger")
            elif now >= run.deadline + DEADLINE_SLACK:
                run._cancel("timeout")
            elif run.interrupt_cause is None:
                nearest = min(nearest, run.deadline + DEADLINE_SLACK)
        return nearest

    def ended(self, session: Session) -> None:
        for running in list(self._runs.values()):
            if running.run._session is session:
                self._lose(running, session.ended or "session_ended")
        self._look_at_guards()

    def _look_at_guards(self) -> None:
        for guard in list(self.guards):
            guard.look(self._connection.session)

    def watch_switches(self) -> None:
        """Something is guarded now, or nothing any more: keepalives follow."""
        self._renew_often()
        self._connection.session.hooks.rearm()

    def _renew_often(self) -> None:
        needed = self._serving is not None or bool(self._runs) or bool(self.guards)
        within = self._switches.staleness / KEEPALIVES_PER_STALENESS if needed else float("inf")
        self._connection.session.renew_within(within)

    # ---- runs --------------------------------------------------------------------------------------------------

    def _assigned(self, session: Session, message: job_pb2.Run) -> None:
        known = self._runs.get(message.run_id)
        if known is not None:
            if message.interrupted:
                known.run._interrupted(_interrupt(message))
            return
        if not message.job or session.ended is not None:
            return  # listed in short: the whole of it follows
        run = Run(self._connection, session, message)
        handler = self._handler_of(message.job)
        if handler is None or self._closing:
            self._connection.spawn(self._report_failure(run, "this agent has no handler for the job", 0.0))
            return
        running = self._runs[run.run_id] = _Running(run, handler)
        self._connection.spawn(self._go(running))
        if message.interrupted:
            run._interrupted(_interrupt(message))
        session.hooks.rearm()

    def _lose(self, running: _Running, cause: str) -> None:
        """The run is over in the cluster, whatever its handler does now."""
        if not running.lost:
            running.lost = True
            running.run._cancel(cause)
            if self._serving is not None:
                self._announce()

    def _cancel_all(self, cause: str) -> None:
        for running in list(self._runs.values()):
            running.run._cancel(cause)

    async def _go(self, running: _Running) -> None:
        run = running.run
        try:
            await self._body(running)
        finally:
            run._end()
            del self._runs[run.run_id]
            running.ended.set()
            if running.lost and self._serving is not None:
                self._announce()

    async def _body(self, running: _Running) -> None:
        """The handler from its start to the report of its end. Cancelled only when the connection is closed."""
        run = running.run
        body = running.body = self._start(running)
        run._stop = lambda: self._stop(running)
        if run.interrupt_cause is not None:
            self._stop(running)  # before it could begin
        try:
            await asyncio.wait({body})
        except asyncio.CancelledError:
            body.cancel()
            raise
        if running.lost or self._closing:
            self._say_unreported(running, body)
            return
        await self._report(run, body)

    def _start(self, running: _Running) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if _is_async(running.handler):
            return loop.create_task(_awaited(running.handler, running.run))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=SLOTS_MAX, thread_name_prefix="tenure-run")
        return loop.run_in_executor(self._pool, running.handler, SyncRun(running.run, loop))

    def _stop(self, running: _Running) -> None:
        body, run = running.body, running.run
        if body is None or body.done():
            return
        log.info("run %s of %s is interrupted: %s", run.run_id, run.job, run.interrupt_cause)
        if isinstance(body, asyncio.Task):
            body.cancel()

    # ---- reports -----------------------------------------------------------------------------------------------

    async def _report(self, run: Run, body: asyncio.Future[Any]) -> None:
        if body.cancelled():
            if run.interrupted_by_sidecar:
                await self._acknowledge(run, "stopped")
            else:
                await self._report_failure(run, f"cancelled: {run.interrupt_cause or 'by its own code'}", 0.0)
            return
        error = body.exception()
        if error is None:
            await self._report_success(run, body.result())
        elif run.interrupted_by_sidecar:
            await self._acknowledge(run, _text(error))
        elif isinstance(error, Retry):
            await self._report_failure(run, str(error) or "the handler asked for another attempt", error.after)
        elif isinstance(error, Permanent):
            await self._report_failure(run, str(error) or "the handler failed for good", 0.0, retryable=False)
        else:
            log.error("the handler of run %s of %s failed", run.run_id, run.job, exc_info=error)
            await self._report_failure(run, _text(error), 0.0)

    async def _report_success(self, run: Run, value: object) -> None:
        try:
            result = encoded(value, "result")
        except TypeError as error:
            log.error("run %s of %s is done, but its result is not stored: %s", run.run_id, run.job, error)
            result = b""
        if len(result) > RESULT_BYTES_MAX:
            log.error(
                "run %s of %s is done, but its result is not stored: it has %d bytes, at most %d are kept",
                run.run_id, run.job, len(result), RESULT_BYTES_MAX,
            )  # fmt: skip
            result = b""
        await self._tell(
            run, COMPLETE_RUN, job_pb2.CompleteRunRequest(run_id=run.run_id, token=run.token, result=result)
        )

    async def _report_failure(self, run: Run, text: str, after: float, *, retryable: bool = True) -> None:
        request = job_pb2.FailRunRequest(
            run_id=run.run_id,
            token=run.token,
            error=_bounded(text),
            retryable=retryable,
            retry_after_ms=round(after * 1000),
        )
        await self._tell(run, FAIL_RUN, request)

    async def _acknowledge(self, run: Run, detail: str) -> None:
        request = job_pb2.AcknowledgeInterruptRequest(run_id=run.run_id, token=run.token, detail=_bounded(detail))
        await self._tell(run, ACKNOWLEDGE, request)

    async def _tell(self, run: Run, kind: Kind[Any, Any], request: Any) -> None:
        """Until it is answered, or the session has ended."""
        uncertain = False
        while True:
            try:
                await self._connection.call(
                    kind, lambda: request, timeout=self._connection.options.timeout, session=run._session
                )
                return
            except errors.SessionLost:
                log.warning("run %s of %s has ended (%s), and so has the session", run.run_id, run.job, kind.field)
                return
            except errors.RunEnded as error:
                if not uncertain:
                    log.warning("run %s of %s was over before it was reported: %s", run.run_id, run.job, error)
                return
            except errors.Indefinite:
                uncertain = True
            except (errors.Unavailable, errors.Overloaded) as error:
                log.warning("the end of run %s of %s is not reported yet: %s", run.run_id, run.job, error)
            except errors.TenureError as error:
                log.error("the end of run %s of %s was refused: %s", run.run_id, run.job, error)
                return
            await asyncio.sleep(REPORT_RETRY_S)

    def _say_unreported(self, running: _Running, body: asyncio.Future[Any]) -> None:
        run = running.run
        done = not body.cancelled() and body.exception() is None
        if not self._closing or done:
            how = "was done after all" if done else "has stopped"
            log.warning("run %s of %s %s; it was lost before: %s", run.run_id, run.job, how, run.interrupt_cause)


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


async def _awaited(handler: Callable[[Run], Awaitable[Any]], run: Run) -> Any:
    return await handler(run)


def _interrupt(message: job_pb2.Run) -> session_pb2.RunInterrupted:
    """Of a run that was interrupted while there was no stream: what is left of its time is the grace."""
    return session_pb2.RunInterrupted(
        run_id=message.run_id,
        cause=message.interrupt_cause,
        reason=message.interrupt_reason,
        grace_ms=message.remaining_ms,
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _bounded(text: str) -> str:
    return text.encode("utf-8", "replace")[:ERROR_BYTES_MAX].decode("utf-8", "ignore")
