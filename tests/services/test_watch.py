"""The change stream as a service: resume, compaction, filters, slow readers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tenure.v1 import switch_pb2, watch_pb2

from sidecar.core.commands import Limits
from sidecar.services import handlers
from sidecar.watch import WatchHub
from tests.services.calls import Code, acquire, open_session, refused, refused_stream, release
from tests.services.cluster import Cluster, Stubs, running_cluster
from tests.services.work import apply, assigned, clear_switch, complete, definition, set_switch, trigger, worker
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

KIND = watch_pb2.EventKind


def watch(stubs: Stubs, from_revision: int = 0, **fields: Any) -> Any:
    return stubs.watch.Watch(watch_pb2.WatchRequest(from_revision=from_revision, **{"tenant": "default", **fields}))


async def take(stream: Any, count: int) -> list[watch_pb2.Event]:
    """The next events of a watch."""
    events: list[watch_pb2.Event] = []
    async with asyncio.timeout(10):
        while len(events) < count:
            response = await stream.read()
            assert response is not grpc.aio.EOF, await stream.details()
            events += response.events
            assert not response.events or response.revision >= response.events[-1].revision
    return events


def last_revision(cluster: Cluster) -> int:
    revision: int = cluster[0].runtime.proposer.machine.revision
    return revision


async def test_from_now_on_and_from_a_revision(shared: Cluster) -> None:
    stubs = shared.stubs()
    live = watch(stubs)
    first = await live.read()
    assert not first.events, "the watch stands"
    session = await open_session(stubs)
    token = (await acquire(stubs, session, "watched")).token
    await release(stubs, session, "watched", token)
    seen = await take(live, 3)
    kinds = [KIND.EVENT_KIND_SESSION_OPENED, KIND.EVENT_KIND_LEASE_GRANTED, KIND.EVENT_KIND_LEASE_RELEASED]
    assert [event.kind for event in seen] == kinds
    assert [event.subject for event in seen] == [session, "watched", "watched"]
    assert (seen[1].token, seen[1].session_id, seen[1].tenant) == (token, session, "default")
    assert seen[0].wall_ms > 1_600_000_000_000
    again = watch(stubs, seen[1].revision)
    assert await take(again, 2) == seen[1:]
    for stream in (live, again):
        stream.cancel()


async def test_the_life_of_an_occurrence(shared: Cluster) -> None:
    """All that a consumer needs to follow the history without writing twice."""
    stubs = shared.stubs()
    start = last_revision(shared) + 1
    await apply(stubs, definition("watched-job"))
    created = await trigger(stubs, "watched-job")
    async with worker(stubs, ["watched-job"]) as one:
        run = await assigned(one)
        await one.do(2, **complete(run))
    fleet = await set_switch(stubs, switch_pb2.SWITCH_SCOPE_FLEET, switch_pb2.SWITCH_MODE_PAUSE, reason="why")
    await clear_switch(stubs, fleet.switch_id)
    stream = watch(stubs, start, subject_prefix="watched-job")
    seen = await take(stream, 5)
    kinds = [
        KIND.EVENT_KIND_JOB_APPLIED,
        KIND.EVENT_KIND_OCCURRENCE_CREATED,
        KIND.EVENT_KIND_RUN_ASSIGNED,
        KIND.EVENT_KIND_RUN_ENDED,
        KIND.EVENT_KIND_OCCURRENCE_ENDED,
    ]
    assert [event.kind for event in seen] == kinds
    assert {(event.due_wall_ms, event.sequence) for event in seen[1:]} == {(created.due_wall_ms, created.sequence)}
    assert (seen[2].run_id, seen[2].session_id, seen[2].token) == (run.run_id, one.session, run.token)
    assert [event.cause for event in seen[3:]] == ["succeeded", "succeeded"]
    of_switches = [KIND.EVENT_KIND_SWITCH_SET, KIND.EVENT_KIND_SWITCH_CLEARED]
    other = watch(stubs, start, tenant="other", kinds=of_switches)
    told = await take(other, 2)
    assert [(event.subject, event.tenant) for event in told] == [(fleet.switch_id, "")] * 2, "the fleet's concern all"
    assert (told[0].cause, told[0].actor, told[0].reason) == ("pause", "me", "why")
    for each in (stream, other):
        each.cancel()


async def test_filters(shared: Cluster) -> None:
    stubs = shared.stubs()
    mine, theirs = await open_session(stubs), await open_session(stubs, "other")
    start = last_revision(shared) + 1
    await acquire(stubs, mine, "filter/a")
    await acquire(stubs, theirs, "filter/b", tenant="other")
    await acquire(stubs, mine, "else")
    everything = watch(stubs, start, tenant="")
    assert [event.subject for event in await take(everything, 3)] == ["filter/a", "filter/b", "else"]
    prefixed = watch(stubs, start, subject_prefix="filter/", kinds=[KIND.EVENT_KIND_LEASE_GRANTED])
    other = watch(stubs, start, tenant="other")
    assert [event.subject for event in await take(prefixed, 1)] == ["filter/a"]
    assert [event.tenant for event in await take(other, 1)] == ["other"]
    for stream in (everything, prefixed, other):
        stream.cancel()
    await eventually(lambda: shared[0].runtime.hub.count == 0)


async def test_compacted_revisions(tmp_path: Path) -> None:
    """Every event is delivered, or reported as compacted."""
    async with running_cluster(tmp_path, limits=Limits(events_max=20)) as cluster:
        stubs, machine = cluster.stubs(), cluster[0].runtime.proposer.machine
        await eventually(lambda: machine.limits.events_max == 20)
        session = await open_session(stubs)
        for number in range(40):
            await acquire(stubs, session, f"compacted/{number}")
        first = machine.first_revision()
        assert first > 1
        for revision in (1, first - 1):
            refusal = await refused_stream(watch(stubs, revision))
            assert (refusal.code, refusal.reason) == (Code.OUT_OF_RANGE, "REVISION_COMPACTED")
            assert refusal.facts["first_revision"] == str(first)
        edge = watch(stubs, first)
        assert [event.revision for event in await take(edge, 20)] == list(range(first, first + 20))
        end = watch(stubs, machine.revision + 1)
        assert not (await end.read()).events
        future = await refused_stream(watch(stubs, machine.revision + 2))
        assert (future.code, future.reason) == (Code.OUT_OF_RANGE, "REVISION_FUTURE")


@pytest.mark.parametrize("by", ["lag", "silence"])
async def test_a_slow_reader_is_cut_off_and_resumes(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off for being far behind, or for not reading at all."""
    monkeypatch.setattr(*(handlers, "WRITE_MAX_S", 0.5) if by == "silence" else (WatchHub, "SLOW_AFTER_S", 0.2))
    async with running_cluster(tmp_path) as cluster:
        stubs, hub = cluster.stubs(), cluster[0].runtime.hub
        slow, quick = watch(stubs, 1), watch(stubs, 1)
        assert not (await slow.read()).events
        session = await open_session(stubs, ttl_ms=600_000)
        names = [f"slow/{number:05}/" + "x" * 200 for number in range(3_000)]
        reading = asyncio.ensure_future(take(quick, len(names) + 1))
        for begin in range(0, len(names), 100):
            await asyncio.gather(*(acquire(stubs, session, name, 30) for name in names[begin : begin + 100]))
        events = await reading
        assert sorted(event.subject for event in events[1:]) == names
        assert [event.revision for event in events] == list(range(1, len(events) + 1))
        quick.cancel()

        async def cut_off() -> bool:
            await open_session(stubs)  # the hub looks at who lags when there is something new
            return hub.count == 0

        await eventually(cut_off)
        got: list[watch_pb2.Event] = []

        async def drain() -> None:
            while (response := await slow.read()) is not grpc.aio.EOF:
                got.extend(response.events)

        refusal = await refused(drain())
        assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")
        resume = int(refusal.facts["resume_revision"])
        assert got == events[: len(got)]
        assert resume == got[-1].revision + 1
        resumed = watch(stubs, resume)
        assert (got + await take(resumed, len(events) - len(got)))[: len(events)] == events
        resumed.cancel()


async def test_a_watch_goes_on_at_another_node(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, 3) as cluster:
        leader, follower = cluster.stubs(cluster.leader), cluster.stubs(cluster.follower)
        session = await open_session(leader)
        first = watch(leader, 1)
        seen = await take(first, 1)
        first.cancel()
        await acquire(leader, session, "goes/on")
        second = watch(follower, seen[-1].revision + 1)
        assert [event.subject for event in await take(second, 1)] == ["goes/on"]
        second.cancel()


async def test_a_stopping_sidecar_ends_its_watches(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        stream = watch(cluster.stubs())
        assert not (await stream.read()).events
        cluster[0].runtime.hub.close()
        refusal = await refused(stream.read())
        assert (refusal.code, refusal.reason, refusal.definite) == (Code.UNAVAILABLE, "STREAM_ENDED", True)
