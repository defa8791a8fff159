"""Random lives of jobs, judged after every command (model_jobs.py): by hypothesis, and on longer walks from a seed."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.core.job_lives import TIGHT_LIMITS, World, live, replay


@settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), steps=st.integers(10, 60))
def test_random_lives(data: st.DataObject, steps: int) -> None:
    live(World(lambda options: data.draw(st.sampled_from(options))), steps, note)


WALK_STEPS = 400


@pytest.mark.parametrize("seed", range(20))
def test_a_long_walk(seed: int) -> None:
    live(World(random.Random(seed).choice), WALK_STEPS)


@pytest.mark.parametrize("seed", range(10))
def test_a_long_walk_where_there_is_no_room(seed: int) -> None:
    live(World(random.Random(seed).choice, TIGHT_LIMITS), WALK_STEPS)


def test_a_log_alone_gives_the_same_state() -> None:
    world = World(random.Random(1_000).choice)
    live(world, WALK_STEPS)
    replayed = replay(world.judge.log)
    assert replayed.digest() == world.machine.digest()
