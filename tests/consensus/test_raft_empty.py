"""Founding a cluster, and nodes that lost their store. The rules are at the top of sidecar/consensus/raft.py."""

from __future__ import annotations

from sidecar.consensus.messages import (
    Admit,
    Append,
    Appended,
    Hello,
    PreVote,
    PreVoteRequest,
    Standing,
    Vote,
    VoteRequest,
)
from tests.consensus.harness import Cluster, Host


def voter(host: Host) -> bool:
    return host.raft.is_voter()


def test_nobody_founds_a_cluster_without_bootstrap() -> None:
    cluster = Cluster(3, bootstrap=False)
    cluster.run(10_000, step_ms=20)
    assert not cluster.leaders()
    for host in cluster.running():
        assert host.node is not None
        status = host.node.status()
        assert not status.ready
        assert not status.voter
        assert "bootstrap" in status.reason


def test_one_node_with_bootstrap_founds_when_all_are_there_and_the_others_are_admitted() -> None:
    cluster = Cluster(3, bootstrap=False, boot=False)
    cluster["n1"].boot(bootstrap=True)
    cluster["n2"].boot(bootstrap=True)
    cluster.connect_all()
    cluster.run(10_000, step_ms=20)
    assert not cluster.leaders()  # n3 could have history
    cluster["n3"].boot()
    cluster.connect_all()
    cluster.leader()
    assert not voter(cluster["n3"])
    cluster.run_until(lambda: voter(cluster["n3"]))
    cluster.propose(b"x")
    assert cluster.converged()


def test_a_single_node_needs_bootstrap_too() -> None:
    cluster = Cluster(1, bootstrap=False)
    cluster.run(5_000, step_ms=20)
    assert not cluster.leaders()
    cluster.restart("n1", bootstrap=True)
    cluster.leader()


def test_an_empty_node_neither_votes_nor_stands_nor_counts_until_it_is_admitted() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    lost, other = cluster.followers()
    cluster.propose(b"before")
    cluster.lose_disk(lost.name)
    cluster.crash(other.name)
    cluster.restart(lost.name)
    cluster.run(100)
    # Leader and empty node are two of three, but nothing may be committed by them.
    index = leader.raft.commit_index()
    cluster.propose(b"by two", leader)
    cluster.run(300)
    assert leader.raft.commit_index() == index
    assert lost.application.applied == [b"before"]
    lost.inject(other.name, PreVoteRequest(99, 99, 99), term=1)
    lost.inject(other.name, VoteRequest(99, 99, True), term=99)
    cluster.log.clear()
    cluster.settle()
    assert not cluster.sent(Vote, lost.name)
    assert not cluster.sent(PreVote, lost.name)
    cluster.run(6_000, step_ms=20)
    assert not cluster.leaders()
    assert not voter(lost)
    # With the third node back there is a quorum of voters; the empty one is admitted by it.
    cluster.restart(other.name)
    cluster.leader()
    cluster.run_until(lambda: voter(lost))
    cluster.propose(b"after")
    assert cluster.converged()


def test_a_node_that_lost_its_store_is_ready_when_it_may_vote_and_not_before() -> None:
    cluster = Cluster(3)
    cluster.leader()
    cluster.propose(b"before")
    lost = cluster.followers()[0]
    cluster.lose_disk(lost.name)
    cluster.restart(lost.name)
    node = lost.node
    assert node is not None
    cluster.run_until(lambda: node.status().reason.startswith("not a voter yet: it lost its store"))
    assert lost.application.applied == [b"before"] and not voter(lost)
    cluster.run_until(lambda: node.status().ready)
    assert voter(lost)


def test_an_admitted_node_votes_only_in_newer_terms() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    lost = cluster.followers()[0]
    cluster.lose_disk(lost.name)
    cluster.restart(lost.name)
    cluster.run_until(lambda: voter(lost))
    term = leader.raft.term()
    assert (lost.store.term, lost.store.amnesiac_term) == (term, term)
    other = next(host for host in cluster.followers() if host is not lost)
    cluster.log.clear()
    lost.inject(other.name, VoteRequest(99, 99, True), term=term)
    cluster.settle()
    assert not cluster.sent(Vote)
    cluster.crash(lost.name)
    assert lost.store.amnesiac_term == term
    cluster.restart(lost.name)
    assert voter(lost)
    cluster.run(200)
    # And it takes part: without the other follower it carries commits and elections.
    cluster.crash(other.name)
    cluster.propose(b"x", leader)
    assert lost.application.applied == [b"x"]
    cluster.crash(leader.name)
    cluster.restart(other.name)
    cluster.leader()
    assert lost.raft.term() > term
    assert lost.store.amnesiac_term is None


