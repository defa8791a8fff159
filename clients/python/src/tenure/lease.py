"""Lease handles, and the context manager that cancels its body before the lease can be lost.

Rules:

* A handle is valid while its session's safe-until lies ahead and nobody has taken or given back the lease. Once it is
  not valid it never is again: acquiring anew gives a new handle with a larger token.
* ``on_lost`` callbacks run once, and never for a lease that its holder gave back or transferred itself.
* A release that has been asked for goes on until the sidecar has confirmed it or the session has ended, whatever
  becomes of the task that asked: cancelling it leaves no lease that is held by nobody.
* Within one client a name is held by one handle at a time; others wait in line here before they wait in the cluster's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenure import errors
from tenure.session import CHECK, RELEASE, TRANSFER, Session
from tenure.v1 import lease_pb2
from tenure.values import TokenCheck, token_check

if TYPE_CHECKING:
    from tenure.connection import Connection

__all__ = ["Lease", "LeaseContext", "LocalLine"]

log = logging.getLogger("tenure")

Callback = Callable[["Lease"], object]

HELD, ENDING, ENDED, LOST = "held", "ending", "ended", "lost"
RELEASE_RETRY_DELAY = 0.2
# Losses that may have left the place taken: by a kill switch of the fleet or the tenant, or by something that happened
# while there was no stream, and that may have been one.
PLACE_MAY_BE_TAKEN = ("killed", "lost")


class LocalLine:
    """Who, of the tasks of one client, may hold or ask for a name. First come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def enter(self, name: str, wait: float) -> bool:
        """Takes the place for ``name``; False when it is not free within ``wait`` seconds."""
        line = self._waiting.get(name)
        if line is None:
            self._waiting[name] = deque()
            return True
        if wait <= 0:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            async with asyncio.timeout(wait):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if not turn.cancelled():
                # The turn came in the very moment of giving up.
                self.leave(name)
            elif turn in line:
                line.remove(turn)
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def try_enter(self, name: str) -> bool:
        if name in self._waiting:
            return False
        self._waiting[name] = deque()
        return True

    def leave(self, name: str) -> None:
        line = self._waiting[name]
        while line:
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[name]


