"""The change stream as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.v1 import watch_pb2

from sidecar.core.commands import KEY_BYTES_MAX
from sidecar.services import translate
from sidecar.services import validation as check
from sidecar.services.errors import ApiError, Problem, problem
from sidecar.services.handlers import Context, Handlers, Writer
from sidecar.services.notices import FLEET
from sidecar.watch import (
    CompactedError,
    FutureRevisionError,
    SlowWatcherError,
    TooManyWatchersError,
    UnconfirmedRevisionError,
    WatchError,
    WatchFilter,
)

if TYPE_CHECKING:
    from sidecar.runtime import Runtime


def watch_service(runtime: Runtime) -> Handlers:
    handlers = Handlers(runtime, watch_pb2.DESCRIPTOR.services_by_name["WatchService"])

    async def watch(request: watch_pb2.WatchRequest, context: Context) -> None:
        tenants = runtime.settings.tenants
        wanted = WatchFilter(
            # What concerns the fleet concerns every tenant.
            tenants=frozenset([FLEET, *([check.tenant(request.tenant, tenants)] if request.tenant else tenants)]),
            kinds=translate.event_kinds(request.kinds),
            subject_prefix=check.text(request.subject_prefix, "subject_prefix", KEY_BYTES_MAX),
        )
        first = check.number(request.from_revision, "from_revision", 0, check.TOKEN_MAX)
        writer = Writer(context)
        try:
            async for delivery in runtime.hub.watch(first, wanted, on_cut=writer.cut):
                events = [translate.event(event) for event in delivery.events]
                response = watch_pb2.WatchResponse(events=events, revision=delivery.revision)
                await writer.write(response, delivery.revision + 1)
        except WatchError as error:
            raise _refusal(error, first) from None
        raise problem(Problem.STREAM_ENDED, "this sidecar is stopping")

    handlers.server_stream("Watch", watch)
    return handlers


def _refusal(error: WatchError, from_revision: int) -> ApiError:
    message = str(error)
    if isinstance(error, CompactedError):
        first = error.first_revision
        return problem(Problem.REVISION_COMPACTED, message, from_revision=from_revision, first_revision=first)
    if isinstance(error, SlowWatcherError):
        return problem(Problem.SLOW_READER, message, resume_revision=error.resume_revision)
    if isinstance(error, FutureRevisionError):
        return problem(Problem.REVISION_FUTURE, message, from_revision=from_revision, revision=error.revision)
    if isinstance(error, TooManyWatchersError):
        return problem(Problem.WATCHERS_FULL, message, limit=error.watchers_max)
    if isinstance(error, UnconfirmedRevisionError):
        cause = error.failed
        delay_ms = cause.retry_delay_ms
        return problem(Problem.READ_NOT_CONFIRMED, message, retry_delay_ms=delay_ms, cause=cause.failure.name)
    raise AssertionError(f"no status for {error!r}")
