"""One session as the client sees it: a pure state machine of the stream protocol, without socket or task.

Rules:

* Operations have ids that grow from 1. An operation stays pending until its answer has been processed, and is sent
  again with the same id on every new stream until then; the sidecar answers a repeat with the first outcome.
  ``acknowledged_id`` tells the sidecar which answers it may forget.
* An operation whose caller gave up is abandoned. If its effect must be undone (a lease granted, a record begun) it
  stays pending, so that its outcome is learnt and undone; otherwise it is dropped at the next stream.
* A session ends once: refused by the cluster, closed, or because its safe-until has passed here. From then on nothing
  in it is valid, every lease is told exactly once, and every later use is refused. A new session is a new object.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from tenure import errors
from tenure.clock import Clock, Validity
from tenure.v1 import dedup_pb2, error_pb2, job_pb2, lease_pb2, session_pb2, switch_pb2

__all__ = ["Feed", "HeldLease", "Kind", "Operation", "Session", "Timing"]

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

OPERATIONS_PER_MESSAGE_MAX = 512
MESSAGE_BYTES_TARGET = 1024 * 1024
KEEPALIVES_UNANSWERED_MAX = 16
# An abandoned operation that must be undone is given this long by the sidecar, each time it is sent.
UNDO_TIMEOUT_MS = 10_000
REPEAT_DELAY = 0.1
LOSSES_REMEMBERED_MAX = 256


@dataclass(frozen=True, slots=True)
class Kind(Generic[Request, Response]):
    """One sort of operation: the name of its field, and whether it can change anything."""

    field: str
    mutating: bool


ACQUIRE: Kind[lease_pb2.AcquireLeaseRequest, lease_pb2.AcquireLeaseResponse] = Kind("acquire_lease", True)
RELEASE: Kind[lease_pb2.ReleaseLeaseRequest, lease_pb2.ReleaseLeaseResponse] = Kind("release_lease", True)
TRANSFER: Kind[lease_pb2.TransferLeaseRequest, lease_pb2.TransferLeaseResponse] = Kind("transfer_lease", True)
CHECK: Kind[lease_pb2.CheckLeaseRequest, lease_pb2.CheckLeaseResponse] = Kind("check_lease", False)
GET_LEASE: Kind[lease_pb2.GetLeaseRequest, lease_pb2.GetLeaseResponse] = Kind("get_lease", False)
BEGIN: Kind[dedup_pb2.BeginRecordRequest, dedup_pb2.BeginRecordResponse] = Kind("begin_record", True)
COMPLETE: Kind[dedup_pb2.CompleteRecordRequest, dedup_pb2.CompleteRecordResponse] = Kind("complete_record", True)
FAIL: Kind[dedup_pb2.FailRecordRequest, dedup_pb2.FailRecordResponse] = Kind("fail_record", True)
GET_RECORD: Kind[dedup_pb2.GetRecordRequest, dedup_pb2.GetRecordResponse] = Kind("get_record", False)
CLOSE: Kind[session_pb2.CloseSessionRequest, session_pb2.CloseSessionResponse] = Kind("close_session", True)
SERVE: Kind[job_pb2.ServeJobsRequest, job_pb2.ServeJobsResponse] = Kind("serve_jobs", True)
CHECKPOINT: Kind[job_pb2.CheckpointRunRequest, job_pb2.CheckpointRunResponse] = Kind("checkpoint_run", True)
COMPLETE_RUN: Kind[job_pb2.CompleteRunRequest, job_pb2.CompleteRunResponse] = Kind("complete_run", True)
FAIL_RUN: Kind[job_pb2.FailRunRequest, job_pb2.FailRunResponse] = Kind("fail_run", True)
ACKNOWLEDGE: Kind[job_pb2.AcknowledgeInterruptRequest, job_pb2.AcknowledgeInterruptResponse] = Kind(
    "acknowledge_interrupt", True
)
APPLY_JOBS: Kind[job_pb2.ApplyJobsRequest, job_pb2.ApplyJobsResponse] = Kind("apply_jobs", True)
TRIGGER: Kind[job_pb2.TriggerJobRequest, job_pb2.TriggerJobResponse] = Kind("trigger_job", True)
GET_JOB: Kind[job_pb2.GetJobRequest, job_pb2.GetJobResponse] = Kind("get_job", False)


@dataclass(frozen=True, slots=True)
class Timing:
    """How often a session is renewed, how long an answer may take, and how early a body is cancelled. Milliseconds."""

    ttl_ms: int
    keep_alive_ms: int
    keep_alive_timeout_ms: int
    cancel_margin_ms: int

    @classmethod
    def of(cls, ttl_ms: int, keep_alive_ms: int | None, cancel_margin_ms: int | None) -> Timing:
        """Defaults that fit the ttl. Raises ValueError for a period or a margin that would lose healthy leases."""
        if not 500 <= ttl_ms <= 3_600_000:
            raise ValueError(f"ttl_ms must be 500 to 3,600,000, not {ttl_ms}")
        if keep_alive_ms is None:
            keep_alive_ms = min(ttl_ms // 3, 5_000)
        if not 0 < keep_alive_ms <= ttl_ms // 3:
            raise ValueError(f"keep_alive_ms must be 1 to a third of ttl_ms ({ttl_ms // 3}), not {keep_alive_ms}")
        if cancel_margin_ms is None:
            cancel_margin_ms = min(ttl_ms // 5, 2_000)
        if not 0 <= cancel_margin_ms <= ttl_ms // 2:
            raise ValueError(f"cancel_margin_ms must be 0 to half of ttl_ms ({ttl_ms // 2}), not {cancel_margin_ms}")
        # Renewals are coalesced for some 100 ms by the leader, so a shorter time-out would be noise.
        return cls(ttl_ms, keep_alive_ms, min(max(ttl_ms // 5, 200), 3_000), cancel_margin_ms)


class HeldLease(Protocol):
    """What a session must be able to tell a lease handle."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> int: ...
    def _interrupt(self) -> None: ...
    def _lose(self, cause: str, current_token: int) -> None: ...
    def _jeopardy(self) -> None: ...
    def _safe(self) -> None: ...


