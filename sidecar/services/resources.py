"""The services of the API but cluster and watch: which operation serves which method. ObserveLease, Connect stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tenure.v1 import dedup_pb2, job_pb2, lease_pb2, session_pb2, switch_pb2

from sidecar.core.events import Event
from sidecar.services import validation as check
from sidecar.services.errors import ApiError
from sidecar.services.handlers import Context, Handlers, Writer
from sidecar.services.operations import Operations
from sidecar.services.stream import AgentStream

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

OBSERVE_CONFIRM_MS = 2_000


def session_service(runtime: Runtime, operations: Operations) -> Handlers:
    handlers = Handlers(runtime, session_pb2.DESCRIPTOR.services_by_name["SessionService"])
    handlers.unary("OpenSession", operations.open_session)
    handlers.unary("RenewSession", operations.renew_session)
    handlers.unary("CloseSession", operations.close_session)
    handlers.unary("GetSession", operations.get_session)
    handlers.unary("ListSessions", operations.list_sessions)

    async def connect(context: Context) -> None:
        await AgentStream(runtime, operations, context).run()

    handlers.bidirectional("Connect", connect)
    return handlers


def lease_service(runtime: Runtime, operations: Operations) -> Handlers:
    handlers = Handlers(runtime, lease_pb2.DESCRIPTOR.services_by_name["LeaseService"])
    handlers.unary_undoable("AcquireLease", operations.acquire_lease)
    handlers.unary("ReleaseLease", operations.release_lease)
    handlers.unary("TransferLease", operations.transfer_lease)
    handlers.unary("CheckLease", operations.check_lease)
    handlers.unary("GetLease", operations.get_lease)
    handlers.unary("ListLeases", operations.list_leases)

    async def observe(request: lease_pb2.ObserveLeaseRequest, context: Context) -> None:
        tenant = check.tenant(request.tenant, runtime.settings.tenants)
        await _observe(runtime, operations, tenant, check.lease_name(request.name), context)

    handlers.server_stream("ObserveLease", observe)
    return handlers


def dedup_service(runtime: Runtime, operations: Operations) -> Handlers:
    handlers = Handlers(runtime, dedup_pb2.DESCRIPTOR.services_by_name["DedupService"])
    handlers.unary("BeginRecord", operations.begin_record)
    handlers.unary("CompleteRecord", operations.complete_record)
    handlers.unary("FailRecord", operations.fail_record)
    handlers.unary("ResolveRecord", operations.resolve_record)
    handlers.unary("GetRecord", operations.get_record)
    handlers.unary("ListRecords", operations.list_records)
    return handlers


def job_service(runtime: Runtime, operations: Operations) -> Handlers:
    handlers = Handlers(runtime, job_pb2.DESCRIPTOR.services_by_name["JobService"])
    jobs, runs = operations.jobs, operations.runs
    handlers.unary("ApplyJobs", jobs.apply_jobs)
    handlers.unary("DeleteJob", jobs.delete_job)
    handlers.unary("RollbackJob", jobs.rollback_job)
    handlers.unary("GetJob", jobs.get_job)
    handlers.unary("ListJobs", jobs.list_jobs)
    handlers.unary("ListJobRevisions", jobs.list_job_revisions)
    handlers.unary("PreviewJob", jobs.preview_job)
    handlers.unary("TriggerJob", jobs.trigger_job)
    handlers.unary("BackfillJob", jobs.backfill_job)
    handlers.unary("ListOccurrences", jobs.list_occurrences)
    handlers.unary("ExplainOccurrence", jobs.explain_occurrence)
    handlers.unary("ResolveOccurrence", jobs.resolve_occurrence)
    handlers.unary("ServeJobs", runs.serve_jobs)
    handlers.unary_undoable("ClaimRun", runs.claim_run)
    handlers.unary("CheckpointRun", runs.checkpoint_run)
    handlers.unary("CompleteRun", runs.complete_run)
    handlers.unary("FailRun", runs.fail_run)
    handlers.unary("AcknowledgeInterrupt", runs.acknowledge_interrupt)
    handlers.unary("InterruptRun", runs.interrupt_run)
    handlers.unary("GetRun", runs.get_run)
    handlers.unary("ListRuns", runs.list_runs)
    return handlers


def switch_service(runtime: Runtime, operations: Operations) -> Handlers:
    handlers = Handlers(runtime, switch_pb2.DESCRIPTOR.services_by_name["SwitchService"])
    switches = operations.switches
    handlers.unary("SetSwitch", switches.set_switch)
    handlers.unary("ClearSwitch", switches.clear_switch)
    handlers.unary("GetSwitch", switches.get_switch)
    handlers.unary("ListSwitches", switches.list_switches)
    return handlers


async def _observe(runtime: Runtime, operations: Operations, tenant: str, name: str, context: Context) -> None:
    """Whatever the lease is when the observer is ready for it: a slow one skips states, and costs no memory."""
    changed = asyncio.Event()

    def noticed(_: Event | None) -> None:
        changed.set()

    writer = Writer(context)
    remove = operations.notices.leases.add((tenant, name), noticed)
    try:
        await _confirmed(operations)
        while True:
            changed.clear()
            revision = runtime.proposer.machine.revision
            response = lease_pb2.ObserveLeaseResponse(lease=operations.lease(tenant, name), revision=revision)
            await writer.write(response, revision + 1)
            await changed.wait()
    finally:
        remove()


async def _confirmed(operations: Operations) -> None:
    """The first state is not an old one."""
    done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()

    def confirmed(error: ApiError | None) -> None:
        if not done.done():
            done.set_result(error)

    operations.reads.confirm(confirmed, OBSERVE_CONFIRM_MS)
    error = await done
    if error is not None:
        raise error
