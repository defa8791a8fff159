"""A ledger that enforces fencing tokens, in SQLite.

Rules:
1. Every write carries the writer's fencing token. A token smaller than the largest one seen is refused, in the same
   transaction that would have written. This is the only thing a resource has to do to be safe from a stale holder.
2. A document is written in several transactions (header, one count per paragraph, digest, posting), so a crash leaves
   it half-written. ``start`` of a later attempt wipes what an earlier one left and begins again, or goes on after the
   paragraphs that it knows to be written (a checkpoint). ``withdraw`` takes back what is not posted.
3. A posting stands for an effect that cannot be taken back, such as a mail. Nothing here stops a second one: that no
   document has two is the work of the lease, the token and the idempotency key, and the checker counts them.
4. ``writes`` tells who wrote what, in order. Rows are only ever added.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS fences (lease TEXT PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    key TEXT PRIMARY KEY, paragraphs INTEGER NOT NULL, digest TEXT NOT NULL DEFAULT '',
    finished INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS counts (
    key TEXT NOT NULL, paragraph INTEGER NOT NULL, words INTEGER NOT NULL, PRIMARY KEY (key, paragraph)
);
CREATE TABLE IF NOT EXISTS postings (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, words INTEGER NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS writes (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, step TEXT NOT NULL,
    agent TEXT NOT NULL, attempt INTEGER NOT NULL, token INTEGER NOT NULL
);
"""


class StaleTokenError(Exception):
    """A write was refused because a later holder has already written."""


@dataclass(frozen=True)
class Writer:
    """Who writes, and by which right: the fencing token of the lease and the attempt of the idempotency key."""

    agent: str
    lease: str
    token: int
    attempt: int


@dataclass(frozen=True)
class Posting:
    words: int
    digest: str


class Ledger:
    """One connection. Agents in several processes share the file."""

    def __init__(self, path: Path, *, busy_timeout_ms: int = 2_000) -> None:
        self._db = sqlite3.connect(path, timeout=busy_timeout_ms / 1000, isolation_level=None)
        self._prepare(time.monotonic() + busy_timeout_ms / 1000)

    def _prepare(self, deadline_s: float) -> None:
        """Make the tables. SQLite does not wait for others while one changes the journal's mode, so we do."""
        while True:
            try:
                self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + SCHEMA)
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    def close(self) -> None:
        self._db.close()

    def last_round(self) -> int:
        """The highest round any document was started in; 0 for an empty ledger. Keys are ``inbox/<round>/<file>``."""
        row = self._db.execute("SELECT max(CAST(substr(key, 7) AS INTEGER)) FROM documents").fetchone()
        return int(row[0] or 0)

    def start(self, writer: Writer, key: str, paragraphs: int, *, keep: int = 0) -> Posting | None:
        """Write the header, or return the posting when an earlier attempt got that far and died before saying so.

        The counts of the first ``keep`` paragraphs stay.
        """
        with self._write(writer, key, "start") as db:
            if posted := db.execute("SELECT words, digest FROM postings WHERE key = ?", (key,)).fetchone():
                return Posting(*posted)
            db.execute("DELETE FROM counts WHERE key = ? AND paragraph >= ?", (key, keep))
            db.execute("INSERT OR REPLACE INTO documents (key, paragraphs) VALUES (?, ?)", (key, paragraphs))
        return None

    def count(self, writer: Writer, key: str, paragraph: int, words: int) -> None:
        with self._write(writer, key, f"count {paragraph}") as db:
            db.execute("INSERT INTO counts VALUES (?, ?, ?)", (key, paragraph, words))

    def seal(self, writer: Writer, key: str, digest: str) -> None:
        with self._write(writer, key, "seal") as db:
            db.execute("UPDATE documents SET digest = ? WHERE key = ?", (digest, key))

    def post(self, writer: Writer, key: str) -> Posting:
        """The effect that must happen once: post the sum of the counts, and mark the document finished."""
        with self._write(writer, key, "post") as db:
            words, digest = db.execute(
                "SELECT (SELECT sum(words) FROM counts WHERE key = :key), digest FROM documents WHERE key = :key",
                {"key": key},
            ).fetchone()
            db.execute("INSERT INTO postings (key, words, digest) VALUES (?, ?, ?)", (key, words, digest))
            db.execute("UPDATE documents SET finished = 1 WHERE key = ?", (key,))
        return Posting(words, digest)

    def withdraw(self, writer: Writer, key: str) -> None:
        """Take back everything of a document that is not posted: nobody will finish it."""
        with self._write(writer, key, "withdraw") as db:
            db.execute("DELETE FROM counts WHERE key = :key AND :key NOT IN (SELECT key FROM postings)", {"key": key})
            db.execute("DELETE FROM documents WHERE key = ? AND NOT finished", (key,))

    @contextmanager
    def _write(self, writer: Writer, key: str, step: str) -> Iterator[sqlite3.Connection]:
        """One transaction: check the token, do the write, note who did it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._check_fence(writer)
            yield self._db
            self._db.execute(
                "INSERT INTO writes (key, step, agent, attempt, token) VALUES (?, ?, ?, ?, ?)",
                (key, step, writer.agent, writer.attempt, writer.token),
            )
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _check_fence(self, writer: Writer) -> None:
        row = self._db.execute("SELECT token FROM fences WHERE lease = ?", (writer.lease,)).fetchone()
        if row and writer.token < row[0]:
            raise StaleTokenError(f"token {writer.token} of {writer.lease} is stale: {row[0]} has written")
        self._db.execute("INSERT OR REPLACE INTO fences VALUES (?, ?)", (writer.lease, writer.token))
