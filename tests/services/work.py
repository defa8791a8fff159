"""Jobs in tests: short forms of what operators and workers call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tenure.v1 import job_pb2, switch_pb2

from tests.services.calls import DEADLINE_S, Agent, agent
from tests.services.cluster import Cluster, Stubs
from tests.waiting import eventually

MANUAL: dict[str, Any] = {"manual": {}}
BY: dict[str, Any] = {"actor": "me", "reason": "test"}
UNFINISHED = (job_pb2.OCCURRENCE_STATE_PENDING, job_pb2.OCCURRENCE_STATE_RUNNING, job_pb2.OCCURRENCE_STATE_RETRYING)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def definition(name: str, tenant: str = "default", expected_revision: int | None = None, **spec: Any) -> Any:
    """A job that is only triggered, unless ``spec`` says otherwise."""
    fields = {"owner": "team", "runbook_url": "https://runbooks.test/job", "schedule": MANUAL, **spec}
    wanted = {} if expected_revision is None else {"expected_revision": expected_revision}
    return job_pb2.JobDefinition(tenant=tenant, name=name, spec=job_pb2.JobSpec(**fields), **wanted)


async def apply(stubs: Stubs, *jobs: Any, **fields: Any) -> job_pb2.ApplyJobsResponse:
    return await stubs.job.ApplyJobs(job_pb2.ApplyJobsRequest(jobs=jobs, **fields), timeout=DEADLINE_S)


async def get_job(stubs: Stubs, name: str, tenant: str = "default", **fields: Any) -> job_pb2.Job:
    request = job_pb2.GetJobRequest(tenant=tenant, name=name, **fields)
    return (await stubs.job.GetJob(request, timeout=DEADLINE_S)).job


async def trigger(stubs: Stubs, name: str, tenant: str = "default", **fields: Any) -> job_pb2.Occurrence:
    request = job_pb2.TriggerJobRequest(tenant=tenant, name=name, **{**BY, **fields})
    return (await stubs.job.TriggerJob(request, timeout=DEADLINE_S)).occurrence


async def explain(stubs: Stubs, name: str, due_wall_ms: int = 0, **fields: Any) -> job_pb2.ExplainOccurrenceResponse:
    request = job_pb2.ExplainOccurrenceRequest(
        **{"tenant": "default", "job": name, "due_wall_ms": due_wall_ms, **fields}
    )
    return await stubs.job.ExplainOccurrence(request, timeout=DEADLINE_S)


async def last(stubs: Stubs, name: str) -> job_pb2.Occurrence:
    """The newest occurrence of a job."""
    return (await explain(stubs, name)).occurrences[0]


async def ended(stubs: Stubs, name: str) -> job_pb2.Occurrence:
    """The newest occurrence, once it has ended."""
    found: list[job_pb2.Occurrence] = []

    async def over() -> bool:
        found[:] = [await last(stubs, name)]
        return found[0].state not in UNFINISHED

    await eventually(over, what=f"the end of {name}")
    return found[0]


async def set_switch(stubs: Stubs, scope: int, mode: int, **fields: Any) -> switch_pb2.Switch:
    request = switch_pb2.SetSwitchRequest(
        **{"scope": scope, "mode": mode, **BY, **fields},
    )
    return (await stubs.switch.SetSwitch(request, timeout=DEADLINE_S)).switch


async def clear_switch(stubs: Stubs, switch: str, tenant: str = "", **fields: Any) -> switch_pb2.Switch:
    request = switch_pb2.ClearSwitchRequest(switch_id=switch, tenant=tenant, **{**BY, **fields})
    return (await stubs.switch.ClearSwitch(request, timeout=DEADLINE_S)).switch


@asynccontextmanager
async def worker(stubs: Stubs, jobs: Sequence[str], slots: int = 1, **fields: Any) -> AsyncIterator[Agent]:
    """An agent that serves jobs; operation 1 is taken."""
    async with agent(stubs, **fields) as one:
        served = await one.do(1, serve_jobs=job_pb2.ServeJobsRequest(jobs=jobs, slots=slots))
        assert served.HasField("serve_jobs"), served
        yield one


async def assigned(one: Agent, count: int = 1) -> job_pb2.Run:
    """The ``count``-th run that was pushed to an agent."""
    await one.until(lambda: len(one.pushed("run_assigned")) >= count)
    run: job_pb2.Run = one.pushed("run_assigned")[count - 1].run
    return run


def complete(run: job_pb2.Run, result: bytes = b"") -> dict[str, Any]:
    """The body of an operation."""
    return {"complete_run": job_pb2.CompleteRunRequest(run_id=run.run_id, token=run.token, result=result)}


def fail(run: job_pb2.Run, error: str = "broken", *, retryable: bool = True) -> dict[str, Any]:
    request = job_pb2.FailRunRequest(run_id=run.run_id, token=run.token, error=error, retryable=retryable)
    return {"fail_run": request}


def acknowledge(run: job_pb2.Run, detail: str = "") -> dict[str, Any]:
    request = job_pb2.AcknowledgeInterruptRequest(run_id=run.run_id, token=run.token, detail=detail)
    return {"acknowledge_interrupt": request}


def machine(cluster: Cluster) -> Any:
    return cluster[0].runtime.proposer.machine


async def together(*calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls, return_exceptions=True))
