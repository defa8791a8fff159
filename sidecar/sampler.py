"""Looks at a running sidecar now and then (readiness, disk, wall clocks, certificates, lateness of the loop) and fills
the gauges."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import structlog

from sidecar.consensus.log_store import DiskSpace, SqliteLogStore
from sidecar.consensus.transport import TransportCounters
from sidecar.core.events import Event, Kind
from sidecar.renewal import Renewal
from sidecar.runtime import Runtime
from sidecar.version import VERSION

PROBE_S = 0.1
INTERRUPTS_MAX = 10_000
READY_EVERY, DISK_EVERY, SKEW_EVERY, CERTIFICATES_EVERY = 2, 10, 50, 600  # in probes

log = structlog.get_logger("tenure.sampler")


class Sampler:
    def __init__(
        self,
        runtime: Runtime,
        store: SqliteLogStore,
        peers: TransportCounters,
        disk: Callable[[], DiskSpace],
        renewals: Sequence[Renewal] = (),
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._disk = disk
        self._renewals = renewals
        self._reason: str | None = None
        runtime.metrics.before_scrape.append(self.refresh)
        # Interrupts without an acknowledgement, by run: since when (cluster milliseconds).
        self._interrupts: OrderedDict[str, int] = OrderedDict()
        self._other_rules = False
        runtime.proposer.subscribe(self.count)
        runtime.metrics.build.info({"version": VERSION})
        runtime.metrics.disk_reserve.set(runtime.settings.disk_reserve_bytes)
        self._show_peers(peers)

    def _show_peers(self, peers: TransportCounters) -> None:
        show, node = self._runtime.metrics.counted_elsewhere, self._runtime.node
        show("peer_connections", "connections with other nodes that came into use", lambda: peers.connections)
        show("peer_dials_failed", "dials that came to nothing", lambda: peers.dials_failed)
        show("peer_frames_sent", "frames queued for other nodes", lambda: peers.frames_sent)
        show("peer_frames_received", "frames of other nodes", lambda: peers.frames_received)
        show("peer_bytes_sent", "bytes written to other nodes", lambda: peers.bytes_sent)
        show("peer_bytes_received", "bytes of frames of other nodes", lambda: peers.bytes_received)
        show("peer_connections_refused", "connections refused before they were in use", lambda: peers.refused)
        show("peer_connections_dropped", "connections in use that ended", lambda: peers.dropped)
        show(
            "peer_frames_dropped",
            "frames of other nodes that were not acted upon",
            lambda: {"malformed": node.frames_malformed, "inbox_full": node.frames_dropped},
        )

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        probes = 0
        while True:
            due_s = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._note_lag(max(0.0, loop.time() - due_s))
            probes += 1
            if probes % DISK_EVERY == 0:
                self.check_disk()
            if probes % READY_EVERY == 0:
                self.check_ready()
            if probes % SKEW_EVERY == 0:
                self.check_skew()
                self.check_rules()
            if probes % CERTIFICATES_EVERY == 0:
                self.check_certificates()

    def _note_lag(self, lag_s: float) -> None:
        self._runtime.proposer.core.pressure.note_lag(int(lag_s * 1000))
        self._runtime.metrics.loop_lag.set(lag_s)

    def check_ready(self) -> None:
        reason = self._runtime.ready()
        if reason == self._reason:
            return
        self._reason = reason
        if reason:
            log.info("not ready", reason=reason)
        else:
            log.info("ready", leader=self._runtime.node.status().leader)
        for changed in self._runtime.on_ready_change:
            changed(reason)

    def check_disk(self) -> None:
        """Below the reserve this node takes nothing that grows, and does not lead: a full disk would end it."""
        space, runtime = self._disk(), self._runtime
        settings = runtime.settings
        if not space.low:
            if runtime.trouble:
                log.info("the disk has room again", free_bytes=space.free_bytes)
            runtime.trouble = ""
        else:
            runtime.trouble = f"the disk of {settings.data_dir} has {space.free_bytes} bytes left"
            log.warning(
                "the disk is nearly full", free_bytes=space.free_bytes, reserve_bytes=settings.disk_reserve_bytes
            )
            if runtime.node.is_leader() and settings.peer_ids:
                runtime.node.transfer_leadership(None, self._handed_over)
        runtime.proposer.core.hold_back(runtime.trouble)

    @staticmethod
    def _handed_over(error: str | None) -> None:
        if error is not None:
            log.warning("leadership could not be handed over", error=error)

    def check_certificates(self) -> None:
        for renewal in self._renewals:
            renewal.check()

    def check_skew(self) -> None:
        offsets = self._runtime.node.clock_offsets_ms()
        worst_ms = max((abs(offset_ms) for _, offset_ms in offsets), default=0)
        self._runtime.metrics.clock_skew.set(worst_ms / 1000)
        if worst_ms > self._runtime.settings.skew_max_ms:
            log.warning("wall clocks differ", offsets_ms=dict(offsets), allowed_ms=self._runtime.settings.skew_max_ms)

    def check_rules(self) -> None:
        if self._runtime.scheduler.other_rules() != self._other_rules:
            self._other_rules = not self._other_rules
            state = self._runtime.proposer.machine.tzdata
            log.warning("time-zone rules differ" if self._other_rules else "time-zone rules agree", cluster=state)

    def count(self, events: Sequence[Event]) -> None:
        """What became of due times and runs; counted by the leader alone."""
        if self._runtime.node.is_leader():
            for event in events:
                self._count(event)

    def _count(self, event: Event) -> None:
        metrics, due_s = self._runtime.metrics, event.due_ms / 1000
        if event.kind is Kind.OCCURRENCE_ENDED:
            metrics.due_times_ended(event.cause, event.reason, 1, due_s)
        elif event.kind is Kind.OCCURRENCE_MISSED:
            metrics.due_times_ended("missed", event.reason, event.count, due_s)
        elif event.kind is Kind.RUN_ASSIGNED and event.attempt == 1:
            metrics.start_lateness.observe(max(0, event.wall_ms - event.due_ms) / 1000)
        elif event.kind is Kind.RUN_ENDED:
            metrics.run_ends.labels(event.cause).inc()
        elif event.kind is Kind.RUN_INTERRUPTED:
            self._interrupts[event.run] = event.cluster_ms
            if len(self._interrupts) > INTERRUPTS_MAX:
                self._interrupts.popitem(last=False)
        elif event.kind is Kind.RUN_INTERRUPT_ACKNOWLEDGED and event.run in self._interrupts:
            metrics.interrupt_seconds.observe((event.cluster_ms - self._interrupts.pop(event.run)) / 1000)

    def refresh(self) -> None:
        """The gauges that are read off the state, right before a scrape."""
        metrics, runtime = self._runtime.metrics, self._runtime
        status = runtime.node.status()
        metrics.is_leader.set(runtime.node.is_leader())
        metrics.term.set(status.term)
        metrics.commit_index.set(status.commit_index)
        metrics.applied_index.set(status.applied_index)
        metrics.last_index.set(status.last_index)
        metrics.snapshot_index.set(status.snapshot_index)
        metrics.peers_connected.set(sum(connected for connected, _, _ in status.peers.values()))
        contact_ms = status.leader_contact_ms
        metrics.leader_contact.set(contact_ms / 1000 if contact_ms >= 0 else -1)
        metrics.ready.set(not runtime.ready())
        metrics.log_bytes.set(self._store.size_bytes)
        metrics.log_entries.set(len(self._store))
        metrics.disk_free.set(self._disk().free_bytes)
        self._refresh_state()

    def _refresh_state(self) -> None:
        metrics, machine, proposer = self._runtime.metrics, self._runtime.proposer.machine, self._runtime.proposer
        counts = machine.counts()
        metrics.sessions.set(counts["sessions"])
        metrics.connected_sessions.set(counts["connected_sessions"])
        metrics.leases.set(counts["leases"])
        metrics.lease_holders.set(counts["holders"])
        metrics.lease_waiters.set(counts["waiters"])
        metrics.records.set(counts["records"])
        metrics.record_bytes.set(counts["record_bytes"])
        metrics.stored_requests.set(counts["requests"])
        metrics.revision.set(machine.revision)
        metrics.cluster_time.set(proposer.cluster_now_ms() / 1000)
        metrics.in_flight.set(proposer.core.in_flight)
        metrics.queued.set(proposer.core.queued)
        metrics.watchers.set(self._runtime.hub.count)
        metrics.streams.set(len(self._runtime.streams))
        self._refresh_jobs(counts)

    def _refresh_jobs(self, counts: Mapping[str, int]) -> None:
        metrics, machine, scheduler = self._runtime.metrics, self._runtime.proposer.machine, self._runtime.scheduler
        metrics.jobs.set(counts["jobs"])
        metrics.runs.set(counts["runs"])
        metrics.workers.set(counts["workers"])
        metrics.occurrences.set(counts["occurrences"])
        metrics.occurrences_pending.set(counts["pending"])
        metrics.switches.set(counts["switches"])
        metrics.kill_epoch.set(machine.kill_epoch)
        leads = self._runtime.node.is_leader()
        metrics.scheduler_running.set(leads and not scheduler.held_reason)
        metrics.schedule_lag.set(scheduler.lag_ms() / 1000)
        metrics.tzdata_mismatch.set(scheduler.other_rules())
