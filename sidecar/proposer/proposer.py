"""The proposer: the node's Application. Every path of a request through Raft is here, from submit to done.

    submit -> leading?  queue -> next_entry (one batch a turn, stamped) -> log
              following? outbound -> poll -> node.forward -> the leader's queue -> the same
    committed -> apply on EVERY node, in log order -> the origin's own waiter is staged -> settle -> done

Rules:

1. A waiter is resolved by the apply of its own node, so a read there sees the write. There is no reply message.
2. An item is named by (origin, sequence) and applied at most once under that name: the window of applied names is
   replicated, and part of every snapshot. So an item may be sent again whenever in doubt: leader changed, silence.
3. An item that was certainly not applied under its name, or whose entry a snapshot skipped, goes on under a NEW
   sequence: in the second case only if the command can be repeated (it has a RequestKey, or is idempotent by nature).
4. ``definite`` is said only of what cannot be applied any more: it was never handed to a leader's log or to the
   network, or this node has applied past the item's ``not_after_ms`` without meeting it.
5. Nothing here blocks, sleeps or reads a clock other than the injected one. Timed work happens in ``poll``.
6. Everything is bounded: waiters, queue (items and bytes), batch (items and bytes), frames, renewals.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sidecar.consensus.ports import Clock, Role
from sidecar.core.commands import (
    AcquireLease,
    ApplyJobs,
    AttachSession,
    BackfillJob,
    BeginRecord,
    CancelWait,
    Command,
    DetachSession,
    InterruptRun,
    Limits,
    OpenSession,
    Reason,
    Refused,
    RenewSessions,
    Request,
    RequestKey,
    Result,
    SessionsRenewed,
    SetLimits,
    SetSwitch,
    SettleDue,
    SetTzdata,
    Stamp,
    Tick,
    TriggerJob,
)
from sidecar.core.events import Event
from sidecar.core.machine import Captured as MachineCaptured
from sidecar.core.machine import Machine
from sidecar.proposer.batches import (
    BATCH_OVERHEAD_BYTES,
    AppliedWindow,
    Item,
    MalformedBatch,
    NodeWindow,
    decode_batch,
    decode_forwarded,
    decode_stamp,
    encode_batch,
    encode_forwarded,
    encode_item,
    format_origin,
    parse_origin,
)
from sidecar.proposer.cluster_time import ClusterTime
from sidecar.proposer.outcomes import Done, Failed, Failure, Outcome, Subscriber
from sidecar.proposer.pressure import Pressure
from sidecar.proposer.waiters import Deadlines, Pending, Renewal, RenewalPart, RenewalWindow

# What the leader's own side proposes. Not shed for being slow: then schedules would stand still under load.
DUTIES = (SettleDue, SetTzdata)
REPEATABLE = (Tick, SetLimits, RenewSessions, AttachSession, DetachSession, CancelWait, *DUTIES)
# What makes the state larger; everything else helps somebody to finish, or is the leader's duty.
GROWING = (OpenSession, AcquireLease, BeginRecord, ApplyJobs, TriggerJob, BackfillJob)
# Stopping what runs is let in above the bounds, so many at once: it is needed most when there is too much.
STOPS, STOPS_ROOM = (SetSwitch, InterruptRun), 64
NEVER = float("inf")


class ProposerNode(Protocol):
    """What the proposer asks of its consensus node."""

    def is_leader(self) -> bool: ...
    def forward(self, payload: bytes) -> bool: ...


class Observer(Protocol):
    """Told what happens, for metrics."""

    def batch_proposed(self, items: int, size_bytes: int) -> None: ...
    def request_shed(self, cause: str) -> None: ...
    def proposal_failed(self, failure: str) -> None: ...
    def item_dropped(self, cause: str) -> None: ...
    def leader_learned(self) -> None: ...


class _Unobserved:
    def batch_proposed(self, items: int, size_bytes: int) -> None: ...
    def request_shed(self, cause: str) -> None: ...
    def proposal_failed(self, failure: str) -> None: ...
    def item_dropped(self, cause: str) -> None: ...
    def leader_learned(self) -> None: ...


class ProposerSettings(msgspec.Struct, frozen=True, kw_only=True):
    limits: Limits | None = (
        None  # what this node wants the cluster's limits to be, should it lead; None: whatever they are
    )
    renewal_window_ms: int = 100
    inflight_max: int = 10_000  # proposals of this node without a result
    renewals_max: int = 50_000  # in one window
    queue_max: int = 10_000  # own items on the leader that are not in the log yet; four times as many from followers
    queue_bytes_max: int = 64 << 20
    entry_bytes_max: int = 1 << 20
    batch_items_max: int = 4_000
    forward_bytes_max: int = 256 << 10
    leader_wait_ms: int = 1_700  # a proposal is answered NO_LEADER after this, ...
    leader_grace_ms: int = 200  # ... but not before this much time without a leader has passed
    resend_ms: int = 500  # silence after which an item is forwarded again; doubled each time
    resend_max_ms: int = 4_000
    forward_retry_ms: int = 50
    tick_spacing_ms: int = 10
    shed_latency_ms: int = 1_000
    shed_lag_ms: int = 200


class _Queued(msgspec.Struct):
    """An item on its way into this leader's log. ``pending`` when it is our own."""

    origin: str
    sequence: int
    encoded: bytes
    pending: Pending | None = None


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The replicated application: the machine's snapshot, and which items were applied."""

    machine: bytes
    window: list[NodeWindow]


