"""What is known of a development cluster: asked from every node in turn, and told by the change stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import deque
from dataclasses import dataclass, field

import grpc
import grpc.aio
from tenure.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    watch_pb2,
    watch_pb2_grpc,
)

from sidecar.dev import checker
from sidecar.dev.cluster import LEASE, NODES, DevCluster
from sidecar.dev.errors import DevError
from sidecar.dev.jobs import TENANT, Jobs, JobsSeen, definitions_of

POLL_S = 0.25
CALL_TIMEOUT_S = 1.0
EVENTS_MAX = 200
RETRY_S = 0.5
# A watch is asked for again this often, so that one on a node that was cut off does not wait for its heal.
WATCH_S = 2.0

# A node that comes back is found within a second, not after gRPC's usual minute of back-off.
CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500)]

Status = cluster_pb2.GetStatusResponse
LEADER = cluster_pb2.NODE_ROLE_LEADER


@dataclass
class Observed:
    """The cluster as last seen. ``statuses`` has only nodes that answer."""

    statuses: dict[str, Status] = field(default_factory=dict)
    lease: lease_pb2.Lease | None = None
    sessions: list[session_pb2.Session] = field(default_factory=list)
    work: JobsSeen = field(default_factory=JobsSeen)
    # The job that keys and orders without a name are about; "" until jobs are known.
    chosen: str = ""
    tally: checker.Tally = field(default_factory=checker.Tally)
    events: deque[watch_pb2.Event] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    # What was done to the cluster and what became of its processes, in words; and how many such notes there have been.
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    noted: int = 0
    cluster_ms: int = 0

    def note(self, text: str) -> None:
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")
        self.noted += 1

    @property
    def leader(self) -> str:
        """The leader of the highest term; an older one may not know yet that it is deposed."""
        leaders = [(status.term, name) for name, status in self.statuses.items() if status.role == LEADER]
        return max(leaders)[1] if leaders else ""

    @property
    def term(self) -> int:
        return max((status.term for status in self.statuses.values()), default=0)

    @property
    def holder(self) -> lease_pb2.LeaseHolder | None:
        return self.lease.holders[0] if self.lease and self.lease.holders else None

    @property
    def holder_agent(self) -> str:
        """The agent that holds the lease, or that is at work on the chosen job."""
        if self.holder:
            return self.holder.agent
        run = self.work.run(self.chosen)
        return run.agent if run else ""

    @property
    def token(self) -> int:
        if self.holder:
            return self.holder.token
        run = self.work.run(self.chosen)
        return run.token if run else 0

    def choose_next(self) -> str:
        """Makes the next job the chosen one."""
        names = sorted(self.work.jobs)
        if names:
            self.chosen = names[(names.index(self.chosen) + 1) % len(names)] if self.chosen in names else names[0]
        return self.chosen


class Observer:
    """Keeps ``seen`` up to date until ``stop``, and applies the program's jobs as soon as somebody can take them."""

    def __init__(self, cluster: DevCluster, seen: Observed) -> None:
        self.seen = seen
        self._cluster = cluster
        self._channels = {
            name: grpc.aio.insecure_channel(cluster.address(name), options=CHANNEL_OPTIONS) for name in NODES
        }
        self._audit = checker.Audit(cluster.folder.ledger, cluster.examples / "inbox")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._watch())]
        if self._cluster.program.jobs:
            self._tasks.append(asyncio.create_task(self._apply_jobs()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._audit.close()

    def raise_if_failed(self) -> None:
        """Raises what ended the observing, which only a mistake of ours can do."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def refresh(self) -> Observed:
        """Ask everything once, now."""
        statuses = await asyncio.gather(*(self._status(name) for name in NODES))
        self.seen.statuses = {name: status for name, status in zip(NODES, statuses, strict=True) if status}
        if node := self._best():
            ask_work = self._ask_jobs if self.with_jobs else self._ask_lease
            await asyncio.gather(ask_work(node), self._ask_sessions(node))
            self.seen.cluster_ms = self.seen.statuses[node].cluster_ms
        self.seen.tally = self._tally()
        return self.seen

    @functools.cached_property
    def with_jobs(self) -> bool:
        """Whether the agents work for scheduled jobs, and not for a lease."""
        return self._cluster.program.module != "inbox_agent"

    def jobs(self) -> Jobs:
        """On the leader, or else on a node that answers. ``DevError`` when none does."""
        node = self.seen.leader or self._best()
        if not node:
            raise DevError("no node answers")
        return Jobs(self._channels[node])

    def _tally(self) -> checker.Tally:
        if not self.with_jobs:
            return self._audit.tally(self.seen.token)
        work = self.seen.work
        running = {run.token for job in work.jobs.values() for run in job.runs}
        tally = self._audit.job_tally("job/", running)
        # What Tenure counts as succeeded was asked before the ledger, so the ledger has at least as many.
        succeeded = sum(work.jobs[name].succeeded_total for name in self._cluster.program.writers if name in work.jobs)
        return dataclasses.replace(tally, never=max(0, succeeded - tally.finished))

    async def _apply_jobs(self) -> None:
        """The jobs of the file, as soon as there is a leader. A refusal ends this with its words."""
        definitions = definitions_of(self._cluster.examples / self._cluster.program.jobs)
        while True:
            if self.seen.leader:
                try:
                    applied = await self.jobs().apply(definitions)
                    self.seen.note("applied " + ", ".join(f"{job.name} revision {job.revision}" for job in applied))
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                        raise DevError(f"{self._cluster.program.jobs}: {error.details()}") from error
            await asyncio.sleep(POLL_S)

    async def transfer_leadership(self, to: str) -> str:
        """Move Raft leadership to a node; returns the leader that is known afterwards."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channels[self.seen.leader])
        answer = await stub.TransferLeadership(cluster_pb2.TransferLeadershipRequest(to_node_id=to), timeout=5)
        return answer.leader_id

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def _status(self, name: str) -> Status | None:
        if not self._cluster.nodes[name].running:
            return None
        try:
            return await cluster_pb2_grpc.ClusterServiceStub(self._channels[name]).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return None

    def _best(self) -> str:
        """The node that knows most: one that is cut off may be far behind."""
        ready = [(status.applied_index, name) for name, status in self.seen.statuses.items()]
        return max(ready)[1] if ready else ""

    async def _ask_lease(self, node: str) -> None:
        request = lease_pb2.GetLeaseRequest(tenant=TENANT, name=LEASE, consistency=lease_pb2.CONSISTENCY_LOCAL)
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await lease_pb2_grpc.LeaseServiceStub(self._channels[node]).GetLease(
                request, timeout=CALL_TIMEOUT_S
            )
            self.seen.lease = answer.lease

    async def _ask_jobs(self, node: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            self.seen.work = await Jobs(self._channels[node]).look()
            if self.seen.chosen not in self.seen.work.jobs:
                self.seen.choose_next()

    async def _ask_sessions(self, node: str) -> None:
        request = session_pb2.ListSessionsRequest(tenant=TENANT)
        with contextlib.suppress(grpc.aio.AioRpcError):
            stub = session_pb2_grpc.SessionServiceStub(self._channels[node])
            self.seen.sessions = list((await stub.ListSessions(request, timeout=CALL_TIMEOUT_S)).sessions)

    async def _watch(self) -> None:
        """Follow the change stream, on another node from the same revision on when one ends."""
        revision = 0
        while True:
            for name in [name for name in self.seen.statuses if not self._cluster.mesh.cut_off(name)]:
                revision = await self._watch_on(name, revision or self._first_revision(name))
            await asyncio.sleep(RETRY_S)

    def _first_revision(self, name: str) -> int:
        return max(1, self.seen.statuses[name].revision - EVENTS_MAX)

    async def _watch_on(self, name: str, revision: int) -> int:
        """Returns the revision to go on from; 0 when that one is gone."""
        request = watch_pb2.WatchRequest(tenant=TENANT, from_revision=revision)
        try:
            async for answer in watch_pb2_grpc.WatchServiceStub(self._channels[name]).Watch(request, timeout=WATCH_S):
                self.seen.events.extend(answer.events)
                revision = answer.revision + 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                return 0
        return revision
