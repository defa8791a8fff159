"""Smoke tests with real processes: ``python -m chaos smoke [agent | llm | lease]``; without a name the first two.

Each runs the cluster of ``tenure dev`` without a person, does to it what production does, and counts what was done
twice, never or partially. Each step must be seen to have happened, and work must go on after it. Exit status 0 only
then, and only if all counts are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table

from sidecar.dev.checker import Audit, Report
from sidecar.dev.cluster import NODES
from sidecar.dev.errors import DevError
from sidecar.dev.observer import Observed
from sidecar.dev.run import Options, Running, running

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# Far above what each step needs.
STEP_DEADLINE_S = 20.0
START_DEADLINE_S = 30.0
FINISH_DEADLINE_S = 30.0
POLL_S = 0.05


@dataclass
class Step:
    """One thing as it was done, and what came of it: the seconds from the act until each thing was seen."""

    name: str
    done: str
    times_s: dict[str, float] = field(default_factory=dict)
    posted: int = 0  # effects in the ledger from the act to the end of the step


@dataclass
class Outcome:
    name: str
    steps: list[Step] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    # What else was measured, a line each; and what of it is not as it must be.
    measured: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0
    # Why a step did not happen as it must; empty when all did, and were judged.
    failure: str = "not run to its end"

    @property
    def ok(self) -> bool:
        return not self.failure and not self.broken and self.report.clean


class StepFailed(Exception):
    """Something that a step needs did not come to be in time."""


class Steps:
    """What all of them need, on a running cluster."""

    def __init__(self, dev: Running) -> None:
        self.dev = dev
        self.audit = Audit(dev.folder.ledger, dev.cluster.examples / "inbox")

    async def run(self, outcome: Outcome) -> None:
        """All steps, and the judgement."""
        raise NotImplementedError

    async def do(self, outcome: Outcome, acts: Sequence[str], between: int) -> None:
        """One step (a method) after the other; after each, some more must be posted."""
        for act in acts:
            before = self.posted()
            outcome.steps.append(await getattr(self, act)())
            await self.progress(between)
            outcome.steps[-1].posted = self.posted() - before

    def is_up(self, seen: Observed) -> bool:
        ready = [name for name, status in seen.statuses.items() if status.ready]
        return len(ready) == len(NODES) and bool(seen.leader) and len(seen.sessions) == len(NODES)

    async def kill_leader(self) -> Step:
        """Kill the leader's process; start it again when the others have gone on without it."""
        seen = await self.dev.observer.refresh()
        victim, term = seen.leader, seen.term
        await self.dev.cluster.kill(victim)
        step = Step("kill the leader", f"kill -9 of {victim}, leader of term {term}")
        step.times_s["new leader"] = await self.another_leader(victim, term)
        await self.progress(1)
        await self.dev.cluster.restart(victim)
        await self.until(f"{victim} ready again", lambda seen: self.ready(seen, victim))
        return step

    async def progress(self, count: int) -> None:
        """Wait until some more effects are posted."""
        target = self.posted() + count
        await self.until(f"{count} more postings", lambda _: self.posted() >= target)

    def posted(self) -> int:
        return sum(len(each) for each in self.audit.postings().values())

    def half_written(self) -> str:
        """The key of a document that has counts in the ledger and more to come; ``""`` when there is none."""
        counts = self.audit.counts()
        for key, finished in self.audit.finished_flags().items():
            if not finished and len(counts.get(key, ())) > 0:
                return key
        return ""

    @staticmethod
    def ready(seen: Observed, node: str) -> bool:
        status = seen.statuses.get(node)
        return status is not None and status.ready and status.leader_id == seen.leader

    async def another_leader(self, old: str, term: int) -> float:
        """Wait for a leader of a later term on another node; returns the seconds it took."""

        def found(seen: Observed) -> bool:
            return bool(seen.leader) and seen.leader != old and seen.term > term

        return await self.until("another leader", found)

    async def until_posted(self, key: str) -> float:
        return await self.until(f"{key} done", lambda _: key in self.audit.postings())

    async def until(
        self, what: str, condition: Callable[[Observed], bool], deadline_s: float = STEP_DEADLINE_S
    ) -> float:
        """Wait for something to be seen; returns the seconds it took. ``StepFailed`` when it does not come to be."""
        started = time.monotonic()
        while time.monotonic() - started < deadline_s:
            seen = await self.dev.observer.refresh()
            if condition(seen):
                return time.monotonic() - started
            if failure := self.dev.cluster.failure():
                raise StepFailed(failure)
            await asyncio.sleep(POLL_S)
        raise StepFailed(f"waited {deadline_s:.0f} s in vain for {what}")


async def run_steps(name: str, options: Options, make: Callable[[Running], Steps]) -> Outcome:
    """The whole of one in a fresh folder. Never raises for what goes wrong with the cluster: the outcome says it."""
    outcome, started = Outcome(name), time.monotonic()
    try:
        async with running(options) as dev:
            steps = make(dev)
            try:
                await steps.run(outcome)
                outcome.failure = ""
            except (StepFailed, DevError, grpc.aio.AioRpcError) as error:
                outcome.failure = describe_failure(dev, error)
            finally:
                steps.audit.close()
    except DevError as error:
        outcome.failure = str(error)
    outcome.seconds = time.monotonic() - started
    return outcome


def describe_failure(dev: Running, error: Exception) -> str:
    """What was waited for, what was done before, and the last words of every process."""
    processes = (*dev.cluster.nodes.values(), *dev.cluster.agents.values())
    logs = (f"--- {process.name}\n{process.log_tail(12)}" for process in processes)
    said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return "\n".join([said or "", *dev.observer.seen.notes, *logs])


def show(outcome: Outcome, console: Console) -> None:
    table = Table(title=outcome.name, title_justify="left")
    for heading in ("step", "what was done", "seen after", "posted"):
        table.add_column(heading, justify="right" if heading == "posted" else "left")
    for step in outcome.steps:
        times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in step.times_s.items())
        table.add_row(step.name, step.done, times or "-", str(step.posted))
    console.print(table)
    for line in outcome.measured:
        print(line)
    for finding in outcome.report.findings:
        print(f"{finding.kind}: {finding.subject}: {finding.what}")
    for what in outcome.broken:
        print(f"BROKEN: {what}")
    if outcome.failure:
        print(f"FAILED: {outcome.failure}")
    else:
        print(f"{outcome.name}: {outcome.report.summary()} ({outcome.seconds:.0f} s)")


def main(arguments: list[str]) -> int:
    """``python -m chaos smoke``. Exit status 1 when a step was not seen to happen or a count is not 0."""
    from chaos import smoke_jobs, smoke_lease, smoke_llm

    smokes = {"agent": smoke_jobs.smoke, "llm": smoke_llm.smoke, "lease": smoke_lease.smoke}
    parser = argparse.ArgumentParser(prog="python -m chaos smoke", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="agent | llm | lease", help="which ones [agent llm]")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - smokes.keys():
        parser.error(f"no smoke test is called {', '.join(sorted(unknown))}: there are {', '.join(smokes)}")
    good = True
    for name in names or ("agent", "llm"):
        with tempfile.TemporaryDirectory(prefix="tenure-smoke-") as folder:
            outcome = asyncio.run(until_signalled(smokes[name](Path(folder) / "dev")))
        if outcome is None:
            print("stopped by a signal", file=sys.stderr)
            return 130
        show(outcome, Console(width=None if sys.stdout.isatty() else 160))
        good = good and outcome.ok
    return 0 if good else 1


async def until_signalled(work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """The outcome; None when Ctrl-C or SIGTERM came first, after everything that was started has been ended."""
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
