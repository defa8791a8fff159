"""Calling a sidecar in tests: short forms, and errors taken apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tenure.v1 import error_pb2, lease_pb2, session_pb2

from sidecar.services.errors import DETAILS_KEY
from tests.services.cluster import Stubs

Code = grpc.StatusCode
DEADLINE_S = 5.0


class Refusal:
    """A failed call: its status, and the detail that goes with it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        status = error_pb2.RichStatus()
        for key, value in error.trailing_metadata() or ():
            if key == DETAILS_KEY:
                assert isinstance(value, bytes)
                status.ParseFromString(value)
        self.kinds = [detail.type_url.rsplit("/", 1)[1] for detail in status.details]
        self.detail = error_pb2.ErrorDetail()
        for detail in status.details:
            detail.Unpack(self.detail)
        self.reason = self.detail.reason
        self.facts = dict(self.detail.facts)
        self.definite = self.detail.outcome == error_pb2.OUTCOME_DEFINITE


async def refused(call: Awaitable[Any]) -> Refusal:
    """The refusal that a call ends in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Refusal(caught.value)


async def refused_stream(call: Any) -> Refusal:
    """The refusal that a stream of answers ends in."""

    async def drain() -> None:
        async for _ in call:
            pass

    return await refused(drain())


async def open_session(stubs: Stubs, tenant: str = "default", **fields: Any) -> str:
    request = session_pb2.OpenSessionRequest(tenant=tenant, **fields)
    answer = await stubs.session.OpenSession(request, timeout=DEADLINE_S)
    return answer.session.session_id


async def acquire(
    stubs: Stubs, session: str, name: str, timeout_s: float = DEADLINE_S, **fields: Any
) -> lease_pb2.AcquireLeaseResponse:
    fields = {"tenant": "default", **fields}
    request = lease_pb2.AcquireLeaseRequest(name=name, session_id=session, **fields)
    return await stubs.lease.AcquireLease(request, timeout=timeout_s)


async def release(stubs: Stubs, session: str, name: str, token: int, **fields: Any) -> None:
    request = lease_pb2.ReleaseLeaseRequest(tenant="default", name=name, session_id=session, token=token, **fields)
    await stubs.lease.ReleaseLease(request, timeout=DEADLINE_S)


async def get_lease(stubs: Stubs, name: str, **fields: Any) -> lease_pb2.Lease:
    request = lease_pb2.GetLeaseRequest(tenant="default", name=name, **fields)
    return (await stubs.lease.GetLease(request, timeout=DEADLINE_S)).lease


class Agent:
    """The agent's end of a Connect stream."""

    def __init__(self, stubs: Stubs) -> None:
        self.call = stubs.session.Connect()
        self.attached = session_pb2.Attached()
        self.results: dict[int, session_pb2.OperationResult] = {}
        self.messages = 0
        self.acks: dict[int, int] = {}
        self.pushes: list[session_pb2.Push] = []
        self.ended: Refusal | None = None
        self.over = False
        self._news = asyncio.Condition()
        self._sending = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    @property
    def session(self) -> str:
        return self.attached.session.session_id

    async def attach(self, session: str = "", tenant: str = "default", **fields: Any) -> session_pb2.Attached:
        open_ = None if session else session_pb2.OpenSessionRequest(**fields)
        await self.send(attach=session_pb2.Attach(tenant=tenant, session_id=session, open=open_))
        self.listen()
        await self.until(lambda: self.over or self.session)
        if not self.session and self.ended is not None:
            raise AttachRefused(self.ended)
        return self.attached

    def listen(self) -> None:
        """Read answers from now on."""
        self._reader = asyncio.create_task(self._read())

    async def send(self, **fields: Any) -> None:
        async with self._sending:  # gRPC takes one message of a stream at a time
            await self.call.write(session_pb2.ConnectRequest(**fields))

    async def start(self, number: int, timeout_ms: int = 5_000, **body: Any) -> None:
        await self.send(operations=[session_pb2.Operation(id=number, timeout_ms=timeout_ms, **body)])

    async def do(self, number: int, timeout_ms: int = 5_000, **body: Any) -> session_pb2.OperationResult:
        await self.start(number, timeout_ms, **body)
        return await self.result(number)

    async def result(self, number: int) -> session_pb2.OperationResult:
        await self.until(lambda: number in self.results)
        return self.results[number]

    async def acquire(self, number: int, name: str, timeout_ms: int = 5_000, **fields: Any) -> Any:
        request = lease_pb2.AcquireLeaseRequest(name=name, **fields)
        result = await self.do(number, timeout_ms, acquire_lease=request)
        assert result.HasField("acquire_lease"), result
        return result.acquire_lease

    def pushed(self, kind: str) -> list[Any]:
        return [getattr(push, kind) for push in self.pushes if push.WhichOneof("kind") == kind]

    async def push(self, kind: str) -> Any:
        await self.until(lambda: self.pushed(kind))
        return self.pushed(kind)[0]

    async def end(self) -> Refusal | None:
        """How the stream ended, None for well."""
        await self.until(lambda: self.over)
        return self.ended

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(condition)

    async def hang_up(self) -> None:
        self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while isinstance(message := await self.call.read(), session_pb2.ConnectResponse):
                async with self._news:
                    self._take(message)
                    self._news.notify_all()
            if await self.call.code() is not Code.OK:
                raise grpc.aio.AioRpcError(
                    await self.call.code(),
                    trailing_metadata=await self.call.trailing_metadata(),
                    details=await self.call.details(),
                )
        except grpc.aio.AioRpcError as error:
            self.ended = Refusal(error)
        finally:
            async with self._news:
                self.over = True
                self._news.notify_all()

    def _take(self, message: session_pb2.ConnectResponse) -> None:
        self.messages += 1
        if message.HasField("attached"):
            self.attached = message.attached
        for result in message.results:
            self.results[result.id] = result
        for ack in message.keep_alive_acks:
            self.acks[ack.id] = ack.ttl_ms
        self.pushes.extend(message.pushes)


class AttachRefused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@asynccontextmanager
async def agent(stubs: Stubs, session: str = "", tenant: str = "default", **fields: Any) -> AsyncIterator[Agent]:
    """An attached agent; its stream is cut at the end."""
    connected = Agent(stubs)
    try:
        await connected.attach(session, tenant, **fields)
        yield connected
    finally:
        await connected.hang_up()
