"""The log store: what it keeps, what it refuses, and that it never loses what was acknowledged without saying so."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sidecar.consensus import log_store
from sidecar.consensus.log_store import SqliteLogStore, disk_space
from sidecar.consensus.ports import Entry, SnapshotMeta, StoreError, StoreIdentity
from tests.waiting import wait_until

IDENTITY = StoreIdentity("cluster-a", "n1")
FILES = ("log.sqlite3", "log.sqlite3-wal", "log.watermark")


def entries(first: int, count: int, term: int = 1, size: int = 40) -> list[Entry]:
    return [Entry(index, term, bytes([index % 251]) * size) for index in range(first, first + count)]


def meta(index: int) -> SnapshotMeta:
    return SnapshotMeta(index, 1, 1, f"{index}.snapshot", 10, "00" * 32)


def fill(store: SqliteLogStore, new: list[Entry]) -> None:
    for entry in new:
        store.append(entry)
    store.sync()


def everything(store: SqliteLogStore) -> list[Entry]:
    return store.entries(0, len(store))


def crash_image(folder: Path, target: Path) -> Path:
    """What a process killed now would leave: the files as they are, without a clean close."""
    shutil.copytree(folder, target)
    return target


def hashes(folder: Path) -> dict[str, str]:
    """Of the files that hold something: SQLite makes an empty WAL even to read, which changes nothing."""
    contents = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    return {name: hashlib.blake2b(content).hexdigest() for name, content in contents.items() if content}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteLogStore]:
    opened = SqliteLogStore(tmp_path / "data", IDENTITY)
    yield opened
    opened.close()


# ---- what it keeps ---------------------------------------------------------------------------------------------------


def test_all_of_it_survives_a_restart(tmp_path: Path) -> None:
    store = SqliteLogStore(tmp_path, IDENTITY)
    incarnation = store.incarnation
    assert store.fresh and len(store) == 0
    store.set_term(7, "n2")
    store.set_commit_index(3)
    store.set_amnesiac_term(5)
    store.set_snapshot(meta(2))
    fill(store, entries(1, 5))
    size_bytes = store.size_bytes
    store.close()

    again = SqliteLogStore(tmp_path, IDENTITY)
    assert (again.term, again.vote, again.commit_index, again.amnesiac_term) == (7, "n2", 3, 5)
    assert everything(again) == entries(1, 5) and again.size_bytes == size_bytes > 0
    assert again.snapshot == meta(2)
    assert again.incarnation > incarnation and not again.fresh
    assert again.store_id == store.store_id and len(store.store_id) == 16
    again.close()
    again.close()


def test_a_new_store_is_ahead_of_every_life_of_the_one_that_was_lost(tmp_path: Path) -> None:
    """Else the requests of the new life would carry the names of those of an earlier one, which are in the log."""
    lives = []
    for _ in range(3):
        lost = SqliteLogStore(tmp_path / "lost", IDENTITY)
        lives.append(lost.incarnation)
        lost.close()
    wait_until(lambda: time.time_ns() // 1_000_000 > lives[-1])
    new = SqliteLogStore(tmp_path / "new", IDENTITY)
    assert new.incarnation > max(lives) and new.store_id != lost.store_id
    new.close()


def test_a_store_of_before_store_ids_gets_one_that_stays(tmp_path: Path) -> None:
    store = SqliteLogStore(tmp_path, IDENTITY)
    assert store._state.store_id
    store._state.store_id = b""  # as it is read from a state without the field
    store.set_term(1, None)
    store.close()
    lives = []
    for _ in range(2):
        later = SqliteLogStore(tmp_path, IDENTITY)
        lives.append(later.store_id)
        later.close()
    assert lives[0] == lives[1] != b""


def test_a_crash_before_anything_was_stored_leaves_it_fresh(tmp_path: Path) -> None:
    first = SqliteLogStore(tmp_path, IDENTITY)
    first.close()
    store = SqliteLogStore(tmp_path, IDENTITY)
    assert store.fresh and store.incarnation > first.incarnation
    store.set_term(1, None)
    store.close()
    last = SqliteLogStore(tmp_path, IDENTITY)
    assert not last.fresh
    last.close()


def test_files_are_for_their_owner_only(store: SqliteLogStore, tmp_path: Path) -> None:
    fill(store, entries(1, 1))
    folder = tmp_path / "data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_lone_commit_index_makes_nothing_dirty(store: SqliteLogStore, tmp_path: Path) -> None:
    assert not store.dirty
    store.set_commit_index(4)
    assert not store.dirty and store.commit_index == 4
    store.set_term(1, "n1")
    assert store.dirty
    durable = store.take()
    assert not store.dirty
    durable()
    copy = SqliteLogStore(crash_image(tmp_path / "data", tmp_path / "copy"), IDENTITY)
    assert copy.commit_index == 4 and copy.term == 1
    copy.close()


def test_a_crash_keeps_what_was_durable_and_nothing_by_halves(store: SqliteLogStore, tmp_path: Path) -> None:
    fill(store, entries(1, 3))
    store.truncate_from(2)
    for entry in entries(3, 4, term=2):
        store.append(entry)
    durable = store.take()
    before = SqliteLogStore(crash_image(tmp_path / "data", tmp_path / "before"), IDENTITY)
    assert everything(before) == entries(1, 3)
    before.close()
    durable()
    after = SqliteLogStore(crash_image(tmp_path / "data", tmp_path / "after"), IDENTITY)
    assert everything(after) == entries(1, 2) + entries(3, 4, term=2) == everything(store)
    after.close()


def test_the_transaction_may_run_on_another_thread(store: SqliteLogStore) -> None:
    store.append(Entry(1, 1, b"a"))
    first = store.take()
    store.append(Entry(2, 1, b"b"))  # while the first is under way
    second = store.take()
    for durable in (first, second):
        thread = threading.Thread(target=durable)
        thread.start()
        thread.join()
    assert [entry.index for entry in everything(store)] == [1, 2] and store.failed is None


def test_transactions_must_run_in_order(store: SqliteLogStore) -> None:
    store.append(Entry(1, 1, b"a"))
    store.take()
    store.append(Entry(2, 1, b"b"))
    second = store.take()
    with pytest.raises(AssertionError):
        second()


def test_a_gap_and_an_older_term_are_bugs(store: SqliteLogStore) -> None:
    store.set_term(5, None)
    store.append(Entry(10, 1, b""))
    with pytest.raises(AssertionError):
        store.append(Entry(12, 1, b""))
    with pytest.raises(AssertionError):
        store.set_term(4, None)


def test_compaction_deletes_rows_little_by_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "_DELETE_ROWS_MAX", 10)
    store = SqliteLogStore(tmp_path / "data", IDENTITY)
    fill(store, entries(1, 100))
    store.truncate_to(95)
    store.sync()
    copy = SqliteLogStore(crash_image(tmp_path / "data", tmp_path / "copy"), IDENTITY)
    assert everything(copy) == entries(96, 5)
    copy.close()
    for index in range(101, 111):
        fill(store, entries(index, 1))
    store.close()
    with sqlite3.connect(tmp_path / "data" / "log.sqlite3") as connection:
        assert connection.execute("SELECT MIN(log_index), COUNT(*) FROM entries").fetchone() == (96, 15)
    connection.close()


class LikeAList(RuleBasedStateMachine):
    """Whatever is done to the store, it holds what a list would hold, before and after a crash at any point."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["TENURE_TEST_FOLDER"]) / os.urandom(8).hex()
        self.store = SqliteLogStore(self.folder, IDENTITY)
        self.model: list[Entry] = []
        self.durable: list[Entry] = []

    @rule(count=st.integers(1, 30), term=st.integers(1, 5), first=st.integers(1, 500))
    def append(self, count: int, term: int, first: int) -> None:
        start = self.model[-1].index + 1 if self.model else first
        for entry in entries(start, count, term):
            self.store.append(entry)
            self.model.append(entry)

    @rule(share=st.floats(0, 1))
    def truncate_from(self, share: float) -> None:
        position = int(share * len(self.model))
        self.store.truncate_from(position)
        del self.model[position:]

    @rule(share=st.floats(0, 1))
    def truncate_to(self, share: float) -> None:
        position = int(share * len(self.model))
        self.store.truncate_to(position)
        del self.model[:position]

    @rule(first=st.integers(1, 500), count=st.integers(0, 20))
    def reset(self, first: int, count: int) -> None:
        self.model = entries(first, count, term=9)
        self.store.reset(list(self.model))

    @rule()
    def sync(self) -> None:
        self.store.sync()
        self.durable = list(self.model)

    @precondition(lambda self: self.durable != self.model)
    @rule()
    def crash(self) -> None:
        image = crash_image(self.folder, self.folder.with_name(self.folder.name + "c"))
        self.store.close()
        shutil.rmtree(self.folder)
        self.folder = image
        self.store = SqliteLogStore(image, IDENTITY)
        self.model = list(self.durable)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = SqliteLogStore(self.folder, IDENTITY)
        self.durable = list(self.model)

    @invariant()
    def holds_the_same(self) -> None:
        assert everything(self.store) == self.model
        assert self.store.size_bytes == sum(len(entry.command) + 48 for entry in self.model)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def test_it_behaves_like_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_TEST_FOLDER", str(tmp_path))
    monkeypatch.setattr(log_store, "_DELETE_ROWS_MAX", 5)
    run_state_machine_as_test(LikeAList, settings=settings(max_examples=20, stateful_step_count=20, deadline=None))


