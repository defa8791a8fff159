"""``agent-scheduled-job-leader-election-smoke``: one job, three agents, three faults, and three counts that must be 0.

The cluster of ``tenure dev`` without a person. While the agents work through the inbox:

1. the holder of the lease is killed in the middle of a document (kill -9);
2. the Raft leader is killed (kill -9), and started again later;
3. Raft leadership is moved to the node beside the holder, and that node is cut off from the others, so that the leader
   and the holder are lost at once while both are alive and believe in themselves; then the links are healed.

Each step must be seen to have happened, and work must go on after it. At the end the agents finish what they are at,
and the checker reads the ledger, the histories and the records.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table
from tenure.v1 import dedup_pb2, dedup_pb2_grpc

from sidecar.dev.checker import PREFIX, Audit, Record, Report, check, name_of, round_of
from sidecar.dev.cluster import NODES, Pace, node_of
from sidecar.dev.errors import DevError
from sidecar.dev.observer import TENANT, Observed
from sidecar.dev.run import Options, Running, running

NAME = "agent-scheduled-job-leader-election-smoke"
ROOT = Path(__file__).resolve().parent.parent
# Short enough that a whole round fits between two faults, slow enough that a fault finds a document half-written.
PACE = Pace(ttl_ms=2_500, grace_ms=500, every_ms=50, step_ms=40)
# A holder that is killed with its sidecar alive is replaced after its grace; these are far above what is needed.
STEP_DEADLINE_S = 15.0
START_DEADLINE_S = 30.0
FINISH_DEADLINE_S = 20.0
POLL_S = 0.05
CALL_TIMEOUT_S = 5.0
KILLS_MAX = 3
# Documents that must be finished between two faults.
DOCUMENTS_BETWEEN = 3


@dataclass
class Step:
    """One fault as it was done, and what came of it."""

    name: str
    done: str
    leader_s: float | None = None  # until another leader was known
    holder_s: float | None = None  # until another token was granted
    documents: int = 0  # posted from the fault to the end of the step


@dataclass
class Outcome:
    steps: list[Step] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    seconds: float = 0.0
    # Why a step did not happen as it must; empty when all did.
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.report.clean and len(self.steps) == 3


class StepFailed(Exception):
    """Something that a step needs did not come to be in time."""


class Smoke:
    """The steps, on a running cluster."""

    def __init__(self, dev: Running) -> None:
        self.dev = dev
        self.audit = Audit(dev.folder.ledger, dev.cluster.examples / "inbox")

    async def run(self, outcome: Outcome) -> None:
        await self.until("a leader, a holder and three sessions", self.is_working, START_DEADLINE_S)
        await self.progress()
        for step in (self.kill_holder, self.kill_leader, self.partition_leader):
            before = self.posted()
            outcome.steps.append(await step())
            await self.progress()
            outcome.steps[-1].documents = self.posted() - before
        rounds = await self.finish_round()
        await self.dev.cluster.stop_agents()
        records = await self.read_records()
        outcome.report = check(self.audit, self.dev.folder.histories(), records, rounds)

    def is_working(self, seen: Observed) -> bool:
        ready = [name for name, status in seen.statuses.items() if status.ready]
        return len(ready) == len(NODES) and bool(seen.leader and seen.holder) and len(seen.sessions) == len(NODES)

    async def kill_holder(self) -> Step:
        """Kill the holder when it has written half a document. One that just got to its end is followed by another."""
        for _ in range(KILLS_MAX):
            await self.until("a document half-written", lambda _: bool(self.half_written()), STEP_DEADLINE_S)
            seen = await self.dev.observer.refresh()
            victim, token = seen.holder_agent, self.token(seen)
            await self.dev.cluster.kill(victim)
            key = self.half_written()
            step = Step("kill the holder", f"kill -9 of {victim} within {key}")
            step.holder_s = await self.another_holder(token)
            if key:
                await self.repaired(key)
                return step
        raise StepFailed(f"{KILLS_MAX} holders were killed, each between two documents")

    async def kill_leader(self) -> Step:
        """Kill the leader's process; start it again when the others have gone on without it."""
        seen = await self.dev.observer.refresh()
        victim, term, token, agent = seen.leader, seen.term, self.token(seen), seen.holder_agent
        await self.dev.cluster.kill(victim)
        step = Step("kill the leader", f"kill -9 of {victim}, leader of term {term}")
        step.leader_s = await self.another_leader(victim, term)
        if node_of(agent) == victim:
            step.done += f", {agent} beside it"
            step.holder_s = await self.another_holder(token)
        await self.progress()
        await self.dev.cluster.restart(victim)
        await self.until(f"{victim} ready again", lambda seen: self.ready(seen, victim), STEP_DEADLINE_S)
        return step

    async def partition_leader(self) -> Step:
        """Make one node both leader and neighbour of the holder, and cut it off."""
        node = await self.until_leader_beside_holder()
        seen = await self.dev.observer.refresh()
        term, token, agent = seen.term, self.token(seen), seen.holder_agent
        self.dev.cluster.partition(node)
        step = Step("partition the leader", f"{node}, leader of term {term}, cut off with {agent} beside it")
        step.leader_s = await self.another_leader(node, term)
        waited_s = await self.until("another holder", lambda seen: self.token(seen) > token, STEP_DEADLINE_S)
        step.holder_s = step.leader_s + waited_s
        await self.progress()
        self.dev.cluster.heal()
        await self.until(f"{node} follows and is ready", lambda seen: self.ready(seen, node), STEP_DEADLINE_S)
        return step

    async def until_leader_beside_holder(self) -> str:
        """Move leadership to the node beside the holder; again, should either move meanwhile."""
        deadline = time.monotonic() + STEP_DEADLINE_S
        while time.monotonic() < deadline:
            seen = await self.dev.observer.refresh()
            if seen.leader and seen.holder and seen.leader == node_of(seen.holder_agent):
                return seen.leader
            if seen.leader and seen.holder:
                try:
                    await self.dev.observer.transfer_leadership(node_of(seen.holder_agent))
                except grpc.aio.AioRpcError as error:
                    self.dev.observer.seen.note(f"leadership did not move: {error.details()}")
            await asyncio.sleep(POLL_S)
        raise StepFailed("leadership did not move to the node beside the holder")

    def half_written(self) -> str:
        """The document that has some of its paragraphs in the ledger and some to come; ``""`` when there is none."""
        counts = self.audit.counts()
        for key, finished in self.audit.finished_flags().items():
            if not finished and 0 < len(counts.get(key, ())) < len(self.audit.documents[name_of(key)].words):
                return key
        return ""

    async def progress(self) -> None:
        """Wait until some more documents are posted."""
        target = self.posted() + DOCUMENTS_BETWEEN
        await self.until(f"{DOCUMENTS_BETWEEN} more documents", lambda _: self.posted() >= target, STEP_DEADLINE_S)

    async def finish_round(self) -> int:
        """Wait until the round at hand is complete; returns its number."""
        last = max(round_of(key) for key in self.audit.finished_flags())
        size = len(self.audit.documents)

        def complete(_: Observed) -> bool:
            return sum(1 for key in self.audit.postings() if round_of(key) == last) == size

        await self.until(f"round {last} complete", complete, FINISH_DEADLINE_S)
        return last

    async def read_records(self) -> dict[str, Record]:
        """What Tenure remembers of every document, with results."""
        seen = await self.dev.observer.refresh()
        async with grpc.aio.insecure_channel(self.dev.cluster.address(seen.leader)) as channel:
            stub = dedup_pb2_grpc.DedupServiceStub(channel)
            keys, page = [], ""
            while True:
                request = dedup_pb2.ListRecordsRequest(tenant=TENANT, prefix=PREFIX, page_size=1_000, page_token=page)
                answer = await stub.ListRecords(request, timeout=CALL_TIMEOUT_S)
                keys += [record.key for record in answer.records]
                page = answer.next_page_token
                if not page:
                    break
            records = {}
            for key in keys:
                wanted = dedup_pb2.GetRecordRequest(tenant=TENANT, key=key)
                record = (await stub.GetRecord(wanted, timeout=CALL_TIMEOUT_S)).record
                state = dedup_pb2.RecordState.Name(record.state).removeprefix("RECORD_STATE_")
                records[key] = Record(state, record.result)
        return records

    def posted(self) -> int:
        return sum(len(each) for each in self.audit.postings().values())

    @staticmethod
    def token(seen: Observed) -> int:
        return seen.holder.token if seen.holder else 0

    @staticmethod
    def ready(seen: Observed, node: str) -> bool:
        status = seen.statuses.get(node)
        return status is not None and status.ready and status.leader_id == seen.leader

    async def another_leader(self, old: str, term: int) -> float:
        """Wait for a leader of a later term on another node; returns the seconds it took."""

        def found(seen: Observed) -> bool:
            return bool(seen.leader) and seen.leader != old and seen.term > term

        return await self.until("another leader", found, STEP_DEADLINE_S)

    async def another_holder(self, token: int) -> float:
        """Wait for a grant later than ``token``; returns the seconds it took."""
        return await self.until("another holder", lambda seen: self.token(seen) > token, STEP_DEADLINE_S)

    async def repaired(self, key: str) -> None:
        await self.until(f"{key} repaired", lambda _: key in self.audit.postings(), STEP_DEADLINE_S)

    async def until(self, what: str, condition: Callable[[Observed], bool], deadline_s: float) -> float:
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


