"""Every change the state machine can cause, as a frozen event with a revision.

Kinds are part of the log's contract: numbers are never reused (they equal those of ``tenure.v1.EventKind``).
"""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec


@unique
class Kind(IntEnum):
    SESSION_OPENED = 1
    SESSION_ATTACHED = 2
    SESSION_DETACHED = 3
    SESSION_CLOSED = 4
    SESSION_EXPIRED = 5
    LEASE_GRANTED = 10
    LEASE_RELEASED = 11
    LEASE_EXPIRED = 12  # the holder's session ended
    LEASE_TRANSFERRED = 13  # followed by LEASE_GRANTED for the new holder
    LEASE_WAITING = 14
    LEASE_WAIT_ENDED = 15  # ungranted: cause timeout, cancelled or session_ended
    RECORD_BEGUN = 20
    RECORD_COMPLETED = 21
    RECORD_FAILED = 22
    RECORD_OWNER_LOST = 23  # cause retry or unknown, by the record's policy
    RECORD_RESOLVED = 24
    RECORD_FORGOTTEN = 25  # cause retention or operator
    JOB_APPLIED = 30  # subject: the job's name; sequence: its revision; cause created, changed or rolled_back
    JOB_DELETED = 31
    OCCURRENCE_CREATED = 40  # subject: the job's name; cause schedule, catch_up, trigger or backfill
    OCCURRENCE_ENDED = 41  # cause: the outcome in lower case; reason: why
    OCCURRENCE_MISSED = 42  # a range of due times: the last one is due_ms, count says how many; reason: why
    OCCURRENCE_RESOLVED = 43  # by a person; cause succeeded, failed or retry
    RUN_ASSIGNED = 50
    RUN_ENDED = 51  # cause succeeded, failed, timeout, lost or interrupted
    RUN_INTERRUPTED = 52  # asked to stop; cause killed, timeout, operator, overlap or job_deleted
    RUN_INTERRUPT_ACKNOWLEDGED = 53
    RUN_CHECKPOINTED = 54
    SWITCH_SET = 60  # subject: the switch's id; cause: the mode
    SWITCH_CLEARED = 61  # cause cleared, expired or replaced


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    revision: int
    kind: Kind
    tenant: str
    subject: str  # session id, lease name, idempotency key, job name or switch id
    cluster_ms: int
    wall_ms: int
    session: str = ""
    token: int = 0
    attempt: int = 0
    waiter: str = ""  # for LEASE_GRANTED to a waiter, LEASE_WAITING and LEASE_WAIT_ENDED
    cause: str = ""
    actor: str = ""
    reason: str = ""
    due_ms: int = 0  # of an occurrence: UTC wall milliseconds
    sequence: int = 0  # of an occurrence; of JOB_APPLIED: the job's revision
    run: str = ""
    count: int = 0
