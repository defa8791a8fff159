"""The commands of an operator, as processes against a real sidecar: what they print, and their exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tenure
from tenure.v1 import dedup_pb2

from sidecar.certs import write_certificates
from sidecar.cli.calls import as_dict
from sidecar.dev.ports import free_ports
from tests.waiting import eventually, wait_until

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
Run = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sidecar", *arguments]


@dataclass(frozen=True)
class Sidecar:
    address: str
    tcp: str
    certs: Path


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A cluster of one node, on a unix socket and on TCP with certificates of both sides."""
    folder = tmp_path_factory.mktemp("c")
    peer, http, tcp = free_ports(3)
    certs = folder / "certs"
    write_certificates(certs, "cli", {"n1": ["localhost"], "agent": []})
    settings = {
        "TENURE_NODE_ID": "n1", "TENURE_CLUSTER_ID": "cli", "TENURE_PEERS": f"n1=127.0.0.1:{peer}",
        "TENURE_INSECURE": "true", "TENURE_BOOTSTRAP": "true", "TENURE_DATA_DIR": str(folder / "data"),
        "TENURE_SOCKET": str(folder / "s"), "TENURE_HTTP_LISTEN": f"127.0.0.1:{http}",
        "TENURE_GRPC_LISTEN": f"127.0.0.1:{tcp}", "TENURE_GRPC_TLS_CERT": str(certs / "n1.pem"),
        "TENURE_GRPC_TLS_KEY": str(certs / "n1.key"), "TENURE_GRPC_TLS_CLIENT_CA": str(certs / "ca.pem"),
    }  # fmt: skip
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command("serve"), env=CLEAN | settings, stdout=log, stderr=log)
    running = Sidecar(f"unix:{folder / 's'}", f"localhost:{tcp}", certs)

    def ready() -> bool:
        asked = command("health", "--ready", "--address", running.address)
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    try:
        wait_until(ready, 30)
        yield running
    finally:
        process.terminate()
        assert process.wait(30) == 0, (folder / "log").read_text()


@pytest.fixture
def address(sidecar: Sidecar) -> str:
    return sidecar.address


@pytest.fixture
def run(address: str) -> Run:
    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = CLEAN | {"TENURE_ADDRESS": address, "COLUMNS": "200", "TENURE_ACTOR": "on-call"} | environment
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, check=False, env=settings, timeout=60
        )

    return call


