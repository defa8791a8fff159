"""What every service needs, gathered once by the composition root (server.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.config import Settings
from sidecar.consensus.node import Node
from sidecar.consensus.ports import Clock

if TYPE_CHECKING:
    from sidecar.proposer import AsyncProposer
    from sidecar.watch import WatchHub


@dataclass
class Runtime:
    """One running sidecar. ``draining`` turns true at SIGTERM: no new sessions, existing agents are served on."""

    settings: Settings
    clock: Clock
    node: Node
    proposer: AsyncProposer
    hub: WatchHub
    draining: bool = False
    # Open agent streams by connection id; each value tells its stream that the node is draining (stops_in_ms).
    streams: dict[str, Callable[[int], None]] = field(default_factory=dict)
