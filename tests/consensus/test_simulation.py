"""The simulator itself: our node is clean in it, the library's class is caught, a seed is a run, the checkers bite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from chaos import simulation
from chaos.checkers import Checkers
from chaos.disk import SimLogStore
from chaos.images import LogImage
from chaos.profiles import PROFILES, Shape
from chaos.simulation import EXIT_CLEAN, EXIT_CODE, EXIT_LIVENESS, EXIT_SAFETY, Outcome, simulate, worst
from chaos.world import World
from sidecar.consensus.node import Node
from sidecar.consensus.ports import Entry
from sidecar.consensus.raft import Raft


def report(outcome: Outcome) -> str:
    found = "; ".join(f"{violation.kind} at {violation.host}: {violation.text}" for violation in outcome.violations)
    stock = " --stock" if outcome.stock else ""
    return f"{found}\npython -m chaos sim --profile {outcome.profile} --seed {outcome.seed} -v{stock}"


# ---- ours is clean, and was really tried ---------------------------------------------------------


@pytest.mark.parametrize("profile", list(PROFILES))
def test_a_short_campaign_of_ours_is_clean(profile: str) -> None:
    for seed in range(1000, 1003):
        outcome = simulate(profile, seed)
        assert not outcome.violations, report(outcome)
        assert outcome.acks > 0, f"seed {seed}: a run in which nothing is acknowledged proves nothing"


def test_a_campaign_comes_to_where_bugs_live() -> None:
    """A simulation that never truncates, installs or loses anything would be clean for the wrong reason."""
    reached: dict[str, int] = {}
    for profile, seeds in (("snapcrash", 4), ("kill9", 4), ("power", 4), ("wipe", 4), ("slow", 2), ("stale", 2)):
        for seed in range(seeds):
            for what, count in simulate(profile, seed).reached.items():
                reached[what] = reached.get(what, 0) + count
    wanted = [
        "conflicting entries truncated",
        "connection replaced",
        "crash",
        "crash with power cut",
        "empty node admitted as a voter",
        "killed inside after the sync",
        "killed inside before the sync",
        "killed inside within the sync",
        "killed inside append",
        "killed inside snapshot: temporary file",
        "leader replaced",
        "log compacted",
        "log replaced by a snapshot",
        "queued changes lost",
        "queued changes survived",
        "resume after a pause",
        "snapshot received from a peer",
    ]
    assert [what for what in wanted if what not in reached] == []


# ---- the library's own class is caught -----------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "seeds", "kinds"),
    [
        ("net", 60, {"no-convergence", "stale-read", "commit-without-quorum"}),
        ("snap", 80, {"state-machine-safety", "acked-lost", "digest", "applied-order"}),
        ("snapcrash", 60, {"state-machine-safety", "leader-completeness", "acked-lost"}),
        ("kill9", 60, {"state-machine-safety", "acked-lost", "commit-without-quorum"}),
        ("power", 150, {"double-vote", "election-safety", "leader-completeness", "log-matching", "acked-lost"}),
    ],
)
def test_the_library_s_own_class_is_caught(profile: str, seeds: int, kinds: set[str]) -> None:
    missing = set(kinds)
    for seed in range(seeds):
        missing -= {violation.kind for violation in simulate(profile, seed, stock=True).violations}
        if not missing:
            return
    assert not missing


def test_the_library_s_own_class_is_clean_when_nothing_goes_wrong() -> None:
    for seed in range(5):
        outcome = simulate("quiet", seed, stock=True)
        assert not outcome.violations, report(outcome)


# ---- mistakes put into our own node are caught ---------------------------------------------------


def _caught(profile: str, seeds: int, kind: str) -> bool:
    """Whether a seed shows it; stops at the first that does."""
    return any(kind in {violation.kind for violation in simulate(profile, seed).violations} for seed in range(seeds))


def test_a_read_without_a_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "read_barrier", lambda self, done: done(True))
    assert _caught("net", 5, "stale-read")


def test_a_leader_that_takes_any_round_for_confirmed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Raft, "confirmed_round", lambda self: self.round)
    assert _caught("net", 80, "stale-read")


def test_messages_that_leave_before_the_sync_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything claims to be durable at once, and becomes so when the next turn's changes are handed over."""
    take = SimLogStore.take
    late: dict[int, Callable[[], None]] = {}

    def take_late(self: SimLogStore) -> Callable[[], None]:
        before, late[id(self)] = late.get(id(self)), take(self)
        return before or (lambda: None)

    monkeypatch.setattr(SimLogStore, "take", take_late)
    assert _caught("power", 3, "sent-before-durable")


