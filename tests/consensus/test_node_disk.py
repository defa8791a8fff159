"""The node on its real stores: SQLite and files, restarts, compaction, a snapshot that travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidecar.consensus.log_store import SqliteLogStore
from sidecar.consensus.ports import StoreIdentity
from sidecar.consensus.snapshots import FileSnapshotStore
from tests.consensus.harness import Cluster


def put_on_disk(cluster: Cluster, name: str, folder: Path) -> None:
    """The host's next life has its stores in ``folder``."""
    host: Any = cluster[name]
    identity = StoreIdentity("test", name)
    host.store = SqliteLogStore(folder / name, identity)
    host.snapshots = FileSnapshotStore(folder / name, identity)


def end(cluster: Cluster, name: str) -> None:
    host = cluster[name]
    host.node = None
    host.store.close()
    for other in cluster.names:
        if other != name:
            cluster.disconnect(name, other)


def test_restarts_compaction_and_a_snapshot_to_a_follower(tmp_path: Path) -> None:
    cluster = Cluster(3, boot=False, compact_entries=30, snapshot_chunk_bytes=64)
    for name in cluster.names:
        put_on_disk(cluster, name, tmp_path)
        cluster[name].boot()
    cluster.connect_all()
    leader = cluster.leader()
    away = cluster.followers()[0]
    cluster.propose(b"first")
    end(cluster, away.name)
    for number in range(80):
        cluster.propose(b"%d" % number)
    put_on_disk(cluster, away.name, tmp_path)
    away.boot()
    cluster.connect_all()
    cluster.run_until(cluster.converged)
    assert away.application.restored == 1
    expected = list(leader.application.applied)

    for name in cluster.names:
        end(cluster, name)
    for name in cluster.names:
        put_on_disk(cluster, name, tmp_path)
        cluster[name].boot()
        assert cluster[name].application.restored == 1
        assert cluster[name].raft.is_voter()
    cluster.connect_all()
    cluster.leader()
    cluster.run_until(cluster.converged)
    assert cluster["n1"].application.applied == expected
    for name in cluster.names:
        end(cluster, name)