class Feed(Protocol):
    """Who is told of runs and switches, and looks at the clock with the session."""

    def attached(self, session: Session, attached: session_pb2.Attached) -> None: ...
    def pushed(self, session: Session, push: session_pb2.Push) -> None: ...
    def tick(self, session: Session, now: float) -> float:
        """Does what is due; the moment at which something else may be."""

    def ended(self, session: Session) -> None: ...


class _NoFeed:
    def attached(self, session: Session, attached: session_pb2.Attached) -> None: ...
    def pushed(self, session: Session, push: session_pb2.Push) -> None: ...
    def tick(self, session: Session, now: float) -> float:
        return float("inf")

    def ended(self, session: Session) -> None: ...


@dataclass(slots=True, eq=False)
class Operation(Generic[Response]):
    """One pending call."""

    message: session_pb2.Operation
    kind: Kind[Any, Response]
    # Loop time at which the caller gives up.
    expires_at: float
    answer: asyncio.Future[Any]
    # Makes the value of the call out of the response, in the same turn in which it arrives.
    accept: Callable[[Response], Any]
    # For an operation whose caller is gone, called once: with the value when it happened nevertheless and must be
    # undone, with None when it did not and will not. None in place of the function: there would be nothing to undo.
    undo: Callable[[Any | None], None] | None
    sent: bool = False
    abandoned: bool = False

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def gone(self) -> bool:
        """Whether the caller has given up. The future knows before the caller's task has called `abandon`."""
        return self.abandoned or self.answer.cancelled()


@dataclass(slots=True)
class Hooks:
    """What a session asks of the connection that carries it."""

    # Something is ready to be sent.
    wake: Callable[[], None] = lambda: None
    # A deadline may have moved nearer: call `tick` again.
    rearm: Callable[[], None] = lambda: None
    granted: Callable[[Session, str, int], None] = lambda session, name, token: None
    draining: Callable[[float], None] = lambda stops_in: None
    ended: Callable[[Session], None] = lambda session: None
    feed: Feed = field(default_factory=_NoFeed)


