"""``tenure lease``: who holds what, and taking it from them."""

from __future__ import annotations

from typing import Annotated

import typer

from sidecar.cli import calls, output, shown
from sidecar.cli.calls import Target, calling
from sidecar.cli.options import Actor, Limit, Reason

app = typer.Typer(help="See who holds what; take a lease from its holder.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Token = Annotated[int, typer.Option("--token", help="Token of the grant that is meant, so that no later one is hit.")]


@app.command("ls")
@calling
async def list_(
    target: Target,
    prefix: Annotated[str, typer.Argument(help="Only names that start with this.")] = "",
    limit: Limit = 0,
) -> None:
    """List the leases that are held or waited for."""
    from tenure.v1 import lease_pb2, lease_pb2_grpc

    request = lease_pb2.ListLeasesRequest(tenant=target.tenant, prefix=prefix)
    async with target.channel() as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        leases = await calls.pages(stub.ListLeases, request, "leases", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(lease) for lease in leases])
        return
    rows: list[tuple[object, ...]] = []
    for lease in leases:
        about = (f"{lease.holder_count}/{lease.capacity}", lease.waiter_count)
        rows += [
            (lease.name, h.session_id, h.agent or "-", h.token, shown.duration(h.remaining_ms), *about)
            for h in lease.holders
        ] or [(lease.name, "-", "-", "-", "-", *about)]
    output.print_table(("lease", "holder", "agent", "token", "remaining", "held", "waiting"), rows)


@app.command()
@calling
async def get(target: Target, name: Name) -> None:
    """Show one lease: its holders, and who waits for it."""
    from tenure.v1 import lease_pb2, lease_pb2_grpc

    async with target.channel() as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        response = await stub.GetLease(
            lease_pb2.GetLeaseRequest(tenant=target.tenant, name=name), timeout=target.timeout
        )
    if target.json:
        output.print_json(calls.as_dict(response))
        return
    lease = response.lease
    print(f"lease    {name}: {lease.holder_count} of {lease.capacity or 1} held, {lease.waiter_count} waiting")
    for holder in lease.holders:
        print(f"holder   {holder.session_id} ({holder.agent or 'no name'} on {holder.host or 'unknown host'})")
        print(f"         token {holder.token}, lasts {shown.duration(holder.remaining_ms)} unless renewed")
        if holder.metadata:
            print(f"         {holder.metadata}")
    for place, waiter in enumerate(lease.waiters, 1):
        print(f"waiter   {place}. {waiter.session_id}, priority {waiter.priority}")


@app.command()
@calling
async def release(target: Target, name: Name, token: Token, reason: Reason, actor: Actor) -> None:
    """Take a lease from its holder, as an operator. The holder is told at once; the next in line is granted it."""
    from tenure.v1 import lease_pb2, lease_pb2_grpc

    request = lease_pb2.ReleaseLeaseRequest(
        tenant=target.tenant, name=name, token=token, actor=actor, reason=reason, request_id=calls.fresh_request_id()
    )
    async with target.channel() as channel:
        response = await lease_pb2_grpc.LeaseServiceStub(channel).ReleaseLease(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"released {name}, token {token} (revision {response.revision})")


@app.command()
@calling
async def transfer(
    target: Target,
    name: Name,
    token: Token,
    to: Annotated[str, typer.Option("--to", metavar="SESSION", help="The session that gets it.", show_default=False)],
    reason: Reason,
    actor: Actor,
) -> None:
    """Hand a lease to another session in one step: a new token, no gap, no overlap."""
    from tenure.v1 import lease_pb2, lease_pb2_grpc

    request = lease_pb2.TransferLeaseRequest(
        tenant=target.tenant, name=name, token=token, to_session_id=to, actor=actor, reason=reason,
        request_id=calls.fresh_request_id(),
    )  # fmt: skip
    async with target.channel() as channel:
        response = await lease_pb2_grpc.LeaseServiceStub(channel).TransferLease(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    else:
        print(f"transferred {name} to {to}: token {response.token} (was {token})")
