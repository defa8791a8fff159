"""Those who wait: for a proposal, for a renewal, and the deadlines of both."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sidecar.core.commands import Request
from sidecar.proposer.outcomes import Done


class Waiter:
    """Somebody whose ``done`` will be called exactly once."""

    __slots__ = ("deadline_s", "done", "finished")

    def __init__(self, done: Done, deadline_s: float) -> None:
        self.done = done
        self.deadline_s = deadline_s
        self.finished = False


class Pending(Waiter):
    """A proposal of this node that has no result yet."""

    __slots__ = (
        "encoded",
        "handed",
        "maybe_applied",
        "request",
        "resend_after_s",
        "sent_s",
        "sequence",
        "submitted_s",
    )

    def __init__(self, sequence: int, request: Request, done: Done, submitted_s: float, deadline_s: float) -> None:
        super().__init__(done, deadline_s)
        self.sequence = sequence
        self.request = request
        self.encoded = b""
        self.submitted_s = submitted_s
        # Under this sequence it was given to some leader's log or to the network: it may be applied.
        self.handed = False
        # Under an earlier sequence it may have been applied (a snapshot skipped the entries in question).
        self.maybe_applied = False
        self.sent_s = 0.0
        self.resend_after_s = 0.0


class Renewal(Waiter):
    """One caller's renewal; ``carrier`` is the proposal it travels in, once its window has closed."""

    __slots__ = ("carrier", "submitted_s")

    def __init__(self, done: Done, submitted_s: float, deadline_s: float) -> None:
        super().__init__(done, deadline_s)
        self.submitted_s = submitted_s
        self.carrier: Pending | None = None


class Deadlines:
    """A heap of waiters by deadline. Finished ones are dropped late, but never outnumber the others for long."""

    SLACK = 1_000

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiter]] = []
        self._order = 0  # ties in order of arrival; waiters cannot be compared

    def add(self, waiter: Waiter) -> None:
        self._order += 1
        heapq.heappush(self._heap, (waiter.deadline_s, self._order, waiter))

    def compact(self, live: int) -> None:
        if len(self._heap) > 2 * live + self.SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[Waiter]:
        """Unfinished waiters whose deadline has passed, each taken off the heap."""
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].finished):
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.finished:
                yield waiter

    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")


# By session: the stream the renewals came over, and those who wait.
RenewalPart = dict[str, tuple[str, list[Renewal]]]


class RenewalWindow:
    """Renewals of one coalescing window, by session and the stream they came over, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], list[Renewal]] = {}
        self.count = 0
        self.closes_s = float("inf")

    def add(self, session: str, connection: str, renewal: Renewal, closes_s: float) -> None:
        self._waiting.setdefault((session, connection), []).append(renewal)
        self.count += 1
        self.closes_s = min(self.closes_s, closes_s)

    def take(self, sessions_max: int) -> list[RenewalPart]:
        """Close the window: everything in it, in parts of at most ``sessions_max`` in which no session occurs twice (a
        result names sessions only). Sessions that nobody waits for any more are left out."""
        waiting, self._waiting, self.count, self.closes_s = self._waiting, {}, 0, float("inf")
        parts: list[RenewalPart] = []
        for (session, connection), renewals in waiting.items():
            live = [renewal for renewal in renewals if not renewal.finished]
            if not live:
                continue
            if not parts or len(parts[-1]) == sessions_max or session in parts[-1]:
                parts.append({})
            parts[-1][session] = (connection, live)
        return parts
