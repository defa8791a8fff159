"""The node on its real parts: SQLite, snapshot files, TCP with TLS. And the proof that nothing is ever unpickled."""

from __future__ import annotations

import _pickle
import ast
import asyncio
import contextlib
import hashlib
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pysyncobj.pickle
import pytest
import uvloop

import sidecar.consensus
from sidecar import certs
from sidecar.consensus.log_store import SqliteLogStore
from sidecar.consensus.loop import NodeLoop
from sidecar.consensus.messages import TYPE_PAYLOAD, Append, Body, Forward, LogEntry, SnapshotChunk, encode
from sidecar.consensus.node import Node, NodeSettings
from sidecar.consensus.ports import StoreError, StoreIdentity
from sidecar.consensus.snapshots import FileSnapshotStore
from sidecar.consensus.transport import TcpPeerTransport, TransportSettings
from tests.consensus.harness import ListApplication
from tests.consensus.test_transport import Raw
from tests.waiting import eventually

NAMES = ("n1", "n2", "n3")


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Member:
    """One node of a cluster on this machine, started and stopped like a process."""

    def __init__(self, name: str, folder: Path, tls: certs.PeerContexts | None) -> None:
        self.name, self.folder, self.tls = name, folder, tls
        self.port = 0
        self.application = ListApplication()
        self._task: asyncio.Task[None] | None = None

    async def start(self, ports: dict[str, int], *, bootstrap: bool = True) -> None:
        self.application = ListApplication()
        identity = StoreIdentity("cluster-a", self.name)
        others = tuple(name for name in NAMES if name != self.name)
        self.store = SqliteLogStore(self.folder, identity)
        self.snapshots = FileSnapshotStore(self.folder, identity)
        self.transport = TcpPeerTransport(
            TransportSettings(
                cluster_id="cluster-a",
                node_id=self.name,
                listen=("127.0.0.1", self.port),
                peers={other: ("127.0.0.1", ports.get(other, 1)) for other in others},
                insecure=self.tls is None,
            ),
            self.tls.server if self.tls else None,
            self.tls.client if self.tls else None,
        )
        self.port = self.transport.open()
        clock = SystemClock()
        self.loop = NodeLoop(clock)
        self.node = Node(
            NodeSettings(
                cluster_id="cluster-a",
                node_id=self.name,
                peers=others,
                bootstrap=bootstrap,
                heartbeat_ms=50,
                election_min_ms=400,
                election_max_ms=800,
                compact_entries=60,
                snapshot_chunk_bytes=5_000,
            ),
            self.application,
            self.store,
            self.snapshots,
            self.transport,
            clock,
            random.Random(self.name),
            self.loop.wake,
            self.loop.background,
        )
        self._task = asyncio.create_task(self.loop.run(self.node))

    async def stop(self) -> None:
        self.loop.stop()
        assert self._task is not None
        await self._task
        await self.transport.stop()
        self.store.close()

    def propose(self, payload: bytes) -> None:
        self.application.to_propose.append(payload)
        self.loop.wake()


@contextlib.asynccontextmanager
async def cluster(folder: Path, tls: dict[str, certs.PeerContexts] | None = None) -> AsyncIterator[dict[str, Member]]:
    members = {name: Member(name, folder / name, tls[name] if tls else None) for name in NAMES}
    await start_all(members)
    try:
        yield members
    finally:
        for member in members.values():
            await member.stop()


async def start_all(members: dict[str, Member]) -> None:
    for member in members.values():
        await member.start({})
    for member in members.values():
        for other in members.values():
            if other is not member:
                member.transport.set_address(other.name, ("127.0.0.1", other.port))


async def leader(members: dict[str, Member]) -> Member:
    await eventually(lambda: any(member.node.is_leader() for member in members.values()), 20)
    return next(member for member in members.values() if member.node.is_leader())


async def commit(members: dict[str, Member], payloads: list[bytes]) -> None:
    """Propose and wait until every member has applied all of it."""
    first = await leader(members)
    for payload in payloads:
        first.propose(payload)
    await eventually(
        lambda: all(set(payloads) <= set(member.application.applied) for member in members.values()), 20, "all applied"
    )


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, certs.PeerContexts]:
    folder = tmp_path_factory.mktemp("certs")
    certs.write_development_certificates(folder, NAMES, "cluster-a")
    return {
        name: certs.peer_contexts(
            folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem", cluster_id="cluster-a", node_id=name
        )
        for name in NAMES
    }


def payloads(prefix: str, count: int, size: int = 300) -> list[bytes]:
    return [f"{prefix}-{number} ".encode().ljust(size, b".") for number in range(count)]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_cluster_on_real_parts_survives_restarts_and_a_lost_disk(
    tmp_path: Path, tls: dict[str, certs.PeerContexts], factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tls) as members:
            await commit(members, payloads("first", 50))
            for member in members.values():  # a restart of all
                await member.stop()
            await start_all(members)
            await eventually(lambda: all(len(m.application.applied) == 50 for m in members.values()), 20)

            await commit(members, payloads("second", 150))
            await eventually(lambda: all(member.store.snapshot is not None for member in members.values()), 20)
            digests = {member.application.digest() for member in members.values()}
            assert len(digests) == 1

            lost = next(member for member in members.values() if not member.node.is_leader())
            await lost.stop()
            shutil.rmtree(lost.folder)  # the disk is gone: it rejoins with nothing, and gets the snapshot
            ports = {name: member.port for name, member in members.items()}
            await lost.start(ports, bootstrap=False)
            await eventually(lambda: {m.application.digest() for m in members.values()} == digests, 20)
            assert lost.application.restored == 1 and lost.store.snapshot is not None
            assert len(list((lost.folder / "snapshots").iterdir())) == 1
            await commit(members, payloads("third", 5))

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scenario())


