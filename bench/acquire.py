"""What an uncontended acquire and release cost, by unary calls and by the stream, from two places.

"leader" and "follower" say beside which sidecar the clients are. Every cycle is two commits on a majority, each with an
fsync on every node that acknowledges. The peer in the same run is the disk itself: a bare append and fdatasync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import tenure
import uvloop
from tenure.v1 import cluster_pb2, cluster_pb2_grpc, lease_pb2, lease_pb2_grpc, session_pb2, session_pb2_grpc

from bench.sidecars import three_sidecars

Cycle = Callable[[], Awaitable[float]]
TIMEOUT_S = 10


@dataclass(frozen=True)
class Figure:
    """Acquires a second, and how long one acquire took, in milliseconds."""

    what: str
    clients: int
    cycles_per_s: float
    p50_ms: float
    p99_ms: float


def fdatasync_ms(rounds: int = 300) -> float:
    """Median of a bare 100-byte append made durable, on the disk that the sidecars use."""
    with tempfile.NamedTemporaryFile(prefix="bench-") as file:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            os.write(file.fileno(), b"x" * 100)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1_000)
    return statistics.median(times)


async def leader_of(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        status: cluster_pb2.GetStatusResponse = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
        return status.leader_id


async def load(what: str, cycles: list[Cycle], seconds: float) -> Figure:
    """All clients at once, each as fast as it can, for so many seconds."""
    times: list[float] = []
    began = time.perf_counter()

    async def client(cycle: Cycle) -> None:
        while time.perf_counter() - began < seconds:
            times.append(await cycle())

    await asyncio.gather(*(client(cycle) for cycle in cycles))
    took = time.perf_counter() - began
    times.sort()
    return Figure(what, len(cycles), len(times) / took, _at(times, 0.50) * 1_000, _at(times, 0.99) * 1_000)


def _at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


async def unary(address: str, clients: int, seconds: float, what: str) -> Figure:
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(clients)
    ]
    try:
        cycles = [await _unary_client(channel, number) for number, channel in enumerate(channels)]
        return await load(what, cycles, seconds)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _unary_client(channel: grpc.aio.Channel, number: int) -> Cycle:
    sessions, leases = session_pb2_grpc.SessionServiceStub(channel), lease_pb2_grpc.LeaseServiceStub(channel)
    opened: session_pb2.OpenSessionResponse = await sessions.OpenSession(
        session_pb2.OpenSessionRequest(tenant="default", request_id=str(uuid.uuid4()), ttl_ms=600_000),
        timeout=TIMEOUT_S,
    )
    session, name = opened.session.session_id, f"bench/{number}"

    async def cycle() -> float:
        began = time.perf_counter()
        granted = await leases.AcquireLease(
            lease_pb2.AcquireLeaseRequest(tenant="default", name=name, session_id=session), timeout=TIMEOUT_S
        )
        took = time.perf_counter() - began
        request = lease_pb2.ReleaseLeaseRequest(tenant="default", name=name, session_id=session, token=granted.token)
        await leases.ReleaseLease(request, timeout=TIMEOUT_S)
        return took

    return cycle


async def stream(address: str, clients: int, seconds: float, what: str) -> Figure:
    opened = [await tenure.connect(address, ttl_ms=60_000) for _ in range(clients)]
    try:
        return await load(what, [_stream_client(client, number) for number, client in enumerate(opened)], seconds)
    finally:
        await asyncio.gather(*(client.close() for client in opened))


def _stream_client(client: tenure.Client, number: int) -> Cycle:
    async def cycle() -> float:
        began = time.perf_counter()
        lease = await client.acquire(f"bench/{number}")
        took = time.perf_counter() - began
        await lease.release()
        return took

    return cycle


async def measure(seconds: float) -> tuple[float, list[Figure]]:
    async with three_sidecars() as addresses:
        leader = await leader_of(addresses["n1"])
        follower = next(node for node in addresses if node != leader)
        figures = []
        for where, node in (("leader", leader), ("follower", follower)):
            for clients in (1, 64):
                figures.append(await unary(addresses[node], clients, seconds, f"unary, {where}"))
                figures.append(await stream(addresses[node], clients, seconds, f"stream, {where}"))
        return fdatasync_ms(), figures


def main(arguments: list[str]) -> int:
    """``python -m bench acquire``."""
    parser = argparse.ArgumentParser(prog="python -m bench acquire", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement [3]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    floor_ms, figures = uvloop.run(measure(options.seconds))
    if options.json:
        print(json.dumps({"fdatasync_ms": floor_ms, "figures": [vars(figure) for figure in figures]}))
        return 0
    print(f"bare append and fdatasync: {floor_ms:.2f} ms (median); acquire p50 is given as a multiple of it too\n")
    print(f"{'':<18}{'clients':>8}{'cycles/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'x fdatasync':>13}")
    for f in figures:
        times = f"{f.p50_ms:>9.2f}{f.p99_ms:>9.2f}{f.p50_ms / floor_ms:>13.1f}"
        print(f"{f.what:<18}{f.clients:>8}{f.cycles_per_s:>10.0f}{times}")
    return 0
