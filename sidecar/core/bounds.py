"""The last net below the services' own validation: a command out of bounds never reaches the state.

Services say which field of the caller's request is wrong and why. Here it only matters that a log entry, wherever
it came from, can neither break an invariant nor grow the state without limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, get_args

import msgspec

from sidecar.core import commands as c
from sidecar.core import specification as s

MULTIPLIER_MIN_PERCENT, MULTIPLIER_MAX_PERCENT = 100, 10_000
DESCRIPTION_BYTES_MAX = 1_024
COST_MAX_MICROS = 2**53
TZDATA_BYTES_MAX = 64
# Of due times in one missed range, and of revisions and sequences that a command names.
COUNT_MAX = 2**62

_TEXT_MAX = {
    "tenant": c.TENANT_BYTES_MAX,
    "name": c.NAME_BYTES_MAX,
    "key": c.KEY_BYTES_MAX,
    "session": c.NAME_BYTES_MAX,
    "to_session": c.NAME_BYTES_MAX,
    "suffix": c.INFO_FIELD_BYTES_MAX,
    "agent": c.INFO_FIELD_BYTES_MAX,
    "version": c.INFO_FIELD_BYTES_MAX,
    "host": c.INFO_FIELD_BYTES_MAX,
    "connection": c.NAME_BYTES_MAX,
    "node": c.NAME_BYTES_MAX,
    "metadata": c.METADATA_BYTES_MAX,
    "waiter": c.NAME_BYTES_MAX,
    "actor": c.ACTOR_BYTES_MAX,
    "reason": c.REASON_BYTES_MAX,
    "error": c.ERROR_BYTES_MAX,
    "fence_lease": c.NAME_BYTES_MAX,
    "job": s.JOB_NAME_BYTES_MAX,
    "run": c.NAME_BYTES_MAX,
    "detail": c.DETAIL_BYTES_MAX,
    "switch": c.NAME_BYTES_MAX,
}
_BYTES_MAX = {"fingerprint": c.FINGERPRINT_BYTES_MAX, "result": c.RESULT_BYTES_MAX, "state": s.CHECKPOINT_BYTES_MAX}
_RANGE = {
    "ttl_ms": (c.TTL_MIN_MS, c.TTL_MAX_MS),
    "disconnect_grace_ms": (0, c.TTL_MAX_MS),
    "generation": (0, 2**62),
    "capacity": (1, c.CAPACITY_MAX),
    "wait_ms": (0, c.WAIT_MAX_MS),
    "priority": (c.PRIORITY_MIN, c.PRIORITY_MAX),
    "lock_delay_ms": (0, c.LOCK_DELAY_MAX_MS),
    "retention_ms": (c.RETENTION_MIN_MS, c.RETENTION_MAX_MS),
    "slots": (0, c.SLOTS_MAX),
    "to_revision": (0, COUNT_MAX),
    "retry_after_ms": (0, c.RETRY_AFTER_MAX_MS),
    "expires_after_ms": (0, c.SWITCH_EXPIRY_MAX_MS),
}
# Where a field of that name is bounded otherwise.
_OTHERWISE: dict[tuple[type, str], int] = {
    (c.DeleteJob, "name"): s.JOB_NAME_BYTES_MAX,
    (c.RollbackJob, "name"): s.JOB_NAME_BYTES_MAX,
    (c.TriggerJob, "name"): s.JOB_NAME_BYTES_MAX,
    (c.BackfillJob, "name"): s.JOB_NAME_BYTES_MAX,
    (c.SetTzdata, "version"): TZDATA_BYTES_MAX,
    (c.CompleteRun, "result"): s.OUTCOME_BYTES_MAX,
    (c.ResolveOccurrence, "result"): s.OUTCOME_BYTES_MAX,
}
# By type: what must not be empty. A session, token or attempt that does not exist is refused by the state itself.
_REQUIRED: dict[type, tuple[str, ...]] = {
    c.OpenSession: ("tenant", "suffix"),
    c.AttachSession: ("connection",),
    c.AcquireLease: ("tenant", "name"),
    c.BeginRecord: ("tenant", "key"),
    c.ResolveRecord: ("actor", "reason"),
    c.ApplyJobs: ("actor",),
    c.DeleteJob: ("tenant", "name", "actor", "reason"),
    c.RollbackJob: ("tenant", "name", "actor", "reason"),
    c.SetTzdata: ("version",),
    c.TriggerJob: ("tenant", "name", "actor", "reason"),
    c.BackfillJob: ("tenant", "name", "actor", "reason"),
    c.InterruptRun: ("actor", "reason"),
    c.ResolveOccurrence: ("actor", "reason"),
    c.SetSwitch: ("actor", "reason"),
    c.ClearSwitch: ("switch", "actor", "reason"),
}
_Check = tuple[str, int, int]


def _checks(kind: type[msgspec.Struct]) -> tuple[tuple[_Check, ...], tuple[_Check, ...], tuple[_Check, ...]]:
    fields, required = kind.__struct_fields__, _REQUIRED.get(kind, ())
    texts = tuple(
        (name, int(name in required), _OTHERWISE.get((kind, name), _TEXT_MAX[name]))
        for name in fields
        if name in _TEXT_MAX
    )
    payloads = tuple((name, 0, _OTHERWISE.get((kind, name), _BYTES_MAX[name])) for name in fields if name in _BYTES_MAX)
    numbers = tuple((name, *_RANGE[name]) for name in fields if name in _RANGE)
    return texts, payloads, numbers


_CHECKS: dict[type[msgspec.Struct], tuple[tuple[_Check, ...], tuple[_Check, ...], tuple[_Check, ...]]] = {
    kind: _checks(kind) for kind in get_args(c.Command)
}


def problem(request: c.Request) -> str | None:
    """What is out of bounds in a request; None when nothing is."""
    command = request.command
    texts, payloads, numbers = _CHECKS[type(command)]
    for name, low, high in numbers:
        if not low <= getattr(command, name) <= high:
            return f"{name} must be {low} to {high}"
    for name, low, high in texts:
        if not _fits(getattr(command, name), low, high):
            return f"{name} must be {low} to {high} bytes of UTF-8"
    for name, _, high in payloads:
        if len(getattr(command, name)) > high:
            return f"{name} must be at most {high} bytes"
    key = request.key
    if key is not None and not (
        _fits(key.tenant, 0, c.TENANT_BYTES_MAX)
        and _fits(key.origin, 0, c.NAME_BYTES_MAX)
        and _fits(key.name, not key.origin, c.REQUEST_ID_BYTES_MAX)
    ):
        return f"the request id must be 1 to {c.REQUEST_ID_BYTES_MAX} bytes of UTF-8"
    return _across_fields(command)


def _fits(text: str, low: int, high: int) -> bool:
    """Bytes are counted only when the characters alone (4 bytes each at most) do not decide it."""
    length = len(text)
    return low <= length and (length * 4 <= high or (length <= high and len(text.encode()) <= high))


def _across_fields(command: c.Command) -> str | None:
    check = _ACROSS_FIELDS.get(type(command))
    return None if check is None else check(command)


def _acquire_problem(command: c.AcquireLease) -> str | None:
    return "waiter is required when wait_ms is over 0" if command.wait_ms and not command.waiter else None


def _operator_problem(command: c.ReleaseLease | c.TransferLease) -> str | None:
    operator = bool(command.actor and command.reason)
    return None if command.session or operator else "an operator must give actor and reason"


def _open_problem(command: c.OpenSession) -> str | None:
    if command.disconnect_grace_ms > command.ttl_ms:
        return "disconnect_grace_ms must be at most ttl_ms"
    return _labels_problem(command.labels, c.LABELS_MAX)


def _renew_problem(command: c.RenewSessions) -> str | None:
    matched = not command.connections or len(command.connections) == len(command.sessions)
    return None if matched else "connections must be empty or as many as sessions"


def _limits_problem(command: c.SetLimits) -> str | None:
    return None if all(value >= 1 for value in msgspec.structs.astuple(command.limits)) else "limits must be over 0"


# ---- jobs ------------------------------------------------------------------------------------------------------


def _apply_problem(command: c.ApplyJobs) -> str | None:
    if not 1 <= len(command.jobs) <= c.APPLY_JOBS_MAX:
        return f"jobs must be 1 to {c.APPLY_JOBS_MAX}"
    if len({(job.tenant, job.name): None for job in command.jobs}) < len(command.jobs):
        return "a job may be named once only"
    for job in command.jobs:
        if not _fits(job.tenant, 1, c.TENANT_BYTES_MAX):
            return f"tenant must be 1 to {c.TENANT_BYTES_MAX} bytes of UTF-8"
        found = job_name_problem(job.name) or specification_problem(job.spec)
        if found is None and not -1 <= job.expected_revision <= COUNT_MAX:
            found = "expected_revision must be -1 or more"
        if found is not None:
            return f"job {job.name[:100]}: {found}"
    return None


def job_name_problem(name: str) -> str | None:
    if not _fits(name, 1, s.JOB_NAME_BYTES_MAX):
        return f"name must be 1 to {s.JOB_NAME_BYTES_MAX} bytes of UTF-8"
    if "/" in name or name != name.strip() or name.endswith("*"):
        return "name must have no slash, no white space around it, and no * at its end"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in name):
        return "name must have no control characters"
    return None


def _settle_problem(command: c.SettleDue) -> str | None:
    if len(command.settlements) > c.SETTLEMENTS_MAX:
        return f"settlements must be at most {c.SETTLEMENTS_MAX}"
    for settlement in command.settlements:
        found = _settlement_problem(settlement)
        if found is not None:
            return f"settlement of {settlement.name[:100]}: {found}"
    return None


def _settlement_problem(settlement: c.Settlement) -> str | None:
    start_ms, end_ms, next_ms = settlement.settled_ms, settlement.through_ms, settlement.next_due_ms
    if not (_fits(settlement.tenant, 1, c.TENANT_BYTES_MAX) and _fits(settlement.name, 1, s.JOB_NAME_BYTES_MAX)):
        return "tenant and name must be those of a job"
    if not 0 <= start_ms <= end_ms <= s.WALL_MAX_MS:
        return f"times must be in order, and 0 to {s.WALL_MAX_MS}"
    if next_ms and not end_ms < next_ms <= s.WALL_MAX_MS:
        return "next_due_ms must be after through_ms, or 0"
    if len(settlement.due) > c.DUE_MAX or len(settlement.missed) > c.DUE_MAX:
        return f"due and missed must be at most {c.DUE_MAX}"
    for missed in settlement.missed:
        if not (1 <= missed.count <= COUNT_MAX and _fits(missed.reason, 1, c.REASON_BYTES_MAX)):
            return "a missed range must have a count and a reason"
    spans = [(due.due_ms, due.due_ms) for due in settlement.due]
    spans += [(missed.first_due_ms, missed.last_due_ms) for missed in settlement.missed]
    spans.sort()
    if not all(start_ms < first_ms <= last_ms <= end_ms for first_ms, last_ms in spans):
        return "every due time must be in (settled_ms, through_ms]"
    if not all(before[1] < after[0] for before, after in pairwise(spans)):
        return "due times must be distinct, and no missed range may lie over another one or over a due time"
    return None


def _trigger_problem(command: c.TriggerJob) -> str | None:
    too_large = command.payload is not None and len(command.payload) > s.PAYLOAD_BYTES_MAX
    return f"payload must be at most {s.PAYLOAD_BYTES_MAX} bytes" if too_large else None


def _backfill_problem(command: c.BackfillJob) -> str | None:
    due_ms = command.due_ms
    if not 1 <= len(due_ms) <= c.BACKFILL_MAX:
        return f"due_ms must be 1 to {c.BACKFILL_MAX} times"
    if not (due_ms[0] >= 0 and due_ms[-1] <= s.WALL_MAX_MS and all(a < b for a, b in pairwise(due_ms))):
        return f"due_ms must be in order, distinct, and 0 to {s.WALL_MAX_MS}"
    return None


def _served_problem(command: c.ServeJobs | c.ClaimRun) -> str | None:
    # Serving nothing is how a worker stops; claiming from nothing is a mistake.
    low = int(isinstance(command, c.ClaimRun))
    if not low <= len(command.jobs) <= c.SERVED_JOBS_MAX:
        return f"jobs must be {low} to {c.SERVED_JOBS_MAX}"
    if not all(_fits(job, 1, s.JOB_NAME_BYTES_MAX) for job in command.jobs):
        return f"each of jobs must be 1 to {s.JOB_NAME_BYTES_MAX} bytes of UTF-8"
    return None


def _switch_problem(command: c.SetSwitch) -> str | None:
    if command.job and not command.tenant:
        return "a job's switch must name its tenant"
    if 0 < command.expires_after_ms < c.SWITCH_EXPIRY_MIN_MS:
        return f"expires_after_ms must be 0, or {c.SWITCH_EXPIRY_MIN_MS} to {c.SWITCH_EXPIRY_MAX_MS}"
    return None


_ACROSS_FIELDS: dict[type, Callable[[Any], str | None]] = {
    c.SetLimits: _limits_problem,
    c.OpenSession: _open_problem,
    c.RenewSessions: _renew_problem,
    c.AcquireLease: _acquire_problem,
    c.ReleaseLease: _operator_problem,
    c.TransferLease: _operator_problem,
    c.ApplyJobs: _apply_problem,
    c.SettleDue: _settle_problem,
    c.TriggerJob: _trigger_problem,
    c.BackfillJob: _backfill_problem,
    c.ServeJobs: _served_problem,
    c.ClaimRun: _served_problem,
    c.SetSwitch: _switch_problem,
}


# ---- specifications ----------------------------------------------------------------------------------------------

_SPECIFICATION_TEXTS: tuple[_Check, ...] = (
    ("owner", 1, s.TEXT_BYTES_MAX),
    ("runbook_url", 1, s.URL_BYTES_MAX),
    ("description", 0, DESCRIPTION_BYTES_MAX),
)
_SPECIFICATION_NUMBERS: tuple[_Check, ...] = (
    ("jitter_ms", 0, s.JITTER_MAX_MS),
    ("catch_up_max", 0, s.CATCH_UP_MAX),
    ("catch_up_window_ms", 0, s.CATCH_UP_WINDOW_MAX_MS),
    ("starting_deadline_ms", s.STARTING_DEADLINE_MIN_MS, s.STARTING_DEADLINE_MAX_MS),
    ("buffer_max", 0, s.BUFFER_MAX),
    ("concurrent_max", 0, s.CONCURRENT_MAX),
    ("timeout_ms", s.TIMEOUT_MIN_MS, s.TIMEOUT_MAX_MS),
    ("interrupt_grace_ms", 0, s.GRACE_MAX_MS),
    ("priority", s.PRIORITY_MIN, s.PRIORITY_MAX),
    ("estimated_cost_micros", 0, COST_MAX_MICROS),
    ("history_count", 1, s.HISTORY_COUNT_MAX),
    ("history_age_ms", s.HISTORY_AGE_MIN_MS, s.HISTORY_AGE_MAX_MS),
)
_RETRY_NUMBERS: tuple[_Check, ...] = (
    ("attempts_max", 1, s.ATTEMPTS_MAX),
    ("initial_ms", 0, s.BACKOFF_MAX_MS),
    ("multiplier_percent", MULTIPLIER_MIN_PERCENT, MULTIPLIER_MAX_PERCENT),
    ("max_ms", 0, s.BACKOFF_MAX_MS),
    ("jitter_percent", 0, 100),
)
_SCHEDULE_NUMBERS: tuple[_Check, ...] = (
    ("anchor_ms", 0, s.WALL_MAX_MS),
    ("at_ms", 0, s.WALL_MAX_MS),
    ("start_ms", 0, s.WALL_MAX_MS),
    ("end_ms", 0, s.WALL_MAX_MS),
)


def specification_problem(spec: s.JobSpec) -> str | None:
    """What is out of bounds in a specification, or does not go together; None when nothing is."""
    return (
        _texts_problem(spec, "", _SPECIFICATION_TEXTS)
        or _numbers_problem(spec, "", _SPECIFICATION_NUMBERS)
        or _numbers_problem(spec.retry, "retry.", _RETRY_NUMBERS)
        or _schedule_problem(spec.schedule)
        or _payload_problem(spec)
        or _labels_problem(spec.labels, s.LABELS_MAX)
        or _selector_problem(spec.selector)
        or _canary_problem(spec.canary)
        or _policy_problem(spec)
    )


def _schedule_problem(schedule: s.Schedule) -> str | None:
    cron = schedule.kind is s.ScheduleKind.CRON
    texts = (("cron", int(cron), s.TEXT_BYTES_MAX), ("zone", 1, s.TEXT_BYTES_MAX))
    # Its field means nothing to the other kinds.
    low, high = (s.INTERVAL_MIN_MS, s.INTERVAL_MAX_MS) if schedule.kind is s.ScheduleKind.INTERVAL else (0, 0)
    numbers = (("interval_ms", low, high), *_SCHEDULE_NUMBERS)
    found = _texts_problem(schedule, "schedule.", texts) or _numbers_problem(schedule, "schedule.", numbers)
    if found is not None:
        return found
    if schedule.kind is s.ScheduleKind.ONCE and not schedule.at_ms:
        return "schedule.at_ms is required for a one-shot"
    if schedule.end_ms and schedule.end_ms <= schedule.start_ms:
        return "schedule.end_ms must be after schedule.start_ms"
    return None


def _payload_problem(spec: s.JobSpec) -> str | None:
    fits = len(spec.payload) <= s.PAYLOAD_BYTES_MAX
    return None if fits else f"payload must be at most {s.PAYLOAD_BYTES_MAX} bytes"


def _selector_problem(selector: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    high = c.INFO_FIELD_BYTES_MAX
    if len(selector) > s.SELECTOR_TERMS_MAX or not _distinct([key for key, _ in selector]):
        return f"selector must have at most {s.SELECTOR_TERMS_MAX} terms, each of a key of its own"
    for key, values in selector:
        if not _fits(key, 1, high) or not 1 <= len(values) <= s.SELECTOR_VALUES_MAX or not _distinct(values):
            return f"selector must accept 1 to {s.SELECTOR_VALUES_MAX} different values for each key"
        if not all(_fits(value, 0, high) for value in values):
            return f"values of selector must be at most {high} bytes of UTF-8"
    return None


def _canary_problem(canary: s.Canary | None) -> str | None:
    if canary is None:
        return None
    high = c.INFO_FIELD_BYTES_MAX
    return _numbers_problem(canary, "canary.", (("percent", 1, 99),)) or _texts_problem(
        canary, "canary.", (("label", 1, high), ("value", 0, high))
    )


def _policy_problem(spec: s.JobSpec) -> str | None:
    """What each policy needs of the others."""
    if spec.misfire is s.Misfire.ALL and not spec.catch_up_max:
        return "catch_up_max must be 1 or more for misfire ALL"
    if spec.overlap is s.Overlap.ALLOW and not spec.concurrent_max:
        return "concurrent_max must be 1 or more for overlap ALLOW"
    if spec.overlap is s.Overlap.BUFFER_ALL and not spec.buffer_max:
        return "buffer_max must be 1 or more for overlap BUFFER_ALL"
    if spec.delivery is not s.Delivery.AT_MOST_ONCE:
        return None
    if spec.retry.attempts_max != 1:
        return "retry.attempts_max must be 1 for delivery AT_MOST_ONCE"
    if spec.on_holder_loss is s.HolderLoss.RETRY:
        return "on_holder_loss must be SKIP or HOLD_FOR_PERSON for delivery AT_MOST_ONCE"
    return None


# ---- parts -------------------------------------------------------------------------------------------------------


def _texts_problem(row: msgspec.Struct, where: str, checks: tuple[_Check, ...]) -> str | None:
    for name, low, high in checks:
        text = getattr(row, name)
        if not _fits(text, low, high) or (low and not text.strip()):
            return f"{where}{name} must be {low} to {high} bytes of UTF-8, and not blank"
    return None


def _numbers_problem(row: msgspec.Struct, where: str, checks: tuple[_Check, ...]) -> str | None:
    for name, low, high in checks:
        if not low <= getattr(row, name) <= high:
            return f"{where}{name} must be {low} to {high}"
    return None


def _labels_problem(labels: tuple[tuple[str, str], ...], count_max: int) -> str | None:
    high = c.INFO_FIELD_BYTES_MAX
    fit = len(labels) <= count_max and all(_fits(key, 1, high) and _fits(value, 0, high) for key, value in labels)
    return None if fit else f"labels must be at most {count_max}, each bounded"


def _distinct(texts: Sequence[str]) -> bool:
    return len(dict.fromkeys(texts)) == len(texts)
