"""The synchronous client: the asynchronous one, on an event loop in one background thread. No second implementation.

Renewals run in that thread, so they go on while the caller's thread is busy or blocked. A thread cannot be cancelled
from outside: a body under a lease must look at ``lease.valid`` (or call ``lease.raise_if_lost()``) before each step
that matters, or pass the token along. A lease that was lost is reported with LeaseLost when the body ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from tenure import errors, forks
from tenure.client import Client, ConnectOptions, connect
from tenure.dedup import (
    Attempt,
    BeginResult,
    Completed,
    Failed,
    Idempotency,
    InProgress,
    JsonSerializer,
    OwnerLoss,
    Serializer,
    UnknownOutcome,
    unstorable,
)
from tenure.handlers import is_async
from tenure.jobs import JobInfo, JobOptions, OccurrenceInfo
from tenure.lease import Lease
from tenure.scheduling import FINISH_TIMEOUT, TRIGGER_REASON, JobDecorator
from tenure.switches import SwitchInfo, SwitchState
from tenure.values import Event, EventKind, LeaseInfo, RecordInfo, TokenCheck

__all__ = ["SyncAttempt", "SyncClient", "SyncLease", "connect_sync"]

P = ParamSpec("P")
T = TypeVar("T")

EXIT_TIMEOUT = 2.0


class _Loop:
    """An event loop in a thread of its own, which ends with `stop`."""

    def __init__(self) -> None:
        self.owner = forks.Owner()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tenure-client", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def _check(self) -> None:
        self.owner.check()
        if self.here:
            raise RuntimeError("a callback of the synchronous client must not wait for the client: use another thread")
        if not self._thread.is_alive():
            raise errors.ClientClosed("the client has been closed", reason="CLIENT_CLOSED")

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], object] | None = None) -> T:
        """Runs a coroutine in the loop's thread and waits for it.

        When the waiting thread is interrupted, the coroutine is cancelled; if it has succeeded just then, ``undo`` gets
        its value in the loop's thread, for nobody else will.
        """
        self._check()
        tasks: list[asyncio.Task[T]] = []
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            task = self._loop.create_task(work())
            tasks.append(task)
            task.add_done_callback(functools.partial(_hand_over, outcome))

        def give_up() -> None:
            task = tasks[0]
            if not task.cancel() and undo is not None and not task.cancelled() and task.exception() is None:
                undo(task.result())

        self.call_soon(start)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done() or outcome.exception() is None:
                self.call_soon(give_up)
            raise

    def run_in_order(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a coroutine that ends in order when it is cancelled, and at once when it is cancelled again, and waits
        for its end also when this thread is interrupted: that cancels it."""
        tasks: list[asyncio.Task[None]] = []
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        def start() -> None:
            if not ended.done():
                tasks.append(self._loop.create_task(work()))
                tasks[0].add_done_callback(over)

        def over(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                ended.set_result(None)
            else:
                _hand_over(ended, task)

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            elif not ended.done():
                ended.set_result(None)  # interrupted before it could start

        self._check()
        try:
            self.call_soon(start)
            ended.result()
        except BaseException:
            if ended.done():
                raise
            self.call_soon(cancel)
            try:
                ended.result()
            except BaseException:
                self.call_soon(cancel)
                raise
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        if not self.owner.here or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        left = asyncio.all_tasks(self._loop)  # of a close that was not given the time to end
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def _hand_over(outcome: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        outcome.set_exception(errors.ClientClosed("the client was closed during the call", reason="CLIENT_CLOSED"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class SyncLease:
    """A lease held by a synchronous client; see `tenure.Lease` for what its members mean."""

    def __init__(self, loop: _Loop, lease: Lease) -> None:
        self._loop = loop
        self._lease = lease

    @property
    def name(self) -> str:
        return self._lease.name

    @property
    def token(self) -> int:
        """The fencing token. Pass it along with everything that is done under the lease."""
        return self._lease.token

    @property
    def session_id(self) -> str:
        return self._lease.session_id

    @property
    def valid(self) -> bool:
        """Whether the holder may act now. Cheap, and right from any thread."""
        return self._lease.valid

    @property
    def safe_until(self) -> float:
        return self._lease.safe_until

    def remaining(self) -> float:
        return self._lease.remaining()

    @property
    def lost(self) -> errors.LeaseLost | None:
        return self._lease.lost

    def raise_if_lost(self) -> None:
        """Raises LeaseLost when the lease is lost. Call it before each step that matters."""
        self._lease.raise_if_lost()

    def on_jeopardy(self, callback: Callable[[SyncLease], object]) -> None:
        """Calls back, in the client's thread, each time renewals stop being confirmed."""
        self._loop.call_soon(lambda: self._lease.on_jeopardy(lambda _: callback(self)))

    def on_lost(self, callback: Callable[[SyncLease], object]) -> None:
        """Calls back once, in the client's thread, when the lease is lost."""
        self._loop.call_soon(lambda: self._lease.on_lost(lambda _: callback(self)))

    def check(self, *, timeout: float | None = None) -> TokenCheck:
        return self._loop.run(lambda: self._lease.check(timeout=timeout))

    def release(self, *, timeout: float | None = None) -> None:
        """Gives the lease back; again is harmless."""
        self._loop.run(lambda: self._lease.release(timeout=timeout))

    def transfer(self, to_session: str, *, timeout: float | None = None) -> int:
        """Hands the lease to a named session in one step. Returns the new holder's token."""
        return self._loop.run(lambda: self._lease.transfer(to_session, timeout=timeout))

    def __repr__(self) -> str:
        return f"<Sync{repr(self._lease)[1:]}"


class SyncAttempt:
    """A running attempt at an idempotency key; see `tenure.Attempt`."""

    def __init__(self, loop: _Loop, attempt: Attempt) -> None:
        self._loop = loop
        self._attempt = attempt

    @property
    def key(self) -> str:
        return self._attempt.key

    @property
    def number(self) -> int:
        return self._attempt.number

    def complete(self, result: bytes = b"", *, timeout: float | None = None) -> None:
        self._loop.run(lambda: self._attempt.complete(result, timeout=timeout))

    def fail(self, error: str = "", *, retryable: bool, timeout: float | None = None) -> None:
        self._loop.run(lambda: self._attempt.fail(error, retryable=retryable, timeout=timeout))

    def __repr__(self) -> str:
        return repr(self._attempt)


async def _run_now(function: Callable[[], T]) -> T:
    return function()


def _give_up(result: BeginResult) -> None:
    if isinstance(result, Attempt):
        result._give_up()


class SyncClient:
    """One session at a sidecar for a synchronous program. Safe to use from many threads."""

    def __init__(self, loop: _Loop, client: Client) -> None:
        self._loop = loop
        self._client = client
        self._bodies = threading.Condition()
        self._running: dict[SyncLease, threading.Thread] = {}
        self._closing = False
        atexit.register(self._at_exit)

    # ---- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends everything, after bodies under leases in other threads have ended: only then are these given back.

        Handlers of jobs are told to end (``run.cancelled``) and waited for, up to 30 s.
        """
        if not self._loop.owner.here:
            return  # the parent's
        worker = self._client._worker
        if worker.handlers.here:
            raise RuntimeError("close() was called inside a handler of this client: leave it first")
        with self._bodies:
            if threading.current_thread() in self._running.values():
                raise RuntimeError("close() was called inside the body of a lease of this client: leave the body first")
            self._closing = True
            with suppress(RuntimeError):  # closed before
                self._loop.call_soon(worker.begin_close)
            while self._running:
                self._bodies.wait()
        self._end(None)

    def _end(self, timeout: float | None) -> None:
        atexit.unregister(self._at_exit)
        with suppress(errors.ClientClosed, TimeoutError):
            self._loop.run(lambda: asyncio.wait_for(self._client.close(), timeout))
        self._loop.stop()

    def _at_exit(self) -> None:
        if self._loop.owner.here:
            self._end(EXIT_TIMEOUT)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closing(self) -> bool:
        """Whether `close` waits for bodies; a body should end then."""
        return self._closing

    @property
    def session_id(self) -> str:
        return self._client.session_id

    @property
    def node_id(self) -> str:
        return self._client.node_id

    @property
    def tenant(self) -> str:
        return self._client.tenant

    # ---- jobs --------------------------------------------------------------------------------------------------

    def job(self, name: str, *, replace: bool = False, **define: Unpack[JobOptions]) -> JobDecorator:
        """Decorator: the function is the handler of a job; ``client.work()`` then serves it. See `Client.job`.

        The handler runs in a thread of its own, one for each run, and gets a `SyncRun`. A thread cannot be cancelled:
        it must look at ``run.cancelled`` (or call ``run.raise_if_cancelled()``) before each step that matters.
        """
        decorator = self._client.job(name, replace=replace, **define)

        def register(function: Callable[..., Any]) -> None:
            if is_async(function):
                raise TypeError("a coroutine function needs the asynchronous client: tenure.connect()")
            self._loop.run(lambda: _run_now(lambda: decorator(function)))

        return JobDecorator(register)

    def work(self, *, slots: int = 1, finish_timeout: float = FINISH_TIMEOUT) -> None:
        """Serves the jobs that have handlers, until `stop_work` or `close` is called in another thread (or a handler
        calls `stop_work`), or this thread is interrupted (KeyboardInterrupt). Ends in order, as `Client.work` does; an
        interrupt is raised again at the end, and a second one ends it at once.
        """
        self._loop.run_in_order(lambda: self._client.work(slots=slots, finish_timeout=finish_timeout))

    def stop_work(self) -> None:
        """Lets `work` end in order. From any thread; harmless when nothing works."""
        self._loop.owner.check()
        with suppress(RuntimeError):  # the client is closed
            self._loop.call_soon(self._client.stop_work)

    def apply_job(
        self,
        name: str,
        *,
        expected_revision: int | None = None,
        actor: str | None = None,
        timeout: float | None = None,
        **define: Unpack[JobOptions],
    ) -> int:
        """Creates or changes a job; returns its revision. See `Client.apply_job`."""
        return self._loop.run(
            lambda: self._client.apply_job(
                name, expected_revision=expected_revision, actor=actor, timeout=timeout, **define
            )
        )

    def get_job(self, name: str, *, timeout: float | None = None) -> JobInfo:
        """The job as it is now (linearizable). Raises NotFound."""
        return self._loop.run(lambda: self._client.get_job(name, timeout=timeout))

    def trigger_job(
        self,
        name: str,
        *,
        payload: bytes | str | None = None,
        reason: str = TRIGGER_REASON,
        actor: str | None = None,
        timeout: float | None = None,
    ) -> OccurrenceInfo:
        """Runs a job now, by its overlap policy: the answer may say that it was skipped."""
        return self._loop.run(
            lambda: self._client.trigger_job(name, payload=payload, reason=reason, actor=actor, timeout=timeout)
        )

    def preview_job(
        self, name: str, *, count: int = 10, after: datetime | None = None, timeout: float | None = None
    ) -> list[datetime]:
        """The next due times of a job, in UTC."""
        return self._loop.run(lambda: self._client.preview_job(name, count=count, after=after, timeout=timeout))

    def occurrences(
        self, job: str, *, limit: int = 100, held_only: bool = False, timeout: float | None = None
    ) -> list[OccurrenceInfo]:
        """The last occurrences of a job that are kept, the newest first, without their results."""
        return self._loop.run(lambda: self._client.occurrences(job, limit=limit, held_only=held_only, timeout=timeout))

    def explain(
        self, job: str, due: datetime | None = None, *, timeout: float | None = None
    ) -> tuple[Sequence[OccurrenceInfo], str]:
        """What became of a due time (None: the last one), and in words why nothing did, or what it waits for."""
        return self._loop.run(lambda: self._client.explain(job, due, timeout=timeout))

    # ---- switches ----------------------------------------------------------------------------------------------

    def switch_state(self, job: str | None = None) -> SwitchState:
        """Whether work (of a job, or of the whole tenant) may go on, as far as this client knows. See `Client`."""
        return self._loop.run(lambda: _run_now(lambda: self._client.switch_state(job)))

    @property
    def went_on_unknown(self) -> int:
        """See `Client.went_on_unknown`."""
        return self._client.went_on_unknown

    def set_switch(
        self,
        mode: str,
        reason: str,
        *,
        job: str | None = None,
        fleet: bool = False,
        actor: str | None = None,
        expires_after: float | None = None,
        timeout: float | None = None,
    ) -> SwitchInfo:
        """Puts a switch in force: ``mode`` pause, drain or kill; for a job, the fleet, or else this tenant."""
        return self._loop.run(
            lambda: self._client.set_switch(
                mode, reason, job=job, fleet=fleet, actor=actor, expires_after=expires_after, timeout=timeout
            )
        )

    def clear_switch(
        self,
        switch_id: str,
        reason: str,
        *,
        fleet: bool = False,
        actor: str | None = None,
        timeout: float | None = None,
    ) -> SwitchInfo:
        """Ends a switch of this tenant or its jobs (or of the fleet). Nothing that it suppressed is run."""
        return self._loop.run(
            lambda: self._client.clear_switch(switch_id, reason, fleet=fleet, actor=actor, timeout=timeout)
        )

    # ---- leases ------------------------------------------------------------------------------------------------

    @contextmanager
    def lease(
        self,
        name: str,
        *,
        wait: float = 0.0,
        priority: int = 0,
        capacity: int = 1,
        lock_delay_ms: int = 0,
        metadata: str = "",
        timeout: float | None = None,
    ) -> Generator[SyncLease]:
        """``with client.lease(name) as lease``: the body runs under the lease, which is given back when it has ended.

        Raises LeaseLost at the end when the lease was lost meanwhile, unless the body raised something itself.
        """
        lease = self.acquire(
            name,
            wait=wait,
            priority=priority,
            capacity=capacity,
            lock_delay_ms=lock_delay_ms,
            metadata=metadata,
            timeout=timeout,
        )
        with self._bodies:
            self._running[lease] = threading.current_thread()
        try:
            yield lease
        except BaseException as error:
            if (lost := self._body_ended(lease)) is not None and not isinstance(error, errors.LeaseLost):
                error.add_note(str(lost))
            raise
        if (lost := self._body_ended(lease)) is not None:
            raise lost

    def _body_ended(self, lease: SyncLease) -> errors.LeaseLost | None:
        if not self._loop.owner.here:
            return None  # a forked child leaves the body of its parent: nothing here is its own
        lost = lease.lost
        try:
            with suppress(errors.OperationTimeout):  # the release goes on
                lease.release()
        finally:
            with self._bodies:
                self._running.pop(lease, None)
                self._bodies.notify_all()
        return lost

    def acquire(
        self,
        name: str,
        *,
        wait: float = 0.0,
        priority: int = 0,
        capacity: int = 1,
        lock_delay_ms: int = 0,
        metadata: str = "",
        timeout: float | None = None,
    ) -> SyncLease:
        """Takes a lease, or waits for it up to ``wait`` seconds in line. Release it yourself. See `Client.acquire`."""
        lease = self._loop.run(
            lambda: self._client.acquire(
                name,
                wait=wait,
                priority=priority,
                capacity=capacity,
                lock_delay_ms=lock_delay_ms,
                metadata=metadata,
                timeout=timeout,
            ),
            undo=lambda lease: lease._start_release(),
        )
        return SyncLease(self._loop, lease)

    def on_granted(self, callback: Callable[[SyncLease], object]) -> None:
        """Calls back, in the client's thread, with a lease that was transferred to this session. See `Client`."""
        self._loop.call_soon(lambda: self._client.on_granted(lambda lease: callback(SyncLease(self._loop, lease))))

    def check(self, name: str, token: int, *, timeout: float | None = None) -> TokenCheck:
        """Whether a fencing token is current (linearizable)."""
        return self._loop.run(lambda: self._client.check(name, token, timeout=timeout))

    def get_lease(self, name: str, *, timeout: float | None = None) -> LeaseInfo:
        """The lease as it is now (linearizable)."""
        return self._loop.run(lambda: self._client.get_lease(name, timeout=timeout))

    def list_leases(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[LeaseInfo]:
        """All leases whose name starts with ``prefix``, in order of name."""
        return self._iterate(lambda: self._client.list_leases(prefix, timeout=timeout))

    def watch(
        self, from_revision: int = 0, *, kinds: Iterable[EventKind] = (), subject_prefix: str = ""
    ) -> Iterator[Event]:
        """Events from a revision on, for ever. See `Client.watch`."""
        wanted = tuple(kinds)
        return self._iterate(lambda: self._client.watch(from_revision, kinds=wanted, subject_prefix=subject_prefix))

    def observe(self, name: str) -> Iterator[LeaseInfo]:
        """The lease as it is, then again at every change, for ever."""
        return self._iterate(lambda: self._client.observe(name))

    def _iterate(self, open_: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        iterator: AsyncIterator[T] | None = None

        async def step() -> T:
            nonlocal iterator
            if iterator is None:
                iterator = open_()
            return await anext(iterator)

        async def end() -> None:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

        try:
            while True:
                try:
                    item = self._loop.run(step)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._loop.owner.here:
                with suppress(errors.ClientClosed):
                    self._loop.run(end)

    # ---- dedup -------------------------------------------------------------------------------------------------

    def begin(
        self,
        key: str,
        payload: object = None,
        *,
        fingerprint: bytes | None = None,
        exclude: Iterable[str] = (),
        retention_ms: int | None = None,
        on_owner_loss: OwnerLoss = "retry",
        wait: float = 0.0,
        fence: SyncLease | None = None,
        timeout: float | None = None,
    ) -> SyncAttempt | InProgress | Completed | Failed | UnknownOutcome:
        """Opens an idempotency key. See `Client.begin`."""
        result = self._loop.run(
            lambda: self._client.begin(
                key,
                payload,
                fingerprint=fingerprint,
                exclude=exclude,
                retention_ms=retention_ms,
                on_owner_loss=on_owner_loss,
                wait=wait,
                fence=fence._lease if fence is not None else None,
                timeout=timeout,
            ),
            undo=_give_up,
        )
        return SyncAttempt(self._loop, result) if isinstance(result, Attempt) else result

    def get_record(self, key: str, *, timeout: float | None = None) -> RecordInfo:
        """The record of an idempotency key. Raises NotFound when there is none."""
        return self._loop.run(lambda: self._client.get_record(key, timeout=timeout))

    def idempotent(
        self,
        *,
        key: Callable[..., str],
        payload: Callable[..., object] | None = None,
        retention_ms: int | None = None,
        on_owner_loss: OwnerLoss = "retry",
        wait: float = 0.0,
        serializer: Serializer | None = None,
        final_errors: tuple[type[BaseException], ...] = (),
        timeout: float | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorator: a function that takes effect once per key, in the caller's thread. See `Client.idempotent`."""

        idempotency = Idempotency(key, payload, serializer or JsonSerializer(), on_owner_loss, final_errors)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            if inspect.iscoroutinefunction(function):
                raise TypeError("a coroutine function needs the asynchronous client: tenure.connect()")

            @functools.wraps(function)
            def once(*args: P.args, **kwargs: P.kwargs) -> T:
                name, print_ = idempotency.identify(function, args, kwargs)
                begun = self.begin(
                    name,
                    fingerprint=print_,
                    retention_ms=retention_ms,
                    on_owner_loss=on_owner_loss,
                    wait=wait,
                    timeout=timeout,
                )
                if not isinstance(begun, SyncAttempt):
                    return cast(T, idempotency.replay(begun))
                return self._run_once(idempotency, begun, functools.partial(function, *args, **kwargs))

            return once

        return decorate

    @staticmethod
    def _run_once(idempotency: Idempotency, attempt: SyncAttempt, run: Callable[[], T]) -> T:
        """Runs it in the caller's thread: much of what such functions use belongs to one thread."""
        try:
            value = run()
        except BaseException as error:
            text, retryable = idempotency.failure(error)
            try:
                attempt.fail(text, retryable=retryable)
            except errors.TenureError as refusal:
                error.add_note(f"and {attempt!r} could not be ended: {refusal}")
            raise
        try:
            stored = idempotency.store(value)
        except Exception as error:
            attempt.fail(unstorable(error), retryable=False)
            raise
        attempt.complete(stored)
        return cast(T, idempotency.serializer.loads(stored))


def connect_sync(address: str | Sequence[str] | None = None, **options: Unpack[ConnectOptions]) -> SyncClient:
    """Opens a synchronous client; close it, or use it as a context manager. Options as for `connect`."""
    forks.mark_used()
    connecting = connect(address, **options)
    loop = _Loop()

    async def open_() -> Client:
        return await connecting

    try:
        return SyncClient(loop, loop.run(open_))
    except BaseException:
        loop.stop()
        raise