class Captured:
    """An immutable picture; ``encode`` may run on another thread."""

    def __init__(self, machine: MachineCaptured, window: list[NodeWindow]) -> None:
        self._machine = machine
        self._window = window

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(_Snapshot(self._machine.encode(), self._window))

    def digest(self) -> str:
        """May run on another thread, too."""
        window = msgspec.msgpack.encode(self._window)
        return hashlib.blake2b(self._machine.digest().encode() + window, digest_size=16).hexdigest()


class Proposer:
    """One node's proposer. All methods are called from the node's thread."""

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        node_id: str,
        incarnation: int,
        *,
        settings: ProposerSettings | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.machine = machine
        self.settings = settings or ProposerSettings()
        self.pressure = Pressure(self.settings.shed_latency_ms, self.settings.shed_lag_ms)
        self._clock = clock
        self._node_id, self._incarnation = node_id, incarnation
        self._origin = format_origin(node_id, incarnation)
        self._observer: Observer = observer or _Unobserved()
        self._time = ClusterTime(clock, machine.stamp.cluster_ms)
        self._stopping = False
        self._held_back = ""
        # Replicated.
        self._window = AppliedWindow()
        # Waiters of this node.
        self._sequence = 0
        self._pending: dict[int, Pending] = {}
        self._deadlines = Deadlines()
        self._renewals = RenewalWindow()
        # What this turn's applies came to, until settle.
        self._staged: dict[int, Result] = {}
        self._unapplied: list[int] = []
        self._staged_failures: list[tuple[Pending, Failed]] = []
        self._events: list[Event] = []
        self._published = machine.revision
        self._restored = False
        self._subscribers: dict[int, tuple[Subscriber, Callable[[], None] | None]] = {}
        self._subscriptions = 0
        # The wall time that a leader stamps; who knows the others' clocks may put a better one in its place.
        self.wall_ms: Callable[[], int] = clock.wall_ms
        # Called when this node begins or ceases to lead, or learns of another leader.
        self.on_role_change: list[Callable[[], None]] = []
        # The role of this node.
        self._role: tuple[Role, int, str | None] = (Role.FOLLOWER, 0, None)
        self._leading = False
        self._leader: str | None = None
        self._leaderless_since_s: float | None = clock.monotonic_s()
        self._forward_failed = False
        # Following: items to forward. Leading: items to append, and the names of all that are queued or in the log.
        self._outbound: deque[Pending] = deque()
        self._resend_check_s = 0.0
        self._queue: deque[_Queued] = deque()
        self._queue_bytes = 0
        self._held: set[tuple[str, int]] = set()
        self._stamped_ms = 0
        self._applied_stamp_ms = 0
        self._ticked_s = -NEVER
        self._limits_proposed = False
        self._scheduled_s = NEVER

    def attach(self, node: ProposerNode, wake: Callable[[], None], schedule: Callable[[float], None]) -> None:
        """``wake`` asks for a turn of the node soon; ``schedule(when_s)`` promises ``poll`` at that monotonic time."""
        self._node = node
        self._wake = wake
        self._schedule_poll = schedule
        self._schedule(self._next_poll_s(self._clock.monotonic_s()))

    # ---- callers -----------------------------------------------------------------------------------------------

    def submit(
        self,
        command: Command,
        done: Done,
        *,
        timeout_ms: int,
        key: RequestKey | None = None,
    ) -> int:
        """Propose on whichever node this is: the leader batches it, a follower passes it on; retried through leader
        changes until the timeout. ``done`` is called exactly once: with the result when that is durable and applied on
        THIS node, or with Failed; a refusal may come before this method returns.

        Returns a handle for ``withdraw``."""
        refusal = self._refusal(command, timeout_ms)
        if refusal is not None:
            done(refusal)
            return 0
        return self._propose(command, done, timeout_ms, key).sequence

    def withdraw(self, handle: int) -> None:
        """The caller gave up: an item that was not handed on yet never will be. ``done`` is not called any more."""
        pending = self._pending.get(handle)
        if pending is not None and not pending.handed and not pending.maybe_applied:
            self._finish(pending)

    def renew(self, session: str, done: Done, *, timeout_ms: int, connection: str = "") -> None:
        """Coalesced: all renewals of a window travel in one RenewSessions. ``connection``: the stream a keepalive came
        over. ``done`` gets SessionsRenewed (with the session in ``superseded`` when another stream carries it: then it
        did not count), Refused(SESSION_NOT_FOUND) when the session has ended, or Failed. Renewals are not shed for
        being slow: they keep leases."""
        now_s = self._clock.monotonic_s()
        if self._stopping:
            done(self._stopped(definite=True))
        elif self._renewals.count >= self.settings.renewals_max:
            done(self._overloaded("renewals"))
        else:
            renewal = Renewal(done, now_s, now_s + timeout_ms / 1000)
            self._renewals.add(session, connection, renewal, now_s + self._window_ms(session) / 1000)
            self._deadlines.add(renewal)
            self._schedule(min(self._renewals.closes_s, renewal.deadline_s))

    def shedding(self) -> int:
        """How long to stay away, in milliseconds; 0: new work is welcome. Cheap: ask before working on a request."""
        return self.pressure.retry_delay_ms(len(self._pending))

    def cluster_now_ms(self) -> int:
        """This node's estimate of cluster time."""
        return max(self._time.now_ms(), self.machine.stamp.cluster_ms)

    def subscribe(self, subscriber: Subscriber, on_gap: Callable[[], None] | None = None) -> Callable[[], None]:
        """Committed events, in order of revision, after each turn. ``on_gap``: events were skipped by a snapshot and
        are not held any more; look at the state again. Returns the function that ends the subscription."""
        self._subscriptions += 1
        number = self._subscriptions
        self._subscribers[number] = (subscriber, on_gap)
        return lambda: self._subscribers.pop(number, None) and None

    def hold_back(self, reason: str) -> None:
        """Refuse new sessions, leases and records of this node's callers, with this reason, until called with ""."""
        self._held_back = reason

    def stop(self) -> None:
        """Answer everybody who waits; nothing is accepted from now on."""
        self._stopping = True
        for part in self._renewals.take(self.settings.renewals_max):
            for _, renewals in part.values():
                for renewal in renewals:
                    self._resolve(renewal, self._stopped(definite=True))
        for pending in list(self._pending.values()):
            self._fail(pending, self._stopped(definite=self._definite(pending)))

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def queued(self) -> int:
        return len(self._queue)

    # ---- admission ---------------------------------------------------------------------------------------------

    def _refusal(self, command: Command, timeout_ms: int) -> Failed | None:
        if self._stopping:
            return self._stopped(definite=True)
        if self._held_back and isinstance(command, GROWING):
            self._observer.request_shed("held_back")
            message = self._held_back
            return Failed(failure=Failure.OVERLOADED, definite=True, message=message, retry_delay_ms=5_000)
        if timeout_ms <= 0:
            return Failed(failure=Failure.DEADLINE, definite=True, message="the deadline has passed")
        stops = isinstance(command, STOPS)
        room = STOPS_ROOM if stops else 0
        if len(self._pending) >= self.settings.inflight_max + room:
            return self._overloaded("in_flight")
        full = len(self._queue) >= self.settings.queue_max or self._queue_bytes >= self.settings.queue_bytes_max
        if full and not stops:
            return self._overloaded("queue")
        if self.shedding() and not (stops or isinstance(command, DUTIES)):
            return self._overloaded("latency")
        return None

    def _overloaded(self, cause: str) -> Failed:
        self._observer.request_shed(cause)
        delay_ms = max(self.shedding(), self.pressure.full_delay_ms())
        message = f"this node has more work than it can do in time ({cause})"
        return Failed(failure=Failure.OVERLOADED, definite=True, message=message, retry_delay_ms=delay_ms)

    @staticmethod
    def _stopped(*, definite: bool) -> Failed:
        return Failed(
            failure=Failure.STOPPING, definite=definite, message="this node is stopping", retry_delay_ms=1_000
        )

    def _propose(self, command: Command, done: Done, timeout_ms: int, key: RequestKey | None) -> Pending:
        now_s = self._clock.monotonic_s()
        request = Request(command=command, key=key, not_after_ms=self.cluster_now_ms() + timeout_ms)
        pending = Pending(0, request, done, now_s, now_s + timeout_ms / 1000)
        self._name(pending)
        if len(pending.encoded) > self.settings.entry_bytes_max - BATCH_OVERHEAD_BYTES:
            message = (
                f"{len(pending.encoded)} bytes; at most {self.settings.entry_bytes_max} fit into an entry of the log"
            )
            self._fail(pending, Failed(failure=Failure.TOO_LARGE, definite=True, message=message))
            return pending
        self._deadlines.add(pending)
        self._deadlines.compact(len(self._pending) + self._renewals.count)
        self._dispatch(pending)
        self._schedule(pending.deadline_s)
        return pending

    def _name(self, pending: Pending) -> None:
        """A fresh sequence: what happens to earlier ones no longer concerns the waiter."""
        self._pending.pop(pending.sequence, None)
        self._sequence += 1
        pending.sequence = self._sequence
        pending.encoded = encode_item(Item(self._origin, pending.sequence, pending.request))
        pending.handed = False
        pending.resend_after_s = self.settings.resend_ms / 1000
        self._pending[pending.sequence] = pending

    def _dispatch(self, pending: Pending) -> None:
        """Towards the log, by the way that leads there now. Without a leader it waits for ``role_changed``."""
        if self._leading:
            self._enqueue(_Queued(self._origin, pending.sequence, pending.encoded, pending))
        elif self._leader is not None:
            self._outbound.append(pending)
            self._schedule(self._clock.monotonic_s())
        else:
            self._schedule(self._next_leaderless_check_s(self._clock.monotonic_s()))

    def _enqueue(self, queued: _Queued) -> None:
        self._held.add((queued.origin, queued.sequence))
        self._queue.append(queued)
        self._queue_bytes += len(queued.encoded)
        self._wake()

    # ---- renewals ----------------------------------------------------------------------------------------------

    def _window_ms(self, session: str) -> int:
        """Shorter for a session whose ttl is so short that the window would cost a good part of it."""
        known = self.machine.session(session)
        return min(self.settings.renewal_window_ms, known.ttl_ms // 20) if known else self.settings.renewal_window_ms

    def _close_window(self, now_s: float) -> None:
        if now_s < self._renewals.closes_s:
            return
        for part in self._renewals.take(sessions_max=2_000):
            self._propose_renewals(part, now_s)

    def _propose_renewals(self, part: RenewalPart, now_s: float) -> None:
        def done(outcome: Outcome) -> None:
            for session, (_, renewals) in part.items():
                own = _renewal_outcome(session, outcome)
                for renewal in renewals:
                    self._resolve(renewal, own)

        everyone = [renewal for _, renewals in part.values() for renewal in renewals]
        timeout_ms = max(1, int((max(renewal.deadline_s for renewal in everyone) - now_s) * 1000))
        connections = tuple(connection for connection, _ in part.values())
        command = RenewSessions(sessions=tuple(part), connections=connections if any(connections) else ())
        carrier = self._propose(command, done, timeout_ms, None)
        carrier.submitted_s = min(renewal.submitted_s for renewal in everyone)
        for renewal in everyone:
            renewal.carrier = carrier

    # ---- timed work --------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Whatever is due by the clock. Called when ``schedule`` said so; harmless at any other time."""
        now_s = self._clock.monotonic_s()
        self._scheduled_s = NEVER
        self._expire(now_s)
        self._close_window(now_s)
        if self._leading:
            if self._duty_due_s(now_s) <= now_s:
                self._wake()
        else:
            self._resend(now_s)
            self._forward(now_s)
        self._fail_leaderless(now_s)
        self._schedule(self._next_poll_s(now_s))

    def _schedule(self, when_s: float) -> None:
        if when_s < self._scheduled_s:
            self._scheduled_s = when_s
            self._schedule_poll(when_s)

    def _next_poll_s(self, now_s: float) -> float:
        due_s = min(self._deadlines.next_s(), self._renewals.closes_s)
        if self._leading:
            # What is due already was asked of the node by wake; look again in case the node could not take it.
            due_s = min(due_s, max(self._duty_due_s(now_s), now_s + self.settings.forward_retry_ms / 1000))
        elif self._pending:
            due_s = min(due_s, now_s + self.settings.resend_ms / 2000)
        if self._outbound:
            due_s = min(due_s, now_s + self.settings.forward_retry_ms / 1000)
        if self._pending:
            due_s = min(due_s, self._next_leaderless_check_s(now_s))
        return max(due_s, now_s)

    def _expire(self, now_s: float) -> None:
        for waiter in self._deadlines.due(now_s):
            if isinstance(waiter, Renewal):
                carrier = waiter.carrier
                definite = carrier is None or self._definite(carrier)
                self._resolve(waiter, self._late(definite))
            elif isinstance(waiter, Pending) and waiter.sequence not in self._staged:
                # A staged one has its result, and settle is about to deliver it.
                self._fail(waiter, self._late(self._definite(waiter)))

    @staticmethod
    def _late(definite: bool) -> Failed:
        what = "it was not applied and will not be" if definite else "whether it was applied is not known"
        return Failed(
            failure=Failure.DEADLINE,
            definite=definite,
            message=f"the deadline passed before there was a result; {what}",
        )

    def _definite(self, pending: Pending) -> bool:
        if pending.maybe_applied or pending.sequence in self._staged:
            return False
        # Stamps do not step back: an entry applied from now on has a later one, and would refuse the request.
        return not pending.handed or self.machine.stamp.cluster_ms > pending.request.not_after_ms

    # ---- without a leader --------------------------------------------------------------------------------------

    def _update_leaderless(self, now_s: float) -> None:
        usable = self._node.is_leader() if self._leading else self._leader is not None and not self._forward_failed
        if usable:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = now_s

    def _next_leaderless_check_s(self, now_s: float) -> float:
        return now_s + self.settings.leader_grace_ms / 2000

    def _fail_leaderless(self, now_s: float) -> None:
        self._update_leaderless(now_s)
        since_s = self._leaderless_since_s
        if since_s is None or now_s < since_s + self.settings.leader_grace_ms / 1000:
            return
        wait_s = self.settings.leader_wait_ms / 1000
        for pending in [
            p for p in self._pending.values() if now_s >= p.submitted_s + wait_s and p.sequence not in self._staged
        ]:
            message = "no leader with a quorum is known to this node"
            definite = self._definite(pending)
            self._fail(
                pending, Failed(failure=Failure.NO_LEADER, definite=definite, message=message, retry_delay_ms=200)
            )

    # ---- following ---------------------------------------------------------------------------------------------

    def _resend(self, now_s: float) -> None:
        """Silence: the frame was lost, or the leader dropped the item. The window makes a repeat harmless."""
        if now_s < self._resend_check_s or self._leader is None:
            return
        self._resend_check_s = now_s + self.settings.resend_ms / 4000
        for pending in self._pending.values():
            if pending.handed and now_s >= pending.sent_s + pending.resend_after_s:
                pending.resend_after_s = min(2 * pending.resend_after_s, self.settings.resend_max_ms / 1000)
                pending.sent_s = now_s
                self._outbound.append(pending)

    def _forward(self, now_s: float) -> None:
        while self._outbound and self._leader is not None:
            frame: list[Pending] = []
            size = 0
            while self._outbound:
                size += len(self._outbound[0].encoded)
                if frame and size > self.settings.forward_bytes_max:
                    break
                pending = self._outbound.popleft()
                if not pending.finished:
                    frame.append(pending)
            if not frame:
                return
            self._forward_failed = not self._node.forward(encode_forwarded([p.encoded for p in frame]))
            if self._forward_failed:
                self._outbound.extendleft(reversed(frame))
                return
            for pending in frame:
                pending.handed = True
                pending.sent_s = now_s

    # ---- leading -----------------------------------------------------------------------------------------------

    def _duty(self, now_ms: int) -> Command | None:
        """What the leader proposes by itself: the limits of its configuration, and the passing of time."""
        limits = self._limits_due()
        if limits is not None:
            self._limits_proposed = True
            return SetLimits(limits=limits)
        if self._queue:
            return None  # any request lets time pass
        now_s = self._clock.monotonic_s()
        if self._tick_due_ms() <= now_ms and now_s >= self._ticked_s + self.settings.tick_spacing_ms / 1000:
            self._ticked_s = now_s
            return Tick()
        return None

    def _limits_due(self) -> Limits | None:
        """Those of this leader's configuration, if the cluster has others and was not told in this term."""
        wanted = self.settings.limits
        return None if self._limits_proposed or wanted == self.machine.limits else wanted

    def _tick_due_ms(self) -> float:
        """Never while an entry that is stamped late enough is on its way: one tick in flight, no storm of them."""
        deadline_ms = self.machine.next_deadline_ms()
        if deadline_ms is None or (deadline_ms <= self._stamped_ms and self._applied_stamp_ms < self._stamped_ms):
            return NEVER
        return deadline_ms

    def _duty_due_s(self, now_s: float) -> float:
        if self._limits_due() is not None:
            return now_s
        due_ms = self._tick_due_ms()
        if due_ms == NEVER:
            return NEVER
        return max(self._time.until_s(int(due_ms)), self._ticked_s + self.settings.tick_spacing_ms / 1000)

    def next_entry(self) -> bytes | None:
        if not self._leading or not self._node.is_leader():
            return None  # without a quorum an entry could be committed much later, by another leader
        now_ms = max(self._time.now_ms(), self.machine.stamp.cluster_ms, self._stamped_ms)
        items, size = self._fill_batch(now_ms)
        if not items:
            return None
        self._stamped_ms = now_ms
        self._observer.batch_proposed(len(items), size)
        if self._queue:
            self._wake()
        return encode_batch(Stamp(now_ms, self.wall_ms()), items)

    def _fill_batch(self, now_ms: int) -> tuple[list[bytes], int]:
        items: list[bytes] = []
        size = BATCH_OVERHEAD_BYTES
        duty = self._duty(now_ms)
        if duty is not None:
            items.append(encode_item(Item("", 0, Request(command=duty))))
            size += len(items[0])
        while self._queue and len(items) < self.settings.batch_items_max:
            queued = self._queue[0]
            if items and size + len(queued.encoded) > self.settings.entry_bytes_max:
                break
            self._queue.popleft()
            self._queue_bytes -= len(queued.encoded)
            if queued.pending is not None:
                if queued.pending.finished:
                    self._held.discard((queued.origin, queued.sequence))
                    continue
                queued.pending.handed = True
            items.append(queued.encoded)
            size += len(queued.encoded)
        return items, size

    def forwarded(self, peer: str, payload: bytes) -> None:
        """Items of a follower. What cannot be taken is dropped: the follower sends it again after a while."""
        if not self._leading:
            return
        try:
            items = decode_forwarded(payload)
        except msgspec.MsgspecError:
            self._observer.item_dropped("malformed")
            return
        for item, encoded in items:
            cause = self._unfit(peer, item, encoded)
            if cause:
                self._observer.item_dropped(cause)
            elif not self._window.holds(item.origin, item.sequence) and (item.origin, item.sequence) not in self._held:
                self._enqueue(_Queued(item.origin, item.sequence, encoded))

    def _unfit(self, peer: str, item: Item, encoded: bytes) -> str:
        try:
            node, incarnation = parse_origin(item.origin)
        except MalformedBatch:
            return "malformed"
        if node != peer or item.origin != format_origin(node, incarnation) or item.sequence < 1:
            return "origin"
        if len(encoded) > self.settings.entry_bytes_max - BATCH_OVERHEAD_BYTES:
            return "size"
        full = len(self._queue) >= 4 * self.settings.queue_max or self._queue_bytes >= self.settings.queue_bytes_max
        return "queue" if full else ""

    # ---- the node's Application --------------------------------------------------------------------------------

    def apply(self, index: int, payload: bytes) -> None:
        """Raises MalformedBatch for an entry that is none of ours: the node must stop."""
        batch = decode_batch(payload)
        self._note_applied(batch.stamp.cluster_ms)
        for item in batch.items:
            own = item.origin == self._origin
            self._held.discard((item.origin, item.sequence))
            if item.origin and not self._window.take(item.origin, item.sequence):
                if own:
                    self._unapplied.append(item.sequence)
                continue
            result, events = self.machine.apply(batch.stamp, item.request)
            if events:
                self._events.extend(events)
            if own:
                self._staged[item.sequence] = result

    def _note_applied(self, stamp_ms: int) -> None:
        self._applied_stamp_ms = stamp_ms
        # A leader's own stamps are behind its time by definition; only an entry from before its term can be ahead.
        if not self._leading or stamp_ms > self._time.now_ms():
            self._time.applied(stamp_ms)

    def received(self, payload: bytes) -> None:
        if not self._leading:
            self._time.received(decode_stamp(payload).cluster_ms)

    def settle(self) -> None:
        """Deliver what this turn's applies came to: first results, then events."""
        staged, self._staged = self._staged, {}
        unapplied, self._unapplied = self._unapplied, []
        failures, self._staged_failures = self._staged_failures, []
        now_s = self._clock.monotonic_s()
        for sequence, result in staged.items():
            pending = self._pending.get(sequence)
            if pending is not None:
                self._deliver(pending, result, now_s)
        if unapplied and self._window.incarnation(self._node_id) > self._incarnation:
            self._overtake()
        for sequence in unapplied:
            pending = self._pending.get(sequence)
            if pending is not None:
                self._again(pending)  # certainly not applied: its result would have been met before
        for pending, failed in failures:
            self._fail(pending, failed)
        self._publish()
        if self._leading:
            # Not at once: while the node takes no entries (no quorum, a transfer), turns would chase each other.
            self._schedule(max(self._duty_due_s(now_s), now_s + self.settings.tick_spacing_ms / 1000))

    def _deliver(self, pending: Pending, result: Result, now_s: float) -> None:
        expired = isinstance(result, Refused) and result.reason is Reason.EXPIRED_REQUEST
        if expired and now_s < pending.deadline_s:
            # Our estimate of cluster time was behind (this node was down, or cut off). The entry that refused it has
            # put it right.
            remaining_ms = max(1, int((pending.deadline_s - now_s) * 1000))
            pending.request = msgspec.structs.replace(
                pending.request, not_after_ms=self.cluster_now_ms() + remaining_ms
            )
            self._again(pending)
            return
        if expired and pending.maybe_applied and pending.request.key is None:
            # True of this try only. (With a key, a try that was applied would have given its result again.)
            self._fail(pending, self._late(definite=False))
            return
        self.pressure.note_latency(int((now_s - pending.submitted_s) * 1000))
        self._resolve(pending, result)

    def _again(self, pending: Pending) -> None:
        self._name(pending)
        self._dispatch(pending)

    def _overtake(self) -> None:
        """An earlier life of this node had a higher number: its disk was lost, and the wall clock has stepped back
        since. Nothing of this life would ever be new. So it takes the next number, and all that waits goes on under
        it."""
        self._incarnation = self._window.incarnation(self._node_id) + 1
        self._origin = format_origin(self._node_id, self._incarnation)
        for pending in list(self._pending.values()):
            if pending.sequence not in self._staged:
                self._again(pending)

    def role_changed(self, role: Role, term: int, leader: str | None) -> None:
        if (role, term, leader) == self._role:
            return
        if leader is not None and leader != self._role[2]:
            self._observer.leader_learned()
        self._role = (role, term, leader)
        self._leading = role is Role.LEADER
        self._leader = None if self._leading else leader
        self._forward_failed = False
        self._queue.clear()
        self._queue_bytes = 0
        self._held.clear()
        self._outbound.clear()
        self._stamped_ms = 0
        self._limits_proposed = False
        now_s = self._clock.monotonic_s()
        if self._leading or leader is not None:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = now_s
        for pending in self._pending.values():
            if pending.sequence not in self._staged:
                pending.resend_after_s = self.settings.resend_ms / 1000
                self._dispatch(pending)
        self._schedule(now_s)
        for changed in self.on_role_change:
            changed()

    def capture(self) -> Captured:
        return Captured(self.machine.capture(), self._window.dump())

    def restore(self, payload: bytes) -> None:
        """Raises MalformedBatch for what is not a snapshot of this application."""
        try:
            snapshot = msgspec.msgpack.decode(payload, type=_Snapshot)
        except msgspec.MsgspecError as error:
            raise MalformedBatch(
                f"a snapshot of {len(payload)} bytes is not one of this application: {error}"
            ) from error
        self.machine.restore(snapshot.machine)
        self._window = AppliedWindow.load(snapshot.window)
        self._time.received(self.machine.stamp.cluster_ms)
        self._restored = True
        for pending in [p for p in self._pending.values() if p.handed and p.sequence not in self._staged]:
            self._skipped(pending)

    def _skipped(self, pending: Pending) -> None:
        """Its entry may be among those that the snapshot stands for."""
        pending.maybe_applied = True
        if pending.request.key is not None or isinstance(pending.request.command, REPEATABLE):
            self._again(pending)
        else:
            message = "a snapshot skipped the entry; whether it was applied is not known"
            failed = Failed(failure=Failure.OUTCOME_UNKNOWN, definite=False, message=message)
            self._staged_failures.append((pending, failed))

    def digest(self) -> str:
        """Of machine and window; equal on all nodes at the same applied index."""
        return self.capture().digest()

    # ---- ends --------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        events: Sequence[Event] = self._events
        self._events = []
        gap = False
        if self._restored:
            self._restored = False
            gap = self.machine.first_revision() > self._published + 1
            events = self.machine.events_from(self._published + 1, self.machine.limits.events_max) if not gap else ()
        self._published = self.machine.revision
        for subscriber, on_gap in list(self._subscribers.values()):
            if gap and on_gap is not None:
                on_gap()
            if events:
                subscriber(events)

    def _finish(self, pending: Pending) -> None:
        pending.finished = True
        self._pending.pop(pending.sequence, None)

    def _fail(self, pending: Pending, failed: Failed) -> None:
        if not pending.finished:
            self._observer.proposal_failed(failed.failure.name.lower())
            self._resolve(pending, failed)

    def _resolve(self, waiter: Pending | Renewal, outcome: Outcome) -> None:
        if waiter.finished:
            return
        if isinstance(waiter, Pending):
            self._finish(waiter)
        waiter.finished = True
        waiter.done(outcome)


def _renewal_outcome(session: str, outcome: Outcome) -> Outcome:
    """What the outcome of a window means for one of its sessions."""
    if not isinstance(outcome, SessionsRenewed):
        return outcome
    if session in outcome.ended:
        message = f"session {session} has ended"
        return Refused(reason=Reason.SESSION_NOT_FOUND, message=message, facts=(("session_id", session),))
    return SessionsRenewed(superseded=(session,) if session in outcome.superseded else ())
