"""Switches and the kill epoch (see the rules at the top of machine.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import ClearSwitch, Reason, Refused, SetSwitch, SwitchIsSet, SwitchMode
from sidecar.core.context import Context, full
from sidecar.core.events import Kind
from sidecar.core.sessions import Sessions

# Ended switches that are kept, for all scopes together.
ENDED_MAX = 200

WORDS = {SwitchMode.PAUSE: "paused", SwitchMode.DRAIN: "draining", SwitchMode.KILL: "killed"}


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

    @property
    def scope(self) -> str:
        return "job" if self.job else "tenant" if self.tenant else "fleet"

    @property
    def why(self) -> str:
        """What is recorded of an occurrence that did not run because of it."""
        return f"{WORDS[self.mode]} {self.switch}"


FLEET = ("", "")


class Switches:
    """The table of switches: those in force, at most one of a scope, and the last ended ones.

    What a switch does to occurrences and runs is not decided here: ``set``, ``clear`` and ``expire`` say what changed.
    """

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        arm: Callable[[str, int], None],
        disarm: Callable[[str], None],
        *,
        switches: Iterable[Switch],
        kill_epoch: int,
        floors: Iterable[tuple[str, int]],
    ) -> None:
        """``arm`` and ``disarm`` put the end of a switch, by its id, on the agenda, and take it off."""
        self._context, self._sessions = context, sessions
        self._arm, self._disarm = arm, disarm
        # Raised by every kill. What was given out under an older epoch than its tenant's floor is not current any more.
        self.kill_epoch = kill_epoch
        # By tenant, the epoch of its last kill; that of the fleet's last kill under "".
        self.floors = dict(floors)
        # By id: first in order of their setting, then, once ended, in order of their end.
        self.table = {row.switch: row for row in switches}
        # Derived: ids in force, by tenant ("": the fleet's) and job ("": the tenant's own); how many; ended ones in
        # order of their end; the number of each id, in order; the ids of kills by their epoch.
        self._in_force: dict[str, dict[str, str]] = {}
        self.in_force_count = 0
        self._ended: dict[str, None] = {}
        self._numbers = sorted(map(_number, self.table))
        self._kills: dict[int, str] = {}
        for row in self.table.values():
            if row.kill_epoch:
                self._kills[row.kill_epoch] = row.switch
            if row.ended_ms:
                self._ended[row.switch] = None
            else:
                self._enforce(row)

    # ---- commands ------------------------------------------------------------------------------------------------

    def set(self, command: SetSwitch, runs_at_set: int) -> SwitchIsSet | Refused:
        """``runs_at_set``: how many runs its scope has now. What follows for them is the caller's."""
        context = self._context
        before = self.of_scope(command.tenant, command.job)
        refusal = _too_weak(before, command) if before is not None else self._no_room(command)
        if refusal is not None:
            return refusal
        if before is not None:
            self._end(before, "replaced", command.actor, command.reason)
        kill = command.mode is SwitchMode.KILL
        if kill:
            self._raise_epoch(command)
        row = Switch(
            switch=f"k{context.revision + 1}",
            tenant=command.tenant,
            job=command.job,
            mode=command.mode,
            actor=command.actor,
            reason=command.reason,
            set_ms=context.now_ms,
            set_wall_ms=context.stamp.wall_ms,
            expires_ms=context.now_ms + command.expires_after_ms if command.expires_after_ms else 0,
            kill_epoch=self.kill_epoch if kill else 0,
            runs_at_set=runs_at_set,
        )
        self.table[row.switch] = row
        self._numbers.append(_number(row.switch))
        if kill:
            self._kills[row.kill_epoch] = row.switch
        self._enforce(row)
        revision = context.emit(
            Kind.SWITCH_SET,
            row.tenant,
            row.switch,
            cause=row.mode.name.lower(),
            actor=row.actor,
            reason=row.reason,
            count=runs_at_set,
        )
        return SwitchIsSet(switch=row.switch, replaced="" if before is None else before.switch, revision=revision)

    def clear(self, command: ClearSwitch) -> Switch | Refused:
        """The switch as it ended."""
        row = self.find(command.tenant, command.switch)
        if row is None:
            message = f"no switch {command.switch} is known here: it never was, or ended long ago"
            return Refused(reason=Reason.SWITCH_NOT_FOUND, message=message)
        if row.ended_ms:
            return self._stale(row)
        return self._end(row, "cleared", command.actor, command.reason)

    def _stale(self, row: Switch) -> Refused:
        now = self.of_scope(row.tenant, row.job)
        follows = f"{now.switch} is in force now" if now is not None else "none of its scope is in force now"
        return Refused(
            reason=Reason.SWITCH_STALE,
            message=f"switch {row.switch} has ended ({row.end_cause}); {follows}",
            facts=(("current_switch_id", now.switch if now is not None else ""), ("end_cause", row.end_cause)),
        )

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def due_ms(self, switch: str) -> int | None:
        row = self.table.get(switch)
        return None if row is None or row.ended_ms or not row.expires_ms else row.expires_ms

    def expire(self, switch: str) -> Switch:
        """The switch as it ended."""
        return self._end(self.table[switch], "expired")

    # ---- what is in force ----------------------------------------------------------------------------------------

    def of_scope(self, tenant: str, job: str) -> Switch | None:
        switch = self._in_force.get(tenant, {}).get(job)
        return None if switch is None else self.table[switch]

    def effective(self, tenant: str, job: str) -> Switch | None:
        """The strongest one in force over a job; of equally strong ones that of the widest scope."""
        return self.keeps_from_starting(tenant, job, retrying=False)

    def keeps_from_starting(self, tenant: str, job: str, *, retrying: bool) -> Switch | None:
        """The strongest one, of those that say so. A drain lets what has begun start again, unless another switch
        over the job, however narrow, does not."""
        if not self._in_force:
            return None
        strongest = None
        for row in (self.of_scope(*FLEET), self.of_scope(tenant, ""), self.of_scope(tenant, job)):
            if row is None or (retrying and row.mode is SwitchMode.DRAIN):
                continue
            if strongest is None or row.mode > strongest.mode:
                strongest = row
        return strongest

    def killed(self, tenant: str) -> Switch | None:
        """The kill in force over all of a tenant: the fleet's, or its own."""
        row = self.effective(tenant, "")
        return row if row is not None and row.mode is SwitchMode.KILL else None

    def refusal(self, tenant: str, job: str) -> Refused | None:
        row = self.effective(tenant, job)
        return None if row is None else switched_off(row)

    def floor(self, tenant: str) -> int:
        """Leases and records given out under an epoch below this are not current any more."""
        return max(self.floors.get("", 0), self.floors.get(tenant, 0))

    def killed_by(self, tenant: str, kill_epoch: int) -> str:
        """The switch because of which what was given out under the epoch is not current; empty when it is current."""
        floor = self.floor(tenant)
        return "" if kill_epoch >= floor else self._kills.get(floor, f"epoch {floor}")

    def concerning(self, tenant: str) -> list[Switch]:
        """In force, of the fleet, the tenant, and its jobs in order of name."""
        fleet = [self.table[switch] for switch in self._in_force.get("", {}).values()]
        if not tenant:
            return fleet
        jobs = sorted(self._in_force.get(tenant, {}).items())
        return fleet + [self.table[switch] for _, switch in jobs]

    def ended_since(self, wall_ms: int) -> list[Switch]:
        """Ended after a wall time, the last end first. Usually none, and then it costs nothing."""
        found: list[Switch] = []
        for switch in reversed(self._ended):
            row = self.table[switch]
            if row.ended_wall_ms <= wall_ms:
                break
            found.append(row)
        return found

    # ---- its account ---------------------------------------------------------------------------------------------

    def suppressed(self, switch: str, count: int) -> None:
        """So many occurrences did not run because of it."""
        row = self.table.get(switch)
        if row is not None and count:
            self.table[switch] = replace(row, suppressed=row.suppressed + count)

    def run_ended(self, switch: str, *, acknowledged: bool) -> None:
        """A run that it interrupted has ended now. The switch may have ended, and be forgotten, before."""
        row = self.table.get(switch)
        if row is not None:
            self.table[switch] = replace(
                row,
                runs_ended=row.runs_ended + 1,
                runs_unacknowledged=row.runs_unacknowledged + (not acknowledged),
                effect_ms=max(row.effect_ms, self._context.now_ms - row.set_ms),
            )

    # ---- reads ---------------------------------------------------------------------------------------------------

    def find(self, tenant: str, switch: str) -> Switch | None:
        row = self.table.get(switch)
        return row if row is not None and row.tenant == tenant else None

    def page(self, tenant: str | None, include_ended: bool, after: str, limit: int) -> list[Switch]:
        """Newest first, of a tenant ("": the fleet's own), or with None of all; those set before ``after``."""
        chosen: list[Switch] = []
        for row in self._older_than(after):
            if len(chosen) >= limit:
                break
            if (include_ended or not row.ended_ms) and tenant in (None, row.tenant):
                chosen.append(row)
        return chosen

    def _older_than(self, after: str) -> Iterator[Switch]:
        end = bisect_left(self._numbers, _number(after)) if after else len(self._numbers)
        for index in range(end - 1, -1, -1):
            yield self.table[f"k{self._numbers[index]}"]

    # ---- rules ---------------------------------------------------------------------------------------------------

    def _no_room(self, command: SetSwitch) -> Refused | None:
        """The fleet's always has room."""
        limit = self._context.limits.switches_max
        if not command.tenant or self.in_force_count < limit:
            return None
        return full(Reason.SWITCHES_FULL, "no room for a switch", "switches_max", limit)

    def _raise_epoch(self, command: SetSwitch) -> None:
        self.kill_epoch += 1
        if not command.tenant:
            self.floors = {"": self.kill_epoch}  # above every tenant's
        elif not command.job:
            self.floors[command.tenant] = self.kill_epoch
            if len(self.floors) > self._context.limits.switches_max:
                self._forget_floors()

    def _forget_floors(self) -> None:
        """What is older than a floor belongs to a session: a tenant without any has no use for it."""
        used = {tenant: epoch for tenant, epoch in self.floors.items() if not tenant or self._sessions.count_of(tenant)}
        self.floors = used

    # ---- the table -----------------------------------------------------------------------------------------------

    def _enforce(self, row: Switch) -> None:
        self._in_force.setdefault(row.tenant, {})[row.job] = row.switch
        self.in_force_count += 1
        if row.expires_ms:
            self._arm(row.switch, row.expires_ms)

    def _end(self, row: Switch, cause: str, actor: str = "", reason: str = "") -> Switch:
        context = self._context
        # 0 would say that it is in force.
        ended = replace(
            row,
            ended_ms=max(1, context.now_ms),
            ended_wall_ms=context.stamp.wall_ms,
            end_cause=cause,
            end_actor=actor,
            end_reason=reason,
        )
        self._disarm(row.switch)
        of_tenant = self._in_force[row.tenant]
        del of_tenant[row.job], self.table[row.switch]
        if not of_tenant:
            del self._in_force[row.tenant]
        self.in_force_count -= 1
        self.table[row.switch] = ended
        self._ended[row.switch] = None
        if len(self._ended) > ENDED_MAX:
            self._forget(next(iter(self._ended)))
        context.emit(Kind.SWITCH_CLEARED, row.tenant, row.switch, cause=cause, actor=actor, reason=reason)
        return ended

    def _forget(self, switch: str) -> None:
        row = self.table.pop(switch)
        del self._ended[switch]
        self._kills.pop(row.kill_epoch, None)
        del self._numbers[bisect_left(self._numbers, _number(switch))]


def switched_off(row: Switch) -> Refused:
    """The refusal of what a switch in force forbids."""
    whole = {"fleet": "the whole fleet", "tenant": f"tenant {row.tenant}", "job": f"job {row.job}"}[row.scope]
    return Refused(
        reason=Reason.SWITCHED_OFF,
        message=f"{whole} is {WORDS[row.mode]} by switch {row.switch} of {row.actor}: {row.reason}",
        facts=(
            ("switch_id", row.switch),
            ("scope", row.scope),
            ("mode", row.mode.name.lower()),
            ("reason", row.reason),
            ("actor", row.actor),
            ("since_wall_ms", str(row.set_wall_ms)),
        ),
    )


def _too_weak(before: Switch, command: SetSwitch) -> Refused | None:
    if command.mode >= before.mode:
        return None
    return Refused(
        reason=Reason.SWITCH_STRONGER,
        message=f"switch {before.switch} is in force, and {before.mode.name.lower()} is stronger: clear it first",
        facts=(("switch_id", before.switch), ("mode", before.mode.name.lower())),
    )


def _number(switch: str) -> int:
    """Of an id; of what is none, 0: nothing is older."""
    digits = switch[1:]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 19 else 0
