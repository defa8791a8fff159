"""Occurrences: what becomes of each due time (see the rules at the top of machine.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from enum import IntEnum, unique
from hashlib import blake2b
from itertools import islice

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import (
    Backfilled,
    BackfillJob,
    Done,
    OccurrenceCreated,
    OccurrenceResolution,
    Reason,
    Refused,
    ResolveOccurrence,
    SettleDue,
    SwitchMode,
    TriggerJob,
)
from sidecar.core.context import Context, full
from sidecar.core.deadlines import Deadlines
from sidecar.core.events import Kind
from sidecar.core.jobs import Job, Jobs, job_not_found, revision_mismatch
from sidecar.core.ordering import Key, SortedKeys
from sidecar.core.specification import JobSpec, Mode, Overlap, Retry
from sidecar.core.switches import Switch, Switches, switched_off

STEPS_MAX, FIRST_STEPS_KEPT = 64, 8
STEP_TEXT_MAX = 1_024
# Of what ended after its job was deleted.
ORPHAN_AGE_MS = 30 * 86_400_000
# Rows of history that go for one new occurrence, at most, when there is no room.
MADE_ROOM_MAX = 100
NO_ROOM = "no_room"


@unique
class OccurrenceState(IntEnum):
    PENDING = 1
    RUNNING = 2
    RETRYING = 3  # between two attempts
    SUCCEEDED = 4
    FAILED = 5
    SKIPPED = 6
    MISSED = 7
    CANCELLED = 8
    UNKNOWN = 9


ENDED = frozenset(
    {
        OccurrenceState.SUCCEEDED,
        OccurrenceState.FAILED,
        OccurrenceState.SKIPPED,
        OccurrenceState.MISSED,
        OccurrenceState.CANCELLED,
        OccurrenceState.UNKNOWN,
    }
)


@unique
class Origin(IntEnum):
    SCHEDULE = 1
    CATCH_UP = 2
    TRIGGER = 3
    BACKFILL = 4


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Of an occurrence's story: what happened, when (wall and cluster milliseconds), to whom, and why."""

    what: str
    wall_ms: int
    cluster_ms: int
    attempt: int = 0
    run: str = ""
    session: str = ""
    agent: str = ""
    host: str = ""
    cause: str = ""
    actor: str = ""
    reason: str = ""


