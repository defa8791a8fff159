"""What the machine should do, written again in the plainest way: lists, loops, and no regard for speed.

It knows nothing of the machine's code. Outcomes are short tuples: a word, then what matters of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Outcome = tuple[object, ...]


@dataclass
class ModelSession:
    name: str
    ttl_ms: int
    grace_ms: int
    deadline_ms: int
    connection: str


@dataclass
class Hold:
    session: str
    token: int
    delay_ms: int
    waiter: str
    epoch: int


@dataclass
class Wait:
    session: str
    waiter: str
    priority: int
    order: int
    deadline_ms: int
    delay_ms: int


@dataclass
class ModelLease:
    capacity: int
    holds: list[Hold] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)

    def free(self) -> int:
        return self.capacity - len(self.holds) - len(self.delays)

    def line(self) -> list[Wait]:
        return sorted(self.waits, key=lambda wait: (-wait.priority, wait.order))


@dataclass
class ModelRecord:
    state: str
    attempt: int
    owner: str
    fingerprint: bytes
    loss: str
    retention_ms: int
    expires_ms: int
    result: bytes
    fence: tuple[str, int]


class Model:
    def __init__(self) -> None:
        self.now_ms = 0
        self.token = 0
        self.order = 0
        self.sessions: dict[str, ModelSession] = {}
        self.leases: dict[str, ModelLease] = {}
        self.records: dict[str, ModelRecord] = {}
        # Tokens of an epoch before the last kill are stale; while it is in force, nothing is granted or begun.
        self.epoch = 0
        self.killed = False

    # ---- time -----------------------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        self.now_ms = max(self.now_ms, now_ms)
        while (due := self.first_due()) is not None:
            _, kind, *what = due
            if kind == 1:
                self.end_session(str(what[0]), expired=True)
            elif kind == 2:
                lease = self.leases[str(what[0])]
                lease.waits = [wait for wait in lease.waits if (wait.session, wait.waiter) != (what[1], what[2])]
            else:
                lease = self.leases[str(what[0])]
                lease.delays = [delay for delay in lease.delays if delay > self.now_ms]
                self.fill(lease)
        for key in [key for key, record in self.records.items() if 0 < record.expires_ms <= self.now_ms]:
            del self.records[key]

    def first_due(self) -> tuple[object, ...] | None:
        due: list[tuple[object, ...]] = [(row.deadline_ms, 1, name) for name, row in self.sessions.items()]
        for name, lease in self.leases.items():
            due += [(wait.deadline_ms, 2, name, wait.session, wait.waiter) for wait in lease.waits]
            due += [(delay, 3, name) for delay in lease.delays]
        ready = sorted(row for row in due if int(str(row[0])) <= self.now_ms)
        return ready[0] if ready else None

    def next_deadline_ms(self) -> int | None:
        due = [row.deadline_ms for row in self.sessions.values()]
        for lease in self.leases.values():
            due += [wait.deadline_ms for wait in lease.waits] + lease.delays
        due += [(record.expires_ms + 999) // 1000 * 1000 for record in self.records.values() if record.expires_ms]
        return min(due) if due else None

    # ---- sessions -------------------------------------------------------------------------------------------------

    def open(self, name: str, ttl_ms: int, grace_ms: int, connection: str) -> None:
        self.sessions[name] = ModelSession(name, ttl_ms, grace_ms, self.now_ms + ttl_ms, connection)

    def renew(self, name: str, connection: str) -> str:
        row = self.sessions.get(name)
        if row is None:
            return "ended"
        if connection and connection != row.connection:
            return "superseded"
        row.deadline_ms = self.now_ms + row.ttl_ms
        return "renewed"

    def attach(self, name: str, connection: str) -> Outcome:
        row = self.sessions.get(name)
        if row is None:
            return ("refused", "SESSION_NOT_FOUND")
        row.connection, row.deadline_ms = connection, self.now_ms + row.ttl_ms
        return ("attached", row.deadline_ms)

    def detach(self, name: str, connection: str) -> Outcome:
        row = self.sessions.get(name)
        if row is not None and row.connection == connection:
            row.connection, row.deadline_ms = "", min(row.deadline_ms, self.now_ms + row.grace_ms)
            self.advance(self.now_ms)
        return ("done",)

    def close(self, name: str) -> Outcome:
        if name not in self.sessions:
            return ("refused", "SESSION_NOT_FOUND")
        self.end_session(name, expired=False)
        return ("done",)

    def end_session(self, name: str, *, expired: bool) -> None:
        row = self.sessions.pop(name)
        for lease in self.leases.values():
            lease.waits = [wait for wait in lease.waits if wait.session != name]
        mine = [
            (hold.token, lease, hold) for lease in self.leases.values() for hold in lease.holds if hold.session == name
        ]
        for _, lease, hold in sorted(mine, key=lambda item: item[0]):
            lease.holds.remove(hold)
            if expired and row.deadline_ms + hold.delay_ms > self.now_ms:
                lease.delays = sorted([*lease.delays, row.deadline_ms + hold.delay_ms])
            self.fill(lease)
        for record in self.records.values():
            if record.state == "IN_PROGRESS" and record.owner == name:
                retry = record.loss == "RETRY"
                record.state = "RETRYABLE" if retry else "UNKNOWN"
                record.expires_ms = self.now_ms + record.retention_ms if retry else 0

    # ---- leases ---------------------------------------------------------------------------------------------------

    def lease(self, name: str, capacity: int) -> ModelLease:
        used = self.leases.get(name)
        if used is None or not (used.holds or used.waits or used.delays):
            self.leases[name] = ModelLease(capacity)
        return self.leases[name]

    def fill(self, lease: ModelLease) -> None:
        for wait in lease.line():
            if self.killed:
                return
            session = self.sessions.get(wait.session)
            alive = session is not None and session.deadline_ms > self.now_ms and wait.deadline_ms > self.now_ms
            holding = any(hold.session == wait.session for hold in lease.holds)
            if lease.free() > 0 and alive and not holding:
                lease.waits.remove(wait)
                self.grant(lease, wait.session, wait.delay_ms, wait.waiter)

    def grant(self, lease: ModelLease, session: str, delay_ms: int, waiter: str) -> int:
        self.token += 1
        lease.holds.append(Hold(session, self.token, delay_ms, waiter, self.epoch))
        return self.token

    def acquire(
        self, name: str, session: str, capacity: int, wait_ms: int, priority: int, delay_ms: int, waiter: str
    ) -> Outcome:
        if session not in self.sessions:
            return ("refused", "SESSION_NOT_FOUND")
        if self.killed:
            return ("refused", "SWITCHED_OFF")
        lease = self.lease(name, capacity)
        if lease.capacity != capacity:
            return ("refused", "LEASE_CAPACITY_MISMATCH")
        for hold in lease.holds:
            if hold.session == session and hold.epoch == self.epoch:
                return ("granted", hold.token, True)
            if hold.session == session:
                lease.holds.remove(hold)
                return ("granted", self.grant(lease, session, delay_ms, waiter), False)
        for wait in lease.waits:
            if (wait.session, wait.waiter) == (session, waiter):
                return ("queued", waiter, wait.deadline_ms)
        if lease.free() > 0:
            return ("granted", self.grant(lease, session, delay_ms, waiter), False)
        if wait_ms == 0:
            return ("refused", "LOCK_DELAY" if lease.delays else "LEASE_HELD")
        self.order += 1
        lease.waits.append(Wait(session, waiter, priority, self.order, self.now_ms + wait_ms, delay_ms))
        return ("queued", waiter, self.now_ms + wait_ms)

    def cancel(self, name: str, session: str, waiter: str) -> Outcome:
        lease = self.leases.get(name, ModelLease(1))
        for wait in lease.waits:
            if (wait.session, wait.waiter) == (session, waiter):
                lease.waits.remove(wait)
                return ("done",)
        for hold in lease.holds:
            if hold.session == session and hold.waiter == waiter:
                lease.holds.remove(hold)
                self.fill(lease)
                return ("done",)
        return ("refused", "WAIT_NOT_FOUND")

    def claimed(self, name: str, session: str, token: int) -> Hold | Outcome:
        for hold in self.leases.get(name, ModelLease(1)).holds:
            if hold.token == token:
                return hold if session in ("", hold.session) else ("refused", "NOT_HOLDER")
        return ("refused", "TOKEN_UNKNOWN" if token > self.token else "TOKEN_STALE")

    def release(self, name: str, session: str, token: int) -> Outcome:
        hold = self.claimed(name, session, token)
        if isinstance(hold, tuple):
            return hold
        self.leases[name].holds.remove(hold)
        self.fill(self.leases[name])
        return ("done",)

    def transfer(self, name: str, session: str, token: int, to_session: str) -> Outcome:
        hold = self.claimed(name, session, token)
        if isinstance(hold, tuple):
            return hold
        if self.killed:
            return ("refused", "SWITCHED_OFF")
        if hold.epoch < self.epoch:
            return ("refused", "TOKEN_STALE")
        lease = self.leases[name]
        if to_session not in self.sessions or any(other.session == to_session for other in lease.holds):
            return ("refused", "TRANSFER_TARGET_INVALID")
        lease.holds.remove(hold)
        mine = [wait for wait in lease.line() if wait.session == to_session]
        if mine:
            lease.waits.remove(mine[0])
            new = self.grant(lease, to_session, mine[0].delay_ms, mine[0].waiter)
        else:
            new = self.grant(lease, to_session, hold.delay_ms, "")
        self.fill(lease)
        return ("transferred", new)

    # ---- switches -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.epoch, self.killed = self.epoch + 1, True

    def clear(self) -> None:
        self.killed = False
        for name in sorted(self.leases):
            self.fill(self.leases[name])

    # ---- records --------------------------------------------------------------------------------------------------

    def fenced(self, fence: tuple[str, int]) -> bool:
        name, token = fence
        holds = self.leases.get(name, ModelLease(1)).holds
        return not name or any(hold.token == token and hold.epoch == self.epoch for hold in holds)

    def begin(
        self, key: str, session: str, fingerprint: bytes, loss: str, retention_ms: int, fence: tuple[str, int]
    ) -> Outcome:
        if session not in self.sessions:
            return ("refused", "SESSION_NOT_FOUND")
        if self.killed:
            return ("refused", "SWITCHED_OFF")
        if not self.fenced(fence):
            return ("refused", "FENCE_STALE")
        record = self.records.get(key)
        if record is not None and record.fingerprint != fingerprint:
            return ("refused", "RECORD_MISMATCH")
        if record is not None and record.state != "RETRYABLE":
            return ("begun", record.state, record.attempt, record.owner, record.result)
        attempt = record.attempt + 1 if record is not None else 1
        self.records[key] = ModelRecord("IN_PROGRESS", attempt, session, fingerprint, loss, retention_ms, 0, b"", fence)
        return ("begun", "NEW", attempt, session, b"")

    def complete(self, key: str, session: str, attempt: int, result: bytes) -> Outcome:
        record = self.running(key, session, attempt)
        if isinstance(record, tuple):
            return record
        if record.state == "COMPLETED":
            return ("completed", True) if record.result == result else ("refused", "RECORD_RESULT_MISMATCH")
        if record.state != "IN_PROGRESS":
            return ("refused", "RECORD_NOT_RUNNING")
        if not self.fenced(record.fence):
            return ("refused", "FENCE_STALE")
        self.settle(record, "COMPLETED", result)
        return ("completed", False)

    def fail(self, key: str, session: str, attempt: int, retryable: bool) -> Outcome:
        record = self.running(key, session, attempt)
        if isinstance(record, tuple):
            return record
        if record.state != "IN_PROGRESS":
            return ("refused", "RECORD_NOT_RUNNING")
        self.settle(record, "RETRYABLE" if retryable else "FAILED", b"")
        return ("done",)

    def resolve(self, key: str, attempt: int, resolution: str, result: bytes) -> Outcome:
        record = self.records.get(key)
        if record is None:
            return ("refused", "RECORD_NOT_FOUND")
        if record.attempt != attempt:
            return ("refused", "ATTEMPT_STALE")
        if resolution == "FORGET":
            del self.records[key]
        elif record.state == "COMPLETED":
            return ("refused", "RECORD_NOT_RUNNING")
        else:
            state = {"COMPLETED": "COMPLETED", "FAILED": "FAILED", "RETRY": "RETRYABLE"}[resolution]
            self.settle(record, state, result if resolution == "COMPLETED" else b"")
        return ("done",)

    def running(self, key: str, session: str, attempt: int) -> ModelRecord | Outcome:
        record = self.records.get(key)
        if record is None:
            return ("refused", "RECORD_NOT_FOUND")
        if record.attempt != attempt:
            return ("refused", "ATTEMPT_STALE")
        return record if record.owner == session else ("refused", "RECORD_OWNED_BY_OTHER")

    def settle(self, record: ModelRecord, state: str, result: bytes) -> None:
        record.state, record.result, record.expires_ms = state, result, self.now_ms + record.retention_ms
