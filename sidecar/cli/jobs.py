"""``tenure job``: jobs from files, what they are and were, and running one now or for times that have passed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import calls, named, output, shown, times
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import REFUSED, USAGE, CliError
from sidecar.cli.named import DryRun, JobName
from sidecar.cli.options import Actor, Limit, Reason, one_of

if TYPE_CHECKING:
    import grpc.aio
    from tenure.v1 import job_pb2

    from sidecar.cli.job_files import Located

app = typer.Typer(help="Scheduled jobs: from files, by revisions, and running one now.", no_args_is_help=True)

_FIELD = re.compile(r"jobs\[(\d+)\]\.?(?:spec\.)?(.*)")

Files = Annotated[
    list[str],
    typer.Option("-f", "--file", metavar="FILE", help="A YAML file of jobs; - for standard input. Repeatable."),
]
AnyReason = Annotated[str, typer.Option("--reason", help="Why; it is audited.", show_default=False)]


class Form(StrEnum):
    TEXT = "text"
    YAML = "yaml"
    JSON = "json"


# ---- definitions


@app.command()
@calling
async def apply(target: Target, file: Files, actor: Actor, reason: AnyReason = "", dry_run: DryRun = False) -> None:
    """Create or change the jobs of files: all of them or none. What is equal already stays as it is.

    A file has 'jobs:', a list; docs/JOBS.md lists the keys, 'tenure job show JOB -o yaml' prints an example.
    An edit never runs a time again that is past, and loses none. Every mistake is reported with its file and line.
    """
    from tenure.v1 import job_pb2

    from sidecar.cli import job_files

    located = job_files.load(file, target.tenant)
    request = job_pb2.ApplyJobsRequest(
        jobs=[each.definition for each in located], actor=actor, reason=reason, dry_run=dry_run,
        request_id=calls.fresh_request_id(),
    )  # fmt: skip
    async with target.channel() as channel:
        try:
            response = await named.stub_of(channel).ApplyJobs(request, timeout=target.timeout)
        except Exception as error:
            raise located_error(error, located) or error from error
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print_applied(response.jobs, dry_run)


def located_error(error: Exception, located: Sequence[Located]) -> CliError | None:
    """A refusal that names a field of the request, as one that names a line of a file."""
    from sidecar.cli.failures import explain
    from sidecar.cli.job_files import in_words

    failure = explain(error)
    found = _FIELD.match(failure.facts.get("field", "")) if failure is not None else None
    if failure is None or found is None or int(found[1]) >= len(located):
        return None
    job, path = located[int(found[1])], found[2]
    said = in_words(failure.message.replace(f"jobs[{found[1]}].", "").replace("spec.", ""))
    return CliError(f"{job.at(path)}: {job.name}: {said}", reason=failure.reason, status=failure.status)


def print_applied(jobs: Sequence[job_pb2.AppliedJob], dry_run: bool) -> None:
    from tenure.v1 import job_pb2

    from sidecar.cli import job_files, job_yaml

    counts = {"created": 0, "changed": 0, "unchanged": 0}
    for job in jobs:
        name, change = f"{job.tenant}/{job.name}", shown.enum(job, "change")
        counts[change] += 1
        if job.change == job_pb2.JOB_CHANGE_CHANGED:
            old, new = f"revision {job.revision - 1}", f"revision {job.revision}"
            if job.HasField("before"):
                print("\n".join(job_yaml.spec_diff(name, job.before, job.after, old, new)))
        if job.change != job_pb2.JOB_CHANGE_UNCHANGED:
            print(f"{name}: {'would be ' if dry_run else ''}{change}, revision {job.revision}")
            print(f"  {job.schedule_text.partition('; ')[0]}")
        for warning in job.warnings:
            print(f"  warning: {job_files.in_words(warning)}")
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{'dry run, nothing is changed: ' if dry_run else ''}{summary}")


@app.command("ls")
@calling
async def list_(
    target: Target,
    prefix: Annotated[str, typer.Argument(help="Only names that start with this.")] = "",
    limit: Limit = 0,
) -> None:
    """List the jobs of a tenant: when they are due next, and how the last time went."""
    from tenure.v1 import job_pb2

    request = job_pb2.ListJobsRequest(tenant=target.tenant, prefix=prefix)
    async with target.channel() as channel:
        found = await calls.pages(named.stub_of(channel).ListJobs, request, "jobs", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(job) for job in found])
        return
    now_ms = times.now_ms()
    rows = (
        (job.name, schedule_short(job.spec.schedule), next_due(job, now_ms), job.running, job.pending,
         f"{job.free_slots}/{job.workers}" if job.workers else "NONE", last_outcome(job, now_ms), job.spec.owner)
        for job in found
    )  # fmt: skip
    headings = ("job", "schedule", "next due (UTC)", "running", "waiting", "slots/workers", "last outcome", "owner")
    output.print_table(headings, rows)


def schedule_short(schedule: job_pb2.Schedule) -> str:
    kind = schedule.WhichOneof("kind")
    if kind == "interval":
        return f"every {times.write_duration(schedule.interval.every_ms)}"
    if kind == "once_wall_ms":
        return f"once {times.rfc3339(schedule.once_wall_ms)}"
    if kind == "manual":
        return "manual"
    return schedule.cron + (f" {schedule.zone}" if schedule.zone not in ("", "UTC") else "")


def next_due(job: job_pb2.Job, now_ms: int) -> str:
    if job.switch_id:
        word = {1: "PAUSED", 2: "DRAINED", 3: "KILLED"}[job.switch_mode]
        return f"{word} by {job.switch_id}"
    if not job.next_due_wall_ms:
        return "-"
    mode = ", shadow" if job.spec.mode == 2 else ""
    return f"{named.utc_short(job.next_due_wall_ms)} ({named.ago(job.next_due_wall_ms, now_ms)}{mode})"


def last_outcome(job: job_pb2.Job, now_ms: int) -> str:
    if not job.recent:
        return "-"
    last = job.recent[0]
    return f"{named.outcome(last)}, due {named.ago(last.due_wall_ms, now_ms)}"


@app.command()
@calling
async def show(
    target: Target,
    job: JobName,
    form: Annotated[
        Form,
        typer.Option(
            "-o", "--output", metavar="FORM", parser=one_of(Form), help="text, yaml (as 'apply' accepts it) or json."
        ),
    ] = Form.TEXT,
) -> None:
    """Show a job: its schedule in words, what runs, what went on, and who changed it."""
    from tenure.v1 import job_pb2

    from sidecar.cli import job_yaml

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        found = await named.get_job(target, channel, tenant, name)
    if target.json or form is Form.JSON:
        output.print_json(calls.as_dict(found))
    elif form is Form.YAML:
        print(job_yaml.file_of([job_pb2.JobDefinition(tenant=tenant, name=name, spec=found.spec)]), end="")
    else:
        print_job(found)


def print_job(job: job_pb2.Job) -> None:
    from sidecar.cli.job_files import in_words

    spec, zone, now_ms = job.spec, job.spec.schedule.zone, times.now_ms()
    line = named.label
    mode = " (shadow: nothing is handed out)" if spec.mode == 2 else ""
    print(f"{line('job')}{job.tenant}/{job.name}, revision {job.revision}{mode}")
    if spec.description:
        print(f"{line('')}{spec.description}")
    print(f"{line('owner')}{spec.owner}")
    print(f"{line('runbook')}{spec.runbook_url}")
    for number, text in enumerate(job.schedule_text.split("; ")):
        print(f"{line('' if number else 'schedule')}{text}")
    due = f"{named.both(job.next_due_wall_ms, zone)}, {named.ago(job.next_due_wall_ms, now_ms)}"
    print(f"{line('next due')}{due if job.next_due_wall_ms else 'not by itself'}")
    if job.switch_id:
        print(
            f"{line('switch')}{shown.enum(job, 'switch_mode').upper()} by {job.switch_id}; 'tenure switch show' tells"
        )
    slots = "NO session serves it"
    if job.workers:
        serve = "1 session serves it" if job.workers == 1 else f"{job.workers} sessions serve it"
        slots = f"{serve}, {shown.counted(job.free_slots, 'slot')} free"
    print(f"{line('now')}{job.running} running, {job.pending} waiting; {slots}")
    for run in job.runs:
        print(f"{line('')}{run_line(run)}")
    if job.flag_age_ms:
        print(f"{line('flag')}{'shadow' if spec.mode == 2 else 'canary'}, for {days(job.flag_age_ms)}")
    print(f"{line('so far')}{totals(job)}")
    for number, each in enumerate(job.recent):
        print(f"{line('' if number else 'recent')}{named.both(each.due_wall_ms, zone)}: {named.outcome(each)}")
    print(f"{line('changed')}{named.utc_short(job.changed_wall_ms)} by {job.changed_by or 'nobody who is known'}")
    for warning in job.warnings:
        print(f"{line('warning')}{in_words(warning)}")


def run_line(run: job_pb2.Run) -> str:
    state = f", interrupted ({run.interrupt_cause})" if run.interrupted else ""
    who = f"{run.agent or 'an agent without a name'} on {run.host or 'an unknown host'}"
    return f"{run.run_id}: {who}, attempt {run.attempt}{state}, {shown.duration(run.remaining_ms)} left"


def totals(job: job_pb2.Job) -> str:
    counts = {
        "succeeded": job.succeeded_total, "failed": job.failed_total, "skipped": job.skipped_total,
        "missed": job.missed_total, "cancelled": job.cancelled_total, "unknown": job.unknown_total,
    }  # fmt: skip
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing has ended yet"


def days(ms: int) -> str:
    return f"{ms // times.DAY_MS} days" if ms >= 2 * times.DAY_MS else shown.duration(ms)


# ---- due times


@app.command()
@calling
async def preview(
    target: Target,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job: NAME, or TENANT/NAME.")] = "",
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="FILE", help="The jobs of a file, which need not be applied. Repeatable."),
    ] = None,
    cron: Annotated[str, typer.Option("--cron", metavar="EXPRESSION", help="A cron expression.")] = "",
    zone: Annotated[str, typer.Option("--zone", help="Its IANA time zone, as Europe/Berlin.", show_default="UTC")] = "",
    dst: Annotated[
        str, typer.Option("--dst-policy", metavar="POLICY", help="vixie, skip, twice or shift.", show_default="vixie")
    ] = "",
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=1_000, help="How many due times.")] = 10,
    from_: Annotated[str, typer.Option("--from", metavar="TIME", help="From then on.", show_default="now")] = "",
) -> None:
    """Show the next due times, in UTC and by the zone's clocks. Those that a clock change touches are marked."""
    from tenure.v1 import job_pb2

    requests: list[tuple[str, str, job_pb2.PreviewJobRequest]] = []
    if bool(job) + bool(file) + bool(cron) != 1:
        raise CliError("say one of JOB, -f FILE and --cron EXPRESSION", reason="USAGE", status=USAGE)
    async with target.channel() as channel:
        if job:
            tenant, name = named.job_of(target, job)
            at = (await named.get_job(target, channel, tenant, name)).spec.schedule.zone
            requests.append((job, at, job_pb2.PreviewJobRequest(tenant=tenant, name=name)))
        for title, schedule in schedules_of(target, file or [], cron, zone, dst):
            asked = job_pb2.PreviewJobRequest(tenant=target.tenant, schedule=schedule)
            requests.append((title, schedule.zone, asked))
        previews = []
        for title, at, request in requests:
            request.count = count
            request.from_wall_ms = named.when(from_, at, "--from") if from_ else 0
            previews.append((title, await named.stub_of(channel).PreviewJob(request, timeout=target.timeout)))
    if target.json:
        found = [{"name": title} | calls.as_dict(preview) for title, preview in previews]
        output.print_json(found[0] if job or cron else found)
        return
    for number, (title, preview) in enumerate(previews):
        print_preview(title, preview, first=number == 0)


