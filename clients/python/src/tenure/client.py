"""The asynchronous client: ``async with tenure.connect() as client``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

import grpc
import grpc.aio

from tenure import addresses, errors, forks
from tenure.connection import Connection, Options
from tenure.dedup import (
    OWNER_LOSS,
    Attempt,
    BeginResult,
    Idempotency,
    InProgress,
    JsonSerializer,
    OwnerLoss,
    Serializer,
    begin_result,
    decorate,
)
from tenure.fingerprint import fingerprint as fingerprint_of
from tenure.lease import Callback, Lease, LeaseContext, LocalLine, NeedsAsyncWith
from tenure.scheduling import Scheduling
from tenure.session import ACQUIRE, BEGIN, CHECK, GET_LEASE, GET_RECORD, Session, Timing
from tenure.v1 import dedup_pb2, lease_pb2, lease_pb2_grpc, session_pb2
from tenure.values import EventKind, LeaseInfo, RecordInfo, TokenCheck, lease_info, record_info, token_check
from tenure.watching import Watch, observe
from tenure.work import Worker

__all__ = ["Client", "ConnectOptions", "Connecting", "connect"]

log = logging.getLogger("tenure")

P = ParamSpec("P")
T = TypeVar("T")

TTL_DEFAULT_MS = 15_000
TIMEOUT_DEFAULT = 10.0
IN_FLIGHT_MAX = 1_000
PAGE_SIZE = 500
# An election costs a second or two, in which nothing can be learnt.
STALENESS_MIN, STALENESS_DEFAULT, STALENESS_MAX = 1.0, 5.0, 3_600.0


class ConnectOptions(TypedDict, total=False):
    """The keyword arguments of `connect` and `connect_sync`."""

    # From TENURE_TENANT, or "default".
    tenant: str | None
    # Shown to operators, as are version, host (this machine's name) and labels.
    agent: str | None
    version: str
    host: str | None
    labels: dict[str, str] | None
    # How long what this process holds survives it in the worst case. 500 to 3,600,000; 15,000 when not given.
    ttl_ms: int
    # How long it survives its connection. 0 to the ttl; the sidecar's default is 1,000.
    disconnect_grace_ms: int | None
    # How often the session is renewed: at most a third of the ttl.
    keep_alive_ms: int | None
    # How long before safe-until a body is cancelled, so that it can clean up: at most half of the ttl.
    cancel_margin_ms: int | None
    # Seconds to look for a sidecar, and the default time of every call.
    connect_timeout: float
    timeout: float
    # How many calls may be unanswered at a time.
    in_flight_max: int
    # Seconds after which what is known of kill switches counts as unknown, and guarded work (runs too) stops; 5 when
    # not given. fail_open: it goes on instead, with a warning each minute.
    switch_staleness: float
    fail_open: bool
    # For a sidecar that is not on this machine.
    credentials: grpc.ChannelCredentials | None
    insecure: bool
    # False: a client that only reads and watches, and holds nothing.
    session: bool


def connect(address: str | Sequence[str] | None = None, **options: Unpack[ConnectOptions]) -> Connecting:
    """Opens a client: ``async with connect() as client`` or ``client = await connect()`` (then close it).

    ``address``: ``unix:/path`` or ``host:port``, several as a comma list or a sequence; when None it is taken from
    ``TENURE_ADDRESS``, or is the default socket. The options are described at `ConnectOptions`.

    Raises ValueError for settings that cannot work, and ConnectError, within ``connect_timeout`` seconds and with what
    to do, when there is no sidecar.
    """
    unknown = sorted(options.keys() - ConnectOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(ConnectOptions.__annotations__)
        raise TypeError(f"connect() has no option {', '.join(unknown)}; it has: {known}")
    timeout = options.get("timeout", TIMEOUT_DEFAULT)
    connect_timeout = options.get("connect_timeout", TIMEOUT_DEFAULT)
    if timeout <= 0 or connect_timeout <= 0:
        raise ValueError("timeout and connect_timeout must be more than 0 seconds")
    in_flight_max = options.get("in_flight_max", IN_FLIGHT_MAX)
    if not 0 < in_flight_max <= IN_FLIGHT_MAX:
        raise ValueError(f"in_flight_max must be 1 to {IN_FLIGHT_MAX}, not {in_flight_max}")
    where, credentials = addresses.parse_addresses(address), options.get("credentials")
    addresses.require_protected(where, credentials, options.get("insecure", False))
    ttl_ms = options.get("ttl_ms", TTL_DEFAULT_MS)
    settings = Options(
        addresses=where,
        credentials=credentials,
        tenant=options.get("tenant") or os.environ.get("TENURE_TENANT") or "default",
        info=_agent_info(options),
        timing=Timing.of(ttl_ms, options.get("keep_alive_ms"), options.get("cancel_margin_ms")),
        grace_ms=_grace_ms(ttl_ms, options.get("disconnect_grace_ms")),
        timeout=timeout,
        in_flight_max=in_flight_max,
        switch_staleness=_staleness(options.get("switch_staleness", STALENESS_DEFAULT)),
        fail_open=options.get("fail_open", False),
    )
    return Connecting(settings, connect_timeout, options.get("session", True))


def _agent_info(options: ConnectOptions) -> session_pb2.AgentInfo:
    agent, host = options.get("agent"), options.get("host")
    return session_pb2.AgentInfo(
        agent=agent if agent is not None else f"python-{os.getpid()}",
        version=options.get("version", ""),
        host=host if host is not None else socket.gethostname(),
        labels=options.get("labels") or {},
    )


def _staleness(seconds: float) -> float:
    if not STALENESS_MIN <= seconds <= STALENESS_MAX:
        raise ValueError(f"switch_staleness must be {STALENESS_MIN:g} to {STALENESS_MAX:g} seconds, not {seconds:g}")
    return seconds


def _grace_ms(ttl_ms: int, grace_ms: int | None) -> int | None:
    if grace_ms is None:
        # The sidecar's default would be more than a short ttl.
        return ttl_ms if ttl_ms < 1_000 else None
    if not 0 <= grace_ms <= ttl_ms:
        raise ValueError(f"disconnect_grace_ms must be 0 to ttl_ms ({ttl_ms}), not {grace_ms}")
    return grace_ms


class Connecting(NeedsAsyncWith):
    """What ``connect`` returns: await it, or use it as an asynchronous context manager."""

    _written = "async with tenure.connect() as client"

    def __init__(self, options: Options, connect_timeout: float, session: bool) -> None:
        self._options = options
        self._connect_timeout = connect_timeout
        self._session = session
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def _open(self) -> Client:
        forks.mark_used()
        client = Client(Connection(self._options), self._session)
        if self._session:
            try:
                await client._connection.open(self._connect_timeout)
            except BaseException:
                await client.close()
                raise
        return client

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


class Client(Scheduling):
    """One session at a sidecar, over one shared stream. Safe to use from many tasks of one event loop.

    Durations without a unit in their name are seconds; ``*_ms`` are integer milliseconds.
    """

    def __init__(self, connection: Connection, session: bool) -> None:
        self._connection = connection
        self._with_session = session
        self._line = LocalLine()
        self._bodies: set[LeaseContext] = set()
        self._on_granted: Callback | None = None
        self._worker = Worker(connection)
        connection.feed(self._worker)
        connection.on_granted = self._granted

    # ---- life --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends everything. Handlers and bodies under leases are cancelled and waited for; only then is what they held
        given back. A handler in a thread that does not look at ``run.cancelled`` is waited for 30 s.
        """
        if not self._connection.owner.here:
            return  # the parent's
        task = asyncio.current_task()
        if any(body.task is task for body in self._bodies):
            raise RuntimeError("close() was called inside the body of a lease of this client: leave the body first")
        if self._worker.inside(task):
            raise RuntimeError("close() was called inside a handler or a guard of this client: leave it first")
        await self._worker.close()
        for body in list(self._bodies):
            body.close()
        while self._bodies:
            await next(iter(self._bodies)).ended.wait()
        await self._connection.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """The id of the session; changes when a session was lost and a new one opened. Empty while there is none."""
        return self._connection.session.id

    @property
    def node_id(self) -> str:
        """The sidecar that carries the session now; empty while there is none."""
        return self._connection.node_id

    @property
    def tenant(self) -> str:
        return self._connection.options.tenant

    def _timeout(self, timeout: float | None) -> float:
        if timeout is None:
            return self._connection.options.timeout
        if not timeout > 0:
            raise errors.InvalidArgument("timeout must be more than 0 seconds", facts={"field": "timeout"})
        return timeout

    def _need_session(self) -> None:
        self._connection.check_usable()
        if not self._with_session:
            raise errors.InvalidArgument(
                "this client was opened with session=False and can hold nothing",
                reason="NO_SESSION",
                facts={"field": "session"},
            )

    # ---- leases ------------------------------------------------------------------------------------------------

    def lease(
        self,
        name: str,
        *,
        wait: float = 0.0,
        priority: int = 0,
        capacity: int = 1,
        lock_delay_ms: int = 0,
        metadata: str = "",
        timeout: float | None = None,
    ) -> LeaseContext:
        """``async with client.lease(name) as lease``: the body runs under the lease. Arguments as for `acquire`."""
        return LeaseContext(
            lambda: self.acquire(
                name,
                wait=wait,
                priority=priority,
                capacity=capacity,
                lock_delay_ms=lock_delay_ms,
                metadata=metadata,
                timeout=timeout,
            ),
            self._bodies,
        )

    async def acquire(
        self,
        name: str,
        *,
        wait: float = 0.0,
        priority: int = 0,
        capacity: int = 1,
        lock_delay_ms: int = 0,
        metadata: str = "",
        timeout: float | None = None,
    ) -> Lease:
        """Takes a lease, or waits for it up to ``wait`` seconds in line (0 tries once). Release it yourself.

        ``timeout`` is for the answer, in seconds on top of the wait. ``capacity`` N makes a semaphore of N sessions.
        ``lock_delay_ms``: nobody gets it for so long after this holder's session EXPIRED. Cancelling leaves nothing
        behind.

        Raises LeaseHeld when somebody else has it (also another task of this client), and what every call can raise.
        """
        self._need_session()
        if not wait >= 0:
            raise errors.InvalidArgument("wait must be 0 or more seconds", facts={"field": "wait"})
        seconds = self._timeout(timeout)
        loop = asyncio.get_running_loop()
        wait_until = loop.time() + wait
        if not await self._line.enter(name, wait):
            raise self._held_here(name)

        def request() -> lease_pb2.AcquireLeaseRequest:
            return lease_pb2.AcquireLeaseRequest(
                name=name,
                capacity=capacity,
                wait_ms=max(round((wait_until - loop.time()) * 1000), 0),
                priority=priority,
                lock_delay_ms=lock_delay_ms,
                metadata=metadata,
            )

        def granted(session: Session, response: lease_pb2.AcquireLeaseResponse) -> Lease:
            return self._new_lease(session, name, response.token, already_held=response.already_held)

        def undo(lease: Lease | None) -> None:
            if lease is None:
                self._line.leave(name)
            else:
                lease._start_release()

        left = max(wait_until - loop.time(), 0.0)
        return cast(
            Lease, await self._connection.call(ACQUIRE, request, timeout=left + seconds, accept=granted, undo=undo)
        )

    def _new_lease(self, session: Session, name: str, token: int, *, already_held: bool) -> Lease:
        return Lease(
            self._connection, session, name, token, already_held=already_held, freed=lambda: self._line.leave(name)
        )

    def _held_here(self, name: str) -> errors.LeaseHeld:
        session = self._connection.session
        token = next((held for held_name, held in session.leases if held_name == name), 0)
        return errors.LeaseHeld(
            f"{name!r} is held, or being acquired, by another task of this client",
            reason="LEASE_HELD",
            facts={"holder": session.id, "token": str(token), "local": "true"},
        )

    def on_granted(self, callback: Callback) -> None:
        """Calls back (function or coroutine function) with a Lease that was transferred to this session.

        Without a callback, such a lease is given back at once: somebody must look after it.
        """
        self._on_granted = callback

    def _granted(self, session: Session, name: str, token: int) -> None:
        if (name, token) in session.leases or not self._line.try_enter(name):
            return  # an acquire of this name is under way and is answered with it
        lease = self._new_lease(session, name, token, already_held=True)
        if self._on_granted is None:
            log.warning(
                "lease %r (token %d) was transferred to this session, which has no on_granted: given back", name, token
            )
            lease._start_release()
        else:
            lease._run(self._on_granted)

    async def check(self, name: str, token: int, *, timeout: float | None = None) -> TokenCheck:
        """Whether a fencing token is current (linearizable). Needs no lease: for those who receive tokens."""
        request = lease_pb2.CheckLeaseRequest(tenant=self.tenant, name=name, token=token)
        seconds = self._timeout(timeout)
        if self._with_session:
            return token_check(await self._connection.call(CHECK, lambda: request, timeout=seconds))
        return token_check(
            await self._connection.unary(
                lambda channel: lease_pb2_grpc.LeaseServiceStub(channel).CheckLease(request, timeout=seconds),
                timeout=seconds,
            )
        )

    async def get_lease(self, name: str, *, timeout: float | None = None) -> LeaseInfo:
        """The lease as it is now (linearizable); without holders and waiters when it is free."""
        request = lease_pb2.GetLeaseRequest(tenant=self.tenant, name=name)
        seconds = self._timeout(timeout)
        response: lease_pb2.GetLeaseResponse
        if self._with_session:
            response = await self._connection.call(GET_LEASE, lambda: request, timeout=seconds)
        else:
            response = await self._connection.unary(
                lambda channel: lease_pb2_grpc.LeaseServiceStub(channel).GetLease(request, timeout=seconds),
                timeout=seconds,
            )
        return lease_info(response.lease, response.read.revision)

    async def list_leases(
        self, prefix: str = "", *, page_size: int = PAGE_SIZE, timeout: float | None = None
    ) -> AsyncIterator[LeaseInfo]:
        """All leases whose name starts with ``prefix``, in order of name. ``timeout`` is for each page."""
        seconds = self._timeout(timeout)
        page_token = ""
        while True:
            request = lease_pb2.ListLeasesRequest(
                tenant=self.tenant, prefix=prefix, page_size=page_size, page_token=page_token
            )
            page = await self._list_page(request, seconds)
            for lease in page.leases:
                yield lease_info(lease, page.read.revision)
            page_token = page.next_page_token
            if not page_token:
                return

    async def _list_page(self, request: lease_pb2.ListLeasesRequest, seconds: float) -> lease_pb2.ListLeasesResponse:
        return await self._connection.unary(
            lambda channel: lease_pb2_grpc.LeaseServiceStub(channel).ListLeases(request, timeout=seconds),
            timeout=seconds,
        )

    # ---- the change stream -------------------------------------------------------------------------------------

    def watch(
        self,
        from_revision: int = 0,
        *,
        kinds: Iterable[EventKind] = (),
        subject_prefix: str = "",
        all_tenants: bool = False,
    ) -> Watch:
        """Events from a revision on (0: from now on), for ever: ``async for event in client.watch()``.

        Goes on by itself, without a gap, after a lost connection, another sidecar, or being cut off for slowness.
        Without ``kinds``, all of them. Raises Compacted when the revision is no longer held.
        """
        self._connection.check_usable()
        tenant = "" if all_tenants else self.tenant
        return Watch(self._connection, tenant, from_revision, tuple(kind.value for kind in kinds), subject_prefix)

    def observe(self, name: str) -> AsyncIterator[LeaseInfo]:
        """The lease as it is, then again at every change, for ever. Goes on by itself after a lost connection."""
        self._connection.check_usable()
        return observe(self._connection, self.tenant, name)

    # ---- dedup -------------------------------------------------------------------------------------------------

    async def begin(
        self,
        key: str,
        payload: object = None,
        *,
        fingerprint: bytes | None = None,
        exclude: Iterable[str] = (),
        retention_ms: int | None = None,
        on_owner_loss: OwnerLoss = "retry",
        wait: float = 0.0,
        fence: Lease | None = None,
        timeout: float | None = None,
    ) -> BeginResult:
        """Opens an idempotency key: an Attempt to be completed or failed, or what is known of the key.

        ``payload`` (without the fields in ``exclude``) or ``fingerprint`` says what the key stands for; another
        payload under the same key raises RecordMismatch. ``wait``: seconds to wait for the outcome of a running
        attempt. ``on_owner_loss``: whether an attempt whose session ended may be repeated ("retry") or needs a person
        ("unknown"). ``retention_ms``: how long the outcome is kept. ``fence``: a lease that must be current at begin
        and at complete.
        """
        self._need_session()
        if on_owner_loss not in OWNER_LOSS:
            raise errors.InvalidArgument("on_owner_loss is 'retry' or 'unknown'", facts={"field": "on_owner_loss"})
        if fingerprint is None:
            fingerprint = fingerprint_of(payload, exclude) if payload is not None else b""
        print_ = fingerprint
        seconds = self._timeout(timeout)
        loop = asyncio.get_running_loop()
        wait_until = loop.time() + max(wait, 0.0)

        def request() -> dedup_pb2.BeginRecordRequest:
            return dedup_pb2.BeginRecordRequest(
                key=key,
                fingerprint=print_,
                owner_loss=OWNER_LOSS[on_owner_loss],
                retention_ms=retention_ms,
                wait_ms=max(round((wait_until - loop.time()) * 1000), 0),
                fence=dedup_pb2.Fence(lease_name=fence.name, token=fence.token) if fence is not None else None,
            )

        while True:
            left = max(wait_until - loop.time(), 0.0)
            result = await self._begin_once(key, request, left + seconds)
            if not isinstance(result, InProgress) or wait_until - loop.time() <= 0.01:
                return result

    async def _begin_once(
        self, key: str, request: Callable[[], dedup_pb2.BeginRecordRequest], seconds: float
    ) -> BeginResult:
        def begun(session: Session, response: dedup_pb2.BeginRecordResponse) -> BeginResult:
            return begin_result(self._connection, session, key, response)

        def undo(result: BeginResult | None) -> None:
            if isinstance(result, Attempt):
                result._give_up()

        return cast(BeginResult, await self._connection.call(BEGIN, request, timeout=seconds, accept=begun, undo=undo))

    async def get_record(self, key: str, *, timeout: float | None = None) -> RecordInfo:
        """The record of an idempotency key (linearizable). Raises NotFound when there is none."""
        self._need_session()
        request = dedup_pb2.GetRecordRequest(tenant=self.tenant, key=key)
        response = await self._connection.call(GET_RECORD, lambda: request, timeout=self._timeout(timeout))
        return record_info(response.record)

    def idempotent(
        self,
        *,
        key: Callable[..., str],
        payload: Callable[..., object] | None = None,
        retention_ms: int | None = None,
        on_owner_loss: OwnerLoss = "retry",
        wait: float = 0.0,
        serializer: Serializer | None = None,
        final_errors: tuple[type[BaseException], ...] = (),
        timeout: float | None = None,
    ) -> _Decorator:
        """Decorator: a function that takes effect once per key, and returns the stored result ever after.

        ``key`` and ``payload`` are called with the function's arguments; without ``payload`` the arguments themselves
        are what the key stands for. ``wait``: seconds to wait for a running attempt, else RecordInProgress is raised.
        An exception frees the key for another attempt, unless it is one of ``final_errors``, which are stored and
        replayed as RecordFailed. A plain function runs in a thread. Results are stored as JSON unless ``serializer``
        says otherwise.
        """

        def begin(name: str, print_: bytes) -> Awaitable[BeginResult]:
            return self.begin(
                name,
                fingerprint=print_,
                retention_ms=retention_ms,
                on_owner_loss=on_owner_loss,
                wait=wait,
                timeout=timeout,
            )

        idempotency = Idempotency(key, payload, serializer or JsonSerializer(), on_owner_loss, final_errors)
        return _Decorator(idempotency, begin)


class _Decorator:
    def __init__(self, idempotency: Idempotency, begin: Callable[[str, bytes], Awaitable[BeginResult]]) -> None:
        self._idempotency = idempotency
        self._begin = begin

    @overload
    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, Awaitable[T]]: ...
    def __call__(self, function: Callable[P, Any]) -> Callable[P, Awaitable[Any]]:
        return decorate(self._idempotency, self._begin, function)
