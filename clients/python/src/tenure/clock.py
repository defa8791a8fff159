"""The clock that leases are counted on, and the arithmetic of how long their holder may act.

Rules:

* Time is that of ``CLOCK_BOOTTIME`` where there is one (it goes on while the machine is suspended), otherwise of the
  monotonic clock. The wall clock decides nothing.
* A renewal counts from the moment it was SENT, and only once it has been confirmed. The server's ttl starts later, when
  the renewal is applied, so the holder always stops first.
* A margin of 1 % of the ttl (5 ms at least) bounds the difference in rate between this clock and the cluster's.
* When the stream breaks, the sidecar may cut the session to its disconnect grace. So does the holder, unless it knows
  that the sidecar's process is gone: a process that is gone has cut nothing, and may be back within the ttl.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "Validity", "margin", "now"]

# Seconds since some fixed point; only differences have a meaning.
Clock = Callable[[], float]

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def _pick() -> Clock:
    clock_id = _BOOTTIME
    if clock_id is None:
        return time.monotonic
    return lambda: time.clock_gettime(clock_id)


_read = _pick()


def now() -> float:
    """The time in seconds on the clock that ``Lease.safe_until`` refers to."""
    return _read()


def margin(ttl_ms: int) -> float:
    """Seconds by which a holder stops earlier than the server may grant to another."""
    return max(ttl_ms / 100, 5.0) / 1000


class Validity:
    """Until when the holder of a session may act. Times are seconds on the lease clock."""

    def __init__(self, ttl_ms: int, grace_ms: int, cancel_margin_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.grace_ms = grace_ms
        self.cancel_margin_ms = cancel_margin_ms
        self._renewed_until = float("-inf")
        self._cut_at: float | None = None  # the first suspected cut that nothing has disproved
        self._suspected_at = float("-inf")  # the last one

    def renewed(self, sent_at: float, ttl_ms: int) -> None:
        """A renewal sent at ``sent_at`` was confirmed with this ttl. An older one never shortens a newer one.

        Only the stream that carries the session gets confirmations: one sent after a suspected cut disproves it.
        """
        if sent_at > self._suspected_at:
            self._cut_at = None
        self._renewed_until = max(self._renewed_until, sent_at + ttl_ms / 1000 - margin(ttl_ms))

    def attached(self, sent_at: float, ttl_ms: int, grace_ms: int) -> None:
        """A stream took the session over. That counts as a renewal; a cut by an older stream is void."""
        self.ttl_ms, self.grace_ms = ttl_ms, grace_ms
        self._cut_at = None
        self.renewed(sent_at, ttl_ms)

    def disconnected(self, at: float) -> None:
        """A stream broke at ``at``: the sidecar may have cut the session to its disconnect grace."""
        if self._cut_at is None:
            self._cut_at = at
        self._suspected_at = at

    def sidecar_gone(self, at: float) -> None:
        """The sidecar's process ended, and the stream that broke at ``at`` with it: that break cut nothing."""
        if self._cut_at == self._suspected_at == at:
            self._cut_at = None

    @property
    def cut(self) -> bool:
        return self._cut_at is not None

    @property
    def _cut_until(self) -> float:
        if self._cut_at is None:
            return float("inf")
        return self._cut_at + self.grace_ms / 1000 - margin(self.grace_ms)

    @property
    def safe_until(self) -> float:
        """The holder may act before this moment, and not at it or later."""
        return min(self._renewed_until, self._cut_until)

    @property
    def cancel_at(self) -> float:
        """When the body must be cancelled so that it can clean up while the lease is still its own."""
        lead = self.cancel_margin_ms / 1000
        return min(self._renewed_until - lead, self._cut_until - min(lead, self.grace_ms / 2000))
