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
  2. Everything due at or before the stamp ends: a deadline AT the stamp has passed. In order of deadline; at one
     deadline sessions go first, then waits, lock delays, switches, runs, occurrences that have not started in time,
     and last those that become ready; then by name. Next go records whose retention is over, then history, then
     remembered requests. So a renewal that reaches the log behind its deadline is refused, whether or not a tick came
     before it.
  3. A request with a key that was answered before gets that answer again. Else it runs once, and is remembered.
  4. What may start is given to workers. So at rest nothing that may start has a worker with a free slot, but for what
     the start rate holds back.

Sessions
  * A session ends by closing, or when its deadline passes. A renewal, an attach: deadline = stamp + ttl. A detach cuts
    the deadline to the disconnect grace if its connection is the one that carries the session (0 ends it at once).
  * A detached session that is renewed by a unary call has its full ttl again: the sender is alive. A keepalive counts
    only while its stream carries the session; one that was under way when its stream broke says nothing. For the same
    reason an attach is refused when a later stream of the same client has attached before it.
  * With a session end, in this order: its places in line, its leases in order of token (each is granted to the next
    at once), its attempts at records in order of key, its runs in order of token, what it serves, and what was
    remembered of its stream.

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

Jobs
  * Due times are UTC wall time; everything else that lasts is cluster time. The core computes no due times: the leader
    says what is due (SettleDue), and the log carries it. A settlement counts only for the revision, and for the time
    through which the job is settled, that it was made for; any other is passed over. So each due time is dealt with
    once, whoever leads, however often it is proposed, wherever the clocks step.
  * A new job, and a new schedule, begin at the wall time of the apply: what is before is never due. A schedule that is
    behind (something is due and not settled) is not replaced, nor its job deleted, before it was settled: JOB_BEHIND,
    which is no answer and never remembered; under a switch, too: what is skipped is recorded. A change that leaves the
    schedule alone touches no due time.
  * ApplyJobs is whole or nothing. A specification equal to the present one changes nothing, whatever revision was
    expected. A rollback is a change to an old specification.
  * Deleting a job cancels what waits and interrupts what runs; the history stays for its time.

Occurrences
  * One of the schedule is named by its due time alone, one of a person also by the revision that created it. A name
    that is known is never created again.
  * PENDING -> RUNNING -> (RETRYING -> RUNNING)* -> one outcome, which only a person changes, and only from UNKNOWN.
    Every due time becomes one occurrence, or is counted in one range of missed ones.
  * Ready: at the due time plus the jitter, which is derived from the name; at once if that is past. It starts within
    the starting deadline, counted from the due time by cluster time, and once more by wall time when it starts
    (cluster time stands still while the whole cluster is down), or is missed. For catch-up and persons both count from
    the creation.
  * Overlap is judged at the creation, by what is unfinished of the job, catch-up included. Catch-up and backfill
    always wait in line. One of a job runs at a time (of ALLOW, so many), and one between two attempts keeps its place.
  * History: so many rows of a job as it says, and as long as it says now; the oldest end goes first. What is held for
    a person stays. When the table is full, the row that would be the first to go makes room; if there is none, due
    times are missed for want of room, and a person is refused. What a run ends with always has room.

Runs
  * A start is one step of one apply. It looks at the switches, the overlap, the start rate, the record of the
    occurrence's key (an effect that is made makes no run; one whose outcome nobody knows is held), the wall clock, and
    at the worker: its session lives, a stream carries it, it has a free slot, it fits the selector and the canary.
  * Who is first: priority, then ready, due time, tenant, job, sequence. To whom: the fewest runs for its slots, then
    who was given one the longest ago, then by session. Nobody waits for what another job's occurrence lacks.
  * A session that polls takes by the same rules, without slots. A shadow job meets a worker and ends there.
  * The start rate: in every second, on whatever boundary, at most so many starts, a tenth of it per 100 ms.
  * Only the holder, by token and session, speaks for a run; a run that has ended is not found. What is remembered of
    the answer makes a repeat harmless.
  * An interrupt asks; the run ends with the holder's word, or with the grace. With the word: cancelled, or after a
    timeout another attempt, else failed. Without: nobody knows whether the work has stopped, so the outcome is unknown,
    unless another attempt follows a timeout. A run that completes has completed, interrupted or not.
  * A lost holder (the session ended) leads to another attempt at once, while attempts are left and the job says so;
    else the outcome is unknown, held for a person if the job says that.