def parsed(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_status_and_health(run: Run) -> None:
    assert "n1 of cluster cli, leader; ready" in run("status").stdout
    assert parsed(run("status", "--json"))["leader_id"] == "n1"
    assert run("health").stdout == "ready\n"
    nowhere = run("health", "--address", "unix:/nonexistent/s")
    assert nowhere.returncode == 4
    assert "no such socket" in nowhere.stderr


def test_a_lease_is_listed_shown_and_taken(run: Run, address: str) -> None:
    with tenure.connect_sync(address, agent="holder") as client:
        lease = client.acquire("cli/taken")
        assert [each["name"] for each in parsed(run("lease", "ls", "cli/taken", "--json"))] == ["cli/taken"]
        assert "holder" in run("lease", "ls").stdout
        shown = parsed(run("lease", "get", "cli/taken", "--json"))
        assert shown["lease"]["holders"][0]["token"] == lease.token
        assert client.session_id in run("session", "ls").stdout

        wrong = run("lease", "release", "cli/taken", "--token", str(lease.token + 1), "--reason", "test")
        assert wrong.returncode == 1
        assert "TOKEN" in wrong.stderr
        released = run("lease", "release", "cli/taken", "--token", str(lease.token), "--reason", "it hangs")
        assert released.returncode == 0, released.stderr
        wait_until(lambda: not lease.valid, 10)
        events = [
            json.loads(line)
            for line in run(
                "watch", "--from", "1", "--prefix", "cli/taken", "--count", "2", "--json"
            ).stdout.splitlines()
        ]
        assert [(event["kind"], event["actor"], event["reason"]) for event in events][1] == (
            "lease_released",
            "on-call",
            "it hangs",
        )


async def test_a_lease_is_transferred(run: Run, address: str) -> None:
    granted: list[tenure.Lease] = []
    async with tenure.connect(address) as old, tenure.connect(address) as new:
        new.on_granted(granted.append)
        token = str((await old.acquire("cli/moved")).token)
        give = (
            "lease",
            "transfer",
            "cli/moved",
            "--token",
            token,
            "--to",
            new.session_id,
            "--reason",
            "drain",
            "--json",
        )
        moved = parsed(await asyncio.to_thread(run, *give))
        await eventually(lambda: granted)
        assert granted[0].token == moved["token"] > int(token)
        assert (await new.check("cli/moved", moved["token"])).current


def test_an_unknown_outcome_is_resolved(run: Run, address: str) -> None:
    with tenure.connect_sync(address) as client:
        begun = client.begin("cli/bill-7", {"bill": 7}, on_owner_loss="unknown")
        assert isinstance(begun, tenure.SyncAttempt)
    wait_until(
        lambda: parsed(run("dedup", "get", "cli/bill-7", "--json"))["record"]["state"] == "RECORD_STATE_UNKNOWN", 10
    )
    assert [each["key"] for each in parsed(run("dedup", "ls", "cli/", "--state", "unknown", "--json"))] == [
        "cli/bill-7"
    ]
    late = run("dedup", "resolve", "cli/bill-7", "--as", "retry", "--attempt", "2", "--reason", "looked")
    assert late.returncode == 1
    done = run(
        "dedup",
        "resolve",
        "cli/bill-7",
        "--as",
        "completed",
        "--attempt",
        "1",
        "--result",
        "paid",
        "--reason",
        "looked",
    )
    assert done.stdout == "cli/bill-7 is completed\n", done.stderr
    assert "result   paid" in run("dedup", "get", "cli/bill-7").stdout
    assert run("dedup", "get", "cli/nothing").returncode == 1


def test_cluster_commands(run: Run) -> None:
    assert parsed(run("cluster", "snapshot", "--json"))["snapshot_index"] > 0
    assert len(parsed(run("cluster", "digest", "--json"))["digest"]) >= 32
    alone = run("cluster", "transfer-leader")
    assert alone.returncode != 0
    assert "Traceback" not in alone.stderr


def test_errors_name_what_is_wrong(run: Run) -> None:
    bad = run("lease", "get", "ends with a slash/", "--json")
    assert bad.returncode == 2
    assert json.loads(bad.stderr)["error"]["facts"]["field"] == "name"
    assert run("lease", "ls", "--tenant", "nobody").returncode == 1
    assert run("lease", "ls", "--tls-cert", "x").returncode == 2
    assert run("lease", "ls", "--address", "example.invalid:1").returncode == 4


def test_over_tcp_both_sides_show_a_certificate(run: Run, sidecar: Sidecar) -> None:
    there = ("status", "--json", "--address", sidecar.tcp)
    ca = ("--tls-ca", str(sidecar.certs / "ca.pem"))
    own = ("--tls-cert", str(sidecar.certs / "agent.pem"), "--tls-key", str(sidecar.certs / "agent.key"))
    assert parsed(run(*there, *ca, *own))["node_id"] == "n1"
    for incomplete in ((), ca):
        refused = run(*there, *incomplete)
        assert refused.returncode == 4
        assert "--tls-ca" in json.loads(refused.stderr)["error"]["todo"]
    locked = run("lock", "cli/tcp", "--address", sidecar.tcp, *ca, *own, "--", "sh", "-c", "exit 9")
    assert locked.returncode == 9, locked.stderr


def test_lock_gives_the_token_and_returns_the_status(run: Run) -> None:
    done = run("lock", "cli/lock", "--", "sh", "-c", 'echo "$TENURE_LEASE $TENURE_FENCING_TOKEN"; exit 7')
    assert done.returncode == 7, done.stderr
    name, token = done.stdout.split()
    assert name == "cli/lock"
    assert int(token) > 0
    assert run("lock", "cli/lock", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert run("lock", "cli/lock", "--", "no-such-command").returncode == 127
    assert run("lock", "cli/lock", "--", "/etc/passwd").returncode == 126


def test_lock_that_is_held(run: Run, address: str) -> None:
    with tenure.connect_sync(address) as client:
        client.acquire("cli/held")
        tried = run("lock", "cli/held", "--", "true")
        assert tried.returncode == 75
        assert "LEASE_HELD" in tried.stderr


def start_lock(address: str, name: str, script: str, *options: str) -> subprocess.Popen[str]:
    settings = CLEAN | {"TENURE_ADDRESS": address}
    return subprocess.Popen(
        command("lock", name, *options, "--", "sh", "-c", script),
        env=settings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_lock_passes_signals_on(address: str) -> None:
    lock = start_lock(address, "cli/signals", 'trap "exit 42" USR1; echo started; while :; do sleep 0.05; done')
    assert lock.stdout is not None
    assert lock.stdout.readline() == "started\n"
    lock.send_signal(signal.SIGUSR1)
    _, said = lock.communicate(timeout=30)
    assert lock.returncode == 42, said


def test_lock_that_is_lost_ends_the_command(run: Run, address: str, tmp_path: Path) -> None:
    alive = tmp_path / "pid"
    lock = start_lock(address, "cli/lost", f"echo $$ > {alive}; echo started; exec sleep 600")
    assert lock.stdout is not None
    assert lock.stdout.readline() == "started\n"
    token = parsed(run("lease", "get", "cli/lost", "--json"))["lease"]["holders"][0]["token"]
    assert run("lease", "release", "cli/lost", "--token", str(token), "--reason", "test").returncode == 0
    _, said = lock.communicate(timeout=30)
    assert lock.returncode == 76, said
    assert not Path(f"/proc/{alive.read_text().strip()}").exists()


def test_the_command_does_not_outlive_a_killed_lock(run: Run, address: str, tmp_path: Path) -> None:
    alive = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {alive}; echo started; wait"
    lock = start_lock(address, "cli/killed", script)
    assert lock.stdout is not None
    assert lock.stdout.readline() == "started\n"
    lock.kill()
    lock.communicate(timeout=30)
    for pid in alive.read_text().split():
        wait_until(lambda: not running(pid), 10)  # noqa: B023
    # The next one gets it after the grace, with a larger token.
    assert run("lock", "cli/killed", "--wait", "20", "--", "true").returncode == 0


def test_the_command_has_ended_before_another_can_hold_the_lease_of_a_stopped_lock(
    run: Run, address: str, tmp_path: Path
) -> None:
    alive = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {alive}; echo started; wait"
    lock = start_lock(address, "cli/stopped", script, "--ttl", "2", "--grace", "0.5")
    assert lock.stdout is not None
    assert lock.stdout.readline() == "started\n"
    pids = alive.read_text().split()
    lock.send_signal(signal.SIGSTOP)
    still = f"for pid in {' '.join(pids)}; do grep -s '^State:.[^Z]' /proc/$pid/status; done; true"
    looked = run("lock", "cli/stopped", "--wait", "20", "--", "sh", "-c", still)
    lock.send_signal(signal.SIGCONT)
    _, said = lock.communicate(timeout=30)
    assert (looked.returncode, looked.stdout) == (0, "")
    assert lock.returncode == 76, said


def running(pid: str) -> bool:
    """Not gone, and no zombie that nobody has looked at yet."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_json_has_numbers_and_every_field() -> None:
    record = as_dict(dedup_pb2.Record(begun_ms=1 << 40))
    assert record["begun_ms"] == 1 << 40
    assert record["error"] == ""


def test_certs_and_config(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = parsed(run("certs", "n1", "n2=n2.example", "--cluster", "c", "--out", str(folder), "--json"))
    assert [each["name"] for each in made] == ["ca", "n1", "n2"]
    kept = parsed(run("certs", "n1", "--cluster", "c", "--out", str(folder), "--json"))
    assert [each["renewed"] for each in kept] == [False, False]
    assert run("certs", "n1", "n1", "--cluster", "c", "--out", str(folder)).returncode == 2
    (tmp_path / "data").mkdir()
    checked = run(
        "config", "check", "--node-id", "n1", "--cluster-id", "c", "--peers", "n1=127.0.0.1:7070", "--insecure",
        "--data-dir", str(tmp_path / "data"), "--json",
    )  # fmt: skip
    assert parsed(checked)["node_id"] == {"value": "n1", "source": "flag"}
    wrong = run("config", "check", "--heartbeat-ms", "0", "--peers", "x")
    assert wrong.returncode == 2
    for text in ("--heartbeat-ms", "--peers", "node_id"):
        assert text in wrong.stderr
    tls = (
        "--peer-tls-cert",
        f"{folder}/n2.pem",
        "--peer-tls-key",
        f"{folder}/n2.key",
        "--peer-tls-ca",
        f"{folder}/ca.pem",
    )
    anothers = run("config", "check", "--node-id", "n1", "--cluster-id", "c", "--peers", "n1=127.0.0.1:7070", *tls)
    assert anothers.returncode == 2
    assert "it names tenure://c/n2, but this is tenure://c/n1" in anothers.stderr
