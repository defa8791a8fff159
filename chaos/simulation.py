"""One run: a world, a cluster in it, clients, faults; then calm, and everything must come together again.

``simulate(profile, seed)`` is the whole story of a run. ``main`` is ``python -m chaos sim``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chaos.checkers import Checkers, Violation
from chaos.disk import Disk, LogVolume, Volume
from chaos.faults import Faults
from chaos.network import Network
from chaos.profiles import MILLISECOND, PROFILES, SECOND, Profile, Shape
from chaos.workload import RegisterClient
from chaos.world import Host, HostClock, HostState, Process, World

if TYPE_CHECKING:
    from chaos.core import Ledger
    from chaos.operators import JobPopulation

EXIT_CLEAN, EXIT_SAFETY, EXIT_USAGE, EXIT_LIVENESS, EXIT_CODE = 0, 1, 2, 3, 4

_POLL_US = 100 * MILLISECOND
# The full hour, and ends of gaps and folds: New York, Berlin, Lord Howe.
_MOMENTS_S = (1_700_002_800, 1_710_054_000, 1_730_613_600, 1_711_846_800, 1_729_990_800, 1_712_415_600, 1_728_142_200)


@dataclass
class Outcome:
    """What a run came to."""

    profile: str
    seed: int
    stock: bool
    violations: list[Violation]
    virtual_us: int
    acks: int
    reads: int
    elections: int
    frames: int
    digest: str
    reached: dict[str, int]
    trace: list[str]

    @property
    def status(self) -> int:
        return worst([violation.severity for violation in self.violations])


def worst(statuses: Sequence[int]) -> int:
    """Safety before a crash of the code before liveness."""
    for status in (EXIT_SAFETY, EXIT_CODE, EXIT_LIVENESS):
        if status in statuses:
            return status
    return EXIT_CLEAN


class Simulation:
    """Builds the world of one seed and runs it."""

    def __init__(self, profile: Profile, seed: int, *, stock: bool, verbose: bool = False) -> None:
        self.stock = stock
        self.world = World(seed, Shape(), verbose=verbose)
        self.world.shape = self.shape = self._shape(profile)
        self.world.network = Network(self.world, self.shape)
        self.world.checkers = Checkers(self.world)
        self.core = self.shape.application in ("core", "jobs")
        self.ledger: Ledger | None = None  # of the applications core and jobs
        self.population: JobPopulation | None = None
        self._set_epoch()
        boot = self._boot()
        for number in range(self.shape.nodes):
            name = f"n{number + 1}"
            clock = HostClock(self.world, self.world.between(1, 1_000_000) * MILLISECOND, self.world.epoch_us)
            if self.shape.wall_skew_ms:
                skew_ms = self.world.between(-self.shape.wall_skew_ms, self.shape.wall_skew_ms)
                clock.set_wall(clock.wall_us() + skew_ms * MILLISECOND)
            clock.drift(self.world.between(-self.shape.drift_ppm, self.shape.drift_ppm))
            disk = Disk(self.world, name, self._volume(name))
            self.world.hosts[name] = Host(self.world, name, disk, clock, boot)
        self.faults = Faults(self.world)

    def _set_epoch(self) -> None:
        """Jobs are due by wall time: shortly before a minute, an hour, or a change of the clocks in some zone."""
        self.world.wall_error_max_ms = self.shape.wall_error_max_ms
        if self.shape.application == "jobs":
            moment_s = _MOMENTS_S[self.world.between(0, len(_MOMENTS_S) - 1)]
            self.world.epoch_us = moment_s * SECOND - self.world.between(2 * SECOND, 40 * SECOND)

    def _shape(self, profile: Profile) -> Shape:
        shape = profile.draw(self.world.rng)
        if self.stock:
            return replace(shape, redial_us=shape.redial_us if shape.replaced_links_deliver else shape.stock_redial_us)
        return replace(shape, replaced_links_deliver=False)  # our transport's contract: a replaced connection is dead

    def _volume(self, name: str) -> Volume:
        if self.stock:
            from chaos.stock import StockVolume

            return StockVolume(name)
        return LogVolume(name, self.world.checkers, ideal=self.shape.ideal_disk)

    def _boot(self) -> Callable[[Host], Process]:
        if self.stock:
            from chaos.stock import StockProcess

            return StockProcess
        if self.core:
            from chaos.core import CoreProcess, Ledger

            ledger = self.ledger = Ledger(self.world)
            return lambda host: CoreProcess(host, ledger)
        from chaos.process import RegisterProcess

        return RegisterProcess

    # ---- the story

    def run(self) -> None:
        for host in self.world.hosts.values():
            self.world.after(self.world.between(0, 300 * MILLISECOND), host.boot)
        if self.core:
            self._populate_with_agents()
        else:
            for number in range(self.shape.clients):
                RegisterClient(self.world, f"c{number + 1}").start()
        self.world.after(2 * SECOND, self.faults.start)
        self.world.run_until(self.shape.duration_us)
        self._heal()
        self._converge()

    def _populate_with_agents(self) -> None:
        from chaos.agents import populate

        assert self.ledger is not None
        self.world.documents = {}
        if self.shape.application == "core":
            populate(self.world, self.ledger)
            return
        from chaos.job_ledger import JobLedger
        from chaos.operators import JobPopulation

        self.ledger.jobs = JobLedger(self.world)
        self.population = JobPopulation(self.world, self.ledger)
        self.population.start()

    def _heal(self) -> None:
        """All faults end: whatever was stopped runs, whatever was cut is whole, disks and networks are ordinary."""
        world = self.world
        world.note("world", "all faults end")
        world.calm = True
        world.network.heal()
        for host in world.hosts.values():
            host.disk.disarm()
            host.disk.full = False
            host.disk.sync_us = self.shape.sync_us
            if self.population is not None:
                host.clock.set_wall(world.epoch_us + world.now_us + world.between(-100, 100) * MILLISECOND)
            host.resume()
            if host.state is HostState.DOWN:
                host.boot()

    def _converge(self) -> None:
        """A new command must be applied on all nodes within the bound; then all must be equal."""
        world = self.world
        end_us = world.now_us + self.shape.convergence_us
        probe = world.commands + 1
        world.commands += 1
        asked = 0
        while world.now_us < end_us:
            if asked % 10 == 0:
                self._propose_everywhere(probe)
            asked += 1
            world.run_until(world.now_us + _POLL_US)
            if self._converged(probe):
                world.note(
                    "world", f"converged {(world.now_us - end_us + self.shape.convergence_us) // MILLISECOND} ms later"
                )
                if self.population is not None:
                    self._end_of_jobs(self.population)
                else:
                    self._compare()
                if self.core:
                    self._nothing_leaks()
                return
        state = {
            host.name: (host.state.value, host.process.applied_index() if host.process else None)
            for host in world.hosts.values()
        }
        world.checkers.violation(
            "no-convergence", "world", f"{self.shape.convergence_us // SECOND} s after the heal: {state}"
        )
        self._compare_acknowledged()

    def _end_of_jobs(self, population: JobPopulation) -> None:
        """What is due is dealt with; then, with nothing due any more, every occurrence comes to its end."""
        assert self.ledger is not None and self.ledger.jobs is not None
        world, ledger = self.world, self.ledger.jobs
        wall_ms = world.true_wall_ms()
        if not self._within(30 * SECOND, lambda: not ledger.unsettled(wall_ms)):
            world.checkers.violation("stalled", "world", f"not settled 30 s later: {ledger.unsettled(wall_ms)[:5]}")
        population.tidy_up()
        if not self._within(60 * SECOND, population.tidy):
            world.checkers.violation("stuck", "world", "schedules could not be ended within a minute")
        if not self._within(150 * SECOND, lambda: not ledger.unfinished()):
            world.checkers.violation("stuck", "world", f"not ended 150 s later: {ledger.unfinished()[:5]}")
        population.leave()

    def _within(self, longest_us: int, true: Callable[[], bool]) -> bool:
        end_us = self.world.now_us + longest_us
        while not true():
            if self.world.now_us >= end_us:
                return False
            self.world.run_until(self.world.now_us + _POLL_US)
        return True

    def _nothing_leaks(self) -> None:
        """All agents have gone: their sessions, leases and places in line must end, on all nodes."""
        from chaos.core import CoreProcess

        counts: dict[str, int] = {}
        for _ in range(40):
            self.world.run_until(self.world.now_us + SECOND)
            processes = [host.process for host in self.world.hosts.values() if isinstance(host.process, CoreProcess)]
            leftovers = [process.leftovers() for process in processes]
            level = len({process.applied_index() for process in processes}) == 1
            if len(processes) == len(self.world.hosts) and level and not any(leftovers):
                self._compare()
                jobs = None if self.ledger is None else self.ledger.jobs
                for process in processes:
                    if jobs is not None:
                        jobs.compare("world", process.machine)
                return
            counts = next((each for each in leftovers if each), counts)
        self.world.checkers.violation("leak", "world", f"40 s after the last agent had gone: {counts}")

    def _propose_everywhere(self, probe: int) -> None:
        for host in self.world.hosts.values():
            process = host.process
            if host.running and process is not None and not process.holds(probe):
                host.enter(lambda process=process: process.propose(probe, lambda _: None))  # type: ignore[misc]

    def _converged(self, probe: int) -> bool:
        processes = [host.process for host in self.world.hosts.values()]
        if any(process is None or not process.holds(probe) for process in processes):
            return False
        if self.population is not None:
            return True  # those who work go on, and the nodes are never level for long
        indexes = [process.applied_index() for process in processes if process is not None]
        return min(indexes) == max(indexes)

    def _compare(self) -> None:
        checkers = self.world.checkers
        digests = {host.name: host.process.digest() for host in self.world.hosts.values() if host.process}
        if len(dict.fromkeys(digests.values())) > 1:
            checkers.violation("digest", "world", f"states differ at the end: {digests}")
        self._compare_acknowledged()

    def _compare_acknowledged(self) -> None:
        """Whoever has applied the most must have all that was acknowledged so far; once converged, everything."""
        running = [host for host in self.world.hosts.values() if host.process is not None]
        if not running:
            return
        most = max(running, key=lambda host: host.process.applied_index() if host.process else 0)
        assert most.process is not None
        far = most.process.applied_index()
        acked = self.world.checkers.acked
        lost = [command for command, index in acked.items() if index <= far and not most.process.holds(command)]
        if lost:
            text = f"{len(lost)} of {len(acked)} acknowledged commands are gone: {lost[:5]}"
            self.world.checkers.violation("acked-lost", most.name, text)


Script = Callable[[World], None]  # plans what happens at which time, before the run begins


def simulate(
    profile: str | Profile, seed: int, *, stock: bool = False, verbose: bool = False, script: Script | None = None
) -> Outcome:
    """Run one seed of a profile, to its end, whatever is found on the way."""
    known = PROFILES[profile] if isinstance(profile, str) else profile
    simulation = Simulation(known, seed, stock=stock, verbose=verbose)
    world = simulation.world
    if script is not None:
        script(world)
    with _quiet_logs(), _surroundings(stock):
        simulation.run()
    return Outcome(
        profile=profile if isinstance(profile, str) else "of a test",
        seed=seed,
        stock=stock,
        violations=list(world.checkers.violations.values()),
        virtual_us=world.now_us,
        acks=world.checkers.acks,
        reads=world.checkers.reads,
        elections=world.checkers.elections,
        frames=world.network.frames,
        digest=world.digest(),
        reached=world.reached,
        trace=list(world.trace),
    )


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Nodes under faults warn all the time; what a run came to is in its trace."""
    logger = logging.getLogger("tenure")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _surroundings(stock: bool) -> AbstractContextManager[None]:
    if not stock:
        return nullcontext()
    from chaos.stock import library_in_the_world

    return library_in_the_world()


