"""What a clock change does to local times, by policy: UTC time cut into pieces with a simple rule each.

A piece says which offsets lead from UTC to local times that count in it. One offset: the ordinary case. None: the
second passing of a fold that counts once. Two: behind a gap whose times are moved by its length, both the new local
time and the one that clocks would show without the change. A piece may carry a gap: times of it are due at its start.

A change of three hours or more is no daylight saving time but a correction (Apia lost a whole day in 2011): the new
time holds at once, nothing is moved out of such a gap, and VIXIE repeats what such a fold repeats, as Debian's cron.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import lru_cache

import msgspec

from sidecar.scheduling.cron import MINUTE_MS, Pattern
from sidecar.scheduling.zones import BLOCK_MS, DAY_MS, Change, Zone

CORRECTION_MS = 3 * 3_600_000
# A date comes back after 40 years at the latest (29 February on a given weekday, across 2100). Only one whose times
# fall into the gap of a clock change each time is searched for longer.
SEARCH_MAX_MS = 100 * 366 * DAY_MS


class Rule(Enum):
    PLAIN = 1  # what the clocks show counts, whenever they show it
    FIRST = 2  # of the fold only the first passing
    GAP_END = 3  # FIRST, and times in the gap are due at its end
    SHIFT = 4  # FIRST, and times in the gap are later by its length


class Piece(msgspec.Struct, frozen=True):
    """Times with start_ms <= t < end_ms."""

    start_ms: int
    end_ms: int
    offsets: tuple[int, ...]
    # Local times (from, until) that do not exist and are due at start_ms.
    gap: tuple[int, int] | None = None

    def first(self, pattern: Pattern, from_ms: int, until_ms: int) -> int | None:
        """First due time of the piece with from_ms <= t < until_ms."""
        if from_ms <= self.start_ms < until_ms and self._gap_is_due(pattern):
            return self.start_ms
        start, end = max(self.start_ms, from_ms), min(self.end_ms, until_ms)
        times = [found - o for o in self.offsets if (found := pattern.next(start + o)) is not None and found - o < end]
        return min(times, default=None)

    def last(self, pattern: Pattern, from_ms: int, until_ms: int) -> int | None:
        """Last due time of the piece with from_ms <= t < until_ms."""
        start, end = max(self.start_ms, from_ms), min(self.end_ms, until_ms)
        times = [
            found - o for o in self.offsets if (found := pattern.previous(end + o)) is not None and found - o >= start
        ]
        if not times and from_ms <= self.start_ms < until_ms and self._gap_is_due(pattern):
            return self.start_ms
        return max(times, default=None)

    def count(self, pattern: Pattern, from_ms: int, until_ms: int) -> int:
        """How many due times the piece has with from_ms <= t < until_ms."""
        start, end = max(self.start_ms, from_ms), min(self.end_ms, until_ms)
        if len(self.offsets) > 1:
            return sum(1 for _ in self._walk(pattern, start, end))
        total = sum(pattern.count(start + o, end + o) for o in self.offsets)
        if from_ms <= self.start_ms < until_ms and self._gap_is_due(pattern):
            total += not any(pattern.matches(self.start_ms + o) for o in self.offsets)
        return total

    def _walk(self, pattern: Pattern, start: int, end: int) -> Iterator[int]:
        # Only the length of a gap, which is less than CORRECTION_MS.
        while (found := self.first(pattern, start, end)) is not None:
            yield found
            start = found + 1

    def _gap_is_due(self, pattern: Pattern) -> bool:
        if self.gap is None:
            return False
        found = pattern.next(self.gap[0])
        return found is not None and found < self.gap[1]


class ZonedPattern:
    """When a pattern of local times is due in a zone. UTC milliseconds; every range is from_ms <= t < until_ms.

    first and last look no further than SEARCH_MAX_MS."""

    def __init__(self, pattern: Pattern, zone: Zone, rule: Rule) -> None:
        self.pattern, self.zone, self.rule = pattern, zone, rule

    def first(self, from_ms: int, until_ms: int) -> int | None:
        at, until_ms = from_ms, min(until_ms, from_ms + SEARCH_MAX_MS)
        while at < until_ms:
            piece = self._piece(at)
            found = piece.first(self.pattern, at, until_ms)
            if found is not None:
                return found
            # Local and UTC time are less than a day apart, so nothing is due more than a day before the next match.
            ahead = self.pattern.next(at - DAY_MS)
            if ahead is None:
                return None
            at = max(piece.end_ms, ahead - DAY_MS)
        return None

    def last(self, from_ms: int, until_ms: int) -> int | None:
        end, from_ms = until_ms, max(from_ms, until_ms - SEARCH_MAX_MS)
        while end > from_ms:
            piece = self._piece(end - 1)
            found = piece.last(self.pattern, from_ms, end)
            if found is not None:
                return found
            behind = self.pattern.previous(end + DAY_MS)
            if behind is None:
                return None
            end = min(piece.start_ms, behind + DAY_MS)
        return None

    def count(self, from_ms: int, until_ms: int) -> int:
        total, at = 0, from_ms
        while at < until_ms:
            piece = self._piece(at)
            total += piece.count(self.pattern, at, until_ms)
            at = piece.end_ms
        return total

    def _piece(self, at_ms: int) -> Piece:
        block = _pieces(self.zone, self.rule, at_ms // BLOCK_MS)
        return next(piece for piece in block if at_ms < piece.end_ms)

    def mark(self, due_ms: int) -> str:
        """How a clock change touches this due time; "" if it does not."""
        for change in self.zone.changes(due_ms - DAY_MS, due_ms + DAY_MS):
            size = change.new_ms - change.old_ms
            if size > 0 and self.rule in (Rule.GAP_END, Rule.SHIFT) and size < CORRECTION_MS:
                origin = self._origin_in_gap(change, due_ms)
                if origin is not None:
                    return f"{_clock(origin)} is in the gap, moved to {_clock(due_ms + change.new_ms)}"
            elif size < 0 and change.at_ms <= due_ms < change.at_ms - size:
                return f"second of two {_clock(due_ms + change.new_ms)}"
            elif size < 0 and change.at_ms + size <= due_ms < change.at_ms:
                return f"first of two {_clock(due_ms + change.old_ms)}"
        return ""

    def _origin_in_gap(self, change: Change, due_ms: int) -> int | None:
        """The local time in the gap of this change that is due at due_ms."""
        if self.rule is Rule.GAP_END and due_ms == change.at_ms:
            found = self.pattern.next(change.at_ms + change.old_ms)
            return found if found is not None and found < change.at_ms + change.new_ms else None
        moved = due_ms + change.old_ms
        in_gap = change.at_ms + change.old_ms <= moved < change.at_ms + change.new_ms
        return moved if self.rule is Rule.SHIFT and in_gap and self.pattern.matches(moved) else None


def _clock(local_ms: int) -> str:
    hours, minutes = divmod(local_ms % DAY_MS // MINUTE_MS, 60)
    return f"{hours:02}:{minutes:02}"


@lru_cache(maxsize=8192)
def _pieces(zone: Zone, rule: Rule, block: int) -> tuple[Piece, ...]:
    """The pieces of one block of time, without a hole between them."""
    start, end = block * BLOCK_MS, (block + 1) * BLOCK_MS
    # From a day before: what a change does may reach into the block.
    changes = zone.changes(start - DAY_MS, end)
    pieces = [Piece(start - DAY_MS, changes[0].at_ms if changes else end, (zone.offset_ms(start - DAY_MS),))]
    for index, change in enumerate(changes):
        pieces += _around(change, changes[index + 1].at_ms if index + 1 < len(changes) else end, rule)
    return tuple(_from(piece, start) for piece in pieces if piece.end_ms > max(start, piece.start_ms))


def _around(change: Change, end: int, rule: Rule) -> Iterator[Piece]:
    """From a change until the next one."""
    at, size, dst = change.at_ms, change.new_ms - change.old_ms, abs(change.new_ms - change.old_ms) < CORRECTION_MS
    new = (change.new_ms,)
    if size > 0 and dst and rule is Rule.GAP_END:
        yield Piece(at, end, new, (at + change.old_ms, at + change.new_ms))
    elif size > 0 and dst and rule is Rule.SHIFT:
        middle = min(at + size, end)
        yield Piece(at, middle, (change.new_ms, change.old_ms))
        yield Piece(middle, end, new)
    elif size < 0 and (rule in (Rule.FIRST, Rule.SHIFT) or (dst and rule is Rule.GAP_END)):
        middle = min(at - size, end)
        yield Piece(at, middle, ())
        yield Piece(middle, end, new)
    else:
        yield Piece(at, end, new)


def _from(piece: Piece, start: int) -> Piece:
    return piece if piece.start_ms >= start else Piece(start, piece.end_ms, piece.offsets)
