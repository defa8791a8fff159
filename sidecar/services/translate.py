"""Between the messages of the API and the structs of the core. Commands are checked here, field by field."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from msgspec import structs
from tenure.v1 import dedup_pb2, lease_pb2, session_pb2, watch_pb2

from sidecar.core import commands, dedup, events, leases, sessions
from sidecar.services import validation as check
from sidecar.services.errors import Problem, problem

# Holders and waiters of one lease that an answer shows.
SHOWN_MAX, SHOWN_IN_LIST_MAX = 1_000, 20

_CONSISTENCY_NAMES = {int(number): name for name, number in lease_pb2.Consistency.items()}
_OWNER_LOSS_NAMES = {int(number): name for name, number in dedup_pb2.OwnerLossPolicy.items()}
_RESOLUTION_NAMES = {int(number): name for name, number in dedup_pb2.Resolution.items() if number}
_RECORD_STATE_NAMES = {int(number): name for name, number in dedup_pb2.RecordState.items()}
_EVENT_KIND_NAMES = {int(number): name for name, number in watch_pb2.EventKind.items() if number}


def linearizable(consistency: lease_pb2.Consistency.ValueType) -> bool:
    check.choice(consistency, "consistency", _CONSISTENCY_NAMES)
    return consistency != lease_pb2.CONSISTENCY_LOCAL


# ---- sessions -----------------------------------------------------------------------------------------------------


def open_session(
    request: session_pb2.OpenSessionRequest, tenant: str, connection: str = "", node: str = "", generation: int = 1
) -> commands.OpenSession:
    info = request.info
    bytes_max = commands.INFO_FIELD_BYTES_MAX
    ttl_ms = commands.TTL_DEFAULT_MS
    if request.HasField("ttl_ms"):
        ttl_ms = check.number(request.ttl_ms, "ttl_ms", commands.TTL_MIN_MS, commands.TTL_MAX_MS)
    grace_ms = min(commands.DISCONNECT_GRACE_DEFAULT_MS, ttl_ms)
    if request.HasField("disconnect_grace_ms"):
        grace_ms = check.number(request.disconnect_grace_ms, "disconnect_grace_ms", 0, ttl_ms)
    return commands.OpenSession(
        tenant=tenant,
        suffix=secrets.token_hex(8),
        agent=check.text(info.agent, "info.agent", bytes_max),
        version=check.text(info.version, "info.version", bytes_max),
        host=check.text(info.host, "info.host", bytes_max),
        labels=check.labels(info.labels),
        ttl_ms=ttl_ms,
        disconnect_grace_ms=grace_ms,
        connection=connection,
        node=node,
        generation=generation,
    )


def session(row: sessions.Session, now_ms: int) -> session_pb2.Session:
    return session_pb2.Session(
        session_id=row.session,
        tenant=row.tenant,
        info=session_pb2.AgentInfo(agent=row.agent, version=row.version, host=row.host, labels=dict(row.labels)),
        ttl_ms=row.ttl_ms,
        disconnect_grace_ms=row.disconnect_grace_ms,
        opened_ms=row.opened_ms,
        deadline_ms=row.deadline_ms,
        remaining_ms=max(0, row.deadline_ms - now_ms),
        node_id=row.node,
        connected=bool(row.connection),
    )


# ---- leases -------------------------------------------------------------------------------------------------------


def acquire_lease(request: lease_pb2.AcquireLeaseRequest, tenant: str, session_id: str) -> commands.AcquireLease:
    capacity = 1
    if request.HasField("capacity"):
        capacity = check.number(request.capacity, "capacity", 1, commands.CAPACITY_MAX)
    return commands.AcquireLease(
        tenant=tenant,
        name=check.lease_name(request.name),
        session=session_id,
        capacity=capacity,
        wait_ms=check.number(request.wait_ms, "wait_ms", 0, commands.WAIT_MAX_MS),
        priority=check.number(request.priority, "priority", commands.PRIORITY_MIN, commands.PRIORITY_MAX),
        lock_delay_ms=check.number(request.lock_delay_ms, "lock_delay_ms", 0, commands.LOCK_DELAY_MAX_MS),
        metadata=check.text(request.metadata, "metadata", commands.METADATA_BYTES_MAX),
        waiter=_waiter(),
    )


def renamed(command: commands.AcquireLease) -> commands.AcquireLease:
    """The same request as a call of its own."""
    return structs.replace(command, waiter=_waiter())


def _waiter() -> str:
    """Names a call, not a request: a late cancel of an abandoned call must not undo what a repeat was told."""
    return secrets.token_hex(8)


def release_lease(request: lease_pb2.ReleaseLeaseRequest, tenant: str, session_id: str) -> commands.ReleaseLease:
    actor, reason = _operator(request.actor, request.reason, session_id)
    return commands.ReleaseLease(
        tenant=tenant,
        name=check.lease_name(request.name),
        token=check.token(request.token),
        session=session_id,
        actor=actor,
        reason=reason,
    )


def transfer_lease(request: lease_pb2.TransferLeaseRequest, tenant: str, session_id: str) -> commands.TransferLease:
    actor, reason = _operator(request.actor, request.reason, session_id)
    return commands.TransferLease(
        tenant=tenant,
        name=check.lease_name(request.name),
        token=check.token(request.token),
        to_session=check.session_id(request.to_session_id, "to_session_id"),
        session=session_id,
        actor=actor,
        reason=reason,
    )


def _operator(actor: str, reason: str, session_id: str) -> tuple[str, str]:
    """An act without a session is an operator's, who must be named; an act of the holder names nobody else."""
    if not session_id:
        return (
            check.required_text(actor, "actor", commands.ACTOR_BYTES_MAX),
            check.required_text(reason, "reason", commands.REASON_BYTES_MAX),
        )
    if actor or reason:
        message = "actor and reason are for operators; allowed with an empty session_id only"
        raise problem(Problem.FIELD_INVALID, message, field="actor" if actor else "reason")
    return "", ""


