"""The consensus node: the ready loop, free of clocks, sockets, disks and asyncio.

    wait for: a frame, a proposal, or the next timer
    feed frames and one batch of proposals to pysyncobj; doTick(0)
    if the log store has unsynced writes: make them durable, off the event loop     (group commit)
    send what was queued during the tick
    settle: answer those who wait for what was applied

One turn is ``begin_turn`` -> durable? -> ``end_turn``. No message that reflects an entry, a term or a vote leaves before
it is durable, because frames queued in ``begin_turn`` leave in ``end_turn`` only. The next turn does not begin before
the last one has ended; what arrives meanwhile waits in the inbox.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sidecar.consensus.ports import Application, Clock, LogStore, PeerTransport, Role, SnapshotStore


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and bounds of one node."""

    cluster_id: str
    node_id: str
    peers: tuple[str, ...]  # ids of the other voters, without addresses
    bootstrap: bool = False
    heartbeat_ms: int = 100
    election_min_ms: int = 800
    election_max_ms: int = 1_600
    fast_election_max_ms: int = 100  # after the leader's connection was reset
    entry_bytes_max: int = 1 << 20
    append_bytes_max: int = 4 << 20  # of entries in one message; larger than any entry
    inbox_frames_max: int = 10_000
    compact_entries: int = 50_000
    compact_bytes: int = 64 << 20
    snapshot_chunk_bytes: int = 256 << 10
    reads_max: int = 10_000  # read barriers in flight


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    term: int
    leader: str | None
    commit_index: int
    applied_index: int
    last_index: int
    first_index: int
    snapshot_index: int
    voter: bool
    ready: bool  # has applied everything that was committed when it (re)joined, and knows a leader with a quorum
    reason: str  # why not ready
    peers: dict[str, tuple[bool, int, int]]  # connected, match index, milliseconds since last answer (leader only; -1 never)
    leader_contact_ms: int  # since this node last knew that its applied state was current; -1 never


class Turn(Protocol):
    """What ``begin_turn`` leaves to be done before ``end_turn``."""

    durable: Callable[[], None] | None  # must have returned before end_turn; may run on another thread


class Node:
    """One Raft member. All methods are called from one thread."""

    def __init__(
        self,
        settings: NodeSettings,
        application: Application,
        store: LogStore,
        snapshots: SnapshotStore,
        transport: PeerTransport,
        clock: Clock,
        rng: random.Random,
        wake: Callable[[], None],
        background: Callable[[Callable[[], object], Callable[[object | BaseException], None]], None],
    ) -> None:
        """``wake`` asks for a turn soon. ``background(work, done)`` runs ``work`` on another thread and then calls ``done``
        with what it returned or raised, on the node's own thread, between turns (snapshot encoding and writing)."""
        ...

    def begin_turn(self) -> Turn: ...
    def end_turn(self, turn: Turn) -> None: ...

    def next_turn_s(self) -> float:
        """Monotonic time by which the next turn is due even if nothing happens."""
        ...

    # PeerEvents: peer_connected, peer_disconnected, frame_received

    def status(self) -> NodeStatus: ...

    def is_leader(self) -> bool:
        """Leader, and heard from a quorum recently enough to act as one."""
        ...

    def forward(self, payload: bytes) -> bool:
        """Send an application message to the leader (not to itself). False when no leader is known or connected."""
        ...

    def read_barrier(self, done: Callable[[bool], None]) -> None:
        """Linearizable read: ``done(True)`` once this node has applied everything that was committed when it was called
        (ReadIndex through the leader, confirmed by a quorum's echo of a later round); ``done(False)`` when that cannot be known."""
        ...

    def transfer_leadership(self, to: str | None, done: Callable[[str | None], None]) -> None:
        """``done(None)`` when another node leads, else with the reason it failed. The leader stops taking entries meanwhile."""
        ...

    def take_snapshot(self, done: Callable[[int, int, str | None], None]) -> None:
        """``done(index, size_bytes, error)``."""
        ...

    def clock_offsets_ms(self) -> Sequence[tuple[str, int]]:
        """Leader only: wall clock of each peer minus ours, measured on heartbeats (half the round trip taken off)."""
        ...
