"""What becomes of due times that passed unserved."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.specification import MISFIRE_THRESHOLD_MS, JobSpec, Misfire, Schedule, ScheduleKind
from sidecar.scheduling.misfires import (
    MISFIRE_LATEST,
    MISFIRE_SKIP,
    OUT_OF_WINDOW,
    OVER_CATCH_UP_MAX,
    PAST_DEADLINE,
    DueTime,
    MissedRange,
    Plan,
    plan,
)
from sidecar.scheduling.schedules import Compiled, compile_schedule
from tests.scheduling.times import DAY, HOUR, MINUTE, cron, every, iso, job, ms, once

LIMIT = 1_000


def planned(spec: JobSpec, settled: str, now: str, limit: int = LIMIT) -> Plan:
    return plan(compile_schedule(spec.schedule), spec, ms(settled), ms(now), limit)


def created(result: Plan) -> list[tuple[str, bool]]:
    return [(iso(each.due_ms), each.catch_up) for each in result.due]


def missed(result: Plan) -> list[tuple[str, str, int, str]]:
    return [(iso(r.first_due_ms), iso(r.last_due_ms), r.count, r.reason) for r in result.missed]


# All nodes are down from 03:10:30 until 05:05:30: 115 minutes, from 03:11 to 05:05, passed.
DOWN, BACK = "2026-06-01T03:10:30", "2026-06-01T05:05:30"


def minutely(misfire: Misfire, **more: int) -> JobSpec:
    return job(cron("* * * * *"), misfire=misfire, starting_deadline_ms=DAY, **more)


def test_after_an_outage_skip_goes_on_with_the_next() -> None:
    result = planned(minutely(Misfire.SKIP), DOWN, BACK)
    assert created(result) == []
    assert missed(result) == [("2026-06-01T03:11", "2026-06-01T05:05", 115, MISFIRE_SKIP)]
    assert (result.settled_ms, iso(result.next_due_ms)) == (ms(BACK), "2026-06-01T05:06")


def test_after_an_outage_latest_runs_one() -> None:
    result = planned(minutely(Misfire.LATEST, catch_up_window_ms=DAY), DOWN, BACK)
    assert created(result) == [("2026-06-01T05:05", True)]
    assert missed(result) == [("2026-06-01T03:11", "2026-06-01T05:04", 114, MISFIRE_LATEST)]
    assert iso(result.next_due_ms) == "2026-06-01T05:06"


def test_after_an_outage_all_runs_the_newest_in_order() -> None:
    result = planned(minutely(Misfire.ALL, catch_up_max=50, catch_up_window_ms=DAY), DOWN, BACK)
    times = [ms("2026-06-01T04:16") + MINUTE * i for i in range(50)]
    assert list(result.due) == [DueTime(at, True) for at in times]
    assert iso(times[-1]) == "2026-06-01T05:05"
    assert missed(result) == [("2026-06-01T03:11", "2026-06-01T04:15", 65, OVER_CATCH_UP_MAX)]


def test_the_default_window_of_an_hour_says_so_for_those_that_are_older() -> None:
    result = planned(minutely(Misfire.ALL, catch_up_max=50), DOWN, BACK)
    assert len(result.due) == 50
    assert missed(result) == [
        ("2026-06-01T03:11", "2026-06-01T04:05", 55, OUT_OF_WINDOW),
        ("2026-06-01T04:06", "2026-06-01T04:15", 10, OVER_CATCH_UP_MAX),
    ]


@pytest.mark.parametrize("misfire", list(Misfire))
def test_in_every_policy_the_next_one_is_on_time(misfire: Misfire) -> None:
    spec = minutely(misfire, catch_up_max=50)
    result = planned(spec, BACK, "2026-06-01T05:06:00")
    assert (created(result), missed(result)) == ([("2026-06-01T05:06", False)], [])
    assert iso(result.next_due_ms) == "2026-06-01T05:07"


@pytest.mark.parametrize("misfire", [Misfire.SKIP, Misfire.LATEST, Misfire.ALL])
def test_on_time_ends_at_the_threshold(misfire: Misfire) -> None:
    assert MISFIRE_THRESHOLD_MS == 10_000
    spec = job(cron("0 * * * *"), misfire=misfire, catch_up_max=5)
    assert created(planned(spec, "2026-01-01T00:30", "2026-01-01T01:00:10")) == [("2026-01-01T01:00", False)]
    late = planned(spec, "2026-01-01T00:30", "2026-01-01T01:00:11")
    assert created(late) == ([] if misfire is Misfire.SKIP else [("2026-01-01T01:00", True)])


def test_a_short_deadline_is_kept() -> None:
    spec = job(cron("15 6 * * *"), starting_deadline_ms=20_000)
    result = planned(spec, "2026-06-01T06:14", "2026-06-01T06:40")
    assert created(result) == []
    assert missed(result) == [("2026-06-01T06:15", "2026-06-01T06:15", 1, PAST_DEADLINE)]
    assert iso(result.next_due_ms) == "2026-06-02T06:15"


def test_a_long_deadline_is_met_with_the_nominal_time() -> None:
    spec = job(cron("15 6 * * *"), starting_deadline_ms=1_800_000)
    result = planned(spec, "2026-06-01T06:14", "2026-06-01T06:40")
    assert (created(result), missed(result)) == ([("2026-06-01T06:15", True)], [])


@pytest.mark.parametrize("misfire", [Misfire.SKIP, Misfire.LATEST, Misfire.ALL])
def test_a_deadline_below_the_threshold_counts_for_those_on_time(misfire: Misfire) -> None:
    spec = job(every(1_000), misfire=misfire, catch_up_max=5, starting_deadline_ms=3_000)
    now = ms("2026-01-01")
    result = plan(compile_schedule(spec.schedule), spec, now - 8_000, now, LIMIT)
    assert [each.due_ms - now for each in result.due] == [-3_000, -2_000, -1_000, 0]
    assert [(r.first_due_ms - now, r.last_due_ms - now, r.count, r.reason) for r in result.missed] == [
        (-7_000, -4_000, 4, PAST_DEADLINE)
    ]


OUTAGE = ("2026-06-01T12:05", "2026-06-01T14:05")


def test_the_catch_up_window_counts_from_now_and_includes_its_end() -> None:
    spec = job(cron("*/15 * * * *"), misfire=Misfire.ALL, catch_up_max=100, catch_up_window_ms=3_600_000)
    result = planned(spec, *OUTAGE)
    times = ["13:15", "13:30", "13:45", "14:00"]
    assert created(result) == [(f"2026-06-01T{at}", True) for at in times]
    assert missed(result) == [("2026-06-01T12:15", "2026-06-01T13:00", 4, OUT_OF_WINDOW)]
    on_the_edge = planned(spec, OUTAGE[0], "2026-06-01T14:15:00")
    assert created(on_the_edge)[0] == ("2026-06-01T13:15", True)


def test_latest_and_skip_in_that_outage() -> None:
    latest = planned(job(cron("*/15 * * * *"), catch_up_window_ms=3_600_000), *OUTAGE)
    assert created(latest) == [("2026-06-01T14:00", True)]
    assert [row[2:] for row in missed(latest)] == [(4, OUT_OF_WINDOW), (3, MISFIRE_LATEST)]
    skip = planned(job(cron("*/15 * * * *"), misfire=Misfire.SKIP), *OUTAGE)
    assert (created(skip), [row[2:] for row in missed(skip)]) == ([], [(8, MISFIRE_SKIP)])


def test_latest_looks_no_further_back_than_the_window() -> None:
    result = planned(job(cron("0 2 * * *")), "2026-06-01T01:00", "2026-06-01T15:00")
    assert created(result) == []
    assert missed(result) == [("2026-06-01T02:00", "2026-06-01T02:00", 1, OUT_OF_WINDOW)]
    assert iso(result.next_due_ms) == "2026-06-02T02:00"


def test_a_job_starts_with_the_first_due_time_after_its_creation() -> None:
    spec = job(cron("0 2 * * *"))
    result = planned(spec, "2026-06-01T15:00", "2026-06-01T15:00")
    assert (created(result), missed(result)) == ([], [])
    assert (iso(result.next_due_ms), iso(result.settled_ms)) == ("2026-06-02T02:00", "2026-06-01T15:00")


def test_an_edit_repeats_nothing() -> None:
    """At 02:00:30 from 02:00 to 02:05, settled through the moment of the edit."""
    result = planned(job(cron("5 2 * * *")), "2026-06-01T02:00:30", "2026-06-01T02:05")
    assert created(result) == [("2026-06-01T02:05", False)]
    same = planned(job(cron("0 2 * * *")), "2026-06-01T02:00:30", "2026-06-01T02:05")
    assert (created(same), missed(same)) == ([], [])


def test_an_hour_asleep_is_one_catch_up_and_one_range() -> None:
    spec = job(cron("* * * * *"))
    for second in ("00", "07", "30"):
        result = planned(spec, "2026-06-01T12:00:30", f"2026-06-01T13:00:{second}")
        assert sum(each.catch_up for each in result.due) == 1
        assert [r.reason for r in result.missed] == [MISFIRE_LATEST]
        assert sum(r.count for r in result.missed) + len(result.due) == 60


def test_years_of_minutes_are_one_range() -> None:
    result = planned(minutely(Misfire.LATEST), "2016-01-01T00:00:30", "2026-01-01T00:00:30")
    assert created(result) == [("2026-01-01T00:00", True)]
    assert sum(r.count for r in result.missed) == 3_653 * 1_440 - 1
    assert [r.reason for r in result.missed] == [OUT_OF_WINDOW, MISFIRE_LATEST]


def test_a_clock_that_stands_earlier_changes_nothing() -> None:
    result = planned(job(cron("* * * * *")), "2026-01-01T12:00:30", "2026-01-01T09:00")
    assert result == Plan(ms("2026-01-01T12:00:30"), ms("2026-01-01T12:01"))


def test_a_schedule_that_is_over_has_no_next() -> None:
    at = ms("2026-01-01T12:00")
    result = planned(job(once(at)), "2026-01-01T11:00", "2026-01-01T12:00:05")
    assert result == Plan(ms("2026-01-01T12:00:05"), 0, (DueTime(at, False),))
    manual = planned(job(Schedule(kind=ScheduleKind.MANUAL)), "2026-01-01T11:00", "2026-01-01T12:00")
    assert manual == Plan(ms("2026-01-01T12:00"), 0)


def test_a_plan_that_is_full_ends_at_a_due_time_and_goes_on_from_there() -> None:
    spec = minutely(Misfire.ALL, catch_up_max=50, catch_up_window_ms=DAY)
    first = planned(spec, DOWN, BACK, limit=20)
    assert len(first.due) == 20 and [r.count for r in first.missed] == [65]
    assert first.settled_ms == first.due[-1].due_ms == first.next_due_ms - MINUTE
    second = plan(compile_schedule(spec.schedule), spec, first.settled_ms, ms(BACK), 30)
    assert len(second.due) == 30 and second.missed == ()
    assert second.settled_ms == ms(BACK)
    assert iso(second.due[-1].due_ms) == "2026-06-01T05:05"


def test_a_plan_may_be_full_of_catch_ups_with_more_on_time() -> None:
    spec = minutely(Misfire.ALL, catch_up_max=3, catch_up_window_ms=DAY)
    now = "2026-06-01T05:06:00"
    full = planned(spec, DOWN, now, limit=3)
    assert [each.catch_up for each in full.due] == [True] * 3
    assert iso(full.next_due_ms) == now[:16]
    assert [each.catch_up for each in planned(spec, DOWN, now, limit=4).due] == [True, True, True, False]


def walked(compiled: Compiled, after: int, until: int) -> list[int]:
    found = []
    while (at := compiled.next_after(after)) is not None and at <= until:
        found.append(after := at)
    return found


SCHEDULES = (
    cron("* * * * *"), cron("*/7 * * * *", "Europe/Berlin"), cron("30 2 * * *", "Europe/Berlin"),
    cron("0,30 * * * *", "Australia/Lord_Howe"), every(1_000, 1), every(95_123, 17),
    once(ms("2026-10-25T01:00")), cron("* * * * *", "Europe/Berlin", end_ms=ms("2026-10-25T01:30")),
)  # fmt: skip

specs = st.builds(
    job,
    st.sampled_from(SCHEDULES),
    misfire=st.sampled_from(Misfire),
    catch_up_max=st.integers(1, 40),
    catch_up_window_ms=st.integers(0, HOUR),
    starting_deadline_ms=st.integers(1_000, 2 * HOUR),
)
# Ordinary polls, stalls, clocks that step back.
steps = st.one_of(st.integers(0, 3_000), st.integers(0, 3 * MINUTE), st.integers(0, 2 * HOUR), st.integers(-HOUR, -1))


@settings(max_examples=300, deadline=None)
@given(specs, st.lists(steps, min_size=1, max_size=25), st.integers(1, 60))
def test_every_due_time_is_in_one_entry_whatever_the_clock_does(spec: JobSpec, moves: list[int], limit: int) -> None:
    compiled = compile_schedule(spec.schedule)
    start = settled = now = ms("2026-10-24T23:00")
    seen: Counter[int] = Counter()
    for move in moves:
        now += move
        result = plan(compiled, spec, settled, now, limit)
        check(compiled, spec, result, settled, now, limit)
        seen.update(each.due_ms for each in result.due)
        for gone in result.missed:
            seen.update(walked(compiled, gone.first_due_ms - 1, gone.last_due_ms))
        settled = result.settled_ms
    assert seen == Counter(walked(compiled, start, settled))


def check(compiled: Compiled, spec: JobSpec, result: Plan, settled: int, now: int, limit: int) -> None:
    """What is true of each plan."""
    assert settled <= result.settled_ms <= max(settled, now)
    assert result.settled_ms == max(settled, now) or len(result.due) == limit
    assert result.next_due_ms == (compiled.next_after(result.settled_ms) or 0)
    assert len(result.due) <= limit
    for gone in result.missed:
        check_range(compiled, gone)
    bounds = [(r.first_due_ms, r.last_due_ms) for r in result.missed] + [(d.due_ms, d.due_ms) for d in result.due]
    flat = [at for first_and_last in bounds for at in first_and_last]
    assert flat == sorted(flat) and all(settled < at <= result.settled_ms for at in flat)
    for due in result.due:
        late_ms = now - due.due_ms
        assert due.catch_up == (late_ms > MISFIRE_THRESHOLD_MS)
        assert late_ms <= spec.starting_deadline_ms
        assert not due.catch_up or (spec.misfire is not Misfire.SKIP and late_ms <= spec.catch_up_window_ms)
    most = {Misfire.SKIP: 0, Misfire.LATEST: 1, Misfire.ALL: spec.catch_up_max}[spec.misfire]
    assert sum(due.catch_up for due in result.due) <= most


def check_range(compiled: Compiled, gone: MissedRange) -> None:
    times = walked(compiled, gone.first_due_ms - 1, gone.last_due_ms)
    assert (times[0], times[-1], len(times)) == (gone.first_due_ms, gone.last_due_ms, gone.count)


@settings(max_examples=150, deadline=None)
@given(specs, st.integers(MISFIRE_THRESHOLD_MS, 3 * HOUR), st.integers(1, 40))
def test_the_limit_changes_nothing_but_how_many_plans_it_takes(spec: JobSpec, behind: int, limit: int) -> None:
    compiled = compile_schedule(spec.schedule)
    settled, now = ms("2026-10-25T00:00"), ms("2026-10-25T00:00") + behind
    whole = plan(compiled, spec, settled, now, 100_000)
    due: list[DueTime] = []
    missed: list[MissedRange] = []
    while settled < now:
        part = plan(compiled, spec, settled, now, limit)
        assert part.settled_ms > settled
        due += part.due
        missed += part.missed
        settled = part.settled_ms
    assert (tuple(due), tuple(missed)) == (whole.due, whole.missed)
