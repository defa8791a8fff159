"""The leader's duty: find out what is due, and propose it.

    poll -> is this node the leader, and is its clock to be trusted?
         -> machine.jobs_to_settle(wall time) -> a plan for each -> one SettleDue -> the log

Rules:

1. Nothing is remembered here that matters. What a job is settled through, and what is due next, is replicated state; a
   settlement that meets another state is passed over. So a new leader goes on where the log ends, and two leaders, a
   repeated proposal or a clock that steps back can neither double a due time nor lose one.
2. Wall time decides what is due. A new leader, or one whose wall clock has jumped, proposes nothing until the clocks of
   its peers were measured, or could not be for some seconds; while a majority of the cluster disagrees with this clock,
   nothing is proposed at all: the duty is handed to a node that is with the majority.
3. Work is done in slices, so that ten thousand jobs that are due at once delay nobody's heartbeat.
4. A job whose schedule cannot be computed here (its zone is unknown to this node's tables) holds up no other job: it is
   settled as having no next due time, until it is changed or a leader with other tables computes all anew. One whose
   settlement the state refuses is set aside in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sidecar.consensus.ports import Clock
from sidecar.core.commands import Due, Missed, Refused, SettleDue, Settlement, SetTzdata
from sidecar.core.events import Event, Kind
from sidecar.core.jobs import Job
from sidecar.proposer import Failed, Outcome, Proposer
from sidecar.scheduling.misfires import Plan, plan
from sidecar.scheduling.schedules import compile_schedule
from sidecar.scheduling.zones import tzdata_version

log = logging.getLogger("tenure.scheduling")

# Of one slice.
JOBS_MAX, DUE_TIMES_MAX = 200, 1_000
PROPOSE_TIMEOUT_MS = 5_000
# Wall time is looked at this often, although nothing may be due: it can step.
LOOK_S = 0.5
RETRY_S = 0.1
# Between two slices, for everybody else's work.
BREATH_S = 0.002
# Wall time that moved this much against the monotonic clock has stepped; the peers are asked again for this long.
STEP_MS = 1_000
MEASURE_S = 1.0
# Peers whose clocks are not known are awaited for so long: a broken connection is made again within a second or two.
DOUBT_S = 5.0
MEASURING = "the other nodes' clocks are being measured"

JobKey = tuple[str, str]


class SchedulerNode(Protocol):
    """What the scheduler asks of its consensus node."""

    def is_leader(self) -> bool: ...
    def clock_offsets_ms(self) -> Sequence[tuple[str, int]]: ...
    def transfer_leadership(self, to: str | None, done: Callable[[str | None], None]) -> None: ...


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int = 1  # voters of the cluster
    skew_max_ms: int = 10_000  # a clock that differs by more from a majority's fires nothing


class Scheduler:
    """One node's. All methods are called from the node's thread."""

    def __init__(
        self, proposer: Proposer, node: SchedulerNode, clock: Clock, settings: SchedulerSettings | None = None
    ) -> None:
        self._proposer, self._node, self._clock = proposer, node, clock
        self._machine = proposer.machine
        self._settings = settings or SchedulerSettings()
        self.held_reason = ""  # why nothing is proposed although this node leads; empty: it is
        self._in_flight: set[JobKey] = set()
        self._refused: set[JobKey] = set()  # set aside until they change, or another node leads
        self._tzdata_proposed = False
        self._doubt_since_s: float | None = None  # no majority is known to have this node's time
        # Wall minus monotonic time, when last looked at; and until when the peers' clocks are awaited.
        self._drift_ms: int | None = None
        self._measure_until_s = 0.0
        self._schedule: Callable[[float], None] = lambda when_s: None

    def attach(self, schedule: Callable[[float], None]) -> None:
        """``schedule(when_s)`` promises ``poll`` at that monotonic time; a later call takes the place of an earlier."""
        self._schedule = schedule
        self._proposer.wall_ms = self.wall_ms
        self._proposer.subscribe(self._events, self._look_now)
        self._proposer.on_role_change.append(self._look_now)
        self._look_now()

    def wall_ms(self) -> int:
        """What this leader stamps: its own wall time, unless a majority is known to have another; then that of the
        node in the middle, so that a job which is created meanwhile does not begin hours from now."""
        offsets = dict(self._node.clock_offsets_ms())
        alone = self._settings.nodes - len(self._far(offsets)) < self._settings.nodes // 2 + 1
        return self._clock.wall_ms() + (statistics.median_low([0, *offsets.values()]) if alone else 0)

    def _far(self, offsets: dict[str, int]) -> dict[str, int]:
        return {peer: offset_ms for peer, offset_ms in offsets.items() if abs(offset_ms) > self._settings.skew_max_ms}

    def lag_ms(self) -> int:
        """How late the most overdue schedule is; 0 when none is, or this node does not lead. Without the jobs that are
        set aside: they are warned of, and one of them does not make the leader unfit for all others."""
        wall_ms, due_ms = self._clock.wall_ms(), self._machine.next_due_wall_ms()
        if due_ms is None or due_ms >= wall_ms or not self._node.is_leader():
            return 0
        if self._refused:
            behind = self._machine.jobs_to_settle(wall_ms, len(self._refused) + JOBS_MAX)
            fit = [job for job in behind if job.next_due_ms > 0 and (job.tenant, job.name) not in self._refused]
            due_ms = min((job.next_due_ms for job in fit), default=wall_ms)
        return wall_ms - due_ms

    # ---- when --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Propose what is due. Harmless at any time, and on a follower."""
        now_s, wall_ms = self._clock.monotonic_s(), self._clock.wall_ms()
        self._watch_clock(now_s, wall_ms)
        if not self._node.is_leader():
            self._doubt_since_s, self._tzdata_proposed, self.held_reason = None, False, ""
            self._in_flight.clear()
            self._refused.clear()
            self._schedule(now_s + LOOK_S)
            return
        self._hold(now_s)
        if self.held_reason:
            self._schedule(now_s + RETRY_S)
            return
        self._propose_tzdata()
        more = self._settle(wall_ms)
        self._schedule(now_s + BREATH_S if more else self._next_s(now_s, wall_ms))

    def _next_s(self, now_s: float, wall_ms: int) -> float:
        due_ms = self._machine.next_due_wall_ms()
        if due_ms is None:
            return now_s + LOOK_S
        # At least a moment: what is due already is in flight.
        return now_s + min(LOOK_S, max(BREATH_S if due_ms > wall_ms else RETRY_S, (due_ms - wall_ms) / 1000))

    def _events(self, events: Sequence[Event]) -> None:
        applied = {(event.tenant, event.subject) for event in events if event.kind is Kind.JOB_APPLIED}
        if applied:
            self._refused -= applied
            self._look_now()

    def _look_now(self) -> None:
        self._schedule(self._clock.monotonic_s())

    # ---- is the clock to be trusted? ---------------------------------------------------------------------------

    def _watch_clock(self, now_s: float, wall_ms: int) -> None:
        drift_ms = wall_ms - int(now_s * 1000)
        if self._drift_ms is not None and abs(drift_ms - self._drift_ms) > STEP_MS and self._settings.nodes > 1:
            log.warning("the wall clock stepped by %d ms", drift_ms - self._drift_ms)
            self._measure_until_s = now_s + MEASURE_S
        self._drift_ms = drift_ms

    def _hold(self, now_s: float) -> None:
        before = self.held_reason
        self.held_reason = self._distrust(now_s)
        if self.held_reason and self.held_reason != before:
            level = logging.INFO if self.held_reason == MEASURING else logging.WARNING
            log.log(level, "schedules are held back: %s", self.held_reason)
        elif before and not self.held_reason:
            log.info("schedules go on")

    def _distrust(self, now_s: float) -> str:
        if now_s < self._measure_until_s:
            return f"the wall clock stepped; {MEASURING}"
        offsets = dict(self._node.clock_offsets_ms())
        far = self._far(offsets)
        quorum = self._settings.nodes // 2 + 1
        if 1 + len(offsets) - len(far) >= quorum:
            self._doubt_since_s = None
            return ""
        if self._doubt_since_s is None:
            self._doubt_since_s = now_s
        if self._settings.nodes - len(far) >= quorum:
            # Those that cannot be measured have the benefit of the doubt, in the end.
            return MEASURING if now_s < self._doubt_since_s + DOUBT_S else ""
        self._hand_over(offsets)
        differences = ", ".join(f"{peer} {offset_ms:+d} ms" for peer, offset_ms in sorted(far.items()))
        return f"this node's wall clock differs from most others': {differences}"

    def _hand_over(self, offsets: dict[str, int]) -> None:
        """To the node whose clock is in the middle of all."""
        middle_ms = statistics.median_low([0, *offsets.values()])
        peer = min(sorted(offsets), key=lambda name: abs(offsets[name] - middle_ms))
        self._node.transfer_leadership(peer, lambda error: None)

    # ---- what is due -------------------------------------------------------------------------------------------

    def _propose_tzdata(self) -> None:
        version = tzdata_version()
        if self._tzdata_proposed or self._machine.tzdata == version:
            return
        self._tzdata_proposed = True

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Failed):
                self._tzdata_proposed = False

        self._proposer.submit(SetTzdata(version=version), done, timeout_ms=PROPOSE_TIMEOUT_MS)

    def _settle(self, wall_ms: int) -> bool:
        """Whether there may be more to do at once."""
        passed_over = len(self._in_flight) + len(self._refused)
        jobs = self._machine.jobs_to_settle(wall_ms, JOBS_MAX + passed_over)
        settlements: list[Settlement] = []
        room = DUE_TIMES_MAX
        for job in jobs:
            if room <= 0 or len(settlements) >= JOBS_MAX:
                break
            key = (job.tenant, job.name)
            if key not in self._in_flight and key not in self._refused:
                settlement = _settlement(job, wall_ms, room)
                settlements.append(settlement)
                room -= len(settlement.due)
        if not settlements:
            return False
        self._propose(settlements)
        return room <= 0 or len(jobs) >= JOBS_MAX + passed_over

    def _propose(self, settlements: list[Settlement]) -> None:
        keys = [(each.tenant, each.name) for each in settlements]
        self._in_flight.update(keys)

        def done(outcome: Outcome) -> None:
            """Whatever came of it: what is still to be done, the state says."""
            self._in_flight.difference_update(keys)
            if isinstance(outcome, Refused):
                self._set_aside(settlements, outcome.message)
                return
            late = isinstance(outcome, Failed)
            self._schedule(self._clock.monotonic_s() + (RETRY_S if late else 0))

        self._proposer.submit(SettleDue(settlements=tuple(settlements)), done, timeout_ms=PROPOSE_TIMEOUT_MS)

    def _set_aside(self, settlements: list[Settlement], why: str) -> None:
        """One refused settlement has the others of its slice refused: each is tried by itself."""
        if len(settlements) > 1:
            for each in settlements:
                self._propose([each])
            return
        (refused,) = settlements
        log.error("the due times of job %s/%s cannot be settled: %s", refused.tenant, refused.name, why)
        self._refused.add((refused.tenant, refused.name))
        self._look_now()

    def other_rules(self) -> bool:
        """Whether this node has other time-zone rules than those by which due times are computed."""
        return self._machine.tzdata not in ("", tzdata_version())

    def warnings(self) -> list[str]:
        """What an operator of this node should know of."""
        found = []
        if self.other_rules():
            rules = f"{tzdata_version()}, due times are computed by {self._machine.tzdata}"
            found.append(f"this node has time-zone rules {rules}")
        if self.held_reason:
            found.append(f"schedules are held back: {self.held_reason}")
        if self._refused:
            tenant, name = min(self._refused)
            found.append(f"due times of {len(self._refused)} jobs (as {tenant}/{name}) cannot be settled: see the log")
        return found


