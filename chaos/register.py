"""A small replicated application for the consensus profiles: commands are numbers, applied once, in one order.

The state is the list of commands in the order of the log and a rolling digest of it. Like the product's proposer it
passes commands on to the leader, sends them again after a change of leader, and resolves a caller at the apply of the
node that the caller talks to. A repeat of a command has no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from sidecar.consensus.ports import Role


class Captured:
    def __init__(self, applied: int, digest: bytes, order: list[int], places: list[int]) -> None:
        self._content = (applied, digest, order, places)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._content)


class RegisterApplication:
    """The port ``Application``. The hooks tell its process what happens; the process tells the checkers."""

    def __init__(self, entry_bytes_max: int, observe: Callable[[int, bytes, str], None]) -> None:
        self._entry_bytes_max = entry_bytes_max
        self._observe = observe
        self.forward: Callable[[bytes], bool] = lambda _: False
        self.leading: Callable[[], bool] = lambda: False
        self.on_role: Callable[[Role, int, str | None], None] = lambda *_: None
        self.on_restore: Callable[[int], None] = lambda _: None
        self.places: dict[int, int] = {}  # command -> index of its first entry; in the order of the log
        self.applied = 0
        self._rolling = b""
        self._waiting: dict[int, tuple[bytes, Callable[[int], None]]] = {}
        self._queue: dict[int, bytes] = {}  # to be appended by this node when it leads
        self._settled: list[tuple[Callable[[int], None], int]] = []
        self._leader: str | None = None

    # ---- the caller's side

    def propose(self, command: int, padding: bytes, done: Callable[[int], None]) -> None:
        """``done(index)`` once the command is applied here. No answer otherwise: the caller has its own timeout."""
        item = msgspec.msgpack.encode((command, padding))
        self._waiting[command] = (item, done)
        self._pass_on(command, item)

    def give_up(self, command: int) -> None:
        self._waiting.pop(command, None)

    def _pass_on(self, command: int, item: bytes) -> None:
        if self.leading():
            self._queue[command] = item
        else:
            self.forward(item)

    # ---- the port

    def next_entry(self) -> bytes | None:
        batch: list[bytes] = []
        size = 0
        for command, item in list(self._queue.items()):
            if batch and size + len(item) > self._entry_bytes_max:
                break
            batch.append(item)
            size += len(item) + 5
            del self._queue[command]
        return msgspec.msgpack.encode(batch) if batch else None

    def forwarded(self, peer: str, payload: bytes) -> None:
        command, _ = msgspec.msgpack.decode(payload, type=tuple[int, bytes])
        if command not in self.places:
            self._queue[command] = payload

    def received(self, payload: bytes) -> None:
        return

    def apply(self, index: int, payload: bytes) -> None:
        for item in msgspec.msgpack.decode(payload, type=list[bytes]):
            command, _ = msgspec.msgpack.decode(item, type=tuple[int, bytes])
            if command not in self.places:
                self.places[command] = index
                self._rolling = hashlib.blake2b(self._rolling + item, digest_size=8).digest()
            self._resolve(command)
        self.applied = index
        self._observe(index, payload, self.digest())

    def _resolve(self, command: int) -> None:
        waiting = self._waiting.pop(command, None)
        if waiting is not None:
            self._settled.append((waiting[1], self.places[command]))

    def settle(self) -> None:
        settled, self._settled = self._settled, []
        for done, index in settled:
            done(index)

    def role_changed(self, role: Role, term: int, leader: str | None) -> None:
        self.on_role(role, term, leader)
        if role is not Role.LEADER:
            self._queue.clear()
        if leader is not None and leader != self._leader:
            for command, (item, _) in list(self._waiting.items()):
                self._pass_on(command, item)
        self._leader = leader

    def capture(self) -> Captured:
        return Captured(self.applied, self._rolling, list(self.places), list(self.places.values()))

    def restore(self, payload: bytes) -> None:
        self.applied, self._rolling, order, places = msgspec.msgpack.decode(
            payload, type=tuple[int, bytes, list[int], list[int]]
        )
        self.places = dict(zip(order, places, strict=True))
        for command in [command for command in self._waiting if command in self.places]:
            self._resolve(command)
        self.on_restore(self.applied)

    def digest(self) -> str:
        return self._rolling.hex()
