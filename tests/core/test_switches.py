"""Switches: what is in force, what a kill makes stale, and what goes on."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from sidecar.core import commands as c
from sidecar.core.commands import Reason, SwitchMode
from sidecar.core.events import Event, Kind
from sidecar.core.machine import Machine
from sidecar.core.switches import ENDED_MAX
from tests.core.derived import check_derived, restored

R = TypeVar("R")


class Life:
    """A machine, and the time at which the next command reaches it."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.now_ms = 1_000
        self.events: list[Event] = []

    def do(self, command: c.Command) -> c.Result:
        stamp = c.Stamp(self.now_ms, self.now_ms + 1_000_000)
        result, events = self.machine.apply(stamp, c.Request(command=command))
        self.events.extend(events)
        check_derived(self.machine)
        return result

    def get(self, command: c.Command, kind: type[R]) -> R:
        result = self.do(command)
        assert isinstance(result, kind), result
        return result

    def refused(self, command: c.Command, reason: Reason) -> dict[str, str]:
        result = self.get(command, c.Refused)
        assert result.reason is reason, result
        return dict(result.facts)

    def open(self, tenant: str = "t", ttl_ms: int = 60_000) -> str:
        suffix = f"q{self.machine.revision}"
        return self.get(c.OpenSession(tenant=tenant, suffix=suffix, ttl_ms=ttl_ms), c.SessionOpened).session

    def acquire(self, session: str, name: str = "x", **options: Any) -> c.AcquireLease:
        return c.AcquireLease(tenant="t", name=name, session=session, **options)

    def token(self, session: str, name: str = "x") -> int:
        return self.get(self.acquire(session, name), c.LeaseGranted).token

    def set(self, mode: SwitchMode, tenant: str = "", expires_after_ms: int = 0) -> str:
        return self.get(switch(mode, tenant, expires_after_ms), c.SwitchIsSet).switch

    def clear(self, found: str, tenant: str = "") -> None:
        self.get(c.ClearSwitch(tenant=tenant, switch=found, actor="bob", reason="over"), c.Done)

    def restart(self) -> None:
        self.machine = restored(self.machine)


def switch(mode: SwitchMode, tenant: str = "", expires_after_ms: int = 0) -> c.SetSwitch:
    return c.SetSwitch(mode=mode, actor="ann", reason="cost", tenant=tenant, expires_after_ms=expires_after_ms)


KILL, DRAIN, PAUSE = SwitchMode.KILL, SwitchMode.DRAIN, SwitchMode.PAUSE


def test_a_switch_is_in_force_over_its_scope_and_no_other() -> None:
    life = Life()
    of_tenant = life.set(DRAIN, "t")
    effective = life.machine.effective_switch
    assert effective("t", "j") is not None and effective("u", "j") is None
    of_fleet = life.set(PAUSE)
    found = [effective("t", "j"), effective("u", "j")]
    assert [row.switch for row in found if row is not None] == [of_tenant, of_fleet]
    assert [row.switch for row in life.machine.switches_concerning("t")] == [of_fleet, of_tenant]
    assert [row.switch for row in life.machine.switches_concerning("u")] == [of_fleet]


def test_of_equally_strong_ones_the_widest_counts() -> None:
    life = Life()
    life.set(PAUSE, "t")
    of_fleet = life.set(PAUSE)
    row = life.machine.effective_switch("t", "j")
    assert row is not None and row.switch == of_fleet


def test_a_stronger_one_takes_the_place_of_a_weaker_one_and_never_the_other_way_round() -> None:
    life = Life()
    first = life.set(PAUSE)
    second = life.get(switch(KILL), c.SwitchIsSet)
    assert second.replaced == first
    facts = life.refused(switch(DRAIN), Reason.SWITCH_STRONGER)
    assert facts == {"switch_id": second.switch, "mode": "kill"}
    row = life.machine.switch("", first)
    assert row is not None and (row.end_cause, row.end_actor) == ("replaced", "ann")
    kinds = [(event.kind, event.subject, event.cause) for event in life.events]
    assert kinds == [
        (Kind.SWITCH_SET, first, "pause"),
        (Kind.SWITCH_CLEARED, first, "replaced"),
        (Kind.SWITCH_SET, second.switch, "kill"),
    ]


def test_clearing_needs_the_id_of_what_is_in_force() -> None:
    life = Life()
    first = life.set(KILL, "t")
    life.refused(c.ClearSwitch(tenant="u", switch=first, actor="b", reason="r"), Reason.SWITCH_NOT_FOUND)
    life.refused(c.ClearSwitch(tenant="t", switch="k999", actor="b", reason="r"), Reason.SWITCH_NOT_FOUND)
    second = life.set(KILL, "t")
    late = c.ClearSwitch(tenant="t", switch=first, actor="b", reason="r")
    assert life.refused(late, Reason.SWITCH_STALE)["current_switch_id"] == second
    life.clear(second, "t")
    assert life.machine.effective_switch("t", "") is None
    assert life.refused(late, Reason.SWITCH_STALE)["current_switch_id"] == ""


