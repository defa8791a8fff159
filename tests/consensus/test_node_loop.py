"""The asyncio driver, on asyncio's own loop and on uvloop: real time, a network and disks in memory."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from sidecar.consensus.loop import NodeLoop
from sidecar.consensus.node import Node, NodeSettings
from sidecar.consensus.ports import PeerEvents, StoreError
from tests.consensus.harness import ListApplication, MemorySnapshots, MemoryStore
from tests.waiting import eventually


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class LoopNetwork:
    """Delivers each frame in a later pass of the event loop."""

    def __init__(self) -> None:
        self.events: dict[str, PeerEvents] = {}


class LoopTransport:
    def __init__(self, name: str, network: LoopNetwork) -> None:
        self.name = name
        self.network = network

    def start(self, events: PeerEvents) -> None:
        self.network.events[self.name] = events

    def send(self, peer: str, frame: bytes) -> bool:
        if peer not in self.network.events:
            return False
        asyncio.get_running_loop().call_soon(self.network.events[peer].frame_received, self.name, frame)
        return True

    def connected(self, peer: str) -> bool:
        return peer in self.network.events

    def flush(self) -> None: ...


class Member:
    def __init__(self, name: str, peers: tuple[str, ...], network: LoopNetwork) -> None:
        clock = SystemClock()
        self.turns = 0
        self.loop = NodeLoop(clock, self._count)
        self.application = ListApplication()
        self.store = MemoryStore()
        self.node = Node(
            NodeSettings(
                cluster_id="c",
                node_id=name,
                peers=peers,
                bootstrap=True,
                heartbeat_ms=20,
                election_min_ms=150,
                election_max_ms=300,
                compact_entries=15,
            ),
            self.application,
            self.store,
            MemorySnapshots(),
            LoopTransport(name, network),
            clock,
            random.Random(name),
            self.loop.wake,
            self.loop.background,
        )
        self.task = asyncio.create_task(self.loop.run(self.node))

    def _count(self, turn_s: float, sync_s: float) -> None:
        assert turn_s >= sync_s >= 0
        self.turns += 1

    def propose(self, payload: bytes) -> None:
        self.application.to_propose.append(payload)
        self.loop.wake()


class SlowDisk:
    """From now on a sync of this store takes until the gate is opened."""

    def __init__(self, store: MemoryStore) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()
        self._take = store.take
        store.take = self.take  # type: ignore[method-assign]

    def take(self) -> Callable[[], None]:
        sync = self._take()

        def wait() -> None:
            self.entered.set()
            assert self.gate.wait(20)
            sync()

        return wait


async def cluster(size: int) -> list[Member]:
    network = LoopNetwork()
    names = [f"n{number}" for number in range(1, size + 1)]
    members = [Member(name, tuple(peer for peer in names if peer != name), network) for name in names]
    for member in members:
        for peer in member.node.settings.peers:
            member.node.peer_connected(peer)
    await eventually(lambda: any(member.node.is_leader() for member in members))
    return members


def leader_of(members: list[Member]) -> Member:
    return next(member for member in members if member.node.is_leader())


async def stop(members: list[Member]) -> None:
    for member in members:
        member.loop.stop()
    await asyncio.gather(*(member.task for member in members))


runners = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Runner = Callable[[Awaitable[None]], None]


@runners
@pytest.mark.parametrize("size", [1, 3])
def test_three_nodes_replicate_compact_and_stop(run: Runner, size: int) -> None:
    async def main() -> None:
        members = await cluster(size)
        leader = leader_of(members)
        for number in range(30):
            leader.propose(b"%d" % number)
            await eventually(lambda number=number: len(leader.application.applied) > number)  # type: ignore[misc]
        await eventually(lambda: all(len(member.application.applied) == 30 for member in members))
        await eventually(lambda: all(member.store.snapshot for member in members))
        assert leader.loop.last_turn_s is not None
        await stop(members)

    run(main())


@runners
def test_an_idle_node_sleeps(run: Runner) -> None:
    async def main() -> None:
        members = await cluster(3)
        raft = leader_of(members).node._raft
        before, round_before = [member.turns for member in members], raft.round
        await eventually(lambda: raft.round >= round_before + 25)
        rounds = raft.round - round_before + 2
        for member, turns in zip(members, before, strict=True):
            # A leader: one turn for each heartbeat and each of two answers; a follower one for each heartbeat.
            assert member.turns - turns <= 4 * rounds
        await stop(members)

    run(main())


@runners
def test_what_ends_the_node_is_raised(run: Runner) -> None:
    async def main() -> None:
        (member,) = await cluster(1)
        member.store.sync_error = StoreError("log.db: no space left on the device")
        member.propose(b"x")
        with pytest.raises(StoreError, match="no space left"):
            await member.task
        assert member.application.applied == []

    run(main())


@runners
def test_the_event_loop_goes_on_while_the_disk_is_slow(run: Runner) -> None:
    async def main() -> None:
        (member,) = await cluster(1)
        disk = SlowDisk(member.store)
        results: list[bool] = []
        member.propose(b"x")
        await eventually(disk.entered.is_set)
        member.node.read_barrier(results.append)  # this very coroutine runs: the loop is free
        assert member.application.applied == []
        disk.gate.set()
        await eventually(lambda: member.application.applied == [b"x"] and results == [True])
        await stop([member])

    run(main())


@runners
def test_cancelling_waits_for_the_sync_that_is_going_on(run: Runner) -> None:
    async def main() -> None:
        (member,) = await cluster(1)
        disk = SlowDisk(member.store)
        member.propose(b"x")
        await eventually(disk.entered.is_set)
        timer = threading.Timer(0.05, disk.gate.set)
        timer.start()
        member.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await member.task
        assert not member.store.queued
        timer.join()

    run(main())


def test_wake_from_another_thread() -> None:
    async def main() -> None:
        (member,) = await cluster(1)
        member.application.to_propose.append(b"x")  # without a wake-up
        thread = threading.Thread(target=member.loop.wake_threadsafe)
        thread.start()
        await eventually(lambda: member.application.applied == [b"x"])
        thread.join()
        await stop([member])

    asyncio.run(main())
