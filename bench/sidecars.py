"""Three sidecars as processes, with mutual TLS and fsync, for a measurement."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import tenure

from sidecar.certs import write_development_certificates
from sidecar.dev.ports import free_ports
from sidecar.dev.processes import Process

NODES = ("n1", "n2", "n3")
START_S = 30.0
STOP_S = 10.0


@asynccontextmanager
async def three_sidecars(settings: Mapping[str, str] | None = None) -> AsyncIterator[dict[str, str]]:
    """Addresses by node id; everything is stopped and removed at the end. ``settings``: variables for each sidecar."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        certificates = folder / "certs"
        write_development_certificates(certificates, NODES, "bench")
        ports = free_ports(2 * len(NODES))
        peers = ",".join(f"{node}=127.0.0.1:{port}" for node, port in zip(NODES, ports, strict=False))
        more = settings or {}
        processes = [_process(node, folder, certificates, peers, ports[3 + i], more) for i, node in enumerate(NODES)]
        addresses = {node: f"unix:{folder / f'{node}.sock'}" for node in NODES}
        try:
            for process in processes:
                await process.start()
            async with asyncio.timeout(START_S):
                for address in addresses.values():
                    await _until_serving(address)
            yield addresses
        finally:
            await asyncio.gather(*(process.stop(STOP_S) for process in processes))


def _process(
    node: str, folder: Path, certificates: Path, peers: str, http_port: int, settings: Mapping[str, str]
) -> Process:
    (folder / node).mkdir()
    environment = {
        "TENURE_NODE_ID": node,
        "TENURE_CLUSTER_ID": "bench",
        "TENURE_PEERS": peers,
        "TENURE_DATA_DIR": str(folder / node),
        "TENURE_BOOTSTRAP": "true",
        "TENURE_PEER_TLS_CERT": str(certificates / f"{node}.pem"),
        "TENURE_PEER_TLS_KEY": str(certificates / f"{node}.key"),
        "TENURE_PEER_TLS_CA": str(certificates / "ca.pem"),
        "TENURE_SOCKET": str(folder / f"{node}.sock"),
        "TENURE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
        "TENURE_DRAIN_TIMEOUT_MS": "1000",
        **settings,
    }
    command = [sys.executable, "-m", "sidecar", "serve"]
    return Process(node, command, environment, folder / f"{node}.log", lambda _: None)


async def _until_serving(address: str) -> None:
    while True:
        try:
            async with tenure.connect(address, connect_timeout=1) as client:
                await client.get_lease("bench/ready")
                return
        except tenure.TenureError:
            await asyncio.sleep(0.05)
