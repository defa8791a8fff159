"""When schedules are due: tables of known values. Days with a clock change first, for each policy."""

from __future__ import annotations

import pytest

from sidecar.core.specification import WALL_MAX_MS, DstPolicy, Schedule, ScheduleKind
from sidecar.scheduling.schedules import ScheduleError, clock_change_marks, compile_schedule
from tests.scheduling.times import DAY, HOUR, MINUTE, K, N, S, V, compiled, cron, every, iso, ms, once

ALL = (V, K, N, S)

# Expression, zone, policies, from (included), the due times that follow.
TABLE: list[tuple[str, str, tuple[DstPolicy, ...], str, list[str]]] = [
    # A daily job in the gap.
    ("30 2 * * *", "Europe/Berlin", (V,), "2025-03-29T01:30",
     ["2025-03-29T01:30", "2025-03-30T01:00", "2025-03-31T00:30"]),
    ("30 2 * * *", "Europe/Berlin", (K, N), "2025-03-29T01:30", ["2025-03-29T01:30", "2025-03-31T00:30"]),
    ("30 2 * * *", "Europe/Berlin", (S,), "2025-03-29T01:30",
     ["2025-03-29T01:30", "2025-03-30T01:30", "2025-03-31T00:30"]),
    ("0 2 * * *", "US/Pacific", (V, S), "2025-03-08T10:00",
     ["2025-03-08T10:00", "2025-03-09T10:00", "2025-03-10T09:00"]),
    ("0 2 * * *", "US/Pacific", (K, N), "2025-03-08T10:00", ["2025-03-08T10:00", "2025-03-10T09:00"]),
    # A whole list in the gap is one run at its end.
    ("0,15,30 2 * * *", "Europe/Berlin", (V,), "2026-03-29T00:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
    ("0,30 2,3 * * *", "Europe/Berlin", (S,), "2026-03-29T00:00",
     ["2026-03-29T01:00", "2026-03-29T01:30", "2026-03-30T00:00"]),
    # Elsewhere on that day.
    ("20 15 * * *", "America/New_York", ALL, "2025-03-07T20:20",
     ["2025-03-07T20:20", "2025-03-08T20:20", "2025-03-09T19:20", "2025-03-10T19:20"]),
    # Every hour through the fold.
    ("30 * * * *", "Europe/Helsinki", (V, K), "2026-10-24T23:30",
     ["2026-10-24T23:30", "2026-10-25T00:30", "2026-10-25T01:30", "2026-10-25T02:30", "2026-10-25T03:30"]),
    ("30 * * * *", "Europe/Helsinki", (N, S), "2026-10-24T23:30",
     ["2026-10-24T23:30", "2026-10-25T00:30", "2026-10-25T02:30", "2026-10-25T03:30"]),
    # The same hours, but to Debian's cron no wildcard.
    ("30 0-23 * * *", "Europe/Helsinki", (V,), "2026-10-24T23:30",
     ["2026-10-24T23:30", "2026-10-25T00:30", "2026-10-25T02:30"]),
    ("*/20 2 * * *", "Europe/Berlin", (V,), "2026-03-29T00:00", ["2026-03-30T00:00"]),
    # Weekdays, across a day of 23 hours.
    ("0 0 * * 0-4", "America/Chicago", ALL, "2026-03-06T06:02",
     ["2026-03-08T06:00", "2026-03-09T05:00", "2026-03-10T05:00"]),
    ("0 0 * * SUN-THU", "America/Chicago", ALL, "2026-03-06T06:02",
     ["2026-03-08T06:00", "2026-03-09T05:00", "2026-03-10T05:00"]),
    ("0 0 * * 7,1,2,3,4", "America/Chicago", ALL, "2026-03-06T06:02",
     ["2026-03-08T06:00", "2026-03-09T05:00", "2026-03-10T05:00"]),
    # A day without midnight, date restricted.
    ("0 1 4 11 *", "America/Sao_Paulo", ALL, "2018-11-03T02:00", ["2018-11-04T03:00"]),
    ("0 1 6 9 *", "America/Santiago", ALL, "2026-09-01T00:00", ["2026-09-06T04:00"]),
    # Half an hour, at Lord Howe.
    ("15 2 * * *", "Australia/Lord_Howe", (V,), "2025-10-03T15:45",
     ["2025-10-03T15:45", "2025-10-04T15:30", "2025-10-05T15:15"]),
    ("15 2 * * *", "Australia/Lord_Howe", (K, N), "2025-10-03T15:45", ["2025-10-03T15:45", "2025-10-05T15:15"]),
    ("15 2 * * *", "Australia/Lord_Howe", (S,), "2025-10-03T15:45",
     ["2025-10-03T15:45", "2025-10-04T15:45", "2025-10-05T15:15"]),
    ("45 1 * * *", "Australia/Lord_Howe", (V, N, S), "2026-04-03T14:45",
     ["2026-04-03T14:45", "2026-04-04T14:45", "2026-04-05T15:15"]),
    ("45 1 * * *", "Australia/Lord_Howe", (K,), "2026-04-03T14:45",
     ["2026-04-03T14:45", "2026-04-04T14:45", "2026-04-04T15:15", "2026-04-05T15:15"]),
    # At a quarter to three, at Chatham.
    ("55 3 * * *", "Pacific/Chatham", ALL, "2026-09-25T15:10",
     ["2026-09-25T15:10", "2026-09-26T14:10", "2026-09-27T14:10"]),
    ("55 3 * * *", "Pacific/Chatham", ALL, "2026-04-03T14:10",
     ["2026-04-03T14:10", "2026-04-04T15:10", "2026-04-05T15:10"]),
    ("0 3 * * *", "Pacific/Chatham", (V,), "2026-09-26T00:00", ["2026-09-26T14:00", "2026-09-27T13:15"]),
    ("0 3 * * *", "Pacific/Chatham", (K, N), "2026-09-26T00:00", ["2026-09-27T13:15"]),
    ("0 3 * * *", "Pacific/Chatham", (S,), "2026-09-26T00:00", ["2026-09-26T14:15", "2026-09-27T13:15"]),
    # Two hours, at Troll.
    ("30 2 * * *", "Antarctica/Troll", (V,), "2026-03-28T02:30",
     ["2026-03-28T02:30", "2026-03-29T01:00", "2026-03-30T00:30"]),
    ("30 2 * * *", "Antarctica/Troll", (K, N), "2026-03-28T02:30", ["2026-03-28T02:30", "2026-03-30T00:30"]),
    ("30 2 * * *", "Antarctica/Troll", (S,), "2026-03-28T02:30",
     ["2026-03-28T02:30", "2026-03-29T02:30", "2026-03-30T00:30"]),
    ("0 22 * * *", "Antarctica/Troll", ALL, "2026-10-24T20:00", ["2026-10-24T20:00", "2026-10-25T22:00"]),
    ("30 2 * * *", "Antarctica/Troll", (V, N, S), "2026-10-25T00:00", ["2026-10-25T00:30", "2026-10-26T02:30"]),
    ("30 2 * * *", "Antarctica/Troll", (K,), "2026-10-25T00:00",
     ["2026-10-25T00:30", "2026-10-25T02:30", "2026-10-26T02:30"]),
    # A day that a zone left out is a correction: nothing is moved.
    ("0 12 30 12 *", "Pacific/Apia", ALL, "2010-12-31T00:00", ["2012-12-29T22:00"]),
    # So is one of three hours, at Casey, forward and back.
    ("30 1 * * *", "Antarctica/Casey", ALL, "2020-10-02T17:30", ["2020-10-02T17:30", "2020-10-04T14:30"]),
    ("30 1 * * *", "Antarctica/Casey", (V, K), "2023-03-07T14:30",
     ["2023-03-07T14:30", "2023-03-08T14:30", "2023-03-08T17:30", "2023-03-09T17:30"]),
    ("30 1 * * *", "Antarctica/Casey", (N, S), "2023-03-07T14:30",
     ["2023-03-07T14:30", "2023-03-08T14:30", "2023-03-09T17:30"]),
    # Sparse dates.
    ("0 0 29 2 *", "UTC", ALL, "2096-03-01T00:00", ["2104-02-29T00:00"]),
    ("0 0 29 2 *", "America/New_York", ALL, "2096-03-01T00:00", ["2104-02-29T05:00", "2108-02-29T05:00"]),
    ("0 0 * 2 MON#5", "UTC", ALL, "2072-03-01T00:00", ["2112-02-29T00:00", "2140-02-29T00:00"]),
    ("0 0 31 2 1-5", "UTC", ALL, "2026-01-01T00:00",
     ["2026-02-02T00:00", "2026-02-03T00:00", "2026-02-04T00:00", "2026-02-05T00:00", "2026-02-06T00:00",
      "2026-02-09T00:00"]),
    # Both day fields: OR, but AND if one of them starts with a star.
    ("0 0 13 * 5", "UTC", ALL, "2026-01-01T00:00",
     ["2026-01-02T00:00", "2026-01-09T00:00", "2026-01-13T00:00", "2026-01-16T00:00", "2026-01-23T00:00",
      "2026-01-30T00:00", "2026-02-06T00:00"]),
    ("0 0 1 * 0", "UTC", ALL, "2026-06-16T00:01",
     ["2026-06-21T00:00", "2026-06-28T00:00", "2026-07-01T00:00", "2026-07-05T00:00"]),
    ("0 0 */14 * FRI", "UTC", ALL, "2026-05-01T00:00", ["2026-05-01T00:00", "2026-05-15T00:00", "2026-05-29T00:00"]),
    # The last ones and the nth.
    ("15 2 L * *", "UTC", ALL, "2028-01-31T02:15", ["2028-01-31T02:15", "2028-02-29T02:15", "2028-03-31T02:15"]),
    ("0 9 LW * *", "UTC", ALL, "2026-01-01T00:00", ["2026-01-30T09:00", "2026-02-27T09:00", "2026-03-31T09:00"]),
    ("0 9 * * 5L", "UTC", ALL, "2026-01-01T00:00", ["2026-01-30T09:00", "2026-02-27T09:00", "2026-03-27T09:00"]),
    ("0 9 * JAN,MAR TUE#2", "UTC", ALL, "2026-01-01T00:00", ["2026-01-13T09:00", "2026-03-10T09:00"]),
    # Rules of a zone that changed: Mexico has no summer time since 2023.
    ("0 9 * * *", "America/Mexico_City", ALL, "2023-06-01T00:00", ["2023-06-01T15:00"]),
    ("@hourly", "", ALL, "2026-01-01T00:01", ["2026-01-01T01:00"]),
    ("@daily", "", ALL, "2026-01-01T00:01", ["2026-01-02T00:00"]),
    ("@MIDNIGHT", "", ALL, "2026-01-01T00:01", ["2026-01-02T00:00"]),
    ("@weekly", "", ALL, "2026-01-01T00:01", ["2026-01-04T00:00"]),
    ("@monthly", "", ALL, "2026-01-01T00:01", ["2026-02-01T00:00"]),
    ("@yearly", "", ALL, "2026-01-01T00:01", ["2027-01-01T00:00"]),
    ("@annually", "", ALL, "2026-01-01T00:01", ["2027-01-01T00:00"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "zone", "policy", "start", "expected"),
    [(e, z, p, start, due) for e, z, policies, start, due in TABLE for p in policies],
)
def test_due_times(expression: str, zone: str, policy: DstPolicy, start: str, expected: list[str]) -> None:
    schedule = compiled(expression, zone, policy)
    before, end = ms(start) - 1, ms(expected[-1])
    assert [iso(at) for at in schedule.due(before, end, 100)] == expected
    assert [iso(at) for at in schedule.latest(before, end, 100)] == expected
    assert schedule.count(before, end) == len(expected)
    found: list[str] = []
    at = before
    while len(found) < len(expected):
        following = schedule.next_after(at)
        assert following is not None
        found.append(iso(at := following))
    assert found == expected
    assert all(schedule.is_due(ms(text)) for text in expected)
    assert schedule.previous_at_or_before(end) == end


def test_policies_differ_only_where_the_table_says_so() -> None:
    """The table names each policy for each of its cases, or it would prove less than it seems to."""
    for expression, zone, _, start, _ in TABLE:
        if zone not in ("", "UTC") and "*/20" not in expression and "0-23" not in expression and "," not in expression:
            covered = {p for e, z, policies, s, _ in TABLE if (e, z, s) == (expression, zone, start) for p in policies}
            assert covered == set(ALL), (expression, zone, start)


def test_a_count_of_a_year_of_minutes_follows_elapsed_time() -> None:
    year = (ms("2026-01-01") - 1, ms("2027-01-01") - 1)
    for policy, minutes in ((V, 525_600), (K, 525_600), (N, 525_600 - 60), (S, 525_600 - 60)):
        assert compiled("* * * * *", "Europe/Berlin", policy).count(*year) == minutes
    assert compiled("0 3 * * *", "Europe/Berlin").count(*year) == 365


def test_the_window_is_closed_at_its_start_and_open_at_its_end() -> None:
    schedule = compiled("0 * * * *", start_ms=ms("2026-01-01T10:00"), end_ms=ms("2026-01-01T13:00"))
    hours = ["2026-01-01T10:00", "2026-01-01T11:00", "2026-01-01T12:00"]
    assert [iso(at) for at in schedule.due(0, WALL_MAX_MS, 9)] == hours
    assert [iso(at) for at in schedule.latest(0, WALL_MAX_MS, 2)] == hours[1:]
    assert schedule.count(0, WALL_MAX_MS) == 3
    assert schedule.next_after(ms(hours[-1])) is None
    assert schedule.previous_at_or_before(WALL_MAX_MS) == ms(hours[-1])
    assert schedule.previous_at_or_before(ms(hours[0]) - 1) is None
    assert not schedule.is_due(ms("2026-01-01T13:00"))


def test_an_interval_counts_from_its_anchor_in_both_directions() -> None:
    schedule = compile_schedule(every(90 * MINUTE, ms("2026-01-01T00:10")))
    expected = ["2025-12-31T21:10", "2025-12-31T22:40", "2026-01-01T00:10", "2026-01-01T01:40"]
    assert [iso(at) for at in schedule.due(ms("2025-12-31T20:00"), ms("2026-01-01T03:00"), 9)] == expected
    assert schedule.due(ms("2026-01-01T00:10"), ms("2026-01-01T01:40"), 9) == [ms("2026-01-01T01:40")]
    assert schedule.count(0, 10**15) == (WALL_MAX_MS - 10 * MINUTE) // (90 * MINUTE) + 1
    assert compile_schedule(every(1_500, 700)).due(0, 4_000, 9) == [700, 2_200, 3_700]


def test_a_one_shot_is_due_once_however_far_it_is() -> None:
    far = ms("9000-01-01")
    schedule = compile_schedule(once(far))
    assert schedule.next_after(0) == schedule.previous_at_or_before(WALL_MAX_MS) == far
    assert schedule.next_after(far) is None
    assert schedule.count(far - 1, far) == 1
    assert schedule.count(far, WALL_MAX_MS) == 0


def test_a_manual_one_is_never_due() -> None:
    schedule = compile_schedule(Schedule(kind=ScheduleKind.MANUAL))
    assert schedule.next_after(0) is schedule.previous_at_or_before(WALL_MAX_MS) is None
    assert schedule.count(0, WALL_MAX_MS) == 0
    assert schedule.due(0, WALL_MAX_MS, 5) == schedule.latest(0, WALL_MAX_MS, 5) == []


def test_time_ends() -> None:
    for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"):
        schedule = compiled("* * * * *", zone)
        last = schedule.previous_at_or_before(WALL_MAX_MS)
        assert last == WALL_MAX_MS // MINUTE * MINUTE
        assert schedule.next_after(last) is None
        assert schedule.next_after(WALL_MAX_MS * 5) is None
        assert schedule.next_after(-DAY) == 0
        assert schedule.previous_at_or_before(-1) is None


def test_times_that_never_exist_are_given_up() -> None:
    """The last Sunday of March at 02:30 is in the gap each year."""
    never = compiled("30 2 * 3 7L", "Europe/Berlin", N)
    assert never.next_after(ms("2026-01-01")) is None
    assert never.count(ms("2026-01-01"), ms("2126-01-01")) == 0
    assert compiled("30 2 * 3 7L", "Europe/Berlin", V).next_after(ms("2026-01-01")) == ms("2026-03-29T01:00")


def test_a_date_that_does_not_exist_is_never_due_and_no_loop() -> None:
    # cronsim takes it: the 1st or the 21st, if it is also the last Monday of the month.
    schedule = compiled("0 0 */20 * 1L", "Europe/Berlin")
    assert schedule.next_after(0) is schedule.previous_at_or_before(WALL_MAX_MS) is None
    assert schedule.count(0, ms("2100-01-01")) == 0


@pytest.mark.parametrize(
    ("policy", "day", "expected"),
    [
        (V, "2026-03-29", ["02:30 is in the gap, moved to 03:00"]),
        (S, "2026-03-29", ["02:30 is in the gap, moved to 03:30"]),
        (V, "2026-10-25", ["first of two 02:30"]),
        (N, "2026-10-25", ["first of two 02:30"]),
        (K, "2026-10-25", ["first of two 02:30", "second of two 02:30"]),
        (V, "2026-03-28", [""]),
        (V, "2026-10-26", [""]),
    ],
)
def test_marks(policy: DstPolicy, day: str, expected: list[str]) -> None:
    schedule = compiled("30 2 * * *", "Europe/Berlin", policy)
    assert [clock_change_marks(schedule, at) for at in schedule.due(ms(day) - 1, ms(day) + DAY - 1, 9)] == expected


def test_no_mark_without_a_change() -> None:
    change = ms("2026-03-29T01:00")
    assert clock_change_marks(compiled("0 3 * * *", "Europe/Berlin"), change) == ""
    assert clock_change_marks(compiled("0 * * * *", "Europe/Berlin"), change) == ""
    assert clock_change_marks(compile_schedule(every(HOUR)), change) == ""
    assert clock_change_marks(compiled("0 2 * * *", "UTC"), change) == ""


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (cron("0 0 13 * 5"), ["Debian", "OR its day of the week", "zone UTC (tzdata ", "vixie"]),
        (cron("0 0 */2 * 5"), ["AND its day of the week"]),
        (cron("30 2 * * *", "Europe/Berlin"), ["At 02:30 every day", "Europe/Berlin", "due once at its end"]),
        (cron("30 * * * *", "Europe/Berlin"), ["elapsed time"]),
        (cron("30 * * * *", "Europe/Berlin", S), ["later by its length"]),
        (cron("30 * * * *", "Europe/Berlin", N), ["skip"]),
        (cron("30 * * * *", "Europe/Berlin", K), ["both count"]),
        (every(90 * MINUTE, 0, end_ms=DAY), ["every 1 h 30 min", "counted from 1970-01-01 00:00:00", "1970-01-02"]),
        (once(DAY, start_ms=1_000), ["once, at 1970-01-02 00:00:00", "from 1970-01-01 00:00:01"]),
        (Schedule(kind=ScheduleKind.MANUAL), ["triggered"]),
    ],
)
def test_descriptions_name_what_is_easily_misread(schedule: Schedule, words: list[str]) -> None:
    text = compile_schedule(schedule).describe()
    assert [word for word in words if word not in text] == [], text


def test_a_description_speaks_of_a_rule_only_where_it_counts() -> None:
    assert "day of the week" not in compiled("0 0 * * 5").describe()
    assert "day of the week" not in compiled("0 0 13 * *").describe()


def test_equal_schedules_are_compiled_once() -> None:
    assert compile_schedule(cron("1 2 3 4 5")) is compile_schedule(cron("1 2 3 4 5"))


def test_what_cannot_be_compiled_says_why() -> None:
    with pytest.raises(ScheduleError, match="cron hour '24'") as caught:
        compile_schedule(cron("0 24 * * *"))
    assert [problem.field for problem in caught.value.problems] == ["cron hour"]
