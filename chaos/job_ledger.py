"""What scheduled jobs promise: judged by the one history, by what agents believe, and by the effects of their work.

The history is read by rules of its own (``due_times``, whether a settlement fits, which switch is in force), never by
the machine's tables. Only at the end of a run are the tables compared with it.

Due times: ``due-lost``, ``due-doubled``, ``due-invented`` (each due time of each job, while its schedule was in force,
is in exactly one occurrence or missed range), ``fired-early``, ``silenced`` (a schedule begins hours from now),
``stalled`` (liveness).
Occurrences: ``created-twice``, ``outcome-changed``, ``ran-after-end``, ``ended-while-running``, ``history`` (the tables
say something else), ``stuck`` (liveness).
Runs: ``overlap``, ``run-token``, ``start-rate``, ``late-start``, ``attempts``, ``shadow-run``, ``wrong-worker``,
``run-of-the-dead`` (its session has ended), ``checkpoint``; by belief: ``two-runs``.
Switches: ``started-while-off``, ``pending-while-off``, ``not-interrupted``, ``acted-after-kill``.
Effects: ``effect-twice``, ``effect-never``, ``effect-partial``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.due_times import due_times
from chaos.world import World
from sidecar.core.commands import (
    ApplyJobs,
    CheckpointRun,
    ClaimRun,
    OpenSession,
    Refused,
    Request,
    Result,
    RollbackJob,
    RunClaimed,
    ServeJobs,
    SessionOpened,
    SetSwitch,
    SettleDue,
    Settlement,
    Stamp,
    SwitchIsSet,
    SwitchMode,
)
from sidecar.core.events import Event, Kind
from sidecar.core.machine import Machine
from sidecar.core.occurrences import is_canary
from sidecar.core.specification import Delivery, JobSpec, Mode, Overlap

PARTS = 3  # of the effect of an occurrence
OPEN = ("pending", "running", "retrying")
# An agent that was told nothing acts on a run for at most this long after a kill: see the agents' rules.
STALENESS_US = 1_500_000
_SLACK_US = 50_000
# After an election, or after a clock was set, all know of each other's clocks by then.
_MEASURED_US = 1_500_000

JobKey = tuple[str, str]
OccurrenceKey = tuple[str, str, int, int]


class RunBelief(NamedTuple):
    agent: str
    token: int
    until_us: Callable[[], int]  # virtual time at which its session is not safe any more


@dataclass
class JobLife:
    """A job from its creation to its deletion."""

    specs: dict[int, JobSpec]
    revision: int
    settled_ms: int
    created_us: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        return self.specs[self.revision]


@dataclass
class OccurrenceLife:
    life: JobLife
    origin: str
    spec: JobSpec  # at its creation
    created_ms: int
    state: str = "pending"
    reason: str = ""
    run: str = ""  # the present one
    attempts: int = 0
    reopened: bool = False
    checkpoint: bytes = b""


@dataclass
class RunLife:
    key: OccurrenceKey
    session: str
    token: int
    attempt: int
    claimed: bool
    ended: bool = False
    unacknowledged: bool = False
    cause: str = ""  # of the interrupt
    interrupted_us: int = 0


class SwitchInForce(NamedTuple):
    tenant: str
    job: str
    mode: SwitchMode

    def covers(self, key: JobKey) -> bool:
        return self.tenant in ("", key[0]) and self.job in ("", key[1])


class JobLedger:
    def __init__(self, world: World) -> None:
        self._world = world
        self._checkers = world.checkers
        self.jobs: dict[JobKey, JobLife] = {}
        self.occurrences: dict[OccurrenceKey, OccurrenceLife] = {}
        self.runs: dict[str, RunLife] = {}
        self._settled_before: dict[JobKey, int] = {}  # by deleted jobs of the same name
        self._open: dict[OccurrenceKey, None] = {}
        self._live_runs: dict[str, None] = {}
        self._in_force: dict[str, SwitchInForce] = {}
        self._ended_sessions: dict[str, None] = {}
        self._serving: dict[str, tuple[tuple[str, ...], int]] = {}
        self._labels: dict[str, tuple[tuple[str, str], ...]] = {}
        self._starts: deque[int] = deque()
        self._last_token = 0
        self._beliefs: dict[JobKey, list[RunBelief]] = {}
        self._settlement_events: list[Event] = []
        self.effects = Effects(self)

    @property
    def now_us(self) -> int:
        return self._world.now_us

    def violation(self, kind: str, who: str, text: str) -> None:
        self._checkers.violation(kind, who, text)

    def reach(self, what: str) -> None:
        self._world.reach(what)

    # ---- the one history -----------------------------------------------------------------------------------------

    def applied(self, host: str, stamp: Stamp, request: Request, result: Result, events: Sequence[Event]) -> None:
        command = request.command
        self._note_command(command, result)
        claimed = result.run if isinstance(command, ClaimRun) and isinstance(result, RunClaimed) else ""
        self._settlement_events = []
        for event in events:
            if event.kind is Kind.JOB_APPLIED:
                self._job_applied(host, stamp, event, command)
            elif event.kind is Kind.JOB_DELETED:
                self._job_deleted(host, stamp, event)
            elif event.kind is Kind.RUN_ASSIGNED:
                self._assigned(host, stamp, event, claimed=event.run == claimed)
            elif event.kind is Kind.SWITCH_SET and isinstance(command, SetSwitch):
                self._in_force[event.subject] = SwitchInForce(command.tenant, command.job, command.mode)
                self.reach(f"switch set: {command.mode.name.lower()}")
            elif event.kind is Kind.SWITCH_CLEARED:
                self._in_force.pop(event.subject, None)
                self.reach(f"switch {event.cause}")
            elif event.kind in (Kind.SESSION_EXPIRED, Kind.SESSION_CLOSED):
                self._ended_sessions[event.session] = None
            elif event.kind in _HANDLERS:
                _HANDLERS[event.kind](self, host, event)
        if isinstance(command, SettleDue):
            self._settle(host, stamp, command)
        elif self._settlement_events:
            self.violation("due-invented", host, f"{command} has created {self._settlement_events[0]}")
        if isinstance(command, CheckpointRun) and any(event.kind is Kind.RUN_CHECKPOINTED for event in events):
            self.occurrences[self.runs[command.run].key].checkpoint = command.state
        self._between_items(host)

    def _note_command(self, command: object, result: Result) -> None:
        if isinstance(result, Refused):
            return
        if isinstance(command, ServeJobs):
            self._serving[command.session] = (command.jobs, command.slots)
        elif isinstance(command, OpenSession) and isinstance(result, SessionOpened):
            self._labels[result.session] = command.labels
        elif isinstance(command, SetSwitch):
            assert isinstance(result, SwitchIsSet)

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def _job_applied(self, host: str, stamp: Stamp, event: Event, command: object) -> None:
        key = (event.tenant, event.subject)
        life = self.jobs.get(key)
        if event.cause == "created":
            if life is not None:
                self.violation("created-twice", host, f"job {event.subject}")
            spec = _spec_of(command, key)
            self.jobs[key] = JobLife({1: spec}, 1, stamp.wall_ms, self._world.now_us)
            self._not_silenced(host, key, stamp.wall_ms)
            return
        assert life is not None, f"{event.subject} is no job"
        spec = life.specs[_target(command, life)] if isinstance(command, RollbackJob) else _spec_of(command, key)
        if event.sequence != life.revision + 1:
            self.violation("revision", host, f"job {event.subject}: {event.sequence} after {life.revision}")
        if spec.schedule != life.spec.schedule:
            self.reach("schedule edited")
            self._nothing_due(host, key, life, stamp.wall_ms, "another schedule")
            life.settled_ms = max(life.settled_ms, stamp.wall_ms)
            self._not_silenced(host, key, stamp.wall_ms)
        life.revision = event.sequence
        life.specs[life.revision] = spec

    def _not_silenced(self, host: str, key: JobKey, from_ms: int) -> None:
        """A schedule counts from now on, not from a time that a wrong clock shows; once it is known to be wrong."""
        limit_ms = self._world.wall_error_max_ms
        ahead_ms = from_ms - self._world.true_wall_ms()
        unknown_us = max(self._checkers.led_us, self._world.wall_changed_us) + _MEASURED_US
        if limit_ms and ahead_ms > limit_ms:
            self.reach("schedule begins at a wrong time")
        if limit_ms and ahead_ms > limit_ms and self._world.now_us > unknown_us:
            self.violation("silenced", host, f"nothing of {key[1]} is due for {ahead_ms} ms")

    def _job_deleted(self, host: str, stamp: Stamp, event: Event) -> None:
        key = (event.tenant, event.subject)
        life = self.jobs.pop(key)
        self.reach("job deleted")
        self._nothing_due(host, key, life, stamp.wall_ms, "none")
        self._settled_before[key] = max(self._settled_before.get(key, 0), life.settled_ms)

    def _nothing_due(self, host: str, key: JobKey, life: JobLife, wall_ms: int, instead: str) -> None:
        """A schedule that goes leaves no due time behind, also under a switch."""
        left = due_times(life.spec.schedule, life.settled_ms, wall_ms)
        if left:
            text = f"{key[1]} gets {instead} at {wall_ms}, and {_shown(left)} were not settled"
            self.violation("due-lost", host, text)

    # ---- due times -----------------------------------------------------------------------------------------------

    def _settle(self, host: str, stamp: Stamp, command: SettleDue) -> None:
        expected: dict[JobKey, list[int]] = {}
        for settlement in command.settlements:
            key = (settlement.tenant, settlement.name)
            life = self.jobs.get(key)
            fits = (settlement.revision, settlement.settled_ms)
            if life is None or fits != (life.revision, life.settled_ms):
                self.reach("settlement passed over")
                continue
            due = due_times(life.spec.schedule, life.settled_ms, settlement.through_ms)
            expected.setdefault(key, []).extend(due)
            self._not_early(host, key, settlement, due)
            life.settled_ms = settlement.through_ms
        by_job: dict[JobKey, list[Event]] = {key: [] for key in expected}
        for event in self._settlement_events:
            by_job.setdefault((event.tenant, event.subject), []).append(event)
        for key, happened in by_job.items():
            self._each_once(host, key, expected.get(key, []), happened)

    def _not_early(self, host: str, key: JobKey, settlement: Settlement, due: list[int]) -> None:
        """In worlds in which a majority of clocks is right all the time."""
        limit_ms = self._world.wall_error_max_ms
        if limit_ms and due and due[-1] > self._world.true_wall_ms() + limit_ms:
            ahead_ms = due[-1] - self._world.true_wall_ms()
            self.violation("fired-early", host, f"{key[1]} is settled through {ahead_ms} ms ahead of the true time")

    def _each_once(self, host: str, key: JobKey, due: list[int], happened: list[Event]) -> None:
        left = dict.fromkeys(due)
        told: list[int] = []
        for event in happened:
            if event.kind is Kind.OCCURRENCE_CREATED:
                told.append(event.due_ms)
            else:
                self.reach(f"missed: {event.reason}")
                until = [at_ms for at_ms in due if at_ms <= event.due_ms]
                told += until[-event.count :]
                if len(until) < event.count or not until or until[-1] != event.due_ms:
                    text = f"{key[1]}: {event.count} missed until {event.due_ms}, of {_shown(due)}"
                    self.violation("due-invented", host, text)
        for at_ms in told:
            if at_ms in left:
                del left[at_ms]
            else:
                kind = "due-doubled" if at_ms in due else "due-invented"
                self.violation(kind, host, f"{key[1]} at {at_ms}, of {_shown(due)}")
        before_ms = self._settled_before.get(key, 0)
        lost = [at_ms for at_ms in left if at_ms > before_ms]
        if lost:
            self.violation("due-lost", host, f"{key[1]}: nothing became of {_shown(lost)}")

    # ---- occurrences ---------------------------------------------------------------------------------------------

    def _created(self, host: str, event: Event) -> None:
        key = _key(event)
        life = self.jobs[key[:2]]
        known = self.occurrences.get(key)
        if known is not None and known.life is life:
            self.violation("created-twice", host, f"{key}")
        self.occurrences[key] = OccurrenceLife(life, event.cause, life.spec, event.cluster_ms)
        self._open[key] = None
        self.reach(f"created: {event.cause}")
        if event.cause in ("schedule", "catch_up"):
            self._settlement_events.append(event)

    def _missed(self, host: str, event: Event) -> None:
        self._settlement_events.append(event)
        self._count((event.tenant, event.subject), "missed", event.count)

    def _ended(self, host: str, event: Event) -> None:
        key = _key(event)
        row = self.occurrences.get(key)
        if row is None or row.state not in OPEN:
            was = "it never was" if row is None else f"it was {row.state} ({row.reason})"
            self.violation("outcome-changed", host, f"{key} ends {event.cause} ({event.reason}), {was}")
            return
        if row.run:
            self.violation("ended-while-running", host, f"{key} ends {event.cause} while {row.run} goes on")
        self.reach(f"ended: {event.cause} {_word(event.reason)}".rstrip())
        row.state, row.reason = event.cause, event.reason
        del self._open[key]
        self._count(key[:2], event.cause, 1)
        if event.cause == "succeeded" and event.reason != "record_completed":
            self.effects.judge(host, key)

    def _resolved(self, host: str, event: Event) -> None:
        key = _key(event)
        row = self.occurrences[key]
        if row.state != "unknown":
            self.violation("outcome-changed", host, f"{key} is resolved {event.cause}, it was {row.state}")
        self.reach(f"resolved: {event.cause}")
        self._count(key[:2], "unknown", -1)
        if event.cause == "retry":
            row.state, row.reason, row.reopened = "retrying", "", True
            self._open[key] = None
        else:
            row.state, row.reason = event.cause, "resolved"
            self._count(key[:2], event.cause, 1)

    def _count(self, key: JobKey, outcome: str, count: int) -> None:
        life = self.jobs.get(key)
        if life is not None:
            life.counts[outcome] = max(0, life.counts.get(outcome, 0) + count)

    # ---- runs ----------------------------------------------------------------------------------------------------

    def _assigned(self, host: str, stamp: Stamp, event: Event, *, claimed: bool) -> None:
        key = _key(event)
        row = self.occurrences.get(key)
        if row is None or row.state not in ("pending", "retrying"):
            was = "never was" if row is None else f"is {row.state} ({row.reason})"
            self.violation("ran-after-end", host, f"{event.run} is a run of {key}, which {was}")
            return
        self._may_start(host, stamp, event, key, row)
        self._fits_worker(host, event, key, claimed=claimed)
        self._keeps_rate(host, event)
        if event.token <= self._last_token:
            self.violation("run-token", host, f"{event.run}: token {event.token} after {self._last_token}")
        self._last_token = event.token
        row.state, row.run, row.attempts = "running", event.run, row.attempts + 1
        self.runs[event.run] = RunLife(key, event.session, event.token, event.attempt, claimed)
        self._live_runs[event.run] = None
        self.reach("run claimed" if claimed else "run assigned")

    def _may_start(self, host: str, stamp: Stamp, event: Event, key: OccurrenceKey, row: OccurrenceLife) -> None:
        spec = self.jobs[key[:2]].spec
        running = sum(1 for run in self._live_runs if self.runs[run].key[:2] == key[:2])
        most = spec.concurrent_max if spec.overlap is Overlap.ALLOW else 1
        if running >= most:
            self.violation("overlap", host, f"{event.run} of {key} starts while {running} of {most} run")
        modes = {each.mode for each in self._in_force.values() if each.covers(key[:2])}
        if row.state == "retrying":
            modes.discard(SwitchMode.DRAIN)
        if modes:
            self.violation("started-while-off", host, f"{event.run} of {key}, under {sorted(modes)}")
        if spec.mode is Mode.SHADOW:
            self.violation("shadow-run", host, f"{event.run} of {key}")
        if row.state == "pending" and event.cluster_ms > row.created_ms + row.spec.starting_deadline_ms:
            late_ms = event.cluster_ms - row.created_ms
            self.violation("late-start", host, f"{event.run} of {key} starts after {late_ms} ms")
        late_ms = stamp.wall_ms - key[2]
        if row.state == "pending" and row.origin == "schedule" and late_ms > spec.starting_deadline_ms:
            self.violation("late-start", host, f"{event.run} of {key} starts {late_ms} ms after its due time")
        if event.attempt != row.attempts + 1:
            self.violation("attempts", host, f"{event.run} of {key} is attempt {event.attempt} after {row.attempts}")

    def _fits_worker(self, host: str, event: Event, key: OccurrenceKey, *, claimed: bool) -> None:
        jobs, slots = self._serving.get(event.session, ((), 0))
        spec, labels = self.jobs[key[:2]].spec, dict(self._labels.get(event.session, ()))
        fits = all(labels.get(label) in values for label, values in spec.selector)
        if spec.canary is not None:
            wanted = is_canary(spec, *key[:3])
            fits = fits and (labels.get(spec.canary.label) == spec.canary.value) == wanted
        if not claimed:
            busy = [run for run in self._live_runs if self.runs[run].session == event.session]
            busy = [run for run in busy if not self.runs[run].claimed]
            served = any(key[1] == job or (job.endswith("*") and key[1].startswith(job[:-1])) for job in jobs)
            fits = fits and served and len(busy) < slots
        if not fits:
            self.violation("wrong-worker", host, f"{event.run} of {key} goes to {event.session} ({jobs}, {slots})")

    def _keeps_rate(self, host: str, event: Event) -> None:
        starts = self._starts
        starts.append(event.cluster_ms)
        while starts[0] <= event.cluster_ms - 1_000:
            starts.popleft()
        limit = self._world.shape.starts_per_second
        if len(starts) > limit:
            self.violation("start-rate", host, f"{len(starts)} runs start in a second, {limit} may")
        if len(starts) == limit:
            self.reach("start rate reached")

    def _run_ended(self, host: str, event: Event) -> None:
        run, key = self.runs[event.run], _key(event)
        if run.ended or key != run.key:
            self.violation("outcome-changed", host, f"{event.run} of {key} ends twice, or is another's")
            return
        run.ended, run.unacknowledged = True, event.reason.endswith("no acknowledgement")
        del self._live_runs[event.run]
        row = self.occurrences[key]
        row.run, row.state = "", "retrying"
        self.reach(f"run ended: {event.cause}{' without acknowledgement' if run.unacknowledged else ''}")

    def _interrupted(self, host: str, event: Event) -> None:
        run = self.runs[event.run]
        if run.cause or run.ended:
            self.violation("outcome-changed", host, f"{event.run} is interrupted ({event.cause}) after {run.cause}")
        run.cause, run.interrupted_us = event.cause, self._world.now_us
        self.reach(f"interrupted: {event.cause}")

    # ---- switches ------------------------------------------------------------------------------------------------

    def _effective(self, key: JobKey) -> SwitchMode | None:
        return max((each.mode for each in self._in_force.values() if each.covers(key)), default=None)

    def _between_items(self, host: str) -> None:
        """What must be true after each request."""
        for run in self._live_runs:
            if self.runs[run].session in self._ended_sessions:
                self.violation("run-of-the-dead", host, f"{run} of {self.runs[run].session}, which has ended")
        for key in self._open:
            row = self.occurrences[key]
            mode = self._effective(key[:2])
            if mode is not None and (row.state == "pending" or (row.state == "retrying" and mode is SwitchMode.KILL)):
                self.violation("pending-while-off", host, f"{key} is {row.state}, and its job is {mode.name}")
            if mode is SwitchMode.KILL and row.state == "running" and not self.runs[row.run].cause:
                self.violation("not-interrupted", host, f"{row.run} of {key}, which is killed")
            if row.state == "retrying" and not row.reopened:
                self._may_retry(host, key, row)

    def _may_retry(self, host: str, key: OccurrenceKey, row: OccurrenceLife) -> None:
        spec = row.spec
        if row.attempts and spec.delivery is Delivery.AT_MOST_ONCE:
            self.violation("attempts", host, f"{key} is delivered at most once, and retried after {row.attempts}")

    def kill_bound_us(self, run: RunLife, grace_us: int) -> int:
        """Until when an agent may act on a run that was killed."""
        drift_us = STALENESS_US * self._world.shape.drift_ppm // 500_000
        return run.interrupted_us + STALENESS_US + grace_us + drift_us + _SLACK_US

    # ---- what agents believe -------------------------------------------------------------------------------------

    def knows(self, agent: str, run: str, token: int) -> bool:
        """What an agent is given must be in the history."""
        known = self.runs.get(run)
        if known is None or known.token != token:
            self.violation("wrong-answer", agent, f"{run} with token {token} is no run of the history")
            return False
        return True

    def believe(self, key: JobKey, run: str, belief: RunBelief) -> None:
        """From now on this agent works for the job. Nobody else does, unless the job allows it, or the cluster gave up
        waiting for the other's answer."""
        now_us = self._world.now_us
        others = [each for each in self._beliefs.get(key, []) if each.until_us() > now_us]
        mine = self.runs[run]
        for other in others:
            ended = self.runs[f"r{other.token}"]
            if not (ended.unacknowledged or mine.unacknowledged or self.allows(key)):
                text = f"{key[1]}: {belief.agent} ({run}) and {other.agent} (r{other.token}) both run it"
                self.violation("two-runs", belief.agent, text)
        self._beliefs[key] = [*others, belief]

    def disbelieve(self, key: JobKey, token: int) -> None:
        self._beliefs[key] = [each for each in self._beliefs.get(key, []) if each.token != token]

    def allows(self, key: JobKey) -> bool:
        """Whether it ever did: runs may have begun under another revision."""
        life = self.jobs.get(key)
        return life is None or any(spec.overlap is Overlap.ALLOW for spec in life.specs.values())

    def told_checkpoint(self, agent: str, run: str, checkpoint: bytes) -> None:
        row = self.occurrences[self.runs[run].key]
        if row.run == run and row.checkpoint != checkpoint and row.attempts == self.runs[run].attempt:
            text = f"{run} gets the checkpoint {checkpoint!r}, the last one is {row.checkpoint!r}"
            self.violation("checkpoint", agent, text)

    # ---- the end -------------------------------------------------------------------------------------------------

    def unsettled(self, wall_ms: int) -> list[str]:
        """Jobs of which due times up to then are not dealt with."""
        return [
            f"{key[1]}: {_shown(left)}"
            for key, life in self.jobs.items()
            if (left := due_times(life.spec.schedule, life.settled_ms, wall_ms))
        ]

    def unfinished(self) -> list[str]:
        """Occurrences that should have ended by now. One that a pause keeps between two attempts may wait."""
        return [
            f"{key} is {self.occurrences[key].state}"
            for key in self._open
            if not (self.occurrences[key].state == "retrying" and self._effective(key[:2]) is not None)
        ]

    def compare(self, host: str, machine: Machine) -> None:
        """The tables must say what the history said."""
        rows = 0
        for tenant in dict.fromkeys(tenant for tenant, _ in (*self.jobs, *self._settled_before)):
            for job in machine.jobs_with_history(tenant, "", "", 1_000):
                for row in machine.occurrences(tenant, job, None, 100_000):
                    rows += 1
                    known = self.occurrences.get((tenant, job, row.due_ms, row.sequence))
                    state = row.state.name.lower()
                    if state == "missed" and row.sequence == 0 and (known is None or known.state != "missed"):
                        continue  # a range
                    if known is None or known.state != state:
                        was = "is not in the history" if known is None else f"was {known.state}"
                        self.violation("outcome-changed", host, f"{job} {row.due_ms} is {state}, and {was}")
        kept = machine.counts()["occurrences"]
        if rows != kept:
            self.violation("history", host, f"{rows} occurrences can be listed, {kept} are kept")
        for key, life in self.jobs.items():
            self._compare_job(host, machine, key, life)

    def _compare_job(self, host: str, machine: Machine, key: JobKey, life: JobLife) -> None:
        job = machine.job(*key)
        if job is None or (job.revision, job.spec, job.settled_ms) != (life.revision, life.spec, life.settled_ms):
            self.violation("history", host, f"job {key[1]} is {job}, the history says {life}")
            return
        counts = {name: getattr(job, name) for name in _OUTCOMES}
        expected = {name: life.counts.get(name, 0) for name in _OUTCOMES}
        if counts != expected:
            self.violation("history", host, f"job {key[1]} counts {counts}, the history {expected}")
        rows = machine.occurrences(*key, None, 100_000)
        ended = [row for row in rows if row.state.name.lower() not in OPEN and not row.held]
        if len(ended) > life.spec.history_count:
            self.violation("history", host, f"job {key[1]} keeps {len(ended)} of {life.spec.history_count}")


