"""Real sidecars in one process: nodes with stores on disk, peers over loopback, each behind its own gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from tenure.v1 import (
    cluster_pb2_grpc,
    dedup_pb2_grpc,
    job_pb2_grpc,
    lease_pb2_grpc,
    session_pb2_grpc,
    switch_pb2_grpc,
    watch_pb2_grpc,
)

from sidecar.clock import SystemClock
from sidecar.config import Settings
from sidecar.consensus.log_store import SqliteLogStore
from sidecar.consensus.loop import NodeLoop
from sidecar.consensus.node import Node, NodeSettings
from sidecar.consensus.ports import StoreIdentity
from sidecar.consensus.snapshots import FileSnapshotStore
from sidecar.consensus.transport import TcpPeerTransport, TransportSettings
from sidecar.core.commands import Limits
from sidecar.core.machine import Machine
from sidecar.proposer import AsyncProposer, Proposer, ProposerSettings
from sidecar.runtime import Runtime
from sidecar.scheduling.scheduler import Scheduler, SchedulerSettings, SchedulerTimer
from sidecar.services import SERVER_OPTIONS, add_services
from sidecar.watch import WatchHub
from tests.waiting import eventually

CLUSTER = "c-test"


class Sidecar:
    """One node with its services. ``start`` to ``stop`` is one life; the folder outlives it."""

    def __init__(self, node_id: str, ports: dict[str, int], folder: Path, limits: Limits, **settings: Any) -> None:
        self.node_id, self.ports, self.folder, self.limits = node_id, ports, folder, limits
        peers = {peer: f"127.0.0.1:{port}" for peer, port in ports.items()}
        self.settings = Settings(
            node_id=node_id,
            cluster_id=CLUSTER,
            peers=peers,
            data_dir=folder,
            bootstrap=True,
            insecure=True,
            **{"tenants": ("default", "other"), "renewal_window_ms": 20, **settings},
        )
        self.running = False

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        clock = SystemClock()
        others = {peer: ("127.0.0.1", port) for peer, port in self.ports.items() if peer != self.node_id}
        identity = StoreIdentity(CLUSTER, self.node_id)
        self.store = SqliteLogStore(self.folder, identity)
        self.transport = TcpPeerTransport(
            TransportSettings(
                cluster_id=CLUSTER,
                node_id=self.node_id,
                listen=("127.0.0.1", self.ports[self.node_id]),
                peers=others,
                insecure=True,
            )
        )
        self.transport.open()
        wanted = ProposerSettings(limits=self.limits, renewal_window_ms=self.settings.renewal_window_ms)
        proposer = Proposer(Machine(), clock, self.node_id, self.store.incarnation, settings=wanted)
        self.proposer = AsyncProposer(proposer, clock)
        self.node_loop = NodeLoop(clock)
        node = Node(
            NodeSettings(
                cluster_id=CLUSTER,
                node_id=self.node_id,
                peers=tuple(others),
                bootstrap=True,
                heartbeat_ms=50,
                election_min_ms=300,
                election_max_ms=600,
            ),
            proposer,
            self.store,
            FileSnapshotStore(self.folder, identity),
            self.transport,
            clock,
            random.Random(),
            self.node_loop.wake,
            self.node_loop.background,
        )
        self.proposer.attach(node, self.node_loop.wake)
        hub = WatchHub(proposer.machine, self.proposer, self.proposer.read_barrier)
        scheduler = Scheduler(proposer, node, clock, SchedulerSettings(nodes=len(self.ports)))
        self.timer = SchedulerTimer(scheduler, clock)
        self.runtime = Runtime(
            scheduler=scheduler,
            settings=self.settings,
            clock=clock,
            node=node,
            proposer=self.proposer,
            hub=hub,
            started_s=clock.monotonic_s(),
        )
        self.task = asyncio.create_task(self.node_loop.run(node))
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.operations = add_services(self.server, self.runtime)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.timer.start()
        self.running = True

    async def stop(self) -> None:
        if not self.running:
            return
        self.running = False
        self.runtime.stopping = True
        self.runtime.hub.close()
        self.timer.stop()
        self.proposer.stop()
        await self.server.stop(0)
        self.node_loop.stop()
        await self.task
        await self.transport.stop()
        self.store.close()

    def ready(self) -> bool:
        return self.running and not self.runtime.ready()

    def leads(self) -> bool:
        return self.running and self.runtime.node.is_leader()


class Stubs:
    """One channel to one sidecar, with a stub per service."""

    def __init__(self, address: str) -> None:
        # A pool of its own: channels to one address would share a connection otherwise. And a window that does not
        # grow, so that it is soon full when a test does not read.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.session = session_pb2_grpc.SessionServiceStub(self.channel)
        self.lease = lease_pb2_grpc.LeaseServiceStub(self.channel)
        self.dedup = dedup_pb2_grpc.DedupServiceStub(self.channel)
        self.watch = watch_pb2_grpc.WatchServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        self.job = job_pb2_grpc.JobServiceStub(self.channel)
        self.switch = switch_pb2_grpc.SwitchServiceStub(self.channel)


class Cluster:
    def __init__(self, sidecars: list[Sidecar]) -> None:
        self.sidecars = sidecars
        self._channels: list[Stubs] = []

    def __getitem__(self, position: int) -> Sidecar:
        return self.sidecars[position]

    @property
    def leader(self) -> Sidecar:
        return next(sidecar for sidecar in self.sidecars if sidecar.leads())

    @property
    def follower(self) -> Sidecar:
        return next(sidecar for sidecar in self.sidecars if sidecar.running and not sidecar.leads())

    def stubs(self, sidecar: Sidecar | None = None) -> Stubs:
        stubs = Stubs((sidecar or self.sidecars[0]).address)
        self._channels.append(stubs)
        return stubs

    async def ready(self) -> None:
        await eventually(
            lambda: all(s.ready() for s in self.sidecars if s.running) and any(s.leads() for s in self.sidecars),
            what="all sidecars ready",
        )

    async def close(self) -> None:
        for stubs in self._channels:
            await stubs.channel.close()
        for sidecar in self.sidecars:
            await sidecar.stop()


@contextlib.asynccontextmanager
async def running_cluster(
    folder: Path, size: int = 1, limits: Limits | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    """A ready cluster of real sidecars below ``folder``."""
    ports = {f"n{number}": port for number, port in enumerate(free_ports(size), 1)}
    sidecars = [Sidecar(node, ports, folder / node, limits or Limits(), **settings) for node in ports]
    cluster = Cluster(sidecars)
    try:
        for sidecar in sidecars:
            await sidecar.start()
        await cluster.ready()
        yield cluster
    finally:
        await cluster.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
