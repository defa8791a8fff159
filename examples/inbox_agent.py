"""An agent with replicas, of which one at a time works through the inbox.

Start it beside a sidecar (``TENURE_ADDRESS`` says where); ``make run`` starts three. What makes it safe is marked
1 to 4.
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
    def __init__(self, options: argparse.Namespace, history: TextIO) -> None:
        self.options, self.history = options, history
        self.name = f"{options.name}/{os.getpid()}"
        self.ledger = Ledger(options.ledger)
        self.documents = sorted(options.inbox.glob("*.txt"))
        self.stopping = asyncio.Event()
        self.safe = asyncio.Event()
        self.working = False

    async def run(self) -> None:
        """Hold the lease whenever it is our turn, and work while we hold it, until told to stop."""
        timing = {"ttl_ms": self.options.ttl_ms, "disconnect_grace_ms": self.options.grace_ms}
        async with tenure.connect(agent=self.options.name, connect_timeout=30, **timing) as client:
            while not self.stopping.is_set():
                try:
                    # 1. Wait in line for the lease. Should it be about to be lost, the client cancels the body in time.
                    async with client.lease(self.options.lease, wait=60) as lease:
                        await self.work(client, lease)
                except tenure.LeaseHeld:
                    continue  # not our turn within a minute: stand in line again
                except tenure.LeaseLost as lost:
                    self.note("lost", token=lost.token, cause=lost.cause)
                except (StaleTokenError, tenure.StaleToken) as refused:
                    self.note("refused", cause=str(refused))
                except tenure.TenureError as error:
                    self.note("error", cause=str(error))
                    await asyncio.sleep(error.retry_delay or 0.5)

    async def work(self, client: tenure.Client, lease: tenure.Lease) -> None:
        """One document after the other. When all are done, the next round begins with the first."""
        self.note_held("granted", lease)
        lease.on_jeopardy(self.in_jeopardy)
        lease.on_safe(lambda _: self.safe.set())
        self.safe.set()
        self.working = True
        try:
            number = self.ledger.last_round() or 1
            while True:
                for document in self.documents:
                    if self.stopping.is_set():
                        return
                    if await self.process(client, lease, f"inbox/{number}/{document.name}", document.read_text()):
                        await self.between_documents()
                number += 1
        finally:
            self.working = False
            self.note("left", token=lease.token)

    async def process(self, client: tenure.Client, lease: tenure.Lease, key: str, text: str) -> bool:
        """Process one document, unless that has been done before; says whether there was anything to do."""
        # 2. Open the key. It tells whether the document was done, and numbers the attempts at it.
        digest = hashlib.sha256(text.encode()).hexdigest()
        attempt = await client.begin(key, fingerprint=digest.encode(), wait=30, fence=lease)
        if isinstance(attempt, tenure.Completed):
            return False
        assert isinstance(attempt, tenure.Attempt), attempt
        try:
            # 3. Every write carries the fencing token, and the ledger refuses one that is not the newest.
            writer = Writer(self.name, lease.name, lease.token, attempt.number)
            posting = await self.post(lease, writer, key, digest, text)
            # 4. Store the result under the key. From now on every replica knows that the document is done.
            await attempt.complete(json.dumps(asdict(posting)).encode())
        except BaseException:
            with contextlib.suppress(tenure.TenureError):  # if it cannot be told now, the end of our session will tell
                await attempt.fail("interrupted", retryable=True)
            raise
        self.note_held("completed", lease, key=key, attempt=attempt.number)
        return True

    async def post(self, lease: tenure.Lease, writer: Writer, key: str, digest: str, text: str) -> Posting:
        """Write the document to the ledger in several steps; a crash between two leaves it to the next attempt."""
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        if posted := self.ledger.start(writer, key, len(paragraphs)):
            return posted
        for number, paragraph in enumerate(paragraphs):
            await self.step(lease)
            self.ledger.count(writer, key, number, len(paragraph.split()))
        await self.step(lease)
        self.ledger.seal(writer, key, digest)
        await self.step(lease)
        posting = self.ledger.post(writer, key)
        self.note_held("posted", lease, key=key, attempt=writer.attempt)
        return posting

    async def step(self, lease: tenure.Lease) -> None:
        """Stands for the slow work of a real agent. Goes on only while the lease is ours and not in doubt."""
        await asyncio.sleep(self.options.step_ms / 1000)
        await self.safe.wait()
        lease.raise_if_lost()

    def in_jeopardy(self, lease: tenure.Lease) -> None:
        """The sidecar cannot confirm that the lease is still ours: stop at once, until it can or the lease is lost."""
        self.safe.clear()
        self.note("jeopardy", token=lease.token)

    async def between_documents(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), self.options.every_ms / 1000)

    def stop(self, task: asyncio.Task[None]) -> None:
        """Told to end: finish the document at hand, if there is one, and give the lease back."""
        self.stopping.set()
        if not self.working:
            task.cancel()

    def note_held(self, event: str, lease: tenure.Lease, **facts: object) -> None:
        self.note(event, token=lease.token, remaining_ms=round(lease.remaining() * 1000), **facts)

    def note(self, event: str, **facts: object) -> None:
        """Add a line to this agent's history, from which it can be checked what it did and when."""
        line = {"at_ms": round(time.monotonic() * 1000), "agent": self.name, "event": event, **facts}
        self.history.write(json.dumps(line) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--lease", default="inbox")
    parser.add_argument("--inbox", type=Path, required=True, help="folder of documents")
    parser.add_argument("--ledger", type=Path, required=True, help="the SQLite file that all replicas write to")
    parser.add_argument("--history", type=Path, required=True, help="where to note, as JSON lines, what this agent did")
    parser.add_argument("--ttl-ms", type=int, default=15_000, help="how long an agent that hangs keeps the lease")
    parser.add_argument("--grace-ms", type=int, default=1_000, help="how long an agent that died keeps it")
    parser.add_argument("--every-ms", type=int, default=2_000, help="pause between documents")
    parser.add_argument("--step-ms", type=int, default=200, help="pause before each step within a document")
    return parser.parse_args()


async def main() -> None:
    options = parse()
    with options.history.open("a", buffering=1) as history:  # a line is written as soon as it is complete
        agent = Agent(options, history)
        task = asyncio.create_task(agent.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, agent.stop, task)
        with contextlib.suppress(asyncio.CancelledError):
            await task


if __name__ == "__main__":
    asyncio.run(main())
