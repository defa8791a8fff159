"""Every error the client raises.

The two types that matter most are ``Definite`` (it did not happen and will not happen later) and ``Indefinite`` (it may
have happened: ask again, or let the fencing token and the idempotency key decide). An error of a call is one of the
two. ``LeaseLost`` is neither: it says that a lease that was held no longer is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from tenure.v1 import error_pb2

__all__ = [
    "AttemptStale",
    "ClientClosed",
    "ClientForkedError",
    "Compacted",
    "ConnectError",
    "Definite",
    "Indefinite",
    "InvalidArgument",
    "JobConflict",
    "LeaseHeld",
    "LeaseLost",
    "LimitReached",
    "NotFound",
    "OperationTimeout",
    "Overloaded",
    "PermissionDenied",
    "RecordFailed",
    "RecordInProgress",
    "RecordMismatch",
    "RecordUnknown",
    "RunEnded",
    "SessionLost",
    "StaleToken",
    "SwitchStateUnknown",
    "SwitchedOff",
    "TenureError",
    "Unavailable",
    "from_detail",
    "from_rpc_error",
]

DETAILS_KEY = "grpc-status-details-bin"


class TenureError(Exception):
    """Base of every error of this package.

    ``reason`` is a stable identifier such as ``LEASE_HELD``, ``facts`` what the sidecar said about it, and
    ``retry_delay`` the seconds to wait before trying again (0 when that cannot help by itself).
    """

    def __init__(
        self, message: str, *, reason: str = "", facts: Mapping[str, str] | None = None, retry_delay: float = 0.0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.facts: Mapping[str, str] = dict(facts or {})
        self.retry_delay = retry_delay

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})" if self.reason else self.message

    def _number(self, fact: str) -> int:
        text = self.facts.get(fact, "")
        return int(text) if text.lstrip("-").isdigit() else 0


class Definite(TenureError):
    """It did not happen, and will not happen later."""


class Indefinite(TenureError):
    """It may have happened. What it was for must bear that: a repeat is safe under the same key or token."""


# ---- definite --------------------------------------------------------------------------------------------------


class InvalidArgument(Definite, ValueError):
    """An argument is malformed or out of bounds. ``field`` names it, where the sidecar said which."""

    @property
    def field(self) -> str:
        return self.facts.get("field", "")


class NotFound(Definite, LookupError):
    """No such tenant, session, lease or record."""


class PermissionDenied(Definite):
    """The session or name belongs to somebody else."""


class LeaseHeld(Definite):
    """Somebody else holds the lease (also at the end of a wait). ``retry_delay`` says when asking again may help."""

    @property
    def holder(self) -> str:
        """Session id of the holder; empty when the sidecar did not say."""
        return self.facts.get("holder", "")

    @property
    def token(self) -> int:
        """The holder's fencing token; 0 when the sidecar did not say."""
        return self._number("token")


class StaleToken(Definite):
    """The fencing token is not the current one. ``current_token`` is, where it is known (0 otherwise)."""

    @property
    def current_token(self) -> int:
        return self._number("current_token")


class AttemptStale(Definite):
    """The attempt at an idempotency key is no longer the running one: another has begun, or it has ended."""


class RecordMismatch(Definite):
    """The idempotency key was used with another payload (or completed with another result)."""


class SessionLost(Definite):
    """The session has ended. What it held is gone; the client opens a new one for later calls."""


class Overloaded(Definite):
    """The sidecar, or this client, has too much to do. Wait ``retry_delay`` seconds."""


class LimitReached(Definite):
    """A bound on the stored state was reached: too many sessions, leases, waiters or records."""


class Unavailable(Definite):
    """No sidecar, no leader, no quorum, or draining. The call was not carried out."""


class ConnectError(Unavailable):
    """No sidecar could be reached; the message says what was tried and what to do."""


class ClientClosed(Definite):
    """The client has been closed."""


class ClientForkedError(Definite, RuntimeError):
    """This process was forked from one that had opened a client; a connection cannot be shared."""


class Compacted(Definite):
    """The wanted revision is no longer held. Read the state again, then watch from its revision."""

    @property
    def first_revision(self) -> int:
        return self._number("first_revision")


class RecordInProgress(Definite):
    """Another attempt at this idempotency key is running."""


class RecordFailed(Definite):
    """An earlier attempt at this idempotency key failed for good; ``message`` is its stored error."""


class RecordUnknown(Definite):
    """The owner of an earlier attempt was lost; nobody knows if it took effect. A person must resolve it."""


class SwitchedOff(Definite):
    """A switch in force forbids it: the fleet, the tenant or the job is paused, draining or killed."""

    @property
    def switch_id(self) -> str:
        return self.facts.get("switch_id", "")

    @property
    def mode(self) -> str:
        """pause, drain or kill."""
        return self.facts.get("mode", "").lower()

    @property
    def actor(self) -> str:
        """Who has set it."""
        return self.facts.get("actor", "")


class SwitchStateUnknown(Definite):
    """Whether a switch is in force could not be learnt for too long; treated as if one was (see ``fail_open``)."""


class JobConflict(Definite):
    """There is a job of that name with another specification, or of another revision than expected."""


class RunEnded(Definite):
    """The run is over, or somebody else's: nothing that this process reports of it is accepted any more."""


# ---- indefinite ------------------------------------------------------------------------------------------------


