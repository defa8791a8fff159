"""``tenure job import crontab`` and ``cronjob``: what people have, as a file of jobs, and a report of what is lost.

The file goes to standard output, the report to standard error. What the file says behaves as before wherever this is
possible: cron and Kubernetes have no time limit of their own, so the limit is a day; cron never repeats a command, so
there is one attempt. Every job is checked as 'apply' would before it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import output, shown
from sidecar.cli.failures import REFUSED, USAGE, CliError
from sidecar.cli.options import DEFAULT_TENANT, Json, Tenant

if TYPE_CHECKING:
    from tenure.v1 import job_pb2

app = typer.Typer(help="Make a file of jobs out of a crontab or of Kubernetes CronJobs.", no_args_is_help=True)

NAME_BYTES_MAX = 128
COMMENT_CHARS_MAX = 400

Owner = Annotated[
    str,
    typer.Option("--owner", help="The owner of the jobs: a team or a person that can be asked.", show_default=False),
]
RunbookUrl = Annotated[
    str, typer.Option("--runbook-url", metavar="URL", help="What to do when they fail.", show_default=False)
]
Zone = Annotated[
    str,
    typer.Option("--zone", help="The IANA zone where the file does not say one, as Europe/Berlin.", show_default="UTC"),
]
Out = Annotated[Path | None, typer.Option("--out", help="Write the jobs there.", show_default="standard output")]


@dataclass
class Imported:
    """A job, and what stands above it in the file."""

    definition: job_pb2.JobDefinition
    place: str
    comments: list[str] = field(default_factory=list)
    # What its worker would run, as a shell reads it; and of a crontab's line the command itself.
    command: str = ""
    argument: str = ""


@dataclass
class Report:
    """What a person must know of the import, in order: ``lost`` is what no longer happens, ``notes`` the rest."""

    lines: list[str] = field(default_factory=list)
    lost: int = 0

    def lose(self, place: str, text: str) -> None:
        self.lost += 1
        self.lines.append(f"{place}: NOT carried over: {text}")

    def note(self, place: str, text: str) -> None:
        self.lines.append(f"{place}: {text}")


@app.command()
def crontab(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A crontab, as 'crontab -l' prints it.")],
    owner: Owner,
    runbook_url: RunbookUrl,
    zone: Zone = "",
    user_field: Annotated[
        bool, typer.Option("--user-field", help="The sixth field is a user, as in /etc/crontab and /etc/cron.d.")
    ] = False,
    out: Out = None,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
) -> None:
    """Print the jobs of a crontab as YAML for 'tenure job apply', and say what could not be carried over."""
    from sidecar.cli import import_crontab

    report = Report()
    found = import_crontab.read(
        text_of(file), str(file), tenant, owner, runbook_url, zone, report, user_field=user_field
    )
    finish(found, report, out, json=json)


@app.command()
def cronjob(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="YAML, as 'kubectl get cronjobs -o yaml' prints.")
    ],
    owner: Owner,
    runbook_url: RunbookUrl,
    zone: Zone = "",
    out: Out = None,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
) -> None:
    """Print Kubernetes CronJobs as YAML for 'tenure job apply', and say what could not be carried over."""
    from sidecar.cli import import_cronjob

    report = Report()
    found: list[Imported] = []
    for file in files:
        found += import_cronjob.read(text_of(file).encode(), str(file), tenant, owner, runbook_url, zone, report)
    finish(found, report, out, json=json)


def text_of(file: Path) -> str:
    from sidecar.cli.job_files import content_of

    try:
        return content_of(str(file)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(f"{file}: not UTF-8", reason="USAGE", status=USAGE) from error


def finish(found: list[Imported], report: Report, out: Path | None, *, json: bool) -> None:
    kept = checked(unique(found), report)
    text = file_of(kept)
    for line in report.lines if not json else []:
        typer.echo(line, err=True)
    if not kept:
        raise CliError("no job could be carried over", reason="IMPORT", status=REFUSED, todo="the lines above say why")
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise CliError(f"{out}: {error.strerror}", reason="USAGE", status=USAGE) from error
    if json:
        output.print_json({"jobs": len(kept), "not_carried_over": report.lost, "report": report.lines, "yaml": text})
        return
    if out is None:
        typer.echo(text, nl=False)
    lost = "nothing is lost" if not report.lost else f"{shown.counted(report.lost, 'thing')} not carried over"
    remarks = f", {shown.counted(len(report.lines), 'remark')} above" if report.lines else ""
    typer.echo(f"{shown.counted(len(kept), 'job')}; {lost}{remarks}", err=True)
    typer.echo(f"next: tenure job apply --dry-run -f {out or 'FILE'}", err=True)


def unique(found: list[Imported]) -> list[Imported]:
    """Names that were taken before get a number."""
    taken: set[tuple[str, str]] = set()
    for each in found:
        definition, base, number = each.definition, each.definition.name, 1
        while (definition.tenant, definition.name) in taken:
            number += 1
            definition.name = f"{base[: NAME_BYTES_MAX - 8]}-{number}"
        taken.add((definition.tenant, definition.name))
    return found


def checked(found: list[Imported], report: Report) -> list[Imported]:
    """Those that 'apply' accepts; why it does not accept the others."""
    from sidecar.cli.job_files import Reader
    from sidecar.cli.job_yaml import file_of as plain_file_of

    kept = []
    for each in found:
        reader = Reader("import", each.definition.tenant)
        reader.read(plain_file_of([each.definition]).encode())
        for problem in reader.problems:
            report.lose(each.place, f"{each.definition.name}: {problem.text}")
        if not reader.problems:
            kept.append(each)
    return kept


def file_of(found: list[Imported]) -> str:
    from sidecar.cli.job_yaml import dump, fields_of

    lines = ["jobs:"]
    for each in found:
        named = f"{each.definition.tenant}/{each.definition.name}"
        worker = [f"its worker: tenure worker --job {named} -- {each.command}"] if each.command else []
        lines += [f"  # {comment(text)}" for text in each.comments + worker]
        lines += [f"  {line}" if line else "" for line in dump([fields_of(each.definition)]).splitlines()]
    return "\n".join(lines) + "\n"


def comment(text: str) -> str:
    """One printable line, whatever the source had."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= COMMENT_CHARS_MAX else shown[:COMMENT_CHARS_MAX] + "..."


def valid_name(text: str) -> str:
    """A job's name out of any text."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text).strip("-._")
    return kept[: NAME_BYTES_MAX - 8].strip("-._") or "job"
