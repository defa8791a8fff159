"""Jobs as values, and how one is described with keyword arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

from tenure.switches import word
from tenure.v1 import job_pb2

__all__ = [
    "CanaryOptions",
    "JobInfo",
    "JobOptions",
    "OccurrenceInfo",
    "job_info",
    "job_spec",
    "occurrence_info",
    "wall_ms",
]

Schedule = str | timedelta | datetime | None


class CanaryOptions(TypedDict):
    """``percent`` of the occurrences go to workers with this label only, the others to workers without it."""

    percent: int
    label: str
    value: str


class JobOptions(TypedDict, total=False):
    """A job's specification. Durations are seconds; defaults are those that ``tenure job show`` shows."""

    # Required: who answers for the job, and what to read when it fails.
    owner: str
    runbook_url: str
    description: str
    # Cron (five fields, or @hourly and the like), an interval, a time, or None: only when triggered.
    schedule: Schedule
    zone: str
    dst_policy: str  # vixie, skip, twice, shift
    start: datetime
    end: datetime
    jitter: float
    misfire_policy: str  # skip, latest, all (with catch_up_max)
    catch_up_max: int
    catch_up_window: float
    starting_deadline: float
    overlap_policy: str  # skip, buffer_one, buffer_all, cancel_running, allow (with concurrent_max)
    buffer_max: int
    concurrent_max: int
    run_timeout: float
    interrupt_grace: float
    delivery: str  # at_least_once, at_most_once
    on_holder_loss: str  # retry, skip, hold_for_person
    attempts_max: int
    retry_initial: float
    retry_max: float
    retry_multiplier_percent: int
    retry_jitter_percent: int
    retry_on_failure: bool
    retry_on_timeout: bool
    priority: int
    labels: Mapping[str, str]
    selector: Mapping[str, Sequence[str]]
    payload: bytes | str
    estimated_cost_micros: int
    mode: str  # live, shadow
    canary: CanaryOptions
    history_count: int
    history_age: float


_SECONDS = {
    "jitter": "jitter_ms",
    "catch_up_window": "catch_up_window_ms",
    "starting_deadline": "starting_deadline_ms",
    "run_timeout": "timeout_ms",
    "interrupt_grace": "interrupt_grace_ms",
    "history_age": "history_age_ms",
}
_PLAIN = (
    "owner", "runbook_url", "description", "catch_up_max", "buffer_max", "concurrent_max", "priority",
    "estimated_cost_micros", "history_count",
)  # fmt: skip
_CHOICES: dict[str, tuple[Any, str]] = {
    "misfire_policy": (job_pb2.MisfirePolicy, "MISFIRE_POLICY_"),
    "overlap_policy": (job_pb2.OverlapPolicy, "OVERLAP_POLICY_"),
    "delivery": (job_pb2.Delivery, "DELIVERY_"),
    "on_holder_loss": (job_pb2.HolderLossPolicy, "HOLDER_LOSS_POLICY_"),
    "mode": (job_pb2.JobMode, "JOB_MODE_"),
}
_RETRY_SECONDS = {"retry_initial": "initial_ms", "retry_max": "max_ms"}
_RETRY_PLAIN = {
    "attempts_max": "attempts_max",
    "retry_multiplier_percent": "multiplier_percent",
    "retry_jitter_percent": "jitter_percent",
    "retry_on_failure": "on_failure",
    "retry_on_timeout": "on_timeout",
}


def job_spec(options: JobOptions) -> job_pb2.JobSpec:
    """The message for these options. Raises TypeError for an unknown one, ValueError for one that cannot be said."""
    unknown = sorted(options.keys() - JobOptions.__annotations__.keys())
    if unknown:
        known = list(JobOptions.__annotations__)
        near = [match for name in unknown for match in _near(name, known)]
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise TypeError(f"a job has no option {', '.join(unknown)}{meant}; it has: {', '.join(known)}")
    given: dict[str, object] = dict(options)
    spec = job_pb2.JobSpec(schedule=_schedule(options))
    for name in _PLAIN:
        if name in given:
            setattr(spec, name, given[name])
    for name, field in _SECONDS.items():
        if name in given:
            setattr(spec, field, _milliseconds(name, given[name]))
    for name, (enum, prefix) in _CHOICES.items():
        if name in given:
            setattr(spec, name, _choice(name, given[name], enum, prefix))
    for name, field in _RETRY_SECONDS.items():
        if name in given:
            setattr(spec.retry, field, _milliseconds(name, given[name]))
    for name, field in _RETRY_PLAIN.items():
        if name in given:
            setattr(spec.retry, field, given[name])
    spec.labels.update(options.get("labels", {}))
    for key, values in options.get("selector", {}).items():
        spec.selector.append(job_pb2.SelectorTerm(key=key, values=[values] if isinstance(values, str) else values))
    if "canary" in options:
        spec.canary.CopyFrom(job_pb2.Canary(**options["canary"]))
    payload = options.get("payload", b"")
    spec.payload = payload.encode() if isinstance(payload, str) else payload
    return spec


