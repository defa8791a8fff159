"""The manifests in examples/: they parse, and a sidecar takes the settings that they give it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import config
from sidecar.certs import write_certificates
from sidecar.config import split_address

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: a socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield Path(made)


def settings(
    environment: Mapping[str, str], mounts: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Settings:
    """What a sidecar would run with: ``mounts`` says which volume is where; each is a folder of the test instead."""
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            for path, volume in mounts.items():
                value = re.sub(rf"^{path}(?=/|$)", str(folder / volume), value)
            patch.setenv(name, value)
        return config.load().settings  # every mistake is an error, unknown names and missing files included


def all_agree(found: Mapping[str, config.Settings]) -> None:
    """One cluster: everybody is in it, under its own name and at its own place."""
    one = next(iter(found.values()))
    assert set(found) == set(one.peers) == {each.node_id for each in found.values()}
    for each in found.values():
        assert (each.peers, each.cluster_id, each.bootstrap) == (one.peers, one.cluster_id, True)
        assert not each.insecure
        ports = {split_address(address)[1] for address in each.peers.values()}
        assert ports == {split_address(each.peer_bind)[1]}


def test_compose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    services: dict[str, Any] = compose["services"]
    command = services.pop("certificates")["command"]
    nodes, cluster = command[1:4], command[command.index("--cluster") + 1]
    assert (command[0], nodes) == ("certs", list(services))
    write_certificates(folder / "certificates", cluster, {node: [] for node in nodes})
    found = {}
    for node, service in services.items():
        mounts = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
        assert set(mounts.values()) <= set(compose["volumes"])
        # What the image sets by itself is on volumes as well.
        defaults = {"TENURE_DATA_DIR": "/var/lib/tenure", "TENURE_SOCKET": "/run/tenure/tenure.sock"}
        found[node] = settings(defaults | service["environment"], mounts, folder, monkeypatch)
        assert found[node].data_dir == folder / f"{node}-data"
        assert Path(found[node].socket).parent == folder / f"{node}-socket"
        assert service["ports"][0].endswith(f":{split_address(found[node].http_listen)[1]}")
        assert found[node].drain_timeout_ms < 1_000 * int(service["stop_grace_period"].removesuffix("s"))
    all_agree(found)


def test_kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "agents.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    service, replicated = by_kind["Service"], by_kind["StatefulSet"]["spec"]
    pod = replicated["template"]["spec"]
    (sidecar,), (agent,) = pod["initContainers"], pod["containers"]

    # Found before they are ready, started together, and beside the agent for as long as that lives.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert replicated["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == replicated["selector"]["matchLabels"]
    assert service["spec"]["selector"] == replicated["template"]["metadata"]["labels"]
    assert (replicated["podManagementPolicy"], sidecar["restartPolicy"]) == ("Parallel", "Always")

    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    volumes = {volume["name"] for volume in (*pod["volumes"], *_claims(replicated))}
    assert set(mounts.values()) == volumes
    name, count = by_kind["StatefulSet"]["metadata"]["name"], replicated["replicas"]
    nodes = [f"{name}-{number}" for number in range(count)]
    write_certificates(folder / mounts["/etc/tenure"], "prod", {node: [] for node in nodes})
    found = {node: settings(_environment(sidecar, node), mounts, folder, monkeypatch) for node in nodes}
    all_agree(found)
    one = found[nodes[0]]
    assert one.peers[nodes[0]] == f"{nodes[0]}.{replicated['serviceName']}:7070"
    assert one.data_dir == folder / "data"
    assert one.drain_timeout_ms < 1_000 * pod["terminationGracePeriodSeconds"]

    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    assert ports == {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"peers": split_address(one.peer_bind)[1], "http": split_address(one.http_listen)[1]}
    probes = {kind: sidecar[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert all(probe["port"] == "http" for probe in probes.values())

    # The agent reaches the socket, by the volume and by the group.
    (shared,) = agent["volumeMounts"]
    assert _environment(agent, "") == {"TENURE_ADDRESS": f"unix:{shared['mountPath']}/tenure.sock"}
    assert Path(one.socket) == folder / shared["name"] / "tenure.sock" and one.socket_mode == 0o660
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def _claims(replicated: Any) -> list[Any]:
    return [claim["metadata"] for claim in replicated["volumeClaimTemplates"]]


def _environment(container: Any, pod: str) -> dict[str, str]:
    """As Kubernetes makes it: fields of the pod, and $(NAME) for what comes before."""
    made: dict[str, str] = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            made[entry["name"]] = pod
        else:
            assert isinstance(entry["value"], str), f"{entry['name']} needs quotes"
            made[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], entry["value"])
    return made
