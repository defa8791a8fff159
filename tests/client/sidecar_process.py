"""A real sidecar as a process: a cluster of one, on a unix socket, with its data in a folder that outlives restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import tenure

from tests.waiting import eventually


class SidecarProcess:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "t.sock"
        self.address = f"unix:{self.path}"
        self._peer_port = _free_port()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TENURE_")}
        environment |= {
            "TENURE_NODE_ID": "n1",
            "TENURE_CLUSTER_ID": "client-tests",
            "TENURE_PEERS": f"n1=127.0.0.1:{self._peer_port}",
            "TENURE_INSECURE": "true",
            "TENURE_BOOTSTRAP": "true",
            "TENURE_DATA_DIR": str(self.folder / "data"),
            "TENURE_SOCKET": str(self.path),
            "TENURE_HTTP_LISTEN": "",
        }
        log = (self.folder / "sidecar.log").open("ab")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sidecar", "serve", env=environment, stdout=log, stderr=log
            )
        await eventually(self.listening, timeout_s=30.0, what=f"a sidecar on {self.path}: {self.log()[-2000:]}")

    def log(self) -> str:
        path = self.folder / "sidecar.log"
        return path.read_text() if path.exists() else ""

    def listening(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self.log()[-4000:]
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self.path))
            return True
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """kill -9, and wait for the end."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        if process is not None:
            await process.wait()


@asynccontextmanager
async def sidecar_process(folder: Path) -> AsyncIterator[SidecarProcess]:
    sidecar = SidecarProcess(folder)
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.kill()


async def nothing_left(address: str) -> None:
    """Waits until no lease is held or waited for."""
    async with tenure.connect(address, session=False) as observer:

        async def free() -> bool:
            return not [lease async for lease in observer.list_leases()]

        await eventually(free, timeout_s=15.0, what="no lease is held or waited for")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
