"""Jobs and their revisions (see the rules at the top of machine.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import (
    AppliedJob,
    ApplyJobs,
    DeleteJob,
    JobChange,
    JobDefinition,
    JobRolledBack,
    JobsApplied,
    Reason,
    Refused,
    RollbackJob,
    Settlement,
    SetTzdata,
)
from sidecar.core.context import Context, full
from sidecar.core.events import Kind
from sidecar.core.ordering import Key, Sorted, SortedKeys
from sidecar.core.specification import JobSpec, Mode, Schedule, ScheduleKind

NOT_COMPUTED = -1
# The leader settles what is due within moments; who changes a schedule meanwhile tries again.
BEHIND_RETRY_DELAY_MS = 100
# What a revision counts for beside its texts and its payload.
REVISION_OVERHEAD_BYTES = 512


class Job(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Wall times are UTC milliseconds."""

    tenant: str
    name: str
    revision: int
    spec: JobSpec
    created_wall_ms: int
    changed_wall_ms: int
    changed_by: str
    # Every due time up to here is dealt with.
    settled_ms: int
    # 0: none any more; NOT_COMPUTED: the leader will say.
    next_due_ms: int = NOT_COMPUTED
    # Since when (wall time) it is in shadow mode or has a canary; 0: neither.
    flag_since_ms: int = 0
    # The kill epoch of the last kill of this job: older receipts are refused.
    kill_floor: int = 0
    # How many occurrences ended how, over its life.
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    missed: int = 0
    cancelled: int = 0
    unknown: int = 0


