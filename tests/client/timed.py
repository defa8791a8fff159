"""A client on a clock that a test moves, and one that works, against a double."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import tenure

from tests.client.double import Double
from tests.waiting import eventually


class Clock:
    """The lease clock of a client. It stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def connected(server: Double, clock: Clock | None = None, **options: Any) -> AsyncIterator[tenure.Client]:
    connecting = tenure.connect(server.address, **options)
    if clock is not None:
        connecting._options = dataclasses.replace(connecting._options, clock=clock)
    async with connecting as client:
        yield client


@asynccontextmanager
async def working(client: tenure.Client, server: Double, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """``client.work`` as a task, known to the server; stopped at the end."""
    before = len(server.served)
    task = asyncio.create_task(client.work(**options))
    await eventually(lambda: len(server.served) > before or task.done(), what="it is served")
    try:
        yield task
    finally:
        client.stop_work()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def settle(client: tenure.Client) -> None:
    """What was pushed before has been seen when this returns, and what follows from it has been done."""
    for _ in range(2):
        await client.check("nothing", 1)
        await asyncio.sleep(0)


async def passes(client: tenure.Client, server: Double, clock: Clock, seconds: float, step: float = 0.25) -> None:
    """Time goes by on the client's clock in small steps; what is due is done, and answered if the server answers."""
    for _ in range(round(seconds / step)):
        clock.now += step
        client._connection._tick()
        if server.acknowledge and not server.mute and client.node_id:
            await client.check("nothing", 1)
        for _ in range(3):
            await asyncio.sleep(0)