# ---- killed in the middle --------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from sidecar.consensus.log_store import SqliteLogStore
from sidecar.consensus.ports import Entry, StoreIdentity
store = SqliteLogStore(Path(sys.argv[1]), StoreIdentity("cluster-a", "n1"))
limit = int(sys.argv[2])
index = store.entry(-1).index if len(store) else 0
while True:
    for _ in range(3):
        index += 1
        store.append(Entry(index, 1, index.to_bytes(8, "big") * 200))
    if index % 50 == 0 and len(store) > 60:
        store.truncate_to(20)
    try:
        store.sync()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(3)
    print(index, flush=True)
"""


def test_kill_dash_nine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(11)
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            acknowledged = 0
            for _ in range(rng.randrange(20, 400)):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split("\n")[:-1]  # a last line cut off by the kill does not count
            acknowledged = int(rest[-1]) if rest else acknowledged
        store = SqliteLogStore(tmp_path, IDENTITY)
        found = everything(store)
        assert found[-1].index >= acknowledged
        assert [entry.index for entry in found] == list(range(found[0].index, found[-1].index + 1))
        assert all(entry.command == entry.index.to_bytes(8, "big") * 200 for entry in found)
        store.close()


def test_a_full_disk_stops_the_store_and_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: it needs no rights. It strikes the WAL and the database.

    The writer limits itself: ``preexec_fn`` would run in a fork of this process, which may have gRPC's threads."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))\n"
    ended = subprocess.run(
        [sys.executable, "-c", limit + WRITER, str(tmp_path), "0"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 3
    *acknowledged, error = ended.stdout.splitlines()
    assert error.startswith("StoreError") and "What to do" in error and "in doubt" in error
    store = SqliteLogStore(tmp_path, IDENTITY)
    assert store.entry(-1).index >= int(acknowledged[-1])
    store.close()


def test_after_a_failed_commit_nothing_is_accepted_any_more(store: SqliteLogStore, tmp_path: Path) -> None:
    fill(store, entries(1, 3))
    connection = store._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages + 2}").fetchall()  # SQLite then says "full", as for ENOSPC
    with pytest.raises(StoreError, match=r"disk is full.*make room"):
        fill(store, entries(4, 100, size=1_000))
    assert store.failed is not None
    for attempt in (store.sync, lambda: store.append(Entry(104, 1, b"")), lambda: store.set_term(9, None)):
        with pytest.raises(StoreError, match="in doubt"):
            attempt()
    store.close()
    again = SqliteLogStore(tmp_path / "data", IDENTITY)
    assert everything(again) == entries(1, 3)
    again.close()


def test_free_space_is_measured_and_a_low_disk_is_told(store: SqliteLogStore, tmp_path: Path) -> None:
    space = store.disk_space()
    assert 0 < space.free_bytes <= space.total_bytes
    assert disk_space(tmp_path, reserve_bytes=space.total_bytes + 1).low
    assert not disk_space(tmp_path, reserve_bytes=0).low
    with pytest.raises(StoreError, match="free disk space"):
        disk_space(tmp_path / "nowhere")


# ---- what it refuses -------------------------------------------------------------------------------------------------


def refuses(folder: Path, words: str, identity: StoreIdentity = IDENTITY) -> str:
    """Opening is refused with these words, and no file of the store is touched."""
    before = hashes(folder)
    with pytest.raises(StoreError, match=words) as caught:
        SqliteLogStore(folder, identity)
    assert hashes(folder) == before
    assert str(folder) in str(caught.value) and "What to do" in str(caught.value)
    return str(caught.value)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A store as a crash leaves it: most in the database, the newest entries in the WAL only."""
    store = SqliteLogStore(tmp_path / "live", IDENTITY)
    store.set_term(3, "n2")
    fill(store, entries(1, 60, size=500))
    store.close()
    store = SqliteLogStore(tmp_path / "live", IDENTITY)
    for index in range(61, 73):
        fill(store, entries(index, 1, size=500))
    copy = crash_image(tmp_path / "live", tmp_path / "data")
    store.close()
    return copy


