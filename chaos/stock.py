"""The library's own class in the simulated world: the proof that the checkers bite.

Everything that decides is the library's: elections, replication, commits, compaction, installing snapshots, callbacks.
Replaced is only what touches the machine: its socket transport (by the simulated network), its journal and dump files
(by models that keep their semantics: each write of theirs is a storage step; a kill keeps what was written so far, a
power cut may take back what was not synced, and the library syncs nothing) and its clock and randomness. Objects stay
in memory, so nothing is pickled across the simulated network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pysyncobj.pickle as library_pickle
import pysyncobj.syncobj as library
from pysyncobj.config import FAIL_REASON, SERIALIZER_STATE, SyncObjConf
from pysyncobj.node import Node as LibraryNode
from pysyncobj.syncobj import SyncObj, replicated
from pysyncobj.transport import Transport

from chaos.checkers import Checkers
from chaos.disk import Disk, SimCrash
from chaos.images import LogImage
from chaos.profiles import MILLISECOND
from chaos.timeline import Timeline
from chaos.world import Host
from sidecar.consensus.ports import Entry

Record = tuple[bytes, int, int]  # command, index, term

_TICK_US = (20 * MILLISECOND, 50 * MILLISECOND)
_SPIN_US = 100  # what one look at the clock costs, so that a loop that waits for time to pass ends


class _Now:
    """The clock and randomness the library finds in its module, of whichever host runs at the moment."""

    host: Host
    spent_us = 0

    def monotonic(self) -> float:
        self.spent_us += _SPIN_US
        return (self.host.clock.monotonic_us() + self.spent_us) / 1_000_000

    def random(self) -> float:
        return self.host.world.rng.random()

    def isfile(self, path: str) -> bool:
        volume = self.host.disk.volume
        assert isinstance(volume, StockVolume)
        return volume.dump is not None


_NOW = _Now()


class _NoPoller:
    def subscribe(self, *_: object) -> None:
        return

    def unsubscribe(self, *_: object) -> None:
        return

    def poll(self, _: float) -> None:
        return


@contextmanager
def library_in_the_world() -> Iterator[None]:
    """Puts the simulated clock, randomness, journal and dump where the library looks for them, and takes them out."""
    substitutes = {
        "monotonicTime": _NOW.monotonic,
        "random": SimpleNamespace(random=_NOW.random),
        "os": SimpleNamespace(path=SimpleNamespace(isfile=_NOW.isfile)),
        "createPoller": lambda _: _NoPoller(),
        "createJournal": lambda _: JournalModel(_NOW.host.disk, _NOW.host.world.checkers),
        "Serializer": SerializerModel,
        "PIPE_NOTIFIER_ENABLED": False,
    }
    originals = {name: getattr(library, name) for name in substitutes}
    level = logging.getLogger("pysyncobj").level
    logging.getLogger("pysyncobj").setLevel(logging.CRITICAL + 1)
    for name, value in substitutes.items():
        setattr(library, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(library, name, value)
        logging.getLogger("pysyncobj").setLevel(level)


class StockVolume:
    """The journal, its ``.meta`` and the dump, as the page cache has them, and what a power cut may leave instead."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.records: list[Record] = []
        self.meta: dict[str, Any] = {}
        self.dump: bytes | None = None
        self._older: list[tuple[list[Record], dict[str, Any]]] = []  # states since the kernel last wrote back

    def wrote(self) -> None:
        self._older.append((list(self.records), dict(self.meta)))
        if len(self._older) > 64:
            del self._older[:32]

    def written_back(self) -> None:
        self._older.clear()

    def crash(self, world: Timeline, *, power: bool) -> None:
        if not power or not self._older:
            return
        # The two files are written back independently of each other.
        self.records = list(self._older[world.between(0, len(self._older) - 1)][0])
        self.meta = dict(self._older[world.between(0, len(self._older) - 1)][1])
        world.note(self.host, f"after the power cut: {len(self.records)} records, {self.meta}")
        self._older.clear()


