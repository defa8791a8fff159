"""``tenure dev`` as a process: it works, takes orders, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.dev import orders
from sidecar.dev.errors import DevError
from sidecar.dev.folder import Folder
from tests.waiting import eventually

READY_S = 30.0


class Dev:
    """A development cluster in a process of its own."""

    def __init__(self, state: Path, output: str = "output.txt") -> None:
        self.state, self.folder = state, Folder(state)
        self.output = state.with_name(output)
        command = [sys.executable, "-m", "sidecar", "dev", "--plain", "--state-dir", str(state)]
        with self.output.open("w") as written:
            self.process = subprocess.Popen(command, stdout=written, stderr=written, stdin=subprocess.DEVNULL)
        self.children: set[int] = set()

    async def order(self, **order: Any) -> dict[str, Any]:
        return await orders.send(str(self.folder.find_control_socket()), order)

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.order(order="status"))["status"]
        self.children |= {each["pid"] for each in (*status["nodes"], *status["agents"])} - {0}
        return status

    async def working(self) -> bool:
        """Whether all nodes are ready, all agents are there, and a run has posted a document."""
        try:
            status = await self.status()
        except DevError:
            assert self.process.poll() is None, self.output.read_text()
            return False
        ready = all(node["health"] == "ready" for node in status["nodes"])
        return ready and status["sessions"] == 3 and status["work"]["posted"] > 0

    async def goes_on(self) -> None:
        """Wait until something more is posted."""
        before = (await self.status())["work"]["posted"]

        async def more() -> bool:
            return bool((await self.status())["work"]["posted"] > before)

        await eventually(more, 20)

    async def job(self, name: str) -> dict[str, Any]:
        jobs: list[dict[str, Any]] = (await self.status())["jobs"]
        return next(job for job in jobs if job["name"] == name)

    def started(self) -> bool:
        return self.state.exists()

    async def ended(self) -> None:
        await eventually(lambda: self.process.poll() is not None, 20)
        await eventually(lambda: not any(map(running, self.children)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
async def dev(tmp_path: Path) -> AsyncIterator[Dev]:
    dev = Dev(tmp_path / "dev")
    yield dev
    if dev.process.poll() is None:
        dev.process.terminate()
        await dev.ended()


async def test_it_works_takes_orders_and_leaves_nothing_behind(dev: Dev, tmp_path: Path) -> None:
    await eventually(dev.working, READY_S)
    said = (await dev.order(order="kill", target="holder"))["said"]
    assert said.startswith("killed agent-") and said.endswith(", the holder")
    await dev.goes_on()
    # Who leads now, which need not be who led before.
    killed = (await dev.order(order="kill", target="leader"))["said"].split()[1].rstrip(",")

    async def other_leader() -> bool:
        status = await dev.status()
        return bool(status["leader"]) and status["leader"] != killed

    await eventually(other_leader, 20)
    assert (await dev.order(order="restart", target="all"))["said"] == f"started {killed}"
    assert "is cut off" in (await dev.order(order="partition", target="1", one_way=False))["said"]
    assert (await dev.order(order="heal"))["said"] == "all links are whole"
    await eventually(dev.working, READY_S)
    status = await dev.status()
    dev.process.terminate()
    await dev.ended()
    assert dev.process.returncode == 0
    assert (status["work"]["twice"], status["work"]["never"]) == (0, 0)
    assert "nothing is left behind" in dev.output.read_text()
    assert os.listdir(tmp_path) == [dev.output.name]


async def test_jobs_take_orders(dev: Dev) -> None:
    await eventually(dev.working, READY_S)
    assert [job["name"] for job in (await dev.status())["jobs"]] == ["digest", "heartbeat"]
    assert (await dev.order(order="trigger", target="heartbeat"))["said"].startswith("triggered heartbeat: ")

    async def triggered() -> bool:
        return bool((await dev.job("heartbeat"))["totals"]["succeeded"])

    await eventually(triggered, 20)
    for order, mode in (("pause", "pause"), ("kill_job", "kill")):
        switch = (await dev.order(order=order, target=""))["said"].split()[-1]  # digest, the chosen one

        async def in_force(switch: str = switch, mode: str = mode) -> bool:
            job = await dev.job("digest")
            return (job["switch"], job["mode"]) == (switch, mode)

        await eventually(in_force)
        with pytest.raises(DevError, match=f"switch {switch}"):
            await dev.order(order="trigger", target="digest")
        assert (await dev.order(order="resume", target="digest"))["said"].startswith("digest goes on")
        await dev.goes_on()
    status = await dev.status()
    assert (status["work"]["twice"], status["work"]["never"], status["work"]["partial"]) == (0, 0, 0)


async def test_a_second_cluster_in_the_same_folder_is_refused(dev: Dev) -> None:
    await eventually(dev.started)
    second = Dev(dev.state, output="second.txt")
    await second.ended()
    assert second.process.returncode == 1
    assert f"(process {dev.process.pid}): stop it, or choose another folder" in second.output.read_text()


async def test_nothing_survives_a_supervisor_that_is_killed(dev: Dev) -> None:
    await eventually(dev.working, READY_S)
    dev.process.kill()
    await dev.ended()
