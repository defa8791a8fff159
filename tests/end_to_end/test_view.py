"""What the live view and the plain lines say about a cluster."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console
from tenure.v1 import cluster_pb2, job_pb2, lease_pb2, session_pb2, switch_pb2, watch_pb2

from sidecar.dev import view
from sidecar.dev.checker import Tally
from sidecar.dev.cluster import NODES, DevCluster
from sidecar.dev.observer import LEADER, Observed, Status

SUCCEEDED, FAILED = job_pb2.OCCURRENCE_STATE_SUCCEEDED, job_pb2.OCCURRENCE_STATE_FAILED
DUE_MS = 1_780_000_000_000


@pytest.fixture
def seen() -> Observed:
    """Two jobs: one at work, one killed by a switch."""
    seen = up(Tally(posted=31, finished=31, partial=1))
    run = job_pb2.Run(run_id="r44", job="digest", agent="agent-3", token=44, attempt=2)
    digest = job_pb2.Job(
        name="digest", schedule_text="every 3 s", next_due_wall_ms=int((time.time() + 90) * 1_000), runs=[run],
        pending=4, succeeded_total=31, failed_total=2, skipped_total=5, missed_total=1, recent=recent(2),
    )  # fmt: skip
    mode = switch_pb2.SWITCH_MODE_KILL
    heartbeat = job_pb2.Job(name="heartbeat", switch_id="k7", switch_mode=mode, succeeded_total=3)
    seen.work.jobs = {"digest": digest, "heartbeat": heartbeat}
    seen.work.switches = [
        switch_pb2.Switch(
            switch_id="k7", tenant="default", job="heartbeat", mode=mode, actor="ana", reason="too dear",
            suppressed=8, runs_left=1,
        )
    ]  # fmt: skip
    seen.chosen = "digest"
    kind = watch_pb2.EVENT_KIND_RUN_ASSIGNED
    event = watch_pb2.Event(revision=99, kind=kind, subject="digest", token=44, wall_ms=1, due_wall_ms=DUE_MS)
    seen.events.append(event)
    seen.note("killed agent-1 (kill -9)")
    return seen


def recent(count: int) -> list[job_pb2.Occurrence]:
    """Newest first: the newest has failed, the others succeeded."""
    found = [job_pb2.Occurrence(due_wall_ms=DUE_MS + 3_000 * n, state=SUCCEEDED, attempt=1) for n in range(count)]
    found[-1].state, found[-1].reason, found[-1].attempt = FAILED, "no paper", 3
    return found[::-1]


def up(tally: Tally) -> Observed:
    """Three nodes, of which n2 leads, and a session of agent-3."""
    seen = Observed(cluster_ms=60_000, tally=tally)
    for name in NODES:
        role = LEADER if name == "n2" else cluster_pb2.NODE_ROLE_FOLLOWER
        seen.statuses[name] = Status(node_id=name, role=role, leader_id="n2", term=5, applied_index=812, ready=True)
    info = session_pb2.AgentInfo(agent="agent-3")
    seen.sessions = [session_pb2.Session(session_id="s1", info=info, remaining_ms=4_200)]
    return seen


@pytest.fixture
def lease_seen() -> Observed:
    """The slice without jobs: agent-3 holds the lease."""
    seen = up(Tally(round=2, documents=24, finished=7, posted=31, partial=1))
    holder = lease_pb2.LeaseHolder(session_id="s1", token=44, granted_ms=48_000, agent="agent-3")
    seen.lease = lease_pb2.Lease(name="inbox", holders=[holder])
    kind = watch_pb2.EVENT_KIND_LEASE_GRANTED
    seen.events.append(watch_pb2.Event(revision=99, kind=kind, subject="inbox", token=44, wall_ms=1))
    seen.note("killed agent-1 (kill -9)")
    return seen


def drawn(cluster: DevCluster, seen: Observed, width: int = 160, height: int = 40) -> str:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(view.screen(cluster, seen, height))
    return console.export_text()


def shows(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, part


def test_the_screen_shows_everything_at_a_glance(cluster: DevCluster, seen: Observed) -> None:
    text = drawn(cluster, seen)
    shows(
        text, "leader n2", "1 sessions", "4.2 s", "> digest", "agent-3, attempt 2; 4 waiting", "failed ok",
        "kill (k7)", "kill of heartbeat (k7, by ana: too dear), 8 suppressed, 1 runs left",
        "31 posted in all", "twice 0  never 0  partial 1", "run assigned", "token 44", "killed agent-1 (kill -9)",
        "quit",
    )  # fmt: skip
    line = next(line for line in text.splitlines() if "> digest" in line)
    assert line.split()[-4:-1] == ["31", "2", "6"]  # ok, failed, other; then the border
    assert re.search(r" in \d+ s ", line)


def test_it_fits_a_small_terminal(cluster: DevCluster, seen: Observed) -> None:
    lines = drawn(cluster, seen, width=80, height=24).rstrip("\n").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "quit" in lines[-2]


def test_nobody_and_nothing_is_said_in_words(cluster: DevCluster, lease_cluster: DevCluster) -> None:
    shows(drawn(cluster, Observed()), "none yet", "no leader", "twice 0")
    shows(drawn(lease_cluster, Observed()), "nobody holds it", "no leader", "twice 0")


def test_the_slice_without_jobs_shows_its_lease(lease_cluster: DevCluster, lease_seen: Observed) -> None:
    shows(
        drawn(lease_cluster, lease_seen), "leader n2, term 5", "agent-3 holds it, token 44, for 12 s", "1 sessions",
        "round 2: 7 of 24 documents, 31 posted in all", "twice 0  never 0  partial 1", "lease granted",
    )  # fmt: skip


class News:
    def __init__(self, cluster: DevCluster, seen: Observed) -> None:
        self.cluster, self.seen, self.lines = cluster, seen, view.Lines()

    def __call__(self) -> list[str]:
        return [line[len("00:00:00 ") :] for line in self.lines.news(self.cluster, self.seen)]


def test_lines_tell_what_changed_and_only_that(cluster: DevCluster, seen: Observed) -> None:
    news = News(cluster, seen)
    first = news()
    assert first[0] == "killed agent-1 (kill -9)"
    assert "leader n2, term 5" in first
    earlier, later = (view.clock(DUE_MS + 3_000 * number) for number in range(2))
    assert f"digest due {earlier}: succeeded" in first
    assert f"digest due {later}: failed (no paper), attempt 3" in first
    assert any(line.startswith("kill of heartbeat (k7, by ana: too dear)") for line in first)
    assert first[-1] == "31 posted in all; twice 0, never 0, partial 1; 1 sessions"
    assert news() == []
    seen.work.switches = []
    seen.work.jobs["digest"].recent.insert(0, job_pb2.Occurrence(due_wall_ms=DUE_MS + 9_000, state=SUCCEEDED))
    assert news() == [f"digest due {view.clock(DUE_MS + 9_000)}: succeeded", "no switch is in force"]


def test_lines_of_the_slice_without_jobs(lease_cluster: DevCluster, lease_seen: Observed) -> None:
    news = News(lease_cluster, lease_seen)
    first = news()
    assert "agent-3 holds 'inbox', token 44" in first
    assert first[-1] == "round 2: 7 of 24 documents, 31 posted in all; twice 0, never 0, partial 1; 1 sessions"
    assert news() == []
    lease_seen.lease = None
    lease_seen.note("killed agent-3 (kill -9)")
    assert news() == ["killed agent-3 (kill -9)", "nobody holds 'inbox'"]


def test_one_job_after_the_other_is_chosen(seen: Observed) -> None:
    assert [seen.choose_next() for _ in range(3)] == ["heartbeat", "digest", "heartbeat"]
    assert (seen.holder_agent, seen.token) == ("", 0)
    seen.choose_next()
    assert (seen.holder_agent, seen.token) == ("agent-3", 44)
    assert Observed().choose_next() == ""
