"""One run as a process: what the program is told, how it is ended, and what its end means.

The program is a process group of its own. It finds the receipt as JSON on its standard input and, the parts that shell
scripts want, in its environment; its standard output is the worker's. Files in a folder of the run's own, which is
removed afterwards: ``TENURE_RESULT_FILE`` (what it writes there is the result) and ``TENURE_CHECKPOINT_FILE`` (holds
what the attempts before have stored; what stands there at the end of a failed attempt is handed to the next one).

What its exit status means (``meaning``):

=====================  =============================================================
0                      succeeded
64, 65, 78, 126, 127   failed, and another attempt would fail as well: wrong usage, data or configuration (EX_USAGE,
                       EX_DATAERR, EX_CONFIG), not executable, not found
75 and all others      failed, worth another attempt, as the job's retry policy says; also when a signal ended it
=====================  =============================================================
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sidecar.cli import times
from sidecar.cli.lock import GUARD_TOLD_S, GUARDED

RESULT_BYTES_MAX = CHECKPOINT_BYTES_MAX = 16_384
ERROR_BYTES_MAX = 4_096
PERMANENT = frozenset({64, 65, 78, 126, 127})
# After the program's end: as long as something else may keep its standard error open.
LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What the program is told. ``deadline_wall_ms`` is what the wall clock of this machine will show at the end."""

    tenant: str
    job: str
    run_id: str
    due_wall_ms: int
    sequence: int
    attempt: int
    token: int
    idempotency_key: str
    deadline_wall_ms: int
    traceparent: str
    payload: bytes
    checkpoint: bytes

    def environment(self) -> dict[str, str]:
        return {
            "TENURE_RUN_ID": self.run_id, "TENURE_JOB": self.job, "TENURE_TENANT": self.tenant,
            "TENURE_DUE": times.rfc3339(self.due_wall_ms), "TENURE_DUE_MS": str(self.due_wall_ms),
            "TENURE_ATTEMPT": str(self.attempt), "TENURE_FENCING_TOKEN": str(self.token),
            "TENURE_IDEMPOTENCY_KEY": self.idempotency_key, "TENURE_DEADLINE_MS": str(self.deadline_wall_ms),
            "TENURE_TRACEPARENT": self.traceparent, "TRACEPARENT": self.traceparent,
        }  # fmt: skip

    def as_json(self) -> bytes:
        """``payload`` is null when it is not UTF-8; ``payload_base64`` always holds it."""
        return json.dumps(
            {
                "tenant": self.tenant, "job": self.job, "run_id": self.run_id,
                "due": times.rfc3339(self.due_wall_ms), "due_ms": self.due_wall_ms, "sequence": self.sequence,
                "attempt": self.attempt, "fencing_token": self.token, "idempotency_key": self.idempotency_key,
                "deadline_ms": self.deadline_wall_ms, "traceparent": self.traceparent, "payload": text_of(self.payload),
                "payload_base64": base64.b64encode(self.payload).decode(),
                "checkpoint_base64": base64.b64encode(self.checkpoint).decode(),
            },
            ensure_ascii=False,
        ).encode() + b"\n"  # fmt: skip


def text_of(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True)
class Ended:
    """How it ended. ``status`` as a shell says it: 128 + n when signal n ended it. ``state`` None: not changed."""

    status: int
    error: str
    result: bytes
    state: bytes | None
    # What the person who runs the worker should know, empty mostly.
    remark: str = ""

    @property
    def succeeded(self) -> bool:
        return self.status == 0

    @property
    def retryable(self) -> bool:
        return self.status not in PERMANENT


