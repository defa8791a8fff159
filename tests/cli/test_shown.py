"""What the commands make of answers that a quiet cluster does not give."""

from __future__ import annotations

import pytest
from tenure.v1 import cluster_pb2, job_pb2, switch_pb2

from sidecar.cli import explain, jobs, operate, switches

DUE = 1_774_767_600_000  # 2026-03-29 07:00:00Z
SPEC = job_pb2.JobSpec(
    owner="ops", runbook_url="https://example.org/r", schedule=job_pb2.Schedule(zone="Europe/Berlin")
)
JOB = job_pb2.Job(tenant="acme", name="bill", spec=SPEC)


def told(**fields: object) -> job_pb2.ExplainOccurrenceResponse:
    occurrence = job_pb2.Occurrence(tenant="acme", job="bill", due_wall_ms=DUE, first_due_wall_ms=DUE, count=1)
    for name, value in fields.items():
        setattr(occurrence, name, value)
    return job_pb2.ExplainOccurrenceResponse(occurrences=[occurrence], job=JOB)


def story(response: job_pb2.ExplainOccurrenceResponse) -> str:
    return "\n".join(explain.story(response, "acme/bill", DUE))


def test_what_is_held_is_settled_by_the_command_that_is_shown() -> None:
    lines = story(told(state=job_pb2.OCCURRENCE_STATE_UNKNOWN, reason="holder_lost", held=True, attempt=2, sequence=4))
    assert "acme/bill: unknown (holder_lost), HELD for a person" in lines
    assert "due       2026-03-29 07:00:00Z (2026-03-29 09:00:00 +02:00 CEST)" in lines
    assert (
        "tenure job resolve acme/bill 2026-03-29T07:00:00Z --sequence 4 --attempt 2 --as succeeded|failed|retry"
        in lines
    )


def test_missed_times_in_a_row_are_backfilled_as_one() -> None:
    response = told(
        state=job_pb2.OCCURRENCE_STATE_MISSED, reason="catch-up window", first_due_wall_ms=DUE - 7_200_000, count=3
    )
    lines = story(response)
    assert "acme/bill: 3 times missed (catch-up window)" in lines
    assert "tenure job backfill acme/bill 2026-03-29T05:00:00Z 2026-03-29T07:00:00.001Z --reason" in lines


def test_a_switch_is_named_before_all_else() -> None:
    response = told(state=job_pb2.OCCURRENCE_STATE_SKIPPED, reason="paused k7")
    response.job.switch_id = "k7"
    lines = story(response).splitlines()
    assert next(line for line in lines if line.startswith("do")).startswith("do        tenure switch show k7")


def test_a_run_that_goes_on_can_be_stopped() -> None:
    response = told(state=job_pb2.OCCURRENCE_STATE_RUNNING, run_id="r9", attempt=1)
    response.explanation = "crawler on host-3 works on it"
    step = response.occurrences[0].steps.add(
        wall_ms=DUE + 250, what="assigned", attempt=1, run_id="r9", session_id="s1", agent="crawler", host="host-3"
    )
    assert explain.step_line(step, "Europe/Berlin") == (
        "  2026-03-29 07:00:00.250Z (09:00:00 local)  attempt 1 given to crawler on host-3 (session s1, run r9)"
    )
    lines = story(response)
    assert "now       crawler on host-3 works on it" in lines
    assert "tenure interrupt r9 --reason" in lines


def test_of_a_deleted_job_only_the_story_is_left() -> None:
    response = told(state=job_pb2.OCCURRENCE_STATE_FAILED, reason="error")
    response.ClearField("job")
    assert "it has been deleted" in story(response)
    assert "backfill" not in story(response)


def test_status_shows_what_needs_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    status = cluster_pb2.GetStatusResponse(
        jobs=3, switches=2, kill_epoch=5, schedule_held_reason="the clock is 20 s ahead of the others",
        tzdata_version="2026.6", cluster_tzdata_version="2026.5",
    )  # fmt: skip
    operate.print_work(status)
    shown = capsys.readouterr().out
    for text in (
        "3 jobs", "2 IN FORCE", "kill epoch 5", "schedules HELD BACK: the clock is 20 s ahead of the others",
        "this node has tzdata 2026.6, the cluster goes by 2026.5",
    ):  # fmt: skip
        assert text in shown
    operate.print_work(
        cluster_pb2.GetStatusResponse(schedule_lag_ms=61_000, tzdata_version="1", cluster_tzdata_version="1")
    )
    shown = capsys.readouterr().out
    assert "schedules 61.0 s behind" in shown
    assert "zones" not in shown


def test_a_jobs_flags_warnings_and_totals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_pb2.Job(
        tenant="acme", name="bill", revision=4, spec=SPEC, schedule_text="manual", flag_age_ms=40 * 86_400_000,
        succeeded_total=7, missed_total=1, warnings=["it has been in shadow mode for 40 days"], switch_id="k3",
        switch_mode=switch_pb2.SWITCH_MODE_DRAIN,
    )  # fmt: skip
    job.spec.mode = job_pb2.JOB_MODE_SHADOW
    jobs.print_job(job)
    shown = capsys.readouterr().out
    for text in (
        "shadow: nothing is handed out", "flag      shadow, for 40 days", "7 succeeded, 1 missed", "DRAIN by k3",
        "warning   it has been in shadow mode for 40 days",
    ):  # fmt: skip
        assert text in shown, shown
    assert jobs.next_due(job, 0) == "DRAINED by k3"


def test_the_effect_of_a_kill_is_told_as_it_is() -> None:
    run = job_pb2.Run(tenant="acme", job="bill", run_id="r1", agent="crawler", host="host-3", session_id="s1")
    switch = switch_pb2.Switch(runs_at_set=3, runs_ended=2, runs_unacknowledged=1, runs_left=1, effect_ms=10_400)
    lines = switches.effect_lines(switch, [run], waited=True)
    assert lines[0] == "  2 of 3 runs ended, the slowest after 10.4 s"
    assert "1 of them WITHOUT an acknowledgement" in lines[1]
    assert lines[2:] == ["  1 run not ended yet", "    acme/bill r1: crawler on host-3, session s1"]
    assert switches.effect_lines(switch_pb2.Switch(), [], waited=True) == ["  nothing ran in it"]
