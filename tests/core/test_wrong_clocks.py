"""The wall time of a stamp is the word of one leader, and the next one's clock may be hours away from it."""

from __future__ import annotations

import pytest

from sidecar.core import commands as c
from sidecar.core import specification as s
from sidecar.core.machine import Machine

WALL_MS = 1_700_000_000_000


@pytest.mark.parametrize("behind_ms", [0, 1_000, 2_000_000])
def test_what_one_leader_found_due_is_ready_at_once_under_one_whose_clock_is_behind(behind_ms: int) -> None:
    machine = Machine()
    schedule = s.Schedule(kind=s.ScheduleKind.INTERVAL, interval_ms=1_000)
    spec = s.JobSpec(owner="team", runbook_url="https://r", schedule=schedule, starting_deadline_ms=10_000)
    definition = c.JobDefinition(tenant="t", name="j", spec=spec)
    create = c.ApplyJobs(jobs=(definition,), actor="a")
    machine.apply(c.Stamp(1, WALL_MS - 500), c.Request(command=create))
    settlement = c.Settlement(
        tenant="t", name="j", revision=1, settled_ms=WALL_MS - 500, through_ms=WALL_MS, next_due_ms=WALL_MS + 1_000,
        due=(c.Due(WALL_MS),),
    )  # fmt: skip
    machine.apply(c.Stamp(10, WALL_MS - behind_ms), c.Request(command=c.SettleDue(settlements=(settlement,))))
    row = machine.occurrence("t", "j", WALL_MS, 0)
    assert row is not None
    assert (row.ready_ms, row.start_by_ms) == (10, 10 + spec.starting_deadline_ms)
