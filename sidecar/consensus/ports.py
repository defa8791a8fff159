"""What the consensus node needs from outside, and what it offers: every port it meets the world through.

The real node and the simulated node are the same code; only what stands behind these ports differs.
Nothing here knows pysyncobj, asyncio or any command of the state machine.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import msgspec


class Clock(Protocol):
    """The node's own monotonic clock (real: CLOCK_BOOTTIME where there is one) and its wall clock."""

    def monotonic_s(self) -> float: ...
    def wall_ms(self) -> int: ...


class Captured(Protocol):
    """An immutable picture of the application's state. ``encode`` may be called on another thread."""

    def encode(self) -> bytes: ...


class Role(IntEnum):
    FOLLOWER = 1
    CANDIDATE = 2
    LEADER = 3


class Application(Protocol):
    """The replicated application, as the node sees it. All calls come from the node's turn, one at a time."""

    def apply(self, index: int, payload: bytes) -> None:
        """One committed entry, in log order, exactly once per life of the process. Raising stops the node."""

    def received(self, payload: bytes) -> None:
        """An entry reached this node's log (not committed yet, may be dropped). For time keeping only."""

    def next_entry(self) -> bytes | None:
        """Leader only, asked once a turn: the next entry to append, at most ``entry_bytes_max``; None for nothing."""

    def settle(self) -> None:
        """What was applied in this turn is as durable as it has to be: answer those who wait, publish events."""

    def role_changed(self, role: Role, term: int, leader: str | None) -> None:
        """Called when the role, the term or the known leader changed; ``leader`` may be this node."""

    def forwarded(self, peer: str, payload: bytes) -> None:
        """A follower's message for the leader's application. Called even if this node is not the leader."""

    def capture(self) -> Captured: ...

    def restore(self, payload: bytes) -> None:
        """Replace the state by a snapshot's. Entries skipped by it were applied elsewhere: outcomes here are
        unknown."""

    def digest(self) -> str: ...


# ---- the log store -------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, array_like=True):
    index: int
    term: int
    command: bytes  # pysyncobj's: one type byte, then the payload


class SnapshotMeta(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a snapshot: the last entry it contains and the one before (pysyncobj's log always starts with two)."""

    index: int
    term: int
    previous_term: int
    file: str
    size_bytes: int
    checksum: str  # blake2b-256 of the file's content (without the copy of it at the end), hexadecimal


class StoreIdentity(msgspec.Struct, frozen=True, array_like=True):
    cluster_id: str
    node_id: str


class StoreError(Exception):
    """The store cannot be used: corrupt, foreign, of a newer format, or the disk refused. Names the file, says what
    to do."""


class SnapshotRefused(StoreError):
    """What a peer sent is no snapshot for us (size, order, checksum, cluster). Our own store is as good as before."""


class LogStore(Protocol):
    """Entries, term, vote, voter flag, incarnation and snapshot metadata of one node, in one durable place.

    Reads come from memory. Mutations are queued in order and become durable together at ``sync``; a crash keeps
    some prefix of the queued mutations, at least all that were synced before. A failed sync raises StoreError
    and the store is unusable from then on (nothing that was in doubt may be acknowledged).
    """

    # -- read
    def __len__(self) -> int: ...
    def entry(self, position: int) -> Entry: ...
    def entries(self, start: int, stop: int) -> list[Entry]: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def vote(self) -> str | None: ...
    @property
    def commit_index(self) -> int:
        """A hint that may lag: the last commit index that was stored."""

    @property
    def snapshot(self) -> SnapshotMeta | None: ...
    @property
    def incarnation(self) -> int:
        """Raised durably at every open, and ahead of the lives of a disk that was lost (as far as the wall clock has
        not stepped back since): two lives of a node never share it."""

    @property
    def amnesiac_term(self) -> int | None:
        """The mark of a node whose store was empty: 0 until it is a voter; then, if it was admitted to a cluster with
        history, the term of that, in which it does not vote, until a newer term begins. None for all other nodes."""

    @property
    def fresh(self) -> bool:
        """Nothing was stored before this open: created by it, or by one that crashed before its first entry."""

    # -- write (queued)
    def append(self, entry: Entry) -> None: ...
    def truncate_from(self, position: int) -> None: ...
    def truncate_to(self, position: int) -> None:
        """Drop everything before ``position``."""

    def reset(self, entries: list[Entry]) -> None:
        """Replace the whole log in one step."""

    def set_term(self, term: int, vote: str | None) -> None: ...
    def set_commit_index(self, index: int) -> None: ...
    def set_snapshot(self, meta: SnapshotMeta) -> None: ...
    def set_amnesiac_term(self, term: int | None) -> None: ...

    # -- durability
    @property
    def dirty(self) -> bool:
        """Whether anything queued must be durable before a message leaves (a commit index alone does not count)."""

    def take(self) -> Callable[[], None]:
        """Hand over what is queued: the returned function makes it durable and may run on another thread,
        one at a time, in order. The event loop never waits for the disk."""

    def close(self) -> None: ...


class SnapshotStore(Protocol):
    """Snapshot files. A file is complete, checksummed and durable before its meta is handed out."""

    def write(self, index: int, term: int, previous_term: int, payload: bytes) -> SnapshotMeta:
        """Temporary file, fsync, rename, fsync of the folder. May run on another thread."""

    def read(self, meta: SnapshotMeta) -> bytes:
        """The payload, verified against the checksum; StoreError otherwise."""

    def chunk(self, meta: SnapshotMeta, offset: int, size: int) -> bytes: ...

    def receive_begin(self, meta: SnapshotMeta) -> None: ...
    def receive_chunk(self, offset: int, data: bytes) -> None: ...
    def receive_end(self) -> SnapshotMeta:
        """Verify size and checksum, fsync, rename, fsync. StoreError leaves the old snapshot as it was."""

    def retain(self, keep: SnapshotMeta) -> None:
        """Delete all other snapshot files and temporary files."""


# ---- the network ---------------------------------------------------------------------------------------------------


class PeerEvents(Protocol):
    """What a transport tells the node. Called on the node's own thread, between turns; each may ask for a turn."""

    def peer_connected(self, peer: str) -> None: ...

    def peer_disconnected(self, peer: str, *, reset: bool) -> None:
        """``reset``: the other side closed or reset it (its process is probably gone), as against our own giving up."""

    def frame_received(self, peer: str, frame: bytes) -> None:
        """Only from the current connection of an authenticated peer of this cluster."""


class PeerTransport(Protocol):
    """Moves frames between the nodes of one cluster; order is kept within a connection, frames die with it."""

    def start(self, events: PeerEvents) -> None: ...

    def send(self, peer: str, frame: bytes) -> bool:
        """Queue a frame. False when there is no connection or its queue is full (the connection is then dropped)."""

    def connected(self, peer: str) -> bool: ...
    def flush(self) -> None:
        """Join what was queued for each peer in this turn into one write."""
