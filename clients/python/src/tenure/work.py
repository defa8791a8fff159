"""The worker of a client: serves jobs, starts what is assigned, and stops what must stop.

Rules:

* A run is started once in this process, however often it is told of: by a push, or by the list with which a stream
  attaches. A run that the list leaves out is over in the cluster; its handler is cancelled and nothing is reported.
* A handler that does not end when it is cancelled (a thread that does not look) keeps its slot here, and nothing is
  said of it; the cluster goes by the grace.
* A session is told what this worker serves as often as that changes, and a new session anew. What is refused for good
  ends `work`.
* `work` ends in order: first the cluster learns that no more is wanted, then what runs may end, then it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tenure import errors
from tenure.connection import Connection
from tenure.handlers import Handler, Handlers
from tenure.reports import Reports
from tenure.run import Run
from tenure.session import SERVE, Session
from tenure.switches import Guard
from tenure.v1 import job_pb2, session_pb2

__all__ = ["Worker"]

log = logging.getLogger("tenure")

SLOTS_MAX = 1_000
ANNOUNCE_RETRY_S = 0.2
# A run whose time is over is cancelled by the sidecar's interrupt; by the clock alone only so much later.
DEADLINE_SLACK = 0.5
# Cancelled handlers are waited for so long; a thread that does not look at ``run.cancelled`` cannot be ended.
STUBBORN_S = 30.0
# What a worker that ends still has to say is given so long, where nothing else takes longer.
LAST_WORDS_S = 2.0
# Keepalives in the time after which nothing is known of the switches any more.
KEEPALIVES_PER_STALENESS = 4
STARTED_REMEMBERED_MAX = 4_096

Define = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class _Running:
    run: Run
    body: asyncio.Future[Any]
    # Until its end is reported.
    task: asyncio.Task[None] | None = None
    lost: bool = False  # over in the cluster, or the session is
    said: bool = False  # that it does not end

    @property
    def going(self) -> bool:
        return not self.body.done()


class Worker:
    """See the rules at the top of this file. There is one of each client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._switches = connection.switches
        self.handlers = Handlers()
        self._definitions: dict[str, Define] = {}
        self._undefined: dict[str, Define] = {}
        self._reports = Reports(connection)
        self._runs: dict[str, _Running] = {}
        self._started: OrderedDict[str, None] = OrderedDict()
        # From the start of a handler to the answer to its report.
        self._tasks: set[asyncio.Task[None]] = set()
        self.guards: set[Guard] = set()
        self._stopping: asyncio.Event | None = None  # there is one while `work` goes on
        self._slots = 0  # none from the moment at which `work` is to end
        self._taking = False
        # What the present session was told: its id, the jobs, the slots.
        self._announced: tuple[str, tuple[str, ...], int] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._refused: BaseException | None = None
        self._closing = False
        self._switches.on_change = self._look_at_guards

    @property
    def here(self) -> bool:
        """Whether this is the process that the worker belongs to."""
        return self._connection.owner.here

    # ---- what is served ----------------------------------------------------------------------------------------

    def register(self, name: str, handler: Handler, define: Define | None) -> None:
        self.handlers.add(name, handler)
        if define is not None:
            self._definitions[name] = define
        if self._slots:
            if define is not None:
                self._undefined[name] = define
            self._announce()

    async def work(self, slots: int, stop: asyncio.Event | None, finish_timeout: float) -> None:
        self._check(slots, finish_timeout)
        self._stopping, self._refused = asyncio.Event(), None
        self._slots, self._taking = slots, True
        self._undefined = dict(self._definitions)
        self._renew_often(self._connection.session)
        self._announce()
        try:
            await self._until_stopped(self._stopping, stop)
        finally:
            self._slots = 0
            if self.here:  # a forked child leaves everything as it is
                await self._finish(finish_timeout)
        if self._refused is not None:
            raise self._refused

    def _check(self, slots: int, finish_timeout: float) -> None:
        self._connection.check_usable()
        if not 1 <= slots <= SLOTS_MAX:
            raise ValueError(f"slots must be 1 to {SLOTS_MAX}, not {slots}")
        if not finish_timeout >= 0:
            raise ValueError(f"finish_timeout must be 0 or more seconds, not {finish_timeout}")
        if not self.handlers.names:
            raise ValueError("no handler: decorate a function with client.job(...) first")
        if self._stopping is not None:
            raise RuntimeError("this client works already")

    @staticmethod
    async def _until_stopped(*stops: asyncio.Event | None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in stops if event is not None]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    async def _finish(self, timeout: float) -> None:
        """No new runs; those that go on may end. Cancelling this, or the end of the time, cancels them."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            if not self._closing:
                self._announce()
                await self._known_by(deadline)
                await self._all_ended(deadline)
        finally:
            self._taking = False
            self._cancel_all("stopped")
            try:
                await self._last_words()
            finally:
                self._stopping = None
                self._renew_often(self._connection.session)

    async def _known_by(self, deadline: float) -> None:
        """Until the cluster knows what is served, but not for long."""
        if self._announcing is not None and not self._announcing.done():
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({self._announcing}, timeout=min(max(left, 0), LAST_WORDS_S))

    async def _all_ended(self, deadline: float) -> None:
        """Until no run is left, reports included; also those that come meanwhile."""
        loop = asyncio.get_running_loop()
        while self._tasks:
            left = max(deadline - loop.time(), 0)
            done, _ = await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return

    async def _last_words(self) -> None:
        """Waits for handlers that were cancelled, and then for what is to be said of them."""
        loop = asyncio.get_running_loop()
        bodies = [running.body for running in self._runs.values() if running.going]
        if bodies:
            await asyncio.wait(bodies, timeout=STUBBORN_S)
        for running in self._runs.values():
            self._say_stubborn(running)
        deadline = loop.time() + LAST_WORDS_S
        await self._known_by(deadline)
        endless = {running.task for running in self._runs.values() if running.going}
        reports = self._tasks - endless
        if reports:
            await asyncio.wait(reports, timeout=max(deadline - loop.time(), 0))

    def begin_close(self) -> None:
        """Nothing begins any more, and everything that goes on must end."""
        self._closing, self._taking = True, False
        self.stop()
        self._cancel_all("client_closed")
        for guard in list(self.guards):
            guard.cut(errors.ClientClosed("the client is being closed", reason="CLIENT_CLOSED"))

    async def close(self) -> None:
        """Cancels every handler and guarded body; waits for the handlers, and for the reports of their ends."""
        self.begin_close()
        await self._last_words()

    def inside(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is a handler or a guarded body: it cannot wait for its own end."""
        bodies: list[object] = [running.body for running in self._runs.values()]
        return task is not None and (task in bodies or any(guard.task is task for guard in self.guards))

    # ---- the announcement --------------------------------------------------------------------------------------

    def _wanted(self, session: Session) -> tuple[str, tuple[str, ...], int]:
        stuck = sum(each.lost for each in self._runs.values())
        return session.id, self.handlers.names, max(self._slots - stuck, 0)

    def _announce(self) -> None:
        """Creates the jobs that are to be, and tells the cluster what is served, until it is known there."""
        if not self._closing and (self._announcing is None or self._announcing.done()):
            self._announcing = self._connection.spawn(self._announce_until_known())
            self._announcing.add_done_callback(self._announcing_ended)

    def _announcing_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self._refused is None:
            self._refused = task.exception()
            self.stop()

    async def _announce_until_known(self) -> None:
        while not self._closing:
            session = self._connection.session
            try:
                if self._slots and self._undefined:
                    name, define = next(iter(self._undefined.items()))
                    await define()
                    self._undefined.pop(name, None)
                    continue
                wanted = self._wanted(session)
                if wanted == self._announced or not session.id:
                    return  # without a session: attached() begins anew
                await self._serve(session, wanted[1], wanted[2])
                self._announced = wanted
            except errors.SessionLost:
                continue
            except errors.ClientClosed:
                return
            except (errors.Unavailable, errors.Overloaded, errors.Indefinite) as error:
                log.warning("the cluster does not know yet what this client serves: %s", error)
                await asyncio.sleep(ANNOUNCE_RETRY_S)

    async def _serve(self, session: Session, jobs: tuple[str, ...], slots: int) -> None:
        request = job_pb2.ServeJobsRequest(jobs=jobs, slots=slots)
        await self._connection.call(SERVE, lambda: request, timeout=self._connection.options.timeout, session=session)

    # ---- told by the session -----------------------------------------------------------------------------------

    def attached(self, session: Session, attached: session_pb2.Attached) -> None:
        self._switches.told(session, attached.switches if attached.HasField("switches") else None)
        self._renew_often(session)
        listed = {message.run_id for message in attached.runs}
        for run_id, running in list(self._runs.items()):
            if run_id not in listed:
                self._lose(running, "lost")  # those of an older session are lost already
        for message in attached.runs:
            self._assigned(session, message)
        if self._stopping is not None:
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
                session.hooks.rearm()  # the grace is looked at
        elif kind == "run_lost":
            running = self._runs.get(push.run_lost.run_id)
            if running is not None:
                self._lose(running, push.run_lost.cause or "lost")

    def tick(self, session: Session, now: float) -> float:
        """Cancels what may not go on by the clock."""
        mine = [each.run for each in self._runs.values() if each.run._session is session]
        nearest = float("inf")
        if mine or self.guards:
            if self._switches.stops():
                for run in mine:
                    run._cancel("switch_state_unknown")
                self._look_at_guards()
            elif not self._switches.fail_open:
                nearest = self._switches.stale_at()
        for run in mine:
            if now >= session.validity.cancel_at:
                run._cancel("session_in_danger")
            elif now >= run.deadline + DEADLINE_SLACK:
                run._cancel("timeout")
            elif run.interrupt_cause is None:
                nearest = min(nearest, run.deadline + DEADLINE_SLACK)
        for running in self._runs.values():
            if running.run._grace_over:
                self._say_stubborn(running)
        return nearest

    def ended(self, session: Session) -> None:
        for running in list(self._runs.values()):
            if running.run._session is session:
                self._lose(running, session.ended or "session_ended")

    def _look_at_guards(self) -> None:
        for guard in list(self.guards):
            guard.look()

    def watch_switches(self) -> None:
        """Something is guarded now, or nothing any more: keepalives follow."""
        session = self._connection.session
        self._renew_often(session)
        session.hooks.rearm()

    def _renew_often(self, session: Session) -> None:
        needed = self._stopping is not None or bool(self._runs) or bool(self.guards)
        within = self._switches.staleness / KEEPALIVES_PER_STALENESS if needed else float("inf")
        session.renew_within(within)

    # ---- runs --------------------------------------------------------------------------------------------------

    def _assigned(self, session: Session, message: job_pb2.Run) -> None:
        known = self._runs.get(message.run_id)
        if known is not None and message.interrupted:
            known.run._interrupted(_interrupt(message))
        if known is not None or message.run_id in self._started:
            return  # its handler goes on, or has ended
        if not message.job or session.ended is not None:
            return  # listed in short: the whole of it follows
        self._started[message.run_id] = None
        if len(self._started) > STARTED_REMEMBERED_MAX:
            self._started.popitem(last=False)
        self._begin(session, message)

    def _begin(self, session: Session, message: job_pb2.Run) -> None:
        run = Run(self._connection, session, message)
        handler = self.handlers.of(message.job)
        if message.interrupted:
            run._interrupted(_interrupt(message))
            self._spawn(self._reports.not_started(run))
        elif handler is None or not self._taking:
            why = "has no handler for the job" if handler is None else "has stopped working"
            self._spawn(self._reports.failed(run, f"not started: this agent {why}"))
        else:
            running = self._runs[run.run_id] = _Running(run, self.handlers.start(handler, run))
            run._stop = lambda: self._stop(running)
            running.task = self._spawn(self._until_reported(running))
            session.hooks.rearm()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._connection.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until_reported(self, running: _Running) -> None:
        """Cancelled only when the connection is closed."""
        run, body = running.run, running.body
        try:
            await asyncio.wait({body})
            if running.lost:
                done = not body.cancelled() and body.exception() is None
                how = "was done after all" if done else "has stopped"
                log.warning("run %s of %s %s; it was lost before: %s", run.run_id, run.job, how, run.interrupt_cause)
            else:
                await self._reports.ended(run, body)
        finally:
            body.cancel()
            run._end()
            del self._runs[run.run_id]
            self._renew_often(self._connection.session)
            if running.lost and self._slots:
                self._announce()

    def _stop(self, running: _Running) -> None:
        if running.going:
            log.info("run %s of %s must end: %s", running.run.run_id, running.run.job, running.run.interrupt_cause)
            if isinstance(running.body, asyncio.Task):
                running.body.cancel()

    def _lose(self, running: _Running, cause: str) -> None:
        """The run is over in the cluster, whatever its handler does now."""
        if not running.lost:
            running.lost = True
            running.run._cancel(cause)
            if self._slots:
                self._announce()

    def _cancel_all(self, cause: str) -> None:
        for running in list(self._runs.values()):
            running.run._cancel(cause)

    @staticmethod
    def _say_stubborn(running: _Running) -> None:
        if running.going and not running.said:
            running.said = True
            log.error(
                "the handler of run %s of %s does not end (%s); it keeps its slot",
                running.run.run_id, running.run.job, running.run.interrupt_cause,
            )  # fmt: skip


def _interrupt(message: job_pb2.Run) -> session_pb2.RunInterrupted:
    """Of a run that was interrupted while there was no stream: what is left of its time is the grace."""
    return session_pb2.RunInterrupted(
        run_id=message.run_id,
        cause=message.interrupt_cause,
        reason=message.interrupt_reason,
        grace_ms=message.remaining_ms,
    )
