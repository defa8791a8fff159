"""The agent's stream: operations, keepalives, pushes, takeover, breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tenure.v1 import dedup_pb2, error_pb2, lease_pb2, session_pb2

from sidecar.services import stream as stream_module
from sidecar.services.outbox import ITEMS_MAX
from tests.services.calls import (
    DEADLINE_S,
    Agent,
    AttachRefused,
    Code,
    acquire,
    agent,
    get_lease,
    open_session,
    refused,
    release,
)
from tests.services.cluster import Cluster, running_cluster
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

Acquire = lease_pb2.AcquireLeaseRequest
Release = lease_pb2.ReleaseLeaseRequest


def machine(cluster: Cluster) -> Any:
    return cluster[0].runtime.proposer.machine


def session_row(cluster: Cluster, session: str) -> Any:
    return machine(cluster).session(session)


async def in_line(cluster: Cluster, name: str, count: int = 1) -> None:
    await eventually(lambda: (row := machine(cluster).lease("default", name)) and len(row.waiters) == count)


# ---- attach -------------------------------------------------------------------------------------------------------


async def test_open_work_close(shared: Cluster) -> None:
    async with agent(shared.stubs(), info={"agent": "a"}, ttl_ms=30_000) as one:
        attached = one.attached
        assert (attached.resumed, attached.node_id, attached.session.connected) == (False, "n1", True)
        assert attached.session.info.agent == "a"
        assert attached.held_complete
        grant = await one.acquire(1, "stream/work")
        assert (grant.already_held, grant.ttl_ms) == (False, 30_000)
        checked = await one.do(2, check_lease=lease_pb2.CheckLeaseRequest(name="stream/work", token=grant.token))
        assert checked.check_lease.state == lease_pb2.TOKEN_STATE_CURRENT
        seen = await one.do(3, get_lease=lease_pb2.GetLeaseRequest(name="stream/work"))
        assert seen.get_lease.lease.holders[0].session_id == one.session
        begun = await one.do(4, begin_record=dedup_pb2.BeginRecordRequest(key="stream/key"))
        assert begun.begin_record.outcome == dedup_pb2.BEGIN_OUTCOME_NEW
        completed = await one.do(
            5, complete_record=dedup_pb2.CompleteRecordRequest(key="stream/key", attempt=1, result=b"r")
        )
        assert not completed.complete_record.already_completed
        record = await one.do(6, get_record=dedup_pb2.GetRecordRequest(key="stream/key"))
        assert record.get_record.record.result == b"r"
        released = await one.do(7, release_lease=Release(name="stream/work", token=grant.token))
        assert released.release_lease.revision > grant.revision
        await one.start(8, close_session=session_pb2.CloseSessionRequest())
        assert await one.end() is None
        assert one.results[8].HasField("close_session")
        assert not one.pushes
    assert session_row(shared, one.session) is None


async def test_many_operations_in_one_message_are_answered_in_few(shared: Cluster) -> None:
    async with agent(shared.stubs()) as one:
        count = 500
        await one.send(
            operations=[
                session_pb2.Operation(id=number, timeout_ms=5_000, acquire_lease=Acquire(name=f"bulk/{number}"))
                for number in range(1, count + 1)
            ]
        )
        await one.until(lambda: len(one.results) == count)
        tokens = [one.results[number].acquire_lease.token for number in range(1, count + 1)]
        assert tokens == sorted(set(tokens)), "operations start in the order given"
        assert one.messages < count / 10


@pytest.mark.parametrize(
    ("attach", "code", "reason"),
    [
        ({"tenant": "a b", "open": {}}, Code.INVALID_ARGUMENT, "TENANT_INVALID"),
        ({"tenant": "unknown", "open": {}}, Code.NOT_FOUND, "TENANT_NOT_FOUND"),
        ({"tenant": "default"}, Code.INVALID_ARGUMENT, "FIELD_REQUIRED"),
        ({"tenant": "default", "open": {"ttl_ms": 1}}, Code.INVALID_ARGUMENT, "VALUE_OUT_OF_RANGE"),
        ({"tenant": "default", "session_id": "gone"}, Code.NOT_FOUND, "SESSION_NOT_FOUND"),
    ],
)
async def test_attach_refused(shared: Cluster, attach: dict[str, Any], code: Any, reason: str) -> None:
    one = Agent(shared.stubs())
    await one.send(attach=session_pb2.Attach(**attach))
    one.listen()
    ended = await one.end()
    assert ended is not None
    assert (ended.code, ended.reason) == (code, reason)


async def test_a_session_of_another_tenant(shared: Cluster) -> None:
    foreign = await open_session(shared.stubs(), "other")
    with pytest.raises(AttachRefused) as caught:
        await Agent(shared.stubs()).attach(foreign)
    assert (caught.value.refusal.code, caught.value.refusal.reason) == (Code.PERMISSION_DENIED, "SESSION_FOREIGN")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"operations": [{"id": 1}]}], "STREAM_PROTOCOL"),
        ([{"attach": {"tenant": "default", "open": {}}, "keep_alive": {"id": 1}}], "STREAM_PROTOCOL"),
        ([{"attach": {"tenant": "default", "open": {}}}] * 2, "STREAM_PROTOCOL"),
        ([{"attach": {"tenant": "default", "open": {}}}, {"operations": [{"id": 0}]}], "STREAM_PROTOCOL"),
        ([{"attach": {"tenant": "default", "open": {}}}, {"acknowledged_id": -1}], "VALUE_OUT_OF_RANGE"),
    ],
)
async def test_broken_rules_end_the_stream(shared: Cluster, messages: list[dict[str, Any]], reason: str) -> None:
    one = Agent(shared.stubs())
    one.listen()
    for message in messages:
        await one.send(**message)
    ended = await one.end()
    assert ended is not None
    assert (ended.code, ended.reason) == (Code.INVALID_ARGUMENT, reason)


async def test_a_message_that_is_not_utf8_ends_the_stream(shared: Cluster) -> None:
    stubs = shared.stubs()
    call: Any = stubs.channel.stream_stream("/tenure.v1.SessionService/Connect")()
    await call.write(b"\x0a\x02\x0a\xff")

    async def read() -> None:
        await call.read()
        await call

    refusal = await refused(read())
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


# ---- operations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "code", "reason"),
    [
        ({"get_lease": {"name": "x"}, "timeout_ms": 0}, Code.INVALID_ARGUMENT, "DEADLINE_REQUIRED"),
        ({"get_lease": {"name": "x"}, "timeout_ms": -1}, Code.INVALID_ARGUMENT, "VALUE_OUT_OF_RANGE"),
        ({}, Code.INVALID_ARGUMENT, "FIELD_REQUIRED"),
        ({"acquire_lease": {"name": ""}}, Code.INVALID_ARGUMENT, "NAME_INVALID"),
        ({"acquire_lease": {"name": "x", "session_id": "else"}}, Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        ({"acquire_lease": {"name": "x", "tenant": "other"}}, Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        ({"release_lease": {"name": "x", "token": 10**15}}, Code.FAILED_PRECONDITION, "TOKEN_UNKNOWN"),
        ({"get_record": {"key": "never begun"}}, Code.NOT_FOUND, "RECORD_NOT_FOUND"),
        (
            {"complete_record": {"key": "k", "attempt": 1, "result": b"x" * 65_537}},
            Code.INVALID_ARGUMENT,
            "FIELD_TOO_LARGE",
        ),
    ],
)
async def test_a_refused_operation(shared: Cluster, operation: dict[str, Any], code: Any, reason: str) -> None:
    async with agent(shared.stubs()) as one:
        await one.send(operations=[session_pb2.Operation(id=1, **{"timeout_ms": 1_000, **operation})])
        error = (await one.result(1)).error
        assert (error.code, error.detail.reason) == (code.value[0], reason)
        assert error.detail.outcome == error_pb2.OUTCOME_DEFINITE
        assert await one.do(2, get_lease=lease_pb2.GetLeaseRequest(name="still/fine"))


async def test_a_repeated_operation_has_the_first_outcome(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs, disconnect_grace_ms=5_000) as one:
        grant = await one.acquire(1, "repeat/op")
        one.results.clear()
        again = await one.acquire(1, "repeat/op")
        assert (again.token, again.already_held) == (grant.token, False)
        one.results.clear()
        reused = await one.do(1, acquire_lease=Acquire(name="repeat/other"))
        assert reused.error.detail.reason == "REQUEST_ID_REUSED"
        session = one.session
    async with agent(stubs, session) as two:
        assert two.attached.resumed
        assert [(held.name, held.token) for held in two.attached.held] == [("repeat/op", grant.token)]
        assert (await two.acquire(1, "repeat/op")).token == grant.token
        await two.send(acknowledged_id=1)
        fresh = await two.acquire(2, "repeat/op")
        assert (fresh.token, fresh.already_held) == (grant.token, True)
        two.results.clear()
        forgotten = await two.do(1, acquire_lease=Acquire(name="repeat/op"))
        assert forgotten.error.detail.reason == "REQUEST_FORGOTTEN"


async def test_too_many_operations(shared: Cluster) -> None:
    stubs = shared.stubs()
    holder = await open_session(stubs)
    await acquire(stubs, holder, "full/stream")
    async with agent(stubs) as one:
        count = stream_module.OPERATIONS_MAX
        waiting = Acquire(name="full/stream", wait_ms=60_000)
        await one.send(
            operations=[
                session_pb2.Operation(id=number, timeout_ms=60_000, acquire_lease=waiting)
                for number in range(1, count + 3)
            ]
        )
        for number in (count + 1, count + 2):
            error = (await one.result(number)).error
            assert (error.code, error.detail.reason) == (Code.RESOURCE_EXHAUSTED.value[0], "STREAM_OPERATIONS_FULL")
            assert error.detail.retry_delay_ms > 0


async def test_waiting_and_giving_up(shared: Cluster) -> None:
    stubs = shared.stubs()
    holder = await open_session(stubs)
    token = (await acquire(stubs, holder, "wait/stream")).token
    async with agent(stubs) as one, agent(stubs) as two:
        await one.start(1, 60_000, acquire_lease=Acquire(name="wait/stream", wait_ms=50_000))
        await in_line(shared, "wait/stream")
        await two.start(1, 60_000, acquire_lease=Acquire(name="wait/stream", wait_ms=50_000))
        await in_line(shared, "wait/stream", 2)
        await one.send(cancelled_ids=[1, 7])
        given_up = (await one.result(1)).error
        assert (given_up.code, given_up.detail.reason) == (Code.ABORTED.value[0], "WAIT_CANCELLED")
        await release(stubs, holder, "wait/stream", token)
        grant = (await two.result(1)).acquire_lease
        assert grant.token > token
        short = (await one.do(2, 200, acquire_lease=Acquire(name="wait/stream", wait_ms=50_000))).error
        assert (short.code, short.detail.reason) == (Code.ALREADY_EXISTS.value[0], "LEASE_HELD")
        assert short.detail.facts["holder"] == two.session
        assert not machine(shared).lease("default", "wait/stream").waiters


async def test_an_acquire_that_is_given_up_at_once_holds_nothing(shared: Cluster) -> None:
    async with agent(shared.stubs()) as one:
        operation = session_pb2.Operation(id=1, timeout_ms=5_000, acquire_lease=Acquire(name="give/up"))
        await one.send(operations=[operation], cancelled_ids=[1])
        error = (await one.result(1)).error
        assert error.detail.reason == "WAIT_CANCELLED"
        assert machine(shared).lease("default", "give/up") is None
        held = await one.acquire(2, "give/up")
        operation = session_pb2.Operation(id=3, timeout_ms=5_000, acquire_lease=Acquire(name="give/up"))
        await one.send(operations=[operation], cancelled_ids=[3])
        again = (await one.result(3)).acquire_lease
        assert (again.token, again.already_held) == (held.token, True)
        assert not one.pushes


async def test_random_cancellations_leave_nothing(shared: Cluster) -> None:
    """A thousand acquires, most of them given up at some moment: in the end nobody holds and nobody waits."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    stubs, rng = shared.stubs(), random.Random(seed)
    async with agent(stubs) as one, agent(stubs) as two:

        async def live(agent_: Agent, number: int) -> None:
            name = f"storm/{number % 3}"
            operation = session_pb2.Operation(
                id=number, timeout_ms=20_000, acquire_lease=Acquire(name=name, wait_ms=rng.choice([0, 15_000]))
            )
            await agent_.send(operations=[operation], cancelled_ids=[number] if rng.random() < 0.2 else [])
            if rng.random() < 0.7:
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
                await agent_.send(cancelled_ids=[number])
            result = await agent_.result(number)
            if result.HasField("acquire_lease"):
                token = result.acquire_lease.token
                await agent_.do(10_000 + number, release_lease=Release(name=name, token=token))

        for start in range(1, 500, 50):
            lives = [live(one, n) for n in range(start, start + 50)] + [live(two, n) for n in range(start, start + 50)]
            await asyncio.gather(*lives)
        await eventually(lambda: not machine(shared).leases("default", "storm/", "", 9))


