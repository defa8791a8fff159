"""``python -m bench``: starts three sidecars, measures, prints a table, stops everything."""

from __future__ import annotations

import argparse
import json
import sys

import uvloop

from bench import acquire
from bench.sidecars import three_sidecars


async def measure(seconds: float) -> tuple[float, list[acquire.Figure]]:
    async with three_sidecars() as addresses:
        leader = await acquire.leader_of(addresses["n1"])
        follower = next(node for node in addresses if node != leader)
        figures = []
        for where, node in (("leader", leader), ("follower", follower)):
            for clients in (1, 64):
                figures.append(await acquire.unary(addresses[node], clients, seconds, f"unary, {where}"))
                figures.append(await acquire.stream(addresses[node], clients, seconds, f"stream, {where}"))
        return acquire.fdatasync_ms(), figures


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=acquire.__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement [3]")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    floor_ms, figures = uvloop.run(measure(arguments.seconds))
    if arguments.json:
        print(json.dumps({"fdatasync_ms": floor_ms, "figures": [vars(figure) for figure in figures]}))
        return 0
    print(f"bare append and fdatasync: {floor_ms:.2f} ms (median); acquire p50 is given as a multiple of it too\n")
    print(f"{'':<18}{'clients':>8}{'cycles/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'x fdatasync':>13}")
    for f in figures:
        times = f"{f.p50_ms:>9.2f}{f.p99_ms:>9.2f}{f.p50_ms / floor_ms:>13.1f}"
        print(f"{f.what:<18}{f.clients:>8}{f.cycles_per_s:>10.0f}{times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
