"""Frames between the nodes of one cluster: TCP with mutual TLS, one connection in use for each pair of nodes.

Wire
  A frame is four bytes of length (big endian) and as many bytes. Length 0 is a sign of life and is not delivered. A
  length over the limit ends the connection before anything of the frame is kept. Before a connection is introduced,
  the limit is that of an introduction: a kilobyte.

Introduction
  acceptor -> dialer   Hello with a nonce
  dialer -> acceptor   Hello that gives the nonce back: the dialer is alive now, this is not an old connection's buffer
  senior -> junior     Welcome. The senior is the node with the smaller id, whoever dialled.
  Both check magic, version, cluster and node id, and that the certificate of the other side names just this cluster
  and node (SAN URI ``tenure://<cluster>/<node>``). The address of the other side proves nothing and is not looked at.

Which connection is in use
  Both sides dial while they have none. Only the senior decides, so that the two never choose differently: what it
  welcomes is in use, and replaces what was. Of its own dials it drops those that come too late. A junior that dials
  while the senior has a connection with it has either lost that one (then the new one replaces it), or its dial and
  the senior's welcome have crossed (then the new one is dropped). The junior's Hello tells which: it names the process
  life of the junior and the last connection it was welcomed on. So a half-open connection is healed by the first dial,
  and dialling at once makes nothing flap.
  A connection that is not in use any more is dead: nothing is delivered from it, and the node hears
  ``peer_disconnected`` before it hears ``peer_connected`` again.

Two processes with one node id
  Each Hello names the store (random, made with it; empty from a version that does not name it). Whoever has a
  connection in use with a node refuses, junior and senior alike, a Hello of the same id from another store, and says
  so with Refused. First come, first served, and only while that connection lives: a node that comes back with a new
  disk is let in as soon as the connection of its old process has ended, after ``silence_s`` at the latest.
  Who is refused cannot know which of the two is the right one, so it goes on, says ``displaced`` and dials again. But
  a process that no peer has accepted since it started, refused for ``displaced_after_s``, does nobody a service, and
  might be let in when the other one loses a connection: ``on_displaced`` is called, and it should end.
  A senior that dials welcomes before it can be refused; until the junior's first sign of life it is not accepted.

Bounds: frame, write queue of a peer (over it the connection is dropped: a slow peer has to catch up), strangers in
introduction (over it the oldest is dropped, so that slow ones cannot lock out the honest), time for connecting and for
introduction, and time without a sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import random
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote

import msgspec

from sidecar.consensus.ports import PeerEvents

VERSION = 1
HELLO_BYTES_MAX = 1_024

_MAGIC = "tenure-peer"
_NONCE_BYTES = 16
_LENGTH_BYTES = 4
_WRITE_BYTES = 1 << 20  # handed to the socket's own buffer at a time; the rest waits in our bounded queue
_ADDRESSES_MAX = 4  # of one name, tried in one dial
_LOG_INTERVAL_S = 10.0
_SIGN_OF_LIFE = bytes(_LENGTH_BYTES)

_log = logging.getLogger("tenure.transport")


class TransportError(Exception):
    """The transport cannot be set up: address in use or not ours, or plaintext where it is not allowed."""


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who we are and the bounds of every connection."""

    cluster_id: str
    node_id: str
    listen: tuple[str, int]  # host, port; port 0 takes a free one
    peers: Mapping[str, tuple[str, int]]  # the others: id to host, port
    insecure: bool = False  # plaintext, on loopback only
    frame_bytes_max: int = 8 << 20
    queue_bytes_max: int = 32 << 20
    strangers_max: int = 32
    connect_timeout_s: float = 2.0
    introduction_timeout_s: float = 3.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    stable_s: float = 2.0  # a connection that lasted this long lets the back-off start anew
    sign_of_life_s: float = 1.0
    silence_s: float = 4.0  # without any byte from the other side
    store_id: bytes = b""  # the same for each life of a store, another one for another store; empty: not told
    displaced_after_s: float = 10.0  # more than twice silence_s: by then the connection of a dead process has ended