def lease(
    row: leases.Lease,
    find_session: Callable[[str], sessions.Session | None],
    now_ms: int,
    shown_max: int = SHOWN_MAX,
) -> lease_pb2.Lease:
    return lease_pb2.Lease(
        tenant=row.tenant,
        name=row.name,
        capacity=row.capacity,
        holders=[_holder(holder, find_session(holder.session), now_ms) for holder in row.holders[:shown_max]],
        waiters=[
            lease_pb2.LeaseWaiter(
                session_id=waiter.session,
                priority=waiter.priority,
                queued_ms=waiter.queued_ms,
                deadline_ms=waiter.deadline_ms,
            )
            for waiter in row.waiters[:shown_max]
        ],
        delayed_until_ms=row.delayed_until_ms,
        holder_count=len(row.holders),
        waiter_count=len(row.waiters),
    )


def _holder(holder: leases.Holder, owner: sessions.Session | None, now_ms: int) -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(
        session_id=holder.session,
        token=holder.token,
        granted_ms=holder.granted_ms,
        deadline_ms=owner.deadline_ms if owner else 0,
        remaining_ms=max(0, owner.deadline_ms - now_ms) if owner else 0,
        metadata=holder.metadata,
        agent=owner.agent if owner else "",
        host=owner.host if owner else "",
    )


# ---- records ------------------------------------------------------------------------------------------------------


def begin_record(request: dedup_pb2.BeginRecordRequest, tenant: str, session_id: str) -> commands.BeginRecord:
    check.number(request.wait_ms, "wait_ms", 0, commands.WAIT_MAX_MS)
    policy = check.choice(request.owner_loss, "owner_loss", _OWNER_LOSS_NAMES)
    retention_ms = commands.RETENTION_DEFAULT_MS
    if request.HasField("retention_ms"):
        retention_ms = check.number(
            request.retention_ms, "retention_ms", commands.RETENTION_MIN_MS, commands.RETENTION_MAX_MS
        )
    fence_lease, fence_token = "", 0
    if request.HasField("fence"):
        fence_lease = check.lease_name(request.fence.lease_name, "fence.lease_name")
        fence_token = check.token(request.fence.token, "fence.token")
    return commands.BeginRecord(
        tenant=tenant,
        key=check.key(request.key),
        session=session_id,
        fingerprint=check.payload(request.fingerprint, "fingerprint", commands.FINGERPRINT_BYTES_MAX),
        owner_loss=commands.OwnerLoss(policy or commands.OwnerLoss.RETRY),
        retention_ms=retention_ms,
        fence_lease=fence_lease,
        fence_token=fence_token,
    )


def complete_record(request: dedup_pb2.CompleteRecordRequest, tenant: str, session_id: str) -> commands.CompleteRecord:
    return commands.CompleteRecord(
        tenant=tenant,
        key=check.key(request.key),
        session=session_id,
        attempt=check.attempt(request.attempt),
        result=check.payload(request.result, "result", commands.RESULT_BYTES_MAX),
    )