class LastWords(asyncio.Protocol):
    """Standard error of a program: it goes on to the worker's, and the last of it is kept."""

    def __init__(self) -> None:
        self.kept, self.over = bytearray(), asyncio.Event()

    def data_received(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(2, data)
        self.kept += data
        del self.kept[:-ERROR_BYTES_MAX]

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


class RunProcess:
    """The program of one run. Use it as an asynchronous context manager: at its end nothing of it is left."""

    def __init__(self, program: str, arguments: list[str], receipt: Receipt, safe_until: Callable[[], float]) -> None:
        """``safe_until``: the moment, on the clock of ``tenure.now``, until which the run is ours for certain."""
        self._program, self._arguments, self._receipt, self._safe_until = program, arguments, receipt, safe_until
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def __aenter__(self) -> RunProcess:
        self._folder = tempfile.TemporaryDirectory(prefix="tenure-run-", ignore_cleanup_errors=True)
        try:
            self._state = Path(self._folder.name) / "checkpoint"
            self._result = Path(self._folder.name) / "result"
            if self._receipt.checkpoint:
                self._state.write_bytes(self._receipt.checkpoint)
            files = {"TENURE_CHECKPOINT_FILE": str(self._state), "TENURE_RESULT_FILE": str(self._result)}
            await self._start(self._receipt.environment() | files)
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    async def _start(self, environment: Mapping[str, str]) -> None:
        guards_end, self._guard = os.pipe()
        os.set_blocking(self._guard, False)
        said, says = os.pipe()
        loop = asyncio.get_running_loop()
        self._words = LastWords()
        self._listening, _ = await loop.connect_read_pipe(lambda: self._words, os.fdopen(said, "rb", 0))
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", GUARDED, str(os.getpid()), str(guards_end), "group", self._program,
                *self._arguments,
                stdin=asyncio.subprocess.PIPE, stderr=says, env=os.environ | environment,
                process_group=0, pass_fds=(guards_end,),
            )  # fmt: skip
        except BaseException:
            os.close(self._guard)
            self._listening.close()
            raise
        finally:
            os.close(guards_end)
            os.close(says)
        self._tasks = [loop.create_task(self._tell_guard()), loop.create_task(self._feed())]

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._send(signal.SIGKILL)
            await self._process.wait()
        if self._stopped:
            self._send(signal.SIGKILL)  # what it has left behind in its group
        self._to_guard("done\n")
        os.close(self._guard)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listening.close()
        self._folder.cleanup()

    async def _tell_guard(self) -> None:
        told = 0.0
        while True:
            until = self._safe_until()
            if until != told:
                told = until
                self._to_guard(f"{told:.6f}\n")
            await asyncio.sleep(GUARD_TOLD_S)

    def _to_guard(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it has done its work, or somebody has stopped it
            os.write(self._guard, line.encode())

    async def _feed(self) -> None:
        """A program need not read what it is told."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stdin.write(self._receipt.as_json())
                await stdin.drain()
                stdin.close()
                await stdin.wait_closed()
        finally:
            stdin.transport.abort()

    async def ended(self) -> Ended:
        """Waits for its end."""
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._words.over.wait()
        return self._meaning()

    async def stop(self, within_s: float) -> None:
        """SIGTERM to its group; SIGKILL to what is left when the time is over, or when the program itself has ended."""
        self._stopped = True
        self._send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        self._send(signal.SIGKILL)
        await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _meaning(self) -> Ended:
        code = self._process.returncode
        assert code is not None
        status = code if code >= 0 else 128 - code
        result, state, remark = b"", None, ""
        if status == 0:
            result, remark = self._bounded(self._result, RESULT_BYTES_MAX)
            result = result or remark.encode()  # nobody should take it for a run without a result
        else:
            found, remark = self._bounded(self._state, CHECKPOINT_BYTES_MAX)
            state = found if found and found != self._receipt.checkpoint else None
        return Ended(status, self._error(code) if status else "", result, state, remark)

    def _error(self, code: int) -> str:
        how = f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        said = self._words.kept.decode(errors="replace").strip()
        text = f"{how}: {said}" if said else how
        while len(text.encode()) > ERROR_BYTES_MAX:  # the end of what it said matters most
            said = said[max(1, len(said) // 8) :]
            text = f"{how}: ...{said}"
        return text

    @staticmethod
    def _bounded(path: Path, bytes_max: int) -> tuple[bytes, str]:
        """The file's content; nothing, and why, when it is too large to be kept."""
        try:
            with path.open("rb") as file:
                data = file.read(bytes_max + 1)
        except FileNotFoundError:
            return b"", ""
        except OSError as error:
            return b"", f"{path.name} is not kept: {error.strerror}"
        if len(data) > bytes_max:
            return b"", f"the {path.name} is not kept: it has more than {bytes_max} bytes"
        return data, ""
