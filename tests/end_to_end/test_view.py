"""What the live view and the plain lines say about a cluster."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tenure.v1 import cluster_pb2, lease_pb2, session_pb2, watch_pb2

from sidecar.dev import view
from sidecar.dev.checker import Tally
from sidecar.dev.cluster import NODES, DevCluster
from sidecar.dev.observer import LEADER, Observed, Status


@pytest.fixture
def seen() -> Observed:
    seen = Observed(cluster_ms=60_000, tally=Tally(round=2, documents=24, finished=7, posted=31, partial=1))
    for name in NODES:
        role = LEADER if name == "n2" else cluster_pb2.NODE_ROLE_FOLLOWER
        seen.statuses[name] = Status(node_id=name, role=role, leader_id="n2", term=5, applied_index=812, ready=True)
    holder = lease_pb2.LeaseHolder(session_id="s1", token=44, granted_ms=48_000, agent="agent-3")
    seen.lease = lease_pb2.Lease(name="inbox", holders=[holder])
    info = session_pb2.AgentInfo(agent="agent-3")
    seen.sessions = [session_pb2.Session(session_id="s1", info=info, remaining_ms=4_200)]
    kind = watch_pb2.EVENT_KIND_LEASE_GRANTED
    seen.events.append(watch_pb2.Event(revision=99, kind=kind, subject="inbox", token=44, wall_ms=1))
    seen.note("killed agent-1 (kill -9)")
    return seen


def drawn(cluster: DevCluster, seen: Observed, width: int = 160, height: int = 40) -> str:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(view.screen(cluster, seen, height))
    return console.export_text()


def test_the_screen_shows_everything_at_a_glance(cluster: DevCluster, seen: Observed) -> None:
    text = drawn(cluster, seen)
    for part in (
        "leader n2, term 5", "agent-3 holds it, token 44, for 12 s", "1 sessions", "4.2 s",
        "round 2: 7 of 24 documents, 31 posted in all", "twice 0  never 0  partial 1",
        "lease granted", "killed agent-1 (kill -9)", "quit",
    ):  # fmt: skip
        assert part in text, part


def test_it_fits_a_small_terminal(cluster: DevCluster, seen: Observed) -> None:
    lines = drawn(cluster, seen, width=80, height=24).rstrip("\n").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "quit" in lines[-2]


def test_nobody_and_nothing_is_said_in_words(cluster: DevCluster) -> None:
    text = drawn(cluster, Observed())
    for part in ("nobody holds it", "no leader", "twice 0"):
        assert part in text, part


def test_lines_tell_what_changed_and_only_that(cluster: DevCluster, seen: Observed) -> None:
    lines = view.Lines()

    def news() -> list[str]:
        return [line[len("00:00:00 ") :] for line in lines.news(cluster, seen)]

    first = news()
    assert first[0] == "killed agent-1 (kill -9)"
    assert "leader n2, term 5" in first
    assert "agent-3 holds 'inbox', token 44" in first
    assert first[-1] == "round 2: 7 of 24 documents, 31 posted in all; twice 0, never 0, partial 1; 1 sessions"
    assert news() == []
    seen.lease = None
    seen.note("killed agent-3 (kill -9)")
    assert news() == ["killed agent-3 (kill -9)", "nobody holds 'inbox'"]
