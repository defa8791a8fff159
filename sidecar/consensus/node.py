"""The consensus node: the ready loop, free of clocks, sockets, disks and asyncio.

    wait for: a frame, a proposal, or the next timer
    feed frames and one batch of proposals to pysyncobj; doTick(0)
    if the log store has unsynced writes: make them durable, off the event loop     (group commit)
    send what was queued during the tick
    settle: answer those who wait for what was applied

One turn is ``begin_turn`` -> durable? -> ``end_turn``. No message that reflects an entry, a term or a vote leaves
before it is durable, because frames queued in ``begin_turn`` leave in ``end_turn`` only. The next turn does not begin
before the last one has ended; what arrives meanwhile waits in the inbox.

The duties of whoever drives a node (loop.py in production, the simulator in tests):

1. Call ``begin_turn`` when ``wake`` was called or ``next_turn_s`` has come; run ``durable``; call ``end_turn``.
2. An exception of any of the three ends the node: it must not be driven further, and the process should stop.
3. Call everything on one thread, and ``done`` of ``background`` too.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sidecar.consensus.messages import (
    ENVELOPE_BYTES_MAX,
    Append,
    Body,
    Forward,
    HandOver,
    HandOverRefused,
    MalformedFrame,
    ReadReply,
    ReadRequest,
    Standing,
    decode,
    encode,
)
from sidecar.consensus.ports import (
    Application,
    Clock,
    LogStore,
    PeerTransport,
    Role,
    SnapshotMeta,
    SnapshotStore,
    StoreError,
)
from sidecar.consensus.raft import Incoming, Outgoing, Raft, Settings

logger = logging.getLogger("tenure.consensus")

TIMER_GRAIN_S = 0.000_5  # the library's timers fire strictly after their time
COMPACTION_HELD_FACTOR = 4  # a snapshot on its way to a follower holds compaction up to this many times the bound
TAIL_FRACTION = 10  # a tenth of the bounds stays in the log for followers that are a little behind


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and bounds of one node."""

    cluster_id: str
    node_id: str
    peers: tuple[str, ...]  # ids of the other voters, without addresses
    bootstrap: bool = False
    heartbeat_ms: int = 100
    election_min_ms: int = 800
    election_max_ms: int = 1_600
    fast_election_max_ms: int = 100  # after the leader's connection was reset
    entry_bytes_max: int = 1 << 20
    append_bytes_max: int = 4 << 20  # of entries in one message; larger than any entry
    inbox_frames_max: int = 10_000
    inbox_bytes_max: int = 64 << 20
    compact_entries: int = 50_000
    compact_bytes: int = 64 << 20
    snapshot_chunk_bytes: int = 256 << 10
    reads_max: int = 10_000  # read barriers in flight

    def __post_init__(self) -> None:
        if self.node_id in self.peers or len(set(self.peers)) != len(self.peers):
            raise ValueError(f"peers of {self.node_id} must be distinct and not contain it: {', '.join(self.peers)}")
        if not 0 < 3 * self.heartbeat_ms < self.election_min_ms < self.election_max_ms:
            raise ValueError("it must hold: 3 * heartbeat_ms < election_min_ms < election_max_ms")
        if not 0 < self.fast_election_max_ms <= self.election_min_ms:
            raise ValueError("fast_election_max_ms must be positive and at most election_min_ms")
        if not 0 < self.entry_bytes_max < self.append_bytes_max:
            raise ValueError("append_bytes_max must be larger than entry_bytes_max")
        if min(self.compact_entries, self.compact_bytes, self.snapshot_chunk_bytes, self.reads_max) < 1:
            raise ValueError("bounds must be positive")

    def frame_bytes_max(self) -> int:
        """No frame between nodes with these settings is longer."""
        return max(self.append_bytes_max, self.snapshot_chunk_bytes) + ENVELOPE_BYTES_MAX


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    term: int
    leader: str | None
    commit_index: int
    applied_index: int
    last_index: int
    first_index: int
    snapshot_index: int
    voter: bool
    ready: bool  # a voter that has applied what was committed when it (re)joined, and knows a leader with a quorum
    reason: str  # why not ready
    peers: dict[
        str, tuple[bool, int, int]
    ]  # connected, match index, milliseconds since last answer (leader only; -1 never)
    leader_contact_ms: int  # since this node last knew that its applied state was current; -1 never


