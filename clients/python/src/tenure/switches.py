"""What this process knows of kill switches, and how fresh that is.

Rules:

* The sidecar tells of every change. An acknowledged keepalive confirms that all it had told by then is how the cluster
  was when the keepalive was SENT, or later: the acknowledgement is a commit. So knowledge is as old as that sending.
* Knowledge older than ``switch_staleness`` is none: the state is UNKNOWN, and guarded work stops, unless the client was
  opened with ``fail_open=True``; then it goes on, with a warning in the log each minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import NoReturn, Protocol

from tenure import errors
from tenure.session import Session
from tenure.v1 import session_pb2, switch_pb2

__all__ = ["Guard", "SwitchInfo", "SwitchState", "Switches", "switch_info"]

log = logging.getLogger("tenure")

WARN_EVERY = 60.0


class SwitchState(Enum):
    """Whether work of a job (or of the tenant) may go on. Not a truth value: there are more than two."""

    ACTIVE = "active"
    PAUSED = "paused"  # nothing new may begin
    DRAINING = "draining"  # nothing new may begin; what has begun goes on to its end
    KILLED = "killed"  # nothing may go on
    UNKNOWN = "unknown"  # not learnt, or too long ago

    def __bool__(self) -> NoReturn:
        raise TypeError("a SwitchState is no truth value: compare it, for example `state is SwitchState.ACTIVE`")


@dataclass(frozen=True, slots=True)
class SwitchInfo:
    """A switch. ``scope`` is fleet, tenant or job, ``mode`` pause, drain or kill; times are UTC milliseconds."""

    switch_id: str
    scope: str
    tenant: str
    job: str
    mode: str
    actor: str
    reason: str
    set_wall_ms: int
    remaining_ms: int
    active: bool
    runs_left: int


def switch_info(message: switch_pb2.Switch) -> SwitchInfo:
    return SwitchInfo(
        switch_id=message.switch_id,
        scope=switch_pb2.SwitchScope.Name(message.scope).removeprefix("SWITCH_SCOPE_").lower(),
        tenant=message.tenant,
        job=message.job,
        mode=switch_pb2.SwitchMode.Name(message.mode).removeprefix("SWITCH_MODE_").lower(),
        actor=message.actor,
        reason=message.reason,
        set_wall_ms=message.set_wall_ms,
        remaining_ms=message.remaining_ms,
        active=message.active,
        runs_left=message.runs_left,
    )


_STATES = {"pause": SwitchState.PAUSED, "drain": SwitchState.DRAINING, "kill": SwitchState.KILLED}
_STRENGTH = {"pause": 1, "drain": 2, "kill": 3}


class Switches:
    """See the rules at the top of this file."""

    def __init__(self, staleness: float, fail_open: bool) -> None:
        self.staleness, self.fail_open = staleness, fail_open
        self.epoch = 0
        self.on_change: Callable[[], None] = lambda: None
        self._known: list[SwitchInfo] = []
        self._session: Session | None = None
        self._warned_at = float("-inf")

    def told(self, session: Session, message: session_pb2.SwitchesChanged) -> None:
        self._session = session
        self._known = [switch_info(each) for each in message.switches]
        self.epoch = message.kill_epoch
        self.on_change()

    def stale_at(self, session: Session) -> float:
        """When what is known ceases to be knowledge; on the session's clock."""
        return session.confirmed_at + self.staleness if session is self._session else float("-inf")

    def stale(self, session: Session) -> bool:
        return session.ended is not None or session.clock() >= self.stale_at(session)

    def stops(self, session: Session) -> bool:
        """Whether guarded work must stop because nothing is known; warns where it may go on all the same."""
        if not self.stale(session):
            return False
        if not self.fail_open:
            return True
        now = session.clock()
        if now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            log.warning("the state of the kill switches is not known; work goes on (fail_open)")
        return False

    def strongest(self, job: str | None) -> SwitchInfo | None:
        """Of those that concern the job, or, without one, the whole tenant."""
        found = [each for each in self._known if each.scope != "job" or (job is not None and each.job == job)]
        return max(found, key=lambda each: _STRENGTH.get(each.mode, 3), default=None)

    def state(self, session: Session, job: str | None) -> SwitchState:
        if self.stale(session):
            return SwitchState.UNKNOWN
        switch = self.strongest(job)
        # A mode that is newer than this client is taken for the strongest.
        return SwitchState.ACTIVE if switch is None else _STATES.get(switch.mode, SwitchState.KILLED)

    def refusal(self, session: Session, job: str | None) -> errors.TenureError:
        """Why work may not go on."""
        what = f"job {job}" if job else "this tenant"
        switch = self.strongest(job)
        if self.stale(session) or switch is None:
            message = f"whether {what} is switched off could not be learnt for {self.staleness:g} s"
            return errors.SwitchStateUnknown(message, reason="SWITCH_STATE_UNKNOWN")
        facts = {"switch_id": switch.switch_id, "mode": switch.mode, "actor": switch.actor, "reason": switch.reason}
        message = f"{what} is switched off ({switch.mode}) by {switch.actor}: {switch.reason}"
        return errors.SwitchedOff(message, reason="SWITCHED_OFF", facts=facts)


class Keeper(Protocol):
    """Who looks at guards when something changes, and keeps the knowledge fresh while there are any."""

    guards: set[Guard]

    def watch_switches(self) -> None: ...


class Guard:
    """``async with client.guard(job):`` the body runs only while no switch forbids it."""

    def __init__(self, switches: Switches, session: Callable[[], Session], job: str | None, keeper: Keeper) -> None:
        self._switches, self._session, self._job, self._keeper = switches, session, job, keeper
        self._task: asyncio.Task[object] | None = None
        self._why: errors.TenureError | None = None

    async def __aenter__(self) -> None:
        session = self._session()
        state = self._switches.state(session, self._job)
        unknown_is_fine = state is SwitchState.UNKNOWN and not self._switches.stops(session)
        if state is not SwitchState.ACTIVE and not unknown_is_fine:
            raise self._switches.refusal(session, self._job)
        self._task = asyncio.current_task()
        self._keeper.guards.add(self)
        self._keeper.watch_switches()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.guards.discard(self)
        self._keeper.watch_switches()
        if self._why is None or self._task is None:
            return
        # The cancellation was ours, unless somebody else has asked for one, too.
        if self._task.uncancel() == 0 and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise self._why from error

    def look(self, session: Session) -> None:
        """Cancels the body, once, when it may not go on."""
        if self._why is None and self._task is not None:
            killed = self._switches.state(session, self._job) is SwitchState.KILLED
            if killed or self._switches.stops(session):
                self._why = self._switches.refusal(session, self._job)
                self._task.cancel()
