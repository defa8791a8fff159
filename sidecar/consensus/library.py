"""Everything that stands between us and pysyncobj: the pin, and what it finds where it looks for a clock, sockets,
files.

``Library`` is its class SyncObj, with the inner names that raft.py overrides or reads. What is wrong with them, and
what is done instead, is in raft.py and in docs/pysyncobj.md.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pysyncobj
from pysyncobj import syncobj
from pysyncobj.journal import Journal
from pysyncobj.node import Node as LibraryNode
from pysyncobj.transport import Transport as LibraryTransport

from sidecar.consensus.ports import Clock, Entry, LogStore


class BrokenInvariant(AssertionError):
    """Raft's own promises do not hold here. Going on could spread the damage: the node must stop."""


# ---- the pin: these files' inner methods are overridden, so they must be the ones that were read -------------------

LIBRARY_VERSION = "0.3.17"
LIBRARY_SHA256 = {
    "syncobj.py": "e8bdf06797085d734df86e24ab4802fe87893dff77268565ec036f7ad4a1cfe4",
    "transport.py": "0c9d89f9c4781ec9772df8011d7975a1a4a1a5f541357e12eae85a813e92b50b",
    "node.py": "e4a3f027cd8291f558334bb9c977e952f6b6989e7e1fa1588d3005ef0b990e2c",
    "journal.py": "9cf1eaf6acc704581a4cf7d3de330a404403913107adc91c929778b7e3f35edf",
    "config.py": "fbbc7ff9f18e4d15a7fd563376e42f5bd192956879d4b810b056d5248b955698",
    "serializer.py": "4d39fde2f15000ad8f507ec229ebd4f6a86371b6f84d4dc1439a9cccd52857ee",
}


def check_library(folder: Path) -> None:
    """Raises ImportError unless ``folder`` holds the very pysyncobj that the overrides below were written against."""
    for name, expected in LIBRARY_SHA256.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ImportError(f"cannot read {folder / name} to check the version of pysyncobj: {error}") from error
        found = hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()
        if found != expected:
            raise ImportError(
                f"{folder / name} is not the one of pysyncobj {LIBRARY_VERSION}: sha256 {found}, expected {expected}. "
                "Its inner methods are overridden here, so no other version will do. "
                f"Install it: pip install pysyncobj=={LIBRARY_VERSION}"
            )


check_library(Path(pysyncobj.__file__).parent)


# ---- the library's surroundings: clock, poller, journal factory ----------------------------------------------------


class _CurrentClock:
    """The library reads a module-level clock. Everything runs on one thread, so each entry into it sets whose clock
    it is."""

    clock: Clock | None = None


def _library_monotonic_s() -> float:
    clock = _CurrentClock.clock
    return time.monotonic() if clock is None else clock.monotonic_s()


def use_clock(clock: Clock | None) -> None:
    """From now on the library lives by this clock (None: the system's)."""
    _CurrentClock.clock = clock


class NoPoller:
    """Stands in for the library's socket poller: there are no sockets in it."""

    def subscribe(self, *_: object) -> None: ...
    def unsubscribe(self, *_: object) -> None: ...
    def poll(self, _timeout_s: float) -> None: ...


NO_POLLER = "none"
library: Any = syncobj  # without annotations
_stock_create_poller = library.createPoller
_stock_create_journal = library.createJournal


def _create_poller(poller_type: str) -> object:
    return NoPoller() if poller_type == NO_POLLER else _stock_create_poller(poller_type)


def _create_journal(journal: object) -> object:
    return journal if isinstance(journal, Journal) else _stock_create_journal(journal)


# Both pass on what is not ours, so the library's own class still works in the same process (the simulator compares).
library.monotonicTime = _library_monotonic_s
library.createPoller = _create_poller
library.createJournal = _create_journal


