"""Was anything done twice, never, or partially? Asked of the ledger, the agents' histories and the records.

The checker shares no code with the agent: it reads the ledger's tables and the documents by itself.

* twice: an effect that is there two times, two writers in one attempt, a write that a newer token had already ruled
  out, work after the posting, or two agents that both believed to hold the lease.
* never: a document that must have been finished and was not, or that somebody was told is finished and is not.
* partial: a document that was begun and not finished, one whose counts, sum or digest are wrong, or a record that does
  not say what the ledger says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "inbox/"


class Document(NamedTuple):
    """What the ledger must say about a document, worked out from its text."""

    words: tuple[int, ...]  # by paragraph
    digest: str


class Posting(NamedTuple):
    words: int
    digest: str


class Write(NamedTuple):
    key: str
    step: str
    agent: str
    attempt: int
    token: int


class Finding(NamedTuple):
    kind: str  # twice, never or partial
    subject: str
    what: str


@dataclass(frozen=True)
class Tally:
    """The counts while work is going on; ``partial`` is what a holder before this one has left half-written."""

    round: int = 0
    documents: int = 0
    finished: int = 0  # in this round
    posted: int = 0  # in all rounds
    twice: int = 0
    never: int = 0
    partial: int = 0


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    documents: int = 0
    postings: int = 0
    writes: int = 0
    grants: int = 0
    refused: int = 0  # writes with a stale token that the ledger turned down

    def count(self, kind: str) -> int:
        """How many documents (or leases) have a finding of this kind."""
        return len({finding.subject for finding in self.findings if finding.kind == kind})

    @property
    def clean(self) -> bool:
        return not self.findings

    def summary(self) -> str:
        return ", ".join(f"{kind} {self.count(kind)}" for kind in ("twice", "never", "partial"))


def read_inbox(folder: Path) -> dict[str, Document]:
    """The documents by file name."""
    documents = {}
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        words = tuple(len(paragraph.split()) for paragraph in paragraphs)
        documents[path.name] = Document(words, hashlib.sha256(text.encode()).hexdigest())
    return documents


def key_of(round_number: int, name: str) -> str:
    return f"{PREFIX}{round_number}/{name}"


def round_of(key: str) -> int:
    return int(key.removeprefix(PREFIX).split("/", 1)[0])


def name_of(key: str) -> str:
    return key.rsplit("/", 1)[1]


class Audit:
    """Reads a ledger, also while agents write to it."""

    def __init__(self, ledger: Path, inbox: Path) -> None:
        self._path = ledger
        self.documents = read_inbox(inbox)
        self._last = Tally(documents=len(self.documents))

    @cached_property
    def _db(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=2)

    def close(self) -> None:
        if "_db" in self.__dict__:
            self._db.close()
            del self._db

    def tally(self, token: int) -> Tally:
        """The counts right now; ``token`` is the present holder's, whose open document is not partial but in work."""
        try:
            self._last = self._tally(token)
        except sqlite3.OperationalError:  # no ledger yet, or it is busy: what was so a moment ago will do
            self.close()
        return self._last

    def _tally(self, token: int) -> Tally:
        """By sums that SQLite makes, because it is asked several times a second for as long as a cluster runs."""
        current = self._one("SELECT coalesce(max(CAST(substr(key, 7) AS INTEGER)), 0) FROM documents")
        posted = self._one("SELECT count(*) FROM postings")
        distinct = self._one("SELECT count(DISTINCT key) FROM postings")
        finished = self._one("SELECT count(DISTINCT key) FROM postings WHERE key GLOB ?", key_of(current, "*"))
        earlier = (current - 1) * len(self.documents) if current else 0
        open_keys = [key for (key,) in self._db.execute("SELECT key FROM documents WHERE NOT finished")]
        return Tally(
            round=current,
            documents=len(self.documents),
            finished=finished,
            posted=posted,
            twice=self._one("SELECT count(*) FROM (SELECT key FROM postings GROUP BY key HAVING count(*) > 1)"),
            never=earlier - (distinct - finished),
            partial=sum(1 for key in open_keys if self._last_token(key) != token),
        )

    def _last_token(self, key: str) -> int:
        return self._one("SELECT token FROM writes WHERE key = ? ORDER BY number DESC LIMIT 1", key)

    def _one(self, sql: str, *values: object) -> int:
        return int(self._db.execute(sql, values).fetchone()[0])

    def job_tally(self, prefix: str, running: Collection[int]) -> Tally:
        """The counts of a job's effects right now. A half-written one is partial when none of the ``running`` tokens is
        at it. What is never done, only the schedule can tell."""
        try:
            self._last = self._job_tally(f"{prefix}*", running)
        except sqlite3.OperationalError:
            self.close()
        return self._last

    def _job_tally(self, keys: str, running: Collection[int]) -> Tally:
        open_keys = [
            k for (k,) in self._db.execute("SELECT key FROM documents WHERE NOT finished AND key GLOB ?", (keys,))
        ]
        posted = self._one("SELECT count(*) FROM postings WHERE key GLOB ?", keys)
        distinct = self._one("SELECT count(DISTINCT key) FROM postings WHERE key GLOB ?", keys)
        return Tally(
            finished=distinct,
            posted=posted,
            twice=self._one(
                "SELECT count(*) FROM (SELECT key FROM postings WHERE key GLOB ? GROUP BY key HAVING count(*) > 1)",
                keys,
            ),
            partial=sum(1 for key in open_keys if self._last_token(key) not in running),
        )

    def postings(self) -> dict[str, list[Posting]]:
        found: dict[str, list[Posting]] = {}
        for key, words, digest in self._db.execute("SELECT key, words, digest FROM postings ORDER BY number"):
            found.setdefault(key, []).append(Posting(words, digest))
        return found

    def finished_flags(self) -> dict[str, bool]:
        return {key: bool(done) for key, done in self._db.execute("SELECT key, finished FROM documents")}

    def digests(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT key, digest FROM documents"))

    def counts(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for key, words in self._db.execute("SELECT key, words FROM counts ORDER BY key, paragraph"):
            found.setdefault(key, []).append(words)
        return {key: tuple(words) for key, words in found.items()}

    def writes(self) -> list[Write]:
        return [
            Write(*row)
            for row in self._db.execute("SELECT key, step, agent, attempt, token FROM writes ORDER BY number")
        ]


class Record(NamedTuple):
    """What Tenure remembers of a key."""

    state: str  # COMPLETED and so on
    result: bytes


def check(audit: Audit, histories: Iterable[Path], records: dict[str, Record], rounds: int) -> Report:
    """Check everything, when all agents have ended. Every document of rounds 1 to ``rounds`` must be finished."""
    lines = [line for path in histories for line in read_history(path)]
    writes, postings = audit.writes(), audit.postings()
    expected = [key_of(number, name) for number in range(1, rounds + 1) for name in audit.documents]
    report = Report(documents=len(expected), writes=len(writes), postings=sum(map(len, postings.values())))
    report.grants = sum(1 for line in lines if line["event"] == "granted")
    report.refused = sum(1 for line in lines if line["event"] == "refused")
    for findings in (
        twice_in_ledger(postings, writes),
        twice_in_histories(writes, lines),
        never(expected, postings, lines, records),
        partial_in_ledger(audit, postings, lambda key: audit.documents[name_of(key)]),
        partial_in_records(audit, postings, records),
    ):
        report.findings.extend(findings)
    return report


def read_history(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def twice_in_ledger(postings: dict[str, list[Posting]], writes: list[Write]) -> Iterator[Finding]:
    for key, each in postings.items():
        if len(each) > 1:
            yield Finding("twice", key, f"posted {len(each)} times")
    newest = 0
    owners: dict[tuple[str, int], tuple[str, int]] = {}
    attempts: dict[str, int] = {}
    posted: set[str] = set()
    for write in writes:
        if write.token < newest:
            yield Finding("twice", write.key, f"{write.step}: token {write.token} was accepted after {newest}")
        newest = max(newest, write.token)
        owner = owners.setdefault((write.key, write.attempt), (write.agent, write.token))
        if owner != (write.agent, write.token):
            yield Finding("twice", write.key, f"attempt {write.attempt} was worked on by {owner[0]} and {write.agent}")
        if write.attempt < attempts.get(write.key, 0):
            yield Finding("twice", write.key, f"attempt {write.attempt} went on after {attempts[write.key]} had begun")
        attempts[write.key] = max(write.attempt, attempts.get(write.key, 0))
        if write.key in posted and write.step != "start":
            yield Finding("twice", write.key, f"{write.step} by attempt {write.attempt} after it was posted")
        if write.step == "post":
            posted.add(write.key)


def twice_in_histories(writes: list[Write], lines: list[dict[str, Any]]) -> Iterator[Finding]:
    """Two who believed at once, or a writer who was never granted what it wrote under."""
    grants = sorted((line for line in lines if line["event"] == "granted"), key=lambda line: float(line["at_ms"]))
    granted = {line["token"]: line for line in reversed(grants)}  # the first, should there be two
    if len(grants) != len(granted):
        yield Finding("twice", "lease", "one token was granted to two agents")
    for write in writes:
        grant = granted.get(write.token)
        if grant is None or grant["agent"] != write.agent:
            yield Finding("twice", write.key, f"{write.agent} was not granted token {write.token}, and wrote under it")
    ends = {token: belief_end_ms(token, lines) for token in granted}
    order = sorted(granted)
    for earlier, later in itertools.pairwise(order):
        if granted[later]["at_ms"] < ends[earlier]:
            overlap_ms = ends[earlier] - granted[later]["at_ms"]
            yield Finding("twice", "lease", f"tokens {earlier} and {later} were both held for {overlap_ms:.0f} ms")


def belief_end_ms(token: int, lines: list[dict[str, Any]]) -> float:
    """Until when the holder of a token thought it held it: until it left, but not past its last known safe-until.

    A holder that never left was killed, and believed nothing after its last line.
    """
    mine = [line for line in lines if line.get("token") == token]
    left = [line["at_ms"] for line in mine if line["event"] == "left"]
    end: float = left[0] if left else max(line["at_ms"] for line in mine)
    safe_until: float = max(line["at_ms"] + line["remaining_ms"] for line in mine if "remaining_ms" in line)
    return min(end, safe_until)


def never(
    expected: list[str], postings: dict[str, list[Posting]], lines: list[dict[str, Any]], records: dict[str, Record]
) -> Iterator[Finding]:
    for key in expected:
        if key not in postings:
            yield Finding("never", key, "not finished")
    told = {line["key"] for line in lines if line["event"] == "completed"}
    for key in sorted(told - postings.keys()):
        yield Finding("never", key, "an agent was told that it is complete, and the ledger has no posting")
    for key, record in records.items():
        if record.state == "COMPLETED" and key not in postings:
            yield Finding("never", key, "its record is complete, and the ledger has no posting")


def partial_in_ledger(
    audit: Audit, postings: dict[str, list[Posting]], document_of: Callable[[str], Document]
) -> Iterator[Finding]:
    counts, digests = audit.counts(), audit.digests()
    for key, finished in audit.finished_flags().items():
        document = document_of(key)
        if not finished:
            yield Finding("partial", key, "begun and not finished")
            continue
        if counts.get(key, ()) != document.words:
            yield Finding("partial", key, f"counts are {counts.get(key, ())}, the document has {document.words}")
        if digests[key] != document.digest:
            yield Finding("partial", key, "the digest is not the document's")
        for posting in postings.get(key, []):
            if posting != Posting(sum(document.words), document.digest):
                yield Finding("partial", key, "the posting does not fit the document")
        if key not in postings:
            yield Finding("partial", key, "marked finished without a posting")
    for key in postings.keys() - digests.keys():
        yield Finding("partial", key, "posted without a header")


def partial_in_records(
    audit: Audit, postings: dict[str, list[Posting]], records: dict[str, Record]
) -> Iterator[Finding]:
    for key in audit.finished_flags():
        if key not in records:
            yield Finding("partial", key, "in the ledger, and Tenure has no record of it")
    for key, record in records.items():
        if record.state != "COMPLETED":
            yield Finding("partial", key, f"its record is left {record.state}")
        elif key in postings and json.loads(record.result) != postings[key][0]._asdict():
            yield Finding("partial", key, f"its record says {record.result!r}, the ledger {postings[key][0]}")
