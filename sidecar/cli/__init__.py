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

import sys


def main() -> None:
    """Entry point of the ``tenure`` command."""
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