def test_terms_and_votes_that_are_not_stored_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_in_memory(self: SimLogStore, term: int, vote: str | None) -> None:
        self.image.apply(("term", (term, vote)))

    monkeypatch.setattr(SimLogStore, "set_term", only_in_memory)
    assert _caught("elections", 40, "double-vote")


def test_an_empty_node_that_votes_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Raft, "_mark_if_empty", lambda self: None)
    assert _caught("wipe", 40, "acked-lost")


# ---- each checker bites --------------------------------------------------------------------------


def checkers() -> Checkers:
    world = World(0, Shape())
    world.checkers = Checkers(world)
    return world.checkers


def image(*terms: int) -> LogImage:
    content = LogImage()
    content.entries = [Entry(index, term, b"x") for index, term in enumerate(terms, start=1)]
    return content


def _two_leaders(c: Checkers) -> None:
    c.leads("n1", 3, None)
    c.leads("n2", 3, None)


def _two_commands_in_one_place(c: Checkers) -> None:
    c.logged("n1", 5, 2, b"a", 1)
    c.logged("n2", 5, 2, b"b", 1)


def _two_pasts(c: Checkers) -> None:
    c.logged("n1", 5, 2, b"a", 1)
    c.logged("n2", 5, 2, b"a", 2)


def _a_leader_without_a_committed_entry(c: Checkers) -> None:
    c.applied("n1", 3, 1, 1, b"a", None)
    c.leads("n2", 2, image(1, 1))


def _another_entry_applied(c: Checkers) -> None:
    c.applied("n1", 3, 1, 1, b"a", None)
    c.applied("n2", 3, 2, 2, b"b", None)


def _applied_again(c: Checkers) -> None:
    c.applied("n1", 3, 1, 1, b"a", None)
    c.applied("n1", 3, 1, 1, b"a", None)


def _a_snapshot_takes_the_state_back(c: Checkers) -> None:
    c.applied("n1", 3, 1, 1, b"a", None)
    c.restored("n1", 2)


def _acknowledged_at_two_places(c: Checkers) -> None:
    c.acknowledged("n1", 7, 3)
    c.acknowledged("n1", 7, 4)


def _a_minority(c: Checkers) -> None:
    c.quorum("n1", 3, copies=1, voters=3)


def _half_is_no_majority(c: Checkers) -> None:
    c.quorum("n1", 3, copies=2, voters=4)


def _a_read_of_the_past(c: Checkers) -> None:
    c.acknowledged("n1", 7, 3)
    c.read_answered("n2", c.read_floor(), 2)


def _reads_go_back(c: Checkers) -> None:
    c.read_answered("n1", 0, 5)
    c.read_answered("n2", c.read_floor(), 4)


def _states_differ(c: Checkers) -> None:
    c.state("n1", 3, "aa")
    c.state("n2", 3, "bb")


def _sent_too_early(c: Checkers) -> None:
    c.sent("n1", 1)


def _two_votes(c: Checkers) -> None:
    c.voted("n1", 2, 2, "n2")
    c.voted("n1", 2, 2, "n3")


def _the_term_goes_back(c: Checkers) -> None:
    c.voted("n1", 3, 2, None)


def _an_incarnation_again(c: Checkers) -> None:
    opened = image()
    opened.incarnation = 1
    c.store_opened("n1", opened)
    c.store_opened("n1", opened)


