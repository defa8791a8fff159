"""Stands in for a model server: counts words, and by script is slow, refuses, or hangs.

    python -m examples.model_stand_in --port 8080 --script "ok; slow; 429:1.5, ok; hang, ok" --log requests.jsonl

The script is a list of lives, separated by ``;``. Each new key (header Idempotency-Key) is given the next one, in turn
(or at random from ``--seed``), and its n-th request the n-th behaviour of it; further ones are answered. Behaviours:


    ok        an answer at once                     slow[:S]  an answer after S seconds [0.8]
    429[:S]   too many requests, Retry-After: S [1] 500       an error of the server
    hang      no answer, for as long as the client waits

Every request is noted in the log when it comes, and again when it ends: ``answered``, or ``abandoned`` by the client.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

DEFAULTS_S = {"slow": 0.8, "429": 1.0}
KINDS = ("ok", "slow", "429", "500", "hang")


@dataclass(frozen=True)
class Behaviour:
    kind: str
    seconds: float = 0.0


def parse_script(text: str) -> list[list[Behaviour]]:
    """ValueError, naming the part that is not understood."""
    return [[parse_behaviour(part.strip()) for part in life.split(",")] for life in text.split(";")]


def parse_behaviour(text: str) -> Behaviour:
    kind, _, seconds = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} is not a behaviour: there are {', '.join(KINDS)}")
    return Behaviour(kind, float(seconds) if seconds else DEFAULTS_S.get(kind, 0.0))


class StandIn:
    """The server. ``note`` is given a line for each request that comes and for each that ends."""

    def __init__(
        self, script: list[list[Behaviour]], note: Callable[[dict[str, object]], None], seed: int | None = None
    ) -> None:
        self._script, self._note = script, note
        self._choice = None if seed is None else random.Random(seed)
        self._turns = itertools.cycle(script)
        self._lives: dict[str, list[Behaviour]] = {}
        self._numbers = itertools.count(1)
        self.app = web.Application()
        self.app.router.add_post("/v1/summarize", self.summarize)

    def behaviour(self, key: str) -> Behaviour:
        """How the next request with this key is treated."""
        if key not in self._lives:
            life = next(self._turns) if self._choice is None else self._choice.choice(self._script)
            self._lives[key] = list(life)
        return self._lives[key].pop(0) if self._lives[key] else Behaviour("ok")

    async def summarize(self, request: web.Request) -> web.Response:
        key = request.headers.get("Idempotency-Key", "")
        number, behaviour = next(self._numbers), self.behaviour(key)
        token = int(request.headers.get("Fencing-Token", 0))
        asked = {"number": number, "key": key, "token": token, "behaviour": behaviour.kind}
        self._note({"at_ms": now_ms(), "event": "asked", **asked, "seconds": behaviour.seconds})
        end = "abandoned"
        try:
            answer = await self.answer(behaviour, await request.json())
            end = "answered"
            return answer
        finally:
            self._note({"at_ms": now_ms(), "event": end, "number": number, "key": key})

    async def answer(self, behaviour: Behaviour, body: dict[str, str]) -> web.Response:
        if behaviour.kind == "429":
            return web.Response(status=429, headers={"Retry-After": f"{behaviour.seconds:g}"})
        if behaviour.kind == "500":
            return web.Response(status=500)
        await asyncio.sleep(behaviour.seconds)
        if behaviour.kind == "hang":
            await asyncio.Event().wait()
        paragraphs = [paragraph for paragraph in body["text"].split("\n\n") if paragraph.strip()]
        return web.json_response({"words": [len(paragraph.split()) for paragraph in paragraphs]})


def now_ms() -> int:
    return round(time.time() * 1_000)


async def start(stand_in: StandIn, port: int) -> web.AppRunner:
    """Serve on loopback. A client that goes away ends the handler of its request."""
    runner = web.AppRunner(stand_in.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--script", type=parse_script, default=parse_script("ok; slow; 429, ok; hang, ok"))
    parser.add_argument("--seed", type=int, help="choose among the script's lives at random, instead of in turn")
    parser.add_argument("--log", type=Path, required=True, help="where to note requests, as JSON lines")
    options = parser.parse_args()
    with options.log.open("a", buffering=1) as log:
        stand_in = StandIn(options.script, lambda line: print(json.dumps(line), file=log), options.seed)
        runner = await start(stand_in, options.port)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
