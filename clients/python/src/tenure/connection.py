"""Keeps a session attached to a sidecar, for as long as the client is open.

Rules:

* One stream carries the session. When it breaks, the session is resumed on a new one, within milliseconds when the
  sidecar is there, and tried for ever with a jittered, bounded back-off when it is not. Addresses are tried in turn.
* A stream that has stopped answering is not given up: another is tried beside it, and takes over when it attaches.
* When the session ends, a new one is opened for later use. Nothing of the old one becomes valid again. If it ended only
  here (its safe-until passed), the cluster is told to end it too, so that nothing stays held by nobody.
* A call is repeated only where that is exactly-once: with the same id while its outcome is not known, with a new one
  after a refusal that says it did not happen, and never before the delay that the refusal asks for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from tenure import addresses, clock, errors, forks
from tenure.session import CLOSE, Feed, Hooks, Kind, Operation, Request, Response, Session, Timing
from tenure.stream import Stream
from tenure.switches import Switches
from tenure.v1 import session_pb2, session_pb2_grpc

__all__ = ["Connection", "Options", "positive_jitter"]

log = logging.getLogger("tenure")

T = TypeVar("T")

DIAL_TIMEOUT = 5.0
PROBE_TIMEOUT = 1.0
BACKOFF_FIRST = 0.02
# A socket that is back is found within this, plus the time of a dial.
BACKOFF_MAX = 0.5
# A stream that broke because its sidecar died is followed at once by a refused connection. Later than this, the
# sidecar may have cut the session first and died afterwards.
DEATH_NOTICED_WITHIN = 0.25
CLOSE_TIMEOUT = 2.0
# Why a sidecar ends a stream when another has attached the session.
TAKEN_OVER = "SESSION_TAKEN_OVER"
RETIRED_MAX = 16


def positive_jitter(delay: float) -> float:
    """Up to a fifth more than ``delay``, never less: many callers refused together do not come back together."""
    return delay * (1 + random.random() / 5)


@dataclass(frozen=True, slots=True)
class Options:
    """What a client was opened with."""

    addresses: Sequence[addresses.Address]
    credentials: grpc.ChannelCredentials | None
    tenant: str
    info: session_pb2.AgentInfo
    timing: Timing
    grace_ms: int | None
    timeout: float
    in_flight_max: int
    switch_staleness: float = 5.0
    fail_open: bool = False
    clock: clock.Clock = clock.now


class Connection:
    """See the rules at the top of this file."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.switches = Switches(options.switch_staleness, options.fail_open, options.clock)
        self._feed: Feed | None = None
        self.owner = forks.Owner()
        self.on_granted: Callable[[Session, str, int], None] = lambda session, name, token: None
        self.last_error: errors.TenureError | None = None
        self.session = self._new_session()
        # The identity of the request that opens the session: repeated until it is answered, so that only one is opened.
        self._opening_id = uuid.uuid4().hex
        self._stream: Stream | None = None
        self._carried: Session | None = None
        self._broken: tuple[addresses.Address, float] | None = None
        self._replacing = False
        self._attached = asyncio.Event()
        self._kick = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._retired: deque[str] = deque(maxlen=RETIRED_MAX)
        self._dials = 0
        self._unary: grpc.aio.Channel | None = None
        self._unary_dials = 0
        self._ever_attached = False
        self._failed = False
        self._closed = False
        self._finished = False

    # ---- life --------------------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Attaches a session, or raises: a refusal at once, ConnectError when no sidecar was reached in time."""
        self._supervisor = self.spawn(self._keep_attached())
        self._supervisor.set_name("tenure-supervisor")
        attached = self.spawn(self._attached.wait())
        done, _ = await asyncio.wait({self._supervisor, attached}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._supervisor in done:
            await self._supervisor  # raises the refusal
        if attached not in done:
            reason = self.last_error
            raise errors.ConnectError(
                f"no sidecar within {timeout:g} s: {reason.message if reason else 'no answer'}",
                reason=(reason.reason if reason else "") or "NO_SIDECAR",
            )

    async def close(self) -> None:
        """Ends the session (which gives back what it holds) and every task and socket of this connection."""
        if self._finished or not self.owner.here:
            return
        if not self._closed and self._carried is self.session and self.session.id:
            with suppress(errors.TenureError):  # the session then ends by its grace or ttl
                await self.call(CLOSE, session_pb2.CloseSessionRequest, timeout=CLOSE_TIMEOUT, session=self.session)
        self._closed = True
        self.session.end("client_closed")
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for task in self._background if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        if self._unary is not None:
            await self._unary.close()
        self._finished = True

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs something that ends with the connection at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        forks.keep_from_child(task=task)
        self._background.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None or not self.owner.here:
            return
        if not isinstance(task.exception(), errors.TenureError):
            if task is self._supervisor:
                self._failed = True
                self.session.end("client_failed")
            context = {"message": "a tenure task failed", "exception": task.exception(), "task": task}
            task.get_loop().call_exception_handler(context)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def node_id(self) -> str:
        return self._stream.node_id if self._stream is not None else ""

    def check_usable(self) -> None:
        self.owner.check()
        if self._closed or self._failed:
            raise errors.ClientClosed(
                "the client has failed; the event loop's exception handler was told why"
                if self._failed
                else "the client has been closed",
                reason="CLIENT_CLOSED",
            )

    # ---- sessions ----------------------------------------------------------------------------------------------

    def feed(self, feed: Feed) -> None:
        """Who is told of runs and switches from now on."""
        self._feed = self.session.hooks.feed = feed

    def _new_session(self) -> Session:
        options = self.options
        hooks = Hooks(
            rearm=self._rearm,
            granted=self._granted,
            draining=self._draining,
            ended=self._session_ended,
        )
        if self._feed is not None:
            hooks.feed = self._feed
        grace_ms = 1_000 if options.grace_ms is None else options.grace_ms
        return Session(options.timing, options.clock, hooks, grace_ms=grace_ms, in_flight_max=options.in_flight_max)

    def _granted(self, session: Session, name: str, token: int) -> None:
        self.on_granted(session, name, token)

    def _draining(self, stops_in: float) -> None:
        log.info("sidecar %s stops in at most %g s", self.node_id, stops_in)

    def _session_ended(self, session: Session) -> None:
        if session is not self.session or self._closed:
            return
        log.info("session %s has ended: %s", session.id, session.ended)
        if session.id:
            self._retired.append(session.id)
        self._attached.clear()
        self.session = self._new_session()
        self._opening_id = uuid.uuid4().hex
        self._kick.set()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(0, self._tick)

    def _tick(self) -> None:
        if self._closed or not self.owner.here:
            return  # in a forked child, nothing renews the parent's session
        session = self.session
        delay = session.tick(attached=self._carried is session)
        if session.ended is None and session.stalled:
            self._kick.set()
        # Loop time stops while the machine is suspended, the lease clock does not: look again at least every second.
        self._timer = asyncio.get_running_loop().call_later(min(delay, 1.0), self._tick)

    async def _retire(self) -> None:
        """Ends sessions in the cluster that have ended here, so that they hold nothing any longer."""
        while self._retired:
            session_id = self._retired[0]
            request = session_pb2.CloseSessionRequest(
                tenant=self.options.tenant, session_id=session_id, request_id=f"retire-{session_id}"
            )

            async def close(channel: grpc.aio.Channel, request: session_pb2.CloseSessionRequest = request) -> None:
                await session_pb2_grpc.SessionServiceStub(channel).CloseSession(request, timeout=CLOSE_TIMEOUT)

            try:
                await self.unary(close, timeout=10.0)
            except errors.Unavailable:
                return  # with the next session
            except errors.TenureError as error:
                log.debug("session %s was not closed: %s", session_id, error)
            if self._retired and self._retired[0] == session_id:
                self._retired.popleft()

    # ---- streams -----------------------------------------------------------------------------------------------

    async def _keep_attached(self) -> None:
        while True:
            if self._stream is not None and self._carried is not self.session:
                await self._drop_stream()
            if self._stream is None:
                stream = await self._establish()
            else:
                replacement = await self._watch(self._stream)
                if replacement is None:
                    await self._drop_stream()
                    continue
                stream = replacement
            await self._adopt(stream)

    async def _adopt(self, stream: Stream) -> None:
        """The stream has attached the current session. An older one is closed only now."""
        older, self._stream = self._stream, stream
        self._carried = self.session
        self._broken = None
        self.last_error = None
        stream.on_end = lambda: self._stream_ended(stream)
        self.session.resumed()
        stream.carry(self.session)
        self.session.hooks.wake()
        self._attached.set()
        self._ever_attached = True
        if older is not None:
            await older.close()
        if self._retired:
            self.spawn(self._retire())

    async def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._carried = None
        if stream is not None:
            await stream.close()

    async def _watch(self, stream: Stream) -> Stream | None:
        """Waits until the stream has ended (None), or another has attached because this one does not answer."""
        session = self.session
        alone = len(self.options.addresses) == 1
        turned = alone
        while session.ended is None and not stream.ended.is_set():
            if session.stalled:
                if not turned:
                    # Of several, the next one is likelier to answer than the one that does not.
                    self._dials, turned = self._dials + 1, True
                replacement = await self._attempt_beside(stream, session, None if alone else self._dial_timeout())
                if replacement is not None:
                    return replacement
            self._kick.clear()
            if session.ended is None and not stream.ended.is_set():
                await self._wait_kick(BACKOFF_MAX if session.stalled else None)
        return None

    async def _attempt_beside(self, stream: Stream, session: Session, timeout: float | None) -> Stream | None:
        """One try to attach while the old stream is still there; given up when the session ends.

        When it succeeds, the sidecar ends the old stream, and that may be heard first: it is given its time.
        """
        loop = asyncio.get_running_loop()
        attempt = self.spawn(self._attempt(session, timeout))
        self._replacing = True
        attempt.add_done_callback(self._not_replacing)
        give_up_at: float | None = None
        while not attempt.done() and session.ended is None and (give_up_at is None or loop.time() < give_up_at):
            if stream.ended.is_set() and give_up_at is None:
                give_up_at = loop.time() + self._dial_timeout()
            self._kick.clear()
            kicked = self.spawn(self._kick.wait())
            left = None if give_up_at is None else give_up_at - loop.time()
            await asyncio.wait({attempt, kicked}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            kicked.cancel()
        if not attempt.done():
            attempt.cancel()
            await asyncio.wait({attempt})
        return None if attempt.cancelled() else attempt.result()

    def _not_replacing(self, _: object) -> None:
        self._replacing = False

    def _stream_ended(self, stream: Stream) -> None:
        """In the very turn in which it is noticed: the session may be cut from now on."""
        session = self._carried
        if stream is self._stream and session is self.session and session.ended is None:
            self._carried = None
            self.last_error = stream.error
            if isinstance(stream.error, errors.SessionLost):
                session.end("session_ended")
            elif not self._replacing or stream.error is None or stream.error.reason != TAKEN_OVER:
                self._may_be_cut(stream.address, session)
        self._kick.set()

    def _may_be_cut(self, address: addresses.Address, session: Session) -> None:
        now = self.options.clock()
        self._broken = (address, now)
        session.disconnected(now)

    async def _establish(self) -> Stream:
        """Tries until a stream has attached the current session."""
        failures = 0
        while True:
            session = self.session
            stream = await self._attempt(session, self._dial_timeout())
            if stream is not None:
                return stream
            if session.ended is not None:
                continue
            failures += 1
            error = self.last_error
            if failures == 1 and error is not None:
                session.in_doubt(error.message)
            if error is not None and self._fatal(error):
                raise error
            backoff = min(BACKOFF_FIRST * 2 ** min(failures, 10), BACKOFF_MAX) * (0.5 + random.random() / 2)
            asked = error.retry_delay if error is not None else 0.0
            self._kick.clear()
            await self._wait_kick(max(backoff, positive_jitter(asked)))

    def _fatal(self, error: errors.TenureError) -> bool:
        """A refusal that repeating cannot change, before anything has ever worked."""
        wrong = (errors.InvalidArgument, errors.PermissionDenied, errors.NotFound)
        return isinstance(error, wrong) and not self._ever_attached

    async def _wait_kick(self, timeout: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._kick.wait()

    def _dial_timeout(self) -> float:
        return min(DIAL_TIMEOUT, max(self.options.timing.ttl_ms / 3000, 1.0))

    async def _attempt(self, session: Session, timeout: float | None) -> Stream | None:
        """One try to attach ``session``; None when it failed (`last_error` says why)."""
        address = self.options.addresses[self._dials % len(self.options.addresses)]
        try:
            stream = await self._dial(address, session, timeout)
        except errors.TenureError as error:
            self.last_error = error
            self._dials += 1
            self._refused(session, error)
            return None
        if session.ended is not None:
            await stream.close()
            return None
        return stream

    async def _dial(self, address: addresses.Address, session: Session, timeout: float | None) -> Stream:
        found = await addresses.probe(address, PROBE_TIMEOUT)
        if not found.listening:
            self._note_death(address, session, found)
            raise errors.ConnectError(found.problem, reason="NO_SIDECAR")
        self.owner.check()
        # Counted, so that the attach of a stream that was given up cannot take the session back from its successor.
        session.streams += 1
        attach = session_pb2.Attach(tenant=self.options.tenant, session_id=session.id, generation=session.streams)
        if not session.id:
            attach.open.CopyFrom(self._open_request())
        stream, attached = await self._attach(address, session, attach, timeout)
        if session.ended is None:
            if self._stream is not None:
                self._stream.supersede()
            # Also when an earlier, unanswered request has opened it: attaching renews.
            session.attached(attached, stream.attach_sent_at)
            session.received(stream.first)
        return stream

    async def _attach(
        self, address: addresses.Address, session: Session, attach: session_pb2.Attach, timeout: float | None
    ) -> tuple[Stream, session_pb2.Attached]:
        options = self.options
        left = False

        def leaves() -> None:
            nonlocal left
            left = True

        try:
            return await Stream.dial(address, options.credentials, attach, timeout, options.clock, leaves)
        except (errors.ConnectError, asyncio.CancelledError):
            if left and session.id and session.ended is None:
                # It may have attached before it was given up, and then the sidecar has seen a stream break.
                self._may_be_cut(address, session)
            raise

    def _open_request(self) -> session_pb2.OpenSessionRequest:
        options = self.options
        return session_pb2.OpenSessionRequest(
            tenant=options.tenant,
            request_id=self._opening_id,
            info=options.info,
            ttl_ms=options.timing.ttl_ms,
            disconnect_grace_ms=options.grace_ms,
        )

    def _note_death(self, address: addresses.Address, session: Session, found: addresses.ProbeResult) -> None:
        if self._broken is None or not found.gone:
            return
        broken_address, at = self._broken
        if broken_address == address and self.options.clock() - at <= DEATH_NOTICED_WITHIN:
            session.sidecar_gone(at)

    def _refused(self, session: Session, error: errors.TenureError) -> None:
        if not isinstance(error, errors.SessionLost):
            return
        if session.id:
            session.end("session_ended")
        else:
            # The session that an earlier, unanswered request opened has ended meanwhile.
            self._opening_id = uuid.uuid4().hex

    # ---- calls -------------------------------------------------------------------------------------------------

    async def call(
        self,
        kind: Kind[Request, Response],
        request: Callable[[], Request],
        *,
        timeout: float,
        session: Session | None = None,
        accept: Callable[[Session, Response], Any] | None = None,
        undo: Callable[[Any | None], None] | None = None,
    ) -> Any:
        """One operation on the stream, repeated within ``timeout`` seconds where that is exactly-once.

        ``request`` is asked for the request at each try. ``session`` pins the call to one session; otherwise it may
        move to a new one. ``accept`` makes the value of the call in the very turn in which the answer arrives. When
        the call does not return a value, ``undo`` is called once: with the value if it happened all the same, with
        None if not.
        """
        self.check_usable()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        refusals = 0
        operation: Operation[Response] | None = None
        try:
            while True:
                self.check_usable()
                target = session or self.session
                try:
                    operation = self._submit(target, kind, request(), deadline, accept, undo)
                    return await self._answer(target, operation, timeout)
                except (errors.Unavailable, errors.Overloaded, errors.SessionLost) as error:
                    if isinstance(error, errors.SessionLost) and (session is not None or target is self.session):
                        raise
                    refusals += 1
                    delay = self._delay(error, refusals)
                    if loop.time() + delay >= deadline:
                        raise
                    operation = None
                    await asyncio.sleep(delay)
        except BaseException:
            # An abandoned operation sees to it by itself, as soon as its fate is known.
            if undo is not None and (operation is None or not operation.abandoned):
                undo(None)
            raise

    @staticmethod
    def _submit(
        target: Session,
        kind: Kind[Request, Response],
        request: Request,
        deadline: float,
        accept: Callable[[Session, Response], Any] | None,
        undo: Callable[[Any | None], None] | None,
    ) -> Operation[Response]:
        def accepted(response: Response) -> Any:
            return response if accept is None else accept(target, response)

        return target.submit(kind, request, deadline, accepted, undo)

    async def _answer(self, target: Session, operation: Operation[Any], timeout: float) -> Any:
        try:
            async with asyncio.timeout_at(operation.expires_at):
                return await operation.answer
        except errors.TenureError:
            raise
        except TimeoutError:
            if _succeeded(operation.answer):
                return operation.answer.result()
            sent = operation.sent
            target.abandon(operation)
            raise self._timed_out(operation.kind, sent, timeout) from None
        except asyncio.CancelledError:
            target.abandon(operation)
            raise

    @staticmethod
    def _delay(error: errors.TenureError, refusals: int) -> float:
        if isinstance(error, errors.SessionLost):
            return 0.0
        if error.retry_delay > 0:
            return positive_jitter(error.retry_delay)
        ceiling: float = min(0.05 * 2 ** min(refusals, 5), 1.0)
        return ceiling * (0.5 + random.random() / 2)

    def _timed_out(self, kind: Kind[Any, Any], sent: bool, timeout: float) -> errors.TenureError:
        why = f": {self.last_error.message}" if self.last_error is not None and self._carried is None else ""
        if kind.mutating and sent:
            return errors.OperationTimeout(
                f"no answer to {kind.field} within {timeout:g} s; it may have happened{why}", reason="CLIENT_TIMEOUT"
            )
        return errors.Unavailable(f"no answer to {kind.field} within {timeout:g} s{why}", reason="CLIENT_TIMEOUT")

    async def unary(self, call: Callable[[grpc.aio.Channel], Awaitable[T]], *, timeout: float) -> T:
        """A plain call that is idempotent, repeated within ``timeout`` seconds while no sidecar can answer it."""
        self.check_usable()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        refusals = 0
        while True:
            self.check_usable()
            try:
                return await call(self.channel())
            except grpc.aio.AioRpcError as failure:
                error = errors.from_rpc_error(failure, failure.trailing_metadata(), read_only=True)
            if not isinstance(error, (errors.Unavailable, errors.Overloaded)):
                raise error
            refusals += 1
            delay = self._delay(error, refusals)
            if loop.time() + delay >= deadline:
                raise await self._explained(error)
            await self.next_channel()
            await asyncio.sleep(delay)

    async def _explained(self, error: errors.TenureError) -> errors.TenureError:
        """What to do about it, when it is that no sidecar listens."""
        address = self.options.addresses[self._unary_dials % len(self.options.addresses)]
        if error.reason:
            return error
        found = await addresses.probe(address, PROBE_TIMEOUT)
        return error if found.listening else errors.ConnectError(found.problem, reason="NO_SIDECAR")

    def channel(self) -> grpc.aio.Channel:
        """For plain calls and server streams: apart from the session's stream, which changes connections at will."""
        self.check_usable()
        if self._unary is None:
            address = self.options.addresses[self._unary_dials % len(self.options.addresses)]
            self._unary = addresses.open_channel(address, self.options.credentials)
            forks.keep_from_child(wire_object=self._unary)
        return self._unary

    async def next_channel(self) -> None:
        """After a failure: the next address, where there are several."""
        if len(self.options.addresses) > 1 and self._unary is not None:
            channel, self._unary = self._unary, None
            self._unary_dials += 1
            await channel.close()


def _succeeded(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None
