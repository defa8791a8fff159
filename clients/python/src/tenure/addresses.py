"""Where the sidecar is, how to reach it, and what to say when it is not there."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tenure.errors import ConnectError

__all__ = ["DEFAULT_ADDRESS", "Address", "ProbeResult", "advice", "open_channel", "parse_addresses", "probe"]

DEFAULT_ADDRESS = "unix:/run/tenure/tenure.sock"
ADDRESS_VARIABLE = "TENURE_ADDRESS"

# The sidecar answers pings every 10 s or slower; a dead peer is noticed within 30 s.
KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

CHANNEL_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Repeats are ours: only with the same identity, only within the caller's time.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a connection may take to be established: a sidecar that is busy for a moment is there all the same.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Every channel is its own connection, so that a new stream does not ride on a connection that is already dead.
    ("grpc.use_local_subchannel_pool", 1),
    # The sidecar is beside us; a proxy from the environment is never wanted.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class Address:
    """``unix:/path`` or ``host:port``."""

    target: str

    @property
    def path(self) -> str | None:
        """The socket's file, or None for TCP."""
        return self.target.removeprefix("unix:") if self.target.startswith("unix:") else None

    @property
    def host(self) -> str:
        return self.target.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    @property
    def local(self) -> bool:
        """Whether plain text stays on this machine."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.target


def parse_addresses(address: str | Sequence[str] | None) -> tuple[Address, ...]:
    """From the argument, else ``TENURE_ADDRESS``, else the default socket. Raises ValueError for a malformed one."""
    if address is None:
        address = os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    parts = address.split(",") if isinstance(address, str) else list(address)
    found = tuple(_parse(part.strip()) for part in parts if part.strip())
    if not found:
        raise ValueError(f"no address in {address!r}; say unix:/path/of/the.sock or host:port")
    return found


def _parse(text: str) -> Address:
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(
                f"address {text!r}: the path of a unix socket must be absolute, as in unix:/run/tenure/tenure.sock"
            )
        return Address(f"unix:{path}")
    if text.startswith("/"):
        return Address(f"unix:{text}")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address {text!r}: say unix:/path/of/the.sock or host:port")
    return Address(text)


def open_channel(address: Address, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is not None and address.path is None:
        return grpc.aio.secure_channel(address.target, credentials, options=CHANNEL_OPTIONS)
    options = CHANNEL_OPTIONS
    if address.path is not None:
        options = (*CHANNEL_OPTIONS, ("grpc.default_authority", "localhost"))
    return grpc.aio.insecure_channel(address.target, options=options)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether something listens at an address, and what it means when not."""

    listening: bool
    # The process that listened there has ended (as opposed to: we cannot tell).
    gone: bool
    problem: str = ""


async def probe(address: Address, timeout: float) -> ProbeResult:
    """Tries to connect, and says what that shows. Never raises for a network's reasons."""
    try:
        async with asyncio.timeout(timeout):
            await _touch(address)
    except TimeoutError:
        return ProbeResult(False, False, f"{address}: no answer to a connection attempt within {timeout:g} s")
    except OSError as error:
        gone = error.errno in (errno.ECONNREFUSED, errno.ENOENT)
        return ProbeResult(False, gone, advice(address, error))
    return ProbeResult(True, False)


async def _touch(address: Address) -> None:
    loop = asyncio.get_running_loop()
    if address.path is not None:
        # Connecting to a unix socket never waits for the peer: it is accepted into the backlog, refused, or the
        # backlog is full.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(address.path)
            except BlockingIOError:
                return
        return
    infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    last: OSError | None = None
    for family, kind, protocol, _, where in infos:
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, where)
            except OSError as error:
                last = error
            else:
                return
    raise last or OSError(errno.EHOSTUNREACH, f"{address.host} has no address")


def advice(address: Address, error: OSError) -> str:
    """What is wrong with an address, and what to do about it."""
    path = address.path
    if path is None:
        if error.errno == errno.ECONNREFUSED:
            return f"{address}: nothing listens there; is the sidecar running, with TENURE_GRPC_LISTEN set?"
        return f"{address}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        hint = (
            "" if Path(path).parent.is_dir() else f" (there is no folder {Path(path).parent}: is the volume mounted?)"
        )
        return (
            f"{address}: there is no such socket{hint}; start the sidecar (tenure serve), or say where it listens "
            f"with {ADDRESS_VARIABLE} or connect(address)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{address}: not allowed to use this socket; join its group (TENURE_SOCKET_GROUP of the sidecar)"
    if error.errno == errno.ECONNREFUSED:
        return f"{address}: the socket is there but nobody listens; the sidecar has stopped, start it again"
    return f"{address}: {error.strerror or error}"


def require_protected(
    addresses: Sequence[Address], credentials: grpc.ChannelCredentials | None, insecure: bool
) -> None:
    """Plain text over a network only when it is asked for. Raises ConnectError otherwise."""
    for address in addresses:
        if not address.local and credentials is None and not insecure:
            raise ConnectError(
                f"{address} is not on this machine: pass credentials=grpc.ssl_channel_credentials(...), "
                "or insecure=True to send everything in plain text",
                reason="PLAINTEXT_REFUSED",
            )
