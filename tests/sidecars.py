"""Real sidecar processes for tests: started as an operator would start them, with data in a folder of the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from tenure.v1 import lease_pb2_grpc, session_pb2_grpc

from sidecar.dev.ports import free_ports
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parent.parent
START_S = 30.0  # of a process on a busy machine


class Process:
    """One ``tenure serve``. Its settings are environment variables, so that a test may change any of them."""

    def __init__(self, folder: Path, node: str, peers: dict[str, int], **settings: object) -> None:
        self.folder = folder
        self.node = node
        self.http_port = free_ports(1)[0]
        self.socket = folder / f"{node}.sock"
        self.log = folder / f"{node}.log"
        self.settings: dict[str, object] = {
            "node_id": node,
            "cluster_id": "c1",
            "peers": ",".join(f"{peer}=127.0.0.1:{port}" for peer, port in peers.items()),
            "data_dir": folder / node,
            "socket": self.socket,
            "http_listen": f"127.0.0.1:{self.http_port}",
            "bootstrap": "true",
            "insecure": "true",
            "heartbeat_ms": 60,
            "election_min_ms": 500,
            "election_max_ms": 900,
            "drain_timeout_ms": 10_000,
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
        environment |= {f"TENURE_{name.upper()}": str(value) for name, value in self.settings.items()}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "sidecar", "serve"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)

    async def ready(self) -> None:
        await eventually(lambda: self.get("readyz")[0] == 200, START_S, f"{self.node} ready: {self.lines()[-5:]}")

    async def ended(self, timeout_s: float = START_S) -> int:
        """The exit status."""
        assert self.process is not None
        await eventually(lambda: self.process is not None and self.process.poll() is not None, timeout_s)
        return int(self.process.returncode)

    def kill(self) -> None:
        """kill -9, if it is still there."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body of an HTTP path; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/{path}", timeout=2) as response:
                status, body = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        except OSError:
            return 0, None
        return status, json.loads(body) if path.endswith("z") else body.decode()

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def events(self) -> list[dict[str, Any]]:
        """Its log, line by line."""
        return [json.loads(line) for line in self.lines()]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self.socket}")


def one(folder: Path, **settings: object) -> Process:
    """A cluster of one node."""
    return Process(folder, "n1", {"n1": free_ports(1)[0]}, **settings)


def three(folder: Path, **settings: object) -> dict[str, Process]:
    names = ("n1", "n2", "n3")
    peers = dict(zip(names, free_ports(3), strict=True))
    return {name: Process(folder, name, peers, **settings) for name in names}


def sessions(channel: grpc.aio.Channel) -> session_pb2_grpc.SessionServiceAsyncStub:
    return session_pb2_grpc.SessionServiceStub(channel)


def leases(channel: grpc.aio.Channel) -> lease_pb2_grpc.LeaseServiceAsyncStub:
    return lease_pb2_grpc.LeaseServiceStub(channel)


async def all_ready(processes: list[Process]) -> None:
    await asyncio.gather(*(process.ready() for process in processes))
