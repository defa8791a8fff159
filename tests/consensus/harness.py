"""A cluster in one thread for directed tests: a clock that is moved by hand, a network and disks that fail on demand.

The simulator (chaos/) searches at random; here a test says exactly what happens. Frames are delivered at once and in
order unless a link is ``cut`` (nothing connects), ``held`` (frames wait), or a filter drops them.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from sidecar.consensus.messages import Body, Envelope, decode, encode
from sidecar.consensus.node import Node, NodeSettings
from sidecar.consensus.ports import Entry, PeerEvents, Role, SnapshotMeta, StoreError
from sidecar.consensus.raft import Raft

FRAME_BYTES_MAX = 64 << 20

Message = TypeVar("Message")


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_offset_ms = 1_700_000_000_000

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return self.wall_offset_ms + int(self.now_s * 1000)


class SharedClock:
    """A node's view of the harness's clock, with a wall clock of its own."""

    def __init__(self, clock: ManualClock, wall_ahead_ms: int = 0) -> None:
        self.clock = clock
        self.wall_ahead_ms = wall_ahead_ms

    def monotonic_s(self) -> float:
        return self.clock.now_s

    def wall_ms(self) -> int:
        return self.clock.wall_ms() + self.wall_ahead_ms


class MemoryStore:
    """LogStore in memory. ``crash`` keeps what was synced and the first ``keep`` of the queued changes."""

    def __init__(self) -> None:
        self.durable: dict[str, Any] = {
            "log": [],
            "term": 0,
            "vote": None,
            "commit_index": 0,
            "snapshot": None,
            "amnesiac_term": None,
        }
        self.queued: list[tuple[str, Any]] = []
        self.untaken = 0
        self.incarnation = 0
        self.fresh = True
        self.sync_error: StoreError | None = None
        self.state = self._copy()

    def _copy(self) -> dict[str, Any]:
        return {**self.durable, "log": list(self.durable["log"])}

    @staticmethod
    def _apply(state: dict[str, Any], kind: str, value: Any) -> None:
        if kind == "append":
            state["log"].append(value)
        elif kind == "truncate_from":
            del state["log"][value:]
        elif kind == "truncate_to":
            del state["log"][:value]
        elif kind == "reset":
            state["log"] = list(value)
        elif kind == "term":
            state["term"], state["vote"] = value
        else:
            state[kind] = value

    def _change(self, kind: str, value: Any) -> None:
        self._apply(self.state, kind, value)
        self.queued.append((kind, value))

    def reopen(self, keep: int = 0) -> MemoryStore:
        """What the next life finds."""
        for kind, value in self.queued[:keep]:
            self._apply(self.durable, kind, value)
        after = MemoryStore()
        after.durable = self.durable
        after.state = after._copy()
        after.incarnation = self.incarnation + 1
        after.fresh = False
        return after

    def __len__(self) -> int:
        return len(self.state["log"])

    def entry(self, position: int) -> Entry:
        assert position >= 0
        entry: Entry = self.state["log"][position]
        return entry

    def entries(self, start: int, stop: int) -> list[Entry]:
        assert start >= 0
        return list(self.state["log"][start:stop])

    @property
    def size_bytes(self) -> int:
        return sum(len(entry.command) for entry in self.state["log"])

    @property
    def term(self) -> int:
        return int(self.state["term"])

    @property
    def vote(self) -> str | None:
        vote: str | None = self.state["vote"]
        return vote

    @property
    def commit_index(self) -> int:
        return int(self.state["commit_index"])

    @property
    def snapshot(self) -> SnapshotMeta | None:
        meta: SnapshotMeta | None = self.state["snapshot"]
        return meta

    @property
    def amnesiac_term(self) -> int | None:
        term: int | None = self.state["amnesiac_term"]
        return term

    def append(self, entry: Entry) -> None:
        self._change("append", entry)

    def truncate_from(self, position: int) -> None:
        self._change("truncate_from", position)

    def truncate_to(self, position: int) -> None:
        self._change("truncate_to", position)

    def reset(self, entries: list[Entry]) -> None:
        self._change("reset", entries)

    def set_term(self, term: int, vote: str | None) -> None:
        self._change("term", (term, vote))

    def set_commit_index(self, index: int) -> None:
        self._change("commit_index", index)

    def set_snapshot(self, meta: SnapshotMeta) -> None:
        self._change("snapshot", meta)

    def set_amnesiac_term(self, term: int | None) -> None:
        self._change("amnesiac_term", term)

    @property
    def dirty(self) -> bool:
        return any(kind != "commit_index" for kind, _ in self.queued)

    def take(self) -> Callable[[], None]:
        def sync() -> None:
            if self.sync_error is not None:
                raise self.sync_error
            for kind, value in self.queued:
                self._apply(self.durable, kind, value)
            self.queued.clear()

        return sync

    def close(self) -> None: ...


class MemorySnapshots:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.incoming: SnapshotMeta | None = None
        self.received = b""
        self.corrupt_next = False
        self.full = False
        self.received_bytes = 0

    def write(self, index: int, term: int, previous_term: int, payload: bytes) -> SnapshotMeta:
        if self.full:
            raise StoreError("no space left on the device")
        name = f"own-{index}"
        self.files[name] = payload
        return SnapshotMeta(index, term, previous_term, name, len(payload), _checksum(payload))

    def read(self, meta: SnapshotMeta) -> bytes:
        payload = self.files.get(meta.file)
        if payload is None or _checksum(payload) != meta.checksum:
            raise StoreError(f"{meta.file} is missing or corrupt")
        return payload

    def chunk(self, meta: SnapshotMeta, offset: int, size: int) -> bytes:
        return self.files[meta.file][offset : offset + size]

    def receive_begin(self, meta: SnapshotMeta) -> None:
        self.incoming, self.received = meta, b""

    def receive_chunk(self, offset: int, data: bytes) -> None:
        assert offset == len(self.received)
        self.received += data
        self.received_bytes += len(data)

    def receive_end(self) -> SnapshotMeta:
        meta, payload = self.incoming, self.received
        assert meta is not None
        self.incoming, self.received = None, b""
        if self.corrupt_next:
            self.corrupt_next = False
            raise StoreError("checksum differs")
        if _checksum(payload) != meta.checksum:
            raise StoreError("checksum differs")
        name = f"received-{meta.index}"
        self.files[name] = payload
        return SnapshotMeta(meta.index, meta.term, meta.previous_term, name, meta.size_bytes, meta.checksum)

    def retain(self, keep: SnapshotMeta) -> None:
        self.files = {name: payload for name, payload in self.files.items() if name == keep.file}


def _checksum(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


class CapturedList:
    def __init__(self, items: list[bytes]) -> None:
        self.items = items

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self.items)


class ListApplication:
    """The replicated state is the list of payloads applied."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.indexes: list[int] = []
        self.to_propose: deque[bytes] = deque()
        self.heard: list[bytes] = []
        self.forwarded_payloads: list[tuple[str, bytes]] = []
        self.roles: list[tuple[Role, int, str | None]] = []
        self.settled = 0
        self.restored = 0
        self.raise_at: bytes | None = None

    def apply(self, index: int, payload: bytes) -> None:
        if payload == self.raise_at:
            raise RuntimeError(f"cannot apply {payload!r}")
        assert not self.indexes or index > self.indexes[-1]
        self.indexes.append(index)
        self.applied.append(payload)

    def received(self, payload: bytes) -> None:
        self.heard.append(payload)

    def next_entry(self) -> bytes | None:
        return self.to_propose.popleft() if self.to_propose else None

    def settle(self) -> None:
        self.settled += 1

    def role_changed(self, role: Role, term: int, leader: str | None) -> None:
        self.roles.append((role, term, leader))

    def forwarded(self, peer: str, payload: bytes) -> None:
        self.forwarded_payloads.append((peer, payload))

    def capture(self) -> CapturedList:
        return CapturedList(list(self.applied))

    def restore(self, payload: bytes) -> None:
        self.applied = msgspec.msgpack.decode(payload, type=list[bytes])
        self.restored += 1

    def digest(self) -> str:
        return hashlib.blake2b(b"\0".join(self.applied), digest_size=8).hexdigest()


