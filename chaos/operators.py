"""The people in a simulated world: they define jobs, change their minds, trigger, backfill, interrupt, resolve, and
turn switches. After the last fault they end all schedules and clear all switches, but for a pause that may stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from chaos.agents import Agent, Reader, Step
from chaos.core import TENANT, CoreProcess, Ledger
from chaos.due_times import due_times
from chaos.job_ledger import JobKey
from chaos.profiles import MILLISECOND, SECOND
from chaos.workers import Worker
from chaos.world import World
from sidecar.core.commands import (
    ApplyJobs,
    BackfillJob,
    ClearSwitch,
    Command,
    DeleteJob,
    InterruptRun,
    JobDefinition,
    OccurrenceResolution,
    Reason,
    Refused,
    ResolveOccurrence,
    RollbackJob,
    SetSwitch,
    SwitchMode,
    TriggerJob,
)
from sidecar.core.machine import Machine
from sidecar.core.specification import (
    Canary,
    Delivery,
    DstPolicy,
    HolderLoss,
    JobSpec,
    Misfire,
    Mode,
    Overlap,
    Retry,
    Schedule,
    ScheduleKind,
)

TENANTS = (TENANT, "two")
MANUAL = Schedule(kind=ScheduleKind.MANUAL)
_CRONS = ("* * * * *", "*/2 * * * *", "0,30 * * * *", "30 2 * * *", "30 1,2 * * *", "*/7 2 * * *", "0 */2 * * *")
_ZONES = ("UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kolkata")
_KINDS = ("plain", "once", "recorded", "long", "batch", "plain")


class SpecMaker:
    """Draws specifications. How a job is delivered, how long its work takes, and whether it has records, goes by its
    name, and stays."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _one_of(self, choices: Any) -> Any:
        every = tuple(choices)
        return every[self._world.between(0, len(every) - 1)]

    def schedule(self) -> Schedule:
        world = self._world
        what = world.between(1, 20)
        if what <= 12:
            interval_ms = world.between(10, 50) * 100
            return Schedule(kind=ScheduleKind.INTERVAL, interval_ms=interval_ms, anchor_ms=world.between(0, 9_999))
        if what <= 17:
            return Schedule(
                kind=ScheduleKind.CRON,
                cron=self._one_of(_CRONS),
                zone=self._one_of(_ZONES),
                dst=self._one_of(DstPolicy),
            )
        if what == 18:
            return Schedule(kind=ScheduleKind.ONCE, at_ms=world.true_wall_ms() + world.between(-2_000, 8_000))
        if what == 19:
            start_ms = world.true_wall_ms() + world.between(-5_000, 5_000)
            end_ms = start_ms + world.between(1_000, 60_000)
            return Schedule(kind=ScheduleKind.INTERVAL, interval_ms=1_000, start_ms=start_ms, end_ms=end_ms)
        return MANUAL

    def draw(self, name: str) -> JobSpec:
        world, once = self._world, name.startswith("once")
        overlap = Overlap.ALLOW if name.startswith("batch") else self._one_of(list(Overlap)[:4])
        misfire = self._one_of(Misfire)
        starting_deadline_ms = self._one_of((2_000, 10_000, 60_000, 4 * 3_600_000))
        losses = (HolderLoss.SKIP, HolderLoss.HOLD_FOR_PERSON) if once else tuple(HolderLoss)
        return JobSpec(
            owner="sim",
            runbook_url="https://runbooks.example/sim",
            schedule=self.schedule(),
            jitter_ms=world.between(0, 1_500) if world.chance(300) else 0,
            misfire=misfire,
            catch_up_max=world.between(1, 8) if misfire is Misfire.ALL else 0,
            catch_up_window_ms=self._one_of((30_000, 600_000, 4 * 3_600_000)),
            starting_deadline_ms=starting_deadline_ms,
            overlap=overlap,
            buffer_max=world.between(1, 4),
            concurrent_max=world.between(2, 4) if overlap is Overlap.ALLOW else 1,
            timeout_ms=world.between(3_000, 8_000) if name.startswith("long") else world.between(1_000, 2_500),
            interrupt_grace_ms=world.between(100, 1_500),
            delivery=Delivery.AT_MOST_ONCE if once else Delivery.AT_LEAST_ONCE,
            on_holder_loss=self._one_of(losses),
            retry=self._retry(once=once),
            priority=world.between(-2, 2),
            selector=(("cohort", ("old", "new")),) if world.chance(100) else (),
            mode=Mode.SHADOW if world.chance(80) else Mode.LIVE,
            canary=Canary(percent=world.between(1, 99), label="cohort", value="new") if world.chance(100) else None,
            history_count=world.between(1, 12),
            history_age_ms=60_000,
        )

    def _retry(self, *, once: bool) -> Retry:
        world = self._world
        return Retry(
            attempts_max=1 if once else world.between(1, 4),
            initial_ms=world.between(1, 600),
            max_ms=1_000,
            on_failure=world.chance(800),
            on_timeout=world.chance(800),
        )


