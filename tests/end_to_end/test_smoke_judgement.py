"""What the second smoke test reads from the model server's log: right logs pass, and each wrong one is found."""

from __future__ import annotations

import json
from dataclasses import replace

from chaos.smoke_llm import TIMEOUT_MS, Request, asked_under_kill, hangs, requests_of, unseen, waits
from sidecar.dev.job_checker import Window

AT_MS = 1_000_000
KILL = Window(AT_MS + 10_000, AT_MS + 14_000)


def asked(number: int, behaviour: str, after_ms: int, took_ms: int, *, key: str = "k", seconds: float = 0.0) -> Request:
    end = "abandoned" if behaviour == "hang" else "answered"
    asked_ms = AT_MS + after_ms
    return Request(number, key, number, behaviour, seconds, asked_ms, asked_ms + took_ms, end)


HANG = asked(1, "hang", 0, TIMEOUT_MS + 40)


def test_the_log_is_read() -> None:
    lines = [
        {"event": "asked", "number": 1, "key": "k", "token": 5, "behaviour": "hang", "seconds": 0.0, "at_ms": 10},
        {"event": "asked", "number": 2, "key": "l", "token": 6, "behaviour": "429", "seconds": 1.5, "at_ms": 20},
        {"event": "answered", "number": 2, "key": "l", "at_ms": 25},
    ]
    first, second = requests_of("".join(json.dumps(line) + "\n" for line in lines))
    assert first == Request(1, "k", 5, "hang", 0.0, 10)
    assert second == Request(2, "l", 6, "429", 1.5, 20, 25, "answered")


def test_a_hang_must_be_cut_at_the_timeout() -> None:
    assert hangs([HANG], (), ()) == ([TIMEOUT_MS + 40], [])
    late, early, never = asked(1, "hang", 0, TIMEOUT_MS + 9_000), asked(1, "hang", 0, 300), replace(HANG, ended_ms=0)
    assert [len(hangs([request], (), ())[1]) for request in (late, early, never)] == [1, 1, 1]


def test_a_hang_may_end_early_with_its_holder_or_by_a_kill_but_never_late() -> None:
    early, late = asked(1, "hang", 9_500, 700), asked(1, "hang", 9_500, TIMEOUT_MS + 9_000)
    assert hangs([early], {1}, ()) == ([], [])
    assert hangs([early], (), (KILL,)) == ([], [])
    assert len(hangs([late], {1}, (KILL,))[1]) == 1


def test_retry_after_must_be_kept() -> None:
    first, second = asked(1, "429", 0, 5, seconds=1.5), asked(2, "ok", 1_520, 5)
    assert waits([first, second], ()) == ([(1_500, 1_515)], [])
    assert len(waits([first, replace(second, asked_ms=AT_MS + 1_200)], ())[1]) == 1


def test_the_back_off_of_the_job_must_be_kept_when_it_is_longer() -> None:
    attempts = [asked(1, "429", 0, 0, seconds=0.2), asked(2, "500", 520, 0), asked(3, "ok", 1_540, 0)]
    assert waits(attempts, ()) == ([(500, 520), (1_000, 1_020)], [])
    hasty = [*attempts[:2], replace(attempts[2], asked_ms=AT_MS + 1_100)]
    assert len(waits(hasty, ())[1]) == 1


def test_after_the_loss_of_a_holder_and_between_keys_nothing_is_waited_for() -> None:
    first, second = asked(1, "429", 0, 5, seconds=1.5), asked(2, "ok", 100, 5)
    assert waits([first, second], {1}) == ([], [])
    assert waits([first, replace(second, key="l")], ()) == ([], [])


def test_nothing_may_be_asked_under_a_kill() -> None:
    requests = [asked(1, "ok", after_ms, 5) for after_ms in (9_990, 12_000, 14_000)]
    assert list(asked_under_kill(requests, (KILL,))) == ["k: asked while a kill was in force"]


def test_what_was_not_seen_is_not_shown() -> None:
    assert list(unseen([asked(1, "slow", 0, 5), asked(2, "429", 0, 5), asked(3, "500", 0, 5)])) == [
        "no request has met 'hang'"
    ]
