"""The leader's duty through leader changes, clock steps, outages, and schedules that cannot be computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sidecar.clock import SystemClock
from sidecar.core.commands import ApplyJobs, Command, JobDefinition, Reason, Refused, SettleDue
from sidecar.core.occurrences import OccurrenceState, Origin
from sidecar.core.specification import JobSpec, Misfire, Schedule, ScheduleKind
from sidecar.proposer import Done
from sidecar.scheduling import misfires, scheduler, zones
from tests.scheduling.cluster import MINUTE_MS, SchedulingCluster, cron, every_minute


@pytest.fixture
def cluster() -> SchedulingCluster:
    return SchedulingCluster()


def due_times(cluster: SchedulingCluster, name: str = "report") -> list[int]:
    return [row.due_ms for row in cluster.leading().history(name)]


def minutes(first_ms: int, count: int) -> list[int]:
    return [first_ms + step * MINUTE_MS for step in range(count)]


def test_each_minute_is_due_once_and_on_time(cluster: SchedulingCluster) -> None:
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 3 * MINUTE_MS + 500)
    assert due_times(cluster) == minutes(first_ms, 4)
    rows = cluster.leading().history("report")
    assert all(0 <= row.created_wall_ms - row.due_ms < 100 for row in rows)
    assert {row.origin for row in rows} == {Origin.SCHEDULE}
    assert cluster.leading().job("report").next_due_ms == first_ms + 4 * MINUTE_MS


def test_a_leader_that_dies_right_before_the_due_time_loses_none_of_a_hundred(cluster: SchedulingCluster) -> None:
    """C17."""
    names = [f"job-{number}" for number in range(100)]
    definitions = tuple(JobDefinition(tenant="default", name=name, spec=every_minute()) for name in names)
    cluster.await_call(cluster.lead().submit(ApplyJobs(jobs=definitions, actor="a person")))
    first_ms = cluster.next_minute()
    for round_number in range(10):
        cluster.until_wall(first_ms + round_number * MINUTE_MS - 500)
        dead = cluster.leader().name
        cluster.crash(dead)
        cluster.until_wall(first_ms + round_number * MINUTE_MS + 5_000)
        cluster.restart(dead)
        assert sum(host.scheduler.lag_ms() > 0 for host in cluster.scheduling.values()) == 0
    for name in names:
        rows = cluster.leading().history(name)
        assert [row.due_ms for row in rows] == minutes(first_ms, 10)
        assert all(row.created_wall_ms - row.due_ms < 5_000 for row in rows)


def test_a_deposed_leader_that_still_believes_doubles_nothing(cluster: SchedulingCluster) -> None:
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 300)
    old = cluster.leader().name
    cluster.isolate(old)
    cluster.until_wall(first_ms + 4_000)
    cluster.heal()
    cluster.until_wall(first_ms + MINUTE_MS + 500)
    assert due_times(cluster) == minutes(first_ms, 2)
    cluster.run_until(cluster.agree)


def test_a_clock_that_steps_back_fires_nothing_twice(cluster: SchedulingCluster) -> None:
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 500)
    cluster.clock.wall_offset_ms -= 10 * MINUTE_MS
    cluster.until_wall(first_ms + MINUTE_MS + 500)
    assert due_times(cluster) == minutes(first_ms, 2)


@pytest.mark.parametrize(
    ("misfire", "caught_up"),
    [(Misfire.SKIP, []), (Misfire.LATEST, [59]), (Misfire.ALL, [50, 51, 52, 53, 54, 55, 56, 57, 58, 59])],
)
def test_a_cluster_that_stood_still_for_an_hour(
    cluster: SchedulingCluster, misfire: Misfire, caught_up: list[int]
) -> None:
    """C19: the same outcome as a restart, see below; the minutes of the gap are one row, or are run."""
    cluster.apply("report", every_minute(misfire=misfire, catch_up_max=10 if misfire is Misfire.ALL else 0))
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 30_000)
    cluster.sleep(60 * MINUTE_MS)
    cluster.until_wall(first_ms + 60 * MINUTE_MS + 500)
    expect_an_hour_caught_up(cluster, first_ms, caught_up)


@pytest.mark.parametrize(("misfire", "caught_up"), [(Misfire.SKIP, []), (Misfire.LATEST, [59])])
def test_a_cluster_that_was_down_for_an_hour(
    cluster: SchedulingCluster, misfire: Misfire, caught_up: list[int]
) -> None:
    cluster.apply("report", every_minute(misfire=misfire))
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 30_000)
    for name in cluster.names:
        cluster.crash(name)
    cluster.sleep(60 * MINUTE_MS)
    for name in cluster.names:
        cluster.restart(name)
    cluster.until_wall(first_ms + 60 * MINUTE_MS + 500)
    expect_an_hour_caught_up(cluster, first_ms, caught_up)


def expect_an_hour_caught_up(cluster: SchedulingCluster, first_ms: int, caught_up: list[int]) -> None:
    rows = cluster.leading().history("report")
    run = [row for row in rows if row.origin is Origin.CATCH_UP and row.state is not OccurrenceState.MISSED]
    assert [row.due_ms for row in run] == [first_ms + step * MINUTE_MS for step in caught_up]
    missed = [row for row in rows if row.state is OccurrenceState.MISSED]
    assert sum(row.count for row in missed) == 60 - len(caught_up)
    on_time = [row.due_ms for row in rows if row.origin is Origin.SCHEDULE and row.state is OccurrenceState.PENDING]
    assert on_time == [first_ms + 60 * MINUTE_MS]


def test_a_leader_whose_clock_is_alone_hands_over_and_fires_nothing(cluster: SchedulingCluster) -> None:
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 40_000)
    wrong = cluster.leading()
    wrong.clock.wall_ahead_ms = 10 * MINUTE_MS
    cluster.until_wall(first_ms + 500)
    assert cluster.leading() is not wrong
    assert due_times(cluster) == [first_ms]


def test_a_leader_whose_clock_is_alone_and_who_stays_leader_fires_nothing(
    cluster: SchedulingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.apply("report", every_minute())
    cluster.run(500)
    wrong = cluster.leading()
    assert wrong.node is not None
    monkeypatch.setattr(wrong.node, "transfer_leadership", lambda to, done: None)
    wrong.clock.wall_ahead_ms = 10 * MINUTE_MS
    cluster.run(5_000)
    assert cluster.leading() is wrong
    assert due_times(cluster) == []
    assert "differs from most others'" in wrong.scheduler.held_reason
    assert wrong.scheduler.lag_ms() > 9 * MINUTE_MS
    assert wrong.scheduler.warnings()
    wrong.clock.wall_ahead_ms = 0
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 2_000)
    assert wrong.scheduler.held_reason == ""
    assert due_times(cluster) == [first_ms]


def test_a_new_leader_whose_clock_is_wrong_fires_nothing_before_it_has_measured_the_others(
    cluster: SchedulingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 40_000)
    right = cluster.leading()
    wrong = next(host for host in cluster.scheduling.values() if host is not right)
    wrong.clock.wall_ahead_ms = 10 * MINUTE_MS
    cluster.run(2_000)  # that it stepped is long past
    assert right.node is not None and wrong.node is not None
    with monkeypatch.context() as before_the_first_answers:
        before_the_first_answers.setattr(wrong.node, "clock_offsets_ms", list)
        right.node.transfer_leadership(wrong.name, lambda error: None)
        cluster.run(1_000)
        assert cluster.leading() is wrong
        assert wrong.scheduler.held_reason == scheduler.MEASURING
    cluster.until_wall(first_ms + 500)
    assert cluster.leading() is not wrong
    assert due_times(cluster) == [first_ms]


def test_a_peer_that_cannot_be_measured_for_long_has_the_benefit_of_the_doubt(cluster: SchedulingCluster) -> None:
    """Of three nodes one is down and the two others disagree: nobody can tell who is right, and schedules go on."""
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 40_000)
    down, far = (host for host in cluster.scheduling.values() if host is not cluster.leading())
    cluster.crash(down.name)
    far.clock.wall_ahead_ms = -10 * MINUTE_MS
    cluster.run(1_000)
    assert cluster.leading().scheduler.held_reason == scheduler.MEASURING
    cluster.until_wall(first_ms + 500)
    assert due_times(cluster) == [first_ms]


def test_a_follower_whose_clock_is_wrong_holds_nothing_up(cluster: SchedulingCluster) -> None:
    cluster.apply("report", every_minute())
    follower = next(host for host in cluster.scheduling.values() if host is not cluster.leading())
    follower.clock.wall_ahead_ms = 10 * MINUTE_MS
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 500)
    assert due_times(cluster) == [first_ms]


def test_a_thousand_jobs_at_once_are_settled_in_slices(cluster: SchedulingCluster) -> None:
    spec = every_minute()
    definitions = tuple(JobDefinition(tenant="default", name=f"job-{n:04}", spec=spec) for n in range(1_000))
    cluster.await_call(cluster.lead().submit(ApplyJobs(jobs=definitions, actor="a person"), timeout_ms=10_000))
    leading = cluster.leading()
    sizes: list[int] = []
    submit = leading.proposer.submit

    def counted(command: Command, done: Done, **options: Any) -> int:
        if isinstance(command, SettleDue):
            sizes.append(len(command.settlements))
        return submit(command, done, **options)

    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 500)
    leading.proposer.submit = counted  # type: ignore[method-assign]
    cluster.until_wall(first_ms + 2_000)
    assert cluster.leading() is leading
    assert sizes == [scheduler.JOBS_MAX] * (1_000 // scheduler.JOBS_MAX)
    for number in range(1_000):
        assert [row.due_ms for row in leading.history(f"job-{number:04}")] == [first_ms]


def test_an_edit_waits_for_what_is_due_by_the_old_schedule(cluster: SchedulingCluster) -> None:
    """C15. The leader's scheduler is held off, so that the edit comes between the due time and its settlement."""
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms - 500)
    leading = cluster.leading()
    leading.scheduler.poll, poll = lambda: None, leading.scheduler.poll  # type: ignore[method-assign]
    cluster.until_wall(first_ms + 500)
    later = cron("5 0 1 1 *")
    edit = ApplyJobs(jobs=(JobDefinition(tenant="default", name="report", spec=later),), actor="a person")
    refused = cluster.await_call(leading.submit(edit))
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.JOB_BEHIND
    leading.scheduler.poll = poll  # type: ignore[method-assign]
    leading.scheduler.poll()
    cluster.run(200)
    cluster.apply("report", later)
    cluster.run(500)
    assert due_times(cluster) == [first_ms]
    assert leading.job("report").revision == 2


