"""The profile ``core``: its checks bite, on histories made up here and on mistakes put into the product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.checkers import Checkers
from chaos.core import TENANT, Applied, Belief, Ledger
from chaos.profiles import PROFILES, SECOND, Shape
from chaos.simulation import simulate
from chaos.world import HostClock, World
from sidecar.core.commands import (
    AcquireLease,
    CancelWait,
    Done,
    LeaseGranted,
    OpenSession,
    Request,
    RequestKey,
    Result,
    SessionOpened,
    Stamp,
    Tick,
)
from sidecar.core.events import Event, Kind
from sidecar.core.leases import Leases
from sidecar.core.requests import Requests
from sidecar.core.sessions import Sessions
from sidecar.proposer import Proposer

# ---- made-up histories --------------------------------------------------------------------------------


NOW = Stamp(9_000, 9_000)


def ledger() -> Ledger:
    world = World(0, Shape())
    world.now_us = 10 * SECOND
    world.checkers = Checkers(world)
    return Ledger(world)


def event(revision: int, kind: Kind, subject: str = "job", **fields: Any) -> Event:
    return Event(revision=revision, kind=kind, tenant=TENANT, subject=subject, cluster_ms=1, wall_ms=1, **fields)


def happens(
    book: Ledger, index: int, *events: Event, request: Request | None = None, result: Result | None = None
) -> None:
    book.applied("n1", index, 1, [(NOW, request or Request(command=Tick()), result or Done(), list(events))])


def _opened(name: str, session: str, revision: int, not_after_ms: int = 0) -> Applied:
    request = Request(
        command=OpenSession(tenant=TENANT, suffix="x"),
        key=RequestKey(tenant=TENANT, origin="", name=name),
        not_after_ms=not_after_ms,
    )
    result = SessionOpened(session=session, opened_ms=1, deadline_ms=2, revision=revision)
    return NOW, request, result, [event(revision, Kind.SESSION_OPENED, session, session=session)]


def _two_holders(book: Ledger) -> None:
    book.believe("job", Belief("a1", 1, 11 * SECOND))
    book.believe("job", Belief("a2", 2, 11 * SECOND))


def _a_token_again(book: Ledger) -> None:
    happens(book, 3, event(1, Kind.LEASE_GRANTED, session="s1", token=5))
    happens(book, 4, event(2, Kind.LEASE_GRANTED, session="s2", token=5))


def _granted_to_a_dead_session(book: Ledger) -> None:
    happens(
        book, 3, event(1, Kind.SESSION_CLOSED, "s1", session="s1"), event(2, Kind.LEASE_GRANTED, session="s1", token=1)
    )


def _granted_to_one_who_gave_up(book: Ledger) -> None:
    cancel = CancelWait(tenant=TENANT, name="job", session="s1", waiter="w1")
    happens(book, 3, request=Request(command=cancel))
    happens(book, 4, event(1, Kind.LEASE_GRANTED, session="s1", waiter="w1", token=1))


def _expired_early(book: Ledger) -> None:
    book.session_safe["s1"] = lambda: 11 * SECOND
    happens(book, 3, event(1, Kind.SESSION_EXPIRED, "s1", session="s1"))


def _completed_twice(book: Ledger) -> None:
    happens(book, 3, event(1, Kind.RECORD_COMPLETED, "key", attempt=1))
    happens(book, 4, event(2, Kind.RECORD_COMPLETED, "key", attempt=2))


def _told_two_results(book: Ledger) -> None:
    book.told_completed("a1", "key", b"one")
    book.told_completed("a2", "key", b"two")


def _begun_twice(book: Ledger) -> None:
    happens(book, 3, event(1, Kind.RECORD_BEGUN, "key", session="s1", attempt=1))
    happens(book, 4, event(2, Kind.RECORD_BEGUN, "key", session="s2", attempt=1))


def _applied_twice(book: Ledger) -> None:
    book.applied("n1", 3, 1, [_opened("r1", "s1", 1)])
    book.applied("n1", 4, 1, [_opened("r1", "s2", 2)])


def _happened_after_a_definite_no(book: Ledger) -> None:
    book.told_never("a1", RequestKey(tenant=TENANT, origin="", name="r1"))
    book.applied("n1", 3, 1, [_opened("r1", "s1", 1)])


def _a_definite_no_after_it_happened(book: Ledger) -> None:
    book.applied("n1", 3, 1, [_opened("r1", "s1", 1)])
    book.told_never("a1", RequestKey(tenant=TENANT, origin="", name="r1"))


def _applied_after_its_deadline(book: Ledger) -> None:
    book.applied("n1", 3, 1, [_opened("r1", "s1", 1, not_after_ms=8_999)])


def _time_runs_ahead(book: Ledger) -> None:
    book.applied("n1", 3, 1, [(Stamp(10_100, 0), Request(command=Tick()), Done(), [])])


def _proposed_again_and_again(book: Ledger) -> None:
    book.applied("n1", 3, 1_000, [])


def _a_gap_of_revisions(book: Ledger) -> None:
    happens(book, 3, event(1, Kind.SESSION_OPENED))
    happens(book, 4, event(3, Kind.SESSION_OPENED))


def _other_events_elsewhere(book: Ledger) -> None:
    happens(book, 3, event(1, Kind.SESSION_OPENED, "s1"))
    book.applied("n2", 3, 1, [(NOW, Request(command=Tick()), Done(), [event(1, Kind.SESSION_OPENED, "s2")])])


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (_two_holders, "two-holders"),
        (_a_token_again, "token"),
        (_granted_to_a_dead_session, "granted-to-dead"),
        (_granted_to_one_who_gave_up, "granted-to-dead"),
        (_expired_early, "expired-early"),
        (_completed_twice, "completed-twice"),
        (_told_two_results, "completed-twice"),
        (_begun_twice, "begun-twice"),
        (_applied_twice, "applied-twice"),
        (_happened_after_a_definite_no, "definite-but-happened"),
        (_a_definite_no_after_it_happened, "definite-but-happened"),
        (_applied_after_its_deadline, "applied-late"),
        (_time_runs_ahead, "cluster-time"),
        (_proposed_again_and_again, "storm"),
        (_a_gap_of_revisions, "revision"),
        (_other_events_elsewhere, "digest"),
    ],
)
def test_a_bad_history_is_called_by_its_name(history: Callable[[Ledger], None], kind: str) -> None:
    book = ledger()
    history(book)
    assert list(book.checkers.violations) == [kind]


def test_a_good_history_is_not_called_anything() -> None:
    book = ledger()
    book.believe("job", Belief("a1", 1, 11 * SECOND))
    book.believe("job", Belief("a1", 1, 12 * SECOND))
    book.disbelieve("job", "a1")
    book.believe("job", Belief("a2", 2, 11 * SECOND))
    book.applied("n1", 3, 1, [_opened("r1", "s1", 1)])
    book.applied("n2", 3, 1, [_opened("r1", "s1", 1)])
    acquire = Request(command=AcquireLease(tenant=TENANT, name="job", session="s1", waiter="w1"))
    granted = LeaseGranted(token=1, already_held=False, ttl_ms=1, revision=2)
    happens(book, 4, event(2, Kind.LEASE_GRANTED, session="s1", token=1, waiter="w1"), request=acquire, result=granted)
    book.told_completed("a1", "key", b"one")
    book.told_completed("a2", "key", b"one")
    assert book.checkers.violations == {}


# ---- mistakes put in ----------------------------------------------------------------------------------


def caught(kinds: set[str], seeds: int) -> bool:
    """Whether a seed shows one of them; stops at the first that does."""
    return any(kinds & {violation.kind for violation in simulate("core", seed).violations} for seed in range(seeds))


def test_an_overtaken_attach_that_is_accepted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Sessions.attach
    monkeypatch.setattr(Sessions, "attach", lambda self, command: attach(self, replace(command, generation=0)))
    assert caught({"expired-early"}, 80)


def test_a_grant_before_the_holder_s_session_has_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal for a fifth of the ttl: the cluster gives away what the holder still relies on."""
    renew = Sessions.renew

    def renew_too_little(self: Sessions, command: Any) -> Any:
        result = renew(self, command)
        for session in command.sessions:
            row = self.table.get(session)
            if row is not None:
                self._replace(row, replace(row, deadline_ms=row.deadline_ms - row.ttl_ms * 4 // 5))
                self._arm(self.table[session])
        return result

    monkeypatch.setattr(Sessions, "renew", renew_too_little)
    assert caught({"expired-early"}, 20)


def test_requests_that_are_not_remembered_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "recall", lambda self, key, fingerprint: None)
    assert caught({"applied-twice"}, 40)


def test_answers_that_are_more_certain_than_the_truth_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposer, "_definite", lambda self, pending: True)
    assert caught({"definite-but-happened"}, 60)


