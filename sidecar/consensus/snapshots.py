"""Snapshot files of one node: written beside the old one, verified, made durable, and only then named.

A file is ``magic, header length, header, payload, blake2b-256 of all before``. Its name holds the index, the term and a
part of that checksum, so one name never stands for two contents, and the meta that the log store holds is right before
and after a crash at any point: the file it names is neither overwritten nor removed until another meta is durable.

The folder belongs to the data folder, which the log store locks; open that first. Writing, reading and receiving may
each run on a thread of their own, but there is one receiver at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
from pathlib import Path

import msgspec

from sidecar.consensus.log_store import corrupt, disk_space, foreign, prepare_folder, sync_folder
from sidecar.consensus.ports import SnapshotMeta, SnapshotRefused, StoreError, StoreIdentity

FORMAT = 1
SIZE_BYTES_MAX = 1 << 30

_PREFIX = struct.Struct("<8sI")  # magic, length of the header
_MAGIC = b"TENUSNAP"
_HEADER_BYTES_MAX = 4_096
_CHECKSUM_BYTES = 32
_NAME = re.compile(r"[0-9]{20}-[0-9]{20}-[0-9a-f]{16}\.snapshot")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    cluster_id: str
    node_id: str  # who wrote it first; a snapshot travels between the nodes of a cluster
    index: int
    term: int
    previous_term: int
    payload_bytes: int


class _Receiving:
    """One file on its way in: hashed as it arrives, so that the end costs only the sync."""

    def __init__(self, meta: SnapshotMeta, path: Path, descriptor: int) -> None:
        self.meta = meta
        self.path = path
        self.descriptor = descriptor
        self.received_bytes = 0
        self.hash = _hash()
        self.head = bytearray()
        self.tail = b""

    def add(self, data: bytes) -> None:
        _write_all(self.descriptor, data)
        if len(self.head) < _PREFIX.size + _HEADER_BYTES_MAX:
            self.head += data[: _PREFIX.size + _HEADER_BYTES_MAX - len(self.head)]
        self.received_bytes += len(data)
        joined = self.tail + data
        self.hash.update(joined[:-_CHECKSUM_BYTES])
        self.tail = joined[-_CHECKSUM_BYTES:]


class FileSnapshotStore:
    """SnapshotStore on disk. StoreError: our disk or our file. Its subclass SnapshotRefused: what a peer sent."""

    def __init__(self, data_dir: Path, identity: StoreIdentity, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        """``size_bytes_max`` bounds a whole file, written or received. Raises StoreError if there can be no folder."""
        self._folder = data_dir / "snapshots"
        self._identity = identity
        self._size_bytes_max = size_bytes_max
        self._receiving: _Receiving | None = None
        self._lock = threading.Lock()
        self._temporary: set[str] = set()  # in use now
        self._unrecorded: set[str] = set()  # named in this life, perhaps not yet in the log store
        self._drafts = 0
        try:
            prepare_folder(self._folder)
        except OSError as error:
            raise _refused(self._folder, error) from error

    # -- our own -------------------------------------------------------------------------------------------------------

    def write(self, index: int, term: int, previous_term: int, payload: bytes) -> SnapshotMeta:
        header = msgspec.msgpack.encode(
            _Header(
                format=FORMAT,
                cluster_id=self._identity.cluster_id,
                node_id=self._identity.node_id,
                index=index,
                term=term,
                previous_term=previous_term,
                payload_bytes=len(payload),
            )
        )
        head = _PREFIX.pack(_MAGIC, len(header)) + header
        size_bytes = len(head) + len(payload) + _CHECKSUM_BYTES
        if size_bytes > self._size_bytes_max:
            raise StoreError(
                f"{self._folder}: a snapshot of {size_bytes} bytes is over the limit of {self._size_bytes_max}. What "
                f"to do: raise the limit on all nodes, or lower the bounds on what the cluster holds"
            )
        digest = _hash(head)
        digest.update(payload)
        meta = SnapshotMeta(
            index, term, previous_term, _name(index, term, digest.hexdigest()), size_bytes, digest.hexdigest()
        )
        path, descriptor = self._draft()
        try:
            for part in (head, payload, digest.digest()):
                _write_all(descriptor, part)
            self._publish(path, descriptor, meta.file)
        except OSError as error:
            raise _refused(path, error) from error
        finally:
            self._discard(path, descriptor)
        return meta

    def read(self, meta: SnapshotMeta) -> bytes:
        path = self._path(meta)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise corrupt(path, "the snapshot is missing") from None
        except OSError as error:
            raise _refused(path, error) from error
        if len(content) != meta.size_bytes:
            raise corrupt(path, f"it has {len(content)} bytes instead of {meta.size_bytes}")
        view = memoryview(content)
        if not _hash(view[:-_CHECKSUM_BYTES]).hexdigest() == content[-_CHECKSUM_BYTES:].hex() == meta.checksum:
            raise corrupt(path, "its checksum is wrong")
        header, start = _parse_head(content[: _PREFIX.size + _HEADER_BYTES_MAX], path)
        self._check_header(header, start, meta, path)
        return content[start:-_CHECKSUM_BYTES]

    def chunk(self, meta: SnapshotMeta, offset: int, size: int) -> bytes:
        """Bytes of the file as it is, header and all; fewer at its end. Not verified: the receiver does that."""
        path = self._path(meta)
        try:
            with open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            raise corrupt(path, "the snapshot is missing") from None
        except OSError as error:
            raise _refused(path, error) from error

    def retain(self, keep: SnapshotMeta) -> None:
        """Delete all other snapshot files and temporary files, but nothing that is being written, and nothing newer
        than ``keep`` that was written in this life: it may not have been recorded yet."""
        with self._lock:
            newer = {name for name in self._unrecorded if int(name[:20]) > keep.index}
            self._unrecorded = newer
            spared = newer | self._temporary | {keep.file}
        try:
            for path in self._folder.iterdir():
                if path.name not in spared and (path.suffix == ".tmp" or _NAME.fullmatch(path.name)):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise _refused(self._folder, error) from error

    # -- from a peer ---------------------------------------------------------------------------------------------------

    def receive_begin(self, meta: SnapshotMeta) -> None:
        """Ends an earlier reception that did not come to its end. The peer's file name is not used."""
        self.receive_abort()
        if not _PREFIX.size + _CHECKSUM_BYTES < meta.size_bytes <= self._size_bytes_max:
            raise SnapshotRefused(f"a snapshot of {meta.size_bytes} bytes, the limit is {self._size_bytes_max}")
        if meta.index < 0 or meta.term < 0 or max(meta.index, meta.term) >= 1 << 63:
            raise SnapshotRefused(f"a snapshot of index {meta.index}, term {meta.term}")
        if not _CHECKSUM.fullmatch(meta.checksum):
            raise SnapshotRefused("a snapshot with a malformed checksum")
        free_bytes = disk_space(self._folder).free_bytes
        if free_bytes < meta.size_bytes:
            raise StoreError(
                f"{self._folder}: no room for a snapshot of {meta.size_bytes} bytes, {free_bytes} are free. What to "
                f"do: make room; the node tries again by itself"
            )
        path, descriptor = self._draft()
        self._receiving = _Receiving(meta, path, descriptor)

    def receive_chunk(self, offset: int, data: bytes) -> None:
        """Chunks come in order; any other ends the reception."""
        receiving = self._receiving
        if receiving is None:
            raise SnapshotRefused("a chunk of a snapshot whose reception has not begun")
        if offset != receiving.received_bytes or offset + len(data) > receiving.meta.size_bytes:
            self.receive_abort()
            raise SnapshotRefused(
                f"a chunk of {len(data)} bytes at {offset}, expected one at {receiving.received_bytes} "
                f"of {receiving.meta.size_bytes}"
            )
        try:
            receiving.add(data)
        except OSError as error:
            self.receive_abort()
            raise _refused(receiving.path, error) from error

    def receive_end(self) -> SnapshotMeta:
        receiving = self._receiving
        if receiving is None:
            raise SnapshotRefused("the end of a snapshot whose reception has not begun")
        try:
            meta = self._verify_received(receiving)
            self._publish(receiving.path, receiving.descriptor, meta.file)
        except OSError as error:
            raise _refused(receiving.path, error) from error
        finally:
            self.receive_abort()
        return meta

    def receive_abort(self) -> None:
        """Give up what is being received, if anything."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            self._discard(receiving.path, receiving.descriptor)

    def _verify_received(self, receiving: _Receiving) -> SnapshotMeta:
        meta = receiving.meta
        if receiving.received_bytes != meta.size_bytes:
            raise SnapshotRefused(f"a snapshot that ended at {receiving.received_bytes} of {meta.size_bytes} bytes")
        if not receiving.hash.hexdigest() == receiving.tail.hex() == meta.checksum:
            raise SnapshotRefused("a snapshot whose checksum is wrong")
        try:
            header, start = _parse_head(bytes(receiving.head), receiving.path)
            self._check_header(header, start, meta, receiving.path)
        except StoreError as error:
            raise SnapshotRefused(f"a snapshot that cannot be used: {error}") from error
        name = _name(meta.index, meta.term, meta.checksum)
        return SnapshotMeta(meta.index, meta.term, meta.previous_term, name, meta.size_bytes, meta.checksum)

    # -- shared --------------------------------------------------------------------------------------------------------

    def _path(self, meta: SnapshotMeta) -> Path:
        if not _NAME.fullmatch(meta.file):
            raise StoreError(f"{self._folder}: {meta.file!r} is not the name of a snapshot")
        return self._folder / meta.file

    def _check_header(self, header: _Header, start: int, meta: SnapshotMeta, path: Path) -> None:
        if header.cluster_id != self._identity.cluster_id:
            raise foreign(path, StoreIdentity(header.cluster_id, header.node_id), self._identity)
        if (header.index, header.term, header.previous_term) != (meta.index, meta.term, meta.previous_term):
            raise corrupt(path, f"it holds index {header.index}, term {header.term}, but is recorded as {meta}")
        if start + header.payload_bytes + _CHECKSUM_BYTES != meta.size_bytes:
            raise corrupt(path, "its header and its size disagree")

    def _draft(self) -> tuple[Path, int]:
        with self._lock:
            self._drafts += 1
            name = f"{os.getpid()}-{self._drafts}.tmp"
            self._temporary.add(name)
        path = self._folder / name
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            with self._lock:
                self._temporary.discard(name)
            raise _refused(path, error) from error

    def _publish(self, path: Path, descriptor: int, name: str) -> None:
        """The file is durable before it has its name, and the name before anybody hears of it."""
        os.fsync(descriptor)
        with self._lock:
            self._unrecorded.add(name)
        os.rename(path, self._folder / name)
        sync_folder(self._folder)

    def _discard(self, path: Path, descriptor: int) -> None:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        with self._lock:
            self._temporary.discard(path.name)


def _hash(data: bytes | memoryview = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES)


def _name(index: int, term: int, checksum: str) -> str:
    return f"{index:020d}-{term:020d}-{checksum[:16]}.snapshot"


def _parse_head(head: bytes, path: Path) -> tuple[_Header, int]:
    """The header and where the payload begins."""
    if len(head) < _PREFIX.size:
        raise corrupt(path, "it is too short for a snapshot")
    magic, length = _PREFIX.unpack_from(head)
    if magic != _MAGIC or length > _HEADER_BYTES_MAX:
        raise corrupt(path, "it is not a snapshot of Tenure")
    body = head[_PREFIX.size : _PREFIX.size + length]
    try:
        version = msgspec.msgpack.decode(body, type=_FormatOnly).format
        if version > FORMAT:
            raise StoreError(
                f"{path}: the snapshot has format {version}, written by a newer version; this one knows up to format "
                f"{FORMAT}. What to do: run the newer version on this node"
            )
        return msgspec.msgpack.decode(body, type=_Header), _PREFIX.size + length
    except msgspec.DecodeError as error:
        raise corrupt(path, f"its header cannot be read: {error}") from error


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: {error.strerror or error}. What to do: check that the folder has room and belongs to the user that "
        f"runs this process; the snapshot before is untouched"
    )
