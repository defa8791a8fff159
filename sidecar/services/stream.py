"""The agent's stream: one session, many operations, keepalives, and what the holder must know without asking.

Rules:

1. The first message attaches: it opens a session or resumes one. The stream then carries that session until it ends,
   until another stream attaches to it (this one ends, ABORTED), or until the session ends (NOT_FOUND, after the push).
2. Operations start in the order given and are answered in any order, each exactly once, as long as the stream lives.
   Answers that become known in one turn of the event loop leave in one message.
3. A keepalive is acknowledged only by a commit. While none is confirmed for a third of the ttl, or when there is no
   leader, the holder is told that it is in jeopardy, and when that is over.
4. When the agent's end breaks, the session's deadline is cut to its grace (DetachSession, until it has happened). Not
   so when this sidecar ends the stream, nor when the agent had fallen silent before: it may be alive, cut off, and
   unable to see the break; then it counts on its ttl, and so must we.
5. Everything is bounded: operations without an answer, keepalives without an acknowledgement, what is to be sent.
6. What the session serves is kept by the cluster, not by the stream: after a break, runs go on, and new ones come over
   the next stream. The switches that concern its tenant are told with the attach and at every change, before anything
   that was committed later.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from tenure.v1 import session_pb2

from sidecar.core import commands
from sidecar.core.commands import Reason, Refused, SessionsRenewed
from sidecar.core.events import Event, Kind
from sidecar.core.leases import Lease
from sidecar.core.sessions import Session
from sidecar.proposer import Failed, Failure, Outcome
from sidecar.services import translate
from sidecar.services import validation as check
from sidecar.services.calls import Answer, Caller
from sidecar.services.errors import ApiError, Problem, problem, refused, session_gone, unsuccessful
from sidecar.services.feed import OF_RUNS, RunFeed
from sidecar.services.handlers import Context, parsed
from sidecar.services.notices import FLEET
from sidecar.services.operations import Operations
from sidecar.services.outbox import Outbox
from sidecar.services.waiting import Running, insist

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

OPERATIONS_MAX = 1_024
KEEPALIVES_MAX = 64
KEEPALIVE_TIMEOUT_MAX_MS = 5_000
ATTACH_WAIT_S = 10.0
ATTACH_TIMEOUT_MS = 5_000
SILENCE_MAX_S = 7.0  # clients send a keepalive at least every five seconds
OWN_ENDS_MAX = 4_096
HELD_MAX = 10_000
GENERATION_MAX = 2**62
FLUSH_MAX_S = 5.0


class AgentStream:
    """One call of SessionService.Connect."""

    def __init__(self, runtime: Runtime, operations: Operations, context: Context) -> None:
        self._runtime, self._operations, self._context = runtime, operations, context
        self._proposer = runtime.proposer
        self._machine = runtime.proposer.machine
        self._loop = asyncio.get_running_loop()
        self._connection = f"{runtime.settings.node_id}/{secrets.token_hex(8)}"
        self._outbox = Outbox()
        self._over = asyncio.Event()
        self._verdict: ApiError | None = None  # how the stream ends, when not well
        self._agent_left = False
        self._session = self._tenant = ""
        self._generation = 0
        self._ttl_s = 0.0
        self._heard_s = self._loop.time()
        # Operations under way by id: the request, and what can be given up.
        self._running: dict[int, tuple[session_pb2.Operation, Running | None]] = {}
        self._acknowledged = 0
        self._closing = False
        # Leases that this stream itself gives back: no news to its holder.
        self._own_ends: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._feed: RunFeed | None = None  # set once attached
        self._leave: list[Callable[[], None]] = []
        # Keepalives without an acknowledgement, oldest first, with the time of arrival.
        self._unconfirmed: deque[tuple[int, float]] = deque()
        self._confirmed_s = 0.0
        self._jeopardy = False
        self._jeopardy_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Until the stream is over; raises ApiError when it does not end well."""
        first = await self._first_message()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._attach(first)
            tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
            for task in tasks:
                task.add_done_callback(self._task_ended)
            await self._over.wait()
        except asyncio.CancelledError:
            self._agent_left = True
            raise
        finally:
            self._release()
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if self._verdict is not None:
            raise self._verdict

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._over.set()

    # ---- attach -----------------------------------------------------------------------------------------------------

    async def _first_message(self) -> session_pb2.Attach:
        try:
            message = await asyncio.wait_for(self._context.read(), ATTACH_WAIT_S)
        except TimeoutError:
            raise problem(Problem.STREAM_PROTOCOL, "the first message did not come in time") from None
        if message is grpc.aio.EOF:
            raise problem(Problem.STREAM_PROTOCOL, "the stream ended before it attached")
        request = parsed(message)
        if not request.HasField("attach") or len(request.ListFields()) > 1:
            raise problem(Problem.STREAM_PROTOCOL, "the first message of a stream carries attach and nothing else")
        attach: session_pb2.Attach = request.attach
        return attach

    async def _attach(self, attach: session_pb2.Attach) -> None:
        self._tenant = check.tenant(attach.tenant, self._runtime.settings.tenants)
        self._generation = check.number(attach.generation, "attach.generation", 0, GENERATION_MAX)
        sent_before_s = self._heard_s = self._loop.time()
        if attach.session_id:
            self._session = check.session_id(attach.session_id)
            await self._take_over()
        else:
            await self._open(attach)
        row = self._machine.session(self._session)
        if row is None:
            raise session_gone(self._session)
        if row.connection != self._connection:
            raise self._taken_over()
        self._ttl_s = row.ttl_ms / 1000
        self._confirmed_s = sent_before_s
        self._listen()
        self._outbox.attached(self._attached(row, resumed=bool(attach.session_id)))
        if self._runtime.draining:
            self.draining(self._runtime.settings.drain_timeout_ms)

    def _listen(self) -> None:
        notices = self._operations.notices
        notices.streams[self._session] = self
        self._runtime.streams[self._connection] = self.draining
        self._leave = [notices.switches.add(tenant, self._switched) for tenant in (FLEET, self._tenant)]
        outbox, views = self._outbox, self._operations.views
        self._feed = RunFeed(self._machine, views, self._session, self._push, lambda: outbox.roomy)

    def _attached(self, row: Session, *, resumed: bool) -> session_pb2.Attached:
        """What the session has; a lease that a kill has made stale is not held any more."""
        assert self._feed is not None
        held = [
            session_pb2.LeaseGranted(name=lease.name, token=token)
            for lease, token in self._machine.session_leases(self._session)
            if not self._is_killed(lease, token)
        ]
        return session_pb2.Attached(
            session=translate.session(row, self._proposer.cluster_now_ms()),
            node_id=self._runtime.settings.node_id,
            resumed=resumed,
            held=held[:HELD_MAX],
            held_complete=len(held) <= HELD_MAX,
            runs=self._feed.attached(),
            switches=self._operations.views.switches_changed(self._tenant),
        )

    async def _open(self, attach: session_pb2.Attach) -> None:
        if not attach.HasField("open"):
            raise problem(Problem.FIELD_REQUIRED, "attach needs session_id or open", field="attach.open")
        if self._runtime.draining:
            raise problem(Problem.DRAINING, "this sidecar is stopping and opens no new sessions")
        caller = Caller(self._runtime.settings.tenants, ATTACH_TIMEOUT_MS)
        node_id = self._runtime.settings.node_id
        generation = self._generation or 1
        command = translate.open_session(attach.open, self._tenant, self._connection, node_id, generation)
        key = caller.key(self._tenant, attach.open.request_id)
        outcome = await self._proposer.propose(command, timeout_ms=ATTACH_TIMEOUT_MS, key=key)
        opened = _result(outcome, commands.SessionOpened)
        self._session = opened.session
        row = self._machine.session(self._session)
        if row is not None and row.connection != self._connection:
            await self._take_over()  # a repeat: the session was opened for a stream that broke

    async def _take_over(self) -> None:
        """A stream of this node that carries the session learns of it by the event."""
        command = commands.AttachSession(
            tenant=self._tenant,
            session=self._session,
            connection=self._connection,
            node=self._runtime.settings.node_id,
            generation=self._generation,
        )
        outcome = await self._proposer.propose(command, timeout_ms=ATTACH_TIMEOUT_MS)
        _result(outcome, commands.SessionAttached)

    # ---- the agent's messages ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                message = await self._context.read()
                if message is grpc.aio.EOF:
                    self._agent_left = True
                    self._end(None)
                    return
                self._heard_s = self._loop.time()
                self._received(parsed(message))
        except ApiError as error:
            self._end(error)

    def _received(self, request: session_pb2.ConnectRequest) -> None:
        if request.HasField("attach"):
            raise problem(Problem.STREAM_PROTOCOL, "a stream attaches once, in its first message")
        check.number(request.acknowledged_id, "acknowledged_id", 0, check.TOKEN_MAX)
        self._acknowledged = max(self._acknowledged, request.acknowledged_id)
        if request.HasField("keep_alive"):
            self._keep_alive(request.keep_alive.id)
        for operation in request.operations:
            self._start(operation)
        for cancelled in request.cancelled_ids:
            running = self._running.get(cancelled)
            if running is not None and running[1] is not None:
                running[1].give_up()

    def _start(self, operation: session_pb2.Operation) -> None:
        if operation.id < 1:
            raise problem(Problem.STREAM_PROTOCOL, "ids of operations start at 1", field="id", value=operation.id)
        known = self._running.get(operation.id)
        if known is not None:
            if known[0] != operation:
                message = f"operation {operation.id} is running, with another body"
                raise problem(Problem.STREAM_PROTOCOL, message, field="id")
            return  # it is answered once
        body = operation.WhichOneof("body")
        answer = self._answer_to(operation, body or "none")
        if len(self._running) >= OPERATIONS_MAX:
            message = f"{OPERATIONS_MAX} operations of this stream have no answer yet"
            answer(problem(Problem.STREAM_OPERATIONS_FULL, message, limit=OPERATIONS_MAX))
            return
        self._running[operation.id] = (operation, None)
        try:
            running = self._begin(operation, body, answer)
        except ApiError as error:
            answer(error)
        else:
            if running is not None and operation.id in self._running:
                self._running[operation.id] = (operation, running)

    def _begin(self, operation: session_pb2.Operation, body: str | None, answer: Answer) -> Running | None:
        if body is None:
            raise problem(Problem.FIELD_REQUIRED, "the operation has no body that this sidecar knows", field="body")
        if not operation.timeout_ms:
            raise problem(Problem.DEADLINE_REQUIRED, "the operation has no timeout_ms", field="timeout_ms")
        timeout_ms = check.number(operation.timeout_ms, "timeout_ms", 1, check.DEADLINE_MAX_MS)
        caller = Caller(
            self._runtime.settings.tenants, timeout_ms, self._tenant, self._session, operation.id, self._acknowledged
        )
        request = getattr(operation, body)
        self._note_own(body, request)
        return self._operations.on_stream[body](request, caller, answer)

    def _answer_to(self, operation: session_pb2.Operation, body: str) -> Answer:
        number, started_s = operation.id, self._loop.time()

        def answer(result: Message | ApiError) -> None:
            self._running.pop(number, None)
            code = "OK"
            if isinstance(result, ApiError):
                code = result.code.name
                answered = session_pb2.OperationResult(id=number, error=result.on_stream())
                if body in _ENDING and result.row.definite:
                    request = getattr(operation, body)
                    self._own_ends.pop((request.name, request.token), None)
            else:
                answered = session_pb2.OperationResult(id=number, **{body: result})  # type: ignore[arg-type]
                self._closing = self._closing or body == "close_session"
            self._runtime.observe_request(
                "tenure.v1.SessionService", f"Connect/{body}", code, self._loop.time() - started_s
            )
            self._send(self._outbox.result, answered)

        return answer

    # ---- keepalives -------------------------------------------------------------------------------------------------

    def _keep_alive(self, number: int) -> None:
        arrived_s = self._heard_s
        if len(self._unconfirmed) >= KEEPALIVES_MAX:
            self._unconfirmed.pop()
        self._unconfirmed.append((number, arrived_s))
        self._watch_confirmation()

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, SessionsRenewed):
                if outcome.superseded:
                    self.noticed(None)  # another stream carries the session, or none
                else:
                    # After the events of the same turn: what it confirms has been told before.
                    self._loop.call_soon(self._confirm, number, arrived_s)
            elif isinstance(outcome, Refused):
                self._lost("expired")
            elif isinstance(outcome, Failed) and outcome.failure is Failure.NO_LEADER:
                self._in_jeopardy("no leader")

        timeout_ms = min(KEEPALIVE_TIMEOUT_MAX_MS, max(100, int(self._ttl_s * 1000)))
        self._proposer.renew(self._session, done, timeout_ms=timeout_ms, connection=self._connection)

    def _confirm(self, number: int, arrived_s: float) -> None:
        self._confirmed_s = max(self._confirmed_s, arrived_s)
        while self._unconfirmed and self._unconfirmed[0][1] <= arrived_s:
            self._unconfirmed.popleft()
        self._send(self._outbox.acknowledgement, session_pb2.KeepAliveAck(id=number, ttl_ms=int(self._ttl_s * 1000)))
        if self._jeopardy:
            self._jeopardy = False
            self._push(session_pb2.Push(safe=session_pb2.SessionSafe()))

    def _watch_confirmation(self) -> None:
        if self._jeopardy_timer is None and self._unconfirmed:
            due_s = self._unconfirmed[0][1] + self._ttl_s / 3
            self._jeopardy_timer = self._loop.call_at(due_s, self._check_confirmation)

    def _check_confirmation(self) -> None:
        self._jeopardy_timer = None
        if self._unconfirmed and self._loop.time() >= self._unconfirmed[0][1] + self._ttl_s / 3:
            self._in_jeopardy("the cluster does not confirm renewals")
        else:
            self._watch_confirmation()

    def _in_jeopardy(self, cause: str) -> None:
        if not self._jeopardy and not self._over.is_set():
            self._jeopardy = True
            remaining_s = max(0.0, self._confirmed_s + self._ttl_s - self._loop.time())
            told = session_pb2.SessionJeopardy(remaining_ms=int(remaining_s * 1000), cause=cause)
            self._push(session_pb2.Push(jeopardy=told))

    # ---- events -----------------------------------------------------------------------------------------------------

    def noticed(self, event: Event | None) -> None:
        """A committed event of this session; None when some were skipped."""
        if event is None or event.kind is Kind.SESSION_ATTACHED:
            row = self._machine.session(self._session)
            if row is None:
                self._lost("expired")
            elif row.connection != self._connection:
                self._end(self._taken_over())
            elif event is None and self._feed is not None:
                self._feed.skipped()
        elif event.kind in OF_RUNS:
            if self._feed is not None:
                self._feed.noticed(event)
        elif event.kind is Kind.LEASE_GRANTED:
            if event.cause == "transfer":
                granted = session_pb2.LeaseGranted(name=event.subject, token=event.token)
                self._push(session_pb2.Push(granted=granted))
        elif event.kind in _LOSSES:
            self._lease_lost(event)
        elif event.kind is Kind.SESSION_EXPIRED:
            self._lost("expired")
        elif event.kind is Kind.SESSION_CLOSED:
            if self._closing or any(operation.HasField("close_session") for operation, _ in self._running.values()):
                self._end(None)
            else:
                self._lost("closed")

    def _lease_lost(self, event: Event) -> None:
        ended = (event.subject, event.token)
        if ended in self._own_ends:
            del self._own_ends[ended]
            return
        cause = _LOSSES[event.kind]
        if event.kind is Kind.LEASE_RELEASED:
            if event.cause == "cancelled":
                return  # whoever cancelled was never told that it holds it
            cause = "operator" if event.actor else "session_ended" if event.cause == "session_closed" else "released"
        lease = self._machine.lease(self._tenant, event.subject)
        current = lease.holders[-1].token if lease is not None and lease.holders else 0
        lost = session_pb2.LeaseLost(name=event.subject, token=event.token, cause=cause, current_token=current)
        self._push(session_pb2.Push(lease_lost=lost))

    def _note_own(self, body: str, request: Any) -> None:
        if body in _ENDING:
            self._own_ends[(request.name, request.token)] = None
            if len(self._own_ends) > OWN_ENDS_MAX:
                self._own_ends.popitem(last=False)

    def _switched(self, event: Event | None) -> None:
        """A switch of the fleet or the tenant was set or has ended; None when some events were skipped."""
        self._push(session_pb2.Push(switches=self._operations.views.switches_changed(self._tenant)))
        if event is None or event.cause == "kill":
            for lease, token in self._machine.session_leases(self._session):
                if self._is_killed(lease, token):
                    lost = session_pb2.LeaseLost(name=lease.name, token=token, cause="killed")
                    self._push(session_pb2.Push(lease_lost=lost))

    def _is_killed(self, lease: Lease, token: int) -> bool:
        epochs = (holder.kill_epoch for holder in lease.holders if holder.token == token)
        return any(self._machine.killed_by(self._tenant, epoch) for epoch in epochs)

    def _lost(self, cause: str) -> None:
        if not self._over.is_set():
            self._push(session_pb2.Push(session_lost=session_pb2.SessionLost(cause=cause)))
            self._end(session_gone(self._session))

    def draining(self, stops_in_ms: int) -> None:
        """This sidecar is stopping; the stream is served on until then."""
        self._push(session_pb2.Push(draining=session_pb2.NodeDraining(stops_in_ms=stops_in_ms)))

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _push(self, push: session_pb2.Push) -> None:
        self._send(self._outbox.push, push)

    def _send(self, put: Any, message: Message) -> None:
        put(message)
        if self._outbox.overfull or (self._feed is not None and self._feed.overfull):
            self._verdict = problem(Problem.SLOW_READER, "the agent did not read its answers in time")
            self._over.set()

    async def _write(self) -> None:
        """Everything that is there, until the stream has ended and all is sent."""
        try:
            while not self._outbox.ended or not self._outbox.empty:
                await self._outbox.filled()
                while not self._outbox.empty:
                    await self._context.write(self._outbox.take())
                    if self._feed is not None:
                        self._feed.send()
        except grpc.aio.BaseError:  # the connection broke under it
            self._agent_left = True
        self._over.set()

    def _end(self, verdict: ApiError | None) -> None:
        """What is to be sent is sent before."""
        if not self._outbox.ended:
            self._verdict = verdict
            self._outbox.end()
            self._loop.call_later(FLUSH_MAX_S, self._over.set)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._jeopardy_timer is not None:
            self._jeopardy_timer.cancel()
        for _, running in self._running.values():
            if running is not None:
                running.drop()
        for leave in self._leave:
            leave()
        self._runtime.streams.pop(self._connection, None)
        streams = self._operations.notices.streams
        if streams.get(self._session) is self:
            del streams[self._session]
        silent = self._loop.time() - self._heard_s > SILENCE_MAX_S
        row = self._machine.session(self._session)
        carried = row is not None and row.connection == self._connection
        if self._agent_left and carried and not silent and not self._runtime.stopping:
            insist(self._proposer, commands.DetachSession(session=self._session, connection=self._connection))

    def _taken_over(self) -> ApiError:
        message = f"another stream has attached to session {self._session}"
        facts = (("session_id", self._session),)
        return refused(Refused(reason=Reason.SESSION_TAKEN_OVER, message=message, facts=facts))


_ENDING = ("release_lease", "transfer_lease")
_LOSSES = {
    Kind.LEASE_RELEASED: "released",
    Kind.LEASE_EXPIRED: "session_ended",
    Kind.LEASE_TRANSFERRED: "transferred",
}


def _result(outcome: Outcome, expected: type[Any]) -> Any:
    if isinstance(outcome, expected):
        return outcome
    raise unsuccessful(outcome)