def _near(name: str, known: list[str]) -> list[str]:
    """Also what a file of jobs calls otherwise: its ``timeout`` is ``run_timeout`` here."""
    ends = [each for each in known if each.endswith(f"_{name}")]
    return ends or difflib.get_close_matches(name, known, n=1)


def _schedule(options: JobOptions) -> job_pb2.Schedule:
    schedule = job_pb2.Schedule(zone=options.get("zone", ""))
    kind = options.get("schedule")
    if kind is None:
        schedule.manual.SetInParent()
    elif isinstance(kind, str):
        if kind.strip().lower().startswith("every "):
            raise ValueError(
                f"an interval is written as a timedelta here, not as {kind!r}: schedule=timedelta(seconds=5)"
            )
        schedule.cron = kind
    elif isinstance(kind, timedelta):
        schedule.interval.every_ms = round(kind.total_seconds() * 1000)
    else:
        schedule.once_wall_ms = wall_ms("schedule", kind)
    if "dst_policy" in options:
        chosen = _choice("dst_policy", options["dst_policy"], job_pb2.DstPolicy, "DST_POLICY_")
        schedule.dst_policy = job_pb2.DstPolicy.ValueType(chosen)
    if "start" in options:
        schedule.start_wall_ms = wall_ms("start", options["start"])
    if "end" in options:
        schedule.end_wall_ms = wall_ms("end", options["end"])
    return schedule


def wall_ms(name: str, time: datetime) -> int:
    if time.tzinfo is None:
        raise ValueError(f"{name} has no time zone: {time.isoformat()}")
    # Through UTC: two times of one zone subtract by the wall clock.
    return round((time.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1))


def _milliseconds(name: str, seconds: object) -> int:
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {seconds!r}")
    return round(seconds * 1000)


def _choice(name: str, value: object, enum: Any, prefix: str) -> int:
    known = {each.removeprefix(prefix).lower(): int(enum.Value(each)) for each in enum.keys()[1:]}
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return known[str(value)]


@dataclass(frozen=True, slots=True)
class OccurrenceInfo:
    """One due time and what became of it. Times are UTC milliseconds."""

    job: str
    due_wall_ms: int
    sequence: int
    state: str  # pending, running, retrying, succeeded, failed, skipped, missed, cancelled or unknown
    reason: str
    attempt: int
    run_id: str
    error: str
    result: bytes
    ended_wall_ms: int
    count: int  # of due times in a row that were missed
    held: bool


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it is now. Times are UTC milliseconds; 0: none."""

    tenant: str
    name: str
    revision: int
    owner: str
    runbook_url: str
    schedule_text: str
    next_due_wall_ms: int
    settled_wall_ms: int
    switch_id: str
    pending: int
    running: int
    workers: int
    free_slots: int
    recent: tuple[OccurrenceInfo, ...]
    warnings: tuple[str, ...]


def occurrence_info(message: job_pb2.Occurrence) -> OccurrenceInfo:
    return OccurrenceInfo(
        job=message.job,
        due_wall_ms=message.due_wall_ms,
        sequence=message.sequence,
        state=word(job_pb2.OccurrenceState, message.state, "OCCURRENCE_STATE_"),
        reason=message.reason,
        attempt=message.attempt,
        run_id=message.run_id,
        error=message.error,
        result=message.result,
        ended_wall_ms=message.ended_wall_ms,
        count=message.count,
        held=message.held,
    )


def job_info(message: job_pb2.Job) -> JobInfo:
    return JobInfo(
        tenant=message.tenant,
        name=message.name,
        revision=message.revision,
        owner=message.spec.owner,
        runbook_url=message.spec.runbook_url,
        schedule_text=message.schedule_text,
        next_due_wall_ms=message.next_due_wall_ms,
        settled_wall_ms=message.settled_wall_ms,
        switch_id=message.switch_id,
        pending=message.pending,
        running=message.running,
        workers=message.workers,
        free_slots=message.free_slots,
        recent=tuple(map(occurrence_info, message.recent)),
        warnings=tuple(message.warnings),
    )