Switches
  * At most one is in force per scope; it takes the place of a weaker or equal one. The strongest of fleet, tenant and
    job counts, of equally strong ones that of the widest scope.
  * Nothing that one suppresses is delayed: what would have started has ended. So a clear has nothing to replay; only
    what was parked between two attempts goes on. A due time within the time of a switch is skipped also when it is
    settled after the clear.
  * A pause keeps everything from starting, also beside a drain of a wider scope; a drain lets retries go on; a kill
    interrupts runs and cancels retries.
  * A kill raises the epoch. What was given out under an older one than the floor of its scope is stale for ever: a
    token keeps its place, and is good for giving it back and for nothing else; taking the lease again gives a new one.
  * Under a kill of the fleet or the tenant nothing is granted and nothing begun; lines stay, and go on after the
    clear. Settling (release, complete without a fence, fail, renewal) goes on.

Requests
  * Unary keys are kept for the retention, stream keys until they are acknowledged or their session ends. When the
    table is full, a unary answer of some age makes room; else the request is refused before it runs.
  * A refusal is an answer like any other: the same request gets it again, a new try is a new request. Not remembered,
    because the state did not judge the request itself: refusals for its key, its deadline or its form, all that say
    that the state is full, and JOB_BEHIND.
  * The remembered result of a waiter becomes the grant, or the refusal that ended the wait. A cancelled one is
    forgotten. A repeat of a waiting request takes the place over under its own waiter name and with its own time.
  * A repeated begin that found an outcome reads it from the record again, so that results are stored once.

Events have contiguous revisions. The last ``events_max`` of them are part of the state. ``first_revision`` is the
oldest one held: every event since then can be read, on every node alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from sidecar.core import bounds
from sidecar.core.commands import (
    AcknowledgeInterrupt,
    AcquireLease,
    ApplyJobs,
    AttachSession,
    BackfillJob,
    BeginOutcome,
    BeginRecord,
    CancelWait,
    CheckpointRun,
    ClaimRun,
    ClearSwitch,
    CloseSession,
    Command,
    CompleteRecord,
    CompleteRun,
    DeleteJob,
    DetachSession,
    Done,
    FailRecord,
    FailRun,
    InterruptRun,
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
    ResolveOccurrence,
    ResolveRecord,
    Result,
    RollbackJob,
    ServeJobs,
    SessionAttached,
    SetLimits,
    SetSwitch,
    SettleDue,
    SetTzdata,
    Stamp,
    SwitchMode,
    Tick,
    TransferLease,
    TriggerJob,
)
from sidecar.core.context import Context
from sidecar.core.deadlines import Deadlines
from sidecar.core.dedup import Record, Records, RecordState
from sidecar.core.events import Event, Kind
from sidecar.core.governor import Governor
from sidecar.core.jobs import Job, JobRevision, Jobs, job_not_found
from sidecar.core.leases import Lease, Leases
from sidecar.core.occurrences import Occurrence, OccurrenceKey, Occurrences, OccurrenceState
from sidecar.core.requests import Requests, fingerprint_of
from sidecar.core.runs import Run, Runs, Worker
from sidecar.core.sessions import Session, Sessions
from sidecar.core.snapshot import Captured, SnapshotError, State, decode
from sidecar.core.switches import Switch, Switches

__all__ = ["Captured", "Machine", "SnapshotError"]

