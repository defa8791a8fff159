"""Cluster, health and reflection; three nodes, and what is said without a quorum."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tenure.v1 import cluster_pb2, dedup_pb2, job_pb2, lease_pb2, session_pb2, switch_pb2

from sidecar.clock import SystemClock
from sidecar.scheduling.zones import tzdata_version
from sidecar.services import SERVER_OPTIONS, specs
from sidecar.services.explain import Explainer
from tests.services.calls import DEADLINE_S, Code, acquire, get_lease, open_session, refused
from tests.services.cluster import Cluster, Sidecar, Stubs, running_cluster
from tests.services.work import apply, assigned, definition, get_job, machine, set_switch, trigger, wall_ms, worker
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

Health = health_pb2.HealthCheckResponse
SERVICES = [f"tenure.v1.{name}Service" for name in ("Session", "Lease", "Dedup", "Job", "Switch", "Watch", "Cluster")]


async def status(cluster: Cluster, position: int = 0) -> cluster_pb2.GetStatusResponse:
    stubs = cluster.stubs(cluster[position])
    return await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=DEADLINE_S)


async def test_status_digest_and_snapshot(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    await acquire(stubs, session, "status")
    seen = await status(shared)
    assert (seen.cluster_id, seen.node_id, seen.role, seen.leader_id) == (
        "c-test",
        "n1",
        cluster_pb2.NODE_ROLE_LEADER,
        "n1",
    )
    assert (seen.ready, seen.not_ready_reason, seen.voter, seen.draining) == (True, "", True, False)
    assert seen.sessions >= 1 and seen.leases >= 1
    assert seen.last_index >= seen.commit_index >= seen.applied_index >= seen.first_index > 0
    assert seen.version and seen.uptime_ms > 0 and seen.wall_ms > seen.cluster_ms
    digest = await stubs.cluster.GetDigest(cluster_pb2.GetDigestRequest(), timeout=DEADLINE_S)
    assert len(digest.digest) == 32
    assert not digest.read.linearizable
    taken = await stubs.cluster.TakeSnapshot(cluster_pb2.TakeSnapshotRequest(), timeout=DEADLINE_S)
    assert taken.snapshot_index >= digest.read.applied_index
    assert taken.size_bytes > 0
    assert (await status(shared)).snapshot_index == taken.snapshot_index


@pytest.mark.asyncio(loop_scope="function")
async def test_status_of_scheduled_work(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = cluster.stubs()
    monkeypatch.setattr(specs, "FLAG_AGE_MAX_MS", -1)
    shadow = definition("old-flag", mode=job_pb2.JOB_MODE_SHADOW)
    await apply(stubs, shadow, definition("plain", timeout_ms=60_000))
    await trigger(stubs, "plain")
    async with worker(stubs, ["plain"]) as one:
        await assigned(one)
        await set_switch(
            stubs, switch_pb2.SWITCH_SCOPE_JOB, switch_pb2.SWITCH_MODE_PAUSE, tenant="default", job="plain"
        )
        seen = await status(cluster)
    assert (seen.jobs, seen.runs, seen.occurrences, seen.switches, seen.kill_epoch) == (2, 1, 1, 1, 0)
    assert seen.tzdata_version == seen.cluster_tzdata_version == tzdata_version()
    assert (seen.schedule_lag_ms, seen.schedule_held_reason) == (0, "")
    assert [warning for warning in seen.warnings if "default/old-flag" in warning and "shadow mode" in warning]
    assert not [warning for warning in seen.warnings if "plain" in warning]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_clock_that_stood_ahead(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has dealt with is not due again, and that is said: else the job would only seem to have stopped."""
    stubs, now_ms, minute_ms = cluster.stubs(), wall_ms(), 60_000
    by_minutes = {"interval": {"every_ms": minute_ms, "anchor_wall_ms": 0}}
    await apply(stubs, definition("early", schedule=by_minutes), definition("late"))

    monkeypatch.setattr(SystemClock, "wall_ms", lambda _: wall_ms() + 60 * minute_ms)

    async def ahead() -> bool:
        return (await get_job(stubs, "early")).settled_wall_ms > now_ms + 59 * minute_ms

    await eventually(ahead, what="due times of the wrong hour")
    monkeypatch.undo()
    settled_ms = (await get_job(stubs, "early")).settled_wall_ms

    assert [warning for warning in (await status(cluster)).warnings if "1 jobs" in warning and "early" in warning]
    job = machine(cluster).job("default", "early")
    passed_over_ms = settled_ms // minute_ms * minute_ms
    said = Explainer(cluster[0].runtime).nothing(job, passed_over_ms)
    assert "is not run" in said and "stood ahead" in said
    request = job_pb2.PreviewJobRequest(tenant="default", name="early", count=1)
    shown = await stubs.job.PreviewJob(request, timeout=DEADLINE_S)
    assert shown.due[0].due_wall_ms == passed_over_ms + minute_ms


