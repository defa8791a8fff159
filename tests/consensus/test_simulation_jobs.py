"""The profiles with scheduled jobs: clean on the product, and their checks bite, on histories made up here and on
mistakes put into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.checkers import Checkers
from chaos.core import CoreProcess
from chaos.due_times import due_times
from chaos.job_ledger import STALENESS_US, JobLedger, RunBelief
from chaos.profiles import MILLISECOND, PROFILES, SECOND, Shape
from chaos.simulation import simulate
from chaos.workers import Worker
from chaos.world import World
from sidecar.core.commands import (
    AppliedJob,
    ApplyJobs,
    ClearSwitch,
    Command,
    DeleteJob,
    Done,
    Due,
    JobChange,
    JobDefinition,
    JobsApplied,
    Missed,
    Request,
    Result,
    ServeJobs,
    SetSwitch,
    SettleDue,
    Settlement,
    Stamp,
    SwitchIsSet,
    SwitchMode,
    Tick,
)
from sidecar.core.events import Event, Kind
from sidecar.core.governor import Governor
from sidecar.core.jobs import Jobs
from sidecar.core.occurrences import Occurrences
from sidecar.core.runs import Runs
from sidecar.core.specification import (
    Delivery,
    DstPolicy,
    HolderLoss,
    JobSpec,
    Mode,
    Overlap,
    Retry,
    Schedule,
    ScheduleKind,
)
from sidecar.core.switches import Switches
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.schedules import compile_schedule
from sidecar.services.feed import RunFeed

JOBS = ("jobs", "jobs-clock", "jobs-wrong-clock", "jobs-kill")

# ---- the product --------------------------------------------------------------------------------------


def test_a_campaign_comes_to_where_bugs_of_jobs_live() -> None:
    reached: dict[str, int] = {}
    for profile in JOBS:
        for seed in range(6):
            outcome = simulate(profile, seed)
            assert not outcome.violations, (profile, seed, outcome.violations)
            for what, count in outcome.reached.items():
                reached[what] = reached.get(what, 0) + count
    wanted = [
        "agent crashed in the middle of a run",
        "created: backfill",
        "created: catch_up",
        "created: schedule",
        "created: trigger",
        "ended: cancelled killed",
        "ended: missed starting_deadline",
        "ended: skipped killed",
        "ended: skipped overlap",
        "ended: skipped paused",
        "ended: skipped shadow",
        "ended: succeeded after_interrupt:timeout",
        "ended: unknown holder_lost",
        "interrupted: killed",
        "interrupted: overlap",
        "interrupted: timeout",
        "job deleted",
        "job rolled back",
        "missed: catch_up_window",
        "missed: misfire_latest",
        "missed: misfire_skip",
        "resolved: retry",
        "run claimed",
        "run ended: interrupted without acknowledgement",
        "run ended: lost",
        "run lost by its holder",
        "run lost by its holder's own clock",
        "schedule change waited for settlement",
        "schedule edited",
        "settlement passed over",
        "start rate reached",
        "switch expired",
        "switch replaced",
        "work stopped because nothing is known of switches",
    ]
    assert [what for what in wanted if what not in reached] == []


# ---- due times, the slow way ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(DstPolicy))
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe"])
def test_two_ways_to_compute_due_times_agree_around_clock_changes(zone: str, policy: DstPolicy) -> None:
    for change_s in (1_710_054_000, 1_730_613_600, 1_711_846_800, 1_729_990_800, 1_712_415_600, 1_728_142_200):
        for cron in ("*/7 * * * *", "30 2 * * *", "30 1,2 * * *", "*/7 2 * * *", "0 */2 * * *"):
            schedule = Schedule(kind=ScheduleKind.CRON, cron=cron, zone=zone, dst=policy)
            after_ms, until_ms = (change_s - 6 * 3_600) * 1_000, (change_s + 6 * 3_600) * 1_000
            found = due_times(schedule, after_ms, until_ms)
            assert found == compile_schedule(schedule).due(after_ms, until_ms, 10_000)


# ---- made-up histories ----------------------------------------------------------------------------------

WALL_MS = 1_700_000_000_000
EVERY_SECOND = Schedule(kind=ScheduleKind.INTERVAL, interval_ms=1_000)
SPEC = JobSpec(owner="sim", runbook_url="https://r", schedule=EVERY_SECOND, starting_deadline_ms=5_000)


class History:
    """Writes a history, and has it judged."""

    def __init__(self, *, shape: Shape | None = None) -> None:
        self.world = World(0, shape or Shape(starts_per_second=2))
        self.world.now_us = 10 * SECOND
        self.world.checkers = Checkers(self.world)
        self.ledger = JobLedger(self.world)
        self.cluster_ms = 5_000
        self._revision = 0

    @property
    def found(self) -> list[str]:
        return list(self.world.checkers.violations)

    def happens(self, command: Command, *events: Event, result: Result | None = None, wall_ms: int = WALL_MS) -> None:
        stamp = Stamp(self.cluster_ms, wall_ms)
        self.ledger.applied("n1", stamp, Request(command=command), result or Done(), events)

    def event(self, kind: Kind, due_ms: int = 0, **fields: Any) -> Event:
        self._revision += 1
        fields = {"subject": "j", "tenant": "t"} | fields
        return Event(
            revision=self._revision, kind=kind, cluster_ms=self.cluster_ms, wall_ms=WALL_MS, due_ms=due_ms, **fields
        )

    # -- in short

    def job(self, spec: JobSpec = SPEC, revision: int = 1, wall_ms: int = WALL_MS) -> None:
        change = JobChange.CREATED if revision == 1 else JobChange.CHANGED
        event = self.event(Kind.JOB_APPLIED, sequence=revision, cause=change.name.lower())
        command = ApplyJobs(jobs=(JobDefinition(tenant="t", name="j", spec=spec),), actor="a")
        applied = JobsApplied(jobs=(AppliedJob("t", "j", change, revision),), revision=event.revision)
        self.happens(command, event, result=applied, wall_ms=wall_ms)

    def settle(
        self, seconds: int, *due: int, missed: tuple[Event, ...] = (), from_s: int = 0, revision: int = 1
    ) -> None:
        """``due`` in seconds."""
        events = [self.event(Kind.OCCURRENCE_CREATED, WALL_MS + at_s * 1_000, cause="schedule") for at_s in due]
        settlement = Settlement(
            tenant="t",
            name="j",
            revision=revision,
            settled_ms=WALL_MS + from_s * 1_000,
            through_ms=WALL_MS + seconds * 1_000,
            next_due_ms=WALL_MS + (seconds + 1) * 1_000,
            due=tuple(Due(each.due_ms) for each in events),
            missed=tuple(Missed(each.due_ms, each.due_ms, each.count, each.reason) for each in missed),
        )
        self.happens(SettleDue(settlements=(settlement,)), *missed, *events, wall_ms=settlement.through_ms)

    def missed(self, at_s: int, count: int) -> Event:
        return self.event(Kind.OCCURRENCE_MISSED, WALL_MS + at_s * 1_000, count=count, reason="misfire_skip")

    def trigger(self, sequence: int = 7, **fields: Any) -> None:
        self.happens(Tick(), self.event(Kind.OCCURRENCE_CREATED, WALL_MS, sequence=sequence, cause="trigger", **fields))

    def assign(self, token: int, sequence: int = 7, attempt: int = 1, session: str = "s1") -> None:
        event = self.event(
            Kind.RUN_ASSIGNED,
            WALL_MS,
            sequence=sequence,
            session=session,
            token=token,
            attempt=attempt,
            run=f"r{token}",
        )
        self.happens(Tick(), event)

    def worker(self, session: str = "s1", slots: int = 9) -> None:
        self.happens(ServeJobs(tenant="t", session=session, jobs=("*",), slots=slots))

    def run_ends(self, token: int, sequence: int = 7, reason: str = "") -> Event:
        return self.event(
            Kind.RUN_ENDED, WALL_MS, sequence=sequence, run=f"r{token}", cause="succeeded", reason=reason, token=token
        )

    def ends(self, outcome: str, sequence: int = 7, reason: str = "") -> Event:
        return self.event(Kind.OCCURRENCE_ENDED, WALL_MS, sequence=sequence, cause=outcome, reason=reason)

    def switch(self, mode: SwitchMode, *events: Event) -> None:
        event = self.event(Kind.SWITCH_SET, subject="k1", cause=mode.name.lower())
        command = SetSwitch(mode=mode, actor="a", reason="r", tenant="t", job="j")
        self.happens(command, event, *events, result=SwitchIsSet(switch="k1", replaced="", revision=1))

    def running(self, spec: JobSpec = SPEC) -> None:
        self.job(spec)
        self.worker()
        self.trigger()
        self.assign(1)

    def believes(self, agent: str, token: int) -> None:
        self.ledger.believe(("t", "j"), f"r{token}", RunBelief(agent, token, lambda: 20 * SECOND))


def _a_due_time_without_a_trace(h: History) -> None:
    h.job()
    h.settle(3, 1, 3)


def _a_due_time_twice(h: History) -> None:
    h.job()
    h.settle(3, 1, 2, 3, missed=(h.missed(2, 2),))


def _a_due_time_that_is_none(h: History) -> None:
    h.job(replace(SPEC, schedule=replace(EVERY_SECOND, interval_ms=2_000)))
    h.settle(3, 2, 3)


def _a_missed_range_that_is_too_long(h: History) -> None:
    h.job()
    h.settle(2, missed=(h.missed(2, 3),))


def _an_occurrence_out_of_nothing(h: History) -> None:
    h.job()
    h.happens(Tick(), h.event(Kind.OCCURRENCE_CREATED, WALL_MS + 1_000, cause="schedule"))


def _an_edit_over_due_times(h: History) -> None:
    h.job()
    h.job(replace(SPEC, schedule=replace(EVERY_SECOND, anchor_ms=3)), revision=2, wall_ms=WALL_MS + 1_000)


def _a_deletion_over_due_times(h: History) -> None:
    h.job()
    command = DeleteJob(tenant="t", name="j", actor="a", reason="r")
    h.happens(command, h.event(Kind.JOB_DELETED, sequence=1), wall_ms=WALL_MS + 2_500)


def _settled_before_its_time(h: History) -> None:
    h.world.epoch_us, h.world.wall_error_max_ms = WALL_MS * 1_000 - 20 * SECOND, 12_000
    h.job()
    h.settle(3, 1, 2, 3)


def _begins_hours_from_now(h: History) -> None:
    h.world.epoch_us, h.world.wall_error_max_ms = WALL_MS * 1_000 - 20 * SECOND, 12_000
    h.job(wall_ms=WALL_MS + 3_600_000)


def _created_again(h: History) -> None:
    h.job()
    h.trigger()
    h.trigger()


def _two_outcomes(h: History) -> None:
    h.job()
    h.trigger()
    h.happens(Tick(), h.ends("failed"))
    h.happens(Tick(), h.ends("cancelled"))


def _a_failure_that_is_resolved(h: History) -> None:
    h.job()
    h.trigger()
    h.happens(Tick(), h.ends("failed"))
    h.happens(Tick(), h.event(Kind.OCCURRENCE_RESOLVED, WALL_MS, sequence=7, cause="succeeded"))


def _a_run_of_what_was_skipped(h: History) -> None:
    h.job()
    h.worker()
    h.trigger()
    h.happens(Tick(), h.ends("skipped", reason="paused k1"))
    h.assign(1)


def _an_end_while_it_runs(h: History) -> None:
    h.running()
    h.happens(Tick(), h.ends("cancelled"))


def _two_at_a_time(h: History) -> None:
    h.running()
    h.trigger(8)
    h.assign(2, 8)


def _a_token_that_is_smaller(h: History) -> None:
    h.running(replace(SPEC, overlap=Overlap.ALLOW, concurrent_max=2))
    h.trigger(8)
    h.assign(1, 8)


def _three_in_a_second(h: History) -> None:
    h.job(replace(SPEC, overlap=Overlap.ALLOW, concurrent_max=5))
    h.worker()
    for token in (1, 2, 3):
        h.trigger(token)
        h.assign(token, token)
        h.cluster_ms += 499


def _a_start_after_the_deadline(h: History) -> None:
    h.job()
    h.worker()
    h.trigger()
    h.cluster_ms += 5_001
    h.assign(1)


def _an_attempt_is_left_out(h: History) -> None:
    h.job()
    h.worker()
    h.trigger()
    h.assign(1, attempt=2)


def _a_second_attempt_of_what_is_delivered_once(h: History) -> None:
    once = replace(SPEC, delivery=Delivery.AT_MOST_ONCE, on_holder_loss=HolderLoss.SKIP, retry=Retry(attempts_max=1))
    h.running(once)
    h.happens(Tick(), h.run_ends(1))


def _a_shadow_that_runs(h: History) -> None:
    h.running(replace(SPEC, mode=Mode.SHADOW))


def _to_one_who_serves_something_else(h: History) -> None:
    h.job()
    h.happens(ServeJobs(tenant="t", session="s1", jobs=("k", "l*"), slots=1))
    h.trigger()
    h.assign(1)


def _to_one_who_has_no_slot(h: History) -> None:
    h.job()
    h.worker(slots=0)
    h.trigger()
    h.assign(1)


def _of_one_whose_session_has_ended(h: History) -> None:
    h.running()
    h.happens(Tick(), h.event(Kind.SESSION_EXPIRED, subject="s1", session="s1"))


def _to_one_without_the_label(h: History) -> None:
    h.job(replace(SPEC, selector=(("cohort", ("new",)),)))
    h.worker()
    h.trigger()
    h.assign(1)


def _a_start_under_a_pause(h: History) -> None:
    h.running()
    h.happens(Tick(), h.run_ends(1))
    h.switch(SwitchMode.PAUSE)
    h.assign(2, attempt=2)


def _what_waits_is_not_skipped(h: History) -> None:
    h.job()
    h.trigger()
    h.switch(SwitchMode.DRAIN)


def _a_retry_survives_a_kill(h: History) -> None:
    h.running()
    h.happens(Tick(), h.run_ends(1))
    h.switch(SwitchMode.KILL)


def _a_kill_leaves_a_run_alone(h: History) -> None:
    h.running()
    h.switch(SwitchMode.KILL)


def _acts_long_after_a_kill(h: History) -> None:
    h.running()
    h.switch(SwitchMode.KILL, h.event(Kind.RUN_INTERRUPTED, WALL_MS, sequence=7, run="r1", cause="killed"))
    h.world.now_us += STALENESS_US + 400_000
    assert h.ledger.effects.write("a1", "r1", 0, 300_000)


def _two_agents_run_it(h: History) -> None:
    h.running(replace(SPEC, retry=Retry(attempts_max=9)))
    h.believes("a1", 1)
    h.happens(Tick(), h.run_ends(1))
    h.assign(2, attempt=2)
    h.believes("a2", 2)


def _an_older_checkpoint(h: History) -> None:
    h.running()
    h.ledger.told_checkpoint("a1", "r1", b"2")


def _no_effect(h: History) -> None:
    h.running()
    h.happens(Tick(), h.run_ends(1), h.ends("succeeded"))


def _half_an_effect(h: History) -> None:
    h.running()
    assert h.ledger.effects.write("a1", "r1", 0, 0)
    h.happens(Tick(), h.run_ends(1), h.ends("succeeded"))


def _an_effect_after_the_success(h: History) -> None:
    h.running()
    for part in (0, 1, 2):
        assert h.ledger.effects.write("a1", "r1", part, 0)
    h.happens(Tick(), h.run_ends(1), h.ends("succeeded"))
    assert h.ledger.effects.write("a1", "r1", 2, 0)


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (_a_due_time_without_a_trace, "due-lost"),
        (_a_due_time_twice, "due-doubled"),
        (_a_due_time_that_is_none, "due-invented"),
        (_a_missed_range_that_is_too_long, "due-invented"),
        (_an_occurrence_out_of_nothing, "due-invented"),
        (_an_edit_over_due_times, "due-lost"),
        (_a_deletion_over_due_times, "due-lost"),
        (_settled_before_its_time, "fired-early"),
        (_begins_hours_from_now, "silenced"),
        (_created_again, "created-twice"),
        (_two_outcomes, "outcome-changed"),
        (_a_failure_that_is_resolved, "outcome-changed"),
        (_a_run_of_what_was_skipped, "ran-after-end"),
        (_an_end_while_it_runs, "ended-while-running"),
        (_two_at_a_time, "overlap"),
        (_a_token_that_is_smaller, "run-token"),
        (_three_in_a_second, "start-rate"),
        (_a_start_after_the_deadline, "late-start"),
        (_an_attempt_is_left_out, "attempts"),
        (_a_second_attempt_of_what_is_delivered_once, "attempts"),
        (_a_shadow_that_runs, "shadow-run"),
        (_to_one_who_serves_something_else, "wrong-worker"),
        (_to_one_who_has_no_slot, "wrong-worker"),
        (_to_one_without_the_label, "wrong-worker"),
        (_of_one_whose_session_has_ended, "run-of-the-dead"),
        (_a_start_under_a_pause, "started-while-off"),
        (_what_waits_is_not_skipped, "pending-while-off"),
        (_a_retry_survives_a_kill, "pending-while-off"),
        (_a_kill_leaves_a_run_alone, "not-interrupted"),
        (_acts_long_after_a_kill, "acted-after-kill"),
        (_two_agents_run_it, "two-runs"),
        (_an_older_checkpoint, "checkpoint"),
        (_no_effect, "effect-never"),
        (_half_an_effect, "effect-partial"),
        (_an_effect_after_the_success, "effect-twice"),
    ],
)
def test_a_bad_history_is_called_by_its_name(history: Callable[[History], None], kind: str) -> None:
    h = History()
    history(h)
    assert h.found == [kind]


def test_a_good_history_is_not_called_anything() -> None:
    h = History()
    h.job()
    h.worker()
    h.settle(4, 3, 4, missed=(h.missed(2, 2),))
    h.settle(4)  # a repeat is passed over
    h.trigger()
    h.assign(1)
    h.believes("a1", 1)
    for part in (0, 1, 2):
        assert h.ledger.effects.write("a1", "r1", part, 0)
    h.ledger.disbelieve(("t", "j"), 1)
    h.happens(Tick(), h.run_ends(1), h.ends("succeeded"))
    assert h.found == []


def test_a_store_refuses_a_token_that_is_older_than_one_it_has_seen() -> None:
    h = History()
    h.running()
    h.happens(Tick(), h.run_ends(1, reason="timeout: no acknowledgement"))
    h.assign(2, attempt=2)
    assert h.ledger.effects.open("r2")
    assert not h.ledger.effects.write("a1", "r1", 0, 0)
    assert h.found == []


# ---- mistakes put in ------------------------------------------------------------------------------------


QUIET_JOBS = dataclasses.replace(
    PROFILES["jobs-kill"],
    shape=dataclasses.replace(PROFILES["jobs-kill"].shape, faults=(), switch_weight=0),
    swarm=False,
)


def cut_off_and_kill(world: World) -> None:
    """Whenever a long run goes on at a follower: that follower is cut off from the others, and the fleet is killed."""

    def look() -> None:
        if world.calm:
            return
        leader = next((host for host in world.hosts.values() if host.process and host.process.is_leader()), None)
        process = None if leader is None else leader.process
        where = _follower_with_a_long_run(process) if isinstance(process, CoreProcess) else ""
        if leader is None or not where or where == leader.name:
            world.after(50 * MILLISECOND, look)
            return
        others = [name for name in world.hosts if name != where]
        mend = world.network.partition([*((where, name) for name in others), *((name, where) for name in others)])
        leader.enter(lambda: _kill_for_a_while(world, process))
        world.after(6 * SECOND, mend)
        world.after(9 * SECOND, look)

    world.after(3 * SECOND, look)


def _follower_with_a_long_run(process: CoreProcess) -> str:
    for run in process.machine.runs("sim", "", 0, 100):
        session = process.machine.session(run.session)
        if run.job.startswith("long") and session is not None and session.ttl_ms > 4_000:
            return session.node
    return ""


def _kill_for_a_while(world: World, process: Any) -> None:
    def killed(result: Any) -> None:
        if isinstance(result, SwitchIsSet):
            clear = ClearSwitch(tenant="", switch=result.switch, actor="a", reason="over")
            world.after(4 * SECOND, lambda: process.submit(clear, None, 5_000, lambda _: None))

    process.submit(SetSwitch(mode=SwitchMode.KILL, actor="a", reason="r"), None, 2_000, killed)


def caught(kinds: set[str], seeds: int, *profiles: str) -> bool:
    """Whether a seed of one of the profiles shows one of them; stops at the first that does."""
    for seed in range(seeds):
        for profile in profiles:
            if kinds & {violation.kind for violation in simulate(profile, seed).violations}:
                return True
    return False


def test_settlements_that_are_not_compared_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Jobs.settle

    def settle_anyway(self: Jobs, settlement: Settlement) -> Any:
        job = self.table.get((settlement.tenant, settlement.name))
        if job is None:
            return None
        return settle(self, replace(settlement, revision=job.revision, settled_ms=job.settled_ms))

    monkeypatch.setattr(Jobs, "settle", settle_anyway)
    assert caught({"due-invented", "due-doubled", "due-lost"}, 20, "jobs", "jobs-clock")


def test_edits_that_wait_for_no_settlement_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "_behind", lambda self, job, schedule: None)
    assert caught({"due-lost"}, 20, "jobs", "jobs-clock")


def test_a_plan_that_forgets_a_due_time_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Occurrences.settle

    def forgetful(self: Occurrences, command: SettleDue) -> Any:
        fewer = tuple(
            replace(each, due=each.due[1:] if len(each.due) > 1 else each.due) for each in command.settlements
        )
        return settle(self, replace(command, settlements=fewer))

    monkeypatch.setattr(Occurrences, "settle", forgetful)
    assert caught({"due-lost"}, 20, "jobs", "jobs-clock")


def test_a_leader_that_trusts_its_clock_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_distrust", lambda self, now_s: "")
    assert caught({"fired-early"}, 10, "jobs-wrong-clock")


def create_under_a_wrong_clock(world: World) -> None:
    """The leader's clock is an hour ahead; two seconds later a job is created there."""

    def set_clock() -> None:
        leader = next(host for host in world.hosts.values() if host.process and host.process.is_leader())
        leader.clock.set_wall(leader.clock.wall_us() + 3_600 * SECOND)
        world.wall_changed_us, world.wall_error_max_ms = world.now_us, 12_000
        definition = JobDefinition(tenant="sim", name="plain99", spec=SPEC)
        command = ApplyJobs(jobs=(definition,), actor="a")
        process: Any = leader.process
        world.after(2 * SECOND, lambda: leader.enter(lambda: process.submit(command, None, 5_000, lambda _: None)))

    world.after(6 * SECOND, set_clock)


