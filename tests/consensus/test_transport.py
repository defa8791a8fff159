"""The peer transport between real sockets: who gets in, which connection counts, and what strangers cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import os
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from sidecar import certs
from sidecar.consensus import transport as module
from sidecar.consensus.transport import TcpPeerTransport, TransportError, TransportSettings, identity_uri
from tests.waiting import eventually

Run = Callable[[Coroutine[Any, Any, None]], None]
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


class Node:
    """PeerEvents that remembers what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []
        self.frames: list[tuple[str, bytes]] = []
        self.on_frame: Callable[[], None] = lambda: None

    def peer_connected(self, peer: str) -> None:
        self.heard.append(("connected", peer))

    def peer_disconnected(self, peer: str, *, reset: bool) -> None:
        self.heard.append(("reset" if reset else "given up", peer))

    def frame_received(self, peer: str, frame: bytes) -> None:
        assert self.of(peer)[-1] == "connected"
        self.frames.append((peer, frame))
        self.on_frame()

    def of(self, peer: str) -> list[str]:
        return [event for event, of in self.heard if of == peer]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario on each kind of loop, and checks that nothing is left behind and nothing was reported."""

    def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
        reported: list[dict[str, Any]] = []

        async def main() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: reported.append(context))
            async with asyncio.timeout(30):
                await scenario
            await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()}, what="no task is left")

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        assert not reported

    return run_scenario


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with certificates: of our cluster, of another cluster, and of our cluster by another authority."""
    folders = {}
    for name, cluster in (("ours", "cluster-a"), ("another authority", "cluster-a"), ("another cluster", "cluster-b")):
        folders[name] = tmp_path_factory.mktemp("certs")
        certs.write_development_certificates(folders[name], ("n1", "n2", "n3"), cluster)
    return folders


def contexts(folder: Path, node: str, cluster: str = "cluster-a") -> Contexts:
    made = certs.peer_contexts(
        folder / f"{node}.pem", folder / f"{node}.key", folder / "ca.pem", cluster_id=cluster, node_id=node
    )
    return made.server, made.client


@contextlib.asynccontextmanager
async def transport(
    name: str = "n1", peers: Sequence[str] = ("n2", "n3"), tls: Contexts | None = None, **changes: Any
) -> AsyncIterator[tuple[TcpPeerTransport, Node]]:
    """One transport that listens. Its peers are at an address that refuses, until a test says where they are."""
    settings = TransportSettings(
        cluster_id="cluster-a",
        node_id=name,
        listen=("127.0.0.1", 0),
        peers=dict.fromkeys(peers, ("127.0.0.1", 1)),
        insecure=tls is None,
    )
    server_tls, client_tls = tls or (None, None)
    made = TcpPeerTransport(msgspec.structs.replace(settings, **changes), server_tls, client_tls)
    made.open()
    node = Node()
    made.start(node)
    try:
        yield made, node
    finally:
        await made.stop()
        heard = list(node.heard)
        assert not made._connections and not made._tasks and not made._strangers
        assert node.heard == heard


def port(of: TcpPeerTransport) -> int:
    return of.bound_to[0][1]


def introduce(*transports: TcpPeerTransport) -> None:
    """Tell everybody where everybody is."""
    for one in transports:
        for other in transports:
            if other is not one:
                one.set_address(other.settings.node_id, ("127.0.0.1", port(other)))


async def received(node: Node, count: int) -> None:
    await eventually(lambda: len(node.frames) == count)


async def heard(node: Node, events: list[tuple[str, ...]]) -> None:
    await eventually(lambda: node.heard == events)


async def refused(by: TcpPeerTransport, reason: str, least: int) -> None:
    await eventually(lambda: by.counters.refused.get(reason, 0) >= least)


