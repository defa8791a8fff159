"""The pure, deterministic state machine of Tenure.

Rules of this package
  * ``apply(stamp, request)`` maps the state and a request to a result and events, and does nothing else: no clock,
    no I/O, no randomness, no logging. Every node applies the same requests in the same order and gets the same
    state, bit for bit: nothing is decided by a hash, the order of a set, a float, or a node's own configuration.
  * It never raises for what a user sent: a refusal is a result (``Refused``), and changes nothing but time. A broken
    invariant is an assertion, and ends the node before it can spread.
  * Records are frozen, replaced and never mutated. So ``capture`` copies tables of references, and another thread
    can encode the copy while this one goes on.
  * Only the tables are state. Indexes and the agenda of deadlines are derived from them, and rebuilt by ``restore``.

How an apply goes
  1. Time moves to the stamp. It never steps back.
  2. Everything due at or before the stamp ends: a deadline AT the stamp has passed. First what can free a lease, in
     order of deadline; at one deadline sessions go first, then waits, then lock delays; then by name. Next go records
     whose retention is over, last remembered requests. So a renewal that reaches the log behind its deadline is
     refused, whether or not a tick came before it.
  3. A request with a key that was answered before gets that answer again. Else it runs once, and is remembered.

Sessions
  * A session ends by closing, or when its deadline passes. A renewal, an attach: deadline = stamp + ttl. A detach cuts
    the deadline to the disconnect grace if its connection is the one that carries the session (0 ends it at once).
  * A detached session that is renewed by a unary call has its full ttl again: the sender is alive. A keepalive counts
    only while its stream carries the session; one that was under way when its stream broke says nothing. For the same
    reason an attach is refused when a later stream of the same client has attached before it.
  * With a session end, in this order: its places in line, its leases in order of token (each is granted to the next
    at once), its attempts at records in order of key, and what was remembered of its stream.

Leases
  * Tokens come from one counter for all names, raised by every grant. So they grow for each name, for ever, although
    a lease that nobody holds, waits for or is kept from is not stored at all.
  * A free place goes to the first in line (priority, then arrival) whose session lives and whose wait has not ended,
    both judged at the stamp: nobody is granted what he has stopped waiting for.
  * A session has at most one place of a lease, whatever its capacity. Acquiring again gives the same token and changes
    nothing. A second place in LINE is possible (two tasks of one process), and passed over while the first holds.
  * A lock delay follows an expiry, never a release or a transfer. It counts from the deadline of the session, and
    keeps back the one place that was lost; places beside it are granted. A try that finds no other gets LOCK_DELAY.
  * All who use a name at one time state the same capacity.
  * A transfer takes the place from one and gives it to the other under a new token in one step. A target in line
    leaves the line with that grant. An inherited place keeps the lock delay, and no metadata.
  * A token that is not a holder's is stale, or unknown when it is larger than any that was ever granted.

Records (dedup)
  * NEW goes to one caller per attempt; attempt n+1 begins only after attempt n ended retryable. Complete and fail
    name their attempt and session, so that a late one changes nothing. Complete is idempotent for an equal result.
  * A fence is looked at first in begin, and again in complete. It says that a token is current, of whichever session.
  * When the session of a running attempt ends (also by closing), the record's policy decides: retryable, or unknown
    until somebody resolves it. A completed record can be forgotten by an operator, but not be given another result.
  * The retention counts from the outcome. A retryable record is forgotten after it too; attempts then begin at 1.
    Running and unknown records stay. Nothing is forgotten to make room: at a limit, new keys are refused. A result
    of up to 4,096 bytes, and every error, always has room once its attempt was let in.

Requests
  * Unary keys are kept for the retention, stream keys until they are acknowledged or their session ends. When the
    table is full, a unary answer of some age makes room; else the request is refused before it runs.
  * A refusal is an answer like any other: the same request gets it again, a new try is a new request. Not remembered,
    because the state did not judge the request itself: refusals for its key, its deadline or its form, and all that
    say that the state is full.
  * The remembered result of a waiter becomes the grant, or the refusal that ended the wait. A cancelled one is
    forgotten. A repeat of a waiting request takes the place over under its own waiter name and with its own time.
  * A repeated begin that found an outcome reads it from the record again, so that results are stored once.

Events have contiguous revisions. The last ``events_max`` of them are part of the state. ``first_revision`` is the
oldest one held: every event since then can be read, on every node alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from sidecar.core import bounds
from sidecar.core.commands import (
    AcquireLease,
    AttachSession,
    BeginOutcome,
    BeginRecord,
    CancelWait,
    ClearSwitch,
    CloseSession,
    Command,
    CompleteRecord,
    DetachSession,
    Done,
    FailRecord,
    LeaseGranted,
    LeaseQueued,
    Limits,
    OpenSession,
    Reason,
    RecordBegun,
    Refused,
    ReleaseLease,
    RenewSessions,
    Request,
    RequestKey,
    ResolveRecord,
    Result,
    SetLimits,
    SetSwitch,
    Stamp,
    Tick,
    TransferLease,
)
from sidecar.core.context import Context
from sidecar.core.deadlines import Deadlines
from sidecar.core.dedup import Record, Records, RecordState
from sidecar.core.events import Event, Kind
from sidecar.core.leases import Lease, Leases
from sidecar.core.requests import Requests, fingerprint_of
from sidecar.core.sessions import Session, Sessions
from sidecar.core.snapshot import Captured, SnapshotError, State, decode
from sidecar.core.switches import Switch, Switches

__all__ = ["Captured", "Machine", "SnapshotError"]

# What can come due and free a lease, in this order at one deadline. A key of the agenda: the rank, then what it is.
_SESSION, _WAIT, _DELAY, _SWITCH = 1, 2, 3, 4

# Nobody waits for the end of a retention, so ticks for it are bundled: many records end with one.
_RETENTION_TICK_MS = 1_000

_NOT_REMEMBERED = frozenset(
    {
        Reason.EXPIRED_REQUEST,
        Reason.REQUEST_ID_REUSED,
        Reason.REQUEST_FORGOTTEN,
        Reason.REQUESTS_FULL,
        Reason.INVALID_COMMAND,
        Reason.SESSIONS_FULL,
        Reason.LEASES_FULL,
        Reason.WAITERS_FULL,
        Reason.RECORDS_FULL,
    }
)


class Machine:
    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """``limits`` must be equal on all nodes; they are changed later by ``SetLimits`` only."""
        self._load(
            State(
                limits=limits,
                stamp=Stamp(0, 0),
                revision=0,
                last_token=0,
                sessions=[],
                leases=[],
                waiters=[],
                records=[],
                unary=[],
                stream=[],
                acknowledged=[],
                events=[],
                switches=[],
                kill_epoch=0,
                floors=[],
            )
        )

    def _load(self, state: State) -> None:
        self._context = context = Context(state.limits, state.stamp, state.revision, state.events)
        # Deadlines of sessions, waits and lock delays, by rank.
        self._agenda: Deadlines[tuple[Any, ...]] = Deadlines(self._due_ms)
        arm, disarm = self._agenda.arm, self._agenda.disarm
        self._requests = Requests(context, state.unary, state.stream, state.acknowledged)
        self._sessions = Sessions(context, state.sessions, lambda row: arm((_SESSION, row.session), row.deadline_ms))
        self._switches = Switches(
            context,
            self._sessions,
            arm=lambda switch, at_ms: arm((_SWITCH, switch), at_ms),
            disarm=lambda switch: disarm((_SWITCH, switch)),
            switches=state.switches,
            kill_epoch=state.kill_epoch,
            floors=state.floors,
        )
        self._leases = Leases(
            context,
            self._sessions,
            self._requests,
            self._switches,
            arm_wait=lambda wait, at_ms: arm((_WAIT, *wait), at_ms),
            disarm_wait=lambda wait: disarm((_WAIT, *wait)),
            arm_delay=lambda key, at_ms: arm((_DELAY, *key), at_ms),
            leases=state.leases,
            waiters=state.waiters,
            last_token=state.last_token,
        )
        self._records = Records(context, self._sessions, self._leases, self._switches, state.records)
        self._handlers: dict[type, Callable[[Any], Result]] = {
            Tick: lambda command: self._done(),
            SetLimits: self._set_limits,
            OpenSession: self._sessions.open,
            RenewSessions: self._sessions.renew,
            AttachSession: self._sessions.attach,
            DetachSession: self._detach,
            CloseSession: self._close,
            CancelWait: self._leases.cancel,
            ReleaseLease: self._leases.release,
            TransferLease: self._leases.transfer,
            BeginRecord: self._records.begin,
            CompleteRecord: self._records.complete,
            FailRecord: self._records.fail,
            ResolveRecord: self._records.resolve,
            SetSwitch: self._set_switch,
            ClearSwitch: self._clear_switch,
        }

    # ---- the state as a whole ------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._context.limits

    @property
    def stamp(self) -> Stamp:
        """Of the last applied request; cluster_ms never steps back."""
        return self._context.stamp

    @property
    def revision(self) -> int:
        """Of the last event; 0 before the first."""
        return self._context.revision

    @property
    def last_token(self) -> int:
        return self._leases.last_token

    def capture(self) -> Captured:
        requests = self._requests
        return Captured(
            State(
                limits=self.limits,
                stamp=self.stamp,
                revision=self.revision,
                last_token=self.last_token,
                sessions=list(self._sessions.table.values()),
                leases=list(self._leases.table.values()),
                waiters=[(key[0], key[1], row) for key, row in self._leases.waiters.items()],
                records=list(self._records.table.values()),
                unary=list(requests.unary.items()),
                stream=list(requests.stream.items()),
                acknowledged=list(requests.acknowledged.items()),
                events=self._context.history(),
                switches=list(self._switches.table.values()),
                kill_epoch=self._switches.kill_epoch,
                floors=list(self._switches.floors.items()),
            )
        )

    def restore(self, payload: bytes) -> None:
        """Replaces the state. Raises SnapshotError, and then leaves it as it was."""
        self._load(decode(payload))

    def digest(self) -> str:
        """Equal on all nodes at the same applied index. Encodes the whole state: for many records, use a capture's."""
        return self.capture().digest()

    # ---- apply ---------------------------------------------------------------------------------------------------

    def apply(self, stamp: Stamp, request: Request) -> tuple[Result, Sequence[Event]]:
        """First ends what is due at ``stamp``, then runs the command, unless it was answered before."""
        self._context.move_to(stamp)
        self._end_what_is_due()
        self._records.expire()
        self._requests.expire()
        result = self._answer(request)
        return result, self._context.take_fresh()

    def _answer(self, request: Request) -> Result:
        problem = bounds.problem(request)
        if problem is not None:
            return Refused(reason=Reason.INVALID_COMMAND, message=problem)
        if request.key is not None:
            return self._answer_once(request, request.key)
        return self._expired(request) or self._run(request.command, None)

    def _answer_once(self, request: Request, key: RequestKey) -> Result:
        if key.origin:
            session = self._sessions.find(key.tenant, key.origin)
            if isinstance(session, Refused):
                return session
        command = request.command
        fingerprint = fingerprint_of(command)
        answered = self._requests.recall(key, fingerprint)
        if answered is not None:
            return self._repeat(command, key, answered)
        refusal = self._expired(request) or self._requests.make_room(key)
        if refusal is not None:
            return refusal
        result = self._run(command, key)
        if self._is_remembered(command, key, result):
            self._requests.remember(key, fingerprint, _without_payload(result))
        return result

    def _expired(self, request: Request) -> Refused | None:
        late_ms = self._context.now_ms - request.not_after_ms
        if not request.not_after_ms or late_ms <= 0:
            return None
        message = f"the caller's deadline had passed {late_ms} ms before the request was applied"
        return Refused(reason=Reason.EXPIRED_REQUEST, message=message)

    def _run(self, command: Command, key: RequestKey | None) -> Result:
        if isinstance(command, AcquireLease):
            return self._leases.acquire(command, None if key is None else _identity(key))
        return self._handlers[type(command)](command)

    def _is_remembered(self, command: Command, key: RequestKey, result: Result) -> bool:
        if isinstance(result, Refused):
            return result.reason not in _NOT_REMEMBERED
        if isinstance(result, LeaseQueued) and isinstance(command, AcquireLease):
            # Two requests under one waiter's name: the place in line, and so the outcome, is the first one's.
            waiter = self._leases.waiters[(command.tenant, command.name, command.session, command.waiter)]
            return waiter.request == _identity(key)
        # A session that closed itself over its own stream has taken the stream's answers with it.
        return not key.origin or key.origin in self._sessions.table

    def _repeat(self, command: Command, key: RequestKey, answered: Result) -> Result:
        if isinstance(command, AcquireLease) and isinstance(answered, LeaseQueued | LeaseGranted):
            renamed = self._leases.rename(command, _identity(key), answered)
            if renamed is not answered:
                self._requests.amend(key, renamed)
            return renamed
        if isinstance(command, BeginRecord) and isinstance(answered, RecordBegun) and _has_payload(answered):
            return self._records.refill(command, answered)
        return answered

    # ---- what ends -----------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """Cluster time at which something ends by itself that somebody waits for; the leader proposes a Tick then.

        Remembered requests are not among it: they go with whatever is applied next.
        """
        agenda_ms, expiry_ms = self._agenda.next_ms(), self._records.expiries.next_ms()
        if expiry_ms is not None:
            expiry_ms = -(-expiry_ms // _RETENTION_TICK_MS) * _RETENTION_TICK_MS
        if agenda_ms is None or expiry_ms is None:
            return expiry_ms if agenda_ms is None else agenda_ms
        return min(agenda_ms, expiry_ms)

    def _end_what_is_due(self) -> None:
        agenda, now_ms = self._agenda, self._context.now_ms
        while agenda.could_be_due(now_ms):
            key = agenda.pop(now_ms)
            if key is None:
                return
            if key[0] == _SESSION:
                self._end_session(self._sessions.table[key[1]], Kind.SESSION_EXPIRED)
            elif key[0] == _WAIT:
                self._leases.end_wait(key[1:])
            elif key[0] == _DELAY:
                self._leases.end_delay(key[1:])
            else:
                self._switch_ended(self._switches.expire(key[1]))

    def _due_ms(self, key: tuple[Any, ...]) -> int | None:
        if key[0] == _SESSION:
            session = self._sessions.table.get(key[1])
            return None if session is None else session.deadline_ms
        if key[0] == _SWITCH:
            return self._switches.due_ms(key[1])
        return self._leases.wait_due_ms(key[1:]) if key[0] == _WAIT else self._leases.delay_due_ms(key[1:])

    def _end_session(self, row: Session, kind: Kind) -> None:
        self._agenda.disarm((_SESSION, row.session))
        self._sessions.remove(row)
        self._context.emit(kind, row.tenant, row.session, session=row.session)
        self._leases.end_session(row, expired=kind is Kind.SESSION_EXPIRED)
        self._records.end_session(row.session)
        self._requests.end_session(row.session)

    # ---- commands that concern more than one table ---------------------------------------------------------------

    def _done(self) -> Done:
        return Done(revision=self._context.revision)

    def _set_limits(self, command: SetLimits) -> Done:
        self._context.set_limits(command.limits)
        return self._done()

    def _detach(self, command: DetachSession) -> Done:
        self._sessions.detach(command)
        self._end_what_is_due()  # with a grace of 0, this very session
        return self._done()

    def _close(self, command: CloseSession) -> Done | Refused:
        row = self._sessions.find(command.tenant, command.session)
        if isinstance(row, Refused):
            return row
        self._end_session(row, Kind.SESSION_CLOSED)
        return self._done()

    def _set_switch(self, command: SetSwitch) -> Result:
        return self._switches.set(command, runs_at_set=0)

    def _clear_switch(self, command: ClearSwitch) -> Done | Refused:
        ended = self._switches.clear(command)
        if isinstance(ended, Refused):
            return ended
        revision = self._context.revision
        self._switch_ended(ended)
        return Done(revision=revision)

    def _switch_ended(self, ended: Switch) -> None:
        if not ended.job:
            self._leases.unkilled(ended.tenant)

    # ---- reads (return records; never mutate) --------------------------------------------------------------------

    def session(self, session: str) -> Session | None:
        return self._sessions.table.get(session)

    def sessions(self, tenant: str, after: str, limit: int) -> list[Session]:
        """A page in order of session id."""
        return self._sessions.page(tenant, after, limit)

    def session_leases(self, session: str) -> list[tuple[Lease, int]]:
        """The leases a session holds, each with its token, ordered by name."""
        return self._leases.held_by(session)

    def lease(self, tenant: str, name: str) -> Lease | None:
        """None for a lease that nobody holds, waits for or is kept from."""
        return self._leases.view((tenant, name))

    def leases(self, tenant: str, prefix: str, after: str, limit: int) -> list[Lease]:
        """A page in order of name."""
        return self._leases.page(tenant, prefix, after, limit)

    def record(self, tenant: str, key: str) -> Record | None:
        return self._records.table.get((tenant, key))

    def records(self, tenant: str, prefix: str, after: str, limit: int, state: RecordState | None) -> list[Record]:
        """A page in order of key; of one state, or of all."""
        return self._records.page(tenant, prefix, after, limit, state)

    @property
    def kill_epoch(self) -> int:
        return self._switches.kill_epoch

    def killed_by(self, tenant: str, kill_epoch: int) -> str:
        """The switch because of which what was given out under this epoch (a token, a receipt) is not current; empty
        when it is current."""
        return self._switches.killed_by(tenant, kill_epoch)

    def switch(self, tenant: str, switch: str) -> Switch | None:
        """In force, or ended and still kept; of the fleet, with tenant ""."""
        return self._switches.find(tenant, switch)

    def switches(self, tenant: str | None, include_ended: bool, after: str, limit: int) -> list[Switch]:
        """A page, newest first; of a tenant, with "" of the fleet, with None of all."""
        return self._switches.page(tenant, include_ended, after, limit)

    def switches_concerning(self, tenant: str) -> list[Switch]:
        """In force: the fleet's, the tenant's, and those of its jobs."""
        return self._switches.concerning(tenant)

    def effective_switch(self, tenant: str, job: str) -> Switch | None:
        """The strongest in force over a job; with job "", over all of the tenant."""
        return self._switches.effective(tenant, job)

    def counts(self) -> dict[str, int]:
        """Sizes, for metrics."""
        return {
            "sessions": len(self._sessions.table),
            "connected_sessions": self._sessions.connected,
            "leases": len(self._leases.table),
            "holders": self._leases.holder_count,
            "waiters": len(self._leases.waiters),
            "records": len(self._records.table),
            "record_bytes": self._records.bytes,
            "requests": len(self._requests),
            "switches": self._switches.in_force_count,
            "events": self._context.history_length(),
        }

    # ---- the change stream ---------------------------------------------------------------------------------------

    def first_revision(self) -> int:
        """The first revision still held; every later one is. revision + 1 when nothing is held."""
        return self._context.first_revision()

    def events_from(self, revision: int, limit: int) -> list[Event]:
        """Events in order, beginning with ``revision``, which must not be before ``first_revision()``."""
        return self._context.events_from(revision, limit)


def _identity(key: RequestKey) -> RequestKey:
    """The part of a key that is the same in every repeat."""
    return replace(key, acknowledged=0)


def _has_payload(begun: RecordBegun) -> bool:
    return begun.outcome is BeginOutcome.COMPLETED or begun.outcome is BeginOutcome.FAILED


def _without_payload(result: Result) -> Result:
    if isinstance(result, RecordBegun) and _has_payload(result):
        return replace(result, result=b"", error="")
    return result
