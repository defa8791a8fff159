"""Requests about jobs, runs and switches as commands, checked field by field."""

from __future__ import annotations

from tenure.v1 import job_pb2, switch_pb2

from sidecar.core import bounds, commands, occurrences
from sidecar.core.specification import CHECKPOINT_BYTES_MAX, OUTCOME_BYTES_MAX, PAYLOAD_BYTES_MAX, WALL_MAX_MS
from sidecar.services import specs
from sidecar.services import validation as check
from sidecar.services.calls import Caller
from sidecar.services.errors import Problem, problem

APPLY_BYTES_MAX = 900_000
SWITCH_ID_BYTES_MAX = 64
RUN_ID_BYTES_MAX = 64
# Who applied jobs, when it is not said.
UNKNOWN_ACTOR = "unknown"

_RESOLUTION_NAMES = {int(number): name for name, number in job_pb2.OccurrenceResolution.items() if number}
_STATE_NAMES = {int(number): name for name, number in job_pb2.OccurrenceState.items()}
_SCOPE_NAMES = {int(number): name for name, number in switch_pb2.SwitchScope.items() if number}
_MODE_NAMES = {int(number): name for name, number in switch_pb2.SwitchMode.items() if number}


def actor(value: str) -> str:
    return check.required_text(value, "actor", commands.ACTOR_BYTES_MAX)


def reason(value: str) -> str:
    return check.required_text(value, "reason", commands.REASON_BYTES_MAX)


def wall_ms(value: int, field: str) -> int:
    return check.number(value, field, 0, WALL_MAX_MS)


# ---- jobs ---------------------------------------------------------------------------------------------------------


def apply_jobs(request: job_pb2.ApplyJobsRequest, caller: Caller) -> commands.ApplyJobs:
    check.number(len(request.jobs), "jobs", 1, commands.APPLY_JOBS_MAX)
    size = request.ByteSize()
    if size > APPLY_BYTES_MAX:
        raise check.too_large("jobs", size, APPLY_BYTES_MAX)
    definitions: dict[tuple[str, str], commands.JobDefinition] = {}
    for index, message in enumerate(request.jobs):
        definition = _definition(message, f"jobs[{index}]", caller)
        named = (definition.tenant, definition.name)
        if named in definitions:
            first = list(definitions).index(named)
            allowed = f"each job once; jobs[{first}] has this name, too"
            raise check.invalid(Problem.FIELD_INVALID, f"jobs[{index}].name", message.name, allowed)
        definitions[named] = definition
    return commands.ApplyJobs(
        jobs=tuple(definitions.values()),
        actor=check.text(request.actor.strip(), "actor", commands.ACTOR_BYTES_MAX) or UNKNOWN_ACTOR,
        reason=check.text(request.reason, "reason", commands.REASON_BYTES_MAX),
    )


def _definition(message: job_pb2.JobDefinition, at: str, caller: Caller) -> commands.JobDefinition:
    expected = -1
    if message.HasField("expected_revision"):
        expected = check.number(message.expected_revision, f"{at}.expected_revision", 0, bounds.COUNT_MAX)
    return commands.JobDefinition(
        tenant=caller.tenant_of(message.tenant, f"{at}.tenant"),
        name=check.job_name(message.name, f"{at}.name"),
        spec=specs.spec_of(message.spec, f"{at}.spec"),
        expected_revision=expected,
    )


def delete_job(request: job_pb2.DeleteJobRequest, tenant: str) -> commands.DeleteJob:
    return commands.DeleteJob(
        tenant=tenant, name=check.job_name(request.name), actor=actor(request.actor), reason=reason(request.reason)
    )


def rollback_job(request: job_pb2.RollbackJobRequest, tenant: str) -> commands.RollbackJob:
    to_revision = 0
    if request.HasField("to_revision"):
        to_revision = check.number(request.to_revision, "to_revision", 1, bounds.COUNT_MAX)
    return commands.RollbackJob(
        tenant=tenant,
        name=check.job_name(request.name),
        to_revision=to_revision,
        actor=actor(request.actor),
        reason=reason(request.reason),
    )


def trigger_job(request: job_pb2.TriggerJobRequest, tenant: str) -> commands.TriggerJob:
    payload = check.payload(request.payload, "payload", PAYLOAD_BYTES_MAX) if request.HasField("payload") else None
    return commands.TriggerJob(
        tenant=tenant,
        name=check.job_name(request.name),
        actor=actor(request.actor),
        reason=reason(request.reason),
        payload=payload,
    )


def resolve_occurrence(request: job_pb2.ResolveOccurrenceRequest, tenant: str) -> commands.ResolveOccurrence:
    resolution = check.choice(request.resolution, "resolution", _RESOLUTION_NAMES)
    return commands.ResolveOccurrence(
        tenant=tenant,
        job=check.job_name(request.job, "job"),
        due_ms=wall_ms(request.due_wall_ms, "due_wall_ms"),
        sequence=check.number(request.sequence, "sequence", 0, bounds.COUNT_MAX),
        attempt=check.attempt(request.attempt),
        resolution=commands.OccurrenceResolution(resolution),
        actor=actor(request.actor),
        reason=reason(request.reason),
        result=check.payload(request.result, "result", OUTCOME_BYTES_MAX),
        error=check.text(request.error, "error", commands.ERROR_BYTES_MAX),
    )


