"""What is to be sent over one stream: gathered between two writes, bounded by number and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from tenure.v1 import session_pb2

# A message takes what is there up to about this much; a reader that leaves this much lying is cut off.
MESSAGE_BYTES_MAX = 512 * 1024
ITEMS_MAX, BYTES_MAX = 4_096, 4 << 20
# What can wait does, while there is as much as this.
ROOMY_ITEMS_MAX, ROOMY_BYTES_MAX = 1_024, 1 << 20


class Outbox:
    def __init__(self) -> None:
        self._items: deque[tuple[str, Any, int]] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self.ended = False

    @property
    def empty(self) -> bool:
        return not self._items

    @property
    def overfull(self) -> bool:
        return len(self._items) > ITEMS_MAX or self._bytes > BYTES_MAX

    @property
    def roomy(self) -> bool:
        return len(self._items) < ROOMY_ITEMS_MAX and self._bytes < ROOMY_BYTES_MAX

    def attached(self, message: session_pb2.Attached) -> None:
        self._put("attached", message)

    def result(self, message: session_pb2.OperationResult) -> None:
        self._put("results", message)

    def acknowledgement(self, message: session_pb2.KeepAliveAck) -> None:
        self._put("keep_alive_acks", message)

    def push(self, message: session_pb2.Push) -> None:
        self._put("pushes", message)

    def end(self) -> None:
        """Nothing more is taken in; what is there is sent."""
        self.ended = True
        self._filled.set()

    async def filled(self) -> None:
        """Until there is something to send, or the end."""
        await self._filled.wait()
        if not self.ended:
            self._filled.clear()

    def take(self) -> session_pb2.ConnectResponse:
        """One message of what is there, in order within each kind."""
        response = session_pb2.ConnectResponse()
        size = 0
        while self._items and (not size or size + self._items[0][2] <= MESSAGE_BYTES_MAX):
            kind, message, bytes_ = self._items.popleft()
            size += bytes_
            if kind == "attached":
                response.attached.CopyFrom(message)
            else:
                getattr(response, kind).append(message)
        self._bytes -= size
        return response

    def _put(self, kind: str, message: Any) -> None:
        if not self.ended:
            size = message.ByteSize() + 8
            self._items.append((kind, message, size))
            self._bytes += size
            self._filled.set()
