"""Work as its holders see it: runs over the stream and by claims, their interruption and loss."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tenure.v1 import dedup_pb2, job_pb2, session_pb2

from sidecar.services import feed
from sidecar.services.claims import NOT_DELIVERED
from sidecar.services.handlers import Handlers
from tests.services.calls import DEADLINE_S, Code, agent, open_session, refused
from tests.services.cluster import Cluster, Stubs
from tests.services.work import (
    BY,
    acknowledge,
    apply,
    assigned,
    complete,
    definition,
    ended,
    fail,
    last,
    machine,
    trigger,
    worker,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILED = Code.FAILED_PRECONDITION
SUCCEEDED, CANCELLED, UNKNOWN = (
    job_pb2.OCCURRENCE_STATE_SUCCEEDED,
    job_pb2.OCCURRENCE_STATE_CANCELLED,
    job_pb2.OCCURRENCE_STATE_UNKNOWN,
)
AT_ONCE: dict[str, Any] = {"retry": {"initial_ms": 0, "jitter_percent": 0}}
ALLOW: dict[str, Any] = {"overlap_policy": job_pb2.OVERLAP_POLICY_ALLOW, "concurrent_max": 100}


async def claim(stubs: Stubs, session: str, *jobs: str, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
    request = job_pb2.ClaimRunRequest(tenant="default", session_id=session, jobs=jobs, **fields)
    return await stubs.job.ClaimRun(request, timeout=timeout_s)


async def interrupt(stubs: Stubs, run: job_pb2.Run, **fields: Any) -> job_pb2.InterruptRunResponse:
    request = job_pb2.InterruptRunRequest(tenant="default", run_id=run.run_id, **{**BY, **fields})
    return await stubs.job.InterruptRun(request, timeout=DEADLINE_S)


# ---- over the stream ------------------------------------------------------------------------------------------------


async def test_a_run_from_start_to_end(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("whole", payload=b"in", timeout_ms=60_000, estimated_cost_micros=5))
    async with worker(stubs, ["whole"], info={"agent": "a", "host": "h"}, ttl_ms=30_000) as one:
        created = await trigger(stubs, "whole")
        run = await assigned(one)
        assert (run.tenant, run.job, run.attempt, run.payload, run.checkpoint) == ("default", "whole", 1, b"in", b"")
        assert (run.due_wall_ms, run.sequence) == (created.due_wall_ms, created.sequence)
        assert (run.session_id, run.agent, run.host, run.estimated_cost_micros) == (one.session, "a", "h", 5)
        assert run.run_id == f"r{run.token}"
        assert 0 < run.remaining_ms <= 60_000
        assert 0 < run.session_remaining_ms <= 30_000
        version, trace, span, flags = run.traceparent.split("-")
        assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")
        stored = await one.do(
            2, checkpoint_run=job_pb2.CheckpointRunRequest(run_id=run.run_id, token=run.token, state=b"s")
        )
        assert stored.checkpoint_run.revision
        seen = await stubs.job.GetRun(job_pb2.GetRunRequest(tenant="default", run_id=run.run_id), timeout=DEADLINE_S)
        assert (seen.run.checkpoint, seen.run.traceparent) == (b"s", run.traceparent)
        stale = await one.do(3, complete_run=job_pb2.CompleteRunRequest(run_id=run.run_id, token=run.token + 1))
        assert stale.error.detail.reason == "RUN_STALE"
        done = await one.do(4, **complete(run, b"out"))
        assert done.complete_run.revision
        gone = await one.do(5, **complete(run, b"other"))
        assert gone.error.detail.reason == "RUN_NOT_FOUND"
        row = await last(stubs, "whole")
        assert (row.state, row.result, row.attempt) == (SUCCEEDED, b"out", 1)
        assert not one.pushed("run_lost")


async def test_the_next_attempt_has_the_checkpoint(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("again", **AT_ONCE))
    async with worker(stubs, ["again"]) as one:
        await trigger(stubs, "again")
        first = await assigned(one)
        await one.do(
            2, checkpoint_run=job_pb2.CheckpointRunRequest(run_id=first.run_id, token=first.token, state=b"half")
        )
        failed = await one.do(3, **fail(first))
        assert failed.fail_run.retrying
        second = await assigned(one, 2)
        assert (second.attempt, second.checkpoint, second.traceparent[:35]) == (2, b"half", first.traceparent[:35])
        assert second.traceparent != first.traceparent
        assert second.idempotency_key == first.idempotency_key
        over = await one.do(4, **fail(second, retryable=False))
        assert not over.fail_run.retrying
        assert not one.pushed("run_lost")
    assert (await last(stubs, "again")).state == job_pb2.OCCURRENCE_STATE_FAILED


async def test_operations_are_exactly_once(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one:
        apply_request = job_pb2.ApplyJobsRequest(jobs=[definition("on-stream", tenant="")])
        created = await one.do(1, apply_jobs=apply_request)
        assert created.apply_jobs.jobs[0].change == job_pb2.JOB_CHANGE_CREATED
        again = await one.do(1, apply_jobs=apply_request)
        assert again.apply_jobs.jobs[0].change == job_pb2.JOB_CHANGE_CREATED
        shown = await one.do(2, get_job=job_pb2.GetJobRequest(name="on-stream"))
        assert shown.get_job.job.revision == 1
        triggered = await one.do(3, trigger_job=job_pb2.TriggerJobRequest(name="on-stream", **BY))
        repeated = await one.do(3, trigger_job=job_pb2.TriggerJobRequest(name="on-stream", **BY))
        assert repeated.trigger_job.occurrence.sequence == triggered.trigger_job.occurrence.sequence
        foreign = await one.do(4, apply_jobs=job_pb2.ApplyJobsRequest(jobs=[definition("x", tenant="other")]))
        assert dict(foreign.error.detail.facts)["field"] == "jobs[0].tenant"
        await one.do(5, serve_jobs=job_pb2.ServeJobsRequest(jobs=["on-stream"], slots=1))
        run = await assigned(one)
        await one.do(6, **complete(run, b"1"))
        twice = await one.do(6, **complete(run, b"1"))
        assert twice.HasField("complete_run")
    assert (await last(stubs, "on-stream")).result == b"1"


async def test_slots_bound_what_is_given(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("slots", **ALLOW))
    async with worker(stubs, ["slots"], slots=2) as one:
        for _ in range(4):
            await trigger(stubs, "slots")
        await assigned(one, 2)
        await one.do(2, get_job=job_pb2.GetJobRequest(name="slots"))
        assert len(one.pushed("run_assigned")) == 2
        shown = (await one.do(3, get_job=job_pb2.GetJobRequest(name="slots"))).get_job.job
        assert (shown.running, shown.workers, shown.free_slots, len(shown.runs)) == (2, 1, 0, 2)
        await one.do(4, serve_jobs=job_pb2.ServeJobsRequest(jobs=["slots"], slots=4))
        await assigned(one, 4)
        listed = await stubs.job.ListRuns(
            job_pb2.ListRunsRequest(tenant="default", job="slots", page_size=3), timeout=DEADLINE_S
        )
        assert len(listed.runs) == 3
        rest = job_pb2.ListRunsRequest(tenant="default", job="slots", page_size=3, page_token=listed.next_page_token)
        answer = await stubs.job.ListRuns(rest, timeout=DEADLINE_S)
        assert (len(answer.runs), answer.next_page_token) == (1, "")
        for number in range(1, 5):
            await one.do(10 + number, **complete(await assigned(one, number)))


async def test_a_stream_that_attaches_again_finds_its_runs(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("kept", payload=b"in", **ALLOW))
    async with worker(stubs, ["kept"], slots=3, ttl_ms=30_000, disconnect_grace_ms=30_000) as one:
        await trigger(stubs, "kept")
        first = await assigned(one)
        session = one.session
    await eventually(lambda: not machine(shared).session(session).connection)
    await trigger(stubs, "kept")
    assert (await last(stubs, "kept")).state == job_pb2.OCCURRENCE_STATE_PENDING, "nothing goes where no stream is"
    async with agent(stubs, session=session) as two:
        kept, second = two.attached.runs
        assert (kept.run_id, kept.payload) == (first.run_id, b"in")
        assert (second.attempt, second.payload) == (1, b"in"), "what waited is given with the attach"
        await two.do(2, **complete(first))
        await two.do(3, **complete(second))
    async with agent(stubs, session=session) as three:
        assert not three.attached.runs


async def test_an_attach_with_much_to_run_is_bounded(shared: Cluster) -> None:
    stubs = shared.stubs()
    count = 40
    await apply(stubs, definition("large", payload=b"x" * 65_536, **ALLOW))
    async with worker(stubs, ["large"], slots=count, ttl_ms=30_000, disconnect_grace_ms=30_000) as one:
        await asyncio.gather(*(trigger(stubs, "large") for _ in range(count)))
        await assigned(one, count)
        assert all(len(push.run.payload) == 65_536 for push in one.pushed("run_assigned"))
        session = one.session
    async with agent(stubs, session=session) as two:
        runs = two.attached.runs
        assert len(runs) == count
        assert runs[0].payload
        named = [run.run_id for run in runs if not run.job]
        assert two.attached.ByteSize() < feed.ATTACHED_BYTES_MAX + 70_000
        await assigned(two, len(named))
        pushed = [push.run for push in two.pushed("run_assigned")]
        assert [run.run_id for run in pushed] == named
        assert all(run.payload and run.job for run in pushed)
        await two.do(2, close_session=session_pb2.CloseSessionRequest())


# ---- interrupted and lost -------------------------------------------------------------------------------------------


async def test_an_operator_interrupts_a_run(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("interrupted", interrupt_grace_ms=60_000))
    async with worker(stubs, ["interrupted"]) as one:
        await trigger(stubs, "interrupted")
        run = await assigned(one)
        told = await interrupt(stubs, run, reason="too loud", request_id="stop")
        assert (told.run.interrupted, told.run.interrupt_cause) == (True, "operator")
        assert (await interrupt(stubs, run, reason="too loud", request_id="stop")).revision == told.revision
        push = await one.push("run_interrupted")
        assert (push.run_id, push.cause, push.reason) == (run.run_id, "operator", "too loud")
        assert 0 < push.grace_ms <= 60_000
        late = await one.do(2, checkpoint_run=job_pb2.CheckpointRunRequest(run_id=run.run_id, token=run.token))
        assert (late.error.code, late.error.detail.reason) == (9, "RUN_INTERRUPTED")
        acknowledged = await one.do(3, **acknowledge(run, "half way"))
        assert acknowledged.HasField("acknowledge_interrupt")
        row = await last(stubs, "interrupted")
        assert (row.state, row.reason) == (CANCELLED, "operator")
        assert len(one.pushed("run_interrupted")) == 1
        assert not one.pushed("run_lost"), "its holder knows"


async def test_what_has_happened_is_taken_after_an_interrupt(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("settled", interrupt_grace_ms=60_000))
    async with worker(stubs, ["settled"]) as one:
        await trigger(stubs, "settled")
        run = await assigned(one)
        await interrupt(stubs, run)
        await one.do(2, **complete(run, b"done"))
        assert not one.pushed("run_lost")
    row = await last(stubs, "settled")
    assert (row.state, row.result, row.reason) == (SUCCEEDED, b"done", "after_interrupt:operator")


async def test_a_run_that_hangs_is_interrupted_and_lost(shared: Cluster) -> None:
    stubs = shared.stubs()
    retry = {"attempts_max": 1}
    await apply(stubs, definition("hangs", timeout_ms=1_000, interrupt_grace_ms=200, retry=retry))
    async with worker(stubs, ["hangs"]) as one:
        await trigger(stubs, "hangs")
        run = await assigned(one)
        push = await one.push("run_interrupted")
        assert (push.run_id, push.cause) == (run.run_id, "timeout")
        lost = await one.push("run_lost")
        assert lost.run_id == run.run_id
        refused_ = await one.do(2, **complete(run))
        assert refused_.error.detail.reason == "RUN_NOT_FOUND"
    row = await ended(stubs, "hangs")
    assert row.state == UNKNOWN
    assert "no acknowledgement" in row.reason


async def test_a_deleted_job_interrupts_its_run(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("removed", interrupt_grace_ms=60_000))
    async with worker(stubs, ["removed"]) as one:
        await trigger(stubs, "removed")
        run = await assigned(one)
        request = job_pb2.DeleteJobRequest(tenant="default", name="removed", **BY)
        await stubs.job.DeleteJob(request, timeout=DEADLINE_S)
        push = await one.push("run_interrupted")
        assert (push.run_id, push.cause) == (run.run_id, "job_deleted")
        await one.do(2, **acknowledge(run))
    assert (await last(stubs, "removed")).state == CANCELLED


async def test_a_dead_holder_is_replaced(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("replaced", **AT_ONCE))
    async with worker(stubs, ["replaced"], disconnect_grace_ms=0) as one:
        await trigger(stubs, "replaced")
        first = await assigned(one)
    async with worker(stubs, ["replaced"]) as two:
        second = await assigned(two)
        assert (second.attempt, second.sequence) == (2, first.sequence)
        assert second.token > first.token
        await two.do(2, **complete(second))
    row = await last(stubs, "replaced")
    assert (row.state, row.attempt) == (SUCCEEDED, 2)


async def test_a_record_that_is_complete_needs_no_run(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("recorded"))
    created = await trigger(stubs, "recorded")
    session = await open_session(stubs)
    key = created.idempotency_key
    begin = dedup_pb2.BeginRecordRequest(tenant="default", key=key, session_id=session)
    await stubs.dedup.BeginRecord(begin, timeout=DEADLINE_S)
    done = dedup_pb2.CompleteRecordRequest(tenant="default", key=key, session_id=session, attempt=1, result=b"before")
    await stubs.dedup.CompleteRecord(done, timeout=DEADLINE_S)
    async with worker(stubs, ["recorded"]) as one:
        row = await ended(stubs, "recorded")
        assert (row.state, row.reason, row.result) == (SUCCEEDED, "record_completed", b"before")
        assert not one.pushed("run_assigned")


async def test_shadow_is_recorded_and_not_handed_out(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("shadow", mode=job_pb2.JOB_MODE_SHADOW))
    async with worker(stubs, ["shadow"]) as one:
        await trigger(stubs, "shadow")
        row = await ended(stubs, "shadow")
        assert (row.state, row.reason, row.shadow) == (job_pb2.OCCURRENCE_STATE_SKIPPED, "shadow", True)
        assert [step.session_id for step in row.steps if step.what == "assigned"] == [one.session]
        assert not one.pushed("run_assigned")


# ---- by claims ------------------------------------------------------------------------------------------------------


async def test_claims(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("claimed", payload=b"in"))
    session = await open_session(stubs, ttl_ms=60_000)
    nothing = await claim(stubs, session, "claimed")
    assert not nothing.HasField("run")
    await trigger(stubs, "claimed")
    first = await claim(stubs, session, "claim*", request_id="mine")
    assert (first.run.payload, first.run.session_id) == (b"in", session)
    again = await claim(stubs, session, "claim*", request_id="mine")
    assert (again.run.run_id, again.revision) == (first.run.run_id, first.revision)
    other = await open_session(stubs)
    request = job_pb2.CompleteRunRequest(tenant="default", run_id=first.run.run_id, token=first.run.token)
    request.session_id = other
    stale = await refused(stubs.job.CompleteRun(request, timeout=DEADLINE_S))
    assert (stale.code, stale.reason) == (FAILED, "RUN_STALE")
    request.session_id, request.request_id = session, "end"
    done = await stubs.job.CompleteRun(request, timeout=DEADLINE_S)
    assert (await stubs.job.CompleteRun(request, timeout=DEADLINE_S)).revision == done.revision
    over = await refused(claim(stubs, session, "claim*", request_id="mine"))
    assert (over.code, over.reason) == (Code.NOT_FOUND, "RUN_NOT_FOUND")


async def test_a_claim_waits_for_work(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("awaited", **AT_ONCE), definition("unrelated"))
    session = await open_session(stubs, ttl_ms=60_000)
    waiting = asyncio.create_task(claim(stubs, session, "awaited", wait_ms=60_000, timeout_s=60, request_id="wait"))
    await eventually(lambda: _waiters(shared))
    await trigger(stubs, "unrelated")
    created = await trigger(stubs, "awaited")
    first = (await waiting).run
    assert first.sequence == created.sequence
    repeated = await claim(stubs, session, "awaited", wait_ms=60_000, timeout_s=60, request_id="wait")
    assert repeated.run.run_id == first.run_id, "a repeat walks to the same answer"
    failed = job_pb2.FailRunRequest(
        tenant="default", session_id=session, run_id=first.run_id, token=first.token, retryable=True
    )
    assert (await stubs.job.FailRun(failed, timeout=DEADLINE_S)).retrying
    second = (await claim(stubs, session, "awaited", wait_ms=60_000, timeout_s=60)).run
    assert second.attempt == 2


def _waiters(cluster: Cluster) -> int:
    """Whether a claim waits."""
    return len(cluster[0].operations.notices.work)


async def test_a_claim_that_waits_in_vain_says_so(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("in-vain"))
    session = await open_session(stubs, ttl_ms=60_000)
    answer = await claim(stubs, session, "in-vain", wait_ms=20)
    assert not answer.HasField("run")
    bounded = await claim(stubs, session, "in-vain", wait_ms=3_600_000, timeout_s=0.5)
    assert not bounded.HasField("run")


async def test_a_claim_that_nobody_hears_of_is_given_back(shared: Cluster) -> None:
    stubs, other = shared.stubs(), shared.stubs()
    await apply(stubs, definition("unheard", **AT_ONCE))
    session = await open_session(stubs, ttl_ms=60_000)
    waiting = claim(other, session, "unheard", wait_ms=60_000, timeout_s=60)
    task = asyncio.create_task(waiting)
    await eventually(lambda: _waiters(shared))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    created = await trigger(stubs, "unheard")
    run = (await claim(stubs, session, "unheard", wait_ms=60_000, timeout_s=60)).run
    assert run.sequence == created.sequence
    row = await last(stubs, "unheard")
    given_back = [step for step in row.steps if NOT_DELIVERED in (step.reason, step.cause)]
    assert run.attempt == 1 + len(given_back)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.InternalError("the call has ended")])
async def test_a_run_whose_answer_cannot_be_sent_is_given_back(shared: Cluster, error: BaseException) -> None:
    stubs, runtime = shared.stubs(), shared[0].runtime
    name = f"unsent-{type(error).__name__}"
    await apply(stubs, definition(name, **AT_ONCE))
    await trigger(stubs, name)
    session = await open_session(stubs, ttl_ms=60_000)
    handlers = Handlers(runtime, job_pb2.DESCRIPTOR.services_by_name["JobService"])
    request = job_pb2.ClaimRunRequest(tenant="default", session_id=session, jobs=[name])
    given: list[job_pb2.Run] = []

    async def send(answer: Any) -> None:
        given.append(answer.run)
        raise error

    context: Any = GoneContext()
    with pytest.raises(type(error)):
        await handlers._run(shared[0].operations.runs.claim_run, request, context, send)
    assert given[0].attempt == 1
    again = (await claim(stubs, session, name, wait_ms=60_000, timeout_s=60)).run
    assert again.attempt == 2
    row = await last(stubs, name)
    assert row.error == NOT_DELIVERED


class GoneContext:
    """Of a call whose caller is not there any more when the answer is sent."""

    def time_remaining(self) -> float:
        return DEADLINE_S


async def test_jobs_that_are_due_are_given_to_agents_fairly(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, *(definition(f"fair-{n}") for n in range(6)))
    async with worker(stubs, ["fair-*"], slots=6) as one, worker(stubs, ["fair-*"], slots=6) as two:
        for n in range(6):
            await trigger(stubs, f"fair-{n}")
        await assigned(one, 3)
        await assigned(two, 3)
        for each in (one, two):
            for number in range(1, 4):
                await each.do(1 + number, **complete(await assigned(each, number)))
