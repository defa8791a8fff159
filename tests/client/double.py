"""A sidecar that never was: it speaks the stream protocol from memory, and misbehaves on request.

For what a real sidecar does only by accident: accepting bytes and never answering, losing answers, breaking streams at
a chosen moment. It keeps leases and records in dictionaries and renews no deadline: sessions end when a test says so.
Runs are given, interrupted and lost when a test says so, too, and no switch is in force but those that it sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tenure.v1 import dedup_pb2, error_pb2, job_pb2, lease_pb2, session_pb2, switch_pb2

from tests.waiting import eventually


@dataclass(eq=False)
class Session:
    session_id: str
    request_id: str
    ttl_ms: int
    grace_ms: int
    answers: dict[int, session_pb2.OperationResult] = field(default_factory=dict)
    stream: Link | None = None


@dataclass(eq=False)
class Link:
    """One stream of the double."""

    context: Any
    outbox: asyncio.Queue[session_pb2.ConnectResponse | None] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class Held:
    token: int
    session_id: str


def refusal(
    code: grpc.StatusCode, reason: str, *, definite: bool = True, retry_delay_ms: int = 0, **facts: str
) -> error_pb2.OperationError:
    outcome = error_pb2.OUTCOME_DEFINITE if definite else error_pb2.OUTCOME_INDEFINITE
    detail = error_pb2.ErrorDetail(reason=reason, outcome=outcome, retry_delay_ms=retry_delay_ms, facts=facts)
    return error_pb2.OperationError(code=code.value[0], message=reason.lower(), detail=detail)


class Double:
    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}"
        self.sessions: dict[str, Session] = {}
        self.leases: dict[str, Held] = {}
        self.waiting: dict[str, list[tuple[Session, int]]] = {}
        self.records: dict[str, dedup_pb2.Record] = {}
        self.last_token = 0
        self.attaches: list[session_pb2.Attach] = []
        self.received: list[session_pb2.ConnectRequest] = []
        self.closed_sessions: list[str] = []
        self.runs: dict[str, job_pb2.Run] = {}
        self.in_short: set[str] = set()  # runs that an attach only names
        self.served: list[tuple[str, tuple[str, ...], int]] = []  # session, jobs, slots
        self.reports: list[tuple[str, Any]] = []  # complete, fail or acknowledge; the request
        self.switches: session_pb2.SwitchesChanged | None = session_pb2.SwitchesChanged()
        self.jobs: dict[str, job_pb2.JobSpec] = {}
        self.with_attached: list[session_pb2.Push] = []  # in the same message as the answer to an attach
        # How it misbehaves.
        self.mute = False  # reads everything, answers nothing
        self.acknowledge = True  # else it confirms nothing: no keepalive, no attach
        self.drop_answers = False  # does what it is told, and loses the answer
        self.refuse: Callable[[session_pb2.Operation], error_pb2.OperationError | None] = lambda operation: None
        self._server: grpc.aio.Server | None = None

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._server = grpc.aio.server()
        connect = grpc.stream_stream_rpc_method_handler(
            self._connect,
            request_deserializer=session_pb2.ConnectRequest.FromString,
            response_serializer=session_pb2.ConnectResponse.SerializeToString,
        )
        close = grpc.unary_unary_rpc_method_handler(
            self._close,
            request_deserializer=session_pb2.CloseSessionRequest.FromString,
            response_serializer=session_pb2.CloseSessionResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(
            "tenure.v1.SessionService", {"Connect": connect, "CloseSession": close}
        )
        self._server.add_generic_rpc_handlers((handlers,))
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Like a process that dies: everything ends at once, and nothing is forgotten."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        for session in self.sessions.values():
            session.stream = None

    def break_streams(self) -> None:
        for session in self.sessions.values():
            if session.stream is not None:
                session.stream.outbox.put_nowait(None)

    def push(self, push: session_pb2.Push) -> None:
        for session in self.sessions.values():
            if session.stream is not None:
                session.stream.outbox.put_nowait(session_pb2.ConnectResponse(pushes=[push]))

    # ---- the stream --------------------------------------------------------------------------------------------

    async def _connect(
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        first = await anext(aiter(request_iterator))
        self.attaches.append(first.attach)
        if self.mute or not self.acknowledge:
            await asyncio.Event().wait()
        session = await self._attach(first.attach, context)
        link = Link(context)
        session.stream = link
        shown = session_pb2.Session(
            session_id=session.session_id, ttl_ms=session.ttl_ms, disconnect_grace_ms=session.grace_ms
        )
        held = [
            session_pb2.LeaseGranted(name=name, token=lease.token)
            for name, lease in self.leases.items()
            if lease.session_id == session.session_id
        ]
        attached = session_pb2.Attached(
            session=shown,
            node_id="double",
            resumed=bool(first.attach.session_id),
            held=held,
            held_complete=True,
            runs=self._runs_of(session),
            switches=self.switches,
        )
        reader = asyncio.create_task(self._read(session, link, request_iterator))
        try:
            yield session_pb2.ConnectResponse(attached=attached, pushes=self.with_attached)
            while (message := await link.outbox.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on request")
        finally:
            reader.cancel()
            if session.stream is link:
                session.stream = None

    async def _attach(self, attach: session_pb2.Attach, context: Any) -> Session:
        if attach.session_id:
            if attach.session_id not in self.sessions:
                await self._abort(context, refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
            return self.sessions[attach.session_id]
        for session in self.sessions.values():
            if session.request_id == attach.open.request_id:
                return session
        number = len(self.sessions) + len(self.closed_sessions) + 1
        session = Session(
            f"s{number}", attach.open.request_id, attach.open.ttl_ms or 15_000, attach.open.disconnect_grace_ms or 1_000
        )
        self.sessions[session.session_id] = session
        return session

    async def _abort(self, context: Any, error: error_pb2.OperationError) -> None:
        status = error_pb2.RichStatus(code=error.code, message=error.message)
        status.details.add().Pack(error.detail)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
        await context.abort(code, error.message)

    async def _read(self, session: Session, link: Link, requests: AsyncIterator[session_pb2.ConnectRequest]) -> None:
        async for message in requests:
            self.received.append(message)
            if self.mute:
                continue
            if message.HasField("keep_alive") and self.acknowledge:
                ack = session_pb2.KeepAliveAck(id=message.keep_alive.id, ttl_ms=session.ttl_ms)
                link.outbox.put_nowait(session_pb2.ConnectResponse(keep_alive_acks=[ack]))
            for operation in message.operations:
                self._start(session, operation)
            for cancelled in message.cancelled_ids:
                self._cancel(session, cancelled)

    def _start(self, session: Session, operation: session_pb2.Operation) -> None:
        result = session.answers.get(operation.id)
        if result is None:
            error = self.refuse(operation)
            if error is not None:
                result = session_pb2.OperationResult(id=operation.id, error=error)
                self._send(session, result)  # not remembered: it was refused before it was looked at
                return
            result = self._run(session, operation)
            if result is None:
                return  # in line
        self._answer(session, result)

    def _answer(self, session: Session, result: session_pb2.OperationResult) -> None:
        session.answers[result.id] = result
        self._send(session, result)

    def _send(self, session: Session, result: session_pb2.OperationResult) -> None:
        if session.stream is not None and not self.drop_answers:
            session.stream.outbox.put_nowait(session_pb2.ConnectResponse(results=[result]))

    def _run(self, session: Session, operation: session_pb2.Operation) -> session_pb2.OperationResult | None:
        body = operation.WhichOneof("body")
        assert body is not None
        outcome = getattr(self, f"_{body}")(session, operation.id, getattr(operation, body))
        if outcome is None:
            return None
        name = "error" if isinstance(outcome, error_pb2.OperationError) else body
        fields: dict[str, Any] = {name: outcome}
        return session_pb2.OperationResult(id=operation.id, **fields)

    # ---- operations --------------------------------------------------------------------------------------------

    def _acquire_lease(self, session: Session, number: int, request: lease_pb2.AcquireLeaseRequest) -> Any:
        held = self.leases.get(request.name)
        if held is None:
            return self._grant(request.name, session)
        if held.session_id == session.session_id:
            return lease_pb2.AcquireLeaseResponse(token=held.token, already_held=True, ttl_ms=session.ttl_ms)
        if request.wait_ms > 0:
            line = self.waiting.setdefault(request.name, [])
            if (session, number) not in line:
                line.append((session, number))
            return None
        return refusal(
            grpc.StatusCode.ALREADY_EXISTS,
            "LEASE_HELD",
            retry_delay_ms=500,
            holder=held.session_id,
            token=str(held.token),
        )

    def _grant(self, name: str, session: Session) -> lease_pb2.AcquireLeaseResponse:
        self.last_token += 1
        self.leases[name] = Held(self.last_token, session.session_id)
        return lease_pb2.AcquireLeaseResponse(token=self.last_token, ttl_ms=session.ttl_ms)

    def _release_lease(self, session: Session, number: int, request: lease_pb2.ReleaseLeaseRequest) -> Any:
        held = self.leases.get(request.name)
        if held is None or held.token != request.token:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "TOKEN_STALE")
        self.free(request.name)
        return lease_pb2.ReleaseLeaseResponse()

    def free(self, name: str) -> None:
        """The lease comes free, and goes to the first in line."""
        del self.leases[name]
        line = self.waiting.get(name, [])
        if line:
            session, number = line.pop(0)
            response = self._grant(name, session)
            self._answer(session, session_pb2.OperationResult(id=number, acquire_lease=response))

    def _cancel(self, session: Session, number: int) -> None:
        for line in self.waiting.values():
            if (session, number) in line:
                line.remove((session, number))
                error = refusal(grpc.StatusCode.ABORTED, "WAIT_CANCELLED")
                self._answer(session, session_pb2.OperationResult(id=number, error=error))

    def _transfer_lease(self, session: Session, number: int, request: lease_pb2.TransferLeaseRequest) -> Any:
        self.last_token += 1
        self.leases[request.name] = Held(self.last_token, request.to_session_id)
        return lease_pb2.TransferLeaseResponse(token=self.last_token)

    def _check_lease(self, session: Session, number: int, request: lease_pb2.CheckLeaseRequest) -> Any:
        held = self.leases.get(request.name)
        current = held is not None and held.token == request.token
        state = lease_pb2.TOKEN_STATE_CURRENT if current else lease_pb2.TOKEN_STATE_STALE
        return lease_pb2.CheckLeaseResponse(state=state, current_token=held.token if held is not None else 0)

    def _begin_record(self, session: Session, number: int, request: dedup_pb2.BeginRecordRequest) -> Any:
        record = self.records.get(request.key)
        outcomes = {
            dedup_pb2.RECORD_STATE_IN_PROGRESS: dedup_pb2.BEGIN_OUTCOME_IN_PROGRESS,
            dedup_pb2.RECORD_STATE_COMPLETED: dedup_pb2.BEGIN_OUTCOME_COMPLETED,
            dedup_pb2.RECORD_STATE_FAILED: dedup_pb2.BEGIN_OUTCOME_FAILED,
        }
        if record is not None and record.state in outcomes:
            if record.fingerprint != request.fingerprint:
                return refusal(grpc.StatusCode.FAILED_PRECONDITION, "RECORD_MISMATCH")
            return dedup_pb2.BeginRecordResponse(outcome=outcomes[record.state], record=record)
        attempt = record.attempt + 1 if record is not None else 1
        record = dedup_pb2.Record(
            key=request.key,
            state=dedup_pb2.RECORD_STATE_IN_PROGRESS,
            attempt=attempt,
            fingerprint=request.fingerprint,
            owner_session_id=session.session_id,
        )
        self.records[request.key] = record
        return dedup_pb2.BeginRecordResponse(outcome=dedup_pb2.BEGIN_OUTCOME_NEW, record=record)

    def _complete_record(self, session: Session, number: int, request: dedup_pb2.CompleteRecordRequest) -> Any:
        record = self.records[request.key]
        if record.attempt != request.attempt:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "ATTEMPT_STALE")
        record.state, record.result = dedup_pb2.RECORD_STATE_COMPLETED, request.result
        return dedup_pb2.CompleteRecordResponse()

    def _fail_record(self, session: Session, number: int, request: dedup_pb2.FailRecordRequest) -> Any:
        record = self.records[request.key]
        record.error = request.error
        record.state = dedup_pb2.RECORD_STATE_RETRYABLE if request.retryable else dedup_pb2.RECORD_STATE_FAILED
        return dedup_pb2.FailRecordResponse()

    def _close_session(self, session: Session, number: int, request: session_pb2.CloseSessionRequest) -> Any:
        self.end_session(session.session_id)
        return session_pb2.CloseSessionResponse()

    def expire(self, session_id: str) -> None:
        """The session ends in the cluster, and its stream with it."""
        stream = self.sessions[session_id].stream
        self.end_session(session_id)
        if stream is not None:
            stream.outbox.put_nowait(None)

    def end_session(self, session_id: str) -> None:
        for run_id in [run.run_id for run in self.runs.values() if run.session_id == session_id]:
            del self.runs[run_id]
        if self.sessions.pop(session_id, None) is not None:
            self.closed_sessions.append(session_id)
        for name in [name for name, held in self.leases.items() if held.session_id == session_id]:
            self.free(name)

    # ---- unary calls -------------------------------------------------------------------------------------------

    async def _close(self, request: session_pb2.CloseSessionRequest, context: Any) -> session_pb2.CloseSessionResponse:
        self.end_session(request.session_id)
        return session_pb2.CloseSessionResponse()

    # ---- runs --------------------------------------------------------------------------------------------------

    def _runs_of(self, session: Session) -> list[job_pb2.Run]:
        own = [run for run in self.runs.values() if run.session_id == session.session_id]
        return [job_pb2.Run(run_id=run.run_id, token=run.token) if run.run_id in self.in_short else run for run in own]

    def _serve_jobs(self, session: Session, number: int, request: job_pb2.ServeJobsRequest) -> Any:
        self.served.append((session.session_id, tuple(request.jobs), request.slots))
        return job_pb2.ServeJobsResponse()

    def _apply_jobs(self, session: Session, number: int, request: job_pb2.ApplyJobsRequest) -> Any:
        (wanted,) = request.jobs
        known = self.jobs.get(wanted.name)
        if wanted.HasField("expected_revision") and known is not None:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "JOB_REVISION_MISMATCH", job=wanted.name)
        change = job_pb2.JOB_CHANGE_CREATED if known is None else job_pb2.JOB_CHANGE_CHANGED
        if known == wanted.spec:
            change = job_pb2.JOB_CHANGE_UNCHANGED
        if not request.dry_run:
            self.jobs[wanted.name] = wanted.spec
        return job_pb2.ApplyJobsResponse(jobs=[job_pb2.AppliedJob(name=wanted.name, change=change, revision=1)])

    def _checkpoint_run(self, session: Session, number: int, request: job_pb2.CheckpointRunRequest) -> Any:
        run = self.runs.get(request.run_id)
        if run is None or run.token != request.token:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "RUN_STALE")
        if run.interrupted:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "RUN_INTERRUPTED")
        run.checkpoint = request.state
        return job_pb2.CheckpointRunResponse()

    def _complete_run(self, session: Session, number: int, request: job_pb2.CompleteRunRequest) -> Any:
        return self._report("complete", session, request, job_pb2.CompleteRunResponse())

    def _fail_run(self, session: Session, number: int, request: job_pb2.FailRunRequest) -> Any:
        return self._report("fail", session, request, job_pb2.FailRunResponse())

    def _acknowledge_interrupt(
        self, session: Session, number: int, request: job_pb2.AcknowledgeInterruptRequest
    ) -> Any:
        return self._report("acknowledge", session, request, job_pb2.AcknowledgeInterruptResponse())

    def _report(self, what: str, session: Session, request: Any, response: Any) -> Any:
        run = self.runs.get(request.run_id)
        if run is None:
            return refusal(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
        if run.token != request.token or run.session_id != session.session_id:
            return refusal(grpc.StatusCode.FAILED_PRECONDITION, "RUN_STALE")
        self.reports.append((what, request))
        del self.runs[request.run_id]
        return response

    # ---- for tests ---------------------------------------------------------------------------------------------

    def operations(self, body: str) -> list[session_pb2.Operation]:
        """Every operation of one sort that has arrived, repeats included."""
        return [each for message in self.received for each in message.operations if each.HasField(body)]  # type: ignore[arg-type]

    def tell(self, session_id: str, **kind: Any) -> None:
        """A push to one session, if it has a stream."""
        stream = self.sessions[session_id].stream
        if stream is not None:
            stream.outbox.put_nowait(session_pb2.ConnectResponse(pushes=[session_pb2.Push(**kind)]))

    def assign(self, session_id: str, job: str = "digest", *, push: bool = True, **fields: Any) -> job_pb2.Run:
        self.last_token += 1
        values: dict[str, Any] = {
            "run_id": f"r{self.last_token}", "tenant": "default", "job": job, "session_id": session_id,
            "token": self.last_token, "attempt": 1, "due_wall_ms": 1_700_000_000_000, "remaining_ms": 3_600_000,
            "idempotency_key": f"job/{job}/1700000000000", **fields,
        }  # fmt: skip
        run = self.runs[values["run_id"]] = job_pb2.Run(**values)
        if push:
            self.tell(session_id, run_assigned=session_pb2.RunAssigned(run=run))
        return run

    def interrupt(self, run: job_pb2.Run, cause: str = "killed", grace_ms: int = 10_000) -> None:
        run.interrupted, run.interrupt_cause = True, cause
        message = session_pb2.RunInterrupted(
            run_id=run.run_id, cause=cause, reason="test", grace_ms=grace_ms, switch_id="k1"
        )
        self.tell(run.session_id, run_interrupted=message)

    def lose(self, run: job_pb2.Run, cause: str = "timeout") -> None:
        """The run is over in the cluster, without an answer of its holder."""
        del self.runs[run.run_id]
        self.tell(run.session_id, run_lost=session_pb2.RunLost(run_id=run.run_id, cause=cause))

    def switch(self, mode: int = switch_pb2.SWITCH_MODE_KILL, job: str = "") -> None:
        """One more is in force, of the tenant or of a job."""
        assert self.switches is not None
        scope = switch_pb2.SWITCH_SCOPE_JOB if job else switch_pb2.SWITCH_SCOPE_TENANT
        number = len(self.switches.switches) + 1
        self.switches.switches.append(
            switch_pb2.Switch(
                switch_id=f"k{number}",
                scope=scope,
                tenant="default",
                job=job,
                mode=switch_pb2.SwitchMode.ValueType(mode),
                actor="ops",
                reason="test",
                active=True,
            )
        )
        self.push(session_pb2.Push(switches=self.switches))

    def clear(self) -> None:
        self.switches = session_pb2.SwitchesChanged()
        self.push(session_pb2.Push(switches=self.switches))

    def reported(self, run: job_pb2.Run) -> list[str]:
        return [what for what, request in self.reports if request.run_id == run.run_id]

    async def until_reported(self, run: job_pb2.Run) -> tuple[str, Any]:
        await eventually(lambda: self.reported(run), what=f"the report of {run.run_id}")
        return next((what, request) for what, request in self.reports if request.run_id == run.run_id)

    async def until_held(self, name: str) -> Held:
        await eventually(lambda: name in self.leases, what=f"{name} is held")
        return self.leases[name]


@asynccontextmanager
async def double(folder: Path) -> AsyncIterator[Double]:
    server = Double(folder / "double.sock")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
