"""What a stream tells of runs when much is to be sent, or events were skipped; proposals that are repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tenure.v1 import job_pb2, session_pb2

from sidecar.core import commands
from sidecar.core.commands import Done, Reason, Refused, RequestKey
from sidecar.core.events import Event, Kind
from sidecar.core.occurrences import Origin
from sidecar.core.runs import NO_ACKNOWLEDGEMENT, Run
from sidecar.services import feed as feed_module
from sidecar.services.base import Patient
from sidecar.services.feed import RunFeed
from tests.waiting import eventually

SESSION = "s"


def run_row(token: int, **fields: Any) -> Run:
    base: dict[str, Any] = {"session": SESSION, "attempt": 1, "kill_epoch": 0, "job_revision": 1, "started_ms": 0}
    return Run(
        **{
            "run": f"r{token}",
            "tenant": "default",
            "job": "job",
            "due_ms": 1,
            "sequence": 0,
            "origin": Origin.SCHEDULE,
            "token": token,
            "deadline_ms": 100,
            "timeout_ms": 100,
            **base,
            **fields,
        }
    )


class State:
    """Stands for the machine and the views."""

    def __init__(self) -> None:
        self.table: dict[str, Run] = {}
        self.payload = b""

    def run(self, named: Any) -> Any:
        if isinstance(named, str):
            return self.table.get(named)
        return job_pb2.Run(run_id=named.run, job=named.job, token=named.token, payload=self.payload)

    def session_runs(self, session: str) -> list[Run]:
        return [row for row in self.table.values() if row.session == session]

    def now_ms(self) -> int:
        return 40


class Feeding:
    def __init__(self, *tokens: int) -> None:
        self.state, self.pushes, self.room = State(), list[session_pb2.Push](), True
        self.add(*tokens)
        state: Any = self.state
        self.feed = RunFeed(state, state, SESSION, self.pushes.append, lambda: self.room)

    def add(self, *tokens: int, **fields: Any) -> None:
        self.state.table.update({f"r{token}": run_row(token, **fields) for token in tokens})

    def event(self, kind: Kind, token: int, **fields: Any) -> None:
        named = {"tenant": "default", "subject": "job", "session": SESSION, "run": f"r{token}", "due_ms": 1}
        self.feed.noticed(Event(revision=1, kind=kind, cluster_ms=1, wall_ms=1, **{**named, **fields}))

    def told(self) -> list[tuple[str, str]]:
        """What was pushed since the last call."""
        found: list[tuple[str, str]] = []
        for push in self.pushes:
            kind = push.WhichOneof("kind")
            assert kind is not None
            body = getattr(push, kind)
            found.append((kind, body.run.run_id if kind == "run_assigned" else body.run_id))
        self.pushes.clear()
        return found


def test_news_of_a_run_wait_for_room_and_keep_their_order() -> None:
    one = Feeding(1, 2, 3)
    one.room = False
    one.event(Kind.RUN_ASSIGNED, 1)
    one.event(Kind.RUN_ASSIGNED, 2)
    one.event(Kind.RUN_ASSIGNED, 3)
    one.add(1, interrupt_cause="timeout", interrupt_reason="why", deadline_ms=70)
    one.event(Kind.RUN_INTERRUPTED, 1, cause="timeout")
    del one.state.table["r2"]
    one.event(Kind.RUN_ENDED, 2, cause="failed")
    assert not one.told()
    one.room = True
    one.feed.send()
    stopped = one.pushes[-1].run_interrupted
    assert (stopped.cause, stopped.reason, stopped.grace_ms) == ("timeout", "why", 30)
    assert one.told() == [("run_assigned", "r1"), ("run_assigned", "r3"), ("run_interrupted", "r1")]


def test_an_end_is_news_only_when_the_holder_did_not_bring_it_about() -> None:
    one = Feeding(1, 2)
    one.feed.attached()
    for cause, reason in (("succeeded", ""), ("failed", "x"), ("interrupted", "killed"), ("timeout", "timeout")):
        one.event(Kind.RUN_ENDED, 1, cause=cause, reason=reason)
    assert not one.told()
    one.event(Kind.RUN_ENDED, 2, cause="timeout", reason=f"timeout: {NO_ACKNOWLEDGEMENT}")
    assert one.told() == [("run_lost", "r2")]


def test_a_claimed_run_is_not_pushed() -> None:
    one = Feeding()
    one.add(1, claimed=True)
    one.event(Kind.RUN_ASSIGNED, 1)
    one.event(Kind.RUN_ASSIGNED, 2)  # of which nothing is left
    one.add(3, session="other")
    one.event(Kind.RUN_ASSIGNED, 3)
    assert not one.told()
    assert [run.run_id for run in one.feed.attached()] == []


def test_an_interrupt_of_a_claimed_run_is_told_after_the_attach() -> None:
    """It may have come while there was no stream."""
    one = Feeding()
    one.add(1, claimed=True)
    one.add(2, claimed=True, interrupt_cause="killed")
    assert [run.run_id for run in one.feed.attached()] == []
    one.feed.send()
    assert one.told() == [("run_interrupted", "r2")]


def test_after_a_gap_what_is_known_is_compared_with_what_is() -> None:
    one = Feeding(1, 2)
    assert [run.run_id for run in one.feed.attached()] == ["r1", "r2"]
    del one.state.table["r1"]
    one.add(2, interrupt_cause="killed")
    one.add(3)
    one.add(4, claimed=True)
    one.feed.skipped()
    assert one.told() == [("run_lost", "r1"), ("run_interrupted", "r2"), ("run_assigned", "r3")]
    one.feed.skipped()
    assert one.told() == [("run_interrupted", "r2")]


def test_an_attach_names_what_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "ATTACHED_BYTES_MAX", 100)
    one = Feeding(1, 2, 3)
    one.state.payload = b"x" * 90
    shown = one.feed.attached()
    assert [(run.run_id, run.token, bool(run.job)) for run in shown] == [
        ("r1", 1, True),
        ("r2", 2, False),
        ("r3", 3, False),
    ]
    one.feed.send()
    assert one.told() == [("run_assigned", "r2"), ("run_assigned", "r3")]


def test_too_much_news_is_known() -> None:
    one = Feeding(1)
    one.room = False
    for _ in range(feed_module.WAITING_MAX):
        one.event(Kind.RUN_ASSIGNED, 1)
    assert not one.feed.overfull
    one.event(Kind.RUN_ASSIGNED, 1)
    assert one.feed.overfull


# ---- proposals that are repeated ------------------------------------------------------------------------------------


class Behind:
    """A proposer whose job is behind a number of times."""

    def __init__(self, times: int) -> None:
        self.times, self.asked = times, list[tuple[RequestKey | None, int]]()

    def submit(self, command: Any, done: Any, *, timeout_ms: int, key: RequestKey | None = None) -> int:
        self.asked.append((key, timeout_ms))
        behind = Refused(reason=Reason.JOB_BEHIND, message="not settled yet", retry_delay_ms=1)
        result = behind if len(self.asked) <= self.times else Done(revision=7)
        asyncio.get_running_loop().call_soon(done, result)
        return 1


def patient(proposer: Behind, timeout_ms: int) -> tuple[Patient, list[Any]]:
    command = commands.DeleteJob(tenant="default", name="a", actor="me", reason="why")
    outcomes: list[Any] = []
    fake: Any = proposer
    return Patient(fake, command, RequestKey("default", "", "key"), timeout_ms, outcomes.append), outcomes


async def test_a_job_that_is_behind_is_asked_again() -> None:
    proposer = Behind(3)
    _, outcomes = patient(proposer, 60_000)
    await eventually(lambda: outcomes)
    assert outcomes == [Done(revision=7)]
    assert len(proposer.asked) == 4
    assert {key.name for key, _ in proposer.asked if key is not None} == {"key"}, "it is one request"
    left = [timeout_ms for _, timeout_ms in proposer.asked]
    assert left == sorted(left, reverse=True)


async def test_nobody_asks_again_beyond_the_deadline_or_when_it_is_given_up() -> None:
    _, outcomes = patient(Behind(10**9), 20)
    await eventually(lambda: outcomes)
    assert outcomes[0].reason is Reason.JOB_BEHIND
    call, outcomes = patient(Behind(10**9), 60_000)
    call.give_up()
    await eventually(lambda: outcomes)
    assert outcomes[0].reason is Reason.JOB_BEHIND