class Lease:
    """A lease that this process holds, or held. Made by ``Client.lease`` and ``Client.acquire``."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        name: str,
        token: int,
        *,
        already_held: bool,
        freed: Callable[[], None],
    ) -> None:
        self.name = name
        # The fencing token: strictly larger at every grant of this name. Pass it along with everything done under the
        # lease.
        self.token = token
        self.session_id = session.id
        # Whether the session held the lease before this call (after an answer that was lost).
        self.already_held = already_held
        self._connection = connection
        self._session = session
        self._state = HELD
        self._lost: errors.LeaseLost | None = None
        self._on_jeopardy: list[Callback] = []
        self._on_safe: list[Callback] = []
        self._on_lost: list[Callback] = []
        # Set by whoever runs a body under this lease: called once when the body must stop.
        self._interrupted: Callable[[], None] | None = None
        self._freed: Callable[[], None] | None = freed
        self._body = False
        self._releasing: asyncio.Task[None] | None = None
        session.hold(self)

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def valid(self) -> bool:
        """Whether the holder may act now. Checks the clock, so it is right even if the event loop was blocked."""
        return self._state == HELD and self._connection.owner.here and self._session.valid

    @property
    def safe_until(self) -> float:
        """The moment, in seconds on ``tenure.now()``, before which the holder may act; moves with renewals."""
        return self._session.validity.safe_until

    def remaining(self) -> float:
        """Seconds for which the holder may still act if no renewal succeeds; 0 when it may not."""
        return max(self.safe_until - self._session.clock(), 0.0) if self.valid else 0.0

    @property
    def in_jeopardy(self) -> bool:
        """Whether renewals are not being confirmed at present."""
        return self._session.jeopardy is not None

    @property
    def lost(self) -> errors.LeaseLost | None:
        """Why the lease was lost; None while it is held, and when its holder gave it back."""
        if self._lost is None and self._state == HELD and self._connection.owner.here and not self._session.valid:
            # The clock has passed safe-until and the event loop has not come round to saying so.
            return errors.LeaseLost(self.name, self.token, self._session.ended or "expired")
        return self._lost

    def raise_if_lost(self) -> None:
        """Raises LeaseLost when the lease is lost. For bodies that cannot be cancelled."""
        self._connection.owner.check()
        if (lost := self.lost) is not None:
            raise lost

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} token={self.token} {self._state} remaining={self.remaining():.3f}s>"

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def on_jeopardy(self, callback: Callback) -> None:
        """Calls back (function or coroutine function) each time renewals stop being confirmed."""
        self._on_jeopardy.append(callback)

    def on_safe(self, callback: Callback) -> None:
        """Calls back when a renewal is confirmed again after jeopardy."""
        self._on_safe.append(callback)

    def on_lost(self, callback: Callback) -> None:
        """Calls back once, when the lease is lost; at once if it is lost already."""
        if self._state == LOST:
            self._run(callback)
        else:
            self._on_lost.append(callback)

    def _run(self, callback: Callback) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._call, callback)

    def _call(self, callback: Callback) -> None:
        # An exception goes to the event loop's exception handler, as for every callback.
        result = callback(self)
        if inspect.isawaitable(result):
            self._connection.spawn(_completed(result))

    # ---- told by the session -----------------------------------------------------------------------------------

    def _jeopardy(self) -> None:
        for callback in self._on_jeopardy:
            self._run(callback)

    def _safe(self) -> None:
        for callback in self._on_safe:
            self._run(callback)

    def _interrupt(self) -> None:
        """The body must stop now so that it has ended before safe-until."""
        stop, self._interrupted = self._interrupted, None
        if stop is not None:
            stop()

    def _lose(self, cause: str, current_token: int) -> None:
        if self._state == LOST or self._state == ENDED:
            return
        if self._state == ENDING:
            # The holder asked for the end itself; how it came is no news.
            if self._releasing is None or cause not in PLACE_MAY_BE_TAKEN:
                self._end(ENDED)
                self._leave_place(cause)
            return
        self._lost = errors.LeaseLost(self.name, self.token, cause, current_token)
        self._end(LOST)
        if not self._body:
            self._leave_place(cause)
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            self._run(callback)
        self._interrupt()

    def _notice_clock(self) -> None:
        """Tells of a loss that the clock knows and the event loop has not come round to."""
        if self._state == HELD and (lost := self.lost) is not None:
            self._lose(lost.cause, 0)

    def _end(self, state: str) -> None:
        self._state = state
        self._session.drop(self)
        if not self._body:
            self._free()

    def _free(self) -> None:
        freed, self._freed = self._freed, None
        if freed is not None:
            freed()

    def _body_begins(self, interrupted: Callable[[], None]) -> None:
        """Raises LeaseLost when there is no point in beginning."""
        self._notice_clock()
        if self._lost is not None:
            raise self._lost
        self._body = True
        self._interrupted = interrupted

    def _body_ended(self) -> None:
        self._body = False
        self._interrupted = None
        if self._lost is not None:
            self._leave_place(self._lost.cause)
        if self._state in (ENDED, LOST):
            self._free()

    def _leave_place(self, cause: str) -> None:
        """After a kill the place stays taken until its holder has stopped and says so."""
        if cause in PLACE_MAY_BE_TAKEN and self._session.ended is None:
            self._connection.spawn(self._give_back_until_done(lambda: True))

    # ---- acts --------------------------------------------------------------------------------------------------

    async def check(self, *, timeout: float | None = None) -> TokenCheck:
        """Asks the cluster whether the token is current (linearizable)."""
        request = lease_pb2.CheckLeaseRequest(name=self.name, token=self.token)
        connection = self._connection
        seconds = connection.options.timeout if timeout is None else timeout
        return token_check(await connection.call(CHECK, lambda: request, timeout=seconds))

    async def release(self, *, timeout: float | None = None) -> None:
        """Gives the lease back. Again is harmless, also after a loss or a cancelled release.

        Raises OperationTimeout when it is not confirmed in time; it goes on until it is.
        """
        self._connection.owner.check()
        self._notice_clock()
        if self._state in (ENDED, LOST):
            return
        releasing = self._start_release()
        seconds = self._connection.options.timeout if timeout is None else timeout
        done, _ = await asyncio.wait({releasing}, timeout=seconds)
        if not done:
            raise errors.OperationTimeout(
                f"the release of {self.name!r} was not confirmed within {seconds:g} s; it goes on",
                reason="CLIENT_TIMEOUT",
            )
        if releasing.cancelled():
            raise errors.ClientClosed("the client was closed during the release", reason="CLIENT_CLOSED")
        releasing.result()

    def _start_release(self) -> asyncio.Task[None]:
        if self._releasing is None:
            self._state = ENDING
            self._releasing = self._connection.spawn(self._release_until_done())
        return self._releasing

    async def _release_until_done(self) -> None:
        await self._give_back_until_done(lambda: self._state == ENDING)
        if self._state == ENDING:
            self._end(ENDED)

    async def _give_back_until_done(self, wanted: Callable[[], bool]) -> None:
        request = lease_pb2.ReleaseLeaseRequest(name=self.name, token=self.token)
        connection = self._connection
        while wanted():
            try:
                await connection.call(
                    RELEASE, lambda: request, timeout=connection.options.timeout, session=self._session
                )
            except (errors.StaleToken, errors.SessionLost, errors.NotFound, errors.ClientClosed):
                return  # it is not ours any more, which is what was wanted
            except (errors.Unavailable, errors.Overloaded, errors.Indefinite) as error:
                log.warning("release of %r (token %d) is not confirmed yet: %s", self.name, self.token, error)
                await asyncio.sleep(RELEASE_RETRY_DELAY)
            else:
                return

    async def transfer(self, to_session: str, *, timeout: float | None = None) -> int:
        """Hands the lease to a named session in one step, without a gap. Returns the new holder's token.

        The handle is not valid while the transfer is under way. After a definite refusal it is valid again; when the
        outcome is not known the lease counts as lost, and is given back if it was not transferred.
        """
        self._connection.owner.check()
        self.raise_if_lost()
        if self._state != HELD:
            raise errors.StaleToken(f"{self.name!r} (token {self.token}) has been given back", reason="TOKEN_STALE")
        self._state = ENDING
        # In a task of its own: a caller that is cancelled does not leave the handle in doubt.
        return await asyncio.shield(self._connection.spawn(self._transfer(to_session, timeout)))

    async def _transfer(self, to_session: str, timeout: float | None) -> int:
        request = lease_pb2.TransferLeaseRequest(name=self.name, token=self.token, to_session_id=to_session)
        connection = self._connection
        seconds = connection.options.timeout if timeout is None else timeout
        try:
            response = await connection.call(TRANSFER, lambda: request, timeout=seconds, session=self._session)
        except errors.Definite:
            if self._state == ENDING:
                self._state = HELD
                if self._session.ended is not None:
                    self._lose(self._session.ended, 0)
            raise
        except errors.Indefinite:
            self._start_release()
            raise
        if self._state == ENDING:
            self._end(ENDED)
        token: int = response.token
        return token


async def _completed(awaitable: Awaitable[Any]) -> None:
    await awaitable


class NeedsAsyncWith:
    """Says how it is written to those who took it for what ``async with`` gives."""

    _written = ""

    if not TYPE_CHECKING:  # a type checker finds both by itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{name!r} is found on what 'async with' gives: {self._written}", name=name, obj=self)

        def __enter__(self) -> Any:
            raise TypeError(f"'with' does not do here: {self._written}, or use tenure.connect_sync()")

        def __exit__(self, *_: object) -> None: ...


class LeaseContext(NeedsAsyncWith):
    """``async with client.lease(name) as lease``: the body runs under the lease and is cancelled before it can be lost.

    The cancellation comes ``cancel_margin_ms`` before safe-until, so that the body can clean up while the lease is
    its own. Once the body has ended, the lease is given back if it still is there, and LeaseLost is raised. A
    cancellation from elsewhere stays a CancelledError.
    """

    _written = "async with client.lease(name) as lease"

    def __init__(self, acquire: Callable[[], Awaitable[Lease]], bodies: set[LeaseContext]) -> None:
        self._acquire = acquire
        self._bodies = bodies
        self._lease: Lease | None = None
        self._cancelling = 0
        self._interrupted = False
        self.task: asyncio.Task[Any] | None = None
        self.ended = asyncio.Event()

    async def __aenter__(self) -> Lease:
        if self.task is not None:
            raise RuntimeError("a lease context is entered once; ask client.lease(...) for another")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("client.lease must be used inside a task")
        self.task = task
        lease = await self._acquire()
        self._lease = lease
        self._cancelling = task.cancelling()
        lease._body_begins(self._stop)
        self._bodies.add(self)
        return lease

    def _stop(self) -> None:
        if not self._interrupted and self.task is not None:
            self._interrupted = True
            self.task.cancel(msg="the lease is about to be lost")

    def close(self) -> None:
        """The client is being closed: the body must stop."""
        if self._lease is not None:
            self._lease._interrupt()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, task = self._lease, self.task
        assert lease is not None
        assert task is not None
        if not lease._connection.owner.here:
            return  # a forked child leaves the body of its parent: nothing here is its own
        # From here on nobody interrupts: the body has ended.
        lease._interrupted = None
        lease._notice_clock()
        lost = lease.lost
        ours = self._interrupted and task.uncancel() <= self._cancelling
        try:
            if lease._state in (HELD, ENDING):
                await self._give_back(lease)
        finally:
            lease._body_ended()
            self._bodies.discard(self)
            self.ended.set()
        if not self._interrupted and lost is None:
            return
        lost = lost or errors.LeaseLost(lease.name, lease.token, "interrupted")
        if error is None or (ours and kind is not None and issubclass(kind, asyncio.CancelledError)):
            raise lost from error
        error.add_note(str(lost))

    async def _give_back(self, lease: Lease) -> None:
        try:
            await lease.release()
        except errors.TenureError as error:
            # The body has done its work, and the release goes on; nothing that the caller could do better.
            log.warning("lease %r (token %d): %s", lease.name, lease.token, error)
