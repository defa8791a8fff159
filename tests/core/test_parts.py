"""The parts below the machine: sorted keys, the agenda of deadlines, what is remembered of requests."""

from __future__ import annotations

import random

import pytest

from sidecar.core.commands import (
    AcquireLease,
    Done,
    LeaseGranted,
    Limits,
    OpenSession,
    Reason,
    Refused,
    ReleaseLease,
    RequestKey,
    Stamp,
)
from sidecar.core.context import Context
from sidecar.core.deadlines import Deadlines
from sidecar.core.ordering import SortedKeys
from sidecar.core.requests import Requests, fingerprint_of


@pytest.mark.parametrize("seed", range(5))
def test_sorted_keys_are_a_sorted_list(seed: int) -> None:
    chance = random.Random(seed)
    plain = sorted({(chance.choice("ab"), f"{chance.randrange(9_000):04}") for _ in range(3_000)})
    keys = SortedKeys(chance.sample(plain, len(plain)))
    for _ in range(6_000):
        key = (chance.choice("ab"), f"{chance.randrange(9_000):04}")
        if key in plain:
            plain.remove(key)
            keys.remove(key)
        else:
            plain.append(key)
            plain.sort()
            keys.add(key)
    assert list(keys) == plain
    assert len(keys) == len(plain)
    for prefix, after in [
        ("", ""),
        ("1", ""),
        ("1", "12"),
        ("1", "1500"),
        ("", "8"),
        ("9", ""),
        ("1", "3"),
        ("3", "1"),
    ]:
        expected = [key for key in plain if key[0] == "a" and key[1].startswith(prefix) and key[1] > after]
        assert list(keys.after("a", prefix, after)) == expected


def test_an_after_that_is_itself_a_key_is_left_out_and_the_empty_name_is_kept() -> None:
    keys = SortedKeys([("t", ""), ("t", "a"), ("t", "ab"), ("u", "a")])
    assert list(keys.after("t", "", "")) == [("t", ""), ("t", "a"), ("t", "ab")]
    assert list(keys.after("t", "a", "a")) == [("t", "ab")]
    assert list(keys.after("v", "", "")) == []
    assert list(SortedKeys().after("t", "", "")) == []


class Due:
    """Keys with due times that move, as a table of sessions would."""

    def __init__(self) -> None:
        self.times: dict[tuple[str], int] = {}
        self.deadlines: Deadlines[tuple[str]] = Deadlines(self.times.get)

    def set(self, name: str, at_ms: int) -> None:
        self.times[(name,)] = at_ms
        self.deadlines.arm((name,), at_ms)

    def popped(self, now_ms: int) -> list[str]:
        found = iter(lambda: self.deadlines.pop(now_ms), None)
        return [key[0] for key in found]


def test_deadlines_come_in_order_of_time_and_then_of_key() -> None:
    due = Due()
    for name, at_ms in [("c", 5), ("b", 7), ("a", 5), ("d", 9)]:
        due.set(name, at_ms)
    assert due.popped(4) == []
    assert due.popped(7) == ["a", "c", "b"]
    assert due.deadlines.next_ms() == 9


def test_a_deadline_that_was_postponed_comes_later_and_is_not_reported_before() -> None:
    due = Due()
    due.set("a", 5)
    due.set("b", 8)
    due.times[("a",)] = 20  # postponed: nobody tells the heap
    assert due.deadlines.could_be_due(5)
    assert due.deadlines.next_ms() == 8
    assert due.popped(10) == ["b"]
    assert due.popped(20) == ["a"]


def test_a_deadline_that_comes_nearer_is_armed_again() -> None:
    due = Due()
    due.set("a", 50)
    due.set("a", 5)
    assert due.popped(49) == ["a"]
    assert due.popped(50) == []


def test_a_key_that_is_gone_never_comes() -> None:
    due = Due()
    due.set("a", 5)
    due.set("b", 5)
    del due.times[("a",)]
    due.deadlines.disarm(("b",))
    assert due.popped(9) == []
    assert due.deadlines.next_ms() is None
    assert len(due.deadlines) == 0


def test_stale_entries_do_not_pile_up() -> None:
    due = Due()
    for round_ in range(50_000):
        due.set("a", 100_000 + round_)
        due.deadlines.disarm(("a",))
    assert len(due.deadlines._heap) < 3_000


def test_sessions_that_are_renewed_all_the_time_cost_the_heap_one_move_per_ttl() -> None:
    due = Due()
    for number in range(100):
        due.set(f"s{number:03}", 1_000)
    for now_ms in range(0, 10_000, 100):
        for key in due.times:
            due.times[key] = now_ms + 1_000
        assert due.popped(now_ms) == []
    assert len(due.deadlines._heap) == 100


def requests(**limits: int) -> tuple[Context, Requests]:
    context = Context(Limits(**limits), Stamp(0, 0), 0, [])
    return context, Requests(context, [], [], [])


def test_a_forgotten_answer_that_is_given_anew_keeps_its_new_place_in_the_order() -> None:
    """Also when all of it happens in one millisecond: what is dropped first must not depend on a restore in between."""
    context, table = requests(requests_max=2, request_retention_min_ms=1)
    one, two, three = (RequestKey("t", "", name) for name in ("one", "two", "three"))
    table.remember(one, b"f", Done())
    table.remember(two, b"f", Done())
    table.forget(one)
    table.remember(one, b"f", Done())
    again = Requests(context, table.unary.items(), [], [])
    context.move_to(Stamp(1, 0))
    for each in (table, again):
        assert each.make_room(three) is None
        assert list(each.unary) == [("t", "one")]


def test_operations_are_acknowledged_in_a_step_that_the_client_made_up() -> None:
    _, table = requests()
    for sequence in (1, 2, 5, 9):
        table.remember(RequestKey("t", "s", "", sequence), b"f", Done())
    assert table.recall(RequestKey("t", "s", "", 9, acknowledged=5), b"f") == Done()
    assert list(table.stream) == [("s", 9)]
    assert table.recall(RequestKey("t", "s", "", 10, acknowledged=3), b"f") is None
    refused = table.recall(RequestKey("t", "s", "", 10, acknowledged=2**60), b"f")
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.REQUEST_FORGOTTEN
    assert len(table) == 0
    table.end_session("s")
    assert not table.acknowledged


def test_amending_what_was_forgotten_does_nothing() -> None:
    _, table = requests()
    for key in (None, RequestKey("t", "", "r"), RequestKey("t", "s", "", 1)):
        table.amend(key, LeaseGranted(token=1, already_held=False, ttl_ms=1, revision=1))
        table.forget(key)
    assert len(table) == 0


def test_the_fingerprint_leaves_out_what_the_sidecar_chose() -> None:
    opened = OpenSession(tenant="t", suffix="a", connection="c1", node="n1")
    assert fingerprint_of(opened) == fingerprint_of(OpenSession(tenant="t", suffix="b", connection="c2", node="n2"))
    assert fingerprint_of(opened) != fingerprint_of(OpenSession(tenant="t", suffix="a", agent="other"))
    waiting = AcquireLease(tenant="t", name="x", session="s", wait_ms=9, waiter="w")
    assert fingerprint_of(waiting) == fingerprint_of(AcquireLease(tenant="t", name="x", session="s"))
    assert fingerprint_of(waiting) != fingerprint_of(ReleaseLease(tenant="t", name="x", session="s", token=0))
