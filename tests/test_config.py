"""Settings: one name in three places, and every mistake said at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.config import ConfigError, Loaded, Settings, effective, is_loopback, load, split_address
from sidecar.core.commands import Limits


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("TENURE_"):
            monkeypatch.delenv(name)
    yield


def flags(tmp_path: Path, **changes: object) -> dict[str, object]:
    return {
        "node_id": "n1",
        "cluster_id": "c1",
        "peers": "n1=127.0.0.1:7001",
        "data_dir": str(tmp_path / "data"),
        "socket": str(tmp_path / "t.sock"),
        **changes,
    }


def three(tmp_path: Path, **changes: object) -> dict[str, object]:
    peers = "n1=127.0.0.1:7001,n2=127.0.0.1:7002,n3=127.0.0.1:7003"
    return flags(tmp_path, **{"peers": peers, "insecure": True, **changes})


def wrong(**given: object) -> dict[str, str]:
    """Setting -> its line, of what is refused."""
    with pytest.raises(ConfigError) as caught:
        load(given)
    return {problem.setting: str(problem) for problem in caught.value.problems}


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tenure.toml"
    file.write_text('heartbeat_ms = 60\nelection_min_ms = 400\ntenants = ["a", "b"]\nlog_level = "debug"\n')
    monkeypatch.setenv("TENURE_CONFIG", str(file))
    monkeypatch.setenv("TENURE_HEARTBEAT_MS", "70")
    monkeypatch.setenv("TENURE_ELECTION_MIN_MS", "500")
    loaded = load(flags(tmp_path, heartbeat_ms="80", log_format=None))
    assert loaded.file == file
    settings = loaded.settings
    assert (settings.heartbeat_ms, settings.election_min_ms, settings.election_max_ms) == (80, 500, 1_600)
    assert settings.tenants == ("a", "b") and settings.log_level == "debug"
    sources = {row.setting: row.source for row in effective(loaded)}
    assert [sources[name] for name in ("heartbeat_ms", "election_min_ms", "tenants", "log_format")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]


def test_what_is_shown_can_be_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(three(tmp_path, tenants="a,b", socket_mode="0600", require_deadline="false"))
    for row in effective(loaded):
        if row.value != "(none)":
            monkeypatch.setenv(row.variable, row.value)
    assert load().settings == loaded.settings


def test_every_mistake_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tenure.toml"
    file.write_text('snapshot_entries = "many"\nhartbeat_ms = 5\n')
    monkeypatch.setenv("TENURE_LOG_LEVEL", "loud")
    monkeypatch.setenv("TENURE_NODE_IDX", "n1")
    given = flags(tmp_path, node_id="n9", peers="n1=127.0.0.1:7001,n2=127.0.0.1:7001", tenants="a b", colour="red")
    with pytest.raises(ConfigError) as caught:
        load(given, file)
    text = str(caught.value)
    for expected in (
        "key snapshot_entries (file) is many: must be a whole number from 100 to 10000000",
        "key hartbeat_ms (file) is 5: there is no such setting; did you mean heartbeat_ms?",
        "TENURE_LOG_LEVEL (environment) is loud: must be one of debug, info, warning, error",
        "TENURE_NODE_IDX (environment) is n1: there is no such setting; did you mean TENURE_NODE_ID?",
        "--colour (flag) is red: there is no such setting",
        "--tenants (flag) is a b: each tenant must be",
        "must name 1, 3, 5 or 7 nodes, not 2",
        "must give each node an address of its own",
        "must include this node, n9",
        "peer_tls_cert is (none): must be given (or insecure = true, on loopback only) (set TENURE_PEER_TLS_CERT,",
    ):
        assert expected in text, text
    assert text.startswith(f"{len(caught.value.problems)} settings are wrong:")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("node_id", "", "must be given"),
        ("node_id", "a/b", "must be 1 to 64 letters"),
        ("cluster_id", "x" * 65, "must be 1 to 64 letters"),
        ("peers", "n1", "must be a list like"),
        ("peers", "n1=127.0.0.1:1,n1=127.0.0.1:2", "names the node n1 twice"),
        ("peers", "n1=127.0.0.1:0", "needs a port"),
        ("peers", "n1=127.0.0.1:70000", "must be host:port"),
        ("peers", "n1=::1:70", "must be host:port"),
        ("heartbeat_ms", "0", "from 10 to 10000"),
        ("heartbeat_ms", "10.5", "from 10 to 10000"),
        ("heartbeat_ms", "", "from 10 to 10000"),
        ("election_min_ms", "300", "must be more than 3 * heartbeat_ms = 300"),
        ("election_max_ms", "800", "must be more than election_min_ms = 800"),
        ("renewal_window_ms", "900", "must be at most election_min_ms = 800"),
        ("shed_lag_ms", "800", "must be less than election_min_ms"),
        ("bootstrap", "maybe", "must be true or false"),
        ("log_format", "xml", "must be one of json, console"),
        ("socket_mode", "rw", "must be an octal mode"),
        ("socket_group", "no-such-group", "must be a group of this machine"),
        ("socket", "", "must be given, or grpc_listen"),
        ("socket", "t.sock", "must be an absolute path"),
        ("socket", "/tmp/" + "x" * 100, "must be at most 100 bytes long"),
        ("tenants", "", "must name one tenant or more"),
        ("grpc_listen", "127.0.0.1", "must be host:port"),
        ("grpc_listen", "127.0.0.1:5", "or insecure = true on loopback"),
        ("grpc_listen", "0.0.0.0:5", "plaintext is refused"),
        ("grpc_tls_client_ca", "/does/not/exist", "must be a file that this user can read"),
        ("limits_request_retention_min_ms", "400000", "must be at most limits_request_retention_ms = 300000"),
        ("data_dir", "/dev/null/data", "is not a folder"),
    ],
)
def test_one_mistake(tmp_path: Path, name: str, value: str, expected: str) -> None:
    found = wrong(**flags(tmp_path, **{name: value}))
    assert expected in found[name]


def test_plaintext_between_peers_is_for_loopback_only(tmp_path: Path) -> None:
    assert load(three(tmp_path)).settings.peers_plaintext
    away = three(tmp_path, peers="n1=10.0.0.1:7001,n2=127.0.0.1:7002,n3=127.0.0.1:7003")
    assert "the address of n1 is 10.0.0.1:7001" in wrong(**away)["insecure"]
    assert "must be a loopback address" in wrong(**three(tmp_path, peer_listen="0.0.0.0:7001"))["peer_listen"]


def test_a_single_node_needs_no_certificates(tmp_path: Path) -> None:
    assert load(flags(tmp_path)).settings.peer_ids == ()


def test_variables_of_others_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TENURE_ADDRESS",
        "TENURE_TENANT",
        "TENURE_FENCING_TOKEN",
        "TENURE_SERVICE_HOST",
        "TENURE_SERVICE_PORT_GRPC",
        "TENURE_PORT",
        "TENURE_PORT_8321_TCP",
        "TENURE_PORT_8321_TCP_ADDR",
        "TENURE_PEERS_SERVICE_HOST",
        "TENURE_0_PORT_7001_TCP_PROTO",
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8321")
    load(flags(tmp_path))
    monkeypatch.setenv("TENURE_HTTP_PORTS", "1")
    assert set(wrong(**flags(tmp_path))) == {"http_ports"}


@pytest.mark.parametrize("content", ["heartbeat_ms = ", "\xff", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tenure.toml"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load(flags(tmp_path), file)
    assert str(file) in str(caught.value) and "TOML" in str(caught.value)


def test_limits_are_those_of_the_state_machine() -> None:
    assert Settings().limits == Limits()
    named = {name.removeprefix("limits_") for name in Settings.model_fields if name.startswith("limits_")}
    assert named == set(Limits.__struct_fields__)
    assert Settings(limits_sessions_max=7).limits == Limits(sessions_max=7)


def test_every_setting_is_described_and_has_no_secret() -> None:
    rows = effective(Loaded(Settings(), {}))
    assert len(rows) == len(Settings.model_fields) and all(row.description for row in rows)
    assert not [row for row in rows if "password" in row.setting or "secret" in row.setting]


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("host.example:0") == ("host.example", 0)
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "n1")] == [True] * 3 + [
        False
    ] * 2
