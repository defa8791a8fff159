"""The command as a process: help, wrong usage, wrong settings, no cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

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


def test_orders_without_a_cluster_say_so(tmp_path: Path) -> None:
    done = tenure("dev", "--state-dir", str(tmp_path / "dev"), "heal", "--json")
    assert done.returncode == 1
    assert "start one with 'tenure dev'" in json.loads(done.stderr)["error"]["message"]


def test_no_examples_is_said_before_anything_is_started(tmp_path: Path) -> None:
    done = tenure("dev", "--state-dir", str(tmp_path / "dev"), "--examples", str(tmp_path))
    assert done.returncode == 1
    assert "say where the examples are with --examples" in done.stderr
    assert not (tmp_path / "dev").exists()
