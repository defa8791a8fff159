"""Runs: one attempt at an occurrence by one session; who works for what (see the rules at the top of machine.py)."""

from __future__ import annotations

import msgspec

from sidecar.core.occurrences import Origin


class Worker(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a session serves. ``assigned`` orders the equally busy: who was given a run the longest ago is next."""

    session: str
    tenant: str
    jobs: tuple[str, ...]
    slots: int
    assigned: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The receipt. Its name is ``r`` and its fencing token."""

    run: str
    tenant: str
    job: str
    due_ms: int
    sequence: int
    origin: Origin
    session: str
    token: int
    attempt: int
    kill_epoch: int
    job_revision: int
    started_ms: int
    # Cluster milliseconds: the end of its time; once interrupted, the end of the grace.
    deadline_ms: int
    timeout_ms: int
    # Whether it came by a claim of a session that polls; it then takes no slot.
    claimed: bool = False
    # Why it was asked to stop: killed, timeout, operator, overlap or job_deleted; empty: it was not.
    interrupt_cause: str = ""
    interrupt_reason: str = ""
    interrupt_switch: str = ""
    interrupted_ms: int = 0
