"""One call of ``SessionService.Connect``: sends what its session has ready in few messages, hands on what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from tenure import addresses, errors, forks
from tenure.clock import Clock
from tenure.session import Session
from tenure.v1 import session_pb2, session_pb2_grpc

__all__ = ["Stream"]

_Call = grpc.aio.StreamStreamCall[session_pb2.ConnectRequest, session_pb2.ConnectResponse]


class Stream:
    """Open it with `dial`, give it its session with `carry`, wait for `ended`, and `close` it in any case."""

    def __init__(self, address: addresses.Address, channel: grpc.aio.Channel, clock: Clock) -> None:
        self.address = address
        self.node_id = ""
        self.attach_sent_at = 0.0
        # What came in the same message as the answer to the attach.
        self.first = session_pb2.ConnectResponse()
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        # Why it ended; None when the sidecar ended it in good order.
        self.error: errors.TenureError | None = None
        self._clock = clock
        self._owner = forks.Owner()
        self._channel = channel
        # No deadline: the stream lives as long as the client. Everything on it has its own.
        self._call: _Call = session_pb2_grpc.SessionServiceStub(channel).Connect()
        forks.keep_from_child(wire_object=self._call)
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._superseded = False

    @classmethod
    async def dial(
        cls,
        address: addresses.Address,
        credentials: grpc.ChannelCredentials | None,
        attach: session_pb2.Attach,
        timeout: float | None,
        clock: Clock,
        leaves: Callable[[], None],
    ) -> tuple[Stream, session_pb2.Attached]:
        """Connects and attaches. Raises the sidecar's refusal, or ConnectError when there was no answer.

        ``leaves`` is called when the attach is about to leave this process: before, nothing can have come of it.
        """
        channel = addresses.open_channel(address, credentials)
        forks.keep_from_child(wire_object=channel)
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout):
                await _connected(address, channel)
                stream = cls(address, channel, clock)
                leaves()
                attached = await stream._attach(attach)
        except BaseException as error:
            await (channel if stream is None else stream).close()
            if not isinstance(error, TimeoutError):
                raise
            raise errors.ConnectError(
                f"{address}: connected, but the sidecar did not attach the session within {timeout} s",
                reason="NO_ANSWER",
            ) from None
        return stream, attached

    async def _attach(self, attach: session_pb2.Attach) -> session_pb2.Attached:
        self.attach_sent_at = self._clock()
        try:
            await self._call.write(session_pb2.ConnectRequest(attach=attach))
            answer = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answer = grpc.aio.EOF
        if not isinstance(answer, session_pb2.ConnectResponse):
            raise await self._failure()
        if not answer.HasField("attached") or not answer.attached.session.session_id:
            raise errors.ConnectError(
                f"{self.address}: the first answer was not an attached session", reason="PROTOCOL"
            )
        self.node_id = answer.attached.node_id
        self.first = answer
        return answer.attached

    def carry(self, session: Session) -> None:
        """From now on the stream sends what the session has ready, and hands it what arrives."""
        session.hooks.wake = self._ready.set
        for work, name in ((self._write(session), "write"), (self._read(session), "read")):
            task = asyncio.get_running_loop().create_task(work, name=f"tenure-stream-{name}")
            forks.keep_from_child(task=task)
            task.add_done_callback(self._task_done)
            self._tasks.append(task)

    def supersede(self) -> None:
        """Another stream has attached the session: what still arrives here may be older than what that one told."""
        self._superseded = True

    async def _write(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Whatever becomes ready while a message is on its way goes into the next one.
            await self._ready.wait()
            self._ready.clear()
            while (message := session.outgoing(loop.time())) is not None:
                self._owner.check()
                try:
                    await self._call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader learns why

    async def _read(self, session: Session) -> None:
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, session_pb2.ConnectResponse):
                    break
                if not self._superseded:
                    session.received(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the status says why
        if await self._call.code() != grpc.StatusCode.OK:
            self.error = await self._failure()
        self._end()

    def _end(self) -> None:
        if not self.ended.is_set() and self._owner.here:
            self.ended.set()
            self.on_end()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None or not self._owner.here:
            return
        context = {"message": "a tenure stream failed", "exception": task.exception(), "task": task}
        task.get_loop().call_exception_handler(context)
        self._end()

    async def _failure(self) -> errors.TenureError:
        """What the sidecar, or the transport, said when the call ended."""
        code, details, metadata = (
            await self._call.code(),
            await self._call.details(),
            await self._call.trailing_metadata(),
        )
        error = grpc.aio.AioRpcError(code, await self._call.initial_metadata(), metadata, details=details)
        found = errors.from_rpc_error(error, metadata, read_only=True)
        if isinstance(found, errors.Unavailable) and not found.reason:
            return errors.ConnectError(f"{self.address}: {details or 'the connection broke'}", reason="DISCONNECTED")
        return found

    async def close(self) -> None:
        """Ends the call and the connection. In a forked child it touches neither: they are the parent's."""
        if not self._owner.here:
            return
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()
        await self._channel.close()
        self.ended.set()


async def _connected(address: addresses.Address, channel: grpc.aio.Channel) -> None:
    """Raises ConnectError when the other side cannot be reached, or does not speak."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise errors.ConnectError(
                f"{address}: the connection failed; the sidecar hangs or is starting, or something else listens there",
                reason="DISCONNECTED",
            )
        await channel.wait_for_state_change(state)