async def dials_failed(by: TcpPeerTransport, least: int) -> None:
    await eventually(lambda: by.counters.dials_failed >= least)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Raw:
    """The other end of a connection, byte by byte: a peer that may lie."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, life: bytes = b"") -> None:
        self.reader, self.writer = reader, writer
        self.life = life or os.urandom(16)
        self.name = b""  # of the connection

    @classmethod
    async def dial(cls, to: TcpPeerTransport, tls: ssl.SSLContext | None = None, life: bytes = b"") -> Raw:
        host = "" if tls else None
        reader, writer = await asyncio.open_connection("127.0.0.1", port(to), ssl=tls, server_hostname=host)
        return cls(reader, writer, life)

    async def read(self) -> bytes:
        length = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(length) if length else await self.read()

    def send(self, body: bytes) -> None:
        self.writer.write(frame(body))

    async def hello(self, name: str = "n2", **changes: Any) -> None:
        """Answer the acceptor's introduction."""
        theirs = msgspec.msgpack.decode(await self.read(), type=module._Hello)
        self.name = theirs.nonce
        ours = msgspec.structs.replace(theirs, node_id=name, life=self.life, seen=b"", store=b"")
        self.send(msgspec.msgpack.encode(msgspec.structs.replace(ours, **changes)))

    async def join(self, name: str = "n2", **changes: Any) -> None:
        await self.hello(name, **changes)
        assert msgspec.msgpack.decode(await self.read(), type=module._Welcome)

    async def closed(self) -> bool:
        """Wait until the other side has ended it."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.reader.read()
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


# ---- honest peers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [True, False])
def test_three_nodes_find_each_other_and_frames_keep_their_order(
    run: Run, authorities: dict[str, Path], secure: bool
) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            made = {}
            for name in ("n1", "n2", "n3"):
                others = [other for other in ("n1", "n2", "n3") if other != name]
                tls = contexts(authorities["ours"], name) if secure else None
                made[name] = await stack.enter_async_context(transport(name, others, tls))
            introduce(*(one for one, _ in made.values()))
            await eventually(
                lambda: all(len(one._connections) == 2 and len(node.heard) == 2 for one, node in made.values())
            )
            sent = [os.urandom(size) for size in (1, 100, 3, 70_000, 5, 2_000_000, 8 << 20)]
            for name, (one, _) in made.items():
                for other in made:
                    if other != name:
                        assert one.connected(other)
                        assert all(one.send(other, body) for body in sent)
                one.flush()
            for name, (_, node) in made.items():
                await received(node, 2 * len(sent))
                for other in made:
                    assert [body for peer, body in node.frames if peer == other] == (sent if other != name else [])
                    assert node.of(other) == (["connected"] if other != name else [])

    run(scenario())


def test_frames_leave_with_the_flush_in_one_write(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, _):
            raw = await Raw.dial(one)
            await raw.join()
            assert one.send("n2", b"a") and one.send("n2", b"b")
            one.counters.bytes_sent = 0
            current = one._links["n2"].current
            assert current is not None and len(current.queue) == 4
            one.flush()
            assert not current.queue and one.counters.bytes_sent == 10
            assert (await raw.read(), await raw.read()) == (b"a", b"b")
            await raw.close()

    run(scenario())


def test_without_a_connection_nothing_is_queued(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            assert not one.send("n2", b"x") and not one.send("stranger", b"x")
            assert not one.connected("n2") and not one.connected("stranger")
            one.flush()
            for wrong in (b"", bytes((8 << 20) + 1)):
                with pytest.raises(ValueError, match="8388608 are allowed"):
                    one.send("n2", wrong)
            assert node.heard == []

    run(scenario())


def test_a_peer_that_comes_back_elsewhere_is_found(run: Run, authorities: dict[str, Path]) -> None:
    async def scenario() -> None:
        ours = authorities["ours"]
        async with transport("n2", ["n1"], contexts(ours, "n2")) as (one, node):
            for life in range(1, 3):
                async with transport("n1", ["n2"], contexts(ours, "n1")) as (other, other_node):
                    one.set_address("n1", ("localhost", port(other)))  # n1 does not know where n2 is
                    await eventually(lambda: other.connected("n2") and one.connected("n1"))
                    other.send("n2", b"life")
                    other.flush()
                    await received(node, life)
                    assert other_node.heard == [("connected", "n2")]
                await heard(node, [("connected", "n1"), ("reset", "n1")] * life)

    run(scenario())


def test_a_name_is_resolved_again_at_each_dial() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        resolved: list[str] = []
        real = loop.getaddrinfo

        async def getaddrinfo(host: str, port: int, **options: Any) -> Any:
            resolved.append(host)
            return await real("127.0.0.1" if len(resolved) > 2 else "127.0.0.2", port, **options)

        async with transport("n2", ["n1"]) as (other, _):
            loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
            async with transport("n1", ["n2"]) as (one, _):
                one.set_address("n2", ("peer.example", port(other)))
                await eventually(lambda: one.connected("n2"))
            assert resolved.count("peer.example") >= 2

    asyncio.run(scenario())


def test_a_proxy_in_between_and_a_link_that_swallows_everything(run: Run, authorities: dict[str, Path]) -> None:
    """The other side is noticed to be silent, and found again when the link is whole."""

    async def scenario() -> None:
        ours, quick = authorities["ours"], {"silence_s": 0.4, "sign_of_life_s": 0.1, "introduction_timeout_s": 0.4}
        held = asyncio.Event()
        held.set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65_536):
                    if held.is_set():
                        writer.write(data)
            writer.close()

        async with (
            transport("n1", ["n2"], contexts(ours, "n1"), **quick) as (one, node),
            transport("n2", ["n1"], contexts(ours, "n2"), **quick) as (other, other_node),
        ):

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port(one))
                await asyncio.gather(pump(reader, onward_writer), pump(onward_reader, writer))

            proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
            other.set_address("n1", proxy.sockets[0].getsockname())
            await eventually(lambda: one.connected("n2") and other.connected("n1"))
            held.clear()
            await eventually(lambda: not one.connected("n2") and not other.connected("n1"))
            held.set()
            await eventually(lambda: one.connected("n2") and other.connected("n1"))
            assert other.send("n1", b"again")
            other.flush()
            await eventually(lambda: node.frames == [("n2", b"again")])
            assert node.of("n2")[:1] == other_node.of("n1")[:1] == ["connected"]
            assert one.counters.dropped.get("silent", 0) + other.counters.dropped.get("silent", 0) >= 1
            proxy.close()

    run(scenario())


# ---- which connection counts -----------------------------------------------------------------------------------------


def test_a_newer_connection_replaces_the_older_and_the_older_is_dead(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            old = await Raw.dial(one)
            await old.join()
            old.send(b"from the old")
            await eventually(lambda: node.frames == [("n2", b"from the old")])
            new = await Raw.dial(one)
            await new.join()
            old.send(b"too late")
            new.send(b"from the new")
            assert await old.closed()
            await eventually(lambda: len(node.frames) == 2)
            assert node.frames[1] == ("n2", b"from the new")
            assert node.heard == [("connected", "n2"), ("given up", "n2"), ("connected", "n2")]
            assert one.counters.dropped == {"replaced": 1} and len(one._connections) == 1
            await old.close()
            await new.close()
            await eventually(lambda: node.heard[-1] == ("reset", "n2"))

    run(scenario())


def test_two_processes_with_one_id_are_told_from_a_restart(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with transport() as (one, _):
            lives = [os.urandom(16), os.urandom(16)]
            for turn, said in ((0, 0), (1, 0), (0, 1)):
                raw = await Raw.dial(one, life=lives[turn])
                await raw.join()
                assert caplog.text.count("two processes run as node n2") == said
                await raw.close()

    run(scenario())


def test_a_process_with_another_store_is_refused_while_the_first_is_connected(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with transport(store_id=b"of n1") as (one, node):
            first = await Raw.dial(one)
            await first.join(store=b"first")
            second = await Raw.dial(one)
            await second.hello(store=b"second")
            assert msgspec.msgpack.decode(await second.read(), type=module._Refused)
            assert await second.closed()
            assert node.heard == [("connected", "n2")] and one.counters.refused == {"double": 1}
            assert "another process runs as node n2, with a data folder of its own" in caplog.text
            again = await Raw.dial(one)
            await again.join(store=b"first")  # a new life of the same store
            await again.close()
            await eventually(lambda: not one.connected("n2"))
            replaced = await Raw.dial(one)
            await replaced.join(store=b"second")  # its disk was lost, and its old process is gone
            for raw in (first, second, replaced):
                await raw.close()

    run(scenario())


def test_a_hello_of_a_version_without_stores_is_accepted(run: Run) -> None:
    async def scenario() -> None:
        async with transport(store_id=b"of n1") as (one, node):
            first = await Raw.dial(one)
            await first.join(store=b"first")
            older = await Raw.dial(one)
            hello = msgspec.msgpack.decode(await older.read())
            assert hello.pop("store") == b"of n1"
            older.send(msgspec.msgpack.encode(hello | {"node_id": "n2", "life": older.life, "seen": b""}))
            assert msgspec.msgpack.decode(await older.read(), type=module._Welcome)
            await heard(node, [("connected", "n2"), ("given up", "n2"), ("connected", "n2")])
            await first.close()
            await older.close()

    run(scenario())


@pytest.mark.parametrize(("doubled", "peer"), [("n1", "n2"), ("n2", "n1")])
@pytest.mark.parametrize("secure", [True, False])
def test_who_is_refused_as_a_double_is_told(
    run: Run, authorities: dict[str, Path], doubled: str, peer: str, secure: bool
) -> None:
    """Whichever of the two is the senior, and until the first process is gone."""

    async def scenario() -> None:
        tls = {name: contexts(authorities["ours"], name) if secure else None for name in (doubled, peer)}
        quick: dict[str, Any] = {"backoff_max_s": 0.1, "sign_of_life_s": 0.1, "displaced_after_s": 0.2}
        reasons: list[str] = []
        async with (
            transport(peer, [doubled], tls[peer], store_id=b"p", **quick) as (one, node),
            transport(doubled, [peer], tls[doubled], store_id=b"second", **quick) as (second, _),
        ):
            second.on_displaced = reasons.append
            async with transport(doubled, [peer], tls[doubled], store_id=b"first", **quick) as (first, first_node):
                first.set_address(peer, ("127.0.0.1", port(one)))
                await eventually(lambda: first.connected(peer) and one.connected(doubled))
                second.set_address(peer, ("127.0.0.1", port(one)))
                await eventually(lambda: reasons)
                assert f"{peer} refused this process" in reasons[0] and second.displaced() == reasons[0]
                assert one.counters.refused["double"] >= 2 and not first.displaced() and not one.displaced()
                assert node.heard == [("connected", doubled)] and first_node.heard == [("connected", peer)]
            await eventually(lambda: one.connected(doubled) and second.connected(peer) and not second.displaced())

    run(scenario())


def test_who_was_accepted_by_a_peer_goes_on_when_another_refuses_it(run: Run) -> None:
    """Else a second process could end the first."""

    async def scenario() -> None:
        reasons: list[str] = []
        quick: dict[str, Any] = {"backoff_max_s": 0.1, "displaced_after_s": 0.0}
        async with (
            transport("n2", ["n1"], store_id=b"of n2") as (other, _),
            transport("n3", ["n1"], store_id=b"of n3") as (another, _),
            transport("n1", store_id=b"right", **quick) as (right, _),
            transport("n1", store_id=b"wrong", **quick) as (wrong, _),
        ):
            right.on_displaced = reasons.append
            right.set_address("n3", ("127.0.0.1", port(another)))
            wrong.set_address("n2", ("127.0.0.1", port(other)))
            await eventually(lambda: other.connected("n1") and another.connected("n1"))
            await eventually(lambda: right._ever_accepted)
            right.set_address("n2", ("127.0.0.1", port(other)))
            await eventually(lambda: right.counters.refused.get("displaced", 0) >= 2)
            assert "n2 refused this process" in right.displaced() and not reasons
            assert another.connected("n1") and not wrong.displaced()

    run(scenario())


def test_nothing_that_arrived_in_one_piece_with_the_end_is_delivered_after_it(run: Run) -> None:
    """A node may drop a connection while it is handed frames of it: the rest of them is not delivered."""

    async def scenario() -> None:
        async with transport() as (one, node):
            raw = await Raw.dial(one)
            await raw.join()
            current = one._links["n2"].current
            assert current is not None
            node.on_frame = lambda: one.drop(current, "test", reset=False)
            raw.writer.write(frame(b"first") + frame(b"second") + frame(b"third"))
            assert await raw.closed()
            assert node.frames == [("n2", b"first")]
            await raw.close()

    run(scenario())


def test_two_that_dial_at_once_get_one_connection_without_a_flap(
    run: Run, authorities: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = asyncio.Event()

    async def nobody_has_a_head_start(self: TcpPeerTransport, link: module._Link) -> None:
        await at_once.wait()

    monkeypatch.setattr(TcpPeerTransport, "_wait_before_dialing", nobody_has_a_head_start)

    async def meet() -> None:
        ours = authorities["ours"]
        async with (
            transport("n1", ["n2"], contexts(ours, "n1")) as (one, node),
            transport("n2", ["n1"], contexts(ours, "n2")) as (other, other_node),
        ):
            introduce(one, other)
            at_once.set()
            await eventually(lambda: one.connected("n2") and other.connected("n1"))
            await eventually(lambda: len(one._connections) == len(other._connections) == 1)
            assert one.send("n2", b"x") and other.send("n1", b"y")
            one.flush()
            other.flush()
            await received(node, 1)
            await received(other_node, 1)
            assert node.heard == [("connected", "n2")] and other_node.heard == [("connected", "n1")]
        at_once.clear()

    async def scenario() -> None:
        for _ in range(8):
            await meet()

    run(scenario())


def test_a_dial_that_crossed_the_welcome_is_dropped_and_one_after_a_loss_replaces(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            first = await Raw.dial(one)
            await first.join()
            first.writer.write(bytes(4))  # the junior's first sign of life
            crossed = await Raw.dial(one, life=first.life)
            await crossed.hello()  # sent before the welcome on the first was seen
            assert await crossed.closed()
            await heard(node, [("connected", "n2")])
            after_a_loss = await Raw.dial(one, life=first.life)
            await after_a_loss.join(seen=first.name)
            await heard(node, [("connected", "n2"), ("given up", "n2"), ("connected", "n2")])
            assert await first.closed()
            for raw in (first, crossed, after_a_loss):
                await raw.close()

    run(scenario())


def test_a_welcome_that_never_arrived_does_not_lock_the_junior_out(run: Run) -> None:
    async def scenario() -> None:
        async with transport(sign_of_life_s=0.1, silence_s=60.0) as (one, node):
            lost = await Raw.dial(one)
            await lost.hello()
            await heard(node, [("connected", "n2")])
            current = one._links["n2"].current

            async def replaced() -> bool:
                again = await Raw.dial(one, life=lost.life)
                await again.hello()
                await again.close()
                return one._links["n2"].current is not current

            await eventually(replaced)
            await lost.close()

    run(scenario())


def test_the_junior_waits_for_the_welcome(run: Run) -> None:
    """As a junior (n3), a connection is in use only when the senior said so; a second welcome is an error."""

    async def scenario() -> None:
        async with transport("n3", ["n1", "n2"]) as (one, node):
            raw = await Raw.dial(one)
            await raw.hello("n1")
            await eventually(lambda: any(connection.introduced for connection in one._connections))
            assert node.heard == [] and not one.connected("n1")
            raw.send(msgspec.msgpack.encode(module._Welcome()))
            raw.send(b"frame")
            await eventually(lambda: node.frames == [("n1", b"frame")])
            await raw.close()

    run(scenario())


@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_end_by_the_other_side_is_told_as_reset(run: Run, how: str) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            raw = await Raw.dial(one)
            await raw.join()
            await eventually(lambda: node.heard == [("connected", "n2")])
            if how == "reset":
                raw.reset()
            else:
                await raw.close()
            await eventually(lambda: node.heard == [("connected", "n2"), ("reset", "n2")])
            assert not one.send("n2", b"x")

    run(scenario())


def test_a_silent_peer_is_given_up(run: Run) -> None:
    async def scenario() -> None:
        async with transport(silence_s=0.3, sign_of_life_s=0.1) as (one, node):
            raw = await Raw.dial(one)
            await raw.join()
            assert await raw.reader.readexactly(4) == bytes(4)  # our own sign of life
            assert await raw.closed()
            assert node.heard == [("connected", "n2"), ("given up", "n2")]
            assert node.frames == [] and one.counters.dropped == {"silent": 1}
            await raw.close()

    run(scenario())


def test_a_peer_that_does_not_read_is_dropped_and_memory_stays_bounded(run: Run) -> None:
    async def scenario() -> None:
        async with transport(queue_bytes_max=4 << 20) as (one, node):
            raw = await Raw.dial(one)
            await raw.join()
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            current = one._links["n2"].current
            assert current is not None and current.transport is not None
            body, accepted = bytes(100_000), 0
            while one.send("n2", body):
                accepted += 1
                one.flush()
                await asyncio.sleep(0)
                assert current.queue_bytes <= 4 << 20
                assert current.transport.get_write_buffer_size() <= 3 << 20
                assert accepted < 1_000
            assert not one.connected("n2") and current.queue_bytes == 0
            assert node.heard == [("connected", "n2")]  # not from inside send
            await eventually(lambda: node.heard[-1] == ("given up", "n2"))
            raw.reset()

    run(scenario())


# ---- strangers -------------------------------------------------------------------------------------------------------


async def turned_away(one: TcpPeerTransport, node: Node, raw: Raw, reason: str) -> None:
    assert await raw.closed()
    await eventually(lambda: one.counters.refused.get(reason, 0) == 1, what=f"{reason}: {one.counters.refused}")
    assert node.heard == [] and node.frames == []
    assert not one._strangers
    await raw.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack(">I", 1 << 30), "oversized"),
        (struct.pack(">I", 1_025), "oversized"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "oversized"),
        (b"\xff" * 100_000, "oversized"),
        (frame(b"garbage"), "garbage"),
        (frame(msgspec.msgpack.encode({"type": "hello"})), "garbage"),
        (frame(msgspec.msgpack.encode({"type": "other"})), "garbage"),
        (frame(msgspec.msgpack.encode(module._Welcome())), "garbage"),
        (frame(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."), "garbage"),
    ],
)
def test_garbage_ends_the_connection_and_nothing_else(run: Run, sent: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            raw = await Raw.dial(one)
            raw.writer.write(sent)
            await turned_away(one, node, raw, reason)
            good = await Raw.dial(one)
            await good.join()
            await eventually(lambda: node.heard == [("connected", "n2")])
            await good.close()

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": "another"}, "garbage"),
        ({"version": 2}, "version"),
        ({"cluster_id": "cluster-b"}, "cluster"),
        ({"node_id": "n1"}, "own"),
        ({"node_id": "n9"}, "unknown"),
        ({"nonce": b"of another connection"}, "garbage"),
    ],
)
def test_who_does_not_belong_is_refused(
    run: Run, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            for count in range(1, 4):
                raw = await Raw.dial(one)
                await raw.hello(**changes)
                assert await raw.closed()
                await raw.close()
                await refused(one, reason, count)
            assert node.heard == []

    run(scenario())
    assert len([r for r in caplog.records if r.message.startswith("refused")]) == 1  # others must not fill our disk


def test_an_address_that_leads_to_the_wrong_node(run: Run) -> None:
    async def scenario() -> None:
        async with transport("n2", ["n1", "n3"]) as (other, _), transport("n1") as (one, node):
            one.set_address("n3", ("127.0.0.1", port(other)))
            await eventually(lambda: one.counters.refused.get("other", 0) > 0)
            assert node.heard == []
            one.set_address("n3", ("127.0.0.1", port(one)))
            await eventually(lambda: one.counters.refused.get("own", 0) > 0)

    run(scenario())


def test_after_the_introduction_the_frame_limit_holds(run: Run) -> None:
    async def scenario() -> None:
        async with transport(frame_bytes_max=1_000_000) as (one, node):
            raw = await Raw.dial(one)
            await raw.join()
            raw.writer.write(frame(bytes(1_000_000)) + struct.pack(">I", 1_000_001))
            assert await raw.closed()
            assert [len(body) for _, body in node.frames] == [1_000_000]
            await eventually(lambda: node.heard == [("connected", "n2"), ("given up", "n2")])
            await raw.close()

    run(scenario())


def test_who_never_introduces_itself_is_dropped_in_time(run: Run) -> None:
    """A connection that says nothing, and one that says half of it byte by byte."""

    async def scenario() -> None:
        async with transport(introduction_timeout_s=0.3) as (one, node):
            silent, slow = await Raw.dial(one), await Raw.dial(one)
            slow.writer.write(b"\x00\x00")
            assert await silent.closed() and await slow.closed()
            assert one.counters.refused == {"timeout": 2} and node.heard == []
            await silent.close()
            await slow.close()

    run(scenario())


def test_many_strangers_take_no_place_from_the_honest(run: Run, authorities: dict[str, Path]) -> None:
    async def scenario() -> None:
        ours = authorities["ours"]
        async with transport(tls=contexts(ours, "n1"), strangers_max=5) as (one, node):
            crowd = []
            for _ in range(40):
                crowd.append(await asyncio.open_connection("127.0.0.1", port(one)))
                assert len(one._strangers) <= 6
            await eventually(lambda: one.counters.refused.get("crowded", 0) >= 35)
            assert len(one._connections) <= 6
            raw = await Raw.dial(one, contexts(ours, "n2")[1])
            await raw.join()
            await eventually(lambda: node.heard == [("connected", "n2")])
            await raw.close()
            for _, writer in crowd:
                writer.transport.abort()

    run(scenario())


# ---- certificates ----------------------------------------------------------------------------------------------------


def test_another_authority_is_refused_whoever_dials(run: Run, authorities: dict[str, Path]) -> None:
    async def scenario() -> None:
        ours, theirs = authorities["ours"], authorities["another authority"]
        async with (
            transport("n1", ["n2"], contexts(ours, "n1")) as (one, node),
            transport("n2", ["n1"], contexts(theirs, "n2")) as (other, other_node),
        ):
            introduce(one, other)
            for each in (one, other):
                await refused(each, "tls", 3)
            assert node.heard == other_node.heard == []

    run(scenario())


def test_a_certificate_of_another_node_or_cluster_is_refused(
    run: Run, authorities: dict[str, Path], tmp_path: Path
) -> None:
    """The authority is right, the name is not: n3 says that it is n2, and a node of another cluster that it is ours."""
    ours = authorities["ours"]
    authority, key = certs._load_pair(ours / "ca.pem", ours / "ca.key")
    assert authority is not None and key is not None
    now = datetime.datetime.now(datetime.UTC)
    certs._node(tmp_path, authority, key, "cluster-b", "n2", certs.LOCAL_HOSTS, 90, now)
    (tmp_path / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())

    async def scenario() -> None:
        async with transport(tls=contexts(ours, "n1")) as (one, node):
            for count, tls in enumerate((contexts(ours, "n3"), contexts(tmp_path, "n2", "cluster-b")), start=1):
                raw = await Raw.dial(one, tls[1])
                await raw.hello("n2")
                assert await raw.closed()
                await refused(one, "certificate", count)
                await raw.close()
            assert node.heard == [] and one.counters.refused == {"certificate": 2}

    run(scenario())


def test_without_a_certificate_or_without_tls_nobody_gets_in(run: Run, authorities: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with transport(tls=contexts(authorities["ours"], "n1")) as (one, node):
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            bare.check_hostname = False
            bare.verify_mode = ssl.CERT_NONE
            try:
                raw = await Raw.dial(one, bare)
            except (ssl.SSLError, ConnectionError):
                pass  # TLS 1.2 would tell it here, TLS 1.3 at the first read
            else:
                await raw.closed()
                await raw.close()
            await eventually(lambda: one.counters.refused == {"tls": 1})
            plain = await Raw.dial(one)
            plain.writer.write(frame(b"hello"))
            assert await plain.closed()
            await plain.close()
            await eventually(lambda: one.counters.refused == {"tls": 2})
            assert node.heard == []

    run(scenario())


def test_renewed_certificates_are_for_new_connections(run: Run, authorities: dict[str, Path]) -> None:
    async def scenario() -> None:
        ours, theirs = authorities["ours"], authorities["another authority"]
        async with transport(tls=contexts(ours, "n1")) as (one, node):
            before = await Raw.dial(one, contexts(ours, "n2")[1])
            await before.join()
            one.use_tls(*contexts(theirs, "n1"))
            after = await Raw.dial(one, contexts(theirs, "n3")[1])
            await after.join("n3")
            before.send(b"still here")
            await eventually(lambda: node.frames == [("n2", b"still here")])
            assert node.heard == [("connected", "n2"), ("connected", "n3")]
            await before.close()
            await after.close()

    run(scenario())


def test_both_sides_name_a_node_alike() -> None:
    assert identity_uri("cluster-a", "n1") == certs.identity_uri("cluster-a", "n1") == "tenure://cluster-a/n1"
    assert identity_uri("a/b c", "n?") == certs.identity_uri("a/b c", "n?") == "tenure://a%2Fb%20c/n%3F"


# ---- settings that are refused, dials that lead nowhere --------------------------------------------------------------


def settings(**changes: Any) -> TransportSettings:
    base = TransportSettings(
        cluster_id="cluster-a", node_id="n1", listen=("127.0.0.1", 0), peers={"n2": ("127.0.0.1", 1)}, insecure=True
    )
    return msgspec.structs.replace(base, **changes)


async def test_plaintext_must_be_asked_for_and_stays_on_loopback(authorities: dict[str, Path]) -> None:
    with pytest.raises(TransportError, match="mutual TLS"):
        TcpPeerTransport(settings(insecure=False))
    with pytest.raises(TransportError, match="loopback only"):
        TcpPeerTransport(settings(listen=("0.0.0.0", 0))).open()
    with pytest.raises(TransportError, match="demand certificates"):
        lax = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        lax.check_hostname = False
        lax.verify_mode = ssl.CERT_NONE
        TcpPeerTransport(settings(), contexts(authorities["ours"], "n1")[0], lax)
    with pytest.raises(TransportError, match="its own peer"):
        TcpPeerTransport(settings(node_id="n2"))


def test_plaintext_is_not_dialled_beyond_loopback(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with transport() as (one, _):
            one.set_address("n2", ("192.0.2.1", 4_000))
            await eventually(lambda: "192.0.2.1 is not a loopback address" in caplog.text)

    run(scenario())


async def test_an_address_that_cannot_be_had_is_said_plainly(authorities: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        with pytest.raises(TransportError, match=rf"127.0.0.1:{address[1]}.*in use.*peer_listen"):
            TcpPeerTransport(settings(listen=address)).open()
    with pytest.raises(TransportError, match="cannot listen"):
        TcpPeerTransport(settings(listen=("192.0.2.1", 0)), *contexts(authorities["ours"], "n1")).open()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address where connecting takes for ever: the queue of a listener that accepts nobody is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            waiting.append(sock)
        yield address
        for sock in waiting:
            sock.close()


def test_a_dial_gives_up_in_time_and_tries_again(run: Run, black_hole: tuple[str, int]) -> None:
    async def scenario() -> None:
        async with transport("n1", ["n2"], connect_timeout_s=0.1) as (one, _), transport("n2", ["n1"]) as (other, _):
            one.set_address("n2", black_hole)
            failed = one.counters.dials_failed
            await eventually(lambda: one.counters.dials_failed >= failed + 2)
            one.set_address("n2", ("127.0.0.1", port(other)))
            await eventually(lambda: one.connected("n2"))

    run(scenario())


@contextlib.asynccontextmanager
async def resetting() -> AsyncIterator[int]:
    """The port of a listener that resets every connection at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def reset_all() -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    task = asyncio.create_task(reset_all())
    try:
        yield listener.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.wait({task})
        listener.close()


