"""Unary calls: what they do, exactly-once repeats, waits and their cancellation, pages."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from tenure.v1 import dedup_pb2, lease_pb2, session_pb2

from sidecar.core.commands import Limits
from sidecar.core.machine import Machine
from sidecar.services.handlers import Handlers
from sidecar.services.notices import Notices
from sidecar.services.operations import Operations
from tests.services.calls import DEADLINE_S, Code, acquire, get_lease, open_session, refused, release
from tests.services.cluster import Cluster, Stubs, running_cluster
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


def row(cluster: Cluster, name: str) -> Any:
    return machine(cluster).lease("default", name)


def machine(cluster: Cluster) -> Machine:
    return cluster[0].runtime.proposer.machine


async def in_line(cluster: Cluster, name: str, count: int = 1) -> None:
    await eventually(lambda: row(cluster, name) and len(row(cluster, name).waiters) == count)


# ---- sessions -----------------------------------------------------------------------------------------------------


async def test_the_life_of_a_session(shared: Cluster) -> None:
    stubs = shared.stubs()
    info = session_pb2.AgentInfo(agent="a", version="1", host="h", labels={"x": "y"})
    opened = await stubs.session.OpenSession(
        session_pb2.OpenSessionRequest(tenant="default", info=info, ttl_ms=60_000), timeout=DEADLINE_S
    )
    session = opened.session
    assert (session.info, session.ttl_ms, session.disconnect_grace_ms) == (info, 60_000, 1_000)
    assert 0 < session.remaining_ms <= 60_000
    assert not session.connected
    named: dict[str, Any] = {"tenant": "default", "session_id": session.session_id}
    renewed = await stubs.session.RenewSession(session_pb2.RenewSessionRequest(**named), timeout=DEADLINE_S)
    assert renewed.ttl_ms == 60_000
    found = await stubs.session.GetSession(session_pb2.GetSessionRequest(**named), timeout=DEADLINE_S)
    assert found.session.deadline_ms >= session.deadline_ms
    assert found.read.linearizable
    await stubs.session.CloseSession(session_pb2.CloseSessionRequest(**named), timeout=DEADLINE_S)
    gone = await refused(stubs.session.GetSession(session_pb2.GetSessionRequest(**named), timeout=DEADLINE_S))
    assert (gone.code, gone.reason) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_opening_again_with_the_same_request_id(shared: Cluster) -> None:
    stubs = shared.stubs()
    first, second, other = [await open_session(stubs, request_id=name) for name in ("one", "one", "two")]
    assert first == second != other


async def test_a_session_that_is_not_renewed_ends(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs, ttl_ms=500)
    await acquire(stubs, session, "short")
    waiting = await open_session(stubs)
    grant = await acquire(stubs, waiting, "short", wait_ms=5_000)
    assert not grant.already_held
    gone = await refused(acquire(stubs, session, "short"))
    assert gone.reason == "SESSION_NOT_FOUND"


async def test_sessions_by_pages(shared: Cluster) -> None:
    stubs = shared.stubs()
    sessions = {await open_session(stubs, "other") for _ in range(5)}
    seen: list[str] = []
    token = ""
    while True:
        request = session_pb2.ListSessionsRequest(tenant="other", page_size=2, page_token=token)
        page = await stubs.session.ListSessions(request, timeout=DEADLINE_S)
        assert len(page.sessions) <= 2
        seen += [session.session_id for session in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert len(seen) == len(set(seen))
    assert sessions <= set(seen)


# ---- leases -------------------------------------------------------------------------------------------------------


async def test_acquire_release_acquire(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs, info={"agent": "a1", "host": "h1"}), await open_session(stubs)
    first = await acquire(stubs, one, "turns", metadata="m")
    assert (first.already_held, first.ttl_ms) == (False, 15_000)
    again = await acquire(stubs, one, "turns")
    assert (again.token, again.already_held) == (first.token, True)
    held = await refused(acquire(stubs, two, "turns"))
    assert (held.code, held.reason, held.definite) == (Code.ALREADY_EXISTS, "LEASE_HELD", True)
    assert (held.facts["holder"], held.facts["token"]) == (one, str(first.token))
    assert held.detail.retry_delay_ms > 0
    assert "google.rpc.RetryInfo" in held.kinds
    lease = await get_lease(stubs, "turns")
    (holder,) = lease.holders
    assert (holder.session_id, holder.metadata, holder.agent, holder.host) == (one, "m", "a1", "h1")
    await release(stubs, one, "turns", first.token)
    second = await acquire(stubs, two, "turns")
    assert second.token > first.token
    assert second.revision > first.revision


async def test_a_free_lease_is_shown_empty(shared: Cluster) -> None:
    stubs = shared.stubs()
    for consistency in (lease_pb2.CONSISTENCY_LINEARIZABLE, lease_pb2.CONSISTENCY_LOCAL):
        request = lease_pb2.GetLeaseRequest(tenant="default", name="nobody", consistency=consistency)
        answer = await stubs.lease.GetLease(request, timeout=DEADLINE_S)
        assert (answer.lease.name, list(answer.lease.holders)) == ("nobody", [])
        assert answer.read.linearizable is (consistency == lease_pb2.CONSISTENCY_LINEARIZABLE)
        assert answer.read.staleness_ms >= 0


async def test_waiting_in_line(shared: Cluster) -> None:
    stubs = shared.stubs()
    holder = await open_session(stubs)
    token = (await acquire(stubs, holder, "line")).token
    sessions = [await open_session(stubs) for _ in range(3)]
    calls: list[asyncio.Task[lease_pb2.AcquireLeaseResponse]] = []
    for count, session in enumerate(sessions, 1):
        calls.append(asyncio.ensure_future(acquire(stubs, session, "line", 10, wait_ms=9_000)))
        await in_line(shared, "line", count)
    last = (holder, token)
    for session, call in zip(sessions, calls, strict=True):
        await release(stubs, last[0], "line", last[1])
        grant = await call
        assert grant.token > last[1]
        assert grant.ttl_ms == 15_000
        last = (session, grant.token)


async def test_the_wait_ends_without_a_grant(shared: Cluster) -> None:
    stubs = shared.stubs()
    holder, waiter = await open_session(stubs), await open_session(stubs)
    token = (await acquire(stubs, holder, "patience")).token
    held = await refused(acquire(stubs, waiter, "patience", wait_ms=50))
    assert (held.code, held.reason, held.definite) == (Code.ALREADY_EXISTS, "LEASE_HELD", True)
    assert held.facts["token"] == str(token)
    assert not row(shared, "patience").waiters


async def test_a_caller_that_goes_away_leaves_the_line(shared: Cluster) -> None:
    """Neither a place in line nor a lease stays behind, whether the caller cancelled or ran out of time."""
    stubs = shared.stubs()
    holder, waiter = await open_session(stubs), await open_session(stubs)
    token = (await acquire(stubs, holder, "ghosts")).token
    call = asyncio.ensure_future(acquire(stubs, waiter, "ghosts", 30, wait_ms=20_000))
    await in_line(shared, "ghosts")
    call.cancel()
    await in_line(shared, "ghosts", 0)
    late = await refused(acquire(stubs, waiter, "ghosts", 0.3, wait_ms=20_000))
    assert late.code in (Code.DEADLINE_EXCEEDED, Code.ALREADY_EXISTS)
    await in_line(shared, "ghosts", 0)
    await release(stubs, holder, "ghosts", token)
    assert row(shared, "ghosts") is None
    assert (await acquire(stubs, waiter, "ghosts", request_id="fresh")).token > token


async def test_many_random_cancellations_leave_nothing(shared: Cluster) -> None:
    stubs = shared.stubs()
    sessions = [await open_session(stubs) for _ in range(4)]

    async def one(number: int) -> None:
        session, request = sessions[number % 4], f"storm/{number}"
        timeout_s = 0.02 + number % 7 / 100
        try:
            grant = await acquire(stubs, session, "storm", timeout_s, wait_ms=5_000, request_id=request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not Code.DEADLINE_EXCEEDED:
                assert error.code() in (Code.ALREADY_EXISTS, Code.UNAVAILABLE), error
                return
            try:  # it may have happened: the repeat tells
                grant = await acquire(stubs, session, "storm", request_id=request)
            except grpc.aio.AioRpcError as again:
                assert again.code() is Code.ALREADY_EXISTS, again
                return
        if not grant.already_held:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a call of the same session may have been undone with it
                await release(stubs, session, "storm", grant.token)

    for start in range(0, 200, 20):
        await asyncio.gather(*(one(number) for number in range(start, start + 20)))
    await eventually(lambda: row(shared, "storm") is None, what="nobody holds the lease")


async def test_what_a_cancelled_call_was_given_is_given_back(shared: Cluster) -> None:
    """L12: cancelled at any moment, on its way, in line, or with the grant on its way back. A grant stays only if its
    answer had left before the sidecar could hear of the cancellation; then the repeat gives the same token."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stubs, codes = shared.stubs(), Counter[str]()
    holder, session = await open_session(stubs, ttl_ms=600_000), await open_session(stubs, ttl_ms=600_000)
    runtime = shared[0].runtime
    before, runtime.observe_request = runtime.observe_request, lambda _, method, code, __: codes.update([method + code])
    answered = {}
    try:
        for number in range(200):
            name = f"given-up/{number}"
            contended = number % 4 == 0
            token = (await acquire(stubs, holder, name)).token if contended else 0
            call = asyncio.create_task(
                acquire(stubs, session, name, request_id=name, wait_ms=4_000 if contended else 0)
            )
            if number % 8 == 0:
                await eventually(lambda: machine(shared).counts()["waiters"])
                call.cancel()  # in line for certain
            await asyncio.wait([call], timeout=rng.random() / 200)
            if contended:
                releasing = asyncio.create_task(release(stubs, holder, name, token))
                await asyncio.wait([call], timeout=rng.random() / 200)
                call.cancel()
                await releasing
            call.cancel()
            await asyncio.wait([call])
            if not call.cancelled():
                answered[name] = call.result().token
        held = machine(shared).leases
        await eventually(
            # Fifty were granted to the holder.
            lambda: len(held("default", "given-up/", "", 999)) == codes["AcquireLeaseOK"] - 50 >= len(answered)
        )
    finally:
        runtime.observe_request = before
    assert codes["AcquireLeaseCANCELLED"] >= 25
    for lease in held("default", "given-up/", "", 999):
        assert not lease.waiters
        repeated = await acquire(stubs, session, lease.name, request_id=lease.name)
        assert repeated.token == lease.holders[0].token == answered.get(lease.name, repeated.token)
        await release(stubs, session, lease.name, repeated.token)
    assert not held("default", "given-up/", "", 999)


