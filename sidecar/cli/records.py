"""``tenure dedup``: what is known of an idempotency key, and settling what only a person can know."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sidecar.cli import calls, output, shown
from sidecar.cli.calls import Target, calling
from sidecar.cli.options import Actor, Limit, Reason, one_of

app = typer.Typer(help="See what is known of an idempotency key; settle unknown outcomes.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", show_default=False)]


class State(StrEnum):
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    RETRYABLE = "retryable"


class As(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    RETRY = "retry"
    FORGET = "forget"


@app.command("ls")
@calling
async def list_(
    target: Target,
    prefix: Annotated[str, typer.Argument(help="Only keys that start with this.")] = "",
    state: Annotated[
        State | None,
        typer.Option(
            "--state", metavar="STATE", parser=one_of(State), help=f"Only records in this state: {', '.join(State)}."
        ),
    ] = None,
    limit: Limit = 0,
) -> None:
    """List records, without their results."""
    from tenure.v1 import dedup_pb2, dedup_pb2_grpc

    request = dedup_pb2.ListRecordsRequest(tenant=target.tenant, prefix=prefix)
    if state is not None:
        request.state = dedup_pb2.RecordState.Value(f"RECORD_STATE_{state.name}")
    async with target.channel() as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        records = await calls.pages(stub.ListRecords, request, "records", limit, target.timeout)
    if target.json:
        output.print_json([calls.as_dict(record) for record in records])
        return
    rows = ((r.key, shown.enum(r, "state"), r.attempt, r.owner_session_id or "-", r.error or "-") for r in records)
    output.print_table(("key", "state", "attempt", "owner", "error"), rows)


@app.command()
@calling
async def get(target: Target, key: Key) -> None:
    """Show one record and its result."""
    from tenure.v1 import dedup_pb2, dedup_pb2_grpc

    async with target.channel() as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        response = await stub.GetRecord(
            dedup_pb2.GetRecordRequest(tenant=target.tenant, key=key), timeout=target.timeout
        )
    if target.json:
        output.print_json(calls.as_dict(response))
        return
    record = response.record
    print(f"record   {record.key}: {shown.enum(record, 'state')}, attempt {record.attempt}")
    if record.owner_session_id:
        print(f"owner    {record.owner_session_id} (when it is lost: {shown.enum(record, 'owner_loss')})")
    if record.HasField("fence"):
        print(f"fence    {record.fence.lease_name}, token {record.fence.token}")
    if record.error:
        print(f"error    {record.error}")
    if record.state == dedup_pb2.RECORD_STATE_COMPLETED:
        print(f"result   {shown.content(record.result)}")


@app.command()
@calling
async def resolve(
    target: Target,
    key: Key,
    as_: Annotated[
        As,
        typer.Option(
            "--as",
            metavar="OUTCOME",
            parser=one_of(As),
            help="What became of it: completed, failed, retry (it may run again) or forget (frees the key).",
        ),
    ],
    attempt: Annotated[int, typer.Option("--attempt", help="The attempt you looked at, so that no later one is hit.")],
    reason: Reason,
    actor: Actor,
    result: Annotated[
        str, typer.Option("--result", help="The result, for --as completed, as the agent stores it: mostly JSON.")
    ] = "",
    error: Annotated[str, typer.Option("--error", help="The error, for --as failed.")] = "",
) -> None:
    """Settle a record whose outcome only a person can know."""
    from tenure.v1 import dedup_pb2, dedup_pb2_grpc

    request = dedup_pb2.ResolveRecordRequest(
        tenant=target.tenant, key=key, attempt=attempt, result=result.encode(), error=error, actor=actor,
        reason=reason, resolution=dedup_pb2.Resolution.Value(f"RESOLUTION_{as_.name}"),
        request_id=calls.fresh_request_id(),
    )  # fmt: skip
    async with target.channel() as channel:
        response = await dedup_pb2_grpc.DedupServiceStub(channel).ResolveRecord(request, timeout=target.timeout)
    if target.json:
        output.print_json(calls.as_dict(response))
    elif as_ is As.FORGET:
        print(f"forgot {key}")
    else:
        print(f"{key} is {shown.enum(response.record, 'state')}")
