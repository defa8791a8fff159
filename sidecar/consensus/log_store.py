"""The log store of one node: SQLite in WAL mode, one transaction for each turn, everything read from memory.

Rules
  * A transaction is durable when COMMIT has returned (``synchronous=FULL``: the WAL is synced before). Nothing that is
    in doubt is acknowledged: the first failed commit ends the store for this life of the process.
  * The event loop never touches SQLite after the store is open. It changes the mirror at once and queues the change;
    ``take`` hands the queue over as one function, which runs on another thread.
  * A store is either opened whole or refused, with a message that says what to do. Refusing changes no byte of it: it
    is verified through a read-only connection first. Nothing is ever emptied, repaired or guessed.

Files, all in the data folder
  ``log.sqlite3``, ``-wal``  entries (a checksum each), and one row of state (checksummed, part of every transaction)
  ``log.watermark``          the number of the last transaction known to be durable. SQLite replays a WAL up to the
                             first bad frame and ignores the rest without a word, and a missing WAL is no error to it
                             either: both would lose acknowledged entries. The watermark is written after each commit
                             and not synced by itself, so that after a power cut it can only lag behind what the
                             database holds; if it is ahead, committed transactions are gone.
  ``lock``                   held (flock) while a process uses the folder
  ``log.sqlite3-shm``        a leftover of the read-only check, ignored

What it cannot detect: a whole folder put back from an older copy. So a lost node is wiped and rejoins, it is never
restored from a backup of its own folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from urllib.parse import quote

import msgspec

from sidecar.consensus.ports import Entry, SnapshotMeta, StoreError, StoreIdentity

FORMAT = 1
DISK_RESERVE_BYTES = (
    256 << 20
)  # below this the disk counts as low: stop taking work while there is room to stop cleanly

_APPLICATION_ID = 0x54454E55  # "TENU", so that any other SQLite file is told apart
_CHECKPOINT_PAGES = 500  # 2 MB: a checkpoint then stalls one commit by about a millisecond, not ten
_SQLITE_MAGIC = b"SQLite format 3\x00"
_PAGE_BYTES = 4_096
_DELETE_ROWS_MAX = 1_000  # compacted rows removed in one transaction: truncating 50,000 at once would stall a turn
_ENTRY_OVERHEAD_BYTES = 48
_STORE_ID_BYTES = 16
_WATERMARK = struct.Struct("<8sQI")
_WATERMARK_MAGIC = b"TENUMARK"

_log = logging.getLogger("tenure.store")

_SCHEMA = """
CREATE TABLE entries (
    log_index INTEGER PRIMARY KEY, term INTEGER NOT NULL, checksum INTEGER NOT NULL, command BLOB NOT NULL);
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), checksum INTEGER NOT NULL, body BLOB NOT NULL);
"""


class _State(msgspec.Struct, kw_only=True):
    """The one row of state. ``first_index`` is authoritative: rows below it are compacted and await deletion."""

    format: int
    cluster_id: str
    node_id: str
    transaction: int = 0
    incarnation: int = 0
    first_index: int = 0
    last_index: int = -1  # below first_index: the log is empty
    term: int = 0
    vote: str | None = None
    commit_index: int = 0
    amnesiac_term: int | None = None
    snapshot: SnapshotMeta | None = None
    store_id: bytes = b""  # empty in stores of before there was one: they get it at the next open


class _Kind(IntEnum):
    APPEND = 1
    DELETE_FROM = 2
    CLEAR = 3


class _Operation(msgspec.Struct):
    kind: _Kind
    index: int = 0
    entries: list[Entry] = msgspec.field(default_factory=list)


class DiskSpace(msgspec.Struct, frozen=True):
    """Room on the file system of the data folder, in bytes; ``low`` when it is below the reserve."""

    free_bytes: int
    total_bytes: int
    low: bool


def disk_space(folder: Path, reserve_bytes: int = DISK_RESERVE_BYTES) -> DiskSpace:
    """Raises StoreError when the file system cannot be asked."""
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        raise StoreError(f"{folder}: cannot read the free disk space: {error.strerror}") from error
    free_bytes = facts.f_bavail * facts.f_frsize
    return DiskSpace(free_bytes, facts.f_blocks * facts.f_frsize, free_bytes < reserve_bytes)


def sync_folder(folder: Path) -> None:
    """Make created, renamed and deleted names of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def corrupt(path: Path, reason: str) -> StoreError:
    """The one wording for a damaged file, so that whoever is on call always reads the same instruction."""
    return StoreError(
        f"{path}: the store is corrupt ({reason}). It was left as it is. What to do: check the disk; if a majority of "
        f"the cluster is up without this node, move its data folder away and start it with an empty one and without "
        f"bootstrap: it fetches everything from the others"
    )


