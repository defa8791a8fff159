"""Calls that may have to wait: an acquire in line for its lease, a begin for the outcome of a running attempt.

An acquire, from start to answer:

    proposed -> granted | refused | failed                      answered at once
             -> queued  -> granted | wait ended (events)        answered by the event
                        -> deadline, or the caller gave up      CancelWait, answered by its result

Rules:
1. Whoever was not told "granted" does not hold the lease because of this call: what it may have been given is taken
   back with CancelWait, which names this very call (``waiter``) and so never undoes what a repeat of it was told.
2. A stream that broke does not give up its places in line: the agent may resume, and send the operation again. Its
   session's end, or the wait's, are the bounds. ``drop`` forgets such a call without undoing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from tenure.v1 import lease_pb2

from sidecar.core.commands import (
    AcquireLease,
    BeginOutcome,
    BeginRecord,
    CancelWait,
    DetachSession,
    Done,
    FailRun,
    LeaseGranted,
    LeaseQueued,
    Reason,
    RecordBegun,
    Refused,
    RequestKey,
)
from sidecar.core.dedup import Record, RecordState
from sidecar.core.events import Event, Kind
from sidecar.proposer import Failed, Failure, Outcome
from sidecar.services import translate
from sidecar.services.calls import Answer, Once
from sidecar.services.errors import ApiError, Problem, outcome_unknown, problem, refused, session_gone, unsuccessful
from sidecar.services.notices import Notices

if TYPE_CHECKING:
    from sidecar.proposer import AsyncProposer

INSIST_TIMEOUT_MS = 5_000
INSIST_PAUSE_S = 0.5


class Running(Protocol):
    """An operation under way."""

    def give_up(self) -> None:
        """The caller does not want it any more; it is still answered."""

    def drop(self) -> None:
        """Nobody can be answered any more; nothing is undone."""


def insist(
    proposer: AsyncProposer,
    command: CancelWait | DetachSession | FailRun,
    done: Callable[[Outcome], None] | None = None,
) -> None:
    """Propose until it has happened, the session has ended, or this node stops. ``done`` gets the FIRST outcome."""
    loop = asyncio.get_running_loop()
    first = done

    def propose() -> None:
        proposer.submit(command, settled, timeout_ms=INSIST_TIMEOUT_MS)

    def settled(outcome: Outcome) -> None:
        nonlocal first
        if first is not None:
            told, first = first, None
            told(outcome)
        again = isinstance(outcome, Failed) and outcome.failure is not Failure.STOPPING
        if again and proposer.machine.session(command.session) is not None:
            loop.call_later(INSIST_PAUSE_S, propose)

    propose()


def derived(key: RequestKey, number: int) -> RequestKey:
    """The name of a further try of the same request: a repeat of the request walks through the same ones."""
    name = f"{key.origin}\n{key.sequence}" if key.origin else key.name
    return RequestKey(key.tenant, "", f"{blake2b(name.encode(), digest_size=16).hexdigest()}\n{number}")


class AcquireCall:
    def __init__(
        self,
        proposer: AsyncProposer,
        notices: Notices,
        command: AcquireLease,
        key: RequestKey,
        timeout_ms: int,
        answer: Answer,
    ) -> None:
        self._proposer, self._notices = proposer, notices
        self._loop = asyncio.get_running_loop()
        self._command, self._key = command, key
        self._answer = Once(answer)
        self._deadline_s = self._loop.time() + timeout_ms / 1000
        self._given_up = self._dropped = self._fresh_grant = False
        self._leave: Callable[[], None] | None = None  # set while it is in line
        self._propose()

    def give_up(self) -> None:
        if self._given_up:
            return
        self._given_up = True
        if self._leave is not None or self._fresh_grant:  # in line, or answered too late
            self._undo()

    def drop(self) -> None:
        self._dropped = True
        self._out_of_line()

    def _propose(self) -> None:
        timeout_ms = max(1, int((self._deadline_s - self._loop.time()) * 1000))
        self._proposer.submit(self._command, self._decided, timeout_ms=timeout_ms, key=self._key)

    def _decided(self, outcome: Outcome) -> None:
        if isinstance(outcome, LeaseGranted):
            self._granted(outcome)
        elif isinstance(outcome, LeaseQueued):
            self._queued()
        else:
            self._answer(unsuccessful(outcome))
            if isinstance(outcome, Failed) and not outcome.definite and not self._dropped:
                insist(self._proposer, self._cancel())

    def _granted(self, grant: LeaseGranted) -> None:
        if self._given_up and not grant.already_held:
            self._undo()
            return
        self._fresh_grant = not grant.already_held
        self._answer(
            lease_pb2.AcquireLeaseResponse(
                token=grant.token, already_held=grant.already_held, ttl_ms=grant.ttl_ms, revision=grant.revision
            )
        )

    def _queued(self) -> None:
        if self._given_up:
            self._undo()
        elif not self._dropped:
            remove = self._notices.waiters.add(self._command.waiter, self._noticed)
            timer = self._loop.call_at(self._deadline_s, self._undo)

            def leave() -> None:
                remove()
                timer.cancel()

            self._leave = leave

    def _noticed(self, event: Event | None) -> None:
        self._out_of_line()
        if event is None:
            # The request remembers what became of it. A fresh name, as for any repeat.
            self._command = translate.renamed(self._command)
            self._propose()
        elif event.kind is Kind.LEASE_GRANTED:
            session = self._proposer.machine.session(self._command.session)
            ttl_ms = session.ttl_ms if session else 0
            self._fresh_grant = True
            self._answer(lease_pb2.AcquireLeaseResponse(token=event.token, ttl_ms=ttl_ms, revision=event.revision))
        elif event.cause == "session_ended":
            self._answer(session_gone(event.session))
        elif event.cause == "timeout":
            self._answer(self._held())
        else:
            self._answer(problem(Problem.WAIT_CANCELLED, "the place in line was given up"))

    def _undo(self) -> None:
        self._out_of_line()
        insist(self._proposer, self._cancel(), self._undone)

    def _undone(self, outcome: Outcome) -> None:
        if isinstance(outcome, Done):
            given_up = problem(Problem.WAIT_CANCELLED, "the place in line was given up")
            self._answer(given_up if self._given_up else self._held())
        elif isinstance(outcome, Failed):
            self._answer(outcome_unknown("giving up the place in line was not confirmed in time", outcome.failure.name))
        else:
            self._answer(outcome_unknown("a repeat of this request has taken over its place in line", "REPEATED"))

    def _cancel(self) -> CancelWait:
        command = self._command
        return CancelWait(tenant=command.tenant, name=command.name, session=command.session, waiter=command.waiter)

    def _out_of_line(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _held(self) -> ApiError:
        lease = self._proposer.machine.lease(self._command.tenant, self._command.name)
        facts: tuple[tuple[str, str], ...] = ()
        if lease is not None and lease.holders:
            newest = lease.holders[-1]
            facts = (("holder", newest.session), ("token", str(newest.token)))
        message = "not granted within the time given to wait"
        return refused(Refused(reason=Reason.LEASE_HELD, message=message, facts=facts))


class BeginCall:
    """Waits while another attempt runs, then tells its outcome, or begins again if that attempt came to nothing.

    A begin that has been answered "in progress" is remembered as that, so each further one goes by a name derived from
    the request's: a repeat of the request walks through the same answers.
    """

    def __init__(
        self,
        proposer: AsyncProposer,
        notices: Notices,
        command: BeginRecord,
        key: RequestKey,
        wait_ms: int,
        timeout_ms: int,
        answer: Answer,
    ) -> None:
        self._proposer, self._notices = proposer, notices
        self._loop = asyncio.get_running_loop()
        self._command, self._key = command, key
        self._answer = Once(answer)
        now_s = self._loop.time()
        self._deadline_s = now_s + timeout_ms / 1000
        self._wait_until_s = min(now_s + wait_ms / 1000, self._deadline_s)
        self._round = 0
        self._given_up = self._dropped = False
        self._leave: Callable[[], None] | None = None
        self._propose(key)

    def give_up(self) -> None:
        self._given_up = True
        if self._leave is not None:
            self._stop_waiting()
            self._answer(problem(Problem.WAIT_CANCELLED, "the wait for the outcome was given up"))

    def drop(self) -> None:
        self._dropped = True
        self._stop_waiting()

    def _propose(self, key: RequestKey) -> None:
        timeout_ms = max(1, int((self._deadline_s - self._loop.time()) * 1000))
        self._proposer.submit(self._command, self._decided, timeout_ms=timeout_ms, key=key)

    def _decided(self, outcome: Outcome) -> None:
        if isinstance(outcome, RecordBegun):
            self._result = outcome
            patient = not self._given_up and not self._dropped and self._loop.time() < self._wait_until_s
            if outcome.outcome is BeginOutcome.IN_PROGRESS and patient:
                self._wait()
            else:
                self._tell(outcome)
        else:
            self._answer(unsuccessful(outcome))

    def _wait(self) -> None:
        command = self._command
        remove = self._notices.records.add((command.tenant, command.key), self._noticed)
        timer = self._loop.call_at(self._wait_until_s, self._timed_out)

        def leave() -> None:
            remove()
            timer.cancel()

        self._leave = leave
        self._noticed(None)  # it may have moved on already

    def _noticed(self, _: Event | None) -> None:
        row = self._row()
        running = row is not None and row.state is RecordState.IN_PROGRESS
        if running and row is not None and (row.attempt, row.owner) == (self._result.attempt, self._result.owner):
            return
        self._stop_waiting()
        outcome = _outcome_of(row, self._command, self._proposer.machine.revision)
        if outcome is None:
            self._again()
        else:
            self._tell(outcome)

    def _again(self) -> None:
        self._round += 1
        self._propose(derived(self._key, self._round))

    def _timed_out(self) -> None:
        self._stop_waiting()
        self._tell(self._result)

    def _tell(self, result: RecordBegun) -> None:
        self._answer(translate.begun(self._command, result, self._row()))

    def _row(self) -> Record | None:
        return self._proposer.machine.record(self._command.tenant, self._command.key)

    def _stop_waiting(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None


def _outcome_of(row: Record | None, command: BeginRecord, revision: int) -> RecordBegun | None:
    """The outcome that ended the wait; None when there is none, and somebody has to begin again."""
    if row is None or row.fingerprint != command.fingerprint:
        return None
    outcomes = {
        RecordState.COMPLETED: BeginOutcome.COMPLETED,
        RecordState.FAILED: BeginOutcome.FAILED,
        RecordState.UNKNOWN: BeginOutcome.UNKNOWN,
    }
    if row.state not in outcomes:
        return None
    return RecordBegun(
        outcome=outcomes[row.state],
        attempt=row.attempt,
        owner=row.owner,
        result=row.result,
        error=row.error,
        expires_ms=row.expires_ms,
        revision=revision,
    )
