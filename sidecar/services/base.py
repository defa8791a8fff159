"""What all operations of the API share: how they propose, how they read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from tenure.v1 import lease_pb2

from sidecar.core import commands
from sidecar.core.commands import Reason, Refused, RequestKey
from sidecar.proposer import Outcome
from sidecar.services import translate
from sidecar.services.calls import Answer, Caller, attempt
from sidecar.services.errors import ApiError, refused, unsuccessful
from sidecar.services.notices import Notices
from sidecar.services.reads import Reads
from sidecar.services.waiting import Running

if TYPE_CHECKING:
    from sidecar.proposer import AsyncProposer
    from sidecar.runtime import Runtime

LINEARIZABLE = lease_pb2.CONSISTENCY_LINEARIZABLE


class Resource:
    """The operations on one kind of thing.

    Each takes the request, who calls, and a callback for the one answer; it raises ApiError for bad input, and returns
    what runs on when its caller may want to give it up. No coroutine: a stream starts a thousand of them in one go.
    """

    def __init__(self, runtime: Runtime, notices: Notices, reads: Reads) -> None:
        self._runtime = runtime
        self._proposer = runtime.proposer
        self._machine = runtime.proposer.machine
        self.notices = notices
        self.reads = reads

    def _propose(
        self,
        command: commands.Command,
        caller: Caller,
        key: RequestKey,
        answer: Answer,
        expected: type[commands.Result],
        translated: Callable[..., Message],
    ) -> None:
        self._proposer.submit(command, _answering(answer, expected, translated), timeout_ms=caller.timeout_ms, key=key)

    def _propose_patiently(
        self,
        command: commands.Command,
        caller: Caller,
        key: RequestKey,
        answer: Answer,
        expected: type[commands.Result],
        translated: Callable[..., Message],
    ) -> Running:
        """Tries again while the job's due times are not settled yet."""
        done = _answering(answer, expected, translated)
        return Patient(self._proposer, command, key, caller.timeout_ms, done)

    def _read(
        self,
        consistency: lease_pb2.Consistency.ValueType,
        caller: Caller,
        answer: Answer,
        produce: Callable[[lease_pb2.ReadInfo], Message],
    ) -> None:
        linearizable = translate.linearizable(consistency)
        self.reads.read(produce, answer, linearizable=linearizable, timeout_ms=caller.timeout_ms)

    def _read_then(self, caller: Caller, answer: Answer, proceed: Callable[[Caller], None]) -> None:
        """``proceed`` looks at what is current, and answers; it may raise ApiError. It is told what time is left."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()

        def confirmed(error: ApiError | None) -> None:
            if error is not None:
                answer(error)
                return
            left_ms = max(1, caller.timeout_ms - int((loop.time() - started_s) * 1000))
            try:
                proceed(caller.within(left_ms))
            except ApiError as refusal:
                answer(refusal)

        self.reads.confirm(confirmed, caller.timeout_ms)


class Patient:
    """A proposal that is repeated while the answer is JOB_BEHIND: the leader is about to settle what the job's present
    schedule has due. That answer is not remembered, so the repeat is the same request."""

    def __init__(
        self,
        proposer: AsyncProposer,
        command: commands.Command,
        key: RequestKey,
        timeout_ms: int,
        done: Callable[[Outcome], None],
    ) -> None:
        self._proposer, self._command, self._key, self._done = proposer, command, key, done
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + timeout_ms / 1000
        self._over = False
        self._propose()

    def give_up(self) -> None:
        """The next refusal is the answer."""
        self._over = True

    def drop(self) -> None:
        self._over = True

    def _propose(self) -> None:
        timeout_ms = max(1, int((self._deadline_s - self._loop.time()) * 1000))
        self._proposer.submit(self._command, self._decided, timeout_ms=timeout_ms, key=self._key)

    def _decided(self, outcome: Outcome) -> None:
        if isinstance(outcome, Refused) and outcome.reason is Reason.JOB_BEHIND and not self._over:
            again_s = self._loop.time() + outcome.retry_delay_ms / 1000
            if again_s < self._deadline_s:
                self._loop.call_at(again_s, self._propose)
                return
        self._done(outcome)


def job_gone(tenant: str, name: str) -> ApiError:
    """There is no such job."""
    message = f"tenant {tenant} has no job {name}"
    return refused(Refused(reason=Reason.JOB_NOT_FOUND, message=message, facts=(("tenant", tenant), ("job", name))))


def run_gone(run: str) -> ApiError:
    """There is no such run (any more)."""
    message = f"run {run} never was, or has ended"
    return refused(Refused(reason=Reason.RUN_NOT_FOUND, message=message, facts=(("run_id", run),)))


def _answering(
    answer: Answer, expected: type[commands.Result], translated: Callable[..., Message]
) -> Callable[[Outcome], None]:
    """Gives the caller what the state has decided, or why it has not."""

    def done(outcome: Outcome) -> None:
        answer(attempt(translated, outcome) if isinstance(outcome, expected) else unsuccessful(outcome))

    return done
