"""Claims that may wait: a client without a stream asks for a run, and is answered when there is one.

Rules:
1. Every try is a request of its own, under a name derived from the caller's: a repeat of the call walks through the
   answers that the first one got, up to the run that it was given.
2. Another try is made when something has changed for one of the jobs, and now and then while an occurrence of theirs
   is pending: nothing says when its jitter or its back-off has passed.
3. Whoever was not told of a run does not have it: it is given back, to be tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure.v1 import job_pb2

from sidecar.core.commands import ClaimRun, FailRun, RequestKey, RunClaimed
from sidecar.core.events import Event
from sidecar.proposer import Failed, Failure, Outcome
from sidecar.services.calls import Answer, Once, attempt
from sidecar.services.errors import Problem, problem, unsuccessful
from sidecar.services.notices import Notices
from sidecar.services.waiting import INSIST_PAUSE_S, INSIST_TIMEOUT_MS, derived, insist

if TYPE_CHECKING:
    from sidecar.proposer import AsyncProposer

LOOK_S = 0.5
JOBS_LOOKED_AT_MAX = 1_000
NOT_DELIVERED = "claim was not delivered"

# The response for a run; raises ApiError when it has ended since.
Shown = Callable[[RunClaimed], job_pb2.ClaimRunResponse]


class ClaimCall:
    def __init__(
        self,
        proposer: AsyncProposer,
        notices: Notices,
        command: ClaimRun,
        key: RequestKey,
        wait_ms: int,
        timeout_ms: int,
        shown: Shown,
        answer: Answer,
        *,
        repeatable: bool,
    ) -> None:
        """``repeatable``: the caller has named the request, and can learn an outcome that stays unknown."""
        self._proposer, self._notices = proposer, notices
        self._loop = asyncio.get_running_loop()
        self._command, self._key, self._shown, self._repeatable = command, key, shown, repeatable
        self._answer = Once(answer)
        now_s = self._loop.time()
        self._deadline_s = now_s + timeout_ms / 1000
        self._wait_until_s = min(now_s + wait_ms / 1000, self._deadline_s)
        self._first_revision = proposer.machine.revision
        self._round = 0
        self._given_up = False
        self._granted: RunClaimed | None = None
        self._leave: Callable[[], None] | None = None  # set while it waits
        self._propose(key)

    def give_up(self) -> None:
        if self._given_up:
            return
        self._given_up = True
        if self._granted is not None:  # answered too late
            self._give_back(self._granted)
        elif self._leave is not None:
            self._stop_waiting()
            self._answer(problem(Problem.WAIT_CANCELLED, "the wait for a run was given up"))

    def drop(self) -> None:
        self.give_up()

    def _propose(self, key: RequestKey) -> None:
        self._key_now = key
        timeout_ms = max(1, int((self._deadline_s - self._loop.time()) * 1000))
        self._proposer.submit(self._command, self._decided, timeout_ms=timeout_ms, key=key)

    def _decided(self, outcome: Outcome) -> None:
        if isinstance(outcome, RunClaimed):
            self._claimed(outcome)
        else:
            self._answer(unsuccessful(outcome))
            if isinstance(outcome, Failed) and not outcome.definite and not self._repeatable:
                self._learn()

    def _claimed(self, outcome: RunClaimed) -> None:
        if outcome.run and self._given_up:
            self._give_back(outcome)
        elif outcome.run:
            self._granted = outcome
            self._answer(attempt(self._shown, outcome))
        elif self._given_up or self._loop.time() >= self._wait_until_s:
            self._answer(job_pb2.ClaimRunResponse(revision=outcome.revision))
        elif outcome.revision < self._first_revision:  # an answer of an earlier call
            self._again()
        else:
            self._wait(outcome)

    def _again(self) -> None:
        self._round += 1
        self._propose(derived(self._key, self._round))

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, nothing: RunClaimed) -> None:
        def looked() -> None:
            if self._leave is None:
                return
            if self._is_something_pending():
                self._stop_waiting()
                self._again()
            else:
                self._timer = self._loop.call_later(LOOK_S, looked)

        def noticed(event: Event | None) -> None:
            if (event is None or self._concerns(event)) and self._is_something_pending():
                self._stop_waiting()
                self._again()

        def ended() -> None:
            self._stop_waiting()
            self._answer(job_pb2.ClaimRunResponse(revision=nothing.revision))

        remove = self._notices.work.add(self._command.tenant, noticed)
        end = self._loop.call_at(self._wait_until_s, ended)
        self._timer = self._loop.call_later(LOOK_S, looked)

        def leave() -> None:
            remove()
            end.cancel()
            self._timer.cancel()

        self._leave = leave

    def _stop_waiting(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _concerns(self, event: Event) -> bool:
        """An event of a switch, or of one of the jobs."""
        return not event.due_ms or any(fits(event.subject, job) for job in self._command.jobs)

    def _is_something_pending(self) -> bool:
        machine, tenant = self._proposer.machine, self._command.tenant
        for job in self._command.jobs:
            if job.endswith("*"):
                names = [row.name for row in machine.jobs(tenant, job[:-1], "", JOBS_LOOKED_AT_MAX)]
            else:
                names = [job]
            if any(machine.job_counts(tenant, name)[0] for name in names):
                return True
        return False

    # ---- what nobody was told of ------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Nobody else can repeat this request: find out whether it was given a run, and give that back."""
        if self._proposer.machine.session(self._command.session) is not None:
            self._proposer.submit(self._command, self._learned, timeout_ms=INSIST_TIMEOUT_MS, key=self._key_now)

    def _learned(self, outcome: Outcome) -> None:
        if isinstance(outcome, RunClaimed) and outcome.run:
            self._give_back(outcome)
        elif isinstance(outcome, Failed) and outcome.failure is not Failure.STOPPING:
            self._loop.call_later(INSIST_PAUSE_S, self._learn)

    def _give_back(self, granted: RunClaimed) -> None:
        command = self._command
        insist(
            self._proposer,
            FailRun(
                tenant=command.tenant,
                session=command.session,
                run=granted.run,
                token=granted.token,
                error=NOT_DELIVERED,
                retryable=True,
            ),
        )
        self._answer(problem(Problem.WAIT_CANCELLED, "the claim was given up"))


def fits(name: str, pattern: str) -> bool:
    """Whether a job is one of those that a worker's pattern means."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
