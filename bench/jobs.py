"""How late due jobs start, how many start in a second, and how many are done twice when a worker stands still.

The same one-shot jobs, on the same machine, one contestant after another, each with three worker processes:

* late: from the due time to the first line of the job's function, for 1, 100 and 1,000 jobs due at the same time;
* started twice: due times that more than one worker started although nothing was wrong;
* the fault: while its jobs are at work, one worker is stopped (SIGSTOP) for longer than its lock, then goes on. Doubled
  are the due times with two effects in the ledger. Never: those with none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from bench import tenure_peer, work
from bench.apscheduler_peer import OnRedis, OnSQLAlchemy
from bench.contestants import LOCK_MS, WORKERS, Contestant, NotMeasured, workers_of
from bench.redis_peer import Lock

CONTESTANTS: tuple[type[Contestant], ...] = (tenure_peer.Tenure, OnSQLAlchemy, OnRedis, Lock)
# Jobs due at once, how often, and how far apart in milliseconds.
LOADS = ((1, 20, 600), (100, 3, 3_000), (1_000, 1, 0))
STARTED_WITHIN_S = 60.0
FAULT_JOBS = 30
FAULT_WORK_MS = 1_000
FAULT_AFTER_MS = 400
FAULT_STOPPED_MS = 2 * LOCK_MS
FAULT_SETTLED_WITHIN_S = 30.0
POPULATION = 10_000


@dataclass(frozen=True)
class Lateness:
    """Of one load. ``never`` is how many due times had not started after a minute."""

    at_once: int
    p50_ms: float
    p99_ms: float
    per_second: float
    twice: int
    never: int


@dataclass(frozen=True)
class Fault:
    runs: int
    doubled: int
    never: int
    refused: int  # stale effects that the ledger turned down
    stopped: int  # runs that were at work on the worker when it was stopped


@dataclass
class Figures:
    name: str
    how: str
    lateness: list[Lateness] = field(default_factory=list)
    fault: Fault | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Population:
    """With so many jobs: 1,000 of them due at once, and single calls, p50 and p99 in milliseconds."""

    jobs: int
    tick: Lateness
    add_ms: tuple[float, float]
    explain_ms: tuple[float, float]


def plan(load: tuple[int, int, int], lead_s: float, prefix: str, choice: random.Random) -> dict[str, int]:
    """Job names and due times: ``load`` jobs at once, some times over, each time at another fraction of a second."""
    at_once, times, apart_ms = load
    first_ms = int((time.time() + lead_s) * 1_000)
    due: dict[str, int] = {}
    for number in range(times):
        at_ms = first_ms + number * apart_ms + choice.randrange(500)
        due |= {f"{prefix}-{number}-{each}": at_ms for each in range(at_once)}
    return due


def judge(at_once: int, due_ms: dict[str, int], told: work.Told) -> Lateness:
    """Where nothing started at all: infinitely late."""
    starts = {name: sorted(told.starts[name]) for name in due_ms if name in told.starts}
    late = sorted(each[0] - due_ms[name] for name, each in starts.items()) or [math.inf]
    # Groups that are due at different times are counted by themselves: from the due time to the last start.
    spans = [
        max((starts[name][0] - at_ms for name, its in due_ms.items() if its == at_ms and name in starts), default=0.0)
        for at_ms in sorted(set(due_ms.values()))
    ]
    seconds = sum(spans) / 1_000
    return Lateness(
        at_once=at_once,
        p50_ms=share_of(late, 0.50),
        p99_ms=share_of(late, 0.99),
        per_second=len(starts) / seconds if seconds else 0.0,
        twice=sum(1 for each in starts.values() if len(each) > 1),
        never=len(due_ms) - len(starts),
    )


def share_of(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share) - 1)]


async def until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def start_all(contestant: Contestant, due_ms: dict[str, int], work_ms: int) -> None:
    """Arrange jobs; ``NotMeasured`` when the first was due before all were arranged."""
    await contestant.arrange(due_ms, work_ms)
    if time.time() * 1_000 > min(due_ms.values()):
        raise NotMeasured(f"{len(due_ms)} jobs could not be arranged within {contestant.lead_s:.0f} s")


async def lateness(contestant: Contestant, load: tuple[int, int, int], choice: random.Random) -> Lateness:
    due_ms = plan(load, contestant.lead_s, f"late-{load[0]}", choice)
    await start_all(contestant, due_ms, 0)
    last_s = max(due_ms.values()) / 1_000 - time.time()

    def all_started() -> bool:
        return due_ms.keys() <= work.read(contestant.folder).starts.keys()

    await until(all_started, last_s + STARTED_WITHIN_S)
    await asyncio.sleep(1.0)  # for whoever starts the same once more
    return judge(load[0], due_ms, work.read(contestant.folder))


async def fault(contestant: Contestant, choice: random.Random) -> Fault:
    """Stop a worker in the middle of its runs for longer than its lock, and let it go on."""
    due_ms = plan((FAULT_JOBS, 1, 0), contestant.lead_s, "fault", choice)
    await start_all(contestant, due_ms, FAULT_WORK_MS)
    begun_before = {name: work.read(contestant.folder).begun.get(name, 0) for name in WORKERS}

    def busy(name: str) -> int:
        told = work.read(contestant.folder)
        return told.begun.get(name, 0) - told.ended.get(name, 0)

    due_in_s = min(due_ms.values()) / 1_000 - time.time()
    if not await until(lambda: any(busy(name) for name in WORKERS), due_in_s + STARTED_WITHIN_S):
        raise NotMeasured("no worker began anything")
    await asyncio.sleep(FAULT_AFTER_MS / 1_000)
    victim = max(WORKERS, key=busy)
    contestant.workers[victim].signal(signal.SIGSTOP)
    stopped = busy(victim)
    await asyncio.sleep(FAULT_STOPPED_MS / 1_000)
    contestant.workers[victim].signal(signal.SIGCONT)

    def settled() -> bool:
        told = work.read(contestant.folder)
        over = all(told.begun.get(name, 0) == told.ended.get(name, 0) for name in WORKERS if name in told.begun)
        return over and due_ms.keys() <= work.effects(contestant.folder).keys()

    await until(settled, FAULT_SETTLED_WITHIN_S)
    await asyncio.sleep(LOCK_MS / 1_000)  # for whoever does the same once more
    counts = work.effects(contestant.folder)
    told = work.read(contestant.folder)
    assert told.begun[victim] >= begun_before[victim]
    return Fault(
        runs=FAULT_JOBS,
        doubled=sum(1 for name in due_ms if counts.get(name, 0) > 1),
        never=sum(1 for name in due_ms if name not in counts),
        refused=told.refused,
        stopped=stopped,
    )


async def measure(kind: type[Contestant], loads: tuple[tuple[int, int, int], ...], seed: int) -> Figures:
    """One contestant, whole. What cannot be measured is noted."""
    figures, choice = Figures(kind.name, kind.how), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            contestant = kind(Path(folder))
            async with workers_of(contestant):
                for load in loads:
                    figures.lateness.append(await lateness(contestant, load, choice))
                figures.fault = await fault(contestant, choice)
                for worker in contestant.workers.values():
                    if not worker.running:
                        figures.notes.append(f"{worker.name} ended by itself: {worker.log_tail(1)[:160]}")
        except NotMeasured as why:
            figures.notes.append(f"not measured{' further' if figures.lateness else ''}: {why}")
    return figures


async def measure_population(jobs: int, seed: int) -> Population:
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        contestant = tenure_peer.Tenure(Path(folder))
        async with workers_of(contestant):
            specs = {f"job-{number}": tenure_peer.once(tenure_peer.FAR_MS + number) for number in range(jobs)}
            await contestant.apply(specs)
            adding, explaining = await tenure_peer.time_calls(contestant, list(specs), tenure_peer.FAR_MS)
            tick = await lateness(contestant, (1_000, 1, 0), choice)
    both = ((share_of(each, 0.5), share_of(each, 0.99)) for each in (adding, explaining))
    return Population(jobs, tick, *both)


# ---- the report


def show(all_figures: list[Figures], population: Population | None) -> None:
    first = all_figures[0]
    headings = (("p50 ms", 11), ("x", 7), ("p99 ms", 11), ("x", 7), ("starts/s", 10), ("x", 7), ("twice", 7))
    print(f"from the due time to the start of the work; x: how many times the figure of {first.name}")
    print(f"{'':<26}{'due at once':>12}" + "".join(f"{heading:>{width}}" for heading, width in headings))
    for row, (at_once, _, _) in enumerate(LOADS):
        for figures in all_figures:
            if row < len(figures.lateness) and row < len(first.lateness):
                print(line(figures.name, figures.lateness[row], first.lateness[row]))
            else:
                print(f"{figures.name:<26}{at_once:>12,}  not measured")
    print(f"\na worker is stopped for {FAULT_STOPPED_MS:,} ms while its runs ({FAULT_WORK_MS:,} ms each) are at work")
    print(f"{'':<26}{'due':>12}{'at work there':>15}{'doubled':>9}{'never':>7}{'stale refused':>15}")
    for figures in all_figures:
        f = figures.fault
        values = f"{f.runs:>12}{f.stopped:>15}{f.doubled:>9}{f.never:>7}{f.refused:>15}" if f else "  not measured"
        print(f"{figures.name:<26}{values}")
    print()
    for figures in all_figures:
        print(f"{figures.name}: {figures.how}")
        for note in figures.notes:
            print(f"  {note}")
    if population:
        show_population(population)


def line(name: str, measured: Lateness, of: Lateness) -> str:
    m = measured
    rate, rate_x = f"{m.per_second:>10,.0f}", ratio(m.per_second, of.per_second)
    if m.at_once == 1:  # one at a time says nothing about a rate
        rate, rate_x = f"{'-':>10}", f"{'-':>7}"
    never = f"  {m.never} never started" if m.never else ""
    late = f"{m.p50_ms:>11,.1f}{ratio(m.p50_ms, of.p50_ms)}{m.p99_ms:>11,.1f}{ratio(m.p99_ms, of.p99_ms)}"
    return f"{name:<26}{m.at_once:>12,}{late}{rate}{rate_x}{m.twice:>7,}{never}"


def ratio(value: float, of: float) -> str:
    return f"{value / of:>7.2f}" if of else f"{'-':>7}"


def show_population(p: Population) -> None:
    print(f"\nTenure with {p.jobs:,} jobs")
    print(f"{'':<26}{'p50 ms':>11}{'p99 ms':>11}")
    for what, (p50_ms, p99_ms) in (("add one job", p.add_ms), ("explain", p.explain_ms)):
        print(f"{what:<26}{p50_ms:>11,.1f}{p99_ms:>11,.1f}")
    late = f"{p.tick.p50_ms:>11,.1f}{p.tick.p99_ms:>11,.1f}"
    print(f"{'1,000 due at once':<26}{late}   ({p.tick.never} never, {p.tick.twice} twice)")


def main(arguments: list[str]) -> int:
    """``python -m bench jobs``. Exit status 1 when Tenure itself could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="contestants whose name starts so")
    parser.add_argument("--at-once", type=int, default=LOADS[-1][0], help="the largest load to measure [1000]")
    parser.add_argument("--population", type=int, default=POPULATION, help="jobs of the last part; 0: leave it out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    loads = tuple(load for load in LOADS if load[0] <= options.at_once)
    chosen = [k for k in CONTESTANTS if not options.only or any(k.name.startswith(name) for name in options.only)]
    all_figures = []
    for kind in chosen:
        print(f"measuring {kind.name} ...", file=sys.stderr)
        all_figures.append(uvloop.run(measure(kind, loads, options.seed)))
    population = None
    if options.population and tenure_peer.Tenure in chosen:
        print(f"measuring {options.population:,} jobs ...", file=sys.stderr)
        with contextlib.suppress(NotMeasured):
            population = uvloop.run(measure_population(options.population, options.seed))
    if options.json:
        both = {"contestants": [asdict(f) for f in all_figures], "population": population and asdict(population)}
        print(json.dumps(both))
    else:
        show(all_figures, population)
    ours = [figures for figures in all_figures if figures.name == tenure_peer.Tenure.name]
    return 1 if ours and ours[0].fault is None else 0