class Occurrence(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Its name is (tenant, job, due_ms, sequence): 0 for one of the schedule, else the revision that created it."""

    tenant: str
    job: str
    due_ms: int
    sequence: int
    origin: Origin
    state: OccurrenceState
    job_revision: int
    created_ms: int
    created_wall_ms: int
    # Not before this, and not (for the first time) after that; cluster milliseconds.
    ready_ms: int
    start_by_ms: int
    priority: int = 0
    reason: str = ""
    attempt: int = 0
    run: str = ""  # the present one
    checkpoint: bytes = b""
    payload: bytes | None = None  # instead of the job's
    result: bytes = b""
    error: str = ""
    ended_ms: int = 0
    ended_wall_ms: int = 0
    expires_ms: int = 0  # when its history is over
    # A missed range: the first due time and how many; due_ms is the last.
    first_due_ms: int = 0
    count: int = 1
    held: bool = False
    canary: bool = False
    shadow: bool = False
    steps: tuple[Step, ...] = ()


OccurrenceKey = tuple[str, str, int, int]


def idempotency_key(job: str, due_ms: int, sequence: int, origin: Origin) -> str:
    """Of the effect that belongs to the due time. A backfill has that of the schedule's own occurrence; a trigger is
    an effect of its own."""
    own = f"/{sequence}" if origin is Origin.TRIGGER else ""
    return f"job/{job}/{due_ms}{own}"


# ---- what is derived from the name of an occurrence ----------------------------------------------------------------


def spread(span: int, *parts: object) -> int:
    """A number from 0 to ``span``, the same for the same parts on every node and in every version."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % (span + 1)


def jitter(spec: JobSpec, tenant: str, job: str, due_ms: int, sequence: int) -> int:
    return spread(spec.jitter_ms, "jitter", tenant, job, due_ms, sequence) if spec.jitter_ms else 0


def is_canary(spec: JobSpec, tenant: str, job: str, due_ms: int) -> bool:
    return spec.canary is not None and spread(99, "canary", tenant, job, due_ms) < spec.canary.percent


def backoff_ms(retry: Retry, row: Occurrence) -> int:
    """The wait after the row's attempt."""
    power = max(0, row.attempt - 1)
    base_ms: int = min(retry.max_ms, retry.initial_ms * retry.multiplier_percent**power // 100**power)
    span = base_ms * retry.jitter_percent // 100
    return base_ms + spread(span, "backoff", row.tenant, row.job, row.due_ms, row.sequence, row.attempt)


# ---- the line of a job ---------------------------------------------------------------------------------------------

Place = tuple[int, int, int, int]  # lowered priority, ready_ms, due_ms, sequence: sorts as a job's line goes
# Where an occurrence waits that is ready: between attempts or not, canary or not.
Slot = tuple[bool, bool]
SLOTS: tuple[Slot, ...] = ((False, False), (False, True), (True, False), (True, True))


class Line:
    """Derived: what there is of one job."""

    __slots__ = ("history", "key", "order", "ready", "retrying", "running", "unfinished")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.order: list[tuple[int, int]] = []  # due time and sequence of every row
        self.history: list[tuple[int, int, int]] = []  # the same of what ended and is not held, after when it ended
        self.unfinished: dict[tuple[int, int], None] = {}
        self.running = self.retrying = 0
        self.ready: dict[Slot, list[Place]] = {}


_OPEN = frozenset({OccurrenceState.PENDING, OccurrenceState.RUNNING, OccurrenceState.RETRYING})
_WAITING = frozenset({OccurrenceState.PENDING, OccurrenceState.RETRYING})


class Occurrences:
    """The table of occurrences, the line of each job, and its history."""

    def __init__(
        self,
        context: Context,
        jobs: Jobs,
        switches: Switches,
        *,
        arm_ready: Callable[[OccurrenceKey, int], None],
        disarm_ready: Callable[[OccurrenceKey], None],
        arm_start: Callable[[OccurrenceKey, int], None],
        disarm_start: Callable[[OccurrenceKey], None],
        interrupt: Callable[[str, str], None],
        rows: Iterable[Occurrence],
    ) -> None:
        """``interrupt`` asks a run, by its name, to stop for a cause."""
        self._context, self._jobs, self._switches, self._interrupt = context, jobs, switches, interrupt
        self._arm_ready, self._disarm_ready = arm_ready, disarm_ready
        self._arm_start, self._disarm_start = arm_start, disarm_start
        self.table: dict[OccurrenceKey, Occurrence] = {}
        # Derived.
        self.bytes = 0
        self.pending = 0
        self._history = 0  # rows in the histories of all lines
        self.lines: dict[Key, Line] = {}
        self.line_order = SortedKeys()
        self.ready_order = SortedKeys()  # of lines in which something is ready
        self.open_order = SortedKeys()  # of lines in which something is unfinished
        self._held: dict[str, dict[OccurrenceKey, None]] = {}
        self.expiries: Deadlines[Key] = Deadlines(self._expires_ms)
        # Lines to be looked at, at the end of the apply: something changed that may let one of them start.
        self.changed: dict[Key, None] = {}
        for row in rows:
            self.put(row)

    # ---- commands ------------------------------------------------------------------------------------------------

    def settle(self, command: SettleDue) -> Done:
        for settlement in command.settlements:
            job = self._jobs.settle(settlement)
            if job is None:
                continue
            for missed in settlement.missed:
                self._miss(job, missed.first_due_ms, missed.last_due_ms, missed.count, missed.reason)
            ended = self._switches.ended_since(settlement.settled_ms)
            for due in settlement.due:
                if (job.tenant, job.name, due.due_ms, 0) not in self.table:
                    origin = Origin.CATCH_UP if due.catch_up else Origin.SCHEDULE
                    self._create(job, due.due_ms, 0, origin, was_off=_off_at(ended, job, due.due_ms))
        return Done(revision=self._context.revision)

    def trigger(self, command: TriggerJob) -> OccurrenceCreated | Refused:
        job = self._startable(command.tenant, command.name)
        if isinstance(job, Refused):
            return job
        refusal = self._no_room(1, 0 if command.payload is None else len(command.payload))
        if refusal is not None:
            return refusal
        due_ms, sequence = self._context.stamp.wall_ms, self._context.revision + 1
        self._create(job, due_ms, sequence, Origin.TRIGGER, command.payload, actor=command.actor, reason=command.reason)
        return OccurrenceCreated(due_ms=due_ms, sequence=sequence, revision=self._context.revision)

    def backfill(self, command: BackfillJob) -> Backfilled | Refused:
        job = self._startable(command.tenant, command.name)
        if isinstance(job, Refused):
            return job
        if job.revision != command.revision:
            return revision_mismatch(job, command.revision)
        refusal = self._no_room(len(command.due_ms), 0)
        if refusal is not None:
            return refusal
        due: list[tuple[int, int, str]] = []
        for due_ms in command.due_ms:
            word, sequence = self._known_as(job, due_ms), 0
            if not word:
                sequence = self._context.revision + 1
                self._create(job, due_ms, sequence, Origin.BACKFILL, actor=command.actor, reason=command.reason)
            due.append((due_ms, sequence, word))
        return Backfilled(due=tuple(due), revision=self._context.revision)

    def _startable(self, tenant: str, name: str) -> Job | Refused:
        job = self._jobs.table.get((tenant, name))
        if job is None:
            return job_not_found(name)
        return self._switches.refusal(tenant, name) or job

    def _known_as(self, job: Job, due_ms: int) -> str:
        """Why a due time is not run again: what the schedule, or an earlier backfill, made of it. Empty: it may be."""
        states = [row.state for row in self.at(job.tenant, job.name, due_ms) if row.origin is not Origin.TRIGGER]
        if OccurrenceState.SUCCEEDED in states:
            return "succeeded"
        if OccurrenceState.RUNNING in states:
            return "running"
        return "pending" if any(state in _WAITING for state in states) else ""

    def resolve(self, command: ResolveOccurrence) -> Done | Refused:
        row = self.table.get((command.tenant, command.job, command.due_ms, command.sequence))
        if row is None:
            return _not_found(command.job)
        refusal = self._cannot_resolve(row, command)
        if refusal is not None:
            return refusal
        cause = command.resolution.name.lower()
        step = self._step("resolved", row.attempt, cause=cause, actor=command.actor, reason=command.reason)
        row = replace(row, held=False, steps=told(row.steps, step), result=command.result, error=command.error)
        key = (row.tenant, row.job)
        self._jobs.count(key, OccurrenceState.UNKNOWN.name.lower(), -1)
        if command.resolution is OccurrenceResolution.RETRY:
            canary = is_canary(self._jobs.table[key].spec, *key, row.due_ms)
            again = replace(
                row, state=OccurrenceState.RETRYING, canary=canary, reason="", ready_ms=self._context.now_ms
            )
            self.put(replace(again, ended_ms=0, ended_wall_ms=0, expires_ms=0))
        else:
            self._put_ended(row, OccurrenceState[command.resolution.name], f"resolved by {command.actor}")
        revision = self._emit(Kind.OCCURRENCE_RESOLVED, row, cause=cause, actor=command.actor, reason=command.reason)
        self._trim(key)
        return Done(revision=revision)

    def _cannot_resolve(self, row: Occurrence, command: ResolveOccurrence) -> Refused | None:
        facts = (("state", row.state.name), ("attempt", str(row.attempt)))
        if row.state is not OccurrenceState.UNKNOWN:
            message = f"only an unknown outcome can be resolved, and this one is {row.state.name.lower()}"
            return Refused(reason=Reason.OCCURRENCE_NOT_HELD, message=message, facts=facts)
        if row.attempt != command.attempt:
            message = f"attempt {command.attempt} is not its last one, which is {row.attempt}"
            return Refused(reason=Reason.ATTEMPT_STALE, message=message, facts=facts)
        if command.resolution is not OccurrenceResolution.RETRY:
            return None
        if (row.tenant, row.job) not in self._jobs.table:
            return job_not_found(row.job)
        switch = self._switches.effective(row.tenant, row.job)
        return switched_off(switch) if switch is not None and switch.mode is SwitchMode.KILL else None

    # ---- creation ------------------------------------------------------------------------------------------------

    def _create(
        self,
        job: Job,
        due_ms: int,
        sequence: int,
        origin: Origin,
        payload: bytes | None = None,
        *,
        actor: str = "",
        reason: str = "",
        was_off: Switch | None = None,
    ) -> None:
        """``was_off``: the switch that was over the job when this was due, and has ended since."""
        if origin in (Origin.SCHEDULE, Origin.CATCH_UP) and not self._make_room():
            self._miss(job, due_ms, due_ms, 1, NO_ROOM)
            return
        row = self._new(job, due_ms, sequence, origin, payload, actor, reason)
        self._emit(Kind.OCCURRENCE_CREATED, row, cause=origin.name.lower(), actor=actor, reason=reason)
        switch = self._switches.effective(job.tenant, job.name) or was_off
        if switch is not None:
            self._switches.suppressed(switch.switch, 1)
            self.end(row, OccurrenceState.SKIPPED, switch.why)
            return
        why = self._overlapping(job, origin)
        if why:
            self.end(row, OccurrenceState.SKIPPED, why)
            return
        if job.spec.overlap is Overlap.CANCEL_RUNNING and origin in (Origin.SCHEDULE, Origin.TRIGGER):
            self._cancel_others(job)
        self.put(row)

    def _new(
        self, job: Job, due_ms: int, sequence: int, origin: Origin, payload: bytes | None, actor: str, reason: str
    ) -> Occurrence:
        spec, now_ms, wall_ms = job.spec, self._context.now_ms, self._context.stamp.wall_ms
        ready_ms = now_ms
        start_by_ms = now_ms + spec.starting_deadline_ms
        if origin is Origin.SCHEDULE:
            # The clock of the leader that stamped it may be behind that of the one that found it due.
            late_ms = max(0, wall_ms - due_ms)
            ready_ms = max(now_ms, now_ms + jitter(spec, job.tenant, job.name, due_ms, sequence) - late_ms)
            start_by_ms = now_ms + max(0, spec.starting_deadline_ms - late_ms)
        return Occurrence(
            tenant=job.tenant,
            job=job.name,
            due_ms=due_ms,
            sequence=sequence,
            origin=origin,
            state=OccurrenceState.PENDING,
            job_revision=job.revision,
            created_ms=now_ms,
            created_wall_ms=wall_ms,
            ready_ms=ready_ms,
            start_by_ms=start_by_ms,
            priority=spec.priority,
            payload=payload,
            first_due_ms=due_ms,
            canary=is_canary(spec, job.tenant, job.name, due_ms),
            shadow=spec.mode is Mode.SHADOW,
            steps=(self._step("created", 0, cause=origin.name.lower(), actor=actor, reason=reason),),
        )

    def _overlapping(self, job: Job, origin: Origin) -> str:
        """Why the job's policy lets no further one in; empty: it may wait, or start."""
        spec = job.spec
        line = self.lines.get((job.tenant, job.name))
        unfinished = 0 if line is None else len(line.unfinished)
        if not unfinished or origin in (Origin.CATCH_UP, Origin.BACKFILL):
            return ""
        if spec.overlap is Overlap.SKIP or (spec.overlap is Overlap.ALLOW and unfinished >= spec.concurrent_max):
            return "overlap"
        buffer = {Overlap.BUFFER_ONE: 1, Overlap.BUFFER_ALL: spec.buffer_max}.get(spec.overlap)
        return "overlap_buffer_full" if buffer is not None and unfinished > buffer else ""

    def _cancel_others(self, job: Job) -> None:
        for row in self.unfinished((job.tenant, job.name)):
            if row.state is OccurrenceState.RUNNING:
                self._interrupt(row.run, "overlap")
            else:
                self.end(row, OccurrenceState.CANCELLED, "overlap")

    def _miss(self, job: Job, first_due_ms: int, last_due_ms: int, count: int, reason: str) -> None:
        """One row for due times in a row. What there is no room for joins the row before, when that says the same."""
        if (job.tenant, job.name, last_due_ms, 0) in self.table:
            return
        total = count
        before = self._last_without_room(job) if reason == NO_ROOM else None
        if before is not None and before.due_ms < first_due_ms:
            self._remove(before)
            first_due_ms, total = before.first_due_ms, before.count + count
        context = self._context
        row = Occurrence(
            tenant=job.tenant,
            job=job.name,
            due_ms=last_due_ms,
            sequence=0,
            origin=Origin.SCHEDULE,
            state=OccurrenceState.MISSED,
            job_revision=job.revision,
            created_ms=context.now_ms,
            created_wall_ms=context.stamp.wall_ms,
            ready_ms=context.now_ms,
            start_by_ms=context.now_ms,
            reason=reason,
            ended_ms=context.now_ms,
            ended_wall_ms=context.stamp.wall_ms,
            expires_ms=context.now_ms + job.spec.history_age_ms,
            first_due_ms=first_due_ms,
            count=total,
        )
        self.put(row)
        self._jobs.count((job.tenant, job.name), "missed", count)
        self._emit(Kind.OCCURRENCE_MISSED, row, reason=reason, count=count)
        self._trim((job.tenant, job.name))

    def _last_without_room(self, job: Job) -> Occurrence | None:
        line = self.lines.get((job.tenant, job.name))
        if line is None or not line.history:
            return None
        _, due_ms, sequence = line.history[-1]
        row = self.table[(job.tenant, job.name, due_ms, sequence)]
        return row if row.state is OccurrenceState.MISSED and row.reason == NO_ROOM else None

    # ---- changes of one ------------------------------------------------------------------------------------------

    def end(
        self,
        row: Occurrence,
        state: OccurrenceState,
        reason: str = "",
        *,
        result: bytes = b"",
        error: str = "",
        run: str = "",
        session: str = "",
        held: bool = False,
    ) -> int:
        """The one outcome of an occurrence that has none."""
        assert row.state in _OPEN, f"{row.job} of {row.due_ms} has ended {row.state.name}"
        cause = state.name.lower()
        step = self._step("ended", row.attempt, run=run, session=session, cause=cause, reason=reason)
        row = replace(row, result=result, error=error, held=held, steps=told(row.steps, step))
        ended = self._put_ended(row, state, reason)
        revision = self._emit(
            Kind.OCCURRENCE_ENDED, ended, cause=cause, reason=reason, session=session, run=run, attempt=row.attempt
        )
        self._trim((row.tenant, row.job))
        return revision

    def _put_ended(self, row: Occurrence, state: OccurrenceState, reason: str) -> Occurrence:
        """What another attempt would need is kept only as long as there may be one."""
        context, key = self._context, (row.tenant, row.job)
        job = self._jobs.table.get(key)
        age_ms = ORPHAN_AGE_MS if job is None else job.spec.history_age_ms
        unknown = state is OccurrenceState.UNKNOWN
        ended = replace(
            row,
            state=state,
            reason=reason,
            run="",
            checkpoint=row.checkpoint if unknown else b"",
            payload=row.payload if unknown else None,
            ended_ms=context.now_ms,
            ended_wall_ms=context.stamp.wall_ms,
            expires_ms=context.now_ms + age_ms,
        )
        self.put(ended)
        self._jobs.count(key, state.name.lower(), 1)
        return ended

    def retry(self, row: Occurrence, wait_ms: int, *, error: str = "") -> None:
        """Between two attempts. Not while everything of the job is killed: then there is no other attempt."""
        switch = self._switches.effective(row.tenant, row.job)
        if switch is not None and switch.mode is SwitchMode.KILL:
            self.end(row, OccurrenceState.CANCELLED, switch.why, error=error)
            return
        step = self._step("retrying", row.attempt, reason=f"after {wait_ms} ms" if wait_ms else "")
        self.put(
            replace(
                row,
                state=OccurrenceState.RETRYING,
                run="",
                ready_ms=self._context.now_ms + wait_ms,
                error=error,
                steps=told(row.steps, step),
            )
        )

    def tell(self, row: Occurrence, what: str, **facts: str) -> Occurrence:
        """The row with a further step in its story."""
        return replace(row, steps=told(row.steps, self._step(what, row.attempt, **facts)))

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def ready_due_ms(self, key: OccurrenceKey) -> int | None:
        row = self.table.get(key)
        return None if row is None else row.ready_ms

    def start_due_ms(self, key: OccurrenceKey) -> int | None:
        row = self.table.get(key)
        return None if row is None else row.start_by_ms

    def become_ready(self, key: OccurrenceKey) -> None:
        self._add_ready(self.lines[key[:2]], self.table[key])

    def miss_start(self, key: OccurrenceKey, waited_for: str) -> None:
        """It did not start in time, because it ``waited_for`` something."""
        reason = f"starting_deadline: {waited_for}" if waited_for else "starting_deadline"
        self.end(self.table[key], OccurrenceState.MISSED, reason)

    def expire(self) -> None:
        """History goes silently."""
        now_ms = self._context.now_ms
        while self.expiries.could_be_due(now_ms):
            key = self.expiries.pop(now_ms)
            if key is None:
                break
            self._drop_oldest(key)

    def _expires_ms(self, key: Key) -> int | None:
        """When the oldest row of a job's history goes: by the age that the job says now, if there is still the job."""
        line = self.lines.get(key)
        if line is None or not line.history:
            return None
        ended_ms, due_ms, sequence = line.history[0]
        job = self._jobs.table.get(key)
        if job is not None:
            return ended_ms + job.spec.history_age_ms
        return self.table[(*key, due_ms, sequence)].expires_ms

    # ---- jobs and switches change --------------------------------------------------------------------------------

    def job_changed(self, job: Job) -> None:
        key = (job.tenant, job.name)
        line = self.lines.get(key)
        if line is None:
            return
        for row in self.unfinished(key):
            canary = is_canary(job.spec, row.tenant, row.job, row.due_ms)
            if row.canary != canary:
                self.put(replace(row, canary=canary))
        self.changed[key] = None
        self._trim(key)
        self._arm_expiry(line)

    def end_all(self, job: Job) -> None:
        """The job is about to go."""
        for row in self.unfinished((job.tenant, job.name)):
            if row.state is OccurrenceState.RUNNING:
                self._interrupt(row.run, "job_deleted")
            else:
                self.end(row, OccurrenceState.CANCELLED, "job_deleted")

    def job_gone(self, key: Key) -> None:
        """From now on each row goes at the time that was set when it ended."""
        line = self.lines.get(key)
        if line is not None:
            self._arm_expiry(line)

    def switched_off(self, key: Key) -> None:
        """A switch was set over a job: what has not begun does not, and a kill leaves no retry."""
        switch = self._switches.effective(*key)
        assert switch is not None, f"no switch over {key}"
        skipped = 0
        for row in self.unfinished(key):
            if row.state is OccurrenceState.PENDING:
                self.end(row, OccurrenceState.SKIPPED, switch.why)
                skipped += 1
            elif row.state is OccurrenceState.RETRYING and switch.mode is SwitchMode.KILL:
                self.end(row, OccurrenceState.CANCELLED, switch.why)
        self._switches.suppressed(switch.switch, skipped)
        self.changed[key] = None

    def open_lines(self, tenant: str, job: str) -> list[Key]:
        """Jobs with something unfinished in the scope of a switch, in order."""
        if job:
            line = self.lines.get((tenant, job))
            return [line.key] if line is not None and line.unfinished else []
        return list(self.open_order.after(tenant, "", "") if tenant else self.open_order)

    # ---- reads ---------------------------------------------------------------------------------------------------

    def unfinished(self, key: Key) -> list[Occurrence]:
        """In order of due time."""
        line = self.lines.get(key)
        return [] if line is None else [self.table[(*key, *place)] for place in sorted(line.unfinished)]

    def at(self, tenant: str, job: str, due_ms: int) -> list[Occurrence]:
        """Of one due time, the schedule's first; also the range of missed ones that covers it."""
        line = self.lines.get((tenant, job))
        if line is None:
            return []
        start = bisect_left(line.order, (due_ms, 0))
        found = []
        for place in islice(line.order, start, None):
            row = self.table[(tenant, job, *place)]
            if row.due_ms != due_ms and (row.sequence or row.first_due_ms > due_ms):
                # Ranges do not lie over each other, and nothing but a trigger or a backfill lies within one.
                if row.sequence:
                    continue
                break
            found.append(row)
            if row.due_ms != due_ms:
                break
        return found

    def page(self, tenant: str, job: str, before: tuple[int, int] | None, limit: int) -> list[Occurrence]:
        """Newest due time first, those before ``before`` (due time and sequence)."""
        line = self.lines.get((tenant, job))
        if line is None:
            return []
        end = len(line.order) if before is None else bisect_left(line.order, before)
        return [self.table[(tenant, job, *line.order[at])] for at in range(end - 1, max(-1, end - 1 - limit), -1)]

    def held(self, tenant: str, limit: int) -> list[Occurrence]:
        """What waits for a person, the longest first."""
        rows = [self.table[key] for key in self._held.get(tenant, ())]
        return sorted(rows, key=lambda row: (row.ended_ms, row.job, row.due_ms, row.sequence))[:limit]

    # ---- may it start? -------------------------------------------------------------------------------------------

    def may_start(self, line: Line, retrying: bool) -> bool:
        """Whether the job lets one more of its occurrences run: one at a time, or as many as it allows. One that has
        begun keeps its place while it waits for its next attempt."""
        job = self._jobs.table.get(line.key)
        if job is None:
            return False
        most = job.spec.concurrent_max if job.spec.overlap is Overlap.ALLOW else 1
        if line.running >= most or (not retrying and line.running + line.retrying >= most):
            return False
        return self._switches.keeps_from_starting(*line.key, retrying=retrying) is None

    # ---- the table -----------------------------------------------------------------------------------------------

    def put(self, row: Occurrence) -> None:
        key = (row.tenant, row.job, row.due_ms, row.sequence)
        line = self.lines.get(key[:2])
        if line is None:
            line = self.lines[key[:2]] = Line(key[:2])
            self.line_order.add(line.key)
        before = self.table.get(key)
        if before is None:
            insort(line.order, key[2:])
        else:
            self._forget_derived(line, key, before)
        self.table[key] = row
        self._derive(line, key, row)
        self.changed[line.key] = None

    def _derive(self, line: Line, key: OccurrenceKey, row: Occurrence) -> None:
        self.bytes += _carried(row)
        if row.state not in _OPEN:
            if row.held:
                self._held.setdefault(row.tenant, {})[key] = None
            else:
                self._history += 1
                insort(line.history, (row.ended_ms, *key[2:]))
                self._arm_expiry(line)
            return
        if not line.unfinished:
            self.open_order.add(line.key)
        line.unfinished[key[2:]] = None
        line.running += row.state is OccurrenceState.RUNNING
        line.retrying += row.state is OccurrenceState.RETRYING
        if row.state is OccurrenceState.PENDING:
            self.pending += 1
            self._arm_start(key, row.start_by_ms)
        if row.state in _WAITING:
            if row.ready_ms > self._context.now_ms:
                self._arm_ready(key, row.ready_ms)
            else:
                self._add_ready(line, row)

    def _forget_derived(self, line: Line, key: OccurrenceKey, row: Occurrence) -> None:
        self.bytes -= _carried(row)
        if row.state not in _OPEN:
            if row.held:
                held = self._held[row.tenant]
                del held[key]
                if not held:
                    del self._held[row.tenant]
            else:
                self._history -= 1
                del line.history[bisect_left(line.history, (row.ended_ms, *key[2:]))]
                self._arm_expiry(line)
            return
        del line.unfinished[key[2:]]
        if not line.unfinished:
            self.open_order.remove(line.key)
        line.running -= row.state is OccurrenceState.RUNNING
        line.retrying -= row.state is OccurrenceState.RETRYING
        if row.state is OccurrenceState.PENDING:
            self.pending -= 1
            self._disarm_start(key)
        if row.state in _WAITING and not self._take_ready(line, row):
            self._disarm_ready(key)

    def _remove(self, row: Occurrence) -> None:
        key = (row.tenant, row.job, row.due_ms, row.sequence)
        line = self.lines[key[:2]]
        self._forget_derived(line, key, row)
        del self.table[key]
        del line.order[bisect_left(line.order, key[2:])]
        if not line.order:
            del self.lines[line.key]
            self.line_order.remove(line.key)

    def _add_ready(self, line: Line, row: Occurrence) -> None:
        if not line.ready:
            self.ready_order.add(line.key)
        insort(line.ready.setdefault(slot_of(row), []), place_of(row))
        self.changed[line.key] = None

    def _take_ready(self, line: Line, row: Occurrence) -> bool:
        slot, place = slot_of(row), place_of(row)
        places = line.ready.get(slot, [])
        at = bisect_left(places, place)
        if at == len(places) or places[at] != place:
            return False
        del places[at]
        if not places:
            del line.ready[slot]
            if not line.ready:
                self.ready_order.remove(line.key)
        return True

    # ---- room ----------------------------------------------------------------------------------------------------

    def _trim(self, key: Key) -> None:
        job, line = self._jobs.table.get(key), self.lines.get(key)
        while job is not None and line is not None and len(line.history) > job.spec.history_count:
            self._drop_oldest(key)

    def _drop_oldest(self, key: Key) -> None:
        _, due_ms, sequence = self.lines[key].history[0]
        self._remove(self.table[(*key, due_ms, sequence)])

    def _arm_expiry(self, line: Line) -> None:
        expires_ms = self._expires_ms(line.key)
        if expires_ms is None:
            self.expiries.disarm(line.key)
        else:
            self.expiries.arm(line.key, expires_ms)

    def _make_room(self) -> bool:
        """For one that is due: what ended, and would be the first to go, goes now."""
        limits = self._context.limits
        surplus = len(self.table) + 1 - limits.occurrences_max
        if surplus > min(self._history, MADE_ROOM_MAX):
            return False
        for _ in range(MADE_ROOM_MAX):
            oldest = self.expiries.first()
            fits = len(self.table) < limits.occurrences_max
            if fits and self.bytes + self._jobs.bytes <= limits.job_bytes_max:
                return True
            if oldest is None:
                return False
            self._drop_oldest(oldest)
        return False

    def _no_room(self, count: int, size: int) -> Refused | None:
        """For what somebody asks for: nothing goes unless it is all let in."""
        limit = self._context.limits.occurrences_max
        surplus = len(self.table) + count - limit
        if surplus > min(self._history, MADE_ROOM_MAX + count):
            return full(Reason.OCCURRENCES_FULL, "no room for an occurrence", "occurrences_max", limit)
        refusal = self.no_room_for(size)
        for _ in range(0 if refusal is not None else surplus):
            oldest = self.expiries.first()
            assert oldest is not None, "there is history, and nothing of it expires"
            self._drop_oldest(oldest)
        return refusal

    def no_room_for(self, growth: int) -> Refused | None:
        """Refuses what carries more than there is room for. What a run ends with always has room."""
        limit = self._context.limits.job_bytes_max
        if growth <= 0 or self.bytes + self._jobs.bytes + growth <= limit:
            return None
        return full(Reason.OCCURRENCES_FULL, "no room for what it carries", "job_bytes_max", limit)

    # ---- its story -----------------------------------------------------------------------------------------------

    def _step(self, what: str, attempt: int, **facts: str) -> Step:
        context = self._context
        return Step(what=what, wall_ms=context.stamp.wall_ms, cluster_ms=context.now_ms, attempt=attempt, **facts)

    def _emit(self, kind: Kind, row: Occurrence, *, attempt: int = 0, count: int = 0, **facts: str) -> int:
        return self._context.emit(
            kind,
            row.tenant,
            row.job,
            due_ms=row.due_ms,
            sequence=row.sequence,
            attempt=attempt,
            count=count,
            cause=facts.get("cause", ""),
            actor=facts.get("actor", ""),
            reason=facts.get("reason", ""),
            session=facts.get("session", ""),
            run=facts.get("run", ""),
        )


def told(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """The story goes on. A long one keeps its beginning and its end; of a run's checkpoints, only the last is told."""
    if steps and step.what == "checkpointed" and steps[-1].what == step.what:
        return (*steps[:-1], step)
    if len(steps) < STEPS_MAX:
        return (*steps, step)
    return (*steps[:FIRST_STEPS_KEPT], *steps[FIRST_STEPS_KEPT + 1 :], step)


def slot_of(row: Occurrence) -> Slot:
    return (row.state is OccurrenceState.RETRYING, row.canary)


def place_of(row: Occurrence) -> Place:
    return (-row.priority, row.ready_ms, row.due_ms, row.sequence)


def _off_at(ended: Iterable[Switch], job: Job, due_ms: int) -> Switch | None:
    for row in ended:
        over = row.tenant in ("", job.tenant) and row.job in ("", job.name)
        if over and row.set_wall_ms <= due_ms < row.ended_wall_ms:
            return row
    return None


def _carried(row: Occurrence) -> int:
    """What it counts for, in bytes, against job_bytes_max."""
    size = len(row.checkpoint) + len(row.result) + len(row.error)
    return size if row.payload is None else size + len(row.payload)


def _not_found(job: str) -> Refused:
    message = f"job {job} has no such occurrence: it never was, or its history is over"
    return Refused(reason=Reason.OCCURRENCE_NOT_FOUND, message=message, facts=(("job", job),))
