"""What a leader knows of one follower, and how much it may send to it: flow control, free of any I/O.

* ``match`` only grows within a term. ``next_index`` runs ahead of it (pipelining) and never goes back at an acceptance.
* A rejection sends ``next_index`` back once. What was sent before that moment is of the past: rejections of rounds up
  to then are ignored, so a burst of them cannot send it back again and again (hole N1).
* After a new connection or a rejection one message probes; the pipeline opens at its acceptance.
* A follower that needs what the log no longer holds gets the snapshot in a window of chunks; each acknowledgement says
  how much has arrived, so a transfer goes on where it stopped, also after a reconnection.
"""

from __future__ import annotations

from collections import deque

from sidecar.consensus.messages import Standing
from sidecar.consensus.ports import SnapshotMeta

MESSAGES_IN_FLIGHT_MAX = 64
CHUNKS_IN_FLIGHT_MAX = 4
FIRST_NEXT_INDEX = 2  # the entry at index 1 is the same in every log


class Transfer:
    """One snapshot on its way to one follower."""

    def __init__(self, meta: SnapshotMeta, now_s: float) -> None:
        self.meta = meta
        self.received = 0
        self.sent = 0
        self.probing = True  # one chunk, to hear how much is there already
        self.probed = False
        self.progress_s = now_s

    def restart(self, now_s: float) -> None:
        self.sent, self.probing, self.probed, self.progress_s = 0, True, False, now_s

    def next_chunk(self, chunk_bytes: int) -> tuple[int, int] | None:
        """Offset and size of the next chunk to send; None when the window is full."""
        if self.probing:
            if self.probed:
                return None
            self.probed = True
            self.sent = min(chunk_bytes, self.meta.size_bytes)
            return 0, self.sent
        if self.sent >= self.meta.size_bytes or self.sent - self.received >= CHUNKS_IN_FLIGHT_MAX * chunk_bytes:
            return None
        offset, size = self.sent, min(chunk_bytes, self.meta.size_bytes - self.sent)
        self.sent += size
        return offset, size

    def acknowledged(self, offset: int, now_s: float) -> None:
        if offset > self.meta.size_bytes:
            return
        if self.probing or offset < self.received:
            self.sent = offset
        if self.probing or offset != self.received:
            self.progress_s = now_s
        self.probing = False
        self.received = offset
        self.sent = max(self.sent, offset)


class Admission:
    """How far the leader is in letting a node with an empty store count again. See the rules in raft.py."""

    def __init__(self, confirm_round: int) -> None:
        self.confirm_round = confirm_round
        self.index: int | None = None  # set once the round is confirmed


class Progress:
    """One follower, in one term of the leader."""

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        self.match = 0
        self.commit_sent = 0
        self.standing: Standing | None = None  # by its own answers in this term; None before the first
        self.echoed_round = 0
        self.answered_s: float | None = None
        self.offset_ms: int | None = None
        self.probing = True
        self.transfer: Transfer | None = None
        self.admission: Admission | None = None
        self._in_flight: deque[tuple[int, int]] = deque()
        self._bytes_in_flight = 0
        self._rewound_round = 0

    def connected(self, now_s: float) -> None:
        """What was in flight died with the old connection."""
        self._forget_in_flight()
        self.next_index = max(self.match + 1, FIRST_NEXT_INDEX) if self.match else self.next_index
        self.probing = True
        if self.transfer is not None:
            self.transfer.restart(now_s)

    def forgot(self) -> None:
        """The follower lost its store: nothing it said before holds."""
        self.match = 0
        self.admission = None

    def has_room(self, bytes_max: int) -> bool:
        if self.probing:
            return not self._in_flight
        return len(self._in_flight) < MESSAGES_IN_FLIGHT_MAX and self._bytes_in_flight < bytes_max

    def sent(self, round_number: int, count: int, size_bytes: int) -> None:
        self.next_index += count
        self._in_flight.append((round_number, size_bytes))
        self._bytes_in_flight += size_bytes

    def echoed(self, round_number: int) -> None:
        self.echoed_round = max(self.echoed_round, round_number)

    def accepted(self, round_number: int, match: int) -> None:
        while self._in_flight and self._in_flight[0][0] <= round_number:
            self._bytes_in_flight -= self._in_flight.popleft()[1]
        self.match = max(self.match, match)
        self.next_index = max(self.next_index, match + 1)
        if round_number > self._rewound_round:
            self.probing = False

    def rejected(self, round_number: int, match: int, retry_from: int, current_round: int) -> None:
        self.match = max(self.match, match)
        if round_number <= self._rewound_round:
            return
        self._rewound_round = current_round
        self._forget_in_flight()
        self.next_index = max(self.match + 1, min(retry_from, self.next_index), FIRST_NEXT_INDEX)
        self.probing = True

    def _forget_in_flight(self) -> None:
        self._in_flight.clear()
        self._bytes_in_flight = 0