def schedules_of(
    target: Target, files: Sequence[str], cron: str, zone: str, dst: str
) -> list[tuple[str, job_pb2.Schedule]]:
    from tenure.v1 import job_pb2

    from sidecar.cli import job_files
    from sidecar.cli.job_fields import words_of

    if not cron:
        if not files:
            return []
        return [(each.name, each.definition.spec.schedule) for each in job_files.load(files, target.tenant)]
    policies = words_of(job_pb2.DstPolicy.DESCRIPTOR)
    if dst and dst not in policies:
        raise CliError(
            f"--dst-policy is {dst!r}; it must be one of {', '.join(policies)}", reason="USAGE", status=USAGE
        )
    policy = job_pb2.DstPolicy.ValueType(policies.get(dst, 0))
    return [(cron, job_pb2.Schedule(cron=cron, zone=zone, dst_policy=policy))]


def print_preview(title: str, preview: job_pb2.PreviewJobResponse, *, first: bool) -> None:
    if not first:
        print()
    print(f"{title}:")
    for text in preview.schedule_text.split("; "):
        print(f"  {text}")
    if not preview.due:
        print("  no due time from here on")
        return
    output.print_table(("UTC", "local", "clock change"), ((d.utc, d.local, d.clock_change) for d in preview.due))


# ---- revisions