def test_a_foreign_store_is_named(image: Path) -> None:
    message = refuses(image, "belongs to node", StoreIdentity("cluster-b", "n1"))
    assert "'n1' of cluster 'cluster-a'" in message and "'cluster-b'" in message
    message = refuses(image, "belongs to node", StoreIdentity("cluster-a", "n2"))
    assert "'n1'" in message and "'n2'" in message


def test_one_process_at_a_time(store: SqliteLogStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"in use by another process \(process id {os.getpid()}\)"):
        SqliteLogStore(tmp_path / "data", IDENTITY)
    other = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "data"), "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert other.returncode != 0 and "in use by another process" in other.stderr


def test_a_program_that_holds_the_database_is_noticed(image: Path) -> None:
    holder = sqlite3.connect(image / "log.sqlite3", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="in use by another process"):
        SqliteLogStore(image, IDENTITY)
    holder.close()
    SqliteLogStore(image, IDENTITY).close()


def test_a_newer_format_asks_for_the_newer_version(image: Path) -> None:
    connection = sqlite3.connect(image / "log.sqlite3")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    refuses(image, r"format 2, written by a newer version")


def test_a_missing_wal_is_noticed(image: Path) -> None:
    (image / "log.sqlite3-wal").unlink()
    refuses(image, "committed transactions are gone")


