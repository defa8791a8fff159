"""The work that every contestant's workers do, and what they note of it.

A worker appends to a file of its own when a run starts and how it ended. What a run is for, its effect, goes to a
ledger that all workers share. The ledger refuses a token that is smaller than one it has seen for the key; a contestant
that gives no token has each of its effects accepted. So "done twice" is counted without asking any scheduler.

Workers are processes; where they are and who they are is in two environment variables, because APScheduler calls
``do`` by its name.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

FOLDER, WORKER = "BENCH_FOLDER", "BENCH_WORKER"
SCHEMA = """
CREATE TABLE IF NOT EXISTS effects (number INTEGER PRIMARY KEY, key TEXT NOT NULL, worker TEXT NOT NULL, token INTEGER);
CREATE TABLE IF NOT EXISTS fences (key TEXT PRIMARY KEY, token INTEGER NOT NULL);
"""


@dataclass
class Told:
    """What the workers have noted. Times are wall milliseconds."""

    starts: dict[str, list[float]] = field(default_factory=dict)
    # By worker: runs begun, and runs ended in whatever way.
    begun: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    refused: int = 0


def do(name: str, work_ms: int) -> None:
    """One run, by a contestant that gives no token."""
    note("start", name)
    time.sleep(work_ms / 1_000)
    if work_ms:
        write(name, None)
    note("done", name)


async def do_fenced(name: str, work_ms: int, token: int) -> None:
    """One run under a fencing token, which may be cancelled."""
    note("start", name)
    try:
        await asyncio.sleep(work_ms / 1_000)
        accepted = write(name, token) if work_ms else True
    except asyncio.CancelledError:
        note("cancelled", name)
        raise
    note("done" if accepted else "refused", name)


def note(what: str, name: str) -> None:
    now_ms = time.time() * 1_000
    line = f"{what} {name} {now_ms:.3f}\n".encode()
    descriptor = os.open(starts_path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)  # one write of a short line: whole, or not there
    finally:
        os.close(descriptor)


def starts_path() -> Path:
    return Path(os.environ[FOLDER]) / f"{os.environ[WORKER]}.notes"


def write(key: str, token: int | None) -> bool:
    """The effect. False when the token is older than one that has written."""
    db = connect(Path(os.environ[FOLDER]))
    try:
        db.execute("BEGIN IMMEDIATE")
        seen = db.execute("SELECT token FROM fences WHERE key = ?", (key,)).fetchone()
        if token is not None:
            if seen and token < seen[0]:
                db.execute("ROLLBACK")
                return False
            db.execute("INSERT OR REPLACE INTO fences VALUES (?, ?)", (key, token))
        db.execute("INSERT INTO effects (key, worker, token) VALUES (?, ?, ?)", (key, os.environ[WORKER], token))
        db.execute("COMMIT")
        return True
    finally:
        db.close()


def connect(folder: Path) -> sqlite3.Connection:
    db = sqlite3.connect(folder / "effects.db", timeout=30, isolation_level=None)
    db.executescript("PRAGMA journal_mode=WAL;" + SCHEMA)
    return db


def read(folder: Path) -> Told:
    told = Told()
    for path in sorted(folder.glob("*.notes")):
        begun = ended = 0
        for line in path.read_text().splitlines():
            what, name, at_ms = line.split(" ")
            if what == "start":
                told.starts.setdefault(name, []).append(float(at_ms))
                begun += 1
            else:
                ended += 1
                told.refused += what == "refused"
        told.begun[path.stem], told.ended[path.stem] = begun, ended
    return told


def effects(folder: Path) -> dict[str, int]:
    """How many effects there are of each key."""
    db = connect(folder)
    try:
        return dict(db.execute("SELECT key, count(*) FROM effects GROUP BY key"))
    finally:
        db.close()