def test_tokens_from_a_counter_of_each_node_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart forgets the counter: the state is restored, the counter begins anew."""
    init = Leases.__init__

    def forgetful(self: Leases, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **(keywords | {"last_token": 0}))

    monkeypatch.setattr(Leases, "__init__", forgetful)
    assert caught({"token", "digest"}, 20)


# ---- found here ---------------------------------------------------------------------------------------

LOST_DISKS_AND_CLOCKS = dataclasses.replace(
    PROFILES["core"],
    shape=dataclasses.replace(
        PROFILES["core"].shape, faults=(("wipe", 30), ("wall_step", 60), ("kill", 10), ("reset", 10))
    ),
    swarm=False,
)


def test_a_new_disk_and_a_clock_that_stepped_back_confuse_nobody() -> None:
    for seed in (1, 5, 6):
        outcome = simulate(LOST_DISKS_AND_CLOCKS, seed)
        assert not outcome.violations, outcome.violations
        assert outcome.reached["empty node admitted as a voter"] > 0


def test_lives_that_are_counted_anew_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostClock, "wall_ms", lambda self: 0)  # so that a new store begins with life 1
    assert any(
        "wrong-answer" in {violation.kind for violation in simulate(LOST_DISKS_AND_CLOCKS, seed).violations}
        for seed in range(12)
    )


def test_a_life_that_is_outrun_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposer, "_overtake", lambda self: None)
    assert any(
        "storm" in {violation.kind for violation in simulate(LOST_DISKS_AND_CLOCKS, seed).violations}
        for seed in range(12)
    )
