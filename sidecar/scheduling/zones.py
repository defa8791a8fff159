"""Time zones of the pinned tzdata package, as stretches of constant offset. The host's database is never read.

Everything here counts in UTC integers. Aware datetimes of one zone compare and subtract by wall clock in Python, which
is wrong around a change; so none leaves this module but as text.
"""

from __future__ import annotations

import difflib
from datetime import datetime, timedelta
from functools import cache, lru_cache
from importlib import metadata, resources
from zoneinfo import ZoneInfo

import msgspec

DAY_MS = 86_400_000
# Changes are found by probing, in blocks of this many days, which are cached.
BLOCK_DAYS = 400
BLOCK_MS = BLOCK_DAYS * DAY_MS
# No two changes of a zone since 1970 are closer than six days; a test compares what is found with the tables.
PROBE_S = 6 * 86_400
MILLISECOND = timedelta(milliseconds=1)


class UnknownZoneError(ValueError):
    """The pinned tzdata has no zone of this name. ``hint`` says what was possibly meant."""

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"unknown time zone {name!r}: {hint}")
        self.hint = hint


class Change(msgspec.Struct, frozen=True):
    """From ``at_ms`` on local time is UTC + ``new_ms``; until then it was UTC + ``old_ms``."""

    at_ms: int
    old_ms: int
    new_ms: int


class Zone:
    """One zone. Get it from ``zone()``."""

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self._info = info

    def offset_ms(self, at_ms: int) -> int:
        """What local time is ahead of UTC."""
        return self.offset_at_second(at_ms // 1000) // MILLISECOND

    def offset_at_second(self, at_s: int) -> timedelta:
        offset = datetime.fromtimestamp(at_s, self._info).utcoffset()
        assert offset is not None
        return offset

    def local(self, at_ms: int) -> str:
        """ "2026-03-29 03:00:00 +02:00 CEST"; milliseconds only where there are any."""
        seconds, millis = divmod(at_ms, 1000)
        moment = datetime.fromtimestamp(seconds, self._info)
        fraction = f".{millis:03}" if millis else ""
        offset = moment.isoformat()[19:]
        name = moment.tzname() or ""
        # Zones without a letter code are called by their offset, which stands there already.
        return f"{moment:%Y-%m-%d %H:%M:%S}{fraction} {offset}" + (f" {name}" if name.isalpha() else "")

    def changes(self, from_ms: int, until_ms: int) -> list[Change]:
        """Changes of the offset with from_ms <= at_ms < until_ms, oldest first."""
        blocks = range(from_ms // BLOCK_MS, (until_ms - 1) // BLOCK_MS + 1)
        return [c for block in blocks for c in _changes_of_block(self, block) if from_ms <= c.at_ms < until_ms]


def zone(name: str) -> Zone:
    """The zone of an IANA name; "" is UTC.

    Raises UnknownZoneError, which names what was possibly meant."""
    return _load(name or "UTC")


@lru_cache(maxsize=1024)
def _load(name: str) -> Zone:
    # Only listed names become a path.
    if name not in names():
        near = _near(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "such as Europe/Berlin"
        raise UnknownZoneError(name, f"an IANA name of tzdata {tzdata_version()}; {hint}")
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return Zone(name, ZoneInfo.from_file(file, key=name))


def _near(name: str) -> list[str]:
    folded = {known.casefold(): known for known in sorted(names())}
    wanted = name.strip().replace(" ", "_").casefold()
    if wanted in folded:
        return [folded[wanted]]
    cities = [known for fold, known in folded.items() if fold.rsplit("/", 1)[-1] == wanted]
    return cities[:3] or [folded[near] for near in difflib.get_close_matches(wanted, folded, n=3, cutoff=0.7)]


@cache
def names() -> frozenset[str]:
    """All zones there are."""
    return frozenset(resources.files("tzdata").joinpath("zones").read_text("utf-8").split())


@cache
def tzdata_version() -> str:
    """Version of the tzdata package, "2026.6" for instance. Nodes with the same one compute the same due times."""
    return metadata.version("tzdata")


def local(due_ms: int, zone_name: str) -> str:
    """A time as the zone's clocks show it, with its offset. Raises UnknownZoneError."""
    return zone(zone_name).local(due_ms)


@lru_cache(maxsize=16_384)
def _changes_of_block(zone: Zone, block: int) -> tuple[Change, ...]:
    found = []
    # One second before the block, then the last second of each stretch.
    low = block * BLOCK_MS // 1000 - 1
    end = (block + 1) * BLOCK_MS // 1000
    before = zone.offset_at_second(low)
    while low < end - 1:
        high = min(low + PROBE_S, end - 1)
        after = zone.offset_at_second(high)
        if after != before:
            moment = _moment_of_change(zone, low, high, after)
            found.append(Change(moment * 1000, before // MILLISECOND, after // MILLISECOND))
            before = after
        low = high
    return tuple(found)


def _moment_of_change(zone: Zone, low: int, high: int, offset: timedelta) -> int:
    """The first second with this offset, which holds at second high and not at second low."""
    while high - low > 1:
        middle = (low + high) // 2
        if zone.offset_at_second(middle) == offset:
            high = middle
        else:
            low = middle
    return high
