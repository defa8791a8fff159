"""``llm-scheduled-job-leader-election-smoke``: a job every second whose runs ask a model server that misbehaves.

The server is a stand-in on this machine: by turns it answers, is slow, says 429 with a Retry-After, fails, or hangs.
Its own log of requests is what the times are judged by. While the job goes on:

1. each misbehaviour is seen and overcome: a hang is cut at the run's timeout, and no attempt comes before the wait that
   the job's retry policy or the server asks for is over;
2. an agent that waits for an answer is killed (kill -9);
3. the Raft leader is killed (kill -9), and started again later;
4. the job is killed by a switch while questions are open: they are given up, and none is asked while it is in force;
5. the switch is cleared: the job goes on, and nothing is made up for.

At the end the schedule is closed, and the checker reads the ledger, as in the other one of that name.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenure.v1 import job_pb2, switch_pb2

from chaos import smoke as base
from chaos.smoke import EXAMPLES, START_DEADLINE_S, Outcome, Step
from chaos.smoke_jobs import JobSteps, now_ms
from sidecar.dev.cluster import Pace, Program
from sidecar.dev.job_checker import Plan, Window
from sidecar.dev.observer import Observed
from sidecar.dev.ports import free_ports
from sidecar.dev.processes import Process
from sidecar.dev.run import Options, Running

NAME = "llm-scheduled-job-leader-election-smoke"
JOB = "summarize"
EVERY_MS = 1_000
PACE = Pace(ttl_ms=2_500, grace_ms=500, step_ms=20)
# What each key meets, by turns. The first two waits that a server asks for are longer and shorter than the job's own.
SCRIPT = "ok; slow:0.9; hang, ok; hang, ok; 429:1.5, ok; 429:0.2, 429:0.2, ok; 500, 500, ok"
LIVES = SCRIPT.count(";") + 1
TIMEOUT_MS = 2_000
RETRY = job_pb2.RetryPolicy(attempts_max=10, initial_ms=500, multiplier_percent=200, max_ms=5_000, jitter_percent=20)
# Two clocks and two processes are between a deadline and the end of a request.
EARLY_MS = 100
# On a machine where everything else runs too.
CUT_WITHIN_MS = 2_000
ACTS = ("misbehave", "kill_holder", "kill_leader", "kill_switch", "clear_switch")
BETWEEN = 4
SUPPRESSED = 3
# Questions that are open when the job is killed.
OPEN = 2


@dataclass
class Request:
    """One question as the server saw it. ``ended_ms`` 0: it is still open."""

    number: int
    key: str
    token: int
    behaviour: str
    seconds: float
    asked_ms: int
    ended_ms: int = 0
    end: str = ""


def requests_of(log: str) -> list[Request]:
    """The stand-in's log, in the order of asking."""
    found: dict[int, Request] = {}
    for line in log.splitlines():
        said = json.loads(line)
        if said["event"] == "asked":
            facts = (said[name] for name in ("number", "key", "token", "behaviour", "seconds", "at_ms"))
            found[said["number"]] = Request(*facts)
        else:
            found[said["number"]].ended_ms, found[said["number"]].end = said["at_ms"], said["event"]
    return list(found.values())


# ---- what is judged by the log alone


def hangs(requests: Sequence[Request], lost: Collection[int], kills: Sequence[Window]) -> tuple[list[int], list[str]]:
    """How long each hang lasted, in milliseconds, and which were not cut at the timeout.

    One whose holder was ``lost`` (by its token), or that a kill cut short, may have ended earlier.
    """
    lasted, broken = [], []
    for request in requests:
        cut_by_kill = any(kill.set_ms - TIMEOUT_MS <= request.asked_ms <= kill.cleared_ms for kill in kills)
        if request.behaviour != "hang":
            continue
        took_ms = request.ended_ms - request.asked_ms if request.ended_ms else -1
        early = request.token in lost or cut_by_kill
        if not early:
            lasted.append(took_ms)
        if not (0 if early else TIMEOUT_MS - EARLY_MS) <= took_ms <= TIMEOUT_MS + CUT_WITHIN_MS:
            broken.append(f"{request.key}: a hang was cut after {took_ms} ms, the timeout is {TIMEOUT_MS} ms")
    return lasted, broken


