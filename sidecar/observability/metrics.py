"""All metrics of a sidecar, in a registry of their own.

No label has values that come from a request: names of leases, keys, sessions and tenants belong into events and logs.
What is a state (not an event) is read when somebody asks, by the functions in ``before_scrape``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

FAST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
ITEMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
LATENESS_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1_800, 3_600)
# Reasons of outcomes, without what is said after them; any other is counted as "other".
REASONS = frozenset(
    {
        "starting_deadline", "overlap", "overlap_buffer_full", "paused", "draining", "killed", "shadow", "no_room",
        "misfire_skip", "misfire_latest", "catch_up_max", "catch_up_window", "timeout", "operator", "job_deleted",
        "holder_lost", "record_completed", "record_failed", "record_unknown", "after_interrupt",
        "attempts_used_up", "not_retryable", "no_retries_of_failures", "at_most_once",
    }
)  # fmt: skip
# More than the API has: a method that is not its own is counted as "other".
METHODS_MAX = 100


class _CountedElsewhere(Collector):
    """A counter that somebody else keeps, by cause if it is a mapping. Asked for its value at each scrape."""

    def __init__(self, name: str, description: str, read: Callable[[], int | Mapping[str, int]]) -> None:
        self._name, self._description, self._read = name, description, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        value = self._read()
        if isinstance(value, Mapping):
            family = CounterMetricFamily(self._name, self._description, labels=("cause",))
            for cause, count in sorted(value.items()):
                family.add_metric((cause,), count)
        else:
            family = CounterMetricFamily(self._name, self._description, value=value)
        yield family


class Metrics:
    """Prefix ``tenure_``; times in seconds, sizes in bytes, as Prometheus wants them."""

    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.before_scrape: list[Callable[[], None]] = []
        self._methods: set[tuple[str, str]] = set()
        ProcessCollector(registry=self.registry)
        self.build = Info("tenure_build", "version of this sidecar", registry=self.registry)
        self._consensus()
        self._log()
        self._state()
        self._requests()
        self._jobs()
        self._machine()

    def _consensus(self) -> None:
        self.is_leader = self._gauge("raft_is_leader", "1 while this node leads and a quorum answers it")
        self.term = self._gauge("raft_term", "current Raft term")
        self.commit_index = self._gauge("raft_commit_index", "last log index known to be committed")
        self.applied_index = self._gauge("raft_applied_index", "last log index applied to the state")
        self.last_index = self._gauge("raft_last_index", "last log index stored here")
        self.leader_changes = self._counter("raft_leader_changes", "times that this node learned of another leader")
        self.peers_connected = self._gauge("raft_peers_connected", "peers with a live connection")
        self.leader_contact = self._gauge("raft_leader_contact_seconds", "age of what this node knows; -1: never knew")
        self.turn_seconds = self._histogram("raft_turn_seconds", "turns of the ready loop, with the sync", FAST_SECONDS)
        self.ready = self._gauge("ready", "1 while this node should be given work")

    def _log(self) -> None:
        self.sync_seconds = self._histogram(
            "log_sync_seconds", "waiting for the disk, per turn that had to", FAST_SECONDS
        )
        self.log_bytes = self._gauge("log_bytes", "size of the log's entries")
        self.log_entries = self._gauge("log_entries", "entries in the log")
        self.snapshot_index = self._gauge("snapshot_index", "log index of the newest snapshot")
        self.disk_free = self._gauge("disk_free_bytes", "free space where the data folder is")
        self.disk_reserve = self._gauge("disk_reserve_bytes", "free space below which this node takes no writes")

    def _state(self) -> None:
        self.sessions = self._gauge("sessions", "live sessions in the cluster")
        self.connected_sessions = self._gauge("connected_sessions", "live sessions that are carried by a stream")
        self.leases = self._gauge("leases", "names that are held, waited for or delayed")
        self.lease_holders = self._gauge("lease_holders", "holders of all leases")
        self.lease_waiters = self._gauge("lease_waiters", "places in line for all leases")
        self.records = self._gauge("records", "dedup records")
        self.record_bytes = self._gauge("record_bytes", "bytes counted against the limit of dedup records")
        self.stored_requests = self._gauge("stored_requests", "requests whose results are kept for repeats")
        self.revision = self._gauge("revision", "revision of the last event")
        self.cluster_time = self._gauge("cluster_time_seconds", "cluster time as this node estimates it")

    def _requests(self) -> None:
        self.requests = Counter(
            "tenure_requests", "finished gRPC calls", ("service", "method", "code"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "tenure_request_seconds",
            "duration of unary gRPC calls",
            ("service", "method"),
            buckets=FAST_SECONDS,
            registry=self.registry,
        )
        self.in_flight = self._gauge("proposals_in_flight", "proposals of this node without a result")
        self.queued = self._gauge("proposals_queued", "proposals that wait for this leader's log")
        self.batch_items = self._histogram("batch_items", "requests in one log entry", ITEMS)
        self.batch_bytes = self._counter("batch_bytes", "bytes of log entries proposed here")
        self.shed = Counter("tenure_shed", "requests refused by overload", ("cause",), registry=self.registry)
        self.failures = Counter(
            "tenure_proposal_failures", "proposals without a result", ("failure",), registry=self.registry
        )
        self.forwarded_dropped = Counter(
            "tenure_forwarded_dropped", "items of followers not taken", ("cause",), registry=self.registry
        )
        self.watchers = self._gauge("watchers", "open watches")
        self.streams = self._gauge("streams", "open agent streams")

    def _jobs(self) -> None:
        """Counted by the leader alone, so that the sum over the nodes is the cluster's."""
        self.jobs = self._gauge("jobs", "jobs in the cluster")
        self.runs = self._gauge("runs", "runs under way")
        self.workers = self._gauge("workers", "sessions that serve jobs")
        self.occurrences = self._gauge("occurrences", "occurrences that are kept, ended ones too")
        self.occurrences_pending = self._gauge("occurrences_pending", "occurrences that have not started")
        self.switches = self._gauge("switches_in_force", "switches in force")
        self.kill_epoch = self._gauge("kill_epoch", "kills so far")
        self.scheduler_running = self._gauge("scheduler_running", "1 on the node that fires schedules")
        self.schedule_lag = self._gauge("schedule_lag_seconds", "how late the most overdue schedule is; 0 on followers")
        self.tzdata_mismatch = self._gauge("tzdata_mismatch", "1 while this node has other zone rules than the cluster")
        self._last_due_s = 0.0
        self.last_due = self._gauge("last_due_time_seconds", "UTC time of the latest due time that was dealt with here")
        self.outcomes = Counter(
            "tenure_occurrences_ended", "due times by outcome", ("outcome", "reason"), registry=self.registry
        )
        self.run_ends = Counter("tenure_runs_ended", "runs by how they ended", ("cause",), registry=self.registry)
        self.start_lateness = self._histogram(
            "run_start_lateness_seconds", "from the due time to the assignment of its first run", LATENESS_SECONDS
        )
        self.interrupt_seconds = self._histogram(
            "interrupt_acknowledged_seconds", "from an interrupt to its acknowledgement", LATENESS_SECONDS
        )

    def _machine(self) -> None:
        self.clock_skew = self._gauge("clock_skew_seconds", "largest difference of a peer's wall clock; 0 on followers")
        self.certificate_expires = self._gauge("peer_certificate_expires_timestamp_seconds", "0 without a certificate")
        self.loop_lag = self._gauge("event_loop_lag_seconds", "how late the event loop ran what was due, lately")

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"tenure_{name}", description, registry=self.registry)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"tenure_{name}", description, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tenure_{name}", description, buckets=buckets, registry=self.registry)

    def counted_elsewhere(self, name: str, description: str, read: Callable[[], int | Mapping[str, int]]) -> None:
        """Show a counter that is kept where the work is done. A mapping is by cause: a small, fixed set of words."""
        self.registry.register(_CountedElsewhere(f"tenure_{name}", description, read))

    # ---- what is told as it happens ------------------------------------------------------------------------------

    def request_done(self, service: str, method: str, code: str, seconds: float | None) -> None:
        """A gRPC call ended. ``service`` without its package; ``seconds`` is None for a stream: it means nothing."""
        service, method = self._known(service, method)
        self.requests.labels(service, method, code).inc()
        if seconds is not None:
            self.request_seconds.labels(service, method).observe(seconds)

    def _known(self, service: str, method: str) -> tuple[str, str]:
        if (service, method) in self._methods:
            return service, method
        if len(self._methods) >= METHODS_MAX:
            return "other", "other"
        self._methods.add((service, method))
        return service, method

    def turn_done(self, turn_s: float, sync_s: float) -> None:
        self.turn_seconds.observe(turn_s)
        if sync_s:
            self.sync_seconds.observe(sync_s)

    def due_times_ended(self, outcome: str, reason: str, count: int, due_s: float) -> None:
        """``reason`` may go on after a colon, or with the name of a switch."""
        said = reason.partition(":")[0]
        words = said.replace(" ", "_")
        label = next((each for each in (words, said.partition(" ")[0]) if each in REASONS), "other" if reason else "")
        self.outcomes.labels(outcome, label).inc(count)
        self._last_due_s = max(due_s, self._last_due_s)
        self.last_due.set(self._last_due_s)

    # The proposer's observer.

    def batch_proposed(self, items: int, size_bytes: int) -> None:
        self.batch_items.observe(items)
        self.batch_bytes.inc(size_bytes)

    def request_shed(self, cause: str) -> None:
        self.shed.labels(cause).inc()

    def proposal_failed(self, failure: str) -> None:
        self.failures.labels(failure).inc()

    def item_dropped(self, cause: str) -> None:
        self.forwarded_dropped.labels(cause).inc()

    def leader_learned(self) -> None:
        self.leader_changes.inc()

    # ---- exposition ------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        for refresh in self.before_scrape:
            refresh()
        return generate_latest(self.registry)