@pytest.mark.parametrize("protected", [True, False])
def test_a_dial_that_is_reset_closes_its_own_descriptor_and_no_other(
    run: Run, authorities: dict[str, Path], protected: bool
) -> None:
    tls = contexts(authorities["ours"], "n1") if protected else None
    opened: list[int] = []

    async def scenario() -> None:
        quick: dict[str, Any] = {"backoff_min_s": 0.001, "backoff_max_s": 0.002}
        async with resetting() as at, transport(peers=["n2"], tls=tls, **quick) as (one, _):
            one.set_address("n2", ("127.0.0.1", at))
            counters = one.counters
            for _ in range(60):
                ended = counters.dials_failed + sum(counters.refused.values())
                await eventually(lambda: counters.dials_failed + sum(counters.refused.values()) > ended)  # noqa: B023
                opened.append(os.open(os.devnull, os.O_RDONLY))  # takes the lowest number that is free

    try:
        run(scenario())
    finally:
        gc.collect()
        for descriptor in opened:
            os.close(descriptor)  # raises when somebody has closed it before


def test_a_name_that_does_not_exist_is_only_a_failed_dial(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, _):
            for name in ("does-not-exist.invalid", "a..b", "x" * 300):
                failed = one.counters.dials_failed
                one.set_address("n2", (name, 1))
                await dials_failed(one, failed + 3)

    run(scenario())