class JobRevision(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tenant: str
    name: str
    revision: int
    spec: JobSpec
    wall_ms: int
    actor: str
    reason: str = ""
    rolled_back_to: int = 0


class Jobs:
    """The table of jobs, their kept revisions, and which of them the leader must see to next."""

    def __init__(
        self,
        context: Context,
        carried: Callable[[], int],
        changed: Callable[[Job], None],
        *,
        jobs: Iterable[Job],
        revisions: Iterable[JobRevision],
        tzdata: str,
    ) -> None:
        """``carried``: what occurrences count for against job_bytes_max. ``changed`` is told each new specification."""
        self._context, self._carried, self._changed = context, carried, changed
        self.tzdata = tzdata
        self.table = {(row.tenant, row.name): row for row in jobs}
        # Oldest first.
        self.revisions: dict[Key, tuple[JobRevision, ...]] = {}
        for revision in revisions:
            key = (revision.tenant, revision.name)
            self.revisions[key] = (*self.revisions.get(key, ()), revision)
        # Derived.
        self.bytes = sum(_size(each.spec) for kept in self.revisions.values() for each in kept)
        self._order = SortedKeys(self.table)
        self._not_computed: dict[Key, None] = {}
        self._due: Sorted[tuple[int, str, str]] = Sorted(
            (row.next_due_ms, *key) for key, row in self.table.items() if row.next_due_ms > 0
        )
        for key, row in self.table.items():
            if row.next_due_ms == NOT_COMPUTED:
                self._not_computed[key] = None

    # ---- commands ------------------------------------------------------------------------------------------------

    def apply(self, command: ApplyJobs) -> JobsApplied | Refused:
        """Everything is looked at before anything is changed."""
        for definition in command.jobs:
            refusal = self._cannot_apply(definition)
            if refusal is not None:
                return refusal
        refusal = self._no_room(command.jobs)
        if refusal is not None:
            return refusal
        applied = tuple(self._apply(definition, command) for definition in command.jobs)
        return JobsApplied(jobs=applied, revision=self._context.revision)

    def _cannot_apply(self, definition: JobDefinition) -> Refused | None:
        job = self.table.get((definition.tenant, definition.name))
        if job is not None and job.spec == definition.spec:
            return None
        found, expected = 0 if job is None else job.revision, definition.expected_revision
        if expected not in (-1, found):
            there_is = "there is none" if job is None else f"it has revision {found}"
            wanted = f"revision {expected} was expected" if expected else "no such job was expected"
            return _mismatch(definition.name, expected, found, f"{wanted}, {there_is}")
        if job is None:
            return None
        return self._behind(job, definition.spec.schedule)

    def _apply(self, definition: JobDefinition, command: ApplyJobs) -> AppliedJob:
        tenant, name, spec = definition.tenant, definition.name, definition.spec
        job = self.table.get((tenant, name))
        if job is not None and job.spec == spec:
            return AppliedJob(tenant, name, JobChange.UNCHANGED, job.revision)
        if job is None:
            made, change = self._create(definition, command.actor), JobChange.CREATED
        else:
            made, change = self._change(job, spec, command.actor), JobChange.CHANGED
        self._keep_revision(made, command.actor, command.reason, cause=change.name.lower())
        return AppliedJob(tenant, name, change, made.revision)

    def _create(self, definition: JobDefinition, actor: str) -> Job:
        wall_ms = self._context.stamp.wall_ms
        job = Job(
            tenant=definition.tenant,
            name=definition.name,
            revision=1,
            spec=definition.spec,
            created_wall_ms=wall_ms,
            changed_wall_ms=wall_ms,
            changed_by=actor,
            settled_ms=max(0, wall_ms),  # no due time is before 1970, whatever the clock says
            flag_since_ms=wall_ms if _is_flagged(definition.spec) else 0,
        )
        self._order.add((job.tenant, job.name))
        self.put(job)
        return job

    def _change(self, job: Job, spec: JobSpec, actor: str) -> Job:
        """Another schedule counts from now on. With the same schedule, nothing changes about due times."""
        wall_ms = self._context.stamp.wall_ms
        rescheduled = spec.schedule != job.spec.schedule
        made = replace(
            job,
            revision=job.revision + 1,
            spec=spec,
            changed_wall_ms=wall_ms,
            changed_by=actor,
            settled_ms=max(job.settled_ms, wall_ms) if rescheduled else job.settled_ms,
            next_due_ms=NOT_COMPUTED if rescheduled else job.next_due_ms,
            flag_since_ms=(job.flag_since_ms or wall_ms) if _is_flagged(spec) else 0,
        )
        self.put(made)
        return made

    def rollback(self, command: RollbackJob) -> JobRolledBack | Refused:
        job = self.table.get((command.tenant, command.name))
        if job is None:
            return job_not_found(command.name)
        kept = self.revisions[(command.tenant, command.name)]
        if command.to_revision:
            target = next((each for each in kept if each.revision == command.to_revision), None)
        else:
            target = kept[-2] if len(kept) > 1 else None
        if target is None:
            return _revision_gone(command, kept)
        refusal = self._behind(job, target.spec.schedule)
        if refusal is not None:
            return refusal
        made = self._change(job, target.spec, command.actor)
        revision = self._keep_revision(
            made, command.actor, command.reason, cause="rolled_back", rolled_back_to=target.revision
        )
        return JobRolledBack(from_revision=job.revision, job_revision=made.revision, revision=revision)

    def deletable(self, command: DeleteJob) -> Job | Refused:
        job = self.table.get((command.tenant, command.name))
        if job is None:
            return job_not_found(command.name)
        return self._behind(job, None) or job

    def delete(self, job: Job) -> None:
        """Its occurrences have been seen to. Their history stays for its time."""
        key = (job.tenant, job.name)
        self._forget_due(key, job)
        self._order.remove(key)
        self.bytes -= sum(_size(each.spec) for each in self.revisions.pop(key))
        del self.table[key]

    def set_tzdata(self, command: SetTzdata) -> None:
        if command.version == self.tzdata:
            return
        self.tzdata = command.version
        for job in list(self.table.values()):
            if job.spec.schedule.kind is ScheduleKind.CRON:
                self.put(replace(job, next_due_ms=NOT_COMPUTED))

    # ---- due times -----------------------------------------------------------------------------------------------

    def settle(self, settlement: Settlement) -> Job | None:
        """The job, settled further; None when the settlement does not fit, and is passed over."""
        job = self.table.get((settlement.tenant, settlement.name))
        if job is None or (job.revision, job.settled_ms) != (settlement.revision, settlement.settled_ms):
            return None
        settled = replace(job, settled_ms=settlement.through_ms, next_due_ms=settlement.next_due_ms)
        self.put(settled)
        return settled

    def to_settle(self, wall_ms: int, limit: int) -> list[Job]:
        """Those whose next due time is not computed, then those that are due, the longest overdue first."""
        chosen = [self.table[key] for key in islice(self._not_computed, limit)]
        for due_ms, tenant, name in islice(self._due, limit - len(chosen)):
            if due_ms > wall_ms:
                break
            chosen.append(self.table[(tenant, name)])
        return chosen

    def next_due_ms(self) -> int | None:
        return next((due_ms for due_ms, _, _ in self._due), None)

    def _behind(self, job: Job, schedule: Schedule | None) -> Refused | None:
        """Refuses to replace the schedule by another, or by none, while due times of it are not settled. Also under a
        switch: what it skips is recorded, and some may have been due before it was set."""
        wall_ms = self._context.stamp.wall_ms
        unknown = job.next_due_ms == NOT_COMPUTED
        due = job.settled_ms < wall_ms if unknown else 0 < job.next_due_ms <= wall_ms
        if schedule == job.spec.schedule or not due:
            return None
        return Refused(
            reason=Reason.JOB_BEHIND,
            message=f"job {job.name}: due times of its present schedule are not dealt with yet",
            facts=(("job", job.name), ("settled_ms", str(job.settled_ms))),
            retry_delay_ms=BEHIND_RETRY_DELAY_MS,
        )

    # ---- reads ---------------------------------------------------------------------------------------------------

    def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Job]:
        return [self.table[key] for key in islice(self._order.after(tenant, prefix, after), limit)]

    # ---- the table -----------------------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """The job must exist, or be in the order already."""
        key = (job.tenant, job.name)
        before = self.table.get(key)
        if before is None or before.next_due_ms != job.next_due_ms:
            if before is not None:
                self._forget_due(key, before)
            if job.next_due_ms > 0:
                self._due.add((job.next_due_ms, *key))
            elif job.next_due_ms == NOT_COMPUTED:
                self._not_computed[key] = None
        self.table[key] = job

    def count(self, key: Key, outcome: str, count: int) -> None:
        """So many more occurrences have ended in this way; fewer, when a person has changed an outcome."""
        job = self.table.get(key)
        if job is not None:
            total: int = getattr(job, outcome)
            self.table[key] = replace(job, **{outcome: max(0, total + count)})

    def _forget_due(self, key: Key, job: Job) -> None:
        if job.next_due_ms > 0:
            self._due.remove((job.next_due_ms, *key))
        self._not_computed.pop(key, None)

    def _keep_revision(self, job: Job, actor: str, reason: str, *, cause: str, rolled_back_to: int = 0) -> int:
        key = (job.tenant, job.name)
        revision = JobRevision(
            tenant=job.tenant,
            name=job.name,
            revision=job.revision,
            spec=job.spec,
            wall_ms=job.changed_wall_ms,
            actor=actor,
            reason=reason,
            rolled_back_to=rolled_back_to,
        )
        kept = (*self.revisions.get(key, ()), revision)
        surplus = max(0, len(kept) - self._context.limits.job_revisions_max)
        self.bytes += _size(job.spec) - sum(_size(each.spec) for each in kept[:surplus])
        self.revisions[key] = kept[surplus:]
        event = self._context.emit(
            Kind.JOB_APPLIED, *key, sequence=job.revision, cause=cause, actor=actor, reason=reason
        )
        self._changed(job)
        return event

    def _no_room(self, definitions: Iterable[JobDefinition]) -> Refused | None:
        """Counts new revisions in full, although an old one may go for each."""
        limits = self._context.limits
        jobs, size = len(self.table), self.bytes + self._carried()
        growth = 0
        for definition in definitions:
            job = self.table.get((definition.tenant, definition.name))
            if job is None or job.spec != definition.spec:
                jobs += job is None
                growth += _size(definition.spec)
        if jobs > max(limits.jobs_max, len(self.table)):
            return full(Reason.JOBS_FULL, "no room for a job", "jobs_max", limits.jobs_max)
        if growth and size + growth > limits.job_bytes_max:
            return full(Reason.JOBS_FULL, "no room for a specification", "job_bytes_max", limits.job_bytes_max)
        return None


