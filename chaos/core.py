"""The product's proposer and state machine on the simulated node, and the checks of what they promise.

Every node reports what it applies; the first to apply an entry defines the one history, the others are compared with
it.
``Ledger`` holds that history as far as the guarantees need it, and what agents believe.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from chaos.disk import SimLogStore
from chaos.job_ledger import JobLedger
from chaos.process import NodeProcess, check_copies, entry_bytes_max
from chaos.profiles import Shape
from chaos.world import Host, World
from sidecar.consensus.ports import Role
from sidecar.core.commands import (
    AcquireLease,
    ApplyJobs,
    BeginRecord,
    CancelWait,
    Command,
    CompleteRecord,
    CompleteRun,
    FailRun,
    LeaseQueued,
    Limits,
    OpenSession,
    Reason,
    Refused,
    Request,
    RequestKey,
    Result,
    RollbackJob,
    SetSwitch,
    Stamp,
    TriggerJob,
)
from sidecar.core.events import Event, Kind
from sidecar.core.machine import Machine
from sidecar.proposer import Done, Failed, Proposer, ProposerSettings
from sidecar.proposer.batches import decode_batch
from sidecar.scheduling.scheduler import Scheduler, SchedulerSettings

TENANT = "sim"
_DIGEST_EVERY = 16  # a digest encodes the whole state
_REPEATS_FREE = 500  # items of a run that may be proposed again, in doubt

Applied = tuple[Stamp, Request, Result, Sequence[Event]]


class Belief(NamedTuple):
    agent: str
    token: int
    until_us: int  # virtual time at which the holder's own clock reaches its safe-until


class Ledger:
    """What the one history says, what agents were told and what they believe. Judges both."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.checkers = world.checkers
        self._entries: dict[int, int] = {}  # index -> checksum of results and events
        self._applied_items = self._repeated_items = 0
        self._revision = 0
        self._tokens: dict[str, int] = {}
        self._executed: dict[str, int] = {}  # request name -> how often it had an effect
        self._never: dict[str, str] = {}  # request name -> who was told that it did not and will not happen
        self._completed: dict[str, tuple[int, bytes]] = {}
        self._results: dict[str, list[Result]] = {}  # request name -> what the history answered it
        self._begun: dict[tuple[str, int], str] = {}
        self._ended_sessions: dict[str, str] = {}
        self._cancelled: dict[tuple[str, str], bool] = {}
        self.beliefs: dict[str, list[Belief]] = {}
        self.told_complete: dict[str, bytes] = {}
        self.session_safe: dict[str, Callable[[], int]] = {}  # session -> until when (virtual) its agent believes in it
        self.jobs: JobLedger | None = None

    # ---- the one history

    def applied(self, host: str, index: int, items: int, batch: list[Applied]) -> None:
        """``items`` of an entry were applied, but for those that had been before."""
        encoded = zlib.crc32(msgspec.msgpack.encode([(result, list(events)) for _, _, result, events in batch]))
        known = self._entries.get(index)
        if known is not None:
            if known != encoded:
                self.checkers.violation("digest", host, f"entry {index} had other results or events elsewhere")
            return
        self._entries[index] = encoded
        self._applied_items += len(batch)
        self._repeated_items += items - len(batch)
        if self._repeated_items > max(_REPEATS_FREE, self._applied_items):
            text = f"{self._repeated_items} items were proposed again in vain, {self._applied_items} were applied"
            self.checkers.violation("storm", host, text)
        for stamp, request, result, events in batch:
            self._time(host, stamp)
            for event in events:
                self._event(host, event)
            self._request(host, stamp, request, result, events)
            if self.jobs is not None:
                self.jobs.applied(host, stamp, request, result, events)

    def _time(self, host: str, stamp: Stamp) -> None:
        """Cluster time began with the world, and may fall behind real time, but never runs ahead of it."""
        drift_us = self._world.now_us * self._world.shape.drift_ppm // 1_000_000
        ahead_us = stamp.cluster_ms * 1_000 - (self._world.now_us + drift_us)
        if ahead_us > 0:
            self.checkers.violation("cluster-time", host, f"cluster time is {ahead_us} us ahead of real time")

    def _event(self, host: str, event: Event) -> None:
        if event.revision != self._revision + 1:
            self.checkers.violation("revision", host, f"{event.revision} after {self._revision}")
        self._revision = event.revision
        self._world.detail(
            host,
            f"event {event.revision} {event.kind.name} {event.subject} {event.session} {event.waiter} {event.token} "
            f"{event.due_ms} {event.sequence} {event.cause} {event.reason}",
        )
        if event.kind is Kind.LEASE_GRANTED:
            self._granted(host, event)
        elif event.kind in (Kind.SESSION_EXPIRED, Kind.SESSION_CLOSED):
            self._session_ended(host, event)
        elif event.kind is Kind.RECORD_COMPLETED:
            if event.subject in self._completed:
                self.checkers.violation("completed-twice", host, f"{event.subject} in attempt {event.attempt}")
            self._completed[event.subject] = (event.attempt, b"")
        elif event.kind is Kind.RECORD_FORGOTTEN:
            self._completed.pop(event.subject, None)
            for place in [place for place in self._begun if place[0] == event.subject]:
                del self._begun[place]
        elif event.kind is Kind.RECORD_BEGUN:
            owner = self._begun.setdefault((event.subject, event.attempt), event.session)
            if owner != event.session:
                text = f"attempt {event.attempt} at {event.subject} was given to {owner} and to {event.session}"
                self.checkers.violation("begun-twice", host, text)

    def _granted(self, host: str, event: Event) -> None:
        last = self._tokens.get(event.subject, 0)
        if event.token <= last:
            self.checkers.violation("token", host, f"{event.subject}: token {event.token} after {last}")
        self._tokens[event.subject] = event.token
        if event.session in self._ended_sessions:
            self.checkers.violation("granted-to-dead", host, f"{event.subject} to {event.session}, which has ended")
        if event.waiter and (event.session, event.waiter) in self._cancelled:
            text = f"{event.subject} to {event.waiter} of {event.session}, which had given up"
            self.checkers.violation("granted-to-dead", host, text)

    def _session_ended(self, host: str, event: Event) -> None:
        self._ended_sessions[event.session] = event.kind.name
        safe_us = self.session_safe.get(event.session)
        if safe_us is not None and event.kind is Kind.SESSION_EXPIRED and safe_us() > self._world.now_us:
            left_ms = (safe_us() - self._world.now_us) // 1000
            text = f"{event.session} expires, its agent relies on it for {left_ms} ms more"
            self.checkers.violation("expired-early", host, text)

    def _request(self, host: str, stamp: Stamp, request: Request, result: Result, events: Sequence[Event]) -> None:
        command, key = request.command, request.key
        self._results.setdefault(name_of(command, key), []).append(result)
        if isinstance(command, CancelWait) and (
            not isinstance(result, Refused) or result.reason is Reason.WAIT_NOT_FOUND
        ):
            self._cancelled[command.session, command.waiter] = True
        if key is None or not _took_effect(command, result, events):
            return
        name = identity(key)
        if request.not_after_ms and stamp.cluster_ms > request.not_after_ms:
            late_ms = stamp.cluster_ms - request.not_after_ms
            self.checkers.violation("applied-late", host, f"request {name}, {late_ms} ms after its deadline")
        self._world.detail(host, f"request {name} takes effect: {type(command).__name__}")
        count = self._executed[name] = self._executed.get(name, 0) + 1
        if count > 1:
            self.checkers.violation("applied-twice", host, f"request {name}: {type(command).__name__}")
        if name in self._never:
            text = f"request {name} took effect after {self._never[name]} was told that it never would"
            self.checkers.violation("definite-but-happened", host, text)

    def forgotten(self, key: RequestKey) -> None:
        """A cancelled request is a fresh try when it comes again."""
        self._executed.pop(identity(key), None)

    # ---- what agents are told

    def told_never(self, agent: str, key: RequestKey) -> None:
        name = identity(key)
        self._never[name] = agent
        if name in self._executed:
            text = f"{agent} is told that request {name} never happened, but it did"
            self.checkers.violation("definite-but-happened", agent, text)

    def told(self, agent: str, command: Command, key: RequestKey | None, result: Result) -> None:
        """A caller's answer must be one that the history gave to this very request."""
        if result not in self._results.get(name_of(command, key), ()):
            self.checkers.violation("wrong-answer", agent, f"{command} is answered {result}")

    def told_completed(self, agent: str, key: str, result: bytes) -> None:
        known = self.told_complete.setdefault(key, result)
        if known != result:
            self.checkers.violation("completed-twice", agent, f"{key} completed with {known!r} and with {result!r}")

    # ---- what agents believe

    def believe(self, lease: str, belief: Belief) -> None:
        """From now on this agent acts as the holder. Nobody else may."""
        self._world.detail(belief.agent, f"holds {lease} (token {belief.token}) until {belief.until_us / 1e6:.6f}")
        now_us = self._world.now_us
        others = [each for each in self.beliefs.get(lease, []) if each.until_us > now_us and each.agent != belief.agent]
        for other in others:
            text = (
                f"{lease}: {belief.agent} (token {belief.token}) and {other.agent} (token {other.token}) both hold it"
            )
            self.checkers.violation("two-holders", belief.agent, text)
        self.beliefs[lease] = [*others, belief]

    def disbelieve(self, lease: str, agent: str) -> None:
        self._world.detail(agent, f"no longer holds {lease}")
        self.beliefs[lease] = [each for each in self.beliefs.get(lease, []) if each.agent != agent]


