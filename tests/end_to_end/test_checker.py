"""The checker bites: a clean ledger has no findings, and every kind of damage done by hand is counted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.ledger import Ledger, Writer
from sidecar.dev.checker import Audit, Record, Report, check, key_of, read_inbox

AGENT = "agent-1/77"
TEXTS = {"a.txt": "one two three\n\nfour five\n", "b.txt": "six\n", "c.txt": "sieben acht neun\n\nzehn\n\nelf\n"}


class World:
    """One round, done right by one agent under token 4; then damaged by a test."""

    def __init__(self, folder: Path) -> None:
        self.inbox = folder / "inbox"
        self.inbox.mkdir()
        for name, text in TEXTS.items():
            (self.inbox / name).write_text(text)
        self.path = folder / "ledger.db"
        self.history = folder / "agent-1.jsonl"
        self.records: dict[str, Record] = {}
        self.lines: list[dict[str, object]] = []
        self.note(1_000, "granted", token=4, remaining_ms=2_000)
        ledger = Ledger(self.path)
        for name in TEXTS:
            self.do(ledger, key_of(1, name), name)
        ledger.close()
        self.note(5_000, "left", token=4)

    def do(self, ledger: Ledger, key: str, name: str) -> None:
        document = read_inbox(self.inbox)[name]
        writer = Writer(AGENT, "inbox", 4, 1)
        ledger.start(writer, key, len(document.words))
        for number, words in enumerate(document.words):
            ledger.count(writer, key, number, words)
        ledger.seal(writer, key, document.digest)
        posting = ledger.post(writer, key)
        self.records[key] = Record("COMPLETED", json.dumps(asdict(posting)).encode())
        self.note(4_000, "completed", token=4, remaining_ms=2_000, key=key)

    def note(self, at_ms: int, event: str, agent: str = AGENT, **facts: object) -> None:
        self.lines.append({"at_ms": at_ms, "agent": agent, "event": event, **facts})

    def sql(self, *statements: str) -> None:
        db = sqlite3.connect(self.path)
        for statement in statements:
            db.execute(statement)
        db.commit()
        db.close()

    def check(self, rounds: int = 1) -> Report:
        self.history.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        audit = Audit(self.path, self.inbox)
        try:
            return check(audit, [self.history], self.records, rounds)
        finally:
            audit.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


A, B = key_of(1, "a.txt"), key_of(1, "b.txt")


def counts(report: Report) -> tuple[int, int, int]:
    return report.count("twice"), report.count("never"), report.count("partial")


def test_work_done_right_has_no_findings(world: World) -> None:
    report = world.check()
    assert report.findings == []
    assert (report.documents, report.postings, report.grants) == (3, 3, 1)
    assert report.summary() == "twice 0, never 0, partial 0"


def posted_again(world: World) -> None:
    world.sql(f"INSERT INTO postings (key, words, digest) SELECT key, words, digest FROM postings WHERE key = '{A}'")


def stale_write_accepted(world: World) -> None:
    world.note(5_500, "granted", agent="agent-2/78", token=5, remaining_ms=2_000)
    world.sql(
        f"INSERT INTO writes (key, step, agent, attempt, token) VALUES ('{A}', 'start', 'agent-2/78', 2, 5)",
        f"INSERT INTO writes (key, step, agent, attempt, token) VALUES ('{B}', 'start', '{AGENT}', 2, 4)",
    )


def two_writers_in_one_attempt(world: World) -> None:
    world.note(5_500, "granted", agent="agent-2/78", token=5, remaining_ms=2_000)
    world.sql(f"INSERT INTO writes (key, step, agent, attempt, token) VALUES ('{A}', 'start', 'agent-2/78', 1, 5)")


def work_after_the_posting(world: World) -> None:
    world.sql(f"INSERT INTO writes (key, step, agent, attempt, token) VALUES ('{A}', 'count 0', '{AGENT}', 2, 4)")


def write_without_a_grant(world: World) -> None:
    world.sql(f"INSERT INTO writes (key, step, agent, attempt, token) VALUES ('{A}', 'start', 'agent-9/1', 2, 9)")


def two_believers(world: World) -> None:
    world.note(4_900, "granted", agent="agent-2/78", token=5, remaining_ms=2_000)


def one_token_for_two(world: World) -> None:
    world.note(5_500, "granted", agent="agent-2/78", token=4, remaining_ms=2_000)


@pytest.mark.parametrize(
    "damage",
    [
        posted_again, stale_write_accepted, two_writers_in_one_attempt, work_after_the_posting,
        write_without_a_grant, two_believers, one_token_for_two,
    ],
)  # fmt: skip
def test_twice_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (1, 0, 0)


def test_a_believer_who_died_or_whose_time_was_up_does_not_count(world: World) -> None:
    """A holder that never left was killed: its belief ended with its last line. One that slept ended at safe-until."""
    world.note(5_100, "granted", agent="agent-2/78", token=5, remaining_ms=1_000)
    world.note(7_000, "granted", agent="agent-3/79", token=6, remaining_ms=1_000)
    world.note(9_000, "left", agent="agent-2/78", token=5)
    assert world.check().findings == []


def never_done(world: World) -> None:
    for table in ("documents", "counts", "postings", "writes"):
        world.sql(f"DELETE FROM {table} WHERE key = '{A}'")
    del world.records[A]
    world.lines = [line for line in world.lines if line.get("key") != A]


def acknowledged_and_lost(world: World) -> None:
    for table in ("documents", "counts", "postings", "writes"):
        world.sql(f"DELETE FROM {table} WHERE key = '{A}'")


@pytest.mark.parametrize("damage", [never_done, acknowledged_and_lost])
def test_never_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (0, 1, 0)


def test_a_round_that_was_not_begun_is_never(world: World) -> None:
    assert counts(world.check(rounds=2)) == (0, 3, 0)


def half_written(world: World) -> None:
    world.sql(f"INSERT INTO documents (key, paragraphs) VALUES ('{key_of(2, 'a.txt')}', 2)")
    world.records[key_of(2, "a.txt")] = Record("COMPLETED", b"{}")


def wrong_count(world: World) -> None:
    world.sql(f"UPDATE counts SET words = words + 1 WHERE key = '{A}' AND paragraph = 0")


def missing_paragraph(world: World) -> None:
    world.sql(f"DELETE FROM counts WHERE key = '{A}' AND paragraph = 1")


def wrong_digest(world: World) -> None:
    world.sql(f"UPDATE documents SET digest = 'x' WHERE key = '{A}'")


def wrong_posting(world: World) -> None:
    world.sql(f"UPDATE postings SET words = 1 WHERE key = '{A}'")


def record_in_progress(world: World) -> None:
    world.records[A] = Record("IN_PROGRESS", b"")


def record_unknown(world: World) -> None:
    world.records[A] = Record("UNKNOWN", b"")


def record_forgotten(world: World) -> None:
    del world.records[A]


def record_says_something_else(world: World) -> None:
    world.records[A] = Record("COMPLETED", json.dumps({"words": 1, "digest": "x"}).encode())


@pytest.mark.parametrize(
    "damage",
    [
        wrong_count, missing_paragraph, wrong_digest, wrong_posting,
        record_in_progress, record_unknown, record_forgotten, record_says_something_else,
    ],
)  # fmt: skip
def test_partial_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (0, 0, 1)


def test_a_document_half_written_is_partial_and_a_record_that_says_it_is_complete_makes_it_never(world: World) -> None:
    half_written(world)
    assert counts(world.check()) == (0, 1, 1)


def test_the_live_tally_sees_a_document_half_written_by_somebody_else(world: World) -> None:
    ledger = Ledger(world.path)
    ledger.start(Writer("agent-2/78", "inbox", 5, 1), key_of(2, "b.txt"), 1)
    audit = Audit(world.path, world.inbox)
    mine, theirs = audit.tally(token=5), audit.tally(token=6)
    audit.close()
    ledger.close()
    assert (mine.round, mine.documents, mine.finished, mine.posted) == (2, 3, 0, 3)
    assert (mine.twice, mine.never, mine.partial) == (0, 0, 0)
    assert theirs.partial == 1


def test_there_may_be_no_ledger_yet(tmp_path: Path, world: World) -> None:
    audit = Audit(tmp_path / "none.db", world.inbox)
    assert audit.tally(0).documents == 3