class Effects:
    """Where the work of agents shows: a store that takes a part of an effect only with a token that is not older than
    one it has seen. The store of one job; of one occurrence, where the job allows several runs at once."""

    def __init__(self, ledger: JobLedger) -> None:
        self._ledger = ledger
        self._highest: dict[tuple[object, ...], int] = {}
        self._parts: dict[OccurrenceKey, dict[int, list[int]]] = {}

    def open(self, run: str) -> bool:
        """The store learns of the token. False: fenced."""
        life = self._ledger.runs[run]
        scope = life.key if self._ledger.allows(life.key[:2]) else life.key[:2]
        if life.token < self._highest.get(scope, 0):
            self._ledger.reach("effect fenced")
            return False
        self._highest[scope] = life.token
        return True

    def write(self, agent: str, run: str, part: int, grace_us: int) -> bool:
        """False: fenced. ``grace_us``: the agent was promised it between an interrupt and the end of its run."""
        if not self.open(run):
            return False
        life = self._ledger.runs[run]
        self._judge_write(agent, run, life, grace_us)
        self._parts.setdefault(life.key, {}).setdefault(part, []).append(life.token)
        return True

    def _judge_write(self, agent: str, run: str, life: RunLife, grace_us: int) -> None:
        ledger = self._ledger
        row = ledger.occurrences[life.key]
        if row.state == "succeeded" and row.reason != "resolved":
            ledger.violation("effect-twice", agent, f"{run} acts for {life.key}, which has succeeded")
        tokens = [token for written in self._parts.get(life.key, {}).values() for token in written]
        others = [token for token in tokens if token != life.token]
        if others and row.spec.delivery is Delivery.AT_MOST_ONCE and not row.reopened:
            ledger.violation(
                "effect-twice", agent, f"{run} acts for {life.key} after {others}, at most once is allowed"
            )
        if life.cause == "killed" and ledger.now_us > ledger.kill_bound_us(life, grace_us):
            late_ms = (ledger.now_us - life.interrupted_us) // 1000
            ledger.violation("acted-after-kill", agent, f"{run} of {life.key}, {late_ms} ms after the kill")

    def judge(self, host: str, key: OccurrenceKey) -> None:
        """It has succeeded, by the word of an agent."""
        parts = self._parts.get(key, {})
        if not parts:
            self._ledger.violation("effect-never", host, f"{key} has succeeded without an effect")
        elif len(parts) < PARTS:
            self._ledger.violation("effect-partial", host, f"{key} has succeeded with parts {sorted(parts)}")


