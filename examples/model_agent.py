"""An agent whose job asks a model server, which is slow, says "too many requests", or hangs.

A hang needs nothing here: the job's timeout cuts it, the run is cancelled, and the connection with it. Nor does the
pause before another attempt: the agent says how long the server asked for, and the scheduler keeps to it.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TextIO

import aiohttp
import tenure

from examples.digest_agent import Agent, arguments, digest_of, serve


class ModelAgent(Agent):
    def __init__(self, options: argparse.Namespace, history: TextIO, http: aiohttp.ClientSession) -> None:
        super().__init__(options, history)
        self.http = http

    async def summarize(self, run: tenure.Run) -> dict[str, object]:
        """Have the model read a document, and write what it says to the ledger."""
        text = self.document(run).read_text(encoding="utf-8")
        return await self.write(run, await self.ask(run, text), digest_of(text))

    async def ask(self, run: tenure.Run, text: str) -> list[int]:
        """The model's answer. The key lets the server know a repeated question; the token, who is asking."""
        headers = {"Idempotency-Key": run.idempotency_key, "Fencing-Token": str(run.token)}
        try:
            async with self.http.post(self.options.model, json={"text": text}, headers=headers) as answer:
                if answer.status == 429:
                    raise tenure.Retry("too many requests", after=float(answer.headers["Retry-After"]))
                if answer.status >= 500:
                    raise tenure.Retry(f"the model server answers {answer.status}")
                if answer.status >= 400:
                    raise tenure.Permanent(f"the model server answers {answer.status}: {await answer.text()}")
                return [int(words) for words in (await answer.json())["words"]]
        except aiohttp.ClientError as error:
            raise tenure.Retry(f"the model server cannot be reached: {error}") from error


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, metavar="URL", help="where to ask")
    options = parser.parse_args()
    timing = {"ttl_ms": options.ttl_ms, "disconnect_grace_ms": options.grace_ms}
    # No timeout of its own: the run has one.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        with options.history.open("a", buffering=1) as history:
            agent = ModelAgent(options, history, http)
            async with tenure.connect(agent=options.name, connect_timeout=30, **timing) as client:
                client.job("summarize")(agent.summarize)
                await serve(client, options.slots)


if __name__ == "__main__":
    asyncio.run(main())
