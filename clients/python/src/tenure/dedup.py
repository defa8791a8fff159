"""Idempotency keys: begin, complete, fail, and the decorator that does all three around a function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol

from tenure import errors
from tenure.fingerprint import fingerprint as fingerprint_of
from tenure.session import COMPLETE, FAIL, Session
from tenure.v1 import dedup_pb2

if TYPE_CHECKING:
    from tenure.connection import Connection

__all__ = [
    "Attempt",
    "BeginResult",
    "Completed",
    "Failed",
    "Idempotency",
    "InProgress",
    "JsonSerializer",
    "OwnerLoss",
    "Serializer",
    "UnknownOutcome",
]

P = ParamSpec("P")

OwnerLoss = Literal["retry", "unknown"]
OWNER_LOSS = {"retry": dedup_pb2.OWNER_LOSS_POLICY_RETRY, "unknown": dedup_pb2.OWNER_LOSS_POLICY_UNKNOWN}
ERROR_BYTES_MAX = 4_096
RESULT_BYTES_MAX = 65_536


class Serializer(Protocol):
    """How results are stored. Must not run code on loading: stored results may have been written by others."""

    def dumps(self, value: Any, /) -> bytes: ...
    def loads(self, data: bytes, /) -> Any: ...


class JsonSerializer:
    """The default. What JSON cannot say is refused with TypeError, never guessed."""

    def dumps(self, value: Any, /) -> bytes:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()

    def loads(self, data: bytes, /) -> Any:
        return json.loads(data) if data else None


@dataclass(frozen=True, slots=True)
class InProgress:
    """Another attempt is running (and was, to the end of the wait)."""

    key: str
    attempt: int
    owner_session_id: str


@dataclass(frozen=True, slots=True)
class Completed:
    """It was done before; this is its stored result, kept until ``expires_ms`` (cluster time)."""

    key: str
    attempt: int
    result: bytes
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It failed for good before, with this stored error."""

    key: str
    attempt: int
    error: str
    expires_ms: int


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """An earlier owner was lost in the middle. A person must resolve the record (``tenure dedup resolve``)."""

    key: str
    attempt: int


class Attempt:
    """The right, and the duty, to do what the key stands for: then ``complete`` or ``fail`` it.

    Key and attempt number are fixed in here; what becomes of the arguments they were made from changes nothing.
    """

    def __init__(self, connection: Connection, session: Session, key: str, number: int) -> None:
        self._connection = connection
        self._session = session
        self._key = key
        self._number = number

    @property
    def key(self) -> str:
        return self._key

    @property
    def number(self) -> int:
        """1 for the first attempt at this key; one more after each that was retried."""
        return self._number

    async def complete(self, result: bytes = b"", *, timeout: float | None = None) -> None:
        """Stores the result (at most 65,536 bytes). Again with the same result is harmless.

        Raises AttemptStale when this is not the running attempt any more, StaleToken when its fence is not current,
        RecordMismatch when it was completed with another result, InvalidArgument for a result that is too large (the
        attempt then goes on), SessionLost or Indefinite when the session ended first.
        """
        try:
            request = dedup_pb2.CompleteRecordRequest(key=self._key, attempt=self._number, result=result)
        except TypeError:
            kind = type(result).__name__
            raise TypeError(f"a result is bytes, not {kind}: encode it, as in json.dumps(result).encode()") from None
        connection = self._connection
        seconds = connection.options.timeout if timeout is None else timeout
        await connection.call(COMPLETE, lambda: request, timeout=seconds, session=self._session)

    async def fail(self, error: str = "", *, retryable: bool, timeout: float | None = None) -> None:
        """Ends the attempt without a result: ``retryable`` frees the key, else the error is stored and replayed."""
        request = dedup_pb2.FailRecordRequest(
            key=self._key, attempt=self._number, retryable=retryable, error=_shortened(error)
        )
        connection = self._connection
        seconds = connection.options.timeout if timeout is None else timeout
        await connection.call(FAIL, lambda: request, timeout=seconds, session=self._session)

    def _give_up(self) -> None:
        """Nobody is there to do it: frees the key for the next."""
        self._connection.spawn(self.fail("the caller gave up before it began", retryable=True))

    def __repr__(self) -> str:
        return f"<Attempt {self._number} at {self._key!r}>"


BeginResult = Attempt | InProgress | Completed | Failed | UnknownOutcome


def begin_result(
    connection: Connection, session: Session, key: str, response: dedup_pb2.BeginRecordResponse
) -> BeginResult:
    record = response.record
    match response.outcome:
        case dedup_pb2.BEGIN_OUTCOME_NEW:
            return Attempt(connection, session, key, record.attempt)
        case dedup_pb2.BEGIN_OUTCOME_IN_PROGRESS:
            return InProgress(key, record.attempt, record.owner_session_id)
        case dedup_pb2.BEGIN_OUTCOME_COMPLETED:
            return Completed(key, record.attempt, record.result, record.expires_ms)
        case dedup_pb2.BEGIN_OUTCOME_FAILED:
            return Failed(key, record.attempt, record.error, record.expires_ms)
    # Also an outcome that is newer than this client: certainly no licence to act.
    return UnknownOutcome(key, record.attempt)