class OperationTimeout(Indefinite, TimeoutError):
    """No answer within the call's time."""


# ---- neither ---------------------------------------------------------------------------------------------------


class LeaseLost(TenureError):
    """The lease is no longer ours, or would not have been for much longer. The body has ended before this is raised.

    ``cause``: expired, session_ended, released, transferred, operator, killed (by a switch), lost (while there was no
    stream, nobody said how), interrupted (cancelled in time, and given back) or client_closed. ``current_token`` is the
    successor's token where the sidecar said so (0 otherwise).
    """

    def __init__(self, name: str, token: int, cause: str, current_token: int = 0) -> None:
        message = f"lease {name!r} (token {token}) is lost: {cause}"
        super().__init__(message, reason="LEASE_LOST", facts={"cause": cause, "current_token": str(current_token)})
        self.name = name
        self.token = token
        self.cause = cause
        self.current_token = current_token


# ---- from the wire ---------------------------------------------------------------------------------------------

_BY_REASON: dict[str, type[TenureError]] = {
    "SESSION_NOT_FOUND": SessionLost,
    "SESSION_FOREIGN": PermissionDenied,
    "REVISION_FUTURE": InvalidArgument,
    "LEASE_HELD": LeaseHeld,
    "LOCK_DELAY": LeaseHeld,
    "TOKEN_STALE": StaleToken,
    "TOKEN_UNKNOWN": StaleToken,
    "NOT_HOLDER": StaleToken,
    "FENCE_STALE": StaleToken,
    "RECORD_MISMATCH": RecordMismatch,
    "RECORD_RESULT_MISMATCH": RecordMismatch,
    "RECORD_NOT_FOUND": NotFound,
    "RECORD_NOT_RUNNING": AttemptStale,
    "RECORD_OWNED_BY_OTHER": AttemptStale,
    "ATTEMPT_STALE": AttemptStale,
    "SESSIONS_FULL": LimitReached,
    "LEASES_FULL": LimitReached,
    "WAITERS_FULL": LimitReached,
    "RECORDS_FULL": LimitReached,
    "REQUESTS_FULL": Overloaded,
    "JOB_NOT_FOUND": NotFound,
    "JOB_REVISION_GONE": NotFound,
    "JOB_REVISION_MISMATCH": JobConflict,
    "JOBS_FULL": LimitReached,
    "OCCURRENCE_NOT_FOUND": NotFound,
    "OCCURRENCES_FULL": LimitReached,
    "RUN_NOT_FOUND": RunEnded,
    "RUN_STALE": RunEnded,
    "RUN_INTERRUPTED": RunEnded,
    "SWITCHED_OFF": SwitchedOff,
    "SWITCH_NOT_FOUND": NotFound,
    "SWITCHES_FULL": LimitReached,
}

_BY_CODE: dict[int, type[TenureError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: InvalidArgument,
    grpc.StatusCode.NOT_FOUND.value[0]: NotFound,
    grpc.StatusCode.PERMISSION_DENIED.value[0]: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED.value[0]: PermissionDenied,
    grpc.StatusCode.ALREADY_EXISTS.value[0]: LeaseHeld,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: Overloaded,
    grpc.StatusCode.UNAVAILABLE.value[0]: Unavailable,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: Compacted,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: OperationTimeout,
}


def from_detail(
    code: int, message: str, detail: error_pb2.ErrorDetail | None, *, read_only: bool = False
) -> TenureError:
    """The error for a status code with what the sidecar said about it (None when it said nothing)."""
    detail = detail or error_pb2.ErrorDetail()
    # A status without a word about its outcome did not come from the sidecar's own code, so nothing is certain,
    # except that a call which only reads has changed nothing.
    definite = detail.outcome == error_pb2.OUTCOME_DEFINITE
    if read_only and detail.outcome == error_pb2.OUTCOME_UNSPECIFIED:
        definite = code != grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    chosen = _BY_REASON.get(detail.reason) or _BY_CODE.get(code) or (Definite if definite else Indefinite)
    if definite and not issubclass(chosen, Definite):
        chosen = Definite
    if not definite and not issubclass(chosen, Indefinite):
        chosen = Indefinite
    return chosen(
        message or detail.reason or "the sidecar gave no reason",
        reason=detail.reason,
        facts=detail.facts,
        retry_delay=detail.retry_delay_ms / 1000,
    )


class _RpcError(Protocol):
    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def from_rpc_error(error: _RpcError, trailing_metadata: object, *, read_only: bool = False) -> TenureError:
    """The error for a failed unary call or an ended stream, with the details of its trailing metadata."""
    code = int(error.code().value[0])
    detail = _detail_in(trailing_metadata)
    return from_detail(code, error.details() or "", detail, read_only=read_only)


def _detail_in(trailing_metadata: object) -> error_pb2.ErrorDetail | None:
    for key, value in trailing_metadata or ():  # type: ignore[attr-defined]
        if key == DETAILS_KEY:
            return _unpack(value)
    return None


def _unpack(value: bytes) -> error_pb2.ErrorDetail | None:
    try:
        status = error_pb2.RichStatus.FromString(value)
        for packed in status.details:
            detail = error_pb2.ErrorDetail()
            if packed.Is(error_pb2.ErrorDetail.DESCRIPTOR) and packed.Unpack(detail):
                return detail
    except DecodeError:  # a proxy's details, or garbage: the status code alone must do
        return None
    return None