class Turn:
    """What ``begin_turn`` leaves to be done before ``end_turn``."""

    def __init__(self, durable: Callable[[], None] | None) -> None:
        self.durable = durable  # must have returned before end_turn; may run on another thread


class _Frame(msgspec.Struct, frozen=True):
    peer: str
    frame: bytes


class _Connected(msgspec.Struct, frozen=True):
    peer: str


class _Disconnected(msgspec.Struct, frozen=True):
    peer: str
    reset: bool


class _Read(msgspec.Struct, frozen=True):
    """Someone who waits for a read barrier: a caller here, or a follower by the number of its question."""

    deadline_s: float
    done: Callable[[bool], None] | None = None
    peer: str = ""
    number: int = 0


class _Handover(msgspec.Struct):
    """Under way: on the leader, and on the follower that passed the request on to it."""

    leader: str  # that is to be followed by another
    term: int
    deadline_s: float
    done: Callable[[str | None], None]
    to: str = ""  # on the leader
    asked_s: float = -1.0


class Node:
    """One Raft member. All methods are called from one thread."""

    def __init__(
        self,
        settings: NodeSettings,
        application: Application,
        store: LogStore,
        snapshots: SnapshotStore,
        transport: PeerTransport,
        clock: Clock,
        rng: random.Random,
        wake: Callable[[], None],
        background: Callable[[Callable[[], object], Callable[[object | BaseException], None]], None],
    ) -> None:
        """``wake`` asks for a turn soon. ``background(work, done)`` runs ``work`` on another thread and then calls
        ``done`` with what it returned or raised, on the node's own thread (snapshot encoding, writing and verifying).

        Loads the snapshot and starts ``transport``. Raises StoreError when what is on disk cannot be used.
        """
        self.settings = settings
        self._application = application
        self._store = store
        self._snapshots = snapshots
        self._transport = transport
        self._clock = clock
        self._wake = wake
        self._background = background
        self._raft = Raft(_raft_settings(settings), application, store, snapshots, clock, rng)
        self._raft.on_role_checked = self._announce_role

        self._inbox: deque[_Frame | _Connected | _Disconnected] = deque()
        self._inbox_bytes = 0
        self.frames_malformed = 0
        self.frames_dropped = 0

        self._turn: Turn | None = None
        self._failed: BaseException | None = None
        self._began_s = self._promised_s = clock.monotonic_s()
        self._announced: tuple[Role, int, str | None] = (Role.FOLLOWER, -1, None)
        self._completions: list[Callable[[], None]] = []
        self._forwards: list[tuple[str, bytes]] = []
        self._leader_heard_s: float | None = None  # in this turn
        self._current_s: float | None = None
        self._overslept = False

        self._reads: list[_Read] = []  # not asked yet
        self._reads_confirming: deque[tuple[int, int, list[_Read]]] = deque()  # round, read index
        self._reads_asked: dict[int, list[_Read]] = {}  # by number of the question to the leader
        self._reads_applying: list[tuple[int, _Read]] = []
        self._reads_count = 0
        self._read_number = 0
        self._asked_leader: tuple[str | None, int] = (None, 0)
        self._refused_by: tuple[str | None, int] | None = None

        self._handover: _Handover | None = None
        self._handover_number = 0  # of the question to the leader

        self._compacting = False
        self._compaction_wanted: list[Callable[[int, int, str | None], None]] = []
        self._compaction_waiters: list[Callable[[int, int, str | None], None]] = []
        self._compaction_retry_s = 0.0
        self._finished: deque[Callable[[], None]] = deque()
        self._retain_due = store.snapshot is not None

        transport.start(self)

    # ---- the turn --------------------------------------------------------------------------------------------------

    def begin_turn(self) -> Turn:
        """Everything but durability and sending. An exception is fatal to the node and is raised again by any later
        turn."""
        if self._failed is not None:
            raise self._failed
        assert self._turn is None, "the last turn has not ended"
        self._began_s = self._clock.monotonic_s()
        try:
            self._feed()
            self._start_reads()
            self._continue_handover()
            self._raft.tick()
            self._note_current()
            self._finish_reads()
            self._compact_if_due()
            self._verify_incoming()
            self._announce_role()
            durable = self._store.take() if self._store.dirty else None
        except BaseException as error:
            self._failed = error
            raise
        self._turn = Turn(durable)
        return self._turn

    def end_turn(self, turn: Turn) -> None:
        """What was durable may be known: send, answer, tidy up."""
        assert turn is self._turn, "not the turn that began"
        self._turn = None
        try:
            self._send_all()
            completions, self._completions = self._completions, []
            for completion in completions:
                completion()
            self._application.settle()
            self._retain_snapshot()
        except BaseException as error:
            self._failed = error
            raise
        self._overslept = self._is_late(self._began_s)
        self._promised_s = max(self.next_turn_s(), self._clock.monotonic_s())

    def next_turn_s(self) -> float:
        """Monotonic time by which the next turn is due even if nothing happens."""
        if self._inbox or self._finished or self._completions or self._more_to_do():
            return self._clock.monotonic_s()
        due_s = self._raft.next_timer_s()
        for reads in (self._reads, *self._reads_asked.values()):
            if reads:
                due_s = min(due_s, reads[0].deadline_s)
        if self._reads_applying:
            due_s = min(due_s, self._reads_applying[0][1].deadline_s)
        if self._handover is not None:
            due_s = min(due_s, self._handover.deadline_s)
        return due_s + TIMER_GRAIN_S

    def _more_to_do(self) -> bool:
        raft = self._raft
        alone = not self.settings.peers and raft.leads() and raft.commit_index() < raft.last_index()
        return alone or raft.applied_index() < raft.commit_index()

    def _feed(self) -> None:
        """Messages before timers: after a pause, what came in meanwhile is heard before anyone is held to be silent."""
        if self._overslept or self._is_late(self._promised_s):
            self._overslept = False
            self._raft.woke_late()
        while self._finished:
            self._finished.popleft()()
        inbox, self._inbox, self._inbox_bytes = self._inbox, deque(), 0
        for item in inbox:
            if item.peer not in self.settings.peers:
                continue  # a transport lets nobody else in
            if isinstance(item, _Frame):
                self._receive(item)
            elif isinstance(item, _Connected):
                self._raft.connected(item.peer)
            else:
                self._raft.disconnected(item.peer, item.reset)

    def _is_late(self, since_s: float) -> bool:
        return self._clock.monotonic_s() - since_s > self.settings.election_min_ms / 4_000

    def _note_current(self) -> None:
        """What the leader said it had committed in this turn's messages is applied."""
        if self._leader_heard_s is not None and self._raft.applied_index() >= self._raft.commit_index():
            self._current_s = self._leader_heard_s
        self._leader_heard_s = None

    def _receive(self, item: _Frame) -> None:
        try:
            envelope = decode(item.frame, self.settings.frame_bytes_max())
        except MalformedFrame as error:
            self.frames_malformed += 1
            _log_rarely(self.frames_malformed, "%s sent a malformed frame, dropped (%d so far): %s", item.peer, error)
            return
        body = self._raft.receive(item.peer, envelope)
        if body is not None:
            self._on_message(item.peer, body)
        if isinstance(envelope.body, Append) and envelope.term == self._raft.term():
            self._leader_heard_s = self._clock.monotonic_s()

    def _on_message(self, peer: str, body: Body) -> None:
        if isinstance(body, Forward):
            self._application.forwarded(peer, body.payload)
        elif isinstance(body, ReadRequest):
            self._on_read_request(peer, body.number)
        elif isinstance(body, ReadReply):
            self._on_read_reply(peer, body)
        elif isinstance(body, HandOver):
            self._on_hand_over(peer, body)
        elif isinstance(body, HandOverRefused):
            self._on_hand_over_refused(peer, body)

    def _send_all(self) -> None:
        self._raft.rounds_left()
        outbox, self._raft.outbox = self._raft.outbox, []
        wall_ms = self._clock.wall_ms()
        last: Outgoing | None = None
        frame = b""
        for message in outbox:
            if last is None or not message.same_frame(last):
                frame = encode(message.term, message.round, wall_ms, message.body)
            last = message
            self._transport.send(message.peer, frame)
        if outbox:
            self._transport.flush()

    def _announce_role(self) -> None:
        now = (self._raft.role(), self._raft.term(), self._raft.leader())
        if now != self._announced:
            self._announced = now
            logger.info("%s in term %d, leader %s", now[0].name.lower(), now[1], now[2] or "unknown")
            self._application.role_changed(*now)

    # ---- PeerEvents ------------------------------------------------------------------------------------------------

    def peer_connected(self, peer: str) -> None:
        self._inbox.append(_Connected(peer))
        self._wake()

    def peer_disconnected(self, peer: str, *, reset: bool) -> None:
        self._inbox.append(_Disconnected(peer, reset))
        self._wake()

    def frame_received(self, peer: str, frame: bytes) -> None:
        """Beyond its bounds the inbox drops frames: the protocol repairs what is lost, memory would not."""
        if (
            len(self._inbox) >= self.settings.inbox_frames_max
            or self._inbox_bytes + len(frame) > self.settings.inbox_bytes_max
        ):
            self.frames_dropped += 1
            _log_rarely(self.frames_dropped, "the inbox is full, a frame of %s is dropped (%d so far)%s", peer, "")
            return
        self._inbox.append(_Frame(peer, frame))
        self._inbox_bytes += len(frame)
        self._wake()

    # ---- what others ask -------------------------------------------------------------------------------------------

    def status(self) -> NodeStatus:
        raft, now = self._raft, self._clock.monotonic_s()
        peers = {}
        for peer in self.settings.peers:
            progress = raft.progress.get(peer)
            answered = (
                -1 if progress is None or progress.answered_s is None else int((now - progress.answered_s) * 1000)
            )
            peers[peer] = (peer in raft.connected_peers, progress.match if progress else 0, answered)
        reason = self._reason_not_ready(now)
        current_s = raft.quorum_contact_s() if raft.leads() else self._current_s
        return NodeStatus(
            role=raft.role(),
            term=raft.term(),
            leader=raft.leader(),
            commit_index=raft.commit_index(),
            applied_index=raft.applied_index(),
            last_index=raft.last_index(),
            first_index=raft.first_index(),
            snapshot_index=self._store.snapshot.index if self._store.snapshot else 0,
            voter=raft.is_voter(),
            ready=not reason,
            reason=reason,
            peers=peers,
            leader_contact_ms=-1 if current_s is None else max(0, int((now - current_s) * 1000)),
        )

    def _reason_not_ready(self, now: float) -> str:
        raft = self._raft
        if raft.leader() is None:
            if not raft.is_voter():
                if raft.last_index() > 1:
                    return "no leader is known, and this node has no vote until it has caught up with one"
                hint = (
                    "waits for the other nodes" if self.settings.bootstrap else "start it with bootstrap to found one"
                )
                return f"the store is empty and no leader is known: {hint}"
            return "no leader is known"
        if not raft.joined:
            return f"catching up: applied {raft.applied_index()} of {raft.commit_index()} or more"
        if raft.leads():
            return "" if self.is_leader() else "a quorum has not answered lately"
        seen_s = raft.leader_seen_s()
        silent = seen_s is None or now - seen_s > self.settings.election_max_ms / 1000
        if silent:
            return "the leader is silent"
        # It serves its agents all the same; but who waits for it before stopping the next node must wait for its vote.
        return "" if raft.is_voter() else "not a voter yet: it lost its store (or is new) and is catching up"

    def is_leader(self) -> bool:
        """Leader, and heard from a quorum recently enough to act as one."""
        raft = self._raft
        return (
            raft.leads() and self._clock.monotonic_s() - raft.quorum_contact_s() < self.settings.election_min_ms / 1000
        )

    def forward(self, payload: bytes) -> bool:
        """Send an application message to the leader (not to itself). False when no leader is known or connected."""
        leader = self._raft.leader()
        if leader is None or leader not in self._raft.connected_peers:
            return False
        if len(payload) > self.settings.entry_bytes_max:
            raise ValueError(f"message of {len(payload)} bytes, at most {self.settings.entry_bytes_max} are allowed")
        self._raft.outbox.append(Outgoing(leader, self._raft.term(), 0, Forward(payload)))
        self._wake()
        return True

    def clock_offsets_ms(self) -> Sequence[tuple[str, int]]:
        """Leader only: wall clock of each peer minus ours, measured on heartbeats (half the round trip taken off)."""
        return [
            (peer, progress.offset_ms)
            for peer, progress in sorted(self._raft.progress.items())
            if progress.offset_ms is not None and peer in self._raft.connected_peers
        ]

    # ---- linearizable reads: the read index, on a round that a quorum echoed (hole h) ------------------------------

    def read_barrier(self, done: Callable[[bool], None]) -> None:
        """Linearizable read: ``done(True)`` once this node has applied everything that was committed when it was called
        (ReadIndex through the leader, confirmed by a quorum's echo of a later round); ``done(False)`` when that
        cannot be known within an election timeout. ``done`` is called at the end of a turn, never from within this
        call."""
        self._wake()
        if self._reads_count >= self.settings.reads_max:
            self._completions.append(lambda: done(False))
            return
        self._reads_count += 1
        self._reads.append(_Read(self._clock.monotonic_s() + self.settings.election_max_ms / 1000, done=done))

    def _on_read_request(self, peer: str, number: int) -> None:
        if not self._raft.leads() or self._reads_count >= self.settings.reads_max:
            self._reply_read(peer, number, 0)
            return
        self._reads_count += 1
        deadline_s = self._clock.monotonic_s() + self.settings.election_max_ms / 1000
        self._reads.append(_Read(deadline_s, peer=peer, number=number))

    def _reply_read(self, peer: str, number: int, index: int) -> None:
        self._raft.outbox.append(Outgoing(peer, self._raft.term(), 0, ReadReply(number, index)))

    def _on_read_reply(self, peer: str, reply: ReadReply) -> None:
        reads = self._reads_asked.pop(reply.number, [])
        if reply.index == 0:
            self._refused_by = self._asked_leader
            self._reads = reads + self._reads
        else:
            self._reads_applying.extend((reply.index, read) for read in reads)

    def _start_reads(self) -> None:
        """Before the tick: the reads of this turn share one round, begun after all of them were asked."""
        raft = self._raft
        leader = (raft.leader(), raft.term())
        if leader != self._asked_leader and self._reads_asked:
            for number in sorted(self._reads_asked, reverse=True):
                self._reads = self._reads_asked.pop(number) + self._reads
        if not self._reads:
            return
        if raft.leads():
            if raft.commits_in_own_term():
                reads, self._reads = self._reads, []
                self._reads_confirming.append((raft.want_round(), raft.commit_index(), reads))
        elif leader[0] in raft.connected_peers and leader != self._refused_by:
            self._asked_leader = leader
            self._read_number += 1
            self._reads_asked[self._read_number], self._reads = self._reads, []
            raft.outbox.append(Outgoing(str(leader[0]), leader[1], 0, ReadRequest(self._read_number)))

    def _finish_reads(self) -> None:
        raft, now = self._raft, self._clock.monotonic_s()
        if raft.leads():
            confirmed = raft.confirmed_round()
            while self._reads_confirming and self._reads_confirming[0][0] <= confirmed:
                _, index, reads = self._reads_confirming.popleft()
                self._reads_applying.extend((index, read) for read in reads)
        else:
            while self._reads_confirming:
                for read in self._reads_confirming.popleft()[2]:
                    self._end_read(read, 0)
        if self._reads_applying:
            applied = raft.applied_index()
            waiting = []
            for index, read in self._reads_applying:
                if index <= applied or read.done is None:
                    self._end_read(read, index)
                elif read.deadline_s < now:
                    self._end_read(read, 0)
                else:
                    waiting.append((index, read))
            self._reads_applying = waiting
        self._expire_reads(now)

    def _expire_reads(self, now: float) -> None:
        if self._reads and self._reads[0].deadline_s < now:
            for read in self._reads:
                if read.deadline_s < now:
                    self._end_read(read, 0)
            self._reads = [read for read in self._reads if read.deadline_s >= now]
        for number in [n for n, reads in self._reads_asked.items() if reads[0].deadline_s < now]:
            for read in self._reads_asked.pop(number):
                self._end_read(read, 0)

    def _end_read(self, read: _Read, index: int) -> None:
        self._reads_count -= 1
        if read.done is None:
            self._reply_read(read.peer, read.number, index)
        else:
            done = read.done
            self._completions.append(lambda: done(index > 0))

    # ---- handing leadership over -----------------------------------------------------------------------------------

    def transfer_leadership(self, to: str | None, done: Callable[[str | None], None]) -> None:
        """``done(None)`` when another node leads, else with the reason it failed. A follower passes it on to the
        leader, which takes no entries meanwhile. ``done`` is called at the end of a turn."""
        self._wake()
        reason = self._begin_handover(to, done) if self._raft.leads() else self._ask_for_handover(to, done)
        if reason is not None:
            self._completions.append(lambda: done(reason))

    def _begin_handover(self, to: str | None, done: Callable[[str | None], None]) -> str | None:
        """Returns why not."""
        raft = self._raft
        if self._handover is not None:
            return f"leadership is being handed over to {self._handover.to} already"
        if to == self.settings.node_id:
            return f"{to} leads already"
        fit = [
            (progress.match, peer)
            for peer, progress in sorted(raft.progress.items())
            if peer in raft.connected_peers and progress.standing is Standing.VOTER and to in (None, peer)
        ]
        if not fit:
            return f"{to} cannot be reached, or cannot lead" if to else "no other node is connected and able to lead"
        deadline_s = self._clock.monotonic_s() + 2 * self.settings.election_max_ms / 1000
        self._handover = _Handover(self.settings.node_id, raft.term(), deadline_s, done, to=max(fit)[1])
        raft.take_entries = False
        return None

    def _ask_for_handover(self, to: str | None, done: Callable[[str | None], None]) -> str | None:
        """Returns why not."""
        raft, leader = self._raft, self._raft.leader()
        if leader is None or leader not in raft.connected_peers:
            return "no leader is known to this node, or it cannot be reached"
        if self._handover is not None:
            return "this node has asked the leader to hand over already"
        # The leader gives up before that, and says so.
        deadline_s = self._clock.monotonic_s() + 3 * self.settings.election_max_ms / 1000
        self._handover = _Handover(leader, raft.term(), deadline_s, done)
        self._handover_number += 1
        raft.outbox.append(Outgoing(leader, raft.term(), 0, HandOver(self._handover_number, to)))
        return None

    def _on_hand_over(self, peer: str, request: HandOver) -> None:
        def done(reason: str | None) -> None:
            if reason is not None:
                refusal = HandOverRefused(request.number, reason)
                self._raft.outbox.append(Outgoing(peer, self._raft.term(), 0, refusal))
                self._wake()

        if self._raft.leads():
            self.transfer_leadership(request.to, done)
        else:  # never passed on twice
            done(f"{self.settings.node_id} does not lead")

    def _on_hand_over_refused(self, peer: str, refusal: HandOverRefused) -> None:
        if self._handover is not None and (self._handover.leader, self._handover_number) == (peer, refusal.number):
            self._end_handover(refusal.reason)

    def _continue_handover(self) -> None:
        handover, raft, now = self._handover, self._raft, self._clock.monotonic_s()
        if handover is None:
            return
        if raft.term() != handover.term and raft.leader() not in (None, handover.leader):
            self._end_handover(None)
        elif raft.term() != handover.term and raft.leader() == handover.leader:
            self._end_handover(f"{handover.leader} was elected again")
        elif now > handover.deadline_s:
            self._end_handover(f"{handover.to or 'another node'} has not taken over in time")
        elif (
            raft.leads()
            and raft.progress[handover.to].match == raft.last_index()
            and now - handover.asked_s >= self.settings.heartbeat_ms / 1000
        ):
            handover.asked_s = now
            raft.send_timeout_now(handover.to)

    def _end_handover(self, reason: str | None) -> None:
        assert self._handover is not None
        done = self._handover.done
        self._handover = None
        self._raft.take_entries = True
        self._completions.append(lambda: done(reason))

    # ---- snapshots of this node's state (holes k1, k5: written whole, off the loop, never replacing a newer one) ---

    def take_snapshot(self, done: Callable[[int, int, str | None], None]) -> None:
        """``done(index, size_bytes, error)``, at the end of a turn."""
        self._compaction_wanted.append(done)
        self._wake()

    def _compact_if_due(self) -> None:
        if self._compacting or not (self._compaction_wanted or self._log_is_long()):
            return
        raft, snapshot = self._raft, self._store.snapshot
        index = raft.applied_index()
        self._compaction_waiters, self._compaction_wanted = self._compaction_wanted, []
        if index < 2 or (snapshot is not None and snapshot.index >= index):
            size_bytes = snapshot.size_bytes if snapshot else 0
            self._end_compaction(
                snapshot.index if snapshot else 0, size_bytes, None if snapshot else "nothing to hold yet"
            )
            return
        term, previous_term = raft.term_at(index), raft.term_at(index - 1)
        assert term is not None and previous_term is not None
        captured = self._application.capture()
        snapshots = self._snapshots
        self._compacting = True

        def write() -> SnapshotMeta:
            return snapshots.write(index, term, previous_term, captured.encode())

        self._background(write, lambda result: self._later(lambda: self._on_written(result)))

    def _log_is_long(self) -> bool:
        """By entries and bytes since the snapshot's tail was left; a transfer to a follower is not cut off lightly."""
        factor = COMPACTION_HELD_FACTOR if self._raft.transfers() else 1
        long = (
            len(self._store) > self.settings.compact_entries * factor
            or self._store.size_bytes > self.settings.compact_bytes * factor
        )
        snapshot = self._store.snapshot
        fresh = snapshot is not None and snapshot.index >= self._raft.applied_index()
        return long and not fresh and self._clock.monotonic_s() >= self._compaction_retry_s

    def _later(self, work: Callable[[], None]) -> None:
        """What a background task found out is looked at in the next turn."""
        self._finished.append(work)
        self._wake()

    def _on_written(self, result: object | BaseException) -> None:
        self._compacting = False
        if isinstance(result, StoreError | OSError):
            logger.error("the snapshot was not written: %s", result)
            self._compaction_retry_s = self._clock.monotonic_s() + self.settings.election_max_ms / 1000
            self._end_compaction(0, 0, str(result))
            return
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, SnapshotMeta)
        snapshot = self._store.snapshot
        if snapshot is None or result.index > snapshot.index:
            keep_entries = self.settings.compact_entries // TAIL_FRACTION
            self._raft.compacted(result, keep_entries, self.settings.compact_bytes // TAIL_FRACTION)
        self._retain_due = True
        self._end_compaction(result.index, result.size_bytes, None)

    def _end_compaction(self, index: int, size_bytes: int, error: str | None) -> None:
        waiters, self._compaction_waiters = self._compaction_waiters, []
        for done in waiters:
            self._completions.append(lambda done=done: done(index, size_bytes, error))  # type: ignore[misc]

    def _retain_snapshot(self) -> None:
        """Old files go when the new metadata is durable and no file is being written."""
        snapshot = self._store.snapshot
        if self._retain_due and not self._compacting and self._raft.incoming is None and snapshot is not None:
            self._retain_due = False
            self._snapshots.retain(snapshot)

    # ---- snapshots from the leader (hole k3: verified before anything is replaced) ---------------------------------

    def _verify_incoming(self) -> None:
        incoming = self._raft.complete_incoming()
        if incoming is None:
            return
        snapshots = self._snapshots

        def verify() -> tuple[SnapshotMeta, bytes]:
            meta = snapshots.receive_end()
            return meta, snapshots.read(meta)

        self._background(verify, lambda result: self._later(lambda: self._on_verified(incoming, result)))

    def _on_verified(self, incoming: Incoming, result: object | BaseException) -> None:
        if isinstance(result, StoreError | OSError):
            self._raft.drop_incoming(result)
            return
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, tuple)
        meta, payload = result
        if (meta.index, meta.term, meta.checksum) != (incoming.meta.index, incoming.meta.term, incoming.meta.checksum):
            self._raft.drop_incoming(StoreError(f"the snapshot that was received is not the one announced: {meta}"))
            return
        if self._raft.install(meta, payload):
            logger.info("the state was replaced by the leader's snapshot up to entry %d", meta.index)
        self._retain_due = True


def _raft_settings(settings: NodeSettings) -> Settings:
    return Settings(
        node_id=settings.node_id,
        peers=settings.peers,
        bootstrap=settings.bootstrap,
        heartbeat_s=settings.heartbeat_ms / 1000,
        election_min_s=settings.election_min_ms / 1000,
        election_max_s=settings.election_max_ms / 1000,
        fast_election_max_s=settings.fast_election_max_ms / 1000,
        entry_bytes_max=settings.entry_bytes_max,
        append_bytes_max=settings.append_bytes_max,
        snapshot_chunk_bytes=settings.snapshot_chunk_bytes,
    )


def _log_rarely(count: int, message: str, peer: str, detail: object) -> None:
    """The first, second, fourth, eighth ... time: a flood of bad input must not become a flood of logs."""
    if count & (count - 1) == 0:
        logger.warning(message, peer, count, detail)
