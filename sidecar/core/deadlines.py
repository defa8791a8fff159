"""Due times in order. Derived state: rebuilt at restore, never part of a snapshot."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

# Compared after the due time, so it decides the order of what is due at once: must be totally ordered.
Key = TypeVar("Key", bound=tuple[object, ...])

# Stale entries tolerated before the heap is rebuilt from what is armed.
_SLACK = 1_024


class Deadlines(Generic[Key]):
    """A heap with lazy deletion, and with lazy postponement.

    A key is armed at a time that is never later than its true due time, which ``due_ms`` tells. To postpone, the owner
    changes what ``due_ms`` answers and does nothing here: the entry is moved when it comes up. So the renewal of
    a session costs nothing in the heap, and each entry moves at most once per ttl.
    """

    def __init__(self, due_ms: Callable[[Key], int | None]) -> None:
        """``due_ms(key)`` is the true due time in cluster milliseconds; None when there is nothing left to end."""
        self._due_ms = due_ms
        self._heap: list[tuple[int, Key]] = []
        # The one valid entry of each key; every other entry of it in the heap is stale.
        self._armed: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._armed)

    def arm(self, key: Key, at_ms: int) -> None:
        """Makes sure that the key comes up at ``at_ms`` or before."""
        armed_ms = self._armed.get(key)
        if armed_ms is None or at_ms < armed_ms:
            self._armed[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))
            self._compact()

    def disarm(self, key: Key) -> None:
        self._armed.pop(key, None)

    def pop(self, now_ms: int) -> Key | None:
        """Takes out the first key that is due at or before ``now_ms``."""
        due_ms = self.next_ms()
        if due_ms is None or due_ms > now_ms:
            return None
        _, key = heapq.heappop(self._heap)
        del self._armed[key]
        return key

    def next_ms(self) -> int | None:
        """The true due time of the first key, which is left at the top of the heap."""
        heap, armed = self._heap, self._armed
        while heap:
            at_ms, key = heap[0]
            if armed.get(key) != at_ms:
                heapq.heappop(heap)
                continue
            due_ms = self._due_ms(key)
            if due_ms == at_ms:
                return at_ms
            if due_ms is None:
                heapq.heappop(heap)
                del armed[key]
                continue
            assert due_ms > at_ms, f"{key!r} is due at {due_ms}, before {at_ms} at which it was armed"
            armed[key] = due_ms
            heapq.heapreplace(heap, (due_ms, key))
        return None

    def first(self) -> Key | None:
        """The key that is due first."""
        return None if self.next_ms() is None else self._heap[0][1]

    def could_be_due(self, now_ms: int) -> bool:
        """Cheap: False when surely nothing is due at ``now_ms``."""
        return bool(self._heap) and self._heap[0][0] <= now_ms

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._armed) + _SLACK:
            self._heap = [(at_ms, key) for key, at_ms in self._armed.items()]
            heapq.heapify(self._heap)