class Operator(Agent):
    """All of them. Knows what it was told, and looks at the tables of the sidecar it talks to."""

    def __init__(self, world: World, ledger: Ledger, name: str, jobs: list[JobKey]) -> None:
        super().__init__(world, ledger, name)
        self._jobs = jobs
        self._maker = SpecMaker(world)
        self._switches: list[tuple[str, str]] = []  # tenant and id of all that this operator has set
        self._deeds: tuple[tuple[int, Callable[[], Step]], ...] = (
            (14, self._edit),
            (4, self._roll_back),
            (4, self._delete),
            (14, self._trigger),
            (8, self._backfill),
            (8, self._interrupt),
            (10, self._resolve),
            (world.shape.switch_weight, self._switch),
            (world.shape.switch_weight, self._clear),
        )
        self.finished = False

    def _live(self) -> Step:
        world = self._world
        for key in self._jobs:
            yield from self._insist(lambda key=key: self._define(key))  # type: ignore[misc]
        total = sum(weight for weight, _ in self._deeds)
        while not world.calm:
            yield self._sleep(world.between(50 * MILLISECOND, 1_200 * MILLISECOND))
            ticket = world.between(1, total)
            for weight, deed in self._deeds:
                ticket -= weight
                if ticket <= 0:
                    yield from deed()
                    break
        yield self._sleep(2 * SECOND)

    def _end_life(self) -> None:
        """It does not begin again: ``tidy_up`` follows."""
        self._life += 1

    # ---- deeds ---------------------------------------------------------------------------------------------------

    def _job(self) -> JobKey:
        return self._jobs[self._world.between(0, len(self._jobs) - 1)]

    def _define(self, key: JobKey, spec: JobSpec | None = None) -> Command:
        definition = JobDefinition(tenant=key[0], name=key[1], spec=spec or self._maker.draw(key[1]))
        return ApplyJobs(jobs=(definition,), actor=self.name)

    def _edit(self) -> Step:
        """All of it, or all but its schedule."""
        key = self._job()
        drawn = self._maker.draw(key[1])
        job = yield from self._look(lambda machine: machine.job(*key))
        if job is not None and self._world.chance(500):
            drawn = replace(drawn, schedule=job.spec.schedule)
        yield from self._insist(lambda: self._define(key, drawn))

    def _roll_back(self) -> Step:
        key, to_revision = self._job(), self._world.between(0, 2)
        command = RollbackJob(tenant=key[0], name=key[1], to_revision=to_revision, actor=self.name, reason="sim")
        result = yield from self._insist(lambda: command)
        if result is not None and not isinstance(result, Refused):
            self._world.reach("job rolled back")

    def _delete(self) -> Step:
        key = self._job()
        command = DeleteJob(tenant=key[0], name=key[1], actor=self.name, reason="sim")
        yield from self._insist(lambda: command)
        yield self._sleep(self._world.between(0, 2 * SECOND))
        yield from self._insist(lambda: self._define(key))

    def _trigger(self) -> Step:
        key = self._job()
        payload = b"payload" if self._world.chance(300) else None
        result = yield from self._call(
            TriggerJob(tenant=key[0], name=key[1], actor=self.name, reason="sim", payload=payload)
        )
        self._note_off(result)

    def _backfill(self) -> Step:
        key = self._job()
        job = yield from self._look(lambda machine: machine.job(*key))
        if job is None:
            return
        until_ms = self._world.true_wall_ms()
        due = due_times(job.spec.schedule, until_ms - 3_600_000, until_ms)[-self._world.between(1, 4) :]
        if due:
            command = BackfillJob(
                tenant=key[0], name=key[1], revision=job.revision, due_ms=tuple(due), actor=self.name, reason="sim"
            )
            self._note_off((yield from self._call(command)))

    def _note_off(self, result: object) -> None:
        if isinstance(result, Refused):
            self._world.reach(f"operator refused: {result.reason.name.lower()}")

    def _interrupt(self) -> Step:
        tenant = self._job()[0]
        runs = yield from self._look(lambda machine: machine.runs(tenant, "", 0, 10))
        if runs:
            run = runs[self._world.between(0, len(runs) - 1)]
            yield from self._call(InterruptRun(tenant=tenant, run=run.run, actor=self.name, reason="sim"))

    def _resolve(self) -> Step:
        tenant, job = self._job()
        rows = yield from self._look(lambda machine: _unknown(machine, tenant, job))
        if rows:
            row = rows[self._world.between(0, len(rows) - 1)]
            resolution = list(OccurrenceResolution)[self._world.between(0, 2)]
            command = ResolveOccurrence(
                tenant=tenant, job=row.job, due_ms=row.due_ms, sequence=row.sequence, attempt=row.attempt,
                resolution=resolution, actor=self.name, reason="sim",
            )  # fmt: skip
            yield from self._call(command)

    def _switch(self) -> Step:
        world, (tenant, job) = self._world, self._job()
        scope = ("", "") if world.chance(200) else (tenant, "") if world.chance(400) else (tenant, job)
        command = SetSwitch(
            mode=list(SwitchMode)[world.between(0, 2)], actor=self.name, reason="sim", tenant=scope[0], job=scope[1],
            expires_after_ms=world.between(1_000, 4_000) if world.chance(400) else 0,
        )  # fmt: skip
        result = yield from self._call(command)
        if result is not None and not isinstance(result, Refused):
            self._switches.append((scope[0], result.switch))
            yield self._sleep(world.between(0, 2 * SECOND))
            if world.chance(700):
                yield from self._clear_one(self._switches[-1])

    def _clear(self) -> Step:
        """One of those that were ever set: often one that has ended."""
        if self._switches:
            yield from self._clear_one(self._switches[self._world.between(0, len(self._switches) - 1)])

    def _clear_one(self, which: tuple[str, str]) -> Step:
        command = ClearSwitch(tenant=which[0], switch=which[1], actor=self.name, reason="sim")
        self._note_off((yield from self._call(command)))

    # ---- the end -------------------------------------------------------------------------------------------------

    def tidy_up(self) -> None:
        self._life += 1
        self._run(self._tidy_up(), self._life)

    def _tidy_up(self) -> Step:
        keeps_pause = self._world.chance(500)
        for key in self._jobs:
            yield from self._end_schedule(key)
        switches = yield from self._insist_looking(lambda machine: machine.switches(None, False, "", 100))
        for switch in switches:
            if not (keeps_pause and switch.mode is SwitchMode.PAUSE):
                clear = ClearSwitch(tenant=switch.tenant, switch=switch.switch, actor=self.name, reason="sim")
                yield from self._insist(lambda clear=clear: clear)  # type: ignore[misc]
        self.finished = True

    def _end_schedule(self, key: JobKey) -> Step:
        """Nothing is due any more, and everybody may do what is left."""
        found = yield from self._insist_looking(lambda machine: [machine.job(*key)])
        if found[0] is not None:
            spec = replace(found[0].spec, schedule=MANUAL, canary=None)
            yield from self._insist(lambda: self._define(key, spec))

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _insist(self, command: Callable[[], Command]) -> Step:
        """As the services do: again after a moment, while due times of the present schedule are not settled."""
        built, key = command(), self._new_key()
        result: Any = None
        for _ in range(40 if self._world.calm else 10):
            result = yield from self._call(built, key=key)
            if isinstance(result, Refused) and result.reason is Reason.JOB_BEHIND:
                self._world.reach("schedule change waited for settlement")
                yield self._sleep(result.retry_delay_ms * MILLISECOND)
            elif result is not None or not self._world.calm:
                break
            else:
                key = self._new_key()
        return result

    def _look(self, look: Callable[[Machine], Any]) -> Step:
        """None when there is no answer."""

        def ask(process: CoreProcess, done: Callable[[Any], None]) -> None:
            done(look(process.machine))

        home = self._home
        found = yield lambda done: self._send(home, ask, 200, done)
        if found is None and self._world.chance(300):
            self._home = self._any_host()
        return found

    def _insist_looking(self, look: Callable[[Machine], Any]) -> Step:
        found = None
        while found is None:
            found = yield from self._look(look)
            yield self._sleep(200 * MILLISECOND)
        return found