class GoneContext:
    """Of a call whose caller is not there any more when the answer is sent."""

    def time_remaining(self) -> float:
        return DEADLINE_S


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.InternalError("the call has ended")])
async def test_a_grant_whose_answer_cannot_be_sent_is_given_back(shared: Cluster, error: BaseException) -> None:
    session = await open_session(shared.stubs())
    runtime = shared[0].runtime
    operations = Operations(runtime, Notices(runtime.proposer))
    handlers = Handlers(runtime, lease_pb2.DESCRIPTOR.services_by_name["LeaseService"])
    request = lease_pb2.AcquireLeaseRequest(tenant="default", name="unsent", session_id=session)
    granted = []

    async def send(answer: Message) -> None:
        granted.append(row(shared, "unsent").holders[0].token)
        raise error

    context: Any = GoneContext()
    with pytest.raises(type(error)):
        await handlers._run(operations.acquire_lease, request, context, send)
    assert granted
    await eventually(lambda: row(shared, "unsent") is None)


async def test_a_repeat_while_in_line_takes_the_place_over(shared: Cluster) -> None:
    stubs, others = shared.stubs(), shared.stubs()
    holder, waiter = await open_session(stubs), await open_session(stubs)
    token = (await acquire(stubs, holder, "repeat")).token
    first = asyncio.ensure_future(acquire(stubs, waiter, "repeat", 30, wait_ms=20_000, request_id="again"))
    await in_line(shared, "repeat")
    name = row(shared, "repeat").waiters[0].waiter
    second = asyncio.ensure_future(acquire(others, waiter, "repeat", 30, wait_ms=15_000, request_id="again"))
    await eventually(lambda: row(shared, "repeat").waiters[0].waiter != name)
    first.cancel()
    await release(stubs, holder, "repeat", token)
    grant = await second
    assert (row(shared, "repeat").holders[0].session, row(shared, "repeat").holders[0].token) == (waiter, grant.token)
    repeated = await acquire(stubs, waiter, "repeat", wait_ms=1, request_id="again")
    assert repeated.token == grant.token


