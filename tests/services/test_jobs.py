"""JobService for operators: definitions, due times, occurrences and their story."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tenure.v1 import job_pb2, lease_pb2

from sidecar.scheduling.zones import tzdata_version
from sidecar.services import words
from tests.services.calls import DEADLINE_S, Code, Refusal, open_session, refused
from tests.services.cluster import Cluster, Stubs
from tests.services.work import (
    BY,
    apply,
    assigned,
    complete,
    definition,
    ended,
    explain,
    fail,
    get_job,
    last,
    machine,
    together,
    trigger,
    wall_ms,
    worker,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID, MISSING, FAILED = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION
HOUR_MS = 3_600_000
HOURLY: dict[str, Any] = {"interval": {"every_ms": HOUR_MS}}

REQUESTS: dict[str, Any] = {
    "ApplyJobs": lambda **f: job_pb2.ApplyJobsRequest(**{"jobs": [definition("x")], **f}),
    "DeleteJob": lambda **f: job_pb2.DeleteJobRequest(**{"tenant": "default", "name": "gone", **BY, **f}),
    "RollbackJob": lambda **f: job_pb2.RollbackJobRequest(**{"tenant": "default", "name": "gone", **BY, **f}),
    "GetJob": lambda **f: job_pb2.GetJobRequest(**{"tenant": "default", "name": "gone", **f}),
    "ListJobs": lambda **f: job_pb2.ListJobsRequest(**{"tenant": "default", **f}),
    "ListJobRevisions": lambda **f: job_pb2.ListJobRevisionsRequest(**{"tenant": "default", "name": "gone", **f}),
    "PreviewJob": lambda **f: job_pb2.PreviewJobRequest(**{"tenant": "default", **f}),
    "TriggerJob": lambda **f: job_pb2.TriggerJobRequest(**{"tenant": "default", "name": "gone", **BY, **f}),
    "BackfillJob": lambda **f: job_pb2.BackfillJobRequest(
        **{"tenant": "default", "name": "gone", "from_wall_ms": 1, "to_wall_ms": 2, **BY, **f}
    ),
    "ListOccurrences": lambda **f: job_pb2.ListOccurrencesRequest(**{"tenant": "default", **f}),
    "ExplainOccurrence": lambda **f: job_pb2.ExplainOccurrenceRequest(**{"tenant": "default", "job": "gone", **f}),
    "ResolveOccurrence": lambda **f: job_pb2.ResolveOccurrenceRequest(
        **{"tenant": "default", "job": "gone", "due_wall_ms": 1, "attempt": 1, "resolution": 1, **BY, **f}
    ),
    "ServeJobs": lambda **f: job_pb2.ServeJobsRequest(
        **{"tenant": "default", "session_id": "s", "jobs": ["a"], "slots": 1, **f}
    ),
    "ClaimRun": lambda **f: job_pb2.ClaimRunRequest(**{"tenant": "default", "session_id": "s", "jobs": ["a"], **f}),
    "CheckpointRun": lambda **f: job_pb2.CheckpointRunRequest(
        **{"tenant": "default", "session_id": "s", "run_id": "r1", "token": 1, **f}
    ),
    "CompleteRun": lambda **f: job_pb2.CompleteRunRequest(
        **{"tenant": "default", "session_id": "s", "run_id": "r1", "token": 1, **f}
    ),
    "FailRun": lambda **f: job_pb2.FailRunRequest(
        **{"tenant": "default", "session_id": "s", "run_id": "r1", "token": 1, **f}
    ),
    "AcknowledgeInterrupt": lambda **f: job_pb2.AcknowledgeInterruptRequest(
        **{"tenant": "default", "session_id": "s", "run_id": "r1", "token": 1, **f}
    ),
    "InterruptRun": lambda **f: job_pb2.InterruptRunRequest(**{"tenant": "default", "run_id": "r1", **BY, **f}),
    "GetRun": lambda **f: job_pb2.GetRunRequest(**{"tenant": "default", "run_id": "r1", **f}),
    "ListRuns": lambda **f: job_pb2.ListRunsRequest(**{"tenant": "default", **f}),
}
REQUIRED, BAD, RANGE, LARGE, NAME = (
    "FIELD_REQUIRED",
    "FIELD_INVALID",
    "VALUE_OUT_OF_RANGE",
    "FIELD_TOO_LARGE",
    "NAME_INVALID",
)

OF_RUNS = ("CheckpointRun", "CompleteRun", "FailRun", "AcknowledgeInterrupt")
BY_NAME = ("DeleteJob", "RollbackJob", "GetJob", "ListJobRevisions", "TriggerJob", "BackfillJob")
BY_JOB = ("ListOccurrences", "ExplainOccurrence", "ResolveOccurrence", "ListRuns")
LISTS = ("ListJobs", "ListOccurrences", "ListRuns")
ACTS = ("DeleteJob", "RollbackJob", "TriggerJob", "BackfillJob", "ResolveOccurrence", "InterruptRun")

# Methods, the fields that are bad, status, reason, the field that is named.
TABLE: list[tuple[tuple[str, ...], dict[str, Any], grpc.StatusCode, str, str]] = [
    (tuple(REQUESTS)[1:], {"tenant": "nobody"}, MISSING, "TENANT_NOT_FOUND", "tenant"),
    (ACTS, {"actor": " "}, INVALID, REQUIRED, "actor"),
    (ACTS, {"reason": ""}, INVALID, REQUIRED, "reason"),
    (ACTS, {"request_id": "x" * 129}, INVALID, BAD, "request_id"),
    ((*BY_NAME, "PreviewJob"), {"name": "a/b"}, INVALID, NAME, "name"),
    (BY_JOB, {"job": "a*"}, INVALID, NAME, "job"),
    (LISTS, {"page_size": 1_001}, INVALID, RANGE, "page_size"),
    (LISTS, {"page_token": "not ours"}, INVALID, "PAGE_TOKEN_INVALID", "page_token"),
    ((*BY_NAME, "ExplainOccurrence"), {}, MISSING, "JOB_NOT_FOUND", ""),
    (("ServeJobs", "ClaimRun", *OF_RUNS), {"session_id": ""}, INVALID, REQUIRED, "session_id"),
    (("ServeJobs", "ClaimRun"), {}, MISSING, "SESSION_NOT_FOUND", ""),
    ((*OF_RUNS, "InterruptRun", "GetRun"), {"run_id": ""}, INVALID, REQUIRED, "run_id"),
    (OF_RUNS, {"token": 0}, INVALID, RANGE, "token"),
    (("InterruptRun", "GetRun"), {}, MISSING, "RUN_NOT_FOUND", ""),
    (("ApplyJobs",), {"jobs": []}, INVALID, RANGE, "jobs"),
    (("RollbackJob",), {"to_revision": 0}, INVALID, RANGE, "to_revision"),
    (("PreviewJob",), {}, INVALID, BAD, "name and schedule"),
    (("PreviewJob",), {"name": "x", "schedule": HOURLY}, INVALID, BAD, "name and schedule"),
    (("PreviewJob",), {"name": "gone"}, MISSING, "JOB_NOT_FOUND", ""),
    (("PreviewJob",), {"schedule": {"cron": "* * * *"}}, INVALID, BAD, "schedule.cron"),
    (("PreviewJob",), {"schedule": HOURLY, "count": 1_001}, INVALID, RANGE, "count"),
    (("PreviewJob",), {"schedule": HOURLY, "from_wall_ms": -1}, INVALID, RANGE, "from_wall_ms"),
    (("TriggerJob",), {"payload": b"x" * 65_537}, INVALID, LARGE, "payload"),
    (("BackfillJob",), {"from_wall_ms": 2, "to_wall_ms": 2}, INVALID, RANGE, "from_wall_ms"),
    (("BackfillJob",), {"to_wall_ms": 10**13}, INVALID, RANGE, "to_wall_ms"),
    (("ListOccurrences",), {"state": 77}, INVALID, BAD, "state"),
    (("ListOccurrences",), {"consistency": 9}, INVALID, BAD, "consistency"),
    (("ExplainOccurrence",), {"due_wall_ms": -1}, INVALID, RANGE, "due_wall_ms"),
    (("ResolveOccurrence",), {"resolution": 0}, INVALID, BAD, "resolution"),
    (("ResolveOccurrence",), {"attempt": 0}, INVALID, RANGE, "attempt"),
    (("ResolveOccurrence",), {"result": b"x" * 16_385}, INVALID, LARGE, "result"),
    (("ResolveOccurrence",), {}, MISSING, "OCCURRENCE_NOT_FOUND", ""),
    (("ServeJobs",), {"jobs": ["a", "b/c"]}, INVALID, NAME, "jobs[1]"),
    (("ServeJobs",), {"slots": 1_001}, INVALID, RANGE, "slots"),
    (("ClaimRun",), {"jobs": []}, INVALID, RANGE, "jobs"),
    (("ClaimRun",), {"wait_ms": -1}, INVALID, RANGE, "wait_ms"),
    (("CheckpointRun",), {"state": b"x" * 16_385}, INVALID, LARGE, "state"),
    (("CompleteRun",), {"result": b"x" * 16_385}, INVALID, LARGE, "result"),
    (("FailRun",), {"error": "x" * 4_097}, INVALID, LARGE, "error"),
    (("FailRun",), {"retry_after_ms": 86_400_001}, INVALID, RANGE, "retry_after_ms"),
    (("AcknowledgeInterrupt",), {"detail": "x" * 4_097}, INVALID, LARGE, "detail"),
]
CASES = [(method, *rest) for methods, *rest in TABLE for method in methods]


def call(stubs: Stubs, method: str, **fields: Any) -> Any:
    return getattr(stubs.job, method)(REQUESTS[method](**fields), timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("method", "fields", "code", "reason", "field"),
    [pytest.param(*case, id=f"{case[0]}-{case[3]}-{case[4]}-{number}") for number, case in enumerate(CASES)],
)
async def test_bad_fields(
    shared: Cluster, method: str, fields: dict[str, Any], code: grpc.StatusCode, reason: str, field: str
) -> None:
    changed = len(machine(shared).jobs("default", "", "", 1_000))
    refusal = await refused(call(shared.stubs(), method, **fields))
    assert (refusal.code, refusal.reason, refusal.definite) == (code, reason, True)
    assert refusal.facts.get("field", "") == field
    assert refusal.message
    assert len(machine(shared).jobs("default", "", "", 1_000)) == changed


# ---- definitions ----------------------------------------------------------------------------------------------------


async def test_apply_says_what_changed(shared: Cluster) -> None:
    stubs = shared.stubs()
    first = await apply(stubs, definition("apply-1", priority=1), definition("apply-2"))
    assert [job.change for job in first.jobs] == [job_pb2.JOB_CHANGE_CREATED] * 2
    assert not first.jobs[0].HasField("before")
    assert first.jobs[0].after.retry.attempts_max == 3, "defaults are said"
    second = await apply(stubs, definition("apply-1", priority=2), definition("apply-2"), actor="alice")
    assert [job.change for job in second.jobs] == [job_pb2.JOB_CHANGE_CHANGED, job_pb2.JOB_CHANGE_UNCHANGED]
    assert [job.revision for job in second.jobs] == [2, 1]
    assert (second.jobs[0].before.priority, second.jobs[0].after.priority) == (1, 2)
    assert "triggered" in second.jobs[0].schedule_text
    job = await get_job(stubs, "apply-1")
    assert (job.revision, job.spec.priority, job.changed_by) == (2, 2, "alice")
    assert (await get_job(stubs, "apply-2")).changed_by == "unknown"


async def test_a_dry_run_changes_nothing(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("dry-old"))
    revision = machine(shared).revision
    wanted = (definition("dry-new"), definition("dry-old", priority=7))
    tried = await apply(stubs, *wanted, dry_run=True)
    assert [job.change for job in tried.jobs] == [job_pb2.JOB_CHANGE_CREATED, job_pb2.JOB_CHANGE_CHANGED]
    assert (tried.jobs[1].before.priority, tried.jobs[1].after.priority, tried.jobs[1].revision) == (0, 7, 2)
    assert machine(shared).revision == revision
    assert (await refused(call(stubs, "GetJob", name="dry-new"))).reason == "JOB_NOT_FOUND"
    conflict = await refused(apply(stubs, definition("dry-old", expected_revision=3, priority=7), dry_run=True))
    assert (conflict.code, conflict.reason) == (FAILED, "JOB_REVISION_MISMATCH")
    done = await apply(stubs, *wanted)
    assert [(job.name, job.change, job.revision) for job in done.jobs] == [
        (job.name, job.change, job.revision) for job in tried.jobs
    ]


async def test_an_apply_is_whole_or_not_at_all(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("whole-1"))
    conflict = await refused(
        apply(stubs, definition("whole-2"), definition("whole-1", expected_revision=9, priority=1))
    )
    assert (conflict.code, conflict.reason) == (FAILED, "JOB_REVISION_MISMATCH")
    assert (conflict.facts["job"], conflict.facts["expected"], conflict.facts["revision"]) == ("whole-1", "9", "1")
    assert (await refused(call(stubs, "GetJob", name="whole-2"))).reason == "JOB_NOT_FOUND"
    bad = definition("whole-3", schedule={"cron": "0 0 30 2 *"})
    refusal = await refused(apply(stubs, definition("whole-2"), bad))
    assert (refusal.code, refusal.facts["field"]) == (INVALID, "jobs[1].spec.schedule.cron")
    assert (await refused(call(stubs, "GetJob", name="whole-2"))).reason == "JOB_NOT_FOUND"


async def test_the_answer_to_a_large_apply_is_bounded(shared: Cluster) -> None:
    stubs = shared.stubs()
    for priority in (1, 2):
        jobs = [definition(f"bulk-{n}", priority=priority, payload=b"x" * 60_000) for n in range(14)]
        answer = await apply(stubs, *jobs)
        assert [job.after.priority for job in answer.jobs] == [priority] * 14
        assert answer.ByteSize() < 2 << 20
    assert answer.jobs[0].before.payload and answer.jobs[0].after.payload
    assert not answer.jobs[-1].after.payload
    assert answer.jobs[-1].before.priority == 1
    listed = await call(stubs, "ListJobRevisions", name="bulk-0")
    assert [row.spec.priority for row in listed.revisions] == [2, 1]


async def test_a_repeated_apply_has_the_first_answer(shared: Cluster) -> None:
    stubs = shared.stubs()
    first = await apply(stubs, definition("once"), request_id="apply-once")
    again = await apply(stubs, definition("once"), request_id="apply-once")
    assert (again.jobs[0].change, again.revision) == (job_pb2.JOB_CHANGE_CREATED, first.revision)
    reused = await refused(apply(stubs, definition("once", priority=1), request_id="apply-once"))
    assert (reused.code, reused.reason) == (INVALID, "REQUEST_ID_REUSED")


async def test_many_workers_define_one_job(shared: Cluster) -> None:
    stubs = shared.stubs()
    answers = await together(*(apply(stubs, definition("many", expected_revision=0)) for _ in range(12)))
    changes = sorted(answer.jobs[0].change for answer in answers)
    assert changes == [job_pb2.JOB_CHANGE_CREATED] + [job_pb2.JOB_CHANGE_UNCHANGED] * 11
    other = await refused(apply(stubs, definition("many", expected_revision=0, priority=5)))
    assert (other.code, other.reason) == (FAILED, "JOB_REVISION_MISMATCH")
    assert (await get_job(stubs, "many")).spec.priority == 0


async def test_rollback(shared: Cluster) -> None:
    stubs = shared.stubs()
    for priority in (1, 2, 3):
        await apply(stubs, definition("rolled", priority=priority), reason=f"to {priority}")
    done = await call(stubs, "RollbackJob", name="rolled", request_id="back")
    assert (done.from_revision, done.job.revision, done.job.spec.priority) == (3, 4, 2)
    again = await call(stubs, "RollbackJob", name="rolled", request_id="back")
    assert (again.from_revision, again.job.revision) == (3, 4)
    far = await call(stubs, "RollbackJob", name="rolled", to_revision=1)
    assert (far.job.revision, far.job.spec.priority) == (5, 1)
    listed = await call(stubs, "ListJobRevisions", name="rolled")
    shown = [(row.revision, row.spec.priority, row.rolled_back_to) for row in listed.revisions]
    assert shown == [(5, 1, 1), (4, 2, 2), (3, 3, 0), (2, 2, 0), (1, 1, 0)]
    assert listed.revisions[-1].reason == "to 1"
    gone = await refused(call(stubs, "RollbackJob", name="rolled", to_revision=77))
    assert (gone.code, gone.reason) == (MISSING, "JOB_REVISION_GONE")


async def test_delete(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("deleted"))
    await trigger(stubs, "deleted")
    first = await call(stubs, "DeleteJob", name="deleted", request_id="delete")
    assert (await call(stubs, "DeleteJob", name="deleted", request_id="delete")).revision == first.revision
    for method in ("GetJob", "DeleteJob", "TriggerJob"):
        assert (await refused(call(stubs, method, name="deleted"))).reason == "JOB_NOT_FOUND"
    story = await explain(stubs, "deleted")
    assert story.occurrences[0].state == job_pb2.OCCURRENCE_STATE_CANCELLED, "the history stays"
    assert "deleted" in story.explanation
    assert not story.HasField("job")


async def test_lists_have_pages(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, *(definition(f"page-{n}", payload=b"secret") for n in range(5)))
    names, token = [], ""
    while True:
        page = await call(stubs, "ListJobs", prefix="page-", page_size=2, page_token=token)
        assert len(page.jobs) <= 2
        assert page.read.linearizable
        names += [job.name for job in page.jobs]
        assert not any(job.spec.payload for job in page.jobs)
        token = page.next_page_token
        if not token:
            break
    assert names == [f"page-{n}" for n in range(5)]
    page = await call(stubs, "ListJobs", prefix="page-", page_size=2)
    foreign = await refused(call(stubs, "ListJobs", prefix="other-", page_token=page.next_page_token))
    assert (foreign.code, foreign.reason) == (INVALID, "PAGE_TOKEN_INVALID")
    assert (await get_job(stubs, "page-0")).spec.payload == b"secret"


async def test_a_local_read_says_how_stale_it_may_be(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("stale"))
    await eventually(lambda: machine(shared).job("default", "stale"))
    answer = await call(stubs, "GetJob", name="stale", consistency=lease_pb2.CONSISTENCY_LOCAL)
    assert not answer.read.linearizable
    assert answer.read.staleness_ms >= 0


# ---- due times ------------------------------------------------------------------------------------------------------


async def test_preview_marks_clock_changes(shared: Cluster) -> None:
    stubs = shared.stubs()
    schedule = {"cron": "30 2 * * *", "zone": "Europe/Berlin"}
    saturday_ms = 1_743_206_400_000  # 2025-03-29T00:00Z
    shown = await call(stubs, "PreviewJob", schedule=schedule, count=3, from_wall_ms=saturday_ms)
    assert [due.utc for due in shown.due] == ["2025-03-29 01:30:00Z", "2025-03-30 01:00:00Z", "2025-03-31 00:30:00Z"]
    assert [bool(due.clock_change) for due in shown.due] == [False, True, False]
    assert shown.due[1].local.startswith("2025-03-30 03:00:00 +02:00")
    assert shown.tzdata_version == tzdata_version()
    assert "vixie" in shown.schedule_text
    await apply(stubs, definition("previewed", schedule=schedule))
    named = await call(stubs, "PreviewJob", name="previewed", from_wall_ms=saturday_ms)
    assert len(named.due) == 10
    assert list(named.due[:3]) == list(shown.due)
    assert not (await call(stubs, "PreviewJob", schedule={"manual": {}})).due
    inclusive = await call(stubs, "PreviewJob", schedule=HOURLY, count=1, from_wall_ms=HOUR_MS)
    assert inclusive.due[0].due_wall_ms == HOUR_MS


async def test_trigger_is_exactly_once(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("triggered", payload=b"its own"))
    first = await trigger(stubs, "triggered", request_id="go", payload=b"other")
    assert (first.state, first.origin) == (job_pb2.OCCURRENCE_STATE_PENDING, job_pb2.OCCURRENCE_ORIGIN_TRIGGER)
    assert first.sequence > 0
    assert first.idempotency_key == f"job/triggered/{first.due_wall_ms}/{first.sequence}"
    again = await trigger(stubs, "triggered", request_id="go", payload=b"other")
    assert (again.due_wall_ms, again.sequence) == (first.due_wall_ms, first.sequence)
    skipped = await trigger(stubs, "triggered")
    assert (skipped.state, skipped.reason) == (job_pb2.OCCURRENCE_STATE_SKIPPED, "overlap")
    async with worker(stubs, ["triggered"]) as one:
        run = await assigned(one)
        assert run.payload == b"other"
        await one.do(2, **complete(run))


async def test_backfill(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("filled", schedule=HOURLY))
    end_ms = wall_ms() // HOUR_MS * HOUR_MS
    range_ = {"from_wall_ms": end_ms - 3 * HOUR_MS, "to_wall_ms": end_ms}
    wanted = [end_ms - n * HOUR_MS for n in (3, 2, 1)]
    tried = await call(stubs, "BackfillJob", name="filled", **range_, dry_run=True)
    assert [(due.due_wall_ms, due.what) for due in tried.due] == [(due_ms, "created") for due_ms in wanted]
    assert not (await call(stubs, "ListOccurrences", job="filled")).occurrences
    done = await call(stubs, "BackfillJob", name="filled", **range_, request_id="fill")
    assert done.due == tried.due
    again = await call(stubs, "BackfillJob", name="filled", **range_, request_id="fill")
    assert again == done
    listed = await call(stubs, "ListOccurrences", job="filled")
    assert [row.due_wall_ms for row in listed.occurrences] == wanted[::-1]
    assert {row.origin for row in listed.occurrences} == {job_pb2.OCCURRENCE_ORIGIN_BACKFILL}
    async with worker(stubs, ["filled"]) as one:
        for number, due_ms in enumerate(wanted, 1):
            run = await assigned(one, number)
            assert run.due_wall_ms == due_ms, "one after another, in order"
            assert run.idempotency_key == f"job/filled/{due_ms}"
            await one.do(number + 1, **complete(run))
    third = await call(stubs, "BackfillJob", name="filled", **range_)
    assert {due.what for due in third.due} == {"succeeded"}
    assert (await get_job(stubs, "filled")).succeeded_total == 3


async def test_absurd_ranges_are_refused_with_their_size(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("absurd", schedule={"interval": {"every_ms": 1_000}}))
    refusal = await refused(call(stubs, "BackfillJob", name="absurd", from_wall_ms=0, to_wall_ms=1_001_000))
    assert (refusal.code, refusal.reason, refusal.facts["field"]) == (INVALID, RANGE, "to_wall_ms")
    for range_, said in (
        ({"from_wall_ms": 0, "to_wall_ms": 4_102_444_800_000}, "(2100-01-01 00:00:00Z); it is in the future"),
        (
            {"from_wall_ms": 2_000, "to_wall_ms": 1_000},
            "(1970-01-01 00:00:02Z); allowed: before to_wall_ms, 1970-01-01",
        ),
    ):
        assert said in (await refused(call(stubs, "BackfillJob", name="absurd", **range_))).message
    assert (refusal.facts["count"], refusal.facts["limit"]) == ("1001", "1000")
    everything = await refused(call(stubs, "BackfillJob", name="absurd", from_wall_ms=0, to_wall_ms=wall_ms()))
    assert int(everything.facts["count"]) > 10**9
    most = await call(stubs, "BackfillJob", name="absurd", from_wall_ms=0, to_wall_ms=1_000_000, dry_run=True)
    assert len(most.due) == 1_000
    nothing = await call(stubs, "BackfillJob", name="absurd", from_wall_ms=1, to_wall_ms=1_000)
    assert not nothing.due


# ---- occurrences ----------------------------------------------------------------------------------------------------


async def test_occurrences_of_all_jobs_in_pages(shared: Cluster) -> None:
    stubs = shared.stubs()
    names = ["walk-a", "walk-b"]
    await apply(stubs, *(definition(name, tenant="other") for name in names))
    for name in names * 3:
        await trigger(stubs, name, "other")
    walked, token = [], ""
    while True:
        page = await call(stubs, "ListOccurrences", tenant="other", page_size=2, page_token=token)
        walked += [(row.job, row.due_wall_ms, row.sequence) for row in page.occurrences]
        token = page.next_page_token
        if not token:
            break
    assert len(walked) == len(set(walked)) == 6
    assert walked == sorted(walked, key=lambda row: (row[0], -row[1], -row[2])), "by job, newest first"
    skipped = job_pb2.OCCURRENCE_STATE_SKIPPED
    some = await call(stubs, "ListOccurrences", tenant="other", job="walk-a", state=skipped)
    assert [row.reason for row in some.occurrences] == ["overlap"] * 2
    assert not (await call(stubs, "ListOccurrences", tenant="other", held_only=True)).occurrences


async def test_a_held_occurrence_waits_for_a_person(shared: Cluster) -> None:
    stubs = shared.stubs()
    loss: dict[str, Any] = {"on_holder_loss": job_pb2.HOLDER_LOSS_POLICY_HOLD_FOR_PERSON}
    await apply(stubs, definition("held", **loss), definition("not-held"))
    await trigger(stubs, "held")
    async with worker(stubs, ["held"], disconnect_grace_ms=0) as one:
        await assigned(one)
    row = await ended(stubs, "held")
    assert (row.state, row.held, row.reason) == (job_pb2.OCCURRENCE_STATE_UNKNOWN, True, "holder_lost")
    story = await explain(stubs, "held")
    assert "waits for a person" in story.explanation
    for fields in ({}, {"job": "held"}):
        listed = await call(stubs, "ListOccurrences", held_only=True, **fields)
        assert [(found.job, found.sequence) for found in listed.occurrences] == [("held", row.sequence)]
    named = {"job": "held", "due_wall_ms": row.due_wall_ms, "sequence": row.sequence}
    stale = await refused(call(stubs, "ResolveOccurrence", **named, attempt=2))
    assert (stale.code, stale.reason) == (FAILED, "ATTEMPT_STALE")
    retry = job_pb2.OCCURRENCE_RESOLUTION_RETRY
    done = await call(stubs, "ResolveOccurrence", **named, resolution=retry, request_id="resolve")
    assert done.occurrence.state == job_pb2.OCCURRENCE_STATE_RETRYING
    again = await call(stubs, "ResolveOccurrence", **named, resolution=retry, request_id="resolve")
    assert again.revision == done.revision
    async with worker(stubs, ["held"]) as two:
        run = await assigned(two)
        assert run.attempt == 2
        await two.do(2, **complete(run, b"by hand"))
    assert (await ended(stubs, "held")).result == b"by hand"
    twice = await refused(call(stubs, "ResolveOccurrence", **named, attempt=2))
    assert (twice.code, twice.reason) == (FAILED, "OCCURRENCE_NOT_HELD")


# ---- explain --------------------------------------------------------------------------------------------------------


async def test_why_there_is_none(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("none", schedule=HOURLY), definition("none-manual"))
    due_ms = wall_ms() // HOUR_MS * HOUR_MS

    async def why(at_ms: int, name: str = "none") -> job_pb2.ExplainOccurrenceResponse:
        answer = await explain(stubs, name, at_ms)
        assert not answer.occurrences
        assert answer.read.linearizable
        return answer

    beside = await why(due_ms + 2 * HOUR_MS + 1)
    assert "no due time" in beside.explanation
    assert (beside.previous_due_wall_ms, beside.next_due_wall_ms) == (due_ms + 2 * HOUR_MS, due_ms + 3 * HOUR_MS)
    early = await why(due_ms - 24 * HOUR_MS)
    assert "before the job existed" in early.explanation
    future = await why(due_ms + 24 * HOUR_MS)
    assert "still to come" in future.explanation
    assert future.job.name == "none"
    assert "nothing of this job was due yet" in (await why(0)).explanation
    assert (await why(0, "none-manual")).explanation.endswith("due yet: it runs only when it is triggered")
    assert "never due by itself" in (await why(due_ms + HOUR_MS, "none-manual")).explanation
    (late,) = (await apply(stubs, definition("none-once", schedule={"once_wall_ms": due_ms - 1}))).jobs
    assert late.warnings == [
        "schedule: all its times are past; the job is never due by itself, and runs only when triggered"
    ]
    assert "was past when the job was created" in (await why(0, "none-once")).explanation


async def test_what_it_waits_for(shared: Cluster) -> None:
    stubs = shared.stubs()
    selector = [{"key": "version", "values": ["2"]}, {"key": "zone", "values": ["a"]}]
    await apply(stubs, definition("waits", selector=selector, overlap_policy=job_pb2.OVERLAP_POLICY_BUFFER_ONE))
    await trigger(stubs, "waits")

    async def why() -> str:
        return (await explain(stubs, "waits")).explanation

    assert "no session serves the job" in await why()
    assert "missed if it has not started in" in await why()
    async with worker(stubs, ["wai*"], info={"agent": "old", "version": "1"}) as one:
        assert "version is '1', the selector wants '2'" in await why()
        async with worker(stubs, ["waits"], info={"version": "2"}):
            assert "zone is not set" in await why()
        await one.do(2, serve_jobs=job_pb2.ServeJobsRequest(jobs=["waits"], slots=0))
        assert "0 slots" in await why()
    fitting: dict[str, Any] = {"info": {"agent": "new", "host": "h", "version": "2", "labels": {"zone": "a"}}}
    async with worker(stubs, ["waits"], **fitting) as two:
        run = await assigned(two)
        assert f"runs as {run.run_id} in session {two.session} (new on h)" in await why()
        await trigger(stubs, "waits")
        assert f"running as {run.run_id}" in await why()
        await two.do(2, **complete(run))
        second = await assigned(two, 2)
        await two.do(3, **fail(second, "no luck", retryable=False))
    row = await ended(stubs, "waits")
    assert (row.state, row.error) == (job_pb2.OCCURRENCE_STATE_FAILED, "no luck")
    assert "no luck" in await why()
    steps = [step.what for step in row.steps]
    assert (steps[0], steps[-1]) == ("created", "ended")
    assert [step.agent for step in row.steps if step.what == "assigned"] == ["new"]


async def test_what_another_one_was_skipped_for(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("jammed"))
    first, skipped = await trigger(stubs, "jammed"), await trigger(stubs, "jammed")
    assert (skipped.state, skipped.reason) == (job_pb2.OCCURRENCE_STATE_SKIPPED, "overlap")

    async def why() -> str:
        return (await explain(stubs, "jammed")).explanation

    named = f"another one of the job was unfinished: the one of {words.utc(first.due_wall_ms)}, "
    assert f"{named}now pending: no session serves the job" in await why()
    async with worker(stubs, ["jammed"]) as one:
        run = await assigned(one)
        assert f"{named}now running as {run.run_id}" in await why()
        await one.do(2, **complete(run))
    assert f"{named}it succeeded at " in await why()


@pytest.mark.asyncio(loop_scope="function")
async def test_explain_is_linearizable_on_each_node(trio: Cluster) -> None:
    leader, follower = trio.stubs(trio.leader), trio.stubs(trio.follower)
    await apply(leader, definition("seen"))
    async with worker(leader, ["seen"]) as one:
        for number in range(1, 11):
            await trigger(leader, "seen")
            run = await assigned(one, number)
            await one.do(number + 1, **complete(run, str(number).encode()))
            row = await last(follower, "seen")
            assert (row.state, row.result) == (job_pb2.OCCURRENCE_STATE_SUCCEEDED, str(number).encode())


async def test_a_due_job_runs_and_is_counted(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("every-second", schedule={"interval": {"every_ms": 1_000}}, timeout_ms=1_000))
    async with worker(stubs, ["every-second"]) as one:
        first = await assigned(one)
        await one.do(2, **complete(first))
        second = await assigned(one, 2)
        await one.do(3, **complete(second))
    assert second.due_wall_ms - first.due_wall_ms >= 1_000
    assert first.due_wall_ms % 1_000 == 0
    job = await get_job(stubs, "every-second")
    assert job.succeeded_total >= 2
    assert job.settled_wall_ms >= second.due_wall_ms
    assert {row.state for row in job.recent} >= {job_pb2.OCCURRENCE_STATE_SUCCEEDED}
    await call(stubs, "DeleteJob", name="every-second")


async def test_an_edit_of_a_job_that_is_behind_waits_for_it(shared: Cluster) -> None:
    """A definition may change at any moment: the call is patient, nothing is lost."""
    stubs = shared.stubs()
    every = {"interval": {"every_ms": 1_000}}
    await apply(stubs, definition("edited", schedule=every, timeout_ms=1_000))
    revisions = []
    for anchor_ms in range(10, 200, 10):
        schedule = {"interval": {"every_ms": 1_000, "anchor_wall_ms": anchor_ms}}
        answer = await apply(stubs, definition("edited", schedule=schedule, timeout_ms=1_000))
        revisions.append(answer.jobs[0].revision)
    assert revisions == list(range(2, 21))
    await call(stubs, "DeleteJob", name="edited")


async def test_runs_of_other_tenants_are_not_seen(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("private", tenant="other"))
    await trigger(stubs, "private", "other")
    async with worker(stubs, ["private"], tenant="other") as one:
        run = await assigned(one)
        for method in ("GetRun", "InterruptRun"):
            refusal: Refusal = await refused(call(stubs, method, run_id=run.run_id))
            assert (refusal.code, refusal.reason) == (MISSING, "RUN_NOT_FOUND")
        mine = await open_session(stubs)
        stale = await refused(call(stubs, "CompleteRun", session_id=mine, run_id=run.run_id, token=run.token))
        assert stale.reason in ("RUN_NOT_FOUND", "RUN_STALE")
        await one.do(2, **complete(run))
