"""``tenure job trigger, backfill, occurrences, held, resolve``: what became of due times, and running them by hand."""

from __future__ import annotations

import asyncio
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import calls, named, output, shown, times
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import DONE, REFUSED, UNKNOWN, USAGE, CliError
from sidecar.cli.named import DryRun, JobName, Limit100
from sidecar.cli.options import Actor, Limit, Reason, one_of

if TYPE_CHECKING:
    import grpc.aio
    from tenure.v1 import job_pb2

POLL_S = 0.25


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    MISSED = "missed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class As(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRY = "retry"


@calling
async def trigger(
    target: Target,
    job: JobName,
    reason: Reason,
    actor: Actor,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="TEXT", help="Instead of the job's payload.")
    ] = None,
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", metavar="FILE", help="The same, from a file.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for its outcome. Exit status: 0 succeeded, 1 another outcome, 3 unknown or not ended."
        ),
    ] = False,
    wait_max: Annotated[
        str, typer.Option("--wait-max", metavar="DURATION", help="How long to wait for it at most.")
    ] = "1h",
) -> None:
    """Run a job now, once, beside its schedule. Its overlap policy and the switches in force decide as always."""
    from tenure.v1 import job_pb2

    if payload is not None and payload_file is not None:
        raise CliError("--payload and --payload-file are the same; say one of them", reason="USAGE", status=USAGE)
    limit_ms = times.option_duration(wait_max, "--wait-max")
    tenant, name = named.job_of(target, job)
    request = job_pb2.TriggerJobRequest(
        tenant=tenant, name=name, actor=actor, reason=reason, request_id=calls.fresh_request_id()
    )
    if payload is not None or payload_file is not None:
        request.payload = payload.encode() if payload is not None else calls.read(payload_file) or b""
    async with target.channel() as channel:
        response = await named.stub_of(channel).TriggerJob(request, timeout=target.timeout)
        occurrence = response.occurrence
        if wait and not ended(occurrence):
            target.say(f"{job}: due {named.utc_short(occurrence.due_wall_ms)}, waiting for its outcome")
            occurrence, why = await followed(target, channel, occurrence, limit_ms / 1_000)
        else:
            occurrence, why = await explained(target, channel, occurrence)
    report_triggered(target, job, occurrence, why, waited=wait)


async def explained(
    target: Target, channel: grpc.aio.Channel, occurrence: job_pb2.Occurrence
) -> tuple[job_pb2.Occurrence, str]:
    """As it is now, and what the sidecar says of it."""
    from tenure.v1 import job_pb2

    request = job_pb2.ExplainOccurrenceRequest(
        tenant=occurrence.tenant, job=occurrence.job, due_wall_ms=occurrence.due_wall_ms
    )
    response = await named.stub_of(channel).ExplainOccurrence(request, timeout=target.timeout)
    fitting = [each for each in response.occurrences if each.sequence == occurrence.sequence]
    if not fitting:  # the job was deleted, and its history is over
        return occurrence, ""
    return fitting[0], response.explanation if len(response.occurrences) == 1 else ""


async def followed(
    target: Target, channel: grpc.aio.Channel, occurrence: job_pb2.Occurrence, limit_s: float
) -> tuple[job_pb2.Occurrence, str]:
    """The occurrence when it has ended, or as it is when the time is up. Says what it waits for when that changes."""
    until, said = time.monotonic() + limit_s, ""
    while True:
        occurrence, why = await explained(target, channel, occurrence)
        if ended(occurrence) or time.monotonic() > until:
            return occurrence, why
        state = f"{shown.enum(occurrence, 'state')}, attempt {occurrence.attempt}"
        waits = "" if occurrence.run_id else why
        # How long it still waits changes all the time.
        now = state + re.sub(r"\d+", "", waits.partition("; ")[0])
        if now != said:
            target.say(f"  {state}" + (f": {waits}" if waits else ""))
            said = now
        await asyncio.sleep(POLL_S)


def ended(occurrence: job_pb2.Occurrence) -> bool:
    from tenure.v1 import job_pb2

    return occurrence.state >= job_pb2.OCCURRENCE_STATE_SUCCEEDED


