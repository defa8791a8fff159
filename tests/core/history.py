"""Random histories of requests, and the recorded ones of each release.

``python -m tests.core.history 0_2`` records two logs, each with a snapshot, in this version's encoding, and prints what
test_history.py must expect of them: 0_2 of sessions, leases and records, 0_2_jobs of jobs, runs and switches. Done once
for each release: the files then stay as they are, and every later version reads them.
"""

from __future__ import annotations

import random
import sys
from itertools import groupby
from pathlib import Path

import msgspec

from sidecar.core import commands as c
from sidecar.core.machine import Machine
from tests.core.job_lives import World

DATA = Path(__file__).parent / "testdata"

Step = tuple[c.Stamp, c.Request]

NAMES, KEYS, CONNECTIONS = ("jobs/a", "jobs/b", "gpu"), ("k1", "k2", "k3", "k4"), ("c1", "c2")


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Several requests under one stamp, as one entry of the log holds them."""

    stamp: c.Stamp
    requests: tuple[c.Request, ...]


def random_history(seed: int, length: int) -> list[Step]:
    """A plausible life: sessions come and go, and do a bit of everything. The same for ever for one seed."""
    writer = _Writer(seed)
    return [writer.step() for _ in range(length)]


class _Writer:
    """Writes commands that mostly make sense, by looking at the state they will meet."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.machine = Machine()
        self.now_ms = 1_000
        self.count = 0
        self.past: list[c.Request] = []

    def step(self) -> Step:
        self.count += 1
        self.now_ms += self.chance.choice((0, 0, 0, 0, 1, 40, 200, 900))
        stamp = c.Stamp(self.now_ms, 1_800_000_000_000 + self.now_ms)
        if self.past and self.chance.random() < 0.05:
            request = self.again(self.chance.choice(self.past[-50:]))
        else:
            command = self.slip() if self.chance.random() < 0.06 else self.command()
            request = c.Request(
                command=command, key=self.key(), not_after_ms=self.now_ms + self.chance.choice((-1, *[500] * 30))
            )
            self.past.append(request)
        self.machine.apply(stamp, request)
        return stamp, request

    def again(self, request: c.Request) -> c.Request:
        """A repeat: mostly honest, sometimes with another body under the same key."""
        if self.chance.random() < 0.8:
            return request
        return c.Request(command=self.command(), key=request.key)

    def key(self) -> c.RequestKey | None:
        kind = self.chance.randrange(3)
        if kind == 0:
            return None
        if kind == 1:
            return c.RequestKey("t", "", f"request-{self.count}")
        acknowledged = max(0, self.count - self.chance.choice((3, 30, 300)))
        return c.RequestKey("t", self.session(), "", self.count, acknowledged)

    def session(self) -> str:
        living = self.machine.sessions("t", "", 100)
        return self.chance.choice(living).session if living and self.chance.random() < 0.95 else "s0-none"

    def command(self) -> c.Command:
        if len(self.machine.sessions("t", "", 100)) < 5:
            return self.open()
        writers = (
            self.renewals,
            self.renewals,
            self.lease,
            self.lease,
            self.lease,
            self.record,
            self.record,
            self.rest,
        )
        return self.chance.choice(writers)()

    def slip(self) -> c.Command:
        """What a client does that is confused, late, or somebody else's."""
        name, session, key = self.chance.choice(NAMES), self.session(), self.chance.choice(KEYS)
        lease, record = self.machine.lease("t", name), self.machine.record("t", key)
        token = lease.holders[0].token if lease is not None and lease.holders else 1
        attempt = record.attempt if record is not None else 1
        return self.chance.choice(
            (
                c.CloseSession(tenant="other", session=session),
                c.OpenSession(tenant="t", suffix="x", ttl_ms=1),
                c.AcquireLease(tenant="t", name=name, session=session, capacity=7),
                c.CancelWait(tenant="t", name=name, session=session, waiter="nobody"),
                c.ReleaseLease(tenant="t", name=name, token=2**40, session=session),
                c.ReleaseLease(tenant="t", name=name, token=token, session=session),
                c.TransferLease(tenant="t", name=name, token=token, to_session="nobody", actor="ann", reason="r"),
                c.BeginRecord(tenant="t", key=key, session=session, fence_lease=name, fence_token=1),
                c.CompleteRecord(tenant="t", key="never begun", session=session, attempt=1),
                c.CompleteRecord(tenant="t", key=key, session=session, attempt=attempt, result=b"mine"),
                c.FailRecord(tenant="t", key=key, session=session, attempt=attempt + 1, retryable=True),
            )
        )

    def open(self) -> c.Command:
        return c.OpenSession(
            tenant="t",
            suffix=f"{self.chance.randrange(10**9):09}",
            agent="agent",
            version="1.2",
            host="host-ä",
            labels=(("zone", "b"),),
            ttl_ms=self.chance.choice((1_000, 5_000, 15_000)),
            disconnect_grace_ms=self.chance.choice((0, 500, 1_000)),
            connection=self.chance.choice(("", "c1")),
            node="n1",
        )

    def renewals(self) -> c.Command:
        sessions = tuple(self.session() for _ in range(3))
        connections = tuple(self.chance.choice(("", "c1", "c2")) for _ in sessions)
        return c.RenewSessions(sessions=sessions, connections=self.chance.choice(((), connections)))

    def lease(self) -> c.Command:
        name, session, what = self.chance.choice(NAMES), self.session(), self.chance.randrange(10)
        if what < 6:
            return c.AcquireLease(
                tenant="t",
                name=name,
                session=session,
                capacity=2 if name == "gpu" else 1,
                wait_ms=self.chance.choice((0, 1_000, 8_000)),
                priority=self.chance.randrange(-1, 2),
                lock_delay_ms=self.chance.choice((0, 600, 3_000)),
                metadata="what for",
                waiter=f"w{self.count}",
            )
        lease = self.machine.lease("t", name)
        if lease is not None and lease.waiters and what == 6:
            waiter = self.chance.choice(lease.waiters)
            return c.CancelWait(tenant="t", name=name, session=waiter.session, waiter=waiter.waiter)
        if lease is None or not lease.holders:
            return c.ReleaseLease(tenant="t", name=name, token=self.chance.randrange(50), session=session)
        holder = self.chance.choice(lease.holders)
        by, actor, reason = self.chance.choice(((holder.session, "", ""), ("", "ann", "by hand"), (session, "", "")))
        if what == 7:
            return c.TransferLease(
                tenant="t", name=name, token=holder.token, to_session=session, session=by, actor=actor, reason=reason
            )
        return c.ReleaseLease(tenant="t", name=name, token=holder.token, session=by, actor=actor, reason=reason)

    def record(self) -> c.Command:
        key, what = self.chance.choice(KEYS), self.chance.randrange(10)
        record = self.machine.record("t", key)
        if record is None or what < 4:
            return self.begin(key)
        if what == 4:
            return c.ResolveRecord(
                tenant="t",
                key=key,
                attempt=record.attempt,
                resolution=self.chance.choice(tuple(c.Resolution)),
                result=b"by hand",
                error="by hand",
                actor="ann",
                reason="checked",
            )
        if what < 7:
            return c.FailRecord(
                tenant="t",
                key=key,
                session=record.owner,
                attempt=record.attempt,
                retryable=self.chance.random() < 0.8,
                error="no route",
            )
        return c.CompleteRecord(
            tenant="t", key=key, session=record.owner, attempt=record.attempt, result=f"r{self.count % 3}".encode()
        )

    def begin(self, key: str) -> c.Command:
        fence = self.machine.lease("t", self.chance.choice(NAMES))
        fenced = fence is not None and fence.holders and self.chance.random() < 0.5
        return c.BeginRecord(
            tenant="t",
            key=key,
            session=self.session(),
            fingerprint=self.chance.choice((b"f", b"f", b"f", b"g")),
            owner_loss=self.chance.choice(tuple(c.OwnerLoss)),
            retention_ms=self.chance.choice((1_000, 5_000, 60_000)),
            fence_lease=fence.name if fence is not None and fenced else "",
            fence_token=fence.holders[0].token if fence is not None and fenced else 0,
        )

    def rest(self) -> c.Command:
        session, connection = self.session(), self.chance.choice(CONNECTIONS)
        return self.chance.choice(
            (
                c.Tick(),
                c.CloseSession(tenant="t", session=session),
                c.DetachSession(session=session, connection=connection),
                c.AttachSession(
                    tenant="t", session=session, connection=connection, node="n2", generation=self.chance.randrange(4)
                ),
                c.SetLimits(limits=c.Limits(events_max=self.chance.choice((100, 10_000)))),
            )
        )