# What can come due, in this order at one deadline. A key of the agenda: the rank, then what it is.
_SESSION, _WAIT, _DELAY, _SWITCH, _RUN, _START, _READY = range(1, 8)

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
        Reason.JOBS_FULL,
        Reason.JOB_BEHIND,
        Reason.OCCURRENCES_FULL,
        Reason.SWITCHES_FULL,
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
                jobs=[],
                revisions=[],
                occurrences=[],
                runs=[],
                workers=[],
                started=[],
                tzdata="",
            )
        )

    def _load(self, state: State) -> None:
        self._context = context = Context(state.limits, state.stamp, state.revision, state.events)
        # Deadlines of everything but retention, by rank.
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
        self._load_jobs(state)
        self._handlers: dict[type, Callable[[Any], Result]] = {
            Tick: lambda command: self._done(),
            SetLimits: self._set_limits,
            OpenSession: self._sessions.open,
            RenewSessions: self._sessions.renew,
            AttachSession: self._attach,
            DetachSession: self._detach,
            CloseSession: self._close,
            CancelWait: self._leases.cancel,
            ReleaseLease: self._leases.release,
            TransferLease: self._leases.transfer,
            BeginRecord: self._records.begin,
            CompleteRecord: self._records.complete,
            FailRecord: self._records.fail,
            ResolveRecord: self._records.resolve,
            ApplyJobs: self._jobs.apply,
            DeleteJob: self._delete_job,
            RollbackJob: self._jobs.rollback,
            SettleDue: self._occurrences.settle,
            SetTzdata: self._set_tzdata,
            TriggerJob: self._occurrences.trigger,
            BackfillJob: self._occurrences.backfill,
            ServeJobs: self._runs.serve,
            ClaimRun: self._runs.claim,
            CheckpointRun: self._runs.checkpoint,
            CompleteRun: self._runs.complete,
            FailRun: self._runs.fail,
            AcknowledgeInterrupt: self._runs.acknowledge,
            InterruptRun: self._runs.interrupt_by_operator,
            ResolveOccurrence: self._occurrences.resolve,
            SetSwitch: self._set_switch,
            ClearSwitch: self._clear_switch,
        }

    def _load_jobs(self, state: State) -> None:
        context = self._context
        arm, disarm = self._agenda.arm, self._agenda.disarm
        self._governor = Governor(context, state.started)
        self._jobs = Jobs(
            context,
            carried=lambda: self._occurrences.bytes,
            changed=lambda job: self._occurrences.job_changed(job),  # noqa: PLW0108 - it comes below
            jobs=state.jobs,
            revisions=state.revisions,
            tzdata=state.tzdata,
        )
        self._occurrences = Occurrences(
            context,
            self._jobs,
            self._switches,
            arm_ready=lambda key, at_ms: arm((_READY, *key), at_ms),
            disarm_ready=lambda key: disarm((_READY, *key)),
            arm_start=lambda key, at_ms: arm((_START, *key), at_ms),
            disarm_start=lambda key: disarm((_START, *key)),
            interrupt=lambda run, cause: self._runs.interrupt(run, cause),  # noqa: PLW0108 - it comes below
            rows=state.occurrences,
        )
        self._runs = Runs(
            context,
            self._sessions,
            self._records,
            self._switches,
            self._jobs,
            self._occurrences,
            self._governor,
            next_token=self._next_token,
            arm=lambda token, at_ms: arm((_RUN, token), at_ms),
            disarm=lambda token: disarm((_RUN, token)),
            runs=state.runs,
            workers=state.workers,
        )
        if not self._governor.allowance():
            self._runs.assign()  # starts nothing: it finds out whether something waits for the next step

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
                jobs=list(self._jobs.table.values()),
                revisions=[revision for kept in self._jobs.revisions.values() for revision in kept],
                occurrences=list(self._occurrences.table.values()),
                runs=list(self._runs.table.values()),
                workers=list(self._runs.workers.values()),
                started=list(self._governor.started),
                tzdata=self.tzdata,
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
        """Ends what is due at ``stamp``, runs the command, unless it was answered before, and starts what may start."""
        self._context.move_to(stamp)
        self._end_what_is_due()
        self._records.expire()
        self._occurrences.expire()
        self._requests.expire()
        result = self._answer(request)
        self._end_what_is_due()  # with a grace of 0, what the request itself has asked to end
        self._runs.assign()
        self._occurrences.expire()  # a job may keep less than before, or what kept its history waiting is gone
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
        bundled = [self._records.expiries.next_ms(), self._occurrences.expiries.next_ms()]
        deadlines = [-(-at_ms // _RETENTION_TICK_MS) * _RETENTION_TICK_MS for at_ms in bundled if at_ms is not None]
        agenda_ms = self._agenda.next_ms()
        if agenda_ms is not None:
            deadlines.append(agenda_ms)
        if self._runs.held_back:
            deadlines.append(self._governor.next_ms())
        return min(deadlines, default=None)

    def _end_what_is_due(self) -> None:
        agenda, now_ms = self._agenda, self._context.now_ms
        while agenda.could_be_due(now_ms):
            key = agenda.pop(now_ms)
            if key is None:
                return
            self._end_one(key[0], key[1:])

    def _end_one(self, rank: int, key: tuple[Any, ...]) -> None:
        if rank == _SESSION:
            self._end_session(self._sessions.table[key[0]], Kind.SESSION_EXPIRED)
        elif rank == _WAIT:
            self._leases.end_wait((key[0], key[1], key[2], key[3]))
        elif rank == _DELAY:
            self._leases.end_delay((key[0], key[1]))
        elif rank == _SWITCH:
            self._switch_ended(self._switches.expire(key[0]))
        elif rank == _RUN:
            self._runs.time_up(key[0])
        else:
            self._end_wait_of(rank, (key[0], key[1], key[2], key[3]))

    def _end_wait_of(self, rank: int, key: OccurrenceKey) -> None:
        if rank == _READY:
            self._occurrences.become_ready(key)
        else:
            self._occurrences.miss_start(key, self._runs.waits_for(self._occurrences.table[key]))

    def _due_ms(self, key: tuple[Any, ...]) -> int | None:
        rank, name = key[0], key[1:]
        if rank == _SESSION:
            session = self._sessions.table.get(name[0])
            return None if session is None else session.deadline_ms
        if rank == _SWITCH:
            return self._switches.due_ms(name[0])
        if rank == _RUN:
            return self._runs.due_ms(name[0])
        by_name: dict[int, Callable[[Any], int | None]] = {
            _WAIT: self._leases.wait_due_ms,
            _DELAY: self._leases.delay_due_ms,
            _START: self._occurrences.start_due_ms,
            _READY: self._occurrences.ready_due_ms,
        }
        return by_name[rank](name)

    def _end_session(self, row: Session, kind: Kind) -> None:
        self._agenda.disarm((_SESSION, row.session))
        self._sessions.remove(row)
        self._context.emit(kind, row.tenant, row.session, session=row.session)
        self._leases.end_session(row, expired=kind is Kind.SESSION_EXPIRED)
        self._records.end_session(row.session)
        self._runs.end_session(row.session)
        self._requests.end_session(row.session)

    # ---- commands that concern more than one table ---------------------------------------------------------------

    def _done(self) -> Done:
        return Done(revision=self._context.revision)

    def _set_limits(self, command: SetLimits) -> Done:
        self._context.set_limits(command.limits)
        return self._done()

    def _next_token(self) -> int:
        """Runs and leases share one counter: a token of either grows for ever."""
        self._leases.last_token += 1
        return self._leases.last_token

    def _attach(self, command: AttachSession) -> SessionAttached | Refused:
        result = self._sessions.attach(command)
        self._runs.attached(command.session)
        return result

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

    def _set_tzdata(self, command: SetTzdata) -> Done:
        self._jobs.set_tzdata(command)
        return self._done()

    def _delete_job(self, command: DeleteJob) -> Done | Refused:
        job = self._jobs.deletable(command)
        if isinstance(job, Refused):
            return job
        revision = self._context.emit(
            Kind.JOB_DELETED,
            job.tenant,
            job.name,
            sequence=job.revision,
            actor=command.actor,
            reason=command.reason,
        )
        self._occurrences.end_all(job)
        self._jobs.delete(self._jobs.table[(job.tenant, job.name)])
        self._occurrences.job_gone((job.tenant, job.name))
        return Done(revision=revision)

    def _set_switch(self, command: SetSwitch) -> Result:
        """A job that does not exist is refused: a kill that was mistyped must not look as if it worked."""
        key = (command.tenant, command.job)
        if command.job and key not in self._jobs.table:
            return job_not_found(command.job)
        result = self._switches.set(command, runs_at_set=self._runs.in_scope(*key))
        if isinstance(result, Refused):
            return result
        row = self._switches.table[result.switch]
        kill = row.mode is SwitchMode.KILL
        if kill and row.job:
            self._jobs.put(replace(self._jobs.table[key], kill_floor=row.kill_epoch))
        for each in self._occurrences.open_lines(*key):
            self._occurrences.switched_off(each)
            if kill:
                self._runs.kill(each, row)
        return result

    def _clear_switch(self, command: ClearSwitch) -> Done | Refused:
        ended = self._switches.clear(command)
        if isinstance(ended, Refused):
            return ended
        revision = self._context.revision
        self._switch_ended(ended)
        return Done(revision=revision)

    def _switch_ended(self, ended: Switch) -> None:
        """What it suppressed is not replayed. Who waits in line for a lease, and retries, go on."""
        if not ended.job:
            self._leases.unkilled(ended.tenant)
        for key in self._occurrences.open_lines(ended.tenant, ended.job):
            self._occurrences.changed[key] = None

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

    def job(self, tenant: str, name: str) -> Job | None:
        return self._jobs.table.get((tenant, name))

    def jobs(self, tenant: str, prefix: str, after: str, limit: int) -> list[Job]:
        """A page in order of name."""
        return self._jobs.page(tenant, prefix, after, limit)

    def job_revisions(self, tenant: str, name: str) -> list[JobRevision]:
        """The kept ones, newest first."""
        return list(reversed(self._jobs.revisions.get((tenant, name), ())))

    def job_counts(self, tenant: str, name: str) -> tuple[int, int, int, int]:
        """Occurrences that wait, runs, connected workers that fit the job, and their free slots."""
        job, line = self._jobs.table.get((tenant, name)), self._occurrences.lines.get((tenant, name))
        running = self._runs.of_job(tenant, name)
        waiting = 0 if line is None else len(line.unfinished) - line.running
        return (waiting, running, *((0, 0) if job is None else self._runs.capacity(job)))

    @property
    def tzdata(self) -> str:
        """The version of the time-zone rules by which due times are computed; empty: none yet."""
        return self._jobs.tzdata

    def jobs_to_settle(self, wall_ms: int, limit: int) -> list[Job]:
        """For the leader: those whose next due time is not computed, then those that are due, most overdue first."""
        return self._jobs.to_settle(wall_ms, limit)

    def next_due_wall_ms(self) -> int | None:
        """The first of the next due times that are computed."""
        return self._jobs.next_due_ms()

    def occurrence(self, tenant: str, job: str, due_ms: int, sequence: int) -> Occurrence | None:
        return self._occurrences.table.get((tenant, job, due_ms, sequence))

    def occurrences_at(self, tenant: str, job: str, due_ms: int) -> list[Occurrence]:
        """Of one due time, the schedule's first; also the range of missed ones that covers it."""
        return self._occurrences.at(tenant, job, due_ms)

    def occurrences(self, tenant: str, job: str, before: tuple[int, int] | None, limit: int) -> list[Occurrence]:
        """A page, newest due time first; those before ``before``, a due time and a sequence."""
        return self._occurrences.page(tenant, job, before, limit)

    def jobs_with_history(self, tenant: str, prefix: str, after: str, limit: int) -> list[str]:
        """Names, in order, of the jobs of which there are occurrences; deleted ones too."""
        keys = islice(self._occurrences.line_order.after(tenant, prefix, after), limit)
        return [name for _, name in keys]

    def held(self, tenant: str, limit: int) -> list[Occurrence]:
        """Those that wait for a person, the longest first."""
        return self._occurrences.held(tenant, limit)

    def waits_for(self, row: Occurrence) -> str:
        """What keeps an occurrence from starting: time (its jitter or a wait), overlap, no worker, start rate, free
        slot, or a switch ("paused k12"). Empty for one that runs or has ended."""
        if row.state not in (OccurrenceState.PENDING, OccurrenceState.RETRYING):
            return ""
        if row.ready_ms > self._context.now_ms:
            return "time"
        return self._runs.waits_for(row) or ("start rate" if self._runs.held_back else "free slot")

    def run(self, run: str) -> Run | None:
        return self._runs.table.get(run)

    def runs(self, tenant: str, job: str, after: int, limit: int) -> list[Run]:
        """A page in order of token, of one job or, with "", of all; those after the token ``after``."""
        return self._runs.page(tenant, job, after, limit)

    def session_runs(self, session: str) -> list[Run]:
        """In order of token."""
        return self._runs.of_session(session)

    def worker(self, session: str) -> Worker | None:
        """What a session serves; None when it serves nothing."""
        return self._runs.workers.get(session)

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
            "jobs": len(self._jobs.table),
            "job_bytes": self._jobs.bytes + self._occurrences.bytes,
            "occurrences": len(self._occurrences.table),
            "pending": self._occurrences.pending,
            "runs": len(self._runs.table),
            "workers": len(self._runs.workers),
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
