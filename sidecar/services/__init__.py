"""The gRPC API of a sidecar: translate, propose, translate back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from sidecar.services import health
from sidecar.services.cluster import cluster_service
from sidecar.services.notices import Notices
from sidecar.services.operations import Operations
from sidecar.services.resources import dedup_service, job_service, lease_service, session_service, switch_service
from sidecar.services.watch import watch_service

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

MESSAGE_BYTES_MAX = 4 << 20

# For grpc.aio.server: the bound of a message (RESOURCE_EXHAUSTED beyond it, by gRPC itself), pings of quiet clients
# tolerated every five seconds and a dead one found in half a minute, and never two servers on one port.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def add_services(server: grpc.aio.Server, runtime: Runtime) -> Operations:
    """Register all services of the API, health and reflection. Called in the event loop, before the server starts.
    Returns what they are served by."""
    operations = Operations(runtime, Notices(runtime.proposer))
    services = [
        session_service(runtime, operations),
        lease_service(runtime, operations),
        dedup_service(runtime, operations),
        job_service(runtime, operations),
        switch_service(runtime, operations),
        watch_service(runtime),
        cluster_service(runtime, operations.reads),
    ]
    names = [service.name for service in services]
    for service in services:
        service.register(server)
    health.Health(runtime, names).handlers().register(server)
    reflected = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(reflected, server)  # type: ignore[no-untyped-call]
    return operations
