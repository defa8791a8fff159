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


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    revision: int
    kind: Kind
    tenant: str
    subject: str  # session id, lease name or idempotency key
    cluster_ms: int
    wall_ms: int
    session: str = ""
    token: int = 0
    attempt: int = 0
    waiter: str = ""  # for LEASE_GRANTED to a waiter, LEASE_WAITING and LEASE_WAIT_ENDED
    cause: str = ""
    actor: str = ""
    reason: str = ""
