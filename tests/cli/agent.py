"""An agent that polls: for tests of commands that look at what agents do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from tenure.v1 import job_pb2, job_pb2_grpc, session_pb2, session_pb2_grpc

from tests.waiting import eventually

WAIT_MS = 10_000


@dataclass(frozen=True)
class Agent:
    stub: Any
    session: str
    tenant: str

    async def claim(self, *jobs: str) -> job_pb2.Run:
        """The next run of these jobs; AssertionError when there is none in time."""
        request = job_pb2.ClaimRunRequest(tenant=self.tenant, session_id=self.session, jobs=jobs, wait_ms=WAIT_MS)
        response = await self.stub.ClaimRun(request, timeout=WAIT_MS / 1_000 + 5)
        assert response.HasField("run"), f"no run of {jobs}"
        run: job_pb2.Run = response.run
        return run

    async def complete(self, run: job_pb2.Run, result: bytes = b"") -> None:
        await self.stub.CompleteRun(job_pb2.CompleteRunRequest(**self._named(run), result=result), timeout=10)

    async def fail(self, run: job_pb2.Run, error: str, *, retryable: bool) -> None:
        request = job_pb2.FailRunRequest(**self._named(run), error=error, retryable=retryable)
        await self.stub.FailRun(request, timeout=10)

    async def acknowledge(self, run: job_pb2.Run) -> None:
        """When it has been interrupted."""
        wanted = job_pb2.GetRunRequest(tenant=self.tenant, run_id=run.run_id)

        async def interrupted() -> bool:
            found: job_pb2.GetRunResponse = await self.stub.GetRun(wanted, timeout=10)
            return found.run.interrupted

        await eventually(interrupted)
        await self.stub.AcknowledgeInterrupt(job_pb2.AcknowledgeInterruptRequest(**self._named(run)), timeout=10)

    def _named(self, run: job_pb2.Run) -> dict[str, Any]:
        return {"tenant": self.tenant, "session_id": self.session, "run_id": run.run_id, "token": run.token}


@asynccontextmanager
async def agent(address: str, name: str = "crawler", tenant: str = "default") -> AsyncIterator[Agent]:
    """A session without a stream, that is closed at the end: what it still runs then is lost."""
    async with grpc.aio.insecure_channel(address) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)
        info = session_pb2.AgentInfo(agent=name, host="host-7")
        request = session_pb2.OpenSessionRequest(tenant=tenant, info=info, ttl_ms=60_000)
        session = (await sessions.OpenSession(request, timeout=10)).session.session_id
        try:
            yield Agent(job_pb2_grpc.JobServiceStub(channel), session, tenant)
        finally:
            closing = session_pb2.CloseSessionRequest(tenant=tenant, session_id=session)
            await sessions.CloseSession(closing, timeout=10)