def _shortened(error: str) -> str:
    data = error.encode("utf-8", "replace")
    return data[:ERROR_BYTES_MAX].decode("utf-8", "ignore")


# ---- the decorator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idempotency:
    """What a decorator was told, and what it decides around one call of its function."""

    key: Callable[..., str]
    payload: Callable[..., object] | None
    serializer: Serializer
    owner_loss: OwnerLoss
    final_errors: tuple[type[BaseException], ...]

    def identify(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, bytes]:
        """Key and fingerprint of a call, taken before the function runs and may change its arguments."""
        key = self.key(*args, **kwargs)
        if not isinstance(key, str):
            raise TypeError(f"the key of {function.__qualname__} must be a string, not {type(key).__name__}")
        if self.payload is not None:
            return key, fingerprint_of(self.payload(*args, **kwargs))
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            return key, fingerprint_of(bound.arguments)
        except TypeError as error:
            raise TypeError(f"{error}; say with payload=lambda ...: what the call is about") from None

    def replay(self, begun: InProgress | Completed | Failed | UnknownOutcome) -> Any:
        """The stored result, or the error that says why there is none."""
        facts = {"key": begun.key, "attempt": str(begun.attempt)}
        where = f"attempt {begun.attempt} at {begun.key!r}"
        match begun:
            case Completed(result=stored):
                try:
                    return self.serializer.loads(stored)
                except ValueError as error:
                    error.add_note(f"The stored result of {where} is not one that this function's serializer wrote.")
                    raise
            case Failed(error=text):
                raise errors.RecordFailed(text or f"{where} failed for good", reason="RECORD_FAILED", facts=facts)
            case InProgress():
                raise errors.RecordInProgress(f"{where} is running", reason="RECORD_IN_PROGRESS", facts=facts)
            case UnknownOutcome():
                raise errors.RecordUnknown(
                    f"the owner of {where} was lost; nobody knows if it took effect",
                    reason="RECORD_UNKNOWN",
                    facts=facts,
                )

    def store(self, value: Any) -> bytes:
        """The result as it is stored. Raises TypeError or ValueError when it cannot be."""
        stored = self.serializer.dumps(value)
        if len(stored) > RESULT_BYTES_MAX:
            raise ValueError(f"the result takes {len(stored)} bytes, more than {RESULT_BYTES_MAX}")
        return stored

    def failure(self, error: BaseException) -> tuple[str, bool]:
        """The text to store for an error of the function, and whether the key is freed for another attempt."""
        if isinstance(error, Exception):
            return f"{type(error).__name__}: {error}", not isinstance(error, self.final_errors)
        # Stopped in the middle. What must not be done twice on suspicion is not retried.
        return f"interrupted ({type(error).__name__})", self.owner_loss == "retry"


def unstorable(error: Exception) -> str:
    # The effect has happened, so the key must not be freed.
    return f"it was done, but its result cannot be stored: {error}"


def decorate(
    idempotency: Idempotency,
    begin: Callable[[str, bytes], Awaitable[BeginResult]],
    function: Callable[P, Any],
) -> Callable[P, Awaitable[Any]]:
    """The function, once per key, for an event loop."""

    @functools.wraps(function)
    async def once(*args: P.args, **kwargs: P.kwargs) -> Any:
        key, print_ = idempotency.identify(function, args, kwargs)
        begun = await begin(key, print_)
        if not isinstance(begun, Attempt):
            return idempotency.replay(begun)
        try:
            value = await _run(function, args, kwargs)
        except BaseException as error:
            await _whatever_happens(_fail(idempotency, begun, error))
            raise
        try:
            stored = idempotency.store(value)
        except Exception as error:
            await _whatever_happens(begun.fail(unstorable(error), retryable=False))
            raise
        await _whatever_happens(begun.complete(stored))
        # What a replay returns, so that first call and replay look alike.
        return idempotency.serializer.loads(stored)

    return once


async def _fail(idempotency: Idempotency, attempt: Attempt, error: BaseException) -> None:
    text, retryable = idempotency.failure(error)
    try:
        await attempt.fail(text, retryable=retryable)
    except errors.TenureError as refusal:
        # The function's own error is the one to report.
        error.add_note(f"and {attempt!r} could not be ended: {refusal}")


async def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    # Off the event loop, so that renewals go on meanwhile.
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    if await _wait_out(work):
        # A thread cannot be cancelled, and what it did counts. The cancellation arrives once that is recorded.
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        task.cancel()
    return work.result()


async def _wait_out(work: asyncio.Future[Any]) -> bool:
    """Waits for the end of ``work`` whatever happens. Returns whether the caller was cancelled meanwhile."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _whatever_happens(work: Awaitable[None]) -> None:
    """Finishes ``work`` even if the caller is cancelled meanwhile; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(work)
    if not await _wait_out(task):
        task.result()
        return
    cancelled = asyncio.CancelledError()
    if not task.cancelled() and task.exception() is not None:
        cancelled.add_note(str(task.exception()))
    raise cancelled
