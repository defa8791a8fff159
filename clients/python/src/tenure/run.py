"""What the handler of a job receives: one attempt at one due time, and the right to act on it.

Rules:

* The right ends at the earliest of: the run's deadline (counted from when the run was received), the session's
  safe-until, an interrupt, the end of the run in the cluster, a kill, and a state of the switches that is not known.
  Then ``valid`` is false by the clock; when the event loop comes round to it, the handler is cancelled (once), and
  ``valid`` stays false. What it does to clean up is its own, within ``remaining()``.
* With whatever the handler does beyond this process it passes ``token`` along, where the receiver can refuse an older
  one, and ``idempotency_key``, where the receiver can recognize a repeat.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tenure import errors
from tenure.dedup import JsonSerializer
from tenure.session import CHECKPOINT, Session
from tenure.switches import word
from tenure.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from tenure.connection import Connection

__all__ = ["Permanent", "Retry", "Run", "SyncRun"]

CHECKPOINT_BYTES_MAX = 16_384
# A thread that waits for the client's loop gives it so much longer than the call may take.
LOOP_SLACK = 5.0


class Retry(Exception):
    """Raised by a handler: this attempt failed, and another may succeed, if the job's policy has one left.

    ``after``: not before so many seconds; a longer wait of the policy counts.
    """

    def __init__(self, message: str = "", *, after: float = 0.0) -> None:
        super().__init__(message)
        if not after >= 0:
            raise ValueError(f"after must be 0 or more seconds, not {after}")
        self.after = after


class Permanent(Exception):
    """Raised by a handler: the occurrence has failed, and no other attempt can help."""


def encoded(value: object, what: str) -> bytes:
    """None as nothing, bytes as they are, text as UTF-8, else JSON. Raises TypeError for what that cannot say."""
    if value is None:
        return b""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    try:
        return value.encode() if isinstance(value, str) else JsonSerializer().dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the {what} can be bytes, text, None, or what JSON can say: {error}") from error


class Run:
    """One attempt, as its handler sees it. Made by ``Client.work``."""

    def __init__(self, connection: Connection, session: Session, message: job_pb2.Run) -> None:
        self._connection, self._session, self._message = connection, session, message
        self._deadline = session.clock() + message.remaining_ms / 1000
        self._grace_until: float | None = None
        self._stop: Callable[[], None] | None = None
        self._over = False
        self._checkpoint = message.checkpoint
        # Why the handler was cancelled, and whether the sidecar asked for it.
        self.interrupt_cause: str | None = None
        self.interrupt_reason = ""
        self.interrupted_by_sidecar = False
        self.switch_id = ""
        # For handlers that run in a thread, which cannot be cancelled.
        self._cancelled = threading.Event()

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._message.run_id

    @property
    def tenant(self) -> str:
        return self._message.tenant

    @property
    def job(self) -> str:
        return self._message.job

    @property
    def job_revision(self) -> int:
        """The revision of the job whose payload and policies this attempt goes by."""
        return self._message.job_revision

    @property
    def due(self) -> datetime:
        """The due time, in UTC. The same for all attempts."""
        return datetime.fromtimestamp(self.due_wall_ms / 1000, UTC)

    @property
    def due_wall_ms(self) -> int:
        return self._message.due_wall_ms

    @property
    def sequence(self) -> int:
        """0 for a due time of the schedule; tells triggered and backfilled occurrences of one time apart."""
        return self._message.sequence

    @property
    def origin(self) -> str:
        """schedule, catch_up, trigger or backfill."""
        return word(job_pb2.OccurrenceOrigin, self._message.origin, "OCCURRENCE_ORIGIN_")

    @property
    def attempt(self) -> int:
        """From 1."""
        return self._message.attempt

    @property
    def token(self) -> int:
        """The fencing token: larger than that of every run before."""
        return self._message.token

    @property
    def kill_epoch(self) -> int:
        return self._message.kill_epoch

    @property
    def session_id(self) -> str:
        return self._session.id

    @property
    def payload(self) -> bytes:
        return self._message.payload

    def json(self) -> Any:
        """The payload as JSON; None when it is empty. Raises ValueError when it is no JSON."""
        return json.loads(self.payload) if self.payload else None

    @property
    def idempotency_key(self) -> str:
        """Of the effect that belongs to this due time: the same in every attempt, and in a backfill of it."""
        return self._message.idempotency_key

    def key(self, suffix: str) -> str:
        """Of one of several effects of this due time."""
        return f"{self.idempotency_key}/{suffix}"

    @property
    def traceparent(self) -> str:
        """W3C trace context: one trace for the occurrence, one span for this attempt."""
        return self._message.traceparent

    @property
    def estimated_cost_micros(self) -> int:
        return self._message.estimated_cost_micros

    def __repr__(self) -> str:
        return (
            f"<Run {self.run_id} of {self.tenant}/{self.job} due {self.due.isoformat()} attempt={self.attempt} "
            f"token={self.token}{' cancelled' if self.cancelled else ''}>"
        )

    # ---- the right to act --------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """The end of its time, in seconds on ``tenure.now()``."""
        return self._deadline

    @property
    def safe_until(self) -> float:
        """Until when it is ours for certain, on ``tenure.now()``; the session's renewals move it, up to the deadline.
        While an interrupt is worked on, the end of the grace counts in place of the deadline."""
        own = self._deadline if self._grace_until is None else self._grace_until
        return min(own, self._session.validity.safe_until)

    @property
    def session_safe_until(self) -> float:
        """Until when its session lives for certain, on ``tenure.now()``: so long nobody else is given the occurrence,
        also beyond the deadline, when the interrupt is worked on."""
        return self._session.validity.safe_until

    @property
    def valid(self) -> bool:
        """Whether the handler may act. Checks the clock, so it is right even if the event loop was blocked."""
        return (
            not self._over
            and self.interrupt_cause is None
            and self._connection.owner.here
            and self._session.valid
            and self._session.clock() < self._deadline
            and self._connection.switches.forbids_going_on(self.job) is None
        )

    def remaining(self) -> float:
        """Seconds until the deadline; once interrupted, what is left of the time to clean up. At least 0."""
        end = self._deadline if self._grace_until is None else self._grace_until
        return max(end - self._session.clock(), 0.0) if not self._over else 0.0

    @property
    def cancelled(self) -> bool:
        """Whether the handler must end. For handlers in threads; an asynchronous one is cancelled."""
        return self._cancelled.is_set()

    def raise_if_cancelled(self) -> None:
        """Raises RunEnded when the handler has lost its right to act."""
        if not self.valid:
            cause = self.interrupt_cause or self._session.ended or "its time is over"
            raise errors.RunEnded(f"run {self.run_id} of {self.job} must end: {cause}", reason="RUN_INTERRUPTED")

    # ---- acts --------------------------------------------------------------------------------------------------

    @property
    def last_checkpoint(self) -> bytes | None:
        """The state that was stored last, by this attempt or one before; None when there is none."""
        return self._checkpoint or None

    async def checkpoint(self, state: object, *, timeout: float | None = None) -> None:
        """Stores a state of up to 16,384 bytes (bytes, text, or what JSON can say), which the next attempt is given.

        Raises RunEnded when the run is over, somebody else's, or interrupted; InvalidArgument for a state too large.
        """
        self._connection.owner.check()
        if self._over:
            raise errors.RunEnded(f"run {self.run_id} of {self.job} has ended", reason="RUN_NOT_FOUND")
        data = encoded(state, "state")
        if len(data) > CHECKPOINT_BYTES_MAX:
            message = f"the state has {len(data)} bytes; at most {CHECKPOINT_BYTES_MAX} are stored"
            raise errors.InvalidArgument(message, facts={"field": "state", "limit": str(CHECKPOINT_BYTES_MAX)})
        request = job_pb2.CheckpointRunRequest(run_id=self.run_id, token=self.token, state=data)
        seconds = self._connection.options.timeout if timeout is None else timeout
        try:
            await self._connection.call(CHECKPOINT, lambda: request, timeout=seconds, session=self._session)
        except errors.SessionLost as error:
            raise errors.RunEnded(f"run {self.run_id}: {error.message}", reason=error.reason) from error
        self._checkpoint = data

    # ---- told by the worker ------------------------------------------------------------------------------------

    def _interrupted(self, message: session_pb2.RunInterrupted) -> None:
        """The sidecar asks for the end; there is the grace to clean up in, and to acknowledge."""
        if self._over or self.interrupted_by_sidecar:
            return
        self.interrupted_by_sidecar = True
        self.interrupt_reason, self.switch_id = message.reason, message.switch_id
        self._grace_until = self._session.clock() + message.grace_ms / 1000
        if self.interrupt_cause is None:
            self._cancel(message.cause)
        else:
            self.interrupt_cause = message.cause

    def _cancel(self, cause: str) -> None:
        if self.interrupt_cause is None:
            self.interrupt_cause = cause
            self._cancelled.set()
            if self._stop is not None:
                self._stop()

    @property
    def _grace_over(self) -> bool:
        return self._grace_until is not None and self._session.clock() >= self._grace_until

    def _end(self) -> None:
        self._over = True


class SyncRun(Run):
    """A run, for a handler that is an ordinary function: it runs in a thread, and looks at ``cancelled`` by itself."""

    _loop: asyncio.AbstractEventLoop

    @classmethod
    def of(cls, run: Run, loop: asyncio.AbstractEventLoop) -> SyncRun:
        """The same run: one state, seen from a thread."""
        seen = cls.__new__(cls)
        seen.__dict__ = run.__dict__
        seen._loop = loop
        return seen

    def checkpoint(self, state: object, *, timeout: float | None = None) -> None:  # type: ignore[override]
        """See `Run.checkpoint`; waits for it."""
        self._connection.owner.check()  # in a forked child, the loop does not run
        storing = Run.checkpoint(self, state, timeout=timeout)
        seconds = self._connection.options.timeout if timeout is None else timeout
        try:
            outcome = asyncio.run_coroutine_threadsafe(storing, self._loop)
        except RuntimeError:  # the loop is closed
            storing.close()
            raise errors.RunEnded(f"run {self.run_id}: the client is closed", reason="CLIENT_CLOSED") from None
        try:
            outcome.result(seconds + LOOP_SLACK)
        except concurrent.futures.TimeoutError as error:
            if outcome.done():
                raise  # the call's own
            message = f"run {self.run_id}: the client did not store the state within {seconds:g} s"
            raise errors.OperationTimeout(message, reason="CLIENT_TIMEOUT") from error
        except concurrent.futures.CancelledError:
            raise errors.RunEnded(f"run {self.run_id}: the client is closed", reason="CLIENT_CLOSED") from None

    def wait_cancelled(self, seconds: float) -> bool:
        """Sleeps, but no longer than the handler may go on. Returns whether it must end."""
        return self._cancelled.wait(seconds)
