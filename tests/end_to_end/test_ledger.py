"""The example's ledger: a stale token changes nothing, and a half-written document is begun again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.ledger import Ledger, Posting, StaleTokenError, Writer

KEY = "inbox/1/a.txt"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.db")
    yield opened
    opened.close()


def writer(token: int, attempt: int = 1) -> Writer:
    return Writer(agent=f"agent/{token}", lease="inbox", token=token, attempt=attempt)


def write_whole(ledger: Ledger, by: Writer, key: str = KEY) -> Posting:
    assert ledger.start(by, key, 2) is None
    ledger.count(by, key, 0, 3)
    ledger.count(by, key, 1, 4)
    ledger.seal(by, key, "d1")
    return ledger.post(by, key)


def test_a_document_is_posted_with_the_sum_of_its_counts(ledger: Ledger) -> None:
    assert write_whole(ledger, writer(1)) == Posting(7, "d1")


@pytest.mark.parametrize("step", ["start", "count", "seal", "post"])
def test_a_stale_token_is_refused_at_every_step(ledger: Ledger, step: str) -> None:
    old, new = writer(1), writer(2)
    ledger.start(old, KEY, 2)
    ledger.start(new, "inbox/1/b.txt", 1)
    steps: dict[str, Callable[[], object]] = {
        "start": lambda: ledger.start(old, KEY, 2),
        "count": lambda: ledger.count(old, KEY, 0, 3),
        "seal": lambda: ledger.seal(old, KEY, "d1"),
        "post": lambda: ledger.post(old, KEY),
    }
    with pytest.raises(StaleTokenError, match="token 1 of inbox is stale: 2 has written"):
        steps[step]()


def test_the_holder_itself_may_go_on_after_a_stale_write_was_refused(ledger: Ledger) -> None:
    ledger.start(writer(2), KEY, 2)
    with pytest.raises(StaleTokenError):
        ledger.count(writer(1), KEY, 0, 99)
    ledger.count(writer(2), KEY, 0, 3)
    ledger.seal(writer(2), KEY, "d1")
    assert ledger.post(writer(2), KEY) == Posting(3, "d1")


def test_what_a_crash_left_is_wiped_by_the_next_attempt(ledger: Ledger) -> None:
    ledger.start(writer(1), KEY, 2)
    ledger.count(writer(1), KEY, 0, 3)
    assert write_whole(ledger, writer(2, attempt=2)) == Posting(7, "d1")


def test_a_later_attempt_learns_that_it_was_posted(ledger: Ledger) -> None:
    write_whole(ledger, writer(1))
    assert ledger.start(writer(2, attempt=2), KEY, 2) == Posting(7, "d1")


def test_the_last_round_is_read_from_the_keys(ledger: Ledger) -> None:
    assert ledger.last_round() == 0
    ledger.start(writer(1), "inbox/2/z.txt", 1)
    ledger.start(writer(1), "inbox/10/a.txt", 1)
    assert ledger.last_round() == 10
