"""What this process knows of kill switches, and how fresh that is.

Rules:

* The sidecar tells of every change. An acknowledged keepalive confirms that all it had told by then is how the cluster
  was when the keepalive was SENT, or later: the acknowledgement is a commit. So knowledge is as old as that sending.
  That a session has ended makes it no older.
* Knowledge older than ``switch_staleness`` is none: the state is UNKNOWN, and guarded work stops, unless the client was
  opened with ``fail_open=True``; then it goes on, with a warning in the log each minute, by what was known last: a kill
  that was known forbids it still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, NoReturn, Protocol

from tenure import errors
from tenure.clock import Clock
from tenure.lease import NeedsAsyncWith
from tenure.session import Session
from tenure.v1 import session_pb2, switch_pb2

__all__ = ["Guard", "SwitchInfo", "SwitchState", "Switches", "switch_info", "word"]

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


def word(enum: Any, value: int, prefix: str) -> str:
    """The value of an enum as a word; of one that is newer than this client, its number."""
    try:
        name: str = enum.Name(value)
    except ValueError:
        return str(value)
    return name.removeprefix(prefix).lower()


def switch_info(message: switch_pb2.Switch) -> SwitchInfo:
    return SwitchInfo(
        switch_id=message.switch_id,
        scope=word(switch_pb2.SwitchScope, message.scope, "SWITCH_SCOPE_"),
        tenant=message.tenant,
        job=message.job,
        mode=word(switch_pb2.SwitchMode, message.mode, "SWITCH_MODE_"),
        actor=message.actor,
        reason=message.reason,
        set_wall_ms=message.set_wall_ms,
        remaining_ms=message.remaining_ms,
        active=message.active,
        runs_left=message.runs_left,
    )


# A mode that is newer than this client is taken for the strongest, a scope for the widest.
_STATES = {"pause": SwitchState.PAUSED, "drain": SwitchState.DRAINING}
_STRENGTH = {"pause": 1, "drain": 2}
_KILL_STRENGTH = 3


class Switches:
    """See the rules at the top of this file."""

    def __init__(self, staleness: float, fail_open: bool, clock: Clock) -> None:
        self.staleness, self.fail_open = staleness, fail_open
        self.epoch = 0
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._known: list[SwitchInfo] = []
        # The session that told of them last: what confirms it, confirms them.
        self._session: Session | None = None
        self._warned_at = float("-inf")
        self.went_on_unknown = 0

    def told(self, session: Session, message: session_pb2.SwitchesChanged | None) -> None:
        """None: by a sidecar that does not speak of switches, and will not tell of changes."""
        if message is None:
            self._session = None
        else:
            self._session = session
            self._known = [switch_info(each) for each in message.switches]
            self.epoch = message.kill_epoch
        self.on_change()

    def stale_at(self) -> float:
        """When what is known ceases to be knowledge; minus infinity when nothing is."""
        return float("-inf") if self._session is None else self._session.confirmed_at + self.staleness

    def _stale(self) -> bool:
        return self._clock() >= self.stale_at()

    def stops(self) -> bool:
        """Whether guarded work must stop because nothing is known; warns where it may go on all the same."""
        if not self._stale():
            return False
        if not self.fail_open:
            return True
        now = self._clock()
        if now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            self.went_on_unknown += 1
            log.warning("the state of the kill switches is not known; work goes on (fail_open)")
        return False

    def strongest(self, job: str | None) -> SwitchInfo | None:
        """Of those that concern the job, or, without one, the whole tenant."""
        found = [each for each in self._known if each.scope != "job" or (job is not None and each.job == job)]
        return max(found, key=lambda each: _STRENGTH.get(each.mode, _KILL_STRENGTH), default=None)

    def state(self, job: str | None) -> SwitchState:
        if self._stale():
            return SwitchState.UNKNOWN
        switch = self.strongest(job)
        return SwitchState.ACTIVE if switch is None else _STATES.get(switch.mode, SwitchState.KILLED)

    def forbids_beginning(self, job: str | None) -> errors.TenureError | None:
        return self._refusal(job, self.strongest(job))

    def forbids_going_on(self, job: str | None) -> errors.TenureError | None:
        switch = self.strongest(job)
        return self._refusal(job, None if switch is None or switch.mode in _STATES else switch)

    def _refusal(self, job: str | None, switch: SwitchInfo | None) -> errors.TenureError | None:
        what = f"job {job}" if job else "this tenant"
        if self.stops():
            message = f"whether {what} is switched off could not be learnt for {self.staleness:g} s"
            return errors.SwitchStateUnknown(message, reason="SWITCH_STATE_UNKNOWN")
        if switch is None:
            return None
        facts = {"switch_id": switch.switch_id, "mode": switch.mode, "actor": switch.actor, "reason": switch.reason}
        message = f"{what} is switched off ({switch.mode}) by {switch.actor}: {switch.reason}"
        return errors.SwitchedOff(message, reason="SWITCHED_OFF", facts=facts)


class Keeper(Protocol):
    """Who looks at guards when something changes, and keeps the knowledge fresh while there are any."""

    guards: set[Guard]

    @property
    def here(self) -> bool: ...
    def watch_switches(self) -> None: ...


class Guard(NeedsAsyncWith):
    """``async with client.guard(job):`` the body runs only while no switch forbids it.

    A cancellation from elsewhere stays a CancelledError, and an error of the body that error, with a note.
    """

    _written = "async with client.guard(job)"

    def __init__(self, switches: Switches, job: str | None, keeper: Keeper) -> None:
        self._switches, self._job, self._keeper = switches, job, keeper
        self._cancelling = 0
        self._why: errors.TenureError | None = None
        self.task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        if self.task is not None:
            raise RuntimeError("a guard is entered once; ask client.guard(...) for another")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("client.guard must be used inside a task")
        refusal = self._switches.forbids_beginning(self._job)
        if refusal is not None:
            raise refusal
        self.task, self._cancelling = task, task.cancelling()
        self._keeper.guards.add(self)
        self._keeper.watch_switches()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._keeper.here:
            return  # a forked child leaves the body of its parent
        self._keeper.guards.discard(self)
        self._keeper.watch_switches()
        if self._why is None or self.task is None:
            return
        # The cancellation was ours, unless somebody else has asked for one, too.
        ours = self.task.uncancel() <= self._cancelling
        if error is None or (ours and isinstance(error, asyncio.CancelledError)):
            raise self._why from error
        error.add_note(str(self._why))

    def look(self) -> None:
        """Cancels the body when it may not go on."""
        refusal = self._switches.forbids_going_on(self._job)
        if refusal is not None:
            self.cut(refusal)

    def cut(self, why: errors.TenureError) -> None:
        """Cancels the body, once."""
        if self._why is None and self.task is not None:
            self._why = why
            self.task.cancel(msg=why.message)
