"""The state as bytes: format 1, msgspec msgpack.

Tables are written in their own order, which is part of the state: it is the same on every node, because it is the order
in which the log changed them. So the bytes, and the digest over them, are equal wherever the same entries were applied,
with or without a snapshot on the way. Derived indexes are not written.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import msgspec

from sidecar.core.commands import Limits, Stamp
from sidecar.core.dedup import Record
from sidecar.core.events import Event
from sidecar.core.governor import Started
from sidecar.core.jobs import Job, JobRevision
from sidecar.core.leases import Lease, WaiterRow
from sidecar.core.occurrences import Occurrence
from sidecar.core.requests import Answer, StreamKey, UnaryKey
from sidecar.core.runs import Run, Worker
from sidecar.core.sessions import Session
from sidecar.core.switches import Switch

FORMAT = 1
# A table is encoded in parts, so that a thread which encodes a large one lets others run in between.
_PART_ROWS = 1_000
_DIGEST_BYTES = 32

Row = TypeVar("Row")


class SnapshotError(ValueError):
    """The bytes are no snapshot that this version can read. Says what to do."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is replicated. The rows are immutable; the lists are copies of the machine's tables."""

    limits: Limits
    stamp: Stamp
    revision: int
    last_token: int
    sessions: list[Session]
    leases: list[Lease]
    waiters: list[WaiterRow]
    records: list[Record]
    unary: list[tuple[UnaryKey, Answer]]
    stream: list[tuple[StreamKey, Answer]]
    acknowledged: list[tuple[str, int]]
    events: list[Event]
    switches: list[Switch]
    kill_epoch: int
    floors: list[tuple[str, int]]
    jobs: list[Job]
    revisions: list[JobRevision]
    occurrences: list[Occurrence]
    runs: list[Run]
    workers: list[Worker]
    started: list[Started]
    tzdata: str


class _Head(msgspec.Struct, frozen=True, array_like=True):
    limits: Limits
    stamp: Stamp
    revision: int
    last_token: int
    kill_epoch: int = 0
    floors: list[tuple[str, int]] = []
    started: list[Started] = []
    tzdata: str = ""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Fields are only added, at the end, with a default; what cannot be read so gets another format number."""

    format: int
    head: bytes
    sessions: list[bytes]
    leases: list[bytes]
    waiters: list[bytes]
    records: list[bytes]
    unary: list[bytes]
    stream: list[bytes]
    acknowledged: list[bytes]
    events: list[bytes]
    switches: list[bytes] = []
    jobs: list[bytes] = []
    revisions: list[bytes] = []
    occurrences: list[bytes] = []
    runs: list[bytes] = []
    workers: list[bytes] = []


class _Format(msgspec.Struct, frozen=True, array_like=True):
    """The first field alone: readable whatever follows."""

    format: int


_ENCODER = msgspec.msgpack.Encoder()


class Captured:
    """An immutable picture of the state, cheap to take; ``encode`` and ``digest`` may run on another thread."""

    def __init__(self, state: State) -> None:
        self._state = state

    def encode(self) -> bytes:
        state = self._state
        head = _Head(
            state.limits,
            state.stamp,
            state.revision,
            state.last_token,
            state.kill_epoch,
            state.floors,
            state.started,
            state.tzdata,
        )
        return _ENCODER.encode(
            _Wire(
                format=FORMAT,
                head=_ENCODER.encode(head),
                sessions=_parts(state.sessions),
                leases=_parts(state.leases),
                waiters=_parts(state.waiters),
                records=_parts(state.records),
                unary=_parts(state.unary),
                stream=_parts(state.stream),
                acknowledged=_parts(state.acknowledged),
                events=_parts(state.events),
                switches=_parts(state.switches),
                jobs=_parts(state.jobs),
                revisions=_parts(state.revisions),
                occurrences=_parts(state.occurrences),
                runs=_parts(state.runs),
                workers=_parts(state.workers),
            )
        )

    def digest(self) -> str:
        return blake2b(self.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def decode(payload: bytes) -> State:
    """Raises SnapshotError."""
    try:
        found = msgspec.msgpack.decode(payload, type=_Format).format
        if found != FORMAT:
            raise SnapshotError(
                f"the snapshot has format {found}, this version reads {FORMAT}: run the version that wrote it"
            )
        wire = msgspec.msgpack.decode(payload, type=_Wire)
        head = msgspec.msgpack.decode(wire.head, type=_Head)
        return State(
            limits=head.limits,
            stamp=head.stamp,
            revision=head.revision,
            last_token=head.last_token,
            sessions=_rows(wire.sessions, list[Session]),
            leases=_rows(wire.leases, list[Lease]),
            waiters=_rows(wire.waiters, list[WaiterRow]),
            records=_rows(wire.records, list[Record]),
            unary=_rows(wire.unary, list[tuple[UnaryKey, Answer]]),
            stream=_rows(wire.stream, list[tuple[StreamKey, Answer]]),
            acknowledged=_rows(wire.acknowledged, list[tuple[str, int]]),
            events=_rows(wire.events, list[Event]),
            switches=_rows(wire.switches, list[Switch]),
            kill_epoch=head.kill_epoch,
            floors=head.floors,
            jobs=_rows(wire.jobs, list[Job]),
            revisions=_rows(wire.revisions, list[JobRevision]),
            occurrences=_rows(wire.occurrences, list[Occurrence]),
            runs=_rows(wire.runs, list[Run]),
            workers=_rows(wire.workers, list[Worker]),
            started=head.started,
            tzdata=head.tzdata,
        )
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"not a snapshot of this state machine, or a damaged one: {error}") from error


def _parts(rows: Iterable[object]) -> list[bytes]:
    left = iter(rows)
    return [_ENCODER.encode(part) for part in iter(lambda: list(islice(left, _PART_ROWS)), [])]


def _rows(parts: list[bytes], kind: type[list[Row]]) -> list[Row]:
    decoder = msgspec.msgpack.Decoder(kind)
    return [row for part in parts for row in decoder.decode(part)]
