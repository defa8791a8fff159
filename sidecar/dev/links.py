"""TCP links between the nodes that can be cut and healed without root.

Node i reaches node j only through the link i->j, so holding a link is a partition as the nodes see it:

1. A held direction delivers nothing: no byte, no end of stream, no reset. New connections are not refused, they hang.
   That is what a network that drops packets looks like; a refused connection would tell the node too much.
2. What was sent into a held direction is not lost but late, as with TCP's own retransmission, and arrives on heal
   unless the sender has given up by then.
3. A direction is named by who speaks. The link i->j carries i's words one way and j's answers the other, so a one-way
   partition of i holds i's words on the links it dialled and on those it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from sidecar.dev.ports import bind

CHUNK_BYTES = 65_536
DIAL_TIMEOUT_S = 2.0
# Closing with a zero linger time sends a reset, which is what the peer of a killed process sees.
RESET = struct.pack("ii", 1, 0)


class Gate:
    """Open, or holding everything that wants to pass."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def passing(self) -> None:
        await self._open.wait()


class Link:
    """What ``source`` dials to reach ``target``."""

    def __init__(self, source: str, target: str, target_port: int) -> None:
        self.source, self.target = source, target
        self.words = {source: Gate(), target: Gate()}  # by who speaks
        self._target_port = target_port
        self._socket = bind()
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, sock=self._socket)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from accept to the end of either side."""
        ends = [writer]
        try:
            for gate in self.words.values():
                await gate.passing()
            dial = asyncio.open_connection("127.0.0.1", self._target_port)
            far_reader, far_writer = await asyncio.wait_for(dial, DIAL_TIMEOUT_S)
            ends.append(far_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer, self.words[self.source]))
                pumps.create_task(self._pump(far_reader, writer, self.words[self.target]))
        except* (OSError, EOFError):
            pass  # One side has ended, or cannot be reached; both ends are told below.
        finally:
            for end in ends:
                reset(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate) -> None:
        """Carry one direction until its end, which is an ``EOFError`` so that the other direction ends too."""
        while True:
            await gate.passing()
            chunk = await reader.read(CHUNK_BYTES)
            await gate.passing()  # it may have been held while there was nothing to read
            if not chunk:
                raise EOFError
            writer.write(chunk)
            await writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, telling the peer that the connection is dead."""
    with contextlib.suppress(OSError):
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


class Mesh:
    """Every link between the nodes."""

    def __init__(self, ports: dict[str, int]) -> None:
        pairs = [(a, b) for a in ports for b in ports if a != b]
        self.links = {(a, b): Link(a, b, ports[b]) for a, b in pairs}

    async def start(self) -> None:
        for link in self.links.values():
            await link.start()

    async def stop(self) -> None:
        for link in self.links.values():
            await link.stop()

    def partition(self, node: str, *, one_way: bool = False) -> None:
        """Cut a node off. ``one_way``: nobody hears it, and it still hears everybody."""
        for ends, link in self.links.items():
            if node in ends:
                for speaker, gate in link.words.items():
                    if speaker == node or not one_way:
                        gate.hold()

    def heal(self) -> None:
        for link in self.links.values():
            for gate in link.words.values():
                gate.release()

    def cut_off(self, node: str) -> str:
        """``""``, ``one-way`` or ``full``: how a node is partitioned."""
        spoken = [link.words[node].held for ends, link in self.links.items() if node in ends]
        heard = [link.words[other].held for (a, b), link in self.links.items() if node in (a, b)
                 for other in (a, b) if other != node]  # fmt: skip
        if all(spoken):
            return "full" if all(heard) else "one-way"
        return ""