async def test_leadership_of_a_single_node_stays(shared: Cluster) -> None:
    stubs = shared.stubs()
    alone = await refused(stubs.cluster.TransferLeadership(cluster_pb2.TransferLeadershipRequest(), timeout=DEADLINE_S))
    assert (alone.code, alone.reason) == (Code.FAILED_PRECONDITION, "LEADERSHIP_NOT_TRANSFERRED")
    request = cluster_pb2.TransferLeadershipRequest(to_node_id="n9")
    unknown = await refused(stubs.cluster.TransferLeadership(request, timeout=DEADLINE_S))
    assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "NODE_NOT_FOUND")


def health_stub(stubs: Stubs) -> Any:
    return health_pb2_grpc.HealthStub(stubs.channel)  # type: ignore[no-untyped-call]


async def test_health(shared: Cluster) -> None:
    health = health_stub(shared.stubs())
    runtime = shared[0].runtime
    for service in ("", *SERVICES):
        watching = health.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watching.read()).status == Health.SERVING
        runtime.draining = True
        for told in runtime.on_ready_change:
            told("draining")
        assert (await watching.read()).status == Health.NOT_SERVING
        # Without a deadline: probes need none.
        assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == Health.NOT_SERVING
        runtime.draining = False
        for told in runtime.on_ready_change:
            told("")
        assert (await watching.read()).status == Health.SERVING
        watching.cancel()
    unknown = health_pb2.HealthCheckRequest(service="nobody")
    assert (await refused(health.Check(unknown))).code is Code.NOT_FOUND
    watching = health.Watch(unknown)
    assert (await watching.read()).status == Health.SERVICE_UNKNOWN
    watching.cancel()
    listed = (await health.List(health_pb2.HealthListRequest())).statuses
    assert set(SERVICES) <= set(listed)


async def test_clients_may_ping_every_ten_seconds() -> None:
    """G01: with gRPC's defaults, a client that pings a quiet stream oftener than every five minutes is told to go away.
    And this end finds a dead client within half a minute."""
    options = dict(SERVER_OPTIONS)
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000 / 2
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.max_pings_without_data"] == 0
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 30_000
    assert not {"grpc.max_connection_age_ms", "grpc.max_connection_idle_ms"} & set(options)


async def test_reflection(shared: Cluster) -> None:
    channel = shared.stubs().channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == names
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="tenure.v1.LeaseService"))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


async def test_calls_are_counted(shared: Cluster) -> None:
    runtime = shared[0].runtime
    counted: list[tuple[str, str, str]] = []
    before = runtime.observe_request
    runtime.observe_request = lambda service, method, code, _: counted.append((service, method, code))
    try:
        stubs = shared.stubs()
        await get_lease(stubs, "counted")
        await refused(get_lease(stubs, ""))
        await eventually(lambda: len(counted) == 2)
    finally:
        runtime.observe_request = before
    service = "tenure.v1.LeaseService"
    assert counted == [(service, "GetLease", "OK"), (service, "GetLease", "INVALID_ARGUMENT")]


async def test_any_node_answers(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, 3) as cluster:
        session = await open_session(cluster.stubs(cluster.follower))
        tokens = []
        for position, sidecar in enumerate(cluster.sidecars):
            stubs = cluster.stubs(sidecar)
            tokens.append((await acquire(stubs, session, f"any/{position}")).token)
            for reader in cluster.sidecars:  # linearizable: what was acknowledged anywhere is seen everywhere
                lease = await get_lease(cluster.stubs(reader), f"any/{position}")
                assert lease.holders[0].token == tokens[-1]
        assert tokens == sorted(set(tokens))
        digests: dict[int, set[str]] = {}

        async def equal() -> bool:
            for sidecar in cluster.sidecars:
                answer = await cluster.stubs(sidecar).cluster.GetDigest(
                    cluster_pb2.GetDigestRequest(), timeout=DEADLINE_S
                )
                digests.setdefault(answer.read.applied_index, set()).add(answer.digest)
            assert all(len(found) == 1 for found in digests.values())
            return len({sidecar.runtime.node.status().applied_index for sidecar in cluster.sidecars}) == 1

        await eventually(equal)


async def move(asked: Stubs, to: str = "") -> cluster_pb2.TransferLeadershipResponse:
    request = cluster_pb2.TransferLeadershipRequest(to_node_id=to)
    return await asked.cluster.TransferLeadership(request, timeout=DEADLINE_S)


async def heard_by_leader(cluster: Cluster) -> None:
    """A leader hands over only to a node that has answered it."""
    peers = cluster.leader.runtime.node.status
    await eventually(lambda: all(contact_ms >= 0 for _, _, contact_ms in peers().peers.values()))


