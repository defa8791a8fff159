"""``tenure worker``, as a process against a real sidecar: scripts as the workers of jobs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidecar.cli.app import app
from tests import sidecars
from tests.waiting import wait_until

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
Done = subprocess.CompletedProcess[str]
JOB = """
jobs:
  - {{name: {name}, tenant: acme, owner: a, runbook_url: "https://example.org/", schedule: manual,
      retry: {{initial: 0s}}, {more}}}
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = sidecars.one(tmp_path_factory.mktemp("w"), tenants="acme")
    process.start()
    try:
        asyncio.run(process.ready())
        yield f"unix:{process.socket}"
        process.terminate()
        assert asyncio.run(process.ended()) == 0, process.lines()[-5:]
    finally:
        process.kill()


def environment(address: str) -> dict[str, str]:
    return CLEAN | {"TENURE_ADDRESS": address, "TENURE_TENANT": "acme", "TENURE_ACTOR": "on-call"}


@pytest.fixture
def run(address: str) -> Callable[..., Done]:
    def call(*arguments: str, given: str = "") -> Done:
        return subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments], input=given, capture_output=True, text=True, check=False,
            env=environment(address), timeout=60,
        )  # fmt: skip

    return call


@contextmanager
def worker(address: str, job: str, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sidecar", "worker", "--job", job, *options, "--", "sh", "-c", script]
    process = subprocess.Popen(
        command, env=environment(address), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)
        assert process.returncode == 0, said
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def applied(run: Callable[..., Done], name: str, more: str = "priority: 0") -> None:
    done = run("job", "apply", "-f", "-", given=JOB.format(name=name, more=more))
    assert done.returncode == 0, done.stderr


def triggered(run: Callable[..., Done], name: str, *options: str) -> dict[str, Any]:
    """The occurrence in the end."""
    done = run("job", "trigger", f"acme/{name}", "--reason", "test", "--wait", "--wait-max", "30s", "--json", *options)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def explained(run: Callable[..., Done], name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("explain", f"acme/{name}", "--json").stdout)
    return found


def alive(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_script_works_for_a_job(run: Callable[..., Done], address: str, tmp_path: Path) -> None:
    applied(run, "echo")
    script = f'cat > {tmp_path}/in; printf "%s %s" "$TENURE_JOB" "$TENURE_ATTEMPT" > "$TENURE_RESULT_FILE"; echo hello'
    jobs = ("--job", "acme/ecco", "--job", "acme/none-*")
    with worker(address, "acme/ec*", script, "--label", "zone=a", *jobs) as process:
        ended = triggered(run, "echo", "--payload", "by hand")
        assert ended["state"] == "OCCURRENCE_STATE_SUCCEEDED", ended
        assert process.stdout is not None
        assert process.stdout.readline() == "hello\n"
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        assert "serves ec*, ecco, none-* of acme, 1 at once" in said[0]
        assert said[1:] == [
            "tenure worker: warning: tenant acme has no job ecco yet; did you mean echo?\n",
            "tenure worker: warning: tenant acme has no job none-* yet\n",
        ]
    assert json.loads((tmp_path / "in").read_text())["payload"] == "by hand"
    assert "result    echo 1" in run("explain", "acme/echo").stdout


def test_a_failure_is_tried_again_from_its_checkpoint(run: Callable[..., Done], address: str) -> None:
    applied(run, "steps")
    script = """
    if [ -s "$TENURE_CHECKPOINT_FILE" ]; then cp "$TENURE_CHECKPOINT_FILE" "$TENURE_RESULT_FILE"; exit 0; fi
    printf "page 1" > "$TENURE_CHECKPOINT_FILE"; echo "no connection" >&2; exit 75
    """
    with worker(address, "acme/steps", script):
        ended = triggered(run, "steps")
    assert (ended["state"], ended["attempt"]) == ("OCCURRENCE_STATE_SUCCEEDED", 2), ended
    assert "result    page 1" in run("explain", "acme/steps").stdout


def test_a_failure_for_good_is_one(run: Callable[..., Done], address: str) -> None:
    applied(run, "bad")
    with worker(address, "acme/bad", "echo wrong data >&2; exit 65"):
        ended = triggered(run, "bad")
    assert (ended["state"], ended["attempt"]) == ("OCCURRENCE_STATE_FAILED", 1), ended
    assert ended["error"] == "exit status 65: wrong data"


def test_a_kill_ends_the_script_and_is_acknowledged(run: Callable[..., Done], address: str, tmp_path: Path) -> None:
    applied(run, "long")
    pids = tmp_path / "pids"
    with worker(address, "acme/long", f"sleep 600 & echo $! $$ > {pids}; wait"):
        run("job", "trigger", "acme/long", "--reason", "test")
        wait_until(lambda: pids.exists() and pids.read_text().strip(), 30)
        killed = run("kill", "acme/long", "--reason", "stop it")
        assert killed.returncode == 0, killed.stdout + killed.stderr
        assert "1 of 1 run ended" in killed.stdout
        for pid in pids.read_text().split():
            wait_until(lambda: not alive(pid), 10)  # noqa: B023
    assert "cancelled (killed)" in run("explain", "acme/long").stdout
    assert run("resume", "acme/long", "--reason", "x").returncode == 0


def test_a_script_that_is_too_slow_is_ended(run: Callable[..., Done], address: str) -> None:
    applied(run, "slow", "timeout: 1s, interrupt_grace: 2s, delivery: at_most_once")
    with worker(address, "acme/slow", "trap '' TERM; while :; do sleep 0.1; done"):
        ended = triggered(run, "slow", "--wait-max", "60s")
    assert ended["state"] == "OCCURRENCE_STATE_FAILED", ended
    assert "timeout" in ended["reason"]


def test_a_worker_that_is_stopped_lets_its_runs_end(run: Callable[..., Done], address: str, tmp_path: Path) -> None:
    applied(run, "patient")
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f'echo > {begun}; while [ ! -e {go} ]; do sleep 0.05; done; printf "to the end" > "$TENURE_RESULT_FILE"'
    with worker(address, "acme/patient", script) as process:
        run("job", "trigger", "acme/patient", "--reason", "test")
        wait_until(begun.exists, 30)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        wait_until(lambda: "no new runs" in process.stderr.readline(), 30)  # type: ignore[union-attr]
        go.touch()
        process.wait(30)
    assert "result    to the end" in run("explain", "acme/patient").stdout


def test_a_second_signal_ends_them(run: Callable[..., Done], address: str, tmp_path: Path) -> None:
    applied(run, "hurry", "delivery: at_most_once")
    begun = tmp_path / "begun"
    with worker(address, "acme/hurry", f"echo $$ > {begun}; sleep 600") as process:
        run("job", "trigger", "acme/hurry", "--reason", "test")
        wait_until(lambda: begun.exists() and begun.read_text().strip(), 30)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        wait_until(lambda: "no new runs" in process.stderr.readline(), 30)  # type: ignore[union-attr]
    wait_until(lambda: not alive(begun.read_text().strip()), 10)
    assert explained(run, "hurry")["occurrences"][0]["state"] == "OCCURRENCE_STATE_FAILED"


def test_the_script_does_not_outlive_a_killed_worker(run: Callable[..., Done], address: str, tmp_path: Path) -> None:
    applied(run, "orphan")
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ >> {pids}; wait"
    command = [sys.executable, "-m", "sidecar", "worker", "--job", "acme/orphan", "--", "sh", "-c", script]
    process = subprocess.Popen(command, env=environment(address))
    run("job", "trigger", "acme/orphan", "--reason", "test")
    wait_until(lambda: pids.exists() and pids.read_text().strip(), 30)
    process.kill()
    process.wait()
    for pid in pids.read_text().split():
        wait_until(lambda: not alive(pid), 10)  # noqa: B023
    with worker(address, "acme/orphan", 'printf "attempt %s" "$TENURE_ATTEMPT" > "$TENURE_RESULT_FILE"'):
        wait_until(lambda: explained(run, "orphan")["occurrences"][0]["state"] == "OCCURRENCE_STATE_SUCCEEDED", 30)
    assert "result    attempt 2" in run("explain", "acme/orphan").stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--job", "a/b", "--job", "c/d", "--", "true"], "one tenant, not of a and c"),
        (["--job", "a", "--label", "x", "--", "true"], "write NAME=VALUE"),
        (["--job", "a", "--stop-wait", "5", "--", "true"], "--stop-wait: '5' is not a number with its unit"),
        (["--job", "a", "--", "no-such-program"], "no such command"),
    ],
)
def test_wrong_usage(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["worker", *options])
    assert said in str(done.exception)
