"""The checkers: what must be true of every run, checked as it happens.

Safety (status 1): ``election-safety``, ``log-matching``, ``leader-completeness``, ``state-machine-safety``,
``applied-order``, ``acked-lost``, ``commit-without-quorum``, ``stale-read``, ``digest``, ``sent-before-durable``,
``double-vote``, ``incarnation`` and those of the application (profile ``core``, see ``chaos/agents.py``).
Liveness (status 3): ``no-convergence``. The code under test raised (status 4): ``code-crash``, ``stopped``.

They look at a run from outside: what is written to the stores, what is applied, who says that it leads, what clients
are told. They know nothing of the code under test, so the library's own class is judged by the very same checks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

from chaos.images import LogImage
from chaos.timeline import Timeline
from sidecar.consensus.ports import Entry

LIVENESS = ("no-convergence", "leak", "storm")
CODE = ("code-crash", "stopped")


class Violation(NamedTuple):
    kind: str
    at_us: int
    host: str
    text: str

    @property
    def severity(self) -> int:
        """Exit status: 1 safety, 3 liveness, 4 crash of the code. (2 is a usage error, as argparse has it.)"""
        if self.kind in LIVENESS:
            return 3
        return 4 if self.kind in CODE else 1


class Committed(NamedTuple):
    term: int  # of the entry
    command: int  # checksum of what is applied there
    seen_term: int  # of the node that was the first to apply it


class Checkers:
    """One instance per run. Each kind of violation is recorded once, with the first place where it showed."""

    def __init__(self, world: Timeline) -> None:
        self.world = world
        self.violations: dict[str, Violation] = {}
        self.counts: dict[str, int] = {}
        self.acked: dict[int, int] = {}  # command -> index
        self.acks = 0
        self.reads = 0
        self.elections = 0
        self.led_us = 0  # when the last leader began
        self.doomed_voters: dict[str, Callable[[str], None]] = {}  # a fault that waits for a vote
        self.expected_stops: list[str] = []
        self._leaders: dict[int, str] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._entries: dict[tuple[int, int], tuple[int, int | None]] = {}  # (index, term) -> (command, term before)
        self._committed: dict[int, Committed] = {}
        self._last_committed = 0
        self._applied: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        self._incarnations: dict[str, int] = {}
        self._floor = 0  # every later read must have applied up to here

    def violation(self, kind: str, host: str, text: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind not in self.violations:
            self.world.note(host, f"VIOLATION {kind}: {text}")
            self.violations[kind] = Violation(kind, self.world.now_us, host, text)

    # ---- life

    def crashed(self, host: str) -> None:
        self._applied.pop(host, None)

    def stopped(self, host: str, reason: str) -> None:
        """A process may stop itself only for a reason that the simulator gave it (a full disk)."""
        if not any(expected in reason for expected in self.expected_stops):
            self.violation("stopped", host, reason)

    def code_crashed(self, host: str, error: Exception, trace: str) -> None:
        self.world.note(host, trace.replace("\n", " | "))
        self.violation("code-crash", host, f"{type(error).__name__}: {error}\n{trace}")

    def store_opened(self, host: str, image: LogImage) -> None:
        before = self._incarnations.get(host, 0)
        if image.incarnation <= before:
            self.violation("incarnation", host, f"{image.incarnation} after {before}")
        self._incarnations[host] = image.incarnation

    def wiped(self, host: str) -> None:
        """Its disk is lost: incarnations begin anew. Its votes and promises of the past still bind it."""
        self._incarnations.pop(host, None)

    # ---- the log

    def appended(self, host: str, image: LogImage, entry: Entry) -> None:
        """Log matching: (index, term) decides the command and the term before it, hence by induction all before it."""
        before = image.entries[-1].term if image.entries else None
        if image.entries and image.entries[-1].index != entry.index - 1:
            self.violation("log-matching", host, f"entry {entry.index} after {image.entries[-1].index}")
        self.logged(host, entry.index, entry.term, entry.command, before)

    def logged(self, host: str, index: int, term: int, command: bytes, before: int | None) -> None:
        known = self._entries.get((index, term))
        checksum = zlib.crc32(command)
        if known is None:
            self._entries[index, term] = (checksum, before)
        elif known[0] != checksum or (before is not None and known[1] is not None and known[1] != before):
            self.violation("log-matching", host, f"two different entries at index {index}, term {term}")
        elif known[1] is None:
            self._entries[index, term] = (checksum, before)

    def truncated(self, host: str, image: LogImage, position: int) -> None:
        if position < len(image.entries):
            self.world.detail(host, f"truncates from index {image.entries[position].index}")

    def voted(self, host: str, term_before: int, term: int, vote: str | None) -> None:
        """Of a vote that is durable, or that has left the host: there is one a term, and terms do not go back."""
        if term < term_before:
            self.violation("double-vote", host, f"its term goes back from {term_before} to {term}")
        if vote is None:
            return
        doom = self.doomed_voters.pop(host, None)
        if doom is not None:
            doom(host)
        known = self._votes.setdefault((host, term), vote)
        if known != vote:
            self.violation("double-vote", host, f"in term {term} for {known} and for {vote}")

    # ---- leadership

    def leads(self, host: str, term: int, image: LogImage | None) -> None:
        known = self._leaders.get(term)
        if known == host:
            return
        if known is not None:
            self.violation("election-safety", host, f"{known} and {host} both lead term {term}")
        self._leaders[term] = host
        self.elections += 1
        self.led_us = self.world.now_us
        if self.world.calm is False and len(self._leaders) > 1:
            self.world.reach("leader replaced")
        self.world.note(host, f"leads term {term}")
        committed = self._committed.get(self._last_committed)
        if image is None or committed is None or committed.seen_term >= term:
            return
        if not image.covers(self._last_committed, committed.term):
            text = (
                f"leads term {term} without entry {self._last_committed} of term {committed.term}, which is committed"
            )
            self.violation("leader-completeness", host, text)

    # ---- applying

    def applied(self, host: str, index: int, term: int, seen_term: int, payload: bytes, digest: str | None) -> None:
        last = self._applied.get(host)
        if last is not None and index <= last:
            self.violation("applied-order", host, f"entry {index} after {last}")
        self._applied[host] = index
        checksum = zlib.crc32(payload)
        known = self._committed.get(index)
        if known is None:
            self._committed[index] = Committed(term, checksum, seen_term)
            self._last_committed = max(self._last_committed, index)
        elif known.command != checksum:
            self.violation("state-machine-safety", host, f"another entry was applied at index {index} before")
        if digest is not None:
            self.state(host, index, digest)

    def restored(self, host: str, index: int) -> None:
        last = self._applied.get(host)
        if last is not None and index < last:
            self.violation("applied-order", host, f"a snapshot takes the state back from {last} to {index}")
        self._applied[host] = index

    def state(self, host: str, index: int, digest: str) -> None:
        known = self._digests.setdefault(index, digest)
        if known != digest:
            self.violation("digest", host, f"state after entry {index} is {digest}, elsewhere it is {known}")

    def quorum(self, host: str, index: int, copies: int, voters: int) -> None:
        if copies * 2 <= voters:
            text = f"entry {index} is acknowledged with {copies} of {voters} durable copies"
            self.violation("commit-without-quorum", host, text)

    def sent(self, host: str, in_doubt: int) -> None:
        if in_doubt:
            self.violation("sent-before-durable", host, f"a frame leaves with {in_doubt} changes not durable")

    # ---- clients

    def acknowledged(self, host: str, command: int, index: int) -> None:
        self.acks += 1
        known = self.acked.setdefault(command, index)
        if known != index:
            self.violation("acked-lost", host, f"command {command} acknowledged at {known} and at {index}")
        self._floor = max(self._floor, index)

    def known(self, position: int) -> None:
        """Somebody has been told of the state at this position."""
        self._floor = max(self._floor, position)

    def read_floor(self) -> int:
        """To be taken when a read begins: it must see at least this much."""
        return self._floor

    def read_answered(self, host: str, floor: int, saw: int) -> None:
        self.reads += 1
        if saw < floor:
            self.violation("stale-read", host, f"saw the state at {saw}, {floor} was known before it began")
        self._floor = max(self._floor, saw)

    # ---- the end

    def committed_term(self, index: int) -> int | None:
        known = self._committed.get(index)
        return known.term if known is not None else None
