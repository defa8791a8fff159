"""Jobs and their revisions (see the rules at the top of machine.py)."""

from __future__ import annotations

import msgspec

from sidecar.core.specification import JobSpec

NOT_COMPUTED = -1


class Job(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Wall times are UTC milliseconds."""

    tenant: str
    name: str
    revision: int
    spec: JobSpec
    created_wall_ms: int
    changed_wall_ms: int
    changed_by: str
    # Every due time up to here is dealt with.
    settled_ms: int
    # 0: none any more; NOT_COMPUTED: the leader will say.
    next_due_ms: int = NOT_COMPUTED
    # Since when (wall time) it is in shadow mode or has a canary; 0: neither.
    flag_since_ms: int = 0
    # The kill epoch of the last kill of this job: older receipts are refused.
    kill_floor: int = 0
    # How many occurrences ended how, over its life.
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    missed: int = 0
    cancelled: int = 0
    unknown: int = 0


class JobRevision(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tenant: str
    name: str
    revision: int
    spec: JobSpec
    wall_ms: int
    actor: str
    reason: str = ""
    rolled_back_to: int = 0
