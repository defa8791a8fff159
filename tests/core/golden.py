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

Options of every command: ``key=r1`` (a unary request), ``key=a#7`` or ``key=a#7/5`` (operation 7 on the stream of a,
which has acknowledged up to 5), ``not_after=``, ``tenant=``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import msgspec

from sidecar.core import commands as c
from sidecar.core.dedup import RecordState
from sidecar.core.events import Event
from sidecar.core.machine import Machine

HIDDEN = {"revision", "cluster_ms", "wall_ms", "message"}


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
        command = getattr(self, f"read_{line.verb}")(line, tenant)
        assert not line.options, f"unknown options: {line.options}"
        request = c.Request(command=command, key=key, not_after_ms=not_after_ms)
        result, events = self.machine.apply(c.Stamp(line.at_ms, line.at_ms + 1_000_000), request)
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
        rows = looks[what]()
        return [row if isinstance(row, str) else render(row) for row in rows] or ["nothing"]


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
