"""What needs no sidecar: clock arithmetic, fingerprints, errors, addresses, the rules of a session."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from typing import Any

import grpc
import grpc.aio
import pytest
import tenure
from hypothesis import given
from hypothesis import strategies as st
from tenure import addresses, errors
from tenure.clock import Validity, margin
from tenure.connection import positive_jitter
from tenure.dedup import Attempt, Completed, Idempotency, JsonSerializer
from tenure.session import ACQUIRE, CHECK, RELEASE, Hooks, Session, Timing
from tenure.v1 import error_pb2, lease_pb2, session_pb2

from tests.client.double import refusal

# ---- the clock -------------------------------------------------------------------------------------------------


def validity(ttl_ms: int = 15_000, grace_ms: int = 1_000, cancel_margin_ms: int = 2_000) -> Validity:
    return Validity(ttl_ms, grace_ms, cancel_margin_ms)


def test_margin() -> None:
    assert margin(15_000) == 0.15
    assert margin(500) == margin(100) == 0.005


def test_safe_until_counts_from_the_sending_of_the_last_confirmed_renewal() -> None:
    state = validity()
    assert state.safe_until == float("-inf")
    state.renewed(100.0, 15_000)
    assert state.safe_until == pytest.approx(114.85)
    assert state.cancel_at == pytest.approx(112.85)
    state.renewed(98.0, 15_000)  # an older one that was confirmed late
    assert state.safe_until == pytest.approx(114.85)


def test_a_broken_stream_cuts_to_the_grace_and_a_resumed_one_lifts_it() -> None:
    state = validity()
    state.renewed(100.0, 15_000)
    state.disconnected(101.0)
    assert state.safe_until == pytest.approx(101.99)
    assert state.cancel_at == pytest.approx(101.49)  # half of the grace is left for cleaning up
    state.disconnected(101.5)  # the first break counts
    assert state.safe_until == pytest.approx(101.99)
    state.attached(101.6, 15_000, 1_000)
    assert state.safe_until == pytest.approx(116.45)


def test_a_cut_never_lengthens() -> None:
    state = validity(grace_ms=15_000)
    state.renewed(100.0, 15_000)
    state.disconnected(105.0)
    assert state.safe_until == pytest.approx(114.85)


def test_a_sidecar_that_is_gone_has_cut_nothing() -> None:
    state = validity()
    state.renewed(100.0, 15_000)
    state.disconnected(101.0)
    state.sidecar_gone(101.0)
    assert state.safe_until == pytest.approx(114.85)


def test_the_end_of_a_sidecar_says_nothing_of_other_streams() -> None:
    state = validity()
    state.renewed(100.0, 15_000)
    state.disconnected(101.0)
    state.disconnected(101.5)
    state.sidecar_gone(101.5)
    assert state.safe_until == pytest.approx(101.99)


def test_only_a_confirmation_sent_after_a_suspected_cut_disproves_it() -> None:
    state = validity()
    state.renewed(100.0, 15_000)
    state.disconnected(101.0)
    state.renewed(100.9, 15_000)
    assert state.cut
    state.renewed(101.1, 15_000)
    assert not state.cut
    state.disconnected(102.0)
    state.disconnected(102.5)
    state.renewed(102.2, 15_000)  # says nothing of the second
    assert state.cut
    state.renewed(102.6, 15_000)
    assert not state.cut


@given(
    st.lists(st.tuples(st.sampled_from(["renewed", "attached", "disconnected"]), st.integers(0, 20_000)), max_size=30)
)
def test_safe_until_never_passes_what_the_server_guarantees(steps: list[tuple[str, int]]) -> None:
    """Against a server that renews when the renewal is sent, and cuts when the stream breaks: the earliest it can."""
    state = validity()
    now, deadline, carried = 0.0, 0.0, False
    for step, wait_ms in steps:
        now += wait_ms / 1000
        if deadline and now >= deadline:
            return
        if step == "attached":
            state.attached(now, 15_000, 1_000)
            deadline, carried = now + 15, True
        elif step == "renewed" and carried:
            state.renewed(now, 15_000)
            deadline = now + 15
        elif step == "disconnected" and carried:
            state.disconnected(now)
            deadline, carried = min(deadline, now + 1), False
        assert state.safe_until <= deadline or not deadline


def test_the_public_clock_goes_on() -> None:
    before = tenure.now()
    assert before <= time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) <= tenure.now()


# ---- settings --------------------------------------------------------------------------------------------------


def test_default_timing_fits_the_ttl() -> None:
    assert Timing.of(15_000, None, None) == Timing(15_000, 5_000, 3_000, 2_000)
    assert Timing.of(500, None, None) == Timing(500, 166, 200, 100)
    assert Timing.of(3_600_000, None, None).keep_alive_ms == 5_000


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_ms": 25_000, "keep_alive_ms": 300_000},  # L19
        {"ttl_ms": 15_000, "keep_alive_ms": 5_001},
        {"ttl_ms": 15_000, "keep_alive_ms": 0},
        {"ttl_ms": 0},
        {"ttl_ms": 499},
        {"ttl_ms": 3_600_001},
        {"ttl_ms": 15_000, "cancel_margin_ms": 7_501},
        {"ttl_ms": 15_000, "disconnect_grace_ms": 15_001},
        {"ttl_ms": 15_000, "disconnect_grace_ms": -1},
        {"timeout": 0},
        {"in_flight_max": 0},
        {"address": "nonsense"},
        {"address": "unix:relative.sock"},
        {"address": "host:99999"},
        {"address": " , "},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        tenure.connect(**options)


def test_an_option_that_does_not_exist_is_refused() -> None:
    options: Any = {"tenent": "a"}
    with pytest.raises(TypeError, match=r"no option tenent; it has: tenant, "):
        tenure.connect(**options)


def test_what_was_not_entered_says_how() -> None:
    connecting: Any = tenure.connect("unix:/run/x.sock")
    with pytest.raises(AttributeError, match=r"async with tenure\.connect\(\) as client"):
        connecting.lease("a")
    with pytest.raises(TypeError, match="connect_sync"), connecting:
        pass


async def test_results_that_cannot_be_stored_or_read_say_why() -> None:
    unused: Any = None
    result: Any = {"ok": 1}
    with pytest.raises(TypeError, match=r"not dict: encode it, as in json\.dumps"):
        await Attempt(unused, unused, "k", 1).complete(result)
    by_hand = Completed("k", 1, b"by hand", 0)
    with pytest.raises(ValueError, match="Expecting value") as caught:
        Idempotency(str, None, JsonSerializer(), "retry", ()).replay(by_hand)
    assert "stored result of attempt 1 at 'k'" in caught.value.__notes__[0]


# ---- addresses -------------------------------------------------------------------------------------------------


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENURE_ADDRESS", raising=False)
    assert [str(each) for each in addresses.parse_addresses(None)] == ["unix:/run/tenure/tenure.sock"]
    monkeypatch.setenv("TENURE_ADDRESS", "unix:/a.sock, 127.0.0.1:8320")
    assert [str(each) for each in addresses.parse_addresses(None)] == ["unix:/a.sock", "127.0.0.1:8320"]
    assert [str(each) for each in addresses.parse_addresses(["/a.sock", "unix:///b.sock"])] == [
        "unix:/a.sock",
        "unix:/b.sock",
    ]
    parsed = addresses.parse_addresses("[::1]:80")[0]
    assert (parsed.host, parsed.port, parsed.local) == ("::1", 80, True)


def test_plain_text_leaves_the_machine_only_on_request() -> None:
    with pytest.raises(tenure.ConnectError, match="not on this machine"):
        tenure.connect("10.0.0.1:8320")
    tenure.connect("10.0.0.1:8320", insecure=True)
    tenure.connect("localhost:8320")


# ---- fingerprints ----------------------------------------------------------------------------------------------


def test_fingerprints() -> None:
    """I03."""
    same = tenure.fingerprint
    assert same({"a": 1, "b": [2, 3]}) == same({"b": [2, 3], "a": 1})
    assert same({"x": {"a": 1, "b": 2}}) == same({"x": {"b": 2, "a": 1}})
    assert same({"a": 1, "b": [2, 3]}) != same({"a": 1, "b": [3, 2]})
    assert same({"a": 1}) != same({"a": "1"})
    assert same({"a": True}) != same({"a": 1})
    assert same({"a": None}) != same({})
    assert same({"a": 1.0}) == same({"a": 1})
    assert same({"a": 1.5}) != same({"a": 1})
    assert same({"a": (1, 2)}) == same({"a": [1, 2]})
    assert same({"a": "ü\ud800"}) != same({"a": "ü"})
    assert len(same(None)) == 32


def test_excluded_fields_do_not_count() -> None:
    same = tenure.fingerprint
    assert same({"a": 1, "ts": 5}, ["ts"]) == same({"a": 1, "ts": 6}, ["ts"]) == same({"a": 1})
    assert same({"a": {"ts": 1}}, ["ts"]) != same({"a": {"ts": 2}}, ["ts"])
    assert same({"a": {"ts": 1}}, ["a.ts"]) == same({"a": {}}, [])
    assert same({"a": [{"ts": 1}, {"ts": 2}]}, ["a.ts"]) == same({"a": [{}, {}]})
    with pytest.raises(TypeError, match="list of field names"):
        same({}, "ts")


@pytest.mark.parametrize("payload", [{1: 2}, b"bytes", {"a": object()}, {"a": {1, 2}}])
def test_what_has_no_canonical_form_is_refused(payload: object) -> None:
    with pytest.raises(TypeError):
        tenure.fingerprint(payload)


def test_infinities_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        tenure.fingerprint(float("nan"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.randoms())
def test_the_order_of_keys_and_a_round_trip_change_nothing(payload: object, rng: random.Random) -> None:
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            rng.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    assert tenure.fingerprint(shuffled(payload)) == tenure.fingerprint(payload)
    assert tenure.fingerprint(json.loads(json.dumps(payload))) == tenure.fingerprint(payload)


# ---- errors ----------------------------------------------------------------------------------------------------


def rpc_error(error: error_pb2.OperationError, *, details: bytes | None = None) -> grpc.aio.AioRpcError:
    status = error_pb2.RichStatus(code=error.code, message=error.message)
    status.details.add().Pack(error_pb2.OperationError(message="another detail"))
    status.details.add().Pack(error.detail)
    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    packed = status.SerializeToString() if details is None else details
    trailing = grpc.aio.Metadata((errors.DETAILS_KEY, packed), ("x", "y"))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=error.message)


def decode(error: grpc.aio.AioRpcError, *, read_only: bool = False) -> errors.TenureError:
    return errors.from_rpc_error(error, error.trailing_metadata(), read_only=read_only)


def test_rich_errors_are_decoded() -> None:
    held = refusal(grpc.StatusCode.ALREADY_EXISTS, "LEASE_HELD", retry_delay_ms=250, holder="s7", token="41")
    error = decode(rpc_error(held))
    assert isinstance(error, tenure.LeaseHeld)
    assert (error.holder, error.token, error.retry_delay, error.reason) == ("s7", 41, 0.25, "LEASE_HELD")
    assert str(error) == "lease_held (LEASE_HELD)"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "TOKEN_STALE", tenure.StaleToken),
        (grpc.StatusCode.FAILED_PRECONDITION, "FENCE_STALE", tenure.StaleToken),
        (grpc.StatusCode.FAILED_PRECONDITION, "ATTEMPT_STALE", tenure.AttemptStale),
        (grpc.StatusCode.FAILED_PRECONDITION, "RECORD_MISMATCH", tenure.RecordMismatch),
        (grpc.StatusCode.FAILED_PRECONDITION, "SOMETHING_NEW", tenure.Definite),
        (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", tenure.SessionLost),
        (grpc.StatusCode.NOT_FOUND, "RECORD_NOT_FOUND", tenure.NotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", tenure.Overloaded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "RECORDS_FULL", tenure.LimitReached),
        (grpc.StatusCode.UNAVAILABLE, "NO_LEADER", tenure.Unavailable),
        (grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED", tenure.Compacted),
        (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID", tenure.InvalidArgument),
    ],
)
def test_each_refusal_has_its_type(code: grpc.StatusCode, reason: str, kind: type[errors.TenureError]) -> None:
    error = decode(rpc_error(refusal(code, reason)))
    assert type(error) is kind
    assert isinstance(error, tenure.Definite)
    assert not isinstance(error, tenure.Indefinite)


def test_an_outcome_that_is_not_known_is_indefinite_whatever_the_code() -> None:
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED):
        error = decode(rpc_error(refusal(code, "OUTCOME_UNKNOWN", definite=False)))
        assert isinstance(error, tenure.Indefinite)
        assert not isinstance(error, tenure.Definite)


def test_an_error_without_details_is_indefinite_for_a_change_and_not_for_a_read() -> None:
    plain = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="down")
    assert isinstance(decode(plain), tenure.Indefinite)
    assert isinstance(decode(plain, read_only=True), tenure.Unavailable)


def test_garbage_details_leave_the_status_code() -> None:
    held = refusal(grpc.StatusCode.UNAVAILABLE, "X")
    assert isinstance(decode(rpc_error(held, details=b"\xff\xff\xff"), read_only=True), tenure.Unavailable)


def test_field_and_revision() -> None:
    assert errors.InvalidArgument("m", facts={"field": "ttl_ms"}).field == "ttl_ms"
    assert errors.Compacted("m", facts={"first_revision": "17"}).first_revision == 17
    assert errors.Compacted("m", facts={"first_revision": "x"}).first_revision == 0


def test_jitter_is_only_ever_later() -> None:
    """B07."""
    delays = [positive_jitter(60.0) for _ in range(300)]
    assert all(60 <= delay <= 72 for delay in delays)
    assert max(delays) - min(delays) > 6


# ---- the session -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class FakeLease:
    def __init__(self, name: str, token: int) -> None:
        self.name, self.token = name, token
        self.told: list[str] = []

    def _interrupt(self) -> None:
        self.told.append("interrupt")

    def _lose(self, cause: str, current_token: int) -> None:
        self.told.append(f"lost {cause} {current_token}")

    def _jeopardy(self) -> None:
        self.told.append("jeopardy")

    def _safe(self) -> None:
        self.told.append("safe")


def attached_session(clock: Clock, **hooks: Any) -> Session:
    session = Session(Timing.of(15_000, None, None), clock, Hooks(**hooks), grace_ms=1_000, in_flight_max=10)
    shown = session_pb2.Session(session_id="s1", ttl_ms=15_000, disconnect_grace_ms=1_000)
    session.attached(session_pb2.Attached(session=shown, held_complete=True), clock())
    return session


def acknowledge(session: Session, number: int) -> None:
    ack = session_pb2.KeepAliveAck(id=number, ttl_ms=15_000)
    session.received(session_pb2.ConnectResponse(keep_alive_acks=[ack]))


async def test_keepalives_and_the_end_of_a_session_in_time() -> None:
    clock = Clock()
    ended: list[Session] = []
    session = attached_session(clock, ended=ended.append)
    lease = FakeLease("job", 1)
    session.hold(lease)
    assert session.tick(True) == pytest.approx(5)
    assert session.outgoing(0) is None
    clock.now += 5
    session.tick(True)
    message = session.outgoing(0)
    assert message is not None
    assert message.keep_alive.id == 1
    clock.now += 0.05
    acknowledge(session, 1)
    assert session.validity.safe_until == pytest.approx(1_000 + 5 + 14.85)  # from the sending, not from the answer
    clock.now = 1_010.0
    session.tick(True)
    assert session.outgoing(0) is not None
    clock.now = 1_013.0
    session.tick(True)
    assert session.stalled
    assert lease.told == ["jeopardy"]
    clock.now = 1_017.85
    session.tick(True)
    assert lease.told == ["jeopardy", "interrupt"]
    assert session.valid
    clock.now = 1_019.86
    assert not session.valid
    session.tick(True)
    assert lease.told == ["jeopardy", "interrupt", "lost expired 0"]
    assert ended == [session]
    acknowledge(session, 2)
    assert not session.valid
    with pytest.raises(tenure.SessionLost):
        session.submit(CHECK, lease_pb2.CheckLeaseRequest(), 1.0, lambda response: response)


async def test_a_late_confirmation_makes_safe_again() -> None:
    clock = Clock()
    session = attached_session(clock)
    lease = FakeLease("job", 1)
    session.hold(lease)
    clock.now += 5
    session.tick(True)
    session.outgoing(0)
    clock.now += 3
    session.tick(True)
    session.outgoing(0)
    acknowledge(session, 1)
    assert lease.told == ["jeopardy", "safe"]
    assert not session.stalled


async def test_a_loss_that_overtakes_the_grant_is_not_missed() -> None:
    session = attached_session(Clock())
    lost = session_pb2.LeaseLost(name="job", token=7, cause="operator", current_token=8)
    session.received(session_pb2.ConnectResponse(pushes=[session_pb2.Push(lease_lost=lost)]))
    lease = FakeLease("job", 7)
    session.hold(lease)
    assert lease.told == ["lost operator 8"]
    assert not session.leases


async def test_messages_carry_what_is_ready_in_order_and_acknowledge_what_was_answered() -> None:
    session = attached_session(Clock())
    request = lease_pb2.CheckLeaseRequest(name="job")
    operations = [session.submit(CHECK, request, 5.0, lambda response: response) for _ in range(3)]
    message = session.outgoing(2.0)
    assert message is not None
    assert [each.id for each in message.operations] == [1, 2, 3]
    assert message.operations[0].timeout_ms == 3_000
    assert message.acknowledged_id == 0
    for number in (1, 3):
        result = session_pb2.OperationResult(id=number, check_lease=lease_pb2.CheckLeaseResponse())
        session.received(session_pb2.ConnectResponse(results=[result]))
    assert operations[0].answer.done()
    session.resumed()
    message = session.outgoing(2.0)
    assert message is not None
    assert [each.id for each in message.operations] == [2]
    assert message.acknowledged_id == 1


async def test_what_is_abandoned_and_how() -> None:
    session = attached_session(Clock())
    undone: list[Any] = []
    acquire = lease_pb2.AcquireLeaseRequest(name="job")

    def submit() -> Any:
        return session.submit(ACQUIRE, acquire, 5.0, lambda response: response.token, undone.append)

    unsent = submit()
    session.abandon(unsent)
    assert undone == [None]
    assert session.outgoing(0.0) is None

    sent = submit()
    session.outgoing(0.0)
    session.abandon(sent)
    message = session.outgoing(0.0)
    assert message is not None
    assert list(message.cancelled_ids) == [sent.id]
    session.resumed()  # a new stream: it is sent again, so that its fate can be learnt
    message = session.outgoing(0.0)
    assert message is not None
    assert [each.id for each in message.operations] == [sent.id]
    assert list(message.cancelled_ids) == [sent.id]
    granted = session_pb2.OperationResult(id=sent.id, acquire_lease=lease_pb2.AcquireLeaseResponse(token=9))
    session.received(session_pb2.ConnectResponse(results=[granted]))
    assert undone == [None, 9]

    answered = submit()
    session.outgoing(0.0)
    granted = session_pb2.OperationResult(id=answered.id, acquire_lease=lease_pb2.AcquireLeaseResponse(token=10))
    session.received(session_pb2.ConnectResponse(results=[granted]))
    session.abandon(answered)  # in the very turn of the answer
    assert undone == [None, 9, 10]

    cancelled = submit()
    session.outgoing(0.0)
    cancelled.answer.cancel()  # the caller's task has not run since
    granted = session_pb2.OperationResult(id=cancelled.id, acquire_lease=lease_pb2.AcquireLeaseResponse(token=11))
    session.received(session_pb2.ConnectResponse(results=[granted]))
    session.abandon(cancelled)
    assert undone == [None, 9, 10, 11]

    last = submit()
    session.outgoing(0.0)
    session.abandon(last)
    session.end("expired")
    assert undone == [None, 9, 10, 11, None]


async def test_a_release_that_nobody_waits_for_is_dropped_at_the_next_stream() -> None:
    session = attached_session(Clock())
    operation = session.submit(RELEASE, lease_pb2.ReleaseLeaseRequest(), 5.0, lambda response: response)
    session.outgoing(0.0)
    session.abandon(operation)
    session.resumed()
    assert session.outgoing(0.0) is None
    assert session.in_flight == 0


async def test_what_a_resumed_session_holds_is_compared() -> None:
    clock = Clock()
    granted: list[tuple[str, int]] = []
    session = attached_session(clock, granted=lambda session, name, token: granted.append((name, token)))
    kept, gone = FakeLease("kept", 1), FakeLease("gone", 2)
    session.hold(kept)
    session.hold(gone)
    session.disconnected(clock())
    shown = session_pb2.Session(session_id="s1", ttl_ms=15_000, disconnect_grace_ms=1_000)
    held = [session_pb2.LeaseGranted(name="kept", token=1), session_pb2.LeaseGranted(name="new", token=3)]
    session.attached(session_pb2.Attached(session=shown, resumed=True, held=held, held_complete=True), clock())
    assert kept.told == []
    assert gone.told == ["lost lost 0"]
    assert granted == [("new", 3)]


async def test_a_suspected_cut_is_looked_into_at_once() -> None:
    """A second stream was tried and given up while the first carries the session: the next renewal may be too late."""
    clock = Clock()
    session = attached_session(clock)
    session.disconnected(clock())
    assert session.validity.safe_until < clock() + 1
    clock.now += 0.001
    session.tick(attached=True)
    message = session.outgoing(0.0)
    assert message is not None
    ack = session_pb2.KeepAliveAck(id=message.keep_alive.id, ttl_ms=15_000)
    session.received(session_pb2.ConnectResponse(keep_alive_acks=[ack]))
    assert session.validity.safe_until > clock() + 10


async def test_unanswered_calls_learn_of_the_end() -> None:
    session = attached_session(Clock())
    acquire = session.submit(ACQUIRE, lease_pb2.AcquireLeaseRequest(), 5.0, lambda response: response)
    session.outgoing(0.0)
    session.end("session_ended")
    with pytest.raises(tenure.SessionLost):
        await acquire.answer


async def test_the_local_line_is_fair_and_survives_cancellations() -> None:
    from tenure.lease import LocalLine

    line = LocalLine()
    assert await line.enter("a", 0)
    assert not await line.enter("a", 0)
    assert not await line.enter("a", 0.001)
    waiters = [asyncio.create_task(line.enter("a", 10)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    line.leave("a")  # to the second; the first has given up
    assert await waiters[1]
    waiters[2].cancel()
    await asyncio.wait(waiters)
    line.leave("a")
    assert line.try_enter("a")
    line.leave("a")
    assert not line._waiting


# ---- the synchronous client ------------------------------------------------------------------------------------

# What the synchronous client leaves out, by method.
LEFT_OUT = {"work": {"stop"}, "list_leases": {"page_size"}, "watch": {"all_tenants"}}
ASYNC_ONLY = {"guard"}  # it cancels its body, and a thread cannot be cancelled
SYNC_ONLY = {"closing"}


def public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def test_the_synchronous_client_mirrors_the_asynchronous_one() -> None:
    mirror, model = public(tenure.SyncClient), public(tenure.Client)
    assert mirror.keys() - model.keys() == SYNC_ONLY
    assert model.keys() - mirror.keys() == ASYNC_ONLY
    for name in mirror.keys() & model.keys():
        if isinstance(model[name], property):
            continue
        wanted = {
            each.name: (each.kind, each.default)
            for each in inspect.signature(model[name]).parameters.values()
            if each.name not in LEFT_OUT.get(name, ())
        }
        found = {each.name: (each.kind, each.default) for each in inspect.signature(mirror[name]).parameters.values()}
        assert found == wanted, name
        assert mirror[name].__doc__, name
