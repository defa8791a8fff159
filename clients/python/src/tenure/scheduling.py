"""What a client can do about jobs and switches: the methods of `Client` that are not about leases and records."""

from __future__ import annotations

import asyncio
import getpass
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, Unpack

import grpc.aio

from tenure import errors
from tenure.connection import Connection
from tenure.handlers import job_name
from tenure.jobs import JobInfo, JobOptions, OccurrenceInfo, job_info, job_spec, occurrence_info, wall_ms
from tenure.session import APPLY_JOBS, GET_JOB, TRIGGER
from tenure.switches import Guard, SwitchInfo, SwitchState, switch_info
from tenure.v1 import job_pb2, job_pb2_grpc, switch_pb2, switch_pb2_grpc
from tenure.work import Worker

__all__ = ["JobDecorator", "Scheduling"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

FINISH_TIMEOUT = 30.0
TRIGGER_REASON = "triggered by a program"


class JobDecorator:
    """What ``client.job(...)`` returns."""

    def __init__(self, register: Callable[[Callable[..., Any]], None]) -> None:
        self._register = register

    def __call__(self, function: F) -> F:
        self._register(function)
        return function


class Scheduling:
    _connection: Connection
    _worker: Worker
    _with_session: bool

    # ---- working -----------------------------------------------------------------------------------------------

    def job(self, name: str, *, replace: bool = False, **define: Unpack[JobOptions]) -> JobDecorator:
        """Decorator: the function is the handler of a job; ``await client.work()`` then serves it.

        ``name`` is NAME or TENANT/NAME, or a beginning of names with ``*`` at its end. The handler gets a `Run`; an
        ordinary function runs in a thread and gets a `SyncRun`. What it returns (None, bytes, text, or what JSON can
        say; at most 16,384 bytes) is the result. `Retry` and `Permanent` say whether another attempt can help; any
        other exception is a failure that is tried again as the job says.

        With ``owner=...`` and further options (see `JobOptions`) ``work`` also creates the job. If there is one with
        another specification, it raises JobConflict, or with ``replace=True`` changes it.
        """
        own = job_name(name, self._connection.options.tenant)
        if not define:
            return JobDecorator(lambda function: self._worker.register(own, function, None))
        if own.endswith("*"):
            raise ValueError(f"{name!r} stands for many jobs and cannot define one")
        spec = job_spec(define)  # what cannot be said is said here, not later

        async def apply() -> None:
            await self._define(own, spec, replace)

        return JobDecorator(lambda function: self._worker.register(own, function, apply))

    async def work(
        self, *, slots: int = 1, stop: asyncio.Event | None = None, finish_timeout: float = FINISH_TIMEOUT
    ) -> None:
        """Serves the jobs that have handlers, up to ``slots`` runs at once, until cancelled, ``stop`` is set, or
        `stop_work` is called. Then nothing new is taken, and what runs has ``finish_timeout`` seconds to end by itself
        before it is cancelled; cancelling once more cancels it at once.

        Raises ValueError without a handler, JobConflict for a definition that does not fit, and what calls raise.
        """
        self._need_session()
        await self._worker.work(slots, stop, finish_timeout)

    def stop_work(self) -> None:
        """Lets `work` end in order. Harmless when nothing works."""
        self._worker.stop()

    # ---- switches ----------------------------------------------------------------------------------------------

    def switch_state(self, job: str | None = None) -> SwitchState:
        """Whether work (of a job, or, without one, of the whole tenant) may go on, as far as this client knows.

        UNKNOWN when it could not be learnt for ``switch_staleness`` seconds. What is known is as old as the last
        confirmed keepalive: a guard, or `work`, keeps it fresh.
        """
        self._need_session()
        name = None if job is None else job_name(job, self._connection.options.tenant)
        return self._connection.switches.state(name)

    @property
    def went_on_unknown(self) -> int:
        """In how many minutes guarded work went on although the state of the switches was not known. Grows under
        ``fail_open`` only; export it as a counter."""
        return self._connection.switches.went_on_unknown

    def guard(self, job: str | None = None) -> Guard:
        """``async with client.guard(job):`` the body is cancelled when a kill switch or its unknown state forbids it.

        Raises SwitchedOff or SwitchStateUnknown, on entering (also for a pause) or at the end of a body that it cut.
        """
        self._need_session()
        name = None if job is None else job_name(job, self._connection.options.tenant)
        return Guard(self._connection.switches, name, self._worker)

    async def set_switch(
        self,
        mode: str,
        reason: str,
        *,
        job: str | None = None,
        fleet: bool = False,
        actor: str | None = None,
        expires_after: float | None = None,
        timeout: float | None = None,
    ) -> SwitchInfo:
        """Puts a switch in force: ``mode`` pause, drain or kill; for a job, the fleet, or else this tenant.

        ``expires_after``: seconds. Raises ValueError for another mode, and what the sidecar refuses.
        """
        if mode not in ("pause", "drain", "kill"):
            raise ValueError(f"mode must be pause, drain or kill, not {mode!r}")
        scope = switch_pb2.SWITCH_SCOPE_JOB if job is not None else switch_pb2.SWITCH_SCOPE_TENANT
        tenant = self._connection.options.tenant
        request = switch_pb2.SetSwitchRequest(
            scope=switch_pb2.SWITCH_SCOPE_FLEET if fleet else scope,
            tenant="" if fleet else tenant,
            job="" if job is None else job_name(job, tenant),
            mode=switch_pb2.SwitchMode.Value(f"SWITCH_MODE_{mode.upper()}"),
            actor=_actor(actor),
            reason=reason,
            expires_after_ms=None if expires_after is None else round(expires_after * 1000),
            request_id=uuid.uuid4().hex,
        )
        response = await self._ask(
            lambda channel, seconds: switch_pb2_grpc.SwitchServiceStub(channel).SetSwitch(request, timeout=seconds),
            timeout,
        )
        return switch_info(response.switch)

    async def clear_switch(
        self,
        switch_id: str,
        reason: str,
        *,
        fleet: bool = False,
        actor: str | None = None,
        timeout: float | None = None,
    ) -> SwitchInfo:
        """Ends a switch of this tenant or its jobs (or of the fleet). Nothing that it suppressed is run."""
        request = switch_pb2.ClearSwitchRequest(
            switch_id=switch_id,
            tenant="" if fleet else self._connection.options.tenant,
            actor=_actor(actor),
            reason=reason,
            request_id=uuid.uuid4().hex,
        )
        response = await self._ask(
            lambda channel, seconds: switch_pb2_grpc.SwitchServiceStub(channel).ClearSwitch(request, timeout=seconds),
            timeout,
        )
        return switch_info(response.switch)

    # ---- jobs --------------------------------------------------------------------------------------------------

    async def apply_job(
        self,
        name: str,
        *,
        expected_revision: int | None = None,
        actor: str | None = None,
        timeout: float | None = None,
        **define: Unpack[JobOptions],
    ) -> int:
        """Creates or changes a job; returns its revision. ``expected_revision``: 0 only if there is none, n only if
        that is its revision; else JobConflict is raised."""
        own = job_name(name, self._connection.options.tenant)
        response = await self._apply(own, job_spec(define), expected_revision, actor=actor, timeout=timeout)
        revision: int = response.jobs[0].revision
        return revision

    async def _define(self, name: str, spec: job_pb2.JobSpec, replace: bool) -> None:
        if replace:
            await self._apply(name, spec, None)
            return
        try:
            await self._apply(name, spec, 0)
        except errors.JobConflict:
            found = await self._apply(name, spec, None, dry_run=True)
            if found.jobs[0].change != job_pb2.JOB_CHANGE_UNCHANGED:
                message = f"there is a job {name!r} with another specification; see `tenure job show`, or replace=True"
                raise errors.JobConflict(message, reason="JOB_REVISION_MISMATCH", facts={"job": name}) from None

    async def _apply(
        self,
        name: str,
        spec: job_pb2.JobSpec,
        expected_revision: int | None,
        *,
        dry_run: bool = False,
        actor: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        self._need_session()
        definition = job_pb2.JobDefinition(
            tenant=self._connection.options.tenant, name=name, spec=spec, expected_revision=expected_revision
        )
        request = job_pb2.ApplyJobsRequest(jobs=[definition], actor=_actor(actor), dry_run=dry_run)
        return await self._connection.call(APPLY_JOBS, lambda: request, timeout=self._timeout(timeout))

    async def get_job(self, name: str, *, timeout: float | None = None) -> JobInfo:
        """The job as it is now (linearizable). Raises NotFound."""
        self._need_session()
        request = job_pb2.GetJobRequest(name=job_name(name, self._connection.options.tenant))
        response = await self._connection.call(GET_JOB, lambda: request, timeout=self._timeout(timeout))
        return job_info(response.job)

    async def trigger_job(
        self,
        name: str,
        *,
        payload: bytes | str | None = None,
        reason: str = TRIGGER_REASON,
        actor: str | None = None,
        timeout: float | None = None,
    ) -> OccurrenceInfo:
        """Runs a job now, by its overlap policy: the answer may say that it was skipped."""
        self._need_session()
        request = job_pb2.TriggerJobRequest(
            name=job_name(name, self._connection.options.tenant),
            actor=_actor(actor),
            reason=reason,
            payload=payload.encode() if isinstance(payload, str) else payload,
        )
        response = await self._connection.call(TRIGGER, lambda: request, timeout=self._timeout(timeout))
        return occurrence_info(response.occurrence)

    async def preview_job(
        self, name: str, *, count: int = 10, after: datetime | None = None, timeout: float | None = None
    ) -> list[datetime]:
        """The next due times of a job, in UTC."""
        request = job_pb2.PreviewJobRequest(
            tenant=self._connection.options.tenant,
            name=job_name(name, self._connection.options.tenant),
            count=count,
            from_wall_ms=0 if after is None else wall_ms("after", after),
        )
        response = await self._ask(
            lambda channel, seconds: job_pb2_grpc.JobServiceStub(channel).PreviewJob(request, timeout=seconds), timeout
        )
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return [epoch + timedelta(milliseconds=due.due_wall_ms) for due in response.due]

    async def occurrences(
        self, job: str, *, limit: int = 100, held_only: bool = False, timeout: float | None = None
    ) -> list[OccurrenceInfo]:
        """The last occurrences of a job that are kept, the newest first, without their results."""
        request = job_pb2.ListOccurrencesRequest(
            tenant=self._connection.options.tenant,
            job=job_name(job, self._connection.options.tenant),
            page_size=min(limit, 1_000),
            held_only=held_only,
        )
        found: list[OccurrenceInfo] = []
        while True:
            response = await self._ask(
                lambda channel, seconds: job_pb2_grpc.JobServiceStub(channel).ListOccurrences(request, timeout=seconds),
                timeout,
            )
            found.extend(map(occurrence_info, response.occurrences))
            if len(found) >= limit or not response.next_page_token:
                return found[:limit]
            request.page_token = response.next_page_token

    async def explain(
        self, job: str, due: datetime | None = None, *, timeout: float | None = None
    ) -> tuple[Sequence[OccurrenceInfo], str]:
        """What became of a due time (None: the last one), and in words why nothing did, or what it waits for."""
        request = job_pb2.ExplainOccurrenceRequest(
            tenant=self._connection.options.tenant,
            job=job_name(job, self._connection.options.tenant),
            due_wall_ms=0 if due is None else wall_ms("due", due),
        )
        response = await self._ask(
            lambda channel, seconds: job_pb2_grpc.JobServiceStub(channel).ExplainOccurrence(request, timeout=seconds),
            timeout,
        )
        return tuple(map(occurrence_info, response.occurrences)), response.explanation

    # ---- common ------------------------------------------------------------------------------------------------

    async def _ask(self, call: Callable[[grpc.aio.Channel, float], Awaitable[Any]], timeout: float | None) -> Any:
        seconds = self._timeout(timeout)
        return await self._connection.unary(lambda channel: call(channel, seconds), timeout=seconds)

    def _need_session(self) -> None:
        raise NotImplementedError

    def _timeout(self, timeout: float | None) -> float:
        raise NotImplementedError


def _actor(actor: str | None) -> str:
    if actor is not None:
        return actor
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