async def test_leadership_moves_at_the_request_of_any_node(tmp_path: Path) -> None:
    """A follower passes it on, and answers when it knows the new leader: itself, a third node, or whoever is fit."""
    async with running_cluster(tmp_path, 3) as cluster:
        await heard_by_leader(cluster)
        for asked_leads, target in ((True, "other"), (False, "itself"), (False, "third"), (False, "anybody")):
            leader = cluster.leader
            one, other = (sidecar for sidecar in cluster.sidecars if sidecar is not leader)
            to = {"other": other, "itself": one, "third": other, "anybody": None}[target]
            stubs = cluster.stubs(leader if asked_leads else one)
            before = leader.runtime.node.status().term
            moved = await move(stubs, to.node_id if to else "")
            assert moved.term > before, target
            assert moved.leader_id in ([to.node_id] if to else [one.node_id, other.node_id]), target
            await eventually(lambda: any(sidecar.leads() for sidecar in cluster.sidecars))
            assert cluster.leader.node_id == moved.leader_id
            await heard_by_leader(cluster)


def knows(asked: Sidecar, leader: Sidecar) -> bool:
    """A node that was started last may have heard of its leader, and have no connection of its own to it yet."""
    status = asked.runtime.node.status()
    return status.leader == leader.node_id and (asked is leader or status.peers[leader.node_id][0])


async def test_leadership_that_does_not_move(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, 3) as cluster:
        leader = cluster.leader
        one, other = (sidecar for sidecar in cluster.sidecars if sidecar is not leader)
        for asked in cluster.sidecars:
            await eventually(functools.partial(knows, asked, leader))
            unknown = await refused(move(cluster.stubs(asked), "n9"))
            assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "NODE_NOT_FOUND")
            assert unknown.facts["nodes"] == "n1,n2,n3"
            there = await refused(move(cluster.stubs(asked), leader.node_id))
            assert (there.code, there.reason) == (Code.FAILED_PRECONDITION, "LEADERSHIP_NOT_TRANSFERRED")
            assert f"{leader.node_id} leads already" in there.message
            assert there.facts["leader"] == leader.node_id
        await other.stop()
        await eventually(lambda: not leader.runtime.node.status().peers[other.node_id][0])
        for asked in (leader, one):
            away = await refused(move(cluster.stubs(asked), other.node_id))
            assert (away.code, away.reason) == (Code.FAILED_PRECONDITION, "LEADERSHIP_NOT_TRANSFERRED")
        await leader.stop()
        await eventually(lambda: not one.runtime.node.status().leader)
        nobody = await refused(move(cluster.stubs(one)))
        assert (nobody.reason, nobody.facts["leader"]) == ("LEADERSHIP_NOT_TRANSFERRED", "")


async def test_without_a_quorum(tmp_path: Path) -> None:
    """Refused in about two seconds, and never answered from what this node happens to know, unless asked for that."""
    async with running_cluster(tmp_path, 3) as cluster:
        kept = cluster.follower
        stubs = cluster.stubs(kept)
        session = await open_session(stubs, ttl_ms=60_000)
        token = (await acquire(stubs, session, "cut/off")).token
        for sidecar in cluster.sidecars:
            if sidecar is not kept:
                await sidecar.stop()
        await eventually(lambda: not kept.ready())
        named: dict[str, Any] = {"tenant": "default"}
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "renew": lambda: stubs.session.RenewSession(
                session_pb2.RenewSessionRequest(session_id=session, **named), timeout=10
            ),
            "check": lambda: stubs.lease.CheckLease(
                lease_pb2.CheckLeaseRequest(name="cut/off", token=token, **named), timeout=10
            ),
            "acquire": lambda: acquire(stubs, session, "cut/off", 10),
            "wait": lambda: acquire(stubs, session, "cut/off", 10, wait_ms=9_000),
            "get": lambda: stubs.lease.GetLease(lease_pb2.GetLeaseRequest(name="cut/off", **named), timeout=10),
            "begin": lambda: stubs.dedup.BeginRecord(
                dedup_pb2.BeginRecordRequest(key="k", session_id=session, **named), timeout=10
            ),
        }
        started_s = time.monotonic()
        for name, refusal in zip(
            calls, await asyncio.gather(*(refused(call()) for call in calls.values())), strict=True
        ):
            assert (refusal.code, refusal.definite) == (Code.UNAVAILABLE, True), name
            assert refusal.reason in ("NO_LEADER", "READ_NOT_CONFIRMED"), name
            assert refusal.detail.retry_delay_ms > 0
        assert time.monotonic() - started_s < 5, "long before the callers' deadlines"
        local = lease_pb2.GetLeaseRequest(name="cut/off", consistency=lease_pb2.CONSISTENCY_LOCAL, **named)
        answer = await stubs.lease.GetLease(local, timeout=DEADLINE_S)
        assert answer.lease.holders[0].token == token
        assert answer.read.staleness_ms > 0
        seen = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=DEADLINE_S)
        assert (seen.ready, bool(seen.not_ready_reason), seen.leader_id) == (False, True, "")
        health = health_stub(stubs)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Health.NOT_SERVING
