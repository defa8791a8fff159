"""Leases (see the rules at the top of machine.py)."""

from __future__ import annotations

import msgspec


class Holder(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    session: str
    token: int
    granted_ms: int
    lock_delay_ms: int = 0
    metadata: str = ""
    waiter: str = ""  # the place in line that was granted, if it came from one


class Waiter(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    session: str
    waiter: str
    priority: int
    queued_ms: int
    deadline_ms: int
    order: int  # position of arrival, cluster-wide; FIFO within a priority
    lock_delay_ms: int = 0
    metadata: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Exists only while it is held, waited for or delayed. Tokens come from one counter for the whole machine, so
    they grow for every name even when a free name is forgotten."""

    tenant: str
    name: str
    capacity: int
    holders: tuple[Holder, ...] = ()  # in order of token
    waiters: tuple[Waiter, ...] = ()  # in order of grant: priority, then arrival
    delayed_until_ms: int = 0