@app.command()
@calling
async def history(
    target: Target,
    job: JobName,
    diff: Annotated[bool, typer.Option("--diff", help="Show what each revision changed.")] = False,
) -> None:
    """List the revisions of a job, newest first: when, by whom, why."""
    from sidecar.cli import job_yaml

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        revisions = await revisions_of(target, channel, tenant, name)
    if target.json:
        output.print_json([calls.as_dict(each) for each in revisions])
        return
    if not diff:
        rows = (
            (each.revision, named.utc_short(each.wall_ms), each.actor or "-",
             f"back to {each.rolled_back_to}" if each.rolled_back_to else "-", each.reason or "-")
            for each in revisions
        )  # fmt: skip
        output.print_table(("revision", "when (UTC)", "who", "rolled", "why"), rows)
        return
    for newer, older in zip(revisions, [*revisions[1:], None], strict=True):
        when = named.utc_short(newer.wall_ms)
        print(f"revision {newer.revision}, {when} by {newer.actor or '-'}: {newer.reason or '-'}")
        if older is not None:
            lines = job_yaml.spec_diff(
                f"{tenant}/{name}", older.spec, newer.spec, f"revision {older.revision}", f"revision {newer.revision}"
            )
            print("\n".join(lines) + "\n")


async def revisions_of(target: Target, channel: grpc.aio.Channel, tenant: str, name: str) -> list[job_pb2.JobRevision]:
    from tenure.v1 import job_pb2

    request = job_pb2.ListJobRevisionsRequest(tenant=tenant, name=name)
    response = await named.stub_of(channel).ListJobRevisions(request, timeout=target.timeout)
    return list(response.revisions)


