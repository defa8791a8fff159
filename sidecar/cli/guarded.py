"""Becomes another program that ends in time, even if the process that started it cannot see to that.

Run as ``python -I -S guarded.py <pid of the parent> <pipe> <group or alone> <program> <arguments>``. The parent says
through the pipe until when the program may run: numbers of seconds on the clock of ``now`` in lines, the last one
counts, and ``done`` when nothing is left to guard. A guard, a process apart from the program and from the terminal,
kills the program (and its process group, if it has one of its own) at that moment, or at once when the pipe ends
without ``done``: its parent was killed. So it makes no difference whether the parent is stopped, or dead, or hangs.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
OPEN_MAX = 65_536
LOOK_S = 0.25  # select does not count the time for which the machine is suspended
# The guard acts this long before the moment it was told, so that the kernel has ended the program by then.
MARGIN_S = 0.1


def now() -> float:
    """As tenure.now, which cannot be imported here."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def main() -> None:
    parent, pipe, grouped, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "group", sys.argv[4]
    fork_guard(os.getpid(), pipe, grouped)
    os.close(pipe)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(program, sys.argv[4:])


def fork_guard(target: int, pipe: int, grouped: bool) -> None:
    """Forked twice: the program must not find a child that it has not started."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        leave_alone(pipe)
        if not told_done(pipe):
            end(target, grouped)
    finally:
        os._exit(0)


def leave_alone(pipe: int) -> None:
    """Nothing of the program's: whoever waits for the end of its output must not wait for the guard's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, OPEN_MAX)
    os.chdir("/")
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)


def told_done(pipe: int) -> bool:
    """Waits. False when the program's time is over."""
    until, rest = float("inf"), b""
    while (left_s := until - MARGIN_S - now()) > 0:
        if not select.select([pipe], [], [], min(left_s, LOOK_S))[0]:
            continue
        data = os.read(pipe, 4_096)
        if not data:
            return False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b"done":
                return True
            until = float(line)
    return False


def end(target: int, grouped: bool) -> None:
    try:
        if grouped:
            os.killpg(target, signal.SIGKILL)
        else:
            os.kill(target, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it had ended by itself


if __name__ == "__main__":
    main()
