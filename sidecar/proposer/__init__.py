"""Joins consensus and core: batches, stamps, waiters, deadlines, back-pressure. The node's Application.

``Proposer`` is free of asyncio (callbacks, an injected clock), so the simulator drives the very same code;
``AsyncProposer`` is the thin facade for services.
"""

from __future__ import annotations

from sidecar.proposer.batches import MalformedBatch
from sidecar.proposer.cluster_time import ClusterTime
from sidecar.proposer.facade import AsyncProposer
from sidecar.proposer.outcomes import Done, Failed, Failure, Outcome, Subscriber
from sidecar.proposer.proposer import Observer, Proposer, ProposerNode, ProposerSettings

__all__ = [
    "AsyncProposer",
    "ClusterTime",
    "Done",
    "Failed",
    "Failure",
    "MalformedBatch",
    "Observer",
    "Outcome",
    "Proposer",
    "ProposerNode",
    "ProposerSettings",
    "Subscriber",
]
