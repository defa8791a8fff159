"""What must hold of jobs, occurrences, runs and switches, judged from outside: by commands, results, events and reads.

A judge knows nothing of how the machine decides. It keeps its own account of what was announced, and after every
command holds the machine's tables against it. Any sequence of commands can be judged, so a failure can be cut down to
the commands that matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from sidecar.core import commands as c
from sidecar.core import specification as s
from sidecar.core.events import Event, Kind
from sidecar.core.jobs import Job
from sidecar.core.machine import Machine
from sidecar.core.occurrences import ENDED, Occurrence, OccurrenceState
from sidecar.core.runs import Run
from sidecar.core.sessions import Session
from tests.core.derived import check_derived, restored

JobKey = tuple[str, str]
Key = tuple[str, str, int, int]
Step = tuple[c.Stamp, c.Request]

T = TypeVar("T")

ALL = 1_000_000
BY_SCHEDULE = ("schedule", "catch_up")
OUTCOMES = ("succeeded", "failed", "skipped", "missed", "cancelled", "unknown")


@dataclass
class OpenRun:
    key: Key
    session: str
    token: int
    claimed: bool
    interrupted: str = ""


@dataclass
class Account:
    """Of one occurrence, as the events tell it."""

    attempts: int = 0
    ended: bool = False
    resolved: bool = False
    orphaned: bool = False  # its job was deleted
    once_under: int = 0  # the revision of the job that said at most once when it was last started


@dataclass
class Judge:
    limits: c.Limits
    log: list[Step] = field(default_factory=list)
    answered: dict[c.RequestKey, int] = field(default_factory=dict)
    open: dict[str, OpenRun] = field(default_factory=dict)
    accounts: dict[Key, Account] = field(default_factory=dict)
    # Of each job as long as it exists: the due times that have become something, in order.
    settled: dict[JobKey, list[int]] = field(default_factory=dict)
    totals: dict[JobKey, dict[str, int]] = field(default_factory=dict)
    deleted: dict[JobKey, None] = field(default_factory=dict)
    ended: dict[Key, Occurrence] = field(default_factory=dict)
    serves: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    switches: dict[str, tuple[str, str, c.SwitchMode]] = field(default_factory=dict)
    # Of every switch since the wall clock last stepped back: its scope, when it was set and ended (0: it has not).
    spans: dict[str, tuple[str, str, int, int]] = field(default_factory=dict)
    # By scope: the epoch of its last kill, and the epoch under which each run was given out.
    floors: dict[JobKey, int] = field(default_factory=dict)
    kills: int = 0
    wall_ms: int = 0
    last_token: int = 0
    known: dict[tuple[str, str, int], None] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine, self.shadow = Machine(self.limits), Machine(self.limits)

    # ---- the way in ------------------------------------------------------------------------------------------------

    def apply(self, stamp: c.Stamp, request: c.Request) -> c.Result:
        """To the machine, and to the one that is restored now and then: all must be the same, and right."""
        self.log.append((stamp, request))
        self.command = request.command
        expected = self.expected(request.command)
        result, events = self.machine.apply(stamp, request)
        again, events_again = self.shadow.apply(stamp, request)
        assert (result, list(events)) == (again, list(events_again))
        self.result = result
        self.now_ms = self.machine.stamp.cluster_ms
        if stamp.wall_ms < self.wall_ms:
            self.spans.clear()
        self.wall_ms = stamp.wall_ms
        self.heed(request, result, events)
        for event in events:
            self.see(event)
        self.check_settled(events, expected)
        self.check_rows()
        self.check_runs()
        self.check_time()
        return result

    def restore(self) -> None:
        check_derived(self.machine)
        self.shadow = restored(self.shadow)
        assert self.shadow.digest() == self.machine.digest()

    def heed(self, request: c.Request, result: c.Result, events: Sequence[Event]) -> None:
        """What is not in any event; a repeat does nothing."""
        command, again = request.command, False
        if request.key is not None:
            answered_ms = self.answered.get(request.key)
            again = answered_ms is not None and self.now_ms < answered_ms + self.machine.limits.request_retention_ms
            if not again:
                self.answered[request.key] = self.now_ms
        if isinstance(command, c.ServeJobs) and isinstance(result, c.Done) and not again:
            self.serves[command.session] = (command.jobs, command.slots)
        if isinstance(command, c.SetSwitch) and any(event.kind is Kind.SWITCH_SET for event in events):
            assert isinstance(result, c.SwitchIsSet)
            self.switches[result.switch] = (command.tenant, command.job, command.mode)
            if command.mode is c.SwitchMode.KILL:
                self.kills += 1
                self.floors[(command.tenant, command.job)] = self.kills
        assert self.machine.kill_epoch == self.kills

    # ---- due times -------------------------------------------------------------------------------------------------

    def expected(self, command: c.Command) -> list[c.Settlement]:
        """The settlements that fit: those that continue exactly where the job is."""
        if not isinstance(command, c.SettleDue):
            return []
        found = []
        self.known = {}
        at: dict[JobKey, tuple[int, int]] = {}
        for settlement in command.settlements:
            name = (settlement.tenant, settlement.name)
            job = self.machine.job(*name)
            if job is None:
                continue
            if at.get(name, (job.revision, job.settled_ms)) == (settlement.revision, settlement.settled_ms):
                at[name] = (settlement.revision, settlement.through_ms)
                found.append(settlement)
                times = [due.due_ms for due in settlement.due] + [gone.last_due_ms for gone in settlement.missed]
                self.known |= {(*name, each): None for each in times if self.machine.occurrence(*name, each, 0)}
        return found

    def check_settled(self, events: Sequence[Event], expected: list[c.Settlement]) -> None:
        """Each due time of what fitted became one thing, and nothing came of what did not fit.

        Except what is known already from a deleted job of the same name, when the clock has stepped back since.
        """
        created = [
            (event.tenant, event.subject, event.due_ms)
            for event in events
            if (event.kind is Kind.OCCURRENCE_CREATED and event.cause in BY_SCHEDULE) or is_no_room(event)
        ]
        missed = [
            (event.tenant, event.subject, event.due_ms, event.count)
            for event in events
            if event.kind is Kind.OCCURRENCE_MISSED and not is_no_room(event)
        ]
        wanted = [(one.tenant, one.name, due.due_ms) for one in expected for due in one.due]
        assert left_out(created, wanted) <= self.known.keys(), "occurrences that were created"
        ranges = [(one.tenant, one.name, gone.last_due_ms, gone.count) for one in expected for gone in one.missed]
        assert {gone[:3] for gone in left_out(missed, ranges)} <= self.known.keys(), "ranges that were missed"
        for one in expected:
            times = sorted([due.due_ms for due in one.due] + [gone.last_due_ms for gone in one.missed])
            all_of_it = self.settled.setdefault((one.tenant, one.name), [])
            all_of_it.extend(times)
            assert all(a < b for a, b in pairwise(all_of_it)), f"due times of {one.name}: {all_of_it}"
            for due_ms in times:
                self.check_explained(one.tenant, one.name, due_ms)

    def check_explained(self, tenant: str, name: str, due_ms: int) -> None:
        rows = self.machine.occurrences_at(tenant, name, due_ms)
        scheduled = [row for row in rows if row.sequence == 0]
        assert len(scheduled) <= 1 or (tenant, name) in self.deleted, scheduled
        job = self.machine.job(tenant, name)
        # Else the history may be too short for it, or the table too small.
        roomy = self.limits.occurrences_max > 1_000
        if (
            roomy
            and job is not None
            and len(self.machine.occurrences(tenant, name, None, ALL)) < job.spec.history_count
        ):
            assert scheduled, f"nothing is known of {name} at {due_ms}"

    # ---- events ----------------------------------------------------------------------------------------------------

    def see(self, event: Event) -> None:
        key = (event.tenant, event.subject, event.due_ms, event.sequence)
        if event.token and event.kind in (Kind.LEASE_GRANTED, Kind.RUN_ASSIGNED):
            assert event.token > self.last_token, "a token that does not grow"
            self.last_token = event.token
        match event.kind:
            case Kind.OCCURRENCE_CREATED:
                before = self.accounts.get(key)
                assert before is None or (before.orphaned and before.ended), f"{key} was created before"
                self.accounts[key] = Account()
                self.ended.pop(key, None)
            case Kind.OCCURRENCE_MISSED:
                self.count(event, "missed", event.count)
                self.ended.pop(key, None)  # of a deleted job, forgotten since: check_settled sees every other one
            case Kind.OCCURRENCE_ENDED:
                account = self.accounts.setdefault(key, Account())
                assert not account.ended, f"{key} ended twice"
                account.ended = True
                self.count(event, event.cause, 1)
            case Kind.OCCURRENCE_RESOLVED:
                account = self.accounts[key]
                account.resolved, account.ended = True, event.cause != "retry"
                self.ended.pop(key, None)
                self.count(event, "unknown", -1)
                self.count(event, event.cause, 1)
            case Kind.RUN_ASSIGNED:
                self.see_assigned(event, key)
            case Kind.RUN_INTERRUPTED:
                assert not self.open[event.run].interrupted, f"{event.run} was interrupted twice"
                self.open[event.run].interrupted = event.cause
            case Kind.RUN_ENDED:
                self.see_run_ended(event, self.open.pop(event.run))
            case Kind.SWITCH_SET:
                self.spans[event.subject] = (*self.switches[event.subject][:2], event.wall_ms, 0)
            case Kind.SWITCH_CLEARED:
                del self.switches[event.subject]
                if event.subject in self.spans:
                    self.spans[event.subject] = (*self.spans[event.subject][:3], event.wall_ms)
            case Kind.JOB_APPLIED if event.cause == "created":
                self.totals[key[:2]] = {}
            case Kind.JOB_DELETED:
                self.forget_job(event.tenant, event.subject)
            case Kind.SESSION_EXPIRED | Kind.SESSION_CLOSED:
                self.serves.pop(event.subject, None)
            case _:
                pass

    def count(self, event: Event, outcome: str, count: int) -> None:
        totals = self.totals.setdefault((event.tenant, event.subject), {})
        totals[outcome] = max(0, totals.get(outcome, 0) + count)

    def forget_job(self, tenant: str, name: str) -> None:
        """A job of the same name that follows is another one."""
        self.settled.pop((tenant, name), None)
        self.deleted[(tenant, name)] = None
        for key, account in self.accounts.items():
            account.orphaned |= key[:2] == (tenant, name)

    def see_assigned(self, event: Event, key: Key) -> None:
        account = self.accounts[key]
        assert not account.ended, f"{key} has ended, and was started again"
        job = self.machine.job(event.tenant, event.subject)
        assert job is not None, f"a run of {event.subject}, which does not exist"
        assert event.attempt == account.attempts + 1, f"attempt {event.attempt} of {key} after {account.attempts}"
        account.attempts += 1
        assert account.once_under != job.revision or account.resolved, f"{key} twice, at most once was said"
        account.once_under = job.revision if job.spec.delivery is s.Delivery.AT_MOST_ONCE else 0
        beside = [run for run in self.open.values() if run.key[:2] == key[:2]]
        assert len(beside) < at_once(job), f"{len(beside)} runs of {job.name} beside {event.run}"
        off = self.switches_over(*key[:2])
        if event.attempt > 1:
            off.discard(c.SwitchMode.DRAIN)
        assert not off, f"{key} started under {off}"
        self.check_not_suppressed(event, key)
        claimed = isinstance(self.result, c.RunClaimed) and self.result.run == event.run
        self.check_worker(event, job, claimed)
        self.open[event.run] = OpenRun(key, event.session, event.token, claimed)
        self.starts.append(event.cluster_ms)
        recent = [start for start in self.starts if start > event.cluster_ms - 1_000]
        assert len(recent) <= self.machine.limits.starts_per_second_max, f"{len(recent)} starts within a second"

    def check_worker(self, event: Event, job: Job, claimed: bool) -> None:
        session = self.machine.session(event.session)
        assert session is not None, f"{event.run} for a session that does not live"
        assert session.tenant == job.tenant and session.deadline_ms > event.cluster_ms
        row = self.machine.occurrence(event.tenant, event.subject, event.due_ms, event.sequence)
        assert row is not None
        assert fits(session, job, row.canary), f"{event.run} for {session}, which does not fit"
        if claimed:
            assert isinstance(self.command, c.ClaimRun)
            assert self.command.session == session.session and serves(self.command.jobs, job.name)
            return
        patterns, slots = self.serves.get(event.session, ((), 0))
        assert serves(patterns, job.name), f"{event.run} for a session that does not serve {job.name}"
        assert session.connection, f"{event.run} for a session that is not connected"
        assert len(self.pushed(event.session)) < slots, f"{event.run} beyond {slots} slots"

    def check_not_suppressed(self, event: Event, key: Key) -> None:
        """What was due under a switch does not start, also when it was settled after the clear.

        A clock that steps back comes by the same times again.
        """
        tenant, job, due_ms, sequence = key
        if sequence or event.attempt > 1:
            return
        for switch, (of_tenant, of_job, set_ms, ended_ms) in self.spans.items():
            if (of_tenant, of_job) in (("", ""), (tenant, ""), (tenant, job)):
                assert not set_ms < due_ms < ended_ms, f"{key} was due under {switch}, and starts"

    def pushed(self, session: str) -> list[OpenRun]:
        return [run for run in self.open.values() if run.session == session and not run.claimed]

    def see_run_ended(self, event: Event, run: OpenRun) -> None:
        assert (event.tenant, event.subject, event.due_ms, event.sequence) == run.key
        row = self.machine.occurrence(*run.key)
        if event.cause == "succeeded" and run.interrupted and row is not None:
            assert row.reason == f"after_interrupt:{run.interrupted}", row

    # ---- switches --------------------------------------------------------------------------------------------------

    def switches_over(self, tenant: str, job: str) -> set[c.SwitchMode]:
        scopes = (("", ""), (tenant, ""), (tenant, job))
        return {mode for *scope, mode in self.switches.values() if tuple(scope) in scopes}

    def switch_over(self, tenant: str, job: str) -> c.SwitchMode | None:
        return max(self.switches_over(tenant, job), default=None)

    def floor(self, tenant: str, job: str) -> int:
        return max(self.floors.get(scope, 0) for scope in (("", ""), (tenant, ""), (tenant, job)))

    # ---- the tables ------------------------------------------------------------------------------------------------

    def jobs(self) -> Iterable[Job]:
        for tenant in ("t", "u"):
            yield from self.machine.jobs(tenant, "", "", ALL)

    def check_rows(self) -> None:
        for job in self.jobs():
            rows = self.machine.occurrences(job.tenant, job.name, None, ALL)
            unfinished = [row for row in rows if row.state not in ENDED]
            switch = self.machine.effective_switch(job.tenant, job.name)
            assert (None if switch is None else switch.mode) is self.switch_over(job.tenant, job.name)
            for row in rows:
                if row.state in ENDED:
                    self.check_ended(row)
            for row in unfinished:
                self.check_unfinished(job, row)
            kept = [row for row in rows if row.state in ENDED and not row.held]
            assert len(kept) <= job.spec.history_count, f"{len(kept)} ended ones of {job.name} are kept"
            self.check_nothing_idle(job, unfinished)
            totals = self.totals[(job.tenant, job.name)]
            for outcome in OUTCOMES:
                assert getattr(job, outcome) == totals.get(outcome, 0), (
                    f"how many of {job.name} are {outcome}: {totals}"
                )

    def check_ended(self, row: Occurrence) -> None:
        key = key_of(row)
        before = self.ended.setdefault(key, row)
        assert before == row, f"{key} changed after its end: {before} became {row}"
        if key in self.accounts:
            assert self.accounts[key].ended, f"{key} has ended, and no event said so"
        else:
            assert row.state is OccurrenceState.MISSED, f"{key} was never created, and is {row.state.name}"
        assert row.ended_ms and (row.reason or row.state in (OccurrenceState.SUCCEEDED, OccurrenceState.FAILED)), row

    def check_unfinished(self, job: Job, row: Occurrence) -> None:
        """It is where its runs and the switches let it be, and something will end it."""
        key, off = key_of(row), self.switch_over(job.tenant, job.name)
        account = self.accounts[key]
        assert not account.ended, f"{key} has ended by its events, and is {row.state.name}"
        running = [run for run in self.open.values() if run.key == key]
        assert len(running) == (row.state is OccurrenceState.RUNNING), f"{key} is {row.state.name}: {running}"
        assert off is None or row.state is not OccurrenceState.PENDING, f"{key} is pending under a {off}"
        assert off is not c.SwitchMode.KILL or row.state is OccurrenceState.RUNNING or account.resolved, key
        next_ms = self.machine.next_deadline_ms()
        if row.state is OccurrenceState.PENDING:
            assert row.start_by_ms > self.now_ms, f"{key} should have started by {row.start_by_ms}"
            assert next_ms is not None and next_ms <= row.start_by_ms, f"nothing ends {key}"
        elif row.state is OccurrenceState.RETRYING and off is None and row.ready_ms > self.now_ms:
            assert next_ms is not None and next_ms <= row.ready_ms, f"nothing starts {key} again"

    def check_nothing_idle(self, job: Job, unfinished: list[Occurrence]) -> None:
        """If all that a job has is ready, none of it runs, and somebody has a slot for it, it would have started."""
        if not unfinished or any(row.run or row.ready_ms > self.now_ms for row in unfinished):
            return
        if self.switch_over(job.tenant, job.name) is not None:
            return
        # By the start rate alone it may wait, and then not for long.
        next_ms, a_step = self.machine.next_deadline_ms(), -(-self.machine.limits.starts_per_second_max // 10)
        lately = sum(start > self.now_ms - 1_200 for start in self.starts)
        if lately >= a_step and next_ms is not None and next_ms <= self.now_ms + 1_200:
            return
        for session in self.machine.sessions(job.tenant, "", ALL):
            patterns, slots = self.serves.get(session.session, ((), 0))
            free = session.connection and len(self.pushed(session.session)) < slots and serves(patterns, job.name)
            able = [row for row in unfinished if free and fits(session, job, row.canary)]
            assert len(able) < len(unfinished), f"{able[0]} waits, and {session.session} has nothing to do"

    def check_runs(self) -> None:
        rows: list[Run] = [run for tenant in ("t", "u") for run in self.machine.runs(tenant, "", 0, ALL)]
        assert {run.run: (run.session, run.token) for run in rows} == {
            name: (run.session, run.token) for name, run in self.open.items()
        }
        for run in rows:
            assert self.machine.run(run.run) == run
            assert self.machine.session(run.session) is not None, f"{run.run} has lost its session"
            assert run.interrupt_cause == self.open[run.run].interrupted
            assert run.deadline_ms > self.now_ms, f"{run.run} is over time"
            next_ms = self.machine.next_deadline_ms()
            assert next_ms is not None and next_ms <= run.deadline_ms, f"nothing ends {run.run}"
            old = run.kill_epoch < self.floor(run.tenant, run.job)
            assert not old or run.interrupt_cause, f"{run.run} goes on after a kill"

    def check_time(self) -> None:
        next_ms = self.machine.next_deadline_ms()
        assert next_ms is None or next_ms > self.now_ms, "something is due, and was not done"
        wall_ms = self.machine.stamp.wall_ms
        waiting = {(job.tenant, job.name) for job in self.machine.jobs_to_settle(wall_ms, ALL)}
        for job in self.jobs():
            behind = job.next_due_ms < 0 or 0 < job.next_due_ms <= wall_ms
            assert behind == ((job.tenant, job.name) in waiting), job


def is_no_room(event: Event) -> bool:
    return event.kind is Kind.OCCURRENCE_MISSED and event.reason == "no_room"


def left_out(found: Sequence[T], wanted: Sequence[T]) -> set[T]:
    """What was wanted and not found; nothing may be found twice, or unwanted."""
    assert len(set(found)) == len(found) and set(found) <= set(wanted), f"{found}, not {wanted}"
    return set(wanted) - set(found)


def key_of(row: Occurrence) -> Key:
    return (row.tenant, row.job, row.due_ms, row.sequence)


def at_once(job: Job) -> int:
    return job.spec.concurrent_max if job.spec.overlap is s.Overlap.ALLOW else 1


def serves(patterns: Sequence[str], name: str) -> bool:
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in patterns)


def fits(session: Session, job: Job, canary: bool) -> bool:
    own = {**dict(session.labels), "agent": session.agent, "version": session.version, "host": session.host}
    if not all(own.get(key) in accepted for key, accepted in job.spec.selector):
        return False
    if job.spec.canary is None:
        return True
    return (own.get(job.spec.canary.label) == job.spec.canary.value) == canary
