"""What the benchmark makes of the notes and the ledger of its workers: it must count what was done twice or never."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import jobs, work
from bench.contestants import NotMeasured, need

DUE_MS = {"a": 1_000, "b": 1_000, "c": 4_000}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(work.FOLDER, str(tmp_path))
    monkeypatch.setenv(work.WORKER, "w1")
    return tmp_path


def told(**starts: list[float]) -> work.Told:
    return work.Told(starts=starts)


def test_lateness_is_from_the_due_time_to_the_first_start() -> None:
    found = jobs.judge(2, DUE_MS, told(a=[1_300, 1_010], b=[1_020], c=[4_030]))
    assert (found.p50_ms, found.p99_ms, found.twice, found.never) == (20, 30, 1, 0)
    assert found.per_second == pytest.approx(3 / 0.050)


def test_what_never_started_is_counted() -> None:
    assert jobs.judge(2, DUE_MS, told(a=[1_010])).never == 2
    nothing = jobs.judge(2, DUE_MS, told())
    assert (nothing.never, nothing.p50_ms, nothing.per_second) == (3, float("inf"), 0.0)


def test_shares_of_few_and_of_many() -> None:
    assert [jobs.share_of([1, 2, 3, 4], share) for share in (0.5, 0.99)] == [2, 4]
    assert jobs.share_of([float(n) for n in range(1, 1_001)], 0.99) == 990


def test_the_ledger_refuses_a_stale_token_and_takes_what_has_none(folder: Path) -> None:
    assert work.write("a", 5)
    assert work.write("a", 6)
    assert not work.write("a", 5)
    assert work.write("b", None) and work.write("b", None)
    assert work.effects(folder) == {"a": 2, "b": 2}


async def test_workers_notes_are_read(folder: Path) -> None:
    work.do("a", 0)
    await work.do_fenced("b", 1, 6)
    await work.do_fenced("b", 1, 5)
    found = work.read(folder)
    assert {name: len(each) for name, each in found.starts.items()} == {"a": 1, "b": 2}
    assert (found.begun, found.ended, found.refused) == ({"w1": 3}, {"w1": 3}, 1)
    assert work.effects(folder) == {"b": 1}


def test_what_is_not_installed_is_said() -> None:
    need("sqlite3")
    with pytest.raises(NotMeasured, match="no_such_module not installed: make bench"):
        need("sqlite3", "no_such_module")


def test_a_plan_has_as_many_at_once_as_it_says() -> None:
    due = jobs.plan((3, 2, 5_000), 1.0, "x", random.Random(1))
    times = sorted(set(due.values()))
    assert [list(due.values()).count(at_ms) for at_ms in times] == [3, 3]
    assert 4_500 < times[1] - times[0] < 5_500
