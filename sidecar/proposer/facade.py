"""The proposer for asyncio: coroutines in place of callbacks, a timer in place of ``schedule``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from sidecar.consensus.ports import Clock
from sidecar.core.commands import Command, RequestKey
from sidecar.core.machine import Machine
from sidecar.proposer.outcomes import Done, Failed, Failure, Outcome, Subscriber
from sidecar.proposer.proposer import Proposer, ProposerNode

T = TypeVar("T")


class LeaderContact(Protocol):
    @property
    def leader_contact_ms(self) -> int: ...


class FacadeNode(ProposerNode, Protocol):
    def read_barrier(self, done: Callable[[bool], None]) -> None: ...
    def status(self) -> LeaderContact: ...


class AsyncProposer:
    """Belongs to one event loop, which is also the node's thread."""

    BARRIER_WAIT_MS = 1_800  # a barrier that cannot be had is answered NO_LEADER after this
    BARRIER_RETRY_S = 0.05

    def __init__(self, proposer: Proposer, clock: Clock) -> None:
        self._proposer = proposer
        self._clock = clock
        self._timer: asyncio.Handle | None = None

    def attach(self, node: FacadeNode, wake: Callable[[], None]) -> None:
        """Called once, in the event loop, before the first turn of the node."""
        self._loop = asyncio.get_running_loop()
        self._node = node
        self._proposer.attach(node, wake, self._schedule)

    @property
    def machine(self) -> Machine:
        return self._proposer.machine

    @property
    def core(self) -> Proposer:
        return self._proposer

    def submit(self, command: Command, done: Done, *, timeout_ms: int, key: RequestKey | None = None) -> int:
        """See ``Proposer.submit``."""
        return self._proposer.submit(command, done, timeout_ms=timeout_ms, key=key)

    def withdraw(self, handle: int) -> None:
        self._proposer.withdraw(handle)

    def renew(self, session: str, done: Done, *, timeout_ms: int, connection: str = "") -> None:
        """See ``Proposer.renew``."""
        self._proposer.renew(session, done, timeout_ms=timeout_ms, connection=connection)

    async def propose(self, command: Command, *, timeout_ms: int, key: RequestKey | None = None) -> Outcome:
        """``submit``, awaited. Cancelling withdraws what was not handed to a leader yet; what was, goes on."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        handle = self._proposer.submit(command, _setter(future), timeout_ms=timeout_ms, key=key)
        try:
            return await future
        except asyncio.CancelledError:
            self._proposer.withdraw(handle)
            raise

    async def read_barrier(self, timeout_ms: int) -> Failed | None:
        """None once a read on this node is linearizable. Tried again until the timeout, or for about two seconds
        without a leader."""
        try:
            async with asyncio.timeout(min(timeout_ms, self.BARRIER_WAIT_MS) / 1000):
                confirmed = False
                while not confirmed:
                    confirmed = await self._one_barrier()
                    if not confirmed:
                        await asyncio.sleep(self.BARRIER_RETRY_S)
        except TimeoutError:
            message = "no leader with a quorum has confirmed the read in time"
            failure = Failure.DEADLINE if timeout_ms < self.BARRIER_WAIT_MS else Failure.NO_LEADER
            return Failed(failure=failure, definite=True, message=message, retry_delay_ms=200)
        return None

    async def _one_barrier(self) -> bool:
        future: asyncio.Future[bool] = self._loop.create_future()
        self._node.read_barrier(_setter(future))
        return await future

    def shedding(self) -> int:
        """See ``Proposer.shedding``."""
        return self._proposer.shedding()

    def cluster_now_ms(self) -> int:
        return self._proposer.cluster_now_ms()

    def staleness_ms(self) -> int:
        """How old what this node shows may be, without a barrier; -1 when it never knew."""
        return self._node.status().leader_contact_ms

    def subscribe(self, subscriber: Subscriber, on_gap: Callable[[], None] | None = None) -> Callable[[], None]:
        """See ``Proposer.subscribe``."""
        return self._proposer.subscribe(subscriber, on_gap)

    def stop(self) -> None:
        """Answer everybody who waits, and end the timer."""
        self._proposer.stop()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = when_s - self._clock.monotonic_s()
        # At once means: in the next iteration of the loop, so that everything submitted in this one shares a frame.
        self._timer = self._loop.call_later(delay_s, self._poll) if delay_s > 0 else self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._proposer.poll()


def _setter(future: asyncio.Future[T]) -> Callable[[T], None]:
    def done(value: T) -> None:
        if not future.done():
            future.set_result(value)

    return done
