"""A clock change close to where one cached block of time ends and the next begins."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sidecar.scheduling.changes import Rule, ZonedPattern
from sidecar.scheduling.cron import pattern
from sidecar.scheduling.zones import BLOCK_MS, Change, Zone, zone
from tests.scheduling.times import HOUR, MINUTE

EDGE = 50 * BLOCK_MS


class OneChange(Zone):
    """Whose only change is where the test wants it."""

    def __init__(self, change: Change) -> None:
        super().__init__("Test/One_Change", zone("UTC")._info)
        self.change = change

    def offset_at_second(self, at_s: int) -> timedelta:
        before = at_s * 1000 < self.change.at_ms
        return timedelta(milliseconds=self.change.old_ms if before else self.change.new_ms)


@pytest.mark.parametrize("minutes", [-120, -60, -59, -30, -1, 0, 1, 30])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("forward", [True, False])
def test_the_edge_of_a_block_changes_nothing(minutes: int, rule: Rule, forward: bool) -> None:
    at = EDGE + minutes * MINUTE
    change = Change(at, HOUR, 2 * HOUR) if forward else Change(at, 2 * HOUR, HOUR)
    times = ZonedPattern(pattern("* * * * *"), OneChange(change), rule)
    assert times.zone.changes(EDGE - 4 * HOUR, EDGE + 4 * HOUR) == [change]
    expected = list(range(EDGE - 4 * HOUR, EDGE + 4 * HOUR, MINUTE))
    if not forward and rule is not Rule.PLAIN:
        expected = [moment for moment in expected if not at <= moment < at + HOUR]
    found, moment = [], EDGE - 4 * HOUR
    while (following := times.first(moment, EDGE + 4 * HOUR)) is not None:
        found.append(following)
        moment = following + 1
    assert found == expected
    assert times.count(EDGE - 4 * HOUR, EDGE + 4 * HOUR) == len(expected)
    assert times.last(EDGE - 4 * HOUR, EDGE + MINUTE) == max(m for m in expected if m < EDGE + MINUTE)


@pytest.mark.parametrize("minutes", [-60, -45, -30, -1, 0])
def test_times_of_a_gap_are_moved_over_the_edge(minutes: int) -> None:
    at = EDGE + minutes * MINUTE
    local = at + HOUR + 30 * MINUTE  # in the middle of the gap
    clock = local // MINUTE % 1440
    expression = pattern(f"{clock % 60} {clock // 60} * * *")
    gap = OneChange(Change(at, HOUR, 2 * HOUR))
    shifted = ZonedPattern(expression, gap, Rule.SHIFT)
    assert shifted.first(at - HOUR, at + 20 * HOUR) == shifted.last(at - HOUR, at + 20 * HOUR) == at + 30 * MINUTE
    ended = ZonedPattern(expression, gap, Rule.GAP_END)
    assert ended.first(at - HOUR, at + 20 * HOUR) == ended.last(at - HOUR, at + 20 * HOUR) == at
    assert [each.count(at - HOUR, at + 20 * HOUR) for each in (shifted, ended)] == [1, 1]