def occurrence_state(value: int) -> occurrences.OccurrenceState | None:
    """None for all of them."""
    check.choice(value, "state", _STATE_NAMES)
    return occurrences.OccurrenceState(value) if value else None


# ---- runs ---------------------------------------------------------------------------------------------------------


def serve_jobs(request: job_pb2.ServeJobsRequest, tenant: str, session: str) -> commands.ServeJobs:
    return commands.ServeJobs(
        tenant=tenant,
        session=session,
        jobs=check.job_patterns(request.jobs),
        slots=check.number(request.slots, "slots", 0, commands.SLOTS_MAX),
    )


def claim_run(request: job_pb2.ClaimRunRequest, tenant: str, session: str) -> commands.ClaimRun:
    check.number(len(request.jobs), "jobs", 1, commands.SERVED_JOBS_MAX)
    check.number(request.wait_ms, "wait_ms", 0, commands.WAIT_MAX_MS)
    return commands.ClaimRun(tenant=tenant, session=session, jobs=check.job_patterns(request.jobs))


def run_id(value: str) -> str:
    return check.identifier(value, "run_id", RUN_ID_BYTES_MAX)


def checkpoint_run(request: job_pb2.CheckpointRunRequest, tenant: str, session: str) -> commands.CheckpointRun:
    return commands.CheckpointRun(
        tenant=tenant,
        session=session,
        run=run_id(request.run_id),
        token=check.token(request.token),
        state=check.payload(request.state, "state", CHECKPOINT_BYTES_MAX),
    )


def complete_run(request: job_pb2.CompleteRunRequest, tenant: str, session: str) -> commands.CompleteRun:
    return commands.CompleteRun(
        tenant=tenant,
        session=session,
        run=run_id(request.run_id),
        token=check.token(request.token),
        result=check.payload(request.result, "result", OUTCOME_BYTES_MAX),
    )


def fail_run(request: job_pb2.FailRunRequest, tenant: str, session: str) -> commands.FailRun:
    return commands.FailRun(
        tenant=tenant,
        session=session,
        run=run_id(request.run_id),
        token=check.token(request.token),
        error=check.text(request.error, "error", commands.ERROR_BYTES_MAX),
        retryable=request.retryable,
        retry_after_ms=check.number(request.retry_after_ms, "retry_after_ms", 0, commands.RETRY_AFTER_MAX_MS),
    )


def acknowledge_interrupt(
    request: job_pb2.AcknowledgeInterruptRequest, tenant: str, session: str
) -> commands.AcknowledgeInterrupt:
    return commands.AcknowledgeInterrupt(
        tenant=tenant,
        session=session,
        run=run_id(request.run_id),
        token=check.token(request.token),
        detail=check.text(request.detail, "detail", commands.DETAIL_BYTES_MAX),
    )


def interrupt_run(request: job_pb2.InterruptRunRequest, tenant: str) -> commands.InterruptRun:
    return commands.InterruptRun(
        tenant=tenant, run=run_id(request.run_id), actor=actor(request.actor), reason=reason(request.reason)
    )


# ---- switches -----------------------------------------------------------------------------------------------------


def set_switch(request: switch_pb2.SetSwitchRequest, caller: Caller) -> commands.SetSwitch:
    scope = check.choice(request.scope, "scope", _SCOPE_NAMES)
    mode = commands.SwitchMode(check.choice(request.mode, "mode", _MODE_NAMES))
    tenant = job = ""
    if scope == switch_pb2.SWITCH_SCOPE_FLEET:
        _absent(request.tenant, "tenant", "empty, as the scope is the fleet")
    else:
        tenant = caller.tenant_of(request.tenant)
    if scope == switch_pb2.SWITCH_SCOPE_JOB:
        job = check.job_name(request.job, "job")
    else:
        _absent(request.job, "job", "empty, unless the scope is a job")
    expires_ms = 0
    if request.HasField("expires_after_ms"):
        expires_ms = check.number(
            request.expires_after_ms,
            "expires_after_ms",
            commands.SWITCH_EXPIRY_MIN_MS,
            commands.SWITCH_EXPIRY_MAX_MS,
        )
    return commands.SetSwitch(
        mode=mode,
        actor=actor(request.actor),
        reason=reason(request.reason),
        tenant=tenant,
        job=job,
        expires_after_ms=expires_ms,
    )


def _absent(value: str, field: str, allowed: str) -> None:
    if value:
        raise check.invalid(Problem.FIELD_INVALID, field, value, allowed)


def switch_id(value: str) -> str:
    return check.identifier(value, "switch_id", SWITCH_ID_BYTES_MAX)


def clear_switch(request: switch_pb2.ClearSwitchRequest, tenant: str) -> commands.ClearSwitch:
    """``tenant`` is empty for the fleet's."""
    return commands.ClearSwitch(
        tenant=tenant,
        switch=switch_id(request.switch_id),
        actor=actor(request.actor),
        reason=reason(request.reason),
    )


def exactly_one(first: bool, second: bool, names: str) -> None:
    """Of two fields that exclude each other."""
    if first == second:
        raise problem(Problem.FIELD_INVALID, f"exactly one of {names} is allowed", field=names)
