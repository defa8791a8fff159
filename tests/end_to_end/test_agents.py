"""The agents of the examples, each run by hand: what they leave in the ledger, and what they tell the scheduler."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import tenure

from examples.digest_agent import Agent, digest_of
from examples.ledger import StaleTokenError
from examples.model_agent import ModelAgent
from examples.model_stand_in import StandIn, parse_script, start
from sidecar.dev.checker import Audit
from sidecar.dev.ports import free_ports
from tests.waiting import eventually

TEXT = "one two three\n\nfour five\n\nsix\n"
KEY = "job/digest/1700000000000"


@dataclass
class HandMadeRun:
    """As the client hands it to a handler. ``stop_after``: it is cancelled when so many checkpoints are stored."""

    token: int
    attempt: int = 1
    last_checkpoint: bytes | None = None
    interrupt_cause: str | None = None
    stop_after: int = 99
    stored: list[bytes] = field(default_factory=list)
    idempotency_key: str = KEY
    due_wall_ms: int = 1_700_000_000_000

    async def checkpoint(self, state: bytes) -> None:
        self.stored.append(state)
        if len(self.stored) >= self.stop_after:
            raise asyncio.CancelledError


def as_run(run: HandMadeRun) -> tenure.Run:
    return cast(tenure.Run, run)


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.txt").write_text(TEXT)
    return argparse.Namespace(name="agent-1", ledger=tmp_path / "ledger.db", inbox=tmp_path / "inbox", step_ms=0)


@pytest.fixture
def agent(options: argparse.Namespace) -> Iterator[Agent]:
    agent = Agent(options, io.StringIO())
    yield agent
    agent.ledger.close()


@pytest.fixture
def audit(options: argparse.Namespace) -> Iterator[Audit]:
    audit = Audit(options.ledger, options.inbox)
    yield audit
    audit.close()


def steps(audit: Audit, token: int) -> list[str]:
    return [write.step for write in audit.writes() if write.token == token]


async def test_a_run_writes_its_document_and_a_checkpoint_after_each_count(agent: Agent, audit: Audit) -> None:
    run = HandMadeRun(token=5)
    assert await agent.digest(as_run(run)) == {"words": 6, "digest": digest_of(TEXT)}
    assert run.stored == [b"1", b"2", b"3"]
    assert steps(audit, 5) == ["start", "count 0", "count 1", "count 2", "seal", "post"]


async def test_the_next_attempt_goes_on_at_the_checkpoint(agent: Agent, audit: Audit) -> None:
    first = HandMadeRun(token=5, stop_after=2, interrupt_cause="timeout")
    with pytest.raises(asyncio.CancelledError):
        await agent.digest(as_run(first))
    assert audit.finished_flags() == {KEY: False}
    second = HandMadeRun(token=6, attempt=2, last_checkpoint=first.stored[0])  # the last one was not stored any more
    assert await agent.digest(as_run(second)) == {"words": 6, "digest": digest_of(TEXT)}
    assert steps(audit, 6) == ["start", "count 1", "count 2", "seal", "post"]
    assert audit.counts() == {KEY: (3, 2, 1)}


async def test_an_attempt_that_finds_the_posting_made_does_not_make_it_again(agent: Agent, audit: Audit) -> None:
    first = await agent.digest(as_run(HandMadeRun(token=5)))
    assert await agent.digest(as_run(HandMadeRun(token=6, attempt=2, last_checkpoint=b"3"))) == first
    assert len(audit.postings()[KEY]) == 1


async def test_a_killed_run_takes_back_what_is_half_written(agent: Agent, audit: Audit) -> None:
    with pytest.raises(asyncio.CancelledError):
        await agent.digest(as_run(HandMadeRun(token=5, stop_after=2, interrupt_cause="killed")))
    assert (audit.finished_flags(), audit.counts(), audit.postings()) == ({}, {}, {})
    assert steps(audit, 5)[-1] == "withdraw"


async def test_an_agent_that_was_replaced_changes_nothing(agent: Agent, audit: Audit) -> None:
    await agent.digest(as_run(HandMadeRun(token=6, attempt=2)))
    with pytest.raises(StaleTokenError):
        await agent.digest(as_run(HandMadeRun(token=5)))
    assert steps(audit, 5) == []


class Asked:
    """An agent and the model that it asks."""

    def __init__(self, agent: ModelAgent, lines: list[dict[str, Any]]) -> None:
        self.agent, self.lines = agent, lines

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]


@pytest.fixture
async def asked(script: str, options: argparse.Namespace) -> AsyncIterator[Asked]:
    lines: list[dict[str, Any]] = []
    (port,) = free_ports(1)
    runner = await start(StandIn(parse_script(script), lines.append), port)
    options.model = f"http://127.0.0.1:{port}/v1/summarize"
    async with aiohttp.ClientSession() as http:
        agent = ModelAgent(options, io.StringIO(), http)
        yield Asked(agent, lines)
        agent.ledger.close()
    await runner.cleanup()


@pytest.mark.parametrize("script", ["429:1.5, ok"])
async def test_a_429_is_told_with_what_the_server_asked_for(asked: Asked, audit: Audit) -> None:
    with pytest.raises(tenure.Retry) as told:
        await asked.agent.summarize(as_run(HandMadeRun(token=5)))
    assert told.value.after == 1.5
    assert await asked.agent.summarize(as_run(HandMadeRun(token=6, attempt=2))) == {
        "words": 6, "digest": digest_of(TEXT),
    }  # fmt: skip
    assert [(line["key"], line["token"]) for line in asked.lines if line["event"] == "asked"] == [(KEY, 5), (KEY, 6)]
    assert len(audit.postings()[KEY]) == 1


@pytest.mark.parametrize("script", ["500"])
async def test_an_error_of_the_server_may_be_tried_again(asked: Asked) -> None:
    with pytest.raises(tenure.Retry, match="answers 500") as told:
        await asked.agent.summarize(as_run(HandMadeRun(token=5)))
    assert told.value.after == 0


@pytest.mark.parametrize("script", ["hang"])
async def test_a_hang_ends_with_the_run(asked: Asked, audit: Audit) -> None:
    waiting = asyncio.create_task(asked.agent.summarize(as_run(HandMadeRun(token=5))))
    await eventually(lambda: asked.events() == ["asked"])
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await eventually(lambda: asked.events() == ["asked", "abandoned"])
    assert audit.writes() == []


async def test_a_server_that_is_not_there_may_be_tried_again(options: argparse.Namespace) -> None:
    (port,) = free_ports(1)
    options.model = f"http://127.0.0.1:{port}/v1/summarize"
    async with aiohttp.ClientSession() as http:
        agent = ModelAgent(options, io.StringIO(), http)
        with pytest.raises(tenure.Retry, match="cannot be reached"):
            await agent.summarize(as_run(HandMadeRun(token=5)))
        agent.ledger.close()


async def test_an_agent_notes_what_it_did(options: argparse.Namespace) -> None:
    history = io.StringIO()
    agent = Agent(options, history)
    await agent.digest(as_run(HandMadeRun(token=5)))
    agent.ledger.close()
    (line,) = [json.loads(line) for line in history.getvalue().splitlines()]
    assert (line["event"], line["key"], line["token"], line["attempt"]) == ("posted", KEY, 5, 1)
