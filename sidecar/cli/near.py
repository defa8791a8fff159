"""Jobs whose names are not known, and what was possibly meant."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sidecar.cli import failures, named
from sidecar.cli.failures import CliError

if TYPE_CHECKING:
    from sidecar.cli.calls import Target

# Names looked at, and named.
LOOKED_AT, SHOWN = 500, 3


def with_hint(target: Target, error: Exception, job: object) -> CliError | None:
    """When an error is that there is no such job, and others are called almost so: one that says so, too."""
    failure = failures.explain(error)
    if failure is None or failure.reason != "JOB_NOT_FOUND" or not isinstance(job, str):
        return None
    import grpc
    from tenure.errors import TenureError

    tenant, name = named.job_of(target, job)
    try:
        found = asyncio.run(nearest(target, tenant, name))
    except (CliError, TenureError, grpc.RpcError):  # the first failure is what counts
        return None
    if not found:
        return None
    prefix = f"{tenant}/" if "/" in job else ""
    meant = " or ".join(prefix + each for each in found)
    return CliError(
        failure.message, reason=failure.reason, status=failure.status, todo=f"did you mean {meant}? {failure.todo}",
        facts=failure.facts,
    )  # fmt: skip


async def nearest(target: Target, tenant: str, name: str) -> list[str]:
    """Among those with the same first letter, else among the first of all."""
    from tenure.v1 import job_pb2

    async with target.channel() as channel:
        for prefix in (name[:1], ""):
            request = job_pb2.ListJobsRequest(tenant=tenant, prefix=prefix, page_size=LOOKED_AT)
            response = await named.stub_of(channel).ListJobs(request, timeout=target.timeout)
            known = [job.name for job in response.jobs]
            if found := difflib.get_close_matches(name, known, n=SHOWN, cutoff=0.7):
                return found
    return []


async def unknown(target: Target, tenant: str, jobs: Sequence[str]) -> list[str]:
    """Of the jobs (or beginnings of names, with a * at the end) that a worker serves: a line for each that there is
    none of now. Nothing when it cannot be found out."""
    import grpc
    from tenure.errors import TenureError
    from tenure.v1 import job_pb2

    lines = []
    try:
        async with target.channel() as channel:
            for job in jobs:
                name = job.removesuffix("*")
                request = job_pb2.ListJobsRequest(tenant=tenant, prefix=name, page_size=1)
                found = (await named.stub_of(channel).ListJobs(request, timeout=target.timeout)).jobs
                # In order of name, so the first is the job itself if there is one.
                if found and (job != name or found[0].name == name):
                    continue
                meant = await nearest(target, tenant, name) if job == name else []
                hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
                lines.append(f"tenant {tenant} has no job {job} yet{hint}")
    except (CliError, TenureError, grpc.RpcError):
        return []
    return lines
