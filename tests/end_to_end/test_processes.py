"""Children of the supervisor: groups of their own, ended for certain, also when the supervisor is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from sidecar.dev.processes import Process, last_words
from tests.waiting import eventually

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]  # fmt: skip


def process(folder: Path, command: list[str], ended: list[str]) -> Process:
    return Process("child", command, {}, folder / "child.log", lambda each: ended.append(each.name))


def gone(pid: int) -> bool:
    """Whether a process has ended; its parent, or who inherited it, need not have taken notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_it_starts_is_killed_and_starts_again(tmp_path: Path) -> None:
    ended: list[str] = []
    child = process(tmp_path, SLEEP, ended)
    await child.start()
    await eventually(lambda: child.log_tail() == "up")
    first = child.pid
    assert os.getpgid(first) == first
    await child.kill()
    await eventually(lambda: ended == ["child"])
    assert child.killed
    assert child.exit_status == -signal.SIGKILL
    await child.start()
    assert child.running
    assert not child.killed
    await child.stop(grace_s=5)
    assert gone(child.pid)
    assert child.exit_status == -signal.SIGTERM


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = process(tmp_path, STUBBORN, [])
    await child.start()
    await eventually(lambda: child.log_tail() == "up")
    await child.stop(grace_s=0.2)
    assert child.exit_status == -signal.SIGKILL


async def test_one_that_ends_by_itself_was_not_killed(tmp_path: Path) -> None:
    ended: list[str] = []
    child = process(tmp_path, [sys.executable, "-c", "print('no such luck'); raise SystemExit(3)"], ended)
    await child.start()
    await eventually(lambda: ended == ["child"])
    assert (child.killed, child.exit_status, child.log_tail(1)) == (False, 3, "no such luck")


async def test_settings_of_the_user_do_not_reach_the_children(tmp_path: Path) -> None:
    os.environ["TENURE_NODE_ID"] = "mine"
    try:
        ended: list[str] = []
        child = process(tmp_path, [sys.executable, "-c", "import os; print(os.environ.get('TENURE_NODE_ID'))"], ended)
        await child.start()
        await eventually(lambda: bool(ended))
        assert child.log_tail() == "None"
    finally:
        del os.environ["TENURE_NODE_ID"]


def start(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from sidecar.dev.processes import Process, last_words

async def main():
    child = Process("child", {STUBBORN!r}, {{}}, Path({str(tmp_path / "child.log")!r}), lambda each: None)
    await child.start()
    while child.log_tail() != "up":
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    supervisor = start(script)
    assert supervisor.stdout is not None
    pid = int(await asyncio.to_thread(supervisor.stdout.readline))
    assert not gone(pid)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    await eventually(lambda: gone(pid))


def test_last_words_are_the_last_error_of_a_log() -> None:
    log = [
        '{"level": "info", "event": "serving"}',
        '{"level": "critical", "event": "the node failed", "error": "disk full"}',
        '{"level": "info", "event": "stopped"}',
    ]
    assert last_words("\n".join(log)) == "the node failed disk full"
    assert last_words("Traceback\nValueError: no") == "ValueError: no"
    assert last_words('[1]\n"x"') == '"x"'
    assert last_words("") == ""
