"""The operations of those who work: which jobs they serve, and what becomes of their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message
from tenure.v1 import job_pb2, lease_pb2

from sidecar.core import commands
from sidecar.services import translate_jobs as translate
from sidecar.services import validation as check
from sidecar.services.base import Resource, run_gone
from sidecar.services.calls import Answer, Caller
from sidecar.services.claims import ClaimCall
from sidecar.services.notices import Notices
from sidecar.services.pages import Page
from sidecar.services.reads import Reads
from sidecar.services.views import Views
from sidecar.services.waiting import Running

if TYPE_CHECKING:
    from sidecar.runtime import Runtime


class Runs(Resource):
    def __init__(self, runtime: Runtime, notices: Notices, reads: Reads, views: Views) -> None:
        super().__init__(runtime, notices, reads)
        self._views = views

    def serve_jobs(self, request: job_pb2.ServeJobsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.serve_jobs(request, tenant, caller.session_of(request.session_id))

        def served(result: commands.Done) -> Message:
            return job_pb2.ServeJobsResponse(revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, served)

    def claim_run(self, request: job_pb2.ClaimRunRequest, caller: Caller, answer: Answer) -> Running:
        tenant = caller.tenant_of(request.tenant)
        command = translate.claim_run(request, tenant, caller.session_of(request.session_id))

        def claimed(result: commands.RunClaimed) -> job_pb2.ClaimRunResponse:
            row = self._machine.run(result.run)
            if row is None:  # a repeat, long after: it has ended since
                raise run_gone(result.run)
            return job_pb2.ClaimRunResponse(run=self._views.run(row), revision=result.revision)

        return ClaimCall(
            self._proposer,
            self.notices,
            command,
            caller.key(tenant, request.request_id),
            request.wait_ms,
            caller.timeout_ms,
            claimed,
            answer,
            repeatable=bool(request.request_id),
        )

    def checkpoint_run(self, request: job_pb2.CheckpointRunRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.checkpoint_run(request, tenant, caller.session_of(request.session_id))

        def stored(result: commands.Done) -> Message:
            return job_pb2.CheckpointRunResponse(revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, stored)

    def complete_run(self, request: job_pb2.CompleteRunRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.complete_run(request, tenant, caller.session_of(request.session_id))

        def completed(result: commands.Done) -> Message:
            return job_pb2.CompleteRunResponse(revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, completed)

    def fail_run(self, request: job_pb2.FailRunRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.fail_run(request, tenant, caller.session_of(request.session_id))

        def failed(result: commands.RunFailed) -> Message:
            return job_pb2.FailRunResponse(
                retrying=result.retrying, retry_in_ms=result.retry_in_ms, revision=result.revision
            )

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.RunFailed, failed)

    def acknowledge_interrupt(
        self, request: job_pb2.AcknowledgeInterruptRequest, caller: Caller, answer: Answer
    ) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.acknowledge_interrupt(request, tenant, caller.session_of(request.session_id))

        def noted(result: commands.Done) -> Message:
            return job_pb2.AcknowledgeInterruptResponse(revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, noted)

    def interrupt_run(self, request: job_pb2.InterruptRunRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.interrupt_run(request, tenant)

        def interrupted(result: commands.Done) -> Message:
            row = self._machine.run(command.run)
            run = self._views.run(row) if row is not None else job_pb2.Run(run_id=command.run, tenant=tenant)
            return job_pb2.InterruptRunResponse(run=run, revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, interrupted)

    def get_run(self, request: job_pb2.GetRunRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        run = translate.run_id(request.run_id)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            row = self._machine.run(run)
            if row is None or row.tenant != tenant:
                raise run_gone(run)
            return job_pb2.GetRunResponse(run=self._views.run(row), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_runs(self, request: job_pb2.ListRunsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        job = check.job_name(request.job, "job") if request.job else ""
        page = Page(("runs", tenant, job), request.page_size, request.page_token, r"\d{1,18}")

        def produce(info: lease_pb2.ReadInfo) -> Message:
            rows = self._machine.runs(tenant, job, int(page.after or 0), page.limit)
            items = page.fill(rows, lambda row: str(row.token), lambda row: self._views.run(row, listed=True))
            return job_pb2.ListRunsResponse(runs=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)
