"""Commands that call a sidecar: the options they share, one channel, pages one after another."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from sidecar.cli.failures import UNREACHABLE, USAGE, CliError
from sidecar.cli.options import DEFAULT_ADDRESS, DEFAULT_TENANT, DEFAULT_TIMEOUT_S, Address, Json, Tenant, Timeout

if TYPE_CHECKING:
    import grpc
    import grpc.aio
    from tenure.addresses import Address as SidecarAddress

P = ParamSpec("P")
T = TypeVar("T")
PAGE_SIZE = 500
TELL_AFTER_S = 1.0  # of waiting in silence
READY_S = 1.0  # for the answer whether one of several sidecars is ready

# What commands that call a sidecar, the client and its agents read. Other names are looked up in the sidecar's
# settings, whose import would take longer than most commands.
VARIABLES = frozenset(
    f"TENURE_{name}"
    for name in (
        "ADDRESS", "TENANT", "ACTOR", "TLS_CA", "TLS_CERT", "TLS_KEY", "LEASE", "FENCING_TOKEN", "AGENT", "LOG",
        "CONFIG", "RUN_ID", "JOB", "DUE", "DUE_MS", "ATTEMPT", "IDEMPOTENCY_KEY", "DEADLINE_MS", "TRACEPARENT",
        "CHECKPOINT_FILE", "RESULT_FILE",
    )
)  # fmt: skip

TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="TENURE_TLS_CA", help="Authority of the sidecar's certificate, for host:port."),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="TENURE_TLS_CERT", help="Client certificate, for host:port.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="TENURE_TLS_KEY", help="Its key.")]


@dataclass(frozen=True)
class Target:
    """The sidecar that a command calls, and how."""

    json: bool
    address: str
    tenant: str
    timeout: float
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None

    @asynccontextmanager
    async def channel(self, *, ready: bool = True) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the first address that something listens at; of several, to the first whose sidecar is ready,
        unless ``ready`` is false: then it is that one that is asked about. Says what to do when nothing listens."""
        from tenure import addresses
        from tenure.errors import ConnectError

        secret = self.credentials()
        try:
            candidates = addresses.parse_addresses(self.address)
            addresses.require_protected(candidates, secret, insecure=False)
        except ValueError as error:
            raise CliError(str(error), reason="USAGE", status=USAGE) from error
        missing, listening = [], []
        for candidate in candidates:
            with self.telling(str(candidate), self.timeout):
                found = await addresses.probe(candidate, self.timeout)
            if not found.listening:
                missing.append(found.problem)
                continue
            listening.append(candidate)
            if not ready or len(candidates) == 1 or await self._serves(candidate, secret):
                break
        else:
            if not listening:
                raise ConnectError("; ".join(missing))
            listening = listening[:1]
        async with addresses.open_channel(listening[-1], secret) as opened:
            with self.telling(str(listening[-1]), self.timeout):
                await self._connected(opened, str(listening[-1]))
            yield opened

    async def _serves(self, address: SidecarAddress, secret: grpc.ChannelCredentials | None) -> bool:
        """Whether the sidecar there is ready. Says so when it is not: nobody should wonder who answers."""
        import grpc
        from tenure import addresses
        from tenure.v1 import cluster_pb2, cluster_pb2_grpc

        try:
            async with asyncio.timeout(READY_S), addresses.open_channel(address, secret) as opened:
                stub = cluster_pb2_grpc.ClusterServiceStub(opened)
                status = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=READY_S)
                why = "" if status.ready else f"it is not ready: {status.not_ready_reason}"
        except (TimeoutError, grpc.RpcError):
            why = "no answer"
        if why:
            self.say(f"tenure: passing over the sidecar at {address} ({why})")
        return not why

    @contextmanager
    def telling(self, address: str, limit_s: float) -> Iterator[None]:
        """Whoever waits in here for more than a moment says so. On a pipe as well, for the log of a job that hangs;
        but with --json, standard error is for a program."""
        words = f"tenure: waiting for the sidecar at {address} (up to {limit_s:g} s)"
        tell = asyncio.get_running_loop().call_later(TELL_AFTER_S, self.say, words)
        try:
            yield
        finally:
            tell.cancel()

    async def tell_if_nobody_listens(self) -> None:
        """For what goes on for ever, and would wait for a sidecar without a word."""
        from tenure import addresses

        candidates = addresses.parse_addresses(self.address)
        found = await asyncio.gather(*(addresses.probe(candidate, TELL_AFTER_S) for candidate in candidates))
        if not any(each.listening for each in found):
            problems = "; ".join(each.problem for each in found)
            self.say(f"tenure: waiting for the sidecar at {self.address} (for as long as it takes): {problems}")

    def say(self, words: str) -> None:
        """A remark on standard error, for a person."""
        if not self.json:
            print(words, file=sys.stderr, flush=True)

    def warn_of_unknown_variables(self) -> None:
        """A mistyped TENURE_TENANT would otherwise mean the default tenant, without a word."""
        named = {name.upper() for name in os.environ if name.upper().startswith("TENURE_")}
        # In the environment of a sidecar, 'tenure serve' has refused them.
        if self.json or named <= VARIABLES or "TENURE_NODE_ID" in named:
            return
        from sidecar.config import unknown_variables, variable

        for problem in unknown_variables(os.environ):
            self.say(f"tenure: warning: {variable(problem.setting)} is set, but {problem.allowed}")

    async def _connected(self, channel: grpc.aio.Channel, address: str) -> None:
        """Before anything is sent: a handshake that fails has done nothing, and says so."""
        from grpc import ChannelConnectivity as State

        try:
            async with asyncio.timeout(self.timeout):
                state = channel.get_state(try_to_connect=True)
                while state not in (State.READY, State.TRANSIENT_FAILURE):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state()
        except TimeoutError:
            state = State.TRANSIENT_FAILURE
        if state is not State.READY:
            raise CliError(
                f"{address}: something listens there, but no connection came about",
                reason="NO_CONNECTION",
                status=UNREACHABLE,
                todo="for host:port, say --tls-ca, and --tls-cert with --tls-key if it wants a client certificate",
            )

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a TCP address; None without an authority (then plain text, which only loopback may use)."""
        import grpc

        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_cert and not self.tls_ca):
            raise CliError("--tls-cert, --tls-key and --tls-ca go together", reason="USAGE", status=USAGE)
        if self.tls_ca is None:
            return None
        return grpc.ssl_channel_credentials(read(self.tls_ca), read(self.tls_key), read(self.tls_cert))


def read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", reason="USAGE", status=USAGE) from error


# The options of Target, as typer wants to see them.
SHARED = {
    "json": (Json, False), "address": (Address, DEFAULT_ADDRESS), "tenant": (Tenant, DEFAULT_TENANT),
    "timeout": (Timeout, DEFAULT_TIMEOUT_S), "tls_ca": (TlsCa, None), "tls_cert": (TlsCert, None),
    "tls_key": (TlsKey, None),
}  # fmt: skip


def calling(function: Callable[Concatenate[Target, P], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a command of a coroutine whose first parameter is the target: its own options, and those of ``Target``."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        target = Target(**{name: given.pop(name) for name in SHARED})
        target.warn_of_unknown_variables()
        work: Any = function
        try:
            asyncio.run(work(target, **given))
        except Exception as error:
            from sidecar.cli.near import with_hint

            hinted = with_hint(target, error, given.get("job"))
            if hinted is None:
                raise
            raise hinted from error

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(n, keyword, default=d, annotation=a) for n, (a, d) in SHARED.items()]
    parameters = [*(parameter.replace(kind=keyword) for parameter in own), *shared]
    del command.__wrapped__
    typed: Any = command
    typed.__signature__ = inspect.Signature(parameters)
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def fresh_request_id() -> str:
    """An identity for one call, so that its repeats are the same request."""
    return f"cli-{uuid.uuid4()}"


async def pages(
    call: Callable[..., Awaitable[Any]], request: Any, field: str, limit: int, timeout_s: float
) -> list[Any]:
    """The items of a list call, page by page, at most ``limit`` (0: all)."""
    items: list[Any] = []
    while True:
        request.page_size = min(PAGE_SIZE, limit - len(items)) if limit else PAGE_SIZE
        response = await call(request, timeout=timeout_s)
        items += getattr(response, field)
        request.page_token = response.next_page_token
        if not request.page_token or (limit and len(items) >= limit):
            return items


def as_dict(message: Any) -> dict[str, Any]:
    """A message for ``--json``: every field, by its name in the proto; 64-bit numbers as numbers, bytes as base64."""
    from google.protobuf.json_format import MessageToDict

    value = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(message.DESCRIPTOR, value)


def _numbers(descriptor: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Protobuf's JSON writes 64-bit integers as text; a program that reads ours wants numbers."""
    for name, item in value.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            parts: Iterable[Any] = item if isinstance(item, list) else [item]
            for part in parts:
                _numbers(field.message_type, part)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            value[name] = [int(each) for each in item] if isinstance(item, list) else int(item)
    return value