def _unknown(machine: Machine, tenant: str, job: str) -> list[Any]:
    held = machine.held(tenant, 5)
    return held or [row for row in machine.occurrences(tenant, job, None, 50) if row.state.name == "UNKNOWN"]


class JobPopulation:
    """All who live in a world with jobs."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        shape = world.shape
        names = [f"{_KINDS[number % len(_KINDS)]}{number}" for number in range(shape.job_count)]
        jobs = [(TENANTS[number % 3 == 2], name) for number, name in enumerate(names)]
        self._operators = [
            Operator(world, ledger, f"o{number + 1}", jobs[number::2]) for number in range(min(2, len(jobs)))
        ]
        self._workers: list[Worker] = []
        for number in range(shape.workers):
            tenant = TENANTS[number % 3 == 2]
            served = tuple(name for owner, name in jobs if owner == tenant)
            patterns = served if world.chance(500) else ("*",)
            self._workers.append(Worker(world, ledger, f"w{number + 1}", tenant, patterns))
        self._others = [Agent(world, ledger, f"a{number + 1}") for number in range(shape.agents)]
        self._world = world

    def start(self) -> None:
        for each in (*self._operators, *self._workers, *self._others):
            each.start()
        Reader(self._world).start()

    def tidy_up(self) -> None:
        for operator in self._operators:
            operator.tidy_up()

    def tidy(self) -> bool:
        return all(operator.finished for operator in self._operators)

    def leave(self) -> None:
        for worker in self._workers:
            worker.leaving = True