class Member(LibraryNode):
    """A node of the cluster. The library keeps nodes in sets; ``hash(str)`` differs in every process, this does not."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)  # type: ignore[no-untyped-call]
        self.hash = zlib.crc32(node_id.encode())

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Member) and self.id == other.id


class StoreJournal(Journal):
    """pysyncobj's Journal over our LogStore (holes a, b, k2: nothing is rewritten, a sync is one step of the store)."""

    def __init__(self, store: LogStore) -> None:
        self.store = store

    def add(self, command: bytes, index: int, term: int) -> None:
        self.store.append(Entry(index, term, command))

    def deleteEntriesFrom(self, position: int) -> None:
        self.store.truncate_from(position)

    def deleteEntriesTo(self, position: int) -> None:
        self.store.truncate_to(position)

    def clear(self) -> None:
        raise BrokenInvariant("the log is never cleared; a snapshot replaces it in one step")

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, item: int | slice) -> Any:
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self.store))
            return [(entry.command, entry.index, entry.term) for entry in self.store.entries(start, max(start, stop))]
        entry = self.store.entry(item if item >= 0 else len(self.store) + item)
        return entry.command, entry.index, entry.term

    def setCurrentTerm(self, term: int, vote: str | None) -> None:
        self.store.set_term(term, vote)

    def getCurrentTerm(self) -> int:
        return self.store.term

    def getVotedForNodeId(self) -> str | None:
        return self.store.vote

    def setRaftCommitIndex(self, index: int) -> None:
        if index > self.store.commit_index:
            self.store.set_commit_index(index)

    def getRaftCommitIndex(self) -> int:
        """The stored hint, kept within what is known to be committed and what is in the log."""
        snapshot = self.store.snapshot
        first, last = self.store.entry(0).index, self.store.entry(len(self.store) - 1).index
        return min(max(self.store.commit_index, first, snapshot.index if snapshot else 1), last)

    def _destroy(self) -> None: ...


class Outbox(LibraryTransport):
    """pysyncobj's Transport without a network: what the library's own code sends is translated and queued.

    Read-only nodes, utility commands (membership, versions, status) and forwarded commands have no way in or out
    (hole g).
    """

    def __init__(self, sends: Callable[[str, dict[str, Any]], bool]) -> None:
        super().__init__(None, None, None)  # type: ignore[no-untyped-call]
        self._sends = sends

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """No utility command is ever called."""

    def send(self, node: Member, message: dict[str, Any]) -> bool:
        return self._sends(node.id, message)


class NoDumps:
    """In place of the library's serializer: it writes, reads and sends no dump (holes k1, k3, k4, and its pickles)."""


if TYPE_CHECKING:

    class Library:
        """What is used of pysyncobj's SyncObj, inner names included."""

        _SyncObj__raftState: int
        _SyncObj__raftCurrentTerm: int
        _SyncObj__votedForNodeId: str | None
        _SyncObj__raftLeader: Member | None
        _SyncObj__raftElectionDeadline: float
        _SyncObj__raftCommitIndex: int
        _SyncObj__raftLastApplied: int
        _SyncObj__raftMatchIndex: dict[Member, int]
        _SyncObj__lastResponseTime: dict[Member, float]
        _SyncObj__newAppendEntriesTime: float
        _SyncObj__noopIDx: int | None
        _SyncObj__needLoadDumpFile: bool
        _SyncObj__serializer: object

        def __init__(self, self_node: Member, others: list[Member], *, conf: object, transport: Outbox) -> None: ...
        def doTick(self, time_to_wait_s: float) -> None: ...
        def _SyncObj__onMessageReceived(self, node: Member, message: dict[str, Any]) -> None: ...
        def _SyncObj__onNodeConnected(self, node: Member) -> None: ...
        def _SyncObj__onNodeDisconnected(self, node: Member) -> None: ...
        def _SyncObj__onBecomeLeader(self) -> None: ...
        def _SyncObj__setState(self, state: int) -> None: ...
        def _SyncObj__setCurrentTerm(self, term: int, vote: str | None) -> None: ...
else:
    Library = syncobj.SyncObj
