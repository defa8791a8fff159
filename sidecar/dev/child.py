"""Becomes another program that cannot outlive the process that started it.

Run as ``python -I -S child.py <pid of the parent> <program> <arguments>``. On Linux the kernel is asked to kill this
process when its parent dies, however the parent dies (the request survives ``exec``). Elsewhere only an orderly end
of the parent ends the child. A script of its own, because ``preexec_fn`` would fork a process full of gRPC threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