def test_running_out_of_descriptors_does_not_end_the_listening(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with transport() as (one, node):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            raw_socket = socket.socket()  # the descriptor that the dial needs
            raw_socket.setblocking(False)
            hoard = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        hoard.append(os.open("/dev/null", os.O_RDONLY))
                await asyncio.get_running_loop().sock_connect(raw_socket, ("127.0.0.1", port(one)))
                await eventually(lambda: ("accept", "") in one._logged_at)
            finally:
                for descriptor in hoard:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            reader, writer = await asyncio.open_connection(sock=raw_socket)
            raw = Raw(reader, writer)
            await raw.join()
            await eventually(lambda: node.heard == [("connected", "n2")])
            await raw.close()

    run(scenario())


def test_a_connection_that_is_accepted_as_the_transport_stops_is_closed(run: Run) -> None:
    """However many steps the loop has made since somebody connected."""

    async def scenario() -> None:
        for steps in range(8):
            async with transport() as (one, _):
                theirs = socket.create_connection(("127.0.0.1", port(one)))
                for _ in range(steps):
                    await asyncio.sleep(0)
            theirs.setblocking(False)
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(theirs, 1_024):
                    pass  # our introduction; then the end
            theirs.close()

    run(scenario())
    gc.collect()  # a socket that nobody has closed is an error when it is collected


def test_a_greeting_that_is_cancelled_before_its_first_step_closes_its_socket(run: Run) -> None:
    async def scenario() -> None:
        async with transport() as (one, _):
            accepted, theirs = socket.socketpair()
            one._meet(accepted)
            (greeting,) = one._strangers.values()
            greeting.cancel()
            await eventually(greeting.done)
            await asyncio.sleep(0)
            assert accepted.fileno() == -1 and not one._connections
            theirs.close()

    run(scenario())