def test_a_leader_that_stays_with_a_wrong_clock_stamps_the_time_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_hand_over", lambda self, offsets: None)
    found = {each.kind for each in simulate(QUIET_JOBS, 1, script=create_under_a_wrong_clock).violations}
    assert "silenced" not in found
    monkeypatch.setattr(Scheduler, "wall_ms", lambda self: self._clock.wall_ms())
    found = {each.kind for each in simulate(QUIET_JOBS, 1, script=create_under_a_wrong_clock).violations}
    assert "silenced" in found


def test_an_occurrence_that_is_assigned_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays ready after its run has begun."""
    monkeypatch.setattr(
        Occurrences, "may_start", lambda self, line, retrying: self._jobs.table.get(line.key) is not None
    )
    assert caught({"overlap", "two-runs", "started-while-off"}, 10, *JOBS)


def test_a_run_that_is_lost_before_its_session_has_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each checkpoint of another run, a session loses what else it holds."""
    checkpoint = Runs.checkpoint

    def lose_others(self: Runs, command: Any) -> Any:
        result = checkpoint(self, command)
        for run in self.of_session(command.session):
            if run.run != command.run and not run.interrupt_cause:
                self._lose(run)
        return result

    monkeypatch.setattr(Runs, "checkpoint", lose_others)
    assert caught({"two-runs", "effect-twice"}, 60, *JOBS)


