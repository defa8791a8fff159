"""The stand-in for a model server: it does what its script says, and its log says what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from examples.model_stand_in import Behaviour, StandIn, parse_script, start
from sidecar.dev.ports import free_ports
from tests.waiting import eventually


class Model:
    def __init__(self, port: int, lines: list[dict[str, Any]], http: aiohttp.ClientSession) -> None:
        self.url, self.lines, self.http = f"http://127.0.0.1:{port}/v1/summarize", lines, http

    async def ask(self, key: str, text: str = "one two\n\nthree\n") -> tuple[int, Any]:
        headers = {"Idempotency-Key": key, "Fencing-Token": "7"}
        async with self.http.post(self.url, json={"text": text}, headers=headers) as answer:
            if answer.status == 200:
                return 200, (await answer.json())["words"]
            return answer.status, answer.headers.get("Retry-After")

    def events(self, key: str) -> list[str]:
        return [line["event"] for line in self.lines if line["key"] == key]


@pytest.fixture
def script() -> str:
    return "ok; slow:0.01; 429:1.5, 429:0.25, ok; hang, ok; 500, ok"


@pytest.fixture
async def model(script: str) -> AsyncIterator[Model]:
    lines: list[dict[str, Any]] = []
    (port,) = free_ports(1)
    runner = await start(StandIn(parse_script(script), lines.append), port)
    async with aiohttp.ClientSession() as http:
        yield Model(port, lines, http)
    await runner.cleanup()


async def test_each_key_lives_the_next_life_of_the_script(model: Model) -> None:
    assert await model.ask("a") == (200, [2, 1])
    assert await model.ask("b") == (200, [2, 1])
    assert [await model.ask("c") for _ in range(4)] == [(429, "1.5"), (429, "0.25"), (200, [2, 1]), (200, [2, 1])]
    hanging = asyncio.create_task(model.ask("d"))
    await eventually(lambda: model.events("d") == ["asked"])
    assert [await model.ask("e") for _ in range(2)] == [(500, None), (200, [2, 1])]
    assert not hanging.done()
    hanging.cancel()
    await eventually(lambda: model.events("d") == ["asked", "abandoned"])
    assert await model.ask("d") == (200, [2, 1])
    assert await model.ask("f") == (200, [2, 1])  # the script begins again


async def test_the_log_tells_who_asked_and_what_came(model: Model) -> None:
    for key in ("a", "b", "c"):
        await model.ask(key)
    await eventually(lambda: len(model.lines) == 6)
    asked = [line for line in model.lines if line["event"] == "asked"]
    assert [(line["number"], line["behaviour"], line["seconds"], line["token"]) for line in asked] == [
        (1, "ok", 0.0, 7), (2, "slow", 0.01, 7), (3, "429", 1.5, 7),
    ]  # fmt: skip
    assert model.events("c") == ["asked", "answered"]


@pytest.mark.parametrize("script", ["ok; 429:0, ok"])
async def test_a_seed_chooses_the_same_lives_again(script: str) -> None:
    def chosen(seed: int) -> list[Behaviour]:
        stand_in = StandIn(parse_script(script), lambda line: None, seed)
        return [stand_in.behaviour(f"key-{number}") for number in range(20)]

    assert chosen(1) == chosen(1)
    assert {behaviour.kind for behaviour in chosen(1)} == {"ok", "429"}


@pytest.mark.parametrize("text", ["", "ok;", "ok; explode", "429:soon"])
def test_a_script_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_script(text)
