"""The wire format of the log and of forwarded proposals, and the window that applies each item once.

One Raft entry is one ``Batch``; tags and field orders are part of the log's contract: never reused, only added to.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.core.commands import Request, Stamp

# How far an origin's sequences may be ahead of its oldest one that was never applied. Larger than what one node
# has in flight; a proposal that falls out of the window is proposed again under a new sequence.
WINDOW_SEQUENCES = 16_384
# More node ids than a cluster ever has at a time: ids come and go over its life.
WINDOW_NODES_MAX = 64
# Encoded bytes of a batch besides its items: tag, stamp, array headers.
BATCH_OVERHEAD_BYTES = 64


class MalformedBatch(Exception):
    """A committed entry is not a batch that this version understands: an invariant is broken, the node must stop."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One request. ``origin`` ("<node id>/<incarnation>") and ``sequence`` name the waiter; an empty origin: nobody
    waits, and it is not deduplicated."""

    origin: str
    sequence: int
    request: Request


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    stamp: Stamp
    items: list[Item]


class _RawBatch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The same bytes as ``Batch``, put together from items that are encoded already."""

    stamp: Stamp
    items: list[msgspec.Raw]


class _StampOnly(msgspec.Struct, frozen=True, array_like=True, tag=1):
    stamp: Stamp


class _Forwarded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A follower's message to the leader."""

    items: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_stamp_decoder = msgspec.msgpack.Decoder(_StampOnly)
_forwarded_decoder = msgspec.msgpack.Decoder(_Forwarded)
_item_decoder = msgspec.msgpack.Decoder(Item)


def encode_item(item: Item) -> bytes:
    return _encoder.encode(item)


def encode_batch(stamp: Stamp, items: Sequence[bytes]) -> bytes:
    return _encoder.encode(_RawBatch(stamp, [msgspec.Raw(item) for item in items]))


def decode_batch(payload: bytes) -> Batch:
    try:
        return _batch_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedBatch(f"a committed entry of {len(payload)} bytes is not a batch: {error}") from error


def decode_stamp(payload: bytes) -> Stamp:
    """Of a batch, without decoding its items."""
    try:
        return _stamp_decoder.decode(payload).stamp
    except msgspec.MsgspecError as error:
        raise MalformedBatch(f"an entry of {len(payload)} bytes is not a batch: {error}") from error


def encode_forwarded(items: Sequence[bytes]) -> bytes:
    return _encoder.encode(_Forwarded([msgspec.Raw(item) for item in items]))


def decode_forwarded(payload: bytes) -> list[tuple[Item, bytes]]:
    """Items with their encodings, all checked: what enters the log must be applicable. Raises msgspec.MsgspecError."""
    raws = _forwarded_decoder.decode(payload).items
    return [(_item_decoder.decode(raw), bytes(raw)) for raw in raws]


# ---- each item once ------------------------------------------------------------------------------------------------


class NodeWindow(msgspec.Struct, frozen=True, array_like=True):
    """Of one node's current incarnation: every sequence up to ``floor`` counts as applied; bit i of ``above``
    (little endian) stands for sequence floor + 1 + i."""

    node: str
    incarnation: int
    floor: int
    above: bytes


class _Applied:
    __slots__ = ("above", "floor", "incarnation")

    def __init__(self, incarnation: int, floor: int = 0, above: int = 0) -> None:
        self.incarnation = incarnation
        self.floor = floor
        self.above = above


class AppliedWindow:
    """Which items of which origin were applied. Replicated state: the same calls give the same window on every node."""

    def __init__(self) -> None:
        self._by_origin: dict[str, _Applied] = {}
        self._origins: dict[str, str] = {}  # node id -> its current origin, in order of appearance

    def take(self, origin: str, sequence: int) -> bool:
        """Whether the item is new, and from now on it is not. An item of an earlier life of its node is never new:
        nobody waits for it."""
        applied = self._by_origin.get(origin) or self._admit(origin)
        if applied is None or sequence <= applied.floor:
            return False
        if sequence == applied.floor + 1 and not applied.above:
            applied.floor = sequence
            return True
        return self._mark(applied, sequence)

    def holds(self, origin: str, sequence: int) -> bool:
        """Whether ``take`` would refuse it. Changes nothing."""
        applied = self._by_origin.get(origin)
        if applied is None:
            return False
        return sequence <= applied.floor or bool(applied.above >> (sequence - applied.floor - 1) & 1)

    def incarnation(self, node: str) -> int:
        """The latest life of that node of which an item was applied; 0 for none."""
        current = self._origins.get(node)
        return 0 if current is None else self._by_origin[current].incarnation

    def _mark(self, applied: _Applied, sequence: int) -> bool:
        offset = sequence - applied.floor - 1
        if offset >= WINDOW_SEQUENCES:
            self._raise_floor(applied, offset - WINDOW_SEQUENCES + 1)
            offset = WINDOW_SEQUENCES - 1
        bit = 1 << offset
        if applied.above & bit:
            return False
        applied.above |= bit
        # Sequences that have become contiguous with the floor move below it.
        contiguous = (~applied.above & (applied.above + 1)).bit_length() - 1
        self._raise_floor(applied, contiguous)
        return True

    @staticmethod
    def _raise_floor(applied: _Applied, by: int) -> None:
        applied.floor += by
        applied.above >>= by

    def _admit(self, origin: str) -> _Applied | None:
        node, incarnation = parse_origin(origin)
        current = self._origins.get(node)
        if current is not None:
            if self._by_origin[current].incarnation >= incarnation:
                return None
            del self._by_origin[current]
            del self._origins[node]
        elif len(self._origins) >= WINDOW_NODES_MAX:
            oldest = next(iter(self._origins))
            del self._by_origin[self._origins.pop(oldest)]
        self._origins[node] = origin
        applied = self._by_origin[origin] = _Applied(incarnation)
        return applied

    def dump(self) -> list[NodeWindow]:
        """In order of appearance, which decides eviction and so is part of the state."""
        windows = []
        for node, origin in self._origins.items():
            a = self._by_origin[origin]
            above = a.above.to_bytes((a.above.bit_length() + 7) // 8, "little")
            windows.append(NodeWindow(node, a.incarnation, a.floor, above))
        return windows

    @classmethod
    def load(cls, windows: Sequence[NodeWindow]) -> AppliedWindow:
        loaded = cls()
        for w in windows:
            origin = format_origin(w.node, w.incarnation)
            loaded._origins[w.node] = origin
            loaded._by_origin[origin] = _Applied(w.incarnation, w.floor, int.from_bytes(w.above, "little"))
        return loaded


def format_origin(node: str, incarnation: int) -> str:
    return f"{node}/{incarnation}"


def parse_origin(origin: str) -> tuple[str, int]:
    node, _, incarnation = origin.rpartition("/")
    if not node or not incarnation.isascii() or not incarnation.isdigit():
        raise MalformedBatch(f"not the origin of an item: {origin!r}")
    return node, int(incarnation)
