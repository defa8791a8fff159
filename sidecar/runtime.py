"""What every service needs, gathered once by the composition root (server.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sidecar.config import Settings
from sidecar.consensus.node import Node
from sidecar.consensus.ports import Clock
from sidecar.observability.metrics import Metrics
from sidecar.proposer import AsyncProposer
from sidecar.scheduling.scheduler import Scheduler
from sidecar.watch import WatchHub


@dataclass
class Runtime:
    """One running sidecar. ``draining`` turns true at SIGTERM: no new sessions, existing agents are served on."""

    settings: Settings
    clock: Clock
    node: Node
    proposer: AsyncProposer
    hub: WatchHub
    scheduler: Scheduler
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    # Right before the gRPC server is stopped: streams that break from now on are not their agents' fault.
    stopping: bool = False
    # What the server itself has found wrong, for example a disk that is nearly full; empty when nothing is.
    trouble: str = ""
    # Empty, or that other nodes refuse this process because another one runs with its node id.
    displaced: Callable[[], str] = lambda: ""
    started_s: float = 0.0  # monotonic
    # Open agent streams by connection id; each value tells its stream that the node is draining (stops_in_ms).
    streams: dict[str, Callable[[int], None]] = field(default_factory=dict)
    # Service, method, code and seconds of each finished call.
    observe_request: Callable[[str, str, str, float], None] = lambda service, method, code, seconds: None
    # Called with the new reason ("" when ready) whenever readiness changes.
    on_ready_change: list[Callable[[str], None]] = field(default_factory=list)

    def ready(self) -> str:
        """Empty when this node should be given work, else the reason: it has not caught up, knows no leader with a
        quorum, has no vote, is draining, or has found something wrong with itself."""
        if self.draining:
            return "draining"
        return self.trouble or self.displaced() or self.node.status().reason or self._behind()

    def _behind(self) -> str:
        """A leader that does not fire what is due looks healthy in every other way."""
        lag_ms = self.scheduler.lag_ms()
        if lag_ms <= self.settings.schedule_lag_max_ms:
            return ""
        why = f": {self.scheduler.held_reason}" if self.scheduler.held_reason else ""
        return f"schedules are {lag_ms // 1000} s behind{why}"

    def uptime_ms(self) -> int:
        return int((self.clock.monotonic_s() - self.started_s) * 1000)