def _checksum(index: int, term: int, command: bytes) -> int:
    return zlib.crc32(command, zlib.crc32(struct.pack("<QQ", index, term)))


class SqliteLogStore:
    """LogStore on disk. Opening verifies all of it; see the module for the rules.

    Raises StoreError if the store is corrupt, of another cluster or node, of a newer format, in use by another process,
    or if the disk refuses.
    """

    def __init__(self, data_dir: Path, identity: StoreIdentity) -> None:
        self._folder = data_dir
        self._path = data_dir / "log.sqlite3"
        self._identity = identity
        self._entries: list[Entry] = []
        self._size_bytes = 0
        self._queue: list[_Operation] = []
        self._dirty = False
        self._changed = False
        self._failed: str | None = None
        self._closed = False
        self._taken = 0
        self._written = 0
        self._commit_lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._watermark: int | None = None
        try:
            self._lock_descriptor = _lock_folder(data_dir)
        except OSError as error:
            raise _refused(data_dir, error) from error
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            if not self._path.exists():
                self._create()
            mark = self._read_watermark()
            self._verify_head()
            self._state, self._entries, self._lowest_row = self._verify(mark)
            self._size_bytes = sum(len(entry.command) + _ENTRY_OVERHEAD_BYTES for entry in self._entries)
            self._fresh = self._never_used()
            self._connection = self._connect()
            self._watermark = os.open(self._watermark_path, os.O_RDWR | os.O_CLOEXEC)
            # By the wall clock, so that a new store is ahead of every life of the disk that it replaces.
            self._state.incarnation = max(self._state.incarnation + 1, time.time_ns() // 1_000_000)
            self._state.store_id = self._state.store_id or os.urandom(_STORE_ID_BYTES)
            self._changed = True
            self.take()()
            os.fsync(self._watermark)
            sync_folder(self._folder)
        except sqlite3.Error as error:
            raise self._sqlite_error(error) from error
        except OSError as error:
            raise _refused(self._path, error) from error

    @property
    def _watermark_path(self) -> Path:
        return self._folder / "log.watermark"

    def _sibling(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    def _create(self) -> None:
        """Build the database under another name and rename it, so that a crash on the way leaves nothing half made."""
        self._refuse_leftovers()
        _write_new(self._watermark_path, _encode_watermark(0))
        draft = self._sibling(".new")
        for leftover in (draft, draft.with_name(draft.name + "-journal")):
            leftover.unlink(missing_ok=True)
        _write_new(draft, b"")  # SQLite keeps the mode (0600) of a file that exists, and gives it to the WAL
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            connection.executescript(_SCHEMA)
            body = msgspec.msgpack.encode(
                _State(format=FORMAT, cluster_id=self._identity.cluster_id, node_id=self._identity.node_id)
            )
            connection.execute("INSERT INTO state VALUES (1, ?, ?)", (zlib.crc32(body), body))
        finally:
            connection.close()
        os.rename(draft, self._path)
        sync_folder(self._folder)

    def _refuse_leftovers(self) -> None:
        """No database, but traces of one: somebody removed a part of the store. An empty log here would be a lie."""
        if self._watermark_path.exists() and self._read_watermark() > 0:
            raise corrupt(
                self._path, f"the file is missing, but {self._watermark_path.name} shows that it held entries"
            )
        wal = self._sibling("-wal")
        if wal.exists() and wal.stat().st_size > 0:
            raise corrupt(self._path, f"the file is missing, but {wal.name} is there")
        snapshots = self._folder / "snapshots"
        if snapshots.is_dir() and any(snapshots.glob("*.snapshot")):
            raise corrupt(self._path, "the file is missing, but there are snapshots")

    def _read_watermark(self) -> int:
        try:
            raw = self._watermark_path.read_bytes()
        except FileNotFoundError:
            raise corrupt(self._watermark_path, "the file is missing") from None
        if len(raw) != _WATERMARK.size:
            raise corrupt(self._watermark_path, f"it has {len(raw)} bytes instead of {_WATERMARK.size}")
        magic, transaction, checksum = _WATERMARK.unpack(raw)
        if magic != _WATERMARK_MAGIC or checksum != zlib.crc32(raw[:-4]):
            raise corrupt(self._watermark_path, "its checksum is wrong")
        return int(transaction)

    def _verify_head(self) -> None:
        """Before SQLite sees the file: it removes the WAL of a database that it takes for empty."""
        with open(self._path, "r+b") as file:  # a clear "permission denied" instead of SQLite's "unable to open"
            head = file.read(_PAGE_BYTES)
        if len(head) < _PAGE_BYTES or not head.startswith(_SQLITE_MAGIC):
            raise corrupt(self._path, "it is not an SQLite file, or cut off in its first page")

    def _verify(self, mark: int) -> tuple[_State, list[Entry], int]:
        """Read everything through a read-only connection: it replays the WAL without writing to any file but -shm."""
        connection = sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True, isolation_level=None)
        try:
            state = self._verify_state(connection, mark)
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != ("ok",):
                raise corrupt(self._path, f"SQLite's check says: {verdict}")
            entries, lowest_row = self._verify_entries(connection, state)
        finally:
            connection.close()
        snapshot = state.snapshot
        if snapshot is not None and entries and entries[0].index > snapshot.index + 1:
            raise corrupt(self._path, f"entries between snapshot {snapshot.index} and {entries[0].index} are missing")
        return state, entries, lowest_row

    def _verify_state(self, connection: sqlite3.Connection, mark: int) -> _State:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            raise corrupt(self._path, "it is an SQLite file, but not a log store of Tenure")
        if version > FORMAT:
            raise StoreError(
                f"{self._path}: the store has format {version}, written by a newer version; this one knows up to "
                f"format {FORMAT}. What to do: run the newer version on this node. The store was left as it is"
            )
        rows = connection.execute("SELECT checksum, body FROM state").fetchall()
        if len(rows) != 1 or not isinstance(rows[0][1], bytes) or zlib.crc32(rows[0][1]) != rows[0][0]:
            raise corrupt(self._path, "the checksum of its state is wrong")
        try:
            state = msgspec.msgpack.decode(rows[0][1], type=_State)
        except msgspec.DecodeError as error:
            raise corrupt(self._path, f"its state cannot be read: {error}") from error
        if state.format != version:
            raise corrupt(self._path, f"its header says format {version}, its state says format {state.format}")
        found = StoreIdentity(state.cluster_id, state.node_id)
        if found != self._identity:
            raise foreign(self._path, found, self._identity)
        if state.transaction < mark:
            raise corrupt(
                self._path,
                f"committed transactions are gone: it ends at {state.transaction}, but {mark} was durable; "
                f"its -wal file was removed, cut off or damaged",
            )
        return state

    def _verify_entries(self, connection: sqlite3.Connection, state: _State) -> tuple[list[Entry], int]:
        entries: list[Entry] = []
        expected = state.first_index
        query = "SELECT log_index, term, checksum, command FROM entries WHERE log_index >= ? ORDER BY log_index"
        for index, term, checksum, command in connection.execute(query, (state.first_index,)):
            if index != expected:
                raise corrupt(self._path, f"entry {expected} is missing")
            if not isinstance(command, bytes) or not isinstance(term, int) or term < 0:
                raise corrupt(self._path, f"entry {index} is malformed")
            if _checksum(index, term, command) != checksum:
                raise corrupt(self._path, f"the checksum of entry {index} is wrong")
            entries.append(Entry(index, term, command))
            expected += 1
        if expected != state.last_index + 1:
            raise corrupt(self._path, f"the log should end at entry {state.last_index}, but ends at {expected - 1}")
        (lowest,) = connection.execute("SELECT MIN(log_index) FROM entries").fetchone()
        return entries, state.first_index if lowest is None else int(lowest)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            for pragma in (
                "locking_mode=EXCLUSIVE",  # no -shm file; other programs see "database is locked"
                "journal_mode=WAL",
                "synchronous=FULL",
                "secure_delete=OFF",  # on in some builds; it rewrites every freed page
                f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
            ):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            # What the WAL holds may be in the page cache only, if an earlier fsync failed and the process ended on it,
            # as it has to. Writing it into the database and syncing that makes it durable before it is built upon.
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise sqlite3.OperationalError("database is locked")
        except sqlite3.Error as error:
            connection.close()
            raise self._sqlite_error(error, locked=not hasattr(error, "sqlite_errorcode")) from error
        return connection

    def _never_used(self) -> bool:
        state = self._state
        return not (self._entries or state.term or state.vote or state.snapshot or state.amnesiac_term is not None)

    # -- read ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, position: int) -> Entry:
        return self._entries[position]

    def entries(self, start: int, stop: int) -> list[Entry]:
        return self._entries[start:stop]

    @property
    def size_bytes(self) -> int:
        """Bytes of the log in memory: commands plus a fixed overhead for each entry."""
        return self._size_bytes

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def vote(self) -> str | None:
        return self._state.vote

    @property
    def commit_index(self) -> int:
        return self._state.commit_index

    @property
    def snapshot(self) -> SnapshotMeta | None:
        return self._state.snapshot

    @property
    def incarnation(self) -> int:
        return self._state.incarnation

    @property
    def store_id(self) -> bytes:
        """Random, made with the store and never changed: tells two stores of one node apart."""
        return self._state.store_id

    @property
    def amnesiac_term(self) -> int | None:
        return self._state.amnesiac_term

    @property
    def fresh(self) -> bool:
        """No entry, term, vote or snapshot had ever been stored when this open began: created by this open, or by an
        earlier one that crashed before it stored anything."""
        return self._fresh

    @property
    def failed(self) -> str | None:
        """Why the store became unusable; None while it works."""
        return self._failed

    def disk_space(self) -> DiskSpace:
        """Free space beside the store; raises StoreError."""
        return disk_space(self._folder)

    # -- write (queued) ------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        if self._entries and entry.index != self._entries[-1].index + 1:
            raise AssertionError(f"entry {entry.index} cannot follow entry {self._entries[-1].index}")
        self._touch()
        self._entries.append(entry)
        self._size_bytes += len(entry.command) + _ENTRY_OVERHEAD_BYTES
        if not self._queue or self._queue[-1].kind is not _Kind.APPEND:
            self._queue.append(_Operation(_Kind.APPEND))
        self._queue[-1].entries.append(entry)

    def truncate_from(self, position: int) -> None:
        """Drop the entry at ``position`` and all that follow."""
        if position == 0:
            self.reset([])
        elif position < len(self._entries):
            self._touch()
            self._queue.append(_Operation(_Kind.DELETE_FROM, index=self._entries[position].index))
            self._size_bytes -= _size_bytes(self._entries[position:])
            del self._entries[position:]

    def truncate_to(self, position: int) -> None:
        if position >= len(self._entries):
            # Not by advancing first_index: rows that await deletion must never be taken for a log that starts lower.
            self.reset([])
        elif position > 0:
            self._touch()
            self._size_bytes -= _size_bytes(self._entries[:position])
            del self._entries[:position]

    def reset(self, entries: list[Entry]) -> None:
        self._touch()
        self._queue = [_Operation(_Kind.CLEAR)]  # what was queued before would be cleared again anyway
        self._entries = []
        self._size_bytes = 0
        for entry in entries:
            self.append(entry)

    def set_term(self, term: int, vote: str | None) -> None:
        if term < self._state.term:
            raise AssertionError(f"term {term} is before the stored term {self._state.term}")
        self._touch()
        self._state.term = term
        self._state.vote = vote

    def set_commit_index(self, index: int) -> None:
        self._state.commit_index = index
        self._changed = True

    def set_snapshot(self, meta: SnapshotMeta) -> None:
        self._touch()
        self._state.snapshot = meta

    def set_amnesiac_term(self, term: int | None) -> None:
        self._touch()
        self._state.amnesiac_term = term

    def _touch(self) -> None:
        self._usable()
        self._dirty = self._changed = True

    def _usable(self) -> None:
        if self._failed is not None:
            raise StoreError(self._failed)
        if self._closed:
            raise StoreError(f"{self._path}: the store is closed")

    # -- durability ----------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return self._dirty

    def take(self) -> Callable[[], None]:
        self._usable()
        if not self._changed:
            return self._usable
        self._state.transaction += 1
        self._state.first_index = self._entries[0].index if self._entries else 0
        self._state.last_index = self._entries[-1].index if self._entries else -1
        body = msgspec.msgpack.encode(self._state)
        operations, self._queue = self._queue, []
        self._dirty = self._changed = False
        transaction, first_index = self._state.transaction, self._state.first_index
        self._taken = transaction
        return lambda: self._commit(transaction, first_index, operations, body)

    def sync(self) -> None:
        """``take`` and make durable at once; for callers that have no event loop to spare."""
        self.take()()

    def _commit(self, transaction: int, first_index: int, operations: list[_Operation], body: bytes) -> None:
        with self._commit_lock:
            self._usable()
            if self._written not in (0, transaction - 1):
                raise AssertionError(f"transaction {transaction} must not follow {self._written}")
            connection, watermark = self._connection, self._watermark
            assert connection is not None and watermark is not None
            try:
                connection.execute("BEGIN IMMEDIATE")
                for operation in operations:
                    self._execute(connection, operation)
                self._delete_compacted(connection, first_index)
                connection.execute("UPDATE state SET checksum = ?, body = ? WHERE id = 1", (zlib.crc32(body), body))
                connection.execute("COMMIT")
                os.pwrite(watermark, _encode_watermark(transaction), 0)
            except (sqlite3.Error, OSError) as error:
                raise self._fail(error) from error
            self._written = transaction

    def _execute(self, connection: sqlite3.Connection, operation: _Operation) -> None:
        if operation.kind is _Kind.APPEND:
            connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", _rows(operation.entries))
            self._lowest_row = min(self._lowest_row, operation.entries[0].index)
        elif operation.kind is _Kind.DELETE_FROM:
            connection.execute("DELETE FROM entries WHERE log_index >= ?", (operation.index,))
        else:
            connection.execute("DELETE FROM entries")
            self._lowest_row = 1 << 62

    def _delete_compacted(self, connection: sqlite3.Connection, first_index: int) -> None:
        if self._lowest_row < first_index:
            stop = min(first_index, self._lowest_row + _DELETE_ROWS_MAX)
            connection.execute("DELETE FROM entries WHERE log_index < ?", (stop,))
            self._lowest_row = stop

    def _fail(self, error: sqlite3.Error | OSError) -> StoreError:
        """Whether the transaction reached the disk is not known: stop for good. The next open finds out."""
        reason = self._sqlite_error(error) if isinstance(error, sqlite3.Error) else _refused(self._path, error)
        self._failed = f"{reason}. The write is in doubt and the store is closed until this node is restarted"
        _log.error("log store failed: %s", self._failed)
        return StoreError(self._failed)

    def _sqlite_error(self, error: sqlite3.Error, *, locked: bool = False) -> StoreError:
        code = getattr(error, "sqlite_errorcode", None)
        primary = code & 0xFF if isinstance(code, int) else None
        free_bytes = disk_space(self._folder).free_bytes
        if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and free_bytes < _PAGE_BYTES):
            return _disk_full(self._path)
        if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
            return StoreError(
                f"{self._path}: the disk refused: {error} ({getattr(error, 'sqlite_errorname', 'SQLite')}, "
                f"{free_bytes} bytes free). What to do: check the disk, its quota and the rights of the folder, then "
                f"start this node again"
            )
        if locked or primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(
                f"{self._path}: in use by another process. What to do: stop it, then start this node again"
            )
        return corrupt(self._path, str(error))

    def close(self) -> None:
        """Make durable what is queued (unless the store failed), then release the files. May be called twice."""
        if self._closed:
            return
        try:
            if self._failed is None and self._taken == self._written:
                self.take()()
        finally:
            with self._commit_lock:
                self._release()

    def _release(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._watermark is not None:
            os.close(self._watermark)
            self._watermark = None
        os.close(self._lock_descriptor)


# ---- small parts -----------------------------------------------------------------------------------------------------


def foreign(path: Path, found: StoreIdentity, expected: StoreIdentity) -> StoreError:
    """The file is whole, but somebody else's. Both owners are named."""
    return StoreError(
        f"{path}: the store belongs to node {found.node_id!r} of cluster {found.cluster_id!r}, but this is node "
        f"{expected.node_id!r} of cluster {expected.cluster_id!r}. What to do: correct data_dir, node_id or "
        f"cluster_id; the store was left as it is"
    )


def prepare_folder(folder: Path) -> None:
    """Create a folder (0700) with its parents, durably. A folder that exists keeps its rights."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def _lock_folder(folder: Path) -> int:
    """flock and not fcntl's record locks: those do not see a second store in one process, and any close drops them."""
    prepare_folder(folder)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(
            f"{folder}: in use by another process (process id {owner}). What to do: stop it, or give this node a data "
            f"folder of its own"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _rows(entries: Iterable[Entry]) -> Iterable[tuple[int, int, int, bytes]]:
    for entry in entries:
        yield entry.index, entry.term, _checksum(entry.index, entry.term, entry.command), entry.command


def _size_bytes(entries: list[Entry]) -> int:
    return sum(len(entry.command) + _ENTRY_OVERHEAD_BYTES for entry in entries)


def _encode_watermark(transaction: int) -> bytes:
    body = _WATERMARK.pack(_WATERMARK_MAGIC, transaction, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _write_new(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_full(path: Path) -> StoreError:
    return StoreError(
        f"{path}: the disk is full ({disk_space(path.parent).free_bytes} bytes free). What to do: make room, then "
        f"start this node again; nothing that was acknowledged is lost"
    )


def _refused(path: Path, error: OSError) -> StoreError:
    where = Path(error.filename) if isinstance(error.filename, str) else path
    return StoreError(
        f"{where}: {error.strerror or error}. What to do: check that the data folder exists, has room, and belongs to "
        f"the user that runs this process (folder 0700, files 0600), then start this node again"
    )