def test_bootstrap_that_stays_set_is_harmless_when_a_disk_is_lost() -> None:
    """The node that lost its disk meets, at first, only another empty node."""
    cluster = Cluster(3, boot=False)
    for name in ("n1", "n2", "n3"):
        cluster[name].boot()
    cluster.connect_all()
    leader = cluster.leader()
    cluster.propose(b"x")
    lost = cluster.followers()[0]
    other = cluster.followers()[1]
    cluster.crash(other.name)
    cluster.lose_disk(lost.name)
    cluster.crash(leader.name)
    cluster.restart(lost.name)
    cluster.run(6_000, step_ms=20)
    assert not voter(lost)
    cluster.restart(other.name)
    cluster.run(6_000, step_ms=20)
    assert not cluster.leaders()  # one voter of three
    assert not voter(lost)
    cluster.restart(leader.name)
    cluster.leader()
    cluster.run_until(lambda: voter(lost))
    assert lost.application.applied == [b"x"]


def test_admission_waits_for_candidates_of_the_past() -> None:
    """A vote given before the disk was lost may still make a leader; so nothing counts before that time is over."""
    cluster = Cluster(3)
    cluster.leader()
    lost = cluster.followers()[0]
    cluster.lose_disk(lost.name)
    started_s = cluster.clock.now_s
    cluster.restart(lost.name)
    cluster.run_until(lambda: voter(lost))
    assert cluster.clock.now_s - started_s >= 2 * 1.6


def test_admission_needs_a_round_that_a_quorum_of_voters_echoes() -> None:
    """A leader that was deposed without knowing could otherwise admit the node on a log that lacks what it
    acknowledged."""
    cluster = Cluster(5)
    old = cluster.leader()
    lost, *others = cluster.followers()
    for host in others:
        cluster.cut(old.name, host.name)
    # The old leader keeps only the node that is about to lose its disk; check-quorum is slower than this test.
    old.raft._SyncObj__lastResponseTime = dict.fromkeys(old.raft.members.values(), cluster.clock.now_s + 100)
    cluster.lose_disk(lost.name)
    for host in others:
        cluster.cut(lost.name, host.name)
    cluster.restart(lost.name)
    cluster.run(6_000, step_ms=20)
    assert old.raft.leads()
    assert lost.raft.leader() == old.name
    assert not voter(lost)


def test_a_disk_lost_twice_is_noticed() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    lost = cluster.followers()[0]
    for _ in range(2):
        cluster.lose_disk(lost.name)
        cluster.restart(lost.name)
        cluster.run(300)
        assert leader.raft._SyncObj__raftMatchIndex[leader.raft.members[lost.name]] == 0
        cluster.run_until(lambda: voter(lost))
        cluster.run(300)
    assert leader.raft._SyncObj__raftMatchIndex[leader.raft.members[lost.name]] == leader.raft.last_index()


def test_an_admission_that_is_not_for_this_log_is_ignored() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    lost = cluster.followers()[0]
    cluster.lose_disk(lost.name)
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, Admit)
    cluster.restart(lost.name)
    cluster.run(6_000, step_ms=20)
    term = leader.raft.term()
    lost.inject(leader.name, Admit(lost.raft.last_index() + 1), term=term)
    lost.inject(leader.name, Admit(1), term=term - 1)
    other = next(host for host in cluster.followers() if host is not lost)
    lost.inject(other.name, Admit(1), term=term)
    cluster.settle()
    assert not voter(lost)


def test_crashes_while_the_cluster_is_founded_do_not_leave_it_stuck() -> None:
    for keep in range(6):
        cluster = Cluster(3, seed=keep)
        cluster.run(20)
        cluster.crash("n1", keep=keep)
        cluster.run(20)
        cluster.crash("n2", keep=keep)
        cluster.restart("n1")
        cluster.run(40)
        cluster.restart("n2")
        cluster.leader()
        cluster.run_until(lambda cluster=cluster: all(voter(host) for host in cluster.running()))  # type: ignore[misc]


def test_the_mark_is_stored_before_anything_else() -> None:
    """Whatever prefix of the first writes survives, an empty store never comes back as a voter."""
    for keep in range(4):
        cluster = Cluster(3)
        cluster.leader()
        lost = cluster.followers()[0]
        cluster.lose_disk(lost.name)
        lost.boot()
        cluster.crash(lost.name, keep=keep)
        lost.boot()
        assert not voter(lost)


def test_two_disks_lost_of_three_stop_the_cluster_instead_of_losing_data() -> None:
    cluster = Cluster(3)
    leader = cluster.leader()
    cluster.propose(b"x")
    for host in cluster.followers():
        cluster.lose_disk(host.name)
    for name in cluster.names:
        if cluster[name].node is None:
            cluster.restart(name)
    cluster.run(10_000, step_ms=20)
    assert not cluster.leaders()
    assert [voter(host) for host in cluster.running()].count(True) == 1
    assert leader.application.applied == [b"x"]


def test_hellos_end_when_the_cluster_is_founded() -> None:
    cluster = Cluster(3)
    cluster.leader()
    cluster.run(1_000)
    cluster.log.clear()
    cluster.run(1_000)
    assert not cluster.sent(Hello)
    assert all(answer.standing is Standing.VOTER for answer in cluster.bodies(Appended))
    assert cluster.sent(Append)
