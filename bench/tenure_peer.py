"""Tenure: three sidecars with mutual TLS and fsync, an agent beside each. Run as a program, this is one of these."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc.aio
import tenure
from tenure.v1 import job_pb2, job_pb2_grpc

from bench import work
from bench.contestants import LOCK_MS, SLOTS, WORKERS, Contestant, ready
from bench.sidecars import three_sidecars

STARTS_PER_SECOND_MAX = 10_000
TENANT = "default"
# As many as one call may bring.
BATCH = 1_000
TIMEOUT_S = 30.0
FAR_MS = 4_000_000_000_000  # a due time that no measurement reaches


class Tenure(Contestant):
    name = "Tenure"
    how = f"three sidecars, an agent beside each; limit raised to {STARTS_PER_SECOND_MAX:,} starts a second"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        limits = {"TENURE_LIMITS_STARTS_PER_SECOND_MAX": str(STARTS_PER_SECOND_MAX)}
        async with three_sidecars(limits) as addresses:
            self.address = next(iter(addresses.values()))
            for worker, address in zip(WORKERS, addresses.values(), strict=True):
                self.worker(worker, "bench.tenure_peer", address)
            await self.start_workers()
            yield

    async def arrange(self, due_ms: Mapping[str, int], work_ms: int) -> None:
        await self.apply({name: once(at_ms, str(work_ms)) for name, at_ms in due_ms.items()})

    async def apply(self, specs: Mapping[str, job_pb2.JobSpec]) -> None:
        async with self.jobs() as stub:
            definitions = [job_pb2.JobDefinition(tenant=TENANT, name=name, spec=spec) for name, spec in specs.items()]
            for start in range(0, len(definitions), BATCH):
                request = job_pb2.ApplyJobsRequest(
                    jobs=definitions[start : start + BATCH], actor="bench", request_id=str(uuid.uuid4())
                )
                await stub.ApplyJobs(request, timeout=TIMEOUT_S)

    async def explain(self, name: str, due_ms: int) -> None:
        async with self.jobs() as stub:
            request = job_pb2.ExplainOccurrenceRequest(tenant=TENANT, job=name, due_wall_ms=due_ms)
            answer: job_pb2.ExplainOccurrenceResponse = await stub.ExplainOccurrence(request, timeout=TIMEOUT_S)
            assert answer.occurrences or answer.explanation, name

    @contextlib.asynccontextmanager
    async def jobs(self) -> AsyncIterator[job_pb2_grpc.JobServiceAsyncStub]:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
            yield stub


def once(at_ms: int, payload: str = "0") -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        owner="bench",
        runbook_url="https://example.org/bench",
        schedule=job_pb2.Schedule(once_wall_ms=at_ms),
        payload=payload.encode(),
        history_count=1,
    )


async def time_calls(contestant: Tenure, names: list[str], due_ms: int, rounds: int = 50) -> tuple[list[float], ...]:
    """How long adding one job more took, and explaining one; milliseconds, sorted."""
    adding, explaining = [], []
    for number, name in zip(range(rounds), itertools.cycle(names), strict=False):
        began = time.perf_counter()
        await contestant.apply({f"more-{number}": once(FAR_MS + number)})
        adding.append((time.perf_counter() - began) * 1_000)
        began = time.perf_counter()
        await contestant.explain(name, due_ms)
        explaining.append((time.perf_counter() - began) * 1_000)
    return sorted(adding), sorted(explaining)


async def serve(address: str) -> None:
    """Work for every job, until the process is ended."""
    async with tenure.connect(address, agent=os.environ[work.WORKER], ttl_ms=LOCK_MS, connect_timeout=30) as client:

        @client.job("*")
        async def run(run: tenure.Run) -> None:
            await work.do_fenced(run.job, int(run.payload), run.token)

        serving = asyncio.create_task(client.work(slots=SLOTS))
        ready(Path(os.environ[work.FOLDER]), os.environ[work.WORKER])
        await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