def identity(key: RequestKey) -> str:
    return f"{key.origin}/{key.sequence}" if key.origin else key.name


def name_of(command: Command, key: RequestKey | None) -> str:
    """Of a request without a key: what it is about. Enough to tell whether an answer can be its own."""
    return identity(key) if key is not None else f"{command}"


def _took_effect(command: Command, result: Result, events: Sequence[Event]) -> bool:
    """Whether this very apply did something for the request (a repeat is answered from memory and does nothing)."""
    if isinstance(result, Refused):
        return False
    if isinstance(command, OpenSession):
        return any(event.kind is Kind.SESSION_OPENED for event in events)
    if isinstance(command, AcquireLease):
        kind = Kind.LEASE_WAITING if isinstance(result, LeaseQueued) else Kind.LEASE_GRANTED
        return any(
            event.kind is kind and event.subject == command.name and event.waiter == command.waiter for event in events
        )
    if isinstance(command, BeginRecord):
        return any(event.kind is Kind.RECORD_BEGUN and event.subject == command.key for event in events)
    if isinstance(command, CompleteRecord):
        return any(event.kind is Kind.RECORD_COMPLETED and event.subject == command.key for event in events)
    if isinstance(command, TriggerJob):
        return any(event.kind is Kind.OCCURRENCE_CREATED and event.cause == "trigger" for event in events)
    if isinstance(command, ApplyJobs | RollbackJob):
        return any(event.kind is Kind.JOB_APPLIED for event in events)
    if isinstance(command, CompleteRun | FailRun):
        return any(event.kind is Kind.RUN_ENDED and event.run == command.run for event in events)
    if isinstance(command, SetSwitch):
        return any(event.kind is Kind.SWITCH_SET for event in events)
    return False


