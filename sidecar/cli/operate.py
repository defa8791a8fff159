"""``tenure status``, ``health``, ``session ls``, ``watch`` and ``cluster``: the cluster as an operator sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import calls, output, shown
from sidecar.cli.calls import Target, calling
from sidecar.cli.failures import REFUSED, CliError
from sidecar.cli.options import Limit

if TYPE_CHECKING:
    from tenure import Event
    from tenure.v1 import cluster_pb2

# Less is the ordinary time between a due time and its entry in the log.
SCHEDULE_LAG_SHOWN_MS = 2_000

sessions = typer.Typer(help="The agents that are alive.", no_args_is_help=True)
cluster = typer.Typer(help="Leadership, snapshots and digests.", no_args_is_help=True)


async def get_status(target: Target) -> cluster_pb2.GetStatusResponse:
    from tenure.v1 import cluster_pb2, cluster_pb2_grpc

    async with target.channel(ready=False) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        return await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=target.timeout)


@calling
async def status(target: Target) -> None:
    """Show what the sidecar knows of itself and of the cluster. Answers without a majority, too."""
    now = await get_status(target)
    if target.json:
        output.print_json(calls.as_dict(now))
        return
    state = "ready" if now.ready else f"NOT READY: {now.not_ready_reason}"
    draining = ", draining" if now.draining else ""
    print(f"node      {now.node_id} of cluster {now.cluster_id}, {shown.enum(now, 'role')}{draining}; {state}")
    print(f"leader    {now.leader_id or 'none known'}, term {now.term}" + ("" if now.voter else "; not a voter yet"))
    print(f"log       applied {now.applied_index} of {now.commit_index} committed, {now.last_index} stored,", end=" ")
    print(f"snapshot {now.snapshot_index}")
    state = ", ".join(shown.counted(getattr(now, f"{noun}s"), noun) for noun in ("session", "lease", "record"))
    print(f"state     {state}, revision {now.revision}")
    print_work(now)
    print(f"process   version {now.version}, up {shown.duration(now.uptime_ms)}, wall clock {shown.wall(now.wall_ms)}")
    for warning in now.warnings:
        print(f"WARNING   {warning}")
    leads = now.role == 3
    rows = (
        (p.node_id, p.address, "yes" if p.connected else "NO", p.match_index if leads else "-",
         shown.duration(p.last_contact_ms) if leads else "-")
        for p in now.peers
    )  # fmt: skip
    if now.peers:
        print()
        output.print_table(("peer", "address", "connected", "stored", "last answer"), rows)


def print_work(now: cluster_pb2.GetStatusResponse) -> None:
    """Jobs, what stops them, and whether their due times are computed."""
    kept = shown.counted(now.occurrences, "occurrence")
    print(f"jobs      {shown.counted(now.jobs, 'job')}, {now.runs} running, {kept} kept")
    stopped = f"{now.switches} IN FORCE; 'tenure switch ls' tells" if now.switches else "none in force"
    print(f"switches  {stopped}; kill epoch {now.kill_epoch}")
    if now.schedule_held_reason:
        print(f"schedules HELD BACK: {now.schedule_held_reason}")
    elif now.schedule_lag_ms > SCHEDULE_LAG_SHOWN_MS:
        print(f"schedules {shown.duration(now.schedule_lag_ms)} behind")
    if now.cluster_tzdata_version and now.tzdata_version != now.cluster_tzdata_version:
        print(f"zones     this node has tzdata {now.tzdata_version}, the cluster goes by {now.cluster_tzdata_version}")


@calling
async def health(
    target: Target,
    ready: Annotated[
        bool, typer.Option("--ready", help="Ask whether it can serve, not only whether it is alive.")
    ] = False,
) -> None:
    """Say whether the sidecar is alive (for a container's health check); with --ready, whether it can serve."""
    now = await get_status(target)
    if target.json:
        output.print_json({"alive": True, "ready": now.ready, "reason": now.not_ready_reason})
    if ready and not now.ready:
        raise CliError(f"{now.node_id} is not ready: {now.not_ready_reason}", reason="NOT_READY", status=REFUSED)
    if not target.json:
        print("ready" if now.ready else f"alive; not ready: {now.not_ready_reason}")


@sessions.command("ls")
@calling
async def list_sessions(target: Target, limit: Limit = 0) -> None:
    """List the sessions of a tenant."""
    from tenure.v1 import session_pb2, session_pb2_grpc

    request = session_pb2.ListSessionsRequest(tenant=target.tenant)
    async with target.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        found = await calls.pages(stub.ListSessions, request, "sessions", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(session) for session in found])
        return
    rows = (
        (s.session_id, s.info.agent or "-", s.info.version or "-", s.info.host or "-", s.node_id or "-",
         "yes" if s.connected else "no", shown.duration(s.remaining_ms), shown.duration(s.ttl_ms))
        for s in found
    )  # fmt: skip
    output.print_table(("session", "agent", "version", "host", "node", "connected", "remaining", "ttl"), rows)


