"""Ports for the cluster, chosen outside the range the kernel hands out to outgoing connections.

A node that is killed must find its port free when it comes back. A port from the ephemeral range could meanwhile
belong to any connection on the machine.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

FIRST_PORT, LAST_PORT = 10_240, 32_767
TRIES_MAX = 200
# Ports that this process has given out lately: nobody may listen on them yet, but somebody will.
_given: deque[int] = deque(maxlen=2_000)


def bind() -> socket.socket:
    """A socket bound to a free port on loopback, not yet listening."""
    for _ in range(TRIES_MAX):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", _candidate()))
        except OSError:
            sock.close()
        else:
            return sock
    raise RuntimeError(f"no free port found between {FIRST_PORT} and {LAST_PORT} in {TRIES_MAX} tries")


def free_ports(count: int) -> list[int]:
    """``count`` different ports nobody listens on."""
    sockets = [bind() for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    _given.extend(ports)
    for sock in sockets:
        sock.close()
    return ports


def _candidate() -> int:
    first, last = _ephemeral_range()
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        if not first <= port <= last and port not in _given:
            return port


def _ephemeral_range() -> tuple[int, int]:
    """What the kernel uses for outgoing connections; only Linux says so in a file."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 49_152, 65_535
    first, last = (int(word) for word in text.split())
    # Where that range covers everything there is no port to prefer.
    return (first, last) if first > FIRST_PORT or last < LAST_PORT else (0, 0)
