"""One child process: in a session and process group of its own, its output in a file, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CHILD = str(Path(__file__).with_name("child.py"))
LOG_TAIL_BYTES = 16_384


class Process:
    """A program that can be started again after its end, of which ``on_end`` is told. Signals go to its whole group."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        on_end: Callable[[Process], None],
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.started_at = 0.0  # on the event loop's clock, in seconds
        # Whether somebody ended it on purpose; a process that ends by itself is a failure.
        self.killed = False
        self._command, self._environment, self._log = list(command), dict(environment), log
        self._on_end, self._folder = on_end, folder
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        assert not self.running, f"{self.name} is running"
        command = [sys.executable, "-I", "-S", CHILD, str(os.getpid()), *self._command]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited(), **self._environment},
                cwd=self._folder,
                start_new_session=True,  # a Ctrl-C in the terminal reaches only the supervisor
            )
        loop = asyncio.get_running_loop()
        self.started_at = loop.time()
        self.killed = False
        self._reaper = loop.create_task(self._reap(self._process))

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._on_end(self)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group; nothing happens when it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        self.killed = True
        self.signal(signal.SIGKILL)
        if self._process:
            await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM; kill -9 when it has not ended within ``grace_s`` seconds."""
        if not self.running:
            return
        self.killed = True
        self.signal(signal.SIGTERM)
        try:
            assert self._process is not None
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            await self.kill()

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of its output."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""


def last_words(log: str) -> str:
    """Why a process ended, from its log: its last line of severity error or critical, else simply its last line."""
    lines = log.splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
                return " ".join(str(entry[name]) for name in ("event", "error", "exception") if name in entry)
    return lines[-1] if lines else ""


def inherited() -> dict[str, str]:
    """The environment, without settings that are meant for another sidecar or client."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
