"""Schedules that are refused, and how: the field, its value, and what is allowed."""

from __future__ import annotations

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.specification import INTERVAL_MAX_MS, WALL_MAX_MS, DstPolicy, Schedule, ScheduleKind
from sidecar.scheduling import cron as crontab
from sidecar.scheduling.schedules import Problem, ScheduleError, compile_schedule, problems
from tests.scheduling.times import DAY, N, cron, every, ms, once


@pytest.mark.parametrize(
    ("expression", "field", "value", "allowed"),
    [
        ("", "cron", "", "five fields"),
        ("   ", "cron", "   ", "five fields"),
        ("0 0 * *", "cron", "0 0 * *", "it has 4 fields; allowed: five fields"),
        ("* * * * * *", "cron", "* * * * * *", "it has 6: finer than one minute, or with a year; allowed: five"),
        ("0 0 0 * * * 2026", "cron", "0 0 0 * * * 2026", "five fields"),
        ("60 * * * *", "cron minute", "60", "0-59"),
        ("0 24 * * *", "cron hour", "24", "0-23"),
        ("0 0 0 * *", "cron day-of-month", "0", "1-31"),
        ("0 0 1 13 *", "cron month", "13", "1-12"),
        ("0 0 * * 8", "cron day-of-week", "8", "0-7"),
        ("0 0 * * 1,9,2", "cron day-of-week", "9", "0-7"),
        ("-1 * * * *", "cron minute", "-1", "0-59"),
        ("5-1 * * * *", "cron minute", "5-1", "ranges"),
        ("*/0 * * * *", "cron minute", "*/0", "steps"),
        ("1, * * * *", "cron minute", "", "lists"),
        ("+1 * * * *", "cron minute", "+1", "0-59"),
        ("１ * * * *", "cron", "１ * * * *", "ASCII"),
        ("0 MON * * *", "cron hour", "MON", "0-23"),
        ("0 0 * MON *", "cron month", "MON", "JAN-DEC"),
        ("0 0 * * JAN", "cron day-of-week", "JAN", "SUN-SAT"),
        ("0 0 ? * 1", "cron day-of-month", "?", "write *"),
        ("0 0 15W * *", "cron day-of-month", "15W", "only LW"),
        ("0 0 W * *", "cron day-of-month", "W", "only LW"),
        ("0 0 L-3 * *", "cron day-of-month", "L-3", "LW"),
        ("0 0 L/2 * *", "cron day-of-month", "L/2", "no step"),
        ("0 0 * * L", "cron day-of-week", "L", "5L"),
        ("0 0 * * FRIL", "cron day-of-week", "FRIL", "a number"),
        ("0 0 * * 1#6", "cron day-of-week", "1#6", "5#2"),
        ("0 0 * 1#2 *", "cron month", "1#2", "1-12"),
        ("H * * * *", "cron minute", "H", "0-59"),
        # What cronsim reads as something that nobody means.
        ("*/90 * * * *", "cron minute", "*/90", "interval"),
        ("0 */25 * * *", "cron hour", "*/25", "24 values"),
        ("5-5/10 * * * *", "cron minute", "5-5/10", "one value"),
        ("@reboot", "cron", "@reboot", "no boot"),
        ("@every 5m", "cron", "@every 5m", "interval"),
        ("every 5m", "cron", "every 5m", "an interval is no cron expression"),
        ("5m", "cron", "5m", "an interval is no cron expression"),
        ("5", "cron", "5", "it has 1 field; allowed: five fields"),
        ("@never", "cron", "@never", "@hourly"),
        ("TZ=Europe/Berlin 0 0 * * *", "cron", "TZ=Europe/Berlin 0 0 * * *", "field of its own"),
        ("CRON_TZ=UTC 0 0 * * *", "cron", "CRON_TZ=UTC 0 0 * * *", "field of its own"),
        ("0 0 30 2 *", "cron", "0 0 30 2 *", ": it never fires: no month that it names has such a day"),
        ("0 0 31 4,6 *", "cron", "0 0 31 4,6 *", "never fires"),
        ("0 0 */20 * 1L", "cron", "0 0 */20 * 1L", "never fires"),
    ],
)
def test_cron(expression: str, field: str, value: str, allowed: str) -> None:
    found = problems(cron(expression))
    assert [(problem.field, problem.value) for problem in found] == [(field, value)]
    assert allowed in found[0].said
    assert bool(found[0].allowed) == ("never fires" not in found[0].why)


def test_an_expression_that_is_too_long_is_not_even_read() -> None:
    (problem,) = problems(cron("1," * 5_000 + "1 * * * *"))
    assert "at most" in problem.allowed and len(str(problem)) < 200


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = problems(cron("60 24 * ? *", "Mars/Base", start_ms=-1))
    assert [p.field for p in found] == ["start_ms", "cron minute", "cron hour", "cron month", "zone"]


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 31 2 1-5",  # OR: each weekday of February
        "0 0 29 2 *",
        "0 0 * 2 1#5",
        "*/60 * * * *",
        "0 */24 * * *",
        "0 0 L,15 * *",
        "0 0 * * 7",
        "  0   0 * * mon-fri ",
        "0 0 1 jan *",
        "@Daily",
    ],
)
def test_what_is_allowed(expression: str) -> None:
    assert problems(cron(expression)) == []


