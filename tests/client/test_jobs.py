"""How a job is described with keyword arguments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tenure.jobs import JobOptions, job_spec
from tenure.v1 import job_pb2

REQUIRED: JobOptions = {"owner": "me", "runbook_url": "https://runbooks.test/x"}


def spec(**options: Any) -> job_pb2.JobSpec:
    return job_spec(cast(JobOptions, {**REQUIRED, **options}))


def test_durations_are_seconds_and_what_is_not_given_stays_unset() -> None:
    made = spec(schedule="0 9 * * *", zone="Europe/Berlin", run_timeout=1.5, retry_initial=0.25, attempts_max=2)
    assert (made.schedule.cron, made.schedule.zone, made.timeout_ms) == ("0 9 * * *", "Europe/Berlin", 1_500)
    assert (made.retry.initial_ms, made.retry.attempts_max) == (250, 2)
    assert not made.HasField("starting_deadline_ms")


def test_schedules_of_each_kind() -> None:
    assert spec(schedule=timedelta(minutes=5)).schedule.interval.every_ms == 300_000
    assert spec(schedule=datetime(2030, 1, 1, tzinfo=UTC)).schedule.once_wall_ms == 1_893_456_000_000
    assert spec().schedule.WhichOneof("kind") == "manual"
    assert spec(selector={"zone": "a", "cohort": ["x", "y"]}).selector[1].values == ["x", "y"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"timeout": 5}, TypeError, "did you mean run_timeout"),
        ({"ownr": "x"}, TypeError, r"did you mean owner\?"),
        ({"schedule": "every 5s"}, ValueError, "timedelta"),
        ({"schedule": datetime(2030, 1, 1)}, ValueError, "time zone"),
        ({"run_timeout": "20s"}, ValueError, "run_timeout must be 0 or more seconds"),
        ({"overlap_policy": "forbid"}, ValueError, "one of skip, buffer_one"),
        ({"mode": "unspecified"}, ValueError, "one of live, shadow"),
    ],
)
def test_what_cannot_be_said_is_refused_at_once(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        spec(**options)
