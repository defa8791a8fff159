"""Every operation of the API but streams: check, translate, propose or read, translate back (see base.Resource).

Those on sessions, leases and records are here; those on jobs, runs and switches have a class each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from tenure.v1 import dedup_pb2, lease_pb2, session_pb2

from sidecar.core import commands
from sidecar.core.commands import Reason, Refused
from sidecar.core.dedup import RecordState
from sidecar.core.leases import Lease
from sidecar.core.sessions import Session
from sidecar.proposer import Outcome
from sidecar.services import translate
from sidecar.services import validation as check
from sidecar.services.base import LINEARIZABLE, Resource
from sidecar.services.calls import Answer, Caller
from sidecar.services.errors import ApiError, Problem, problem, refused, session_gone, unsuccessful
from sidecar.services.jobs import Jobs
from sidecar.services.notices import Notices
from sidecar.services.pages import Page
from sidecar.services.reads import Reads
from sidecar.services.runs import Runs
from sidecar.services.switches import Switches
from sidecar.services.views import Views
from sidecar.services.waiting import AcquireCall, BeginCall, Running

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

# Records looked at for one page of a list with a filter: the event loop is never held for long.
SCAN_MAX, SCAN_STEP = 5_000, 500

# One operation: request, who calls, and the callback for the one answer.
Start = Callable[[Any, Caller, Answer], Running | None]


class Operations(Resource):
    def __init__(self, runtime: Runtime, notices: Notices) -> None:
        reads = Reads(runtime)
        super().__init__(runtime, notices, reads)
        self.views = Views(runtime)
        self.jobs = Jobs(runtime, notices, reads, self.views)
        self.runs = Runs(runtime, notices, reads, self.views)
        self.switches = Switches(runtime, notices, reads, self.views)
        # By the name of the body of an operation on a stream.
        self.on_stream: dict[str, Start] = {
            "acquire_lease": self.acquire_lease,
            "release_lease": self.release_lease,
            "transfer_lease": self.transfer_lease,
            "check_lease": self.check_lease,
            "get_lease": self.get_lease,
            "begin_record": self.begin_record,
            "complete_record": self.complete_record,
            "fail_record": self.fail_record,
            "get_record": self.get_record,
            "close_session": self.close_session,
            "serve_jobs": self.runs.serve_jobs,
            "checkpoint_run": self.runs.checkpoint_run,
            "complete_run": self.runs.complete_run,
            "fail_run": self.runs.fail_run,
            "acknowledge_interrupt": self.runs.acknowledge_interrupt,
            "apply_jobs": self.jobs.apply_jobs,
            "trigger_job": self.jobs.trigger_job,
            "get_job": self.jobs.get_job,
        }

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, request: session_pb2.OpenSessionRequest, caller: Caller, answer: Answer) -> None:
        if self._runtime.draining:
            raise problem(Problem.DRAINING, "this sidecar is stopping and opens no new sessions")
        tenant = caller.tenant_of(request.tenant)
        command = translate.open_session(request, tenant)

        def opened(result: commands.SessionOpened) -> Message:
            row = self._machine.session(result.session)
            if row is None:  # a repeat, long after: it has ended since
                raise session_gone(result.session)
            return session_pb2.OpenSessionResponse(session=self._session(row))

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.SessionOpened, opened)

    def renew_session(self, request: session_pb2.RenewSessionRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        session = caller.session_of(request.session_id)
        known = self._machine.session(session)
        if known is not None and known.tenant != tenant:
            raise self._foreign(session)

        def done(outcome: Outcome) -> None:
            row = self._machine.session(session)
            if not isinstance(outcome, commands.SessionsRenewed):
                answer(unsuccessful(outcome))
            elif row is None:
                answer(session_gone(session))
            elif row.tenant != tenant:  # this node did not know it when it was asked
                answer(self._foreign(session))
            else:
                answer(session_pb2.RenewSessionResponse(ttl_ms=row.ttl_ms))

        self._proposer.renew(session, done, timeout_ms=caller.timeout_ms)

    def close_session(self, request: session_pb2.CloseSessionRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = commands.CloseSession(tenant=tenant, session=caller.session_of(request.session_id))
        key = caller.key(tenant, request.request_id)
        self._propose(command, caller, key, answer, commands.Done, lambda _: session_pb2.CloseSessionResponse())

    def get_session(self, request: session_pb2.GetSessionRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        session = caller.session_of(request.session_id)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            row = self._machine.session(session)
            if row is None:
                raise session_gone(session)
            if row.tenant != tenant:
                raise self._foreign(session)
            return session_pb2.GetSessionResponse(session=self._session(row), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_sessions(self, request: session_pb2.ListSessionsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        page = Page(("sessions", tenant), request.page_size, request.page_token)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            rows = self._machine.sessions(tenant, page.after, page.limit)
            items = page.fill(rows, lambda row: row.session, self._session)
            return session_pb2.ListSessionsResponse(sessions=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)

    def _session(self, row: Session) -> session_pb2.Session:
        return translate.session(row, self._proposer.cluster_now_ms())

    # ---- leases -----------------------------------------------------------------------------------------------------

    def acquire_lease(self, request: lease_pb2.AcquireLeaseRequest, caller: Caller, answer: Answer) -> Running:
        tenant = caller.tenant_of(request.tenant)
        command = translate.acquire_lease(request, tenant, caller.session_of(request.session_id))
        key = caller.key(tenant, request.request_id)
        return AcquireCall(self._proposer, self.notices, command, key, caller.timeout_ms, answer)

    def release_lease(self, request: lease_pb2.ReleaseLeaseRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.release_lease(request, tenant, caller.session_or_operator(request.session_id))

        def released(result: commands.Done) -> Message:
            return lease_pb2.ReleaseLeaseResponse(revision=result.revision)

        self._propose(command, caller, caller.key(tenant, request.request_id), answer, commands.Done, released)

    def transfer_lease(self, request: lease_pb2.TransferLeaseRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.transfer_lease(request, tenant, caller.session_or_operator(request.session_id))
        key = caller.key(tenant, request.request_id)

        def transferred(result: commands.LeaseTransferred) -> Message:
            return lease_pb2.TransferLeaseResponse(token=result.token, revision=result.revision)

        self._propose(command, caller, key, answer, commands.LeaseTransferred, transferred)

    def check_lease(self, request: lease_pb2.CheckLeaseRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        name, token = check.lease_name(request.name), check.token(request.token)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            lease = self._machine.lease(tenant, name)
            # What a kill has made stale is held yet, and current no more.
            held = {
                holder.token: holder.session
                for holder in (lease.holders if lease is not None else ())
                if not self._machine.killed_by(tenant, holder.kill_epoch)
            }
            state = lease_pb2.TOKEN_STATE_CURRENT if token in held else lease_pb2.TOKEN_STATE_STALE
            if token > self._machine.last_token:
                state = lease_pb2.TOKEN_STATE_UNKNOWN
            newest = max(held, default=0)
            holder = held.get(token) or held.get(newest, "")
            row = self._machine.session(holder)
            remaining_ms = max(0, row.deadline_ms - self._proposer.cluster_now_ms()) if row else 0
            return lease_pb2.CheckLeaseResponse(
                state=state, current_token=newest, holder_session_id=holder, remaining_ms=remaining_ms, read=info
            )

        self._read(LINEARIZABLE, caller, answer, produce)

    def get_lease(self, request: lease_pb2.GetLeaseRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        name = check.lease_name(request.name)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            return lease_pb2.GetLeaseResponse(lease=self.lease(tenant, name), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_leases(self, request: lease_pb2.ListLeasesRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        prefix = check.prefix(request.prefix, commands.NAME_BYTES_MAX)
        page = Page(("leases", tenant, prefix), request.page_size, request.page_token)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            rows = self._machine.leases(tenant, prefix, page.after, page.limit)
            items = page.fill(rows, lambda row: row.name, self._listed_lease)
            return lease_pb2.ListLeasesResponse(leases=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)

    def lease(self, tenant: str, name: str) -> lease_pb2.Lease:
        """As it is on this node now."""
        row = self._machine.lease(tenant, name)
        if row is None:
            return lease_pb2.Lease(tenant=tenant, name=name)
        return translate.lease(row, self._machine.session, self._proposer.cluster_now_ms())

    def _listed_lease(self, row: Lease) -> lease_pb2.Lease:
        now_ms = self._proposer.cluster_now_ms()
        return translate.lease(row, self._machine.session, now_ms, translate.SHOWN_IN_LIST_MAX)

    # ---- records ----------------------------------------------------------------------------------------------------

    def begin_record(self, request: dedup_pb2.BeginRecordRequest, caller: Caller, answer: Answer) -> Running:
        tenant = caller.tenant_of(request.tenant)
        command = translate.begin_record(request, tenant, caller.session_of(request.session_id))
        key = caller.key(tenant, request.request_id)
        return BeginCall(self._proposer, self.notices, command, key, request.wait_ms, caller.timeout_ms, answer)

    def complete_record(self, request: dedup_pb2.CompleteRecordRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.complete_record(request, tenant, caller.session_of(request.session_id))
        key = caller.key(tenant, request.request_id)

        def completed(result: commands.RecordCompleted) -> Message:
            return dedup_pb2.CompleteRecordResponse(
                already_completed=result.already_completed, revision=result.revision
            )

        self._propose(command, caller, key, answer, commands.RecordCompleted, completed)

    def fail_record(self, request: dedup_pb2.FailRecordRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.fail_record(request, tenant, caller.session_of(request.session_id))
        key = caller.key(tenant, request.request_id)

        def noted(result: commands.Done) -> Message:
            return dedup_pb2.FailRecordResponse(revision=result.revision)

        self._propose(command, caller, key, answer, commands.Done, noted)

    def resolve_record(self, request: dedup_pb2.ResolveRecordRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        command = translate.resolve_record(request, tenant)
        key = caller.key(tenant, request.request_id)

        def resolved(result: commands.Done) -> Message:
            row = self._machine.record(tenant, command.key)
            record = translate.record(row) if row else dedup_pb2.Record(tenant=tenant, key=command.key)
            return dedup_pb2.ResolveRecordResponse(record=record, revision=result.revision)

        self._propose(command, caller, key, answer, commands.Done, resolved)

    def get_record(self, request: dedup_pb2.GetRecordRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        key = check.key(request.key)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            row = self._machine.record(tenant, key)
            if row is None:
                message = "there is no record of this key"
                raise refused(Refused(reason=Reason.RECORD_NOT_FOUND, message=message, facts=(("key", key),)))
            return dedup_pb2.GetRecordResponse(record=translate.record(row), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_records(self, request: dedup_pb2.ListRecordsRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant)
        prefix = check.prefix(request.prefix, commands.KEY_BYTES_MAX)
        state = translate.record_state(request.state)
        page = Page(("records", tenant, prefix, str(request.state)), request.page_size, request.page_token)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            items = self._records(tenant, prefix, state, page)
            return dedup_pb2.ListRecordsResponse(records=items, next_page_token=page.next_token, read=info)

        self._read(request.consistency, caller, answer, produce)

    def _records(self, tenant: str, prefix: str, state: RecordState | None, page: Page) -> list[dedup_pb2.Record]:
        """Looks at no more than SCAN_MAX records; a page may then be short, and still have a next one."""
        items: list[dedup_pb2.Record] = []
        for _ in range(0, SCAN_MAX, SCAN_STEP):
            rows = self._machine.records(tenant, prefix, page.after, SCAN_STEP, None)
            for row in rows:
                if state is not None and row.state is not state:
                    page.skip(row.key)
                    continue
                record = translate.record(row, with_result=False)
                if not page.take(row.key, record):
                    return items
                items.append(record)
            if len(rows) < SCAN_STEP:
                page.finish()
                return items
        return items

    # ---- common -----------------------------------------------------------------------------------------------------

    def _foreign(self, session: str) -> ApiError:
        message = f"session {session} belongs to another tenant"
        return refused(Refused(reason=Reason.SESSION_FOREIGN, message=message, facts=(("session_id", session),)))
