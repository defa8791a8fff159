"""Jobs, occurrences, runs and switches as messages, with what else an answer says of them, as they are on this node."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from tenure.v1 import job_pb2, session_pb2, switch_pb2

from sidecar.core.commands import AppliedJob, JobChange, JobDefinition, SwitchMode
from sidecar.core.jobs import Job, JobRevision
from sidecar.core.occurrences import ENDED, Occurrence, Step, idempotency_key
from sidecar.core.runs import Run
from sidecar.core.specification import JobSpec
from sidecar.core.switches import Switch
from sidecar.services import specs

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

RECENT_MAX = 5
# Occurrences looked at for the recent ones of a job: those that have not ended are passed over.
RECENT_SCAN_MAX = 20
RUNS_SHOWN_MAX, RUNS_LISTED_MAX = 1_000, 20
RUNS_COUNTED_MAX = 10_000
COUNT_STEP = 1_000
# Switches that an agent is told of; beyond the first number without actor and reason.
SWITCHES_TOLD_MAX, SWITCHES_TOLD_WHOLE_MAX = 5_000, 500


class Views:
    """All methods look at the machine now."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock, self._proposer = runtime.clock, runtime.proposer
        self._machine = runtime.proposer.machine

    def now_ms(self) -> int:
        """Cluster time."""
        return self._proposer.cluster_now_ms()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def job(self, row: Job, *, listed: bool = False) -> job_pb2.Job:
        """``listed``: one of many, without payloads."""
        machine = self._machine
        switch = machine.effective_switch(row.tenant, row.name)
        pending, running, workers, free_slots = machine.job_counts(row.tenant, row.name)
        runs = machine.runs(row.tenant, row.name, 0, RUNS_LISTED_MAX if listed else RUNS_SHOWN_MAX)
        wall_ms = self.wall_ms()
        return job_pb2.Job(
            tenant=row.tenant,
            name=row.name,
            revision=row.revision,
            spec=specs.spec_message(row.spec, with_payload=not listed),
            schedule_text=specs.text_of(row.spec),
            next_due_wall_ms=max(0, row.next_due_ms),
            settled_wall_ms=row.settled_ms,
            created_wall_ms=row.created_wall_ms,
            changed_wall_ms=row.changed_wall_ms,
            changed_by=row.changed_by,
            switch_id=switch.switch if switch else "",
            switch_mode=switch_pb2.SwitchMode.ValueType(switch.mode if switch else 0),
            pending=pending,
            running=running,
            workers=workers,
            free_slots=free_slots,
            flag_age_ms=max(0, wall_ms - row.flag_since_ms) if row.flag_since_ms else 0,
            runs=[self.run(run, listed=True) for run in runs],
            recent=[self.occurrence(recent, listed=True) for recent in self._recent(row)],
            warnings=specs.warnings_of(row.spec, wall_ms, row.flag_since_ms),
            missed_total=row.missed,
            succeeded_total=row.succeeded,
            failed_total=row.failed,
            skipped_total=row.skipped,
            cancelled_total=row.cancelled,
            unknown_total=row.unknown,
        )

    def _recent(self, row: Job) -> list[Occurrence]:
        newest = self._machine.occurrences(row.tenant, row.name, None, RECENT_SCAN_MAX)
        return [occurrence for occurrence in newest if occurrence.state in ENDED][:RECENT_MAX]

    def revision(self, row: JobRevision, *, with_payload: bool = True) -> job_pb2.JobRevision:
        return job_pb2.JobRevision(
            revision=row.revision,
            spec=specs.spec_message(row.spec, with_payload=with_payload),
            wall_ms=row.wall_ms,
            actor=row.actor,
            reason=row.reason,
            rolled_back_to=row.rolled_back_to,
        )

    def applied(self, definition: JobDefinition, done: AppliedJob) -> job_pb2.AppliedJob:
        """What became of a definition."""
        before = self._spec_before(done)
        job = self._machine.job(done.tenant, done.name)
        flag_since_ms = job.flag_since_ms if job is not None else 0
        return job_pb2.AppliedJob(
            tenant=done.tenant,
            name=done.name,
            change=job_pb2.JobChange.ValueType(done.change),
            revision=done.revision,
            before=specs.spec_message(before) if before is not None else None,
            after=specs.spec_message(definition.spec),
            warnings=specs.warnings_of(
                definition.spec, self.wall_ms(), flag_since_ms, applied=done.change is not JobChange.UNCHANGED
            ),
            schedule_text=specs.text_of(definition.spec),
        )

    def _spec_before(self, done: AppliedJob) -> JobSpec | None:
        if done.change is JobChange.CREATED:
            return None
        wanted = done.revision - (done.change is JobChange.CHANGED)
        return self._spec_of(done.tenant, done.name, wanted)

    def _spec_of(self, tenant: str, name: str, revision: int) -> JobSpec | None:
        job = self._machine.job(tenant, name)
        if job is not None and job.revision == revision:
            return job.spec
        kept = (row.spec for row in self._machine.job_revisions(tenant, name) if row.revision == revision)
        return next(kept, None)

    # ---- occurrences ------------------------------------------------------------------------------------------------

    def occurrence(self, row: Occurrence, *, listed: bool = False) -> job_pb2.Occurrence:
        """``listed``: one of many, without result and steps."""
        run = self._machine.run(row.run) if row.run else None
        return job_pb2.Occurrence(
            tenant=row.tenant,
            job=row.job,
            due_wall_ms=row.due_ms,
            sequence=row.sequence,
            origin=job_pb2.OccurrenceOrigin.ValueType(row.origin),
            state=job_pb2.OccurrenceState.ValueType(row.state),
            reason=row.reason,
            attempt=row.attempt,
            run_id=row.run,
            session_id=run.session if run is not None else "",
            error=row.error,
            result=b"" if listed else row.result,
            ended_wall_ms=row.ended_wall_ms,
            first_due_wall_ms=row.first_due_ms or row.due_ms,
            count=row.count,
            held=row.held,
            idempotency_key=idempotency_key(row.job, row.due_ms, row.sequence, row.origin),
            job_revision=row.job_revision,
            created_wall_ms=row.created_wall_ms,
            canary=row.canary,
            shadow=row.shadow,
            steps=() if listed else map(_step, row.steps),
        )

    # ---- runs -------------------------------------------------------------------------------------------------------

    def run(self, row: Run, *, listed: bool = False) -> job_pb2.Run:
        """``listed``: one of many, without payload and checkpoint. Times are as seen now."""
        now_ms = self.now_ms()
        session = self._machine.session(row.session)
        occurrence = self._machine.occurrence(row.tenant, row.job, row.due_ms, row.sequence)
        spec = self._spec_of(row.tenant, row.job, row.job_revision)
        payload = occurrence.payload if occurrence is not None else None
        if payload is None:
            payload = spec.payload if spec is not None else b""
        return job_pb2.Run(
            run_id=row.run,
            tenant=row.tenant,
            job=row.job,
            due_wall_ms=row.due_ms,
            sequence=row.sequence,
            origin=job_pb2.OccurrenceOrigin.ValueType(row.origin),
            session_id=row.session,
            token=row.token,
            attempt=row.attempt,
            kill_epoch=row.kill_epoch,
            job_revision=row.job_revision,
            payload=b"" if listed else payload,
            checkpoint=b"" if listed or occurrence is None else occurrence.checkpoint,
            idempotency_key=idempotency_key(row.job, row.due_ms, row.sequence, row.origin),
            started_ms=row.started_ms,
            deadline_ms=row.deadline_ms,
            remaining_ms=max(0, row.deadline_ms - now_ms),
            traceparent=traceparent(row),
            interrupted=bool(row.interrupt_cause),
            interrupt_cause=row.interrupt_cause,
            interrupt_reason=row.interrupt_reason,
            agent=session.agent if session is not None else "",
            host=session.host if session is not None else "",
            estimated_cost_micros=spec.estimated_cost_micros if spec is not None else 0,
            session_remaining_ms=max(0, session.deadline_ms - now_ms) if session is not None else 0,
        )

    # ---- switches ---------------------------------------------------------------------------------------------------

    def switches_changed(self, tenant: str) -> session_pb2.SwitchesChanged:
        """All that are in force over a tenant, the widest and strongest first; of very many, the first ones."""
        rows = sorted(self._machine.switches_concerning(tenant), key=lambda row: (bool(row.job), -row.mode, row.job))
        shown = []
        for index, row in enumerate(rows[:SWITCHES_TOLD_MAX]):
            switch = self.switch(row, counted=False)
            if index >= SWITCHES_TOLD_WHOLE_MAX:
                switch.reason = switch.actor = ""
            shown.append(switch)
        return session_pb2.SwitchesChanged(switches=shown, kill_epoch=self._machine.kill_epoch)

    def switch(self, row: Switch, *, counted: bool = True) -> switch_pb2.Switch:
        """``counted``: with the number of runs that are left."""
        scope = switch_pb2.SWITCH_SCOPE_JOB if row.job else switch_pb2.SWITCH_SCOPE_TENANT
        return switch_pb2.Switch(
            switch_id=row.switch,
            scope=scope if row.tenant else switch_pb2.SWITCH_SCOPE_FLEET,
            tenant=row.tenant,
            job=row.job,
            mode=switch_pb2.SwitchMode.ValueType(row.mode),
            actor=row.actor,
            reason=row.reason,
            set_wall_ms=row.set_wall_ms,
            # An end that is due and not applied yet is still to come.
            remaining_ms=max(1, row.expires_ms - self.now_ms()) if row.expires_ms and not row.ended_ms else 0,
            kill_epoch=row.kill_epoch,
            active=not row.ended_ms,
            end_cause=row.end_cause,
            end_actor=row.end_actor,
            end_reason=row.end_reason,
            ended_wall_ms=row.ended_wall_ms,
            runs_at_set=row.runs_at_set,
            runs_ended=row.runs_ended,
            runs_unacknowledged=row.runs_unacknowledged,
            effect_ms=row.effect_ms,
            suppressed=row.suppressed,
            runs_left=self._runs_left(row) if counted else 0,
        )

    def _runs_left(self, row: Switch) -> int:
        if row.mode is SwitchMode.KILL:
            return max(0, row.runs_at_set - row.runs_ended)
        if row.ended_ms:
            return 0
        if row.job:
            return self._machine.job_counts(row.tenant, row.job)[1]
        return self._runs_of(row.tenant) if row.tenant else self._machine.counts()["runs"]

    def _runs_of(self, tenant: str) -> int:
        count, after = 0, 0
        while count < RUNS_COUNTED_MAX:
            rows = self._machine.runs(tenant, "", after, COUNT_STEP)
            count += len(rows)
            if len(rows) < COUNT_STEP:
                break
            after = rows[-1].token
        return count


def traceparent(row: Run) -> str:
    """W3C trace context: the trace is the occurrence's, the span the run's, so that every attempt is in one trace."""
    named = f"{row.tenant}/{row.job}/{row.due_ms}/{row.sequence}".encode()
    trace = blake2b(named, digest_size=16).hexdigest()
    span = blake2b(f"{row.tenant}/{row.run}".encode(), digest_size=8).hexdigest()
    return f"00-{trace}-{span}-01"


def _step(row: Step) -> job_pb2.OccurrenceStep:
    return job_pb2.OccurrenceStep(
        wall_ms=row.wall_ms,
        what=row.what,
        attempt=row.attempt,
        run_id=row.run,
        session_id=row.session,
        agent=row.agent,
        host=row.host,
        cause=row.cause,
        actor=row.actor,
        reason=row.reason,
        cluster_ms=row.cluster_ms,
    )
