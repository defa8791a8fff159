"""Cron expressions as patterns over the local calendar: no zone, no clock.

cronsim reads the expression and says which dates it names; what it found is kept as a table of the minutes of a day
and, for each of the 14 kinds of years there are, a table of days. So a question costs a few look-ups, however far the
answer is, and "never" is an answer, not a search.

cronsim's own stepping is what the tests compare with, but not what is used: from within the second passing of a fold it
goes back to the first, it steps over due times where clocks change by or at a part of an hour, it takes a midnight that
does not exist for one that does, it moves times out of a gap of a whole day, and it gives up after 50 years.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from datetime import date, datetime
from functools import cached_property, lru_cache

from cronsim import CronSim, CronSimError

from sidecar.core.specification import TEXT_BYTES_MAX

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
DAY_MINUTES = 1440
MINUTE_MS = 60_000
DAY_MS = DAY_MINUTES * MINUTE_MS
EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
YEAR_MIN, YEAR_MAX = 1968, 9999
ANY_DAY = datetime(2024, 1, 1)

FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")
SIZES = (60, 24, 31, 12, 7)
ALLOWED = (
    "0-59",
    "0-23",
    "1-31, L (last day of the month) or LW (its last day from Monday to Friday)",
    "1-12 or JAN-DEC",
    "0-7 or SUN-SAT (0 and 7 are Sunday), 5L (last Friday of the month) or 5#2 (its second Friday)",
)
FORMS = "also *, lists (1,2), ranges (1-5) and steps (*/5)"


NAMES = "five fields: minute hour day-of-month month day-of-week"


class CronError(ValueError):
    """``field`` of the expression has a ``value`` that is not among what is ``allowed``; ``why`` where that does not
    show it. One of the two may be empty."""

    def __init__(self, field: str, value: str, allowed: str, why: str = "") -> None:
        super().__init__(f"{field} {value!r}: {'; '.join(filter(None, (why, allowed)))}")
        self.field, self.value, self.allowed, self.why = field, value, allowed, why


class Days:
    """The dates that the three day fields name."""

    def __init__(self, dom: str, month: str, dow: str) -> None:
        self._sim = CronSim(f"0 0 {dom} {month} {dow}", ANY_DAY)
        self._tables: dict[tuple[bool, int], tuple[int, ...]] = {}

    @cached_property
    def empty(self) -> bool:
        """Whether there is no such date in any year. 1996 to 2023 hold every kind of year."""
        return not any(self.of_year(year) for year in range(1996, 2024))

    def of_year(self, year: int) -> tuple[int, ...]:
        """Days of the year (0 = 1 January), sorted."""
        first = date(year, 1, 1)
        length = date(year, 12, 31).toordinal() - first.toordinal() + 1
        kind = (length == 366, first.weekday())
        table = self._tables.get(kind)
        if table is None:
            dates = (date.fromordinal(first.toordinal() + day) for day in range(length))
            matches = (
                d.timetuple().tm_yday - 1 for d in dates if d.month in self._sim.months and self._sim.match_day(d)
            )
            table = self._tables[kind] = tuple(matches)
        return table

    def next(self, day: int) -> int | None:
        """First matching day >= day, in days since 1970; None behind the last year of the calendar."""
        if self.empty:
            return None
        year, start, yday = split_day(day)
        while year <= YEAR_MAX:
            table = self.of_year(year)
            index = bisect_left(table, yday)
            if index < len(table):
                return start + table[index]
            year, yday = year + 1, 0
            start = first_day(year) if year <= YEAR_MAX else start
        return None

    def previous(self, day: int) -> int | None:
        """Last matching day <= day; None before 1968."""
        if self.empty:
            return None
        year, start, yday = split_day(day)
        while year >= YEAR_MIN:
            table = self.of_year(year)
            index = bisect_left(table, yday + 1)
            if index:
                return start + table[index - 1]
            year, yday = year - 1, 366
            start = first_day(year)
        return None

    def count(self, day: int, end: int) -> int:
        """How many matching days there are from day up to, not with, end."""
        (year, _, yday), (last_year, _, last_yday) = split_day(day), split_day(end)
        whole = sum(len(self.of_year(between)) for between in range(year, last_year))
        return whole + bisect_left(self.of_year(last_year), last_yday) - bisect_left(self.of_year(year), yday)


class Pattern:
    """The local times that an expression names. Get it from ``pattern()``."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        minutes, hours, dom, month, dow = fields
        self.fields = fields
        self.days = _days(dom, month, dow)
        self.minutes = _minutes(minutes, hours)
        # Debian's cron tells the two sorts of jobs by the first character only: 0-23 is no wildcard.
        self.fixed_time = not minutes.startswith("*") and not hours.startswith("*")
        self.day_fields_or = not dom.startswith("*") and not dow.startswith("*")

    def next(self, from_ms: int) -> int | None:
        """First local time >= from_ms; None behind the last year of the calendar."""
        day, minute = divmod(-(-from_ms // MINUTE_MS), DAY_MINUTES)
        found = self.days.next(day)
        if found == day:
            index = bisect_left(self.minutes, minute)
            if index < len(self.minutes):
                return day * DAY_MS + self.minutes[index] * MINUTE_MS
            found = self.days.next(day + 1)
        return None if found is None else found * DAY_MS + self.minutes[0] * MINUTE_MS

    def previous(self, until_ms: int) -> int | None:
        """Last local time < until_ms; None before 1968."""
        day, minute = divmod(-(-until_ms // MINUTE_MS), DAY_MINUTES)
        found = self.days.previous(day)
        if found == day:
            index = bisect_left(self.minutes, minute)
            if index:
                return day * DAY_MS + self.minutes[index - 1] * MINUTE_MS
            found = self.days.previous(day - 1)
        return None if found is None else found * DAY_MS + self.minutes[-1] * MINUTE_MS

    def count(self, from_ms: int, until_ms: int) -> int:
        """How many there are with from_ms <= local time < until_ms."""
        if until_ms <= from_ms:
            return 0
        day, minute = divmod(-(-from_ms // MINUTE_MS), DAY_MINUTES)
        last_day, last_minute = divmod(-(-until_ms // MINUTE_MS), DAY_MINUTES)
        whole = self.days.count(day, last_day) * len(self.minutes)
        return whole + self._before(last_day, last_minute) - self._before(day, minute)

    def matches(self, local_ms: int) -> bool:
        return local_ms % MINUTE_MS == 0 and self.next(local_ms) == local_ms

    def _before(self, day: int, minute: int) -> int:
        return bisect_left(self.minutes, minute) if self.days.next(day) == day else 0

    def explain(self) -> str:
        return CronSim(" ".join(self.fields), ANY_DAY).explain()


@lru_cache(maxsize=4096)
def pattern(expression: str) -> Pattern:
    """Raises CronError, of which ``errors`` gives all at once."""
    wrong = errors(expression)
    if wrong:
        raise wrong[0]
    return Pattern(fields_of(expression))


def fields_of(expression: str) -> tuple[str, ...]:
    plain = ALIASES.get(expression.strip().lower(), expression)
    return tuple(plain.upper().split())


def errors(expression: str) -> list[CronError]:
    """What is wrong with an expression, whether or not it ever matches."""
    text = expression.strip()
    if not text:
        return [CronError("cron", expression, "five fields, or @hourly and the like")]
    if len(text) > TEXT_BYTES_MAX or not text.isascii():
        return [CronError("cron", text[:40], f"at most {TEXT_BYTES_MAX} ASCII characters")]
    if text.startswith("@") and text.lower() not in ALIASES:
        return [CronError("cron", text, *_about_alias(text.lower()))]
    if re.match(r"(CRON_)?TZ=", text):
        return [CronError("cron", text, "five fields", "the time zone is a field of its own (zone)")]
    fields = fields_of(text)
    if len(fields) != len(FIELDS):
        return [CronError("cron", text, NAMES, _about_count(text, len(fields)))]
    try:
        CronSim(" ".join(fields), ANY_DAY)
        readable = True
    except CronSimError:
        readable = False
    found = [error for index, field in enumerate(fields) for error in _errors_of_field(index, field, readable)]
    # If the fields are right one by one, it is that the date does not exist.
    return found if found or readable else [never(text)]


def never(expression: str) -> CronError:
    return CronError("cron", expression, "", "it never fires: no month that it names has such a day")


def _about_alias(alias: str) -> tuple[str, str]:
    """What is allowed, and why this is not."""
    known = f"one of {', '.join(ALIASES)}"
    if alias == "@reboot":
        return f"{known}, or a manual schedule and a trigger", "a cluster has no boot to run at"
    if alias.startswith("@every"):
        return f"{known}; or an interval", "an interval is no cron expression, but a schedule of its own kind"
    return known, ""


def _about_count(text: str, count: int) -> str:
    if re.match(r"every\b|\d+\s*[a-z]+$", text, re.IGNORECASE):
        return "an interval is no cron expression, but a schedule of its own kind"
    if count > len(FIELDS):
        return f"it has {count}: finer than one minute, or with a year"
    return f"it has {count} field{'s' if count > 1 else ''}"


def _errors_of_field(index: int, field: str, readable: bool) -> list[CronError]:
    found = []
    for term in field.split(","):
        why = _refused(index, term)
        if why or not (readable or _is_readable(index, term)):
            found.append(CronError(f"cron {FIELDS[index]}", term, f"{ALLOWED[index]}; {FORMS}", why))
    return found


def _is_readable(index: int, term: str) -> bool:
    fields = ["*"] * len(FIELDS)
    fields[index] = term
    try:
        CronSim(" ".join(fields), ANY_DAY)
    except CronSimError:
        return False
    return True


def _refused(index: int, term: str) -> str:
    """Why a term is refused that cronsim takes for something else, or whose mistake has a better name."""
    value, _, step = term.partition("/")
    if "?" in term:
        return "there is no ?, write *"
    if "W" in term and index == 2 and value != "LW":
        return "of W only LW is supported"
    if step.isdecimal() and int(step) > SIZES[index]:
        return f"a step over more than the {SIZES[index]} values picks the first one only; an interval may be meant"
    if step and ("L" in value and index == 2):
        return "a last day takes no step"
    if step and "-" in value and len(set(value.split("-"))) == 1:
        # cronsim takes 5-5/10 for 5/10, cron for 5.
        return "a range of one value takes no step"
    if index == 4 and re.fullmatch(r"(SUN|MON|TUE|WED|THU|FRI|SAT)L", term):
        return "the last weekday of a month is written with a number"
    return ""


@lru_cache(maxsize=4096)
def _days(dom: str, month: str, dow: str) -> Days:
    return Days(dom, month, dow)


@lru_cache(maxsize=4096)
def _minutes(minutes: str, hours: str) -> tuple[int, ...]:
    """Minutes of the day, sorted."""
    sim = CronSim(f"{minutes} {hours} * * *", ANY_DAY)
    return tuple(60 * hour + minute for hour in sorted(sim.hours) for minute in sorted(sim.minutes))


def split_day(day: int) -> tuple[int, int, int]:
    """A day since 1970 as its year, the first day of that year, and the day within the year."""
    year = date.fromordinal(day + EPOCH_ORDINAL).year
    start = first_day(year)
    return year, start, day - start


@lru_cache(maxsize=512)
def first_day(year: int) -> int:
    return date(year, 1, 1).toordinal() - EPOCH_ORDINAL