def _spec_of(command: object, key: JobKey) -> JobSpec:
    assert isinstance(command, ApplyJobs), f"{command} has changed a job"
    return next(each.spec for each in command.jobs if (each.tenant, each.name) == key)


def _target(command: RollbackJob, life: JobLife) -> int:
    return command.to_revision or life.revision - 1


def _key(event: Event) -> OccurrenceKey:
    return (event.tenant, event.subject, event.due_ms, event.sequence)


def _word(reason: str) -> str:
    """Without what differs from case to case."""
    return " ".join(word for word in reason.split() if not any(letter.isdigit() for letter in word))


def _shown(due: Sequence[int]) -> str:
    return f"{len(due)} due times ({', '.join(map(str, due[:4]))}{', ...' if len(due) > 4 else ''})"


_OUTCOMES = ("succeeded", "failed", "skipped", "missed", "cancelled", "unknown")
_HANDLERS: dict[Kind, Callable[[JobLedger, str, Event], None]] = {
    Kind.OCCURRENCE_CREATED: JobLedger._created,
    Kind.OCCURRENCE_ENDED: JobLedger._ended,
    Kind.OCCURRENCE_MISSED: JobLedger._missed,
    Kind.OCCURRENCE_RESOLVED: JobLedger._resolved,
    Kind.RUN_ENDED: JobLedger._run_ended,
    Kind.RUN_INTERRUPTED: JobLedger._interrupted,
}
