"""The language of the golden scenarios in testdata/*.txt: what happened is written below each line.

A line that starts with ``@`` is an input: cluster time, a verb, words, and options as ``name=value``. Below it,
indented, stands what came of it: the result, then an event per line after ``*``. All other lines are prose and kept.
A line ``---`` starts a scenario of its own with a fresh machine.

    @1000 open a ttl=15000                a session; later lines call it a, wherever its id would stand
    @1000 acquire a jobs/x wait=5000      the waiter is called w unless waiter=... says otherwise
    @2000 release a jobs/x 1              a lone dash instead of the session is an operator (actor=, reason=)
    @2000 begin a key fp=1 fence=jobs/x:1
    @2000 complete a key 1 done           attempt 1
    @3000 show lease jobs/x               also: session, record, leases, records, events, deadline, counts
    @3000 restore                         goes on with a machine restored from a snapshot

Jobs, with fields of the specification as options (overlap=allow concurrent_max=2 selector=zone:a|b canary=50:ring:1):

    @0 apply nightly every=60000          or cron="0 2 * * *", or at=...; else it is manual. edit: changes what it names
    @0 settle nightly next=1060000        through now, or through=...; due=1000000,1030000c (c: catch-up)
                                          missed=900000-990000:10:why; to be stale: revision=, settled=
    @0 serve a "night*" slots=2           claim a nightly; checkpoint, succeed, falter, acknowledge: a r1 ...
    @0 interrupt r1                       judge nightly 1000000 1 retry; trigger, backfill; switch kill nightly; clear k
    @0 show history nightly               also: job, revisions, story, at, held, run, runs, serves, switches, to_settle

Wall time is cluster time + 1,000,000 ms, unless wall=... says otherwise. Due times are wall times.

Options of every command: ``key=r1`` (a unary request), ``key=a#7`` or ``key=a#7/5`` (operation 7 on the stream of a,
which has acknowledged up to 5), ``not_after=``, ``tenant=``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import Any

import msgspec

from sidecar.core import commands as c
from sidecar.core import specification as spec
from sidecar.core.dedup import RecordState
from sidecar.core.events import Event
from sidecar.core.jobs import Job, JobRevision
from sidecar.core.machine import Machine
from sidecar.core.occurrences import Occurrence

HIDDEN = {"revision", "cluster_ms", "wall_ms", "message"}
WALL_MS = 1_000_000


class Line:
    """One input, taken apart: words in order, options by name."""

    def __init__(self, text: str) -> None:
        time, self.verb, *rest = shlex.split(text)
        self.at_ms = int(time.removeprefix("@"))
        self.words = [word for word in rest if not re.match(r"[a-z_]+=", word)]
        self.options = dict(word.split("=", 1) for word in rest if re.match(r"[a-z_]+=", word))

    def text(self, name: str, default: str = "") -> str:
        return self.options.pop(name, default)

    def number(self, name: str, default: int = 0) -> int:
        return int(self.options.pop(name, default))


class Scenario:
    def __init__(self) -> None:
        self.machine = Machine()
        self.ids: dict[str, str] = {}

    # ---- names ----------------------------------------------------------------------------------------------------

    def id(self, name: str) -> str:
        return "" if name == "-" else self.ids.get(name, name)

    def names(self, text: str) -> str:
        for name, session in self.ids.items():
            text = re.sub(rf"\b{re.escape(session)}\b", name, text)
        return text

    # ---- a line ---------------------------------------------------------------------------------------------------

    def run(self, text: str) -> list[str]:
        line = Line(text)
        if line.verb == "show":
            return [self.names(row) for row in self.show(line)]
        if line.verb == "restore":
            return self.restore()
        tenant = line.text("tenant", "t")
        key, not_after_ms = self.key(line.text("key"), tenant), line.number("not_after")
        self.wall_ms = line.number("wall", line.at_ms + WALL_MS)
        command = getattr(self, f"read_{line.verb}")(line, tenant)
        assert not line.options, f"unknown options: {line.options}"
        request = c.Request(command=command, key=key, not_after_ms=not_after_ms)
        result, events = self.machine.apply(c.Stamp(line.at_ms, self.wall_ms), request)
        if isinstance(result, c.SessionOpened):
            self.ids.setdefault(line.words[0], result.session)
        return [self.names(row) for row in (render(result), *map(render_event, events))]

    def key(self, text: str, tenant: str) -> c.RequestKey | None:
        if not text:
            return None
        stream = re.fullmatch(r"(\w+)#(\d+)(?:/(\d+))?", text)
        if stream is None:
            return c.RequestKey(tenant, "", text)
        return c.RequestKey(tenant, self.id(stream[1]), "", int(stream[2]), int(stream[3] or 0))

    def restore(self) -> list[str]:
        again = Machine()
        again.restore(self.machine.capture().encode())
        assert again.digest() == self.machine.digest()
        self.machine = again
        return []

    # ---- commands -------------------------------------------------------------------------------------------------

    def read_tick(self, line: Line, tenant: str) -> c.Command:
        return c.Tick()

    def read_limits(self, line: Line, tenant: str) -> c.Command:
        changed = {name: int(value) for name, value in line.options.items()}
        line.options.clear()
        return c.SetLimits(limits=msgspec.structs.replace(self.machine.limits, **changed))

    def read_open(self, line: Line, tenant: str) -> c.Command:
        return c.OpenSession(
            tenant=tenant,
            suffix=line.text("suffix", line.words[0]),
            agent=line.text("agent"),
            version=line.text("version"),
            host=line.text("host"),
            labels=tuple(pair(text) for text in line.text("labels").split(",") if text),
            ttl_ms=line.number("ttl", c.TTL_DEFAULT_MS),
            disconnect_grace_ms=line.number("grace", 1_000),
            connection=line.text("connection"),
            node="n1",
            generation=line.number("generation", 1),
        )

    def read_renew(self, line: Line, tenant: str) -> c.Command:
        connection = line.text("connection")
        sessions = tuple(map(self.id, line.words))
        return c.RenewSessions(sessions=sessions, connections=(connection,) * len(sessions) if connection else ())

    def read_attach(self, line: Line, tenant: str) -> c.Command:
        session, connection = line.words
        generation = line.number("generation")
        return c.AttachSession(
            tenant=tenant, session=self.id(session), connection=connection, node="n2", generation=generation
        )

    def read_detach(self, line: Line, tenant: str) -> c.Command:
        session, connection = line.words
        return c.DetachSession(session=self.id(session), connection=connection)

    def read_close(self, line: Line, tenant: str) -> c.Command:
        return c.CloseSession(tenant=tenant, session=self.id(line.words[0]))

    def read_acquire(self, line: Line, tenant: str) -> c.Command:
        session, name = line.words
        return c.AcquireLease(
            tenant=tenant,
            name=name,
            session=self.id(session),
            capacity=line.number("capacity", 1),
            wait_ms=line.number("wait"),
            priority=line.number("priority"),
            lock_delay_ms=line.number("delay"),
            metadata=line.text("metadata"),
            waiter=line.text("waiter", "w"),
        )

    def read_cancel(self, line: Line, tenant: str) -> c.Command:
        session, name = line.words
        return c.CancelWait(tenant=tenant, name=name, session=self.id(session), waiter=line.text("waiter", "w"))

    def read_release(self, line: Line, tenant: str) -> c.Command:
        session, name, token = line.words
        return c.ReleaseLease(
            tenant=tenant,
            name=name,
            token=int(token),
            session=self.id(session),
            actor=line.text("actor"),
            reason=line.text("reason"),
        )

    def read_transfer(self, line: Line, tenant: str) -> c.Command:
        session, name, token, to_session = line.words
        return c.TransferLease(
            tenant=tenant,
            name=name,
            token=int(token),
            to_session=self.id(to_session),
            session=self.id(session),
            actor=line.text("actor"),
            reason=line.text("reason"),
        )

    def read_begin(self, line: Line, tenant: str) -> c.Command:
        session, key = line.words
        lease, _, token = line.text("fence").rpartition(":")
        return c.BeginRecord(
            tenant=tenant,
            key=key,
            session=self.id(session),
            fingerprint=line.text("fp").encode(),
            owner_loss=c.OwnerLoss[line.text("loss", "retry").upper()],
            retention_ms=line.number("retention", c.RETENTION_DEFAULT_MS),
            fence_lease=lease,
            fence_token=int(token or 0),
        )

    def read_complete(self, line: Line, tenant: str) -> c.Command:
        session, key, attempt, result = line.words
        size = line.number("size", len(result))
        return c.CompleteRecord(
            tenant=tenant,
            key=key,
            session=self.id(session),
            attempt=int(attempt),
            result=result.encode().ljust(size, b"."),
        )

    def read_fail(self, line: Line, tenant: str) -> c.Command:
        session, key, attempt, how, error = line.words
        assert how in ("retryable", "final")
        return c.FailRecord(
            tenant=tenant,
            key=key,
            session=self.id(session),
            attempt=int(attempt),
            retryable=how == "retryable",
            error=error,
        )

    def read_resolve(self, line: Line, tenant: str) -> c.Command:
        key, attempt, how = line.words
        return c.ResolveRecord(
            tenant=tenant,
            key=key,
            attempt=int(attempt),
            resolution=c.Resolution[how.upper()],
            result=line.text("result").encode(),
            error=line.text("error"),
            actor=line.text("actor", "ann"),
            reason=line.text("reason", "checked by hand"),
        )

    # ---- commands about jobs --------------------------------------------------------------------------------------

    def read_apply(self, line: Line, tenant: str) -> c.Command:
        """Several jobs have the same specification."""
        expected, actor, reason = line.number("expected", -1), line.text("actor", "ann"), line.text("reason")
        blank = spec.JobSpec(owner="team", runbook_url="https://r", schedule=schedule(line))
        jobs = tuple(
            c.JobDefinition(tenant=tenant, name=name, spec=changed(blank, line.options), expected_revision=expected)
            for name in line.words
        )
        line.options.clear()
        return c.ApplyJobs(jobs=jobs, actor=actor, reason=reason)

    def read_edit(self, line: Line, tenant: str) -> c.Command:
        job = self.machine.job(tenant, line.words[0])
        assert job is not None
        actor, reason = line.text("actor", "bob"), line.text("reason")
        edited = job.spec
        if {"cron", "every", "at"} & {*line.options}:
            edited = msgspec.structs.replace(edited, schedule=schedule(line))
        edited = changed(edited, line.options)
        line.options.clear()
        definition = c.JobDefinition(tenant=tenant, name=job.name, spec=edited)
        return c.ApplyJobs(jobs=(definition,), actor=actor, reason=reason)

    def read_delete(self, line: Line, tenant: str) -> c.Command:
        return c.DeleteJob(tenant=tenant, name=line.words[0], actor="ann", reason="not needed")

    def read_rollback(self, line: Line, tenant: str) -> c.Command:
        return c.RollbackJob(
            tenant=tenant, name=line.words[0], to_revision=line.number("to"), actor="ann", reason="worse than before"
        )

    def read_settle(self, line: Line, tenant: str) -> c.Command:
        name = line.words[0]
        job = self.machine.job(tenant, name)
        due = tuple(c.Due(int(text.rstrip("c")), text.endswith("c")) for text in line.text("due").split(",") if text)
        through_ms = line.number("through", self.wall_ms)
        settlement = c.Settlement(
            tenant=tenant,
            name=name,
            revision=line.number("revision", job.revision if job is not None else 0),
            settled_ms=line.number("settled", job.settled_ms if job is not None else 0),
            through_ms=through_ms,
            next_due_ms=line.number("next", through_ms + 60_000),
            due=due,
            missed=tuple(missed(text) for text in line.text("missed").split(",") if text),
        )
        return c.SettleDue(settlements=(settlement,))

    def read_tzdata(self, line: Line, tenant: str) -> c.Command:
        return c.SetTzdata(version=line.words[0])

    def read_trigger(self, line: Line, tenant: str) -> c.Command:
        payload = line.options.pop("payload", None)
        return c.TriggerJob(
            tenant=tenant,
            name=line.words[0],
            actor="ann",
            reason="now",
            payload=None if payload is None else payload.encode(),
        )

    def read_backfill(self, line: Line, tenant: str) -> c.Command:
        name, *due = line.words
        job = self.machine.job(tenant, name)
        revision = line.number("revision", job.revision if job is not None else 0)
        due_ms = tuple(map(int, due))
        return c.BackfillJob(tenant=tenant, name=name, revision=revision, due_ms=due_ms, actor="ann", reason="again")

    def read_serve(self, line: Line, tenant: str) -> c.Command:
        session, *jobs = line.words
        slots = line.number("slots", 1)
        return c.ServeJobs(tenant=tenant, session=self.id(session), jobs=tuple(jobs), slots=slots)

    def read_claim(self, line: Line, tenant: str) -> c.Command:
        session, *jobs = line.words
        return c.ClaimRun(tenant=tenant, session=self.id(session), jobs=tuple(jobs))

    def read_checkpoint(self, line: Line, tenant: str) -> c.Command:
        session, run, state = line.words
        size = line.number("size", len(state))
        return c.CheckpointRun(
            tenant=tenant,
            session=self.id(session),
            run=run,
            token=line.number("token", int(run[1:])),
            state=state.encode().ljust(size, b"."),
        )

    def read_succeed(self, line: Line, tenant: str) -> c.Command:
        session, run, result = line.words
        token = line.number("token", int(run[1:]))
        return c.CompleteRun(tenant=tenant, session=self.id(session), run=run, token=token, result=result.encode())

    def read_falter(self, line: Line, tenant: str) -> c.Command:
        session, run, how, error = line.words
        assert how in ("retryable", "final")
        return c.FailRun(
            tenant=tenant,
            session=self.id(session),
            run=run,
            token=line.number("token", int(run[1:])),
            error=error,
            retryable=how == "retryable",
            retry_after_ms=line.number("after"),
        )

    def read_acknowledge(self, line: Line, tenant: str) -> c.Command:
        session, run = line.words
        token = line.number("token", int(run[1:]))
        return c.AcknowledgeInterrupt(
            tenant=tenant, session=self.id(session), run=run, token=token, detail=line.text("detail")
        )

    def read_interrupt(self, line: Line, tenant: str) -> c.Command:
        return c.InterruptRun(tenant=tenant, run=line.words[0], actor="ann", reason="runs wild")

    def read_judge(self, line: Line, tenant: str) -> c.Command:
        job, due_ms, attempt, how = line.words
        row = self.occurrence(tenant, job, int(due_ms))
        return c.ResolveOccurrence(
            tenant=tenant,
            job=job,
            due_ms=int(due_ms),
            sequence=0 if row is None else row.sequence,
            attempt=int(attempt),
            resolution=c.OccurrenceResolution[how.upper()],
            result=line.text("result").encode(),
            error=line.text("error"),
            actor="ann",
            reason="looked at it",
        )

    def read_switch(self, line: Line, tenant: str) -> c.Command:
        """A mode, then a job, ``tenant`` for all of it, or ``fleet``."""
        mode, scope = line.words
        return c.SetSwitch(
            mode=c.SwitchMode[mode.upper()],
            tenant="" if scope == "fleet" else tenant,
            job="" if scope in ("fleet", "tenant") else scope,
            actor="ann",
            reason="too dear",
            expires_after_ms=line.number("expires"),
        )

    def read_clear(self, line: Line, tenant: str) -> c.Command:
        fleet = line.options.pop("fleet", "")
        return c.ClearSwitch(tenant="" if fleet else tenant, switch=line.words[0], actor="bob", reason="fixed")

    # ---- looks ----------------------------------------------------------------------------------------------------

    def show(self, line: Line) -> list[str]:
        machine = self.machine
        what, *words = line.words
        word = words[0] if words else ""
        tenant, after, limit = line.text("tenant", "t"), line.text("after"), line.number("limit", 100)
        looks: dict[str, Callable[[], Iterable[object]]] = {
            "lease": lambda: [machine.lease(tenant, word)],
            "leases": lambda: [lease.name for lease in machine.leases(tenant, word, after, limit)],
            "holds": lambda: [f"{lease.name} {token}" for lease, token in machine.session_leases(self.id(word))],
            "session": lambda: [machine.session(self.id(word))],
            "sessions": lambda: [row.session for row in machine.sessions(tenant, self.id(after), limit)],
            "record": lambda: [machine.record(tenant, word)],
            "records": lambda: [row.key for row in machine.records(tenant, word, after, limit, state(line))],
            "deadline": lambda: [f"deadline {machine.next_deadline_ms()}"],
            "counts": lambda: [
                " ".join(f"{name}={count}" for name, count in machine.counts().items() if count) or "nothing"
            ],
            "events": lambda: [
                f"held from {machine.first_revision()} to {machine.revision}",
                *(f"{event.revision} {event.kind.name}" for event in machine.events_from(int(word), limit)),
            ],
        }
        if what not in looks:
            return self.show_jobs(what, words, tenant, after, limit) or ["nothing"]
        rows = looks[what]()
        return [row if isinstance(row, str) else render(row) for row in rows] or ["nothing"]

    def occurrence(self, tenant: str, job: str, due_ms: int, sequence: int | None = None) -> Occurrence | None:
        """Without a sequence, the first of that time."""
        if sequence is None:
            return next(iter(self.machine.occurrences_at(tenant, job, due_ms)), None)
        return self.machine.occurrence(tenant, job, due_ms, sequence)

    def show_jobs(self, what: str, words: list[str], tenant: str, after: str, limit: int) -> list[str]:
        machine, word = self.machine, words[0] if words else ""
        numbers = [int(each) for each in words[1:] if each.isdigit()]
        looks: dict[str, Callable[[], Iterable[object]]] = {
            "job": lambda: [
                about_job(machine.job(tenant, word)),
                "{} wait, {} run; {} workers, {} free slots".format(*machine.job_counts(tenant, word)),
            ],
            "jobs": lambda: [job.name for job in machine.jobs(tenant, word, after, limit)],
            "revisions": lambda: [about_revision(each) for each in machine.job_revisions(tenant, word)],
            "to_settle": lambda: [job.name for job in machine.jobs_to_settle(self.machine.stamp.wall_ms, limit)],
            "history": lambda: map(about_occurrence, machine.occurrences(tenant, word, None, limit)),
            "at": lambda: map(about_occurrence, machine.occurrences_at(tenant, word, numbers[0])),
            "held": lambda: map(about_occurrence, machine.held(tenant, limit)),
            "occurrence": lambda: [self.occurrence(tenant, word, *numbers)],
            "story": lambda: story(self.occurrence(tenant, word, *numbers)),
            "waits": lambda: [
                f"{row.due_ms}/{row.sequence} {machine.waits_for(row) or 'for nothing'}"
                for row in machine.occurrences(tenant, word, None, limit)
            ],
            "run": lambda: [machine.run(word)],
            "runs": lambda: [
                f"{run.run} {run.job} {run.session}" for run in machine.runs(tenant, word, int(after or 0), limit)
            ],
            "serves": lambda: [machine.worker(self.id(word))],
            "switches": lambda: machine.switches(None if word == "all" else tenant, True, after, limit),
            "effective": lambda: [machine.effective_switch(tenant, word)],
            "epoch": lambda: [f"kill epoch {machine.kill_epoch}"],
        }
        rows = looks[what]()
        return [self.names(row) if isinstance(row, str) else render(row) for row in rows]


def about_job(job: Job | None) -> str:
    if job is None:
        return "nothing"
    totals = ("succeeded", "failed", "skipped", "missed", "cancelled", "unknown")
    counted = " ".join(f"{name}={getattr(job, name)}" for name in totals if getattr(job, name))
    due = "not computed" if job.next_due_ms < 0 else job.next_due_ms or "never"
    flag = f" flagged since {job.flag_since_ms}" if job.flag_since_ms else ""
    return (
        f"{job.name} revision {job.revision} by {job.changed_by}, settled through {job.settled_ms}, "
        f"next {due}{flag}; {counted or 'nothing yet'}"
    )


def about_revision(revision: JobRevision) -> str:
    back = f" back to {revision.rolled_back_to}" if revision.rolled_back_to else ""
    return f"{revision.revision} by {revision.actor}{back}: {' '.join(fields(revision.spec, 'owner', 'runbook_url'))}"


def about_occurrence(row: Occurrence) -> str:
    count = f" since {row.first_due_ms}, {row.count} of them" if row.count > 1 else ""
    held = " held" if row.held else ""
    attempt = f" attempt {row.attempt}" if row.attempt else ""
    reason = f": {row.reason}" if row.reason else ""
    which = f"/{row.sequence}" if row.sequence else ""
    return f"{row.due_ms}{which} {row.origin.name.lower()} {row.state.name}{held}{count}{attempt}{reason}"


def story(row: Occurrence | None) -> list[str]:
    """The cluster time of each step, then what happened."""
    if row is None:
        return ["nothing"]
    return [f"{step.cluster_ms} {step.what} {' '.join(fields(step, 'what'))}".rstrip() for step in row.steps]


def schedule(line: Line) -> spec.Schedule:
    if "cron" in line.options:
        return spec.Schedule(kind=spec.ScheduleKind.CRON, cron=line.text("cron"))
    if "every" in line.options:
        return spec.Schedule(kind=spec.ScheduleKind.INTERVAL, interval_ms=line.number("every"))
    if "at" in line.options:
        return spec.Schedule(kind=spec.ScheduleKind.ONCE, at_ms=line.number("at"))
    return spec.Schedule(kind=spec.ScheduleKind.MANUAL)


CHOICES: dict[str, type[IntEnum]] = {
    "misfire": spec.Misfire,
    "overlap": spec.Overlap,
    "delivery": spec.Delivery,
    "on_holder_loss": spec.HolderLoss,
    "mode": spec.Mode,
}


def changed(old: spec.JobSpec, options: dict[str, str]) -> spec.JobSpec:
    """The specification with the fields that are named; those of its retries are found among them."""
    fields_: dict[str, Any] = {}
    retry: dict[str, Any] = {}
    for name, text in options.items():
        if name in CHOICES:
            fields_[name] = CHOICES[name][text.upper()]
        elif name in spec.Retry.__struct_fields__:
            retry[name] = text == "yes" if name.startswith("on_") else int(text)
        elif name == "selector":
            terms = (term.split(":") for term in text.split(","))
            fields_[name] = tuple((key, tuple(values.split("|"))) for key, values in terms)
        elif name == "canary":
            percent, label, value = text.split(":") if text else ("", "", "")
            fields_[name] = spec.Canary(percent=int(percent), label=label, value=value) if text else None
        elif name == "payload":
            fields_[name] = text.encode()
        else:
            fields_[name] = text if name in ("owner", "description") else int(text)
    if retry:
        fields_["retry"] = msgspec.structs.replace(old.retry, **retry)
    return msgspec.structs.replace(old, **fields_)


def pair(text: str) -> tuple[str, str]:
    name, value = text.split(":")
    return name, value


def missed(text: str) -> c.Missed:
    times, count, reason = text.split(":")
    first, last = times.split("-")
    return c.Missed(int(first), int(last), int(count), reason)


def state(line: Line) -> RecordState | None:
    name = line.text("state")
    return RecordState[name] if name else None


def render(value: Any) -> str:
    """The kind of a result or a row, then its fields that are not at their default."""
    if value is None:
        return "nothing"
    if isinstance(value, c.Refused):
        facts = (f"{name}={fact}" for name, fact in value.facts if fact)
        retry = (f"retry={value.retry_delay_ms}",) if value.retry_delay_ms else ()
        return " ".join(("refused", value.reason.name, *facts, *retry))
    return " ".join((kind_of(value), *fields(value)))


def render_event(event: Event) -> str:
    hidden = () if event.session != event.subject else ("session",)
    return " ".join(("*", event.kind.name, event.subject, *fields(event, "kind", "subject", "tenant", *hidden)))


def fields(value: Any, *hidden: str) -> Iterable[str]:
    for field in msgspec.structs.fields(value):
        got = getattr(value, field.name)
        if field.name not in HIDDEN and field.name not in hidden and got != field.default:
            yield f"{field.name.removesuffix('_ms')}={plain(got)}"


def plain(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        text = value.decode()
        return text if len(text) <= 40 else f"{text[:8]}...({len(text)})"
    if isinstance(value, tuple):
        return "[" + ", ".join(plain(item) for item in value) + "]"
    if isinstance(value, msgspec.Struct):
        return "(" + " ".join(fields(value)) + ")"
    return str(value) or "''"


def kind_of(value: Any) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(value).__name__).lower()


def play(script: str, *, restore_always: bool = False) -> str:
    """The script again, with what really happens. With ``restore_always``, every line meets a restored machine."""
    out: list[str] = []
    scenario = Scenario()
    for line in script.splitlines():
        if line.startswith("---"):
            scenario = Scenario()
        if line.startswith("@"):
            if restore_always:
                scenario.restore()
            out.append(line)
            out.extend(f"    {row}" for row in scenario.run(line))
        elif not line.startswith("    "):
            out.append(line)
    return "\n".join(out) + "\n"
