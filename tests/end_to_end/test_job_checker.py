"""The checker of scheduled jobs bites: what was done right has no findings, and every kind of damage is counted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from examples.ledger import Ledger, Writer
from sidecar.dev.checker import Audit, read_inbox
from sidecar.dev.job_checker import JobReport, Outcome, Plan, Window, check, document_of

TEXTS = {"a.txt": "one two three\n\nfour five\n", "b.txt": "six\n", "c.txt": "sieben acht neun\n\nzehn\n\nelf\n"}
START_MS, EVERY_MS = 1_700_000_000_000, 1_000
PLAN = Plan("digest", EVERY_MS, START_MS - 300, START_MS + 5_500)
FIRST, SECOND, THIRD = START_MS, START_MS + 1_000, START_MS + 2_000


class World:
    """Six due times, each done right under a token of its own; then damaged by a test."""

    def __init__(self, folder: Path) -> None:
        self.inbox, self.path = folder / "inbox", folder / "ledger.db"
        self.inbox.mkdir()
        for name, text in TEXTS.items():
            (self.inbox / name).write_text(text)
        self.documents = read_inbox(self.inbox)
        self.ledger = Ledger(self.path)
        self.outcomes: dict[int, list[Outcome]] = {}
        for token, due_ms in enumerate(PLAN.due_ms, 1):
            self.do(due_ms, token)

    def do(self, due_ms: int, token: int, attempt: int = 1) -> None:
        key = PLAN.key(due_ms)
        document = document_of(self.documents, key)
        by = writer(key, token, attempt)
        assert self.ledger.start(by, key, len(document.words)) is None
        for number, words in enumerate(document.words):
            self.ledger.count(by, key, number, words)
        self.ledger.seal(by, key, document.digest)
        result = json.dumps(asdict(self.ledger.post(by, key))).encode()
        self.outcomes[due_ms] = [Outcome("SUCCEEDED", "", attempt, result)]

    def undo(self, due_ms: int, *outcomes: Outcome) -> str:
        """As if nothing had been done at a due time; Tenure says ``outcomes``."""
        key = PLAN.key(due_ms)
        self.sql(
            *(f"DELETE FROM {table} WHERE key = '{key}'" for table in ("documents", "counts", "postings", "writes"))
        )
        self.sql(f"DELETE FROM fences WHERE lease = '{key}'")
        self.outcomes[due_ms] = list(outcomes)
        return key

    def sql(self, *statements: str) -> None:
        db = sqlite3.connect(self.path)
        for statement in statements:
            db.execute(statement)
        db.commit()
        db.close()

    def wrote(self, due_ms: int, step: str, agent: str, attempt: int, token: int) -> None:
        self.sql(
            "INSERT INTO writes (key, step, agent, attempt, token) "
            f"VALUES ('{PLAN.key(due_ms)}', '{step}', '{agent}', {attempt}, {token})"
        )

    def say(self, due_ms: int, state: str, reason: str = "") -> None:
        self.outcomes[due_ms] = [self.outcomes[due_ms][0]._replace(state=state, reason=reason)]

    def check(self, plan: Plan = PLAN) -> JobReport:
        audit = Audit(self.path, self.inbox)
        try:
            return check(plan, audit, self.outcomes)
        finally:
            audit.close()


def writer(key: str, token: int, attempt: int = 1) -> Writer:
    return Writer(f"agent-{token % 3}/77", key, token, attempt)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


def counts(report: JobReport) -> tuple[int, int, int]:
    return report.count("twice"), report.count("never"), report.count("partial")


def test_work_done_right_has_no_findings(world: World) -> None:
    report = world.check()
    assert report.findings == []
    assert list(PLAN.due_ms) == [START_MS + 1_000 * number for number in range(6)]
    assert (report.documents, report.postings, report.grants, report.states) == (6, 6, 6, {"SUCCEEDED": 6})
    assert report.summary() == "twice 0, never 0, partial 0"


def test_a_second_attempt_that_repairs_or_goes_on_is_right(world: World) -> None:
    key = world.undo(THIRD)
    world.ledger.start(writer(key, 7), key, 3)
    world.ledger.count(writer(key, 7), key, 0, len(TEXTS["c.txt"].split("\n\n")[0].split()))
    world.do(THIRD, 8, attempt=2)
    assert world.check(replace(PLAN, exclusive=False)).findings == []


def posted_again(world: World) -> None:
    key = PLAN.key(FIRST)
    world.sql(f"INSERT INTO postings (key, words, digest) SELECT key, words, digest FROM postings WHERE key = '{key}'")


def stale_write_accepted(world: World) -> None:
    world.wrote(SECOND, "start", "agent-1/77", 3, 9)
    world.wrote(SECOND, "start", "agent-0/77", 4, 8)


def a_run_beside_another_of_the_job(world: World) -> None:
    world.wrote(FIRST, "start", "agent-1/77", 2, 3)  # tokens up to 6 have written


def two_writers_in_one_attempt(world: World) -> None:
    world.wrote(SECOND, "start", "agent-1/77", 1, 9)


def an_earlier_attempt_goes_on(world: World) -> None:
    world.wrote(SECOND, "start", "agent-1/77", 3, 9)
    world.wrote(SECOND, "start", "agent-2/77", 2, 10)


def work_after_the_posting(world: World) -> None:
    world.wrote(SECOND, "count 0", "agent-1/77", 2, 9)


def two_outcomes(world: World) -> None:
    world.outcomes[SECOND] *= 2


def not_due(world: World) -> None:
    world.wrote(START_MS + 500, "start", "agent-1/77", 1, 9)


def after_the_end(world: World) -> None:
    world.wrote(START_MS + 6_000, "start", "agent-1/77", 1, 9)


@pytest.mark.parametrize(
    "damage",
    [
        posted_again, stale_write_accepted, a_run_beside_another_of_the_job, two_writers_in_one_attempt,
        an_earlier_attempt_goes_on, work_after_the_posting, two_outcomes, not_due, after_the_end,
    ],
)  # fmt: skip
def test_twice_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (1, 0, 0)


def test_runs_side_by_side_are_right_when_the_job_allows_them(world: World) -> None:
    a_run_beside_another_of_the_job(world)
    assert world.check(replace(PLAN, exclusive=False)).findings == []


def test_a_trigger_at_a_due_time_is_not_a_second_outcome(world: World) -> None:
    world.outcomes[SECOND].append(world.outcomes[SECOND][0]._replace(sequence=812))
    assert world.check().findings == []


def nothing_at_all(world: World) -> None:
    world.undo(SECOND)


def skipped(world: World) -> None:
    world.undo(SECOND, Outcome("SKIPPED", "overlap"))


def missed(world: World) -> None:
    world.undo(SECOND, Outcome("MISSED", "starting_deadline: no worker"))


def failed(world: World) -> None:
    world.undo(SECOND, Outcome("FAILED", "timeout"))


def said_to_have_succeeded(world: World) -> None:
    world.undo(SECOND, Outcome("SUCCEEDED", "", 1, b"{}"))


def killed_without_a_kill(world: World) -> None:
    world.undo(SECOND, Outcome("SKIPPED", "killed k1"))


def done_without_an_outcome(world: World) -> None:
    world.outcomes[SECOND] = []


@pytest.mark.parametrize(
    "damage",
    [
        nothing_at_all, skipped, missed, failed, said_to_have_succeeded, killed_without_a_kill, done_without_an_outcome,
    ],
)  # fmt: skip
def test_never_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (0, 1, 0)


def test_due_times_that_nobody_has_heard_of_are_never(world: World) -> None:
    assert counts(world.check(replace(PLAN, end_ms=START_MS + 7_500))) == (0, 2, 0)


def half_written(world: World) -> None:
    key = world.undo(THIRD, Outcome("SKIPPED", "killed k1"))
    world.ledger.start(writer(key, 9), key, 2)
    world.ledger.count(writer(key, 9), key, 0, 3)


def wrong_count(world: World) -> None:
    world.sql(f"UPDATE counts SET words = words + 1 WHERE key = '{PLAN.key(THIRD)}' AND paragraph = 0")


def missing_count(world: World) -> None:
    world.sql(f"DELETE FROM counts WHERE key = '{PLAN.key(THIRD)}' AND paragraph = 0")


def wrong_document(world: World) -> None:
    other = document_of(world.documents, PLAN.key(FIRST)).digest
    world.sql(f"UPDATE documents SET digest = '{other}' WHERE key = '{PLAN.key(THIRD)}'")


def wrong_posting(world: World) -> None:
    world.sql(f"UPDATE postings SET words = words + 1 WHERE key = '{PLAN.key(THIRD)}'")


def still_running(world: World) -> None:
    world.say(THIRD, "RUNNING")


def still_retrying(world: World) -> None:
    world.say(THIRD, "RETRYING")


def posted_and_unknown(world: World) -> None:
    world.say(THIRD, "UNKNOWN", "holder_lost")


def posted_and_cancelled(world: World) -> None:
    world.say(THIRD, "CANCELLED", "killed")


def another_result(world: World) -> None:
    world.outcomes[THIRD] = [Outcome("SUCCEEDED", "", 1, json.dumps({"words": 1, "digest": "x"}).encode())]


@pytest.mark.parametrize(
    "damage",
    [
        wrong_count, missing_count, wrong_document, wrong_posting, still_running, still_retrying, posted_and_unknown,
        posted_and_cancelled, another_result,
    ],
)  # fmt: skip
def test_partial_is_counted(world: World, damage: Callable[[World], None]) -> None:
    damage(world)
    assert counts(world.check()) == (0, 0, 1)


# ---- a kill: from the second due time on, cleared before the sixth

KILLED = replace(PLAN, kills=(Window(SECOND - 100, SECOND + 3_900),), end_ms=START_MS + 5_500)
INSIDE, BEFORE, LATE, AFTER = SECOND, FIRST, SECOND + 2_000, SECOND + 4_000


def test_what_was_due_under_a_kill_need_not_be_done_and_must_not(world: World) -> None:
    for due_ms in (INSIDE, LATE):
        world.undo(due_ms, Outcome("SKIPPED", "killed k1"))
    assert world.check(KILLED).findings == []
    world.wrote(INSIDE, "start", "agent-1/77", 1, 9)
    assert counts(world.check(KILLED)) == (1, 0, 0)


def test_what_was_at_work_when_the_kill_came_may_be_cancelled_but_not_left_half_done(world: World) -> None:
    world.undo(INSIDE, Outcome("SKIPPED", "killed k1"))
    key = world.undo(BEFORE, Outcome("CANCELLED", "killed"))
    world.ledger.start(writer(key, 9), key, 2)
    assert counts(world.check(KILLED)) == (0, 0, 1)
    world.ledger.withdraw(writer(key, 9), key)
    assert counts(world.check(replace(KILLED, exclusive=False))) == (0, 0, 0)


def test_after_the_clear_everything_is_done_again(world: World) -> None:
    world.undo(INSIDE, Outcome("SKIPPED", "killed k1"))
    world.undo(AFTER, Outcome("SKIPPED", "killed k1"))
    assert counts(world.check(KILLED)) == (0, 1, 0)


def test_the_live_tally(world: World) -> None:
    key = world.undo(THIRD)
    world.ledger.start(writer(key, 9), key, 2)
    audit = Audit(world.path, world.inbox)
    at_work, abandoned = audit.job_tally("job/", {9}), audit.job_tally("job/", set())
    audit.close()
    assert (at_work.posted, at_work.finished, at_work.twice, at_work.partial) == (5, 5, 0, 0)
    assert abandoned.partial == 1
    posted_again(world)
    audit = Audit(world.path, world.inbox)
    assert audit.job_tally("job/", {9}).twice == 1
    audit.close()
