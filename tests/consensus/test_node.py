"""The node as a whole: elections, replication, reads, hand-over, snapshots, restarts."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.consensus.messages import (
    Append,
    Body,
    Envelope,
    HandOver,
    HandOverRefused,
    LogEntry,
    MalformedFrame,
    PreVoteRequest,
    ReadRequest,
    SnapshotChunk,
    TimeoutNow,
    decode,
    encode,
)
from sidecar.consensus.node import NodeSettings, Turn
from sidecar.consensus.ports import Role, StoreError
from tests.consensus.harness import Cluster


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_new_cluster_elects_one_leader_and_replicates(size: int) -> None:
    cluster = Cluster(size)
    leader = cluster.leader()
    for number in range(5):
        cluster.propose(b"%d" % number)
    cluster.run(300)
    assert cluster.converged()
    assert leader.application.applied == [b"0", b"1", b"2", b"3", b"4"]
    assert len(cluster.leaders()) == 1
    for host in cluster.running():
        assert host.node is not None
        status = host.node.status()
        assert status.ready, status.reason
        assert status.leader == leader.name
        assert status.role is (Role.LEADER if host is leader else Role.FOLLOWER)


def test_followers_learn_of_a_commit_without_waiting_for_a_heartbeat() -> None:
    cluster = Cluster(3)
    cluster.leader()
    cluster.propose(b"x")  # no time passes in here
    assert all(host.application.applied == [b"x"] for host in cluster.running())


def test_nothing_but_heartbeats_when_idle() -> None:
    cluster = Cluster(3)
    cluster.leader()
    cluster.run(1000)
    cluster.log.clear()
    cluster.run(1000)
    appends = cluster.sent(Append)
    assert 18 <= len(appends) <= 22  # ten rounds a second to each of two followers
    assert len(cluster.log) == 2 * len(appends)  # and their answers


def test_nothing_leaves_before_it_is_durable() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    leader.application.to_propose.append(b"x")
    cluster.log.clear()
    assert leader.node is not None
    turn = leader.node.begin_turn()
    assert turn.durable is not None
    assert not cluster.log
    turn.durable()
    leader.node.end_turn(turn)
    assert [item[1] for item in cluster.sent(Append)] == [
        host.name for host in cluster.hosts.values() if host is not leader
    ]


def test_a_failed_sync_stops_the_node_and_sends_nothing() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    leader.store.sync_error = StoreError("log.db: no space left on the device")
    leader.application.to_propose.append(b"x")
    cluster.log.clear()
    with pytest.raises(StoreError):
        leader.turn()
    assert not cluster.log


def test_an_exception_in_apply_stops_the_node_for_good() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    follower.application.raise_at = b"bad"
    with pytest.raises(RuntimeError, match="cannot apply"):
        cluster.propose(b"bad", leader)
    with pytest.raises(RuntimeError, match="cannot apply"):
        follower.turn()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        NodeSettings(cluster_id="c", node_id="n1", peers=("n1",))
    with pytest.raises(ValueError, match="heartbeat"):
        NodeSettings(cluster_id="c", node_id="n1", peers=("n2",), heartbeat_ms=500)
    with pytest.raises(ValueError, match="append_bytes_max"):
        NodeSettings(cluster_id="c", node_id="n1", peers=("n2",), entry_bytes_max=8 << 20)


# ---- reads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_reads_on_the_leader_see_what_was_committed(size: int) -> None:
    cluster = Cluster(size)
    leader = cluster.leader()
    cluster.propose(b"x")
    assert leader.node is not None
    results: list[bool] = []
    leader.node.read_barrier(results.append)
    assert results == []  # never from within the call
    cluster.settle()
    assert results == [True]


def test_a_read_on_a_follower_waits_until_it_has_applied_what_the_leader_had_committed() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    reader, other = cluster.followers()
    assert reader.node is not None
    cluster.drop = lambda source, target, envelope: target == reader.name and isinstance(envelope.body, Append)
    cluster.propose(b"x", leader)
    assert other.application.applied == [b"x"]
    assert reader.application.applied == []
    results: list[list[bytes]] = []
    reader.node.read_barrier(lambda known: results.append(list(reader.application.applied) if known else [b"unknown"]))
    cluster.settle()
    assert results == []
    cluster.drop = lambda source, target, envelope: False
    cluster.run(200)
    assert results == [[b"x"]]


def test_many_reads_share_one_round() -> None:
    cluster = Cluster(3)
    cluster.leader()
    reader = cluster.followers()[0]
    cluster.run(500)
    cluster.log.clear()
    results: list[bool] = []
    for _ in range(1_000):
        assert reader.node is not None
        reader.node.read_barrier(results.append)
    cluster.settle()
    assert results == [True] * 1_000
    assert len(cluster.sent(ReadRequest)) == 1
    assert len(cluster.log) <= 10


def test_reads_without_a_leader_end_within_an_election_timeout() -> None:
    cluster = Cluster(3)
    reader = cluster.followers()[0]
    cluster.isolate(reader.name)
    assert reader.node is not None
    results: list[bool] = []
    reader.node.read_barrier(results.append)
    cluster.run(1_700)
    assert results == [False]


def test_a_read_outlives_a_change_of_leader() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(1_000)
    reader = cluster.followers()[0]
    assert reader.node is not None
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, ReadRequest) and target == leader.name
    results: list[bool] = []
    reader.node.read_barrier(results.append)
    cluster.run(20)
    cluster.crash(leader.name)
    cluster.run(1_000)
    assert results == [True]


def test_a_read_whose_index_never_arrives_ends_too() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    reader = cluster.followers()[0]
    cluster.run(500)
    assert reader.node is not None
    cluster.drop = lambda source, target, envelope: target == reader.name and isinstance(envelope.body, Append)
    cluster.propose(b"x", leader)
    results: list[bool] = []
    reader.node.read_barrier(results.append)
    cluster.run(20)
    cluster.isolate(reader.name)
    cluster.run(1_700)
    assert results == [False]
    assert reader.node._reads_count == 0


def test_a_follower_says_how_current_its_state_is() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    assert follower.node is not None
    for number in range(20):
        cluster.propose(b"%d" % number, leader)  # never idle
        cluster.run(10)
        assert follower.node.status().leader_contact_ms <= 10
    cluster.isolate(follower.name)
    cluster.run(500)
    assert 490 <= follower.node.status().leader_contact_ms <= 520


def test_reads_are_bounded() -> None:
    cluster = Cluster(3, reads_max=10)
    cluster.leader()
    reader = cluster.followers()[0]
    cluster.isolate(reader.name)
    results: list[bool] = []
    for _ in range(15):
        assert reader.node is not None
        reader.node.read_barrier(results.append)
    cluster.run(10)
    assert results == [False] * 5
    cluster.run(2_000)
    assert results == [False] * 15


# ---- handing leadership over ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_leadership_is_handed_over_without_an_election_timeout(named: bool) -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(1_000)
    target = cluster.followers()[1]
    assert leader.node is not None
    results: list[str | None] = []
    leader.application.to_propose.append(b"last")
    leader.node.transfer_leadership(target.name if named else None, results.append)
    cluster.run(50)
    assert results == [None]
    assert [host is leader for host in cluster.leaders()] == [False]
    if named:
        assert target.raft.leads()
    cluster.propose(b"x")
    assert b"x" in leader.application.applied


def test_a_handover_is_not_lost_among_the_messages_of_its_turn() -> None:
    """A heartbeat that arrives together with the word to take over says no more than that word does."""
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(1_000)
    target = cluster.followers()[1]
    results: list[str | None] = []
    assert leader.node is not None
    cluster.hold(leader.name, target.name)
    leader.node.transfer_leadership(target.name, results.append)
    cluster.run(3 * leader.node.settings.heartbeat_ms)
    cluster.release(leader.name, target.name)
    cluster.run(20)
    assert target.raft.leads()
    assert results == [None]


def test_a_handover_that_cannot_be_is_refused_with_a_reason() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    results: list[str | None] = []
    assert leader.node is not None
    assert follower.node is not None
    leader.node.transfer_leadership("n9", results.append)
    leader.node.transfer_leadership(leader.name, results.append)
    follower.node.transfer_leadership(None, results.append)
    cluster.crash(follower.name)
    cluster.run(20)
    leader.node.transfer_leadership(follower.name, results.append)
    cluster.run(20)
    assert len(results) == 3
    assert all(results)
    alone = Cluster(1)
    assert alone.leader().node is not None
    node = alone["n1"].node
    assert node is not None
    node.transfer_leadership(None, results.append)
    alone.settle()
    assert results[-1] is not None
    assert "no other node" in results[-1]


def test_a_handover_that_does_not_come_about_is_given_up() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    target = cluster.followers()[0]
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, TimeoutNow)
    results: list[str | None] = []
    assert leader.node is not None
    leader.node.transfer_leadership(target.name, results.append)
    leader.application.to_propose.append(b"waits")
    cluster.run(1_000)
    assert results == []
    assert leader.application.applied == []
    cluster.run(3_000)
    assert results
    assert results[0] is not None
    assert "not taken over in time" in results[0]
    assert leader.application.applied == [b"waits"]


@pytest.mark.parametrize("target", ["itself", "third", "anybody"])
def test_a_follower_passes_a_handover_on(target: str) -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    asked, other = cluster.followers()
    to = {"itself": asked.name, "third": other.name, "anybody": None}[target]
    results: list[str | None] = []
    assert asked.node is not None
    asked.node.transfer_leadership(to, results.append)
    cluster.run(50)
    assert results == [None]
    assert not leader.raft.leads()
    assert asked.raft.leader() in ([to] if to else [asked.name, other.name])
    cluster.propose(b"x")
    cluster.run(200)
    assert leader.application.applied == [b"x"]


def test_a_follower_tells_why_the_leader_does_not_hand_over() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    asked, other = cluster.followers()
    results: list[str | None] = []
    assert asked.node is not None
    asked.node.transfer_leadership(leader.name, results.append)
    cluster.run(20)
    assert results == [f"{leader.name} leads already"]
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, TimeoutNow)
    asked.node.transfer_leadership(other.name, results.append)
    asked.node.transfer_leadership(other.name, results.append)
    cluster.run(20)
    assert results[1] == "this node has asked the leader to hand over already"
    cluster.run(4_000)
    assert results[2] == f"{other.name} has not taken over in time"
    cluster.isolate(asked.name)
    cluster.run(20)
    asked.node.transfer_leadership(None, results.append)
    cluster.run(20)
    assert "no leader is known" in str(results[3])


def test_a_handover_that_was_passed_on_always_ends() -> None:
    """The question or its answer may be lost, or the leader; an answer of the past answers nothing."""
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    asked, other = cluster.followers()
    results: list[str | None] = []
    assert asked.node is not None
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, HandOver)
    asked.node.transfer_leadership(other.name, results.append)
    cluster.run(20)
    asked.inject(leader.name, HandOverRefused(number=77, reason="of another question"), term=leader.raft.term())
    asked.inject(other.name, HandOverRefused(number=1, reason="of another node"), term=leader.raft.term())
    cluster.run(6_000)
    assert results == ["another node has not taken over in time"]
    asked.inject(leader.name, HandOverRefused(number=1, reason="too late"), term=leader.raft.term())
    asked.node.transfer_leadership(other.name, results.append)
    cluster.crash(leader.name)
    cluster.run(6_000)
    assert results[1:] == [None]  # another leads, which is what was asked for


def test_a_handover_is_not_passed_on_twice() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    one, other = cluster.followers()
    cluster.log.clear()
    one.inject(other.name, HandOver(number=5, to=other.name), term=leader.raft.term())
    cluster.run(20)
    said = [envelope.body for _, _, envelope in cluster.log if isinstance(envelope.body, HandOver | HandOverRefused)]
    assert said == [HandOverRefused(number=5, reason=f"{one.name} does not lead")]


# ---- snapshots of the node's own ------------------------------------------------------------------------------------


def test_the_log_is_compacted_by_entries_and_keeps_a_tail() -> None:
    cluster = Cluster(3, compact_entries=50)
    leader = cluster.leader()
    for number in range(200):
        cluster.propose(b"%d" % number)
    assert leader.store.snapshot is not None
    assert len(leader.store) <= 51
    assert leader.raft.first_index() < leader.store.snapshot.index - 3
    assert len(leader.snapshots.files) == 1
    for name in cluster.names:
        cluster.crash(name, keep=1_000)
    for name in cluster.names:
        cluster.restart(name)
    cluster.leader()
    cluster.run(500)
    assert cluster.converged()
    assert len(leader.application.applied) == 200


def test_the_log_is_compacted_by_bytes() -> None:
    cluster = Cluster(3, compact_bytes=10_000)
    leader = cluster.leader()
    for _ in range(100):
        cluster.propose(b"x" * 500)
    assert leader.store.size_bytes < 11_000
    snapshots = leader.store.snapshot
    cluster.run(500)
    assert leader.store.snapshot == snapshots  # not again and again while nothing is new


def test_a_snapshot_on_request() -> None:
    cluster = Cluster(3)
    host = cluster.followers()[0]
    results: list[tuple[int, int, str | None]] = []
    assert host.node is not None
    cluster.propose(b"x")
    host.node.take_snapshot(lambda *result: results.append(result))
    cluster.settle()
    assert host.store.snapshot is not None
    assert results == [(host.raft.applied_index(), host.store.snapshot.size_bytes, None)]
    host.node.take_snapshot(lambda *result: results.append(result))
    cluster.settle()
    assert results[1] == results[0]


def test_a_snapshot_that_cannot_be_written_is_reported_and_tried_again_later() -> None:
    cluster = Cluster(1, compact_entries=10)
    host = cluster.leader()
    host.snapshots.full = True
    results: list[tuple[int, int, str | None]] = []
    assert host.node is not None
    for number in range(20):
        cluster.propose(b"%d" % number)
    host.node.take_snapshot(lambda *result: results.append(result))
    cluster.settle()
    assert results
    assert results[0][2] is not None
    host.snapshots.full = False
    cluster.run(3_000)
    cluster.propose(b"x")
    assert host.store.snapshot is not None


# ---- restarts, late wake-ups, slow disks ----------------------------------------------------------------------------


def test_a_node_started_alone_applies_what_it_knows_to_be_committed_and_is_not_ready() -> None:
    cluster = Cluster(3)
    cluster.leader()
    cluster.propose(b"x")
    cluster.propose(b"y")
    host = cluster.followers()[0]
    known = host.store.commit_index
    for name in cluster.names:
        cluster.crash(name, keep=1_000)
    host.boot()
    cluster.run(3_000)
    assert host.application.applied == [b"x", b"y"]
    assert host.node is not None
    status = host.node.status()
    assert status.applied_index == known
    assert not status.ready
    assert status.reason == "no leader is known"


def test_everything_acknowledged_survives_a_crash_of_all() -> None:
    for seed in range(5):
        cluster = Cluster(3, seed=seed)
        cluster.leader()
        for number in range(10):
            cluster.propose(b"%d" % number)
        for name in cluster.names:
            cluster.crash(name)
        for name in cluster.names:
            cluster.restart(name)
        cluster.leader()
        cluster.run(300)
        assert cluster.converged()
        assert len(cluster["n1"].application.applied) == 10


def test_a_follower_that_did_not_run_for_a_while_does_not_hold_the_leader_to_be_silent() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    follower = cluster.followers()[0]
    follower.paused = True
    cluster.run(700)
    cluster.hold(leader.name, follower.name)  # what came in is still in the kernel when it wakes up
    follower.node._inbox.clear()  # type: ignore[union-attr]
    cluster.run(3_000)
    follower.paused = False
    cluster.log.clear()
    cluster.settle()
    assert not cluster.sent(PreVoteRequest)


def test_a_paused_leader_finds_its_successor_and_follows() -> None:
    cluster = Cluster(3)
    old = cluster.leader()
    cluster.run(500)
    old.paused = True
    old.application.to_propose.append(b"late")
    cluster.run_until(lambda: [host for host in cluster.leaders() if host is not old])
    cluster.propose(b"x", next(host for host in cluster.leaders() if host is not old))
    old.paused = False
    cluster.run(500)
    assert len(cluster.leaders()) == 1
    assert not old.raft.leads()
    cluster.propose(b"y")
    assert cluster.converged()


def test_a_slow_disk_changes_no_leader() -> None:
    """300 ms for each sync, turns as long: answers are late, but nobody is silent."""
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.run(500)
    term = leader.raft.term()
    open_turns: dict[str, tuple[Turn, float]] = {}
    for step in range(1_500):
        cluster.clock.now_s += 0.01
        if step % 20 == 0:
            leader.application.to_propose.append(b"%d" % step)
        for host in cluster.running():
            assert host.node is not None
            if host.name in open_turns:
                turn, ready_s = open_turns[host.name]
                if cluster.clock.now_s < ready_s:
                    continue
                assert turn.durable is not None
                turn.durable()
                host.node.end_turn(turn)
                del open_turns[host.name]
            if host.due() or host.application.to_propose:
                host.woken = False
                turn = host.node.begin_turn()
                if turn.durable is None:
                    host.node.end_turn(turn)
                else:
                    open_turns[host.name] = turn, cluster.clock.now_s + 0.3
    assert leader.raft.leads()
    assert leader.raft.term() == term
    assert len(leader.application.applied) > 20


def test_the_same_seed_is_the_same_run() -> None:
    def trace(seed: int) -> list[tuple[str, str, Envelope]]:
        cluster = Cluster(5, seed=seed)
        cluster.propose(b"x")
        cluster.crash(cluster.leader().name)
        cluster.run(3_000)
        return cluster.log

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


# ---- bad input, bounds, offsets, forwarding -------------------------------------------------------------------------


def test_garbage_is_counted_and_dropped() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    good = encode(1, 0, 0, TimeoutNow())
    frames = [b"", b"garbage", b"\x80\x04\x95", good[:-1], b"\xc1" * 100, os.urandom(200), b"\x95\x02" + good[2:]]
    frames.append(b"x" * (follower.node.settings.frame_bytes_max() + 1))  # type: ignore[union-attr]
    for frame in frames:
        assert follower.events is not None
        follower.events.frame_received(leader.name, frame)
    cluster.run(300)
    assert follower.node is not None
    assert follower.node.frames_malformed == len(frames)
    cluster.propose(b"x")
    assert cluster.converged()


@given(st.binary(max_size=300))
def test_decoding_never_fails_in_another_way(frame: bytes) -> None:
    with contextlib.suppress(MalformedFrame):
        decode(frame, 1_000)


@pytest.mark.parametrize(
    "body",
    [
        Append(0, 0, 1),
        Append(1, 0, 1, (LogEntry(9, b"\x01"),)),  # of a later term than the message
        Append(5, 3, 1, (LogEntry(2, b"\x01"),)),  # terms that go back
        Append(1, 0, 1, (LogEntry(1, b""),)),
        Append(1, 0, 1, (LogEntry(1, b"\x01x"),)),
        SnapshotChunk(1, 1, 1, 10, "0" * 64, 0, b"x"),
        SnapshotChunk(5, 1, 1, 10, "0" * 64, 8, b"xxx"),
        SnapshotChunk(5, 1, 1, 10, "0" * 64, 0, b""),
        SnapshotChunk(5, 9, 1, 10, "0" * 64, 0, b"x"),
        SnapshotChunk(5, 1, 1, 10, "../../etc", 0, b"x"),
    ],
)
def test_messages_that_cannot_be_are_refused(body: Body) -> None:
    with pytest.raises(MalformedFrame):
        decode(encode(4, 1, 0, body), 1_000)


def test_the_inbox_is_bounded_and_what_was_dropped_is_repaired() -> None:
    cluster = Cluster(3, inbox_frames_max=5)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    follower.paused = True
    for number in range(50):
        cluster.propose(b"%d" % number, leader)
    assert follower.node is not None
    assert len(follower.node._inbox) <= 5
    assert follower.node.frames_dropped > 0
    follower.paused = False
    cluster.run(1_000)
    assert cluster.converged()


def test_clock_offsets_are_measured_on_heartbeats() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    ahead, behind = cluster.followers()
    ahead.clock.wall_ahead_ms, behind.clock.wall_ahead_ms = 5_000, -3_000
    cluster.run(500)
    assert leader.node is not None
    assert dict(leader.node.clock_offsets_ms()) == {ahead.name: 5_000, behind.name: -3_000}
    assert ahead.node is not None
    assert ahead.node.clock_offsets_ms() == []


def test_messages_of_the_application_reach_the_leader() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    follower = cluster.followers()[0]
    assert follower.node is not None
    assert leader.node is not None
    assert follower.node.forward(b"please")
    assert not leader.node.forward(b"to myself")
    with pytest.raises(ValueError, match="at most"):
        follower.node.forward(b"x" * ((1 << 20) + 1))
    cluster.settle()
    assert leader.application.forwarded_payloads == [(follower.name, b"please")]
    cluster.cut(leader.name, follower.name)
    cluster.settle()
    assert not follower.node.forward(b"please")


def test_the_application_is_told_of_roles_before_it_is_asked_for_entries() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    assert leader.application.roles[-1] == (Role.LEADER, leader.raft.term(), leader.name)
    follower = cluster.followers()[0]
    cluster.run(10)
    assert follower.application.roles[-1] == (Role.FOLLOWER, leader.raft.term(), leader.name)
    cluster.propose(b"x")
    assert leader.application.heard == follower.application.heard == [b"x"]


def test_membership_in_settings_is_what_the_frames_limit_follows() -> None:
    settings = NodeSettings(cluster_id="c", node_id="n1", peers=("n2",))
    assert settings.frame_bytes_max() > settings.append_bytes_max