class JournalModel:
    """The semantics of the library's FileJournal: the header is moved with each record, a deletion from the front
    clears the file and adds the rest again one by one, the meta file is replaced at each vote."""

    def __init__(self, disk: Disk, checkers: Checkers) -> None:
        self._disk, self._checkers = disk, checkers
        volume = disk.volume
        assert isinstance(volume, StockVolume)
        self.volume = volume
        self._journal = list(volume.records)
        self._meta = dict(volume.meta)
        self._meta_saved = True

    def _write(self, label: str, change: Callable[[], None]) -> None:
        self._disk.step(label)
        change()
        self.volume.wrote()

    def add(self, command: bytes, index: int, term: int, label: str = "journal: add") -> None:
        record = (command, index, term)
        before = self._journal[-1][2] if self._journal else None
        self._checkers.logged(self._disk.host, index, term, command, before)
        self._journal.append(record)
        self._write(label, lambda: None)
        self._write(label, lambda: self.volume.records.append(record))

    def clear(self) -> None:
        self._journal = []
        self._write("journal: clear", self.volume.records.clear)

    def deleteEntriesFrom(self, position: int) -> None:
        removed = len(self._journal) - position
        del self._journal[position:]
        while removed > 0:
            step = min(10, removed)
            removed -= step
            kept = len(self._journal) + removed

            def shorten(kept: int = kept) -> None:
                del self.volume.records[kept:]

            self._write("journal: delete from", shorten)

    def deleteEntriesTo(self, position: int) -> None:
        rest = self._journal[position:]
        self.clear()
        for record in rest:
            self.add(*record, label="journal: add again")

    def __getitem__(self, item: Any) -> Any:
        return self._journal[item]

    def __len__(self) -> int:
        return len(self._journal)

    def _destroy(self) -> None:
        return

    def setRaftCommitIndex(self, index: int) -> None:
        self._meta["raftCommitIndex"] = index
        self._meta_saved = False

    def getRaftCommitIndex(self) -> int:
        return int(self._meta.get("raftCommitIndex", 1))

    def setCurrentTerm(self, term: int, vote: str | None) -> None:
        self._meta["currentTerm"] = term
        self._meta["votedForNodeId"] = vote
        self._store_meta()

    def _store_meta(self) -> None:
        meta = dict(self._meta)

        def replace() -> None:
            self.volume.meta = meta

        self._write("journal: meta", replace)
        self._meta_saved = True

    def getCurrentTerm(self) -> int:
        return int(self._meta.get("currentTerm", 0))

    def getVotedForNodeId(self) -> str | None:
        return self._meta.get("votedForNodeId")

    def onOneSecondTimer(self) -> None:
        if not self._meta_saved:
            self._store_meta()


class SerializerModel:
    """The library's dump file and its transmission: written at once, or by a child that takes a while; reported at the
    next look after that."""

    def __init__(self, file: str, chunk_bytes: int, *_: object) -> None:
        self._chunk_bytes = chunk_bytes
        self._disk = _NOW.host.disk
        volume = self._disk.volume
        assert isinstance(volume, StockVolume)
        self._volume = volume
        self._writing: bytes | None = None
        self._written_us = 0
        self._id: int | None = None
        self._outgoing: dict[Any, tuple[bytes, int]] = {}
        self._incoming: bytes | None = None

    def checkSerializing(self) -> tuple[int, int | None]:
        if self._writing is None:
            return SERIALIZER_STATE.NOT_SERIALIZING, None
        if self._disk.world.now_us < self._written_us:
            return SERIALIZER_STATE.SERIALIZING, self._id
        self._finish()
        self._writing = None
        self._outgoing = {}
        return SERIALIZER_STATE.SUCCESS, self._id

    def serialize(self, data: Any, index: int) -> None:
        if self._writing is not None:
            return
        self._id = index
        self._writing = library_pickle.dumps(data)  # type: ignore[no-untyped-call]
        low_us, high_us = self._disk.world.shape.stock_dump_us
        takes_us = self._disk.world.between(low_us, high_us) if high_us else 0
        self._written_us = self._disk.world.now_us + takes_us
        if not takes_us:
            self._finish()

    def _finish(self) -> None:
        if self._volume.dump is not self._writing:
            self._disk.step("snapshot: dump")
            self._volume.dump = self._writing
            self._disk.step("snapshot: after the rename")

    def deserialize(self) -> Any:
        return library_pickle.loads(self._volume.dump)  # type: ignore[no-untyped-call]

    def getTransmissionData(self, peer: Any) -> Any:
        if self._writing is not None:
            return None
        if peer not in self._outgoing:
            if self._volume.dump is None:
                return None
            self._outgoing[peer] = (self._volume.dump, 0)
        content, offset = self._outgoing[peer]
        data = content[offset : offset + self._chunk_bytes]
        if data:
            self._outgoing[peer] = (content, offset + len(data))
        else:
            del self._outgoing[peer]
        return data, offset == 0, not data

    def setTransmissionData(self, data: Any) -> bool:
        if data is None:
            return False
        content, first, last = data
        if first:
            self._incoming = b""
        elif self._incoming is None:
            return False
        self._incoming += content
        if not last:
            return False
        self._disk.step("snapshot: dump: received")
        self._volume.dump = self._incoming
        self._incoming = None
        return True

    def cancelTransmisstion(self, peer: Any) -> None:
        self._outgoing.pop(peer, None)


