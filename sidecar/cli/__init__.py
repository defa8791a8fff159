"""The ``tenure`` command: parse, call, render. One module for each group of commands; heavy imports inside functions.

Exit statuses, the same for every command unless its help says more:

==  ============================================================================================
0   done
1   refused or failed; it did not happen, and will not happen later
2   the command line or the configuration is wrong
3   not known: it may have happened. Ask what is so before you repeat it
4   nothing was done, because no sidecar, leader or majority could be reached
130 interrupted
==  ============================================================================================
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``tenure`` command."""
    if sys.argv[1:2] == ["serve"]:
        stop_at_once_until_served()
    from sidecar.cli.app import app
    from sidecar.cli.failures import INTERRUPTED, render

    try:
        app(prog_name="tenure")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        failure = render(error, sys.argv)
        if failure is None:
            raise
        sys.exit(failure)


def stop_at_once_until_served() -> None:
    """Before the imports, which take a good part of a second: a signal that comes before the sidecar listens to
    signals itself (server.py, before it opens anything) ends the process as it would later, with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