def job_not_found(name: str) -> Refused:
    return Refused(reason=Reason.JOB_NOT_FOUND, message=f"there is no job {name}", facts=(("job", name),))


def revision_mismatch(job: Job, expected: int) -> Refused:
    found = f"revision {expected} was expected, it has revision {job.revision}"
    return _mismatch(job.name, expected, job.revision, found)


def _mismatch(name: str, expected: int, found: int, why: str) -> Refused:
    facts = (("job", name), ("expected", str(expected)), ("revision", str(found)))
    return Refused(reason=Reason.JOB_REVISION_MISMATCH, message=f"job {name}: {why}", facts=facts)


def _revision_gone(command: RollbackJob, kept: tuple[JobRevision, ...]) -> Refused:
    what = f"revision {command.to_revision}" if command.to_revision else "the revision before the present one"
    revisions = ", ".join(str(each.revision) for each in kept)
    return Refused(
        reason=Reason.JOB_REVISION_GONE,
        message=f"job {command.name}: {what} is not kept; these are: {revisions}",
        facts=(("job", command.name), ("kept", revisions)),
    )


def _is_flagged(spec: JobSpec) -> bool:
    return spec.mode is Mode.SHADOW or spec.canary is not None


def _size(spec: JobSpec) -> int:
    """What a revision counts for, in bytes, against job_bytes_max. Never by its encoding, which grows with versions."""
    texts = [spec.owner, spec.runbook_url, spec.description, spec.schedule.cron, spec.schedule.zone]
    texts += [text for pair in spec.labels for text in pair]
    texts += [text for key, values in spec.selector for text in (key, *values)]
    return REVISION_OVERHEAD_BYTES + sum(map(len, texts)) + len(spec.payload)
