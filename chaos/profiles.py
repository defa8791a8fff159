"""Profiles: which faults, sizes and timings a run is made of. Every seed draws its own shape from its profile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

MILLISECOND = 1_000
SECOND = 1_000_000

Range = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Everything about a run that its seed does not decide event by event. Times in microseconds."""

    nodes: int = 3
    duration_us: int = 20 * SECOND
    convergence_us: int = 30 * SECOND  # after all faults have ended, a new command is applied everywhere within this

    # network
    latency_us: Range = (200, 3_000)
    slow_latency_us: int = 60_000  # a quarter of the runs have a network that is up to this slow
    bytes_per_us: int = 100
    link_frames_max: int = 2_000
    redial_us: Range = (20 * MILLISECOND, 800 * MILLISECOND)
    idle_timeout_us: Range = (1 * SECOND, 4 * SECOND)
    replaced_links_deliver: bool = False

    # disk and life
    sync_us: Range = (100, 2_000)
    down_us: Range = (50 * MILLISECOND, 3 * SECOND)
    ideal_disk: bool = False
    cpu_us: Range = (50, 300)  # from a wake-up to the turn
    background_us: Range = (2 * MILLISECOND, 300 * MILLISECOND)
    drift_ppm: int = 100

    # faults: name -> weight; one is drawn every ``gap_us``
    faults: tuple[tuple[str, int], ...] = ()
    gap_us: Range = (100 * MILLISECOND, 1_200 * MILLISECOND)
    fault_us: Range = (50 * MILLISECOND, 2_500 * MILLISECOND)

    # workload
    clients: int = 4
    patience_us: int = 2 * SECOND  # after which a client does something else
    think_us: Range = (2 * MILLISECOND, 80 * MILLISECOND)
    command_bytes: Range = (20, 60)
    reads_per_thousand: int = 250
    application: str = "register"
    agents: int = 2  # beside those that ``clients`` says
    workers: int = 0
    job_count: int = 0
    switch_weight: int = 6

    # limits of the state
    starts_per_second: int = 200
    job_revisions: int = 20
    occurrences: int = 500_000

    # wall clocks: how far the hosts' are off at the beginning
    wall_skew_ms: int = 0
    wall_error_max_ms: int = 0  # the clocks of a majority are never more wrong than this; 0: they may be

    # the node
    heartbeat_ms: int = 100
    election_ms: Range = (800, 1_600)
    append_bytes_max: int = 4 << 20
    compact_entries: int = 50_000
    snapshot_chunk_bytes: int = 256 << 10

    # the library's own class
    stock_use_batch: bool = True
    stock_redial_us: Range = (0, 5 * SECOND)
    stock_dump_us: Range = (0, 0)  # how long its forked child writes a dump; 0: it is written at once


NET_FAULTS = (("reset", 30), ("hold", 20), ("isolate", 12), ("one_way", 8), ("cut", 8), ("split", 6), ("pause", 12))
LIFE_FAULTS = (("kill", 20), ("kill_in_step", 30))
SMALL_BATCHES = 150


@dataclass(frozen=True)
class Profile:
    about: str
    shape: Shape
    stock: bool = True  # the library's own class runs it too
    nodes: tuple[int, ...] = (3,)
    swarm: bool = True  # each seed leaves out some of the faults
    seconds: Range = (12, 20)
    tags: tuple[str, ...] = field(default=())

    def draw(self, rng: random.Random) -> Shape:
        def between(low: int, high: int) -> int:
            return low + int(rng.random() * (high - low + 1))

        faults = self.shape.faults
        if self.swarm and len(faults) > 2:
            faults = tuple(fault for fault in faults if rng.random() < 0.7) or faults
        slow_net = rng.random() < 0.25
        return replace(
            self.shape,
            nodes=self.nodes[between(0, len(self.nodes) - 1)],
            duration_us=between(*self.seconds) * SECOND,
            faults=faults,
            clients=between(2, 6) if self.swarm else self.shape.clients,
            latency_us=(1_000, self.shape.slow_latency_us) if slow_net else self.shape.latency_us,
            stock_use_batch=rng.random() < 0.5,
            compact_entries=self.shape.compact_entries * (1, 1, 3)[between(0, 2)],
        )


