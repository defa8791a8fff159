"""``tenure dev``: a cluster on this machine to look at and to break."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from sidecar.cli import output
from sidecar.cli.failures import USAGE, CliError
from sidecar.cli.options import Json

HELP = """Run three sidecars and three agents on this machine, with a live view.

The agents work for the jobs of examples/jobs.yaml; each due time is worked on by one of them. Break things while they
work, with the keys of the view or from a second terminal:

tenure dev kill leader (or holder, node 2, agent 2); partition 2; heal; restart (or restart node 2); status

A killed agent is started again after 2 seconds, as an orchestrator would. A killed node stays down until 'restart'.
Ctrl-C ends everything and removes the state folder, unless --keep is given.
"""

app = typer.Typer(help=HELP, invoke_without_command=True)

StateDir = Annotated[
    Path,
    typer.Option("--state-dir", help="The folder of the cluster; one cluster at a time in each."),
]
Words = Annotated[list[str], typer.Argument(metavar="leader | holder | node N | agent N", show_default=False)]
DEFAULT_STATE_DIR = Path(".tenure/dev")
CHECKOUT = Path(__file__).resolve().parents[2]


@app.callback()
def dev(
    context: typer.Context,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    examples: Annotated[
        Path,
        typer.Option(help="The folder with the agents, jobs.yaml and inbox/.", show_default="examples of the checkout"),
    ] = CHECKOUT / "examples",
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on with the data of the last run, and keep it at the end.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of drawing a screen.")] = False,
) -> None:
    context.obj = state_dir
    if context.invoked_subcommand is not None:
        return
    from sidecar.dev.run import Options, run

    raise typer.Exit(asyncio.run(run(Options(state=state_dir, examples=examples, keep=keep, plain=plain))))


@app.command()
def kill(context: typer.Context, target: Words, json: Json = False) -> None:
    """Kill -9 the Raft leader, the agent at work, or a certain node or agent."""
    report(order(context, {"order": "kill", "target": name_of(target)}), json)


@app.command()
def partition(
    context: typer.Context,
    target: Annotated[list[str], typer.Argument(metavar="N | leader | holder", show_default=False)],
    one_way: Annotated[bool, typer.Option("--one-way", help="It still hears the others; they do not hear it.")] = False,
    json: Json = False,
) -> None:
    """Cut a node off from the others: packets vanish, connections stay open. 'holder': the node beside it."""
    report(order(context, {"order": "partition", "target": name_of(target), "one_way": one_way}), json)


@app.command()
def heal(context: typer.Context, json: Json = False) -> None:
    """Make all links whole again."""
    report(order(context, {"order": "heal"}), json)


@app.command()
def restart(
    context: typer.Context,
    target: Annotated[list[str] | None, typer.Argument(metavar="NODE", show_default="all")] = None,
    json: Json = False,
) -> None:
    """Start the nodes that are down, or stop a certain one and start it again."""
    report(order(context, {"order": "restart", "target": name_of(target or ["all"])}), json)


@app.command()
def status(context: typer.Context, json: Json = False) -> None:
    """Show nodes, agents and how the work goes."""
    facts = order(context, {"order": "status"})["status"]
    if json:
        output.print_json(facts)
        return
    print_status(facts)


def print_status(facts: dict[str, Any]) -> None:
    holder, work = "nobody", facts["work"]
    if facts["holder"]:
        holder = f"{facts['holder']}, token {facts['token']}, for {facts['held_ms'] / 1000:.0f} s"
    done = f"round {work['round']}: {work['finished']} of {work['documents']} documents, {work['posted']} posted in all"
    if facts["program"] != "inbox_agent":
        holder = f"{facts['holder']}, token {facts['token']}" if facts["holder"] else "nobody"
        done = f"{work['posted']} posted in all"
    print(f"leader   {facts['leader'] or 'none'}, term {facts['term']}")
    print(f"holder   {holder}")
    print(f"work     {done}")
    print(f"counts   twice {work['twice']}, never {work['never']}, partial {work['partial']}\n")
    columns = ("name", "role", "term", "applied", "health", "cut_off", "pid", "address")
    nodes = ([node[column] or "-" for column in columns] for node in facts["nodes"])
    output.print_table(("node", *columns[1:5], "cut off", *columns[6:]), nodes)
    print()
    output.print_table(
        ("agent", "running", "pid"),
        ((a["name"], "yes" if a["running"] else "no", a["pid"] or "-") for a in facts["agents"]),
    )
    print("\nmetrics  " + ", ".join(f"{name} {url}/metrics" for name, url in facts["http"].items()))
    if facts["jobs"]:
        print()
        output.print_table(("job", "schedule", "switch", "now", "ok", "failed", "last"), map(job_row, facts["jobs"]))


SCHEDULE_MAX = 48  # of a description that is a sentence or two; tenure job show has the whole


def job_row(job: dict[str, Any]) -> tuple[object, ...]:
    totals = job["totals"]
    switch = f"{job['mode']} {job['switch']}" if job["switch"] else "-"
    now = ", ".join(run["agent"] for run in job["runs"]) or "-"
    last = job["last"][0]["outcome"] if job["last"] else "-"
    schedule = textwrap.shorten(job["schedule"], SCHEDULE_MAX, placeholder=" ...")
    return (job["name"], schedule, switch, now, totals["succeeded"], totals["failed"], last)


def name_of(words: list[str]) -> str:
    """``node 2``, ``n2`` and ``2`` are one node; ``agent 2`` and ``agent-2`` one agent."""
    match words:
        case ["node", number]:
            return f"n{number.removeprefix('n')}"
        case ["agent", number]:
            return f"agent-{number.removeprefix('agent-')}"
        case [word]:
            return word
    raise CliError(f"not understood: {' '.join(words)}", reason="USAGE", status=USAGE, todo="see 'tenure dev --help'")


def order(context: typer.Context, what: dict[str, Any]) -> dict[str, Any]:
    from sidecar.dev.folder import Folder
    from sidecar.dev.orders import send

    return asyncio.run(send(str(Folder(context.obj).find_control_socket()), what))


def report(answer: dict[str, Any], json: bool) -> None:
    if json:
        output.print_json(answer)
    else:
        print(answer["said"])