async def test_release_and_transfer_by_an_operator(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    token = (await acquire(stubs, one, "operated")).token
    moved = await stubs.lease.TransferLease(
        lease_pb2.TransferLeaseRequest(
            tenant="default", name="operated", token=token, to_session_id=two, actor="ops", reason="drill"
        ),
        timeout=DEADLINE_S,
    )
    assert moved.token > token
    assert row(shared, "operated").holders[0].session == two
    request = lease_pb2.TransferLeaseRequest(
        tenant="default", name="operated", session_id=two, token=moved.token, to_session_id="gone"
    )
    invalid = await refused(stubs.lease.TransferLease(request, timeout=DEADLINE_S))
    assert (invalid.code, invalid.reason) == (Code.FAILED_PRECONDITION, "TRANSFER_TARGET_INVALID")
    await release(stubs, "", "operated", moved.token, actor="ops", reason="drill over")
    assert row(shared, "operated") is None


async def test_a_semaphore(shared: Cluster) -> None:
    stubs = shared.stubs()
    sessions = [await open_session(stubs) for _ in range(3)]
    for session in sessions[:2]:
        await acquire(stubs, session, "slots", capacity=2)
    assert (await refused(acquire(stubs, sessions[2], "slots", capacity=2))).reason == "LEASE_HELD"
    mismatch = await refused(acquire(stubs, sessions[2], "slots"))
    assert (mismatch.code, mismatch.reason) == (Code.FAILED_PRECONDITION, "LEASE_CAPACITY_MISMATCH")
    lease = await get_lease(stubs, "slots")
    assert (lease.capacity, lease.holder_count) == (2, 2)


async def test_leases_by_pages_while_others_change(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    names = [f"walk/{number:03}" for number in range(0, 40, 2)]
    for name in names:
        await acquire(stubs, session, name)
    seen: list[str] = []
    token = ""
    for step in range(100):
        request = lease_pb2.ListLeasesRequest(
            tenant="default", prefix="walk/", page_size=3, page_token=token, consistency=lease_pb2.CONSISTENCY_LOCAL
        )
        page = await stubs.lease.ListLeases(request, timeout=DEADLINE_S)
        seen += [lease.name for lease in page.leases]
        token = page.next_page_token
        if not token:
            break
        await acquire(stubs, session, f"walk/{2 * step + 1:03}")  # before, behind and beyond the walk
    assert sorted(set(seen)) == sorted(seen) == seen
    assert set(names) <= set(seen)


async def test_a_page_is_smaller_than_a_mebibyte(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    names = [f"bulk/{number:04}/" + "n" * 200 for number in range(1_500)]
    for start in range(0, len(names), 100):
        await asyncio.gather(
            *(acquire(stubs, session, name, metadata="m" * 1_024) for name in names[start : start + 100])
        )
    seen, sizes, token = [], [], ""
    while True:
        request = lease_pb2.ListLeasesRequest(tenant="default", prefix="bulk/", page_size=1_000, page_token=token)
        page = await stubs.lease.ListLeases(request, timeout=DEADLINE_S)
        seen += [lease.name for lease in page.leases]
        sizes.append(page.ByteSize())
        token = page.next_page_token
        if not token:
            break
    assert seen == names
    assert max(sizes) < 1 << 20
    assert len(sizes) >= 2


async def test_observing_a_lease(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    stream = stubs.lease.ObserveLease(lease_pb2.ObserveLeaseRequest(tenant="default", name="observed"))
    changes = aiter(stream)
    assert not (await anext(changes)).lease.holders
    token = (await acquire(stubs, session, "observed")).token
    held = await anext(changes)
    assert held.lease.holders[0].token == token
    await release(stubs, session, "observed", token)
    freed = await anext(changes)
    assert not freed.lease.holders
    assert freed.revision > held.revision
    stream.cancel()
    await eventually(lambda: ("default", "observed") not in _observed(shared))


def _observed(cluster: Cluster) -> Any:
    return cluster[0].runtime.proposer.core._subscribers and _notices(cluster).leases._by_key


def _notices(cluster: Cluster) -> Any:
    for subscriber, _ in cluster[0].runtime.proposer.core._subscribers.values():
        owner = getattr(subscriber, "__self__", None)
        if hasattr(owner, "leases"):
            return owner
    raise AssertionError("nobody listens")


# ---- records ------------------------------------------------------------------------------------------------------


def begin(stubs: Stubs, session: str, key: str, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
    request = dedup_pb2.BeginRecordRequest(tenant="default", key=key, session_id=session, **fields)
    return stubs.dedup.BeginRecord(request, timeout=timeout_s)


def complete(stubs: Stubs, session: str, key: str, attempt: int = 1, result: bytes = b"r", **fields: Any) -> Any:
    request = dedup_pb2.CompleteRecordRequest(
        tenant="default", key=key, session_id=session, attempt=attempt, result=result, **fields
    )
    return stubs.dedup.CompleteRecord(request, timeout=DEADLINE_S)


def fail(stubs: Stubs, session: str, key: str, attempt: int, *, retryable: bool) -> Any:
    request = dedup_pb2.FailRecordRequest(
        tenant="default", key=key, session_id=session, attempt=attempt, retryable=retryable, error="e"
    )
    return stubs.dedup.FailRecord(request, timeout=DEADLINE_S)


async def test_a_key_completes_once(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    new = await begin(stubs, one, "once", fingerprint=b"f", request_id="b1")
    assert (new.outcome, new.record.attempt, new.record.owner_session_id) == (dedup_pb2.BEGIN_OUTCOME_NEW, 1, one)
    repeat = await begin(stubs, one, "once", fingerprint=b"f", request_id="b1")
    assert repeat.outcome == dedup_pb2.BEGIN_OUTCOME_NEW
    other = await begin(stubs, two, "once", fingerprint=b"f")
    assert other.outcome == dedup_pb2.BEGIN_OUTCOME_IN_PROGRESS
    mismatch = await refused(begin(stubs, two, "once", fingerprint=b"g"))
    assert (mismatch.code, mismatch.reason) == (Code.FAILED_PRECONDITION, "RECORD_MISMATCH")
    assert not (await complete(stubs, one, "once")).already_completed
    assert (await complete(stubs, one, "once")).already_completed
    late = await refused(complete(stubs, one, "once", result=b"else"))
    assert (late.code, late.reason) == (Code.FAILED_PRECONDITION, "RECORD_RESULT_MISMATCH")
    done = await begin(stubs, two, "once", fingerprint=b"f")
    assert (done.outcome, done.record.result) == (dedup_pb2.BEGIN_OUTCOME_COMPLETED, b"r")
    assert done.record.state == dedup_pb2.RECORD_STATE_COMPLETED


async def test_waiting_for_the_outcome(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    await begin(stubs, one, "await")
    waiting = asyncio.ensure_future(begin(stubs, two, "await", 10, wait_ms=9_000))
    await eventually(lambda: len(_notices(shared).records))
    await complete(stubs, one, "await", result=b"the result")
    done = await waiting
    assert (done.outcome, done.record.result) == (dedup_pb2.BEGIN_OUTCOME_COMPLETED, b"the result")


async def test_waiting_until_it_is_ones_own_turn(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    await begin(stubs, one, "turn")
    waiting = asyncio.ensure_future(begin(stubs, two, "turn", 10, wait_ms=9_000, request_id="mine"))
    await eventually(lambda: len(_notices(shared).records))
    await fail(stubs, one, "turn", 1, retryable=True)
    mine = await waiting
    assert (mine.outcome, mine.record.attempt) == (dedup_pb2.BEGIN_OUTCOME_NEW, 2)
    repeat = await begin(stubs, two, "turn", 10, wait_ms=9_000, request_id="mine")
    assert (repeat.outcome, repeat.record.attempt) == (dedup_pb2.BEGIN_OUTCOME_NEW, 2)
    late = await refused(complete(stubs, one, "turn", 1))
    assert (late.code, late.reason) == (Code.FAILED_PRECONDITION, "ATTEMPT_STALE")


async def test_a_wait_for_an_outcome_has_an_end(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    await begin(stubs, one, "endless")
    assert (await begin(stubs, two, "endless", wait_ms=30)).outcome == dedup_pb2.BEGIN_OUTCOME_IN_PROGRESS
    call = asyncio.ensure_future(begin(stubs, two, "endless", 10, wait_ms=9_000))
    await eventually(lambda: len(_notices(shared).records))
    call.cancel()
    await eventually(lambda: not len(_notices(shared).records))


async def test_fence_failure_and_resolution(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    token = (await acquire(stubs, session, "fence")).token
    fence = dedup_pb2.Fence(lease_name="fence", token=token)
    begun = await begin(stubs, session, "fenced", fence=fence)
    assert begun.record.fence == fence
    await release(stubs, session, "fence", token)
    stale = await refused(complete(stubs, session, "fenced"))
    assert (stale.code, stale.reason) == (Code.FAILED_PRECONDITION, "FENCE_STALE")
    await fail(stubs, session, "fenced", 1, retryable=False)
    failed = await begin(stubs, session, "fenced", fence=None)
    assert (failed.outcome, failed.record.error) == (dedup_pb2.BEGIN_OUTCOME_FAILED, "e")
    resolved = await stubs.dedup.ResolveRecord(
        dedup_pb2.ResolveRecordRequest(
            tenant="default",
            key="fenced",
            attempt=1,
            resolution=dedup_pb2.RESOLUTION_COMPLETED,
            result=b"by hand",
            actor="ops",
            reason="checked the ledger",
        ),
        timeout=DEADLINE_S,
    )
    assert (resolved.record.state, resolved.record.result) == (dedup_pb2.RECORD_STATE_COMPLETED, b"by hand")


async def test_an_owner_is_lost(shared: Cluster) -> None:
    stubs = shared.stubs()
    one, two = await open_session(stubs), await open_session(stubs)
    await begin(stubs, one, "lost/retry")
    await begin(stubs, one, "lost/unknown", owner_loss=dedup_pb2.OWNER_LOSS_POLICY_UNKNOWN)
    close = session_pb2.CloseSessionRequest(tenant="default", session_id=one)
    await stubs.session.CloseSession(close, timeout=DEADLINE_S)
    retried = await begin(stubs, two, "lost/retry")
    assert (retried.outcome, retried.record.attempt) == (dedup_pb2.BEGIN_OUTCOME_NEW, 2)
    assert (await begin(stubs, two, "lost/unknown")).outcome == dedup_pb2.BEGIN_OUTCOME_UNKNOWN
    request = dedup_pb2.ListRecordsRequest(tenant="default", prefix="lost/", state=dedup_pb2.RECORD_STATE_UNKNOWN)
    page = await stubs.dedup.ListRecords(request, timeout=DEADLINE_S)
    assert [record.key for record in page.records] == ["lost/unknown"]
    assert not page.next_page_token


async def test_records_by_pages(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    keys = [f"many/{number:03}" for number in range(30)]
    await asyncio.gather(*(begin(stubs, session, key) for key in keys))
    for key in keys[::3]:
        await complete(stubs, session, key, result=b"x" * 100)
    for state, expected in (
        (dedup_pb2.RECORD_STATE_UNSPECIFIED, keys),
        (dedup_pb2.RECORD_STATE_COMPLETED, keys[::3]),
    ):
        seen, token = [], ""
        while True:
            request = dedup_pb2.ListRecordsRequest(
                tenant="default", prefix="many/", state=state, page_size=4, page_token=token
            )
            page = await stubs.dedup.ListRecords(request, timeout=DEADLINE_S)
            assert not any(record.result for record in page.records)
            seen += [record.key for record in page.records]
            token = page.next_page_token
            if not token:
                break
        assert seen == expected


# ---- limits -------------------------------------------------------------------------------------------------------


async def test_full_tables(tmp_path: Any) -> None:
    limits = Limits(sessions_max=2, leases_max=1, records_max=1)
    async with running_cluster(tmp_path, limits=limits) as cluster:
        stubs = cluster.stubs()
        await eventually(lambda: cluster[0].runtime.proposer.machine.limits == limits)
        session = await open_session(stubs)
        await open_session(stubs)
        await acquire(stubs, session, "only")
        await begin(stubs, session, "only")
        for call, reason in (
            (open_session(stubs), "SESSIONS_FULL"),
            (acquire(stubs, session, "more"), "LEASES_FULL"),
            (begin(stubs, session, "more"), "RECORDS_FULL"),
        ):
            full = await refused(call)
            assert (full.code, full.reason, full.definite) == (Code.RESOURCE_EXHAUSTED, reason, True)
            assert full.detail.retry_delay_ms > 0


async def test_a_deadline_is_not_required_where_the_settings_say_so(tmp_path: Any) -> None:
    async with running_cluster(tmp_path, require_deadline=False) as cluster:
        answer = await cluster.stubs().lease.GetLease(lease_pb2.GetLeaseRequest(tenant="default", name="any"))
        assert answer.read.linearizable