def _a_stop_without_a_reason(c: Checkers) -> None:
    c.stopped("n1", "felt like it")


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (_two_leaders, "election-safety"),
        (_two_commands_in_one_place, "log-matching"),
        (_two_pasts, "log-matching"),
        (_a_leader_without_a_committed_entry, "leader-completeness"),
        (_another_entry_applied, "state-machine-safety"),
        (_applied_again, "applied-order"),
        (_a_snapshot_takes_the_state_back, "applied-order"),
        (_acknowledged_at_two_places, "acked-lost"),
        (_a_minority, "commit-without-quorum"),
        (_half_is_no_majority, "commit-without-quorum"),
        (_a_read_of_the_past, "stale-read"),
        (_reads_go_back, "stale-read"),
        (_states_differ, "digest"),
        (_sent_too_early, "sent-before-durable"),
        (_two_votes, "double-vote"),
        (_the_term_goes_back, "double-vote"),
        (_an_incarnation_again, "incarnation"),
        (_a_stop_without_a_reason, "stopped"),
    ],
)
def test_a_bad_history_is_called_by_its_name(history: Callable[[Checkers], Any], kind: str) -> None:
    bad = checkers()
    history(bad)
    assert list(bad.violations) == [kind]


def test_a_good_history_is_not_called_anything() -> None:
    good = checkers()
    good.leads("n1", 1, image(1))
    good.logged("n1", 2, 1, b"a", 1)
    good.logged("n2", 2, 1, b"a", 1)
    good.voted("n1", 0, 1, "n1")
    good.voted("n1", 1, 1, "n1")
    good.applied("n1", 2, 1, 1, b"a", "aa")
    good.quorum("n1", 2, copies=2, voters=3)
    good.acknowledged("n1", 7, 2)
    good.acknowledged("n1", 7, 2)
    good.read_answered("n2", good.read_floor(), 2)
    good.crashed("n1")
    good.applied("n1", 2, 1, 1, b"a", "aa")
    good.leads("n2", 2, image(1, 1))
    good.sent("n1", 0)
    assert good.violations == {}


# ---- a seed is a run -----------------------------------------------------------------------------

_SEEDS = (
    ("core", False),
    ("jobs", False),
    ("jobs-clock", False),
    ("kill9", False),
    ("snapcrash", False),
    ("power", True),
    ("snap", True),
)
_PROGRAM = f"""
from chaos.simulation import simulate
for profile, stock in {_SEEDS!r}:
    print(profile, stock, simulate(profile, 4, stock=stock).digest)
"""


def _run_with(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_a_seed_is_the_same_run_whatever_python_hashes_to() -> None:
    one, two = _run_with("1"), _run_with("4242")
    assert one == two
    here = "".join(f"{profile} {stock} {simulate(profile, 4, stock=stock).digest}\n" for profile, stock in _SEEDS)
    assert one == here, "a run depends on what ran before it in the same process"


def test_another_seed_is_another_run() -> None:
    assert simulate("net", 1).digest != simulate("net", 2).digest


# ---- the command line ----------------------------------------------------------------------------


def test_the_worst_finding_decides_the_status() -> None:
    assert worst([]) == worst([EXIT_CLEAN]) == EXIT_CLEAN
    assert worst([EXIT_LIVENESS, EXIT_CLEAN]) == EXIT_LIVENESS
    assert worst([EXIT_LIVENESS, EXIT_CODE]) == EXIT_CODE
    assert worst([EXIT_CODE, EXIT_SAFETY, EXIT_LIVENESS]) == EXIT_SAFETY


def test_a_clean_campaign_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulation.main(["--profile", "quiet", "--seeds", "0-1"]) == EXIT_CLEAN
    assert "seeds 2, violations: none" in capsys.readouterr().out


def test_a_failing_seed_comes_with_the_command_that_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulation.main(["--stock", "--profile", "snap", "--seeds", "5-6"]) == EXIT_SAFETY
    output = capsys.readouterr().out
    assert "state-machine-safety" in output
    assert "python -m chaos sim --profile snap --seed 5 -v --stock" in output


def test_a_trace_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(["--profile", "kill9", "--seed", "0", "-v"])
    output = capsys.readouterr().out
    for words in ("boots (life 1)", "leads term", "fault", "Append after", "all faults end", "converged"):
        assert words in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "nonsense"],
        ["--seeds", "a-b"],
        ["--seeds", "9-3"],
        ["--stock", "--profile", "core"],
        ["--nonsense"],
    ],
)
def test_a_wrong_command_line_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        simulation.main(arguments)
    assert stop.value.code == simulation.EXIT_USAGE
    assert "error" in capsys.readouterr().err