# ---- the command line


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    statuses: list[int] = []
    for name in options.profiles:
        statuses.append(_campaign(name, options))
    return worst(statuses)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m chaos sim",
        description="Deterministic simulation of whole nodes: virtual clock, network and disk. A seed is a bug report.",
        epilog="exit status: 0 clean, 1 a safety violation, 2 usage, 3 a liveness violation only, 4 the code raised. "
        "profiles: " + "; ".join(f"{name} ({profile.about})" for name, profile in PROFILES.items()),
    )
    parser.add_argument("--seeds", default="0-9", help="a range such as 0-199")
    parser.add_argument("--seed", type=int, help="a single seed")
    parser.add_argument("--profile", default="all", help="comma list of profiles, or all")
    parser.add_argument("--stock", action="store_true", help="run the library's own class instead of ours")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the trace of each run")
    parser.add_argument("--digest", action="store_true", help="print the digest of each run")
    parser.add_argument("--coverage", action="store_true", help="print how often the runs came to where bugs live")
    options = parser.parse_args(arguments)
    options.profiles = _profiles(parser, options.profile, options.stock)
    if options.seed is not None:
        options.seed_list = [options.seed]
    else:
        options.seed_list = _seeds(parser, options.seeds)
    return options


def _profiles(parser: argparse.ArgumentParser, wanted: str, stock: bool) -> list[str]:
    if wanted == "all":
        return [name for name, profile in PROFILES.items() if profile.stock or not stock]
    names = wanted.split(",")
    for name in names:
        if name not in PROFILES:
            parser.error(f"no profile {name!r}; there are: {', '.join(PROFILES)}")
        if stock and not PROFILES[name].stock:
            parser.error(f"profile {name} needs what the library's own class does not have")
    return names