class TransportCounters(msgspec.Struct):
    """Only grows, for metrics. ``refused`` and ``dropped`` have a small fixed set of reasons."""

    connections: int = 0
    dials_failed: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    refused: dict[str, int] = {}
    dropped: dict[str, int] = {}


class _Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    magic: str
    version: int
    cluster_id: str
    node_id: str
    life: bytes  # random, of this process
    nonce: bytes  # the acceptor's, given back by the dialer; from then on the name of the connection
    seen: bytes  # the name of the connection that was last in use with the other side, empty for none
    store: bytes = b""


class _Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Another process of your node id is connected. Only sent to who named a store, and so knows this."""


_decode = msgspec.msgpack.Decoder(_Hello | _Welcome | _Refused).decode


def identity_uri(cluster_id: str, node_id: str) -> str:
    """What the certificate of a node carries as a subject alternative name."""
    return f"tenure://{quote(cluster_id, safe='')}/{quote(node_id, safe='')}"


class _Link:
    """One peer: where it is, and the connection in use, if any."""

    def __init__(self, peer: str, address: tuple[str, int]) -> None:
        self.peer = peer
        self.address = address
        self.current: _Connection | None = None
        self.loss: bool | None = None  # ``reset`` of a loss that the node has not heard of yet
        self.idle = asyncio.Event()  # set while there is no connection in use
        self.idle.set()
        self.hurry = asyncio.Event()
        self.seen = b""
        self.life, self.life_before = b"", b""  # of the process that was in use last, and of the one before it
        self.failures = 0
        # Since when, and when last, this peer has told us that another process has our id; -inf for never.
        self.displaced_since = self.displaced_at = float("-inf")


class _Connection(asyncio.Protocol):
    """One TCP connection, from either side. ``link`` is set as soon as it is known whose it is meant to be."""

    def __init__(self, owner: TcpPeerTransport, dialed: _Link | None) -> None:
        self.owner = owner
        self.dialed = dialed
        self.link = dialed
        self.transport: asyncio.Transport | None = None
        self.dead = False
        self.in_use = False
        self.introduced = False
        self.confirmed = False  # something came after the welcome: the junior uses it
        self.accepted = False  # the other side uses it as well
        self.store = b""  # of the other side
        self.nonce = os.urandom(_NONCE_BYTES)
        self.life = b""  # of the other side
        self.done: asyncio.Future[None] = owner.loop.create_future()  # in use, or dead
        self.deadline = owner.loop.call_later(
            owner.settings.introduction_timeout_s, owner.refuse, self, "timeout", "it took too long"
        )
        self.in_use_since = 0.0
        self.received_at = self.sent_at = owner.loop.time()
        self.queue: list[bytes] = []
        self.queue_bytes = 0
        self._paused = False
        self._buffer = bytearray()
        self._limit = HELLO_BYTES_MAX

    # -- from asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transport is an asyncio.Transport in all but name.
        self.transport = cast(asyncio.Transport, transport)
        if self.dead:
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=_WRITE_BYTES)
        if self.dialed is None:
            self.owner.introduce(self)

    def data_received(self, data: bytes) -> None:
        if self.dead:
            return
        self.received_at = self.owner.loop.time()
        self.confirmed = self.in_use
        if self._buffer:
            self._buffer += data
            used = self._deliver(self._buffer)
            del self._buffer[:used]
        else:
            used = self._deliver(data)
            self._buffer += data[used:]
        if self.dead:
            self._buffer.clear()

    def _deliver(self, data: bytes | bytearray) -> int:
        """Deliver the whole frames at the front of ``data``; returns how many bytes they took."""
        start, end = 0, len(data)
        while not self.dead and end - start >= _LENGTH_BYTES:
            length = int.from_bytes(data[start : start + _LENGTH_BYTES], "big")
            if length > self._limit:
                self.owner.refuse(self, "oversized", f"a frame of {length} bytes, {self._limit} are allowed")
                break
            stop = start + _LENGTH_BYTES + length
            if stop > end:
                break
            if length:
                with memoryview(data) as view, view[start + _LENGTH_BYTES : stop] as part:
                    frame = bytes(part)
                self.owner.received(self, frame)
            elif self.in_use and not self.accepted:
                self.owner.accepted(self)
            start = stop
        return start

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        # Unreachable and timed out are our own conclusions; an end or a reset is the other side's doing.
        reset = exc is None or isinstance(exc, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if not self.in_use and isinstance(exc, ssl.SSLError):  # TLS 1.3: how a dialler hears that it was refused
            self.owner.refuse(self, "tls", f"no TLS session: {exc}")
        elif not self.in_use:
            self.owner.refuse(self, "ended", "it was closed before the introduction was over")
        self.owner.drop(self, "reset" if reset else "failed", reset=reset)
        self.owner.forget(self)

    # -- for the owner -------------------------------------------------------------------------------------------------

    def put(self, frame: bytes) -> None:
        self.queue += (len(frame).to_bytes(_LENGTH_BYTES, "big"), frame)
        self.queue_bytes += _LENGTH_BYTES + len(frame)

    def show_life(self) -> None:
        self.queue.append(_SIGN_OF_LIFE)
        self.queue_bytes += _LENGTH_BYTES
        self.flush()

    def flush(self) -> None:
        while self.queue and not self._paused and not self.dead and self.transport is not None:
            if self.queue_bytes <= _WRITE_BYTES:
                data, self.queue = b"".join(self.queue), []
            else:
                data = self._take_some()
            self.queue_bytes -= len(data)
            self.sent_at = self.owner.loop.time()
            self.owner.counters.bytes_sent += len(data)
            self.transport.write(data)

    def _take_some(self) -> bytes:
        count = size = 0
        while size < _WRITE_BYTES and count < len(self.queue):
            size += len(self.queue[count])
            count += 1
        data = b"".join(self.queue[:count])
        del self.queue[:count]
        return data

    def use(self) -> None:
        self.in_use = True
        self.in_use_since = self.received_at = self.owner.loop.time()
        self._limit = self.owner.settings.frame_bytes_max
        self.deadline.cancel()
        self._finish()

    def kill(self, *, gently: bool = False) -> None:
        """Nothing is delivered from here on. Gently: what was queued still leaves."""
        if gently:
            self.flush()
        self.dead = True
        self.deadline.cancel()
        self.queue.clear()
        self.queue_bytes = 0
        self._finish()
        if self.transport is not None:
            if gently:
                self.transport.close()
            else:
                self.transport.abort()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class TcpPeerTransport:
    """PeerTransport over TCP. ``open``, then ``start``, then ``stop``; all on one event loop."""

    def __init__(
        self,
        settings: TransportSettings,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Without TLS contexts ``settings.insecure`` must be set. Both contexts must demand certificates.
        Must be called in a running event loop. Raises TransportError."""
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.counters = TransportCounters()
        self._server_tls = server_tls
        self._client_tls = client_tls
        self._rng = rng or random.Random()
        self._links = {peer: _Link(peer, address) for peer, address in settings.peers.items()}
        self._events: PeerEvents | None = None
        self._listeners: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}  # listeners that accept nobody for a moment
        self.bound_to: list[tuple[str, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[_Connection, asyncio.Task[None]] = {}  # in order of arrival
        self._connections: set[_Connection] = set()  # whose socket is open
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._logged_at: dict[tuple[str, str], tuple[float, int]] = {}
        self._life = os.urandom(_NONCE_BYTES)
        self._watch: asyncio.TimerHandle | None = None
        self._stopped = False
        self._ever_accepted = False
        self.on_displaced: Callable[[str], None] = lambda reason: None  # may be called more than once
        self._check_settings()

    def _check_settings(self) -> None:
        if self.settings.node_id in self._links:
            raise TransportError(f"{self.settings.node_id} is this node, and cannot be its own peer")
        if self._server_tls is not None and self._client_tls is not None:
            self.use_tls(self._server_tls, self._client_tls)
        elif not self.settings.insecure:
            raise TransportError("peers talk with mutual TLS. What to do: give certificate, key and authority")

    def use_tls(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """For connections from now on; those that are open stay. Raises TransportError when it is not strict enough."""
        for context in (server, client):
            if context.verify_mode is not ssl.CERT_REQUIRED or context.minimum_version < ssl.TLSVersion.TLSv1_2:
                raise TransportError("the TLS contexts of peers must demand certificates, and TLS 1.2 or newer")
        self._server_tls, self._client_tls = server, client

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Bind and listen; returns the port. Nothing is accepted before ``start``. Raises TransportError."""
        host, port = self.settings.listen
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((entry[0], str(entry[4][0])) for entry in found):
                self._allow_plaintext(address)
                port = self._listen(family, address, port)
        except (OSError, UnicodeError) as error:
            self._close_listeners()
            raise TransportError(
                f"cannot listen for peers on {host}:{port}: {error}. What to do: set peer_listen to a free address of "
                f"this machine"
            ) from error
        except TransportError:
            self._close_listeners()
            raise
        return port

    def _listen(self, family: int, address: str, port: int) -> int:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            return self._unless_bound(error, port)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            return self._unless_bound(error, port)
        self._listeners.append(listener)
        self.bound_to.append(listener.getsockname()[:2])
        return int(self.bound_to[-1][1])

    def _unless_bound(self, error: OSError, port: int) -> int:
        """A name such as localhost often has a second address, of a family that is switched off on this machine."""
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and self.bound_to:
            return port
        raise error

    def start(self, events: PeerEvents) -> None:
        self._events = events
        for listener in self._listeners:
            self.loop.add_reader(listener, self._accept, listener)
        for link in self._links.values():
            self._spawn(self._dial_forever(link))
        self._watch = self.loop.call_later(self.settings.sign_of_life_s / 2, self._look_after, self.loop.time())

    async def stop(self, grace_s: float = 0.5) -> None:
        """Send what is queued, close everything, wait for the ends at most ``grace_s``. The node hears nothing more."""
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
        self._close_listeners()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.current = None
        for gently in (True, False):
            for connection in list(self._connections):
                connection.kill(gently=gently and connection.in_use)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._all_closed.wait()

    def _close_listeners(self) -> None:
        for pause in self._pauses.values():
            pause.cancel()
        for listener in self._listeners:
            self.loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.loop.call_exception_handler({"message": "a task of the peer transport failed", "exception": error})

    # -- for the node --------------------------------------------------------------------------------------------------

    def send(self, peer: str, frame: bytes) -> bool:
        if not 0 < len(frame) <= self.settings.frame_bytes_max:
            raise ValueError(f"a frame of {len(frame)} bytes; 1 to {self.settings.frame_bytes_max} are allowed")
        link = self._links.get(peer)
        connection = link.current if link is not None else None
        if connection is None:
            return False
        if connection.queue_bytes + _LENGTH_BYTES + len(frame) > self.settings.queue_bytes_max:
            self._warn(
                "slow", peer, f"{peer} does not keep up: {connection.queue_bytes} bytes wait; connection dropped"
            )
            self.drop(connection, "queue", reset=False)
            return False
        connection.put(frame)
        self.counters.frames_sent += 1
        return True

    def connected(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link is not None and link.current is not None

    def flush(self) -> None:
        for link in self._links.values():
            if link.current is not None:
                link.current.flush()

    def set_address(self, peer: str, address: tuple[str, int]) -> None:
        """The next dial goes there, at once if there is no connection. One in use stays: identity is what counts."""
        link = self._links[peer]
        link.address = address
        link.failures = 0
        link.hurry.set()

    # -- dialling and accepting ----------------------------------------------------------------------------------------

    async def _dial_forever(self, link: _Link) -> None:
        while True:
            await link.idle.wait()
            await self._wait_before_dialing(link)
            if link.current is None:
                link.failures += 1  # until it proves stable
                connection = await self._dial(link)
                if connection is not None:
                    await connection.done

    async def _wait_before_dialing(self, link: _Link) -> None:
        settings = self.settings
        delay_s = min(settings.backoff_max_s, settings.backoff_min_s * 2 ** min(link.failures, 16))
        delay_s *= self._rng.uniform(0.5, 1.0)
        if link.failures == 0 and self._senior_to(link.peer):
            delay_s = self._rng.uniform(0.0, settings.backoff_min_s / 4)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await link.hurry.wait()
        link.hurry.clear()

    async def _dial(self, link: _Link) -> _Connection | None:
        host, port = link.address
        reason: Exception = OSError("the name has no address")
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # anew for each dial
        except (OSError, UnicodeError) as error:
            found, reason = [], error
        for family, _, protocol, _, address in found[:_ADDRESSES_MAX]:
            try:
                self._allow_plaintext(str(address[0]))
                return await self._connect(link, socket.socket(family, socket.SOCK_STREAM, protocol), address)
            except (OSError, TransportError) as error:
                reason = error
        self.counters.dials_failed += 1
        self._warn("dial", link.peer, f"cannot reach {link.peer} at {host}:{port}: {reason or type(reason).__name__}")
        return None

    async def _connect(self, link: _Link, sock: socket.socket, address: Any) -> _Connection:
        connection: _Connection | None = None
        try:
            sock.setblocking(False)
            _tune(sock, self.settings)
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self.loop.sock_connect(sock, address)
            connection = self._admit(_Connection(self, link))
            made = connection
            with _given_away(sock):
                await self.loop.create_connection(
                    lambda: made,
                    sock=sock,
                    ssl=self._client_tls,
                    server_hostname="" if self._client_tls else None,  # the SAN URI is checked instead of a host name
                    ssl_handshake_timeout=self.settings.introduction_timeout_s if self._client_tls else None,
                )
        except BaseException as error:
            if connection is None or connection.transport is None:
                sock.close()
            if connection is not None:
                if isinstance(error, ssl.SSLError):
                    self._count_refused("tls")
                self._kill_unfinished(connection)
            raise
        return connection

    def _accept(self, listener: socket.socket) -> None:
        """Somebody waits. Not ``sock_accept``: it loses the connection when it is cancelled as it completes."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # gone again
        except OSError as error:  # out of descriptors, mostly: it passes, and listening must go on
            self._warn("accept", "", f"cannot accept peers: {error}")
            self.loop.remove_reader(listener)  # it would report the one that waits without a pause
            delay_s = self._rng.uniform(0.05, 0.1)
            self._pauses[listener] = self.loop.call_later(
                delay_s, self.loop.add_reader, listener, self._accept, listener
            )
            return
        self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        connection = self._admit(_Connection(self, None))
        greeting = self._strangers[connection] = self._spawn(self._greet(connection, sock))
        # Not in the task itself: one that is cancelled before its first step would leave the socket open.
        greeting.add_done_callback(functools.partial(self._greeted, connection, sock))
        if len(self._strangers) > self.settings.strangers_max:
            self.refuse(next(iter(self._strangers)), "crowded", "too many that do not introduce themselves")

    async def _greet(self, connection: _Connection, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            _tune(sock, self.settings)
            await self.loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._server_tls,
                ssl_handshake_timeout=self.settings.introduction_timeout_s if self._server_tls else None,
            )
        except OSError as error:
            self.refuse(connection, "tls" if isinstance(error, ssl.SSLError) else "ended", f"no TLS session: {error}")

    def _greeted(self, connection: _Connection, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if connection.transport is None:
            sock.close()
        elif not task.cancelled():
            return
        self._kill_unfinished(connection)

    def _kill_unfinished(self, connection: _Connection) -> None:
        """Not by ``connection_lost``: uvloop does not call it for a connection made in the moment of a cancellation."""
        connection.kill()
        self.loop.call_soon(self.forget, connection)

    def _admit(self, connection: _Connection) -> _Connection:
        self._connections.add(connection)
        self._all_closed.clear()
        return connection

    def forget(self, connection: _Connection) -> None:
        """Its socket is closed."""
        self._strangers.pop(connection, None)
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def _allow_plaintext(self, address: str) -> None:
        if self._server_tls is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise TransportError(
                f"{address} is not a loopback address, and insecure peers are allowed on loopback only"
            )

    def _senior_to(self, peer: str) -> bool:
        return self.settings.node_id < peer

    # -- introduction --------------------------------------------------------------------------------------------------

    def introduce(self, connection: _Connection) -> None:
        """Send our Hello."""
        hello = _Hello(
            magic=_MAGIC,
            version=VERSION,
            cluster_id=self.settings.cluster_id,
            node_id=self.settings.node_id,
            life=self._life,
            nonce=connection.nonce,
            seen=connection.dialed.seen if connection.dialed is not None else b"",
            store=self.settings.store_id,
        )
        connection.put(msgspec.msgpack.encode(hello))
        connection.flush()

    def received(self, connection: _Connection, frame: bytes) -> None:
        """A whole frame of a connection that is not dead."""
        if connection.in_use and not connection.accepted:
            if _is_refusal(frame):
                self._displaced_by(connection)
                return
            self.accepted(connection)
        if connection.in_use:
            assert connection.link is not None and self._events is not None
            self.counters.frames_received += 1
            self.counters.bytes_received += _LENGTH_BYTES + len(frame)
            self._events.frame_received(connection.link.peer, frame)
            return
        try:
            message = _decode(frame)
        except msgspec.DecodeError:
            self.refuse(connection, "garbage", "bytes that are no introduction")
            return
        if isinstance(message, _Hello) and not connection.introduced:
            self._hello(connection, message)
        elif isinstance(message, _Welcome) and connection.introduced:
            self._welcomed(connection)
        elif isinstance(message, _Refused) and connection.introduced:
            self._displaced_by(connection)
        else:
            self.refuse(connection, "garbage", "an introduction in the wrong order")

    def _hello(self, connection: _Connection, hello: _Hello) -> None:
        objection = self._objection(connection, hello)
        if objection is not None:
            self.refuse(connection, *objection)
            return
        link = connection.link = self._links[hello.node_id]
        connection.introduced, connection.life, connection.nonce = True, hello.life, hello.nonce
        connection.store = hello.store
        if self._is_a_double(connection, link.current):
            # Whom we dialled does not know yet who we are: it hears it when it dials.
            self._refuse_double(connection, tell=connection.dialed is None)
            return
        if connection.dialed is not None:
            if link.current is not None:  # the other side's dial was faster
                self.drop(connection, "late", reset=False)
                return
            self.introduce(connection)
        elif self._senior_to(link.peer) and self._crossed(link.current, hello):
            self.drop(connection, "late", reset=False)
            return
        if self._senior_to(link.peer):
            connection.put(msgspec.msgpack.encode(_Welcome()))
            connection.flush()
            self._use(connection, link)

    @staticmethod
    def _is_a_double(connection: _Connection, current: _Connection | None) -> bool:
        return current is not None and connection.store != current.store and bool(connection.store and current.store)

    def _refuse_double(self, connection: _Connection, *, tell: bool) -> None:
        assert connection.link is not None
        if tell:
            connection.put(msgspec.msgpack.encode(_Refused()))
        words = (
            f"another process runs as node {connection.link.peer}, with a data folder of its own, and is connected: "
            f"stop the wrong one, each needs a node_id of its own"
        )
        self.refuse(connection, "double", words, gently=True)

    def _crossed(self, current: _Connection | None, hello: _Hello) -> bool:
        """Whether the junior that sent this will find our welcome on the current connection, or already has."""
        if current is None or hello.life != current.life or hello.seen == current.nonce:
            return False
        age_s = self.loop.time() - current.in_use_since
        return current.confirmed or age_s < self.settings.sign_of_life_s

    def _objection(self, connection: _Connection, hello: _Hello) -> tuple[str, str] | None:
        """Why this introduction is refused: a reason for the counter, and words for the log."""
        ours = self.settings
        if hello.magic != _MAGIC:
            return "garbage", "bytes that are no introduction"
        if hello.version != VERSION:
            return "version", f"peer protocol {hello.version}; this node speaks {VERSION}: upgrade the older one"
        if hello.cluster_id != ours.cluster_id:
            return (
                "cluster",
                f"a node of cluster {hello.cluster_id!r}; this one is of {ours.cluster_id!r}: check addresses",
            )
        if hello.node_id == ours.node_id:
            return "own", f"it has our own id {ours.node_id!r}: an address leads here, or two nodes have one id"
        if hello.node_id not in self._links:
            return "unknown", f"node {hello.node_id!r} is not in our list of peers"
        if connection.dialed is not None and connection.dialed.peer != hello.node_id:
            return "other", f"the address of {connection.dialed.peer!r} leads to {hello.node_id!r}: check addresses"
        if connection.dialed is None and hello.nonce != connection.nonce:
            return "garbage", "an introduction that does not answer ours"
        if not self._certified(connection, hello):
            return "certificate", f"its certificate does not name node {hello.node_id!r} of {hello.cluster_id!r}"
        return None

    def _certified(self, connection: _Connection, hello: _Hello) -> bool:
        if self._server_tls is None:
            return True
        assert connection.transport is not None
        certificate = connection.transport.get_extra_info("ssl_object").getpeercert() or {}
        return ("URI", identity_uri(hello.cluster_id, hello.node_id)) in certificate.get("subjectAltName", ())

    def _welcomed(self, connection: _Connection) -> None:
        link = connection.link
        assert link is not None
        if self._senior_to(link.peer):
            self.refuse(connection, "garbage", "a welcome from a node that has no say in it")
        elif self._is_a_double(connection, link.current):  # the other one was faster
            self._refuse_double(connection, tell=True)
        else:
            self._use(connection, link)
            self.accepted(connection)
            connection.show_life()

    # -- the connection in use -----------------------------------------------------------------------------------------

    def _use(self, connection: _Connection, link: _Link) -> None:
        assert self._events is not None
        if link.current is not None:
            self.drop(link.current, "replaced", reset=False)
        self._announce_loss(link)
        self._strangers.pop(connection, None)
        connection.use()
        link.current = connection
        link.seen = connection.nonce
        self._look_for_a_double(link, connection.life)
        link.idle.clear()
        self.counters.connections += 1
        _log.info("connected to %s (%s)", link.peer, "dialled" if connection.dialed else "accepted")
        self._events.peer_connected(link.peer)

    def _look_for_a_double(self, link: _Link, life: bytes) -> None:
        """A process that comes back after another one had its place has not ended: two of them have one id. Their
        stores are copies of one another, or not told: else the second would have been refused."""
        if life == link.life:
            return
        if life == link.life_before:
            words = f"two processes run as node {link.peer}: stop the wrong one, each needs a node_id of its own"
            self._warn("double", link.peer, words)
        link.life, link.life_before = life, link.life

    # -- two processes with our id -------------------------------------------------------------------------------------

    def accepted(self, connection: _Connection) -> None:
        """The other side uses this connection, too."""
        assert connection.link is not None
        connection.accepted = self._ever_accepted = True
        connection.link.displaced_since = connection.link.displaced_at = float("-inf")

    def displaced(self) -> str:
        """Empty, or who says (lately) that another process has our node id."""
        told_since = self.loop.time() - self.settings.silence_s  # a dial comes more often than that
        by = sorted(link.peer for link in self._links.values() if link.displaced_at > told_since)
        if not by:
            return ""
        return (
            f"{', '.join(by)} refused this process: another one runs (or did a moment ago) as node "
            f"{self.settings.node_id}, with a data folder of its own. What to do: stop the wrong one; each needs a "
            f"node_id of its own"
        )

    def _displaced_by(self, connection: _Connection) -> None:
        link, now = connection.link, self.loop.time()
        assert link is not None
        if now - link.displaced_at > self.settings.silence_s:
            link.displaced_since = now
        link.displaced_at = now
        self._warn("displaced", link.peer, self.displaced())
        self._count_refused("displaced")
        self.drop(connection, "displaced", reset=False)
        if not self._ever_accepted and now - link.displaced_since >= self.settings.displaced_after_s:
            self.on_displaced(self.displaced())

    # -- the end of a connection ---------------------------------------------------------------------------------------

    def drop(self, connection: _Connection, reason: str, *, reset: bool, gently: bool = False) -> None:
        """End a connection. If it was in use, the node hears of it soon: not now, because this may be its own call."""
        link = connection.link
        if connection.dead:
            return
        connection.kill(gently=gently)
        self._strangers.pop(connection, None)
        if link is None or link.current is not connection:
            return
        self.counters.dropped[reason] = self.counters.dropped.get(reason, 0) + 1
        link.current = None
        link.idle.set()
        if self.loop.time() - connection.in_use_since >= self.settings.stable_s:
            link.failures = 0
        if not self._stopped:
            _log.info("connection to %s ended: %s", link.peer, reason)
            link.loss = reset
            self.loop.call_soon(self._announce_loss, link)

    def _announce_loss(self, link: _Link) -> None:
        reset, link.loss = link.loss, None
        if reset is not None and not self._stopped:
            assert self._events is not None
            self._events.peer_disconnected(link.peer, reset=reset)

    def _look_after(self, due_at: float) -> None:
        """Show every peer that we live, and give up those that do not show it."""
        settings, now = self.settings, self.loop.time()
        stalled = now - due_at > settings.silence_s / 2  # we slept, not they: what they sent is still to be read
        for link in self._links.values():
            connection = link.current
            if connection is None:
                continue
            if stalled:
                connection.received_at = now
            elif now - connection.received_at > settings.silence_s:
                self._warn(
                    "silent", link.peer, f"{link.peer} was silent for {settings.silence_s} s; connection dropped"
                )
                self.drop(connection, "silent", reset=False)
                continue
            if now - connection.sent_at >= settings.sign_of_life_s and not connection.queue:
                connection.show_life()
        interval_s = settings.sign_of_life_s / 2
        self._watch = self.loop.call_later(interval_s, self._look_after, now + interval_s)

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def refuse(self, connection: _Connection, reason: str, words: str, *, gently: bool = False) -> None:
        """End a connection that broke the rules, with a warning. Nothing it sent was delivered, or will be."""
        if connection.dead:
            return
        self._count_refused(reason)
        who = connection.link.peer if connection.link is not None else "a stranger"
        if reason != "ended":  # a probe of the port, or a dial that came too late: everyday
            self._warn(reason, who, f"refused a connection with {who}: {words}")
        task = self._strangers.pop(connection, None)
        if task is not None and connection.transport is None and task is not asyncio.current_task(self.loop):
            task.cancel()  # still in the TLS handshake
        self.drop(connection, "refused", reset=False, gently=gently)

    def _count_refused(self, reason: str) -> None:
        self.counters.refused[reason] = self.counters.refused.get(reason, 0) + 1

    def _warn(self, reason: str, who: str, words: str) -> None:
        """At most one line for each reason and peer in ten seconds: what others send must not fill our disk."""
        now = self.loop.time()
        logged_at, withheld = self._logged_at.get((reason, who), (now - _LOG_INTERVAL_S, 0))
        if now - logged_at < _LOG_INTERVAL_S:
            self._logged_at[reason, who] = (logged_at, withheld + 1)
            return
        self._logged_at[reason, who] = (now, 0)
        _log.warning("%s%s", words, f" ({withheld} more like this)" if withheld else "")


def _is_refusal(frame: bytes) -> bool:
    try:
        return isinstance(_decode(frame), _Refused)
    except msgspec.DecodeError:
        return False


@contextlib.contextmanager
def _given_away(sock: socket.socket) -> Iterator[None]:
    """While the event loop takes ``sock`` over. uvloop closes the descriptor of a connection that breaks in that very
    moment and does not tell the object, which would close it once more: by then it may be the log's."""
    inode = os.fstat(sock.fileno()).st_ino
    try:
        yield
    finally:
        if sock.fileno() != -1 and _inode(sock.fileno()) != inode:
            sock.detach()


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _tune(sock: socket.socket, settings: TransportSettings) -> None:
    """No delay for small frames, and the kernel's own watch over a silent other side."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", max(1, int(settings.silence_s))),
        ("TCP_USER_TIMEOUT", int(settings.silence_s * 1_000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
