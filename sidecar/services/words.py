"""Durations and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def duration(ms: int) -> str:
    """ "1 h 30 min"; the two largest units that there are."""
    parts = []
    rest = max(0, ms)
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def utc(wall_ms: int) -> str:
    """ "2026-03-29 01:00:00Z"; milliseconds only where there are any."""
    moment = _EPOCH + timedelta(milliseconds=wall_ms)
    millis = wall_ms % 1_000
    return f"{moment:%Y-%m-%d %H:%M:%S}" + (f".{millis:03}" if millis else "") + "Z"