def batches(steps: list[Step]) -> list[Batch]:
    return [
        Batch(stamp, tuple(request for _, request in group))
        for stamp, group in groupby(steps, key=lambda step: step[0])
    ]


def replay(payload: bytes) -> Machine:
    machine = Machine()
    for entry in msgspec.msgpack.decode(payload, type=list[bytes]):
        batch = msgspec.msgpack.decode(entry, type=Batch)
        for request in batch.requests:
            machine.apply(batch.stamp, request)
    return machine


def random_job_history(seed: int, length: int) -> list[Step]:
    """The same for jobs; the first step sets limits under which the rate of starts matters."""
    world = World(random.Random(seed).choice)
    for _ in range(length):
        world.step()
    first_stamp, _ = world.judge.log[0]
    limits = c.Stamp(0, first_stamp.wall_ms), c.Request(command=c.SetLimits(limits=world.judge.limits))
    return [limits, *world.judge.log]


def main(release: str) -> None:
    record(release, random_history(20_260, 3_000))
    record(f"{release}_jobs", random_job_history(20_262, 4_000))


def record(release: str, steps: list[Step]) -> None:
    entries = batches(steps)
    payload = msgspec.msgpack.encode([msgspec.msgpack.encode(batch) for batch in entries])
    machine = replay(payload)
    snapshot = machine.capture().encode()
    (DATA / f"history_{release}.bin").write_bytes(payload)
    (DATA / f"snapshot_{release}.bin").write_bytes(snapshot)
    print(f'"{release}": Expected("{machine.digest()}", {machine.revision}, {machine.last_token}),')


if __name__ == "__main__":
    main(sys.argv[1])
