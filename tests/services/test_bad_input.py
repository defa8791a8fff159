"""Every bad input has one documented status, names its field, changes nothing."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tenure.v1 import dedup_pb2, lease_pb2, session_pb2, watch_pb2

from sidecar.core import commands
from sidecar.services import MESSAGE_BYTES_MAX
from tests.services.calls import DEADLINE_S, Code, acquire, open_session, refused, refused_stream, release
from tests.services.cluster import Cluster, Stubs

pytestmark = pytest.mark.asyncio(loop_scope="module")

S, L, D = "session", "lease", "dedup"
OPEN, ACQUIRE, RELEASE, TRANSFER = "OpenSession", "AcquireLease", "ReleaseLease", "TransferLease"
BEGIN, COMPLETE, FAIL, RESOLVE = "BeginRecord", "CompleteRecord", "FailRecord", "ResolveRecord"
REQUESTS: dict[str, Any] = {
    OPEN: lambda **f: session_pb2.OpenSessionRequest(**{"tenant": "default", **f}),
    "GetSession": lambda **f: session_pb2.GetSessionRequest(**{"tenant": "default", **f}),
    "RenewSession": lambda **f: session_pb2.RenewSessionRequest(**{"tenant": "default", **f}),
    "ListSessions": lambda **f: session_pb2.ListSessionsRequest(**{"tenant": "default", **f}),
    ACQUIRE: lambda **f: lease_pb2.AcquireLeaseRequest(**{"tenant": "default", "name": "job", "session_id": "s", **f}),
    RELEASE: lambda **f: lease_pb2.ReleaseLeaseRequest(
        **{"tenant": "default", "name": "job", "session_id": "s", "token": 1, **f}
    ),
    TRANSFER: lambda **f: lease_pb2.TransferLeaseRequest(
        **{"tenant": "default", "name": "job", "session_id": "s", "token": 1, "to_session_id": "t", **f}
    ),
    "CheckLease": lambda **f: lease_pb2.CheckLeaseRequest(**{"tenant": "default", "name": "job", "token": 1, **f}),
    "GetLease": lambda **f: lease_pb2.GetLeaseRequest(**{"tenant": "default", "name": "job", **f}),
    "ListLeases": lambda **f: lease_pb2.ListLeasesRequest(**{"tenant": "default", **f}),
    BEGIN: lambda **f: dedup_pb2.BeginRecordRequest(**{"tenant": "default", "key": "k", "session_id": "s", **f}),
    COMPLETE: lambda **f: dedup_pb2.CompleteRecordRequest(
        **{"tenant": "default", "key": "k", "session_id": "s", "attempt": 1, **f}
    ),
    FAIL: lambda **f: dedup_pb2.FailRecordRequest(
        **{"tenant": "default", "key": "k", "session_id": "s", "attempt": 1, **f}
    ),
    RESOLVE: lambda **f: dedup_pb2.ResolveRecordRequest(
        **{"tenant": "default", "key": "k", "attempt": 1, "resolution": 1, "actor": "me", "reason": "why", **f}
    ),
    "GetRecord": lambda **f: dedup_pb2.GetRecordRequest(**{"tenant": "default", "key": "k", **f}),
    "ListRecords": lambda **f: dedup_pb2.ListRecordsRequest(**{"tenant": "default", **f}),
}
INVALID, MISSING = Code.INVALID_ARGUMENT, Code.NOT_FOUND

# Service, method, the fields that are bad, status, reason, the field that is named.
CASES: list[tuple[str, str, dict[str, Any], grpc.StatusCode, str, str]] = [
    (S, OPEN, {"tenant": ""}, INVALID, "TENANT_INVALID", "tenant"),
    (S, OPEN, {"tenant": "a b"}, INVALID, "TENANT_INVALID", "tenant"),
    (S, OPEN, {"tenant": "x" * 65}, INVALID, "TENANT_INVALID", "tenant"),
    (S, OPEN, {"tenant": "unknown"}, MISSING, "TENANT_NOT_FOUND", "tenant"),
    (S, OPEN, {"ttl_ms": 0}, INVALID, "VALUE_OUT_OF_RANGE", "ttl_ms"),
    (S, OPEN, {"ttl_ms": -1}, INVALID, "VALUE_OUT_OF_RANGE", "ttl_ms"),
    (S, OPEN, {"ttl_ms": 499}, INVALID, "VALUE_OUT_OF_RANGE", "ttl_ms"),
    (S, OPEN, {"ttl_ms": 3_600_001}, INVALID, "VALUE_OUT_OF_RANGE", "ttl_ms"),
    (S, OPEN, {"ttl_ms": 10**12}, INVALID, "VALUE_OUT_OF_RANGE", "ttl_ms"),
    (S, OPEN, {"disconnect_grace_ms": -1}, INVALID, "VALUE_OUT_OF_RANGE", "disconnect_grace_ms"),
    (S, OPEN, {"ttl_ms": 600, "disconnect_grace_ms": 601}, INVALID, "VALUE_OUT_OF_RANGE", "disconnect_grace_ms"),
    (S, OPEN, {"info": {"agent": "x" * 129}}, INVALID, "FIELD_TOO_LARGE", "info.agent"),
    (S, OPEN, {"info": {"host": "\u00e9" * 65}}, INVALID, "FIELD_TOO_LARGE", "info.host"),
    (
        S,
        OPEN,
        {"info": {"labels": {str(n): "" for n in range(17)}}},
        INVALID,
        "VALUE_OUT_OF_RANGE",
        "info.labels",
    ),
    (S, OPEN, {"info": {"labels": {"": "x"}}}, INVALID, "FIELD_REQUIRED", "info.labels (name)"),
    (S, OPEN, {"info": {"labels": {"a": "x" * 129}}}, INVALID, "FIELD_TOO_LARGE", "info.labels[a]"),
    (S, OPEN, {"request_id": "x" * 129}, INVALID, "FIELD_INVALID", "request_id"),
    (S, OPEN, {"request_id": "a\nb"}, INVALID, "FIELD_INVALID", "request_id"),
    (S, "GetSession", {}, INVALID, "FIELD_REQUIRED", "session_id"),
    (S, "GetSession", {"session_id": "gone"}, MISSING, "SESSION_NOT_FOUND", ""),
    (S, "RenewSession", {"session_id": "gone"}, MISSING, "SESSION_NOT_FOUND", ""),
    (S, "ListSessions", {"page_size": 1_001}, INVALID, "VALUE_OUT_OF_RANGE", "page_size"),
    (S, "ListSessions", {"page_size": -1}, INVALID, "VALUE_OUT_OF_RANGE", "page_size"),
    (S, "ListSessions", {"page_token": "not one of ours"}, INVALID, "PAGE_TOKEN_INVALID", "page_token"),
    (L, ACQUIRE, {"name": ""}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "/job"}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "job/"}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": " job"}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "a\x00b"}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "a\nb"}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "x" * 257}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"name": "\u00e9" * 129}, INVALID, "NAME_INVALID", "name"),
    (L, ACQUIRE, {"session_id": ""}, INVALID, "FIELD_REQUIRED", "session_id"),
    (L, ACQUIRE, {"session_id": "x" * 129}, INVALID, "FIELD_INVALID", "session_id"),
    (L, ACQUIRE, {"session_id": "gone"}, MISSING, "SESSION_NOT_FOUND", ""),
    (L, ACQUIRE, {"capacity": 0}, INVALID, "VALUE_OUT_OF_RANGE", "capacity"),
    (L, ACQUIRE, {"capacity": 10_001}, INVALID, "VALUE_OUT_OF_RANGE", "capacity"),
    (L, ACQUIRE, {"wait_ms": -1}, INVALID, "VALUE_OUT_OF_RANGE", "wait_ms"),
    (L, ACQUIRE, {"wait_ms": 86_400_001}, INVALID, "VALUE_OUT_OF_RANGE", "wait_ms"),
    (L, ACQUIRE, {"priority": 101}, INVALID, "VALUE_OUT_OF_RANGE", "priority"),
    (L, ACQUIRE, {"lock_delay_ms": -1}, INVALID, "VALUE_OUT_OF_RANGE", "lock_delay_ms"),
    (L, ACQUIRE, {"metadata": "x" * 1_025}, INVALID, "FIELD_TOO_LARGE", "metadata"),
    (L, RELEASE, {"token": 0}, INVALID, "VALUE_OUT_OF_RANGE", "token"),
    (L, RELEASE, {"token": -1}, INVALID, "VALUE_OUT_OF_RANGE", "token"),
    (L, RELEASE, {"session_id": ""}, INVALID, "FIELD_REQUIRED", "actor"),
    (L, RELEASE, {"session_id": "", "actor": "me"}, INVALID, "FIELD_REQUIRED", "reason"),
    (L, RELEASE, {"actor": "me"}, INVALID, "FIELD_INVALID", "actor"),
    (L, TRANSFER, {"to_session_id": ""}, INVALID, "FIELD_REQUIRED", "to_session_id"),
    (L, "CheckLease", {"token": 0}, INVALID, "VALUE_OUT_OF_RANGE", "token"),
    (L, "GetLease", {"consistency": 9}, INVALID, "FIELD_INVALID", "consistency"),
    (L, "ListLeases", {"prefix": "x" * 257}, INVALID, "FIELD_TOO_LARGE", "prefix"),
    (D, BEGIN, {"key": ""}, INVALID, "KEY_INVALID", "key"),
    (D, BEGIN, {"key": " \t"}, INVALID, "KEY_INVALID", "key"),
    (D, BEGIN, {"key": "x" * 513}, INVALID, "KEY_INVALID", "key"),
    (D, BEGIN, {"fingerprint": b"x" * 65}, INVALID, "FIELD_TOO_LARGE", "fingerprint"),
    (D, BEGIN, {"retention_ms": 999}, INVALID, "VALUE_OUT_OF_RANGE", "retention_ms"),
    (D, BEGIN, {"retention_ms": 0}, INVALID, "VALUE_OUT_OF_RANGE", "retention_ms"),
    (D, BEGIN, {"wait_ms": -5}, INVALID, "VALUE_OUT_OF_RANGE", "wait_ms"),
    (D, BEGIN, {"owner_loss": 7}, INVALID, "FIELD_INVALID", "owner_loss"),
    (D, BEGIN, {"fence": {"lease_name": "job"}}, INVALID, "VALUE_OUT_OF_RANGE", "fence.token"),
    (D, BEGIN, {"fence": {"token": 1}}, INVALID, "NAME_INVALID", "fence.lease_name"),
    (D, COMPLETE, {"attempt": 0}, INVALID, "VALUE_OUT_OF_RANGE", "attempt"),
    (D, COMPLETE, {"result": b"x" * 65_537}, INVALID, "FIELD_TOO_LARGE", "result"),
    (D, FAIL, {"error": "x" * 4_097}, INVALID, "FIELD_TOO_LARGE", "error"),
    (D, RESOLVE, {"resolution": 0}, INVALID, "FIELD_INVALID", "resolution"),
    (D, RESOLVE, {"actor": " "}, INVALID, "FIELD_REQUIRED", "actor"),
    (D, RESOLVE, {}, MISSING, "RECORD_NOT_FOUND", ""),
    (D, "GetRecord", {"key": "nobody began this"}, MISSING, "RECORD_NOT_FOUND", ""),
    (D, "ListRecords", {"state": 77}, INVALID, "FIELD_INVALID", "state"),
]


def call(stubs: Stubs, service: str, method: str, fields: dict[str, Any]) -> Any:
    return getattr(getattr(stubs, service), method)(REQUESTS[method](**fields), timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("service", "method", "fields", "code", "reason", "field"),
    [pytest.param(*case, id=f"{case[1]}-{case[4]}-{case[5]}-{number}") for number, case in enumerate(CASES)],
)
async def test_bad_fields(
    shared: Cluster, service: str, method: str, fields: dict[str, Any], code: grpc.StatusCode, reason: str, field: str
) -> None:
    revision = shared[0].runtime.proposer.machine.revision
    refusal = await refused(call(shared.stubs(), service, method, fields))
    assert (refusal.code, refusal.reason, refusal.definite) == (code, reason, True)
    assert refusal.facts.get("field", "") == field
    assert refusal.kinds[0] == "google.rpc.ErrorInfo"
    assert refusal.message
    assert shared[0].runtime.proposer.machine.revision == revision, "a refused request changed something"


async def test_text_that_is_not_utf8(shared: Cluster) -> None:
    stubs = shared.stubs()
    metadata = b"\x4a\x02\xff\xfe"  # field 9, a string of two bytes
    whole = REQUESTS[ACQUIRE]().SerializeToString()
    for data in (whole + metadata, whole[:-1], b"\xff\xff\xff\xff"):
        send: Any = stubs.channel.unary_unary("/tenure.v1.LeaseService/AcquireLease")
        refusal = await refused(send(data, timeout=DEADLINE_S))
        assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_MESSAGE")


async def test_a_call_without_a_deadline(shared: Cluster) -> None:
    stubs = shared.stubs()
    for service, method in ((S, OPEN), (L, "GetLease"), (D, "GetRecord")):
        refusal = await refused(getattr(getattr(stubs, service), method)(REQUESTS[method]()))
        assert (refusal.code, refusal.reason) == (INVALID, "DEADLINE_REQUIRED")


async def test_a_message_beyond_the_limit(shared: Cluster) -> None:
    request = REQUESTS[COMPLETE](result=b"x" * (MESSAGE_BYTES_MAX + 1))
    refusal = await refused(shared.stubs().dedup.CompleteRecord(request, timeout=DEADLINE_S))
    assert refusal.code is Code.RESOURCE_EXHAUSTED
    assert str(MESSAGE_BYTES_MAX) in refusal.message


async def test_sessions_of_other_tenants(shared: Cluster) -> None:
    stubs = shared.stubs()
    foreign = await open_session(stubs, "other")
    calls = [
        acquire(stubs, foreign, "foreign"),
        call(stubs, S, "GetSession", {"session_id": foreign}),
        call(stubs, S, "RenewSession", {"session_id": foreign}),
        stubs.session.CloseSession(
            session_pb2.CloseSessionRequest(tenant="default", session_id=foreign), timeout=DEADLINE_S
        ),
        call(stubs, D, BEGIN, {"session_id": foreign}),
    ]
    for each in calls:
        refusal = await refused(each)
        assert (refusal.code, refusal.reason) == (Code.PERMISSION_DENIED, "SESSION_FOREIGN")


async def test_stale_and_future_tokens(shared: Cluster) -> None:
    stubs = shared.stubs()
    mine, theirs = await open_session(stubs), await open_session(stubs)
    old = (await acquire(stubs, mine, "tokens")).token
    await release(stubs, mine, "tokens", old)
    new = (await acquire(stubs, theirs, "tokens")).token
    assert new > old
    stale = await refused(release(stubs, mine, "tokens", old))
    assert (stale.code, stale.reason) == (Code.FAILED_PRECONDITION, "TOKEN_STALE")
    assert stale.facts["current_token"] == str(new)
    foreign = await refused(release(stubs, mine, "tokens", new))
    assert (foreign.code, foreign.reason) == (Code.FAILED_PRECONDITION, "NOT_HOLDER")
    future = await refused(release(stubs, mine, "tokens", 10**15))
    assert (future.code, future.reason) == (Code.FAILED_PRECONDITION, "TOKEN_UNKNOWN")
    assert (await acquire(stubs, theirs, "tokens")).token == new, "the holder lost it"
    states = {}
    for token in (old, new, 10**15):
        request = REQUESTS["CheckLease"](name="tokens", token=token)
        answer = await stubs.lease.CheckLease(request, timeout=DEADLINE_S)
        assert (answer.current_token, answer.holder_session_id) == (new, theirs)
        states[token] = answer.state
    assert list(states.values()) == [
        lease_pb2.TOKEN_STATE_STALE,
        lease_pb2.TOKEN_STATE_CURRENT,
        lease_pb2.TOKEN_STATE_UNKNOWN,
    ]


async def test_a_request_id_with_another_body(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    first = await acquire(stubs, session, "first", request_id="same")
    refusal = await refused(acquire(stubs, session, "second", request_id="same"))
    assert (refusal.code, refusal.reason) == (INVALID, "REQUEST_ID_REUSED")
    assert (await acquire(stubs, session, "first", request_id="same")).token == first.token


async def test_page_tokens_are_for_their_own_list(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(stubs)
    for name in ("paged/a", "paged/b"):
        await acquire(stubs, session, name)
    page = await call(stubs, L, "ListLeases", {"prefix": "paged/", "page_size": 1})
    token = page.next_page_token
    for fields in (
        {"prefix": "page"},
        {"tenant": "other", "prefix": "paged/"},
        {"prefix": "paged/", "page_token": "?"},
    ):
        refusal = await refused(call(stubs, L, "ListLeases", {"page_token": token, **fields}))
        assert (refusal.code, refusal.reason) == (INVALID, "PAGE_TOKEN_INVALID")
    damaged = token[:-2] + ("AA" if token[-2:] != "AA" else "BB")
    answer = call(stubs, L, "ListLeases", {"prefix": "paged/", "page_token": damaged})
    try:
        assert list((await answer).leases) is not None  # still a token, of another place
    except grpc.aio.AioRpcError as error:
        assert error.code() is INVALID


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"tenant": "a b"}, INVALID, "TENANT_INVALID"),
        ({"tenant": "unknown"}, MISSING, "TENANT_NOT_FOUND"),
        ({"from_revision": -1}, INVALID, "VALUE_OUT_OF_RANGE"),
        ({"kinds": [99]}, INVALID, "FIELD_INVALID"),
        ({"kinds": [0]}, INVALID, "FIELD_INVALID"),
        ({"subject_prefix": "x" * 513}, INVALID, "FIELD_TOO_LARGE"),
        ({"from_revision": 10**9}, Code.OUT_OF_RANGE, "REVISION_FUTURE"),
    ],
)
async def test_bad_watches(shared: Cluster, fields: dict[str, Any], code: grpc.StatusCode, reason: str) -> None:
    request = watch_pb2.WatchRequest(**{"tenant": "default", **fields})
    refusal = await refused_stream(shared.stubs().watch.Watch(request))
    assert (refusal.code, refusal.reason) == (code, reason)


async def test_a_bad_observer(shared: Cluster) -> None:
    stream = shared.stubs().lease.ObserveLease(lease_pb2.ObserveLeaseRequest(tenant="default", name=" "))
    refusal = await refused_stream(stream)
    assert (refusal.code, refusal.reason) == (INVALID, "NAME_INVALID")


async def test_values_at_their_limits_are_taken(shared: Cluster) -> None:
    stubs = shared.stubs()
    session = await open_session(
        stubs,
        ttl_ms=commands.TTL_MAX_MS,
        disconnect_grace_ms=0,
        info={"agent": "x" * 128, "labels": {f"{n:0128}": "y" * 128 for n in range(16)}},
    )
    name, metadata = "n" * 254 + "\u00e9", "\x00\n" + "m" * 1_022
    await acquire(stubs, session, name, capacity=10_000, priority=-100, lock_delay_ms=3_600_000, metadata=metadata)
    key, result = "\u2603" * 170 + "k\n", b"\x00" * 65_536
    begun = await call(stubs, D, BEGIN, {"key": key, "session_id": session, "fingerprint": b"f" * 64})
    assert begun.outcome == dedup_pb2.BEGIN_OUTCOME_NEW
    await call(stubs, D, COMPLETE, {"key": key, "session_id": session, "result": result})
    assert (await call(stubs, D, "GetRecord", {"key": key})).record.result == result