def waits(requests: Sequence[Request], lost: Collection[int]) -> tuple[list[tuple[int, int]], list[str]]:
    """After each refusal: the wait that was asked for and the one that was kept, in milliseconds; and those too short.

    Asked for is the longer one of the server's Retry-After and the job's back-off for that attempt. What follows the
    loss of a holder need not wait.
    """
    kept, broken = [], []
    for key in dict.fromkeys(request.key for request in requests):
        mine = [request for request in requests if request.key == key]
        for attempt, (request, following) in enumerate(itertools.pairwise(mine)):
            refused = request.behaviour in ("429", "500") and request.end == "answered"
            if not refused or request.token in lost:
                continue
            backoff_ms = min(RETRY.initial_ms * (RETRY.multiplier_percent / 100) ** attempt, RETRY.max_ms)
            wanted_ms = round(max(backoff_ms, request.seconds * 1_000 if request.behaviour == "429" else 0))
            waited_ms = following.asked_ms - request.ended_ms
            kept.append((wanted_ms, waited_ms))
            if waited_ms < wanted_ms - EARLY_MS:
                broken.append(f"{key}: asked again after {waited_ms} ms, {wanted_ms} ms were to be waited")
    return kept, broken


def asked_under_kill(requests: Sequence[Request], kills: Sequence[Window]) -> Iterator[str]:
    for request in requests:
        if any(kill.set_ms < request.asked_ms < kill.cleared_ms for kill in kills):
            yield f"{request.key}: asked while a kill was in force"


def unseen(requests: Sequence[Request]) -> Iterator[str]:
    """Misbehaviour that no request has met: then nothing was shown about it."""
    for behaviour in ("slow", "429", "500", "hang"):
        if not any(request.behaviour == behaviour for request in requests):
            yield f"no request has met {behaviour!r}"


# ---- the steps


