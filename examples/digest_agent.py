"""An agent with replicas that works for scheduled jobs. Each due time is worked on by one of them.

Start it beside a sidecar (``TENURE_ADDRESS`` says where), and apply ``jobs.yaml`` once; ``make run`` does both, with
three agents. What makes it safe is marked 1 to 4.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import tenure

from examples.ledger import Ledger, Posting, StaleTokenError, Writer


class Agent:
    """The work of a run, and this agent's notes about it."""

    def __init__(self, options: argparse.Namespace, history: TextIO) -> None:
        self.options, self.history = options, history
        self.name = f"{options.name}/{os.getpid()}"
        self.ledger = Ledger(options.ledger)
        self.documents: list[Path] = sorted(options.inbox.glob("*.txt"))

    async def digest(self, run: tenure.Run) -> dict[str, object]:
        """Write the digest of one document, the one whose turn it is at this due time, to the ledger."""
        text = self.document(run).read_text(encoding="utf-8")
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        return await self.write(run, [len(paragraph.split()) for paragraph in paragraphs], digest_of(text))

    async def write(self, run: tenure.Run, words: list[int], digest: str) -> dict[str, object]:
        """The effect, in several steps; a crash between two of them leaves it to the next attempt."""
        # 1. The key is the due time's own, the same in every attempt. The token is this attempt's: the ledger refuses
        #    whoever comes with an older one, such as an agent that was stopped and wakes up.
        writer = Writer(self.name, run.idempotency_key, run.token, run.attempt)
        # 2. What the attempt before has written need not be done again.
        done = int((run.last_checkpoint or b"0").decode())
        # 3. The posting, the effect that cannot be taken back, is made once: an attempt that finds it made says so.
        posted = self.ledger.start(writer, run.idempotency_key, len(words), keep=done)
        if posted is None:
            try:
                posted = await self.write_steps(run, writer, words, digest, done)
            except asyncio.CancelledError:
                self.interrupted(run, writer)
                raise
        self.note("posted", run)
        return asdict(posted)

    async def write_steps(self, run: tenure.Run, writer: Writer, words: list[int], digest: str, done: int) -> Posting:
        for number in range(done, len(words)):
            await self.step()
            self.ledger.count(writer, run.idempotency_key, number, words[number])
            await run.checkpoint(str(number + 1).encode())
        await self.step()
        self.ledger.seal(writer, run.idempotency_key, digest)
        await self.step()
        return self.ledger.post(writer, run.idempotency_key)

    def interrupted(self, run: tenure.Run, writer: Writer) -> None:
        """4. Cancelled, within a grace: somebody has killed the job, or the right to work on it is about to be lost.

        With a kill no other attempt comes, so nothing half-written may be left. Otherwise the next attempt goes on.
        """
        self.note("interrupted", run, cause=run.interrupt_cause or "")
        if run.interrupt_cause in ("killed", "operator", "overlap", "job_deleted"):
            with contextlib.suppress(StaleTokenError):
                self.ledger.withdraw(writer, run.idempotency_key)

    async def beat(self, run: tenure.Run) -> str:
        """The smallest job there is."""
        self.note("beat", run)
        return f"{self.name} at {run.due.isoformat()}"

    def document(self, run: tenure.Run) -> Path:
        """By turns: the seconds of the due time say which."""
        return self.documents[run.due_wall_ms // 1_000 % len(self.documents)]

    async def step(self) -> None:
        """Stands for the slow work of a real agent."""
        await asyncio.sleep(self.options.step_ms / 1000)

    def note(self, event: str, run: tenure.Run, **facts: object) -> None:
        """Add a line to this agent's history, from which it can be checked what it did and when."""
        line = {"at_ms": round(time.time() * 1000), "agent": self.name, "event": event, "key": run.idempotency_key}
        self.history.write(json.dumps({**line, "token": run.token, "attempt": run.attempt, **facts}) + "\n")


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every agent of the examples takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--name", required=True)
    parser.add_argument("--inbox", type=Path, required=True, help="folder of documents")
    parser.add_argument("--ledger", type=Path, required=True, help="the SQLite file that all replicas write to")
    parser.add_argument("--history", type=Path, required=True, help="where to note, as JSON lines, what this agent did")
    parser.add_argument("--ttl-ms", type=int, default=15_000, help="how long an agent that hangs keeps its runs")
    parser.add_argument("--grace-ms", type=int, default=1_000, help="how long an agent that died keeps them")
    parser.add_argument("--step-ms", type=int, default=200, help="pause before each step of a run")
    parser.add_argument("--slots", type=int, default=2, help="runs at once")
    return parser


async def serve(client: tenure.Client, slots: int) -> None:
    """Work until told to end by a signal; runs at work are then finished, and no new ones begun."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, client.stop_work)
    await client.work(slots=slots)


async def main() -> None:
    options = arguments(__doc__).parse_args()
    timing = {"ttl_ms": options.ttl_ms, "disconnect_grace_ms": options.grace_ms}
    with options.history.open("a", buffering=1) as history:  # a line is written as soon as it is complete
        agent = Agent(options, history)
        async with tenure.connect(agent=options.name, connect_timeout=30, **timing) as client:
            client.job("digest")(agent.digest)
            client.job("heartbeat")(agent.beat)
            await serve(client, options.slots)


if __name__ == "__main__":
    asyncio.run(main())