def test_it_expires_by_cluster_time_and_survives_a_restart_until_then() -> None:
    life = Life()
    found = life.set(PAUSE, expires_after_ms=5_000)
    life.restart()
    assert life.machine.next_deadline_ms() == 6_000
    life.now_ms = 5_999
    life.do(c.Tick())
    assert life.machine.effective_switch("t", "j") is not None
    life.now_ms = 6_000
    life.do(c.Tick())
    assert life.machine.effective_switch("t", "j") is None
    row = life.machine.switch("", found)
    assert row is not None and (row.end_cause, row.ended_ms) == ("expired", 6_000)


def test_a_kill_stops_acquire_and_begin_also_of_what_is_held_or_known() -> None:
    life = Life()
    a, b = life.open(), life.open("u")
    token = life.token(a)
    life.get(c.BeginRecord(tenant="t", key="k", session=a), c.RecordBegun)
    life.get(c.CompleteRecord(tenant="t", key="k", session=a, attempt=1, result=b"r"), c.RecordCompleted)
    found = life.set(KILL, "t")
    facts = life.refused(life.acquire(a), Reason.SWITCHED_OFF)
    assert facts == {
        "switch_id": found, "scope": "tenant", "mode": "kill", "reason": "cost", "actor": "ann",
        "since_wall_ms": "1001000",
    }  # fmt: skip
    life.refused(c.BeginRecord(tenant="t", key="k", session=a), Reason.SWITCHED_OFF)
    life.refused(c.BeginRecord(tenant="t", key="new", session=a), Reason.SWITCHED_OFF)
    transfer = c.TransferLease(tenant="t", name="x", token=token, to_session=life.open(), session=a)
    life.refused(transfer, Reason.SWITCHED_OFF)
    life.get(c.AcquireLease(tenant="u", name="x", session=b), c.LeaseGranted)
    life.get(c.BeginRecord(tenant="u", key="k", session=b), c.RecordBegun)


@pytest.mark.parametrize("mode", [PAUSE, DRAIN])
def test_a_pause_and_a_drain_leave_leases_and_records_alone(mode: SwitchMode) -> None:
    life = Life()
    token = life.token(a := life.open())
    life.set(mode)
    assert life.token(a) == token
    life.get(c.BeginRecord(tenant="t", key="k", session=a, fence_lease="x", fence_token=token), c.RecordBegun)
    assert life.machine.kill_epoch == 0


def test_settling_goes_on_under_a_kill() -> None:
    life = Life()
    a = life.open()
    token = life.token(a)
    for key in ("done", "failed"):
        life.get(c.BeginRecord(tenant="t", key=key, session=a), c.RecordBegun)
    life.set(KILL)
    life.get(c.CompleteRecord(tenant="t", key="done", session=a, attempt=1), c.RecordCompleted)
    life.get(c.FailRecord(tenant="t", key="failed", session=a, attempt=1, retryable=True), c.Done)
    assert life.get(c.RenewSessions(sessions=(a,)), c.SessionsRenewed).ended == ()
    life.get(c.ReleaseLease(tenant="t", name="x", token=token, session=a), c.Done)


def test_a_fence_of_an_older_epoch_is_stale_for_ever() -> None:
    life = Life()
    a = life.open()
    token = life.token(a)
    begin = c.BeginRecord(tenant="t", key="k", session=a, fence_lease="x", fence_token=token)
    complete = c.CompleteRecord(tenant="t", key="k", session=a, attempt=1)
    life.get(begin, c.RecordBegun)
    found = life.set(KILL, "t")
    assert life.refused(complete, Reason.FENCE_STALE)["killed_by"] == found
    life.clear(found, "t")
    assert life.refused(complete, Reason.FENCE_STALE)["killed_by"] == found
    life.restart()
    assert life.refused(begin, Reason.FENCE_STALE)["current_token"] == "0"
    transfer = c.TransferLease(tenant="t", name="x", token=token, to_session=life.open(), session=a)
    assert life.refused(transfer, Reason.TOKEN_STALE)["killed_by"] == found


def test_a_killed_place_stays_taken_until_it_is_given_back_or_taken_anew() -> None:
    life = Life()
    a, b = life.open(), life.open()
    old = life.token(a)
    life.clear(life.set(KILL))
    life.refused(life.acquire(b), Reason.LEASE_HELD)
    new = life.get(life.acquire(a), c.LeaseGranted)
    assert new.token > old and not new.already_held
    assert life.token(a) == new.token
    assert [(event.kind, event.token, event.cause) for event in life.events[-2:]] == [
        (Kind.LEASE_RELEASED, old, "killed"),
        (Kind.LEASE_GRANTED, new.token, ""),
    ]
    row = life.machine.lease("t", "x")
    assert row is not None and [holder.token for holder in row.holders] == [new.token]
    assert life.machine.killed_by("t", row.holders[0].kill_epoch) == ""


