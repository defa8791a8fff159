"""The parts behind jobs: the start rate, stories, what is derived from the name of an occurrence, groups of workers.

Seeds are the parameters.
"""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from sidecar.core import commands as c
from sidecar.core import specification as s
from sidecar.core.assignment import Groups
from sidecar.core.context import Context
from sidecar.core.governor import STEP_MS, Governor
from sidecar.core.machine import Machine
from sidecar.core.occurrences import (
    STEPS_MAX,
    Occurrence,
    OccurrenceState,
    Origin,
    Step,
    backoff_ms,
    idempotency_key,
    is_canary,
    jitter,
    spread,
    told,
)
from tests.core.derived import check_derived, restored

MANUAL = s.Schedule(kind=s.ScheduleKind.MANUAL)
SPEC = s.JobSpec(owner="team", runbook_url="https://r", schedule=MANUAL)


def row(attempt: int = 0, due_ms: int = 0) -> Occurrence:
    return Occurrence(
        tenant="t",
        job="j",
        due_ms=due_ms,
        sequence=0,
        origin=Origin.SCHEDULE,
        state=OccurrenceState.RUNNING,
        job_revision=1,
        created_ms=0,
        created_wall_ms=0,
        ready_ms=0,
        start_by_ms=0,
        attempt=attempt,
    )


