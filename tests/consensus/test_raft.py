"""A test per repair: what the library's own class does wrong, and that ours does not. Names of holes as in the docs."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pysyncobj
import pytest

from sidecar.consensus.library import BrokenInvariant, Member, Outbox, check_library
from sidecar.consensus.messages import (
    NO_OP,
    Append,
    Appended,
    LogEntry,
    MalformedFrame,
    PreVote,
    PreVoteRequest,
    SnapshotChunk,
    StaleTerm,
    Standing,
    Vote,
    VoteRequest,
    decode,
    encode,
)
from sidecar.consensus.ports import Entry, Role, SnapshotMeta, StoreError
from sidecar.consensus.progress import Progress
from tests.consensus.harness import Cluster, Host, ManualClock, MemoryStore
from tests.consensus.stock import StockMember, append

CHECKSUM = "0" * 64


def follower_of(cluster: Cluster, term: int = 1) -> Host:
    """A voter that has met a leader of ``term``, alone with the test."""
    host = cluster["n1"]
    host.store = MemoryStore()
    host.store.durable["term"] = term  # a store with a past: it is a voter
    host.store.state = host.store._copy()
    host.boot()
    assert host.events is not None
    for peer in cluster.names:
        if peer != host.name:
            host.events.peer_connected(peer)
    host.turn()
    return host


def lone(size: int = 3) -> tuple[Cluster, Host]:
    """One running voter; its peers are the test. What it sends is in the log."""
    cluster = Cluster(size, boot=False)
    cluster.is_connected = lambda one, other: True  # type: ignore[method-assign]
    return cluster, follower_of(cluster)


def entries(*terms: int) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(term, NO_OP) for term in terms)


def log_of(host: Host) -> list[tuple[int, int]]:
    return [(entry.index, entry.term) for entry in host.store.entries(0, len(host.store))]


def give(host: Host, peer: str, body: Any, *, term: int, round_number: int = 0) -> None:
    host.inject(peer, body, term=term, round_number=round_number)
    host.turn()


def answers(cluster: Cluster, kind: type) -> list[Any]:
    found = [item[2].body for item in cluster.sent(kind)]
    cluster.log.clear()
    return found


# ---- the pin --------------------------------------------------------------------------------------------------------


def test_another_version_of_the_library_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pysyncobj"
    shutil.copytree(Path(pysyncobj.__file__).parent, folder)
    check_library(folder)
    with (folder / "syncobj.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ImportError, match=r"pip install pysyncobj==0\.3\.17"):
        check_library(folder)
    (folder / "syncobj.py").unlink()
    with pytest.raises(ImportError, match="cannot read"):
        check_library(folder)


def test_nodes_hash_alike_in_every_process() -> None:
    assert [hash(Member(name)) for name in ("n1", "n2")] == [3950597356, 1919944022]
    assert Member("n1") == Member("n1") != Member("n2")


# ---- hole a, b: see the log store's tests; what the adaptor and the order of a turn contribute ----------------------


def test_a_vote_survives_power_loss_before_it_is_known() -> None:
    cluster, host = lone()
    host.inject("n2", VoteRequest(1, 0, False), term=5)
    assert host.node is not None
    turn = host.node.begin_turn()
    assert not cluster.sent(Vote)
    assert turn.durable is not None
    turn.durable()
    host.node.end_turn(turn)
    assert cluster.sent(Vote)
    after = host.store.reopen(0)
    assert (after.term, after.vote) == (5, "n2")


# ---- hole c: an append never removes what matches -------------------------------------------------------------------


def test_c_a_late_duplicate_does_not_shorten_the_log() -> None:
    stock = StockMember("n1", ["n2", "n3"], ManualClock())
    stock.receive("n2", append(1, (1, 0), [(2, 1), (3, 1), (4, 1)], commit=4))
    stock.receive("n2", append(1, (1, 0), [(2, 1)], commit=4))
    assert stock.log() == [(1, 0), (2, 1)]  # 3 and 4 were acknowledged and committed

    cluster, host = lone()
    give(host, "n2", Append(1, 0, 4, entries(1, 1, 1)), term=1)
    give(host, "n2", Append(1, 0, 4, entries(1)), term=1)
    give(host, "n2", Append(1, 0, 4), term=1)
    assert log_of(host) == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert host.raft.commit_index() == 4
    assert [answer.match for answer in answers(cluster, Appended)] == [4, 4, 4]


def test_c_only_a_conflict_cuts_and_only_from_there() -> None:
    _, host = lone()
    give(host, "n2", Append(1, 0, 2, entries(1, 1, 1)), term=1)
    give(host, "n3", Append(1, 0, 2, entries(1, 2)), term=2)
    assert log_of(host) == [(1, 0), (2, 1), (3, 2)]


def test_c_a_contradiction_of_what_is_committed_stops_the_node() -> None:
    _, host = lone()
    give(host, "n2", Append(1, 0, 3, entries(1, 1)), term=1)
    host.inject("n3", Append(1, 0, 3, entries(2, 2)), term=2)
    with pytest.raises(BrokenInvariant, match="contradicts the committed entry 2"):
        host.turn()


def test_c_so_does_a_leader_whose_log_differs_before_what_it_sends() -> None:
    _, host = lone()
    give(host, "n2", Append(1, 0, 3, entries(1, 1)), term=1)
    host.inject("n3", Append(3, 2, 1, entries(2)), term=2)
    with pytest.raises(BrokenInvariant, match="contradicts the committed entry 3"):
        host.turn()


def test_c_the_commit_index_stays_within_what_the_message_shows_to_match() -> None:
    _, host = lone()
    give(host, "n2", Append(1, 0, 1, entries(1, 1, 1)), term=1)  # of a leader that is gone
    give(host, "n3", Append(1, 0, 9, entries(1)), term=2)  # has seen entry 2 only
    assert host.raft.commit_index() == 2


# ---- hole d, N1, N2: acknowledgements -------------------------------------------------------------------------------


def test_d_an_acknowledgement_of_another_term_counts_for_nothing() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3", "n4", "n5"], clock)
    stock.lead(term=3)
    stock.receive("n2", {"type": "next_node_idx", "next_node_idx": 3, "reset": False, "success": True})  # of term 1
    assert stock.inner("raftMatchIndex")[stock.nodes["n2"]] == 2

    cluster = Cluster(3)
    leader = cluster.leader()
    peer = cluster.followers()[0].name
    before = leader.raft.progress[peer].match
    late = Appended(True, before + 5, 0, Standing.VOTER)
    give(leader, peer, late, term=leader.raft.term() - 1, round_number=leader.raft.round)
    assert leader.raft.progress[peer].match == before
    assert leader.raft._SyncObj__raftMatchIndex[leader.raft.members[peer]] == before


def divergent_stock_pair(clock: ManualClock) -> tuple[StockMember, StockMember]:
    leader = StockMember("n1", ["n2", "n3"], clock, appendEntriesBatchSizeBytes=4)
    follower = StockMember("n2", ["n1", "n3"], clock, appendEntriesBatchSizeBytes=4)
    follower.receive("n3", append(1, (1, 0), [(index, 1) for index in range(2, 30)]))
    journal = leader.inner("raftLog")
    for index in range(2, 30):
        journal.add(b"\x01", index, 2)
    leader.lead(term=3)
    return leader, follower


def test_n1_a_divergent_follower_more_than_a_batch_behind_converges() -> None:
    clock = ManualClock()
    leader, follower = divergent_stock_pair(clock)
    for _ in range(300):
        clock.now_s += 0.11
        leader.tick()
        for target, message in leader.take_sent():
            if target == "n2":
                follower.receive("n1", message)
        for _, message in follower.take_sent():
            leader.receive("n2", message)
    assert follower.log() != leader.log()  # 300 heartbeats on a perfect network

    cluster = Cluster(3, entry_bytes_max=40, append_bytes_max=64)
    old = cluster.leader()
    cluster.isolate(old.name)
    for number in range(30):
        cluster.propose(b"lost %d" % number, old)
    cluster.run_until(lambda: len(cluster.leaders()) == 1 and cluster.leaders()[0] is not old)
    for number in range(60):
        cluster.propose(b"kept %d" % number)
    assert len(old.store) > 30
    cluster.heal()
    cluster.log.clear()
    cluster.run(300)
    assert cluster.converged()
    assert old.application.applied[-1] == b"kept 59"


def test_n2_acknowledgements_do_not_send_entries_again() -> None:
    stock = StockMember("n1", ["n2", "n3"], ManualClock())
    stock.lead()
    for number in range(3):
        stock.inner("raftLog").add(b"\x01", 3 + number, 1)
        stock.object._SyncObj__sendAppendEntries()
    stock.take_sent()
    stock.receive("n2", {"type": "next_node_idx", "next_node_idx": 3, "reset": False, "success": True})
    stock.object._SyncObj__sendAppendEntries()
    again = [message for target, message in stock.take_sent("append_entries") if target == "n2"]
    assert [entry[1] for entry in again[0]["entries"]] == [3, 4, 5]  # all three were on their way already

    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    cluster.log.clear()
    for host in cluster.followers():
        cluster.hold(leader.name, host.name)
    for number in range(20):
        cluster.propose(b"%d" % number, leader)
    for host in cluster.followers():
        cluster.release(leader.name, host.name)
    cluster.run(500)
    for host in cluster.followers():
        assert sum(len(append.entries) for append in cluster.bodies(Append, host.name)) == 20
    assert cluster.converged()


def test_a_burst_of_rejections_rewinds_once() -> None:
    progress = Progress(100)
    progress.probing = False
    for round_number in range(1, 4):
        progress.sent(round_number, 10, 10)
    progress.rejected(1, 4, 40, current_round=3)
    assert (progress.match, progress.next_index, progress.probing) == (4, 40, True)
    progress.sent(4, 10, 10)
    progress.rejected(2, 4, 30, current_round=4)
    progress.rejected(3, 4, 20, current_round=4)
    assert progress.next_index == 50
    assert not progress.has_room(1_000)  # one probe at a time
    progress.accepted(4, 49)
    assert (progress.match, progress.next_index, progress.has_room(1_000)) == (49, 50, True)


def test_what_is_in_flight_to_one_follower_is_bounded() -> None:
    progress = Progress(2)
    progress.probing = False
    while progress.has_room(1_000):
        progress.sent(1, 1, 300)
    assert progress.next_index == 6
    progress.accepted(1, 5)
    while progress.has_room(1 << 60):
        progress.sent(2, 1, 1)
    assert progress.next_index == 6 + 64


# ---- hole e: a leader of the past is told ---------------------------------------------------------------------------


def test_e_a_stale_sender_is_told_the_newer_term() -> None:
    stock = StockMember("n1", ["n2", "n3"], ManualClock())
    stock.receive("n2", append(5, (1, 0), []))
    stock.take_sent()
    stock.receive("n3", append(4, (1, 0), []))
    assert stock.take_sent() == []

    cluster, host = lone()
    give(host, "n2", Append(1, 0, 1), term=5)
    cluster.log.clear()
    give(host, "n3", Append(1, 0, 1), term=4)
    assert [(item[1], item[2].term) for item in cluster.sent(StaleTerm)] == [("n3", 5)]


def test_e_a_leader_without_a_quorum_steps_down_within_an_election_timeout() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3"], clock)
    stock.lead()
    clock.now_s += 20
    stock.tick()
    assert stock.object._isLeader()  # for 30 seconds

    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.isolate(leader.name)
    cluster.run(1_000)
    assert not leader.raft.leads()
    assert leader.node is not None
    assert not leader.node.is_leader()
    assert leader.node.status().leader is None


# ---- hole f: pre-vote -----------------------------------------------------------------------------------------------


def test_f_a_node_cut_off_neither_raises_its_term_nor_disturbs_when_it_returns() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3"], clock)
    for _ in range(20):
        clock.now_s += 2
        stock.tick()
    assert stock.inner("raftCurrentTerm") == 20

    cluster = Cluster(3)
    leader = cluster.leader()
    away = cluster.followers()[0]
    term = leader.raft.term()
    cluster.isolate(away.name)
    cluster.run(20_000, step_ms=20)
    assert away.raft.term() == term
    cluster.heal()
    cluster.run(3_000)
    assert leader.raft.leads()
    assert leader.raft.term() == term
    assert away.raft.leader() == leader.name


def test_f_a_node_cut_off_from_the_leader_only_does_not_depose_it() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    term = leader.raft.term()
    cluster.cut(leader.name, cluster.followers()[0].name, reset=True)
    cluster.run(10_000, step_ms=20)
    assert leader.raft.leads()
    assert leader.raft.term() == term


def test_a_vote_is_refused_while_the_leader_is_heard_unless_it_hands_over() -> None:
    cluster, host = lone()
    give(host, "n2", Append(1, 0, 1), term=2)
    cluster.log.clear()
    give(host, "n3", PreVoteRequest(3, 9, 2), term=2)
    give(host, "n3", VoteRequest(9, 2, False), term=3)
    assert cluster.log == []
    assert host.raft.term() == 2
    give(host, "n3", VoteRequest(9, 2, True), term=3)
    assert cluster.sent(Vote)


def test_a_log_that_is_behind_gets_neither_pre_vote_nor_vote() -> None:
    cluster, host = lone()
    give(host, "n2", Append(1, 0, 1, entries(2, 2)), term=2)
    cluster.clock.now_s += 5
    cluster.log.clear()
    give(host, "n3", PreVoteRequest(3, 2, 2), term=2)
    give(host, "n3", PreVoteRequest(3, 9, 1), term=2)
    give(host, "n3", VoteRequest(2, 2, True), term=3)
    assert not cluster.sent(PreVote)
    assert not cluster.sent(Vote)
    give(host, "n3", VoteRequest(3, 2, True), term=3)
    assert cluster.sent(Vote)


def test_one_vote_per_term_and_the_same_answer_to_the_same_question() -> None:
    cluster, host = lone()
    give(host, "n2", VoteRequest(1, 0, False), term=4)
    give(host, "n3", VoteRequest(1, 0, False), term=4)
    give(host, "n2", VoteRequest(1, 0, False), term=4)
    assert [item[1] for item in cluster.sent(Vote)] == ["n2", "n2"]


# ---- fast election after a reset connection -------------------------------------------------------------------------


def test_a_crashed_leader_is_replaced_in_a_fraction_of_the_election_timeout() -> None:
    for seed in range(20):
        cluster = Cluster(3, seed=seed)
        leader = cluster.leader()
        cluster.run(1_000)
        cluster.crash(leader.name)
        cluster.run(600)
        assert len(cluster.leaders()) == 1, f"seed {seed}"


def test_one_reset_connection_changes_nothing() -> None:
    for seed in range(10):
        cluster = Cluster(3, seed=seed)
        leader = cluster.leader()
        term = leader.raft.term()
        for host in cluster.followers():
            cluster.disconnect(leader.name, host.name, reset=True)
            cluster.run(50)
            cluster.heal()
            cluster.run(1_000)
        assert leader.raft.leads()
        assert leader.raft.term() == term


# ---- hole g: no pickle, no strangers' commands ----------------------------------------------------------------------


def test_g_nothing_is_ever_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something reached an unpickler")

    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(pysyncobj.pickle, name, refuse, raising=False)
    cluster = Cluster(3, compact_entries=20)
    bomb = pickle.dumps(("put", (1,)))
    for _ in range(60):
        cluster.propose(bomb)
    cluster.crash(cluster.followers()[0].name)
    cluster.propose(bomb)
    for name in cluster.names:
        if cluster[name].node is None:
            cluster.restart(name)
    cluster.run(2_000)
    assert cluster.converged()


@pytest.mark.parametrize("kind", [2, 3, 4, 255])
def test_g_membership_and_version_commands_are_refused_on_the_wire_and_in_the_log(kind: int) -> None:
    command = bytes([kind]) + pickle.dumps(("add", "evil:1"))
    with pytest.raises(MalformedFrame, match="unknown kind"):
        decode(encode(1, 0, 0, Append(1, 0, 1, (LogEntry(1, command),))), 1 << 20)
    _, host = lone()
    host.store.append(Entry(2, 1, command))
    host.inject("n2", Append(2, 1, 2), term=1)
    with pytest.raises(BrokenInvariant, match="unknown kind"):
        host.turn()


def test_g_the_library_has_no_way_to_send_or_take_anything_else() -> None:
    _, host = lone()
    for message in ({"type": "apply_command", "command": b""}, {"type": "response_vote", "term": 1}):
        with pytest.raises(BrokenInvariant):
            host.raft._SyncObj__onMessageReceived(host.raft.members["n2"], message)
    with pytest.raises(BrokenInvariant):
        host.raft.library_sends("n2", {"type": "apply_command"})
    outbox = Outbox(host.raft.library_sends)
    outbox.setOnUtilityMessageCallback("add", print)
    assert outbox._onUtilityMessageCallbacks == {}


# ---- hole h: reads --------------------------------------------------------------------------------------------------


def test_h_a_leader_of_the_past_answers_no_read() -> None:
    cluster = Cluster(3)
    old = cluster.leader()
    assert old.node is not None
    cluster.isolate(old.name)
    results: list[bool] = []
    old.node.read_barrier(results.append)
    cluster.run(3_000)
    assert results == [False]


def test_h_a_read_is_not_answered_on_rounds_that_began_before_it() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    assert leader.node is not None
    for host in cluster.followers():
        cluster.hold(leader.name, host.name)
    results: list[bool] = []
    leader.node.read_barrier(results.append)
    cluster.settle()
    assert results == []
    for host in cluster.followers():
        cluster.release(leader.name, host.name)
    cluster.settle()
    assert results == [True]


def test_h_a_new_leader_answers_reads_only_after_its_own_first_entry_is_committed() -> None:
    cluster = Cluster(3)
    old = cluster.leader()
    cluster.propose(b"x")
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, Appended)
    cluster.crash(old.name)
    cluster.run_until(cluster.leaders)
    new = cluster.leaders()[0]
    assert new.node is not None
    results: list[bool] = []
    new.node.read_barrier(results.append)
    cluster.settle()
    assert results == []
    assert not new.raft.commits_in_own_term()
    cluster.drop = lambda source, target, envelope: False
    cluster.run(300)
    assert results == [True]


# ---- hole i: an exception in the application ------------------------------------------------------------------------


def test_i_an_entry_is_never_applied_twice() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3"], clock)
    stock.lead()

    def burst(*_: object) -> None:
        raise RuntimeError("a callback")

    stock.propose(7, burst)
    stock.tick()
    stock.receive("n2", {"type": "next_node_idx", "next_node_idx": 4, "reset": False, "success": True})
    for _ in range(2):
        try:
            stock.tick()
        except RuntimeError:
            continue
    assert stock.object.values == [7, 7]

    cluster = Cluster(3)
    leader = cluster.leader()
    leader.application.raise_at = b"7"
    with pytest.raises(RuntimeError):
        cluster.propose(b"7", leader)
    with pytest.raises(RuntimeError):
        leader.turn()  # fail-stop: nothing is applied again, nothing is skipped
    assert leader.application.applied == []


# ---- hole j: no chunked entries -------------------------------------------------------------------------------------


def test_j_an_entry_larger_than_a_batch_cannot_exist() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3"], clock, appendEntriesBatchSizeBytes=10)
    stock.lead()
    stock.object._SyncObj__raftNextIndex[stock.nodes["n2"]] = 3
    stock.inner("raftLog").add(b"\x00" + b"x" * 15, 3, 1)
    stock.take_sent()
    stock.object._SyncObj__sendAppendEntries()
    marks = [
        message["transmission"] for target, message in stock.take_sent() if target == "n2" and "transmission" in message
    ]
    assert marks.count("finish") > 1  # the receiver unpickles an incomplete entry

    cluster = Cluster(3, entry_bytes_max=100, append_bytes_max=101)
    cluster.propose(b"x" * 100)
    cluster.run(200)
    assert cluster.converged()
    leader = cluster.leader()
    leader.application.to_propose.append(b"x" * 101)
    with pytest.raises(BrokenInvariant, match="at most 100"):
        leader.turn()


# ---- holes k1, k2, k3, k4, k5, n: snapshots -------------------------------------------------------------------------


def snapshot_of(host: Host, index: int, term: int, items: list[bytes]) -> SnapshotMeta:
    host.application.applied = items
    return host.snapshots.write(index, term, term, host.application.capture().encode())


def stored(log: list[tuple[int, int]], *, term: int = 3, commit: int = 0) -> MemoryStore:
    store = MemoryStore()
    store.durable["log"] = [Entry(index, entry_term, NO_OP) for index, entry_term in log]
    store.durable["term"] = term
    store.durable["commit_index"] = commit
    store.state = store._copy()
    store.fresh = False
    return store


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves its files open
def test_k1_a_crash_between_snapshot_and_compaction_loses_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    files = {"fullDumpFile": str(tmp_path / "dump"), "journalFile": str(tmp_path / "journal"), "useFork": False}
    stock = StockMember("n1", ["n2", "n3"], clock, **files)
    stock.receive("n2", append(1, (1, 0), [(index, 1) for index in range(2, 11)], commit=8))
    stock.tick()
    stock.object.forceLogCompaction()
    stock.tick()  # the dump is renamed; the journal is shortened in the next tick, which does not come
    stock.object.destroy()
    again = StockMember("n1", ["n2", "n3"], clock, **files)
    again.tick()
    assert again.log() == [(7, 1), (8, 1)]  # 9 and 10 were acknowledged
    again.object.destroy()

    cluster = Cluster(3, boot=False)
    host = cluster["n1"]
    meta = snapshot_of(host, 8, 1, [b"a"])
    host.store = stored([(1, 0)] + [(index, 1) for index in range(2, 11)], commit=8)
    host.store.durable["snapshot"] = meta
    host.store.state = host.store._copy()
    host.boot()
    assert log_of(host)[-1] == (10, 1)
    assert host.application.applied == [b"a"]
    assert (host.raft.applied_index(), host.raft.commit_index()) == (8, 8)


@pytest.mark.parametrize("log", [[(1, 0), (2, 1)], [(1, 0)] + [(index, 2) for index in range(2, 12)]])
def test_k1_a_crash_while_a_snapshot_replaced_the_log_is_completed(log: list[tuple[int, int]]) -> None:
    cluster = Cluster(3, boot=False)
    host = cluster["n1"]
    meta = snapshot_of(host, 8, 3, [b"a"])
    host.store = stored(log)
    host.store.durable["snapshot"] = meta
    host.store.state = host.store._copy()
    host.boot()
    assert log_of(host) == [(7, 3), (8, 3)]
    assert (host.raft.applied_index(), host.raft.commit_index()) == (8, 8)


@pytest.mark.parametrize(("hint", "expected"), [(0, 1), (3, 3), (99, 5)])
def test_the_stored_commit_index_is_a_hint_kept_within_the_log(hint: int, expected: int) -> None:
    cluster = Cluster(3, boot=False)
    host = cluster["n1"]
    host.store = stored([(1, 0)] + [(index, 1) for index in range(2, 6)], commit=hint)
    host.boot()
    assert host.raft.commit_index() == expected
    host.turn()
    assert host.raft.applied_index() == expected


def test_k2_a_log_without_its_beginning_is_refused() -> None:
    cluster = Cluster(3, boot=False)
    host = cluster["n1"]
    host.store = stored([(7, 1), (8, 1)])
    with pytest.raises(StoreError, match="no snapshot of what came before"):
        host.boot()
    host.store = stored([(17, 1), (18, 1)])
    host.store.durable["snapshot"] = snapshot_of(host, 8, 1, [])
    host.store.state = host.store._copy()
    with pytest.raises(StoreError, match="entries 9 to 16 are missing"):
        host.boot()


def test_k3_an_unreadable_snapshot_stops_the_start() -> None:
    cluster = Cluster(3, boot=False)
    host = cluster["n1"]
    meta = snapshot_of(host, 8, 1, [b"a"])
    host.store = stored([(7, 1), (8, 1)])
    host.store.durable["snapshot"] = meta
    host.store.state = host.store._copy()
    host.snapshots.files[meta.file] = b"garbage"
    with pytest.raises(StoreError, match="corrupt"):
        host.boot()


def behind_by_a_snapshot(**settings: Any) -> tuple[Cluster, Host, Host]:
    """A cluster whose leader has compacted away what one node, just back, is missing."""
    cluster = Cluster(3, compact_entries=20, **settings)
    leader = cluster.leader()
    away = cluster.followers()[0]
    cluster.propose(b"first")
    cluster.crash(away.name)
    for number in range(60):
        cluster.propose(b"%d" % number)
    assert leader.raft.first_index() > away.store.entry(len(away.store) - 1).index
    return cluster, leader, away


def test_a_node_far_behind_gets_a_snapshot_in_chunks() -> None:
    cluster, leader, away = behind_by_a_snapshot(snapshot_chunk_bytes=32)
    cluster.restart(away.name)
    cluster.run(1_000)
    assert cluster.converged()
    assert away.application.restored == 1
    assert leader.store.snapshot is not None
    chunks = cluster.bodies(SnapshotChunk)
    assert len(chunks) > 5
    assert max(len(chunk.data) for chunk in chunks) == 32
    cluster.propose(b"after")
    assert cluster.converged()
    cluster.restart(away.name)  # from the snapshot it has received
    cluster.run(500)
    assert cluster.converged()


def test_k3_a_corrupt_snapshot_is_never_acknowledged_and_replaces_nothing() -> None:
    cluster, _, away = behind_by_a_snapshot()
    away.snapshots.corrupt_next = True
    away.hold_background = True
    cluster.restart(away.name)
    cluster.run(200)
    before = log_of(away)
    away.hold_background = False
    away.turn()
    assert log_of(away) == before
    assert away.application.restored == 0
    assert away.store.snapshot is None
    cluster.run(3_000)  # the leader sends it again
    assert cluster.converged()


def test_k4_no_flood_while_a_snapshot_is_on_its_way() -> None:
    stock_clock = _SteppingClock()
    stock = StockMember("n1", ["n2", "n3"], stock_clock)
    stock.lead()
    journal = stock.inner("raftLog")
    for index in range(3, 10):
        journal.add(b"\x01", index, 1)
    journal.deleteEntriesTo(5)
    stock.set_inner("raftNextIndex", dict.fromkeys(stock.nodes.values(), 2))
    stock.take_sent()
    stock.object._SyncObj__sendAppendEntries()
    assert len(stock.take_sent()) > 50  # empty messages, for as long as the tick lasts

    cluster, leader, away = behind_by_a_snapshot(snapshot_chunk_bytes=32)
    cluster.restart(away.name)
    cluster.hold(away.name, leader.name)
    cluster.log.clear()
    cluster.run(500)
    assert len([item for item in cluster.sent(SnapshotChunk) if item[1] == away.name]) <= 4
    assert len([item for item in cluster.sent(Append) if item[1] == away.name]) <= 8
    cluster.release(away.name, leader.name)
    cluster.run(1_500)
    assert cluster.converged()


class _SteppingClock(ManualClock):
    """A look at it costs a millisecond, so that a loop that waits for time to pass ends."""

    def monotonic_s(self) -> float:
        self.now_s += 0.001
        return self.now_s


def test_a_transfer_goes_on_where_it_stopped() -> None:
    cluster, leader, away = behind_by_a_snapshot(snapshot_chunk_bytes=16)
    cluster.restart(away.name)
    cluster.run_until(lambda: away.snapshots.received_bytes > 64)
    cluster.disconnect(leader.name, away.name)
    cluster.run(50)
    cluster.heal()
    cluster.run(1_000)
    assert cluster.converged()
    assert leader.store.snapshot is not None
    assert away.snapshots.received_bytes == leader.store.snapshot.size_bytes


def chunk_of(meta: SnapshotMeta, payload: bytes, data: bytes | None = None) -> SnapshotChunk:
    data = payload if data is None else data
    return SnapshotChunk(meta.index, meta.term, meta.previous_term, len(payload), meta.checksum, 0, data)


def test_k5_a_snapshot_older_than_the_state_is_acknowledged_not_installed() -> None:
    cluster, host = lone()
    payload = host.application.capture().encode()
    old = cluster["n2"].snapshots.write(3, 1, 1, payload)
    give(host, "n2", Append(1, 0, 6, entries(1, 1, 1, 1, 1)), term=1)
    cluster.log.clear()
    give(host, "n2", chunk_of(old, payload), term=1)
    assert [answer.match for answer in answers(cluster, Appended)] == [6]
    assert host.application.restored == 0
    assert log_of(host)[-1] == (6, 1)
    # The same when it was overtaken while it was being verified.
    newer = cluster["n2"].snapshots.write(9, 1, 1, payload)
    host.hold_background = True
    give(host, "n2", chunk_of(newer, payload), term=1)
    give(host, "n2", Append(6, 1, 10, entries(1, 1, 1, 1)), term=1)
    host.hold_background = False
    host.turn()
    host.turn()
    assert host.application.restored == 0
    assert host.raft.applied_index() == 10


def test_k5_a_finished_snapshot_of_its_own_does_not_replace_a_newer_one() -> None:
    cluster, host = lone()
    give(host, "n2", Append(1, 0, 4, entries(1, 1, 1)), term=1)
    assert host.node is not None
    host.hold_background = True
    host.node.take_snapshot(lambda index, size, error: None)
    host.turn()
    payload = host.application.capture().encode()
    newer = cluster["n2"].snapshots.write(9, 1, 1, payload)
    give(host, "n2", chunk_of(newer, payload), term=1)
    host.tasks.rotate(1)  # the received one is verified first
    host.hold_background = False
    host.turn()
    host.turn()
    assert host.store.snapshot is not None
    assert host.store.snapshot.index == 9
    assert host.raft.applied_index() == 9
    assert list(host.snapshots.files) == ["received-9"]


def test_n_snapshot_messages_never_move_the_commit_index() -> None:
    stock = StockMember("n1", ["n2", "n3"], ManualClock())
    stock.receive("n2", append(1, (1, 0), [(2, 1), (3, 1)]))  # of a leader that could not commit them
    stock.receive("n3", {"type": "append_entries", "term": 2, "commit_index": 30, "serialized": None})
    assert stock.inner("raftCommitIndex") == 3  # its own, uncommitted entries

    cluster, host = lone()
    payload = host.application.capture().encode() + b"more"
    meta = cluster["n2"].snapshots.write(30, 2, 2, payload)
    give(host, "n2", Append(1, 0, 1, entries(1, 1)), term=1)
    give(host, "n3", chunk_of(meta, payload, payload[:1]), term=2)
    assert host.raft.commit_index() == 1
    assert host.application.indexes == []


# ---- hole l: membership ---------------------------------------------------------------------------------------------


def test_l_the_set_of_voters_is_what_was_configured() -> None:
    _, host = lone()
    library: Any = host.raft
    with pytest.raises(Exception, match="dynamicMembershipChange is disabled"):
        library.addNodeToCluster("evil:1")
    host.turn()
    assert sorted(node.id for node in library.otherNodes) == ["n2", "n3"]
    assert len(host.store) == 1


# ---- hole o: one voice per voter ------------------------------------------------------------------------------------


def test_o_votes_are_collected_per_voter() -> None:
    clock = ManualClock()
    stock = StockMember("n1", ["n2", "n3", "n4", "n5"], clock)
    clock.now_s += 5
    stock.tick()
    for _ in range(2):
        stock.receive("n2", {"type": "response_vote", "term": 1})
    assert stock.object._isLeader()  # with the votes of two of five

    cluster, host = candidate(5)
    term = host.raft.term()
    for _ in range(3):
        give(host, "n2", Vote(), term=term)
    assert host.raft.role() is Role.CANDIDATE
    give(host, "n3", Vote(), term=term)
    assert host.raft.leads()
    assert cluster.clock.now_s > 0


def candidate(size: int) -> tuple[Cluster, Host]:
    cluster, host = lone(size)
    while not cluster.sent(PreVoteRequest):
        cluster.clock.now_s += 0.1
        host.turn()
    for peer in cluster.names[1:]:
        give(host, peer, PreVote(host.raft.term() + 1), term=host.raft.term())
        if host.raft.role() is Role.CANDIDATE:
            return cluster, host
    raise AssertionError("not a candidate")


def test_a_vote_after_the_candidates_own_deadline_does_not_count() -> None:
    cluster, host = candidate(3)
    term = host.raft.term()
    cluster.clock.now_s += 2
    give(host, "n2", Vote(), term=term)
    assert not host.raft.leads()


def test_two_leaders_of_one_term_stop_the_node() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    leader.inject(cluster.followers()[0].name, Append(1, 0, 1), term=leader.raft.term())
    with pytest.raises(BrokenInvariant, match="both lead term"):
        leader.turn()


# ---- the page about it ----------------------------------------------------------------------------------------------


def test_every_test_that_the_page_names_exists() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "pysyncobj.md").read_text()
    tests = "\n".join(path.read_text() for path in sorted((root / "tests").rglob("test_*.py")))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    assert all((root / path).exists() for path in re.findall(r"`(tests/[\w/]+\.py)`", page))
