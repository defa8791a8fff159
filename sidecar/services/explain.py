"""Why an occurrence did not run, what it waits for, and why there is none: in words, from the state of this node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidecar.core.dedup import RecordState
from sidecar.core.jobs import Job
from sidecar.core.occurrences import ENDED, Occurrence, OccurrenceState, idempotency_key
from sidecar.core.runs import Run, Worker
from sidecar.core.sessions import Session
from sidecar.core.specification import JobSpec, ScheduleKind
from sidecar.core.switches import Switch
from sidecar.scheduling.schedules import Compiled, ScheduleError, compile_schedule
from sidecar.services import specs
from sidecar.services.claims import fits
from sidecar.services.words import duration, utc

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

SESSIONS_SCAN_MAX, SESSIONS_STEP = 5_000, 500
WORKERS_SHOWN_MAX = 3
# Unfinished occurrences of the job that are looked at for what one waits for.
BEFORE_SCAN_MAX = 200
ERROR_SHOWN_MAX = 200

# What stands before the ":" of a reason.
_REASONS = {
    "overlap": "another one of the job was unfinished",
    "overlap_buffer_full": "another one was unfinished, and as many as may wait were waiting",
    "shadow": "the job is in shadow mode: it would have been given to a worker",
    "record_completed": "the dedup record of its key says that its effect is completed",
    "record_failed": "the dedup record of its key says that its effect failed for good",
    "record_unknown": "the dedup record of its key says that the outcome of its effect is unknown",
    "starting_deadline": "it did not start within its starting deadline",
    "no_room": "the limit of occurrences was reached",
    "misfire_skip": "it was due while nothing could be started, and the misfire policy is skip",
    "misfire_latest": "it was due while nothing could be started, and a later one ran in its place",
    "catch_up_max": "it was due while nothing could be started, and more than catch_up_max were",
    "catch_up_window": "it was due while nothing could be started, longer ago than the catch-up window",
    "holder_lost": "the session of its run ended before the outcome was known",
    "job_deleted": "the job was deleted",
    "timeout": "its run exceeded its time",
    "operator": "an operator stopped it",
    "killed": "a kill switch stopped it",
}
_OVERLAPPED = ("overlap", "overlap_buffer_full")
_SWITCHED = ("paused", "draining", "killed")


class Explainer:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clock, self._proposer = runtime.clock, runtime.proposer
        self._machine = runtime.proposer.machine

    # ---- there is none ----------------------------------------------------------------------------------------------

    def nothing(self, job: Job, due_ms: int) -> str:
        """Why there is no occurrence of a time; of no time in particular with 0."""
        if not due_ms:
            return f"nothing of this job was due yet: {self._next(job)}"
        at, wall_ms = utc(due_ms), self._clock.wall_ms()
        try:
            compiled = compile_schedule(job.spec.schedule)
        except ScheduleError as error:
            return f"this node cannot compute the schedule of the job: {error}"
        if due_ms <= job.created_wall_ms:
            return f"{at} is before the job existed: it was created at {utc(job.created_wall_ms)}{self._earlier(job)}"
        if not compiled.is_due(due_ms):
            return self._not_due(job, compiled, due_ms)
        if wall_ms < due_ms <= job.settled_ms:
            through = utc(job.settled_ms)
            return f"{at} is not run: the job is dealt with up to {through} already, by a clock that stood ahead"
        if due_ms > wall_ms:
            return f"{at} is still to come, in {duration(due_ms - wall_ms)}{self._suppressing(job)}"
        if due_ms > job.settled_ms:
            return self._unsettled(job, due_ms)
        count, age = job.spec.history_count, duration(job.spec.history_age_ms)
        changed = ""
        if due_ms <= job.changed_wall_ms:
            changed = f"; or the schedule was another one before revision {job.revision}, of {utc(job.changed_wall_ms)}"
        kept = f"history is kept for {age} and the last {count}, or less while occurrences_max is reached"
        return f"there is no record of {at} any more: {kept}{changed}"

    def _earlier(self, job: Job) -> str:
        return f" (last changed by {job.changed_by})" if job.changed_by else ""

    def _not_due(self, job: Job, compiled: Compiled, due_ms: int) -> str:
        before, after = compiled.previous_at_or_before(due_ms - 1), compiled.next_after(due_ms)
        beside = " and ".join(utc(at) for at in (before, after) if at is not None)
        text = f"{utc(due_ms)} is no due time of this job ({specs.schedule_text(job.spec.schedule)})"
        if due_ms <= job.changed_wall_ms and job.revision > 1:
            text += (
                f"; before revision {job.revision}, of {utc(job.changed_wall_ms)}, the schedule may have been another"
            )
        if job.spec.schedule.kind is ScheduleKind.MANUAL:
            return text
        return f"{text}; due beside it: {beside}" if beside else f"{text}; it is never due"

    def _next(self, job: Job) -> str:
        schedule = job.spec.schedule
        if schedule.kind is ScheduleKind.MANUAL:
            return "it runs only when it is triggered"
        if job.next_due_ms > 0:
            return f"the next will be {utc(job.next_due_ms)}{self._suppressing(job)}"
        if job.next_due_ms < 0:
            return "its next due time is not computed yet"
        if schedule.kind is ScheduleKind.ONCE and schedule.at_ms <= job.created_wall_ms:
            return f"its one time, {utc(schedule.at_ms)}, was past when the job was created"
        return "it is not due by itself any more"

    def _suppressing(self, job: Job) -> str:
        switch = self._machine.effective_switch(job.tenant, job.name)
        return f"; it will be skipped, unless this ends before: {switch_text(switch)}" if switch is not None else ""

    def _unsettled(self, job: Job, due_ms: int) -> str:
        late = duration(self._clock.wall_ms() - due_ms)
        held = self._runtime.scheduler.held_reason
        if held:
            return f"schedules are held back ({held}): it was due {late} ago and is dealt with once that is over"
        return f"the leader has not come to it yet: it was due {late} ago; every due time up to then is dealt with"

    # ---- there is one -----------------------------------------------------------------------------------------------

    def one(self, job: Job | None, row: Occurrence) -> str:
        """What it waits for, or how it ended and why."""
        if row.state in ENDED:
            return self._ended(job, row)
        if row.state is OccurrenceState.RUNNING:
            return self._running(row)
        if job is None:
            return "the job was deleted"
        if row.state is OccurrenceState.RETRYING:
            return f"attempt {row.attempt} of {job.spec.retry.attempts_max} ended{_error(row)}; {self._waits(job, row)}"
        left = duration(row.start_by_ms - self._proposer.cluster_now_ms())
        return f"{self._waits(job, row)}; it is missed if it has not started in {left}"

    def _ended(self, job: Job | None, row: Occurrence) -> str:
        kind, _, detail = row.reason.partition(":")
        word, _, switch = kind.partition(" ")
        text = row.state.name.lower()
        if row.count > 1:
            text += f", with {row.count - 1} other due times in a row from {utc(row.first_due_ms)} on"
        if word in _SWITCHED and switch:
            known = self._switch(row.tenant, switch)
            text += f": {switch_text(known)}" if known is not None else f": {row.reason}"
        elif kind:
            text += f": {_REASONS.get(kind, kind)}" + (f" ({detail.strip()})" if detail else "")
            text += self._in_the_way(job, row) if kind in _OVERLAPPED else ""
        text += _error(row)
        return f"{text}; it waits for a person to resolve it" if row.held else text

    def _switch(self, tenant: str, name: str) -> Switch | None:
        """Of the tenant, or of the fleet."""
        return self._machine.switch(tenant, name) or self._machine.switch("", name)

    def _running(self, row: Occurrence) -> str:
        run = self._machine.run(row.run)
        if run is None:
            return "its run has just ended"
        session = self._machine.session(run.session)
        who = f"session {run.session}"
        if session is not None and (session.agent or session.host):
            who += f" ({session.agent} on {session.host})"
        now_ms = self._proposer.cluster_now_ms()
        text = f"attempt {run.attempt} runs as {run.run} in {who} for {duration(now_ms - run.started_ms)}"
        left = duration(run.deadline_ms - now_ms)
        return f"{text}; {_interrupted(run, left, now_ms)}" if run.interrupt_cause else f"{text}; {left} are left"

    def _waits(self, job: Job, row: Occurrence) -> str:
        """The state machine says what for; here it is put into words."""
        what = self._machine.waits_for(row)
        word, _, name = what.partition(" ")
        if word in _SWITCHED:
            switch = self._switch(job.tenant, name)
            return f"it waits for the end of a switch: {switch_text(switch) if switch is not None else what}"
        if what == "time":
            left = duration(row.ready_ms - self._proposer.cluster_now_ms())
            if row.state is OccurrenceState.RETRYING:
                return f"it waits for its next attempt, in {left}"
            return f"it waits for its place in the jitter of {duration(job.spec.jitter_ms)}, in {left}"
        if what == "overlap":
            return self._overlap(job, row)
        if what == "no worker":
            return self._no_worker(job)
        if what == "start rate":
            most = self._machine.limits.starts_per_second_max
            return f"it waits for its turn, by priority: starts are limited to {most} a second over all jobs"
        return self._free_slot(job, row)

    def _overlap(self, job: Job, row: Occurrence) -> str:
        """Which unfinished one of the job goes first."""
        others = [other for other in self._others(row) if other.state not in ENDED]
        first = next((other for other in others if other.state is OccurrenceState.RUNNING), None)
        first = first or next(reversed(others), None)
        if first is None:
            return "it waits for the end of another one of the job"
        return f"it waits for the end of the one of {utc(first.due_ms)} ({self._stands(job, first)})"

    def _in_the_way(self, job: Job | None, row: Occurrence) -> str:
        """Which one it was that another one was skipped for, and how that stands now."""
        first = None
        for other in self._others(row):
            unfinished = other.state not in ENDED or other.ended_ms > row.ended_ms
            if other.created_ms <= row.created_ms and unfinished:
                first = other  # the oldest: it is what the others wait for
        if first is None:
            return ""
        stands = f"it {first.state.name.lower()} at {utc(first.ended_wall_ms)}"
        if first.state not in ENDED:
            stands = f"now {self._stands(job, first)}"
        return f": the one of {utc(first.due_ms)}, {stands}"

    def _stands(self, job: Job | None, row: Occurrence) -> str:
        """One that is unfinished, in few words."""
        state = row.state.name.lower()
        if row.run:
            return f"{state} as {row.run}"
        if job is None or self._machine.waits_for(row) == "overlap":
            return state
        return f"{state}: {self._waits(job, row)}"

    def _others(self, row: Occurrence) -> list[Occurrence]:
        """Of the same job, newest first."""
        found = self._machine.occurrences(row.tenant, row.job, None, BEFORE_SCAN_MAX)
        return [other for other in found if (other.due_ms, other.sequence) != (row.due_ms, row.sequence)]

    def _free_slot(self, job: Job, row: Occurrence) -> str:
        key = idempotency_key(row.job, row.due_ms, row.sequence, row.origin)
        record = self._machine.record(row.tenant, key)
        if record is not None and record.state is RecordState.IN_PROGRESS:
            return f"its effect is in progress by session {record.owner} (dedup record {key})"
        _, _, workers, free_slots = self._machine.job_counts(job.tenant, job.name)
        if not free_slots:
            serve = "1 session serves" if workers == 1 else f"{workers} sessions serve"
            return f"it waits for a free slot: {serve} the job, and all slots are taken"
        canary = job.spec.canary
        if canary is not None:
            label = f"{canary.label}={canary.value}"
            return f"it waits for a free slot of a worker {'with' if row.canary else 'without'} {label} (canary)"
        return "it is about to start"

    # ---- nobody does it ---------------------------------------------------------------------------------------------

    def _no_worker(self, job: Job) -> str:
        serving = list(self._serving(job))
        if not serving:
            return "no session serves the job"
        shown = [
            f"session {session.session} ({session.agent}): {why}"
            for session, worker in serving[:WORKERS_SHOWN_MAX]
            if (why := misfit(job.spec, session, worker))
        ]
        many = len(serving) > 1
        serve = f"{len(serving)} sessions serve the job and none fits" if many else "1 session serves the job, unfit"
        return f"{serve}: {'; '.join(shown)}"

    def _serving(self, job: Job) -> Iterator[tuple[Session, Worker]]:
        after = ""
        for _ in range(0, SESSIONS_SCAN_MAX, SESSIONS_STEP):
            sessions = self._machine.sessions(job.tenant, after, SESSIONS_STEP)
            for session in sessions:
                worker = self._machine.worker(session.session)
                if worker is not None and any(fits(job.name, pattern) for pattern in worker.jobs):
                    yield session, worker
            if len(sessions) < SESSIONS_STEP:
                return
            after = sessions[-1].session


def misfit(spec: JobSpec, session: Session, worker: Worker) -> str:
    """Why a session that serves a job is given no run of it; empty when nothing is in the way."""
    if not session.connection:
        return "its stream is broken"
    if not worker.slots:
        return "it takes no new runs (0 slots)"
    own = {**dict(session.labels), "agent": session.agent, "version": session.version, "host": session.host}
    for key, values in spec.selector:
        if own.get(key) not in values:
            has = f"is {own[key]!r}" if key in own else "is not set"
            return f"{key} {has}, the selector wants {' or '.join(map(repr, values))}"
    return ""


def switch_text(row: Switch) -> str:
    """ "paused by alice since 2026-03-01 10:00:00Z (tenant switch k12): too expensive"."""
    mode, since = _MODES[row.mode.name], utc(row.set_wall_ms)
    return f"{mode} by {row.actor} since {since} ({row.scope} switch {row.switch}): {row.reason}"


_MODES = {"PAUSE": "paused", "DRAIN": "drained", "KILL": "killed"}


def _interrupted(run: Run, left: str, now_ms: int) -> str:
    since = duration(now_ms - run.interrupted_ms)
    why = run.interrupt_cause + (f", {run.interrupt_reason}" if run.interrupt_reason else "")
    return f"it was asked to stop {since} ago ({why}), and has {left} to acknowledge"


def _error(row: Occurrence) -> str:
    return f" with {row.error[:ERROR_SHOWN_MAX]!r}" if row.error else ""
