"""The node as a whole: elections, replication, reads, hand-over, snapshots, restarts."""

from __future__ import annotations

import pytest

from sidecar.consensus.messages import Append
from sidecar.consensus.node import NodeSettings
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
