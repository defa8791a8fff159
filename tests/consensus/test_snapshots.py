"""Snapshot files: complete, verified and durable before anybody hears of them; the old one is untouched until then."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from sidecar.consensus import snapshots
from sidecar.consensus.ports import SnapshotMeta, SnapshotRefused, StoreError, StoreIdentity
from sidecar.consensus.snapshots import FileSnapshotStore

IDENTITY = StoreIdentity("cluster-a", "n1")
PAYLOAD = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> FileSnapshotStore:
    return FileSnapshotStore(tmp_path, IDENTITY)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "snapshots").iterdir())


def transfer(
    source: FileSnapshotStore, meta: SnapshotMeta, target: FileSnapshotStore, size: int = 1_000
) -> SnapshotMeta:
    target.receive_begin(msgspec.structs.replace(meta, file="../../etc/passwd"))  # a peer's file name is not used
    offset = 0
    while chunk := source.chunk(meta, offset, size):
        target.receive_chunk(offset, chunk)
        offset += len(chunk)
    assert offset == meta.size_bytes
    return target.receive_end()


def test_what_was_written_is_read(store: FileSnapshotStore, tmp_path: Path) -> None:
    meta = store.write(120, 4, 3, PAYLOAD)
    assert (meta.index, meta.term, meta.previous_term) == (120, 4, 3)
    content = (tmp_path / "snapshots" / meta.file).read_bytes()
    assert len(content) == meta.size_bytes
    assert hashlib.blake2b(content[:-32], digest_size=32).hexdigest() == meta.checksum == content[-32:].hex()
    assert FileSnapshotStore(tmp_path, IDENTITY).read(meta) == PAYLOAD
    assert names(tmp_path) == [meta.file]


def test_an_empty_state_and_a_thread(store: FileSnapshotStore) -> None:
    metas: list[SnapshotMeta] = []
    thread = threading.Thread(target=lambda: metas.append(store.write(1, 1, 0, b"")))
    thread.start()
    thread.join()
    assert store.read(metas[0]) == b""


def test_files_are_for_their_owner_only(store: FileSnapshotStore, tmp_path: Path) -> None:
    meta = store.write(1, 1, 0, PAYLOAD)
    assert stat.S_IMODE((tmp_path / "snapshots").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "snapshots" / meta.file).stat().st_mode) == 0o600


def test_one_name_never_stands_for_two_contents(store: FileSnapshotStore) -> None:
    first, second = store.write(5, 1, 1, b"a"), store.write(5, 1, 1, b"b")
    assert first.file != second.file
    assert (store.read(first), store.read(second)) == (b"a", b"b")


def test_a_flipped_bit_anywhere_is_noticed(store: FileSnapshotStore, tmp_path: Path) -> None:
    meta = store.write(9, 2, 2, PAYLOAD[:700])
    path = tmp_path / "snapshots" / meta.file
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError, match=r"checksum is wrong.*What to do"):
            store.read(meta)


def test_a_cut_off_or_missing_file_is_noticed(store: FileSnapshotStore, tmp_path: Path) -> None:
    meta = store.write(9, 2, 2, PAYLOAD)
    path = tmp_path / "snapshots" / meta.file
    whole = path.read_bytes()
    for length in (0, 1, 11, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match=f"it has {length} bytes instead of {len(whole)}"):
            store.read(meta)
    path.unlink()
    with pytest.raises(StoreError, match="the snapshot is missing"):
        store.read(meta)
    with pytest.raises(StoreError, match="the snapshot is missing"):
        store.chunk(meta, 0, 10)


def test_a_meta_that_does_not_fit_is_noticed(store: FileSnapshotStore) -> None:
    meta = store.write(9, 2, 2, PAYLOAD)
    with pytest.raises(StoreError, match="it holds index 9"):
        store.read(msgspec.structs.replace(meta, index=10))
    with pytest.raises(StoreError, match="is not the name of a snapshot"):
        store.read(msgspec.structs.replace(meta, file="../log.sqlite3"))


def test_another_cluster_s_snapshot_is_named(tmp_path: Path, store: FileSnapshotStore) -> None:
    meta = store.write(9, 2, 2, PAYLOAD)
    with pytest.raises(StoreError, match=r"belongs to node 'n1' of cluster 'cluster-a'.*'cluster-b'"):
        FileSnapshotStore(tmp_path, StoreIdentity("cluster-b", "n1")).read(meta)
    # Another node's is no mistake: snapshots travel.
    assert FileSnapshotStore(tmp_path, StoreIdentity("cluster-a", "n2")).read(meta) == PAYLOAD


def test_a_newer_format_asks_for_the_newer_version(
    store: FileSnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "FORMAT", 2)
    meta = store.write(9, 2, 2, PAYLOAD)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="format 2, written by a newer version"):
        store.read(meta)
    with pytest.raises(SnapshotRefused, match="format 2"):
        transfer(store, meta, FileSnapshotStore(tmp_path / "other", IDENTITY))


def test_absurd_sizes_are_refused(tmp_path: Path) -> None:
    store = FileSnapshotStore(tmp_path, IDENTITY, size_bytes_max=1_000)
    with pytest.raises(StoreError, match="over the limit of 1000"):
        store.write(1, 1, 0, bytes(1_000))
    meta = store.write(1, 1, 0, bytes(100))
    for size_bytes in (-1, 0, 44, 1_001, 1 << 62):
        with pytest.raises(SnapshotRefused, match="the limit is 1000"):
            store.receive_begin(msgspec.structs.replace(meta, size_bytes=size_bytes))
    for wrong in ({"index": -1}, {"term": 1 << 63}, {"checksum": "../../x"}, {"checksum": "F" * 64}):
        with pytest.raises(SnapshotRefused):
            store.receive_begin(msgspec.structs.replace(meta, **wrong))
    assert names(tmp_path) == [meta.file]


def test_no_room_is_said_before_anything_is_written(store: FileSnapshotStore, tmp_path: Path) -> None:
    big = FileSnapshotStore(tmp_path, IDENTITY, size_bytes_max=1 << 60)
    meta = msgspec.structs.replace(store.write(1, 1, 0, b""), size_bytes=1 << 59)
    with pytest.raises(StoreError, match=r"no room for a snapshot.*make room") as caught:
        big.receive_begin(meta)
    assert not isinstance(caught.value, SnapshotRefused)
    assert names(tmp_path) == [meta.file]


# ---- from a peer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 31, 33, 1_000, 1 << 20])
def test_a_snapshot_travels(tmp_path: Path, size: int) -> None:
    source = FileSnapshotStore(tmp_path / "n1", IDENTITY)
    target = FileSnapshotStore(tmp_path / "n2", StoreIdentity("cluster-a", "n2"))
    meta = source.write(77, 6, 5, PAYLOAD[: 3_000 if size < 40 else None])
    received = transfer(source, meta, target, size)
    assert received == meta
    assert target.read(received) == source.read(meta)
    assert names(tmp_path / "n2") == [received.file]


def test_what_arrives_damaged_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    source = FileSnapshotStore(tmp_path / "n1", IDENTITY)
    target = FileSnapshotStore(tmp_path / "n2", IDENTITY)
    old = target.write(50, 5, 5, b"old")
    meta = source.write(77, 6, 5, PAYLOAD)
    whole = source.chunk(meta, 0, meta.size_bytes)
    rng = random.Random(3)
    for position in [0, 8, 12, 20, len(whole) - 1, len(whole) - 32, *(rng.randrange(len(whole)) for _ in range(30))]:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << rng.randrange(8)
        target.receive_begin(meta)
        target.receive_chunk(0, bytes(flipped))
        with pytest.raises(SnapshotRefused, match="checksum is wrong"):
            target.receive_end()
        assert names(tmp_path / "n2") == [old.file] and target.read(old) == b"old"


def test_a_snapshot_that_says_another_index_than_its_meta_is_refused(tmp_path: Path) -> None:
    source, target = FileSnapshotStore(tmp_path / "n1", IDENTITY), FileSnapshotStore(tmp_path / "n2", IDENTITY)
    meta = source.write(77, 6, 5, PAYLOAD)
    whole = source.chunk(meta, 0, meta.size_bytes)
    for wrong in ({"index": 78}, {"term": 7}, {"previous_term": 4}):
        target.receive_begin(msgspec.structs.replace(meta, **wrong))
        target.receive_chunk(0, whole)
        with pytest.raises(SnapshotRefused, match="it holds index 77"):
            target.receive_end()


def test_a_snapshot_of_another_cluster_is_refused(tmp_path: Path) -> None:
    source = FileSnapshotStore(tmp_path / "a", IDENTITY)
    target = FileSnapshotStore(tmp_path / "b", StoreIdentity("cluster-b", "n1"))
    with pytest.raises(SnapshotRefused, match="cluster-a"):
        transfer(source, source.write(77, 6, 5, PAYLOAD), target)
    assert names(tmp_path / "b") == []


def test_chunks_out_of_order_end_the_reception(tmp_path: Path) -> None:
    source, target = FileSnapshotStore(tmp_path / "n1", IDENTITY), FileSnapshotStore(tmp_path / "n2", IDENTITY)
    meta = source.write(77, 6, 5, PAYLOAD)
    for offset, length in ((100, 100), (0, 100), (201, 100), (-1, 100), (200, meta.size_bytes)):
        target.receive_begin(meta)
        target.receive_chunk(0, source.chunk(meta, 0, 200))
        with pytest.raises(SnapshotRefused, match="expected one at 200"):
            target.receive_chunk(offset, source.chunk(meta, 0, length).ljust(length, b"\0"))
        with pytest.raises(SnapshotRefused, match="has not begun"):
            target.receive_end()
    target.receive_begin(meta)
    target.receive_chunk(0, source.chunk(meta, 0, 200))
    with pytest.raises(SnapshotRefused, match="ended at 200 of"):
        target.receive_end()
    with pytest.raises(SnapshotRefused, match="has not begun"):
        target.receive_chunk(0, b"")
    assert names(tmp_path / "n2") == []
    assert transfer(source, meta, target) == meta


def test_a_new_reception_ends_the_one_before(tmp_path: Path) -> None:
    source, target = FileSnapshotStore(tmp_path / "n1", IDENTITY), FileSnapshotStore(tmp_path / "n2", IDENTITY)
    first, second = source.write(70, 6, 5, b"first"), source.write(77, 6, 5, b"second")
    target.receive_begin(first)
    target.receive_chunk(0, source.chunk(first, 0, 10))
    assert target.read(transfer(source, second, target)) == b"second"
    assert names(tmp_path / "n2") == [second.file]


# ---- cleaning up, crashes, full disks --------------------------------------------------------------------------------


def test_retain_deletes_all_others_but_nothing_in_use(store: FileSnapshotStore, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    (folder / "123-1.tmp").write_bytes(b"left by a crash")
    (folder / "notes.txt").write_bytes(b"not ours")
    old, keep = store.write(10, 1, 1, b"old"), store.write(20, 1, 1, b"keep")
    newer = store.write(30, 1, 1, b"written, but not yet recorded in the log store")
    store.receive_begin(keep)
    store.retain(keep)
    assert old.file not in names(tmp_path)
    assert {keep.file, newer.file, "notes.txt"} < set(names(tmp_path)) and len(
        names(tmp_path)
    ) == 4  # and the reception
    store.receive_abort()
    store.retain(newer)
    assert names(tmp_path) == [newer.file, "notes.txt"]


def test_after_a_restart_only_the_recorded_one_counts(store: FileSnapshotStore, tmp_path: Path) -> None:
    keep = store.write(20, 1, 1, b"keep")
    store.write(30, 1, 1, b"written, but the crash came before it was recorded")
    again = FileSnapshotStore(tmp_path, IDENTITY)
    again.retain(keep)
    assert names(tmp_path) == [keep.file]


WRITER = """
import sys
from pathlib import Path
from sidecar.consensus.ports import StoreIdentity, StoreError
from sidecar.consensus.snapshots import FileSnapshotStore
store = FileSnapshotStore(Path(sys.argv[1]), StoreIdentity("cluster-a", "n1"))
index = 0
while True:
    index += 1
    try:
        meta = store.write(index, 1, 1, index.to_bytes(4, "big") * (20_000 * index))
    except StoreError as error:
        print(error, flush=True)
        sys.exit(3)
    print(meta.file, meta.size_bytes, meta.checksum, flush=True)
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(7)]
        writer.kill()
        lines += writer.stdout.read().splitlines(keepends=True)
    store = FileSnapshotStore(tmp_path, IDENTITY)
    for index, line in enumerate((line for line in lines if line.endswith("\n")), start=1):
        file, size_bytes, checksum = line.split()
        meta = SnapshotMeta(index, 1, 1, file, int(size_bytes), checksum)
        assert store.read(meta) == index.to_bytes(4, "big") * (20_000 * index)
    store.retain(meta)
    assert names(tmp_path) == [meta.file]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    # The writer limits itself: ``preexec_fn`` would run in a fork of this process, which may be full of gRPC's threads.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))\n"
    ended = subprocess.run(
        [sys.executable, "-c", limit + WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    *written, error = ended.stdout.splitlines()
    assert ended.returncode == 3 and "What to do" in error and "untouched" in error
    assert len(written) == 4 and names(tmp_path) == sorted(line.split()[0] for line in written)


def test_a_full_disk_while_receiving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = FileSnapshotStore(tmp_path / "n1", IDENTITY), FileSnapshotStore(tmp_path / "n2", IDENTITY)
    meta = source.write(77, 6, 5, PAYLOAD)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    target.receive_begin(meta)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        target.receive_chunk(0, source.chunk(meta, 0, 100))
    assert not isinstance(caught.value, SnapshotRefused)
    monkeypatch.undo()
    assert names(tmp_path / "n2") == []
    assert transfer(source, meta, target) == meta


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(StoreError, match="What to do"):
        FileSnapshotStore(tmp_path / "data", IDENTITY)
