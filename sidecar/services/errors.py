"""The one table from a refusal to what a caller sees: status, reason, outcome, retry delay.

Three kinds of refusal meet here: ``Reason`` (the state machine said no), ``Failure`` (a proposal has no result) and
``Problem`` (the API itself said no, before or beside the state machine). Each has exactly one row, for unary calls and
for operations on a stream alike. docs/ERRORS.md is written from this table, and a test compares the two.

Rules:
* An outcome is *indefinite* when a mutating call may have happened. Every such failure has the status
  DEADLINE_EXCEEDED and the reason OUTCOME_UNKNOWN, whatever the cause was; repeat it with the same request id.
  (INTERNAL, and every status without an ErrorDetail, comes from outside this table and counts as indefinite.)
* Everything else in the table is *definite*: it did not happen and will not happen later.
"""

# ruff: noqa: E501 - the meanings are lines of a table
from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, unique
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from tenure.v1 import error_pb2

from sidecar.core.commands import Reason, Refused
from sidecar.proposer import Failed, Failure, Outcome

Code = grpc.StatusCode

DOMAIN = "tenure"
DETAILS_KEY = "grpc-status-details-bin"
# Facts travel in the trailing metadata, which gRPC bounds to 8 KiB by default.
FACT_BYTES_MAX = 128
FACTS_MAX = 10
MESSAGE_BYTES_MAX = 512


@unique
class Problem(Enum):
    """Why the API refused. The value is the reason string callers see."""

    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    DEADLINE_REQUIRED = "DEADLINE_REQUIRED"
    TENANT_INVALID = "TENANT_INVALID"
    TENANT_NOT_FOUND = "TENANT_NOT_FOUND"
    NAME_INVALID = "NAME_INVALID"
    KEY_INVALID = "KEY_INVALID"
    FIELD_REQUIRED = "FIELD_REQUIRED"
    FIELD_INVALID = "FIELD_INVALID"
    FIELD_TOO_LARGE = "FIELD_TOO_LARGE"
    VALUE_OUT_OF_RANGE = "VALUE_OUT_OF_RANGE"
    PAGE_TOKEN_INVALID = "PAGE_TOKEN_INVALID"
    STREAM_PROTOCOL = "STREAM_PROTOCOL"
    STREAM_OPERATIONS_FULL = "STREAM_OPERATIONS_FULL"
    STREAM_ENDED = "STREAM_ENDED"
    SLOW_READER = "SLOW_READER"
    REVISION_COMPACTED = "REVISION_COMPACTED"
    REVISION_FUTURE = "REVISION_FUTURE"
    WATCHERS_FULL = "WATCHERS_FULL"
    DRAINING = "DRAINING"
    READ_NOT_CONFIRMED = "READ_NOT_CONFIRMED"
    WAIT_CANCELLED = "WAIT_CANCELLED"
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    LEADERSHIP_NOT_TRANSFERRED = "LEADERSHIP_NOT_TRANSFERRED"
    SNAPSHOT_FAILED = "SNAPSHOT_FAILED"
    INTERNAL = "INTERNAL"


class Row(NamedTuple):
    """What a caller sees. ``retry_delay_ms`` is used where the refusal itself states none."""

    code: grpc.StatusCode
    definite: bool
    retry_delay_ms: int
    meaning: str  # for docs/ERRORS.md: what it means and what to do


def _row(code: grpc.StatusCode, meaning: str, *, retry_ms: int = 0, definite: bool = True) -> Row:
    return Row(code, definite, retry_ms, meaning)


