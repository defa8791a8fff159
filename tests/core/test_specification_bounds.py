"""The last net under specifications and what the leader settles: each bound, from both sides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.core import bounds
from sidecar.core import commands as c
from sidecar.core import specification as s

SPEC = s.JobSpec(
    owner="team",
    runbook_url="https://runbooks/digest",
    schedule=s.Schedule(kind=s.ScheduleKind.CRON, cron="*/5 * * * *"),
)
ONCE = s.Schedule(kind=s.ScheduleKind.ONCE, at_ms=1)


def spec(**changes: Any) -> s.JobSpec:
    return replace(SPEC, **changes)


FIT = {
    "the defaults": spec(),
    "at most once": spec(
        delivery=s.Delivery.AT_MOST_ONCE, on_holder_loss=s.HolderLoss.SKIP, retry=s.Retry(attempts_max=1)
    ),
    "all, with a maximum": spec(misfire=s.Misfire.ALL, catch_up_max=1),
    "allow": spec(overlap=s.Overlap.ALLOW, concurrent_max=2),
    "an interval": spec(schedule=s.Schedule(kind=s.ScheduleKind.INTERVAL, interval_ms=1_000)),
    "a one-shot": spec(schedule=ONCE),
    "a window": spec(schedule=replace(ONCE, start_ms=1, end_ms=2)),
    "the largest payload": spec(payload=bytes(65_536)),
    "a canary": spec(canary=s.Canary(percent=1, label="ring", value="")),
    "a selector": spec(selector=(("zone", ("a", "b")), ("version", ("1",)))),
    "labels": spec(labels=tuple((f"l{n}", "") for n in range(16))),
}
UNFIT = {
    "owner": spec(owner=" "),
    "runbook_url": spec(runbook_url=""),
    "description": spec(description="ä" * 513),
    "jitter_ms": spec(jitter_ms=-1),
    "catch_up_max": spec(misfire=s.Misfire.ALL),
    "catch_up_window_ms": spec(catch_up_window_ms=s.CATCH_UP_WINDOW_MAX_MS + 1),
    "starting_deadline_ms": spec(starting_deadline_ms=999),
    "concurrent_max": spec(overlap=s.Overlap.ALLOW, concurrent_max=0),
    "buffer_max": spec(overlap=s.Overlap.BUFFER_ALL, buffer_max=0),
    "timeout_ms": spec(timeout_ms=0),
    "interrupt_grace_ms": spec(interrupt_grace_ms=s.GRACE_MAX_MS + 1),
    "retry.attempts_max": spec(delivery=s.Delivery.AT_MOST_ONCE, on_holder_loss=s.HolderLoss.SKIP),
    "on_holder_loss": spec(delivery=s.Delivery.AT_MOST_ONCE, retry=s.Retry(attempts_max=1)),
    "retry.multiplier_percent": spec(retry=s.Retry(multiplier_percent=99)),
    "retry.initial_ms": spec(retry=s.Retry(initial_ms=-1)),
    "retry.max_ms": spec(retry=s.Retry(max_ms=s.BACKOFF_MAX_MS + 1)),
    "retry.jitter_percent": spec(retry=s.Retry(jitter_percent=101)),
    "priority": spec(priority=101),
    "labels": spec(labels=tuple((f"l{n}", "") for n in range(17))),
    "selector": spec(selector=(("zone", ()),)),
    "payload": spec(payload=bytes(65_537)),
    "estimated_cost_micros": spec(estimated_cost_micros=-1),
    "canary.percent": spec(canary=s.Canary(percent=100, label="ring", value="")),
    "canary.label": spec(canary=s.Canary(percent=1, label="", value="")),
    "history_count": spec(history_count=0),
    "history_age_ms": spec(history_age_ms=1),
    "schedule.cron": spec(schedule=s.Schedule(kind=s.ScheduleKind.CRON)),
    "schedule.zone": spec(schedule=replace(ONCE, zone="")),
    "schedule.interval_ms": spec(schedule=s.Schedule(kind=s.ScheduleKind.INTERVAL, interval_ms=999)),
    "schedule.at_ms": spec(schedule=replace(ONCE, at_ms=0)),
    "schedule.end_ms": spec(schedule=replace(ONCE, start_ms=5, end_ms=5)),
}


@pytest.mark.parametrize("what", FIT)
def test_a_specification_that_fits(what: str) -> None:
    assert bounds.specification_problem(FIT[what]) is None


@pytest.mark.parametrize("what", UNFIT)
def test_what_is_wrong_with_a_specification_is_named(what: str) -> None:
    found = bounds.specification_problem(UNFIT[what])
    assert found is not None and found.startswith(what)


@pytest.mark.parametrize("one", [("zone", ("a", "a")), ("", ("a",)), ("zone", ("v" * 129,))])
def test_a_term_of_a_selector_is_bounded(one: tuple[str, tuple[str, ...]]) -> None:
    assert bounds.specification_problem(spec(selector=(one,))) is not None


@pytest.mark.parametrize("name", ["digest", "ä" * 64, "a b", "*a", "größe.täglich"])
def test_a_name_of_a_job(name: str) -> None:
    assert bounds.job_name_problem(name) is None


@pytest.mark.parametrize("name", ["", "a/b", " a", "a ", "a*", "a\x00b", "a\nb", "a\x85b", "ä" * 65])
def test_no_name_of_a_job(name: str) -> None:
    assert bounds.job_name_problem(name) is not None


def settlement(**changes: Any) -> c.Settlement:
    row = c.Settlement(
        tenant="t",
        name="j",
        revision=1,
        settled_ms=100,
        through_ms=200,
        next_due_ms=210,
        due=(c.Due(150), c.Due(200)),
        missed=(c.Missed(110, 140, 4, "catch_up_window"),),
    )
    return replace(row, **changes)


def problem(*settlements: c.Settlement) -> str | None:
    return bounds.problem(c.Request(command=c.SettleDue(settlements=settlements)))


def test_a_settlement_that_fits() -> None:
    assert problem(settlement(), settlement(next_due_ms=0), settlement(due=(), missed=(), through_ms=100)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"through_ms": 99},
        {"next_due_ms": 200},
        {"next_due_ms": -1},
        {"through_ms": s.WALL_MAX_MS + 1, "next_due_ms": 0},
        {"due": (c.Due(100),)},
        {"due": (c.Due(201),)},
        {"due": (c.Due(150), c.Due(150))},
        {"due": (c.Due(120),)},
        {"missed": (c.Missed(110, 109, 1, "r"),)},
        {"missed": (c.Missed(110, 140, 1, "r"), c.Missed(140, 145, 1, "r"))},
        {"missed": (c.Missed(110, 140, 0, "r"),)},
        {"missed": (c.Missed(110, 140, 1, ""),)},
        {"name": ""},
        {"due": tuple(c.Due(due) for due in range(101, 1_102)), "through_ms": 2_000, "next_due_ms": 0, "missed": ()},
    ],
)
def test_a_settlement_that_does_not(changes: dict[str, Any]) -> None:
    assert problem(settlement(), settlement(**changes)) is not None


@pytest.mark.parametrize(
    ("command", "fits"),
    [
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r"), True),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="", reason="r"), False),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason=""), False),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r", job="j"), False),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r", tenant="t", job="j"), True),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r", expires_after_ms=999), False),
        (c.SetSwitch(mode=c.SwitchMode.KILL, actor="ann", reason="r", expires_after_ms=1_000), True),
        (c.ClearSwitch(tenant="", switch="", actor="ann", reason="r"), False),
        (c.BackfillJob(tenant="t", name="j", revision=1, due_ms=(), actor="a", reason="r"), False),
        (c.BackfillJob(tenant="t", name="j", revision=1, due_ms=(2, 1), actor="a", reason="r"), False),
        (c.BackfillJob(tenant="t", name="j", revision=1, due_ms=(1, 2), actor="a", reason="r"), True),
        (c.ServeJobs(tenant="t", session="s", jobs=(), slots=0), True),
        (c.ServeJobs(tenant="t", session="s", jobs=("x" * 129,), slots=1), False),
        (c.ClaimRun(tenant="t", session="s", jobs=()), False),
        (c.TriggerJob(tenant="t", name="j", actor="a", reason="r", payload=bytes(65_537)), False),
        (c.ApplyJobs(jobs=(), actor="a"), False),
        (c.ApplyJobs(jobs=(c.JobDefinition(tenant="t", name="j", spec=SPEC),), actor=""), False),
        (c.ApplyJobs(jobs=(c.JobDefinition(tenant="t", name="j", spec=SPEC),) * 2, actor="a"), False),
        (c.ApplyJobs(jobs=(c.JobDefinition(tenant="t", name="j", spec=SPEC),), actor="a"), True),
        (c.ApplyJobs(jobs=(c.JobDefinition(tenant="", name="j", spec=SPEC),), actor="a"), False),
    ],
)
def test_commands_about_jobs_and_switches(command: c.Command, fits: bool) -> None:
    assert (bounds.problem(c.Request(command=command)) is None) == fits