def _seeds(parser: argparse.ArgumentParser, text: str) -> list[int]:
    first, _, last = text.partition("-")
    try:
        seeds = list(range(int(first), int(last or first) + 1))
    except ValueError:
        parser.error(f"not a range of seeds: {text!r} (0-199, or 7)")
    if not seeds:
        parser.error(f"an empty range of seeds: {text!r}")
    return seeds


def _campaign(name: str, options: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    kinds: dict[str, int] = {}
    failed: list[Outcome] = []
    statuses: list[int] = []
    reached: dict[str, int] = {}
    virtual_us = acks = reads = elections = 0
    for seed in options.seed_list:
        outcome = simulate(name, seed, stock=options.stock, verbose=options.verbose)
        virtual_us += outcome.virtual_us
        acks, reads, elections = acks + outcome.acks, reads + outcome.reads, elections + outcome.elections
        statuses.append(outcome.status)
        for what, count in outcome.reached.items():
            reached[what] = reached.get(what, 0) + count
        for violation in outcome.violations:
            kinds[violation.kind] = kinds.get(violation.kind, 0) + 1
        if outcome.violations:
            outcome.trace = outcome.trace if options.verbose or len(options.seed_list) == 1 else []
            failed.append(outcome)
        if options.verbose:
            print("\n".join(outcome.trace))
        if options.digest:
            print(f"{name} seed {seed}: digest {outcome.digest}")
    wall_s = time.perf_counter() - started_s
    found = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"
    print(
        f"{name:<10} {'stock ' if options.stock else ''}seeds {len(options.seed_list)}, violations: {found}; "
        f"{virtual_us / 3.6e9:.2f} virtual hours, {acks} acks, {reads} reads, {elections} elections, {wall_s:.1f} s",
        flush=True,
    )
    if options.coverage:
        print("           " + ", ".join(f"{what} {count}" for what, count in sorted(reached.items())))
    _report(failed, options)
    return worst(statuses)


_FAILURES_SHOWN = 5


def _report(failed: list[Outcome], options: argparse.Namespace) -> None:
    for outcome in failed[:_FAILURES_SHOWN]:
        for violation in outcome.violations:
            text = violation.text if len(options.seed_list) == 1 else violation.text.splitlines()[0]
            print(
                f"  seed {outcome.seed} at {violation.at_us / SECOND:.3f} s, {violation.host}: {violation.kind}: {text}"
            )
        stock = " --stock" if options.stock else ""
        print(f"    python -m chaos sim --profile {outcome.profile} --seed {outcome.seed} -v{stock}")
    others = failed[_FAILURES_SHOWN:]
    if others:
        print(f"  and {len(others)} more: {', '.join(str(outcome.seed) for outcome in others)}")


def collect_garbage_rarely() -> None:
    """A run makes many small objects and few cycles; the default thresholds cost a fifth of the time."""
    gc.set_threshold(50_000, 20, 20)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