@pytest.mark.parametrize(
    ("schedule", "field", "allowed"),
    [
        (every(999), "interval_ms", "1000 to"),
        (every(0), "interval_ms", "1000 to"),
        (every(-5), "interval_ms", "1000 to"),
        (every(INTERVAL_MAX_MS + 1), "interval_ms", str(INTERVAL_MAX_MS)),
        (every(1_000, -1), "anchor_ms", str(WALL_MAX_MS)),
        (every(1_000, WALL_MAX_MS + 1), "anchor_ms", str(WALL_MAX_MS)),
        (every(DAY, 0, start_ms=1, end_ms=DAY), "end_ms", "active window"),
        (every(DAY, 0, start_ms=WALL_MAX_MS), "start_ms", "active window"),
        (once(0), "at_ms", "required"),
        (once(-1), "at_ms", "required"),
        (once(WALL_MAX_MS + 1), "at_ms", str(WALL_MAX_MS)),
        (once(5_000, end_ms=5_000), "end_ms", "active window"),
        (once(5_000, start_ms=5_001), "start_ms", "active window"),
        (cron("* * * * *", start_ms=5, end_ms=5), "end_ms", "after start_ms"),
        (cron("* * * * *", start_ms=WALL_MAX_MS + 1), "start_ms", str(WALL_MAX_MS)),
        (cron("* * * * *", end_ms=-1), "end_ms", "0 (open)"),
        (cron("0 0 * * *", start_ms=1, end_ms=DAY), "end_ms", "active window"),
        (cron("* * * * *", "Europe/Berln"), "zone", "did you mean Europe/Berlin"),
        (cron("* * * * *", "GMT+2:30"), "zone", "IANA"),
        (cron("30 2 * 3 7L", "Europe/Berlin", N), "cron", "left out by clock changes of Europe/Berlin"),
        (Schedule(kind=ScheduleKind.CRON, cron="* * * * *", interval_ms=5), "interval_ms", "kind cron"),
        (Schedule(kind=ScheduleKind.MANUAL, cron="* * * * *"), "cron", "kind manual"),
        (Schedule(kind=ScheduleKind.ONCE, at_ms=5, anchor_ms=7), "anchor_ms", "kind once"),
        (Schedule(kind=ScheduleKind.INTERVAL, interval_ms=5_000, at_ms=7), "at_ms", "kind interval"),
    ],
)
def test_other_fields(schedule: Schedule, field: str, allowed: str) -> None:
    found = problems(schedule)
    assert [problem.field for problem in found] == [field], found
    assert allowed in found[0].said


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(Problem("interval_ms", "5", "1000 or more")) == "interval_ms '5'; allowed: 1000 or more"
    assert (
        str(Problem("at_ms", "0", "1 to 9", "a time is required")) == "at_ms '0': a time is required; allowed: 1 to 9"
    )
    assert str(Problem("cron", "0 0 30 2 *", "", "it never fires")) == "cron '0 0 30 2 *': it never fires"


@pytest.mark.parametrize(
    "schedule",
    [
        cron("0 0 * * *", start_ms=ms("1990-01-01"), end_ms=ms("1990-01-02")),
        once(ms("1999-01-01")),
        every(1_000, end_ms=5_000),
    ],
)
def test_a_window_that_is_over_is_no_mistake(schedule: Schedule) -> None:
    assert problems(schedule) == []


def test_new_zone_data_makes_no_job_unreadable() -> None:
    """What never fires is refused when it is applied, but can be compiled: it may be stored already."""
    never = cron("30 2 * 3 7L", "Europe/Berlin", DstPolicy.TWICE)
    assert problems(never)
    assert compile_schedule(never).next_after(ms("2026-01-01")) is None


# Texts near the grammar: where something is taken for what it is not, and where a reader could crash.
near_fields = st.one_of(
    st.text("0123456789*/,-LW#?SUNMOJAE", max_size=8),
    st.sampled_from(("*", "1", "L", "LW", "5L", "1#2", "MON-FRI", "JAN", "*/5", "1-5/2", "0", "31", "2")),
)


@given(st.one_of(st.lists(near_fields, min_size=5, max_size=5).map(" ".join), st.text(max_size=30)))
@example("² * * * *")
@example("*/² * * * *")
@example("* * LW/2 * *")
def test_what_is_taken_is_what_cronsim_takes(expression: str) -> None:
    """Refusals are ScheduleErrors with a field; nothing is taken that cronsim refuses."""
    try:
        compile_schedule(cron(expression))
    except ScheduleError as error:
        assert all(problem.field.startswith("cron") and problem.said for problem in error.problems)
        fields = crontab.fields_of(expression)
        first = crontab.errors(expression)[0]
        if first.allowed.startswith(crontab.ALLOWED) and not first.why:
            with pytest.raises(CronSimError):
                CronSim(" ".join(fields), crontab.ANY_DAY)
    else:
        CronSim(" ".join(crontab.fields_of(expression)), crontab.ANY_DAY)
        problems(cron(expression))