def report_triggered(target: Target, job: str, occurrence: job_pb2.Occurrence, why: str, *, waited: bool) -> None:
    if target.json:
        output.print_json(calls.as_dict(occurrence))
    else:
        print(f"{job}: due {named.utc_short(occurrence.due_wall_ms)}, {named.outcome(occurrence)}")
        if why and not occurrence.run_id and why != shown.enum(occurrence, "state"):
            print(f"  {why}")
        if occurrence.error:
            print(f"  error: {occurrence.error}")
        if occurrence.result:
            print(f"  result: {shown.content(occurrence.result)}")
        print(f"  tenure explain {job} {times.rfc3339(occurrence.due_wall_ms)}")
    status = exit_status(occurrence, waited=waited)
    if status != DONE:
        raise typer.Exit(status)


def exit_status(occurrence: job_pb2.Occurrence, *, waited: bool) -> int:
    from tenure.v1 import job_pb2

    if not ended(occurrence):
        return UNKNOWN if waited else DONE
    if occurrence.state == job_pb2.OCCURRENCE_STATE_SUCCEEDED:
        return DONE
    return UNKNOWN if occurrence.state == job_pb2.OCCURRENCE_STATE_UNKNOWN else REFUSED


@calling
async def backfill(
    target: Target,
    job: JobName,
    from_: Annotated[str, typer.Argument(metavar="FROM", help="The first due time that may be meant.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The end; a due time at this moment is not meant.")],
    reason: Reason,
    actor: Actor,
    dry_run: DryRun = False,
) -> None:
    """Run due times of the past that did not succeed, in their order, one after another.

    Times are RFC 3339, or by the clocks of the job's zone: '2026-03-29 09:00', 09:00 (today), 'yesterday 09:00', now.
    """
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        zone = (await named.get_job(target, channel, tenant, name)).spec.schedule.zone
        from_ms, to_ms = range_of(from_, to, zone)
        request = job_pb2.BackfillJobRequest(
            tenant=tenant, name=name, from_wall_ms=from_ms, to_wall_ms=to_ms, actor=actor, reason=reason,
            dry_run=dry_run, request_id=calls.fresh_request_id(),
        )  # fmt: skip
        response = await named.stub_of(channel).BackfillJob(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
        return
    made = "would run" if dry_run else "will run"
    words = {"created": made, "succeeded": "has succeeded", "running": "runs", "pending": "waits already"}
    for due in response.due:
        print(f"{named.both(due.due_wall_ms, zone)}  {words.get(due.what, due.what)}")
    count = sum(due.what == "created" for due in response.due)
    print(f"{count} of {shown.counted(len(response.due), 'due time')} {made}")


def range_of(from_: str, to: str, zone: str) -> tuple[int, int]:
    """Of a backfill; told in the words it was given in when it is none."""
    from_ms, to_ms, now_ms = named.when(from_, zone, "FROM"), named.when(to, zone, "TO"), times.now_ms()
    said = ""
    if to_ms > now_ms:
        said = f"TO is {named.both(to_ms, zone)}, which is still to come (it is {named.both(now_ms, zone)})"
    elif from_ms >= to_ms:
        said = f"FROM is {named.both(from_ms, zone)}, which is not before TO, {named.both(to_ms, zone)}"
    if said:
        raise CliError(said, reason="USAGE", status=USAGE, todo="'now' means up to now")
    return from_ms, to_ms


@calling
async def occurrences(
    target: Target,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The job: NAME, or TENANT/NAME.", show_default="all of the tenant")
    ] = "",
    state: Annotated[
        State | None,
        typer.Option(
            "--state", metavar="STATE", parser=one_of(State), help=f"Only those in this state: {', '.join(State)}."
        ),
    ] = None,
    limit: Limit100 = 100,
) -> None:
    """List what became of due times, newest first within a job."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job) if job else (target.tenant, "")
    request = job_pb2.ListOccurrencesRequest(tenant=tenant, job=name)
    if state is not None:
        request.state = job_pb2.OccurrenceState.Value(f"OCCURRENCE_STATE_{state.name}")
    await list_occurrences(target, request, limit)


@calling
async def held(
    target: Target,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The job: NAME, or TENANT/NAME.", show_default="all of the tenant")
    ] = "",
    limit: Limit = 0,
) -> None:
    """List occurrences whose outcome only a person can know, with the command that settles each."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job) if job else (target.tenant, "")
    await list_occurrences(target, job_pb2.ListOccurrencesRequest(tenant=tenant, job=name, held_only=True), limit)