def test_a_start_rate_that_counts_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Governor, "note", lambda self: None)
    assert caught({"start-rate"}, 30, *JOBS)


def test_a_start_rate_that_a_snapshot_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Governor.__init__
    monkeypatch.setattr(Governor, "__init__", lambda self, context, started: init(self, context, ()))
    assert caught({"start-rate", "digest"}, 20, *JOBS)


def test_a_kill_that_interrupts_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "kill", lambda self, key, switch: None)
    assert caught({"not-interrupted"}, 10, "jobs-kill")


def test_a_switch_that_skips_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Occurrences, "switched_off", lambda self, key: None)
    assert caught({"pending-while-off"}, 20, "jobs-kill")


def test_a_switch_that_a_snapshot_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Switches.__init__

    def forgetful(self: Switches, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **(keywords | {"switches": []}))

    monkeypatch.setattr(Switches, "__init__", forgetful)
    assert caught({"started-while-off", "pending-while-off", "digest"}, 10, "jobs-kill")


def test_who_is_cut_off_from_a_kill_stops_by_its_own_clock() -> None:
    reached: dict[str, int] = {}
    for seed in range(5):
        outcome = simulate(QUIET_JOBS, seed, script=cut_off_and_kill)
        assert not outcome.violations, (seed, outcome.violations)
        for what, count in outcome.reached.items():
            reached[what] = reached.get(what, 0) + count
    assert reached["work stopped because nothing is known of switches"] > 0
    assert reached["interrupted: killed"] > 0