# ---- nothing is ever unpickled ---------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


class Tripwire:
    """Hears of every unpickler in the process: by its entry points, and by the interpreter's own audit events, which
    the C implementation raises whoever holds a reference to it."""

    armed: Tripwire | None = None

    def __init__(self) -> None:
        self.tripped: list[str] = []

    @staticmethod
    def audit(event: str, _: tuple[Any, ...]) -> None:
        if Tripwire.armed is not None and event == "pickle.find_class":
            Tripwire.armed.tripped.append(event)

    def entry(self, name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            self.tripped.append(name)
            raise AssertionError(f"{name} was called")

        return refuse


sys.addaudithook(Tripwire.audit)


@pytest.fixture
def tripwire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tripwire]:
    wire = Tripwire()
    for place in (pickle, _pickle, pysyncobj.pickle):
        for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, wire.entry(f"{place.__name__}.{name}"))
    Tripwire.armed = wire
    yield wire
    Tripwire.armed = None


def bombs(target: Path) -> list[bytes]:
    return [pickle.dumps(Bomb(target), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def test_the_tripwire_bites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _pickle.loads  # a reference from before, as a library would hold it
    bomb = bombs(tmp_path / "exploded")[-1]
    wire = Tripwire()
    monkeypatch.setattr(Tripwire, "armed", wire)
    real(bomb)
    assert wire.tripped == ["pickle.find_class"] and (tmp_path / "exploded").exists()


def messages(bomb: bytes) -> Iterator[bytes]:
    """Bombs as frames, and as the contents of well-formed messages from a leader of term 3."""
    yield bomb
    yield msgspec.msgpack.encode(bomb)
    bodies: list[Body] = [Forward(bomb)]
    for kind in (1, 2, 3, 4, 255):  # the library's kinds of commands, most of them pickles to it
        bodies.append(Append(1, 0, 0, (LogEntry(3, bytes([kind]) + bomb),)))
    bodies.append(Append(1, 0, 2, (LogEntry(3, bytes([TYPE_PAYLOAD]) + bomb),)))
    checksum = hashlib.blake2b(bomb[:-32], digest_size=32).hexdigest()
    bodies.append(SnapshotChunk(99, 3, 3, len(bomb), checksum, 0, bomb))
    for round_number, body in enumerate(bodies, start=1):
        yield encode(3, round_number, 0, body)


async def test_no_byte_from_a_socket_reaches_an_unpickler(tmp_path: Path, tripwire: Tripwire) -> None:
    """Bombs before the introduction, after it in place of messages, and inside well-formed messages."""
    target = tmp_path / "exploded"
    for protocol, bomb in enumerate(bombs(target)):
        member = Member("n1", tmp_path / f"n1-{protocol}", None)
        await member.start({})
        for sent in (bomb, len(bomb).to_bytes(4, "big") + bomb):
            raw = await Raw.dial(member.transport)
            raw.writer.write(sent)
            raw.writer.write_eof()
            await raw.closed()
            await raw.close()
        raw = await Raw.dial(member.transport)
        await raw.join()
        for frame in messages(bomb):
            raw.send(frame)
        await applied(member, bomb)  # so they did get to the end of the way
        await raw.close()
        await member.stop()
    assert tripwire.tripped == [] and not target.exists()


async def applied(member: Member, payload: bytes) -> None:
    await eventually(lambda: payload in member.application.applied)


async def test_no_byte_from_a_file_reaches_an_unpickler(tmp_path: Path, tripwire: Tripwire) -> None:
    """Bombs as payloads go through log, snapshot, and their way back; then each file is replaced by a bomb."""
    target = tmp_path / "exploded"
    async with cluster(tmp_path) as members:
        await commit(members, [*bombs(target), *payloads("filler", 100)])
        await eventually(lambda: all(member.store.snapshot is not None for member in members.values()), 20)
        await commit(members, [bomb + b"again" for bomb in bombs(target)])  # these stay in the log
        for member in members.values():
            await member.stop()
        await start_all(members)
        await eventually(lambda: all(bombs(target)[-1] in m.application.applied for m in members.values()), 20)
    identity = StoreIdentity("cluster-a", "n1")
    assert read_everything(tmp_path / "n1", identity)
    for path in sorted(path for path in (tmp_path / "n1").rglob("*") if path.is_file() and path.name != "lock"):
        whole = path.read_bytes()
        for bomb in bombs(target):
            for content in (bomb, bomb + whole[len(bomb) :]):
                path.write_bytes(content)
                read_everything(tmp_path / "n1", identity)
        path.write_bytes(whole)
    assert tripwire.tripped == [] and not target.exists()


def read_everything(folder: Path, identity: StoreIdentity) -> bool:
    try:
        store = SqliteLogStore(folder, identity)
    except StoreError:
        return False
    try:
        assert store.snapshot is not None
        return bool(FileSnapshotStore(folder, identity).read(store.snapshot))
    except StoreError:
        return False
    finally:
        store.close()


def test_consensus_refers_to_no_unpickler() -> None:
    for path in Path(sidecar.consensus.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
            for name in names:
                assert not {"pickle", "_pickle", "marshal", "shelve"} & set(name.split(".")), f"{path.name}: {name}"
