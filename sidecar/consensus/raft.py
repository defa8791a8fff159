"""The hardened Raft: pysyncobj 0.3.17 as a pure state machine, one named repair after another.

What is kept of the library: its tick (when to stand for election, the commit rule, when a leader gives up, applying
in order), its log comparison when voting, its state. What is replaced: everything that met a socket, a file, a pickle
or a clock, and every handler in which the audit found a hole. docs/pysyncobj.md lists each divergence with its test.

Rules

1.  Messages in, ``tick``, make the store durable, messages out. This file only queues messages (``outbox``).
2.  A term or vote changes only through ``LogStore.set_term``; entries, through the journal adaptor or ``_on_append``.
3.  Nothing at or below the commit index is ever changed. A request to do so is a broken invariant: the node stops.
4.  A leader commits by counting voters whose durable log matches, in its own term. Its own copy is durable before any
    answer to it can exist, because its message leaves after the sync.
5.  Any message of a newer term makes this node a follower in that term, except requests for votes from a node that is
    cut off from a leader this node hears (stickiness), and pre-votes, which raise no term.
6.  A leader leads only while a quorum of voters answers it, and serves reads only on a round that a quorum echoed.
7.  A snapshot replaces the state only when it is complete, verified, and newer than what is committed here.
8.  The clock is the injected one, randomness too, and the library's sets iterate in the same order on every machine.

Founding a cluster, and nodes that lost their store ("empty nodes")

An empty store may be new, or the remains of a node that voted and acknowledged before it lost its disk. Nothing in it
tells which. So an empty node is marked in its store before anything else (``amnesiac_term``), and is not a voter: it
does not vote, does not stand, and what it answers does not count. It becomes a voter in one of two ways:

*   Founded: it was started with ``bootstrap``, and *every* other node has said, since this process started, that its
    log is empty too. Then no entry was ever acknowledged by anyone, so it lost none. It may still have lost a vote: not
    if all others are in term 0 (a candidate stores its term before it asks), and otherwise not once
    ``EMPTY_WAIT_ELECTIONS`` election timeouts have passed, because a candidate counts no vote after its own deadline.
    One node with history is enough to prevent it, so ``bootstrap`` may stay set for ever.
*   Admitted: after the same wait it asks its leader. The leader lets a quorum of voters echo a round that began after
    the question. So no newer leader can exist that this node's forgotten vote helped to elect, and everything it ever
    acknowledged is in this leader's log. When it holds the leader's log up to that moment, it becomes a voter;
    but the mark stays, with the leader's term: up to that term it may have voted before, so it votes in newer ones.

With more than a minority of stores lost nobody can be admitted, and the cluster stays without a leader: losing
acknowledged data is a decision for a person (erase all stores, found again).
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from sidecar.consensus.library import (
    NO_POLLER,
    BrokenInvariant,
    Library,
    Member,
    NoDumps,
    Outbox,
    StoreJournal,
    library,
    use_clock,
)
from sidecar.consensus.messages import (
    NO_OP,
    TYPE_PAYLOAD,
    Admit,
    Append,
    Appended,
    Body,
    Envelope,
    Hello,
    LogEntry,
    PreVote,
    PreVoteRequest,
    SnapshotChunk,
    SnapshotReceived,
    StaleTerm,
    Standing,
    TimeoutNow,
    Vote,
    VoteRequest,
)
from sidecar.consensus.ports import (
    Application,
    Clock,
    Entry,
    LogStore,
    Role,
    SnapshotMeta,
    SnapshotStore,
    StoreError,
)
from sidecar.consensus.progress import Admission, Progress, Transfer

logger = logging.getLogger("tenure.consensus")

EMPTY_WAIT_ELECTIONS = 2  # an empty node's past candidates have given up after this many longest election timeouts
APPLY_ENTRIES_PER_TURN = 512
ROUNDS_REMEMBERED = 4_096


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and bounds of the protocol; see NodeSettings."""

    node_id: str
    peers: tuple[str, ...]
    bootstrap: bool
    heartbeat_s: float
    election_min_s: float
    election_max_s: float
    fast_election_max_s: float
    entry_bytes_max: int
    append_bytes_max: int
    snapshot_chunk_bytes: int


class Outgoing(msgspec.Struct, frozen=True):
    peer: str
    term: int
    round: int
    body: Body

    def same_frame(self, other: Outgoing) -> bool:
        return self.body is other.body and (self.term, self.round) == (other.term, other.round)


class Incoming:
    """A snapshot on its way here."""

    def __init__(self, meta: SnapshotMeta) -> None:
        self.meta = meta
        self.received = 0
        self.finishing = False

    def is_of(self, chunk: SnapshotChunk) -> bool:
        return (self.meta.index, self.meta.checksum) == (chunk.index, chunk.checksum)


_FOLLOWER, _CANDIDATE, _LEADER = 0, 1, 2  # the library's numbers
_ROLES = {_FOLLOWER: Role.FOLLOWER, _CANDIDATE: Role.CANDIDATE, _LEADER: Role.LEADER}


