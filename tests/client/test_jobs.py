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


def test_every_field_of_a_specification_can_be_said() -> None:
    """What the API can say of a job, Python can: a field that is added later shows up here."""
    made = spec(
        schedule="0 9 * * *", description="d", jitter=1, misfire_policy="all", catch_up_max=2, catch_up_window=3,
        starting_deadline=4, overlap_policy="allow", buffer_max=5, concurrent_max=6, run_timeout=7, interrupt_grace=8,
        delivery="at_least_once", on_holder_loss="retry", attempts_max=9, retry_initial=1, retry_max=2,
        retry_multiplier_percent=150, retry_jitter_percent=10, retry_on_failure=False, retry_on_timeout=False,
        priority=1, labels={"a": "b"}, selector={"zone": ["x"]}, payload="p", estimated_cost_micros=1, mode="shadow",
        canary={"percent": 5, "label": "track", "value": "new"}, history_count=1, history_age=60,
        zone="Europe/Berlin", dst_policy="shift", start=datetime(2030, 1, 1, tzinfo=UTC),
        end=datetime(2031, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    for message in (made, made.retry, made.canary):
        said = {field.name for field, _ in message.ListFields()}
        assert said == {field.name for field in message.DESCRIPTOR.fields}
    said = {field.name for field, _ in made.schedule.ListFields()}
    assert said == {field.name for field in made.schedule.DESCRIPTOR.fields} - {"interval", "once_wall_ms", "manual"}


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
