"""When to refuse new work, so that heartbeats are not late: hard bounds are the proposer's, this is the early sign."""

from __future__ import annotations

RETRY_DELAY_MIN_MS = 50
RETRY_DELAY_MAX_MS = 2_000
# With no more proposals in flight than this, nothing is refused for being slow: a slow disk or a busy machine is no
# overload, refusing would not help, and only what is let through can show that things are better again.
IN_FLIGHT_FREE = 64


class Pressure:
    """Integer milliseconds throughout; averages that follow quickly, so that one late turn refuses nobody."""

    def __init__(self, latency_max_ms: int, lag_max_ms: int) -> None:
        self._latency_max_ms = latency_max_ms
        self._lag_max_ms = lag_max_ms
        self._latency_ms = 0
        self._lag_ms = 0

    def note_latency(self, latency_ms: int) -> None:
        """How long a proposal took from submit to result."""
        self._latency_ms += (latency_ms - self._latency_ms) // 8

    def note_lag(self, lag_ms: int) -> None:
        """How late the event loop ran something that was due: the time that a heartbeat would be late, too."""
        self._lag_ms += (lag_ms - self._lag_ms) // 4

    def retry_delay_ms(self, in_flight: int) -> int:
        """0: new work is welcome. Otherwise when to come back."""
        if in_flight <= IN_FLIGHT_FREE:
            return 0
        if self._lag_ms > self._lag_max_ms:
            return self._clamp(4 * self._lag_ms)
        if self._latency_ms > self._latency_max_ms:
            return self._clamp(self._latency_ms)
        return 0

    def full_delay_ms(self) -> int:
        """When to come back after a hard bound was met."""
        return self._clamp(2 * self._latency_ms)

    @staticmethod
    def _clamp(delay_ms: int) -> int:
        return min(max(delay_ms, RETRY_DELAY_MIN_MS), RETRY_DELAY_MAX_MS)
