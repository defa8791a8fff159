"""The command as a process: help, wrong usage, wrong settings, no cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sidecar import config
from sidecar.cli import calls
from sidecar.config import Settings, flag

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}


def tenure(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidecar", *arguments]
    settings = {**CLEAN, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=settings, timeout=60)


def test_help_names_the_commands_and_the_exit_statuses() -> None:
    shown = tenure("--help")
    assert shown.returncode == 0
    for word in ("serve", "dev", "it may have", "4 no sidecar"):
        assert word in shown.stdout


def test_version() -> None:
    assert tenure("--version").stdout.strip() == version("tenure-sidecar")


def test_a_light_command_does_not_import_what_it_does_not_need() -> None:
    heavy = ("grpc", "pydantic_settings", "pysyncobj", "uvloop", "aiohttp")
    script = f"import sys, sidecar.cli.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Says so when the command imports one of the modules, and waits there for ever.
HANGING_IMPORT = """
import sys, time
class Hanging:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            print("importing", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Hanging())
sys.argv = ["tenure", "serve"]
from sidecar.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["typer", "sidecar.config", "sidecar.server"])
def test_a_signal_before_the_sidecar_serves_ends_it_in_order(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    settings = {"NODE_ID": "n1", "CLUSTER_ID": "c1", "PEERS": "n1=127.0.0.1:7000", "DATA_DIR": str(tmp_path)}
    environment = CLEAN | {f"TENURE_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-c", HANGING_IMPORT.format(name=module)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "importing\n", process.stderr.read()
            process.send_signal(number)
            assert (process.wait(30), process.stderr.read()) == (0, "")
        finally:
            process.kill()


def test_there_is_a_flag_for_every_setting() -> None:
    shown = tenure("serve", "--help").stdout
    for name in Settings.model_fields:
        assert flag(name) in shown, name
    assert "octal mode of the socket [0660]" in shown


def test_every_wrong_setting_is_reported_at_once() -> None:
    done = tenure("serve", "--node-id", "n1", "--heartbeat-ms", "soon", TENURE_ELECTION_MIN_MS="-3", TENURE_NODEID="n1")
    assert done.returncode == 2
    for text in ("cluster_id", "peers", "--heartbeat-ms", "TENURE_ELECTION_MIN_MS", "did you mean TENURE_NODE_ID"):
        assert text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_or_command_is_wrong_usage() -> None:
    assert tenure("serve", "--nonsense").returncode == 2
    assert tenure("nonsense").returncode == 2
    assert tenure("dev", "kill").returncode == 2
    assert tenure("lock", "name", "--ttl", "100000", "--", "true").returncode == 2
    assert tenure("dev", "kill", "the", "second", "node").returncode == 2


def test_a_command_that_waits_for_a_sidecar_says_so(tmp_path: Path) -> None:
    """Before it has waited to the end: the line is read while the command still runs."""
    address = f"unix:{tmp_path / 's'}"
    for arguments, limit in (
        (["lock", "name", "--address", address, "--", "true"], "up to 10 s"),
        (["watch", "--address", address], "for as long as it takes"),
    ):
        command = [sys.executable, "-m", "sidecar", *arguments]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=CLEAN) as process:
            assert process.stderr is not None
            try:
                line = process.stderr.readline()
                assert line.startswith(f"tenure: waiting for the sidecar at {address} ({limit})") and "\n" in line
                assert process.poll() is None
            finally:
                process.kill()


def test_one_that_cannot_be_connected_with_says_what_it_waits_for_unless_a_program_reads_it(tmp_path: Path) -> None:
    """Something listens and never answers."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        arguments = ("status", "--address", f"unix:{tmp_path / 's'}", "--timeout", "1.5")
        assert f"waiting for the sidecar at unix:{tmp_path / 's'} (up to 1.5 s)" in tenure(*arguments).stderr
        done = tenure(*arguments, "--json")
        assert json.loads(done.stderr)["error"]["reason"] == "NO_CONNECTION" and not done.stdout


def test_a_variable_that_nobody_reads_is_said_with_the_nearest_that_is(tmp_path: Path) -> None:
    arguments = ("status", "--address", f"unix:{tmp_path / 's'}")
    wrong: dict[str, Any] = {"TENURE_TENNANT": "a", "TENURE_LOG_LEVEL": "info", "TENURE_PORT": "tcp://10.0.0.1:80"}
    done = tenure(*arguments, **wrong)
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "TENURE_TENNANT" in warnings[0] and "did you mean TENURE_TENANT?" in warnings[0]
    assert "warning" not in tenure(*arguments, TENURE_TENANT="a", TENURE_AGENT="b").stderr
    assert json.loads(tenure(*arguments, "--json", **wrong).stderr)


def test_the_variables_of_commands_are_those_that_a_sidecar_leaves_alone() -> None:
    assert calls.VARIABLES == config.OTHER_VARIABLES


def test_orders_without_a_cluster_say_so(tmp_path: Path) -> None:
    done = tenure("dev", "--state-dir", str(tmp_path / "dev"), "heal", "--json")
    assert done.returncode == 1
    assert "start one with 'tenure dev'" in json.loads(done.stderr)["error"]["message"]


def test_no_examples_is_said_before_anything_is_started(tmp_path: Path) -> None:
    done = tenure("dev", "--state-dir", str(tmp_path / "dev"), "--examples", str(tmp_path))
    assert done.returncode == 1
    assert "say where the examples are with --examples" in done.stderr
    assert not (tmp_path / "dev").exists()
