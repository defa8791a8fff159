"""The program of a run: what it is told, what its end means, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tenure

from sidecar.cli.run_process import Ended, Receipt, RunProcess
from tests.waiting import eventually, wait_until

RECEIPT = Receipt(
    tenant="acme", job="digest", run_id="r7", due_wall_ms=1_774_767_600_000, sequence=0, attempt=2, token=7,
    idempotency_key="job/digest/1", deadline_wall_ms=1_774_767_660_000, traceparent="00-aa-bb-01",
    payload=b'{"a": 1}', checkpoint=b"page 3",
)  # fmt: skip


def safe() -> float:
    return tenure.now() + 60


def process(script: str, receipt: Receipt = RECEIPT) -> RunProcess:
    return RunProcess("/bin/sh", ["-c", script], receipt, safe)


async def ended(script: str, receipt: Receipt = RECEIPT) -> Ended:
    async with process(script, receipt) as run:
        return await run.ended()


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def exists(named_in: Path) -> bool:
    """The folder of the file whose name stands there."""
    return Path(named_in.read_text().strip()).parent.exists()


async def test_it_is_told_everything(tmp_path: Path) -> None:
    names = "RUN_ID JOB TENANT DUE DUE_MS ATTEMPT FENCING_TOKEN IDEMPOTENCY_KEY DEADLINE_MS TRACEPARENT"
    shown = " ".join(f"$TENURE_{name}" for name in names.split(" "))
    script = f'cd {tmp_path}; cat > stdin; echo "{shown} $TRACEPARENT" > env; cp "$TENURE_CHECKPOINT_FILE" state'
    assert (await ended(script)).succeeded
    assert (tmp_path / "env").read_text().split() == [
        "r7", "digest", "acme", "2026-03-29T07:00:00Z", "1774767600000", "2", "7", "job/digest/1", "1774767660000",
        "00-aa-bb-01", "00-aa-bb-01",
    ]  # fmt: skip
    told = json.loads((tmp_path / "stdin").read_text())
    assert (told["payload"], told["run_id"], told["attempt"], told["due"]) == (
        '{"a": 1}',
        "r7",
        2,
        "2026-03-29T07:00:00Z",
    )
    assert (tmp_path / "state").read_text() == "page 3"


async def test_a_result_is_what_it_wrote() -> None:
    done = await ended('printf done > "$TENURE_RESULT_FILE"; echo new > "$TENURE_CHECKPOINT_FILE"')
    assert (done.status, done.result, done.state, done.error) == (0, b"done", None, "")
    large = await ended('head -c 20000 /dev/zero > "$TENURE_RESULT_FILE"')
    assert large.status == 0
    assert "more than 16384 bytes" in large.remark
    assert large.result == large.remark.encode()


@pytest.mark.parametrize(
    ("status", "retryable"), [(1, True), (75, True), (64, False), (65, False), (78, False), (126, False), (127, False)]
)
async def test_what_an_exit_status_means(status: int, retryable: bool) -> None:
    failed = await ended(f"echo no such document >&2; exit {status}")
    assert (failed.status, failed.retryable) == (status, retryable)
    assert failed.error == f"exit status {status}: no such document"


async def test_a_failure_hands_its_state_on() -> None:
    failed = await ended('printf "page 4" > "$TENURE_CHECKPOINT_FILE"; exit 1')
    assert failed.state == b"page 4"
    assert (await ended("exit 1")).state is None
    killed = await ended("kill -9 $$")
    assert (killed.status, killed.retryable, killed.error) == (137, True, "ended by SIGKILL")


async def test_the_last_words_are_the_error() -> None:
    failed = await ended("yes ä | head -n 5000 >&2; echo the cause >&2; exit 3")
    assert failed.error.endswith("the cause")
    assert failed.error.startswith("exit status 3: ")
    assert len(failed.error.encode()) <= 4_096


async def test_it_need_not_read_its_input() -> None:
    large = replace(RECEIPT, payload=bytes(65_536))
    assert (await ended("exit 0", large)).succeeded
    assert (await ended("exec <&-; sleep 0.1", large)).succeeded


async def test_a_stop_is_a_signal_to_all_of_it_and_then_the_end(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with process(f"sleep 600 & echo $! > {pids}; trap 'exit 9' TERM; while :; do sleep 0.05; done") as run:
        await eventually(lambda: pids.exists() and pids.read_text().strip())
        await run.stop(30)
        assert (await run.ended()).status == 9
    deaf = tmp_path / "deaf"
    async with process(f"trap '' TERM; echo $$ > {deaf}; while :; do sleep 0.05; done") as run:
        await eventually(lambda: deaf.exists() and deaf.read_text().strip())
        await run.stop(0.01)
        assert (await run.ended()).status == 128 + signal.SIGKILL
    for pid in (int(pids.read_text()), int(deaf.read_text())):
        await eventually(lambda: not alive(pid))  # noqa: B023


async def test_what_is_left_in_the_background_does_not_hold_it_up() -> None:
    async with asyncio.timeout(20):
        assert (await ended("sleep 60 & exit 0")).succeeded


async def test_leaving_it_ends_it(tmp_path: Path) -> None:
    pid, folder = tmp_path / "pid", tmp_path / "folder"
    with pytest.raises(RuntimeError):
        async with process(f'echo "$TENURE_RESULT_FILE" > {folder}; echo $$ > {pid}; sleep 600'):
            await eventually(lambda: pid.exists() and pid.read_text().strip())
            raise RuntimeError
    assert not alive(int(pid.read_text()))
    assert not exists(folder)


def test_it_does_not_outlive_a_killed_worker(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"""
import asyncio
from tests.cli.test_run_process import ended
asyncio.run(ended("sleep 600 & echo $! $$ > {pid}; wait"))
"""
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    wait_until(lambda: pid.exists() and pid.read_text().strip(), 30)
    worker.kill()
    worker.wait()
    for each in pid.read_text().split():
        wait_until(lambda: not alive(int(each)), 10)  # noqa: B023


async def test_it_ends_when_the_run_is_no_longer_ours(tmp_path: Path) -> None:
    """By the guard alone, as when the worker is stopped."""
    moment = tenure.now() + 1
    async with RunProcess("/bin/sh", ["-c", "sleep 600"], RECEIPT, lambda: moment) as run:
        assert (await run.ended()).status == 128 + signal.SIGKILL
