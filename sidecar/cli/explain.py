"""``tenure explain JOB [TIME]``: what became of a due time, and why; in lines that a tired person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import calls, named, output, shown, times
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import USAGE, CliError
from sidecar.cli.named import JobName, both, label
from sidecar.cli.occurrences import resolve_command

if TYPE_CHECKING:
    import grpc.aio
    from tenure.v1 import job_pb2

# Due times looked at in the hour that a clock change leaves out.
PREVIEWED = 200
ORIGINS = {
    1: "by its schedule", 2: "caught up with, after it was late", 3: "triggered by hand", 4: "backfilled by hand",
}  # fmt: skip


@calling
async def explain(
    target: Target,
    job: JobName,
    time: Annotated[
        str,
        typer.Argument(
            metavar="TIME",
            help="A due time: RFC 3339; or, by the clocks of the job's zone, 09:00 (of today), 'yesterday 09:00' or "
            "'2026-03-29 09:00'; or milliseconds since 1970.",
            show_default="the last one",
        ),
    ] = "",
) -> None:
    """Tell the story of a due time: who ran it, what went on, the outcome; or why it did not run, and what to do."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        due_ms = 0
        if time:
            zone = (await named.get_job(target, channel, tenant, name)).spec.schedule.zone
            due_ms = await due_time(target, channel, (tenant, name), zone, time)
        request = job_pb2.ExplainOccurrenceRequest(tenant=tenant, job=name, due_wall_ms=due_ms)
        response = await named.stub_of(channel).ExplainOccurrence(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print("\n".join(story(response, f"{tenant}/{name}", due_ms)))


async def due_time(target: Target, channel: grpc.aio.Channel, job: tuple[str, str], zone: str, time: str) -> int:
    """The moment that is meant. For a local time that a clock change leaves out it is when the job is due instead."""
    from tenure.v1 import job_pb2

    try:
        times.parse_when(time, zone or "UTC", times.now_ms())
    except times.LeftOutError as left_out:
        tenant, name = job
        request = job_pb2.PreviewJobRequest(tenant=tenant, name=name, from_wall_ms=left_out.from_ms, count=PREVIEWED)
        response = await named.stub_of(channel).PreviewJob(request, timeout=target.timeout)
        for due in response.due:
            if due.due_wall_ms <= left_out.until_ms and "in the gap" in due.clock_change:
                target.say(f"{left_out}; the job is due at {both(due.due_wall_ms, zone)} instead")
                return int(due.due_wall_ms)
        said = f"TIME: {left_out}, and the job is not due in its place"
        todo = f"'tenure job preview {tenant}/{name} --from {left_out.from_ms}' shows when it is due"
        raise CliError(said, reason="USAGE", status=USAGE, todo=todo) from left_out
    except ValueError:
        pass
    return named.when(time, zone, "TIME")


def story(told: job_pb2.ExplainOccurrenceResponse, name: str, due_ms: int) -> list[str]:
    """The lines of an answer. ``due_ms``: the time that was asked for; 0 for the last one."""
    zone = told.job.spec.schedule.zone
    lines = []
    if not told.occurrences:
        asked = both(due_ms, zone) if due_ms else "no time so far"
        lines.append(f"{name}: {asked}")
    for occurrence in told.occurrences:
        lines += [*([""] if lines else []), *occurrence_lines(occurrence, zone)]
    # Of one that succeeded it says no more than the first line.
    if told.explanation and told.explanation not in (shown.enum(each, "state") for each in told.occurrences):
        lines.append(f"{label('why' if not told.occurrences or ended(told) else 'now')}{told.explanation}")
    return [*lines, *beside(told, zone), *what_next(told)]


def ended(told: job_pb2.ExplainOccurrenceResponse) -> bool:
    from tenure.v1 import job_pb2

    return all(each.state >= job_pb2.OCCURRENCE_STATE_SUCCEEDED for each in told.occurrences)


def occurrence_lines(occurrence: job_pb2.Occurrence, zone: str) -> list[str]:
    flags = "".join(f", {flag}" for flag in ("canary", "shadow") if getattr(occurrence, flag))
    number = f" no. {occurrence.sequence}" if occurrence.sequence else ""
    due = both(occurrence.due_wall_ms, zone)
    if occurrence.count > 1:
        due = f"{both(occurrence.first_due_wall_ms, zone)} to {due}, {occurrence.count} times"
    origin = ORIGINS.get(occurrence.origin, "")
    lines = [
        f"{occurrence.tenant}/{occurrence.job}: {named.outcome(occurrence)}",
        f"{label('due')}{due}",
        f"{label('origin')}{origin}{number}{flags}, revision {occurrence.job_revision} of the job",
    ]
    lines += [step_line(step, zone) for step in occurrence.steps]
    if occurrence.error:
        lines.append(f"{label('error')}{occurrence.error}")
    if occurrence.result:
        lines.append(f"{label('result')}{shown.content(occurrence.result)}")
    if occurrence.attempt > 1:
        lines.append(f"{label('attempts')}{occurrence.attempt}")
    return lines


# Reasons that a worker would have prevented, or may have.
WANTING = ("overlap", "starting_deadline")
STEPS = {
    "created": "it came up", "assigned": "attempt {attempt} given to {who}", "checkpointed": "state stored by {who}",
    "interrupted": "{who} told to stop", "acknowledged": "{who} has stopped",
    "run_ended": "attempt {attempt} over", "retrying": "will be tried again", "ended": "ended",
    "resolved": "settled by a person",
}  # fmt: skip


def step_line(step: job_pb2.OccurrenceStep, zone: str) -> str:
    """``  09:00:01.250Z  attempt 1 given to crawler on host-3 (session s12, run r7)``."""
    who = f"{step.agent or 'an agent'}{f' on {step.host}' if step.host else ''}"
    text = STEPS.get(step.what, step.what.replace("_", " ")).format(attempt=step.attempt, who=who)
    ids = [f"session {step.session_id}" if step.session_id else "", f"run {step.run_id}" if step.run_id else ""]
    known = ", ".join(filter(None, ids))
    about = f" ({known})" if known else ""
    why = f": {step.cause}" if step.cause and step.what != "created" else ""
    by = f", by {step.actor}" if step.actor else ""
    reason = f": {step.reason}" if step.reason else ""
    return f"  {both_times(step.wall_ms, zone)}  {text}{about}{why}{by}{reason}"


def both_times(ms: int, zone: str) -> str:
    """A moment with its milliseconds, in UTC and local."""
    from sidecar.scheduling import zones

    utc = shown.wall(ms)
    if zone in ("", "UTC"):
        return utc
    try:
        return f"{utc} ({zones.local(ms - ms % 1_000, zone)[11:19]} local)"
    except zones.UnknownZoneError:
        return utc


def beside(told: job_pb2.ExplainOccurrenceResponse, zone: str) -> list[str]:
    lines = []
    if told.previous_due_wall_ms:
        lines.append(f"{label('before')}due {both(told.previous_due_wall_ms, zone)}")
    if told.next_due_wall_ms:
        lines.append(f"{label('after')}due {both(told.next_due_wall_ms, zone)}")
    return lines


def what_next(told: job_pb2.ExplainOccurrenceResponse) -> list[str]:
    """Where to read on, whom to ask, and the commands that fit what has happened."""
    job = told.job
    todo = [command for each in told.occurrences if (command := command_for(each, job))]
    if job.switch_id:
        why = "tells who stops it and why; 'tenure resume' lets it go on, and makes up for nothing"
        todo.insert(0, f"tenure switch show {job.switch_id}   # {why}")
    if unserved(told):
        todo.insert(0, f"tenure worker --job {job.tenant}/{job.name} -- COMMAND   # nobody serves the job now")
    if job.name and not told.occurrences and job.spec.schedule.HasField("manual"):
        todo.append(f"tenure job trigger {job.tenant}/{job.name} --reason '...'   # to run it")
    lines = [f"{label('' if number else 'do')}{command}" for number, command in enumerate(todo)]
    if not job.name:
        return [*lines, f"{label('job')}it has been deleted"]
    return [*lines, f"{label('runbook')}{job.spec.runbook_url}", f"{label('owner')}{job.spec.owner}"]


def unserved(told: job_pb2.ExplainOccurrenceResponse) -> bool:
    """Whether it did not run, or does not, for want of a worker."""
    from tenure.v1 import job_pb2

    waiting = (job_pb2.OCCURRENCE_STATE_PENDING, job_pb2.OCCURRENCE_STATE_RETRYING)
    wanting = (each.state in waiting or each.reason.startswith(WANTING) for each in told.occurrences)
    return bool(told.job.name) and not told.job.workers and any(wanting)


def command_for(occurrence: job_pb2.Occurrence, job: job_pb2.Job) -> str:
    """What somebody may want to do about it; empty when nothing is to be done."""
    from tenure.v1 import job_pb2

    name = f"{occurrence.tenant}/{occurrence.job}"
    if occurrence.held:
        return resolve_command(occurrence)
    if occurrence.state < job_pb2.OCCURRENCE_STATE_SUCCEEDED:
        return f"tenure interrupt {occurrence.run_id} --reason '...'   # to stop it" if occurrence.run_id else ""
    if occurrence.state == job_pb2.OCCURRENCE_STATE_SUCCEEDED or occurrence.shadow or not job.name:
        return ""
    if occurrence.origin == job_pb2.OCCURRENCE_ORIGIN_TRIGGER:
        return f"tenure job trigger {name} --reason '...'   # to run it again"
    first = times.rfc3339(occurrence.first_due_wall_ms or occurrence.due_wall_ms)
    after = times.rfc3339(occurrence.due_wall_ms + 1)
    return f"tenure job backfill {name} {first} {after} --reason '...'   # to run it after all"
