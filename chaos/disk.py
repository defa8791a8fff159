"""The simulated disk: what survives a crash, and a crash inside any step.

``SimLogStore`` and ``SimSnapshotStore`` implement the ports of the node. A mutation is visible at once and *queued*; it
is durable once the function that ``take`` returned has run. A crash keeps everything durable and a prefix of what was
queued, chosen by the seed. ``Disk.step`` is called in each storage step: an armed disk ends the process right there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

from chaos.checkers import Checkers
from chaos.images import LogImage, Operation
from chaos.timeline import Timeline
from sidecar.consensus.ports import Entry, SnapshotMeta, SnapshotRefused, StoreError

NO_SPACE = "no space left on the device"
_INCOMING = "incoming.tmp"


class SimCrash(BaseException):
    """The process ends here, in the middle of whatever it did. Not an ``Exception``: no handler may swallow it."""


class Volume(Protocol):
    """What a kind of process keeps on a disk: it knows what a crash leaves of itself."""

    def crash(self, world: Timeline, *, power: bool) -> None: ...


class Disk:
    """One machine's disk: the volume on it, its speed, its faults."""

    def __init__(self, world: Timeline, host: str, volume: Volume) -> None:
        self.world = world
        self.host = host
        self.volume = volume
        self.dying = False
        self.full = False
        self.sync_us = world.shape.sync_us
        self._steps_left: int | None = None
        self._armed_for = ""

    def arm(self, steps: int, only: str = "") -> None:
        """The process dies in the ``steps``-th storage step from now whose name begins with ``only``."""
        self._steps_left = steps
        self._armed_for = only

    def disarm(self) -> None:
        self._steps_left = None

    def step(self, label: str) -> None:
        if self.dying:
            raise SimCrash(label)
        if self._steps_left is not None and label.startswith(self._armed_for):
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._steps_left = None
                self.dying = True
                self.world.note(self.host, f"killed inside: {label}")
                self.world.reach(f"killed inside {label}")
                raise SimCrash(label)

    def crash(self, *, power: bool) -> None:
        self._steps_left = None
        self.volume.crash(self.world, power=power)


class LogVolume:
    """The files of one node of ours: the durable image of its log store, what is queued behind it, and snapshots."""

    def __init__(self, host: str, checkers: Checkers | None = None, *, ideal: bool = False) -> None:
        self.host = host
        self.checkers = checkers
        self.ideal = ideal  # a crash loses nothing that was written (profile ``crash``)
        self.durable = LogImage()
        self.queued: list[Operation] = []
        self.files: dict[str, bytes] = {}
        self.lost: list[LogImage] = []  # what disks held that this machine has lost

    def covers(self, index: int, term: int) -> bool:
        """Whether the entry is durable here, for a voter to count on; or was, on a disk that has been lost since."""
        held = self.durable.amnesiac_term != 0 and self.durable.covers(index, term)
        return held or any(image.covers(index, term) for image in self.lost)

    def crash(self, world: Timeline, *, power: bool) -> None:
        kept = len(self.queued) if self.ideal and not power else world.between(0, len(self.queued))
        if self.queued:
            world.note(self.host, f"{kept} of {len(self.queued)} queued changes survive")
            world.reach("queued changes lost" if kept < len(self.queued) else "queued changes survived")
        self.settle(kept)
        self.queued.clear()
        for name in [name for name in self.files if name.endswith(".tmp")]:
            del self.files[name]

    def settle(self, count: int) -> None:
        """The first ``count`` queued changes are durable from now on."""
        for operation in self.queued[:count]:
            kind, value = operation
            if kind == "term" and self.checkers is not None:
                assert isinstance(value, tuple)
                self.checkers.voted(self.host, self.durable.term, *value)
            self.durable.apply(operation)
        del self.queued[:count]

    def wipe(self) -> None:
        """The disk is lost: what comes back is a new, empty one."""
        self.lost.append(self.durable)
        self.durable = LogImage()
        self.queued.clear()
        self.files.clear()