class SimNode(LibraryNode):
    """Hashes by its number: the library iterates sets of nodes, and a run must not depend on PYTHONHASHSEED."""

    def __hash__(self) -> int:
        return int(self._id[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LibraryNode) and bool(self._id == other.id)


class SimTransport(Transport):
    def __init__(self, host: Host, nodes: dict[str, SimNode]) -> None:
        super().__init__(None, None, None)  # type: ignore[no-untyped-call]
        self._host = host
        self._nodes = nodes

    def send(self, node: SimNode, message: dict[str, Any]) -> bool:
        checkers = self._host.world.checkers
        if message["type"] == "response_vote":
            checkers.voted(self._host.name, 0, message["term"], node.id)
        elif message["type"] == "request_vote":
            checkers.voted(self._host.name, 0, message["term"], self._host.name)
        size = 60 + sum(len(entry[0]) for entry in message.get("entries", ()))
        return self._host.world.network.send(self._host.name, node.id, message, size)

    def connected(self, peer: str) -> None:
        self._onNodeConnected(self._nodes[peer])  # type: ignore[no-untyped-call]

    def disconnected(self, peer: str) -> None:
        self._onNodeDisconnected(self._nodes[peer])  # type: ignore[no-untyped-call]

    def received(self, peer: str, message: object) -> None:
        self._onMessageReceived(self._nodes[peer], message)  # type: ignore[no-untyped-call]


class StockRegister(SyncObj):
    """The register application, as a user of the library writes it."""

    def __init__(self, observe: Callable[[int, bytes], None], *arguments: Any, **keywords: Any) -> None:
        self._observe = observe  # set before the library's constructor: no part of its dump
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]
        self.places: dict[int, int] = {}
        self.rolling = 0

    @replicated  # type: ignore[untyped-decorator]
    def put(self, command: int, padding: bytes) -> int:
        index = int(self.raftLastApplied) + 1
        if command not in self.places:
            self.places[command] = index
            self.rolling = (self.rolling * 1_000_003 + command) % (1 << 61)
        self._observe(index, command.to_bytes(8, "big"))
        return self.places[command]


