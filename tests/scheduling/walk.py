"""What is due, found the slow way: each local time that matches, one by one, mapped to UTC by the policy.

Nothing of the scheduling package is used: the expressions are made here together with what they mean, and zones are
read from the tables by zoneinfo. Works on changes of less than three hours.
"""

from __future__ import annotations

import calendar
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import cache
from importlib import resources
from typing import NamedTuple
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from sidecar.core.specification import DstPolicy

MINUTE = timedelta(minutes=1)
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


class Expression(NamedTuple):
    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    fits_day: Callable[[date], bool]

    def times_of_day(self, day: date) -> list[datetime]:
        """Local times that match."""
        if not self.fits_day(day):
            return []
        return [datetime(day.year, day.month, day.day, hour, minute) for hour in self.hours for minute in self.minutes]

    @property
    def wildcard(self) -> bool:
        return any(field.startswith("*") for field in self.text.split()[:2])


@st.composite
def terms(draw: st.DrawFn, low: int, high: int, names: tuple[str, ...]) -> tuple[str, frozenset[int]]:
    """One term of a field, and the numbers that it stands for."""

    named = bool(names) and draw(st.booleans())

    def word(value: int) -> str:
        return names[value - low] if named else str(value)

    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    step = draw(st.integers(1, high - low))
    kind = draw(st.sampled_from(("one", "one", "range", "from", "steps", "all steps")))
    if kind == "one":
        return word(first), frozenset({first})
    if kind == "range":
        return f"{word(first)}-{word(last)}", frozenset(range(first, last + 1))
    if kind == "from":
        return f"{word(first)}/{step}", frozenset(range(first, high + 1, step))
    if kind == "steps" and first < last:
        return f"{word(first)}-{word(last)}/{step}", frozenset(range(first, last + 1, step))
    return f"*/{step}", frozenset(range(low, high + 1, step))


@st.composite
def numbers(draw: st.DrawFn, low: int, high: int, names: tuple[str, ...] = ()) -> tuple[str, frozenset[int]]:
    if draw(st.integers(0, 3)) == 0:
        return "*", frozenset(range(low, high + 1))
    drawn = draw(st.lists(terms(low, high, names), min_size=1, max_size=3))
    return ",".join(text for text, _ in drawn), frozenset().union(*(values for _, values in drawn))


def length_of_month(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def is_last_working_day(day: date) -> bool:
    later = (day.replace(day=number) for number in range(day.day + 1, length_of_month(day) + 1))
    return day.isoweekday() <= 5 and not any(other.isoweekday() <= 5 for other in later)


@st.composite
def days_of_month(draw: st.DrawFn) -> tuple[str, Callable[[date], bool]]:
    special = draw(st.integers(0, 7))
    if special == 0:
        return "L", lambda day: day.day == length_of_month(day)
    if special == 1:
        return "LW", is_last_working_day
    text, values = draw(numbers(1, 31))
    return text, lambda day: day.day in values


@st.composite
def days_of_week(draw: st.DrawFn) -> tuple[str, Callable[[date], bool]]:
    special, weekday = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    if special == 0:
        return f"{weekday}L", lambda day: day.isoweekday() % 7 == weekday % 7 and day.day + 7 > length_of_month(day)
    if special == 1:
        nth = draw(st.integers(1, 5))
        name = draw(st.sampled_from((str(weekday), WEEKDAYS[weekday % 7])))
        return f"{name}#{nth}", lambda day: day.isoweekday() % 7 == weekday % 7 and (day.day - 1) // 7 + 1 == nth
    text, values = draw(numbers(0, 7, (*WEEKDAYS, "7")))
    return text, lambda day: day.isoweekday() in values or day.isoweekday() % 7 in values


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """Random expressions, among them many that match on few days or on none."""
    minute, minutes = draw(numbers(0, 59))
    hour, hours = draw(numbers(0, 23))
    # Mostly all days, or else few cases would meet a clock change.
    dom, fits_dom = draw(st.one_of(st.just(("*", every_day)), st.just(("*", every_day)), days_of_month()))
    month, months = draw(st.one_of(st.just(("*", frozenset(range(1, 13)))), numbers(1, 12, MONTHS)))
    dow, fits_dow = draw(st.one_of(st.just(("*", every_day)), st.just(("*", every_day)), days_of_week()))
    both = dom.startswith("*") or dow.startswith("*")

    def fits_day(day: date) -> bool:
        fits = (fits_dom(day), fits_dow(day))
        return day.month in months and (all(fits) if both else any(fits))

    return Expression(f"{minute} {hour} {dom} {month} {dow}", minutes, hours, fits_day)


def every_day(day: date) -> bool:
    return True


@cache
def table(zone: str) -> ZoneInfo:
    with resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=zone)


def walk(expression: Expression, zone: str, policy: DstPolicy, from_ms: int, until_ms: int) -> list[int]:
    """All due times with from_ms <= t < until_ms, in UTC milliseconds."""
    found: set[int] = set()
    day, end = (datetime.fromtimestamp(at // 1000, UTC).date() for at in (from_ms, until_ms))
    day -= timedelta(days=1)
    while day <= end + timedelta(days=1):
        for local in expression.times_of_day(day):
            found.update(utc_times(local, table(zone), policy, expression.wildcard))
        day += timedelta(days=1)
    return sorted(at for at in found if from_ms <= at < until_ms)


def utc_times(local: datetime, zone: ZoneInfo, policy: DstPolicy, wildcard: bool) -> list[int]:
    """When a local time that matches is due."""
    passings = [utc for fold in (0, 1) if shown(utc := to_utc(local, zone, fold), zone) == local]
    if passings:
        both = policy is DstPolicy.TWICE or (policy is DstPolicy.VIXIE and wildcard)
        return [milliseconds(utc) for utc in (passings if both else passings[:1])]
    if policy is DstPolicy.SHIFT:
        return [milliseconds(to_utc(local, zone, 0))]
    if policy is DstPolicy.VIXIE and not wildcard:
        return utc_times(local + MINUTE, zone, policy, wildcard)
    return []


def to_utc(local: datetime, zone: ZoneInfo, fold: int) -> datetime:
    return local.replace(tzinfo=zone, fold=fold).astimezone(UTC)


def shown(utc: datetime, zone: ZoneInfo) -> datetime:
    return utc.astimezone(zone).replace(tzinfo=None)


def milliseconds(utc: datetime) -> int:
    return int(utc.timestamp()) * 1000
