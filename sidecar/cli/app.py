"""All commands in one place. Modules named here are light: what a command needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sidecar.cli import (
    dev,
    explain,
    imports,
    jobs,
    leases,
    lock,
    occurrences,
    operate,
    records,
    serve,
    setup,
    switches,
    worker,
)
from sidecar.cli.settings_flags import PASS_ON

HELP = """Tenure: each scheduled job of an agent with N replicas runs on exactly one of them.

Exit statuses: 0 done; 1 refused, it did not happen; 2 wrong usage or configuration; 3 not known, it may have happened;
4 no sidecar, leader or majority could be reached; 130 interrupted.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("tenure-sidecar"))
        raise typer.Exit


@app.callback()
def tenure(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command("serve", help=serve.HELP, context_settings=PASS_ON)(serve.serve)
app.add_typer(dev.app, name="dev")
app.command("status")(operate.status)
app.command("health")(operate.health)
app.add_typer(jobs.app, name="job")
jobs.app.command()(occurrences.trigger)
jobs.app.command()(occurrences.backfill)
jobs.app.command()(occurrences.occurrences)
jobs.app.command()(occurrences.held)
jobs.app.command()(occurrences.resolve)
jobs.app.add_typer(imports.app, name="import")
app.command("explain")(explain.explain)
app.command("runs")(switches.runs)
app.command("interrupt")(switches.interrupt)
app.command("kill")(switches.kill)
app.command("pause")(switches.pause)
app.command("drain")(switches.drain)
app.command("resume")(switches.resume)
app.add_typer(switches.app, name="switch")
app.command("worker", help=worker.HELP)(worker.worker)
app.command("lock", help=lock.HELP)(lock.lock)
app.add_typer(leases.app, name="lease")
app.add_typer(records.app, name="dedup")
app.add_typer(operate.sessions, name="session")
app.command("watch")(operate.watch)
app.add_typer(operate.cluster, name="cluster")
app.command("certs")(setup.certs)
app.add_typer(setup.config, name="config")