# fmt: off
PROBLEMS: Mapping[Problem, Row] = {
    Problem.MALFORMED_MESSAGE: _row(Code.INVALID_ARGUMENT, "The bytes are not the message that the method takes, or a string field is not UTF-8. Fix the encoder."),
    Problem.DEADLINE_REQUIRED: _row(Code.INVALID_ARGUMENT, "The call has no deadline, or an operation no `timeout_ms`. Set one (or run the sidecar with `require_deadline` off)."),
    Problem.TENANT_INVALID: _row(Code.INVALID_ARGUMENT, "The tenant is empty, too long or has characters that are not allowed."),
    Problem.TENANT_NOT_FOUND: _row(Code.NOT_FOUND, "The tenant is well formed but not configured on this sidecar. Check `TENURE_TENANT` and the sidecar's `tenants`."),
    Problem.NAME_INVALID: _row(Code.INVALID_ARGUMENT, "A name of a lease or job (or a prefix) is empty, too long, not printable, or has a slash or a space where none is allowed."),
    Problem.KEY_INVALID: _row(Code.INVALID_ARGUMENT, "An idempotency key is empty, only white space, or longer than 512 bytes."),
    Problem.FIELD_REQUIRED: _row(Code.INVALID_ARGUMENT, "A required field is empty; the fact `field` names it."),
    Problem.FIELD_INVALID: _row(Code.INVALID_ARGUMENT, "A field has a value that is not allowed; the facts name the field and what is allowed."),
    Problem.FIELD_TOO_LARGE: _row(Code.INVALID_ARGUMENT, "A field is longer than its limit; the facts name the field, the size and the limit."),
    Problem.VALUE_OUT_OF_RANGE: _row(Code.INVALID_ARGUMENT, "A number (ttl, wait, capacity, token, ...) is outside its range; the facts name the field and the range."),
    Problem.PAGE_TOKEN_INVALID: _row(Code.INVALID_ARGUMENT, "The page token is not one that this list, with this tenant and prefix, gave out. Start from the first page."),
    Problem.STREAM_PROTOCOL: _row(Code.INVALID_ARGUMENT, "The stream broke a rule of `Connect`: attach first, once and in time; ids from 1; one body per operation. The stream ends."),
    Problem.STREAM_OPERATIONS_FULL: _row(Code.RESOURCE_EXHAUSTED, "Too many operations of this stream are unanswered. Wait for results, then send it again.", retry_ms=50),
    Problem.STREAM_ENDED: _row(Code.UNAVAILABLE, "The sidecar is closing this stream. Connect again and resume the session.", retry_ms=100),
    Problem.SLOW_READER: _row(Code.RESOURCE_EXHAUSTED, "The reader did not keep up and was cut off. A watcher resumes from the fact `resume_revision`; an agent reconnects and resumes its session.", retry_ms=100),
    Problem.REVISION_COMPACTED: _row(Code.OUT_OF_RANGE, "Events from this revision on are no longer held. List anew, or watch from the fact `first_revision`."),
    Problem.REVISION_FUTURE: _row(Code.OUT_OF_RANGE, "The revision is larger than the cluster's next one: it comes from another cluster, or from before a restore. List anew."),
    Problem.WATCHERS_FULL: _row(Code.RESOURCE_EXHAUSTED, "This sidecar serves as many watchers as it may. Close some, or use another node.", retry_ms=5_000),
    Problem.DRAINING: _row(Code.UNAVAILABLE, "The sidecar is stopping and opens no new sessions; sessions it has are served on. Use another one.", retry_ms=1_000),
    Problem.READ_NOT_CONFIRMED: _row(Code.UNAVAILABLE, "A linearizable read could not be confirmed: no leader, or no quorum. Try again, or read with `CONSISTENCY_LOCAL`.", retry_ms=500),
    Problem.WAIT_CANCELLED: _row(Code.ABORTED, "The place in line was given up at the caller's request; the lease is not held."),
    Problem.NODE_NOT_FOUND: _row(Code.NOT_FOUND, "No node of the cluster has this id; the fact `nodes` lists them."),
    Problem.LEADERSHIP_NOT_TRANSFERRED: _row(Code.FAILED_PRECONDITION, "Leadership did not move: no leader is known, or the target leads already, cannot be reached or has not caught up. The fact `leader` names who leads.", retry_ms=1_000),
    Problem.SNAPSHOT_FAILED: _row(Code.FAILED_PRECONDITION, "The snapshot could not be written, or one is being written already. The old one is still in place.", retry_ms=1_000),
    Problem.INTERNAL: _row(Code.INTERNAL, "A defect of the sidecar; its log has the details. It may have happened.", definite=False),
}

