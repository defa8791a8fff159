"""What becomes of the due times of one job that its leader has not settled yet.

    (settled ......... now - MISFIRE_THRESHOLD_MS ......... now]
             late                                 on time

Late is: by more than the threshold. On time ones are created. Of the late ones, from old to new:

    older than the catch-up window   missed, unless the policy is SKIP, which asks no age
    past the starting deadline       missed; on time ones too, if the deadline is shorter than the threshold
    the rest, by policy              SKIP: missed. LATEST: the newest is created, the others are missed.
                                     ALL: the newest catch_up_max are created, the others are missed.

A missed range costs the same whether it is one due time or a year of minutes. A plan that reaches its limit of
creations ends at the last of them; planning on from there gives the rest. Each due time in (settled, plan.settled_ms]
is in exactly one entry.
"""

from __future__ import annotations

import msgspec

from sidecar.core.specification import MISFIRE_THRESHOLD_MS, JobSpec, Misfire
from sidecar.scheduling.schedules import Compiled

MISFIRE_SKIP = "misfire_skip"
MISFIRE_LATEST = "misfire_latest"  # a later one runs in its place
OVER_CATCH_UP_MAX = "catch_up_max"
OUT_OF_WINDOW = "catch_up_window"
PAST_DEADLINE = "starting_deadline"


class DueTime(msgspec.Struct, frozen=True):
    """An occurrence to create."""

    due_ms: int
    catch_up: bool


class MissedRange(msgspec.Struct, frozen=True):
    """``count`` due times from the first to the last one, none of which is created."""

    first_due_ms: int
    last_due_ms: int
    count: int
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """``due`` and ``missed`` are each in order of time and do not overlap."""

    settled_ms: int
    next_due_ms: int  # the first after settled_ms, which may have passed already if the limit was reached; 0: none
    due: tuple[DueTime, ...] = ()
    missed: tuple[MissedRange, ...] = ()


def plan(compiled: Compiled, spec: JobSpec, settled_ms: int, now_ms: int, limit: int) -> Plan:
    """What to do about the due times in (settled_ms, now_ms]; of creations, at most ``limit`` (>= 1).

    A clock that stands before settled_ms changes nothing."""
    assert limit >= 1
    now_ms = max(now_ms, settled_ms)
    # Each bound is the last time of its part; the parts follow one another.
    late_end = max(settled_ms, now_ms - MISFIRE_THRESHOLD_MS - 1)
    window_end = settled_ms
    if spec.misfire is not Misfire.SKIP:
        window_end = min(late_end, max(settled_ms, now_ms - spec.catch_up_window_ms - 1))
    deadline_end = max(window_end, now_ms - spec.starting_deadline_ms - 1)
    missed = _missed(compiled, settled_ms, window_end, OUT_OF_WINDOW)
    if spec.misfire is Misfire.SKIP:
        missed += _missed(compiled, settled_ms, late_end, MISFIRE_SKIP)
        deadline_end = max(deadline_end, late_end)
        missed += _missed(compiled, late_end, deadline_end, PAST_DEADLINE)
        caught_up: list[int] = []
    else:
        missed += _missed(compiled, window_end, deadline_end, PAST_DEADLINE)
        caught_up, passed = _catch_up(compiled, spec, deadline_end, late_end)
        missed += passed
    room = limit - len(caught_up)
    on_time = compiled.due(max(late_end, deadline_end), now_ms, room + 1) if room >= 0 else []
    due = [DueTime(at, True) for at in caught_up] + [DueTime(at, False) for at in on_time]
    # More than fit: the plan ends at the last one that does.
    settled_ms = now_ms if len(due) <= limit else due[limit - 1].due_ms
    return Plan(settled_ms, compiled.next_after(settled_ms) or 0, tuple(due[:limit]), tuple(missed))


def _catch_up(compiled: Compiled, spec: JobSpec, after_ms: int, until_ms: int) -> tuple[list[int], list[MissedRange]]:
    """Of the late due times in (after_ms, until_ms] those that run yet, and what is missed before them."""
    if until_ms <= after_ms:
        return [], []
    most, reason = 1, MISFIRE_LATEST
    if spec.misfire is Misfire.ALL:
        most, reason = spec.catch_up_max, OVER_CATCH_UP_MAX
    created = compiled.latest(after_ms, until_ms, most)
    return created, _missed(compiled, after_ms, created[0] - 1 if created else until_ms, reason)


def _missed(compiled: Compiled, after_ms: int, until_ms: int, reason: str) -> list[MissedRange]:
    """The due times in (after_ms, until_ms] as one range, or as none if there are none."""
    count = compiled.count(after_ms, until_ms)
    if not count:
        return []
    first, last = compiled.next_after(after_ms), compiled.previous_at_or_before(until_ms)
    assert first is not None and last is not None and after_ms < first <= last <= until_ms
    return [MissedRange(first, last, count, reason)]
