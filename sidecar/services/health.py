"""The standard health service (grpc.health.v1): what a load balancer or a probe asks.

Every service of the API, and "" for the whole, is SERVING while this node is ready: it has caught up, knows a leader
with a quorum, and is not draining. Needs no deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2

from sidecar.services.handlers import Context, Handlers

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

Status = health_pb2.HealthCheckResponse
SERVICE_NAME = "grpc.health.v1.Health"
# A change is told at once when the runtime reports it, and found out after this time at the latest.
POLL_S = 0.5


class Health:
    def __init__(self, runtime: Runtime, services: Sequence[str]) -> None:
        self._runtime = runtime
        self._services = frozenset(("", SERVICE_NAME, *services))
        self._changed = asyncio.Event()
        runtime.on_ready_change.append(self._ready_changed)

    def handlers(self) -> Handlers:
        handlers = Handlers(self._runtime, health_pb2.DESCRIPTOR.services_by_name["Health"])
        handlers.exempt_unary("Check", self.check)
        handlers.exempt_unary("List", self.list)
        handlers.server_stream("Watch", self.watch)
        return handlers

    async def check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service}")
        return Status(status=self._status(request.service))

    async def list(self, _: health_pb2.HealthListRequest, __: Context) -> health_pb2.HealthListResponse:
        statuses = {service: Status(status=self._status(service)) for service in sorted(self._services)}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status, then each change of it. An unknown service is told as SERVICE_UNKNOWN, as the protocol has it."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                await context.write(Status(status=status))
                told = status
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), POLL_S)
            except TimeoutError:
                continue

    def _status(self, service: str) -> Status.ServingStatus:
        if service not in self._services:
            return Status.SERVICE_UNKNOWN
        return Status.NOT_SERVING if self._runtime.ready() else Status.SERVING

    def _ready_changed(self, _: str) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
