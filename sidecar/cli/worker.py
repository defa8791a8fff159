"""``tenure worker --job JOB -- COMMAND``: any program as the worker of scheduled jobs.

The worker is a session that serves jobs; each run starts the command anew (run_process.py says what it is told and what
its end means). An interrupt is SIGTERM to the command's group, and SIGKILL when the grace is nearly over; then its end
is acknowledged. SIGTERM to the worker: it takes no new runs, and those that go on may end by themselves for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import named, near, times
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import USAGE, CliError
from sidecar.cli.lock import CONNECT_S, find
from sidecar.cli.run_process import Ended, Receipt, RunProcess

if TYPE_CHECKING:
    import tenure

# SIGKILL goes out this long before the grace is over, or this part of it, so that the end can be acknowledged in time.
ACKNOWLEDGE_S, ACKNOWLEDGE_SHARE = 1.0, 0.25
OWN_GRACE_S = 5.0
STOPPING = (signal.SIGTERM, signal.SIGINT)

HELP = """Work for scheduled jobs with any command: each run starts it once.

The command finds TENURE_RUN_ID, TENURE_JOB, TENURE_TENANT, TENURE_DUE (RFC 3339), TENURE_DUE_MS, TENURE_ATTEMPT, \
TENURE_FENCING_TOKEN, TENURE_IDEMPOTENCY_KEY, TENURE_DEADLINE_MS and TENURE_TRACEPARENT in its environment, and all of \
it with the payload as JSON on its standard input. What it writes to the file TENURE_RESULT_FILE is the result; \
TENURE_CHECKPOINT_FILE holds the state of the attempt before, and what a failed attempt leaves there goes to the next.

Its exit status: 0 succeeded; 64, 65, 78, 126, 127 failed for good (usage, data, configuration, cannot be run, not \
found); 75 and all others failed, to be tried again as the job says. The last lines of its standard error are the error.

An interrupted run (kill, timeout, operator) gets SIGTERM, its whole process group, and SIGKILL after the job's grace. \
SIGTERM to the worker: no new runs, those that go on may end within --stop-wait; a second one ends them at once.
"""


@calling
async def worker(
    target: Target,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    job: Annotated[
        list[str],
        typer.Option("--job", metavar="JOB", help="A job, or the beginning of names with * at its end. Repeatable."),
    ],
    slots: Annotated[int, typer.Option("--slots", min=1, max=1_000, help="How many runs at once.")] = 1,
    agent: Annotated[
        str, typer.Option("--agent", help="The name that operators see.", show_default="that of the command")
    ] = "",
    version: Annotated[str, typer.Option("--agent-version", help="Its version, for selectors.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="For selectors and canaries. Repeatable.")
    ] = None,
    ttl: Annotated[
        float,
        typer.Option("--ttl", min=0.5, max=3600, help="Seconds after which a lost machine's runs go on elsewhere."),
    ] = 15,
    stop_wait: Annotated[
        str, typer.Option("--stop-wait", metavar="DURATION", help="How long runs may go on after SIGTERM.")
    ] = "30s",
) -> None:
    program = find(command[0])
    tenant, names = jobs_of(target, job)
    labels = dict(pair_of(each) for each in label or [])
    wait_s = times.option_duration(stop_wait, "--stop-wait") / 1_000
    import tenure

    with target.telling(target.address, CONNECT_S):
        client = await tenure.connect(
            target.address, tenant=tenant, credentials=target.credentials(), version=version, labels=labels,
            agent=(agent or f"worker {command[0]}")[:128], ttl_ms=round(ttl * 1_000), timeout=target.timeout,
            connect_timeout=CONNECT_S,
        )  # fmt: skip
    async with client:
        serving = Serving(target, program, command[1:])
        for name in names:
            client.job(name)(serving.run)
        target.say(f"{client.session_id} serves {', '.join(names)} of {tenant}, {slots} at once")
        for line in await near.unknown(target, tenant, names) if not target.json else []:
            target.say(f"tenure worker: warning: {line}")
        await serving.until_stopped(client, slots, wait_s)


class Serving:
    """Starts the command for each run."""

    def __init__(self, target: Target, program: str, arguments: list[str]) -> None:
        self._target, self._program, self._arguments = target, program, arguments

    async def run(self, run: tenure.Run) -> bytes:
        """The handler of a run: its result, or the error that says whether another attempt helps."""
        import tenure

        receipt = receipt_of(run)
        async with RunProcess(self._program, self._arguments, receipt, lambda: run.session_safe_until) as process:
            try:
                ended = await process.ended()
            except asyncio.CancelledError:
                # Cancelled by our own clock: the sidecar's interrupt, which says the grace, is yet to come.
                grace_s = run.remaining() if run.interrupted_by_sidecar else max(run.remaining(), OWN_GRACE_S)
                left_s = max(0.0, min(grace_s, run.session_safe_until - tenure.now()))
                await process.stop(left_s - min(ACKNOWLEDGE_S, left_s * ACKNOWLEDGE_SHARE))
                raise
        self._say(receipt, ended)
        if ended.succeeded:
            return ended.result
        if ended.state is not None:
            with contextlib.suppress(tenure.TenureError):  # then the next attempt begins where this one did
                await run.checkpoint(ended.state)
        raise (tenure.Retry if ended.retryable else tenure.Permanent)(ended.error)

    def _say(self, receipt: Receipt, ended: Ended) -> None:
        for words in filter(None, (ended.remark, ended.error.partition("\n")[0])):
            self._target.say(f"tenure worker: {receipt.job} {receipt.run_id}: {words}")

    async def until_stopped(self, client: tenure.Client, slots: int, wait_s: float) -> None:
        """Serves until a signal comes; then until the runs have ended, the time is up, or a second signal comes."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        working = loop.create_task(client.work(slots=slots, stop=stop, finish_timeout=wait_s))

        def stopping() -> None:
            if stop.is_set():
                working.cancel()
                return
            self._target.say(f"tenure worker: no new runs; those that go on may take {wait_s:g} s")
            stop.set()

        for number in STOPPING:
            loop.add_signal_handler(number, stopping)
        with contextlib.suppress(asyncio.CancelledError):
            await working


def receipt_of(run: tenure.Run) -> Receipt:
    return Receipt(
        tenant=run.tenant, job=run.job, run_id=run.run_id, due_wall_ms=run.due_wall_ms, sequence=run.sequence,
        attempt=run.attempt, token=run.token, idempotency_key=run.idempotency_key,
        deadline_wall_ms=times.now_ms() + round(run.remaining() * 1_000), traceparent=run.traceparent,
        payload=run.payload, checkpoint=run.last_checkpoint or b"",
    )  # fmt: skip


def jobs_of(target: Target, jobs: list[str]) -> tuple[str, list[str]]:
    """Their tenant, which is one, and their names or patterns."""
    found = [named.job_of(target, each) for each in jobs]
    tenants = {tenant for tenant, _ in found}
    if len(tenants) > 1:
        said = f"the jobs of one worker are of one tenant, not of {' and '.join(sorted(tenants))}"
        raise CliError(said, reason="USAGE", status=USAGE, todo="start one worker for each tenant")
    return tenants.pop(), list(dict.fromkeys(name for _, name in found))


def pair_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CliError(f"--label is {text!r}; write NAME=VALUE", reason="USAGE", status=USAGE)
    return name, value
