"""What the client returns: plain frozen values, no protobuf. Cluster times are integer milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tenure.v1 import dedup_pb2, lease_pb2, watch_pb2

__all__ = ["Event", "EventKind", "LeaseHolder", "LeaseInfo", "LeaseWaiter", "RecordInfo", "RecordState", "TokenCheck"]


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    session_id: str
    token: int
    granted_ms: int
    deadline_ms: int
    remaining_ms: int
    metadata: str
    agent: str
    host: str


@dataclass(frozen=True, slots=True)
class LeaseWaiter:
    session_id: str
    priority: int
    queued_ms: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as it was at ``revision``. Without holders and waiters it is free.

    ``holders`` and ``waiters`` show the first 1,000 of each, in a list of leases the first 20; the counts are complete.
    """

    name: str
    tenant: str
    capacity: int
    holders: tuple[LeaseHolder, ...]
    waiters: tuple[LeaseWaiter, ...]
    holder_count: int
    waiter_count: int
    delayed_until_ms: int
    revision: int

    @property
    def held(self) -> bool:
        return bool(self.holders)


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Whether a fencing token is current. ``current_token`` is the largest one held now; 0 when the lease is free."""

    current: bool
    current_token: int
    holder_session_id: str
    remaining_ms: int

    def __bool__(self) -> bool:
        return self.current


class EventKind(Enum):
    UNKNOWN = 0
    SESSION_OPENED = 1
    SESSION_ATTACHED = 2
    SESSION_DETACHED = 3
    SESSION_CLOSED = 4
    SESSION_EXPIRED = 5
    LEASE_GRANTED = 10
    LEASE_RELEASED = 11
    LEASE_EXPIRED = 12
    LEASE_TRANSFERRED = 13
    LEASE_WAITING = 14
    LEASE_WAIT_ENDED = 15
    RECORD_BEGUN = 20
    RECORD_COMPLETED = 21
    RECORD_FAILED = 22
    RECORD_OWNER_LOST = 23
    RECORD_RESOLVED = 24
    RECORD_FORGOTTEN = 25
    JOB_APPLIED = 30
    JOB_DELETED = 31
    OCCURRENCE_CREATED = 40
    OCCURRENCE_ENDED = 41
    OCCURRENCE_MISSED = 42
    OCCURRENCE_RESOLVED = 43
    RUN_ASSIGNED = 50
    RUN_ENDED = 51
    RUN_INTERRUPTED = 52
    RUN_INTERRUPT_ACKNOWLEDGED = 53
    RUN_CHECKPOINTED = 54
    SWITCH_SET = 60
    SWITCH_CLEARED = 61


@dataclass(frozen=True, slots=True)
class Event:
    """One change. ``kind`` is UNKNOWN for a kind that is newer than this client; ``kind_number`` is always right."""

    revision: int
    kind: EventKind
    kind_number: int
    tenant: str
    subject: str
    session_id: str
    token: int
    attempt: int
    cause: str
    actor: str
    reason: str
    cluster_ms: int
    wall_ms: int
    # Of jobs: which occurrence (UTC milliseconds), which run, and how many due times (a missed range).
    due_wall_ms: int = 0
    sequence: int = 0
    run_id: str = ""
    count: int = 0


class RecordState(Enum):
    UNSPECIFIED = 0
    IN_PROGRESS = 1
    COMPLETED = 2
    FAILED = 3
    UNKNOWN = 4
    RETRYABLE = 5


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """The record of one idempotency key."""

    key: str
    tenant: str
    state: RecordState
    attempt: int
    owner_session_id: str
    result: bytes
    error: str
    begun_ms: int
    ended_ms: int
    expires_ms: int


def lease_info(lease: lease_pb2.Lease, revision: int) -> LeaseInfo:
    return LeaseInfo(
        name=lease.name,
        tenant=lease.tenant,
        capacity=lease.capacity,
        holders=tuple(
            LeaseHolder(
                session_id=holder.session_id,
                token=holder.token,
                granted_ms=holder.granted_ms,
                deadline_ms=holder.deadline_ms,
                remaining_ms=holder.remaining_ms,
                metadata=holder.metadata,
                agent=holder.agent,
                host=holder.host,
            )
            for holder in lease.holders
        ),
        waiters=tuple(
            LeaseWaiter(
                session_id=waiter.session_id,
                priority=waiter.priority,
                queued_ms=waiter.queued_ms,
                deadline_ms=waiter.deadline_ms,
            )
            for waiter in lease.waiters
        ),
        holder_count=lease.holder_count,
        waiter_count=lease.waiter_count,
        delayed_until_ms=lease.delayed_until_ms,
        revision=revision,
    )


def token_check(response: lease_pb2.CheckLeaseResponse) -> TokenCheck:
    return TokenCheck(
        current=response.state == lease_pb2.TOKEN_STATE_CURRENT,
        current_token=response.current_token,
        holder_session_id=response.holder_session_id,
        remaining_ms=response.remaining_ms,
    )


_KINDS = {kind.value: kind for kind in EventKind}
_STATES = {state.value: state for state in RecordState}


def event(message: watch_pb2.Event) -> Event:
    return Event(
        revision=message.revision,
        kind=_KINDS.get(message.kind, EventKind.UNKNOWN),
        kind_number=message.kind,
        tenant=message.tenant,
        subject=message.subject,
        session_id=message.session_id,
        token=message.token,
        attempt=message.attempt,
        cause=message.cause,
        actor=message.actor,
        reason=message.reason,
        cluster_ms=message.cluster_ms,
        wall_ms=message.wall_ms,
        due_wall_ms=message.due_wall_ms,
        sequence=message.sequence,
        run_id=message.run_id,
        count=message.count,
    )


def record_info(record: dedup_pb2.Record) -> RecordInfo:
    return RecordInfo(
        key=record.key,
        tenant=record.tenant,
        state=_STATES.get(record.state, RecordState.UNSPECIFIED),
        attempt=record.attempt,
        owner_session_id=record.owner_session_id,
        result=record.result,
        error=record.error,
        begun_ms=record.begun_ms,
        ended_ms=record.ended_ms,
        expires_ms=record.expires_ms,
    )