async def smoke(state: Path) -> Outcome:
    """Run the whole of it in a fresh folder. Never raises for what goes wrong with the cluster: the outcome says it."""
    outcome, started = Outcome(), time.monotonic()
    try:
        async with running(Options(state=state, examples=ROOT / "examples", pace=PACE)) as dev:
            steps = Smoke(dev)
            try:
                await steps.run(outcome)
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
    return "\n".join([str(error), *dev.observer.seen.notes, *logs])


def show(outcome: Outcome, console: Console) -> None:
    table = Table(title=NAME, title_justify="left")
    for heading in ("step", "what was done", "new leader", "new holder", "documents"):
        table.add_column(heading, justify="right" if heading in ("new leader", "new holder", "documents") else "left")
    for step in outcome.steps:
        table.add_row(step.name, step.done, seconds(step.leader_s), seconds(step.holder_s), str(step.documents))
    console.print(table)
    report = outcome.report
    begun = report.postings - report.documents
    more = f" ({begun} of them in a round that was not to be finished)" if begun > 0 else ""
    print(
        f"{report.documents} documents expected, {report.postings} posted{more} in {report.writes} writes under "
        f"{report.grants} grants; {report.refused} stale writes refused; {outcome.seconds:.0f} s"
    )
    for finding in report.findings:
        print(f"{finding.kind}: {finding.subject}: {finding.what}")
    if outcome.failure:
        print(f"FAILED: {outcome.failure}")
    elif outcome.steps:
        print(report.summary())


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def main(argv: list[str]) -> int:
    """``python -m chaos smoke``. Exit status 0 only if every step happened and all counts are 0."""
    argparse.ArgumentParser(prog="python -m chaos smoke", description=__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tenure-smoke-") as folder:
        outcome = asyncio.run(until_signalled(smoke(Path(folder) / "dev")))
    if outcome is None:
        print("stopped by a signal", file=sys.stderr)
        return 130
    show(outcome, Console(width=None if sys.stdout.isatty() else 160))
    return 0 if outcome.ok else 1


async def until_signalled(work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """The outcome; None when Ctrl-C or SIGTERM came first, after everything that was started has been ended."""
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