def test_interrupts_that_are_not_told_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = RunFeed.noticed

    def only_given(self: RunFeed, event: Event) -> None:
        if event.kind is Kind.RUN_ASSIGNED:
            noticed(self, event)

    monkeypatch.setattr(RunFeed, "noticed", only_given)
    assert caught({"acted-after-kill"}, 40, "jobs-kill")


def test_an_agent_that_works_on_without_news_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fail closed: a safe session is enough for it."""
    monkeypatch.setattr(Worker, "_is_fresh", lambda self: True)
    assert any(
        "acted-after-kill" in {each.kind for each in simulate(QUIET_JOBS, seed, script=cut_off_and_kill).violations}
        for seed in range(10)
    )


def test_a_checkpoint_that_is_not_handed_on_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    retry = Occurrences.retry
    monkeypatch.setattr(
        Occurrences,
        "retry",
        lambda self, row, wait_ms, **options: retry(self, replace(row, checkpoint=b""), wait_ms, **options),
    )
    assert caught({"checkpoint"}, 30, *JOBS)


def test_a_session_that_ends_without_its_runs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "end_session", lambda self, session: self.workers.pop(session, None) and None)
    assert caught({"run-of-the-dead"}, 5, *JOBS)


def test_history_that_is_not_trimmed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Occurrences, "_trim", lambda self, key: None)
    assert caught({"history"}, 5, *JOBS)
