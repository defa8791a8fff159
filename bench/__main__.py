"""``python -m bench [acquire | jobs]``: starts what it measures, prints a table, stops everything."""

from __future__ import annotations

import argparse
import sys

from bench import acquire, jobs

PARTS = {"acquire": acquire.main, "jobs": jobs.main}


def main(arguments: list[str]) -> int:
    """Entry point. Without a part: ``acquire``, with what follows as its options."""
    if not arguments or (arguments[0] not in PARTS and arguments[0] not in ("-h", "--help")):
        return acquire.main(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench", description="Speed, beside something else.")
    parts = parser.add_subparsers(dest="part", required=True, metavar="acquire|jobs")
    parts.add_parser("acquire", help="what acquiring and releasing a lease costs", add_help=False)
    parts.add_parser("jobs", help="how late jobs start and how many run twice, beside other schedulers", add_help=False)
    chosen, rest = parser.parse_known_args(arguments)
    return PARTS[chosen.part](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
