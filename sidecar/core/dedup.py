"""Dedup records (see the rules at the top of machine.py)."""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec

from sidecar.core.commands import OwnerLoss


@unique
class RecordState(IntEnum):
    IN_PROGRESS = 1
    COMPLETED = 2
    FAILED = 3
    UNKNOWN = 4
    RETRYABLE = 5


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tenant: str
    key: str
    state: RecordState
    attempt: int
    owner: str
    fingerprint: bytes
    owner_loss: OwnerLoss
    retention_ms: int
    begun_ms: int
    ended_ms: int = 0
    expires_ms: int = 0
    result: bytes = b""
    error: str = ""
    fence_lease: str = ""
    fence_token: int = 0
