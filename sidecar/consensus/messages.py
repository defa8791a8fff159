"""What the nodes of one cluster say to each other: frozen structs, one tag number each, never reused.

Every message travels in an ``Envelope`` with the sender's term. Encoded as msgpack arrays; nothing here is ever
unpickled. ``decode`` answers with a message that is valid in itself (bounds, contiguous terms, known kinds of
entries) or raises ``MalformedFrame``: a handler never meets a half-valid message.

Rounds: a leader numbers its passes over its followers. Whatever answers a message echoes the round of what it
answers. One number serves confirmed reads, check-quorum, flow control and the measurement of clock offsets.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Annotated

import msgspec

VERSION = 1
ENVELOPE_BYTES_MAX = 64 << 10  # what a frame may need on top of its entries or chunk
TYPE_PAYLOAD = 0  # first byte of a log entry: the rest is for the application
TYPE_NO_OP = 1  # a leader's first entry of its term; nothing follows

NO_OP = bytes([TYPE_NO_OP])

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class MalformedFrame(ValueError):
    """A frame that no correct node of this version sends. It is dropped, counted and logged; nothing else happens."""


@unique
class Standing(IntEnum):
    """What an answering node is in its cluster. Only a voter's answers count."""

    VOTER = 1
    EMPTY = 2  # its store was empty; promises of its past may still be in use by others
    ASKING = 3  # empty, but nothing it may have promised can be in use any more: admit it when it has caught up


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry without its index: it follows from its place in the message."""

    term: Count
    command: bytes


class Append(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Entries after ``previous_index``; without entries, a heartbeat."""

    previous_index: Count
    previous_term: Count
    commit_index: Count
    entries: tuple[LogEntry, ...] = ()


class Appended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to Append. ``match`` is durable on the sender and equal to the leader's log, also in a rejection."""

    accepted: bool
    match: Count
    retry_from: Count  # rejected only: the index from which to send again
    standing: Standing


class PreVoteRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Would you vote for me in ``candidate_term``? Promises nothing and raises no term."""

    candidate_term: Count
    last_index: Count
    last_term: Count


class PreVote(msgspec.Struct, frozen=True, array_like=True, tag=4):
    candidate_term: Count


class VoteRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    last_index: Count
    last_term: Count
    transfer: bool  # the leader asked for this election: do not stick to it


class Vote(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Granted, in the term of the envelope. A refusal is silence, or StaleTerm."""


class TimeoutNow(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The leader hands over: stand for election at once."""


class StaleTerm(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """What you sent is of a past term; the envelope has the present one."""


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag=9):
    index: Count
    term: Count
    previous_term: Count
    size_bytes: Count
    checksum: Checksum
    offset: Count
    data: bytes


class SnapshotReceived(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """``offset`` bytes of that snapshot are here; send what follows."""

    index: Count
    checksum: Checksum
    offset: Count
    standing: Standing


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag=11):
    number: Count


class ReadReply(msgspec.Struct, frozen=True, array_like=True, tag=12):
    number: Count
    index: Count  # apply this far, then read; 0: cannot be known


class Forward(msgspec.Struct, frozen=True, array_like=True, tag=13):
    payload: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """What is in my log. ``answer``: please say the same of yours. Used only to found a cluster."""

    last_index: Count
    answer: bool


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Leader to an ASKING node that holds everything up to ``index``: be a voter."""

    index: Count


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Follower to leader: hand over to this node, or to the fittest."""

    number: Count
    to: str | None


class HandOverRefused(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """It did not come about. (That it did shows: there is another leader.)"""

    number: Count
    reason: str


Body = (
    Append
    | Appended
    | PreVoteRequest
    | PreVote
    | VoteRequest
    | Vote
    | TimeoutNow
    | StaleTerm
    | SnapshotChunk
    | SnapshotReceived
    | ReadRequest
    | ReadReply
    | Forward
    | Hello
    | Admit
    | HandOver
    | HandOverRefused
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: Count
    term: Count  # the sender's, when it decided to send
    round: Count  # the leader's number of this pass, or the number that is answered; 0 for neither
    wall_ms: int  # the sender's wall clock when the frame left
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(term: int, round_number: int, wall_ms: int, body: Body) -> bytes:
    return _encoder.encode(Envelope(VERSION, term, round_number, wall_ms, body))


def decode(frame: bytes, bytes_max: int) -> Envelope:
    """The message in ``frame``, which is at most ``bytes_max`` long. Raises MalformedFrame."""
    if len(frame) > bytes_max:
        raise MalformedFrame(f"frame of {len(frame)} bytes, at most {bytes_max} are allowed")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"not a message: {error}") from error
    if envelope.version != VERSION:
        raise MalformedFrame(f"message of version {envelope.version}, this node speaks version {VERSION}")
    if isinstance(envelope.body, Append):
        _check_append(envelope.body, envelope.term)
    elif isinstance(envelope.body, SnapshotChunk):
        _check_chunk(envelope.body, envelope.term)
    return envelope


def check_command(command: bytes) -> None:
    """Only payloads and no-ops are ever in the log: pysyncobj's other kinds are pickles. Raises MalformedFrame."""
    if not command or (command[0] != TYPE_PAYLOAD and command != NO_OP):
        raise MalformedFrame(f"log entry of unknown kind {command[:1].hex() or 'none'}")


def _check_append(append: Append, term: int) -> None:
    if append.previous_index < 1:
        raise MalformedFrame("entries before the first of the log")
    at_least = append.previous_term
    for entry in append.entries:
        if not at_least <= entry.term <= term:
            raise MalformedFrame(f"term {entry.term} of an entry after term {at_least}, in a message of term {term}")
        at_least = entry.term
        check_command(entry.command)


def _check_chunk(chunk: SnapshotChunk, term: int) -> None:
    if chunk.index < 2 or not chunk.previous_term <= chunk.term <= term:
        raise MalformedFrame(f"snapshot at index {chunk.index}, term {chunk.term}, in a message of term {term}")
    if chunk.offset + len(chunk.data) > chunk.size_bytes:
        raise MalformedFrame(f"chunk ends at {chunk.offset + len(chunk.data)}, its snapshot at {chunk.size_bytes}")
    if not chunk.data and chunk.size_bytes:
        raise MalformedFrame("empty chunk")
