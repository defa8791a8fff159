"""The jobs of a development cluster: what the API says of them, and what a person does to them.

Everything here goes through the same API as the ordinary command line, on a node that answers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from tenure.v1 import job_pb2, job_pb2_grpc, lease_pb2, switch_pb2, switch_pb2_grpc

from sidecar.dev.cluster import ACTOR
from sidecar.dev.errors import DevError

TENANT = "default"
CALL_TIMEOUT_S = 5.0
POLL_TIMEOUT_S = 1.0
LOCAL = lease_pb2.CONSISTENCY_LOCAL
MODES = {
    "pause": switch_pb2.SWITCH_MODE_PAUSE,
    "drain": switch_pb2.SWITCH_MODE_DRAIN,
    "kill": switch_pb2.SWITCH_MODE_KILL,
}
REASON = "from the development cluster"


@dataclass
class JobsSeen:
    """As last asked. ``jobs`` by name, with their runs and their last outcomes; ``switches`` in force."""

    jobs: dict[str, job_pb2.Job] = field(default_factory=dict)
    switches: list[switch_pb2.Switch] = field(default_factory=list)

    def run(self, job: str = "") -> job_pb2.Run | None:
        """A run of the job (of any job), the newest."""
        runs = [run for name, each in self.jobs.items() if job in ("", name) for run in each.runs]
        return max(runs, key=lambda run: run.token, default=None)

    def switch(self, job: str) -> switch_pb2.Switch | None:
        """The switch that is in force for just this job."""
        return next((each for each in self.switches if each.job == job), None)


class Jobs:
    """On one channel. ``DevError`` with the sidecar's own words when an act is refused."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._jobs: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
        self._switches: switch_pb2_grpc.SwitchServiceAsyncStub = switch_pb2_grpc.SwitchServiceStub(channel)

    async def look(self) -> JobsSeen:
        """As this node knows it. Raises AioRpcError."""
        listed = await self._jobs.ListJobs(
            job_pb2.ListJobsRequest(tenant=TENANT, consistency=LOCAL), timeout=POLL_TIMEOUT_S
        )
        seen = JobsSeen()
        for job in listed.jobs:
            request = job_pb2.GetJobRequest(tenant=TENANT, name=job.name, consistency=LOCAL)
            seen.jobs[job.name] = (await self._jobs.GetJob(request, timeout=POLL_TIMEOUT_S)).job
        wanted = switch_pb2.ListSwitchesRequest(tenant=TENANT, consistency=LOCAL)
        seen.switches = list((await self._switches.ListSwitches(wanted, timeout=POLL_TIMEOUT_S)).switches)
        return seen

    async def apply(self, definitions: Iterable[job_pb2.JobDefinition]) -> list[job_pb2.AppliedJob]:
        """Raises AioRpcError, so that a cluster that is not up yet can be told from a refusal."""
        request = job_pb2.ApplyJobsRequest(jobs=definitions, actor=ACTOR, reason=REASON, request_id=request_id())
        return list((await self._jobs.ApplyJobs(request, timeout=CALL_TIMEOUT_S)).jobs)

    async def trigger(self, job: str) -> job_pb2.Occurrence:
        request = job_pb2.TriggerJobRequest(
            tenant=TENANT, name=job, actor=ACTOR, reason=REASON, request_id=request_id()
        )
        try:
            return (await self._jobs.TriggerJob(request, timeout=CALL_TIMEOUT_S)).occurrence
        except grpc.aio.AioRpcError as error:
            raise refused(error) from error

    async def set_switch(self, job: str, mode: str) -> switch_pb2.Switch:
        """``mode``: pause, drain or kill."""
        request = switch_pb2.SetSwitchRequest(
            scope=switch_pb2.SWITCH_SCOPE_JOB, tenant=TENANT, job=job, mode=MODES[mode],
            actor=ACTOR, reason=REASON, request_id=request_id(),
        )  # fmt: skip
        try:
            return (await self._switches.SetSwitch(request, timeout=CALL_TIMEOUT_S)).switch
        except grpc.aio.AioRpcError as error:
            raise refused(error) from error

    async def clear_switch(self, switch: switch_pb2.Switch) -> switch_pb2.Switch:
        """As it ended."""
        request = switch_pb2.ClearSwitchRequest(
            switch_id=switch.switch_id, tenant=switch.tenant, actor=ACTOR, reason=REASON, request_id=request_id()
        )
        try:
            return (await self._switches.ClearSwitch(request, timeout=CALL_TIMEOUT_S)).switch
        except grpc.aio.AioRpcError as error:
            raise refused(error) from error

    async def explain(self, job: str, due_ms: int) -> job_pb2.ExplainOccurrenceResponse:
        """The story of a due time, as the leader knows it. Raises AioRpcError."""
        request = job_pb2.ExplainOccurrenceRequest(tenant=TENANT, job=job, due_wall_ms=due_ms)
        answer: job_pb2.ExplainOccurrenceResponse = await self._jobs.ExplainOccurrence(request, timeout=CALL_TIMEOUT_S)
        return answer


def definitions_of(file: Path) -> list[job_pb2.JobDefinition]:
    """What a file of jobs says; raises what ``tenure job apply`` would show."""
    from sidecar.cli import job_files

    return [located.definition for located in job_files.load([str(file)], TENANT)]


def refused(error: grpc.aio.AioRpcError) -> DevError:
    return DevError(error.details() or error.code().name)


def request_id() -> str:
    return uuid.uuid4().hex