REASONS: Mapping[Reason, Row] = {
    Reason.EXPIRED_REQUEST: _row(Code.UNAVAILABLE, "The caller's deadline passed before the cluster got to the request, so it was not applied.", retry_ms=100),
    Reason.REQUEST_ID_REUSED: _row(Code.INVALID_ARGUMENT, "This request id was used with another body. Every distinct request needs its own id."),
    Reason.REQUEST_FORGOTTEN: _row(Code.FAILED_PRECONDITION, "The client has acknowledged this operation id, so its outcome is forgotten. Ids only grow."),
    Reason.REQUESTS_FULL: _row(Code.RESOURCE_EXHAUSTED, "The cluster remembers as many requests as it may. Acknowledge operations, slow down.", retry_ms=1_000),
    Reason.INVALID_COMMAND: _row(Code.INVALID_ARGUMENT, "The request is out of bounds. Usually found before it reaches the cluster, and told in more detail."),
    Reason.SESSION_NOT_FOUND: _row(Code.NOT_FOUND, "The session never existed, has expired or was closed. What it held is lost; open a new one."),
    Reason.SESSION_FOREIGN: _row(Code.PERMISSION_DENIED, "The session belongs to another tenant."),
    Reason.SESSIONS_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of sessions (of the cluster or the tenant) is reached.", retry_ms=5_000),
    Reason.SESSION_TAKEN_OVER: _row(Code.ABORTED, "A later stream has attached to this session, so this one ends, or does not attach. Do not reconnect unless you mean to take it back."),
    Reason.LEASE_HELD: _row(Code.ALREADY_EXISTS, "Others hold all of the lease's capacity (also after waiting in line for the time asked). The facts name the holder.", retry_ms=500),
    Reason.LEASE_CAPACITY_MISMATCH: _row(Code.FAILED_PRECONDITION, "The name is in use with another capacity. All its holders and waiters must state the same one."),
    Reason.LEASES_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of leases is reached.", retry_ms=5_000),
    Reason.WAITERS_FULL: _row(Code.RESOURCE_EXHAUSTED, "The line for this lease is full.", retry_ms=1_000),
    Reason.TOKEN_STALE: _row(Code.FAILED_PRECONDITION, "The token is no longer current: the lease was lost, released or granted again. Stop the work done under it."),
    Reason.TOKEN_UNKNOWN: _row(Code.FAILED_PRECONDITION, "The token is larger than any that was granted for this name: it comes from somewhere else."),
    Reason.NOT_HOLDER: _row(Code.FAILED_PRECONDITION, "The token is current, but it is another session's."),
    Reason.LOCK_DELAY: _row(Code.ALREADY_EXISTS, "The last holder expired and asked for a lock delay that has not passed yet.", retry_ms=500),
    Reason.TRANSFER_TARGET_INVALID: _row(Code.FAILED_PRECONDITION, "The session to transfer to is unknown, of another tenant, or already a holder."),
    Reason.WAIT_NOT_FOUND: _row(Code.NOT_FOUND, "There is no such place in line."),
    Reason.RECORD_MISMATCH: _row(Code.FAILED_PRECONDITION, "The key is in use with another fingerprint: the same key for different work."),
    Reason.RECORD_NOT_FOUND: _row(Code.NOT_FOUND, "There is no record of this key (never begun, or forgotten after its retention)."),
    Reason.RECORD_NOT_RUNNING: _row(Code.FAILED_PRECONDITION, "The record has no running attempt to complete or fail."),
    Reason.ATTEMPT_STALE: _row(Code.FAILED_PRECONDITION, "Another attempt than this one is that of the record or occurrence. Discard the work, or look again before you decide."),
    Reason.FENCE_STALE: _row(Code.FAILED_PRECONDITION, "The lease token that fences the record is no longer current. Discard the work."),
    Reason.RECORDS_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of records, or of their bytes, is reached; nothing is forgotten early to make room.", retry_ms=5_000),
    Reason.RECORD_RESULT_MISMATCH: _row(Code.FAILED_PRECONDITION, "The attempt was completed before with another result. The first one stands."),
    Reason.RECORD_OWNED_BY_OTHER: _row(Code.FAILED_PRECONDITION, "The running attempt belongs to another session."),
    Reason.JOB_NOT_FOUND: _row(Code.NOT_FOUND, "There is no job of this name. Names are exact; `tenure job ls` lists them."),
    Reason.JOB_REVISION_MISMATCH: _row(Code.FAILED_PRECONDITION, "The job has another revision than the one expected (or exists, where none was expected). Nothing of the request was applied. Look at it again, then decide."),
    Reason.JOB_REVISION_GONE: _row(Code.NOT_FOUND, "The job never had this revision, or it is no longer kept."),
    Reason.JOBS_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of jobs, or of the bytes of all their kept revisions, is reached.", retry_ms=5_000),
    Reason.JOB_BEHIND: _row(Code.UNAVAILABLE, "Due times of the job's present schedule are not settled yet, and a change would lose them. The sidecar tries again until the deadline; so can you.", retry_ms=100),
    Reason.OCCURRENCE_NOT_FOUND: _row(Code.NOT_FOUND, "There is no such occurrence: never due, or its history is over. Explain the time to learn which."),
    Reason.OCCURRENCE_NOT_HELD: _row(Code.FAILED_PRECONDITION, "Only an occurrence whose outcome is unknown can be resolved, and only at the attempt that is stated."),
    Reason.OCCURRENCES_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of occurrences is reached. History goes by age; shorten that of some jobs.", retry_ms=5_000),
    Reason.RUN_NOT_FOUND: _row(Code.NOT_FOUND, "The run never was, or has ended: by its time, by a switch, with its session, or by an answer given before. Discard the work."),
    Reason.RUN_STALE: _row(Code.FAILED_PRECONDITION, "The token is not the run's, or the run is another session's. Discard the work."),
    Reason.RUN_INTERRUPTED: _row(Code.FAILED_PRECONDITION, "The run was asked to stop; nothing but its end is accepted of it any more."),
    Reason.SWITCHED_OFF: _row(Code.FAILED_PRECONDITION, "A switch in force forbids it; the facts say which, who set it, since when and why. Settling what runs already is still allowed."),
    Reason.SWITCH_NOT_FOUND: _row(Code.NOT_FOUND, "There is no such switch, or it ended so long ago that it is not kept."),
    Reason.SWITCH_STALE: _row(Code.FAILED_PRECONDITION, "The switch has ended; the fact `current_switch_id` names the one that is in force instead, if any."),
    Reason.SWITCH_STRONGER: _row(Code.FAILED_PRECONDITION, "A stronger switch is in force for this scope. Clear that one first."),
    Reason.SWITCHES_FULL: _row(Code.RESOURCE_EXHAUSTED, "The limit of switches in force is reached.", retry_ms=5_000),
}

