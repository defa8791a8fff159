"""Between gRPC and the operations: deadlines, malformed messages, errors as rich statuses, what is counted.

Handlers are registered by hand rather than through the generated servicers, for one reason: a message that does not
parse (truncated, or a string that is not UTF-8) reaches the handler as ``Malformed`` and is refused like any other bad
input. With a plain deserializer gRPC answers UNKNOWN and says nothing of use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sidecar.services import validation as check
from sidecar.services.calls import Answer, Caller
from sidecar.services.errors import ApiError, Problem, problem
from sidecar.services.waiting import Running

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

log = logging.getLogger("tenure.services")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# One operation, see base.Resource.
Start = Callable[[Any, Caller, Answer], Running | None]
# A handler that streams: it may raise ApiError.
Serve = Callable[[Any, Context], Awaitable[None]]

# Without a deadline (where that is allowed), and what is kept back of one to answer before the caller gives up.
DEADLINE_DEFAULT_MS = 10_000
ANSWER_MARGIN_MAX_MS = 50
WRITE_MAX_S = 30.0


class Malformed:
    """Stands for a message that could not be parsed."""

    def __init__(self, error: DecodeError) -> None:
        self.error = error


def parser(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(data: bytes) -> Message | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return Malformed(error)

    return parse


def parsed(message: Any) -> Any:
    """The message itself; refuses a malformed one."""
    if isinstance(message, Malformed):
        raise malformed(message)
    return message


def malformed(message: Malformed) -> ApiError:
    return problem(Problem.MALFORMED_MESSAGE, f"the message could not be parsed: {message.error}")


class Handlers:
    """The handlers of one service, method by method."""

    def __init__(self, runtime: Runtime, service: ServiceDescriptor) -> None:
        self._runtime = runtime
        self._service = service
        self._by_name: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def unary(self, name: str, start: Start) -> None:
        """Serve a unary method by an operation."""

        async def handle(message: Any, context: Context) -> Any:
            return await self._observed(name, context, self._run(start, message, context))

        self._add(grpc.unary_unary_rpc_method_handler, name, handle)

    def unary_undoable(self, name: str, start: Start) -> None:
        """Serve a unary method by an operation that is given up when its answer cannot be sent, too.

        To gRPC's server this is a stream of one answer, which is the same on the wire. But a unary handler has returned
        when its answer is sent, and hears no more of its caller; this one is told."""

        async def handle(message: Any, context: Context) -> None:
            await self._observed(name, context, self._run(start, message, context, context.write))

        self._add(grpc.unary_stream_rpc_method_handler, name, handle)

    def unary_coroutine(self, name: str, serve: Callable[[Any, Caller], Awaitable[Message]]) -> None:
        """Serve a unary method by a coroutine."""

        async def run(message: Any, context: Context) -> Message:
            caller = self._caller(context)
            return await serve(parsed(message), caller)

        async def handle(message: Any, context: Context) -> Any:
            return await self._observed(name, context, run(message, context))

        self._add(grpc.unary_unary_rpc_method_handler, name, handle)

    def exempt_unary(self, name: str, serve: Callable[[Any, Context], Awaitable[Message]]) -> None:
        """Serve a unary method by a coroutine. Needs no deadline, and is not counted: probes call it all the time."""

        async def handle(message: Any, context: Context) -> Any:
            if isinstance(message, Malformed):
                return await abort(context, malformed(message))
            return await serve(message, context)

        self._add(grpc.unary_unary_rpc_method_handler, name, handle)

    def server_stream(self, name: str, serve: Serve) -> None:
        """Serve a method that streams answers by a coroutine that writes to the context. Needs no deadline."""

        async def run(message: Any, context: Context) -> None:
            await serve(parsed(message), context)

        async def handle(message: Any, context: Context) -> None:
            await self._observed(name, context, run(message, context))

        self._add(grpc.unary_stream_rpc_method_handler, name, handle)

    def bidirectional(self, name: str, serve: Callable[[Context], Awaitable[None]]) -> None:
        """Serve a stream by a coroutine that reads (``parsed``) and writes by itself. Needs no deadline."""

        async def handle(_: object, context: Context) -> None:
            await self._observed(name, context, serve(context))

        self._add(grpc.stream_stream_rpc_method_handler, name, handle)

    @property
    def name(self) -> str:
        """The full name of the service."""
        return self._service.full_name

    def register(self, server: grpc.aio.Server) -> None:
        """All methods of the service must have a handler."""
        missing = {method.name for method in self._service.methods} - set(self._by_name)
        assert not missing, f"{self.name} has no handler for {sorted(missing)}"
        handler = grpc.method_handlers_generic_handler(self.name, self._by_name)
        server.add_generic_rpc_handlers((handler,))

    def _add(self, kind: Callable[..., grpc.RpcMethodHandler[Any, Any]], name: str, handle: Callable[..., Any]) -> None:
        parse = parser(GetMessageClass(self._service.methods_by_name[name].input_type))
        self._by_name[name] = kind(handle, request_deserializer=parse, response_serializer=_serialize)

    async def _run(
        self, start: Start, message: Any, context: Context, send: Callable[[Message], Awaitable[None]] | None = None
    ) -> Message:
        caller = self._caller(context)
        answered: asyncio.Future[Message | ApiError] = asyncio.get_running_loop().create_future()

        def answer(result: Message | ApiError) -> None:
            if not answered.done():
                answered.set_result(result)

        running = start(parsed(message), caller, answer)
        try:
            result = await answered
            if isinstance(result, ApiError):
                raise result
            if send is not None:
                await send(result)
        except (asyncio.CancelledError, grpc.aio.BaseError):  # the caller is gone
            if running is not None:
                running.give_up()
            raise
        return result

    def _caller(self, context: Context) -> Caller:
        settings = self._runtime.settings
        remaining_s: float | None = context.time_remaining()
        if remaining_s is None:
            if settings.require_deadline:
                message = "the call has no deadline; set one, it is also how long the outcome is worth waiting for"
                raise problem(Problem.DEADLINE_REQUIRED, message)
            return Caller(settings.tenants, DEADLINE_DEFAULT_MS)
        remaining_ms = min(int(remaining_s * 1000), check.DEADLINE_MAX_MS)
        return Caller(settings.tenants, remaining_ms - min(ANSWER_MARGIN_MAX_MS, remaining_ms // 10))

    async def _observed(self, name: str, context: Context, work: Awaitable[Any]) -> Any:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        code = grpc.StatusCode.OK
        try:
            return await work
        except ApiError as error:
            code = error.code
            return await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.BaseError):  # the caller is gone
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("%s/%s failed", self.name, name)
            return await abort(context, problem(Problem.INTERNAL, "a defect of the sidecar; its log has the details"))
        finally:
            self._runtime.observe_request(self.name, name, code.name, loop.time() - started_s)


async def abort(context: Context, error: ApiError) -> Any:
    """End the call with the error as a rich status. Always raises."""
    await context.abort(error.code, error.message, error.trailing_metadata())


class Writer:
    """Sends the answers of a stream. A reader that takes none for WRITE_MAX_S is cut off, or before that by ``cut``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limit: asyncio.Timeout | None = None

    async def write(self, message: Message, resume_revision: int) -> None:
        """``resume_revision``: where the reader goes on when it is cut off. Should it come to that status at all, it
        has read this message before."""
        try:
            async with asyncio.timeout(WRITE_MAX_S) as self._limit:
                await self._context.write(message)
        except TimeoutError:
            raise problem(Problem.SLOW_READER, "the reader does not read", resume_revision=resume_revision) from None
        finally:
            self._limit = None

    def cut(self) -> None:
        """Wait no longer for a reader that is stuck in a message."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