def test_a_wal_cut_off_anywhere_is_noticed(image: Path, tmp_path: Path) -> None:
    whole = (image / "log.sqlite3-wal").read_bytes()
    for length in range(0, len(whole), 1_111):
        (image / "log.sqlite3-wal").write_bytes(whole[:length])
        refuses(image, "committed transactions are gone")


def test_a_database_cut_off_anywhere_is_noticed(image: Path) -> None:
    whole = (image / "log.sqlite3").read_bytes()
    for length in [1, 99, *range(4_096, len(whole) - 1, 4_096 * 3)]:
        (image / "log.sqlite3").write_bytes(whole[:length])
        refuses(image, "corrupt")


@pytest.mark.parametrize("name", ["log.sqlite3", "log.watermark"])
def test_a_missing_part_is_not_taken_for_a_new_store(image: Path, name: str) -> None:
    (image / name).unlink()
    refuses(image, "missing")
    assert not (image / name).exists()


def test_a_missing_database_beside_snapshots_is_not_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "1.snapshot").write_bytes(b"x")
    with pytest.raises(StoreError, match="there are snapshots"):
        SqliteLogStore(tmp_path, IDENTITY)


@pytest.mark.parametrize("content", [b"", b"garbage" * 1_000, b"SQLite format 3\x00" + bytes(5_000)])
def test_a_file_that_is_no_store_is_refused(image: Path, content: bytes) -> None:
    (image / "log.sqlite3").write_bytes(content)
    (image / "log.sqlite3-wal").unlink()
    refuses(image, "corrupt")


