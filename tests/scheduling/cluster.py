"""The directed cluster with the scheduler on every node: what a sidecar is without its gRPC shell."""

from __future__ import annotations

from typing import Any

import msgspec

from sidecar.consensus.node import Node
from sidecar.core.commands import ApplyJobs, JobDefinition, JobsApplied
from sidecar.core.jobs import Job
from sidecar.core.occurrences import Occurrence
from sidecar.core.specification import JobSpec, Misfire, Overlap, Schedule, ScheduleKind
from sidecar.scheduling.scheduler import Scheduler, SchedulerSettings
from tests.proposing import NEVER, ProposingCluster, ProposingHost

MINUTE_MS = 60_000


class SchedulingHost(ProposingHost):
    scheduler: Scheduler
    look_s: float

    def boot(self, **changes: Any) -> Node:
        node = super().boot(**changes)
        assert isinstance(self.cluster, SchedulingCluster)
        self.look_s = NEVER
        settings = SchedulerSettings(nodes=len(self.cluster.names), skew_max_ms=2_000)
        self.scheduler = Scheduler(self.proposer, node, self.clock, settings)
        self.scheduler.attach(self._look)
        return node

    def _look(self, when_s: float) -> None:
        self.look_s = when_s

    def _look_due(self) -> bool:
        return self.node is not None and not self.paused and self.look_s <= self.cluster.clock.now_s

    def due(self) -> bool:
        return super().due() or self._look_due()

    def turn(self) -> None:
        if self._look_due():
            self.look_s = NEVER
            self.scheduler.poll()
        if super().due():
            super().turn()

    def job(self, name: str) -> Job:
        job = self.machine.job("default", name)
        assert job is not None
        return job

    def history(self, name: str) -> list[Occurrence]:
        """Oldest first."""
        return self.machine.occurrences("default", name, None, 1_000)[::-1]


class SchedulingCluster(ProposingCluster):
    def __init__(self, size: int = 3, **settings: Any) -> None:
        super().__init__(size, **settings)
        # Their nodes were made without a scheduler; nothing has run yet.
        self.scheduling = {name: SchedulingHost(self, name) for name in self.names}
        self.proposing = dict(self.scheduling)
        self.hosts = dict(self.scheduling)
        self.links.clear()
        for name in self.names:
            self.hosts[name].boot()
        self.connect_all()

    def leading(self) -> SchedulingHost:
        return self.scheduling[self.leader().name]

    def apply(self, name: str, spec: JobSpec, *, expected: int = -1) -> JobsApplied:
        definition = JobDefinition(tenant="default", name=name, spec=spec, expected_revision=expected)
        outcome = self.await_call(self.lead().submit(ApplyJobs(jobs=(definition,), actor="a person")))
        assert isinstance(outcome, JobsApplied), outcome
        return outcome

    def until_wall(self, wall_ms: int, step_ms: int = 50) -> None:
        """Until the shared clock shows this time."""
        while self.clock.wall_ms() < wall_ms:
            self.run(min(step_ms, wall_ms - self.clock.wall_ms()), step_ms=step_ms)

    def sleep(self, milliseconds: int) -> None:
        """All processes stand still."""
        self.clock.now_s += milliseconds / 1000

    def next_minute(self) -> int:
        return (self.clock.wall_ms() // MINUTE_MS + 1) * MINUTE_MS


def every_minute(**changes: Any) -> JobSpec:
    return cron("* * * * *", **changes)


def cron(expression: str, **changes: Any) -> JobSpec:
    """Nobody serves it, and all its occurrences may wait: so each due time is one row."""
    spec = JobSpec(
        owner="payments",
        runbook_url="https://example.org/runbook",
        schedule=Schedule(kind=ScheduleKind.CRON, cron=expression),
        overlap=Overlap.BUFFER_ALL,
        buffer_max=1_000,
        misfire=Misfire.LATEST,
        starting_deadline_ms=30 * 86_400_000,
        catch_up_window_ms=30 * 86_400_000,
        history_count=1_000,
    )
    return msgspec.structs.replace(spec, **changes)