@calling
async def watch(
    target: Target,
    from_revision: Annotated[
        int, typer.Option("--from", metavar="REVISION", min=0, help="First revision to show; 0 shows what is to come.")
    ] = 0,
    prefix: Annotated[str, typer.Option("--prefix", help="Only subjects that start with this.")] = "",
    count: Annotated[int, typer.Option("--count", min=0, help="End after this many events; 0 goes on for ever.")] = 0,
) -> None:
    """Follow the change stream, one event a line. Goes on by itself where it was when the sidecar restarts."""
    import tenure

    client = await tenure.connect(
        target.address, tenant=target.tenant, credentials=target.credentials(), session=False, timeout=target.timeout
    )
    async with client:
        await target.tell_if_nobody_listens()
        seen = 0
        async for event in client.watch(from_revision, subject_prefix=prefix):
            print_event(event, target.json)
            seen += 1
            if seen == count:
                return


def print_event(event: Event, json: bool) -> None:
    facts = {
        "session": event.session_id, "token": event.token, "attempt": event.attempt, "cause": event.cause,
        "actor": event.actor, "reason": event.reason,
    }  # fmt: skip
    kind = event.kind.name.lower()
    if json:
        known = {"revision": event.revision, "kind": kind, "tenant": event.tenant, "subject": event.subject}
        output.print_json(known | facts | {"cluster_ms": event.cluster_ms, "wall_ms": event.wall_ms})
    else:
        told = " ".join(f"{name}={value}" for name, value in facts.items() if value and value != event.subject)
        print(
            f"{event.revision:>6}  {shown.wall(event.wall_ms)}  {kind:<18} {event.subject}  {told}".rstrip(), flush=True
        )


@cluster.command("transfer-leader")
@calling
async def transfer_leader(
    target: Target,
    to: Annotated[str, typer.Argument(metavar="NODE", help="The node that is to lead; the most caught-up one.")] = "",
) -> None:
    """Move Raft leadership to another node, without an outage. May be asked of any node."""
    from tenure.v1 import cluster_pb2, cluster_pb2_grpc

    async with target.channel() as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        response = await stub.TransferLeadership(
            cluster_pb2.TransferLeadershipRequest(to_node_id=to), timeout=target.timeout
        )
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"{response.leader_id} leads, term {response.term}")


@cluster.command()
@calling
async def snapshot(target: Target) -> None:
    """Make this node write a snapshot now and compact its log."""
    from tenure.v1 import cluster_pb2, cluster_pb2_grpc

    async with target.channel(ready=False) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        response = await stub.TakeSnapshot(cluster_pb2.TakeSnapshotRequest(), timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"snapshot of index {response.snapshot_index}, {response.size_bytes} bytes")


@cluster.command()
@calling
async def digest(target: Target) -> None:
    """Print the digest of the state. Two nodes at the same applied index must show the same."""
    from tenure.v1 import cluster_pb2, cluster_pb2_grpc

    async with target.channel(ready=False) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        response = await stub.GetDigest(cluster_pb2.GetDigestRequest(), timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"{response.digest}  applied index {response.read.applied_index}")
