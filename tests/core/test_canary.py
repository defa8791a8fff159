"""Who gets an occurrence goes by the specification at the time of the attempt, whenever that has come."""

from __future__ import annotations

import pytest

from sidecar.core import commands as c
from sidecar.core import specification as s
from sidecar.core.machine import Machine
from sidecar.core.occurrences import is_canary
from tests.core.derived import check_derived

NOW_MS = 1_000_000
CANARY = s.Canary(percent=99, label="ring", value="new")


def spec(canary: s.Canary | None, loss: s.HolderLoss) -> s.JobSpec:
    manual = s.Schedule(kind=s.ScheduleKind.MANUAL)
    return s.JobSpec(owner="team", runbook_url="https://r", schedule=manual, canary=canary, on_holder_loss=loss)


class Life:
    def __init__(self) -> None:
        self.machine = Machine()
        self.now_ms = 1_000

    def do(self, command: c.Command) -> c.Result:
        self.now_ms += 1
        result, _ = self.machine.apply(c.Stamp(self.now_ms, NOW_MS + self.now_ms), c.Request(command=command))
        assert not isinstance(result, c.Refused), result
        check_derived(self.machine)
        return result

    def apply_job(self, canary: s.Canary | None, loss: s.HolderLoss) -> None:
        definition = c.JobDefinition(tenant="t", name="j", spec=spec(canary, loss))
        self.do(c.ApplyJobs(jobs=(definition,), actor="a"))
        job = self.machine.job("t", "j")
        assert job is not None
        if job.next_due_ms:
            settlement = c.Settlement(
                tenant="t",
                name="j",
                revision=job.revision,
                settled_ms=job.settled_ms,
                through_ms=job.settled_ms,
                next_due_ms=0,
            )
            self.do(c.SettleDue(settlements=(settlement,)))

    def worker(self, ring: str) -> str:
        opened = self.do(
            c.OpenSession(tenant="t", suffix=ring, ttl_ms=60_000, labels=(("ring", ring),), connection="x", node="n")
        )
        assert isinstance(opened, c.SessionOpened)
        self.do(c.ServeJobs(tenant="t", session=opened.session, jobs=("j",), slots=1))
        return opened.session


@pytest.mark.parametrize("loss", [s.HolderLoss.RETRY, s.HolderLoss.HOLD_FOR_PERSON])
def test_a_canary_that_came_after_the_first_attempt_counts_for_the_next(loss: s.HolderLoss) -> None:
    life = Life()
    life.apply_job(None, loss)
    first = life.worker("old")
    created = life.do(c.TriggerJob(tenant="t", name="j", actor="a", reason="r"))
    assert isinstance(created, c.OccurrenceCreated)
    assert [run.session for run in life.machine.runs("t", "j", 0, 10)] == [first]
    assert is_canary(spec(CANARY, loss), "t", "j", created.due_ms)

    if loss is s.HolderLoss.RETRY:
        life.apply_job(CANARY, loss)
    life.do(c.CloseSession(tenant="t", session=first))
    life.apply_job(CANARY, loss)
    old, new = life.worker("old again"), life.worker("new")
    if loss is s.HolderLoss.HOLD_FOR_PERSON:
        assert life.machine.held("t", 10)
        resolve = c.ResolveOccurrence(
            tenant="t",
            job="j",
            due_ms=created.due_ms,
            sequence=created.sequence,
            attempt=1,
            resolution=c.OccurrenceResolution.RETRY,
            actor="a",
            reason="r",
        )
        life.do(resolve)
    assert [run.session for run in life.machine.runs("t", "j", 0, 10)] == [new] != [old]
