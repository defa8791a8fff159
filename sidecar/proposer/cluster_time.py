"""Cluster time: what the leader stamps on batches, and what every node believes it to be now.

Rules (design, "Time"):

1. A stamp is the stamp of the entry before it in the log, plus what the stamping node's own monotonic clock
   measured since it RECEIVED that entry (or stamped it itself). It received it after it was stamped, so between two
   entries of the log cluster time never advances by more than real time did (but for rounding: less than 1 ms in all).
2. A leader keeps its base through its term: rounding down to milliseconds happens once, not once per entry.
3. Stamps never step back. After a full restart cluster time goes on from the last stamp.
4. No wall clock is read here.

The base is the LAST entry received, not the one that yields the latest time: an entry of a deposed leader that ran
ahead must not let the entries that follow an earlier one advance faster than real time.
"""

from __future__ import annotations

from sidecar.consensus.ports import Clock


class ClusterTime:
    def __init__(self, clock: Clock, cluster_ms: int = 0) -> None:
        self._clock = clock
        self._base_ms = cluster_ms
        self._base_s = clock.monotonic_s()

    def now_ms(self) -> int:
        """The estimate of this node; behind the leader's by the time that the last entry was under way."""
        return self._base_ms + max(0, int((self._clock.monotonic_s() - self._base_s) * 1000))

    def received(self, stamp_ms: int) -> None:
        """A follower's log got an entry with this stamp just now."""
        self._base_ms = stamp_ms
        self._base_s = self._clock.monotonic_s()

    def applied(self, stamp_ms: int) -> None:
        """An entry was applied. Only entries that were in the log when the process started were not received before."""
        if stamp_ms > self._base_ms:
            self.received(stamp_ms)

    def until_s(self, cluster_ms: int) -> float:
        """The own monotonic time at which ``now_ms`` will have reached ``cluster_ms``."""
        return self._base_s + (cluster_ms - self._base_ms) / 1000
