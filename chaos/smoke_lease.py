"""``lease-leader-election-smoke``: one lease, three agents, three faults.

While the agents work through the inbox:

1. the holder of the lease is killed in the middle of a document (kill -9);
2. the Raft leader is killed (kill -9), and started again later;
3. Raft leadership is moved to the node beside the holder, and that node is cut off from the others, so that the leader
   and the holder are lost at once while both are alive and believe in themselves; then the links are healed.

At the end the agents finish what they are at, and the checker reads the ledger, the histories and the records.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
from tenure.v1 import dedup_pb2, dedup_pb2_grpc

from chaos import smoke as base
from chaos.smoke import EXAMPLES, FINISH_DEADLINE_S, POLL_S, START_DEADLINE_S, STEP_DEADLINE_S, Outcome, Step
from sidecar.dev.checker import PREFIX, Record, check, round_of
from sidecar.dev.cluster import Pace, Program, node_of
from sidecar.dev.jobs import TENANT
from sidecar.dev.observer import Observed
from sidecar.dev.run import Options

NAME = "lease-leader-election-smoke"
# Short enough that a whole round fits between two faults, slow enough that a fault finds a document half-written.
PACE = Pace(ttl_ms=2_500, grace_ms=500, step_ms=40)
PROGRAM = Program("inbox_agent", ("--every-ms", "50"), jobs="", writers=())
CALL_TIMEOUT_S = 5.0
KILLS_MAX = 3
# Documents that must be finished between two faults.
DOCUMENTS_BETWEEN = 3


class Steps(base.Steps):
    async def run(self, outcome: Outcome) -> None:
        await self.until("a leader, a holder and three sessions", self.is_working, START_DEADLINE_S)
        await self.progress(DOCUMENTS_BETWEEN)
        await self.do(outcome, ("kill_holder", "kill_leader", "partition_leader"), DOCUMENTS_BETWEEN)
        rounds = await self.finish_round()
        await self.dev.cluster.stop_agents()
        records = await self.read_records()
        report = check(self.audit, self.dev.folder.histories(), records, rounds)
        outcome.report = report
        outcome.measured.append(
            f"{report.documents} documents expected, {report.postings} posted in {report.writes} writes under "
            f"{report.grants} grants; {report.refused} stale writes refused"
        )

    def is_working(self, seen: Observed) -> bool:
        return self.is_up(seen) and bool(seen.holder)

    async def kill_holder(self) -> Step:
        """Kill the holder when it has written half a document. One that just got to its end is followed by another."""
        for _ in range(KILLS_MAX):
            await self.until("a document half-written", lambda _: bool(self.half_written()))
            seen = await self.dev.observer.refresh()
            victim, token = seen.holder_agent, seen.token
            await self.dev.cluster.kill(victim)
            key = self.half_written()
            step = Step("kill the holder", f"kill -9 of {victim} within {key}")
            step.times_s["new holder"] = await self.another_holder(token)
            if key:
                await self.until_posted(key)
                return step
        raise base.StepFailed(f"{KILLS_MAX} holders were killed, each between two documents")

    async def kill_leader(self) -> Step:
        seen = await self.dev.observer.refresh()
        victim, token, agent = seen.leader, seen.token, seen.holder_agent
        step = await super().kill_leader()
        if node_of(agent) == victim:
            step.done += f", {agent} beside it"
            await self.another_holder(token)
        return step

    async def partition_leader(self) -> Step:
        """Make one node both leader and neighbour of the holder, and cut it off."""
        node = await self.until_leader_beside_holder()
        seen = await self.dev.observer.refresh()
        term, token, agent = seen.term, seen.token, seen.holder_agent
        self.dev.cluster.partition(node)
        step = Step("partition the leader", f"{node}, leader of term {term}, cut off with {agent} beside it")
        step.times_s["new leader"] = await self.another_leader(node, term)
        step.times_s["new holder"] = step.times_s["new leader"] + await self.another_holder(token)
        await self.progress(DOCUMENTS_BETWEEN)
        self.dev.cluster.heal()
        await self.until(f"{node} follows and is ready", lambda seen: self.ready(seen, node))
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
        raise base.StepFailed("leadership did not move to the node beside the holder")

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

    async def another_holder(self, token: int) -> float:
        """Wait for a grant later than ``token``; returns the seconds it took."""
        return await self.until("another holder", lambda seen: seen.token > token)


async def smoke(state: Path) -> Outcome:
    options = Options(state=state, examples=EXAMPLES, pace=PACE, program=PROGRAM)
    return await base.run_steps(NAME, options, Steps)
