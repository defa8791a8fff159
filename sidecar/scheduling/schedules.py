"""A schedule, compiled: when it is due next, how often in a range, what its latest times were, and what it means.

Every time is UTC wall milliseconds. Ranges are open at the old end and closed at the new one, (after, until], as they
follow one another. A due time is never before 1970, never after WALL_MAX_MS, and inside the schedule's active window.

No call searches without bound: cron dates come from tables (cron.py), and dates whose times never exist in their zone
are given up after a century (changes.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import msgspec

from sidecar.core.specification import (
    INTERVAL_MAX_MS,
    INTERVAL_MIN_MS,
    WALL_MAX_MS,
    DstPolicy,
    Schedule,
    ScheduleKind,
)
from sidecar.scheduling import cron
from sidecar.scheduling.changes import Rule, ZonedPattern
from sidecar.scheduling.zones import UnknownZoneError, tzdata_version, zone

COMPILED_MAX = 16_384
# 2026-01-01. Whether a schedule without an end ever fires is asked from here on: the zone rules of 1970 are gone.
RECENT_MS = 1_767_225_600_000

DST_WORDS = {
    DstPolicy.SKIP: "skip: times in the gap of a clock change are left out, of two equal times the first counts",
    DstPolicy.TWICE: "twice: times in the gap of a clock change are left out, of two equal times both count",
    DstPolicy.SHIFT: "shift: times in the gap of a clock change are later by its length, "
    "of two equal times the first counts",
}
VIXIE_FIXED = "vixie: times in the gap of a clock change are due once at its end, of two equal times the first counts"
VIXIE_WILDCARD = (
    "vixie: with a * in minute or hour it follows elapsed time through a clock change: "
    "times in the gap are left out, of two equal times both count"
)


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with a schedule. A part of a cron expression is a field "cron minute" and so on.

    ``why`` stands where ``allowed`` does not show it; one of the two may be empty."""

    field: str
    value: str
    allowed: str
    why: str = ""

    @property
    def said(self) -> str:
        """The end of a sentence that begins with the field and its value."""
        return (f": {self.why}" if self.why else "") + (f"; allowed: {self.allowed}" if self.allowed else "")

    def __str__(self) -> str:
        return f"{self.field} {self.value!r}{self.said}"


