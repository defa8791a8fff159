"""Was a scheduled job done twice, never, or partially? Asked of the ledger and the clock first, of Tenure second.

The due times follow from the schedule by arithmetic, and what each must have left in the ledger follows from the
documents. So the three counts need nothing that Tenure says; what it says is then compared with them.

* twice: an effect that is there two times, a write that a newer token had already ruled out, two writers in one
  attempt, work after the posting, work at a time that is not due or while a kill was in force, or two outcomes of one
  due time.
* never: a due time that left no posting, unless a kill is to blame by the clock and by its outcome; one without an
  outcome.
* partial: an effect that was begun and neither finished nor withdrawn, or is not what the document asks for; an outcome
  that is still open at the end, or does not say what the ledger says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.dev.checker import Audit, Document, Finding, Posting, Report, Write, partial_in_ledger, twice_in_ledger

UNFINISHED = ("PENDING", "RUNNING", "RETRYING")
# A due time this long before a kill may have been waiting, retrying or running when it came.
HORIZON_MS = 30_000
# A due time this long before the clear may be settled by the leader only after it, and then runs.
LATE_MS = 3_000


class Window(NamedTuple):
    """A kill was in force, by the clock of who set and cleared it. UTC wall milliseconds, as all times here."""

    set_ms: int
    cleared_ms: int


@dataclass(frozen=True)
class Plan:
    """What must happen: due every ``every_ms`` from ``start_ms`` (included) to ``end_ms`` (not)."""

    job: str
    every_ms: int
    start_ms: int
    end_ms: int
    kills: Sequence[Window] = ()
    # At most one run at a time, so tokens only grow over all due times; else over each one's attempts.
    exclusive: bool = True

    @property
    def due_ms(self) -> range:
        first = -(-self.start_ms // self.every_ms) * self.every_ms
        return range(first, self.end_ms, self.every_ms)

    def key(self, due_ms: int) -> str:
        return f"job/{self.job}/{due_ms}"

    def may_be_suppressed(self, due_ms: int) -> bool:
        return any(kill.set_ms - HORIZON_MS <= due_ms <= kill.cleared_ms for kill in self.kills)

    def must_be_suppressed(self, due_ms: int) -> bool:
        return any(kill.set_ms < due_ms < kill.cleared_ms - LATE_MS for kill in self.kills)


class Outcome(NamedTuple):
    """What Tenure says of a due time. ``state`` in capitals."""

    state: str
    reason: str = ""
    attempt: int = 0
    result: bytes = b""
    # 0 for the schedule's own.
    sequence: int = 0


@dataclass
class JobReport(Report):
    """``documents`` are due times here, ``grants`` runs that wrote."""

    states: dict[str, int] = field(default_factory=dict)


Outcomes = Mapping[int, Sequence[Outcome]]


def document_of(documents: Mapping[str, Document], key: str) -> Document:
    """The document whose turn it is at a due time, as the schedule of the example has it."""
    names = sorted(documents)
    return documents[names[due_of(key) // 1_000 % len(names)]]


def due_of(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


def check(plan: Plan, audit: Audit, outcomes: Outcomes) -> JobReport:
    """Everything, when all due times have passed and all agents have ended. ``outcomes`` by due time."""
    postings = {key: each for key, each in audit.postings().items() if key.startswith(f"job/{plan.job}/")}
    writes = [write for write in audit.writes() if write.key.startswith(f"job/{plan.job}/")]
    report = JobReport(documents=len(plan.due_ms), writes=len(writes), postings=sum(map(len, postings.values())))
    report.grants = len({write.token for write in writes})
    for due_ms in plan.due_ms:
        for outcome in outcomes.get(due_ms, ()):
            report.states[outcome.state] = report.states.get(outcome.state, 0) + 1
    for findings in (
        twice_written(plan, postings, writes),
        twice_decided(plan, writes, outcomes),
        never(plan, postings, outcomes),
        partial_in_ledger(audit, postings, lambda key: document_of(audit.documents, key)),
        partial_in_outcomes(plan, postings, outcomes),
    ):
        report.findings.extend(findings)
    return report


def twice_written(plan: Plan, postings: dict[str, list[Posting]], writes: list[Write]) -> Iterator[Finding]:
    if plan.exclusive:
        yield from twice_in_ledger(postings, writes)
        return
    for key in dict.fromkeys((*postings, *(write.key for write in writes))):
        mine = {key: postings[key]} if key in postings else {}
        yield from twice_in_ledger(mine, [write for write in writes if write.key == key])


def twice_decided(plan: Plan, writes: list[Write], outcomes: Outcomes) -> Iterator[Finding]:
    """Due times that count twice, and work that nothing asked for."""
    for due_ms in plan.due_ms:
        own = [outcome for outcome in outcomes.get(due_ms, ()) if outcome.sequence == 0]
        if len(own) > 1:
            yield Finding("twice", plan.key(due_ms), f"{len(own)} outcomes: {', '.join(each.state for each in own)}")
    for key in dict.fromkeys(write.key for write in writes):
        if due_of(key) not in plan.due_ms:
            yield Finding("twice", key, "worked on, and not due by the schedule")
        elif plan.must_be_suppressed(due_of(key)):
            yield Finding("twice", key, "worked on, and due while a kill was in force")


def never(plan: Plan, postings: dict[str, list[Posting]], outcomes: Outcomes) -> Iterator[Finding]:
    for due_ms in plan.due_ms:
        key, own = plan.key(due_ms), outcomes.get(due_ms, ())
        said = ", ".join(f"{each.state} {each.reason}".strip() for each in own)
        if not own:
            yield Finding("never", key, "no outcome is recorded")
        if key in postings:
            continue
        killed = any(each.state in ("SKIPPED", "CANCELLED") and each.reason.startswith("killed") for each in own)
        if not (killed and plan.may_be_suppressed(due_ms)) and own:
            yield Finding("never", key, f"not done; its outcome: {said}")


def partial_in_outcomes(plan: Plan, postings: dict[str, list[Posting]], outcomes: Outcomes) -> Iterator[Finding]:
    for due_ms in plan.due_ms:
        key = plan.key(due_ms)
        for outcome in outcomes.get(due_ms, ()):
            if outcome.state in UNFINISHED:
                yield Finding("partial", key, f"still {outcome.state} at the end")
            elif key in postings and outcome.state != "SUCCEEDED":
                yield Finding("partial", key, f"posted, and its outcome is {outcome.state} {outcome.reason}")
            elif key in postings and json.loads(outcome.result) != postings[key][0]._asdict():
                yield Finding("partial", key, f"its outcome says {outcome.result!r}, the ledger {postings[key][0]}")
