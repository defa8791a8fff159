"""Jobs, occurrences, runs and switches as the commands name them, and what several commands show of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import shown, times
from sidecar.cli.calls import Target
from sidecar.cli.failures import USAGE, CliError

if TYPE_CHECKING:
    import grpc.aio
    from tenure.v1 import job_pb2

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job: NAME, or TENANT/NAME.", show_default=False)]
Limit100 = Annotated[int, typer.Option("--limit", min=0, help="Show at most this many; 0 shows all.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")]
# What each line of a story begins with, up to here.
INDENT = 10


def job_of(target: Target, name: str) -> tuple[str, str]:
    """Tenant and name. Without a tenant in it, the name is one of --tenant."""
    tenant, slash, rest = name.partition("/")
    if not slash:
        return target.tenant, name
    if not tenant or not rest or "/" in rest:
        raise CliError(f"{name!r} is no job; write NAME or TENANT/NAME", reason="USAGE", status=USAGE)
    return tenant, rest


def stub_of(channel: grpc.aio.Channel) -> Any:
    from tenure.v1 import job_pb2_grpc

    return job_pb2_grpc.JobServiceStub(channel)


async def get_job(target: Target, channel: grpc.aio.Channel, tenant: str, name: str) -> job_pb2.Job:
    from tenure.v1 import job_pb2

    request = job_pb2.GetJobRequest(tenant=tenant, name=name)
    response: job_pb2.GetJobResponse = await stub_of(channel).GetJob(request, timeout=target.timeout)
    return response.job


def when(text: str, zone: str, what: str) -> int:
    """A moment given on the command line, as milliseconds."""
    try:
        return times.parse_when(text, zone or "UTC", times.now_ms())
    except ValueError as error:
        said = str(error).partition("; write ")[0]
        todo = "write 2026-03-29T09:00:00+02:00; or, by the clocks of the job's zone, 09:00, 'yesterday 09:00' or now"
        raise CliError(f"{what}: {said}", reason="USAGE", status=USAGE, todo=todo) from error


def both(ms: int, zone: str) -> str:
    """A moment in UTC and, where that differs, as the zone's clocks show it."""
    from sidecar.scheduling import zones

    utc = utc_short(ms)
    if zone in ("", "UTC"):
        return utc
    try:
        return f"{utc} ({zones.local(ms, zone)})"
    except zones.UnknownZoneError:
        return utc


def utc_short(ms: int) -> str:
    """As ``shown.wall``, without milliseconds that say nothing."""
    return shown.wall(ms).replace(".000Z", "Z")


def ago(ms: int, now_ms: int) -> str:
    """``3 min ago``, ``in 2 h``; nothing for what is not known."""
    if not ms:
        return ""
    distance = shown.duration(abs(now_ms - ms))
    return f"in {distance}" if ms > now_ms else f"{distance} ago"


def outcome(occurrence: job_pb2.Occurrence) -> str:
    """``skipped (overlap)``."""
    state = shown.enum(occurrence, "state")
    count = f"{occurrence.count} times " if occurrence.count > 1 else ""
    reason = f" ({occurrence.reason})" if occurrence.reason else ""
    held = ", HELD for a person" if occurrence.held else ""
    return f"{count}{state}{reason}{held}"


def label(text: str) -> str:
    return f"{text:<{INDENT}}"
