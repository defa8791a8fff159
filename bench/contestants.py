"""Who is measured: each arranges the same jobs for three worker processes in its own way."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from bench import work
from sidecar.dev.processes import Process

WORKERS = ("w1", "w2", "w3")
SLOTS = 400
# A worker that is stopped for longer than this has lost what it held. One that holds on to nothing ignores it.
LOCK_MS = 2_000
READY_S = 30.0
STOP_S = 5.0


class NotMeasured(Exception):
    """A contestant cannot be measured here; says why."""


class Contestant(ABC):
    """One way to run jobs on three workers, in a folder of its own."""

    name: str
    # How jobs are brought to it, in words, for the reader of the table.
    how: str
    # How long arranging may take before the first job is due.
    lead_s = 6.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: dict[str, Process] = {}

    @abstractmethod
    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What it needs besides workers: started, and stopped at the end."""

    @abstractmethod
    async def arrange(self, due_ms: Mapping[str, int], work_ms: int) -> None:
        """See to it that these jobs are due at these times (UTC wall milliseconds), and that three workers are up."""

    def worker(self, name: str, module: str, *arguments: str) -> Process:
        environment = {work.FOLDER: str(self.folder), work.WORKER: name}
        command = [sys.executable, "-m", module, *arguments]
        process = Process(name, command, environment, self.folder / f"{name}.log", lambda _: None)
        self.workers[name] = process
        return process

    async def start_workers(self) -> None:
        """Start all that were made, and wait until each says that it is ready."""
        for name, process in self.workers.items():
            (self.folder / f"{name}.ready").unlink(missing_ok=True)
            await process.start()
        deadline = time.monotonic() + READY_S
        while not all((self.folder / f"{name}.ready").exists() for name in self.workers):
            for process in self.workers.values():
                if not process.running:
                    raise NotMeasured(f"{process.name} of {self.name} ended: {process.log_tail(3)}")
            if time.monotonic() > deadline:
                raise NotMeasured(f"the workers of {self.name} were not ready within {READY_S:.0f} s")
            await asyncio.sleep(0.05)

    async def stop_workers(self) -> None:
        await asyncio.gather(*(process.stop(STOP_S) for process in self.workers.values()))


def ready(folder: Path, name: str) -> None:
    """Called by a worker when it is up."""
    (folder / f"{name}.ready").touch()


def need(*modules: str) -> None:
    """``NotMeasured`` unless these are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise NotMeasured(f"{', '.join(absent)} not installed: make bench installs what is compared")


@contextlib.asynccontextmanager
async def workers_of(contestant: Contestant) -> AsyncIterator[None]:
    """The contestant, running; its workers are ended before what they depend on."""
    async with contestant.running():
        try:
            yield
        finally:
            await contestant.stop_workers()
