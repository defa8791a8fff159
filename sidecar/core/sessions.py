"""Sessions (see the rules at the top of machine.py)."""

from __future__ import annotations

import msgspec


class Session(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    session: str
    tenant: str
    agent: str
    version: str
    host: str
    labels: tuple[tuple[str, str], ...]
    ttl_ms: int
    disconnect_grace_ms: int
    opened_ms: int
    deadline_ms: int
    connection: str = ""
    node: str = ""
