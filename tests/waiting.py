"""Waiting for a condition instead of sleeping for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01


async def eventually(
    predicate: Callable[[], object | Awaitable[object]], timeout_s: float = 10.0, what: str = ""
) -> None:
    """Return once ``predicate`` (a function or coroutine function) is true; AssertionError when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or predicate}"
        await asyncio.sleep(POLL_S)


def wait_until(predicate: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> None:
    """``eventually`` for tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or predicate}"
        time.sleep(POLL_S)
