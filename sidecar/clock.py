"""The real clock behind ``consensus.ports.Clock``."""

from __future__ import annotations

import time

# Counts the time that a machine sleeps, too. A leader that was suspended must not believe that no time has passed.
_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def monotonic_s(self) -> float:
        return time.clock_gettime(_MONOTONIC)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