# ---- the start rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_second_sees_more_starts_than_the_limit(seed: int) -> None:
    """Whenever there is an allowance it is used, at random moments and at those that the governor names itself."""
    chance = random.Random(seed)
    limit = chance.choice([1, 2, 7, 15, 200])
    context = Context(c.Limits(starts_per_second_max=limit), c.Stamp(0, 0), 0, [])
    governor = Governor(context, [])
    starts: list[int] = []
    for _ in range(400):
        now_ms = governor.next_ms() if chance.random() < 0.5 else context.now_ms + chance.randrange(150)
        context.move_to(c.Stamp(now_ms, 0))
        for _ in range(governor.allowance()):
            governor.note()
            starts.append(now_ms)
        if chance.random() < 0.1:
            governor = Governor(context, governor.started)
    for start_ms in starts:
        assert sum(start_ms <= other < start_ms + 1_000 for other in starts) <= limit
    by_step: dict[int, int] = {}
    for start_ms in starts:
        by_step[start_ms // STEP_MS] = by_step.get(start_ms // STEP_MS, 0) + 1
    assert max(by_step.values()) <= max(1, -(-limit // 10))


@pytest.mark.parametrize("limit", [1, 3, 10, 25, 200])
def test_the_governor_names_the_first_moment_at_which_a_start_is_allowed_and_is_not_slower_than_its_limit(
    limit: int,
) -> None:
    context = Context(c.Limits(starts_per_second_max=limit), c.Stamp(0, 0), 0, [])
    governor = Governor(context, [])
    started = 0
    while context.now_ms < 11_000:
        while governor.allowance():
            governor.note()
            started += 1
        next_ms = governor.next_ms()
        context.move_to(c.Stamp(next_ms - 1, 0))
        assert governor.allowance() == 0
        context.move_to(c.Stamp(next_ms, 0))
        assert governor.allowance() > 0
    assert started >= limit * 9


# ---- what is derived from a name -----------------------------------------------------------------------------------


def test_what_is_derived_from_a_name_is_the_same_for_ever() -> None:
    """Written down once: another value would move every job of every user."""
    assert [spread(999, "jitter", "t", "j", due_ms, 0) for due_ms in (0, 1, 2)] == [964, 216, 267]
    assert spread(0, "x") == 0


def test_the_share_of_a_canary_is_about_what_it_says_and_a_larger_share_contains_a_smaller_one() -> None:
    def chosen(percent: int) -> list[int]:
        spec = msgspec.structs.replace(SPEC, canary=s.Canary(percent=percent, label="ring", value="1"))
        return [due_ms for due_ms in range(0, 2_000_000, 1_000) if is_canary(spec, "t", "j", due_ms)]

    tenth, half = chosen(10), chosen(50)
    assert 150 < len(tenth) < 250
    assert 900 < len(half) < 1_100
    assert [due_ms for due_ms in tenth if due_ms not in half] == []


def test_the_wait_before_an_attempt_grows_up_to_its_maximum_and_its_jitter_is_added() -> None:
    retry = s.Retry(initial_ms=1_000, multiplier_percent=150, max_ms=5_000, jitter_percent=0)
    assert [backoff_ms(retry, row(attempt)) for attempt in range(1, 7)] == [1_000, 1_500, 2_250, 3_375, 5_000, 5_000]
    jittered = msgspec.structs.replace(retry, jitter_percent=20)
    waits = [backoff_ms(jittered, row(1, due_ms)) for due_ms in range(100)]
    assert 1_000 <= min(waits) < 1_050
    assert 1_150 < max(waits) <= 1_200
    assert backoff_ms(jittered, row(100)) <= 6_000


def test_jitter_is_within_its_span() -> None:
    spec = msgspec.structs.replace(SPEC, jitter_ms=60_000)
    found = [jitter(spec, "t", f"job-{number}", 0, 0) for number in range(500)]
    assert 0 <= min(found) < 2_000
    assert 58_000 < max(found) <= 60_000


def test_a_backfill_has_the_key_of_the_schedules_own_occurrence_and_a_trigger_one_of_its_own() -> None:
    keys = [idempotency_key("j", 5, 9, origin) for origin in Origin]
    assert keys == ["job/j/5", "job/j/5", "job/j/5/9", "job/j/5"]


# ---- the story -----------------------------------------------------------------------------------------------------


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    steps: tuple[Step, ...] = ()
    for number in range(200):
        steps = told(steps, Step(what="assigned", wall_ms=0, cluster_ms=number))
    assert len(steps) == STEPS_MAX
    assert [step.cluster_ms for step in steps] == [*range(8), *range(200 - (STEPS_MAX - 8), 200)]


def test_of_a_runs_checkpoints_the_last_is_told() -> None:
    steps: tuple[Step, ...] = ()
    for what in ("assigned", "checkpointed", "checkpointed", "run_ended", "checkpointed"):
        steps = told(steps, Step(what=what, wall_ms=0, cluster_ms=len(steps)))
    assert [step.what for step in steps] == ["assigned", "checkpointed", "run_ended", "checkpointed"]


# ---- groups --------------------------------------------------------------------------------------------------------


def test_groups_are_found_by_name_and_by_prefix_and_never_across_tenants() -> None:
    groups = Groups()
    keys = [("t", ("a/x", "b*")), ("t", ("*",)), ("t", ("a*", "a/x")), ("u", ("*",)), ("t", ("ab*",))]
    for key in keys:
        groups.add(key)
    found = {job: sorted(group.key for group in groups.serving("t", job)) for job in ("a/x", "b", "abc", "c")}
    assert found == {
        "a/x": sorted([keys[0], keys[1], keys[2]]),
        "b": sorted([keys[0], keys[1]]),
        "abc": sorted([keys[1], keys[2], keys[4]]),
        "c": [keys[1]],
    }
    for key in keys:
        groups.remove(key)
    assert groups.serving("t", "abc") == []
    assert (groups._exact, groups._prefix, groups._lengths) == ({}, {}, {})


# ---- many ----------------------------------------------------------------------------------------------------------


def test_many_due_at_once_start_at_the_rate_in_order_and_none_is_forgotten_over_a_restore() -> None:
    machine = Machine(c.Limits(starts_per_second_max=50))
    names = [f"job-{number:03}" for number in range(300)]

    def apply(now_ms: int, command: c.Command) -> c.Result:
        return machine.apply(c.Stamp(now_ms, 1_000_000 + now_ms), c.Request(command=command))[0]

    spec = msgspec.structs.replace(SPEC, schedule=s.Schedule(kind=s.ScheduleKind.INTERVAL, interval_ms=60_000))
    definitions = [
        c.JobDefinition(tenant="t", name=name, spec=msgspec.structs.replace(spec, priority=number % 3))
        for number, name in enumerate(names)
    ]
    apply(0, c.ApplyJobs(jobs=tuple(definitions), actor="ann"))
    for suffix in ("a", "b"):
        opened = apply(0, c.OpenSession(tenant="t", suffix=suffix, ttl_ms=3_600_000, connection="c"))
        assert isinstance(opened, c.SessionOpened)
        apply(0, c.ServeJobs(tenant="t", session=opened.session, jobs=("job-*",), slots=1_000))
    due = c.Due(1_000_500)
    settlements = tuple(
        c.Settlement(
            tenant="t", name=name, revision=1, settled_ms=1_000_000, through_ms=1_001_000, next_due_ms=0, due=(due,)
        )
        for name in names
    )
    apply(1_000, c.SettleDue(settlements=settlements))
    while machine.counts()["pending"]:
        machine = restored(machine)
        next_ms = machine.next_deadline_ms()
        assert next_ms is not None
        apply(next_ms, c.Tick())
    runs = machine.runs("t", "", 0, 1_000)
    assert sorted(run.job for run in runs) == names
    started = [run.started_ms for run in runs]
    assert all(later - earlier >= 1_000 for earlier, later in zip(started, started[50:], strict=False))
    assert started[-1] <= 1_000 + 6 * 1_100
    ranks = [(-definitions[int(run.job[4:])].spec.priority, run.job) for run in runs]
    assert all(before < after for before, after in pairwise(ranks))
    of_session = {run.session: len(machine.session_runs(run.session)) for run in runs}
    assert sorted(of_session.values()) == [150, 150]
    check_derived(machine)