def test_who_waits_stays_in_line_and_is_granted_after_the_clear() -> None:
    life = Life()
    a, b = life.open(), life.open()
    token = life.token(a)
    life.get(life.acquire(b, wait_ms=20_000, waiter="w"), c.LeaseQueued)
    found = life.set(KILL, "t", expires_after_ms=10_000)
    life.get(c.ReleaseLease(tenant="t", name="x", token=token, session=a), c.Done)
    life.restart()
    row = life.machine.lease("t", "x")
    assert row is not None and not row.holders and [waiter.session for waiter in row.waiters] == [b]
    life.now_ms = 11_000
    life.do(c.Tick())
    row = life.machine.lease("t", "x")
    assert row is not None and [holder.session for holder in row.holders] == [b]
    other = life.machine.switch("t", found)
    assert other is not None and other.end_cause == "expired"


def test_a_line_is_not_served_while_another_kill_is_still_in_force() -> None:
    life = Life()
    a, b = life.open(), life.open()
    token = life.token(a)
    life.get(life.acquire(b, wait_ms=20_000, waiter="w"), c.LeaseQueued)
    of_fleet, of_tenant = life.set(KILL), life.set(KILL, "t")
    life.get(c.ReleaseLease(tenant="t", name="x", token=token, session=a), c.Done)
    life.clear(of_fleet)
    row = life.machine.lease("t", "x")
    assert row is not None and not row.holders
    life.clear(of_tenant, "t")
    row = life.machine.lease("t", "x")
    assert row is not None and [holder.session for holder in row.holders] == [b]


def test_a_wait_that_ends_under_a_kill_ends_as_switched_off() -> None:
    life = Life()
    a, b = life.open(), life.open()
    life.token(a)
    request = c.Request(
        command=life.acquire(b, wait_ms=2_000, waiter="w"), key=c.RequestKey("t", "", "once"), not_after_ms=0
    )
    life.machine.apply(c.Stamp(life.now_ms, 0), request)
    life.set(KILL)
    life.now_ms = 3_000
    life.do(c.Tick())
    result, _ = life.machine.apply(c.Stamp(life.now_ms, 0), request)
    assert isinstance(result, c.Refused) and result.reason is Reason.SWITCHED_OFF


def test_the_epoch_only_grows_and_a_kill_of_a_job_has_no_floor_here() -> None:
    life = Life()
    life.clear(life.set(KILL, "t"), "t")
    life.clear(life.set(KILL, "u"), "u")
    assert life.machine.kill_epoch == 2
    assert [bool(life.machine.killed_by(tenant, 1)) for tenant in ("t", "u", "v")] == [False, True, False]
    life.clear(life.set(KILL))
    life.restart()
    assert life.machine.kill_epoch == 3
    assert [bool(life.machine.killed_by(tenant, 2)) for tenant in ("t", "u", "v")] == [True, True, True]
    assert life.machine.killed_by("t", 3) == ""


def test_floors_that_nobody_needs_make_room() -> None:
    life = Life()
    life.do(c.SetLimits(limits=c.Limits(switches_max=2)))
    life.open("t1")
    for number in range(4):
        life.clear(life.set(KILL, f"t{number}"), f"t{number}")
    assert dict(life.machine.capture()._state.floors).keys() == {"t1", "t3"}
    assert life.machine.killed_by("t1", 1)


def test_switches_in_force_are_bounded_but_the_fleet_can_always_be_stopped() -> None:
    life = Life()
    life.do(c.SetLimits(limits=c.Limits(switches_max=1)))
    life.set(PAUSE, "t")
    assert life.refused(switch(PAUSE, "u"), Reason.SWITCHES_FULL)["limit"] == "switches_max"
    life.set(KILL, "t")
    life.set(KILL)


def test_pages_are_newest_first_and_ended_ones_are_kept_for_a_while() -> None:
    life = Life()
    ids = [life.set(PAUSE, "t") for _ in range(ENDED_MAX + 5)]
    other = life.set(PAUSE, "u")
    page = life.machine.switches
    assert [row.switch for row in page(None, False, "", 10)] == [other, ids[-1]]
    assert [row.switch for row in page("t", True, "", 3)] == ids[-1:-4:-1]
    assert [row.switch for row in page("t", True, ids[-3], 1_000)] == ids[4:-3][::-1]
    assert page("", True, "", 10) == [] == page("t", True, "k0", 10)
    assert life.machine.switch("t", ids[3]) is None and life.machine.switch("t", ids[4]) is not None
    life.refused(c.ClearSwitch(tenant="t", switch=ids[3], actor="b", reason="r"), Reason.SWITCH_NOT_FOUND)