class Steps(JobSteps):
    def __init__(self, dev: Running, port: int, acts: Sequence[str]) -> None:
        super().__init__(dev, JOB, EVERY_MS)
        self.acts = acts
        self.log = dev.folder.root / "requests.jsonl"
        command = [sys.executable, "-m", "examples.model_stand_in", "--port", str(port)]
        self.model = Process(
            "model", [*command, "--script", SCRIPT, "--log", str(self.log)], {},
            dev.folder.log("model"), lambda _: None, folder=EXAMPLES.parent,
        )  # fmt: skip
        self.kills: list[Window] = []
        self.switch = switch_pb2.Switch()
        self.set_ms = 0

    def spec(self) -> job_pb2.JobSpec:
        return job_pb2.JobSpec(
            owner="smoke", runbook_url="https://example.org/smoke",
            # A slow one does not hold up the next.
            overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW, concurrent_max=50,
            misfire_policy=job_pb2.MISFIRE_POLICY_ALL, catch_up_max=100,
            timeout_ms=TIMEOUT_MS, interrupt_grace_ms=2_000, history_count=1_000, retry=RETRY,
        )  # fmt: skip

    async def run(self, outcome: Outcome) -> None:
        await self.model.start()
        try:
            await self.until("a leader and three sessions", self.is_up, START_DEADLINE_S)
            await self.open_schedule()
            await self.do(outcome, self.acts, 0)
            await self.close_schedule()
            await self.dev.cluster.stop_agents()
        except base.StepFailed as failed:
            raise base.StepFailed(f"{failed}\nopen: {self.open()}") from failed
        finally:
            await self.model.stop(1.0)
        await self.judge(outcome)
        self.judge_requests(outcome)

    def plan(self) -> Plan:
        return Plan(JOB, EVERY_MS, self.start_ms, self.end_ms, self.kills, exclusive=False)

    def judge_requests(self, outcome: Outcome) -> None:
        requests = self.requests()
        lost = self.lost_tokens()
        lasted, uncut = hangs(requests, lost, self.kills)
        kept, hasty = waits(requests, lost)
        outcome.broken += [*uncut, *hasty, *asked_under_kill(requests, self.kills), *unseen(requests)]
        if not lasted or not kept:
            outcome.broken.append("no hang was cut, or no refusal was followed by another attempt")
            return
        slack_ms = [waited_ms - wanted_ms for wanted_ms, waited_ms in kept]
        outcome.measured += [
            f"{len(requests)} requests; {len(lasted)} hangs, cut after {min(lasted)} to {max(lasted)} ms "
            f"(timeout {TIMEOUT_MS} ms)",
            f"{len(kept)} refusals (429, 500), asked again {min(slack_ms)} to {max(slack_ms)} ms after the wait",
        ]

    def lost_tokens(self) -> set[int]:
        """Of runs whose holder was lost, by their stories."""
        steps = (step for found in self.stories.values() for story in found for step in story.steps)
        return {int(step.run_id[1:]) for step in steps if step.what == "run_ended" and step.cause == "lost"}

    async def misbehave(self) -> Step:
        """Wait until each life of the script has come to its good end."""
        await self.until("a first request", lambda _: bool(self.requests()))
        step = Step("the model misbehaves", SCRIPT)

        def overcome(_: Observed) -> bool:
            keys = list(dict.fromkeys(request.key for request in self.requests()))[:LIVES]
            return len(keys) == LIVES and set(keys) <= self.audit.postings().keys()

        step.times_s["all overcome"] = await self.until(f"{LIVES} keys done", overcome)
        return step

    async def kill_holder(self) -> Step:
        """Kill an agent that waits for an answer."""
        found: list[tuple[Request, str]] = []

        def waiting(seen: Observed) -> bool:
            job = seen.work.jobs.get(JOB)
            agents = {run.token: run.agent for run in job.runs} if job else {}
            found[:] = [(each, agents[each.token]) for each in self.open() if each.token in agents]
            return bool(found)

        await self.until("an agent that waits for the model", waiting)
        request, victim = found[0]
        await self.dev.cluster.kill(victim)
        step = Step("kill the holder", f"kill -9 of {victim}, which waits for an answer to {request.key}")
        later = lambda _: any(r.key == request.key and r.token > request.token for r in self.requests())  # noqa: E731
        step.times_s["asked by another"] = await self.until(f"{request.key} asked again", later)
        await self.until_posted(request.key)
        return step

    async def kill_switch(self) -> Step:
        """Kill the job while questions are open, and wait until some due times have been suppressed."""
        await self.progress(BETWEEN)
        await self.until("open questions", lambda _: len(self.open()) >= OPEN)
        began_ms = now_ms()
        self.switch = await self.dev.observer.jobs().set_switch(JOB, "kill")
        self.set_ms = now_ms()
        step = Step("kill switch", f"switch {self.switch.switch_id}, {self.switch.runs_at_set} runs at work")
        await self.until("no open question", lambda _: not self.open())
        ended_ms = max(request.ended_ms for request in self.requests())
        step.times_s["last question given up"] = max(0, ended_ms - began_ms) / 1_000

        def effective(seen: Observed) -> bool:
            switch = seen.work.switch(JOB)
            return switch is not None and switch.runs_left == 0 and switch.suppressed >= SUPPRESSED

        await self.until(f"{SUPPRESSED} due times suppressed and no run left", effective)
        return step

    async def clear_switch(self) -> Step:
        cleared_ms = now_ms()
        ended = await self.dev.observer.jobs().clear_switch(self.switch)
        self.kills.append(Window(self.set_ms, cleared_ms))
        step = Step(
            "clear the switch",
            f"{ended.suppressed} suppressed; {ended.runs_ended} runs had ended, {ended.runs_unacknowledged} of them "
            f"unacknowledged, the last after {ended.effect_ms} ms",
        )
        number = len(self.requests())
        step.times_s["asked again"] = await self.until("a question", lambda _: len(self.requests()) > number)
        await self.progress(BETWEEN)
        return step

    def requests(self) -> list[Request]:
        return requests_of(self.log.read_text()) if self.log.exists() else []

    def open(self) -> list[Request]:
        return [request for request in self.requests() if not request.ended_ms]


async def smoke(state: Path, acts: Sequence[str] = ACTS) -> Outcome:
    """``acts``: the steps to do, by the names of their methods."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1/summarize"
    program = Program("model_agent", ("--model", url, "--slots", "20"), jobs="", writers=(JOB,))
    options = Options(state=state, examples=EXAMPLES, pace=PACE, program=program)
    return await base.run_steps(NAME, options, lambda dev: Steps(dev, port, acts))
