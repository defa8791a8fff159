"""M01: what a sidecar shows in ``/metrics`` does not grow with what it is asked for."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tenure
from prometheus_client.parser import text_string_to_metric_families
from tenure.v1 import lease_pb2, session_pb2

from tests.sidecars import Process, leases, one, sessions

SERIES_MAX, BYTES_MAX = 500, 200_000
MANY = 5_000
MARK = "hostile"
NAMES = [
    f"{MARK}\n",
    f'{MARK}"}} 1\ntenure_evil 1',
    f"{MARK}\\",
    f"{MARK}\x00",
    f"{MARK}\u2028\u202e",
    MARK + "x" * 10_000,
    f"{MARK}{{}}",
]


@pytest.fixture
def node() -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        process = one(Path(folder))
        yield process
        process.kill()


def scrape(node: Process) -> dict[tuple[str, ...], float]:
    """All series, by name and values of labels."""
    status, text = node.get("metrics")
    assert status == 200 and len(text) < BYTES_MAX
    assert MARK not in text and "evil" not in text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


async def every_call(channel: grpc.aio.Channel, client: tenure.Client, name: str) -> set[grpc.StatusCode]:
    """The name wherever a name can be, and how the plain calls ended."""
    codes = set()
    raw: Any = channel.unary_unary
    acquire = lease_pb2.AcquireLeaseRequest(tenant="default", name=name, session_id=client.session_id)
    elsewhere = lease_pb2.AcquireLeaseRequest(tenant=name, name="n", session_id=name, request_id=name)
    session = session_pb2.OpenSessionRequest(tenant="default", info=session_pb2.AgentInfo(agent=name))
    for call in (
        leases(channel).AcquireLease(acquire, timeout=10),
        leases(channel).AcquireLease(elsewhere, timeout=10),
        sessions(channel).OpenSession(session, timeout=10),
        raw("/tenure.v1.LeaseService/AcquireLease")(b"\x0a\x02\xff\xfe", timeout=10),
        raw(f"/tenure.v1.LeaseService/{MARK}Method")(b"", timeout=10),
        raw(f"/{MARK}Service/Acquire")(b"", timeout=10),
    ):
        codes.add(await call.code())
    for operation in (client.acquire(name), client.begin(name)):
        try:
            await operation
        except tenure.TenureError:
            continue
    return codes


async def test_series_do_not_grow_with_names_keys_and_sessions(node: Process) -> None:
    node.start()
    await node.ready()
    async with node.channel() as channel, tenure.connect(f"unix:{node.socket}", ttl_ms=600_000) as client:
        await every_call(channel, client, "harmless")
        await every_call(channel, client, "\n")
        await client.acquire("many/0")
        await client.begin("many/0")
        before = scrape(node)

        for name in NAMES:
            assert grpc.StatusCode.INVALID_ARGUMENT in await every_call(channel, client, name), repr(name)
        for start in range(1, MANY, 500):
            numbers = range(start, min(start + 500, MANY))
            await asyncio.gather(*(client.acquire(f"many/{number}") for number in numbers))
            await asyncio.gather(*(client.begin(f"many/{number}") for number in numbers))
        after = scrape(node)
    assert after["tenure_leases",] >= MANY and after["tenure_records",] >= MANY
    assert len(after) < SERIES_MAX
    # The one thing that may be new is how a call ended: a status of gRPC.
    codes = {code.name for code in grpc.StatusCode}
    assert not {series for series in after.keys() - before.keys() if not codes & set(series)}