@app.command()
@calling
async def rollback(
    target: Target,
    job: JobName,
    reason: Reason,
    actor: Actor,
    to: Annotated[
        int, typer.Option("--to", metavar="REVISION", min=0, help="A kept revision.", show_default="the one before")
    ] = 0,
    dry_run: DryRun = False,
) -> None:
    """Make an older revision the newest one, and show what that changes. No time that is past runs again."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job)
    async with target.channel() as channel:
        kept = {each.revision: each for each in await revisions_of(target, channel, tenant, name)}
        now = max(kept)
        wanted = to or now - 1
        if wanted not in kept:
            todo = f"'tenure job history {job}' lists them"
            said = f"revision {wanted} of {job} is not kept; kept are {', '.join(map(str, sorted(kept)))}"
            if now == 1 and not to:
                said, todo = f"{job} has never been changed: there is no older revision than 1", ""
            raise CliError(said, reason="JOB_REVISION_GONE", status=REFUSED, todo=todo)
        lines = spec_change(f"{tenant}/{name}", kept[now], kept[wanted])
        if dry_run:
            print_rollback(target, job, lines, f"would go from revision {now} to what {wanted} was", kept[wanted])
            return
        request = job_pb2.RollbackJobRequest(
            tenant=tenant, name=name, to_revision=wanted, actor=actor, reason=reason,
            request_id=calls.fresh_request_id(),
        )  # fmt: skip
        response = await named.stub_of(channel).RollbackJob(request, timeout=target.timeout)
    done = response.job
    print_rollback(target, job, lines, f"revision {done.revision} is what {wanted} was (it was {now} before)", response)


def spec_change(name: str, before: job_pb2.JobRevision, after: job_pb2.JobRevision) -> list[str]:
    from sidecar.cli import job_yaml

    old, new = f"revision {before.revision}", f"as revision {after.revision}"
    return job_yaml.spec_diff(name, before.spec, after.spec, old, new)


def print_rollback(target: Target, job: str, lines: Sequence[str], said: str, message: Any) -> None:
    if target.json:
        output.print_json(calls.as_dict(message))
        return
    print("\n".join(lines) or "no difference")
    print(f"{job}: {said}")


@app.command()
@calling
async def delete(target: Target, job: JobName, reason: Reason, actor: Actor) -> None:
    """Remove a job: what waits is cancelled, its runs are interrupted, its history stays for its time."""
    from tenure.v1 import job_pb2

    tenant, name = named.job_of(target, job)
    request = job_pb2.DeleteJobRequest(
        tenant=tenant, name=name, actor=actor, reason=reason, request_id=calls.fresh_request_id()
    )
    async with target.channel() as channel:
        response = await named.stub_of(channel).DeleteJob(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"deleted {tenant}/{name}; its history stays for its time ('tenure job occurrences {job}')")
