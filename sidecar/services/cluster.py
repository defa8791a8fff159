"""The cluster, for operators. Served on every listener: whoever reaches it is trusted with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tenure.v1 import cluster_pb2

from sidecar.core.jobs import Job
from sidecar.scheduling.zones import tzdata_version
from sidecar.services import specs, words
from sidecar.services import validation as check
from sidecar.services.calls import Caller
from sidecar.services.errors import Problem, outcome_unknown, problem
from sidecar.services.handlers import Handlers
from sidecar.services.reads import Reads
from sidecar.version import VERSION

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

CLOCK_OFFSET_MAX_MS = 1_000
WARNINGS_EVERY_MS, FLAGS_SHOWN_MAX, JOBS_STEP = 60_000, 10, 500
# A job that is settled so far beyond this node's clock was so by a clock that stood ahead.
SETTLED_AHEAD_MS = 60_000


def cluster_service(runtime: Runtime, reads: Reads) -> Handlers:
    handlers = Handlers(runtime, cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"])
    service = _Cluster(runtime, reads)
    handlers.unary_coroutine("GetStatus", service.get_status)
    handlers.unary_coroutine("TransferLeadership", service.transfer_leadership)
    handlers.unary_coroutine("TakeSnapshot", service.take_snapshot)
    handlers.unary_coroutine("GetDigest", service.get_digest)
    return handlers


class _Cluster:
    def __init__(self, runtime: Runtime, reads: Reads) -> None:
        self._runtime, self._reads = runtime, reads
        self._of_jobs: list[str] = []
        self._of_jobs_at_ms = 0

    async def get_status(self, _: cluster_pb2.GetStatusRequest, __: Caller) -> cluster_pb2.GetStatusResponse:
        runtime = self._runtime
        status, machine = runtime.node.status(), runtime.proposer.machine
        counts = machine.counts()
        not_ready = runtime.ready()
        return cluster_pb2.GetStatusResponse(
            cluster_id=runtime.settings.cluster_id,
            node_id=runtime.settings.node_id,
            role=cluster_pb2.NodeRole.ValueType(status.role),
            leader_id=status.leader or "",
            term=status.term,
            commit_index=status.commit_index,
            applied_index=status.applied_index,
            last_index=status.last_index,
            first_index=status.first_index,
            snapshot_index=status.snapshot_index,
            ready=not not_ready,
            not_ready_reason=not_ready,
            voter=status.voter,
            draining=runtime.draining,
            peers=self._peers(status.peers),
            sessions=counts["sessions"],
            leases=counts["leases"],
            records=counts["records"],
            revision=machine.revision,
            cluster_ms=runtime.proposer.cluster_now_ms(),
            wall_ms=runtime.clock.wall_ms(),
            version=VERSION,
            uptime_ms=runtime.uptime_ms(),
            jobs=counts["jobs"],
            runs=counts["runs"],
            occurrences=counts["occurrences"],
            switches=counts["switches"],
            kill_epoch=machine.kill_epoch,
            tzdata_version=tzdata_version(),
            cluster_tzdata_version=machine.tzdata,
            schedule_lag_ms=runtime.scheduler.lag_ms(),
            schedule_held_reason=runtime.scheduler.held_reason,
            warnings=[*runtime.scheduler.warnings(), *self._clocks(), *self._of_all_jobs()],
        )

    def _clocks(self) -> list[str]:
        """Nodes whose wall clock differs; only the leader knows."""
        return [
            f"the clock of {peer} differs from that of this node by {offset_ms} ms"
            for peer, offset_ms in self._runtime.node.clock_offsets_ms()
            if abs(offset_ms) > CLOCK_OFFSET_MAX_MS
        ]

    def _of_all_jobs(self) -> list[str]:
        """What all jobs are looked through for, once a minute at most."""
        wall_ms = self._runtime.clock.wall_ms()
        if abs(wall_ms - self._of_jobs_at_ms) >= WARNINGS_EVERY_MS:
            self._of_jobs_at_ms = wall_ms
            self._of_jobs = [*self._settled_ahead(wall_ms), *self._old_flags(wall_ms)]
        return self._of_jobs

    def _settled_ahead(self, wall_ms: int) -> list[str]:
        """A clock that stood ahead and has stepped back leaves jobs that nothing is due of for as long."""
        ahead = [row for row in self._jobs() if row.settled_ms > wall_ms + SETTLED_AHEAD_MS]
        if not ahead:
            return []
        last = max(ahead, key=lambda row: row.settled_ms)
        return [
            f"{len(ahead)} jobs are dealt with up to a time that is still to come (job {last.tenant}/{last.name}: "
            f"{words.utc(last.settled_ms)}), and not due before: a clock stood ahead, or this node's is behind"
        ]

    def _old_flags(self, wall_ms: int) -> list[str]:
        """Jobs that have been in shadow mode, or with a canary, for long."""
        found = [
            f"job {row.tenant}/{row.name}: {warning}"
            for row in self._jobs()
            if (warning := specs.flag_warning(row.spec, wall_ms, row.flag_since_ms))
        ]
        surplus = [f"and {len(found) - FLAGS_SHOWN_MAX} jobs more"] if len(found) > FLAGS_SHOWN_MAX else []
        return found[:FLAGS_SHOWN_MAX] + surplus

    def _jobs(self) -> Iterator[Job]:
        machine = self._runtime.proposer.machine
        for tenant in self._runtime.settings.tenants:
            after = ""
            while rows := machine.jobs(tenant, "", after, JOBS_STEP):
                yield from rows
                after = rows[-1].name

    def _peers(self, peers: Mapping[str, tuple[bool, int, int]]) -> list[cluster_pb2.PeerStatus]:
        addresses = self._runtime.settings.peers
        return [
            cluster_pb2.PeerStatus(
                node_id=peer,
                address=addresses.get(peer, ""),
                connected=connected,
                match_index=match_index,
                last_contact_ms=contact_ms,
            )
            for peer, (connected, match_index, contact_ms) in sorted(peers.items())
        ]

    async def transfer_leadership(
        self, request: cluster_pb2.TransferLeadershipRequest, caller: Caller
    ) -> cluster_pb2.TransferLeadershipResponse:
        runtime = self._runtime
        to = check.optional_identifier(request.to_node_id, "to_node_id", check.NODE_ID_BYTES_MAX) or None
        nodes = sorted(runtime.settings.peers)
        if to is not None and to not in nodes:
            raise problem(Problem.NODE_NOT_FOUND, f"there is no node {to} in this cluster", nodes=",".join(nodes))
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        runtime.node.transfer_leadership(to, lambda reason: None if done.done() else done.set_result(reason))
        try:
            async with asyncio.timeout(caller.timeout_ms / 1000):
                reason = await done
                if reason is not None:
                    leader = runtime.node.status().leader or ""
                    raise problem(Problem.LEADERSHIP_NOT_TRANSFERRED, reason, leader=leader)
        except TimeoutError:
            raise outcome_unknown("the transfer was not seen to end in time", "DEADLINE") from None
        status = runtime.node.status()
        return cluster_pb2.TransferLeadershipResponse(leader_id=status.leader or "", term=status.term)

    async def take_snapshot(
        self, _: cluster_pb2.TakeSnapshotRequest, caller: Caller
    ) -> cluster_pb2.TakeSnapshotResponse:
        taken: asyncio.Future[tuple[int, int, str | None]] = asyncio.get_running_loop().create_future()

        def done(index: int, size_bytes: int, error: str | None) -> None:
            if not taken.done():
                taken.set_result((index, size_bytes, error))

        self._runtime.node.take_snapshot(done)
        try:
            index, size_bytes, error = await asyncio.wait_for(taken, caller.timeout_ms / 1000)
        except TimeoutError:
            raise outcome_unknown("the snapshot was not finished in time; it goes on", "DEADLINE") from None
        if error is not None:
            raise problem(Problem.SNAPSHOT_FAILED, error)
        return cluster_pb2.TakeSnapshotResponse(snapshot_index=index, size_bytes=size_bytes)

    async def get_digest(self, _: cluster_pb2.GetDigestRequest, __: Caller) -> cluster_pb2.GetDigestResponse:
        info = self._reads.info(linearizable=False)
        captured = self._runtime.proposer.core.capture()
        # The state may be large: the event loop is not held up.
        digest = await asyncio.get_running_loop().run_in_executor(None, captured.digest)
        return cluster_pb2.GetDigestResponse(digest=digest, read=info)
