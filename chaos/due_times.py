"""What is due, found the slow way, to judge what the leader found: each minute of UTC is looked at on the local clock.

Nothing of ``sidecar.scheduling`` is used. Of cron, only what the workload writes: minute and hour as ``*``, ``*/n``,
numbers and lists of them. Zones change by less than three hours.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import NamedTuple
from zoneinfo import ZoneInfo

from sidecar.core.specification import DstPolicy, Schedule, ScheduleKind

_MINUTE_MS = 60_000
_MINUTE = timedelta(minutes=1)
_CHANGE_MAX = timedelta(hours=3)


def due_times(schedule: Schedule, after_ms: int, until_ms: int) -> list[int]:
    """All due times with after_ms < t <= until_ms, in UTC milliseconds."""
    after_ms = max(after_ms, schedule.start_ms - 1)
    if schedule.end_ms:
        until_ms = min(until_ms, schedule.end_ms - 1)
    if schedule.kind is ScheduleKind.INTERVAL:
        first_ms = after_ms + 1 + (schedule.anchor_ms - after_ms - 1) % schedule.interval_ms
        return list(range(first_ms, until_ms + 1, schedule.interval_ms))
    if schedule.kind is ScheduleKind.ONCE:
        return [schedule.at_ms] if after_ms < schedule.at_ms <= until_ms else []
    if schedule.kind is ScheduleKind.MANUAL:
        return []
    pattern, zone = _pattern(schedule.cron), _zone(schedule.zone)
    first_ms = (after_ms // _MINUTE_MS + 1) * _MINUTE_MS
    return [at_ms for at_ms in range(first_ms, until_ms + 1, _MINUTE_MS) if _is_due(pattern, zone, schedule.dst, at_ms)]


class _Pattern(NamedTuple):
    minutes: frozenset[int]
    hours: frozenset[int]
    wildcard: bool

    def fits(self, local: datetime) -> bool:
        return local.hour in self.hours and local.minute in self.minutes


@cache
def _pattern(cron: str) -> _Pattern:
    minute, hour, *days = cron.split()
    assert days == ["*", "*", "*"], f"{cron} is more than this knows"
    return _Pattern(_numbers(minute, 60), _numbers(hour, 24), minute.startswith("*") or hour.startswith("*"))


def _numbers(field: str, end: int) -> frozenset[int]:
    if field.startswith("*"):
        return frozenset(range(0, end, int(field[2:] or 1)))
    return frozenset(map(int, field.split(",")))


@cache
def _zone(name: str) -> ZoneInfo:
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def _is_due(pattern: _Pattern, zone: ZoneInfo, policy: DstPolicy, at_ms: int) -> bool:
    utc = datetime.fromtimestamp(at_ms // 1000, UTC)
    local = utc.astimezone(zone)
    if policy is DstPolicy.TWICE or (policy is DstPolicy.VIXIE and pattern.wildcard):
        return pattern.fits(local)
    if pattern.fits(local) and not local.fold:
        return True
    if policy is DstPolicy.VIXIE:
        return any(pattern.fits(left_out) for left_out in _left_out_before(utc, zone))
    return policy is DstPolicy.SHIFT and _fits_shifted(pattern, utc, zone)


def _left_out_before(utc: datetime, zone: ZoneInfo) -> list[datetime]:
    """The local minutes that the clock skipped in the step to this very minute."""
    naive, before = (each.astimezone(zone).replace(tzinfo=None) for each in (utc, utc - _MINUTE))
    return [before + _MINUTE * step for step in range(1, (naive - before) // _MINUTE)]


def _fits_shifted(pattern: _Pattern, utc: datetime, zone: ZoneInfo) -> bool:
    """Whether a local time of a gap that fits is due now, later by the length of the gap."""
    offset = (utc - _CHANGE_MAX).astimezone(zone).utcoffset()
    assert offset is not None
    local = (utc + offset).replace(tzinfo=None)
    exists = local.replace(tzinfo=zone).astimezone(UTC).astimezone(zone).replace(tzinfo=None) == local
    return not exists and pattern.fits(local)