def test_another_sqlite_database_is_refused(image: Path) -> None:
    (image / "log.sqlite3").unlink()
    (image / "log.sqlite3-wal").unlink()
    connection = sqlite3.connect(image / "log.sqlite3")
    connection.execute("CREATE TABLE entries (log_index)")
    connection.close()
    refuses(image, "not a log store of Tenure")


def test_a_bit_flip_anywhere_is_noticed_or_harmless(image: Path) -> None:
    """Every file, its head byte by byte: either opening is refused, or all that was acknowledged is there."""
    expected = entries(1, 72, size=500)
    noticed = harmless = 0
    rng = random.Random(5)
    for name in FILES:
        whole = (image / name).read_bytes()
        head = [byte * 8 + rng.randrange(8) for byte in range(min(len(whole), 100))]
        for bit in (*head, *(rng.randrange(len(whole) * 8) for _ in range(100 if name != "log.watermark" else 0))):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            folder = image.with_name("flip")
            shutil.copytree(image, folder)
            (folder / name).write_bytes(flipped)
            before = hashes(folder)
            try:
                store = SqliteLogStore(folder, IDENTITY)
            except StoreError:
                noticed += 1
                assert hashes(folder) == before
            else:
                harmless += 1
                assert everything(store) == expected
                assert (store.term, store.vote) == (3, "n2")
                store.close()
            shutil.rmtree(folder)
    assert noticed > 200 and harmless > 0


def rewrite(image: Path, statement: str, *values: object) -> None:
    """Change the database behind the store's back, with all of SQLite's own bookkeeping right."""
    connection = sqlite3.connect(image / "log.sqlite3")
    with connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM entries WHERE log_index = 30", "entry 30 is missing"),
        ("DELETE FROM entries WHERE log_index >= 70", "should end at entry 72, but ends at 69"),
        ("INSERT INTO entries VALUES (73, 1, 0, x'00')", "the checksum of entry 73"),
        ("UPDATE entries SET term = 2 WHERE log_index = 5", "the checksum of entry 5"),
        ("UPDATE entries SET command = x'00' WHERE log_index = 5", "the checksum of entry 5"),
        ("UPDATE entries SET command = 'text' WHERE log_index = 5", "entry 5 is malformed"),
        ("UPDATE state SET checksum = 1", "the checksum of its state"),
        ("DELETE FROM state", "the checksum of its state"),
    ],
)
def test_rows_that_do_not_fit_are_noticed(image: Path, statement: str, words: str) -> None:
    rewrite(image, statement)
    refuses(image, words)


def test_a_gap_between_snapshot_and_log_is_noticed(tmp_path: Path) -> None:
    store = SqliteLogStore(tmp_path, IDENTITY)
    store.set_snapshot(meta(10))
    fill(store, entries(13, 2))
    store.close()
    refuses(tmp_path, "entries between snapshot 10 and 13 are missing")


def test_a_state_of_another_shape_is_noticed(image: Path) -> None:
    body = msgspec.msgpack.encode({"format": 1})
    rewrite(image, "UPDATE state SET checksum = ?, body = ?", zlib.crc32(body), body)
    refuses(image, "its state cannot be read")


def test_a_crash_while_the_store_is_created_is_made_good(tmp_path: Path) -> None:
    (tmp_path / "log.watermark").write_bytes(log_store._encode_watermark(0))
    (tmp_path / "log.sqlite3.new").write_bytes(b"half")
    store = SqliteLogStore(tmp_path, IDENTITY)
    assert store.fresh
    store.close()


def test_no_rights_is_said_plainly(image: Path) -> None:
    """Root may read everything, so the child gives up its rights first if it has them."""
    drop = "import os\nif os.getuid() == 0: os.setuid(65534)\n"
    program = WRITER.replace("store = ", drop + "store = ", 1)
    image.chmod(0o711)
    (image / "log.sqlite3").chmod(0)
    (image / "lock").chmod(0)
    child = subprocess.run(
        [sys.executable, "-c", program, ".", "0"], cwd=image, capture_output=True, text=True, check=False, timeout=60
    )
    assert child.returncode != 0
    assert "StoreError" in child.stderr and "Permission denied" in child.stderr and "What to do" in child.stderr


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(StoreError, match=r"data.*What to do"):
        SqliteLogStore(tmp_path / "data", IDENTITY)
