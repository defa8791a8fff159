"""Random schedules against a walk over local times, against cronsim's own stepping, and against themselves."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from cronsim import CronSim
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sidecar.core.specification import WALL_MAX_MS, DstPolicy, Schedule
from sidecar.scheduling.changes import CORRECTION_MS
from sidecar.scheduling.schedules import Compiled, compile_schedule, problems
from sidecar.scheduling.zones import Change, names, zone
from tests.scheduling.times import DAY, HOUR, MINUTE, K, N, S, V, compiled, cron, every, ms
from tests.scheduling.walk import Expression, expressions, table, walk

# Among them changes of half an hour, of two hours, at midnight, at a quarter to three, in Ramadan, on the southern
# half, and zones without any.
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Chatham",
    "America/Santiago", "Africa/Casablanca", "Africa/Cairo", "Asia/Beirut", "America/Havana", "Asia/Kathmandu",
    "Europe/Dublin", "America/St_Johns", "Atlantic/Azores",
)  # fmt: skip
EARLIEST, LATEST = ms("1975-01-01"), ms("2120-01-01")


@st.composite
def moments(draw: st.DrawFn, zone_name: str) -> int:
    """Mostly close to a change of the zone, minutes and others."""
    at = draw(st.integers(EARLIEST, LATEST))
    near = zone(zone_name).changes(at, at + 400 * DAY)
    close = draw(st.integers(0, 4)) > 0
    if near and close:
        change = draw(st.sampled_from(near))
        assume(abs(change.new_ms - change.old_ms) < CORRECTION_MS)
        at = change.at_ms + draw(st.integers(-4 * HOUR, 4 * HOUR))
    return at if draw(st.booleans()) else at // MINUTE * MINUTE


@st.composite
def cases(draw: st.DrawFn) -> tuple[Expression, str, DstPolicy, int, int]:
    """Expression, zone, policy, and a range (after, until]."""
    name = draw(st.sampled_from(ZONES))
    after = draw(moments(name))
    until = after + draw(st.integers(1, 30 * HOUR))
    return draw(expressions()), name, draw(st.sampled_from((V, K, N, S))), after, until


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 50))
def test_due_times_are_those_of_the_walk(case: tuple[Expression, str, DstPolicy, int, int], limit: int) -> None:
    expression, name, policy, after, until = case
    expected = walk(expression, name, policy, after + 1, until + 1)
    schedule = compiled_or_none(expression.text, name, policy)
    if schedule is None:
        assert expected == []  # a date that does not exist
        return
    assert schedule.due(after, until, 10_000) == expected
    assert schedule.latest(after, until, 10_000) == expected
    assert schedule.due(after, until, limit) == expected[:limit]
    assert schedule.latest(after, until, limit) == expected[max(0, len(expected) - limit) :]
    assert schedule.count(after, until) == len(expected)
    following, previous = schedule.next_after(after), schedule.previous_at_or_before(until)
    if expected:
        assert (following, previous) == (expected[0], expected[-1])
    else:
        assert following is None or following > until
        assert previous is None or previous <= after
    if following is not None:
        # What lies far ahead is right as well: nothing just before it, and it itself.
        assert walk(expression, name, policy, following - 6 * HOUR, following + 1)[-1:] == [following]
        assert schedule.is_due(following) and not schedule.is_due(following + 1)


def compiled_or_none(expression: str, name: str, policy: DstPolicy) -> Compiled | None:
    schedule = cron(expression, name, policy)
    if any(problem.why.startswith("it never fires: no month") for problem in problems(schedule)):
        return None
    return compile_schedule(schedule)


def agree(schedule: Compiled, after: int, until: int) -> None:
    """The ways to ask give one answer."""
    due = schedule.due(after, until, 400)
    until = until if len(due) < 400 else due[-1]
    assert all(earlier < later for earlier, later in itertools.pairwise(due))
    assert all(after < at <= until for at in due)
    assert schedule.latest(after, until, 400) == due
    assert schedule.count(after, until) == len(due)
    chain, at = [], after
    while (following := schedule.next_after(at)) is not None and following <= until:
        assert following > at
        chain.append(at := following)
    assert chain == due
    back, at = [], until
    while (previous := schedule.previous_at_or_before(at)) is not None and previous > after:
        assert previous <= at
        back.append(previous)
        at = previous - 1
    assert back[::-1] == due
    assert all(schedule.is_due(at) for at in due)
    middle = (after + until) // 2
    assert schedule.count(after, middle) + schedule.count(middle, until) == len(due)


@settings(max_examples=200, deadline=None)
@given(expressions(), st.sampled_from(sorted(names())), st.sampled_from((V, K, N, S)), st.data())
def test_all_zones_agree_with_themselves(
    expression: Expression, name: str, policy: DstPolicy, data: st.DataObject
) -> None:
    """Corrections of many hours, and offsets with seconds, included."""
    schedule = compiled_or_none(expression.text, name, policy)
    if schedule is None:
        return
    at = data.draw(st.integers(0, LATEST))
    near = zone(name).changes(at, at + 2_000 * DAY)
    start = data.draw(st.sampled_from(near)).at_ms - 12 * HOUR if near else at
    agree(schedule, start, start + data.draw(st.integers(1, 40 * DAY)))


@given(
    st.integers(1_000, 366 * DAY),
    st.integers(0, WALL_MAX_MS),
    st.integers(-DAY, WALL_MAX_MS),
    st.integers(1, 500),
    st.one_of(st.just(0), st.integers(0, WALL_MAX_MS)),
)
def test_intervals_agree_with_themselves(interval: int, anchor: int, after: int, periods: int, start: int) -> None:
    schedule = compile_schedule(every(interval, anchor, start_ms=start))
    until = after + periods * interval
    agree(schedule, after, until)
    first = schedule.next_after(after)
    assert first is None or ((first - anchor) % interval == 0 and first <= max(after, start, 0) + interval)


@given(st.integers(0, LATEST), st.integers(1, 90 * DAY), st.integers(-DAY, DAY), st.integers(1, 90 * DAY))
def test_a_window_takes_away_and_changes_nothing_else(start: int, length: int, shift: int, span: int) -> None:
    after, until = start + shift, start + shift + span
    expression, name = "17 */3 * * *", "America/Santiago"
    whole = compiled(expression, name).due(after, until, 1_000)
    clipped = compiled(expression, name, start_ms=start, end_ms=start + length)
    assert clipped.due(after, until, 1_000) == [at for at in whole if start <= at < start + length]
    agree(clipped, after, until)


# America/Caracas: a change at a time that is no whole hour of UTC. Asia/Gaza: four changes a year.
@pytest.mark.parametrize(
    "name", [*(name for name in ZONES if zone(name).changes(EARLIEST, LATEST)), "America/Caracas", "Asia/Gaza"]
)
def test_there_is_progress_around_every_change(name: str) -> None:
    """From each moment in the two hours around a change, next lies ahead, and chains without repeating anything."""
    schedules = [
        compiled(expression, name, policy)
        for expression in ("30 * * * *", "30 2 * * *", "*/15 0-4 * * *", "59 23 * * *")
        for policy in (V, K, N, S)
    ]
    for change in zone(name).changes(ms("2007-01-01"), ms("2031-01-01")):
        for at in range(change.at_ms - 2 * HOUR, change.at_ms + 2 * HOUR + 1, 15 * MINUTE):
            for schedule in schedules:
                for moment in (at - 1, at):
                    following, previous = schedule.next_after(moment), schedule.previous_at_or_before(moment)
                    assert following is not None and moment < following <= moment + 50 * HOUR
                    assert previous is not None and moment - 50 * HOUR <= previous <= moment
                    assert schedule.next_after(previous) == following


def beyond_cronsim(change: Change) -> bool:
    """Where cronsim is wrong about wildcards: it looks for the hour by whole hours of elapsed time, too far where
    clocks change by or at a part of one; and it takes for due a midnight that does not exist."""
    size = change.new_ms - change.old_ms
    local = change.at_ms + change.old_ms
    return local % HOUR != 0 or size % HOUR != 0 or (size > 0 and local % DAY == 0)


def stepped_by_cronsim(expression: str, name: str, after: int, count: int) -> list[int]:
    """cronsim's own answer under VIXIE, in UTC."""
    start = datetime.fromtimestamp(after // 1000, UTC).astimezone(table(name))
    times = (int(moment.timestamp()) * 1000 for moment in CronSim(expression, start))
    # From within the second passing of a fold it goes back to the first one.
    return list(itertools.islice((at for at in times if at > after), count))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_vixie_is_what_cronsim_does(case: tuple[Expression, str, DstPolicy, int, int]) -> None:
    expression, name, _, after, _ = case
    schedule = compiled_or_none(expression.text, name, V)
    if schedule is None:
        return
    due = schedule.due(after, WALL_MAX_MS, 8)
    if expression.wildcard:
        changes = zone(name).changes(after - DAY, (due[-1] if due else after) + DAY)
        assume(not any(beyond_cronsim(change) for change in changes))
    assert due == stepped_by_cronsim(expression.text, name, after, 8)


def test_random_expressions_are_read_and_described() -> None:
    """The walk would prove little if most of what it makes were refused."""

    @settings(max_examples=200, deadline=None, database=None)
    @given(expressions())
    def check(expression: Expression) -> None:
        schedule: Schedule = cron(expression.text)
        wrong = problems(schedule)
        assert all("never fires: no month" in problem.why for problem in wrong)
        if not wrong:
            assert expression.text in compile_schedule(schedule).describe()

    check()
