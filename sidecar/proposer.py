"""Joins consensus and core: batches, stamps, waiters, deadlines, back-pressure. The node's Application.

Free of asyncio: callbacks and an injected clock, so the simulator drives the very same code. ``AsyncProposer`` is the
thin facade for services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import Protocol

import msgspec

from sidecar.consensus.node import Node
from sidecar.consensus.ports import Clock
from sidecar.core.commands import Command, RequestKey, Result
from sidecar.core.events import Event
from sidecar.core.machine import Machine


@unique
class Failure(IntEnum):
    """Why a proposal has no result. ``definite`` is told apart: whether it can still have happened."""

    NO_LEADER = 1
    OVERLOADED = 2  # queue or in-flight bound reached; retry_delay_ms says when to come back
    DEADLINE = 3
    TOO_LARGE = 4
    STOPPING = 5


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    failure: Failure
    definite: bool
    message: str
    retry_delay_ms: int = 0


Outcome = Result | Failed


class Subscriber(Protocol):
    def __call__(self, events: Sequence[Event]) -> None: ...


class Proposer:
    machine: Machine

    def __init__(self, machine: Machine, clock: Clock, node_id: str, incarnation: int) -> None: ...
    def attach(self, node: Node) -> None: ...

    def submit(
        self,
        command: Command,
        done: Callable[[Outcome], None],
        *,
        timeout_ms: int,
        key: RequestKey | None = None,
        lazy: bool = False,
    ) -> None:
        """Propose on whichever node this is: the leader batches it, a follower passes it on; retried through leader changes
        until the timeout. ``done`` is called exactly once, after the result is durable and applied on THIS node, so
        a read on this node sees it. ``lazy``: may wait for the coalescing window (renewals)."""
        ...

    def renew(self, session: str, done: Callable[[Outcome], None], *, timeout_ms: int) -> None:
        """Coalesced: all renewals of a window travel in one RenewSessions."""
        ...

    def cluster_now_ms(self) -> int: ...
    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Committed events, in order of revision, after each turn. Returns the function that ends it."""
        ...
