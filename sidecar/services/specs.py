"""Specifications of jobs between the API and the core: every field checked, under its path; every default filled in.

``at`` is the path of the message in its request ("jobs[2].spec"): an error says "jobs[2].spec.schedule.cron".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from google.protobuf.message import Message
from tenure.v1 import job_pb2

from sidecar.core import bounds, commands
from sidecar.core import specification as s
from sidecar.core.specification import JobSpec, Schedule, ScheduleKind
from sidecar.scheduling import schedules
from sidecar.services import validation as check
from sidecar.services import words
from sidecar.services.errors import ApiError, Problem, problem, shorten

LABEL_BYTES_MAX = commands.INFO_FIELD_BYTES_MAX

# A change of leaders takes a second or two; what must start sooner than this may be missed by one.
LEADER_CHANGE_MS = 5_000
FLAG_AGE_MAX_MS = 30 * 86_400_000


def _names(enum: Mapping[str, int]) -> dict[int, str]:
    return {number: name for name, number in enum.items()}


_DST = _names(dict(job_pb2.DstPolicy.items()))
_MISFIRE = _names(dict(job_pb2.MisfirePolicy.items()))
_OVERLAP = _names(dict(job_pb2.OverlapPolicy.items()))
_DELIVERY = _names(dict(job_pb2.Delivery.items()))
_LOSS = _names(dict(job_pb2.HolderLossPolicy.items()))
_MODE = _names(dict(job_pb2.JobMode.items()))


# ---- from a message -----------------------------------------------------------------------------------------------


def spec_of(message: job_pb2.JobSpec, at: str) -> JobSpec:
    """Checked, with all defaults. Raises ApiError, which names the first field that is wrong."""
    delivery = s.Delivery(check.choice(message.delivery, f"{at}.delivery", _DELIVERY) or s.Delivery.AT_LEAST_ONCE)
    spec = JobSpec(
        owner=check.required_text(message.owner, f"{at}.owner", s.TEXT_BYTES_MAX),
        runbook_url=_url(message.runbook_url, f"{at}.runbook_url"),
        description=check.text(message.description, f"{at}.description", bounds.DESCRIPTION_BYTES_MAX),
        schedule=schedule_of(message.schedule, f"{at}.schedule"),
        jitter_ms=check.number(message.jitter_ms, f"{at}.jitter_ms", 0, s.JITTER_MAX_MS),
        misfire=s.Misfire(check.choice(message.misfire_policy, f"{at}.misfire_policy", _MISFIRE) or s.Misfire.LATEST),
        catch_up_max=check.number(message.catch_up_max, f"{at}.catch_up_max", 0, s.CATCH_UP_MAX),
        catch_up_window_ms=_given(message, "catch_up_window_ms", at, 3_600_000, 0, s.CATCH_UP_WINDOW_MAX_MS),
        starting_deadline_ms=_given(
            message, "starting_deadline_ms", at, 3_600_000, s.STARTING_DEADLINE_MIN_MS, s.STARTING_DEADLINE_MAX_MS
        ),
        overlap=s.Overlap(check.choice(message.overlap_policy, f"{at}.overlap_policy", _OVERLAP) or s.Overlap.SKIP),
        buffer_max=_given(message, "buffer_max", at, 100, 1, s.BUFFER_MAX),
        concurrent_max=_given(message, "concurrent_max", at, 1, 1, s.CONCURRENT_MAX),
        timeout_ms=_given(message, "timeout_ms", at, 3_600_000, s.TIMEOUT_MIN_MS, s.TIMEOUT_MAX_MS),
        interrupt_grace_ms=_given(message, "interrupt_grace_ms", at, 10_000, 0, s.GRACE_MAX_MS),
        delivery=delivery,
        on_holder_loss=_loss(message.on_holder_loss, delivery, f"{at}.on_holder_loss"),
        retry=_retry(message.retry, delivery, f"{at}.retry"),
        priority=check.number(message.priority, f"{at}.priority", s.PRIORITY_MIN, s.PRIORITY_MAX),
        labels=_labels(message.labels, f"{at}.labels"),
        selector=_selector(message.selector, f"{at}.selector"),
        payload=check.payload(message.payload, f"{at}.payload", s.PAYLOAD_BYTES_MAX),
        estimated_cost_micros=check.number(
            message.estimated_cost_micros, f"{at}.estimated_cost_micros", 0, bounds.COST_MAX_MICROS
        ),
        mode=s.Mode(check.choice(message.mode, f"{at}.mode", _MODE) or s.Mode.LIVE),
        canary=_canary(message.canary, f"{at}.canary") if message.HasField("canary") else None,
        history_count=_given(message, "history_count", at, 100, 1, s.HISTORY_COUNT_MAX),
        history_age_ms=_given(
            message, "history_age_ms", at, 30 * 86_400_000, s.HISTORY_AGE_MIN_MS, s.HISTORY_AGE_MAX_MS
        ),
    )
    _check_together(spec, at)
    return spec


def _given(message: Message, name: str, at: str, default: int, least: int, most: int) -> int:
    """An optional number; 0 is a value like any other."""
    return check.number(getattr(message, name), f"{at}.{name}", least, most) if message.HasField(name) else default


def _check_together(spec: JobSpec, at: str) -> None:
    """Policies that go together."""
    if spec.misfire is s.Misfire.ALL and not spec.catch_up_max:
        allowed = f"1 to {s.CATCH_UP_MAX}, required with MISFIRE_POLICY_ALL"
        raise check.invalid(Problem.FIELD_REQUIRED, f"{at}.catch_up_max", 0, allowed)
    if spec.misfire is not s.Misfire.ALL and spec.catch_up_max:
        allowed = "0, unless misfire_policy is MISFIRE_POLICY_ALL"
        raise check.invalid(Problem.FIELD_INVALID, f"{at}.catch_up_max", spec.catch_up_max, allowed)
    if spec.overlap is s.Overlap.ALLOW and spec.concurrent_max < 2:
        allowed = f"2 to {s.CONCURRENT_MAX}, required with OVERLAP_POLICY_ALLOW"
        raise check.invalid(Problem.FIELD_REQUIRED, f"{at}.concurrent_max", spec.concurrent_max, allowed)
    if spec.overlap is not s.Overlap.ALLOW and spec.concurrent_max > 1:
        allowed = "1 or unset, unless overlap_policy is OVERLAP_POLICY_ALLOW"
        raise check.invalid(Problem.FIELD_INVALID, f"{at}.concurrent_max", spec.concurrent_max, allowed)
    if spec.jitter_ms >= spec.starting_deadline_ms:
        allowed = f"less than starting_deadline_ms ({spec.starting_deadline_ms}), or what is spread so far is missed"
        raise check.invalid(Problem.FIELD_INVALID, f"{at}.jitter_ms", spec.jitter_ms, allowed)


def _loss(value: int, delivery: s.Delivery, field: str) -> s.HolderLoss:
    chosen = check.choice(value, field, _LOSS)
    if delivery is s.Delivery.AT_MOST_ONCE:
        if chosen == s.HolderLoss.RETRY:
            allowed = "HOLDER_LOSS_POLICY_SKIP or HOLDER_LOSS_POLICY_HOLD_FOR_PERSON, as delivery is at most once"
            raise check.invalid(Problem.FIELD_INVALID, field, _LOSS[chosen], allowed)
        return s.HolderLoss(chosen or s.HolderLoss.HOLD_FOR_PERSON)
    return s.HolderLoss(chosen or s.HolderLoss.RETRY)


def _retry(message: job_pb2.RetryPolicy, delivery: s.Delivery, at: str) -> s.Retry:
    once = delivery is s.Delivery.AT_MOST_ONCE
    default = s.Retry()
    attempts_max = _given(message, "attempts_max", at, 1 if once else default.attempts_max, 1, s.ATTEMPTS_MAX)
    if once and attempts_max > 1:
        allowed = "1 or unset, as delivery is at most once"
        raise check.invalid(Problem.FIELD_INVALID, f"{at}.attempts_max", attempts_max, allowed)
    return s.Retry(
        attempts_max=attempts_max,
        initial_ms=_given(message, "initial_ms", at, default.initial_ms, 0, s.BACKOFF_MAX_MS),
        multiplier_percent=_given(
            message,
            "multiplier_percent",
            at,
            default.multiplier_percent,
            bounds.MULTIPLIER_MIN_PERCENT,
            bounds.MULTIPLIER_MAX_PERCENT,
        ),
        max_ms=_given(message, "max_ms", at, default.max_ms, 0, s.BACKOFF_MAX_MS),
        jitter_percent=_given(message, "jitter_percent", at, default.jitter_percent, 0, 100),
        on_failure=message.on_failure if message.HasField("on_failure") else default.on_failure,
        on_timeout=message.on_timeout if message.HasField("on_timeout") else default.on_timeout,
    )


def _url(value: str, field: str) -> str:
    allowed = f"an http or https URL of at most {s.URL_BYTES_MAX} bytes"
    if not value:
        raise problem(Problem.FIELD_REQUIRED, f"{field} is required: {allowed}", field=field, allowed=allowed)
    check.text(value, field, s.URL_BYTES_MAX)
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and value.isprintable() and " " not in value
    except ValueError:
        good = False
    if not good:
        raise check.invalid(Problem.FIELD_INVALID, field, value, allowed)
    return value


def _labels(value: Mapping[str, str], field: str) -> tuple[tuple[str, str], ...]:
    """Ordered by name, so that equal specifications are equal."""
    check.number(len(value), field, 0, s.LABELS_MAX)
    for name, content in value.items():
        check.identifier(name, f"{field} (name)", LABEL_BYTES_MAX)
        check.text(content, f"{field}[{shorten(name, 32)}]", LABEL_BYTES_MAX)
    return tuple(sorted(value.items()))


def _selector(terms: Sequence[job_pb2.SelectorTerm], field: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    check.number(len(terms), field, 0, s.SELECTOR_TERMS_MAX)
    found: dict[str, tuple[str, ...]] = {}
    for index, term in enumerate(terms):
        at = f"{field}[{index}]"
        check.identifier(term.key, f"{at}.key", LABEL_BYTES_MAX)
        if term.key in found:
            raise check.invalid(Problem.FIELD_INVALID, f"{at}.key", term.key, "each key once, with all its values")
        check.number(len(term.values), f"{at}.values", 1, s.SELECTOR_VALUES_MAX)
        for position, content in enumerate(term.values):
            check.text(content, f"{at}.values[{position}]", LABEL_BYTES_MAX)
        found[term.key] = tuple(sorted(dict.fromkeys(term.values)))
    return tuple(sorted(found.items()))


def _canary(message: job_pb2.Canary, at: str) -> s.Canary:
    return s.Canary(
        percent=check.number(message.percent, f"{at}.percent", 1, 99),
        label=check.identifier(message.label, f"{at}.label", LABEL_BYTES_MAX),
        value=check.text(message.value, f"{at}.value", LABEL_BYTES_MAX),
    )


# The schedule's own names of its fields, and those of the message.
_SCHEDULE_FIELDS = {
    "interval_ms": "interval.every_ms",
    "anchor_ms": "interval.anchor_wall_ms",
    "at_ms": "once_wall_ms",
    "start_ms": "start_wall_ms",
    "end_ms": "end_wall_ms",
}


def schedule_of(message: job_pb2.Schedule, at: str) -> Schedule:
    kind = message.WhichOneof("kind")
    if kind is None:
        allowed = "one of cron, interval, once_wall_ms and manual"
        raise problem(Problem.FIELD_REQUIRED, f"{at} needs {allowed}", field=at, allowed=allowed)
    check.text(message.cron, f"{at}.cron", s.TEXT_BYTES_MAX)
    schedule = Schedule(
        kind=_KINDS[kind],
        cron=message.cron.strip() if kind == "cron" else "",
        interval_ms=message.interval.every_ms,
        anchor_ms=message.interval.anchor_wall_ms,
        at_ms=message.once_wall_ms,
        zone=check.text(message.zone, f"{at}.zone", s.TEXT_BYTES_MAX) or "UTC",
        dst=s.DstPolicy(check.choice(message.dst_policy, f"{at}.dst_policy", _DST) or s.DstPolicy.VIXIE),
        start_ms=message.start_wall_ms,
        end_ms=message.end_wall_ms,
    )
    wrong = schedules.problems(schedule)
    if wrong:
        raise _refusal(schedule, wrong[0], at)
    return schedule


_KINDS = {
    "cron": ScheduleKind.CRON,
    "interval": ScheduleKind.INTERVAL,
    "once_wall_ms": ScheduleKind.ONCE,
    "manual": ScheduleKind.MANUAL,
}


def _refusal(schedule: Schedule, wrong: schedules.Problem, at: str) -> ApiError:
    allowed = wrong.allowed  # empty where nothing would help
    if not wrong.field.startswith("cron"):
        field = f"{at}.{_SCHEDULE_FIELDS.get(wrong.field, wrong.field)}"
        shown = wrong.value if wrong.field.endswith("_ms") else shorten(repr(wrong.value), 64)
        return problem(
            Problem.FIELD_INVALID, f"{field} is {shown}{wrong.said}", field=field, value=shown, allowed=allowed
        )
    field, shown = f"{at}.cron", shorten(repr(schedule.cron), 96)
    part = wrong.field.removeprefix("cron").strip()
    where = f": {part} {shorten(repr(wrong.value), 64)}" if part else ""
    message = f"{field} is {shown}{where}{wrong.said}"
    return problem(Problem.FIELD_INVALID, message, field=field, value=shown, part=part or "all", allowed=allowed)


# ---- to a message -------------------------------------------------------------------------------------------------


def spec_message(spec: JobSpec, *, with_payload: bool = True) -> job_pb2.JobSpec:
    """Every default is said, so that applying the message gives the same specification."""
    retry = spec.retry
    return job_pb2.JobSpec(
        owner=spec.owner,
        runbook_url=spec.runbook_url,
        description=spec.description,
        schedule=schedule_message(spec.schedule),
        jitter_ms=spec.jitter_ms,
        misfire_policy=job_pb2.MisfirePolicy.ValueType(spec.misfire),
        catch_up_max=spec.catch_up_max,
        catch_up_window_ms=spec.catch_up_window_ms,
        starting_deadline_ms=spec.starting_deadline_ms,
        overlap_policy=job_pb2.OverlapPolicy.ValueType(spec.overlap),
        buffer_max=spec.buffer_max,
        concurrent_max=spec.concurrent_max,
        timeout_ms=spec.timeout_ms,
        interrupt_grace_ms=spec.interrupt_grace_ms,
        delivery=job_pb2.Delivery.ValueType(spec.delivery),
        on_holder_loss=job_pb2.HolderLossPolicy.ValueType(spec.on_holder_loss),
        retry=job_pb2.RetryPolicy(
            attempts_max=retry.attempts_max,
            initial_ms=retry.initial_ms,
            multiplier_percent=retry.multiplier_percent,
            max_ms=retry.max_ms,
            jitter_percent=retry.jitter_percent,
            on_failure=retry.on_failure,
            on_timeout=retry.on_timeout,
        ),
        priority=spec.priority,
        labels=dict(spec.labels),
        selector=[job_pb2.SelectorTerm(key=key, values=values) for key, values in spec.selector],
        payload=spec.payload if with_payload else b"",
        estimated_cost_micros=spec.estimated_cost_micros,
        mode=job_pb2.JobMode.ValueType(spec.mode),
        canary=_canary_message(spec.canary),
        history_count=spec.history_count,
        history_age_ms=spec.history_age_ms,
    )


def _canary_message(canary: s.Canary | None) -> job_pb2.Canary | None:
    return job_pb2.Canary(percent=canary.percent, label=canary.label, value=canary.value) if canary else None


def schedule_message(schedule: Schedule) -> job_pb2.Schedule:
    message = job_pb2.Schedule(
        zone=schedule.zone,
        dst_policy=job_pb2.DstPolicy.ValueType(schedule.dst),
        start_wall_ms=schedule.start_ms,
        end_wall_ms=schedule.end_ms,
    )
    if schedule.kind is ScheduleKind.CRON:
        message.cron = schedule.cron
    elif schedule.kind is ScheduleKind.INTERVAL:
        message.interval.every_ms, message.interval.anchor_wall_ms = schedule.interval_ms, schedule.anchor_ms
    elif schedule.kind is ScheduleKind.ONCE:
        message.once_wall_ms = schedule.at_ms
    else:
        message.manual.SetInParent()
    return message


# ---- in words -----------------------------------------------------------------------------------------------------


def schedule_text(schedule: Schedule) -> str:
    """The dialect, the zone and what a clock change does."""
    try:
        return schedules.compile_schedule(schedule).describe()
    except schedules.ScheduleError as error:
        return f"cannot be computed by this node: {error}"


def text_of(spec: JobSpec) -> str:
    """The schedule and the policies that decide what runs."""
    late = {
        s.Misfire.SKIP: "of times that were missed none runs",
        s.Misfire.LATEST: "of times that were missed the latest runs",
        s.Misfire.ALL: f"of times that were missed the latest {spec.catch_up_max} run, one after another",
    }[spec.misfire]
    if spec.misfire is not s.Misfire.SKIP:
        late += f", if not older than {words.duration(spec.catch_up_window_ms)}"
    overlap = {
        s.Overlap.SKIP: "while one is unfinished, further ones are skipped",
        s.Overlap.BUFFER_ONE: "while one is unfinished, one further waits, more are skipped",
        s.Overlap.BUFFER_ALL: f"while one is unfinished, up to {spec.buffer_max} further ones wait",
        s.Overlap.CANCEL_RUNNING: "a new one interrupts the unfinished one",
        s.Overlap.ALLOW: f"up to {spec.concurrent_max} run at once, more are skipped",
    }[spec.overlap]
    spread = f"; spread over {words.duration(spec.jitter_ms)}" if spec.jitter_ms else ""
    return f"{schedule_text(spec.schedule)}{spread}; {late}; {overlap}"


def warnings_of(spec: JobSpec, wall_ms: int, flag_since_ms: int = 0, *, applied: bool = False) -> list[str]:
    """What is allowed, and probably not meant. ``applied``: the schedule begins now."""
    found = []
    if applied and spec.schedule.kind is not ScheduleKind.MANUAL and not _has_next(spec.schedule, wall_ms):
        found.append("schedule: all its times are past; the job is never due by itself, and runs only when triggered")
    if spec.starting_deadline_ms < LEADER_CHANGE_MS:
        deadline = words.duration(spec.starting_deadline_ms)
        found.append(f"starting_deadline_ms: {deadline} is smaller than a leader change can take; runs may be missed")
    period_ms = _period_ms(spec.schedule, wall_ms)
    if spec.overlap is s.Overlap.SKIP and period_ms and spec.timeout_ms > period_ms:
        timeout, period = words.duration(spec.timeout_ms), words.duration(period_ms)
        found.append(
            f"timeout_ms: {timeout} is longer than the period of {period}; one run that hangs has later ones skipped"
        )
    flag = flag_warning(spec, wall_ms, flag_since_ms)
    return [*found, flag] if flag else found


def flag_warning(spec: JobSpec, wall_ms: int, flag_since_ms: int) -> str:
    """Of a job that has been in shadow mode, or with a canary, for long; else empty."""
    age_ms = wall_ms - flag_since_ms
    if not flag_since_ms or age_ms <= FLAG_AGE_MAX_MS:
        return ""
    flag = "in shadow mode" if spec.mode is s.Mode.SHADOW else "with a canary"
    return f"it has been {flag} for {age_ms // 86_400_000} days; take the flag away, or it is forgotten"


def _has_next(schedule: Schedule, wall_ms: int) -> bool:
    try:
        return schedules.compile_schedule(schedule).next_after(wall_ms) is not None
    except schedules.ScheduleError:  # accepted under other zone rules than those of this node
        return True


def _period_ms(schedule: Schedule, wall_ms: int) -> int:
    """Between the next two due times; 0 when there are none."""
    if schedule.kind is ScheduleKind.INTERVAL:
        return schedule.interval_ms
    if schedule.kind is not ScheduleKind.CRON:
        return 0
    try:
        due = schedules.compile_schedule(schedule).due(wall_ms, s.WALL_MAX_MS, 2)
    except schedules.ScheduleError:
        return 0
    return due[1] - due[0] if len(due) == 2 else 0
