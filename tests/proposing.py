"""The directed cluster of tests/consensus/harness.py with the real application on it: proposer and state machine."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from sidecar.consensus.node import Node
from sidecar.consensus.ports import Clock
from sidecar.core.commands import (
    AcquireLease,
    Command,
    LeaseGranted,
    OpenSession,
    ReleaseLease,
    RequestKey,
    SessionOpened,
)
from sidecar.core.events import Event
from sidecar.core.machine import Machine
from sidecar.proposer import Failed, Outcome, Proposer, ProposerSettings
from tests.consensus.harness import Cluster, Host

NEVER = float("inf")


class Call:
    """One proposal and what came of it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self.handle = 0
        self.took_s = 0.0
        self._clock = clock
        self._began_s = clock.monotonic_s() if clock else 0.0

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.took_s = self._clock.monotonic_s() - self._began_s if self._clock else 0.0

    @property
    def done(self) -> bool:
        assert len(self.outcomes) <= 1, f"answered more than once: {self.outcomes}"
        return bool(self.outcomes)

    @property
    def result(self) -> Any:
        assert self.done, "no answer yet"
        return self.outcomes[0]

    @property
    def failed(self) -> Failed:
        assert isinstance(self.result, Failed), self.result
        return self.result


class ProposingHost(Host):
    """A host whose node carries a proposer, polled when it asks for it."""

    machine: Machine
    proposer: Proposer
    events_seen: list[Event]
    gaps: int

    def boot(self, **changes: Any) -> Node:
        assert isinstance(self.cluster, ProposingCluster)
        settings = msgspec.structs.replace(self.cluster.settings_of(self.name), **changes)
        self.machine = Machine()
        self.proposer = Proposer(
            self.machine, self.clock, self.name, self.store.incarnation, settings=self.cluster.proposer_settings
        )
        self.tasks.clear()
        self.woken = True
        self.poll_s = NEVER
        self.node = Node(
            settings,
            self.proposer,
            self.store,
            self.snapshots,
            self,
            self.clock,
            random.Random(f"{self.cluster.seed}/{self.name}/{self.store.incarnation}"),
            self._wake,
            lambda work, done: self.tasks.append((work, done)),
        )
        self.proposer.attach(self.node, self._wake, self._schedule)
        self.events_seen = []
        self.gaps = 0
        self.proposer.subscribe(self.events_seen.extend, self._gap)
        return self.node

    def _schedule(self, when_s: float) -> None:
        self.poll_s = min(self.poll_s, when_s)

    def _gap(self) -> None:
        self.gaps += 1

    def _poll_due(self) -> bool:
        return self.node is not None and not self.paused and self.poll_s <= self.cluster.clock.now_s

    def due(self) -> bool:
        return super().due() or self._poll_due()

    def turn(self) -> None:
        if self._poll_due():
            self.poll_s = NEVER
            self.proposer.poll()
        if super().due():
            super().turn()

    # ---- shorthands

    def submit(self, command: Command, key: str = "", *, timeout_ms: int = 5_000, **kwargs: Any) -> Call:
        """With ``key``, exactly once under that request id."""
        call = Call(self.clock)
        request = RequestKey("default", "", key) if key else None
        call.handle = self.proposer.submit(command, call, timeout_ms=timeout_ms, key=request, **kwargs)
        return call

    def renew(self, session: str, *, timeout_ms: int = 2_000, connection: str = "") -> Call:
        call = Call(self.clock)
        self.proposer.renew(session, call, timeout_ms=timeout_ms, connection=connection)
        return call

    def applied_index(self) -> int:
        assert self.node is not None
        return self.node.status().applied_index


class ProposingCluster(Cluster):
    def __init__(self, size: int = 3, *, proposer: ProposerSettings | None = None, **settings: Any) -> None:
        self.proposer_settings = proposer or ProposerSettings()
        super().__init__(size, boot=False, **settings)
        self.proposing = {name: ProposingHost(self, name) for name in self.names}
        self.hosts = dict(self.proposing)
        for name in self.names:
            self.hosts[name].boot()
        self.connect_all()

    def __getitem__(self, name: str) -> ProposingHost:
        return self.proposing[name]

    def lead(self) -> ProposingHost:
        return self.proposing[self.leader().name]

    def follow(self) -> list[ProposingHost]:
        leader = self.lead()
        return [host for host in self.proposing.values() if host is not leader and host.node is not None]

    def await_call(self, call: Call, milliseconds: int = 20_000) -> Any:
        self.run_until(lambda: call.done, milliseconds)
        return call.result

    def open_session(self, host: ProposingHost, key: str = "", *, ttl_ms: int = 15_000) -> str:
        outcome = self.await_call(host.submit(open_session(ttl_ms=ttl_ms), key))
        assert isinstance(outcome, SessionOpened), outcome
        return outcome.session

    def acquire(self, host: ProposingHost, session: str, name: str = "job") -> int:
        outcome = self.await_call(host.submit(acquire(session, name), f"{session}/{name}/{host.applied_index()}"))
        assert isinstance(outcome, LeaseGranted), outcome
        return outcome.token

    def agree(self) -> bool:
        """All running nodes have applied the same and come to the same."""
        running = [host for host in self.proposing.values() if host.node is not None]
        if len({host.applied_index() for host in running}) > 1:
            return False
        digests = {host.proposer.digest() for host in running}
        assert len(digests) == 1, digests
        return True


def open_session(*, ttl_ms: int = 15_000, suffix: str = "x") -> OpenSession:
    grace_ms = min(1_000, ttl_ms)
    return OpenSession(tenant="default", suffix=suffix, ttl_ms=ttl_ms, disconnect_grace_ms=grace_ms)


def acquire(session: str, name: str = "job") -> AcquireLease:
    return AcquireLease(tenant="default", name=name, session=session)


def release(session: str, token: int, name: str = "job") -> ReleaseLease:
    return ReleaseLease(tenant="default", name=name, session=session, token=token)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind.name for event in events]