@dataclass(slots=True)
class _KeepAlives:
    next_id: int = 1
    due_at: float = 0.0
    due: bool = False
    sent_at: OrderedDict[int, float] = field(default_factory=OrderedDict)


class Session:
    """See the rules at the top of this file."""

    def __init__(self, timing: Timing, clock: Clock, hooks: Hooks, *, grace_ms: int, in_flight_max: int) -> None:
        self.id = ""
        self.timing = timing
        self.clock = clock
        self.hooks = hooks
        self.in_flight_max = in_flight_max
        self.validity = Validity(timing.ttl_ms, grace_ms, timing.cancel_margin_ms)
        self.streams = 0  # how many have been tried for this session; see Attach.generation
        self.ended: str | None = None
        self.jeopardy: str | None = None
        # What the sidecar had told by the time it confirmed this moment (a keepalive's, or an attach's, sending) is
        # how the cluster was then, or later.
        self.confirmed_at = float("-inf")
        # Keepalives at least this often, in seconds, for as long as somebody needs fresher news than the ttl asks for.
        self.keep_alive_within = float("inf")
        self.leases: dict[tuple[str, int], HeldLease] = {}
        self._pending: dict[int, Operation[Any]] = {}
        self._outbox: deque[int] = deque()
        self._cancelled: list[int] = []
        self._last_id = 0
        self._keep_alives = _KeepAlives()
        self._losses: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()

    # ---- operations --------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def submit(
        self,
        kind: Kind[Request, Response],
        request: Request,
        expires_at: float,
        accept: Callable[[Response], Any],
        undo: Callable[[Any | None], None] | None = None,
    ) -> Operation[Response]:
        """Queues an operation. Raises SessionLost when the session has ended, Overloaded when too many are pending."""
        if self.ended is not None:
            raise self.lost_error()
        if len(self._pending) >= self.in_flight_max:
            raise errors.Overloaded(
                f"{self.in_flight_max} operations of this client are unanswered",
                reason="CLIENT_IN_FLIGHT",
                retry_delay=0.05,
            )
        self._last_id += 1
        fields: dict[str, Any] = {kind.field: request}
        message = session_pb2.Operation(id=self._last_id, **fields)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        operation = Operation(message, kind, expires_at, answer, accept, undo)
        self._pending[operation.id] = operation
        self._outbox.append(operation.id)
        self.hooks.wake()
        return operation

    def abandon(self, operation: Operation[Any]) -> None:
        """The caller gave up. Whatever the operation has done or may still do is undone, if it must be."""
        operation.abandoned = True
        if operation.answer.done() and not operation.answer.cancelled():
            # Answered in the very turn in which the caller gave up.
            self._settle(operation, None if operation.answer.exception() else operation.answer.result())
            return
        operation.answer.cancel()
        if operation.id not in self._pending:
            return
        if not operation.sent:
            del self._pending[operation.id]
            self._settle(operation, None)
        elif operation.kind is ACQUIRE:
            self._cancelled.append(operation.id)
            self.hooks.wake()

    @staticmethod
    def _settle(operation: Operation[Any], value: Any | None) -> None:
        """The fate of an operation whose caller is gone has been learnt."""
        if operation.undo is not None:
            operation.undo(value)

    def resumed(self) -> None:
        """A new stream took over: everything without an answer is sent again, in order, with the same ids."""
        for operation in list(self._pending.values()):
            if operation.abandoned and operation.undo is None:
                del self._pending[operation.id]
        self._outbox = deque(self._pending)
        self._cancelled = [each.id for each in self._pending.values() if each.abandoned and each.kind is ACQUIRE]
        self._keep_alives.sent_at.clear()
        self.hooks.wake()

    # ---- what goes out -----------------------------------------------------------------------------------------

    def outgoing(self, loop_time: float) -> session_pb2.ConnectRequest | None:
        """Everything that is ready, as one message; None when there is nothing to say."""
        if self.ended is not None or not (self._outbox or self._cancelled or self._keep_alives.due):
            return None
        message = session_pb2.ConnectRequest(acknowledged_id=self._acknowledged())
        size = 0
        while self._outbox and len(message.operations) < OPERATIONS_PER_MESSAGE_MAX and size < MESSAGE_BYTES_TARGET:
            operation = self._pending.get(self._outbox.popleft())
            if operation is not None:
                self._stamp(operation, loop_time)
                message.operations.append(operation.message)
                size += operation.message.ByteSize()
        if not self._outbox:
            # A cancel never overtakes its operation.
            message.cancelled_ids.extend(self._cancelled)
            self._cancelled.clear()
        if self._keep_alives.due:
            message.keep_alive.id = self._keep_alive_now()
        elif not message.operations and not message.cancelled_ids:
            return None  # what was ready has been given up
        return message

    def _acknowledged(self) -> int:
        # Ids grow, so the pending ones are in order.
        return next(iter(self._pending), self._last_id + 1) - 1

    def _stamp(self, operation: Operation[Any], loop_time: float) -> None:
        operation.sent = True
        left_ms = UNDO_TIMEOUT_MS if operation.abandoned else int((operation.expires_at - loop_time) * 1000)
        operation.message.timeout_ms = max(left_ms, 1)

    def _keep_alive_now(self) -> int:
        alive = self._keep_alives
        alive.due = False
        number = alive.next_id
        alive.next_id += 1
        # The time is taken before the message is built, let alone sent: a renewal counts from here.
        alive.sent_at[number] = self.clock()
        while len(alive.sent_at) > KEEPALIVES_UNANSWERED_MAX:
            alive.sent_at.popitem(last=False)
        return number

    # ---- what comes in -----------------------------------------------------------------------------------------

    def attached(self, attached: session_pb2.Attached, sent_at: float) -> None:
        """A stream carries the session; ``sent_at`` is when its attach was sent, on the lease clock."""
        session = attached.session
        self.id = session.session_id
        self.validity.attached(sent_at, session.ttl_ms, session.disconnect_grace_ms)
        self._keep_alives.due_at = sent_at + self._keep_alive_period()
        self.confirmed_at = max(self.confirmed_at, sent_at)
        self._set_safe()
        if attached.resumed:
            self._compare_held(attached)
        self.hooks.feed.attached(self, attached)
        self.hooks.rearm()

    def _compare_held(self, attached: session_pb2.Attached) -> None:
        """What was lost, or was transferred here, while there was no stream to tell it on."""
        held = {(lease.name, lease.token) for lease in attached.held}
        if attached.held_complete:
            # A lease that a kill has made stale is not held, though its place is taken.
            killed = any(_kills_leases(switch) for switch in attached.switches.switches)
            for key in [key for key in self.leases if key not in held]:
                self.leases.pop(key)._lose("killed" if killed else "lost", 0)
        for lease in attached.held:
            if (lease.name, lease.token) not in self.leases:
                self.hooks.granted(self, lease.name, lease.token)

    def disconnected(self, at: float) -> None:
        """A stream broke that carries the session, or may have come to carry it: the session may be cut.

        Should another carry it all the same, that is shown by a keepalive, and long before the grace is over.
        """
        self.validity.disconnected(at)
        self._keep_alives.due = False
        self._keep_alives.due_at = at
        self.hooks.rearm()

    def sidecar_gone(self, at: float) -> None:
        """The stream broke at ``at`` because the sidecar's process ended."""
        if self.validity.cut:
            self.validity.sidecar_gone(at)
            self.hooks.rearm()

    def received(self, message: session_pb2.ConnectResponse) -> None:
        if self.ended is not None:
            return
        # Pushes first: a loss that was pushed in the same message as an answer is not newer than the answer, and an
        # acknowledgement confirms what was told before it.
        for push in message.pushes:
            self._pushed(push)
        for ack in message.keep_alive_acks:
            self._acked(ack)
        for result in message.results:
            self._answered(result)

    def _acked(self, ack: session_pb2.KeepAliveAck) -> None:
        sent_at = self._keep_alives.sent_at.pop(ack.id, None)
        if sent_at is None:
            return
        for older in [number for number in self._keep_alives.sent_at if number < ack.id]:
            del self._keep_alives.sent_at[older]
        self.validity.renewed(sent_at, min(ack.ttl_ms, self.validity.ttl_ms))
        self.confirmed_at = max(self.confirmed_at, sent_at)
        self._set_safe()
        self.hooks.rearm()

    def _answered(self, result: session_pb2.OperationResult) -> None:
        operation = self._pending.get(result.id)
        if operation is None:
            return
        if result.HasField("error"):
            self._refused(operation, result.error)
            return
        del self._pending[operation.id]
        value = operation.accept(getattr(result, operation.kind.field))
        if operation.gone:
            self._settle(operation, value)
        else:
            operation.answer.set_result(value)

    def _refused(self, operation: Operation[Any], refusal: error_pb2.OperationError) -> None:
        error = errors.from_detail(refusal.code, refusal.message, refusal.detail, read_only=not operation.kind.mutating)
        if isinstance(error, errors.Indefinite) and self._may_repeat(operation):
            # The same id again: the answer to a repeat is the first outcome.
            asyncio.get_running_loop().call_later(REPEAT_DELAY, self._repeat, operation)
            return
        del self._pending[operation.id]
        if operation.gone:
            self._settle(operation, None)
        else:
            operation.answer.set_exception(error)
        if isinstance(error, errors.SessionLost) and operation.kind is not CLOSE:
            self.end("session_ended")

    def _may_repeat(self, operation: Operation[Any]) -> bool:
        if operation.gone:
            return operation.undo is not None
        return asyncio.get_running_loop().time() + REPEAT_DELAY < operation.expires_at

    def _repeat(self, operation: Operation[Any]) -> None:
        if self.ended is None and operation.id in self._pending and operation.id not in self._outbox:
            self._outbox.append(operation.id)
            if operation.abandoned and operation.kind is ACQUIRE:
                self._cancelled.append(operation.id)
            self.hooks.wake()

    def _pushed(self, push: session_pb2.Push) -> None:
        kind = push.WhichOneof("kind")
        if kind == "granted":
            self.hooks.granted(self, push.granted.name, push.granted.token)
        elif kind == "jeopardy":
            self._set_jeopardy(push.jeopardy.cause or "the sidecar cannot confirm renewals")
        elif kind == "lease_lost":
            self._lease_lost(push.lease_lost)
        elif kind == "session_lost":
            self.end("session_ended")
        elif kind == "draining":
            self.hooks.draining(push.draining.stops_in_ms / 1000)
        else:
            self.hooks.feed.pushed(self, push)
        # An unknown kind is ignored. `safe` says that the sidecar sees a quorum again; what makes a lease safe
        # is the next confirmed renewal.

    def _lease_lost(self, lost: session_pb2.LeaseLost) -> None:
        key = (lost.name, lost.token)
        lease = self.leases.pop(key, None)
        if lease is not None:
            lease._lose(lost.cause or "lost", lost.current_token)
            return
        # It may overtake the answer that granted the lease.
        self._losses[key] = (lost.cause or "lost", lost.current_token)
        while len(self._losses) > LOSSES_REMEMBERED_MAX:
            self._losses.popitem(last=False)

    # ---- leases ------------------------------------------------------------------------------------------------

    def hold(self, lease: HeldLease) -> None:
        """From now on the lease is told what happens to it."""
        if self.ended is not None:
            lease._lose(self.ended, 0)
            return
        lost = self._losses.pop((lease.name, lease.token), None)
        if lost is not None:
            lease._lose(*lost)
            return
        self.leases[lease.name, lease.token] = lease
        self.hooks.rearm()

    def drop(self, lease: HeldLease) -> None:
        if self.leases.get((lease.name, lease.token)) is lease:
            del self.leases[lease.name, lease.token]

    @property
    def valid(self) -> bool:
        return self.ended is None and self.clock() < self.validity.safe_until

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, attached: bool) -> float:
        """Does what is due now. Returns the seconds until something else may be."""
        now = self.clock()
        if self.ended is not None:
            return 3600.0
        if not self.id:
            return max(self.hooks.feed.tick(self, now) - now, 0.001)
        if now >= self.validity.safe_until:
            self.end("expired")
            return 3600.0
        nearest = self.validity.safe_until
        if now >= self.validity.cancel_at:
            for lease in list(self.leases.values()):
                lease._interrupt()
        else:
            nearest = min(nearest, self.validity.cancel_at)
        nearest = min(nearest, self.hooks.feed.tick(self, now))
        if attached:
            nearest = min(nearest, self._tick_keep_alive(now))
        return max(nearest - now, 0.001)

    def _tick_keep_alive(self, now: float) -> float:
        alive = self._keep_alives
        overdue_at = self._overdue_at()
        if now >= overdue_at:
            self._set_jeopardy("the sidecar does not answer keepalives")
        if now >= alive.due_at:
            alive.due = True
            # While answers are missing it tries more often, so that it is safe again soon after they are back.
            period = self._keep_alive_period()
            if self.jeopardy is not None:
                period = min(period, max(self.timing.keep_alive_timeout_ms // 2, 50) / 1000)
            alive.due_at = now + period
            self.hooks.wake()
        return alive.due_at if now >= overdue_at else min(alive.due_at, overdue_at)

    def _keep_alive_period(self) -> float:
        return min(self.timing.keep_alive_ms / 1000, self.keep_alive_within)

    def _overdue_at(self) -> float:
        oldest = next(iter(self._keep_alives.sent_at.values()), float("inf"))
        return oldest + self.timing.keep_alive_timeout_ms / 1000

    @property
    def stalled(self) -> bool:
        """Whether the oldest unanswered keepalive has had its time."""
        return self.clock() >= self._overdue_at()

    def renew_within(self, seconds: float) -> None:
        """From now on a keepalive is sent at least this often; infinity: as the ttl asks for."""
        if seconds < self.keep_alive_within:
            self._keep_alives.due_at = min(self._keep_alives.due_at, self.clock() + seconds)
            self.hooks.rearm()
        self.keep_alive_within = seconds

    def in_doubt(self, cause: str) -> None:
        """The connection has a reason to fear for the session."""
        self._set_jeopardy(cause)

    def _set_jeopardy(self, cause: str) -> None:
        if self.ended is None and self.jeopardy is None:
            self.jeopardy = cause
            for lease in list(self.leases.values()):
                lease._jeopardy()

    def _set_safe(self) -> None:
        if self.ended is None and self.jeopardy is not None:
            self.jeopardy = None
            for lease in list(self.leases.values()):
                lease._safe()

    # ---- the end -----------------------------------------------------------------------------------------------

    def end(self, cause: str) -> None:
        """Ends the session on this side, once: every lease is told, every pending call is answered."""
        if self.ended is not None:
            return
        self.ended = cause
        leases, self.leases = list(self.leases.values()), {}
        for lease in leases:
            lease._lose(cause, 0)
        self.hooks.feed.ended(self)
        pending, self._pending = list(self._pending.values()), {}
        self._outbox.clear()
        for operation in pending:
            if operation.gone:
                self._settle(operation, None)
            else:
                operation.answer.set_exception(self._pending_error(operation))
        self.hooks.ended(self)

    def _pending_error(self, operation: Operation[Any]) -> errors.TenureError:
        # What an acquire or a release did ended with the session. So did a begin, by the record's policy, and the
        # next one tells. But a record that was completed stays completed.
        certain = (
            not operation.sent or operation.kind in (ACQUIRE, RELEASE, CLOSE, BEGIN) or not operation.kind.mutating
        )
        if certain:
            return self.lost_error()
        return errors.Indefinite(
            f"the session ended ({self.ended}) before the answer came; it may have happened", reason="SESSION_NOT_FOUND"
        )

    def lost_error(self) -> errors.TenureError:
        if self.ended == "client_closed":
            return errors.ClientClosed("the client has been closed", reason="CLIENT_CLOSED")
        return errors.SessionLost(f"session {self.id or '(new)'} has ended: {self.ended}", reason="SESSION_NOT_FOUND")


def _kills_leases(switch: switch_pb2.Switch) -> bool:
    return switch.mode == switch_pb2.SWITCH_MODE_KILL and switch.scope != switch_pb2.SWITCH_SCOPE_JOB
