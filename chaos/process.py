"""Our node in the simulated world: the very class that runs in production, behind simulated ports.

``NodeRunner`` is the simulated counterpart of the asyncio loop that drives the node in a sidecar: it calls
``begin_turn``, lets the returned work become durable after the disk's virtual latency, calls ``end_turn``, and begins
the next turn no earlier. ``RegisterProcess`` runs the small register application on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from chaos.checkers import Checkers
from chaos.disk import LogVolume, SimLogStore, SimSnapshotStore
from chaos.images import LogImage
from chaos.register import RegisterApplication
from chaos.world import Host, ProcessStopped, World
from sidecar.consensus.messages import Append, Vote, VoteRequest, decode
from sidecar.consensus.node import Node, NodeSettings, Turn
from sidecar.consensus.ports import Application, PeerEvents, Role, StoreError

_VOTES_ARE_SHORTER = 100  # bytes


class SimPeerTransport:
    """The port ``PeerTransport``. Checks at each frame that nothing leaves before it is durable."""

    def __init__(self, host: Host, store: SimLogStore, checkers: Checkers) -> None:
        self._host = host
        self._store = store
        self._checkers = checkers

    def start(self, events: PeerEvents) -> None:
        return

    def send(self, peer: str, frame: bytes) -> bool:
        world = self._host.world
        self._checkers.sent(self._host.name, self._store.in_doubt)
        if len(frame) < _VOTES_ARE_SHORTER:
            self._note_vote(peer, frame)
        if world.verbose:
            world.detail(self._host.name, f"-> {peer} {describe(frame)}")
        return world.network.send(self._host.name, peer, frame, len(frame))

    def _note_vote(self, peer: str, frame: bytes) -> None:
        envelope = decode(frame, _VOTES_ARE_SHORTER)
        if isinstance(envelope.body, Vote):
            self._checkers.voted(self._host.name, envelope.term, envelope.term, peer)
        elif isinstance(envelope.body, VoteRequest):
            self._checkers.voted(self._host.name, envelope.term, envelope.term, self._host.name)

    def connected(self, peer: str) -> bool:
        return self._host.world.network.connected(self._host.name, peer)

    def flush(self) -> None:
        return


def describe(frame: bytes) -> str:
    envelope = decode(frame, 1 << 30)
    body = envelope.body
    if isinstance(body, Append):
        place = f"({body.previous_index}, t{body.previous_term})"
        text = f"Append after {place}, {len(body.entries)} entries, commit {body.commit_index}"
    else:
        text = repr(body)
    return f"t{envelope.term} r{envelope.round} {text[:160]}"


class NodeRunner:
    """Drives one ``Node`` turn by turn."""

    def __init__(self, host: Host, application: Callable[[SimLogStore], Application]) -> None:
        """``application`` is made when the store is open, because it may ask for the incarnation."""
        self.host = host
        world = host.world
        shape = world.shape
        volume = host.disk.volume
        assert isinstance(volume, LogVolume)
        self.volume = volume
        self.store = SimLogStore(host.disk, volume, world.checkers, host.clock.wall_ms())
        self.snapshots = SimSnapshotStore(host.disk, volume)
        self._turning = False
        self._wake_at_us: int | None = None
        self._wake_number = 0
        self._between_turns: list[Callable[[], None]] = []
        settings = NodeSettings(
            cluster_id="sim",
            node_id=host.name,
            peers=tuple(name for name in world.hosts if name != host.name),
            bootstrap=True,
            heartbeat_ms=shape.heartbeat_ms,
            election_min_ms=shape.election_ms[0],
            election_max_ms=shape.election_ms[1],
            entry_bytes_max=entry_bytes_max(shape.append_bytes_max),
            append_bytes_max=shape.append_bytes_max,
            compact_entries=shape.compact_entries,
            snapshot_chunk_bytes=shape.snapshot_chunk_bytes,
        )
        self.node = Node(
            settings,
            application(self.store),
            self.store,
            self.snapshots,
            SimPeerTransport(host, self.store, world.checkers),
            host.clock,
            world.rng,
            self.wake,
            self._background,
        )

    # ---- turns

    def wake(self) -> None:
        self._turn_in(self.host.world.between(*self.host.world.shape.cpu_us))

    def _turn_in(self, delay_us: int) -> None:
        """Have a turn by then; an earlier time replaces a later one."""
        if self._turning:
            delay_us = 0  # remembered: the end of the turn looks at it
        at_us = self.host.world.now_us + delay_us
        if self._wake_at_us is not None and self._wake_at_us <= at_us:
            return
        self._wake_at_us = at_us
        self._wake_number += 1
        if not self._turning:
            number = self._wake_number
            self.host.after(delay_us, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._wake_number and not self._turning:
            self._wake_at_us = None
            self._turn()

    def _turn(self) -> None:
        self._turning = True
        turn = stops_on_store_errors(self.node.begin_turn)
        if turn.durable is None:
            self._finish(turn)
        else:
            self.host.after(self.host.world.between(*self.host.disk.sync_us), lambda: self._sync(turn))

    def _sync(self, turn: Turn) -> None:
        assert turn.durable is not None
        stops_on_store_errors(turn.durable)
        # The worker thread is done; the node's own thread finds out a little later, or never.
        self.host.after(self.host.world.between(*self.host.world.shape.cpu_us), lambda: self._finish(turn))

    def _finish(self, turn: Turn) -> None:
        stops_on_store_errors(lambda: self.node.end_turn(turn))
        self._turning = False
        waiting, self._between_turns = self._between_turns, []
        for action in waiting:
            action()
        if self._wake_at_us is not None:
            self._wake_at_us = None
            self.wake()
        self._turn_in(max(self.host.clock.until_us(self.node.next_turn_s()), 10))

    # ---- other threads

    def _background(self, work: Callable[[], object], done: Callable[[object | BaseException], None]) -> None:
        def run() -> None:
            outcome: object | BaseException
            try:
                outcome = work()
            except Exception as error:  # noqa: BLE001 - the port hands every error to ``done``
                outcome = error
            self._between(lambda: done(outcome))

        self.host.after(self.host.world.between(*self.host.world.shape.background_us), run)

    def _between(self, action: Callable[[], None]) -> None:
        if self._turning:
            self._between_turns.append(lambda: stops_on_store_errors(action))
        else:
            stops_on_store_errors(action)
            self.wake()


T = TypeVar("T")


def entry_bytes_max(append_bytes_max: int) -> int:
    return min(1 << 20, append_bytes_max * 2 // 3)


def stops_on_store_errors(call: Callable[[], T]) -> T:
    """A store that refuses ends the process, as the composition root of the product does."""
    try:
        return call()
    except StoreError as error:
        raise ProcessStopped(str(error)) from error


class NodeProcess:
    """A process that is a node with some application: what hosts, faults and the simulation ask of any such process."""

    def __init__(self, host: Host, application: Callable[[SimLogStore], Application]) -> None:
        self._host = host
        self._world = host.world
        self._runner = stops_on_store_errors(lambda: NodeRunner(host, application))
        self._node = self._runner.node

    def start(self) -> None:
        self._runner.wake()

    def peer_connected(self, peer: str) -> None:
        self._node.peer_connected(peer)

    def peer_disconnected(self, peer: str, reset: bool) -> None:
        self._node.peer_disconnected(peer, reset=reset)

    def frame_received(self, peer: str, frame: object) -> None:
        assert isinstance(frame, bytes)
        self._node.frame_received(peer, frame)

    def applied_index(self) -> int:
        return self._node.status().applied_index

    def is_leader(self) -> bool:
        return self._node.is_leader()

    def transfer(self, to: str) -> None:
        self._node.transfer_leadership(to, lambda _: None)
        self._runner.wake()

    def snapshot(self) -> None:
        self._node.take_snapshot(lambda *_: None)
        self._runner.wake()

    # ---- what the checkers see

    def _tell_role(self, role: Role, term: int, image: LogImage) -> None:
        if role is Role.LEADER:
            self._world.checkers.leads(self._host.name, term, image)

    def _tell_applied(self, image: LogImage, index: int, payload: bytes, digest: str | None) -> None:
        entry = image.entries[index - image.entries[0].index]
        self._world.checkers.applied(self._host.name, index, entry.term, image.term, payload, digest)


class RegisterProcess(NodeProcess):
    """Our node with the register application."""

    def __init__(self, host: Host) -> None:
        shape = host.world.shape
        self._application = RegisterApplication(entry_bytes_max(shape.append_bytes_max), self._applied)
        self._application.on_role = self._role_changed
        self._application.on_restore = self._restored
        super().__init__(host, lambda _: self._application)
        self._application.forward = self._node.forward
        self._application.leading = self._node.is_leader

    def _role_changed(self, role: Role, term: int, leader: str | None) -> None:
        self._tell_role(role, term, self._runner.store.image)

    def _applied(self, index: int, payload: bytes, digest: str) -> None:
        self._tell_applied(self._runner.store.image, index, payload, digest)

    def _restored(self, index: int) -> None:
        self._world.checkers.restored(self._host.name, index)

    # ---- what workload and faults ask for

    def propose(self, command: int, done: Callable[[str], None]) -> None:
        padding = bytes(self._world.between(*self._world.shape.command_bytes))

        def settled(index: int) -> None:
            acknowledge(self._world, self._host.name, command, index)
            done("acked")

        self._application.propose(command, padding, settled)
        self._runner.wake()

    def read(self, done: Callable[[int | None], None]) -> None:
        self._node.read_barrier(lambda current: done(self.applied_index() if current else None))
        self._runner.wake()

    def digest(self) -> str:
        return self._application.digest()

    def holds(self, command: int) -> bool:
        return command in self._application.places


def acknowledge(world: World, host: str, command: int, index: int) -> None:
    """A client is told that ``command`` is done: from now on it must never be lost."""
    world.checkers.acknowledged(host, command, index)
    check_copies(world, host, index)


def check_copies(world: World, host: str, index: int) -> None:
    """When a client is told, a majority of the voters has the entry on disk (disks lost since then count)."""
    term = world.checkers.committed_term(index)
    copies = 0
    for each in world.hosts.values():
        volume = each.disk.volume
        assert isinstance(volume, LogVolume)
        if term is not None and volume.covers(index, term):
            copies += 1
    world.checkers.quorum(host, index, copies, len(world.hosts))
