"""The asyncio driver of a node: waits for a wake-up or the node's next timer, and runs turns, one after the other.

    loop = NodeLoop(clock)
    node = Node(..., wake=loop.wake, background=loop.background)
    await loop.run(node)        # returns after loop.stop(); raises what ended the node

The disk is waited for on a thread of its own, so sockets are served meanwhile; what they bring waits in the node's
inbox. Nothing spins: between turns the event loop sleeps, and after each turn it runs everything else that is ready
once (``_breathe``), so a node that always has work does not starve its transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sidecar.consensus.node import Node
from sidecar.consensus.ports import Clock

SLEEP_MAX_S = 1.0  # looked at the clock at least this often: a suspended machine's timers do not count its sleep


class NodeLoop:
    """One per node; made and used on the event loop's thread, except for ``wake_threadsafe``."""

    def __init__(self, clock: Clock, observe_turn: Callable[[float, float], None] | None = None) -> None:
        """``observe_turn(turn_s, sync_s)`` is told how long each turn took, and its share of waiting for the disk."""
        self._clock = clock
        self._observe_turn = observe_turn
        self._loop = asyncio.get_running_loop()
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="log-sync")
        self._background_thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._sleeper: asyncio.Future[None] | None = None
        self._woken = True
        self._stopping = False
        self.last_turn_s: float | None = None  # monotonic, for the health check: None before the first turn

    def wake(self) -> None:
        """A turn soon. Many calls before it are one turn."""
        self._woken = True
        self._end_sleep()

    def wake_threadsafe(self) -> None:
        self._loop.call_soon_threadsafe(self.wake)

    def background(self, work: Callable[[], object], done: Callable[[object | BaseException], None]) -> None:
        """``work`` on the background thread, one at a time; ``done`` on the event loop with its result or exception."""

        def finished(future: Future[object]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(done, error if error is not None else future.result())

        self._background_thread.submit(work).add_done_callback(finished)

    def stop(self) -> None:
        """``run`` returns after the turn that is going on, its changes durable."""
        self._stopping = True
        self._end_sleep()

    async def run(self, node: Node) -> None:
        """Drives the node until ``stop``. Raises what ended it: a StoreError, an exception of the application, or a
        broken invariant. The node must not be used after that, and nothing in doubt was acknowledged."""
        try:
            while not self._stopping:
                await self._sleep_until(node.next_turn_s())
                if not self._stopping:
                    await self._turn(node)
                    await _breathe()
        finally:
            # Also when cancelled in the middle of a sync: the store must not be closed under it.
            self._sync_thread.shutdown(wait=True)
            self._background_thread.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, node: Node) -> None:
        self._woken = False
        began_s = time.perf_counter()
        turn = node.begin_turn()
        sync_s = 0.0
        if turn.durable is not None:
            sync_began_s = time.perf_counter()
            await self._loop.run_in_executor(self._sync_thread, turn.durable)
            sync_s = time.perf_counter() - sync_began_s
        node.end_turn(turn)
        self.last_turn_s = self._clock.monotonic_s()
        if self._observe_turn is not None:
            self._observe_turn(time.perf_counter() - began_s, sync_s)

    async def _sleep_until(self, when_s: float) -> None:
        delay_s = min(when_s - self._clock.monotonic_s(), SLEEP_MAX_S)
        if self._woken or delay_s <= 0:
            return
        self._sleeper = self._loop.create_future()
        timer = self._loop.call_later(delay_s, self._end_sleep)
        try:
            await self._sleeper
        finally:
            timer.cancel()
            self._sleeper = None

    def _end_sleep(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


async def _breathe() -> None:
    """One pass of the event loop over everything else that is ready."""
    await asyncio.sleep(0)
