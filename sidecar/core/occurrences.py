"""Occurrences: what becomes of each due time (see the rules at the top of machine.py)."""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec


@unique
class OccurrenceState(IntEnum):
    PENDING = 1
    RUNNING = 2
    RETRYING = 3  # between two attempts
    SUCCEEDED = 4
    FAILED = 5
    SKIPPED = 6
    MISSED = 7
    CANCELLED = 8
    UNKNOWN = 9


ENDED = frozenset(
    {
        OccurrenceState.SUCCEEDED,
        OccurrenceState.FAILED,
        OccurrenceState.SKIPPED,
        OccurrenceState.MISSED,
        OccurrenceState.CANCELLED,
        OccurrenceState.UNKNOWN,
    }
)


@unique
class Origin(IntEnum):
    SCHEDULE = 1
    CATCH_UP = 2
    TRIGGER = 3
    BACKFILL = 4


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Of an occurrence's story: what happened, when (wall and cluster milliseconds), to whom, and why."""

    what: str
    wall_ms: int
    cluster_ms: int
    attempt: int = 0
    run: str = ""
    session: str = ""
    agent: str = ""
    host: str = ""
    cause: str = ""
    actor: str = ""
    reason: str = ""


class Occurrence(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Its name is (tenant, job, due_ms, sequence): 0 for one of the schedule, else the revision that created it."""

    tenant: str
    job: str
    due_ms: int
    sequence: int
    origin: Origin
    state: OccurrenceState
    job_revision: int
    created_ms: int
    created_wall_ms: int
    # Not before this, and not (for the first time) after that; cluster milliseconds.
    ready_ms: int
    start_by_ms: int
    priority: int = 0
    reason: str = ""
    attempt: int = 0
    run: str = ""  # the present one
    checkpoint: bytes = b""
    payload: bytes | None = None  # instead of the job's
    result: bytes = b""
    error: str = ""
    ended_ms: int = 0
    ended_wall_ms: int = 0
    expires_ms: int = 0  # when its history is over
    # A missed range: the first due time and how many; due_ms is the last.
    first_due_ms: int = 0
    count: int = 1
    held: bool = False
    canary: bool = False
    shadow: bool = False
    steps: tuple[Step, ...] = ()


OccurrenceKey = tuple[str, str, int, int]


def idempotency_key(job: str, due_ms: int, sequence: int, origin: Origin) -> str:
    """Of the effect that belongs to the due time. A backfill has that of the schedule's own occurrence; a trigger is
    an effect of its own."""
    own = f"/{sequence}" if origin is Origin.TRIGGER else ""
    return f"job/{job}/{due_ms}{own}"
