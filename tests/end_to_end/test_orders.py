"""Orders: which ones are understood, what they are turned into, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.dev import name_of
from sidecar.cli.failures import CliError
from sidecar.dev import orders
from sidecar.dev.cluster import DevCluster, agent_of, node_of
from sidecar.dev.errors import DevError
from sidecar.dev.observer import Observed, Observer
from sidecar.dev.orders import ControlServer, Orders


@pytest.fixture
async def given(cluster: DevCluster) -> AsyncIterator[Orders]:
    observer = Observer(cluster, Observed())
    yield Orders(cluster, observer)
    await observer.stop()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"order": "kill", "target": "n9"}, "no node or agent is called n9: there are n1, n2, n3, agent-1"),
        ({"order": "kill", "target": "2"}, "n2 is not running"),
        ({"order": "kill", "target": "leader"}, "there is no leader now"),
        ({"order": "kill", "target": "holder"}, "there is no holder now"),
        ({"order": "partition", "target": "agent-9", "one_way": False}, "no node is called agent-9"),
        ({"order": "restart", "target": "agent-1"}, "no node is called agent-1"),
        ({"order": "trigger", "target": ""}, "no job is known yet"),
        ({"order": "trigger", "target": "digest"}, "no node answers"),
        ({"order": "pause", "target": "digest"}, "no node answers"),
        ({"order": "kill_job", "target": "digest"}, "no node answers"),
        ({"order": "resume", "target": "digest"}, "no switch is in force for digest"),
        ({"order": "drain", "target": None}, "not an order"),
        ({"order": "dance"}, "not an order"),
        ({"order": "kill", "target": 7}, "not an order"),
        (["kill"], "not an order"),
    ],
)
async def test_what_cannot_be_done_is_refused(given: Orders, order: Any, message: str) -> None:
    with pytest.raises(DevError, match=message):
        await given.obey(order)


async def test_partition_and_heal(given: Orders, cluster: DevCluster) -> None:
    said = await given.obey({"order": "partition", "target": "agent-2", "one_way": True})
    assert said == {"said": "n2 is cut off one way: it hears the others and they do not hear it"}
    assert cluster.mesh.cut_off("n2") == "one-way"
    await given.obey({"order": "partition", "target": "2", "one_way": False})
    assert (await given.obey({"order": "status"}))["status"]["nodes"][1]["cut_off"] == "full"
    await given.obey({"order": "heal"})
    assert cluster.mesh.cut_off("n2") == ""


async def test_the_control_socket_answers_garbage_too(given: Orders, tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    control = ControlServer(given, path)
    await control.start()
    try:
        assert (await orders.send(path, {"order": "heal"}))["said"] == "all links are whole"
        with pytest.raises(DevError, match="not an order"):
            await orders.send(path, {})
    finally:
        await control.stop()
    with pytest.raises(DevError, match="start one with 'tenure dev'"):
        await orders.send(path, {"order": "heal"})


def test_names() -> None:
    assert [name_of(words) for words in (["leader"], ["node", "2"], ["node", "n2"], ["agent", "3"], ["agent-3"])] == [
        "leader", "n2", "n2", "agent-3", "agent-3",
    ]  # fmt: skip
    with pytest.raises(CliError):
        name_of(["the", "second", "node"])
    assert [node_of(agent_of(name)) for name in ("n1", "n2")] == ["n1", "n2"]