async def list_occurrences(target: Target, request: job_pb2.ListOccurrencesRequest, limit: int) -> None:
    async with target.channel() as channel:
        stub = named.stub_of(channel)
        found = await calls.pages(stub.ListOccurrences, request, "occurrences", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(each) for each in found])
        return
    rows = (
        (each.job, due_range(each), shown.enum(each, "origin"), named.outcome(each), each.attempt or "-",
         named.utc_short(each.ended_wall_ms) if each.ended_wall_ms else "-", each.error or "-")
        for each in found
    )  # fmt: skip
    output.print_table(("job", "due (UTC)", "origin", "outcome", "attempts", "ended", "error"), rows)
    if request.held_only and found:
        print("\nWhat really became of each only you can find out. Then:")
        for each in found:
            print(f"  {resolve_command(each)}")
    elif limit and len(found) == limit:
        target.say(f"there may be more than {limit}; --limit 0 shows all")


def due_range(occurrence: job_pb2.Occurrence) -> str:
    due = named.utc_short(occurrence.due_wall_ms)
    return f"{named.utc_short(occurrence.first_due_wall_ms)} to {due}" if occurrence.count > 1 else due


def resolve_command(occurrence: job_pb2.Occurrence) -> str:
    """Ready to be typed but for the outcome and the reason."""
    sequence = f" --sequence {occurrence.sequence}" if occurrence.sequence else ""
    due = times.rfc3339(occurrence.due_wall_ms)
    return (
        f"tenure job resolve {occurrence.tenant}/{occurrence.job} {due}{sequence} --attempt {occurrence.attempt}"
        " --as succeeded|failed|retry --reason '...'"
    )


@calling
async def resolve(
    target: Target,
    job: JobName,
    time: Annotated[str, typer.Argument(metavar="TIME", help="Its due time.", show_default=False)],
    as_: Annotated[
        As,
        typer.Option(
            "--as",
            metavar="OUTCOME",
            parser=one_of(As),
            help="What became of it: succeeded, failed, or retry (it may run again).",
        ),
    ],
    attempt: Annotated[int, typer.Option("--attempt", help="The attempt you looked at, so that no later one is hit.")],
    reason: Reason,
    actor: Actor,
    sequence: Annotated[
        int | None,
        typer.Option(
            "--sequence", min=0, help="Tells those of one time apart; 'held' shows it.", show_default="the held one"
        ),
    ] = None,
    result: Annotated[str, typer.Option("--result", help="The result, for --as succeeded.")] = "",
    error: Annotated[str, typer.Option("--error", help="The error, for --as failed.")] = "",
) -> None:
    """Settle an occurrence whose outcome only a person can know."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        zone = (await named.get_job(target, channel, tenant, name)).spec.schedule.zone
        due_ms = named.when(time, zone, "TIME")
        if sequence is None:
            sequence = await sequence_of_held(target, channel, tenant, name, due_ms)
        request = job_pb2.ResolveOccurrenceRequest(
            tenant=tenant, job=name, due_wall_ms=due_ms, sequence=sequence, attempt=attempt,
            resolution=job_pb2.OccurrenceResolution.Value(f"OCCURRENCE_RESOLUTION_{as_.name}"),
            result=result.encode(), error=error, actor=actor, reason=reason, request_id=calls.fresh_request_id(),
        )  # fmt: skip
        response = await named.stub_of(channel).ResolveOccurrence(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        settled = response.occurrence
        print(f"{tenant}/{name} due {named.both(settled.due_wall_ms, zone)} is {named.outcome(settled)}")


async def sequence_of_held(target: Target, channel: grpc.aio.Channel, tenant: str, name: str, due_ms: int) -> int:
    """Of the one of this time that waits for a person. There is none: the schedule's, of which the sidecar says why."""
    from tenure.v1 import job_pb2

    request = job_pb2.ExplainOccurrenceRequest(tenant=tenant, job=name, due_wall_ms=due_ms)
    response = await named.stub_of(channel).ExplainOccurrence(request, timeout=target.timeout)
    held = [each for each in response.occurrences if each.held]
    if len(held) > 1:
        said = (
            f"{len(held)} of that time wait for a person: say --sequence {' or '.join(str(e.sequence) for e in held)}"
        )
        raise CliError(said, reason="USAGE", status=USAGE, todo="'tenure job held' shows each with its command")
    return held[0].sequence if held else 0