def _settlement(job: Job, wall_ms: int, room: int) -> Settlement:
    planned = _plan(job, wall_ms, room)
    return Settlement(
        tenant=job.tenant,
        name=job.name,
        revision=job.revision,
        settled_ms=job.settled_ms,
        through_ms=planned.settled_ms,
        next_due_ms=planned.next_due_ms,
        due=tuple(Due(each.due_ms, each.catch_up) for each in planned.due),
        missed=tuple(Missed(each.first_due_ms, each.last_due_ms, each.count, each.reason) for each in planned.missed),
    )


def _plan(job: Job, wall_ms: int, room: int) -> Plan:
    # A clock that stepped back settles nothing anew.
    now_ms = max(wall_ms, job.settled_ms)
    try:
        return plan(compile_schedule(job.spec.schedule), job.spec, job.settled_ms, now_ms, room)
    except (ValueError, ArithmeticError, LookupError) as error:
        log.error("the schedule of job %s/%s cannot be computed here: %s", job.tenant, job.name, error)
        return Plan(due=(), missed=(), settled_ms=job.settled_ms, next_due_ms=0)


class SchedulerTimer:
    """The scheduler on the running event loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler.attach(self._schedule)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._stopped:
            self._timer = self._loop.call_later(max(0.0, when_s - self._clock.monotonic_s()), self._poll)

    def _poll(self) -> None:
        """Whatever goes wrong once does not end the schedules: it is said, and tried again."""
        try:
            self._scheduler.poll()
        except Exception:  # nobody else would arm the timer again
            log.exception("looking for what is due failed")
            self._schedule(self._clock.monotonic_s() + LOOK_S)