class ObservedMachine(Machine):
    """The product's machine, reporting each request it applies."""

    def __init__(self, limits: Limits) -> None:
        self.batch: list[Applied] = []
        super().__init__(limits)

    def apply(self, stamp: Stamp, request: Request) -> tuple[Result, Sequence[Event]]:
        result, events = super().apply(stamp, request)
        self.batch.append((stamp, request, result, events))
        return result, events


class ObservedProposer(Proposer):
    """The product's proposer, reporting what the node asks of it."""

    observed: CoreProcess

    def apply(self, index: int, payload: bytes) -> None:
        super().apply(index, payload)
        self.observed.applied(index, payload)

    def role_changed(self, role: Role, term: int, leader: str | None) -> None:
        self.observed.role_changed(role, term)
        super().role_changed(role, term, leader)


class Alarm:
    """Calls ``poll`` at a time of the host's monotonic clock; a later call takes the place of an earlier one."""

    def __init__(self, host: Host, poll: Callable[[], None]) -> None:
        self._host = host
        self._poll = poll
        self._number = 0

    def set(self, when_s: float) -> None:
        self._number += 1
        number = self._number

        def ring() -> None:
            if number == self._number:
                self._poll()

        self._host.after(self._host.clock.until_us(when_s), ring)


class CoreProcess(NodeProcess):
    """One simulated sidecar without its gRPC shell: node, proposer, machine."""

    def __init__(self, host: Host, ledger: Ledger) -> None:
        self._ledger = ledger
        self.clock = host.clock
        self.machine = ObservedMachine(limits_of(host.world.shape))
        self._applied_index = 0
        self._asked = 0
        self.unanswered: dict[int, str] = {}
        # Session -> who hears of its events; None: a gap.
        self.listeners: dict[str, Callable[[Event | None], None]] = {}
        super().__init__(host, lambda store: self._application(host, store))
        self.proposer.attach(self._node, self._runner.wake, Alarm(host, self.proposer.poll).set)
        self.proposer.subscribe(self._events, self._gap)
        if host.world.shape.application == "jobs":
            settings = SchedulerSettings(nodes=len(host.world.hosts))
            self.scheduler = Scheduler(self.proposer, self._node, host.clock, settings)
            self.scheduler.attach(Alarm(host, self.scheduler.poll).set)

    def _application(self, host: Host, store: SimLogStore) -> ObservedProposer:
        settings = ProposerSettings(entry_bytes_max=entry_bytes_max(host.world.shape.append_bytes_max))
        self.proposer = ObservedProposer(self.machine, host.clock, host.name, store.incarnation, settings=settings)
        self.proposer.observed = self
        self._store = store
        return self.proposer

    # ---- what the checkers see

    def applied(self, index: int, payload: bytes) -> None:
        digest = self.proposer.digest() if index % _DIGEST_EVERY == 0 else None
        self._tell_applied(self._store.image, index, payload, digest)
        self._applied_index = index
        batch, self.machine.batch = self.machine.batch, []
        items = len(decode_batch(payload).items)
        self._ledger.applied(self._host.name, index, items, batch)

    def role_changed(self, role: Role, term: int) -> None:
        self._tell_role(role, term, self._store.image)

    # ---- what agents ask for

    def submit(self, command: Command, key: RequestKey | None, timeout_ms: int, done: Done) -> None:
        self._asked += 1
        number = self._asked
        self.unanswered[number] = type(command).__name__

        def answered(outcome: Result | Failed) -> None:
            if self.unanswered.pop(number, None) is None:
                self._world.checkers.violation("answered-twice", self._host.name, f"{command}: {outcome}")
            if not isinstance(outcome, Failed):
                self._ledger.told(self._host.name, command, key, outcome)
            if not isinstance(outcome, Failed | Refused):
                self._world.checkers.acks += 1
                self._world.checkers.known(getattr(outcome, "revision", 0))
                check_copies(self._world, self._host.name, self._applied_index)
            done(outcome)

        self.proposer.submit(command, answered, timeout_ms=timeout_ms, key=key)

    def renew(self, session: str, connection: str, timeout_ms: int, done: Done) -> None:
        self.proposer.renew(session, done, timeout_ms=timeout_ms, connection=connection)

    def _events(self, events: Sequence[Event]) -> None:
        for event in events:
            listener = self.listeners.get(event.session)
            if listener is not None:
                listener(event)

    def _gap(self) -> None:
        for listener in list(self.listeners.values()):
            listener(None)

    # ---- what the simulation asks of any process

    def propose(self, command: int, done: Callable[[str], None]) -> None:
        probe = OpenSession(tenant=TENANT, suffix="probe", agent=f"probe-{command}", ttl_ms=3_600_000)
        key = RequestKey(tenant=TENANT, origin="", name=f"probe-{command}")
        self.submit(probe, key, 2_000, lambda outcome: done("unknown" if isinstance(outcome, Failed) else "acked"))

    def read(self, done: Callable[[int | None], None]) -> None:
        self._node.read_barrier(lambda current: done(self.machine.revision if current else None))
        self._runner.wake()

    def digest(self) -> str:
        return self.proposer.digest()

    def holds(self, command: int) -> bool:
        return any(row.agent == f"probe-{command}" for row in self.machine.sessions(TENANT, "", 1_000))

    def leftovers(self) -> dict[str, int]:
        """What is left of agents: the probes' own sessions live on, and hold nothing. Everybody has had an answer."""
        counts = self.machine.counts()
        probes = sum(1 for row in self.machine.sessions(TENANT, "", 1_000) if row.agent.startswith("probe-"))
        empty = ("holders", "waiters", "pending", "runs", "workers")
        left = {name: counts[name] for name in empty} | {"sessions": counts["sessions"] - probes}
        left["unanswered"] = len(self.unanswered)
        return {name: count for name, count in left.items() if count}


def limits_of(shape: Shape) -> Limits:
    return Limits(
        events_max=400,
        starts_per_second_max=shape.starts_per_second,
        job_revisions_max=shape.job_revisions,
        occurrences_max=shape.occurrences,
    )


def is_expired(result: Result) -> bool:
    return isinstance(result, Refused) and result.reason is Reason.EXPIRED_REQUEST
