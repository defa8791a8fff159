"""``tenure kill, pause, drain, resume`` and ``switch``: stop scheduled work, and let it go on.

A scope is a job, a tenant (``--tenant`` on the command line; that of the environment only says whose names are meant)
or the fleet. ``tenure runs`` and ``tenure interrupt RUN``: what runs now, and stopping one of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import calls, named, output, shown, times
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import REFUSED, UNKNOWN, USAGE, CliError
from sidecar.cli.options import Actor, Limit, Reason

if TYPE_CHECKING:
    import grpc.aio
    from tenure.v1 import job_pb2, switch_pb2

app = typer.Typer(help="Switches: what is stopped, by whom, since when and why.", no_args_is_help=True)

POLL_S = 0.1
# So many runs that did not acknowledge are named.
SILENT_MAX = 50
# Beyond the longest grace of a run the core has ended it, acknowledged or not.
WAIT_DEFAULT = "60s"

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="The job: NAME, or TENANT/NAME. Without it: all of --tenant, or --fleet.",
        show_default=False,
    ),
]
Fleet = Annotated[bool, typer.Option("--fleet", help="All jobs of all tenants.")]
Expiry = Annotated[
    str,
    typer.Option(
        "--for", metavar="DURATION", help="It ends by itself after this, as 30m.", show_default="until cleared"
    ),
]


@dataclass(frozen=True)
class Scope:
    """What a switch is for. Both empty: the fleet; no job: the tenant."""

    tenant: str
    job: str

    def __str__(self) -> str:
        if self.job:
            return f"job {self.tenant}/{self.job}"
        return f"tenant {self.tenant}" if self.tenant else "the fleet"

    @property
    def number(self) -> switch_pb2.SwitchScope.ValueType:
        from tenure.v1 import switch_pb2

        if self.job:
            return switch_pb2.SWITCH_SCOPE_JOB
        return switch_pb2.SWITCH_SCOPE_TENANT if self.tenant else switch_pb2.SWITCH_SCOPE_FLEET

    @property
    def words(self) -> str:
        """As the commands are told it."""
        if self.job:
            return f"{self.tenant}/{self.job}"
        return f"--tenant {self.tenant}" if self.tenant else "--fleet"


def said_tenant(context: typer.Context) -> bool:
    """Whether --tenant stands on the command line. That of the environment only says whose names are meant."""
    source = context.get_parameter_source("tenant")
    return source is not None and source.name == "COMMANDLINE"


def scope_of(target: Target, context: typer.Context, job: str, fleet: bool) -> Scope:
    said = said_tenant(context)
    if (job and fleet) or (fleet and said) or not (job or fleet or said):
        raise CliError("say what is meant: JOB, --tenant TENANT, or --fleet", reason="USAGE", status=USAGE)
    if job:
        return Scope(*named.job_of(target, job))
    return Scope("" if fleet else target.tenant, "")


def scope_shown(switch: switch_pb2.Switch) -> str:
    return str(Scope(switch.tenant, switch.job))


def stub_of(channel: grpc.aio.Channel) -> Any:
    from tenure.v1 import switch_pb2_grpc

    return switch_pb2_grpc.SwitchServiceStub(channel)


# ---- set


async def put(
    target: Target, scope: Scope, mode: str, actor: str, reason: str, expiry: str, channel: grpc.aio.Channel
) -> switch_pb2.SetSwitchResponse:
    from tenure.v1 import switch_pb2

    request = switch_pb2.SetSwitchRequest(
        scope=scope.number, tenant=scope.tenant, job=scope.job, mode=switch_pb2.SwitchMode.Value(f"SWITCH_MODE_{mode}"),
        actor=actor, reason=reason, request_id=calls.fresh_request_id(),
    )  # fmt: skip
    if expiry:
        request.expires_after_ms = times.option_duration(expiry, "--for")
    response: switch_pb2.SetSwitchResponse = await stub_of(channel).SetSwitch(request, timeout=target.timeout)
    return response


def say_set(scope: Scope, response: switch_pb2.SetSwitchResponse, what: str) -> None:
    switch = response.switch
    until = f", ends by itself in {shown.duration(switch.remaining_ms)}" if switch.remaining_ms else ""
    print(f"{scope} is {what} (switch {switch.switch_id}{until})")
    if response.replaced_switch_id:
        print(f"  it took the place of switch {response.replaced_switch_id}")
    print(f"  to end it: tenure resume {scope.words} --reason '...'")


def simple(mode: str, what: str, help_: str) -> Callable[..., None]:
    """The commands that set a switch and are done."""

    async def command(
        target: Target,
        context: typer.Context,
        reason: Reason,
        actor: Actor,
        job: Job = "",
        fleet: Fleet = False,
        expiry: Expiry = "",
    ) -> None:
        scope = scope_of(target, context, job, fleet)
        async with target.channel() as channel:
            response = await put(target, scope, mode, actor, reason, expiry, channel)
        if target.json:
            output.print_json(calls.as_dict(response))
        else:
            say_set(scope, response, what)
            left = response.switch.runs_left
            print(
                f"  {left} {'run' if left == 1 else 'runs'} in it go on to their end"
                if left
                else "  nothing runs in it"
            )

    command.__doc__ = help_
    return calling(command)


pause = simple(
    "PAUSE",
    "paused",
    """Start nothing new: what becomes due is skipped, retries wait. What runs goes on.

    Nothing that is skipped is made up for at the end of the pause; 'tenure job backfill' does that.
    """,
)
drain = simple(
    "DRAIN",
    "draining",
    """Start nothing new, and let what has begun come to its end, with its retries.

    Nothing that is skipped is made up for afterwards; 'tenure job backfill' does that.
    """,
)


@calling
async def kill(
    target: Target,
    context: typer.Context,
    reason: Reason,
    actor: Actor,
    job: Job = "",
    fleet: Fleet = False,
    expiry: Expiry = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the runs have ended.")] = True,
    wait_max: Annotated[str, typer.Option("--wait-max", metavar="DURATION", help="How long at most.")] = WAIT_DEFAULT,
) -> None:
    """Stop at once: nothing starts, runs are interrupted, retries are cancelled, older tokens are refused.

    Waits until the interrupted runs have ended, and says how long that took and who did not acknowledge. Exit status 3
    if some did not, or still run: the switch is in force all the same, but whether their work has stopped is not known.
    """
    scope = scope_of(target, context, job, fleet)
    limit_s = times.option_duration(wait_max, "--wait-max") / 1_000
    async with target.channel() as channel:
        response = await put(target, scope, "KILL", actor, reason, expiry, channel)
        switch = response.switch
        silent: list[job_pb2.Run] = []
        if not target.json:
            say_set(scope, response, "killed")
        if wait and switch.runs_at_set:
            told = await interrupted(target, channel, switch)
            if switch.runs_left:
                target.say(
                    f"  waiting for the end of {shown.counted(switch.runs_left, 'run')} (Ctrl-C ends only the waiting)"
                )
            switch = await effect(target, channel, switch, limit_s)
            if switch.runs_left or switch.runs_unacknowledged:
                silent = await not_acknowledged(target, channel, told)
    if target.json:
        response.switch.CopyFrom(switch)
        output.print_json(calls.as_dict(response) | {"not_acknowledged": [calls.as_dict(run) for run in silent]})
    else:
        print("\n".join(effect_lines(switch, silent, waited=wait)))
    if wait and (switch.runs_left or switch.runs_unacknowledged):
        raise typer.Exit(UNKNOWN)


async def interrupted(target: Target, channel: grpc.aio.Channel, switch: switch_pb2.Switch) -> list[job_pb2.Run]:
    """The runs in the scope that are told to stop; those of the fleet as far as this tenant sees them."""
    found = await runs_of(target, channel, switch.tenant or target.tenant, switch.job)
    return [run for run in found if run.interrupted]


async def effect(
    target: Target, channel: grpc.aio.Channel, switch: switch_pb2.Switch, limit_s: float
) -> switch_pb2.Switch:
    """The switch when its runs have ended, or the time is up."""
    from tenure.v1 import switch_pb2

    until = time.monotonic() + limit_s
    request = switch_pb2.GetSwitchRequest(switch_id=switch.switch_id, tenant=switch.tenant)
    while switch.runs_left and time.monotonic() < until:
        await asyncio.sleep(POLL_S)
        switch = (await stub_of(channel).GetSwitch(request, timeout=target.timeout)).switch
    return switch


async def not_acknowledged(target: Target, channel: grpc.aio.Channel, told: list[job_pb2.Run]) -> list[job_pb2.Run]:
    """Those that have not said that their work has stopped: by the stories of their occurrences."""
    from tenure.v1 import job_pb2

    silent = []
    for run in told[:SILENT_MAX]:
        request = job_pb2.ExplainOccurrenceRequest(tenant=run.tenant, job=run.job, due_wall_ms=run.due_wall_ms)
        story = await named.stub_of(channel).ExplainOccurrence(request, timeout=target.timeout)
        for occurrence in story.occurrences:
            unknown = occurrence.state == job_pb2.OCCURRENCE_STATE_UNKNOWN or occurrence.run_id == run.run_id
            if occurrence.sequence == run.sequence and unknown:
                silent.append(run)
    return silent


def effect_lines(switch: switch_pb2.Switch, silent: list[job_pb2.Run], *, waited: bool) -> list[str]:
    if not switch.runs_at_set:
        return ["  nothing ran in it"]
    lines = []
    if switch.runs_ended:
        took = shown.duration(switch.effect_ms)
        ran = shown.counted(switch.runs_at_set, "run")
        lines.append(f"  {switch.runs_ended} of {ran} ended, the slowest after {took}")
    if switch.runs_unacknowledged:
        lines.append(
            f"  {switch.runs_unacknowledged} of them WITHOUT an acknowledgement: their work may go on, "
            "see to the processes themselves"
        )
    if switch.runs_left:
        still = "not ended yet" if waited else "told to stop; 'tenure switch show' tells how it goes"
        lines.append(f"  {shown.counted(switch.runs_left, 'run')} {still}")
    for run in silent:
        who = f"{run.agent or 'an agent'} on {run.host or 'an unknown host'}, session {run.session_id}"
        lines.append(f"    {run.tenant}/{run.job} {run.run_id}: {who}")
    return lines


# ---- clear


@calling
async def resume(
    target: Target,
    context: typer.Context,
    reason: Reason,
    actor: Actor,
    job: Job = "",
    fleet: Fleet = False,
    id_: Annotated[
        str, typer.Option("--id", metavar="SWITCH", help="Only if the switch in force is this one.", show_default=False)
    ] = "",
) -> None:
    """End the switch that is in force for a job, a tenant or the fleet. What it suppressed is not made up for."""
    scope = scope_of(target, context, job, fleet)
    async with target.channel() as channel:
        found = await in_force(target, channel, scope)
        if id_ and found.switch_id != id_:
            said = f"switch {found.switch_id} is in force for {scope}, not {id_}"
            raise CliError(
                said, reason="SWITCH_STALE", status=REFUSED, todo=f"look at it: tenure switch show {found.switch_id}"
            )
        await end(target, channel, found.switch_id, found.tenant, actor, reason)


async def in_force(target: Target, channel: grpc.aio.Channel, scope: Scope) -> switch_pb2.Switch:
    """The switch of exactly this scope. Says which ones of a wider scope there are, when it has none."""
    from tenure.v1 import switch_pb2

    request = switch_pb2.ListSwitchesRequest(tenant=scope.tenant)
    found = await calls.pages(stub_of(channel).ListSwitches, request, "switches", 0, target.timeout)
    if scope.tenant:
        request = switch_pb2.ListSwitchesRequest()
        every = await calls.pages(stub_of(channel).ListSwitches, request, "switches", 0, target.timeout)
        found += [each for each in every if not each.tenant]
    exact = [each for each in found if each.active and (each.tenant, each.job) == (scope.tenant, scope.job)]
    if exact:
        switch: switch_pb2.Switch = exact[0]
        return switch
    wider = [each for each in found if each.active and each.tenant in ("", scope.tenant) and not each.job]
    todo = "; ".join(f"{scope_shown(each)} is under switch {each.switch_id}" for each in wider)
    said = f"no switch is in force for {scope}"
    raise CliError(said, reason="SWITCH_NOT_FOUND", status=REFUSED, todo=todo or "'tenure switch ls' lists them")


async def end(target: Target, channel: grpc.aio.Channel, switch_id: str, tenant: str, actor: str, reason: str) -> None:
    from tenure.v1 import switch_pb2

    request = switch_pb2.ClearSwitchRequest(
        switch_id=switch_id, tenant=tenant, actor=actor, reason=reason, request_id=calls.fresh_request_id()
    )
    response = await stub_of(channel).ClearSwitch(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
        return
    switch = response.switch
    print(f"{scope_shown(switch)} goes on: switch {switch.switch_id} is cleared")
    print(f"  it was set by {switch.actor} at {named.utc_short(switch.set_wall_ms)}: {switch.reason}")
    if switch.suppressed:
        count = shown.counted(switch.suppressed, "due time")
        print(f"  {count} did not run because of it, and will not ('tenure job backfill' runs them)")


# ---- look


@app.command("ls")
@calling
async def list_(
    target: Target,
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Also those that have ended.")] = False,
    limit: Limit = 0,
) -> None:
    """List the switches in force, of the fleet, of tenants and of jobs; with --tenant, those of the tenant only."""
    from tenure.v1 import switch_pb2

    tenant = target.tenant if said_tenant(context) else ""
    request = switch_pb2.ListSwitchesRequest(tenant=tenant, include_ended=every)
    async with target.channel() as channel:
        found = await calls.pages(stub_of(channel).ListSwitches, request, "switches", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(switch) for switch in found])
        return
    rows = (
        (s.switch_id, scope_shown(s), shown.enum(s, "mode"), s.actor, named.utc_short(s.set_wall_ms), lasts(s),
         s.suppressed, s.reason)
        for s in found
    )  # fmt: skip
    output.print_table(("switch", "scope", "mode", "by", "since (UTC)", "lasts", "suppressed", "why"), rows)


def lasts(switch: switch_pb2.Switch) -> str:
    if not switch.active:
        return f"{switch.end_cause} {named.utc_short(switch.ended_wall_ms)}"
    return shown.duration(switch.remaining_ms) if switch.remaining_ms else "until cleared"


SwitchId = Annotated[str, typer.Argument(metavar="SWITCH", help="Its id, as k12.", show_default=False)]


@app.command()
@calling
async def show(target: Target, switch: SwitchId) -> None:
    """Show a switch: who set it and why, and what it did."""
    async with target.channel() as channel:
        found = await find(target, channel, switch)
    if target.json:
        output.print_json(calls.as_dict(found))
        return
    line = named.label
    print(f"{line('switch')}{found.switch_id}: {shown.enum(found, 'mode')} of {scope_shown(found)}")
    print(f"{line('set')}{named.utc_short(found.set_wall_ms)} by {found.actor}: {found.reason}")
    by = f" by {found.end_actor}: {found.end_reason}" if found.end_actor else ""
    print(f"{line('lasts')}{lasts(found)}{by}")
    print(f"{line('did')}{shown.counted(found.suppressed, 'due time')} did not run because of it")
    if found.mode == 3:
        print(f"{line('epoch')}{found.kill_epoch}: what was given out before it is refused")
        print("\n".join(effect_lines(found, [], waited=True)))
    elif found.active:
        print(f"{line('runs')}{found.runs_left} in its scope have not ended")


async def find(target: Target, channel: grpc.aio.Channel, switch_id: str) -> switch_pb2.Switch:
    """By its id alone: the one who looks need not know whose it is."""
    from tenure.v1 import switch_pb2

    request = switch_pb2.ListSwitchesRequest(include_ended=True)
    found = await calls.pages(stub_of(channel).ListSwitches, request, "switches", 0, target.timeout)
    for each in found:
        if each.switch_id == switch_id:
            wanted: switch_pb2.Switch = each
            return wanted
    todo = "'tenure switch ls --all' lists those that are kept"
    raise CliError(f"no switch {switch_id} is known", reason="SWITCH_NOT_FOUND", status=REFUSED, todo=todo)


@app.command()
@calling
async def clear(target: Target, switch: SwitchId, reason: Reason, actor: Actor) -> None:
    """End a switch, by its id. What it suppressed is not made up for."""
    async with target.channel() as channel:
        found = await find(target, channel, switch)
        await end(target, channel, switch, found.tenant, actor, reason)


# ---- runs


async def runs_of(
    target: Target, channel: grpc.aio.Channel, tenant: str, job: str, limit: int = 0
) -> list[job_pb2.Run]:
    from tenure.v1 import job_pb2

    request = job_pb2.ListRunsRequest(tenant=tenant, job=job)
    return await calls.pages(named.stub_of(channel).ListRuns, request, "runs", limit, target.timeout)


@calling
async def runs(
    target: Target,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The job: NAME, or TENANT/NAME.", show_default="all of the tenant")
    ] = "",
    limit: Limit = 0,
) -> None:
    """List what runs now: who, which attempt, how long it may take."""
    tenant, name = named.job_of(target, job) if job else (target.tenant, "")
    async with target.channel() as channel:
        found = await runs_of(target, channel, tenant, name, limit)
    if target.json:
        output.print_json([calls.as_dict(run) for run in found])
        return
    rows = (
        (r.run_id, r.job, named.utc_short(r.due_wall_ms), r.attempt, r.agent or "-", r.host or "-", r.session_id,
         f"stopping: {r.interrupt_cause}" if r.interrupted else "running", shown.duration(r.remaining_ms))
        for r in found
    )  # fmt: skip
    output.print_table(("run", "job", "due (UTC)", "attempt", "agent", "host", "session", "state", "left"), rows)


@calling
async def interrupt(
    target: Target,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Its id, as 'tenure runs' shows it.", show_default=False)],
    reason: Reason,
    actor: Actor,
) -> None:
    """Stop one run. Its occurrence is cancelled and not tried again; the job goes on with its next due time."""
    from tenure.v1 import job_pb2

    request = job_pb2.InterruptRunRequest(
        tenant=target.tenant, run_id=run, actor=actor, reason=reason, request_id=calls.fresh_request_id()
    )
    async with target.channel() as channel:
        response = await named.stub_of(channel).InterruptRun(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
        return
    found = response.run
    who = f"{found.agent or 'its agent'} on {found.host or 'an unknown host'}"
    print(f"{run} of {found.job}: {who} is told to stop, and has {shown.duration(found.remaining_ms)} for it")
    print(f"  tenure explain {found.tenant}/{found.job} {times.rfc3339(found.due_wall_ms)}")
