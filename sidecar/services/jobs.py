"""The operations on jobs and their occurrences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from tenure.v1 import job_pb2, lease_pb2

from sidecar.core import commands
from sidecar.core.commands import AppliedJob, JobChange, Reason, Refused
from sidecar.core.jobs import Job
from sidecar.core.occurrences import Occurrence, OccurrenceState
from sidecar.core.specification import JobSpec
from sidecar.scheduling import schedules, zones
from sidecar.services import specs, words
from sidecar.services import translate_jobs as translate
from sidecar.services import validation as check
from sidecar.services.base import Resource, job_gone
from sidecar.services.calls import Answer, Caller
from sidecar.services.errors import ApiError, Problem, problem, refused
from sidecar.services.explain import Explainer
from sidecar.services.notices import Notices
from sidecar.services.pages import Page
from sidecar.services.reads import Reads
from sidecar.services.views import Views
from sidecar.services.waiting import Running

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

PREVIEW_DEFAULT, PREVIEW_MAX = 10, 1_000
# Occurrences looked at for one page of a list, and rows fetched at a time.
SCAN_MAX, SCAN_STEP = 5_000, 500
# Of the specifications in one answer: beyond the first they are shown without payloads, beyond the second without what
# was before the change.
PAYLOADS_BYTES_MAX, BEFORE_BYTES_MAX = 1 << 20, 2 << 20
_OCCURRENCE_FORM = r"-?\d{1,18}/\d{1,18}/.*"
_UNFINISHED = {
    OccurrenceState.RUNNING: "running",
    OccurrenceState.PENDING: "pending",
    OccurrenceState.RETRYING: "pending",
}


class Jobs(Resource):
    def __init__(self, runtime: Runtime, notices: Notices, reads: Reads, views: Views) -> None:
        super().__init__(runtime, notices, reads)
        self._views = views
        self._explainer = Explainer(runtime)

    # ---- definitions ------------------------------------------------------------------------------------------------

    def apply_jobs(self, request: job_pb2.ApplyJobsRequest, caller: Caller, answer: Answer) -> Running | None:
        command = translate.apply_jobs(request, caller)

        def applied(result: commands.JobsApplied) -> Message:
            return self._applied(command, result.jobs, result.revision)

        if request.dry_run:
            self._read_then(caller, answer, lambda _: answer(self._dry_run(command)))
            return None
        key = caller.key(caller.tenant or command.jobs[0].tenant, request.request_id)
        return self._propose_patiently(command, caller, key, answer, commands.JobsApplied, applied)

    def _dry_run(self, command: commands.ApplyJobs) -> Message:
        """What would change, judged as the state machine does."""
        changes, created = [], 0
        for definition in command.jobs:
            row = self._machine.job(definition.tenant, definition.name)
            revision = row.revision if row is not None else 0
            if row is not None and row.spec == definition.spec:
                changes.append(AppliedJob(definition.tenant, definition.name, JobChange.UNCHANGED, revision))
                continue
            if definition.expected_revision not in (-1, revision):
                raise _mismatch(definition, revision)
            created += row is None
            change = JobChange.CREATED if row is None else JobChange.CHANGED
            changes.append(AppliedJob(definition.tenant, definition.name, change, revision + 1))
        limit = self._machine.limits.jobs_max
        if self._machine.counts()["jobs"] + created > limit:
            message = f"{created} jobs more are over the limit jobs_max of {limit}"
            raise refused(Refused(reason=Reason.JOBS_FULL, message=message, facts=(("limit_value", str(limit)),)))
        return self._applied(command, changes, self._machine.revision)

    def _applied(
        self, command: commands.ApplyJobs, done: tuple[AppliedJob, ...] | list[AppliedJob], revision: int
    ) -> Message:
        response = job_pb2.ApplyJobsResponse(revision=revision)
        size = 0
        for definition, one in zip(command.jobs, done, strict=True):
            shown = self._views.applied(definition, one)
            if size > BEFORE_BYTES_MAX:
                shown.ClearField("before")
            for side in ("before", "after"):
                if size > PAYLOADS_BYTES_MAX and shown.HasField(side):
                    getattr(shown, side).ClearField("payload")
            size += shown.ByteSize()
            response.jobs.append(shown)
        return response

    def delete_job(self, request: job_pb2.DeleteJobRequest, caller: Caller, answer: Answer) -> Running:
        tenant = caller.tenant_of(request.tenant)
        command = translate.delete_job(request, tenant)

        def deleted(result: commands.Done) -> Message:
            return job_pb2.DeleteJobResponse(revision=result.revision)

        key = caller.key(tenant, request.request_id)
        return self._propose_patiently(command, caller, key, answer, commands.Done, deleted)

    def rollback_job(self, request: job_pb2.RollbackJobRequest, caller: Caller, answer: Answer) -> Running:
        tenant = caller.tenant_of(request.tenant)
        command = translate.rollback_job(request, tenant)

        def rolled_back(result: commands.JobRolledBack) -> Message:
            job = self._views.job(self._job(tenant, command.name))
            return job_pb2.RollbackJobResponse(job=job, from_revision=result.from_revision, revision=result.revision)

        key = caller.key(tenant, request.request_id)
        return self._propose_patiently(command, caller, key, answer, commands.JobRolledBack, rolled_back)

    def get_job(self, request: job_pb2.GetJobRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        name = check.job_name(request.name)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            return job_pb2.GetJobResponse(job=self._views.job(self._job(tenant, name)), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_jobs(self, request: job_pb2.ListJobsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        prefix = check.prefix(request.prefix, commands.NAME_BYTES_MAX)
        page = Page(("jobs", tenant, prefix), request.page_size, request.page_token)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            rows = self._machine.jobs(tenant, prefix, page.after, page.limit)
            items = page.fill(rows, lambda row: row.name, lambda row: self._views.job(row, listed=True))
            return job_pb2.ListJobsResponse(jobs=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_job_revisions(self, request: job_pb2.ListJobRevisionsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        name = check.job_name(request.name)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            self._job(tenant, name)
            response = job_pb2.ListJobRevisionsResponse(read=info)
            size = 0
            for row in self._machine.job_revisions(tenant, name):
                shown = self._views.revision(row, with_payload=size <= PAYLOADS_BYTES_MAX)
                size += shown.ByteSize()
                response.revisions.append(shown)
            return response

        self._read(request.consistency, caller, answer, produce)

    def _job(self, tenant: str, name: str) -> Job:
        row = self._machine.job(tenant, name)
        if row is None:
            raise job_gone(tenant, name)
        return row

    # ---- due times --------------------------------------------------------------------------------------------------

    def preview_job(self, request: job_pb2.PreviewJobRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        count = check.number(request.count, "count", 0, PREVIEW_MAX) or PREVIEW_DEFAULT
        from_ms = translate.wall_ms(request.from_wall_ms, "from_wall_ms") or self._views.wall_ms()
        translate.exactly_one(bool(request.name), request.HasField("schedule"), "name and schedule")
        if request.HasField("schedule"):
            schedule = specs.schedule_of(request.schedule, "schedule")
            text = specs.schedule_text(schedule)
            answer(_previewed(schedules.compile_schedule(schedule), text, from_ms, count))
            return
        name = check.job_name(request.name)

        def proceed(_: Caller) -> None:
            row = self._job(tenant, name)
            # What is settled is not due any more, also if a clock that stood ahead has settled it.
            start_ms = from_ms if request.from_wall_ms else max(from_ms, row.settled_ms + 1)
            answer(_previewed(_compiled(row.spec), specs.text_of(row.spec), start_ms, count))

        self._read_then(caller, answer, proceed)

    def trigger_job(self, request: job_pb2.TriggerJobRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.trigger_job(request, tenant)

        def created(result: commands.OccurrenceCreated) -> Message:
            named = (tenant, command.name, result.due_ms, result.sequence)
            return job_pb2.TriggerJobResponse(occurrence=self._shown(*named), revision=result.revision)

        key = caller.key(tenant, request.request_id)
        self._propose(command, caller, key, answer, commands.OccurrenceCreated, created)

    def backfill_job(self, request: job_pb2.BackfillJobRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        name = check.job_name(request.name)
        actor, reason = translate.actor(request.actor), translate.reason(request.reason)
        from_ms, to_ms = self._range(request)
        key = caller.key(tenant, request.request_id)

        def proceed(left: Caller) -> None:
            row = self._job(tenant, name)
            due = _due_in(row, from_ms, to_ms)
            if request.dry_run or not due:
                answer(self._backfill_dry_run(row, due))
                return
            command = commands.BackfillJob(
                tenant=tenant, name=name, revision=row.revision, due_ms=tuple(due), actor=actor, reason=reason
            )
            self._propose(command, left, key, answer, commands.Backfilled, _backfilled)

        self._read_then(caller, answer, proceed)

    def _range(self, request: job_pb2.BackfillJobRequest) -> tuple[int, int]:
        wall_ms = self._views.wall_ms()
        from_ms = translate.wall_ms(request.from_wall_ms, "from_wall_ms")
        to_ms = translate.wall_ms(request.to_wall_ms, "to_wall_ms")
        if to_ms > wall_ms:
            raise _out_of_range("to_wall_ms", to_ms, f"it is in the future; allowed: at most now, {words.utc(wall_ms)}")
        if from_ms >= to_ms:
            raise _out_of_range("from_wall_ms", from_ms, f"allowed: before to_wall_ms, {words.utc(to_ms)}")
        return from_ms, to_ms

    def _backfill_dry_run(self, row: Job, due: list[int]) -> Message:
        response = job_pb2.BackfillJobResponse(revision=self._machine.revision)
        for due_ms in due:
            response.due.add(due_wall_ms=due_ms, what=self._in_the_way(row, due_ms) or "created")
        return response

    def _in_the_way(self, row: Job, due_ms: int) -> str:
        states = {found.state for found in self._machine.occurrences_at(row.tenant, row.name, due_ms)}
        if OccurrenceState.SUCCEEDED in states:
            return "succeeded"
        return next((word for state, word in _UNFINISHED.items() if state in states), "")

    # ---- occurrences ------------------------------------------------------------------------------------------------

    def list_occurrences(self, request: job_pb2.ListOccurrencesRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        job = check.job_name(request.job, "job") if request.job else ""
        state = translate.occurrence_state(request.state)
        held = bool(request.held_only)
        scope = ("occurrences", tenant, job, str(request.state), str(held))
        page = Page(scope, request.page_size, request.page_token, _OCCURRENCE_FORM)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            items = self._occurrences(tenant, job, state, page, held=held)
            return job_pb2.ListOccurrencesResponse(occurrences=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)

    def _occurrences(
        self, tenant: str, job: str, state: OccurrenceState | None, page: Page, *, held: bool
    ) -> list[job_pb2.Occurrence]:
        """Looks at no more than SCAN_MAX of them; a page may then be short, and still have a next one."""
        items: list[job_pb2.Occurrence] = []
        rows = self._held(tenant, job, page.after) if held else self._walk(tenant, job, page.after)
        for scanned, row in enumerate(rows):
            if scanned >= SCAN_MAX:
                return items
            named = f"{row.due_ms}/{row.sequence}/{row.job}"
            if state is not None and row.state is not state:
                page.skip(named)
                continue
            item = self._views.occurrence(row, listed=True)
            if not page.take(named, item):
                return items
            items.append(item)
        page.finish()
        return items

    def _walk(self, tenant: str, job: str, after: str) -> Iterator[Occurrence]:
        """Of one job, or of all in order of name; of each, newest first; those after the one that is named."""
        reached, before = _reached(after)
        names = iter([job]) if job else self._names(tenant, reached)
        for name in names:
            position = before if name == reached else None
            while True:
                rows = self._machine.occurrences(tenant, name, position, SCAN_STEP)
                yield from rows
                if len(rows) < SCAN_STEP:
                    break
                position = (rows[-1].due_ms, rows[-1].sequence)

    def _names(self, tenant: str, first: str) -> Iterator[str]:
        if first:
            yield first
        after = first
        while names := self._machine.jobs_with_history(tenant, "", after, SCAN_STEP):
            yield from names
            after = names[-1]

    def _held(self, tenant: str, job: str, after: str) -> Iterator[Occurrence]:
        """In the same order."""
        reached, before = _reached(after)
        place = (reached, -before[0], -before[1]) if before is not None else None
        rows = self._machine.held(tenant, SCAN_MAX)
        for row in sorted(rows, key=lambda row: (row.job, -row.due_ms, -row.sequence)):
            if (not job or row.job == job) and (place is None or (row.job, -row.due_ms, -row.sequence) > place):
                yield row

    def explain_occurrence(self, request: job_pb2.ExplainOccurrenceRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        job = check.job_name(request.job, "job")
        due_ms = translate.wall_ms(request.due_wall_ms, "due_wall_ms")

        def produce(info: lease_pb2.ReadInfo) -> Message:
            return self._explained(tenant, job, due_ms, info)

        self._read(request.consistency, caller, answer, produce)

    def _explained(self, tenant: str, name: str, due_ms: int, info: lease_pb2.ReadInfo) -> Message:
        job = self._machine.job(tenant, name)
        if due_ms:
            rows = self._machine.occurrences_at(tenant, name, due_ms)
        else:
            rows = self._machine.occurrences(tenant, name, None, 1)
        if job is None and not rows:
            raise job_gone(tenant, name)
        response = job_pb2.ExplainOccurrenceResponse(
            occurrences=[self._views.occurrence(row) for row in sorted(rows, key=lambda row: row.sequence)],
            job=self._views.job(job) if job is not None else None,
            read=info,
        )
        if rows:
            first = next((row for row in rows if row.state in _UNFINISHED), rows[0])
            response.explanation = self._explainer.one(job, first)
        elif job is not None:
            response.explanation = self._explainer.nothing(job, due_ms)
        if job is not None:
            at_ms = due_ms or (rows[0].due_ms if rows else self._views.wall_ms())
            response.previous_due_wall_ms, response.next_due_wall_ms = _beside(job, at_ms)
        return response

    def resolve_occurrence(self, request: job_pb2.ResolveOccurrenceRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.resolve_occurrence(request, tenant)

        def resolved(result: commands.Done) -> Message:
            named = (tenant, command.job, command.due_ms, command.sequence)
            return job_pb2.ResolveOccurrenceResponse(occurrence=self._shown(*named), revision=result.revision)

        key = caller.key(tenant, request.request_id)
        self._propose(command, caller, key, answer, commands.Done, resolved)

    def _shown(self, tenant: str, job: str, due_ms: int, sequence: int) -> job_pb2.Occurrence:
        """As it is now; a repeat, long after, may find its history over."""
        row = self._machine.occurrence(tenant, job, due_ms, sequence)
        if row is None:
            return job_pb2.Occurrence(tenant=tenant, job=job, due_wall_ms=due_ms, sequence=sequence)
        return self._views.occurrence(row)


def _mismatch(definition: commands.JobDefinition, revision: int) -> ApiError:
    found = f"is at revision {revision}" if revision else "does not exist"
    message = f"job {definition.name} {found}, expected was {definition.expected_revision}"
    facts = (
        ("job", definition.name),
        ("expected", str(definition.expected_revision)),
        ("revision", str(revision)),
    )
    return refused(Refused(reason=Reason.JOB_REVISION_MISMATCH, message=message, facts=facts))


def _out_of_range(field: str, at_ms: int, why: str) -> ApiError:
    message = f"{field} is {at_ms} ({words.utc(at_ms)}); {why}"
    return problem(Problem.VALUE_OUT_OF_RANGE, message, field=field, value=at_ms)


def _compiled(spec: JobSpec) -> schedules.Compiled:
    try:
        return schedules.compile_schedule(spec.schedule)
    except schedules.ScheduleError as error:  # accepted under other zone rules than those of this node
        raise problem(Problem.FIELD_INVALID, f"this node cannot compute the schedule: {error}", field="name") from None


def _previewed(compiled: schedules.Compiled, text: str, from_ms: int, count: int) -> Message:
    response = job_pb2.PreviewJobResponse(schedule_text=text, tzdata_version=zones.tzdata_version())
    at_ms = from_ms - 1
    while len(response.due) < count:
        found = compiled.next_after(at_ms)
        if found is None:
            break
        response.due.add(
            due_wall_ms=found,
            utc=words.utc(found),
            local=zones.local(found, compiled.spec.zone),
            clock_change=schedules.clock_change_marks(compiled, found),
        )
        at_ms = found
    return response


def _due_in(row: Job, from_ms: int, to_ms: int) -> list[int]:
    """Due times with from <= t < to, by the present schedule."""
    compiled = _compiled(row.spec)
    count, limit = compiled.count(from_ms - 1, to_ms - 1), commands.BACKFILL_MAX
    if count > limit:
        message = f"{words.utc(from_ms)} to {words.utc(to_ms)} has {count} due times; allowed: at most {limit}"
        raise problem(Problem.VALUE_OUT_OF_RANGE, message, field="to_wall_ms", value=to_ms, count=count, limit=limit)
    return compiled.due(from_ms - 1, to_ms - 1, limit)


def _backfilled(result: commands.Backfilled) -> Message:
    due = [job_pb2.BackfilledDueTime(due_wall_ms=due_ms, what=why or "created") for due_ms, _, why in result.due]
    return job_pb2.BackfillJobResponse(due=due, revision=result.revision)


def _beside(job: Job, at_ms: int) -> tuple[int, int]:
    try:
        compiled = schedules.compile_schedule(job.spec.schedule)
    except schedules.ScheduleError:
        return 0, 0
    return compiled.previous_at_or_before(at_ms - 1) or 0, compiled.next_after(at_ms) or 0


def _reached(after: str) -> tuple[str, tuple[int, int] | None]:
    """The job and the place in it that a page token names."""
    if not after:
        return "", None
    due_ms, sequence, job = after.split("/", 2)
    return job, (int(due_ms), int(sequence))
