"""Random lives of jobs: commands that mostly make sense, each judged by model_jobs.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec

from sidecar.core import commands as c
from sidecar.core import specification as s
from sidecar.core.jobs import Job
from sidecar.core.machine import Machine
from sidecar.core.occurrences import Occurrence, OccurrenceState, idempotency_key
from sidecar.core.runs import Run
from tests.core.model_jobs import ALL, Judge, Step

T = TypeVar("T")

WALL_MS = 1_800_000_000_000
JOBS = (("t", "a"), ("t", "a"), ("t", "ab"), ("t", "b"), ("t", "c"), ("u", "a"))
PASSING_MS = (0,) * 8 + (1, 20, 50, 50, 100, 100, 100, 200, 300, 500, 1_000, 4_000)
WALL_STEPS_MS = (0,) * 60 + (-30_000, -1_500, 900, 15_000)
LIMITS = c.Limits(events_max=200, starts_per_second_max=3)
TIGHT_LIMITS = c.Limits(
    events_max=200,
    starts_per_second_max=1,
    occurrences_max=5,
    jobs_max=4,
    job_revisions_max=2,
    job_bytes_max=5_000,
    switches_max=1,
)


class World:
    """Writes commands that mostly make sense, by looking at the state they will meet; ``pick`` decides everything."""

    def __init__(self, pick: Callable[[Sequence[Any]], Any], limits: c.Limits | None = None) -> None:
        self._pick = pick
        self.judge = Judge(limits or LIMITS)
        self.now_ms, self.wall_offset_ms = 1_000, WALL_MS
        self.count = 0
        self.settlements: list[c.Settlement] = []
        self.past: list[c.Request] = []
        # Claims that follow at once.
        self.claims: list[c.Command] = []

    def pick(self, options: Sequence[T]) -> T:
        found: T = self._pick(options)
        return found

    def one_in(self, count: int) -> bool:
        return bool(self._pick(range(count)) == 0)

    @property
    def machine(self) -> Machine:
        return self.judge.machine

    @property
    def wall_ms(self) -> int:
        return self.now_ms + self.wall_offset_ms

    def step(self) -> None:
        self.count += 1
        if self.claims:
            self.send(c.Request(command=self.claims.pop()))
            return
        self.now_ms += self.pick(PASSING_MS)
        self.wall_offset_ms += self.pick(WALL_STEPS_MS)
        if self.one_in(40):
            self.judge.restore()
        if self.past and self.one_in(25):
            self.send(self.pick(self.past[-20:]))
            return
        writers = (
            *(self.tick,) * 2, *(self.settle,) * 8, *(self.run,) * 14, *(self.session,) * 4, *(self.serve,) * 3,
            *(self.apply_job,) * 2, *(self.by_hand,) * 3, *(self.switch,) * 3, self.record, self.next_deadline,
        )  # fmt: skip
        command = self.apply_job() if self.count <= 2 else self.open() if self.count <= 4 else self.pick(writers)()
        keyed = not isinstance(command, c.Tick | c.SettleDue | c.DetachSession | c.AttachSession | c.RenewSessions)
        key = c.RequestKey("t", "", f"r{self.count}") if keyed and self.one_in(4) else None
        request = c.Request(command=command, key=key)
        if key is not None:
            self.past.append(request)
        self.send(request)

    def send(self, request: c.Request) -> None:
        self.judge.apply(c.Stamp(self.now_ms, self.wall_ms), request)

    # ---- time and due times ----------------------------------------------------------------------------------------

    def tick(self) -> c.Command:
        return c.Tick()

    def next_deadline(self) -> c.Command:
        next_ms = self.machine.next_deadline_ms()
        if next_ms is not None:
            self.now_ms = max(self.now_ms, next_ms - self.pick((0, 0, 1)))
        return c.Tick()

    def settle(self) -> c.Command:
        """A leader's; or an old one's, again or changed, which must change nothing."""
        if self.settlements and self.one_in(5):
            return c.SettleDue(settlements=(self.pick(self.settlements[-6:]),))
        if self.one_in(20):
            return c.SetTzdata(version=self.pick(("2026a", "2026b")))
        waiting = self.machine.jobs_to_settle(self.wall_ms, self.pick((1, ALL)))
        found = tuple(self.settlement(job) for job in waiting)
        self.settlements.extend(found)
        if self.one_in(3):
            return c.Tick()  # it comes later, if at all
        # Two leaders at once: the same due times twice in one entry.
        return c.SettleDue(settlements=found * self.pick((1, 1, 2)))

    def settlement(self, job: Job) -> c.Settlement:
        through_ms = max(job.settled_ms, self.wall_ms - self.pick((0, 0, 0, 500, 4_000)))
        times = due_times(job.spec.schedule, job.settled_ms, through_ms)
        room = self.pick((1, 3, 6))
        missed, due = times[:-room], times[-room:]
        late_ms = self.wall_ms - s.MISFIRE_THRESHOLD_MS
        return c.Settlement(
            tenant=job.tenant,
            name=job.name,
            revision=job.revision,
            settled_ms=job.settled_ms,
            through_ms=through_ms,
            next_due_ms=next_due(job.spec.schedule, through_ms),
            due=tuple(c.Due(at_ms, at_ms < late_ms) for at_ms in due),
            missed=(c.Missed(missed[0], missed[-1], len(missed), "catch_up_window"),) if missed else (),
        )

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def apply_job(self) -> c.Command:
        tenant, name = self.pick(JOBS)
        job = self.machine.job(tenant, name)
        what = self.pick(range(12))
        if job is not None and what == 0:
            return c.DeleteJob(tenant=tenant, name=name, actor="ann", reason="r")
        if job is not None and what == 1:
            return c.RollbackJob(tenant=tenant, name=name, to_revision=self.pick((0, 1, 2)), actor="ann", reason="r")
        spec = job.spec if job is not None and what == 2 else self.spec()
        if job is not None and what <= 5:
            spec = msgspec.structs.replace(spec, schedule=job.spec.schedule)
        expected = self.pick((-1, -1, -1, 0, 1, job.revision if job is not None else 0))
        definition = c.JobDefinition(tenant=tenant, name=name, spec=spec, expected_revision=expected)
        return c.ApplyJobs(jobs=(definition,), actor="ann", reason="r")

    def spec(self) -> s.JobSpec:
        pick = self.pick
        once = pick((False, False, True))
        return s.JobSpec(
            owner="team",
            runbook_url="https://runbooks/a",
            schedule=self.schedule(),
            jitter_ms=pick((0, 0, 0, 800)),
            starting_deadline_ms=pick((1_000, 3_000, 20_000, 60_000)),
            overlap=pick(tuple(s.Overlap)),
            buffer_max=pick((1, 3)),
            concurrent_max=pick((1, 2, 3)),
            timeout_ms=pick((1_000, 3_000, 30_000, 30_000)),
            interrupt_grace_ms=pick((0, 500, 4_000)),
            delivery=s.Delivery.AT_MOST_ONCE if once else s.Delivery.AT_LEAST_ONCE,
            on_holder_loss=pick((s.HolderLoss.SKIP, s.HolderLoss.HOLD_FOR_PERSON) if once else tuple(s.HolderLoss)),
            retry=self.retry(once),
            priority=pick((0, 0, 5, -5)),
            selector=pick(((), (), (("zone", ("a", "b")),), (("version", ("1",)), ("zone", ("a",))))),
            mode=pick((s.Mode.LIVE,) * 5 + (s.Mode.SHADOW,)),
            canary=pick((None, None, None, s.Canary(percent=50, label="zone", value="a"))),
            history_count=pick((2, 30, 1_000)),
            history_age_ms=60_000,
        )

    def schedule(self) -> s.Schedule:
        if self.one_in(8):
            return s.Schedule(kind=s.ScheduleKind.MANUAL)
        interval_ms, anchor_ms = self.pick((1_000, 2_000, 5_000)), self.pick((0, 250))
        return s.Schedule(kind=s.ScheduleKind.INTERVAL, interval_ms=interval_ms, anchor_ms=anchor_ms)

    def retry(self, once: bool) -> s.Retry:
        pick = self.pick
        return s.Retry(
            attempts_max=1 if once else pick((1, 2, 4)),
            initial_ms=pick((0, 200, 1_500, 5_000)),
            max_ms=6_000,
            jitter_percent=pick((0, 20)),
            on_failure=pick((True,) * 4 + (False,)),
            on_timeout=pick((True,) * 4 + (False,)),
        )

    def by_hand(self) -> c.Command:
        tenant, name = self.pick(JOBS)
        rows = self.machine.occurrences(tenant, name, None, ALL)
        unknown = [row for row in rows if row.state is OccurrenceState.UNKNOWN]
        if unknown and self.one_in(2):
            return self.resolution(self.pick(unknown))
        if rows and self.one_in(10):
            return self.resolution(self.pick(rows))
        job = self.machine.job(tenant, name)
        past = due_times(job.spec.schedule, self.wall_ms - 8_000, self.wall_ms)[-3:] if job is not None else []
        if job is not None and past and self.one_in(2):
            revision = self.pick((job.revision, job.revision, job.revision - 1))
            return c.BackfillJob(
                tenant=tenant, name=name, revision=revision, due_ms=tuple(past), actor="ann", reason="r"
            )
        return self.trigger(tenant, name)

    def trigger(self, tenant: str, name: str) -> c.Command:
        payload = self.pick((None, b"other"))
        return c.TriggerJob(tenant=tenant, name=name, actor="ann", reason="r", payload=payload)

    def resolution(self, row: Occurrence) -> c.Command:
        return c.ResolveOccurrence(
            tenant=row.tenant,
            job=row.job,
            due_ms=row.due_ms + self.one_in(20),
            sequence=row.sequence,
            attempt=self.pick((row.attempt, row.attempt, row.attempt + 1)),
            resolution=self.pick(tuple(c.OccurrenceResolution)),
            actor="ann",
            reason="r",
        )

    # ---- sessions and runs -----------------------------------------------------------------------------------------

    def living(self, tenant: str) -> str:
        rows = self.machine.sessions(tenant, "", ALL)
        return self.pick(rows).session if rows and not self.one_in(25) else "s0-none"

    def open(self) -> c.Command:
        return c.OpenSession(
            tenant=self.pick(("t", "t", "t", "u")),
            suffix=f"q{self.count}",
            agent=f"agent{self.count}",
            version=self.pick(("1", "2")),
            labels=(("zone", self.pick(("a", "b"))),),
            ttl_ms=self.pick((2_000, 20_000, *(600_000,) * 6)),
            disconnect_grace_ms=self.pick((0, 500)),
            connection=self.pick(("", "c1", "c1", "c1")),
            node="n",
        )

    def session(self) -> c.Command:
        tenant = self.pick(("t", "t", "t", "u"))
        if len(self.machine.sessions("t", "", ALL)) < 3 or not self.machine.sessions("u", "", ALL):
            return self.open()
        session, connection = self.living(tenant), self.pick(("c1", "c1", "c2"))
        what = self.pick(range(12))
        if what == 0:
            return c.CloseSession(tenant=tenant, session=session)
        if what <= 2:
            return c.DetachSession(session=session, connection=connection)
        if what <= 8:
            return c.AttachSession(tenant=tenant, session=session, connection=connection, node="n")
        return c.RenewSessions(sessions=(session,))

    def serve(self) -> c.Command:
        tenant = self.pick(("t", "t", "t", "u"))
        jobs = self.pick((("a", "b"), ("a*",), *(("*",),) * 6, ()))
        return c.ServeJobs(tenant=tenant, session=self.living(tenant), jobs=jobs, slots=self.pick((0, 1, 1, 2, 4, 8)))

    def run(self) -> c.Command:
        rows = [run for tenant in ("t", "u") for run in self.machine.runs(tenant, "", 0, ALL)]
        if not rows and self.one_in(2):
            return self.serve()
        if not rows or self.one_in(6):
            tenant = self.pick(("t", "t", "t", "u"))
            jobs = self.pick((("a",), ("*",), ("ab", "b")))
            claim = c.ClaimRun(tenant=tenant, session=self.living(tenant), jobs=jobs)
            self.claims = [claim] * self.pick((0, 5))
            return claim
        return self.end(self.pick(rows))

    def end(self, run: Run) -> c.Command:
        slip = self.pick(range(30))
        token = run.token - (slip == 0)
        session = self.living(run.tenant) if slip == 1 else run.session
        name = "r0" if slip == 2 else run.run
        what = self.pick(range(20))
        if what <= 6:
            return c.CompleteRun(tenant=run.tenant, session=session, run=name, token=token, result=b"r")
        if what <= 10:
            retryable, after_ms = self.pick((True,) * 5 + (False,)), self.pick((0, 0, 1_700))
            return c.FailRun(
                tenant=run.tenant,
                session=session,
                run=name,
                token=token,
                error="no route",
                retryable=retryable,
                retry_after_ms=after_ms,
            )
        if what <= 12:
            return c.CheckpointRun(tenant=run.tenant, session=session, run=name, token=token, state=b"half")
        if what == 13:
            return c.InterruptRun(tenant=run.tenant, run=name, actor="ann", reason="r")
        if not run.interrupt_cause and slip > 3:
            return self.settle()
        return c.AcknowledgeInterrupt(tenant=run.tenant, session=session, run=name, token=token, detail="stopped")

    # ---- switches and records --------------------------------------------------------------------------------------

    def switch(self) -> c.Command:
        in_force = self.machine.switches(None, self.one_in(6), "", ALL)
        if in_force and not self.one_in(4):
            row = self.pick(in_force)
            tenant = "nobody" if self.one_in(20) else row.tenant
            return c.ClearSwitch(tenant=tenant, switch=row.switch, actor="bob", reason="r")
        if not in_force and not self.one_in(3):
            return self.trigger(*self.pick(JOBS))
        scopes = [(row.tenant, row.job) for row in in_force[:1]]
        tenant, job = self.pick((("", ""), ("t", ""), ("t", "a"), ("t", "b"), ("u", "a"), *scopes))
        return c.SetSwitch(
            mode=self.pick(tuple(c.SwitchMode)),
            actor="ann",
            reason="r",
            tenant=tenant,
            job=job,
            expires_after_ms=self.pick((0, 1_000, 1_000, 2_000)),
        )

    def record(self) -> c.Command:
        """Of the effect of an occurrence, by somebody who did it beside the schedule."""
        tenant, name = self.pick(JOBS)
        rows = self.machine.occurrences(tenant, name, None, 5)
        if not rows:
            return c.Tick()
        row = self.pick(rows)
        key = idempotency_key(name, row.due_ms, row.sequence, row.origin)
        record = self.machine.record(tenant, key)
        if record is None:
            return c.BeginRecord(tenant=tenant, key=key, session=self.living(tenant), owner_loss=c.OwnerLoss.UNKNOWN)
        if not self.one_in(3):
            return c.CompleteRecord(tenant=tenant, key=key, session=record.owner, attempt=record.attempt, result=b"r")
        return c.FailRecord(tenant=tenant, key=key, session=record.owner, attempt=record.attempt, retryable=False)


def due_times(schedule: s.Schedule, after_ms: int, until_ms: int) -> list[int]:
    if schedule.kind is s.ScheduleKind.MANUAL:
        return []
    return list(range(next_due(schedule, after_ms), until_ms + 1, schedule.interval_ms))


def next_due(schedule: s.Schedule, after_ms: int) -> int:
    if schedule.kind is s.ScheduleKind.MANUAL:
        return 0
    return after_ms + schedule.interval_ms - (after_ms - schedule.anchor_ms) % schedule.interval_ms


def live(world: World, steps: int, tell: Callable[[str], object] = print) -> None:
    """What was done is told when it fails: the sequence is the report."""
    try:
        for _ in range(steps):
            world.step()
        world.judge.restore()
    except BaseException:
        for stamp, request in world.judge.log:
            tell(f"@{stamp.cluster_ms} {stamp.wall_ms} {shown(request.command)} {request.key or ''}")
        raise


def shown(row: msgspec.Struct) -> str:
    """A struct without the fields that are at their default."""
    fields = [(field, getattr(row, field.name)) for field in msgspec.structs.fields(row)]
    said = [f"{field.name}={shown_value(value)}" for field, value in fields if value != field.default]
    return f"{type(row).__name__}({', '.join(said)})"


def shown_value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return shown(value)
    if isinstance(value, Enum):
        return value.name
    return f"({', '.join(map(shown_value, value))})" if isinstance(value, tuple) else repr(value)


def replay(log: list[Step]) -> Machine:
    machine = Machine(LIMITS)
    for stamp, request in log:
        machine.apply(stamp, request)
    return machine