class StockProcess:
    """Drives the library's class as its own thread would: a tick every few milliseconds and after each message."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._world = host.world
        shape = host.world.shape
        nodes = {name: SimNode(name) for name in host.world.hosts}  # type: ignore[no-untyped-call]
        self._transport = SimTransport(host, nodes)
        self._tick_due = False
        self._led_term = 0
        settings = SyncObjConf(  # type: ignore[no-untyped-call]
            autoTick=False,
            appendEntriesUseBatch=shape.stock_use_batch,
            appendEntriesBatchSizeBytes=min(shape.append_bytes_max, 1 << 16),
            logCompactionMinEntries=shape.compact_entries,
            logCompactionBatchSize=shape.snapshot_chunk_bytes,
            fullDumpFile="dump",
            journalFile="journal",
            useFork=False,
        )
        self._lib = self._library(
            lambda: StockRegister(
                self._applied,
                nodes[host.name],
                [node for name, node in nodes.items() if name != host.name],
                conf=settings,
                transport=self._transport,
            )
        )

    def _library(self, call: Callable[[], Any]) -> Any:
        _NOW.host = self._host
        _NOW.spent_us = 0
        result = call()
        if self._host.disk.dying:  # the library swallowed the kill (a bare except)
            raise SimCrash("inside the library")
        return result

    def start(self) -> None:
        self._tick()
        self._tick_regularly()

    def _tick_regularly(self) -> None:
        def again() -> None:
            self._tick()
            self._tick_regularly()

        self._host.after(self._world.between(*_TICK_US), again)

    def _tick_soon(self) -> None:
        if not self._tick_due:
            self._tick_due = True
            self._host.after(self._world.between(*self._world.shape.cpu_us), self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        self._library(lambda: self._lib.doTick(0))
        self._watch()

    def _watch(self) -> None:
        """What the checkers see of the library: who says that it leads."""
        term = int(self._lib.raftCurrentTerm)
        if self._lib._isLeader() and term != self._led_term:
            self._led_term = term
            self._world.checkers.leads(self._host.name, term, self._image())

    def _image(self) -> LogImage:
        image = LogImage()
        image.entries = [Entry(index, term, command) for command, index, term in self._lib._SyncObj__raftLog[:]]
        return image

    def _applied(self, index: int, payload: bytes) -> None:
        entries = self._lib._SyncObj__getEntries(index, 1)
        term = int(entries[0][2]) if entries else 0
        seen_term = int(self._lib.raftCurrentTerm)
        self._world.checkers.applied(self._host.name, index, term, seen_term, payload, f"{self._lib.rolling:016x}")

    # ---- the network

    def peer_connected(self, peer: str) -> None:
        self._library(lambda: self._transport.connected(peer))
        self._tick_soon()

    def peer_disconnected(self, peer: str, reset: bool) -> None:
        self._library(lambda: self._transport.disconnected(peer))
        self._tick_soon()

    def frame_received(self, peer: str, frame: object) -> None:
        before = int(self._lib.raftLastApplied)
        self._library(lambda: self._transport.received(peer, frame))
        after = int(self._lib.raftLastApplied)
        if after != before:
            self._world.checkers.restored(self._host.name, after)
        self._watch()
        self._tick_soon()

    # ---- what workload and faults ask for

    def propose(self, command: int, done: Callable[[str], None]) -> None:
        shape = self._world.shape
        padding = bytes(self._world.between(*shape.command_bytes))

        def answered(result: Any, error: Any) -> None:
            if error == FAIL_REASON.SUCCESS:
                self._acknowledge(command, int(result))
                done("acked")
            else:
                done("unknown")

        self._library(lambda: self._lib.put(command, padding, callback=answered))
        self._tick_soon()

    def _acknowledge(self, command: int, index: int) -> None:
        checkers = self._world.checkers
        checkers.acknowledged(self._host.name, command, index)
        copies = 0
        for host in self._world.hosts.values():
            volume = host.disk.volume
            assert isinstance(volume, StockVolume)
            first = volume.records[0][1] if volume.records else index + 1
            position = index - first
            term = checkers.committed_term(index)
            held = position < 0 or (position < len(volume.records) and volume.records[position][2] == term)
            copies += 1 if held and volume.records else 0
        checkers.quorum(self._host.name, index, copies, len(self._world.hosts))

    def read(self, done: Callable[[int | None], None]) -> None:
        """The library's users read locally at whoever says that it leads."""
        done(int(self._lib.raftLastApplied) if self._lib._isLeader() else None)

    def applied_index(self) -> int:
        return int(self._lib.raftLastApplied)

    def digest(self) -> str:
        return f"{self._lib.rolling:016x}"

    def holds(self, command: int) -> bool:
        return command in self._lib.places

    def is_leader(self) -> bool:
        return bool(self._lib._isLeader())

    def transfer(self, to: str) -> None:
        return

    def snapshot(self) -> None:
        self._lib.forceLogCompaction()
