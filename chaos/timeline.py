"""Virtual time, chance, and the record of what happened.

One thread, one queue of events ordered by (time, sequence), one ``random.Random``. Time is counted in whole
microseconds: no float decides an order, no set is iterated, ``hash()`` decides nothing. The same seed is therefore the
same run on every machine.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable

from chaos.profiles import Shape

_TRACE_LINES_KEPT = 400


class Timeline:
    """What everything in a world shares, whether it lives on a host or looks on from outside."""

    def __init__(self, seed: int, shape: Shape, *, verbose: bool = False) -> None:
        self.seed = seed
        self.shape = shape
        self.rng = random.Random(seed)
        self.now_us = 0
        self.verbose = verbose
        self.reached: dict[str, int] = {}  # how often a run came to where bugs live; a test asks for each of them
        self.calm = False  # after the heal: no more faults, no fault of chance either
        self.trace: deque[str] = deque(maxlen=None if verbose else _TRACE_LINES_KEPT)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._digest = hashlib.blake2b(digest_size=16)

    # ---- events

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_us + delay_us, self._sequence, action))

    def run_until(self, until_us: int) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_us:
            self.now_us, _, action = heapq.heappop(queue)
            action()
        self.now_us = until_us

    # ---- chance

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]. No other draws are made: a logarithm's last bit differs between machines."""
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, per_thousand: int) -> bool:
        return self.rng.random() * 1000 < per_thousand

    # ---- the record

    def reach(self, what: str) -> None:
        self.reached[what] = self.reached.get(what, 0) + 1

    def note(self, who: str, text: str) -> None:
        line = f"{self.now_us / 1_000_000:10.6f} {who:<8} {text}"
        self._digest.update(line.encode())
        self.trace.append(line)

    def detail(self, who: str, text: str) -> None:
        """Only for a person who reads along (``-v``); no part of the digest."""
        if self.verbose:
            self.trace.append(f"{self.now_us / 1_000_000:10.6f} {who:<8} {text}")

    def digest(self) -> str:
        """Equal if and only if two runs were the same, event by event and draw by draw."""
        final = self._digest.copy()
        final.update(repr((self.now_us, self._sequence, self.rng.getstate())).encode())
        return final.hexdigest()