class SimLogStore:
    """The port ``LogStore`` in memory, one per life of a process."""

    def __init__(self, disk: Disk, volume: LogVolume, checkers: Checkers, wall_ms: int) -> None:
        """``wall_ms``: the time by the machine's clock, now that the store is opened."""
        self._disk = disk
        self._volume = volume
        self._checkers = checkers
        self._fresh = not volume.durable.created
        self._unsafe = 0  # queued changes that must be durable before a message leaves
        self._taken = 0
        volume.durable.created = True
        # Durable before anything else happens, as the port demands. By the wall clock, like the real one: a new store
        # must be ahead of the lives of a disk that was lost.
        volume.durable.incarnation = max(volume.durable.incarnation + 1, wall_ms)
        self.image = volume.durable.copy()
        checkers.store_opened(disk.host, self.image)

    # ---- read

    def __len__(self) -> int:
        return len(self.image.entries)

    def entry(self, position: int) -> Entry:
        return self.image.entries[position]

    def entries(self, start: int, stop: int) -> list[Entry]:
        return self.image.entries[start:stop]

    @property
    def size_bytes(self) -> int:
        return self.image.bytes

    @property
    def term(self) -> int:
        return self.image.term

    @property
    def vote(self) -> str | None:
        return self.image.vote

    @property
    def commit_index(self) -> int:
        return self.image.commit_index

    @property
    def snapshot(self) -> SnapshotMeta | None:
        return self.image.snapshot

    @property
    def incarnation(self) -> int:
        return self.image.incarnation

    @property
    def amnesiac_term(self) -> int | None:
        return self.image.amnesiac_term

    @property
    def fresh(self) -> bool:
        return self._fresh

    # ---- write

    def _change(self, kind: str, value: object, *, counts: bool = True) -> None:
        self._disk.step(kind)
        operation = (kind, value)
        self.image.apply(operation)
        self._volume.queued.append(operation)
        if counts:
            self._unsafe += 1

    def append(self, entry: Entry) -> None:
        self._checkers.appended(self._disk.host, self.image, entry)
        self._change("append", entry)

    def truncate_from(self, position: int) -> None:
        self._disk.world.reach("conflicting entries truncated")
        self._checkers.truncated(self._disk.host, self.image, position)
        self._change("truncate_from", position)

    def truncate_to(self, position: int) -> None:
        self._disk.world.reach("log compacted")
        self._change("truncate_to", position)

    def reset(self, entries: list[Entry]) -> None:
        self._disk.world.reach("log replaced by a snapshot")
        self._change("reset", list(entries))

    def set_term(self, term: int, vote: str | None) -> None:
        self._change("term", (term, vote))

    def set_commit_index(self, index: int) -> None:
        self._change("commit_index", index, counts=False)

    def set_snapshot(self, meta: SnapshotMeta) -> None:
        self._change("snapshot", meta)

    def set_amnesiac_term(self, term: int | None) -> None:
        if term != 0 and self.image.amnesiac_term == 0 and self._checkers.acks:
            self._disk.world.reach("empty node admitted as a voter")
        self._change("amnesiac_term", term)

    # ---- durability

    @property
    def dirty(self) -> bool:
        return self._unsafe > 0

    @property
    def in_doubt(self) -> int:
        """Changes that are not durable yet, handed over or not (a commit index alone is none)."""
        return sum(1 for kind, _ in self._volume.queued if kind != "commit_index")

    def take(self) -> Callable[[], None]:
        count = len(self._volume.queued) - self._taken
        self._taken += count
        self._unsafe = 0
        disk, volume = self._disk, self._volume

        def sync() -> None:
            disk.step("before the sync")
            if disk.full:
                raise StoreError(f"{disk.host}/log.db: {NO_SPACE}")
            volume.settle(count // 2)
            disk.step("within the sync")
            volume.settle(count - count // 2)
            self._taken -= count
            disk.step("after the sync")

        return sync

    def close(self) -> None:
        return


class SimSnapshotStore:
    """The port ``SnapshotStore`` in memory. A file without ``.tmp`` is complete and durable."""

    def __init__(self, disk: Disk, volume: LogVolume) -> None:
        self._disk = disk
        self._volume = volume
        self._incoming: SnapshotMeta | None = None
        self._unrecorded: dict[str, int] = {}  # written in this life -> index

    def _checksum(self, payload: bytes) -> str:
        return hashlib.blake2b(payload, digest_size=32).hexdigest()

    def _publish(self, index: int, term: int, payload: bytes) -> str:
        name = f"snapshot-{index}-{term}-{self._checksum(payload)[:8]}"
        self._disk.step("snapshot: temporary file")
        if self._disk.full:
            raise StoreError(f"{self._disk.host}/{name}.tmp: {NO_SPACE}")
        self._volume.files[name + ".tmp"] = payload
        self._disk.step("snapshot: before the rename")
        self._volume.files[name] = self._volume.files.pop(name + ".tmp")
        self._unrecorded[name] = index
        self._disk.step("snapshot: after the rename")
        return name

    def write(self, index: int, term: int, previous_term: int, payload: bytes) -> SnapshotMeta:
        name = self._publish(index, term, payload)
        return SnapshotMeta(index, term, previous_term, name, len(payload), self._checksum(payload))

    def _content(self, meta: SnapshotMeta) -> bytes:
        content = self._volume.files.get(meta.file)
        if content is None:
            raise StoreError(f"{self._disk.host}/{meta.file}: the snapshot is missing")
        return content

    def read(self, meta: SnapshotMeta) -> bytes:
        content = self._content(meta)
        if len(content) != meta.size_bytes or self._checksum(content) != meta.checksum:
            raise StoreError(f"{self._disk.host}/{meta.file}: its checksum is wrong")
        return content

    def chunk(self, meta: SnapshotMeta, offset: int, size: int) -> bytes:
        return self._content(meta)[offset : offset + size]

    def receive_begin(self, meta: SnapshotMeta) -> None:
        self._disk.step("snapshot: receive begins")
        self._incoming = meta
        self._volume.files[_INCOMING] = b""

    def receive_chunk(self, offset: int, data: bytes) -> None:
        self._disk.step("snapshot: receive a chunk")
        if self._incoming is None:
            raise SnapshotRefused("a chunk of a snapshot whose reception has not begun")
        content = self._volume.files[_INCOMING]
        if offset != len(content) or offset + len(data) > self._incoming.size_bytes:
            self.receive_abort()
            raise SnapshotRefused(f"a chunk at {offset}, expected one at {len(content)}")
        self._volume.files[_INCOMING] = content + data

    def receive_end(self) -> SnapshotMeta:
        meta = self._incoming
        if meta is None:
            raise SnapshotRefused("the end of a snapshot whose reception has not begun")
        content = self._volume.files[_INCOMING]
        self.receive_abort()
        if len(content) != meta.size_bytes or self._checksum(content) != meta.checksum:
            raise SnapshotRefused("a snapshot whose checksum is wrong")
        name = self._publish(meta.index, meta.term, content)
        self._disk.world.reach("snapshot received from a peer")
        return SnapshotMeta(meta.index, meta.term, meta.previous_term, name, len(content), meta.checksum)

    def receive_abort(self) -> None:
        self._incoming = None
        self._volume.files.pop(_INCOMING, None)

    def retain(self, keep: SnapshotMeta) -> None:
        """Like the real one: spares what is being written, and what is newer than ``keep`` and not recorded yet."""
        self._disk.step("snapshot: before old files are deleted")
        self._unrecorded = {name: index for name, index in self._unrecorded.items() if index > keep.index}
        for name in list(self._volume.files):
            if name != keep.file and name not in self._unrecorded and not name.endswith(".tmp"):
                del self._volume.files[name]
