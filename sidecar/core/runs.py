"""Runs: one attempt at an occurrence by one session; who works for what (see the rules at the top of machine.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from sidecar.core.assignment import Assignment, Free
from sidecar.core.commands import (
    RETRY_AFTER_MAX_MS,
    AcknowledgeInterrupt,
    CheckpointRun,
    ClaimRun,
    CompleteRun,
    Done,
    FailRun,
    InterruptRun,
    Reason,
    Refused,
    RunClaimed,
    RunFailed,
    ServeJobs,
)
from sidecar.core.context import Context
from sidecar.core.dedup import Records, RecordState
from sidecar.core.events import Kind
from sidecar.core.governor import Governor
from sidecar.core.jobs import Job, Jobs
from sidecar.core.occurrences import (
    STEP_TEXT_MAX,
    Occurrence,
    Occurrences,
    OccurrenceState,
    Origin,
    backoff_ms,
    idempotency_key,
)
from sidecar.core.ordering import Key
from sidecar.core.sessions import Session, Sessions
from sidecar.core.specification import Delivery, HolderLoss, Mode
from sidecar.core.switches import Switch, Switches

# An occurrence whose effect is just being made by somebody else is looked at again after this.
RECORD_BUSY_MS = 1_000
# Runs relative to slots are compared as whole numbers: different fractions of at most 1,000 slots stay different.
_LOAD_SCALE = 1_000_000_000
# Of the error of an attempt that another one follows; the last error is kept whole.
ERROR_TOLD_MAX = 200
NO_ACKNOWLEDGEMENT = "no acknowledgement"


class Worker(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a session serves. ``assigned`` orders the equally busy: who was given a run the longest ago is next."""

    session: str
    tenant: str
    jobs: tuple[str, ...]
    slots: int
    assigned: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The receipt. Its name is ``r`` and its fencing token."""

    run: str
    tenant: str
    job: str
    due_ms: int
    sequence: int
    origin: Origin
    session: str
    token: int
    attempt: int
    kill_epoch: int
    job_revision: int
    started_ms: int
    # Cluster milliseconds: the end of its time; once interrupted, the end of the grace.
    deadline_ms: int
    timeout_ms: int
    # Whether it came by a claim of a session that polls; it then takes no slot.
    claimed: bool = False
    # Why it was asked to stop: killed, timeout, operator, overlap or job_deleted; empty: it was not.
    interrupt_cause: str = ""
    interrupt_reason: str = ""
    interrupt_switch: str = ""
    interrupted_ms: int = 0


class Runs:
    """The tables of runs and workers, and what begins and ends a run."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        records: Records,
        switches: Switches,
        jobs: Jobs,
        occurrences: Occurrences,
        governor: Governor,
        next_token: Callable[[], int],
        arm: Callable[[int, int], None],
        disarm: Callable[[int], None],
        *,
        runs: Iterable[Run],
        workers: Iterable[Worker],
    ) -> None:
        """``arm`` and ``disarm`` put the deadline of a run, by its token, on the agenda, and take it off."""
        self._context, self._sessions, self._records, self._switches = context, sessions, records, switches
        self._jobs, self._occurrences, self._governor = jobs, occurrences, governor
        self._next_token, self._arm, self._disarm = next_token, arm, disarm
        self.table: dict[str, Run] = {}
        self.workers = {row.session: row for row in workers}
        # Derived: runs by token, which is their order; how many of a session's runs take a slot.
        self._of_session: dict[str, dict[int, str]] = {}
        self._of_job: dict[Key, dict[int, str]] = {}
        self._of_tenant: dict[str, dict[int, str]] = {}
        self._busy: dict[str, int] = {}
        self._assignment = Assignment(occurrences, jobs.table.get, sessions.table.get, self._free)
        # Whether something that may start waits for the start rate alone.
        self.held_back = False
        for run in runs:
            self._add(run)
        for worker in self.workers.values():
            self._assignment.join(worker.session, worker.tenant, worker.jobs)

    # ---- workers -------------------------------------------------------------------------------------------------

    def serve(self, command: ServeJobs) -> Done | Refused:
        session = self._sessions.find(command.tenant, command.session)
        if isinstance(session, Refused):
            return session
        before = self.workers.get(session.session)
        self.workers[session.session] = Worker(
            session=session.session,
            tenant=session.tenant,
            jobs=command.jobs,
            slots=command.slots,
            assigned=0 if before is None else before.assigned,
        )
        self._assignment.join(session.session, session.tenant, command.jobs)
        return Done(revision=self._context.revision)

    def attached(self, session: str) -> None:
        """A stream carries the session (again): runs can be pushed to it."""
        self._assignment.freed(session)

    def _free(self, session: str) -> Free | None:
        worker, row = self.workers.get(session), self._sessions.table.get(session)
        busy = self._busy.get(session, 0)
        if worker is None or row is None or not row.connection or busy >= worker.slots:
            return None
        return (busy * _LOAD_SCALE // worker.slots, worker.assigned, session)

    # ---- beginning -----------------------------------------------------------------------------------------------

    def assign(self) -> None:
        """Gives what is ready to workers, as far as there are free slots and the start rate allows it."""
        self._assignment.begin_round()
        self.held_back = False
        while True:
            pair = self._assignment.next()
            if pair is None:
                return
            row, session = pair
            job = self._jobs.table[(row.tenant, row.job)]
            if job.spec.mode is not Mode.SHADOW and not self._governor.allowance():
                self.held_back = True
                return
            self._try(row, job, session)

    def _try(self, row: Occurrence, job: Job, session: Session) -> None:
        if not self._still_wanted(row, job):
            return
        if job.spec.mode is Mode.SHADOW:
            self._pretend(row, session)
        else:
            self._start(row, job, session, claimed=False)
        worker = self.workers[session.session]
        self.workers[session.session] = replace(worker, assigned=self._context.revision)
        self._assignment.assigned(session.session)

    def claim(self, command: ClaimRun) -> RunClaimed | Refused:
        session = self._sessions.find(command.tenant, command.session)
        if isinstance(session, Refused):
            return session
        while True:
            row = self._assignment.poll(session, command.jobs)
            if row is None:
                return self._all_off(command) or RunClaimed(run="", token=0, revision=self._context.revision)
            job = self._jobs.table[(row.tenant, row.job)]
            shadow = job.spec.mode is Mode.SHADOW
            if not shadow and not self._governor.allowance():
                return RunClaimed(run="", token=0, revision=self._context.revision)
            if not self._still_wanted(row, job):
                continue
            if shadow:
                self._pretend(row, session)
                continue
            run = self._start(row, job, session, claimed=True)
            return RunClaimed(run=run.run, token=run.token, revision=self._context.revision)

    def _all_off(self, command: ClaimRun) -> Refused | None:
        """A prefix is off when its whole tenant is."""
        refusal: Refused | None = None
        for job in command.jobs:
            refusal = self._switches.refusal(command.tenant, "" if job.endswith("*") else job)
            if refusal is None:
                return None
        return refusal

    def _still_wanted(self, row: Occurrence, job: Job) -> bool:
        """The last look before a start: is it too late by the wall clock, and is its effect made, or being made?"""
        late_ms = self._context.stamp.wall_ms - row.due_ms
        first = row.state is OccurrenceState.PENDING
        if first and row.origin is Origin.SCHEDULE and late_ms > job.spec.starting_deadline_ms:
            self._occurrences.end(row, OccurrenceState.MISSED, "starting_deadline")
            return False
        if job.spec.mode is Mode.SHADOW:
            return True
        key = idempotency_key(row.job, row.due_ms, row.sequence, row.origin)
        record = self._records.table.get((row.tenant, key))
        if record is None or record.state is RecordState.RETRYABLE:
            return True
        if record.state is RecordState.IN_PROGRESS:
            self._occurrences.put(replace(row, ready_ms=self._context.now_ms + RECORD_BUSY_MS))
        elif record.state is RecordState.COMPLETED:
            self._occurrences.end(row, OccurrenceState.SUCCEEDED, "record_completed", result=record.result)
        elif record.state is RecordState.FAILED:
            self._occurrences.end(row, OccurrenceState.FAILED, "record_failed", error=record.error)
        else:
            self._occurrences.end(row, OccurrenceState.UNKNOWN, "record_unknown", held=True)
        return False

    def _pretend(self, row: Occurrence, session: Session) -> None:
        """Shadow mode: recorded as if the session had been given it."""
        row = self._occurrences.tell(
            row, "assigned", session=session.session, agent=session.agent, host=session.host, cause="shadow"
        )
        self._occurrences.end(replace(row, shadow=True), OccurrenceState.SKIPPED, "shadow", session=session.session)

    def _start(self, row: Occurrence, job: Job, session: Session, *, claimed: bool) -> Run:
        context, token = self._context, self._next_token()
        self._governor.note()
        run = Run(
            run=f"r{token}",
            tenant=row.tenant,
            job=row.job,
            due_ms=row.due_ms,
            sequence=row.sequence,
            origin=row.origin,
            session=session.session,
            token=token,
            attempt=row.attempt + 1,
            kill_epoch=self._switches.kill_epoch,
            job_revision=job.revision,
            started_ms=context.now_ms,
            deadline_ms=context.now_ms + job.spec.timeout_ms,
            timeout_ms=job.spec.timeout_ms,
            claimed=claimed,
        )
        row = replace(row, state=OccurrenceState.RUNNING, attempt=run.attempt, run=run.run, shadow=False)
        self._occurrences.put(
            self._occurrences.tell(
                row, "assigned", run=run.run, session=session.session, agent=session.agent, host=session.host
            )
        )
        self._add(run)
        self._emit(Kind.RUN_ASSIGNED, run)
        return run

    # ---- what a holder says --------------------------------------------------------------------------------------

    def checkpoint(self, command: CheckpointRun) -> Done | Refused:
        run = self._held_by(command)
        if isinstance(run, Refused):
            return run
        if run.interrupt_cause:
            message = f"run {run.run} was asked to stop ({run.interrupt_cause}): only its end is accepted"
            facts = (("cause", run.interrupt_cause), ("run", run.run))
            return Refused(reason=Reason.RUN_INTERRUPTED, message=message, facts=facts)
        row = self._occurrence(run)
        refusal = self._occurrences.no_room_for(len(command.state) - len(row.checkpoint))
        if refusal is not None:
            return refusal
        told = self._occurrences.tell(row, "checkpointed", run=run.run, session=run.session)
        self._occurrences.put(replace(told, checkpoint=command.state))
        return Done(revision=self._emit(Kind.RUN_CHECKPOINTED, run))

    def complete(self, command: CompleteRun) -> Done | Refused:
        """Also of an interrupted run: what happened, happened."""
        run = self._held_by(command)
        if isinstance(run, Refused):
            return run
        self._end(run, "succeeded", acknowledged=True)
        reason = f"after_interrupt:{run.interrupt_cause}" if run.interrupt_cause else ""
        revision = self._occurrences.end(
            self._occurrence(run),
            OccurrenceState.SUCCEEDED,
            reason,
            result=command.result,
            run=run.run,
            session=run.session,
        )
        return Done(revision=revision)

    def fail(self, command: FailRun) -> RunFailed | Refused:
        run = self._held_by(command)
        if isinstance(run, Refused):
            return run
        if run.interrupt_cause:
            self._end_interrupted(run, acknowledged=True, error=command.error)
            return self._failed(run)
        self._end(run, "failed", acknowledged=True)
        row = self._occurrence(run)
        why_not = self._why_no_retry(row, command.retryable)
        if why_not:
            self._occurrences.end(
                row, OccurrenceState.FAILED, why_not, error=command.error, run=run.run, session=run.session
            )
        else:
            job = self._jobs.table[(run.tenant, run.job)]
            wait_ms = max(backoff_ms(job.spec.retry, row), min(command.retry_after_ms, RETRY_AFTER_MAX_MS))
            self._retry(row, run, "failed", wait_ms, error=command.error)
        return self._failed(run)

    def _failed(self, run: Run) -> RunFailed:
        row = self._occurrences.table.get((run.tenant, run.job, run.due_ms, run.sequence))
        retrying = row is not None and row.state is OccurrenceState.RETRYING
        retry_in_ms = row.ready_ms - self._context.now_ms if row is not None and retrying else 0
        return RunFailed(retrying=retrying, retry_in_ms=retry_in_ms, revision=self._context.revision)

    def _why_no_retry(self, row: Occurrence, retryable: bool) -> str:
        """Of a failure; empty: there is another attempt."""
        job = self._jobs.table.get((row.tenant, row.job))
        if not retryable:
            return "not retryable"
        if job is None or not job.spec.retry.on_failure:
            return "no retries of failures"
        return self._why_no_attempt(row, job)

    def _why_no_attempt(self, row: Occurrence, job: Job) -> str:
        if job.spec.delivery is Delivery.AT_MOST_ONCE:
            return "at most once"
        return "attempts used up" if row.attempt >= job.spec.retry.attempts_max else ""

    def acknowledge(self, command: AcknowledgeInterrupt) -> Done | Refused:
        run = self._held_by(command)
        if isinstance(run, Refused):
            return run
        if not run.interrupt_cause:
            message = f"run {run.run} was not asked to stop: say how it ended"
            return Refused(reason=Reason.RUN_STALE, message=message, facts=(("run", run.run),))
        detail = command.detail[:STEP_TEXT_MAX]
        row = self._occurrences.tell(
            self._occurrence(run), "acknowledged", run=run.run, session=run.session, reason=detail
        )
        self._occurrences.put(row)
        self._emit(Kind.RUN_INTERRUPT_ACKNOWLEDGED, run, cause=run.interrupt_cause, reason=detail)
        self._end_interrupted(run, acknowledged=True)
        return Done(revision=self._context.revision)

    def _held_by(self, command: CheckpointRun | CompleteRun | FailRun | AcknowledgeInterrupt) -> Run | Refused:
        """The run, if the caller holds it."""
        run = self.table.get(command.run)
        if run is None or run.tenant != command.tenant:
            return run_not_found(command.run)
        if run.token == command.token and run.session == command.session:
            return run
        whose = "belongs to another session" if run.token == command.token else f"has token {run.token}"
        facts = (("run", run.run), ("token", str(run.token)), ("holder", run.session))
        return Refused(reason=Reason.RUN_STALE, message=f"run {run.run} {whose}", facts=facts)

    # ---- interrupts ----------------------------------------------------------------------------------------------

    def interrupt_by_operator(self, command: InterruptRun) -> Done | Refused:
        """One that was asked to stop before is not asked again."""
        run = self.table.get(command.run)
        if run is None or run.tenant != command.tenant:
            return run_not_found(command.run)
        self.interrupt(run.run, "operator", actor=command.actor, reason=command.reason)
        return Done(revision=self._context.revision)

    def interrupt(self, name: str, cause: str, *, actor: str = "", reason: str = "", switch: str = "") -> None:
        run = self.table[name]
        if run.interrupt_cause:
            return
        context = self._context
        job = self._jobs.table[(run.tenant, run.job)]
        asked = replace(
            run,
            interrupt_cause=cause,
            interrupt_reason=reason,
            interrupt_switch=switch,
            interrupted_ms=context.now_ms,
            deadline_ms=context.now_ms + job.spec.interrupt_grace_ms,
        )
        self.table[name] = asked
        self._disarm(run.token)
        self._arm(run.token, asked.deadline_ms)
        row = self._occurrence(run)
        self._occurrences.put(
            self._occurrences.tell(
                row, "interrupted", run=name, session=run.session, cause=cause, actor=actor, reason=reason
            )
        )
        self._emit(Kind.RUN_INTERRUPTED, asked, cause=cause, actor=actor, reason=reason)

    def kill(self, key: Key, switch: Switch) -> None:
        for name in list(self._of_job.get(key, {}).values()):
            self.interrupt(name, "killed", actor=switch.actor, reason=switch.reason, switch=switch.switch)

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def due_ms(self, token: int) -> int | None:
        run = self.table.get(f"r{token}")
        return None if run is None else run.deadline_ms

    def time_up(self, token: int) -> None:
        """The end of a run's time: it is asked to stop. The end of the grace: it counts as ended."""
        run = self.table[f"r{token}"]
        if run.interrupt_cause:
            self._end_interrupted(run, acknowledged=False)
        else:
            self.interrupt(run.run, "timeout", reason=f"after {run.timeout_ms} ms")

    def end_session(self, session: str) -> None:
        for name in list(self._of_session.get(session, {}).values()):
            run = self.table[name]
            if run.interrupt_cause:
                self._end_interrupted(run, acknowledged=False)
            else:
                self._lose(run)
        if self.workers.pop(session, None) is not None:
            self._assignment.leave(session)

    def _lose(self, run: Run) -> None:
        self._end(run, "lost", acknowledged=False)
        row, job = self._occurrence(run), self._jobs.table[(run.tenant, run.job)]
        policy = job.spec.on_holder_loss
        if policy is HolderLoss.RETRY:
            why_not = self._why_no_attempt(row, job)
            if not why_not:
                self._retry(row, run, "lost", 0)
                return
            reason = f"holder_lost: {why_not}"
        else:
            reason = "holder_lost"
        self._occurrences.end(
            row,
            OccurrenceState.UNKNOWN,
            reason,
            run=run.run,
            session=run.session,
            held=policy is HolderLoss.HOLD_FOR_PERSON,
        )

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _end_interrupted(self, run: Run, *, acknowledged: bool, error: str = "") -> None:
        """By the cause of the interrupt. Without an acknowledgement nobody knows whether the work has stopped."""
        cause = run.interrupt_cause
        timeout = cause == "timeout"
        silent = "" if acknowledged else f"{cause}: {NO_ACKNOWLEDGEMENT}"
        self._end(run, "timeout" if timeout else "interrupted", acknowledged=acknowledged, reason=silent or cause)
        row = self._occurrence(run)
        job = self._jobs.table.get((run.tenant, run.job))
        if timeout and job is not None and job.spec.retry.on_timeout and not self._why_no_attempt(row, job):
            self._retry(row, run, silent or cause, backoff_ms(job.spec.retry, row), error=error)
            return
        state = OccurrenceState.FAILED if timeout else OccurrenceState.CANCELLED
        self._occurrences.end(
            row,
            state if acknowledged else OccurrenceState.UNKNOWN,
            silent or cause,
            error=error,
            run=run.run,
            session=run.session,
        )

    def _retry(self, row: Occurrence, run: Run, cause: str, wait_ms: int, *, error: str = "") -> None:
        told = self._occurrences.tell(
            row, "run_ended", run=run.run, session=run.session, cause=cause, reason=error[:ERROR_TOLD_MAX]
        )
        self._occurrences.retry(told, wait_ms, error=error)

    def _end(self, run: Run, cause: str, *, acknowledged: bool, reason: str = "") -> None:
        """The run is over; its occurrence is the caller's to see to."""
        self._remove(run)
        self._emit(Kind.RUN_ENDED, run, cause=cause, reason=reason)
        if run.interrupt_switch:
            self._switches.run_ended(run.interrupt_switch, acknowledged=acknowledged)

    def _occurrence(self, run: Run) -> Occurrence:
        return self._occurrences.table[(run.tenant, run.job, run.due_ms, run.sequence)]

    # ---- reads ---------------------------------------------------------------------------------------------------

    def page(self, tenant: str, job: str, after: int, limit: int) -> list[Run]:
        """In order of token."""
        tokens = self._of_job.get((tenant, job), {}) if job else self._of_tenant.get(tenant, {})
        return [self.table[name] for name in islice((name for token, name in tokens.items() if token > after), limit)]

    def of_session(self, session: str) -> list[Run]:
        return [self.table[name] for name in self._of_session.get(session, {}).values()]

    def of_job(self, tenant: str, job: str) -> int:
        return len(self._of_job.get((tenant, job), {}))

    def in_scope(self, tenant: str, job: str) -> int:
        """How many there are in the scope of a switch."""
        if job:
            return self.of_job(tenant, job)
        return len(self._of_tenant.get(tenant, {}) if tenant else self.table)

    def capacity(self, job: Job, canary: bool | None = None) -> tuple[int, int]:
        """Connected workers that fit the job (its canaries, or the others), and their free slots."""
        workers = [
            self.workers[session]
            for session in self._assignment.workers_of(job, canary)
            if self._sessions.table[session].connection and self.workers[session].slots
        ]
        return len(workers), sum(max(0, row.slots - self._busy.get(row.session, 0)) for row in workers)

    def waits_for(self, row: Occurrence) -> str:
        """What keeps an occurrence that is ready from starting; empty: a free slot, or the start rate."""
        job = self._jobs.table.get((row.tenant, row.job))
        line = self._occurrences.lines.get((row.tenant, row.job))
        if job is None or line is None:
            return ""
        retrying = row.state is OccurrenceState.RETRYING
        switch = self._switches.keeps_from_starting(row.tenant, row.job, retrying=retrying)
        if switch is not None:
            return switch.why
        if not self._occurrences.may_start(line, retrying):
            return "overlap"
        return "" if self.capacity(job, row.canary)[0] else "no worker"

    # ---- the table -----------------------------------------------------------------------------------------------

    def _add(self, run: Run) -> None:
        self.table[run.run] = run
        self._of_session.setdefault(run.session, {})[run.token] = run.run
        self._of_job.setdefault((run.tenant, run.job), {})[run.token] = run.run
        self._of_tenant.setdefault(run.tenant, {})[run.token] = run.run
        if not run.claimed:
            self._busy[run.session] = self._busy.get(run.session, 0) + 1
        self._arm(run.token, run.deadline_ms)

    def _remove(self, run: Run) -> None:
        del self.table[run.run]
        _drop(self._of_session, run.session, run.token)
        _drop(self._of_job, (run.tenant, run.job), run.token)
        _drop(self._of_tenant, run.tenant, run.token)
        self._disarm(run.token)
        if not run.claimed:
            self._busy[run.session] -= 1
            if not self._busy[run.session]:
                del self._busy[run.session]
            self._assignment.freed(run.session)

    def _emit(self, kind: Kind, run: Run, *, cause: str = "", actor: str = "", reason: str = "") -> int:
        return self._context.emit(
            kind,
            run.tenant,
            run.job,
            session=run.session,
            token=run.token,
            attempt=run.attempt,
            cause=cause,
            actor=actor,
            reason=reason,
            due_ms=run.due_ms,
            sequence=run.sequence,
            run=run.run,
        )


AnyKey = TypeVar("AnyKey")


def _drop(table: dict[AnyKey, dict[int, str]], key: AnyKey, token: int) -> None:
    found = table[key]
    del found[token]
    if not found:
        del table[key]


def run_not_found(run: str) -> Refused:
    message = f"there is no run {run}: it has ended, or never was"
    return Refused(reason=Reason.RUN_NOT_FOUND, message=message, facts=(("run", run),))
