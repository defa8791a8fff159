"""``python -m chaos sim`` (deterministic simulation) and ``python -m chaos smoke`` (real processes, one minute)."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Finds out whether Tenure keeps its promises.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="sim|smoke")
    commands.add_parser("sim", help="whole nodes in virtual time, one seed after another", add_help=False)
    commands.add_parser(
        "smoke", help="three sidecars and three agents, kills and partitions, three counts", add_help=False
    )
    options, rest = parser.parse_known_args(arguments)
    if options.command == "sim":
        from chaos import simulation

        simulation.collect_garbage_rarely()
        return simulation.main(rest)
    from chaos import smoke

    return int(smoke.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
