"""Specifications of jobs: what is refused, under which path; what is filled in; what is warned of."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenure.v1 import job_pb2, switch_pb2

from sidecar.core import bounds, commands
from sidecar.core import specification as s
from sidecar.services import specs, translate_jobs
from sidecar.services import validation as check
from sidecar.services.calls import Caller
from sidecar.services.errors import ApiError

CALLER = Caller(("default", "other"), 1_000)
NOW_MS = 1_767_225_600_000
DAY_MS = 86_400_000
BASE: dict[str, Any] = {"owner": "team", "runbook_url": "https://runbooks.test/job", "schedule": {"cron": "0 * * * *"}}


def message(**fields: Any) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(**{**BASE, **fields})


def spec(**fields: Any) -> s.JobSpec:
    return specs.spec_of(message(**fields), "spec")


def refusal(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


MISSING, BAD, RANGE, LARGE = "FIELD_REQUIRED", "FIELD_INVALID", "VALUE_OUT_OF_RANGE", "FIELD_TOO_LARGE"

# The fields that are bad, the path that is named, the reason, and what the message says, too.
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"owner": ""}, "owner", MISSING, ""),
    ({"owner": " "}, "owner", MISSING, ""),
    ({"owner": "x" * 257}, "owner", LARGE, "256"),
    ({"runbook_url": ""}, "runbook_url", MISSING, "http"),
    ({"runbook_url": "runbooks/job"}, "runbook_url", BAD, "http"),
    ({"runbook_url": "ftp://runbooks.test"}, "runbook_url", BAD, "http"),
    ({"runbook_url": "https://"}, "runbook_url", BAD, "http"),
    ({"runbook_url": "https://[::1"}, "runbook_url", BAD, "http"),
    ({"runbook_url": "https://a b"}, "runbook_url", BAD, "http"),
    ({"runbook_url": "https://r.test/" + "x" * 1_024}, "runbook_url", LARGE, "1024"),
    ({"description": "x" * 1_025}, "description", LARGE, "1024"),
    ({"schedule": {}}, "schedule", MISSING, "cron, interval, once_wall_ms and manual"),
    ({"schedule": {"cron": ""}}, "schedule.cron", BAD, ""),
    ({"schedule": {"cron": "61 * * * *"}}, "schedule.cron", BAD, "minute '61'; allowed: 0-59"),
    ({"schedule": {"cron": "* * * * * *"}}, "schedule.cron", BAD, "five"),
    ({"schedule": {"cron": "0 0 30 2 *"}}, "schedule.cron", BAD, "never"),
    ({"schedule": {"cron": "0 0 ? * *"}}, "schedule.cron", BAD, "day-of-month '?'"),
    ({"schedule": {"cron": "@reboot"}}, "schedule.cron", BAD, "@hourly"),
    ({"schedule": {"cron": "0 " * 200}}, "schedule.cron", LARGE, "256"),
    ({"schedule": {"cron": "0 * * * *", "zone": "Europe/Berln"}}, "schedule.zone", BAD, "Europe/Berlin"),
    ({"schedule": {"cron": "0 * * * *", "zone": "../etc/passwd"}}, "schedule.zone", BAD, "IANA"),
    ({"schedule": {"cron": "0 * * * *", "dst_policy": 9}}, "schedule.dst_policy", BAD, "DST_POLICY_VIXIE"),
    ({"schedule": {"cron": "0 * * * *", "start_wall_ms": -1}}, "schedule.start_wall_ms", BAD, "1970"),
    (
        {"schedule": {"cron": "0 * * * *", "start_wall_ms": 2, "end_wall_ms": 1}},
        "schedule.end_wall_ms",
        BAD,
        "after start",
    ),
    ({"schedule": {"interval": {"every_ms": 999}}}, "schedule.interval.every_ms", BAD, "one second"),
    ({"schedule": {"interval": {}}}, "schedule.interval.every_ms", BAD, "1000"),
    ({"schedule": {"interval": {"every_ms": 10**12}}}, "schedule.interval.every_ms", BAD, "31622400000"),
    (
        {"schedule": {"interval": {"every_ms": 1_000, "anchor_wall_ms": -1}}},
        "schedule.interval.anchor_wall_ms",
        BAD,
        "1970",
    ),
    ({"schedule": {"once_wall_ms": 0}}, "schedule.once_wall_ms", BAD, "required"),
    ({"schedule": {"once_wall_ms": 10**18}}, "schedule.once_wall_ms", BAD, "1970"),
    ({"jitter_ms": -1}, "jitter_ms", RANGE, "86400000"),
    ({"jitter_ms": 60_000, "starting_deadline_ms": 60_000}, "jitter_ms", BAD, "starting_deadline_ms (60000)"),
    ({"misfire_policy": 9}, "misfire_policy", BAD, "MISFIRE_POLICY_LATEST"),
    ({"misfire_policy": job_pb2.MISFIRE_POLICY_ALL}, "catch_up_max", MISSING, "1 to 1000"),
    ({"catch_up_max": 5}, "catch_up_max", BAD, "MISFIRE_POLICY_ALL"),
    ({"misfire_policy": job_pb2.MISFIRE_POLICY_ALL, "catch_up_max": 1_001}, "catch_up_max", RANGE, "1000"),
    ({"catch_up_window_ms": -1}, "catch_up_window_ms", RANGE, "0 to"),
    ({"starting_deadline_ms": 0}, "starting_deadline_ms", RANGE, "1000"),
    ({"overlap_policy": 9}, "overlap_policy", BAD, "OVERLAP_POLICY_SKIP"),
    ({"overlap_policy": job_pb2.OVERLAP_POLICY_ALLOW}, "concurrent_max", MISSING, "2 to 1000"),
    ({"concurrent_max": 2}, "concurrent_max", BAD, "OVERLAP_POLICY_ALLOW"),
    ({"buffer_max": 0}, "buffer_max", RANGE, "1 to 1000"),
    ({"timeout_ms": 999}, "timeout_ms", RANGE, "1000"),
    ({"timeout_ms": 8 * DAY_MS}, "timeout_ms", RANGE, "604800000"),
    ({"interrupt_grace_ms": 600_001}, "interrupt_grace_ms", RANGE, "600000"),
    ({"delivery": 9}, "delivery", BAD, "DELIVERY_AT_LEAST_ONCE"),
    ({"on_holder_loss": 9}, "on_holder_loss", BAD, "HOLDER_LOSS_POLICY_SKIP"),
    (
        {"delivery": job_pb2.DELIVERY_AT_MOST_ONCE, "on_holder_loss": job_pb2.HOLDER_LOSS_POLICY_RETRY},
        "on_holder_loss",
        BAD,
        "at most once",
    ),
    (
        {"delivery": job_pb2.DELIVERY_AT_MOST_ONCE, "retry": {"attempts_max": 2}},
        "retry.attempts_max",
        BAD,
        "at most once",
    ),
    ({"retry": {"attempts_max": 0}}, "retry.attempts_max", RANGE, "1 to 100"),
    ({"retry": {"initial_ms": -1}}, "retry.initial_ms", RANGE, "0 to"),
    ({"retry": {"multiplier_percent": 99}}, "retry.multiplier_percent", RANGE, "100 to"),
    ({"retry": {"max_ms": 2 * DAY_MS}}, "retry.max_ms", RANGE, "86400000"),
    ({"retry": {"jitter_percent": 101}}, "retry.jitter_percent", RANGE, "0 to 100"),
    ({"priority": 101}, "priority", RANGE, "-100 to 100"),
    ({"labels": {str(n): "" for n in range(17)}}, "labels", RANGE, "16"),
    ({"labels": {"": "x"}}, "labels (name)", MISSING, ""),
    ({"labels": {"a": "x" * 129}}, "labels[a]", LARGE, "128"),
    ({"selector": [{"key": str(n), "values": ["x"]} for n in range(9)]}, "selector", RANGE, "8"),
    ({"selector": [{"key": "zone", "values": ["a"]}, {"values": ["x"]}]}, "selector[1].key", MISSING, ""),
    ({"selector": [{"key": "zone"}]}, "selector[0].values", RANGE, "1 to 16"),
    ({"selector": [{"key": "zone", "values": ["x" * 129]}]}, "selector[0].values[0]", LARGE, "128"),
    (
        {"selector": [{"key": "zone", "values": ["a"]}, {"key": "zone", "values": ["b"]}]},
        "selector[1].key",
        BAD,
        "each key once",
    ),
    ({"payload": b"x" * 65_537}, "payload", LARGE, "65536"),
    ({"estimated_cost_micros": -1}, "estimated_cost_micros", RANGE, "0 to"),
    ({"mode": 9}, "mode", BAD, "JOB_MODE_SHADOW"),
    ({"canary": {"percent": 0, "label": "l"}}, "canary.percent", RANGE, "1 to 99"),
    ({"canary": {"percent": 100, "label": "l"}}, "canary.percent", RANGE, "1 to 99"),
    ({"canary": {"percent": 5}}, "canary.label", MISSING, ""),
    ({"history_count": 0}, "history_count", RANGE, "1 to 1000"),
    ({"history_age_ms": 59_999}, "history_age_ms", RANGE, "60000"),
]


@pytest.mark.parametrize(
    ("fields", "path", "reason", "said"),
    [pytest.param(*case, id=f"{case[1]}-{number}") for number, case in enumerate(CASES)],
)
def test_a_bad_field_is_refused_by_its_path(fields: dict[str, Any], path: str, reason: str, said: str) -> None:
    definitions = [{"tenant": "default", "name": "good", "spec": BASE}]
    definitions.append({"tenant": "default", "name": "bad", "spec": {**BASE, **fields}})
    request = job_pb2.ApplyJobsRequest(jobs=definitions)  # type: ignore[arg-type]
    error = refusal(lambda: translate_jobs.apply_jobs(request, CALLER))
    assert (error.facts["field"], error.reason) == (f"jobs[1].spec.{path}", reason)
    assert error.facts["field"] in error.message
    assert said in error.message, error.message


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("digest", True),
        ("Monatsabschluß 2", True),
        ("x" * 128, True),
        ("a*b", True),
        ("", False),
        ("x" * 129, False),
        ("\u00e9" * 65, False),
        ("acme/digest", False),
        (" digest", False),
        ("digest ", False),
        ("digest*", False),
        ("a\nb", False),
        ("a\x7fb", False),
    ],
)
def test_names_of_jobs(name: str, good: bool) -> None:
    request = job_pb2.ApplyJobsRequest(jobs=[{"tenant": "default", "name": name, "spec": BASE}])  # type: ignore[list-item]
    if good:
        (definition,) = translate_jobs.apply_jobs(request, CALLER).jobs
        assert definition.name == name
        assert bounds.job_name_problem(name) is None
    else:
        error = refusal(lambda: translate_jobs.apply_jobs(request, CALLER))
        assert (error.reason, error.facts["field"]) == ("NAME_INVALID", "jobs[0].name")


def test_an_apply_as_a_whole() -> None:
    def applied(*jobs: dict[str, Any], **fields: Any) -> commands.ApplyJobs:
        request = job_pb2.ApplyJobsRequest(jobs=[{"spec": BASE, **job} for job in jobs], **fields)  # type: ignore[misc]
        return translate_jobs.apply_jobs(request, CALLER)

    one = {"tenant": "default", "name": "a"}
    command = applied(one, {"tenant": "other", "name": "a", "expected_revision": 0})
    assert [(job.tenant, job.expected_revision) for job in command.jobs] == [("default", -1), ("other", 0)]
    assert command.actor == "unknown"
    assert applied(one, actor="me").actor == "me"
    for call, field, reason in (
        (applied, "jobs", RANGE),
        (lambda: applied(*[{**one, "name": str(n)} for n in range(1_001)]), "jobs", RANGE),
        (lambda: applied(one, one), "jobs[1].name", BAD),
        (lambda: applied({**one, "tenant": "nobody"}), "jobs[0].tenant", "TENANT_NOT_FOUND"),
        (lambda: applied({**one, "tenant": ""}), "jobs[0].tenant", "TENANT_INVALID"),
        (lambda: applied({**one, "expected_revision": -1}), "jobs[0].expected_revision", RANGE),
        (lambda: applied(one, actor="x" * 129), "actor", LARGE),
        (lambda: applied(one, reason="x" * 1_025), "reason", LARGE),
    ):
        error = refusal(call)
        assert (error.facts["field"], error.reason) == (field, reason)
    large = [{**one, "name": str(n), "spec": {**BASE, "payload": b"x" * 60_000}} for n in range(16)]
    error = refusal(lambda: applied(*large))
    assert (error.facts["field"], error.reason, error.facts["limit_bytes"]) == ("jobs", LARGE, "900000")


def test_what_is_not_said_has_a_default() -> None:
    assert spec() == s.JobSpec(
        owner="team",
        runbook_url="https://runbooks.test/job",
        schedule=s.Schedule(kind=s.ScheduleKind.CRON, cron="0 * * * *"),
    )
    once = spec(delivery=job_pb2.DELIVERY_AT_MOST_ONCE)
    assert (once.retry.attempts_max, once.on_holder_loss) == (1, s.HolderLoss.HOLD_FOR_PERSON)
    equal = spec(labels={"b": "2", "a": "1"}, selector=[{"key": "zone", "values": ["b", "a", "b"]}])
    assert equal == spec(labels={"a": "1", "b": "2"}, selector=[{"key": "zone", "values": ["a", "b"]}])


FULL: list[dict[str, Any]] = [
    {},
    {"schedule": {"cron": "@daily", "zone": "Europe/Berlin", "dst_policy": job_pb2.DST_POLICY_SHIFT}},
    {"schedule": {"interval": {"every_ms": 7_000, "anchor_wall_ms": 3}, "start_wall_ms": 5, "end_wall_ms": NOW_MS}},
    {"schedule": {"once_wall_ms": NOW_MS}},
    {"schedule": {"manual": {}}},
    {"misfire_policy": job_pb2.MISFIRE_POLICY_ALL, "catch_up_max": 50, "catch_up_window_ms": 0},
    {"overlap_policy": job_pb2.OVERLAP_POLICY_ALLOW, "concurrent_max": 3, "interrupt_grace_ms": 0},
    {"delivery": job_pb2.DELIVERY_AT_MOST_ONCE, "on_holder_loss": job_pb2.HOLDER_LOSS_POLICY_SKIP},
    {"retry": {"attempts_max": 100, "initial_ms": 0, "on_failure": False, "on_timeout": False, "jitter_percent": 0}},
    {"labels": {"a": "1"}, "selector": [{"key": "version", "values": ["1", "2"]}], "payload": b"\x00" * 65_536},
    {"mode": job_pb2.JOB_MODE_SHADOW, "canary": {"percent": 5, "label": "cohort", "value": "new"}, "priority": -100},
]


@pytest.mark.parametrize("fields", FULL)
def test_a_described_specification_is_the_same_when_it_is_applied(fields: dict[str, Any]) -> None:
    first = spec(**fields)
    assert bounds.specification_problem(first) is None
    shown = specs.spec_message(first)
    assert specs.spec_of(shown, "spec") == first
    assert specs.spec_message(specs.spec_of(shown, "spec")) == shown


def test_it_is_described_in_words() -> None:
    text = specs.text_of(spec(schedule={"cron": "30 2 * * *", "zone": "Europe/Berlin"}, jitter_ms=90_000))
    for said in ("30 2 * * *", "Europe/Berlin", "vixie", "spread over 1 min 30 s", "not older than 1 h", "skipped"):
        assert said in text
    assert "interrupts" in specs.text_of(spec(overlap_policy=job_pb2.OVERLAP_POLICY_CANCEL_RUNNING))


def test_warnings() -> None:
    def warned(flag_since_ms: int = 0, **fields: Any) -> str:
        return "; ".join(specs.warnings_of(spec(**fields), NOW_MS, flag_since_ms))

    assert warned(timeout_ms=60_000) == ""
    assert "leader change" in warned(timeout_ms=60_000, starting_deadline_ms=4_999)
    assert warned(timeout_ms=60_000, starting_deadline_ms=5_000) == ""
    assert "longer than the period of 1 h" in warned(timeout_ms=3_600_001)
    assert warned(timeout_ms=3_600_001, overlap_policy=job_pb2.OVERLAP_POLICY_BUFFER_ONE) == ""
    assert "period of 10 s" in warned(schedule={"interval": {"every_ms": 10_000}})
    assert warned(schedule={"manual": {}}) == ""
    shadow = {"timeout_ms": 60_000, "mode": job_pb2.JOB_MODE_SHADOW}
    assert warned(NOW_MS - 30 * DAY_MS, **shadow) == ""
    assert "shadow mode for 31 days" in warned(NOW_MS - 31 * DAY_MS, **shadow)
    assert "canary for 31 days" in warned(
        NOW_MS - 31 * DAY_MS, timeout_ms=60_000, canary={"percent": 1, "label": "l", "value": "v"}
    )


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        ({"scope": 0}, "scope", BAD),
        ({"scope": 9}, "scope", BAD),
        ({"mode": 0}, "mode", BAD),
        ({"tenant": "default"}, "tenant", BAD),
        ({"job": "a"}, "job", BAD),
        ({"scope": 2, "tenant": ""}, "tenant", "TENANT_INVALID"),
        ({"scope": 2, "tenant": "nobody"}, "tenant", "TENANT_NOT_FOUND"),
        ({"scope": 2, "tenant": "default", "job": "a"}, "job", BAD),
        ({"scope": 3, "tenant": "default"}, "job", "NAME_INVALID"),
        ({"scope": 3, "tenant": "default", "job": "a*"}, "job", "NAME_INVALID"),
        ({"actor": ""}, "actor", MISSING),
        ({"reason": " "}, "reason", MISSING),
        ({"expires_after_ms": 999}, "expires_after_ms", RANGE),
        ({"expires_after_ms": 0}, "expires_after_ms", RANGE),
        ({"expires_after_ms": 31 * DAY_MS + 1}, "expires_after_ms", RANGE),
    ],
)
def test_the_scope_of_a_switch_is_never_guessed(fields: dict[str, Any], path: str, reason: str) -> None:
    """Nothing that is empty or unknown means "all", or "none"."""
    base = {"scope": 1, "mode": 3, "actor": "me", "reason": "why"}
    request = switch_pb2.SetSwitchRequest(**{**base, **fields})
    error = refusal(lambda: translate_jobs.set_switch(request, CALLER))
    assert (error.facts["field"], error.reason) == (path, reason)


def test_patterns_of_a_worker() -> None:
    assert check.job_patterns(["a", "b*", "*", "a"]) == ("a", "b*", "*")
    for bad in ("", "a**", "a/b", "a/*", " a", "\n*", "x" * 129):
        error = refusal(lambda bad=bad: check.job_patterns(["good", bad]))
        assert (error.reason, error.facts["field"]) == ("NAME_INVALID", "jobs[1]")
    error = refusal(lambda: check.job_patterns(["a"] * 1_001))
    assert (error.reason, error.facts["field"]) == (RANGE, "jobs")


@given(st.binary(max_size=300))
def test_no_bytes_get_past_the_checks_by_an_unexpected_way(data: bytes) -> None:
    """Whatever parses is translated or refused, never anything else; and what is translated, the core takes."""
    definition = job_pb2.JobSpec()
    with contextlib.suppress(Exception):  # does not parse: refused before it comes here
        definition = job_pb2.JobSpec.FromString(data)
    definition.owner, definition.runbook_url = "team", BASE["runbook_url"]
    with contextlib.suppress(ApiError):
        assert bounds.specification_problem(specs.spec_of(definition, "spec")) is None