async def test_a_place_in_line_survives_the_stream(shared: Cluster) -> None:
    stubs = shared.stubs()
    holder = await open_session(stubs)
    token = (await acquire(stubs, holder, "place/kept")).token
    async with agent(stubs, disconnect_grace_ms=10_000) as one:
        await one.start(1, 60_000, acquire_lease=Acquire(name="place/kept", wait_ms=50_000))
        await in_line(shared, "place/kept")
    async with agent(stubs) as rival:
        await rival.start(1, 60_000, acquire_lease=Acquire(name="place/kept", wait_ms=50_000))
        await in_line(shared, "place/kept", 2)
        async with agent(stubs, one.session) as resumed:
            await resumed.start(1, 60_000, acquire_lease=Acquire(name="place/kept", wait_ms=50_000))
            await resumed.do(2, get_lease=lease_pb2.GetLeaseRequest(name="place/kept"))
            await release(stubs, holder, "place/kept", token)
            assert (await resumed.result(1)).acquire_lease.token > token
        assert 1 not in rival.results


async def test_waiting_for_a_record(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one, agent(stubs) as two:
        begin = dedup_pb2.BeginRecordRequest(key="stream/outcome", wait_ms=50_000)
        await one.do(1, begin_record=begin)
        await two.start(1, 60_000, begin_record=begin)
        await two.start(2, 60_000, begin_record=begin)
        await two.do(3, get_record=dedup_pb2.GetRecordRequest(key="stream/outcome"))
        await two.send(cancelled_ids=[2])
        assert (await two.result(2)).error.detail.reason == "WAIT_CANCELLED"
        failed = dedup_pb2.FailRecordRequest(key="stream/outcome", attempt=1, retryable=True)
        await one.do(2, fail_record=failed)
        mine = (await two.result(1)).begin_record
        assert (mine.outcome, mine.record.attempt) == (dedup_pb2.BEGIN_OUTCOME_NEW, 2)


# ---- keepalives and pushes ----------------------------------------------------------------------------------------


async def test_keepalives_keep_the_session(shared: Cluster) -> None:
    async with agent(shared.stubs(), ttl_ms=600) as one:
        opened_ms = one.attached.session.opened_ms
        number = 0
        while session_row(shared, one.session).deadline_ms < opened_ms + 1_500:
            number += 1
            await one.send(keep_alive=session_pb2.KeepAlive(id=number))
            await one.until(lambda: len(one.acks) == number)  # noqa: B023 - it is awaited here
            assert one.acks[number] == 600
        assert not one.pushes


async def test_a_hung_agent_is_told_and_cut_off(shared: Cluster) -> None:
    """Connected, but it sends nothing: its ttl ends the session, and the stream with it."""
    async with agent(shared.stubs(), ttl_ms=500) as one:
        await one.acquire(1, "hung")
        assert (await one.push("session_lost")).cause == "expired"
        ended = await one.end()
        assert ended is not None
        assert (ended.code, ended.reason) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")
    assert machine(shared).lease("default", "hung") is None


async def test_losses_and_grants_are_pushed(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one, agent(stubs) as two:
        token = (await one.acquire(1, "pushed")).token
        transfer = lease_pb2.TransferLeaseRequest(
            tenant="default", name="pushed", token=token, to_session_id=two.session, actor="ops", reason="drill"
        )
        moved = await stubs.lease.TransferLease(transfer, timeout=DEADLINE_S)
        lost = await one.push("lease_lost")
        assert (lost.name, lost.token, lost.cause, lost.current_token) == (
            "pushed",
            token,
            "transferred",
            moved.token,
        )
        granted = await two.push("granted")
        assert (granted.name, granted.token) == ("pushed", moved.token)
        await release(stubs, "", "pushed", moved.token, actor="ops", reason="over")
        lost = await two.push("lease_lost")
        assert (lost.token, lost.cause, lost.current_token) == (moved.token, "operator", 0)


async def test_what_an_agent_gives_back_itself_is_no_news(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one, agent(stubs) as two:
        first = (await one.acquire(1, "own/1")).token
        second = (await one.acquire(2, "own/2")).token
        await one.do(3, release_lease=Release(name="own/1", token=first))
        transfer = lease_pb2.TransferLeaseRequest(name="own/2", token=second, to_session_id=two.session)
        moved = (await one.do(4, transfer_lease=transfer)).transfer_lease
        assert (await two.push("granted")).token == moved.token
        third = (await one.acquire(5, "own/3")).token
        # Refused as the holder's own act; a later release by somebody else is news.
        await one.do(6, transfer_lease=lease_pb2.TransferLeaseRequest(name="own/3", token=third, to_session_id="gone"))
        await release(stubs, one.session, "own/3", third)
        lost = await one.push("lease_lost")
        assert (lost.name, lost.cause) == ("own/3", "released")
        assert len(one.pushes) == 1


async def test_a_session_that_is_closed_by_somebody_else(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one:
        request = session_pb2.CloseSessionRequest(tenant="default", session_id=one.session)
        await stubs.session.CloseSession(request, timeout=DEADLINE_S)
        assert (await one.push("session_lost")).cause == "closed"
        ended = await one.end()
        assert ended is not None
        assert ended.reason == "SESSION_NOT_FOUND"


# ---- takeover and breaks ------------------------------------------------------------------------------------------


async def test_a_second_stream_takes_over(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one:
        token = (await one.acquire(1, "take/over")).token
        async with agent(shared.stubs(), one.session) as two:
            ended = await one.end()
            assert ended is not None
            assert (ended.code, ended.reason, ended.definite) == (Code.ABORTED, "SESSION_TAKEN_OVER", True)
            assert (await two.acquire(2, "take/over")).token == token
            await two.send(keep_alive=session_pb2.KeepAlive(id=1))
            await two.until(lambda: 1 in two.acks)
            assert session_row(shared, one.session).connection


async def test_a_late_attach_is_refused(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs) as one:
        two = Agent(shared.stubs())
        two.listen()
        await two.send(attach=session_pb2.Attach(tenant="default", session_id=one.session, generation=3))
        await one.end()
        late = Agent(shared.stubs())
        late.listen()
        await late.send(attach=session_pb2.Attach(tenant="default", session_id=one.session, generation=2))
        ended = await late.end()
        assert ended is not None
        assert (ended.code, ended.reason, ended.definite) == (Code.ABORTED, "SESSION_TAKEN_OVER", True)
        assert await two.acquire(1, "not/taken/over")
        await two.hang_up()


async def test_a_broken_stream_cuts_the_deadline(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs, ttl_ms=60_000, disconnect_grace_ms=300) as one:
        await one.acquire(1, "broken")
    await eventually(lambda: (row := session_row(shared, one.session)) is None or not row.connection)
    next_holder = await open_session(stubs)
    assert (await acquire(stubs, next_holder, "broken", wait_ms=4_000)).token


async def test_a_half_closed_stream_is_a_broken_one(shared: Cluster) -> None:
    async with agent(shared.stubs(), ttl_ms=60_000, disconnect_grace_ms=0) as one:
        await one.call.done_writing()
        assert await one.end() is None
    await eventually(lambda: session_row(shared, one.session) is None)


async def test_an_agent_that_was_silent_before_the_break_keeps_its_ttl(
    shared: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SILENCE_MAX_S", 0.0)
    async with agent(shared.stubs(), ttl_ms=60_000, disconnect_grace_ms=0) as one:
        connection = session_row(shared, one.session).connection
        await eventually(lambda: connection in shared[0].runtime.streams)
    await eventually(lambda: connection not in shared[0].runtime.streams)
    await open_session(shared.stubs())  # anything the break had proposed is before this
    assert session_row(shared, one.session).connection == connection


async def test_a_session_opened_twice_by_one_request(shared: Cluster) -> None:
    stubs = shared.stubs()
    async with agent(stubs, request_id="the-same", disconnect_grace_ms=9_000) as one:
        pass
    async with agent(stubs, request_id="the-same", disconnect_grace_ms=9_000) as two:
        assert two.session == one.session
        assert session_row(shared, two.session).connection
        assert await two.acquire(1, "twice/opened")


async def test_the_ttl_counts_from_the_request_that_was_answered(shared: Cluster) -> None:
    """A client that was not answered asks again, and counts from then: whatever opened the session, this renewed it."""
    stubs = shared.stubs()
    async with agent(stubs, request_id="renews", ttl_ms=60_000) as one:
        opened = session_row(shared, one.session)
        await eventually(lambda: shared[0].proposer.cluster_now_ms() > opened.deadline_ms - 60_000)
        asked_ms = shared[0].proposer.cluster_now_ms()
        async with agent(stubs, request_id="renews", ttl_ms=60_000) as two:
            assert two.session == one.session
            assert two.attached.session.deadline_ms >= asked_ms + 60_000


async def test_a_slow_reader_is_cut_off(shared: Cluster) -> None:
    stubs = shared.stubs()
    one = Agent(stubs)
    await one.send(attach=session_pb2.Attach(tenant="default", open=session_pb2.OpenSessionRequest()))
    attached = await one.call.read()
    assert isinstance(attached, session_pb2.ConnectResponse)
    connection = session_row(shared, attached.attached.session.session_id).connection
    for start in (1, ITEMS_MAX):  # the first part fills what the network takes, the second what the sidecar keeps
        refused_ones = [
            session_pb2.Operation(id=number, timeout_ms=5_000, get_lease=lease_pb2.GetLeaseRequest())
            for number in range(start, start + ITEMS_MAX - 100)
        ]
        await one.send(operations=refused_ones)
    await eventually(lambda: connection not in shared[0].runtime.streams)
    one.listen()
    ended = await one.end()
    assert ended is not None
    assert (ended.code, ended.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER"), ended.message


# ---- the node -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def test_draining(folder: Path) -> None:
    async with running_cluster(folder) as cluster:
        stubs = cluster.stubs()
        async with agent(stubs, disconnect_grace_ms=9_000) as one:
            token = (await one.acquire(1, "drain")).token
            runtime = cluster[0].runtime
            runtime.draining = True
            for told in list(runtime.streams.values()):
                told(25_000)
            assert (await one.push("draining")).stops_in_ms == 25_000
            with pytest.raises(AttachRefused) as caught:
                await Agent(cluster.stubs()).attach()
            refusal = caught.value.refusal
            assert (refusal.code, refusal.reason, refusal.definite) == (Code.UNAVAILABLE, "DRAINING", True)
            unary = await refused(open_session(stubs))
            assert (unary.code, unary.reason) == (Code.UNAVAILABLE, "DRAINING")
            released = await one.do(2, release_lease=Release(name="drain", token=token))
            assert released.HasField("release_lease")
        async with agent(stubs, one.session) as resumed:
            assert await resumed.push("draining")


async def test_a_restart_inside_the_ttl_keeps_the_token(folder: Path) -> None:
    async with running_cluster(folder) as cluster:
        async with agent(cluster.stubs(), disconnect_grace_ms=0) as one:
            token = (await one.acquire(1, "restart")).token
            await cluster[0].stop()
            await one.end()
        await cluster[0].start()
        await cluster.ready()
        async with agent(cluster.stubs(), one.session) as two:
            assert [(held.name, held.token) for held in two.attached.held] == [("restart", token)]
            assert (await two.acquire(1, "restart")).token == token


async def _trio(folder: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(folder, 3) as cluster:
        yield cluster


async def test_jeopardy_and_back_again(folder: Path) -> None:
    """Without a quorum the holder is told; when renewals are confirmed again it is told, too. The token stays."""
    async for cluster in _trio(folder):
        keeper = cluster.follower
        async with agent(cluster.stubs(keeper), ttl_ms=30_000) as one:
            token = (await one.acquire(1, "jeopardy")).token
            others = [sidecar for sidecar in cluster.sidecars if sidecar is not keeper]
            for other in others:
                await other.stop()
            await one.send(keep_alive=session_pb2.KeepAlive(id=1))
            jeopardy = await one.push("jeopardy")
            assert 0 < jeopardy.remaining_ms <= 30_000
            assert 1 not in one.acks
            for other in others:
                await other.start()
            await cluster.ready()
            await one.send(keep_alive=session_pb2.KeepAlive(id=2))
            await one.push("safe")
            assert 2 in one.acks
            assert (await one.acquire(2, "jeopardy")).token == token


async def test_the_agent_moves_to_another_node(folder: Path) -> None:
    async for cluster in _trio(folder):
        first, second = cluster.leader, cluster.follower
        async with agent(cluster.stubs(first), disconnect_grace_ms=9_000) as one:
            token = (await one.acquire(1, "move")).token
            async with agent(cluster.stubs(second), one.session) as two:
                ended = await one.end()
                assert ended is not None
                assert ended.reason == "SESSION_TAKEN_OVER"
                assert (await two.acquire(1, "move")).token == token
                released = await two.do(2, release_lease=Release(name="move", token=token))
                assert released.HasField("release_lease")
                assert not (await get_lease(cluster.stubs(first), "move")).holders


async def test_a_leader_is_lost_while_an_operation_runs(folder: Path) -> None:
    async for cluster in _trio(folder):
        leader, follower = cluster.leader, cluster.follower
        async with agent(cluster.stubs(follower)) as one:
            await one.acquire(1, "before")
            stopping = asyncio.ensure_future(leader.stop())
            results = [
                await one.do(number, 5_000, acquire_lease=Acquire(name=f"during/{number}")) for number in range(2, 8)
            ]
            await stopping
            for number, result in enumerate(results, 2):
                if not result.HasField("acquire_lease"):
                    assert result.error.detail.reason in ("NO_LEADER", "OUTCOME_UNKNOWN"), result
                    del one.results[number]
                    await one.acquire(number, f"during/{number}")
            leases = await one.do(9, get_lease=lease_pb2.GetLeaseRequest(name="during/7"))
            assert leases.get_lease.lease.holders[0].session_id == one.session
