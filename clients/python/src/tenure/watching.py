"""Server streams that go on by themselves: the change stream, and the state of one lease."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tenure import errors, forks
from tenure.v1 import lease_pb2, lease_pb2_grpc, watch_pb2, watch_pb2_grpc
from tenure.values import Event, LeaseInfo, event, lease_info

if TYPE_CHECKING:
    from tenure.connection import Connection

__all__ = ["Watch", "observe"]

BACKOFF_FIRST = 0.05
BACKOFF_MAX = 1.0
RESUMABLE = (errors.Unavailable, errors.Overloaded, errors.Indefinite)

_Call = grpc.aio.UnaryStreamCall[watch_pb2.WatchRequest, watch_pb2.WatchResponse]


class _Backoff:
    """Grows while nothing arrives, starts again after something has."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.failures = 0

    async def after(self, error: errors.TenureError) -> None:
        self.failures += 1
        await self._connection.next_channel()
        delay = min(BACKOFF_FIRST * 2 ** min(self.failures, 10), BACKOFF_MAX) * (0.5 + random.random() / 2)
        await asyncio.sleep(max(delay, error.retry_delay))


class Watch(AsyncIterator[Event]):
    """Events in order of revision, each exactly once. Close it with ``aclose`` (or cancel the task that reads it)."""

    def __init__(
        self, connection: Connection, tenant: str, from_revision: int, kinds: tuple[int, ...], subject_prefix: str
    ) -> None:
        self._connection = connection
        self._request = watch_pb2.WatchRequest(tenant=tenant, subject_prefix=subject_prefix)
        self._request.kinds.extend(watch_pb2.EventKind.ValueType(int(kind)) for kind in kinds)
        self._next_revision = from_revision
        self._events: deque[Event] = deque()
        self._call: _Call | None = None
        self._backoff = _Backoff(connection)
        self._closed = False

    @property
    def revision(self) -> int:
        """What matches up to this revision has been returned or is about to be; 0 before the first answer."""
        return max(self._next_revision - 1, 0)

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            try:
                await self._more()
            except grpc.aio.AioRpcError as failure:
                self._drop()
                error = errors.from_rpc_error(failure, failure.trailing_metadata(), read_only=True)
                if not isinstance(error, RESUMABLE):
                    raise error from None
                await self._backoff.after(error)
            except BaseException:
                self._drop()
                raise
        return self._events.popleft()

    async def _more(self) -> None:
        self._connection.check_usable()
        if self._call is None:
            if self._next_revision == 0:
                # From now on: pinned to a revision first, so that a break before the first event loses none.
                self._next_revision = await self._current_revision() + 1
            self._request.from_revision = self._next_revision
            self._call = watch_pb2_grpc.WatchServiceStub(self._connection.channel()).Watch(self._request)
            forks.keep_from_child(wire_object=self._call)
        response = await self._call.read()
        if not isinstance(response, watch_pb2.WatchResponse):
            self._drop()
            await self._backoff.after(errors.Unavailable("the sidecar ended the watch"))
            return
        self._backoff.failures = 0
        self._events.extend(event(each) for each in response.events if each.revision >= self._next_revision)
        self._next_revision = max(self._next_revision, response.revision + 1)

    async def _current_revision(self) -> int:
        request = lease_pb2.ListLeasesRequest(
            tenant=self._request.tenant or self._connection.options.tenant, page_size=1
        )
        timeout = self._connection.options.timeout
        page = await lease_pb2_grpc.LeaseServiceStub(self._connection.channel()).ListLeases(request, timeout=timeout)
        return page.read.revision

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None and self._connection.owner.here:
            call.cancel()

    async def aclose(self) -> None:
        self._closed = True
        self._drop()


async def observe(connection: Connection, tenant: str, name: str) -> AsyncIterator[LeaseInfo]:
    """The lease as it is, then again at every change."""
    request = lease_pb2.ObserveLeaseRequest(tenant=tenant, name=name)
    backoff = _Backoff(connection)
    while True:
        connection.check_usable()
        call = lease_pb2_grpc.LeaseServiceStub(connection.channel()).ObserveLease(request)
        forks.keep_from_child(wire_object=call)
        error: errors.TenureError = errors.Unavailable("the sidecar ended the observation")
        try:
            async for response in call:
                backoff.failures = 0
                yield lease_info(response.lease, response.revision)
        except grpc.aio.AioRpcError as failure:
            error = errors.from_rpc_error(failure, failure.trailing_metadata(), read_only=True)
            if not isinstance(error, RESUMABLE):
                raise error from None
        finally:
            if connection.owner.here:
                call.cancel()
        await backoff.after(error)