def test_other_zone_rules_compute_next_due_times_anew_and_refire_nothing(
    cluster: SchedulingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11."""
    cluster.apply("report", every_minute())
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 500)
    mine = cluster.leading().machine.tzdata
    assert mine == zones.tzdata_version()
    monkeypatch.setattr(scheduler, "tzdata_version", lambda: "2099z")
    assert any("time-zone rules" in line for line in cluster.leading().scheduler.warnings())
    cluster.crash(cluster.leader().name)
    cluster.until_wall(first_ms + MINUTE_MS + 500)
    assert cluster.leading().machine.tzdata == "2099z"
    assert due_times(cluster) == minutes(first_ms, 2)


def test_a_schedule_that_cannot_be_computed_holds_up_no_other_job(cluster: SchedulingCluster) -> None:
    unknown = Schedule(kind=ScheduleKind.CRON, cron="* * * * *", zone="Atlantis/Capital")
    cluster.apply("report", every_minute())
    cluster.apply("lost", msgspec.structs.replace(every_minute(), schedule=unknown))
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + 500)
    assert due_times(cluster) == [first_ms]
    assert due_times(cluster, "lost") == []
    assert cluster.leading().job("lost").next_due_ms == 0
    cluster.apply("lost", every_minute())
    cluster.until_wall(first_ms + MINUTE_MS + 500)
    assert due_times(cluster, "lost") == [first_ms + MINUTE_MS]


def test_a_job_that_is_created_while_a_wrong_clock_leads_begins_now(
    cluster: SchedulingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(500)
    wrong = cluster.leading()
    assert wrong.node is not None
    monkeypatch.setattr(wrong.node, "transfer_leadership", lambda to, done: None)
    wrong.clock.wall_ahead_ms = 600 * MINUTE_MS
    cluster.run(1_000)
    cluster.apply("report", every_minute())
    assert cluster.leading() is wrong
    assert abs(wrong.job("report").settled_ms - cluster.clock.wall_ms()) < 1_000


def test_a_settlement_that_is_refused_holds_up_no_other_job(
    cluster: SchedulingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = misfires.plan

    def poisoned(compiled: Any, spec: JobSpec, settled_ms: int, now_ms: int, limit: int) -> misfires.Plan:
        made = planned(compiled, spec, settled_ms, now_ms, limit)
        return msgspec.structs.replace(made, next_due_ms=1) if spec.owner == "poison" else made

    monkeypatch.setattr(scheduler, "plan", poisoned)
    specs = [every_minute(owner="poison"), every_minute()]
    definitions = tuple(
        JobDefinition(tenant="default", name=f"{spec.owner}-{number}", spec=spec)
        for number in range(2)
        for spec in specs
    )
    cluster.await_call(cluster.lead().submit(ApplyJobs(jobs=definitions, actor="a person")))
    first_ms = cluster.next_minute()
    cluster.until_wall(first_ms + MINUTE_MS + 500)
    assert [due_times(cluster, f"{specs[1].owner}-{number}") for number in range(2)] == [minutes(first_ms, 2)] * 2
    assert due_times(cluster, "poison-0") == []
    leading = cluster.leading()
    assert any("poison-0" in warning for warning in leading.scheduler.warnings())
    assert leading.scheduler.lag_ms() == 0
    poll, leading.scheduler.poll = leading.scheduler.poll, lambda: None  # type: ignore[method-assign]
    cluster.until_wall(first_ms + MINUTE_MS + 61_000)
    assert leading.scheduler.lag_ms() == cluster.clock.wall_ms() - (first_ms + 2 * MINUTE_MS)
    leading.scheduler.poll = poll  # type: ignore[method-assign]
    leading.scheduler.poll()

    monkeypatch.undo()
    cluster.apply("poison-0", every_minute())
    cluster.until_wall(first_ms + 3 * MINUTE_MS + 500)
    assert due_times(cluster, "poison-0")[-1] == first_ms + 3 * MINUTE_MS
    assert not any("poison-0" in warning for warning in cluster.leading().scheduler.warnings())


async def test_the_timer_survives_a_look_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    looked: asyncio.Queue[int] = asyncio.Queue()

    class Failing:
        times = 0

        def attach(self, schedule: Callable[[float], None]) -> None:
            schedule(0.0)

        def poll(self) -> None:
            self.times += 1
            looked.put_nowait(self.times)
            if self.times == 1:
                raise KeyError("what nobody thought of")

    timer = scheduler.SchedulerTimer(Failing(), SystemClock())  # type: ignore[arg-type]
    timer.start()
    assert [await asyncio.wait_for(looked.get(), 10) for _ in range(2)] == [1, 2]
    timer.stop()
    assert "looking for what is due failed" in caplog.text
