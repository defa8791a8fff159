"""Links that can be cut: what a partition lets through (nothing), keeps (everything) and says (nothing)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sidecar.dev import ports
from sidecar.dev.links import Mesh
from sidecar.dev.ports import free_ports
from tests.waiting import eventually

Dial = Callable[[str, str], Awaitable["Talk"]]


class Talk:
    """One end of a connection that collects what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.heard = b""
        self.ended = ""
        self.task = asyncio.ensure_future(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(1_000):
                self.heard += data
            self.ended = "end of stream"
        except ConnectionResetError:
            self.ended = "reset"

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def close(self) -> None:
        self.writer.close()


class Town:
    """Three nodes that only listen and dial; ``accepted`` has the far ends by node."""

    def __init__(self) -> None:
        self.ports = dict(zip(("n1", "n2", "n3"), free_ports(3), strict=True))
        self.mesh = Mesh(self.ports)
        self.accepted: dict[str, list[Talk]] = {name: [] for name in self.ports}
        self.servers: dict[str, asyncio.Server] = {}
        self.dialled: list[Talk] = []

    async def start(self) -> None:
        await self.mesh.start()
        for name in self.ports:
            await self.listen(name)

    async def listen(self, name: str) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted[name].append(Talk(reader, writer))

        self.servers[name] = await asyncio.start_server(accept, "127.0.0.1", self.ports[name])

    async def dial(self, source: str, target: str) -> Talk:
        talk = Talk(*await asyncio.open_connection("127.0.0.1", self.mesh.links[source, target].port))
        self.dialled.append(talk)
        return talk

    async def pair(self, source: str, target: str) -> tuple[Talk, Talk]:
        """A connection that is known to work."""
        talk, before = await self.dial(source, target), len(self.accepted[target])
        await eventually(lambda: len(self.accepted[target]) > before)
        return talk, self.accepted[target][-1]

    async def stop(self) -> None:
        for server in self.servers.values():
            server.close()
        for talk in (*self.dialled, *(talk for talks in self.accepted.values() for talk in talks)):
            talk.task.cancel()
            talk.close()
        await self.mesh.stop()


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    town = Town()
    await town.start()
    yield town
    await town.stop()


async def test_words_go_both_ways(town: Town) -> None:
    near, far = await town.pair("n1", "n2")
    near.say(b"to n2")
    far.say(b"to n1")
    await eventually(lambda: (far.heard, near.heard) == (b"to n2", b"to n1"))


async def test_a_full_partition_is_silent_and_late_words_arrive_on_heal(town: Town) -> None:
    near, far = await town.pair("n1", "n2")
    other, beyond = await town.pair("n2", "n3")
    town.mesh.partition("n1")
    near.say(b"a")
    far.say(b"b")
    other.say(b"c")
    await eventually(lambda: beyond.heard == b"c")  # the others still talk
    assert (near.heard, far.heard, near.ended, far.ended) == (b"", b"", "", "")
    assert [town.mesh.cut_off(node) for node in town.ports] == ["full", "", ""]
    town.mesh.heal()
    await eventually(lambda: (near.heard, far.heard) == (b"b", b"a"))
    assert [town.mesh.cut_off(node) for node in town.ports] == ["", "", ""]


async def test_a_new_connection_hangs_in_a_partition(town: Town) -> None:
    town.mesh.partition("n2")
    near = await town.dial("n1", "n2")
    near.say(b"hello")
    other, beyond = await town.pair("n1", "n3")
    other.say(b"meanwhile")
    await eventually(lambda: beyond.heard == b"meanwhile")
    assert (town.accepted["n2"], near.ended) == ([], "")
    town.mesh.heal()
    await eventually(lambda: bool(town.accepted["n2"]) and town.accepted["n2"][0].heard == b"hello")


async def test_one_way_nobody_hears_it_and_it_hears_everybody_whoever_dialled(town: Town) -> None:
    near, far = await town.pair("n1", "n2")  # n1 dialled
    back, ahead = await town.pair("n3", "n1")  # n1 answered
    town.mesh.partition("n1", one_way=True)
    for talk in (near, ahead):
        talk.say(b"from n1")
    for talk in (far, back):
        talk.say(b"to n1")
    await eventually(lambda: (near.heard, ahead.heard) == (b"to n1", b"to n1"))
    assert (far.heard, back.heard) == (b"", b"")
    assert town.mesh.cut_off("n1") == "one-way"
    town.mesh.heal()
    await eventually(lambda: (far.heard, back.heard) == (b"from n1", b"from n1"))


async def test_the_end_of_one_side_is_a_reset_for_the_other_but_not_through_a_partition(town: Town) -> None:
    near, far = await town.pair("n1", "n2")
    cut, unheard = await town.pair("n3", "n2")
    town.mesh.partition("n3")
    unheard.close()
    far.close()
    await eventually(lambda: bool(near.ended))
    assert cut.ended == ""
    town.mesh.heal()
    await eventually(lambda: bool(cut.ended))


async def test_a_node_that_is_down_refuses_and_is_reached_again_when_it_is_back(town: Town) -> None:
    town.servers["n2"].close()
    near = await town.dial("n1", "n2")
    await eventually(lambda: bool(near.ended))
    await town.listen("n2")
    again, far = await town.pair("n1", "n2")
    again.say(b"hello")
    await eventually(lambda: far.heard == b"hello")


def test_a_port_that_was_given_out_is_not_bound_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may not listen yet."""
    (given,) = free_ports(1)
    candidates = iter([given, given, given + 1, given + 2, given + 3])
    monkeypatch.setattr(random, "randint", lambda first, last: next(candidates))
    bound = ports.bind()
    try:
        assert bound.getsockname()[1] != given
    finally:
        bound.close()
