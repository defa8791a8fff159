"""``tenure lock NAME -- COMMAND``: run any program under a lease.

The program runs only while the lease is held. It finds the fencing token in ``TENURE_FENCING_TOKEN`` and the lease's
name in ``TENURE_LEASE``. When the lease is about to be lost it gets SIGTERM, and SIGKILL before another may be granted
the lease. A guard (guarded.py) sees to that also when ``tenure lock`` itself is stopped or killed. Signals that
``tenure lock`` gets are passed on to the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import USAGE, CliError

if TYPE_CHECKING:
    import tenure
    from tenure import Lease

NOT_ACQUIRED, LOST, NOT_EXECUTABLE, NOT_FOUND = 75, 76, 126, 127
KILLED = 128 + signal.SIGKILL  # by the guard, if the lease is lost
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# SIGKILL goes out this long before safe-until, so that the kernel has ended the program by then.
KILL_MARGIN_S = 0.25
CONNECT_S = 10.0
GUARDED = str(Path(__file__).with_name("guarded.py"))
GUARD_TOLD_S = 0.25  # the guard learns of a renewal within this

HELP = f"""Run a command while holding a lease, so that only one of all replicas runs it at a time.

The command finds TENURE_FENCING_TOKEN and TENURE_LEASE in its environment. \
Should the lease be about to be lost, it gets SIGTERM, and SIGKILL in time before another holder can exist.

Exit statuses: the command's own (128 + n when signal n ended it); \
{NOT_ACQUIRED} the lease was not acquired in time; {LOST} the lease was lost and the command ended; \
{NOT_EXECUTABLE} and {NOT_FOUND} the command cannot be run or does not exist; 4 no sidecar, leader or majority.
"""


@calling
async def lock(
    target: Target,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The lease.", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the lease; 0 tries once.")] = 0,
    capacity: Annotated[int, typer.Option("--capacity", min=1, help="How many may hold it at a time.")] = 1,
    priority: Annotated[int, typer.Option("--priority", help="Higher goes first in line; -100 to 100.")] = 0,
    ttl: Annotated[
        float,
        typer.Option("--ttl", min=0.5, max=3600, help="Seconds after which another gets a lost machine's lease."),
    ] = 15,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds between SIGTERM and SIGKILL when the lease is being lost.")
    ] = 3,
) -> None:
    program = find(command[0])
    if grace > ttl / 3:
        raise CliError(f"--grace {grace:g} must be at most a third of --ttl {ttl:g}", reason="USAGE", status=USAGE)
    import tenure

    with target.telling(target.address, CONNECT_S):
        client = await tenure.connect(
            target.address, tenant=target.tenant, credentials=target.credentials(), agent=f"lock {command[0]}"[:128],
            ttl_ms=round(ttl * 1_000), timeout=target.timeout, connect_timeout=CONNECT_S,
            cancel_margin_ms=round((grace + KILL_MARGIN_S) * 1_000),
        )  # fmt: skip
    async with client:
        status = await run_under_lease(client, name, program, command, wait, capacity, priority)
    sys.exit(status)


def find(program: str) -> str:
    """The file that the shell would run."""
    found = shutil.which(program)
    if found is not None:
        return os.path.abspath(found)
    if os.path.exists(program):
        raise CliError(f"{program} cannot be executed", reason="NOT_EXECUTABLE", status=NOT_EXECUTABLE)
    raise CliError(f"{program}: no such command", reason="NOT_FOUND", status=NOT_FOUND)


async def run_under_lease(
    client: tenure.Client, name: str, program: str, command: list[str], wait: float, capacity: int, priority: int
) -> int:
    from tenure import errors

    child: Child | None = None
    try:
        async with client.lease(name, wait=wait, capacity=capacity, priority=priority) as lease:
            child = await Child.start(program, command, lease)
            try:
                return await child.ended()
            except asyncio.CancelledError:
                await child.end_before(lease)
                raise
            finally:
                child.dismiss_guard()
    except errors.LeaseHeld as error:
        not_acquired(error, wait)
    except errors.LeaseLost as error:
        if child is not None and child.status is not None and not child.told_to_end and child.status != KILLED:
            return child.status  # it had ended by itself; the lease was lost on the way out
        raise CliError(
            f"{error.message}; the command was ended",
            reason="LEASE_LOST",
            status=LOST,
            todo="it may have done part of its work",
        ) from error


def not_acquired(error: tenure.LeaseHeld, wait: float) -> NoReturn:
    within = f" within {wait:g} s" if wait else ""
    raise CliError(f"not acquired{within}: {error.message}", reason=error.reason, status=NOT_ACQUIRED) from error


class Child:
    """The command, in a process group of its own unless it needs the terminal."""

    def __init__(self, process: asyncio.subprocess.Process, guard: int, *, grouped: bool) -> None:
        self.told_to_end = False
        self._process, self._guard, self._grouped = process, guard, grouped
        self._telling: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, program: str, command: list[str], lease: Lease) -> Child:
        # A command that reads the terminal must stay in its foreground group, where Ctrl-C reaches it by itself.
        grouped = not sys.stdin.isatty()
        guards_end, guard = os.pipe()
        os.set_blocking(guard, False)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", GUARDED,
                str(os.getpid()), str(guards_end), "group" if grouped else "alone", program, *command[1:],
                env=os.environ | {"TENURE_FENCING_TOKEN": str(lease.token), "TENURE_LEASE": lease.name},
                process_group=0 if grouped else None,
                pass_fds=(guards_end,),
            )  # fmt: skip
        except BaseException:
            os.close(guard)
            raise
        finally:
            os.close(guards_end)
        child = cls(process, guard, grouped=grouped)
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.add_signal_handler(number, child.pass_on, number)
        child._telling = loop.create_task(child._tell_guard(lease))
        return child

    async def _tell_guard(self, lease: Lease) -> None:
        """Until when the command may run, as it moves with renewals."""
        told = 0.0
        while True:
            if lease.valid and lease.safe_until != told:
                told = lease.safe_until
                self._to_guard(f"{told:.6f}\n")
            await asyncio.sleep(GUARD_TOLD_S)

    def dismiss_guard(self) -> None:
        """Nothing is left to guard; or, if the command still runs, let the guard end it at once."""
        if self._telling is not None:
            self._telling.cancel()
        if self._process.returncode is not None:
            self._to_guard("done\n")
        os.close(self._guard)

    def _to_guard(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it has done its work, or somebody has stopped it
            os.write(self._guard, line.encode())

    @property
    def status(self) -> int | None:
        """As a shell would say it: 128 + n when signal n ended the command."""
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    def pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and not self._grouped:
            return  # the terminal has sent it to the command as well
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._grouped:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def ended(self) -> int:
        await self._process.wait()
        status = self.status
        assert status is not None
        return status

    async def end_before(self, lease: Lease) -> None:
        """SIGTERM now, SIGKILL before the lease can be another's."""
        if self.status is not None:
            return
        self.told_to_end = True
        self.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, lease.remaining() - KILL_MARGIN_S)):
                await self._process.wait()
        self.send(signal.SIGKILL)
        await self._process.wait()
