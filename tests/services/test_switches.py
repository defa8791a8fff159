"""Switches: what they stop, on every node and at once; what goes on; that nothing comes back by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tenure.v1 import dedup_pb2, job_pb2, lease_pb2, switch_pb2, watch_pb2

from tests.services.calls import DEADLINE_S, Code, acquire, agent, open_session, refused, release
from tests.services.cluster import Cluster, Stubs
from tests.services.work import (
    BY,
    acknowledge,
    apply,
    assigned,
    clear_switch,
    complete,
    definition,
    explain,
    get_job,
    last,
    machine,
    set_switch,
    trigger,
    worker,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILED, MISSING, INVALID = Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.INVALID_ARGUMENT
FLEET, TENANT, JOB = switch_pb2.SWITCH_SCOPE_FLEET, switch_pb2.SWITCH_SCOPE_TENANT, switch_pb2.SWITCH_SCOPE_JOB
PAUSE, DRAIN, KILL = switch_pb2.SWITCH_MODE_PAUSE, switch_pb2.SWITCH_MODE_DRAIN, switch_pb2.SWITCH_MODE_KILL
SKIPPED, CANCELLED = job_pb2.OCCURRENCE_STATE_SKIPPED, job_pb2.OCCURRENCE_STATE_CANCELLED


async def off(call: Any) -> dict[str, str]:
    """The facts of a refusal because of a switch."""
    refusal = await refused(call)
    assert (refusal.code, refusal.reason, refusal.definite) == (FAILED, "SWITCHED_OFF", True)
    return refusal.facts


async def switches(stubs: Stubs, **fields: Any) -> list[switch_pb2.Switch]:
    answer = await stubs.switch.ListSwitches(switch_pb2.ListSwitchesRequest(**fields), timeout=DEADLINE_S)
    return list(answer.switches)


async def begin(stubs: Stubs, session: str, key: str, tenant: str = "default", **fields: Any) -> Any:
    request = dedup_pb2.BeginRecordRequest(tenant=tenant, key=key, session_id=session, **fields)
    return await stubs.dedup.BeginRecord(request, timeout=DEADLINE_S)


async def check_token(stubs: Stubs, name: str, token: int) -> lease_pb2.CheckLeaseResponse:
    request = lease_pb2.CheckLeaseRequest(tenant="default", name=name, token=token)
    return await stubs.lease.CheckLease(request, timeout=DEADLINE_S)


# ---- the switch itself ----------------------------------------------------------------------------------------------


async def test_set_show_clear(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("one"))
    row = await set_switch(stubs, JOB, PAUSE, tenant="default", job="one", reason="too loud", expires_after_ms=60_000)
    assert (row.scope, row.mode, row.tenant, row.job, row.active) == (JOB, PAUSE, "default", "one", True)
    assert (row.actor, row.reason) == ("me", "too loud")
    assert 0 < row.remaining_ms <= 60_000
    request = switch_pb2.GetSwitchRequest(tenant="default", switch_id=row.switch_id)
    assert (await stubs.switch.GetSwitch(request, timeout=DEADLINE_S)).switch.switch_id == row.switch_id
    assert [found.switch_id for found in await switches(stubs)] == [row.switch_id]
    assert not await switches(stubs, tenant="other")
    job = await get_job(stubs, "one")
    assert (job.switch_id, job.switch_mode) == (row.switch_id, PAUSE)
    request.tenant = ""
    foreign = await refused(stubs.switch.GetSwitch(request, timeout=DEADLINE_S))
    assert (foreign.code, foreign.reason) == (MISSING, "SWITCH_NOT_FOUND")
    ended_ = await clear_switch(stubs, row.switch_id, "default", request_id="clear")
    assert (ended_.active, ended_.end_cause, ended_.end_actor) == (False, "cleared", "me")
    assert not (await clear_switch(stubs, row.switch_id, "default", request_id="clear")).active
    assert not await switches(stubs)
    assert row.switch_id in [found.switch_id for found in await switches(stubs, include_ended=True)]
    assert not (await get_job(stubs, "one")).switch_id


async def test_a_stronger_one_stays_and_a_stale_id_clears_nothing(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("ranked"))
    scope = {"tenant": "default", "job": "ranked"}
    first = await set_switch(stubs, JOB, PAUSE, **scope, request_id="first")
    assert (await set_switch(stubs, JOB, PAUSE, **scope, request_id="first")).switch_id == first.switch_id
    request = switch_pb2.SetSwitchRequest(**{"scope": JOB, "mode": KILL, **scope, **BY})
    answer = await stubs.switch.SetSwitch(request, timeout=DEADLINE_S)
    assert answer.replaced_switch_id == first.switch_id
    second = answer.switch
    assert second.kill_epoch > 0
    weaker = await refused(set_switch(stubs, JOB, DRAIN, **scope))
    assert (weaker.code, weaker.reason) == (FAILED, "SWITCH_STRONGER")
    stale = await refused(clear_switch(stubs, first.switch_id, "default"))
    assert (stale.code, stale.reason) == (FAILED, "SWITCH_STALE")
    assert stale.facts["current_switch_id"] == second.switch_id
    assert (await get_job(stubs, "ranked")).switch_id == second.switch_id
    unknown = await refused(clear_switch(stubs, "k999999", "default"))
    assert (unknown.code, unknown.reason) == (MISSING, "SWITCH_NOT_FOUND")
    await clear_switch(stubs, second.switch_id, "default")


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"scope": 0}, INVALID, "FIELD_INVALID", "scope"),
        ({"mode": 0}, INVALID, "FIELD_INVALID", "mode"),
        ({"tenant": "default"}, INVALID, "FIELD_INVALID", "tenant"),
        ({"scope": TENANT}, INVALID, "TENANT_INVALID", "tenant"),
        ({"scope": JOB, "tenant": "default"}, INVALID, "NAME_INVALID", "job"),
        ({"scope": JOB, "tenant": "default", "job": "mistyped"}, MISSING, "JOB_NOT_FOUND", ""),
        ({"actor": ""}, INVALID, "FIELD_REQUIRED", "actor"),
        ({"reason": ""}, INVALID, "FIELD_REQUIRED", "reason"),
        ({"expires_after_ms": 31 * 86_400_000 + 1}, INVALID, "VALUE_OUT_OF_RANGE", "expires_after_ms"),
    ],
)
async def test_bad_switches(shared: Cluster, fields: dict[str, Any], code: Any, reason: str, field: str) -> None:
    stubs = shared.stubs()
    revision = machine(shared).revision
    refusal = await refused(set_switch(stubs, **{"scope": FLEET, "mode": KILL, **fields}))
    assert (refusal.code, refusal.reason, refusal.facts.get("field", "")) == (code, reason, field)
    assert machine(shared).revision == revision


async def test_bad_reads_and_clears(shared: Cluster) -> None:
    stubs = shared.stubs()
    for call, code, reason in (
        (clear_switch(stubs, ""), INVALID, "FIELD_REQUIRED"),
        (clear_switch(stubs, "k1", actor=""), INVALID, "FIELD_REQUIRED"),
        (clear_switch(stubs, "k1", reason=""), INVALID, "FIELD_REQUIRED"),
        (clear_switch(stubs, "k1", "nobody"), MISSING, "TENANT_NOT_FOUND"),
        (switches(stubs, tenant="nobody"), MISSING, "TENANT_NOT_FOUND"),
        (switches(stubs, page_size=1_001), INVALID, "VALUE_OUT_OF_RANGE"),
        (switches(stubs, page_token="?"), INVALID, "PAGE_TOKEN_INVALID"),
    ):
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (code, reason)


async def test_switches_in_pages(shared: Cluster) -> None:
    stubs = shared.stubs()
    names = [f"paged-{n}" for n in range(5)]
    await apply(stubs, *(definition(name, tenant="other") for name in names))
    for name in names:
        await set_switch(stubs, JOB, PAUSE, tenant="other", job=name)
    seen, token = [], ""
    while True:
        request = switch_pb2.ListSwitchesRequest(tenant="other", page_size=2, page_token=token)
        page = await stubs.switch.ListSwitches(request, timeout=DEADLINE_S)
        seen += [(row.job, row.switch_id) for row in page.switches]
        token = page.next_page_token
        if not token:
            break
    assert [job for job, _ in seen] == names[::-1], "newest first"
    for _, switch in seen:
        await clear_switch(stubs, switch, "other")


# ---- what it stops --------------------------------------------------------------------------------------------------


async def test_a_pause_skips_and_says_by_whom(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("paused", overlap_policy=job_pb2.OVERLAP_POLICY_BUFFER_ONE))
    async with worker(stubs, ["paused"]) as one:
        await trigger(stubs, "paused")
        run = await assigned(one)
        waiting = await trigger(stubs, "paused")
        row = await set_switch(stubs, JOB, PAUSE, tenant="default", job="paused", actor="alice", reason="too loud")
        assert (row.runs_at_set, row.runs_left) == (1, 1)
        told = await off(trigger(stubs, "paused"))
        assert (told["switch_id"], told["actor"], told["reason"], told["mode"]) == (
            row.switch_id,
            "alice",
            "too loud",
            "pause",
        )
        skipped = await last(stubs, "paused")
        assert (skipped.sequence, skipped.state) == (waiting.sequence, SKIPPED)
        assert skipped.reason == f"paused {row.switch_id}"
        story = await explain(stubs, "paused")
        assert "paused by alice" in story.explanation
        assert "too loud" in story.explanation
        await one.do(2, **complete(run))
    await clear_switch(stubs, row.switch_id, "default")
    assert (await last(stubs, "paused")).state == SKIPPED, "nothing is replayed"
    assert (await get_job(stubs, "paused")).pending == 0


async def test_a_kill_interrupts_and_measures(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("killed", interrupt_grace_ms=60_000))
    async with worker(stubs, ["killed"]) as one:
        await trigger(stubs, "killed")
        run = await assigned(one)
        row = await set_switch(stubs, JOB, KILL, tenant="default", job="killed", reason="spending")
        push = await one.push("run_interrupted")
        assert (push.run_id, push.cause, push.switch_id) == (run.run_id, "killed", row.switch_id)
        assert row.runs_left == 1
        await one.do(2, **acknowledge(run, "stopped"))
    request = switch_pb2.GetSwitchRequest(tenant="default", switch_id=row.switch_id)
    seen = (await stubs.switch.GetSwitch(request, timeout=DEADLINE_S)).switch
    assert (seen.runs_at_set, seen.runs_ended, seen.runs_unacknowledged, seen.runs_left) == (1, 1, 0, 0)
    assert seen.effect_ms >= 0
    cancelled = await last(stubs, "killed")
    assert (cancelled.state, cancelled.reason) == (CANCELLED, "killed")
    await clear_switch(stubs, row.switch_id, "default")


@pytest.mark.asyncio(loop_scope="function")
async def test_a_kill_is_in_force_on_every_node_at_once(trio: Cluster) -> None:
    """K01: nothing is answered from what a node remembers; settling goes on; other scopes do not notice."""
    every = [trio.stubs(sidecar) for sidecar in trio.sidecars]
    stubs = every[0]
    await apply(stubs, definition("stop"), definition("go", tenant="other"))
    session, other = await open_session(stubs), await open_session(stubs, "other")
    held = (await acquire(stubs, session, "held")).token
    await begin(stubs, session, "key")
    events: list[watch_pb2.Event] = []

    async def watch() -> None:
        async for answer in every[2].watch.Watch(watch_pb2.WatchRequest(tenant="other", from_revision=1)):
            events.extend(answer.events)

    watching = asyncio.create_task(watch())
    row = await set_switch(stubs, TENANT, KILL, tenant="default", reason="runaway")
    for node in every:
        for call in (
            acquire(node, session, "new"),
            acquire(node, session, "held"),
            begin(node, session, "new"),
            trigger(node, "stop"),
            node.job.ClaimRun(
                job_pb2.ClaimRunRequest(tenant="default", session_id=session, jobs=["stop"]), timeout=DEADLINE_S
            ),
        ):
            facts = await off(call)
            assert (facts["switch_id"], facts["reason"], facts["scope"]) == (row.switch_id, "runaway", "tenant")
            assert int(facts["since_wall_ms"]) == row.set_wall_ms
        checked = await check_token(node, "held", held)
        assert checked.state == lease_pb2.TOKEN_STATE_STALE, "its holder may not act"
        assert (await acquire(node, other, f"free-{node.channel}", tenant="other")).token
        assert (await begin(node, other, f"free-{node.channel}", "other")).outcome == dedup_pb2.BEGIN_OUTCOME_NEW
    await trigger(stubs, "go", "other")
    done = dedup_pb2.CompleteRecordRequest(tenant="default", key="key", session_id=session, attempt=1)
    await stubs.dedup.CompleteRecord(done, timeout=DEADLINE_S)
    await release(stubs, session, "held", held)
    fleet = await set_switch(every[1], FLEET, PAUSE)
    await off(trigger(stubs, "go", "other"))
    assert (await acquire(stubs, other, "while-paused", tenant="other")).token, "a pause is about runs"
    await eventually(lambda: any(event.subject == fleet.switch_id for event in events))
    assert not any(event.subject == row.switch_id for event in events), "of another tenant"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await clear_switch(every[2], row.switch_id, "default")
    again = await acquire(stubs, session, "held")
    assert again.token > held


async def test_the_stream_tells_of_switches(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs, ttl_ms=30_000) as one, agent(stubs, tenant="other") as two:
        assert not one.attached.switches.switches
        epoch = one.attached.switches.kill_epoch
        grant = await one.acquire(1, "told")
        row = await set_switch(stubs, TENANT, KILL, tenant="default", reason="stop")
        await one.until(lambda: any(push.switches for push in one.pushed("switches")))
        told = one.pushed("switches")[-1]
        assert [(switch.switch_id, switch.mode, switch.reason) for switch in told.switches] == [
            (row.switch_id, KILL, "stop")
        ]
        assert told.kill_epoch == row.kill_epoch > epoch
        lost = await one.push("lease_lost")
        assert (lost.name, lost.token, lost.cause) == ("told", grant.token, "killed")
        await one.send(keep_alive={"id": 1})
        await one.until(lambda: 1 in one.acks)
        async with agent(stubs, session=one.session) as again:
            assert [switch.switch_id for switch in again.attached.switches.switches] == [row.switch_id]
            assert not again.attached.held, "what was killed is not held"
            await clear_switch(stubs, row.switch_id, "default")
            await again.until(lambda: again.pushed("switches"))
            assert not again.pushed("switches")[-1].switches
        assert not two.pushed("switches"), "not of its tenant"
        fleet = await set_switch(stubs, FLEET, PAUSE)
        await two.until(lambda: two.pushed("switches"))
        assert two.pushed("switches")[-1].switches[0].scope == FLEET
        await clear_switch(stubs, fleet.switch_id)
        await two.until(lambda: len(two.pushed("switches")) == 2)
        assert not two.pushed("switches")[-1].switches


async def test_an_expired_switch_ends_by_itself(shared: Cluster) -> None:
    stubs = shared.stubs()
    await apply(stubs, definition("expires"))
    async with agent(stubs) as one:
        row = await set_switch(stubs, JOB, KILL, tenant="default", job="expires", expires_after_ms=1_000)
        await one.until(lambda: len(one.pushed("switches")) >= 2)
        first, second = one.pushed("switches")[:2]
        assert [switch.switch_id for switch in first.switches] == [row.switch_id]
        assert not second.switches
    request = switch_pb2.GetSwitchRequest(tenant="default", switch_id=row.switch_id)
    seen = (await stubs.switch.GetSwitch(request, timeout=DEADLINE_S)).switch
    assert (seen.end_cause, seen.remaining_ms) == ("expired", 0)
    await trigger(stubs, "expires")


@pytest.mark.asyncio(loop_scope="function")
async def test_a_kill_outlives_a_restart_and_nothing_is_replayed(trio: Cluster) -> None:
    """K05."""
    stubs = trio.stubs()
    await apply(stubs, definition("ticks", schedule={"interval": {"every_ms": 1_000}}, timeout_ms=1_000))
    row = await set_switch(stubs, TENANT, KILL, tenant="default")

    async def suppressed() -> int:
        return (await get_job(trio.stubs(), "ticks")).skipped_total

    before = await suppressed()
    await eventually(lambda: _more(suppressed, before), what="due times that are skipped")
    for sidecar in trio.sidecars:
        await sidecar.stop()
    for sidecar in trio.sidecars:
        await sidecar.start()
    await trio.ready()
    stubs = trio.stubs()
    assert [found.switch_id for found in await switches(stubs)] == [row.switch_id]
    await off(acquire(stubs, await open_session(stubs), "after"))
    await off(trigger(stubs, "ticks"))
    after = await suppressed()
    await eventually(lambda: _more(suppressed, after), what="due times that are skipped after the restart")
    async with worker(stubs, ["ticks"]) as one:
        cleared = await clear_switch(stubs, row.switch_id, "default")
        run = await assigned(one)
        assert run.due_wall_ms >= cleared.ended_wall_ms, "what was due before is over"
        await one.do(2, **complete(run))
    listed = await stubs.job.ListOccurrences(
        job_pb2.ListOccurrencesRequest(tenant="default", job="ticks"), timeout=DEADLINE_S
    )
    due = [found for found in listed.occurrences if found.due_wall_ms < cleared.ended_wall_ms]
    assert due
    assert {found.state for found in due} <= {SKIPPED, job_pb2.OCCURRENCE_STATE_MISSED}


async def _more(count: Any, than: int) -> bool:
    return bool(await count() > than)
