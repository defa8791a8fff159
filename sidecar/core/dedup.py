"""Dedup records (see the rules at the top of machine.py)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import IntEnum, unique
from itertools import islice

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import (
    ERROR_BYTES_MAX,
    BeginOutcome,
    BeginRecord,
    CompleteRecord,
    Done,
    FailRecord,
    OwnerLoss,
    Reason,
    RecordBegun,
    RecordCompleted,
    Refused,
    Resolution,
    ResolveRecord,
    Result,
)
from sidecar.core.context import Context, full
from sidecar.core.deadlines import Deadlines
from sidecar.core.events import Kind
from sidecar.core.leases import Leases
from sidecar.core.ordering import SortedKeys
from sidecar.core.sessions import Sessions
from sidecar.core.switches import Switches, switched_off

# What a record counts for beside its key, fingerprint, result and error.
RECORD_OVERHEAD_BYTES = 256
# Kept free for the outcome of every attempt that was let in: a result up to this size, and any error, always has room.
OUTCOME_RESERVE_BYTES = ERROR_BYTES_MAX


@unique
class RecordState(IntEnum):
    IN_PROGRESS = 1
    COMPLETED = 2
    FAILED = 3
    UNKNOWN = 4
    RETRYABLE = 5


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    tenant: str
    key: str
    state: RecordState
    attempt: int
    owner: str
    fingerprint: bytes
    owner_loss: OwnerLoss
    retention_ms: int
    begun_ms: int
    ended_ms: int = 0
    expires_ms: int = 0
    result: bytes = b""
    error: str = ""
    fence_lease: str = ""
    fence_token: int = 0


RecordKey = tuple[str, str]  # tenant, idempotency key

_KNOWN = {
    RecordState.IN_PROGRESS: BeginOutcome.IN_PROGRESS,
    RecordState.COMPLETED: BeginOutcome.COMPLETED,
    RecordState.FAILED: BeginOutcome.FAILED,
    RecordState.UNKNOWN: BeginOutcome.UNKNOWN,
}
_OUTCOME_TO_COME = (RecordState.IN_PROGRESS, RecordState.UNKNOWN)


class Records:
    def __init__(
        self, context: Context, sessions: Sessions, leases: Leases, switches: Switches, rows: Iterable[Record]
    ) -> None:
        self._context, self._sessions, self._leases, self._switches = context, sessions, leases, switches
        self.table = {(row.tenant, row.key): row for row in rows}
        # Derived.
        self.bytes = sum(map(_size, self.table.values()))
        keys_by_state: dict[RecordState, list[RecordKey]] = {state: [] for state in RecordState}
        self._running: dict[str, dict[RecordKey, None]] = {}
        self.expiries: Deadlines[RecordKey] = Deadlines(self._expires_ms)
        for key, row in self.table.items():
            keys_by_state[row.state].append(key)
            if row.state is RecordState.IN_PROGRESS:
                self._running.setdefault(row.owner, {})[key] = None
            if row.expires_ms:
                self.expiries.arm(key, row.expires_ms)
        self._order = {state: SortedKeys(keys) for state, keys in keys_by_state.items()}

    # ---- commands ------------------------------------------------------------------------------------------------

    def begin(self, command: BeginRecord) -> RecordBegun | Refused:
        session = self._sessions.find(command.tenant, command.session)
        if isinstance(session, Refused):
            return session
        # Before everything that is known of the key: a kill stops what has a result, too.
        killed = self._switches.killed(command.tenant)
        if killed is not None:
            return switched_off(killed)
        # Before the rest: who acts under a stale token must hear that first, not the result of another.
        stale = self._stale_fence(command.tenant, command.fence_lease, command.fence_token)
        if stale is not None:
            return stale
        record = self.table.get((command.tenant, command.key))
        if record is not None and record.fingerprint != command.fingerprint:
            message = "the key was used before, for another payload (the fingerprints differ)"
            return Refused(reason=Reason.RECORD_MISMATCH, message=message)
        if record is not None and record.state is not RecordState.RETRYABLE:
            return self._known(record)
        return self._begin_attempt(command, record)

    def _begin_attempt(self, command: BeginRecord, before: Record | None) -> RecordBegun | Refused:
        limits = self._context.limits
        if before is None and len(self.table) >= limits.records_max:
            return full(Reason.RECORDS_FULL, "no room for a record", "records_max", limits.records_max)
        record = Record(
            tenant=command.tenant,
            key=command.key,
            state=RecordState.IN_PROGRESS,
            attempt=before.attempt + 1 if before is not None else 1,
            owner=command.session,
            fingerprint=command.fingerprint,
            owner_loss=command.owner_loss,
            retention_ms=command.retention_ms,
            begun_ms=self._context.now_ms,
            fence_lease=command.fence_lease,
            fence_token=command.fence_token,
        )
        refusal = self._no_room(record)
        if refusal is not None:
            return refusal
        self._put(record)
        revision = self._emit(Kind.RECORD_BEGUN, record)
        return RecordBegun(outcome=BeginOutcome.NEW, attempt=record.attempt, owner=record.owner, revision=revision)

    def complete(self, command: CompleteRecord) -> RecordCompleted | Refused:
        record = self._attempt(command.tenant, command.key, command.session, command.attempt)
        if isinstance(record, Refused):
            return record
        if record.state is RecordState.COMPLETED:
            if record.result == command.result:
                return RecordCompleted(already_completed=True, revision=self._context.revision)
            message = "this attempt was completed before, with another result"
            return Refused(reason=Reason.RECORD_RESULT_MISMATCH, message=message)
        if record.state is not RecordState.IN_PROGRESS:
            return _not_running(record)
        stale = self._stale_fence(record.tenant, record.fence_lease, record.fence_token)
        if stale is not None:
            return stale
        ended = self._ended(record, RecordState.COMPLETED, result=command.result)
        refusal = self._no_room(ended)
        if refusal is not None:
            return refusal
        self._put(ended)
        return RecordCompleted(already_completed=False, revision=self._emit(Kind.RECORD_COMPLETED, ended))

    def fail(self, command: FailRecord) -> Done | Refused:
        """Not fenced: giving up does no harm."""
        record = self._attempt(command.tenant, command.key, command.session, command.attempt)
        if isinstance(record, Refused):
            return record
        if record.state is not RecordState.IN_PROGRESS:
            return _not_running(record)
        state = RecordState.RETRYABLE if command.retryable else RecordState.FAILED
        ended = self._ended(record, state, error=command.error)
        self._put(ended)
        return Done(revision=self._emit(Kind.RECORD_FAILED, ended, cause="retryable" if command.retryable else "final"))

    def resolve(self, command: ResolveRecord) -> Done | Refused:
        record = self.table.get((command.tenant, command.key))
        if record is None:
            return _not_found(command.key)
        if record.attempt != command.attempt:
            return _attempt_stale(record, command.attempt)
        audit = {"actor": command.actor, "reason": command.reason}
        if command.resolution is Resolution.FORGET:
            self._remove(record)
            return Done(revision=self._emit(Kind.RECORD_FORGOTTEN, record, cause="operator", **audit))
        if record.state is RecordState.COMPLETED:
            message = "the record is completed, and completes once: it can only be forgotten"
            return Refused(reason=Reason.RECORD_NOT_RUNNING, message=message, facts=(("state", record.state.name),))
        state = {
            Resolution.COMPLETED: RecordState.COMPLETED,
            Resolution.FAILED: RecordState.FAILED,
            Resolution.RETRY: RecordState.RETRYABLE,
        }[command.resolution]
        completed = state is RecordState.COMPLETED
        ended = self._ended(
            record, state, result=command.result if completed else b"", error="" if completed else command.error
        )
        refusal = self._no_room(ended)
        if refusal is not None:
            return refusal
        self._put(ended)
        cause = command.resolution.name.lower()
        return Done(revision=self._emit(Kind.RECORD_RESOLVED, ended, cause=cause, **audit))

    def refill(self, command: BeginRecord, begun: RecordBegun) -> Result:
        """A remembered answer of begin carries no result of its own; it is read from the record, while that is kept."""
        record = self.table.get((command.tenant, command.key))
        if record is not None and record.attempt == begun.attempt and _KNOWN.get(record.state) is begun.outcome:
            return self._known(record)
        message = "the record was known when the request was first answered, and has been forgotten since"
        return Refused(reason=Reason.RECORD_NOT_FOUND, message=message)

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def end_session(self, session: str) -> None:
        for key in sorted(self._running.get(session, {})):
            record = self.table[key]
            retry = record.owner_loss is OwnerLoss.RETRY
            lost = self._ended(record, RecordState.RETRYABLE if retry else RecordState.UNKNOWN)
            self._put(lost)
            self._emit(Kind.RECORD_OWNER_LOST, lost, cause="retry" if retry else "unknown")

    def expire(self) -> None:
        """A record that can be retried is forgotten too; its attempts then begin at 1 again."""
        while self.expiries.could_be_due(self._context.now_ms):
            key = self.expiries.pop(self._context.now_ms)
            if key is None:
                break
            record = self.table[key]
            self._remove(record)
            self._emit(Kind.RECORD_FORGOTTEN, record, cause="retention")

    def _expires_ms(self, key: RecordKey) -> int | None:
        record = self.table.get(key)
        return None if record is None or not record.expires_ms else record.expires_ms

    # ---- reads ---------------------------------------------------------------------------------------------------

    def page(self, tenant: str, prefix: str, after: str, limit: int, state: RecordState | None) -> list[Record]:
        states = tuple(RecordState) if state is None else (state,)
        keys = heapq.merge(*(self._order[each].after(tenant, prefix, after) for each in states))
        return [self.table[key] for key in islice(keys, limit)]

    # ---- rules ---------------------------------------------------------------------------------------------------

    def _attempt(self, tenant: str, key: str, session: str, attempt: int) -> Record | Refused:
        """The record, if its last attempt is this one and the session's."""
        record = self.table.get((tenant, key))
        if record is None:
            return _not_found(key)
        if record.attempt != attempt:
            return _attempt_stale(record, attempt)
        if record.owner != session:
            message = f"attempt {attempt} belongs to session {record.owner}"
            return Refused(reason=Reason.RECORD_OWNED_BY_OTHER, message=message, facts=(("owner", record.owner),))
        return record

    def _stale_fence(self, tenant: str, lease: str, token: int) -> Refused | None:
        if not lease or self._leases.is_current(tenant, lease, token):
            return None
        return Refused(
            reason=Reason.FENCE_STALE,
            message=f"token {token} of lease {lease} is not current",
            facts=(("lease", lease), *self._leases.current_facts(tenant, lease)),
        )

    def _known(self, record: Record) -> RecordBegun:
        return RecordBegun(
            outcome=_KNOWN[record.state],
            attempt=record.attempt,
            owner=record.owner,
            result=record.result,
            error=record.error,
            expires_ms=record.expires_ms,
            revision=self._context.revision,
        )

    def _ended(self, record: Record, state: RecordState, *, result: bytes = b"", error: str = "") -> Record:
        """The retention counts from now, when the outcome is known. What is unknown stays until it is resolved."""
        now_ms = self._context.now_ms
        expires_ms = 0 if state is RecordState.UNKNOWN else now_ms + record.retention_ms
        return replace(record, state=state, ended_ms=now_ms, expires_ms=expires_ms, result=result, error=error)

    def _no_room(self, record: Record) -> Refused | None:
        """Refuses what makes the records larger beyond the limit; what makes them smaller always has room."""
        before = self.table.get((record.tenant, record.key))
        growth = _size(record) - (_size(before) if before is not None else 0)
        limit = self._context.limits.record_bytes_max
        if growth <= 0 or self.bytes + growth <= limit:
            return None
        return full(Reason.RECORDS_FULL, "no room for the record", "record_bytes_max", limit)

    # ---- the table -----------------------------------------------------------------------------------------------

    def _put(self, record: Record) -> None:
        key = (record.tenant, record.key)
        before = self.table.get(key)
        if before is not None:
            self._forget_derived(key, before)
        self.table[key] = record
        self.bytes += _size(record)
        self._order[record.state].add(key)
        if record.state is RecordState.IN_PROGRESS:
            self._running.setdefault(record.owner, {})[key] = None
        if record.expires_ms:
            self.expiries.arm(key, record.expires_ms)

    def _remove(self, record: Record) -> None:
        key = (record.tenant, record.key)
        self._forget_derived(key, record)
        del self.table[key]

    def _forget_derived(self, key: RecordKey, record: Record) -> None:
        self.bytes -= _size(record)
        self._order[record.state].remove(key)
        self.expiries.disarm(key)
        if record.state is RecordState.IN_PROGRESS:
            running = self._running[record.owner]
            del running[key]
            if not running:
                del self._running[record.owner]

    def _emit(self, kind: Kind, record: Record, *, cause: str = "", actor: str = "", reason: str = "") -> int:
        return self._context.emit(
            kind,
            record.tenant,
            record.key,
            session=record.owner,
            attempt=record.attempt,
            cause=cause,
            actor=actor,
            reason=reason,
        )


def _size(record: Record) -> int:
    """What a record counts for, in bytes, against record_bytes_max."""
    reserve = OUTCOME_RESERVE_BYTES if record.state in _OUTCOME_TO_COME else 0
    texts = len(record.key.encode()) + len(record.error.encode())
    return RECORD_OVERHEAD_BYTES + texts + len(record.fingerprint) + len(record.result) + reserve


def _not_found(key: str) -> Refused:
    return Refused(reason=Reason.RECORD_NOT_FOUND, message=f"nothing is known of the key {key}")


def _attempt_stale(record: Record, attempt: int) -> Refused:
    return Refused(
        reason=Reason.ATTEMPT_STALE,
        message=f"attempt {attempt} is not the current one, which is {record.attempt}",
        facts=(("attempt", str(record.attempt)), ("state", record.state.name)),
    )


def _not_running(record: Record) -> Refused:
    return Refused(
        reason=Reason.RECORD_NOT_RUNNING,
        message=f"attempt {record.attempt} is over: the record is {record.state.name}",
        facts=(("attempt", str(record.attempt)), ("state", record.state.name)),
    )