_SNAP = Shape(
    faults=(*NET_FAULTS, ("snapshot", 15), ("isolate", 20)),
    compact_entries=12,
    snapshot_chunk_bytes=60,
    append_bytes_max=400,
    think_us=(1 * MILLISECOND, 40 * MILLISECOND),
)

_JOBS = Shape(
    application="jobs",
    agents=1,
    workers=5,
    job_count=7,
    compact_entries=150,
    snapshot_chunk_bytes=8_000,
    drift_ppm=3_000,
    wall_skew_ms=300,
    starts_per_second=7,
    job_revisions=4,
    occurrences=60,
)

PROFILES: dict[str, Profile] = {
    "net": Profile(
        "the network only, 3 nodes, small batches", Shape(faults=NET_FAULTS, append_bytes_max=SMALL_BATCHES)
    ),
    "net5": Profile(
        "the network only, 5 nodes",
        Shape(faults=NET_FAULTS, append_bytes_max=SMALL_BATCHES),
        nodes=(5,),
        seconds=(8, 14),
    ),
    "sizes": Profile(
        "network, kills and power cuts; clusters of 1, 3, 5 and 7",
        Shape(faults=(*NET_FAULTS, *LIFE_FAULTS, ("power", 10)), compact_entries=60),
        nodes=(1, 3, 5, 7),
        seconds=(6, 10),
        stock=False,
    ),
    "crash": Profile(
        "network and kills; the disk keeps everything that was written",
        Shape(faults=(*NET_FAULTS, ("kill", 30)), append_bytes_max=SMALL_BATCHES, ideal_disk=True),
    ),
    "snap": Profile("network, constant compaction, snapshots in small chunks", _SNAP),
    "snapcrash": Profile(
        "the same, and kills on an ideal disk",
        replace(_SNAP, faults=(*_SNAP.faults, ("kill", 30), ("kill_in_snapshot", 20)), ideal_disk=True),
    ),
    "kill9": Profile(
        "kill -9 inside any storage step, ordinary sizes, compaction",
        Shape(faults=(*NET_FAULTS, *LIFE_FAULTS, ("snapshot", 10), ("kill_in_snapshot", 15)), compact_entries=60),
    ),
    "power": Profile(
        "power cuts of one machine and of all at once: what was not synced is lost",
        Shape(
            faults=(*NET_FAULTS, ("power", 30), ("power_all", 6), ("kill_in_step", 10), ("kill_in_snapshot", 10)),
            compact_entries=60,
        ),
    ),
    "stale": Profile(
        "many reconnections (stock: a replaced connection still delivers, as its own transport does)",
        Shape(
            faults=(("reset", 60), ("hold", 40), ("cut", 10), ("pause", 10)),
            append_bytes_max=SMALL_BATCHES,
            gap_us=(30 * MILLISECOND, 400 * MILLISECOND),
            redial_us=(1 * MILLISECOND, 100 * MILLISECOND),
            replaced_links_deliver=True,
        ),
    ),
    "bulk": Profile(
        "large commands, several batches behind",
        Shape(
            faults=(("isolate", 30), ("cut", 15), ("hold", 20), ("pause", 15), ("kill", 10), ("reset", 20)),
            command_bytes=(1_500, 6_000),
            append_bytes_max=1 << 16,
            think_us=(2 * MILLISECOND, 30 * MILLISECOND),
        ),
        seconds=(6, 10),
    ),
    "elections": Profile(
        "one election after the other: short lives of leaders and voters, lost disks, short timeouts",
        Shape(
            faults=(
                ("kill_voter", 60),
                ("kill", 40),
                ("power", 20),
                ("power_all", 4),
                ("isolate", 20),
                ("transfer", 15),
                ("hold", 15),
                ("wipe", 20),
            ),
            compact_entries=60,
            gap_us=(20 * MILLISECOND, 500 * MILLISECOND),
            down_us=(5 * MILLISECOND, 150 * MILLISECOND),
            fault_us=(50 * MILLISECOND, 600 * MILLISECOND),
            redial_us=(5 * MILLISECOND, 60 * MILLISECOND),
            heartbeat_ms=40,
            election_ms=(150, 170),
        ),
        nodes=(3, 3, 5),
        stock=False,
        seconds=(8, 12),
    ),
    "slow": Profile(
        "slow and full disks, leadership transfers",
        Shape(
            faults=(("slow_disk", 40), ("full_disk", 8), ("transfer", 20), *NET_FAULTS, ("kill_in_step", 10)),
            compact_entries=40,
        ),
        stock=False,
    ),
    "clock": Profile(
        "clocks that drift by half a percent and wall clocks that step by hours, pauses",
        Shape(
            faults=(("wall_step", 30), ("drift", 30), ("pause", 30), ("transfer", 10), *NET_FAULTS),
            drift_ppm=5_000,
        ),
        stock=False,
    ),
    "wipe": Profile(
        "one machine loses its disk and comes back empty; network, kills",
        Shape(faults=(("wipe", 30), ("kill", 10), ("power", 10), *NET_FAULTS), compact_entries=40),
        nodes=(3, 3, 5),
        stock=False,
    ),
    "core": Profile(
        "the product's proposer and state machine under simulated agents, everything that can go wrong",
        Shape(
            application="core",
            faults=(
                *NET_FAULTS,
                *LIFE_FAULTS,
                ("power", 10),
                ("power_all", 3),
                ("slow_disk", 10),
                ("transfer", 12),
                ("snapshot", 8),
                ("wall_step", 8),
                ("drift", 8),
                ("wipe", 6),
                ("full_disk", 4),
            ),
            compact_entries=100,
            snapshot_chunk_bytes=4_000,
            drift_ppm=4_000,
        ),
        nodes=(3, 3, 5),
        stock=False,
        seconds=(10, 16),
    ),
    "jobs": Profile(
        "scheduled jobs on the product's scheduler, proposer and state machine, everything that can go wrong",
        replace(
            _JOBS,
            faults=(
                *NET_FAULTS,
                *LIFE_FAULTS,
                ("power", 10),
                ("power_all", 4),
                ("slow_disk", 8),
                ("transfer", 12),
                ("snapshot", 10),
                ("wall_nudge", 10),
                ("wall_step", 4),
                ("wall_step_all", 4),
                ("drift", 8),
                ("wipe", 5),
                ("full_disk", 3),
            ),
        ),
        nodes=(3, 3, 5),
        stock=False,
        seconds=(14, 24),
    ),
    "jobs-clock": Profile(
        "scheduled jobs while wall clocks step by seconds and by hours, stop, and disagree",
        replace(
            _JOBS,
            faults=(
                ("wall_nudge", 20),
                ("wall_step", 15),
                ("wall_step_all", 20),
                ("wall_stop", 15),
                ("drift", 10),
                ("transfer", 15),
                ("pause", 10),
                ("kill", 10),
                ("power_all", 4),
                ("isolate", 8),
                ("snapshot", 8),
            ),
            wall_skew_ms=4_000,
            switch_weight=2,
        ),
        nodes=(1, 3, 3, 5),
        stock=False,
        seconds=(14, 24),
    ),
    "jobs-wrong-clock": Profile(
        "scheduled jobs while one machine's wall clock is wrong by hours, and everybody can measure it",
        replace(
            _JOBS,
            faults=(("wall_of_one", 40), ("transfer", 30), ("reset", 10), ("snapshot", 5)),
            wall_error_max_ms=12_000,
            switch_weight=2,
        ),
        nodes=(3, 3, 5),
        stock=False,
        swarm=False,
        seconds=(14, 24),
    ),
    "jobs-kill": Profile(
        "scheduled jobs and switches: kills, pauses and drains all the time, with network faults and crashes",
        replace(
            _JOBS,
            faults=(*NET_FAULTS, ("kill", 20), ("power", 8), ("transfer", 10), ("snapshot", 10)),
            fault_us=(50 * MILLISECOND, 5 * SECOND),
            switch_weight=30,
            agents=2,
        ),
        stock=False,
        seconds=(18, 28),
    ),
    "quiet": Profile("no fault at all", Shape(), swarm=False, seconds=(6, 8)),
}