def fail_record(request: dedup_pb2.FailRecordRequest, tenant: str, session_id: str) -> commands.FailRecord:
    return commands.FailRecord(
        tenant=tenant,
        key=check.key(request.key),
        session=session_id,
        attempt=check.attempt(request.attempt),
        retryable=request.retryable,
        error=check.text(request.error, "error", commands.ERROR_BYTES_MAX),
    )


def resolve_record(request: dedup_pb2.ResolveRecordRequest, tenant: str) -> commands.ResolveRecord:
    return commands.ResolveRecord(
        tenant=tenant,
        key=check.key(request.key),
        attempt=check.attempt(request.attempt),
        resolution=commands.Resolution(check.choice(request.resolution, "resolution", _RESOLUTION_NAMES)),
        result=check.payload(request.result, "result", commands.RESULT_BYTES_MAX),
        error=check.text(request.error, "error", commands.ERROR_BYTES_MAX),
        actor=check.required_text(request.actor, "actor", commands.ACTOR_BYTES_MAX),
        reason=check.required_text(request.reason, "reason", commands.REASON_BYTES_MAX),
    )


def record_state(value: dedup_pb2.RecordState.ValueType) -> dedup.RecordState | None:
    """None for all of them."""
    check.choice(value, "state", _RECORD_STATE_NAMES)
    return dedup.RecordState(value) if value else None


def record(row: dedup.Record, *, with_result: bool = True) -> dedup_pb2.Record:
    fence = dedup_pb2.Fence(lease_name=row.fence_lease, token=row.fence_token) if row.fence_lease else None
    return dedup_pb2.Record(
        tenant=row.tenant,
        key=row.key,
        state=dedup_pb2.RecordState.ValueType(row.state),
        attempt=row.attempt,
        owner_session_id=row.owner,
        fingerprint=row.fingerprint,
        result=row.result if with_result else b"",
        error=row.error,
        fence=fence,
        begun_ms=row.begun_ms,
        ended_ms=row.ended_ms,
        expires_ms=row.expires_ms,
        retention_ms=row.retention_ms,
        owner_loss=dedup_pb2.OwnerLossPolicy.ValueType(row.owner_loss),
    )


_STATE_OF = {
    commands.BeginOutcome.NEW: dedup_pb2.RECORD_STATE_IN_PROGRESS,
    commands.BeginOutcome.IN_PROGRESS: dedup_pb2.RECORD_STATE_IN_PROGRESS,
    commands.BeginOutcome.COMPLETED: dedup_pb2.RECORD_STATE_COMPLETED,
    commands.BeginOutcome.FAILED: dedup_pb2.RECORD_STATE_FAILED,
    commands.BeginOutcome.UNKNOWN: dedup_pb2.RECORD_STATE_UNKNOWN,
}


def begun(
    command: commands.BeginRecord, result: commands.RecordBegun, row: dedup.Record | None
) -> dedup_pb2.BeginRecordResponse:
    """What the begin decided, also when the record (``row``, as it is now) has moved on since."""
    same = row is not None and row.attempt == result.attempt and row.fingerprint == command.fingerprint
    shown = record(row, with_result=False) if row is not None and same else dedup_pb2.Record()
    shown.tenant, shown.key, shown.attempt = command.tenant, command.key, result.attempt
    shown.state = _STATE_OF[result.outcome]
    shown.owner_session_id = result.owner
    shown.fingerprint = command.fingerprint
    shown.result, shown.error, shown.expires_ms = result.result, result.error, result.expires_ms
    return dedup_pb2.BeginRecordResponse(
        outcome=dedup_pb2.BeginOutcome.ValueType(result.outcome), record=shown, revision=result.revision
    )


# ---- events -------------------------------------------------------------------------------------------------------


def event_kinds(values: Sequence[watch_pb2.EventKind.ValueType]) -> frozenset[events.Kind]:
    """Empty for all kinds."""
    return frozenset(events.Kind(check.choice(value, "kinds", _EVENT_KIND_NAMES)) for value in values)


def event(row: events.Event) -> watch_pb2.Event:
    return watch_pb2.Event(
        revision=row.revision,
        kind=watch_pb2.EventKind.ValueType(row.kind),
        tenant=row.tenant,
        subject=row.subject,
        session_id=row.session,
        token=row.token,
        attempt=row.attempt,
        cause=row.cause,
        actor=row.actor,
        reason=row.reason,
        cluster_ms=row.cluster_ms,
        wall_ms=row.wall_ms,
        due_wall_ms=row.due_ms,
        sequence=row.sequence,
        run_id=row.run,
        count=row.count,
    )