class ScheduleError(ValueError):
    """A schedule that cannot be compiled. ``problems`` says why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class Times(Protocol):
    """The due times of a schedule without its window. Ranges are from_ms <= t < until_ms."""

    def first(self, from_ms: int, until_ms: int) -> int | None: ...
    def last(self, from_ms: int, until_ms: int) -> int | None: ...
    def count(self, from_ms: int, until_ms: int) -> int: ...


class IntervalTimes:
    """anchor + n * interval, n any integer."""

    def __init__(self, interval_ms: int, anchor_ms: int) -> None:
        self._interval, self._anchor = interval_ms, anchor_ms

    def first(self, from_ms: int, until_ms: int) -> int | None:
        found = self._ceiling(from_ms)
        return found if found < until_ms else None

    def last(self, from_ms: int, until_ms: int) -> int | None:
        found = self._ceiling(until_ms) - self._interval
        return found if found >= from_ms else None

    def count(self, from_ms: int, until_ms: int) -> int:
        return max(0, (self._ceiling(until_ms) - self._ceiling(from_ms)) // self._interval)

    def _ceiling(self, at_ms: int) -> int:
        return at_ms + (self._anchor - at_ms) % self._interval


class OnceTimes:
    """One time, or none."""

    def __init__(self, at_ms: int | None) -> None:
        self._at = at_ms

    def first(self, from_ms: int, until_ms: int) -> int | None:
        return self._at if self._at is not None and from_ms <= self._at < until_ms else None

    last = first

    def count(self, from_ms: int, until_ms: int) -> int:
        return int(self.first(from_ms, until_ms) is not None)


class Compiled:
    """Get it from ``compile_schedule()``."""

    def __init__(self, spec: Schedule, times: Times) -> None:
        self.spec = spec
        self.times = times
        self._start = max(0, spec.start_ms)
        self._end = min(spec.end_ms or WALL_MAX_MS + 1, WALL_MAX_MS + 1)

    def next_after(self, after_ms: int) -> int | None:
        """The first due time > after_ms; None when there is none any more."""
        return self.times.first(max(after_ms + 1, self._start), self._end)

    def previous_at_or_before(self, at_ms: int) -> int | None:
        """The last due time <= at_ms; None when there was none yet."""
        return self.times.last(self._start, min(at_ms + 1, self._end))

    def due(self, after_ms: int, until_ms: int, limit: int) -> list[int]:
        """The first ``limit`` due times in (after_ms, until_ms], oldest first."""
        start, end = self._clip(after_ms, until_ms)
        found: list[int] = []
        while len(found) < limit and (at := self.times.first(start, end)) is not None:
            found.append(at)
            start = at + 1
        return found

    def latest(self, after_ms: int, until_ms: int, limit: int) -> list[int]:
        """The last ``limit`` due times in (after_ms, until_ms], oldest first."""
        start, end = self._clip(after_ms, until_ms)
        found: list[int] = []
        while len(found) < limit and (at := self.times.last(start, end)) is not None:
            found.append(at)
            end = at
        return found[::-1]

    def count(self, after_ms: int, until_ms: int) -> int:
        """How many due times there are in (after_ms, until_ms], exactly; cheap for years of them."""
        start, end = self._clip(after_ms, until_ms)
        return self.times.count(start, end) if start < end else 0

    def is_due(self, at_ms: int) -> bool:
        start, end = self._clip(at_ms - 1, at_ms)
        return self.times.first(start, end) is not None

    def _clip(self, after_ms: int, until_ms: int) -> tuple[int, int]:
        return max(after_ms + 1, self._start), min(until_ms + 1, self._end)

    def describe(self) -> str:
        """What the schedule means, in plain words."""
        spec = self.spec
        if spec.kind is ScheduleKind.MANUAL:
            return "never due by itself, runs when it is triggered"
        if isinstance(self.times, ZonedPattern):
            words = [_describe_cron(spec, self.times)]
        elif spec.kind is ScheduleKind.INTERVAL:
            words = [f"every {_duration(spec.interval_ms)}, counted from {_utc(spec.anchor_ms)}"]
        else:
            words = [f"once, at {_utc(spec.at_ms)}"]
        words += [f"from {_utc(spec.start_ms)} on"] if spec.start_ms else []
        words += [f"until before {_utc(spec.end_ms)}"] if spec.end_ms else []
        return "; ".join(words)


@lru_cache(maxsize=COMPILED_MAX)
def compile_schedule(spec: Schedule) -> Compiled:
    """Raises ScheduleError if ``problems`` has anything but that the schedule never fires: new time zone data must
    not make a job unreadable."""
    wrong = _malformed(spec)
    if wrong:
        raise ScheduleError(wrong)
    if spec.kind is ScheduleKind.INTERVAL:
        return Compiled(spec, IntervalTimes(spec.interval_ms, spec.anchor_ms))
    if spec.kind is ScheduleKind.ONCE:
        return Compiled(spec, OnceTimes(spec.at_ms))
    if spec.kind is ScheduleKind.MANUAL:
        return Compiled(spec, OnceTimes(None))
    pattern = cron.pattern(spec.cron)
    return Compiled(spec, ZonedPattern(pattern, zone(spec.zone), _rule(spec.dst, pattern)))


def clock_change_marks(compiled: Compiled, due_ms: int) -> str:
    """How a clock change touches a due time ("02:30 is in the gap, moved to 03:00", "first of two 02:30"); "" for the
    others."""
    return compiled.times.mark(due_ms) if isinstance(compiled.times, ZonedPattern) else ""


def problems(spec: Schedule) -> list[Problem]:
    """All that is wrong with a schedule; empty for one that can be used."""
    found = _malformed(spec)
    if found or spec.kind is ScheduleKind.MANUAL:
        return found
    compiled = compile_schedule(spec)
    forever = isinstance(compiled.times, ZonedPattern) and not spec.end_ms
    if compiled.next_after(RECENT_MS if forever else -1) is not None:
        return []
    if isinstance(compiled.times, ZonedPattern) and compiled.times.pattern.days.empty:
        return [_of_cron(cron.never(spec.cron))]
    if spec.end_ms or spec.kind is not ScheduleKind.CRON:
        name, value = ("end_ms", spec.end_ms) if spec.end_ms else ("start_ms", spec.start_ms)
        return [Problem(name, str(value), "", "it never fires: nothing is due in the active window")]
    why = f"it never fires: all its local times are left out by clock changes of {spec.zone}"
    return [Problem("cron", spec.cron, "", why)]


def _malformed(spec: Schedule) -> list[Problem]:
    found = _of_window(spec) + _of_kind(spec)
    try:
        zone(spec.zone)
    except UnknownZoneError as error:
        found.append(Problem("zone", spec.zone, error.hint))
    return found


def _of_window(spec: Schedule) -> list[Problem]:
    allowed = f"0 (open) to {WALL_MAX_MS}, in milliseconds since 1970"
    found = [
        Problem(name, str(value), allowed)
        for name, value in (("start_ms", spec.start_ms), ("end_ms", spec.end_ms))
        if not 0 <= value <= WALL_MAX_MS
    ]
    if not found and spec.end_ms and spec.end_ms <= spec.start_ms:
        found.append(Problem("end_ms", str(spec.end_ms), f"after start_ms ({spec.start_ms})"))
    return found


def _of_kind(spec: Schedule) -> list[Problem]:
    found = [
        Problem(name, str(value), f"empty, as the schedule is of kind {spec.kind.name.lower()}")
        for name, value, kind in (
            ("cron", spec.cron, ScheduleKind.CRON),
            ("interval_ms", spec.interval_ms, ScheduleKind.INTERVAL),
            ("anchor_ms", spec.anchor_ms, ScheduleKind.INTERVAL),
            ("at_ms", spec.at_ms, ScheduleKind.ONCE),
        )
        if value and spec.kind is not kind
    ]
    if spec.kind is ScheduleKind.CRON:
        found += [_of_cron(error) for error in cron.errors(spec.cron)]
    if spec.kind is ScheduleKind.INTERVAL:
        if not INTERVAL_MIN_MS <= spec.interval_ms <= INTERVAL_MAX_MS:
            allowed = f"{INTERVAL_MIN_MS} to {INTERVAL_MAX_MS} milliseconds"
            why = "nothing is finer than one second" if spec.interval_ms < INTERVAL_MIN_MS else ""
            found.append(Problem("interval_ms", str(spec.interval_ms), allowed, why))
        if not 0 <= spec.anchor_ms <= WALL_MAX_MS:
            found.append(Problem("anchor_ms", str(spec.anchor_ms), f"0 to {WALL_MAX_MS}, in milliseconds since 1970"))
    if spec.kind is ScheduleKind.ONCE and not 0 < spec.at_ms <= WALL_MAX_MS:
        allowed = f"1 to {WALL_MAX_MS}, in milliseconds since 1970"
        found.append(Problem("at_ms", str(spec.at_ms), allowed, "a time is required"))
    return found


def _of_cron(error: cron.CronError) -> Problem:
    return Problem(error.field, error.value, error.allowed, error.why)


def _rule(policy: DstPolicy, pattern: cron.Pattern) -> Rule:
    if policy is DstPolicy.VIXIE:
        return Rule.GAP_END if pattern.fixed_time else Rule.PLAIN
    return {DstPolicy.SKIP: Rule.FIRST, DstPolicy.TWICE: Rule.PLAIN, DstPolicy.SHIFT: Rule.SHIFT}[policy]


def _describe_cron(spec: Schedule, times: ZonedPattern) -> str:
    pattern = times.pattern
    _, _, dom, _, dow = pattern.fields
    words = [f"cron {spec.cron!r} as Debian's cron reads it (five fields, and L, LW, #): {pattern.explain()}"]
    if pattern.day_fields_or:
        words.append("a day counts if its day of the month OR its day of the week fits")
    elif dom != "*" and dow != "*":
        words.append(
            "a day counts if its day of the month AND its day of the week fit, as one of the two starts with *"
        )
    words.append(f"zone {times.zone.name} (tzdata {tzdata_version()})")
    if spec.dst is DstPolicy.VIXIE:
        words.append(VIXIE_FIXED if pattern.fixed_time else VIXIE_WILDCARD)
    else:
        words.append(DST_WORDS[spec.dst])
    return "; ".join(words)


def _duration(ms: int) -> str:
    parts = []
    for name, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)):
        amount, ms = divmod(ms, size)
        parts += [f"{amount} {name}"] if amount else []
    return " ".join(parts)


def _utc(at_ms: int) -> str:
    return zone("UTC").local(at_ms)