class Host:
    """A machine with at most one node running on it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.store = MemoryStore()
        self.snapshots = MemorySnapshots()
        self.clock = SharedClock(cluster.clock)
        self.application = ListApplication()
        self.node: Node | None = None
        self.woken = False
        self.paused = False
        self.events: PeerEvents | None = None
        self.tasks: deque[tuple[Callable[[], object], Callable[[object | BaseException], None]]] = deque()
        self.hold_background = False
        self.on_sent: Callable[[str, Envelope], None] | None = None
        self.sent: list[tuple[str, Envelope]] = []
        self.flushes = 0

    # ---- PeerTransport

    def start(self, events: PeerEvents) -> None:
        self.events = events

    def send(self, peer: str, frame: bytes) -> bool:
        return self.cluster.transmit(self.name, peer, frame)

    def connected(self, peer: str) -> bool:
        return self.cluster.is_connected(self.name, peer)

    def flush(self) -> None:
        self.flushes += 1

    # ---- life

    def boot(self, **changes: Any) -> Node:
        settings = msgspec.structs.replace(self.cluster.settings_of(self.name), **changes)
        self.application = ListApplication()
        self.tasks.clear()
        self.woken = True
        self.node = Node(
            settings,
            self.application,
            self.store,
            self.snapshots,
            self,
            self.clock,
            random.Random(f"{self.cluster.seed}/{self.name}/{self.store.incarnation}"),
            self._wake,
            lambda work, done: self.tasks.append((work, done)),
        )
        return self.node

    def _wake(self) -> None:
        self.woken = True

    @property
    def raft(self) -> Raft:
        assert self.node is not None
        return self.node._raft

    def run_background(self) -> None:
        while self.tasks and not self.hold_background:
            work, done = self.tasks.popleft()
            try:
                result = work()
            except (StoreError, OSError, AssertionError) as error:
                done(error)
            else:
                done(result)

    def turn(self) -> None:
        assert self.node is not None
        self.run_background()
        self.woken = False
        turn = self.node.begin_turn()
        if turn.durable is not None:
            turn.durable()
        self.node.end_turn(turn)

    def due(self) -> bool:
        if self.node is None or self.paused:
            return False
        return (
            self.woken
            or bool(self.tasks and not self.hold_background)
            or self.node.next_turn_s() <= self.cluster.clock.now_s
        )

    def inject(self, peer: str, body: Body, *, term: int, round_number: int = 0) -> None:
        """A message as if ``peer`` had sent it."""
        assert self.events is not None
        self.events.frame_received(peer, encode(term, round_number, self.cluster.clock.wall_ms(), body))


class Cluster:
    """All hosts, connected with each other unless cut."""

    def __init__(self, size: int = 3, *, seed: int = 1, boot: bool = True, **settings: Any) -> None:
        self.seed = seed
        self.clock = ManualClock()
        self.names = [f"n{number}" for number in range(1, size + 1)]
        self.settings = {"bootstrap": True, **settings}
        self.links: set[frozenset[str]] = set()
        self.cuts: set[frozenset[str]] = set()
        self.held: dict[tuple[str, str], list[bytes]] = {}
        self.drop: Callable[[str, str, Envelope], bool] = lambda source, target, envelope: False
        self.log: list[tuple[str, str, Envelope]] = []
        self.hosts = {name: Host(self, name) for name in self.names}
        if boot:
            for name in self.names:
                self.hosts[name].boot()
            self.connect_all()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def settings_of(self, name: str) -> NodeSettings:
        peers = tuple(peer for peer in self.names if peer != name)
        return NodeSettings(cluster_id="test", node_id=name, peers=peers, **self.settings)

    # ---- network

    def is_connected(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.links

    def connect(self, one: str, other: str) -> None:
        link = frozenset((one, other))
        if link in self.links or link in self.cuts or self.hosts[one].node is None or self.hosts[other].node is None:
            return
        self.links.add(link)
        for source, target in ((one, other), (other, one)):
            events = self.hosts[source].events
            assert events is not None
            events.peer_connected(target)

    def connect_all(self) -> None:
        for position, one in enumerate(self.names):
            for other in self.names[position + 1 :]:
                self.connect(one, other)

    def disconnect(self, one: str, other: str, *, reset: bool = True) -> None:
        link = frozenset((one, other))
        if link not in self.links:
            return
        self.links.discard(link)
        for source, target in ((one, other), (other, one)):
            self.held.pop((source, target), None)
            events = self.hosts[source].events
            if self.hosts[source].node is not None and events is not None:
                events.peer_disconnected(target, reset=reset)

    def cut(self, one: str, other: str, *, reset: bool = False) -> None:
        self.cuts.add(frozenset((one, other)))
        self.disconnect(one, other, reset=reset)

    def isolate(self, name: str, *, reset: bool = False) -> None:
        for other in self.names:
            if other != name:
                self.cut(name, other, reset=reset)

    def heal(self) -> None:
        self.cuts.clear()
        self.connect_all()

    def hold(self, source: str, target: str) -> None:
        """Frames of this direction wait until ``release``."""
        self.held.setdefault((source, target), [])

    def release(self, source: str, target: str) -> None:
        for frame in self.held.pop((source, target), []):
            self._deliver(source, target, frame)

    def transmit(self, source: str, target: str, frame: bytes) -> bool:
        if not self.is_connected(source, target):
            return False
        envelope = decode(frame, FRAME_BYTES_MAX)
        self.log.append((source, target, envelope))
        if self.drop(source, target, envelope):
            return True
        if (source, target) in self.held:
            self.held[source, target].append(frame)
        else:
            self._deliver(source, target, frame)
        return True

    def _deliver(self, source: str, target: str, frame: bytes) -> None:
        events = self.hosts[target].events
        if self.hosts[target].node is not None and events is not None:
            events.frame_received(source, frame)

    def bodies(self, kind: type[Message], target: str | None = None) -> list[Message]:
        """The messages of this kind, to ``target`` or to anyone."""
        return [
            envelope.body for _, to, envelope in self.log if isinstance(envelope.body, kind) and target in (None, to)
        ]

    def sent(self, kind: type, source: str | None = None) -> list[tuple[str, str, Envelope]]:
        return [item for item in self.log if isinstance(item[2].body, kind) and source in (None, item[0])]

    # ---- life

    def crash(self, name: str, *, keep: int = 0) -> None:
        """The process ends; of the queued changes of its store the first ``keep`` survive."""
        host = self.hosts[name]
        host.node = None
        host.store = host.store.reopen(keep)
        for other in self.names:
            if other != name:
                self.disconnect(name, other, reset=True)

    def lose_disk(self, name: str) -> None:
        self.crash(name)
        self.hosts[name].store = MemoryStore()
        self.hosts[name].snapshots = MemorySnapshots()

    def restart(self, name: str, **changes: Any) -> None:
        if self.hosts[name].node is not None:
            self.crash(name)
        self.hosts[name].boot(**changes)
        self.connect_all()

    # ---- time

    def settle(self, turns_max: int = 10_000) -> None:
        """Turns until nobody has anything to do at this moment."""
        for _ in range(turns_max):
            due = [host for host in self.hosts.values() if host.due()]
            if not due:
                return
            for host in due:
                if host.due():
                    host.turn()
        raise AssertionError("the nodes never come to rest: a loop without progress")

    def run(self, milliseconds: int, step_ms: int = 5) -> None:
        for _ in range(0, milliseconds, step_ms):
            self.settle()
            self.clock.now_s += step_ms / 1000
        self.settle()

    def run_until(self, condition: Callable[[], object], milliseconds: int = 20_000) -> None:
        self.settle()
        for _ in range(0, milliseconds, 5):
            if condition():
                return
            self.run(5)
        assert condition(), f"not within {milliseconds} ms: {self.describe()}"

    # ---- shorthands

    def running(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.node is not None]

    def leaders(self) -> list[Host]:
        return [host for host in self.running() if host.raft.leads()]

    def leader(self) -> Host:
        """The leader that can act; waits for one."""
        self.run_until(lambda: [h for h in self.leaders() if h.raft.commits_in_own_term() and _acts(h)])
        return max(self.leaders(), key=lambda host: host.raft.term())

    def followers(self) -> list[Host]:
        leader = self.leader()
        return [host for host in self.running() if host is not leader]

    def propose(self, payload: bytes, host: Host | None = None) -> None:
        host = host or self.leader()
        host.application.to_propose.append(payload)
        host.woken = True
        self.settle()

    def converged(self) -> bool:
        running = self.running()
        return len({tuple(host.application.applied) for host in running}) == 1 and all(
            host.raft.commit_index() == running[0].raft.commit_index() for host in running
        )

    def describe(self) -> str:
        lines = []
        for host in self.running():
            assert host.node is not None
            lines.append(f"{host.name}: {host.node.status()}")
        return "\n".join(lines)


def _acts(host: Host) -> bool:
    return host.node is not None and host.node.is_leader()
