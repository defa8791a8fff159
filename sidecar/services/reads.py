"""Reads: linearizable after a barrier shared by all reads of one loop turn, or local with their staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from tenure.v1 import lease_pb2

from sidecar.proposer import Failed, Failure
from sidecar.services.calls import Answer, attempt
from sidecar.services.errors import ApiError, Problem, failed, problem

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

# Confirmed (None), or why it cannot be.
Confirmed = Callable[[ApiError | None], None]


class Reads:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: list[Confirmed] = []
        self._timeout_ms = 0
        self._barriers: set[asyncio.Task[None]] = set()

    def read(
        self, produce: Callable[[lease_pb2.ReadInfo], Message], answer: Answer, *, linearizable: bool, timeout_ms: int
    ) -> None:
        """``produce`` looks at the machine; it may raise ApiError."""
        if not linearizable:
            answer(attempt(produce, self.info(linearizable=False)))
            return

        def confirmed(error: ApiError | None) -> None:
            answer(error or attempt(produce, self.info(linearizable=True)))

        self.confirm(confirmed, timeout_ms)

    def confirm(self, confirmed: Confirmed, timeout_ms: int) -> None:
        """Called back once this node has applied all that was committed when this was called."""
        delay_ms = self._runtime.proposer.shedding()
        if delay_ms:
            message = "this node has more work than it can do in time"
            shed = Failed(failure=Failure.OVERLOADED, definite=True, message=message, retry_delay_ms=delay_ms)
            confirmed(failed(shed))
            return
        self._waiting.append(confirmed)
        self._timeout_ms = max(self._timeout_ms, timeout_ms)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._start)

    def info(self, *, linearizable: bool) -> lease_pb2.ReadInfo:
        runtime = self._runtime
        return lease_pb2.ReadInfo(
            linearizable=linearizable,
            applied_index=runtime.node.status().applied_index,
            staleness_ms=0 if linearizable else runtime.proposer.staleness_ms(),
            revision=runtime.proposer.machine.revision,
        )

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        timeout_ms, self._timeout_ms = self._timeout_ms, 0
        task = asyncio.create_task(self._barrier(waiting, timeout_ms))
        self._barriers.add(task)
        task.add_done_callback(self._barriers.discard)

    async def _barrier(self, waiting: list[Confirmed], timeout_ms: int) -> None:
        failure = await self._runtime.proposer.read_barrier(timeout_ms)
        error = None
        if failure is not None:
            error = problem(
                Problem.READ_NOT_CONFIRMED,
                failure.message,
                retry_delay_ms=failure.retry_delay_ms,
                cause=failure.failure.name,
            )
        for confirmed in waiting:
            confirmed(error)