class Raft(Library):
    """One member of the cluster. Driven by node.py, on one thread. ``outbox`` is emptied by it after each sync."""

    def __init__(
        self,
        settings: Settings,
        application: Application,
        store: LogStore,
        snapshots: SnapshotStore,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self.application = application
        self.store = store
        self.snapshots = snapshots
        self.clock = clock
        self.rng = rng
        self.outbox: list[Outgoing] = []
        self.members = {node_id: Member(node_id) for node_id in settings.peers}
        self.connected_peers: set[str] = set()  # never iterated
        self.started_s = clock.monotonic_s()
        self.take_entries = True  # False while leadership is being handed over
        self.on_role_checked: Callable[[], None] = lambda: None

        self._votes: set[str] = set()  # never iterated
        self._campaign_until_s = 0.0
        self._pre_votes: set[str] | None = None  # of the pre-vote that is going on; never iterated
        self._transfer_campaign = False
        self._stand_alone = False
        self._leader_seen_s: float | None = None
        self._followed: str | None = None
        self._fast_until_s = 0.0

        self.progress: dict[str, Progress] = {}
        self.round = 0
        self._rounds_sent_s: deque[tuple[int, float]] = deque(maxlen=ROUNDS_REMEMBERED)
        self._heartbeat_due = False
        self._round_wanted = False
        self._answering_round = 0
        self._matched = 0  # how far this log is known to be the leader's, in this term

        self.incoming: Incoming | None = None
        self._empty_logs: dict[str, tuple[int, float]] = {}  # peer -> its term, when it said that its log is empty
        self._hello_due_s = 0.0
        self.joined = False

        use_clock(clock)
        self._mark_if_empty()
        super().__init__(
            Member(settings.node_id),
            [self.members[node_id] for node_id in sorted(settings.peers)],
            conf=self._library_settings(),
            transport=Outbox(self.library_sends),
        )
        self._SyncObj__needLoadDumpFile = False
        self._SyncObj__serializer = NoDumps()
        self._recover()

    def _library_settings(self) -> object:
        conf: object = library.SyncObjConf(
            autoTick=False,
            raftMinTimeout=self.settings.election_min_s,
            raftMaxTimeout=self.settings.election_max_s,
            connectionTimeout=self.settings.election_max_s,
            appendEntriesPeriod=self.settings.heartbeat_s,
            leaderFallbackTimeout=self.settings.election_min_s,  # hole e: 30 s of a leader without followers
            appendEntriesUseBatch=True,  # one pass over the followers per turn, see replicate()
            appendEntriesBatchSizeBytes=self.settings.append_bytes_max,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,  # hole l
            useFork=False,
            pollerType=NO_POLLER,
            journalFile=StoreJournal(self.store),
        )
        return conf

    # ---- reading the state -----------------------------------------------------------------------------------------

    def role(self) -> Role:
        return _ROLES[self._SyncObj__raftState]

    def leads(self) -> bool:
        return self._SyncObj__raftState == _LEADER

    def term(self) -> int:
        return self._SyncObj__raftCurrentTerm

    def leader(self) -> str | None:
        leader = self._SyncObj__raftLeader
        return None if leader is None else str(leader.id)

    def commit_index(self) -> int:
        return self._SyncObj__raftCommitIndex

    def applied_index(self) -> int:
        return self._SyncObj__raftLastApplied

    def first_index(self) -> int:
        return self.store.entry(0).index

    def last_index(self) -> int:
        return self.store.entry(len(self.store) - 1).index

    def last_term(self) -> int:
        return self.store.entry(len(self.store) - 1).term

    def term_at(self, index: int) -> int | None:
        position = index - self.first_index()
        return self.store.entry(position).term if 0 <= position < len(self.store) else None

    def is_voter(self) -> bool:
        """The mark in the store: 0 for an empty node, the term of its admission for a node that was, else none."""
        return self.store.amnesiac_term != 0

    def _may_vote_in(self, term: int) -> bool:
        mark = self.store.amnesiac_term
        return mark is None or 0 < mark < term

    def commits_in_own_term(self) -> bool:
        """A leader's commit index says nothing about other nodes' past until its own no-op is committed (hole h)."""
        no_op = self._SyncObj__noopIDx
        return self.leads() and no_op is not None and self.commit_index() >= no_op

    def election_deadline_s(self) -> float:
        return self._SyncObj__raftElectionDeadline

    def next_timer_s(self) -> float:
        """When ``tick`` has something to do by itself."""
        if self.leads():
            return self._SyncObj__newAppendEntriesTime
        deadline = self._SyncObj__raftElectionDeadline
        return min(deadline, self._hello_due_s) if self._founding() else deadline

    def _now(self) -> float:
        return self.clock.monotonic_s()

    def rounds_left(self) -> None:
        """What this turn queued is leaving now: offsets and contact are measured from here."""
        if self._rounds_sent_s and self._rounds_sent_s[-1][0] == self.round:
            self._rounds_sent_s[-1] = (self.round, self._now())

    def _send(self, peer: str, body: Body, round_number: int = 0) -> None:
        self.outbox.append(Outgoing(peer, self.term(), round_number, body))

    # ---- recovery: the log is aligned to the snapshot, never wiped (holes k1, k2, k3) ------------------------------

    def _recover(self) -> None:
        """Stock wipes a journal that does not begin where the dump ends, swallows an unreadable dump, and without one
        never applies again after compaction. Here: the snapshot is verified and loaded, then its entry is looked up."""
        meta = self.store.snapshot
        if meta is None:
            if self.first_index() != 1:
                raise StoreError(
                    f"the log begins at entry {self.first_index()} and there is no snapshot of what came before. "
                    "Restore the data folder, or erase it: the node will be brought up to date by the others."
                )
        else:
            if self.first_index() > meta.index:
                raise StoreError(
                    f"entries {meta.index + 1} to {self.first_index() - 1} are missing between snapshot and log. "
                    "Restore the data folder, or erase it: the node will be brought up to date by the others."
                )
            self.application.restore(self.snapshots.read(meta))
            self._align_log(meta)
            self._SyncObj__raftLastApplied = meta.index
        self._SyncObj__raftCommitIndex = StoreJournal(self.store).getRaftCommitIndex()
        if not self.members:
            self._SyncObj__raftElectionDeadline = -math.inf  # nobody to wait for
        for index in range(self.commit_index() + 1, self.last_index() + 1):
            self._tell_received(self.store.entry(index - self.first_index()).command)

    def _align_log(self, meta: SnapshotMeta) -> None:
        """The crash may have come between storing the snapshot's metadata and replacing or shortening the log."""
        if self.term_at(meta.index) != meta.term:
            # The log is behind the snapshot or disagrees with it: the snapshot is committed, the tail is not.
            self.store.reset(_sentinels(meta))

    # ---- the tick --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One turn's work after its messages: timers, commit, apply, one new entry, one pass over the followers."""
        use_clock(self.clock)
        self._found_cluster()
        self.doTick(0)
        if self._stand_alone:
            self._lead_alone()
        self._transfer_campaign = False
        self._note_joined()
        self.replicate()

    def woke_late(self) -> None:
        """This process did not run for a while: it cannot tell whether the leader was silent. Start the wait anew."""
        use_clock(self.clock)
        if not self.leads():
            deadline = self._now() + self._SyncObj__generateRaftTimeout()
            self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, deadline)

    def _checkCommandsToApply(self) -> None:
        """Stock drains a queue of pickled commands; here the application is asked for one entry per turn. It comes
        after the commit rule, so even a cluster of one commits an entry only in the turn after it became durable."""
        self.on_role_checked()
        if not (self.leads() and self.take_entries):
            return
        payload = self.application.next_entry()
        if payload is None:
            return
        if len(payload) > self.settings.entry_bytes_max:
            raise BrokenInvariant(f"entry of {len(payload)} bytes, at most {self.settings.entry_bytes_max} are allowed")
        self.store.append(Entry(self.last_index() + 1, self.term(), bytes([TYPE_PAYLOAD]) + payload))
        self.application.received(payload)

    def _SyncObj__tryLogCompaction(self) -> None:
        """Compaction is the node's, see node.py: from an immutable picture, on another thread, by size and by count."""

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:
        raise BrokenInvariant("the library's dumps are not used")

    # ---- applying: no pickle, no skipping, no second time (holes g, i, l) ------------------------------------------

    def _SyncObj__applyLogEntries(self) -> bool:
        """Stock counts an entry as applied after its callbacks, so one that raised is applied twice. Bounded per
        turn: a node that replays a long log goes on answering its leader."""
        first = self.first_index()
        stop = min(self.commit_index(), self.applied_index() + APPLY_ENTRIES_PER_TURN) + 1
        for entry in self.store.entries(self.applied_index() + 1 - first, max(stop - first, 0)):
            self._SyncObj__doApplyCommand(entry.command)
            self._SyncObj__raftLastApplied = entry.index
        return False

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:
        """Stock unpickles the command (and pickled membership and version changes). Here a payload is the
        application's, a no-op is nothing, and anything else stops the node: skipping it would make the replicas
        differ."""
        if command[0] == TYPE_PAYLOAD:
            self.application.apply(self.applied_index() + 1, command[1:])
        elif command != NO_OP:
            raise BrokenInvariant(f"committed entry {self.applied_index() + 1} is of unknown kind {command[:1].hex()}")

    def _tell_received(self, command: bytes) -> None:
        if command[0] == TYPE_PAYLOAD:
            self.application.received(command[1:])

    # ---- what the library's own code sends -------------------------------------------------------------------------

    def library_sends(self, peer: str, message: dict[str, Any]) -> bool:
        """Requests for votes (from its tick) and votes (from its handler). Nothing else of it is in use."""
        if message["type"] == "request_vote":
            self._send(peer, VoteRequest(message["last_log_index"], message["last_log_term"], self._transfer_campaign))
        elif message["type"] == "response_vote":
            self._send(peer, Vote())
        else:
            raise BrokenInvariant(f"the library sends {message['type']!r}")
        return True

    # ---- connections -----------------------------------------------------------------------------------------------

    def connected(self, peer: str) -> None:
        use_clock(self.clock)
        self.connected_peers.add(peer)
        self._SyncObj__onNodeConnected(self.members[peer])
        if peer in self.progress:
            self.progress[peer].connected(self._now())
            self._heartbeat_due = True
        self._hello_due_s = 0.0

    def disconnected(self, peer: str, reset: bool) -> None:
        """Fast election: when the leader's end of the connection was closed, its process is probably gone, so this node
        stops sticking to it and asks for pre-votes after a short random time. If only this connection broke, the
        pre-vote fails (the others still hear the leader) and nothing happened. If the leader is gone, each
        follower sees its own reset, so each both stops sticking and asks: whoever asks last of the two is answered."""
        use_clock(self.clock)
        self.connected_peers.discard(peer)
        self._SyncObj__onNodeDisconnected(self.members[peer])
        if reset and not self.leads() and peer == self.leader():
            now = self._now()
            self._leader_seen_s = None
            self._fast_until_s = now + self.settings.election_min_s
            soon = now + self.rng.random() * self.settings.fast_election_max_s
            self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, soon)

    def _SyncObj__generateRaftTimeout(self) -> float:
        """From the injected generator. Short while a crashed leader is being replaced: split votes are retried soon."""
        shortest, longest = self.settings.election_min_s, self.settings.election_max_s
        if self._now() < self._fast_until_s:
            shortest, longest = self.settings.fast_election_max_s, 3 * self.settings.fast_election_max_s
        return shortest + (longest - shortest) * self.rng.random()

    # ---- messages: terms first (holes d, e, g) ---------------------------------------------------------------------

    def _SyncObj__onMessageReceived(self, node: Member, message: dict[str, Any]) -> None:
        """Stock's one handler for everything is closed, but for its rule of voting, which ``_on_vote_request``
        calls."""
        if message["type"] != "request_vote":
            raise BrokenInvariant(f"the library's handler was given {message['type']!r}")
        super()._SyncObj__onMessageReceived(node, message)

    def receive(self, peer: str, envelope: Envelope) -> Body | None:
        """One message. What is not about elections or the log is handed back, for the node."""
        use_clock(self.clock)
        body = envelope.body
        if isinstance(body, VoteRequest):
            self._on_vote_request(peer, envelope.term, body)
            return None
        if isinstance(body, PreVoteRequest):
            self._on_pre_vote_request(peer, body)
            return None
        if envelope.term > self.term():
            self._step_down(envelope.term)
            if isinstance(body, StaleTerm):
                self._after_stale_term()
        elif envelope.term < self.term() and isinstance(body, Append | SnapshotChunk | TimeoutNow | Admit):
            # Stock ignores a leader of the past in silence; it goes on believing in itself (hole e).
            self._send(peer, StaleTerm())
            return None
        return self._dispatch(peer, envelope)

    def _dispatch(self, peer: str, envelope: Envelope) -> Body | None:
        body, same_term = envelope.body, envelope.term == self.term()
        match body:
            case Append() | SnapshotChunk():
                self._answering_round = envelope.round
                self._follow(peer)
                if isinstance(body, Append):
                    self._on_append(peer, body)
                else:
                    self._on_chunk(peer, body)
                self._answering_round = 0
            case Appended() | SnapshotReceived():
                if same_term and self.leads():
                    self._on_answer(peer, envelope)
            case Vote():
                if same_term:
                    self._on_vote(peer)
            case PreVote():
                self._on_pre_vote(peer, body)
            case TimeoutNow():
                self._on_timeout_now(peer)
            case Admit():
                self._on_admit(peer, body)
            case Hello():
                self._on_hello(peer, envelope.term, body)
            case StaleTerm():
                pass
            case _:
                return body
        return None

    def _step_down(self, term: int) -> None:
        self._transfer_campaign = False  # whoever told this node to take over leads no more
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None

    def _SyncObj__setCurrentTerm(self, term: int, vote: str | None) -> None:
        if term != self.term():
            self._matched = 0
        super()._SyncObj__setCurrentTerm(term, vote)
        mark = self.store.amnesiac_term
        if mark is not None and 0 < mark < term:
            self.store.set_amnesiac_term(None)

    def _SyncObj__setState(self, state: int) -> None:
        """Stock leaves a former leader's or candidate's deadline in the past: it would disturb its successor at
        once."""
        before = self._SyncObj__raftState
        super()._SyncObj__setState(state)
        if state == _CANDIDATE:
            self._votes.clear()
            self._campaign_until_s = self._SyncObj__raftElectionDeadline
            self._leader_seen_s = None
        elif state == _FOLLOWER and before != _FOLLOWER:
            self._SyncObj__raftElectionDeadline = self._now() + self._SyncObj__generateRaftTimeout()
        if state != before and _LEADER in (state, before):
            self.progress.clear()
            self.take_entries = True

    def _follow(self, peer: str) -> None:
        """``peer`` leads this term."""
        leader = self.leader()
        if leader not in (None, peer):
            raise BrokenInvariant(f"{peer} and {leader} both lead term {self.term()}")
        now = self._now()
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = self.members[peer]
        self._followed = peer
        self._leader_seen_s = now
        self._fast_until_s = 0.0
        self._pre_votes = None
        if not self._transfer_campaign:  # its word to take over came in the same turn, and holds
            self._SyncObj__raftElectionDeadline = now + self._SyncObj__generateRaftTimeout()

    # ---- elections: pre-vote, stickiness, one voice per voter (holes f, h, o) --------------------------------------

    def _SyncObj__connectedToAnyone(self) -> bool:
        """The library's last question before it raises its term, asked only once the deadline has passed: True starts
        a real election. Stock needs one connection; here a quorum must have promised its votes first."""
        if not self.is_voter():
            self._SyncObj__raftElectionDeadline = self._now() + self._SyncObj__generateRaftTimeout()
            self._SyncObj__raftLeader = None
            return False
        if not self.members:
            self._stand_alone = True
            return False
        if self._transfer_campaign or self._is_quorum(self._pre_votes):
            self._pre_votes = None
            return True
        self._ask_pre_votes()
        return False

    def _ask_pre_votes(self) -> None:
        """A candidate whose time is over gives up first: votes that arrive later no longer count (see Founding)."""
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None
        self._SyncObj__raftElectionDeadline = self._now() + self._SyncObj__generateRaftTimeout()
        self._pre_votes = set()
        for peer in sorted(self.members):
            self._send(peer, PreVoteRequest(self.term() + 1, self.last_index(), self.last_term()))

    def _is_quorum(self, others: set[str] | None) -> bool:
        return others is not None and (len(others) + 1) * 2 > len(self.members) + 1

    def _on_pre_vote_request(self, peer: str, request: PreVoteRequest) -> None:
        if request.candidate_term < self.term() or (
            request.candidate_term == self.term() and self._SyncObj__votedForNodeId not in (None, peer)
        ):
            self._send(peer, StaleTerm())
            return
        if self.leads() or not self._may_vote_in(request.candidate_term) or self._sticks_to_leader(peer):
            return
        if (request.last_term, request.last_index) < (self.last_term(), self.last_index()):
            return
        self._send(peer, PreVote(request.candidate_term))
        # Give way for a moment: two candidates at the same time split the votes.
        moment = self._now() + self.settings.fast_election_max_s
        self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, moment)

    def _on_pre_vote(self, peer: str, answer: PreVote) -> None:
        if self._pre_votes is None or answer.candidate_term != self.term() + 1:
            return
        self._pre_votes.add(peer)
        if self._is_quorum(self._pre_votes):
            self._SyncObj__raftElectionDeadline = -math.inf  # the tick of this turn starts the election

    def _after_stale_term(self) -> None:
        """Our pre-vote was for a term of the past, or we led one: ask again soon, in the present."""
        soon = self._now() + self.rng.random() * self.settings.fast_election_max_s
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, soon)
        self._pre_votes = None

    def _sticks_to_leader(self, candidate: str) -> bool:
        """A node that hears its leader helps nobody else to its place. Not if it is the leader itself that asks."""
        now = self._now()
        if self.leads():
            return now - self.quorum_contact_s() < self.settings.election_min_s
        if self._leader_seen_s is None or candidate == self._followed:
            return False
        return now - self._leader_seen_s < self.settings.election_min_s

    def _on_vote_request(self, peer: str, term: int, request: VoteRequest) -> None:
        if term < self.term():
            self._send(peer, StaleTerm())
            return
        if term > self.term():
            if not request.transfer and self._sticks_to_leader(peer):
                return
            self._step_down(term)
        if not self._may_vote_in(term):
            return
        if self._SyncObj__votedForNodeId == peer and not self.leads():
            self._send(peer, Vote())  # the answer was lost with its connection
            return
        self._SyncObj__onMessageReceived(
            self.members[peer],
            {
                "type": "request_vote",
                "term": term,
                "last_log_index": request.last_index,
                "last_log_term": request.last_term,
            },
        )

    def _on_vote(self, peer: str) -> None:
        """Stock counts messages; a voter that answers twice is two votes to it. And see Founding for the time limit."""
        if self._SyncObj__raftState != _CANDIDATE or self._now() >= self._campaign_until_s:
            return
        self._votes.add(peer)
        if self._is_quorum(self._votes):
            self._SyncObj__onBecomeLeader()

    def _lead_alone(self) -> None:
        """A cluster of one. After the library's tick, so that its no-op is durable before it is committed."""
        self._stand_alone = False
        self._SyncObj__setState(_CANDIDATE)
        self._SyncObj__setCurrentTerm(self.term() + 1, self.settings.node_id)
        self._SyncObj__onBecomeLeader()

    def _SyncObj__onBecomeLeader(self) -> None:
        next_index = self.last_index() + 1
        super()._SyncObj__onBecomeLeader()
        self._pre_votes = None
        self._fast_until_s = 0.0
        self._rounds_sent_s.clear()
        for peer in sorted(self.members):
            self.progress[peer] = Progress(next_index)

    # ---- handing leadership over -----------------------------------------------------------------------------------

    def send_timeout_now(self, peer: str) -> None:
        self._send(peer, TimeoutNow())

    def _on_timeout_now(self, peer: str) -> None:
        """Of the leader of this very term only. The election skips the pre-vote and tells voters not to stick."""
        if peer == self.leader() and self.is_voter():
            self._transfer_campaign = True
            self._SyncObj__raftElectionDeadline = -math.inf

    # ---- the follower's log (holes c, n, k5) -----------------------------------------------------------------------

    def _on_append(self, peer: str, append: Append) -> None:
        """Stock cuts the log after ``previous_index`` and adds the message's entries again, so a late or repeated
        message shortens an acknowledged log. Here matching entries stay, and only a real conflict cuts."""
        first, last = self.first_index(), self.last_index()
        previous, entries = append.previous_index, append.entries
        match = previous + len(entries)
        if previous < first:
            # What precedes our first entry is in our snapshot, thus committed, thus the same in the leader's log.
            entries = entries[first - previous :]
            previous = first
            match = max(match, first)
        elif self.term_at(previous) != append.previous_term:
            if previous <= self.commit_index():
                raise BrokenInvariant(f"leader {peer} contradicts the committed entry {previous}")
            self._answer(peer, accepted=False, match=self.commit_index(), retry_from=self._retry_from(previous))
            return
        for offset, entry in enumerate(entries):
            index = previous + 1 + offset
            if index > last or self.term_at(index) != entry.term:
                self._replace_tail(index, entries[offset:])
                break
        self._matched = max(self._matched, match)
        self._raise_commit_index(min(append.commit_index, match))
        self._answer(peer, accepted=True, match=max(match, self.commit_index()), retry_from=0)

    def _retry_from(self, previous: int) -> int:
        """The first index of the term that conflicts, above what is committed: one step back per term, not per
        entry."""
        if previous > self.last_index():
            return self.last_index() + 1
        lowest = max(self.first_index(), self.commit_index()) + 1
        conflicting = self.term_at(previous)
        while previous > lowest and self.term_at(previous - 1) == conflicting:
            previous -= 1
        return max(previous, lowest)

    def _replace_tail(self, index: int, entries: tuple[LogEntry, ...]) -> None:
        if index <= self.commit_index():
            raise BrokenInvariant(f"leader {self.leader()} contradicts the committed entry {index}")
        if index <= self.last_index():
            self.store.truncate_from(index - self.first_index())
        for offset, entry in enumerate(entries):
            self.store.append(Entry(index + offset, entry.term, entry.command))
            self._tell_received(entry.command)

    def _raise_commit_index(self, index: int) -> None:
        """Never by a snapshot message (hole n), never beyond what this very message has shown to match."""
        if index > self.commit_index():
            self._SyncObj__raftCommitIndex = index
            self.store.set_commit_index(index)

    def _answer(self, peer: str, *, accepted: bool, match: int, retry_from: int) -> None:
        self._send(peer, Appended(accepted, match, retry_from, self._standing()), self._answering_round)

    # ---- the leader's side: one pass per turn, pipelined, bounded (holes d, j, k4, N1, N2) -------------------------

    def _SyncObj__sendAppendEntries(self) -> None:
        """The library decides when a heartbeat is due; what is sent is decided by ``replicate`` at the end of the
        turn."""
        self._heartbeat_due = True
        self._SyncObj__newAppendEntriesTime = self._now() + self.settings.heartbeat_s

    def want_round(self) -> int:
        """A new round for every follower in this turn; its number. See ``confirmed_round``."""
        self._round_wanted = True
        return self.round + 1

    def replicate(self) -> None:
        if not self.leads():
            self._heartbeat_due = self._round_wanted = False
            return
        everyone = self._heartbeat_due or self._round_wanted
        if self._heartbeat_due:
            self._SyncObj__newAppendEntriesTime = self._now() + self.settings.heartbeat_s
        self._heartbeat_due = self._round_wanted = False
        before = len(self.outbox)
        shared: dict[int, Append] = {}
        for peer, progress in self.progress.items():
            if peer in self.connected_peers:
                self._replicate_to(peer, progress, everyone, shared)
        if len(self.outbox) > before or everyone:
            self.round += 1
            self._rounds_sent_s.append((self.round, self._now()))

    def _replicate_to(self, peer: str, progress: Progress, heartbeat: bool, shared: dict[int, Append]) -> None:
        if progress.next_index <= self.first_index():
            self._send_snapshot(peer, progress, heartbeat)
            return
        progress.transfer = None
        sent = False
        while progress.next_index <= self.last_index() and progress.has_room(2 * self.settings.append_bytes_max):
            append = shared.get(progress.next_index)
            if append is None:
                append = shared[progress.next_index] = self._append_from(progress.next_index)
            self._send(peer, append, self.round + 1)
            progress.sent(self.round + 1, len(append.entries), sum(len(entry.command) for entry in append.entries))
            sent = True
        if not sent and (heartbeat or (self.commit_index() > progress.commit_sent and not progress.probing)):
            self._send(peer, self._append_from(progress.next_index, empty=True), self.round + 1)
        if sent or heartbeat or not progress.probing:
            progress.commit_sent = self.commit_index()

    def _append_from(self, index: int, *, empty: bool = False) -> Append:
        previous_term = self.term_at(index - 1)
        assert previous_term is not None
        entries: list[LogEntry] = []
        size = 0
        position = index - self.first_index()
        while not empty and position < len(self.store):
            entry = self.store.entry(position)
            size += len(entry.command)
            if entries and size > self.settings.append_bytes_max:
                break
            entries.append(LogEntry(entry.term, entry.command))
            position += 1
        return Append(index - 1, previous_term, self.commit_index(), tuple(entries))

    def _on_answer(self, peer: str, envelope: Envelope) -> None:
        """Stock takes any acknowledgement as one of its present term (hole d) and lets each of them send it back
        (N2)."""
        progress, body = self.progress[peer], envelope.body
        assert isinstance(body, Appended | SnapshotReceived)
        if envelope.round > self.round:
            return
        self._note_standing(progress, body.standing)
        progress.echoed(envelope.round)
        self._note_contact(peer, progress, envelope)
        if isinstance(body, SnapshotReceived):
            transfer = progress.transfer
            if transfer and (transfer.meta.index, transfer.meta.checksum) == (body.index, body.checksum):
                transfer.acknowledged(body.offset, self._now())
            return
        if body.match > self.last_index():
            logger.error("%s holds entry %d, this leader's last is %d: ignored", peer, body.match, self.last_index())
            return
        if body.accepted:
            progress.accepted(envelope.round, body.match)
        else:
            progress.rejected(envelope.round, body.match, body.retry_from, self.round)
        if progress.standing is Standing.VOTER:
            self._SyncObj__raftMatchIndex[self.members[peer]] = progress.match
        else:
            self._admit_if_ready(peer, progress)

    def _note_contact(self, peer: str, progress: Progress, envelope: Envelope) -> None:
        """Check-quorum: an answer is worth one election timeout from its arrival, but no more than two from when the
        question was sent, so a backlog of old answers does not keep a leader in office after a pause."""
        now = self._now()
        progress.answered_s = now
        sent_s = self._round_sent_s(envelope.round)
        if sent_s is None:
            return
        round_trip_ms = int((now - sent_s) * 1000)
        progress.offset_ms = envelope.wall_ms - (self.clock.wall_ms() - round_trip_ms // 2)
        if progress.standing is Standing.VOTER:
            member = self.members[peer]
            contact = min(now, sent_s + self.settings.election_min_s)
            times = self._SyncObj__lastResponseTime
            times[member] = max(times[member], contact)

    def _round_sent_s(self, round_number: int) -> float | None:
        while self._rounds_sent_s and self._rounds_sent_s[0][0] < self._lowest_echo():
            self._rounds_sent_s.popleft()
        if not self._rounds_sent_s:
            return None
        position = round_number - self._rounds_sent_s[0][0]
        return self._rounds_sent_s[position][1] if 0 <= position < len(self._rounds_sent_s) else None

    def _lowest_echo(self) -> int:
        return min(progress.echoed_round for progress in self.progress.values())

    def confirmed_round(self) -> int:
        """The newest round that a quorum of voters has echoed in this term: this node led when it began."""
        others_needed = (len(self.members) + 1) // 2
        if others_needed == 0:
            return self.round
        echoes = sorted((p.echoed_round for p in self.progress.values() if p.standing is Standing.VOTER), reverse=True)
        return echoes[others_needed - 1] if len(echoes) >= others_needed else 0

    def quorum_contact_s(self) -> float:
        """Until when a quorum is known to have been in touch with this leader (the library's response times)."""
        others_needed = (len(self.members) + 1) // 2
        if others_needed == 0:
            return self._now()
        times = sorted(self._SyncObj__lastResponseTime.values(), reverse=True)
        return times[others_needed - 1]

    # ---- snapshots to followers (holes k3, k4, k5, n) --------------------------------------------------------------

    def _send_snapshot(self, peer: str, progress: Progress, heartbeat: bool) -> None:
        """Stock sends a whole dump as fast as it can, and empty messages in a spin while it has none. Here: a window of
        chunks, and a heartbeat that says nothing of the log while the window is full."""
        now = self._now()
        meta = self.store.snapshot
        assert meta is not None
        transfer = progress.transfer
        if transfer is None or transfer.meta != meta:
            transfer = progress.transfer = Transfer(meta, now)
        elif now - transfer.progress_s > self.settings.election_min_s and heartbeat:
            transfer.restart(now)
        sent = False
        while (piece := transfer.next_chunk(self.settings.snapshot_chunk_bytes)) is not None:
            data = self.snapshots.chunk(meta, *piece)
            chunk = SnapshotChunk(
                meta.index, meta.term, meta.previous_term, meta.size_bytes, meta.checksum, piece[0], data
            )
            self._send(peer, chunk, self.round + 1)
            sent = True
        if heartbeat and not sent:
            self._send(peer, Append(1, 0, 1), self.round + 1)

    def transfers(self) -> bool:
        """Whether a snapshot is on its way to a follower that is connected."""
        return any(p.transfer is not None and peer in self.connected_peers for peer, p in self.progress.items())

    # ---- snapshots from the leader ---------------------------------------------------------------------------------

    def _on_chunk(self, peer: str, chunk: SnapshotChunk) -> None:
        have = max(self.commit_index(), chunk.index if self.term_at(chunk.index) == chunk.term else 0)
        if have >= chunk.index:
            self._answer(peer, accepted=True, match=have, retry_from=0)
            return
        if self.incoming is None or not self.incoming.is_of(chunk):
            if self.incoming is not None and self.incoming.finishing:
                return  # one at a time; the leader asks again
            self._begin_receiving(chunk)
        incoming = self.incoming
        assert incoming is not None
        if chunk.offset == incoming.received and not incoming.finishing:
            try:
                self.snapshots.receive_chunk(chunk.offset, chunk.data)
                incoming.received += len(chunk.data)
            except StoreError as error:
                self.drop_incoming(error)
        received = 0 if self.incoming is None else incoming.received
        answer = SnapshotReceived(chunk.index, chunk.checksum, received, self._standing())
        self._send(peer, answer, self._answering_round)

    def _begin_receiving(self, chunk: SnapshotChunk) -> None:
        meta = SnapshotMeta(chunk.index, chunk.term, chunk.previous_term, "", chunk.size_bytes, chunk.checksum)
        self.incoming = Incoming(meta)
        try:
            self.snapshots.receive_begin(meta)
        except StoreError as error:
            self.drop_incoming(error)
            self.incoming = Incoming(meta)

    def complete_incoming(self) -> Incoming | None:
        """A snapshot that has arrived as a whole, once: to be verified on another thread, then installed or dropped."""
        incoming = self.incoming
        if incoming is None or incoming.finishing or incoming.received < incoming.meta.size_bytes:
            return None
        incoming.finishing = True
        return incoming

    def drop_incoming(self, error: BaseException) -> None:
        """Start again from nothing; the old snapshot and the log are as they were (k3)."""
        logger.warning("the snapshot that was being received is dropped: %s", error)
        self.incoming = None

    def install(self, meta: SnapshotMeta, payload: bytes) -> bool:
        """Verified: replace the state. False when what is committed here has overtaken it (k5)."""
        use_clock(self.clock)
        self.incoming = None
        if meta.index <= self.commit_index():
            return False
        self.application.restore(payload)
        self.store.set_snapshot(meta)
        if self.term_at(meta.index) != meta.term:
            self.store.reset(_sentinels(meta))
        self._SyncObj__raftCommitIndex = meta.index
        self._SyncObj__raftLastApplied = meta.index
        self._matched = max(self._matched, meta.index)
        self.store.set_commit_index(meta.index)
        leader = self.leader()
        if leader is not None:
            self._answer(leader, accepted=True, match=meta.index, retry_from=0)
        return True

    def compacted(self, meta: SnapshotMeta, keep_entries: int, keep_bytes: int) -> None:
        """A snapshot of this node's own state is on disk: drop the log before it, but for a tail for slow followers."""
        self.store.set_snapshot(meta)
        position = meta.index - 1 - self.first_index()  # of the entry that has to be first, at the latest
        kept = 0
        while position > 0 and keep_entries > 0:
            kept += len(self.store.entry(position - 1).command)
            if kept > keep_bytes:
                break
            position -= 1
            keep_entries -= 1
        if position > 0:
            self.store.truncate_to(position)

    # ---- empty nodes: founding and admission (hole of every memory journal; see the rules above) -------------------

    def _mark_if_empty(self) -> None:
        """First of all that is ever stored, so no later crash can leave an empty store without the mark."""
        store = self.store
        nothing = len(store) == 0 and store.term == 0 and store.snapshot is None
        if nothing and store.amnesiac_term is None:
            store.set_amnesiac_term(0)

    def _standing(self) -> Standing:
        if self.is_voter():
            return Standing.VOTER
        return Standing.ASKING if self._now() >= self._forgotten_after_s() else Standing.EMPTY

    def _forgotten_after_s(self) -> float:
        """When every candidate that may hold a vote this node has forgotten must have given up."""
        return self.started_s + EMPTY_WAIT_ELECTIONS * self.settings.election_max_s

    def _founding(self) -> bool:
        return self.settings.bootstrap and not self.is_voter() and self.last_index() == 1

    def _found_cluster(self) -> None:
        if not self._founding():
            return
        now = self._now()
        calm_s = self._forgotten_after_s()
        if all(
            peer in self._empty_logs and (self._empty_logs[peer][0] == 0 or self._empty_logs[peer][1] >= calm_s)
            for peer in self.members
        ):
            logger.info("every node's log is empty: this node is a voter of the new cluster")
            self.store.set_amnesiac_term(None)
            wait_s = self.rng.random() * self.settings.election_min_s if self.members else -math.inf
            self._SyncObj__raftElectionDeadline = now + wait_s
        elif now >= self._hello_due_s:
            self._hello_due_s = now + self.settings.heartbeat_s
            for peer in sorted(self.members):
                self._send(peer, Hello(self.last_index(), True))

    def _on_hello(self, peer: str, term: int, hello: Hello) -> None:
        if hello.last_index == 1:
            self._empty_logs[peer] = (term, self._now())
        else:
            self._empty_logs.pop(peer, None)
        if hello.answer:
            self._send(peer, Hello(self.last_index(), False))

    def _note_standing(self, progress: Progress, standing: Standing) -> None:
        """An empty store again, though the node had said other things in this term: it lost them."""
        if (standing is Standing.EMPTY) > (progress.standing is Standing.EMPTY) or (
            standing is Standing.ASKING and progress.standing is Standing.VOTER
        ):
            progress.forgot()
        progress.standing = standing

    def _admit_if_ready(self, peer: str, progress: Progress) -> None:
        self._SyncObj__raftMatchIndex[self.members[peer]] = 0
        if progress.standing is not Standing.ASKING or not self.commits_in_own_term():
            return
        if progress.admission is None:
            progress.admission = Admission(self.want_round())
            return
        admission = progress.admission
        if admission.index is None and self.confirmed_round() >= admission.confirm_round:
            admission.index = self.last_index()
        if admission.index is not None and progress.match >= admission.index:
            self._send(peer, Admit(admission.index), self.round)

    def _on_admit(self, peer: str, admit: Admit) -> None:
        if self.is_voter() or peer != self.leader() or self._matched < admit.index:
            return
        if self._standing() is not Standing.ASKING:
            return
        logger.info("admitted by %s in term %d: this node votes and counts again", peer, self.term())
        self.store.set_amnesiac_term(self.term())
        self._answering_round = 0
        self._answer(peer, accepted=True, match=self.commit_index(), retry_from=0)

    # ---- readiness -------------------------------------------------------------------------------------------------

    def _note_joined(self) -> None:
        """Joined: applied all that a leader had committed, its own term's first entry included."""
        if not self.joined and self.leader() is not None and self.applied_index() >= self.commit_index():
            self.joined = self.term_at(self.commit_index()) == self.term()

    def leader_seen_s(self) -> float | None:
        return self._leader_seen_s


def _sentinels(meta: SnapshotMeta) -> list[Entry]:
    """The two entries with which a log begins after a snapshot: their places and terms matter, not their content."""
    return [Entry(meta.index - 1, meta.previous_term, NO_OP), Entry(meta.index, meta.term, NO_OP)]
