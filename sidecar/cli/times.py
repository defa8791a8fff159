"""Durations and moments as people write them: ``10m``, ``1h30m``; RFC 3339, or local time together with a zone."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from sidecar.cli.failures import USAGE, CliError

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
UNIT_WORDS = {
    "sec": "s", "secs": "s", "second": "s", "seconds": "s", "min": "m", "mins": "m", "minute": "m", "minutes": "m",
    "hr": "h", "hrs": "h", "hour": "h", "hours": "h", "day": "d", "days": "d",
}  # fmt: skip
DAY_MS = UNITS_MS["d"]
# The far end of what the API knows, and so of every duration.
MS_MAX = 253_370_764_799_999
DURATION_FORM = "a number with its unit: ms, s, m, h or d, as in 90s, 10m, 1h30m or 1d"
MOMENT_FORM = "RFC 3339, as in 2026-03-29T09:00:00+02:00 or 2026-03-29T07:00:00Z"

_DURATION = re.compile(r"(?:\d{1,15}(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+)(ms|s|m|h|d)")
_MOMENT = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)(?:[Tt ](?P<time>\d\d:\d\d(?::\d\d)?)(?P<fraction>\.\d{1,9})?)?"
    r"\s*(?P<offset>[Zz]|[+-]\d\d:\d\d)?"
)
_CLOCK = re.compile(r"(?:(today|yesterday|tomorrow)\s+)?(\d{1,2}):(\d\d)(?::(\d\d))?")
EPOCH = datetime(1970, 1, 1)


class LeftOutError(ValueError):
    """A local time that a clock change leaves out. What is due in its place is so from ``from_ms`` to ``until_ms``."""

    def __init__(self, text: str, from_ms: int, until_ms: int) -> None:
        super().__init__(text)
        self.from_ms, self.until_ms = from_ms, until_ms


def parse_duration(text: str) -> int:
    """Milliseconds. Raises ValueError that says what is allowed."""
    if not is_duration(text):
        meant = _meant(text)
        raise ValueError(f"{text!r} is not {DURATION_FORM}" + (f"; did you mean {meant}?" if meant else ""))
    total = sum(int(amount) * UNITS_MS[unit] for amount, unit in _PART.findall(text))
    if total > MS_MAX:
        raise ValueError(f"{text!r} is longer than time lasts here")
    return total


def is_duration(text: str) -> bool:
    return _DURATION.fullmatch(text) is not None


def _meant(text: str) -> str:
    """``5 min`` is 5m; nothing for what is no number with a unit."""
    short = re.sub(r"[a-z]+", lambda found: UNIT_WORDS.get(found[0], found[0]), "".join(text.lower().split()))
    return short if is_duration(short) else ""


def write_duration(ms: int) -> str:
    """The shortest text that ``parse_duration`` reads as this many milliseconds, in one unit."""
    unit = next(unit for unit in reversed(UNITS_MS) if ms % UNITS_MS[unit] == 0)
    return f"{ms // UNITS_MS[unit]}{unit}" if ms else "0s"


def option_duration(text: str, option: str) -> int:
    """As ``parse_duration``, for the value of an option."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise CliError(f"{option}: {error}", reason="USAGE", status=USAGE) from error


def parse_moment(text: str, zone: str | None) -> int:
    """UTC wall time in milliseconds. A time without an offset is one of ``zone``; None: it must have an offset.

    Raises ValueError that says what is allowed: also for local times that a clock change leaves out or repeats.
    """
    found = _MOMENT.fullmatch(text.strip())
    if found is None or (found["time"] is None and found["offset"]):
        raise ValueError(f"{text!r} is not a time; write {MOMENT_FORM}")
    clock = found["time"] or "00:00"
    try:
        naive = datetime.fromisoformat(f"{found['day']}T{clock}")
    except ValueError as error:
        raise ValueError(f"{text!r} is not a time: {error}") from error
    millis = int((found["fraction"] or ".0")[1:4].ljust(3, "0"))
    local_ms = (naive - EPOCH) // timedelta(milliseconds=1) + millis
    if found["offset"] is not None:
        return _within(local_ms - _offset_ms(found["offset"]), text)
    if zone is None:
        raise ValueError(f"{text!r} does not say its offset; write {MOMENT_FORM}")
    return _within(_of_zone(local_ms, zone, text), text)


def _within(ms: int, text: str) -> int:
    if not 0 < ms <= MS_MAX:
        raise ValueError(f"{text!r} is not between 1970 and 9998")
    return ms


def _offset_ms(offset: str) -> int:
    if offset in "Zz":
        return 0
    hours, minutes = int(offset[1:3]), int(offset[4:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"{offset!r} is not an offset, as in +02:00")
    return (hours * 60 + minutes) * (-60_000 if offset[0] == "-" else 60_000)


def _of_zone(local_ms: int, name: str, text: str) -> int:
    """Zone changes are days apart, so the offsets a day before and a day after are all there can be."""
    from sidecar.scheduling.zones import zone

    found = zone(name)
    old, new = found.offset_ms(local_ms - DAY_MS), found.offset_ms(local_ms + DAY_MS)
    fitting = sorted(local_ms - offset for offset in {old, new} if found.offset_ms(local_ms - offset) == offset)
    if not fitting:
        said = f"{text!r} does not exist in {name}: the clocks are put forward over it"
        raise LeftOutError(said, local_ms - new, local_ms - old)
    if len(fitting) > 1:
        both = " or ".join(rfc3339(each, name) for each in fitting)
        raise ValueError(f"{text!r} comes twice in {name}: say which one, {both}")
    return fitting[0]


def parse_when(text: str, zone: str, now_ms: int) -> int:
    """A moment as somebody on call says it: RFC 3339 or local time of ``zone``; ``09:00`` (of today there),
    ``yesterday 09:00``, ``now``; or milliseconds since 1970. Raises ValueError that says what is allowed."""
    text = " ".join(text.split())
    if text.lower() == "now":
        return now_ms
    if text.isascii() and text.isdigit() and len(text) > 8:
        return _within(int(text), text)
    clock = _CLOCK.fullmatch(text.lower())
    if clock is None:
        return parse_moment(text, zone)
    word, hour, minute, second = clock.groups()
    days = {"yesterday": -1, "tomorrow": 1}.get(word, 0)
    day = local_day(now_ms, zone) + timedelta(days=days)
    return parse_moment(f"{day:%Y-%m-%d}T{int(hour):02}:{minute}:{second or '00'}", zone)


def local_day(ms: int, name: str) -> datetime:
    """The day that ``ms`` is in, where the zone's clocks are; a datetime without a zone."""
    from sidecar.scheduling.zones import zone

    return EPOCH + timedelta(milliseconds=ms + zone(name).offset_ms(ms))


def rfc3339(ms: int, zone_name: str = "UTC") -> str:
    """As ``parse_moment`` reads it; milliseconds only where there are any."""
    from sidecar.scheduling.zones import zone

    offset = zone(zone_name).offset_ms(ms) if zone_name != "UTC" else 0
    moment = EPOCH + timedelta(milliseconds=ms + offset)
    fraction = f".{ms % 1_000:03}" if ms % 1_000 else ""
    minutes = abs(offset) // 60_000
    ending = f"{'-' if offset < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}" if offset else "Z"
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}{ending}"


def now_ms() -> int:
    return round(datetime.now(UTC).timestamp() * 1_000)


For = Annotated[
    str,
    typer.Option("--for", metavar="DURATION", help="It ends by itself after this: 30m, 2h, 1d.", show_default="never"),
]
