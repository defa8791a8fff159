"""The machine against a plain model of itself, step by step, with snapshots, repeats and replays in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.core import commands as c
from sidecar.core.events import Event, Kind
from sidecar.core.machine import Machine
from tests.core.derived import check_derived, restored
from tests.core.model import Model, Outcome

TENANT = "t"
NAMES = st.sampled_from(["x", "y", "z"])
KEYS = st.sampled_from(["k", "l"])
WAITERS = st.sampled_from(["w1", "w2", "w3"])
CONNECTIONS = st.sampled_from(["", "c1", "c2"])
FINGERPRINTS = st.sampled_from([b"f", b"f", b"f", b"g"])
RESULTS = st.sampled_from([b"r", b"s"])
# Mostly little, so that what was begun is still going on; now and then enough to end something, or everything.
PASSING_MS = st.sampled_from([0, 0, 0, 0, 1, 10, 10, 10, 20, 50, 50, 100, 100, 300, 900, 2_000, -50])
TTLS = st.sampled_from([1_000, 2_000, 5_000, 60_000, 60_000, 60_000])
INDEX = st.sampled_from(range(60))


def simple(result: c.Result) -> Outcome:
    match result:
        case c.Done():
            return ("done",)
        case c.Refused():
            return ("refused", result.reason.name)
        case c.SessionAttached():
            return ("attached", result.deadline_ms)
        case c.LeaseGranted():
            return ("granted", result.token, result.already_held)
        case c.LeaseQueued():
            return ("queued", result.waiter, result.deadline_ms)
        case c.LeaseTransferred():
            return ("transferred", result.token)
        case c.RecordBegun():
            return ("begun", result.outcome.name, result.attempt, result.owner, result.result)
        case c.RecordCompleted():
            return ("completed", result.already_completed)
        case _:
            raise AssertionError(result)


class AgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine, self.shadow, self.model = Machine(), Machine(), Model()
        self.now_ms = 1_000
        self.log: list[tuple[c.Stamp, c.Request, c.Result]] = []
        self.events: list[Event] = []
        self.sessions: list[str] = ["s0-none"]

    @initialize(ttls=st.lists(TTLS, min_size=3, max_size=3))
    def some_sessions(self, ttls: list[int]) -> None:
        for ttl_ms in ttls:
            self.open(0, ttl_ms, 200, "c1")

    # ---- the way in -------------------------------------------------------------------------------------------------

    def apply(self, command: c.Command, passing_ms: int) -> c.Result:
        """To the machine, and to the one that is restored now and then: results, events and state must be the same."""
        self.now_ms = max(0, self.now_ms + passing_ms)
        stamp, request = c.Stamp(self.now_ms, 0), c.Request(command=command)
        # A request with a key of its own each time, so that repeats have something to find.
        if not isinstance(command, c.Tick | c.RenewSessions | c.AttachSession | c.DetachSession | c.CancelWait):
            request = c.Request(command=command, key=c.RequestKey(TENANT, "", f"r{len(self.log)}"))
        self.model.advance(self.now_ms)
        result, events = self.machine.apply(stamp, request)
        again, events_again = self.shadow.apply(stamp, request)
        assert (result, list(events)) == (again, list(events_again))
        self.log.append((stamp, request, result))
        self.events.extend(events)
        return result

    def expect(self, command: c.Command, outcome: Outcome, result: c.Result) -> None:
        assert simple(result) == outcome, f"{command}: {result}, the model says {outcome}"

    def session(self, index: int) -> str:
        """Mostly one that lives; else the last one that was opened."""
        living = list(self.model.sessions)[:4]
        return self.sessions[-1] if index % 20 == 19 or not living else living[index % len(living)]

    def token(self, index: int) -> int:
        """Mostly one that is current; else an old one, or one from the future."""
        current = [hold.token for lease in self.model.leases.values() for hold in lease.holds]
        return current[index % len(current)] if current and index % 7 else self.model.token - index % 4 + 1

    def lease_of(self, token: int, name: str) -> str:
        names = [name for name, lease in self.model.leases.items() for hold in lease.holds if hold.token == token]
        return names[0] if names else name

    # ---- sessions ---------------------------------------------------------------------------------------------------

    @rule(passing_ms=PASSING_MS, ttl_ms=TTLS, grace_ms=st.integers(0, 500), connection=CONNECTIONS)
    def open(self, passing_ms: int, ttl_ms: int, grace_ms: int, connection: str) -> None:
        command = c.OpenSession(
            tenant=TENANT,
            suffix=f"q{len(self.sessions)}",
            ttl_ms=ttl_ms,
            disconnect_grace_ms=grace_ms,
            connection=connection,
        )
        result = self.apply(command, passing_ms)
        assert isinstance(result, c.SessionOpened)
        self.model.open(result.session, ttl_ms, grace_ms, connection)
        self.sessions.append(result.session)

    @rule(passing_ms=PASSING_MS, indexes=st.lists(INDEX, max_size=4), connection=CONNECTIONS)
    def renew(self, passing_ms: int, indexes: list[int], connection: str) -> None:
        sessions = tuple(self.session(index) for index in indexes)
        result = self.apply(c.RenewSessions(sessions=sessions, connections=(connection,) * len(sessions)), passing_ms)
        outcomes = [(session, self.model.renew(session, connection)) for session in sessions]
        assert isinstance(result, c.SessionsRenewed)
        assert list(result.ended) == [session for session, outcome in outcomes if outcome == "ended"]
        assert list(result.superseded) == [session for session, outcome in outcomes if outcome == "superseded"]

    @rule(passing_ms=PASSING_MS, index=INDEX, connection=st.sampled_from(["c1", "c2"]))
    def attach(self, passing_ms: int, index: int, connection: str) -> None:
        session = self.session(index)
        command = c.AttachSession(tenant=TENANT, session=session, connection=connection, node="n")
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.attach(session, connection), result)

    @rule(passing_ms=PASSING_MS, index=INDEX, connection=st.sampled_from(["c1", "c2"]))
    def detach(self, passing_ms: int, index: int, connection: str) -> None:
        session = self.session(index)
        command = c.DetachSession(session=session, connection=connection)
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.detach(session, connection), result)

    @rule(passing_ms=PASSING_MS, index=INDEX)
    def close(self, passing_ms: int, index: int) -> None:
        session = self.session(index)
        command = c.CloseSession(tenant=TENANT, session=session)
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.close(session), result)

    @rule(passing_ms=PASSING_MS)
    def tick(self, passing_ms: int) -> None:
        self.expect(c.Tick(), ("done",), self.apply(c.Tick(), passing_ms))

    @precondition(lambda self: self.machine.next_deadline_ms() is not None)
    @rule(late_ms=st.sampled_from([-1, 0, 0, 1]))
    def tick_around_the_next_deadline(self, late_ms: int) -> None:
        next_ms = self.machine.next_deadline_ms()
        assert next_ms is not None
        self.tick(next_ms + late_ms - self.now_ms)

    # ---- leases -----------------------------------------------------------------------------------------------------

    @rule(
        passing_ms=PASSING_MS,
        index=INDEX,
        name=NAMES,
        wait_ms=st.sampled_from([0, 100, 1_000, 5_000, 5_000, 5_000]),
        priority=st.integers(-1, 1),
        delay_ms=st.sampled_from([0, 0, 700]),
        waiter=WAITERS,
        odd=st.integers(0, 9),
    )
    def acquire(
        self,
        passing_ms: int,
        index: int,
        name: str,
        wait_ms: int,
        priority: int,
        delay_ms: int,
        waiter: str,
        odd: int,
    ) -> None:
        session, capacity = self.session(index), 2 if (name == "z") != (odd == 9) else 1
        command = c.AcquireLease(
            tenant=TENANT,
            name=name,
            session=session,
            capacity=capacity,
            wait_ms=wait_ms,
            priority=priority,
            lock_delay_ms=delay_ms,
            waiter=waiter,
        )
        result = self.apply(command, passing_ms)
        outcome = self.model.acquire(name, session, capacity, wait_ms, priority, delay_ms, waiter)
        self.expect(command, outcome, result)

    @rule(
        index=INDEX,
        name=NAMES,
        priority=st.integers(-1, 1),
        delay_ms=st.sampled_from([0, 700]),
        waiter=WAITERS,
        more=INDEX,
    )
    def acquire_then_another(self, index: int, name: str, priority: int, delay_ms: int, waiter: str, more: int) -> None:
        """One takes it or joins the line, another joins behind or before him."""
        self.acquire(0, index, name, 5_000, 0, delay_ms, waiter, 0)
        self.acquire(1, index + 1 + more % 3, name, 5_000, priority, delay_ms, waiter, 0)

    @rule(passing_ms=PASSING_MS, index=INDEX)
    def release_what_is_held(self, passing_ms: int, index: int) -> None:
        held = [(name, hold) for name, lease in self.model.leases.items() for hold in lease.holds]
        if held:
            name, hold = held[index % len(held)]
            command = c.ReleaseLease(tenant=TENANT, name=name, token=hold.token, session=hold.session)
            result = self.apply(command, passing_ms)
            self.expect(command, self.model.release(name, hold.session, hold.token), result)

    @rule(passing_ms=PASSING_MS, index=INDEX)
    def cancel_what_waits(self, passing_ms: int, index: int) -> None:
        waits = [(name, wait) for name, lease in self.model.leases.items() for wait in lease.waits]
        if waits:
            name, wait = waits[index % len(waits)]
            command = c.CancelWait(tenant=TENANT, name=name, session=wait.session, waiter=wait.waiter)
            result = self.apply(command, passing_ms)
            self.expect(command, self.model.cancel(name, wait.session, wait.waiter), result)

    @rule(passing_ms=PASSING_MS, index=INDEX, name=NAMES, waiter=WAITERS)
    def cancel(self, passing_ms: int, index: int, name: str, waiter: str) -> None:
        session = self.session(index)
        command = c.CancelWait(tenant=TENANT, name=name, session=session, waiter=waiter)
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.cancel(name, session, waiter), result)

    @rule(passing_ms=PASSING_MS, index=INDEX, name=NAMES, token=INDEX, operator=st.booleans())
    def release(self, passing_ms: int, index: int, name: str, token: int, operator: bool) -> None:
        session, token = "" if operator else self.session(index), self.token(token)
        name = self.lease_of(token, name) if index % 5 else name
        command = c.ReleaseLease(tenant=TENANT, name=name, token=token, session=session, actor="ann", reason="r")
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.release(name, session, token), result)

    @rule(passing_ms=PASSING_MS, name=NAMES, token=INDEX, to_index=INDEX)
    def transfer(self, passing_ms: int, name: str, token: int, to_index: int) -> None:
        to_session, token = self.session(to_index), self.token(token)
        name = self.lease_of(token, name) if to_index % 5 else name
        command = c.TransferLease(tenant=TENANT, name=name, token=token, to_session=to_session, actor="ann", reason="r")
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.transfer(name, "", token, to_session), result)

    # ---- records ----------------------------------------------------------------------------------------------------

    @rule(
        passing_ms=PASSING_MS,
        index=INDEX,
        key=KEYS,
        fingerprint=FINGERPRINTS,
        loss=st.sampled_from(c.OwnerLoss),
        retention_ms=st.sampled_from([1_000, 1_500, 4_000]),
        fence=st.sampled_from(["", "", "", "x"]),
        token=INDEX,
    )
    def begin(
        self,
        passing_ms: int,
        index: int,
        key: str,
        fingerprint: bytes,
        loss: c.OwnerLoss,
        retention_ms: int,
        fence: str,
        token: int,
    ) -> None:
        session, token = self.session(index), self.token(token) if fence else 0
        command = c.BeginRecord(
            tenant=TENANT,
            key=key,
            session=session,
            fingerprint=fingerprint,
            owner_loss=loss,
            retention_ms=retention_ms,
            fence_lease=fence,
            fence_token=token,
        )
        result = self.apply(command, passing_ms)
        self.expect(
            command, self.model.begin(key, session, fingerprint, loss.name, retention_ms, (fence, token)), result
        )

    @rule(passing_ms=PASSING_MS, index=INDEX, key=KEYS, attempt=st.integers(1, 3), payload=RESULTS)
    def complete(self, passing_ms: int, index: int, key: str, attempt: int, payload: bytes) -> None:
        session = self.session(index)
        command = c.CompleteRecord(tenant=TENANT, key=key, session=session, attempt=attempt, result=payload)
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.complete(key, session, attempt, payload), result)

    @rule(passing_ms=PASSING_MS, key=KEYS, payload=RESULTS, retryable=st.booleans(), how=st.integers(0, 2))
    def end_the_running_attempt(self, passing_ms: int, key: str, payload: bytes, retryable: bool, how: int) -> None:
        record = self.model.records.get(key)
        if record is None:
            return
        session, attempt = record.owner, record.attempt
        command: c.Command
        if how:
            command = c.CompleteRecord(tenant=TENANT, key=key, session=session, attempt=attempt, result=payload)
            result = self.apply(command, passing_ms)
            self.expect(command, self.model.complete(key, session, attempt, payload), result)
        else:
            command = c.FailRecord(tenant=TENANT, key=key, session=session, attempt=attempt, retryable=retryable)
            result = self.apply(command, passing_ms)
            self.expect(command, self.model.fail(key, session, attempt, retryable), result)

    @rule(
        passing_ms=PASSING_MS, key=KEYS, attempt=st.integers(1, 3), how=st.sampled_from(c.Resolution), payload=RESULTS
    )
    def resolve(self, passing_ms: int, key: str, attempt: int, how: c.Resolution, payload: bytes) -> None:
        command = c.ResolveRecord(
            tenant=TENANT, key=key, attempt=attempt, resolution=how, result=payload, actor="ann", reason="r"
        )
        result = self.apply(command, passing_ms)
        self.expect(command, self.model.resolve(key, attempt, how.name, payload), result)

    # ---- switches ---------------------------------------------------------------------------------------------------

    @rule(passing_ms=PASSING_MS, fleet=st.booleans(), odd=st.integers(0, 4))
    def kill_or_clear(self, passing_ms: int, fleet: bool, odd: int) -> None:
        in_force = self.machine.switches_concerning(TENANT)
        if in_force and odd:
            for row in in_force:
                self.apply(c.ClearSwitch(tenant=row.tenant, switch=row.switch, actor="ann", reason="r"), passing_ms)
            self.model.clear()
        elif not odd:
            tenant = "" if fleet else TENANT
            self.apply(c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r", tenant=tenant), passing_ms)
            self.model.kill()

    # ---- repeats, snapshots ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.log)
    @rule(index=INDEX)
    def repeat_a_request(self, index: int) -> None:
        """Within the retention, a repeat has the answer it had, and changes nothing."""
        stamp, request, before = self.log[index % len(self.log)]
        unsettled = isinstance(before, c.LeaseQueued | c.LeaseGranted | c.RecordBegun)
        too_old = self.now_ms - stamp.cluster_ms >= self.machine.limits.request_retention_ms
        if request.key is None or unsettled or too_old:
            return
        self.model.advance(self.now_ms)
        now = c.Stamp(self.now_ms, 0)
        self.events.extend(self.machine.apply(now, c.Request(command=c.Tick()))[1])
        digest = self.machine.digest()
        assert self.machine.apply(now, request) == (before, [])
        assert self.machine.digest() == digest
        self.shadow.apply(now, request)

    @rule()
    def restore_the_shadow(self) -> None:
        self.shadow = restored(self.shadow)

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_what_the_model_says(self) -> None:
        machine, model = self.machine, self.model
        sessions = {row.session: (row.deadline_ms, row.connection) for row in machine.sessions(TENANT, "", 10_000)}
        assert sessions == {name: (row.deadline_ms, row.connection) for name, row in model.sessions.items()}
        leases = {
            lease.name: (
                [(holder.session, holder.token) for holder in lease.holders],
                [(waiter.session, waiter.waiter) for waiter in lease.waiters],
                list(lease.delays),
            )
            for lease in machine.leases(TENANT, "", "", 10_000)
        }
        assert leases == {
            name: (
                [(hold.session, hold.token) for hold in lease.holds],
                [(wait.session, wait.waiter) for wait in lease.line()],
                lease.delays,
            )
            for name, lease in model.leases.items()
            if lease.holds or lease.waits or lease.delays
        }
        records = {
            row.key: (row.state.name, row.attempt, row.owner, row.result, row.expires_ms)
            for row in machine.records(TENANT, "", "", 10_000, None)
        }
        assert records == {
            key: (row.state, row.attempt, row.owner, row.result, row.expires_ms) for key, row in model.records.items()
        }
        assert machine.next_deadline_ms() == model.next_deadline_ms()

    @invariant()
    def the_past_is_over(self) -> None:
        next_ms = self.machine.next_deadline_ms()
        assert next_ms is None or next_ms > self.machine.stamp.cluster_ms

    @invariant()
    def the_shadow_is_the_same(self) -> None:
        assert self.machine.digest() == self.shadow.digest()
        check_derived(self.machine)

    @invariant()
    def events_tell_it_all(self) -> None:
        assert [event.revision for event in self.events] == list(range(1, len(self.events) + 1))
        tokens = [event.token for event in self.events if event.kind is Kind.LEASE_GRANTED]
        assert all(earlier < later for earlier, later in pairwise(tokens))
        assert holders_by_events(self.events) == {
            lease.name: [holder.token for holder in lease.holders]
            for lease in self.machine.leases(TENANT, "", "", 10_000)
            if lease.holders
        }
        assert self.machine.events_from(self.machine.first_revision(), 1_000_000) == self.events[-10_000:]

    def teardown(self) -> None:
        """The log alone, through its bytes, gives the same state again."""
        replayed = Machine()
        for stamp, request, result in self.log:
            wire = msgspec.msgpack.encode((stamp, request))
            stamp, request = msgspec.msgpack.decode(wire, type=tuple[c.Stamp, c.Request])
            assert replayed.apply(stamp, request)[0] == result
        replayed.apply(self.machine.stamp, c.Request(command=c.Tick()))
        self.machine.apply(self.machine.stamp, c.Request(command=c.Tick()))
        assert replayed.digest() == self.machine.digest()


def holders_by_events(events: list[Event]) -> dict[str, list[int]]:
    """Who holds what, from nothing but the change stream: never more than the capacity allows."""
    held: dict[str, list[int]] = {}
    for event in events:
        if event.kind is Kind.LEASE_GRANTED:
            held.setdefault(event.subject, []).append(event.token)
        elif event.kind in (Kind.LEASE_RELEASED, Kind.LEASE_EXPIRED, Kind.LEASE_TRANSFERRED):
            held[event.subject].remove(event.token)
    return {name: tokens for name, tokens in held.items() if tokens}


WALK_STEPS = 250


@pytest.mark.parametrize("seed", range(20))
def test_a_crowded_walk(seed: int) -> None:
    """Longer than hypothesis would go, and with more of the sessions at the same few leases."""
    chance = random.Random(seed)
    machine = AgainstModel()
    machine.some_sessions([60_000, 4_000, 2_000])
    steps: list[Callable[[], object]] = [
        lambda: machine.acquire(passing(chance), *acquire_arguments(chance)),
        lambda: machine.acquire(0, *acquire_arguments(chance)),
        lambda: machine.acquire(0, *acquire_arguments(chance)),
        lambda: machine.acquire(0, *acquire_arguments(chance)),
        lambda: machine.release_what_is_held(passing(chance), chance.randrange(60)),
        lambda: machine.cancel_what_waits(passing(chance), chance.randrange(60)),
        lambda: machine.transfer(passing(chance), "x", chance.randrange(60), chance.randrange(60)),
        lambda: machine.renew(passing(chance), [chance.randrange(60) for _ in range(3)], chance.choice(["", "c1"])),
        lambda: machine.attach(passing(chance), chance.randrange(60), "c1"),
        lambda: machine.detach(passing(chance), chance.randrange(60), "c1"),
        lambda: machine.begin(
            passing(chance),
            chance.randrange(60),
            chance.choice("kl"),
            b"f",
            chance.choice(list(c.OwnerLoss)),
            chance.choice([1_000, 4_000]),
            chance.choice(["", "x"]),
            chance.randrange(60),
        ),
        lambda: machine.end_the_running_attempt(
            passing(chance),
            chance.choice("kl"),
            chance.choice([b"r", b"s"]),
            chance.random() < 0.5,
            chance.randrange(3),
        ),
        lambda: machine.resolve(passing(chance), chance.choice("kl"), 1, chance.choice(list(c.Resolution)), b"r"),
        lambda: machine.repeat_a_request(chance.randrange(len(machine.log))),
        machine.restore_the_shadow,
        lambda: machine.kill_or_clear(passing(chance), chance.random() < 0.5, chance.randrange(6)),
    ]
    for _ in range(WALK_STEPS):
        if len(machine.model.sessions) < 4:
            machine.open(0, chance.choice([1_000, 2_000, 3_000, 60_000]), chance.choice([0, 200]), "c1")
        elif chance.random() < 0.02:
            machine.close(0, chance.randrange(60))
        chance.choice(steps)()
        machine.the_state_is_what_the_model_says()
        machine.the_past_is_over()
        machine.the_shadow_is_the_same()
        machine.events_tell_it_all()
    machine.teardown()


def passing(chance: random.Random) -> int:
    return chance.choice([0, 0, 1, 10, 50, 100, 300, 900])


def acquire_arguments(chance: random.Random) -> tuple[int, str, int, int, int, str, int]:
    return (
        chance.randrange(60),
        chance.choice("xzz"),
        chance.choice([0, 900, 5_000, 5_000]),
        chance.choice([0, 0, 1]),
        chance.choice([0, 700, 2_000]),
        chance.choice(["w1", "w2"]),
        chance.randrange(40),
    )


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