# These are for definite failures; one whose outcome is not known takes the row of OUTCOME_UNKNOWN, whatever its cause.
FAILURES: Mapping[Failure, Row] = {
    Failure.NO_LEADER: _row(Code.UNAVAILABLE, "No leader is known, or it cannot be reached. Elections take about a second.", retry_ms=500),
    Failure.OVERLOADED: _row(Code.RESOURCE_EXHAUSTED, "The sidecar has as much in flight as it may. Wait for the retry delay.", retry_ms=100),
    Failure.DEADLINE: _row(Code.UNAVAILABLE, "The time ran out before the request was handed to the cluster.", retry_ms=100),
    Failure.TOO_LARGE: _row(Code.INVALID_ARGUMENT, "The request does not fit into one entry of the log."),
    Failure.OUTCOME_UNKNOWN: _row(Code.DEADLINE_EXCEEDED, "The time ran out, or the cluster changed leaders, before the outcome was known: it may have happened. Repeat with the same request id to learn it.", definite=False),
    Failure.STOPPING: _row(Code.UNAVAILABLE, "The sidecar is stopping. Use another one.", retry_ms=1_000),
}
# fmt: on


class ApiError(Exception):
    """A refusal on its way to the caller: as the status of a call, or as the error of an operation on a stream."""

    def __init__(
        self, reason: str, row: Row, message: str, facts: Mapping[str, str] | None = None, retry_delay_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.row = row
        self.message = shorten(message, MESSAGE_BYTES_MAX)
        self.facts = {name: shorten(value, FACT_BYTES_MAX) for name, value in list((facts or {}).items())[:FACTS_MAX]}
        self.retry_delay_ms = retry_delay_ms or row.retry_delay_ms

    @property
    def code(self) -> grpc.StatusCode:
        return self.row.code

    def detail(self) -> error_pb2.ErrorDetail:
        return error_pb2.ErrorDetail(
            reason=self.reason,
            outcome=error_pb2.OUTCOME_DEFINITE if self.row.definite else error_pb2.OUTCOME_INDEFINITE,
            retry_delay_ms=self.retry_delay_ms,
            facts=self.facts,
        )

    def on_stream(self) -> error_pb2.OperationError:
        """The error as the result of one operation."""
        return error_pb2.OperationError(code=number_of(self.code), message=self.message, detail=self.detail())

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """``grpc-status-details-bin``: a google.rpc.Status with ErrorInfo, RetryInfo and tenure.v1.ErrorDetail."""
        outcome = "definite" if self.row.definite else "indefinite"
        info = ErrorInfo(reason=self.reason, domain=DOMAIN, metadata={**self.facts, "outcome": outcome})
        details = [_packed(info)]
        if self.retry_delay_ms:
            retry = RetryInfo()
            retry.retry_delay.FromMilliseconds(self.retry_delay_ms)
            details.append(_packed(retry))
        details.append(_packed(self.detail()))
        status = Status(code=number_of(self.code), message=self.message, details=details)
        return ((DETAILS_KEY, status.SerializeToString()),)


def problem(what: Problem, message: str, *, retry_delay_ms: int = 0, **facts: object) -> ApiError:
    """The API's own refusal."""
    return ApiError(
        what.value, PROBLEMS[what], message, {name: str(value) for name, value in facts.items()}, retry_delay_ms
    )


def refused(refusal: Refused) -> ApiError:
    """The state machine's refusal."""
    reason = refusal.reason
    return ApiError(reason.name, REASONS[reason], refusal.message, dict(refusal.facts), refusal.retry_delay_ms)


def failed(failure: Failed) -> ApiError:
    """A proposal without a result."""
    if failure.definite:
        kind = failure.failure
        return ApiError(kind.name, FAILURES[kind], failure.message, retry_delay_ms=failure.retry_delay_ms)
    return outcome_unknown(failure.message, failure.failure.name)


def unsuccessful(outcome: Outcome) -> ApiError:
    """Of a proposal that did not come to the result it was made for."""
    if isinstance(outcome, Refused):
        return refused(outcome)
    if isinstance(outcome, Failed):
        return failed(outcome)
    raise AssertionError(f"{outcome!r} is no answer to what was proposed")


def outcome_unknown(message: str, cause: str) -> ApiError:
    """It may have happened."""
    kind = Failure.OUTCOME_UNKNOWN
    return ApiError(kind.name, FAILURES[kind], message, {"cause": cause})


def session_gone(session: str) -> ApiError:
    """There is no such session (any more)."""
    message = f"session {session} does not live: it expired, was closed, or never was"
    return refused(Refused(reason=Reason.SESSION_NOT_FOUND, message=message, facts=(("session_id", session),)))


def number_of(code: grpc.StatusCode) -> int:
    """The google.rpc.Code number of a status."""
    return int(code.value[0])


def shorten(text: str, bytes_max: int) -> str:
    """``text`` cut to at most ``bytes_max`` bytes of UTF-8, with an ellipsis where something is missing."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "\u2026"


def _packed(message: ErrorInfo | RetryInfo | error_pb2.ErrorDetail) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def table() -> Iterator[tuple[str, Row]]:
    """Every reason string a caller can see, with its row: the API's, the state machine's, the proposer's."""
    for what, row in PROBLEMS.items():
        yield what.value, row
    for reason, row in REASONS.items():
        yield reason.name, row
    for failure, row in FAILURES.items():
        yield failure.name, row


def markdown() -> str:
    """The table of docs/ERRORS.md."""
    lines = ["| reason | status | outcome | retry after | meaning |", "| --- | --- | --- | --- | --- |"]
    for reason, row in sorted(table()):
        outcome = "definite" if row.definite else "indefinite"
        retry = f"{row.retry_delay_ms} ms" if row.retry_delay_ms else "-"
        lines.append(f"| `{reason}` | {row.code.name} | {outcome} | {retry} | {row.meaning} |")
    return "\n".join(lines) + "\n"
