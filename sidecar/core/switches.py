"""Switches and the kill epoch (see the rules at the top of machine.py)."""

from __future__ import annotations

import msgspec

from sidecar.core.commands import SwitchMode


class Switch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Its name is ``k`` and the revision that set it. The fleet's has neither tenant nor job, a tenant's no job."""

    switch: str
    tenant: str
    job: str
    mode: SwitchMode
    actor: str
    reason: str
    set_ms: int
    set_wall_ms: int
    expires_ms: int = 0  # cluster milliseconds; 0: until it is cleared
    kill_epoch: int = 0  # that it raised; 0 for other modes
    runs_at_set: int = 0
    # Of the runs that it interrupted: ended, those of them without acknowledgement, and the longest time it took.
    runs_ended: int = 0
    runs_unacknowledged: int = 0
    effect_ms: int = 0
    suppressed: int = 0
    ended_ms: int = 0  # 0: in force
    ended_wall_ms: int = 0
    end_cause: str = ""  # cleared, expired or replaced
    end_actor: str = ""
    end_reason: str = ""
