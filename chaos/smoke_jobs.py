"""``agent-scheduled-job-leader-election-smoke``: a job every second, three agents, three faults.

Each run writes a document's digest to the ledger in several steps. While the job goes on:

1. the agent at work is killed in the middle of a run (kill -9);
2. the Raft leader is killed (kill -9), and started again later;
3. the leader's node is cut off from the others while the agent beside it is in the middle of a run, so that the leader
   and the holder are lost at once while both are alive and believe in themselves; then the links are healed.

At the end the schedule is closed, what is due runs to its end, and the checker reads the ledger: every due time between
the first and the last must have left exactly one whole effect, by the clock alone, and have exactly one outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from tenure.v1 import job_pb2

from chaos import smoke as base
from chaos.smoke import EXAMPLES, FINISH_DEADLINE_S, START_DEADLINE_S, STEP_DEADLINE_S, Outcome, Step
from sidecar.dev.cluster import Pace, Program, agent_of
from sidecar.dev.job_checker import UNFINISHED, Plan, check
from sidecar.dev.job_checker import Outcome as JobOutcome
from sidecar.dev.jobs import TENANT
from sidecar.dev.run import Options, Running

NAME = "agent-scheduled-job-leader-election-smoke"
JOB = "digest"
EVERY_MS = 1_000
PACE = Pace(ttl_ms=2_500, grace_ms=500, step_ms=60)
PROGRAM = Program("digest_agent", ("--slots", "1"), jobs="")
ACTS = ("kill_holder", "kill_leader", "partition_leader")
# Due times that must be done between two faults.
BETWEEN = 3
# How far ahead the schedule is opened and closed: more than applying it takes.
AHEAD_MS = 2_000
FAST_POLL_S = 0.01


class JobSteps(base.Steps):
    """Opens a schedule, closes it, and reads what became of its due times."""

    def __init__(self, dev: Running, job: str, every_ms: int) -> None:
        super().__init__(dev)
        self.job, self.every_ms = job, every_ms
        self.start_ms = self.end_ms = 0
        # By due time, once the schedule is closed.
        self.stories: dict[int, list[job_pb2.Occurrence]] = {}

    def spec(self) -> job_pb2.JobSpec:
        """All but the schedule."""
        raise NotImplementedError

    async def open_schedule(self) -> None:
        self.start_ms = now_ms() + AHEAD_MS
        await self.apply()

    async def close_schedule(self) -> None:
        """Let the schedule end a moment from now, so that which due times exist is known to the millisecond."""
        self.end_ms = now_ms() + AHEAD_MS
        await self.apply()

        await self.until("the end of the schedule", lambda _: now_ms() > self.end_ms)
        deadline = time.monotonic() + FINISH_DEADLINE_S
        while time.monotonic() < deadline:  # what is open after that, the checker reports
            found = await self.read_stories(self.plan().due_ms)
            if all(each and not any(outcome.state in UNFINISHED for outcome in each) for each in found.values()):
                return
            await asyncio.sleep(base.POLL_S)

    def plan(self) -> Plan:
        """What must have happened."""
        raise NotImplementedError

    async def apply(self) -> None:
        spec = self.spec()
        spec.schedule.interval.every_ms = self.every_ms
        spec.schedule.start_wall_ms, spec.schedule.end_wall_ms = self.start_ms, self.end_ms
        deadline = time.monotonic() + STEP_DEADLINE_S
        while True:
            await self.dev.observer.refresh()
            try:
                await self.dev.observer.jobs().apply([job_pb2.JobDefinition(tenant=TENANT, name=self.job, spec=spec)])
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(base.POLL_S)

    async def read_stories(self, due: range) -> dict[int, list[JobOutcome]]:
        """What Tenure says of each due time."""
        jobs = self.dev.observer.jobs()
        for due_ms in due:
            self.stories[due_ms] = list((await jobs.explain(self.job, due_ms)).occurrences)
        return {due_ms: [outcome_of(each) for each in found] for due_ms, found in self.stories.items()}

    async def judge(self, outcome: Outcome) -> None:
        plan = self.plan()
        report = check(plan, self.audit, await self.read_stories(plan.due_ms))
        outcome.report = report
        states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(report.states.items()))
        again = sum(1 for each in self.stories.values() for story in each if story.attempt > 1)
        outcome.measured += [
            f"{report.documents} due times: {states}; {report.postings} posted in {report.writes} writes by "
            f"{report.grants} runs, {again} due times took more than one attempt",
            lateness(self.stories),
        ]

    def writer(self, key: str) -> tuple[str, int]:
        """The agent that has written last for a key, and its token."""
        last = [write for write in self.audit.writes() if write.key == key][-1]
        return last.agent.split("/")[0], last.token

    async def taken_over(self, key: str, token: int) -> float:
        """Wait until somebody with a later token writes for the key; returns the seconds it took."""
        return await self.until(f"another agent at {key}", lambda _: self.writer(key)[1] > token)


class Steps(JobSteps):
    def __init__(self, dev: Running, acts: Sequence[str]) -> None:
        super().__init__(dev, JOB, EVERY_MS)
        self.acts = acts

    def spec(self) -> job_pb2.JobSpec:
        return job_pb2.JobSpec(
            owner="smoke", runbook_url="https://example.org/smoke",
            # Whatever comes late still comes: no due time may be left out.
            overlap_policy=job_pb2.OVERLAP_POLICY_BUFFER_ALL, buffer_max=100,
            misfire_policy=job_pb2.MISFIRE_POLICY_ALL, catch_up_max=100,
            timeout_ms=10_000, interrupt_grace_ms=1_000, history_count=1_000,
            retry=job_pb2.RetryPolicy(attempts_max=20, initial_ms=200, max_ms=1_000),
        )  # fmt: skip

    async def run(self, outcome: Outcome) -> None:
        await self.until("a leader and three sessions", self.is_up, START_DEADLINE_S)
        await self.open_schedule()
        await self.progress(BETWEEN)
        await self.do(outcome, self.acts, BETWEEN)
        await self.close_schedule()
        await self.dev.cluster.stop_agents()
        await self.judge(outcome)

    def plan(self) -> Plan:
        return Plan(JOB, EVERY_MS, self.start_ms, self.end_ms)

    async def kill_holder(self) -> Step:
        """Kill the agent at work when it has written a part. One that just got to its end is followed by another."""
        while True:
            key = await self.until_half_written()
            victim, token = self.writer(key)
            await self.dev.cluster.kill(victim)
            if key not in self.audit.postings():
                break
        step = Step("kill the holder", f"kill -9 of {victim} within {key}")
        step.times_s["new holder"] = await self.taken_over(key, token)
        await self.until_posted(key)
        return step

    async def partition_leader(self) -> Step:
        """Cut the leader's node off while the agent beside it is in the middle of a run."""
        while True:
            leader = (await self.dev.observer.refresh()).leader
            key = await self.until_half_written(agent_of(leader))
            agent, token = self.writer(key)
            cut_at = time.monotonic()
            self.dev.cluster.partition(leader)
            seen = await self.dev.observer.refresh()
            if key not in self.audit.postings() and seen.statuses[leader].leader_id == leader:
                break
            self.dev.cluster.heal()
        term = seen.term
        step = Step("partition the leader", f"{leader}, leader of term {term}, cut off with {agent} within {key}")
        await self.another_leader(leader, term)
        step.times_s["new leader"] = time.monotonic() - cut_at
        await self.taken_over(key, token)
        step.times_s["new holder"] = time.monotonic() - cut_at
        await self.progress(BETWEEN)
        self.dev.cluster.heal()
        await self.until(f"{leader} follows and is ready", lambda seen: self.ready(seen, leader))
        await self.until_posted(key)
        return step

    async def until_half_written(self, agent: str = "") -> str:
        """The key of a due time that an agent (this one) is in the middle of. Asked often: a run is short."""
        deadline = time.monotonic() + STEP_DEADLINE_S
        while time.monotonic() < deadline:
            if (key := self.half_written()) and agent in ("", self.writer(key)[0]):
                return key
            await asyncio.sleep(FAST_POLL_S)
        raise base.StepFailed(f"waited {STEP_DEADLINE_S:.0f} s in vain for a run half-way")


def outcome_of(occurrence: job_pb2.Occurrence) -> JobOutcome:
    state = job_pb2.OccurrenceState.Name(occurrence.state).removeprefix("OCCURRENCE_STATE_")
    return JobOutcome(state, occurrence.reason, occurrence.attempt, occurrence.result, occurrence.sequence)


def lateness(stories: dict[int, list[job_pb2.Occurrence]]) -> str:
    """From the due time to the first assignment, by the leader's wall clock."""
    late_ms = sorted(
        step.wall_ms - due_ms
        for due_ms, found in stories.items()
        for story in found
        for step in list(story.steps)
        if step.what == "assigned" and step.attempt == 1
    )
    if not late_ms:
        return "nothing was assigned"
    return (
        f"due to assigned: median {late_ms[len(late_ms) // 2]} ms, last {late_ms[-1]} ms (those of the faults included)"
    )


def now_ms() -> int:
    return round(time.time() * 1_000)


async def smoke(state: Path, acts: Sequence[str] = ACTS) -> Outcome:
    """``acts``: the steps to do, by the names of their methods."""
    options = Options(state=state, examples=EXAMPLES, pace=PACE, program=PROGRAM)
    return await base.run_steps(NAME, options, lambda dev: Steps(dev, acts))
