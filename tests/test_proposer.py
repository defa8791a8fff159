"""The proposer on real nodes and the real state machine, under a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.consensus.messages import Append, Envelope, Forward
from sidecar.consensus.ports import Role
from sidecar.core.commands import (
    AttachSession,
    CloseSession,
    LeaseGranted,
    Limits,
    Reason,
    Refused,
    Request,
    RequestKey,
    SessionOpened,
    SessionsRenewed,
    SetSwitch,
    Stamp,
    SwitchIsSet,
    SwitchMode,
    Tick,
)
from sidecar.core.events import Kind
from sidecar.core.machine import Machine
from sidecar.proposer import ClusterTime, Failure, MalformedBatch, Proposer, ProposerSettings
from sidecar.proposer.batches import (
    WINDOW_NODES_MAX,
    WINDOW_SEQUENCES,
    AppliedWindow,
    Item,
    NodeWindow,
    decode_batch,
    encode_batch,
    encode_forwarded,
    encode_item,
)
from sidecar.proposer.pressure import IN_FLIGHT_FREE
from sidecar.proposer.proposer import STOPS_ROOM
from tests.consensus.harness import ManualClock
from tests.proposing import Call, ProposingCluster, ProposingHost, acquire, kinds, open_session, release


@pytest.fixture
def cluster() -> ProposingCluster:
    made = ProposingCluster(3)
    made.leader()
    return made


# ---- from submit to done ------------------------------------------------------------


def test_every_node_answers_and_its_own_state_shows_the_write(cluster: ProposingCluster) -> None:
    for host in cluster.proposing.values():
        call = host.submit(open_session(), f"open-{host.name}")
        cluster.run_until(lambda call=call: call.done)  # type: ignore[misc]
        assert isinstance(call.result, SessionOpened)
        # At the moment of the answer, not some time later.
        assert host.machine.session(call.result.session) is not None
    cluster.run_until(cluster.agree)


def test_what_arrives_in_one_turn_is_one_entry(cluster: ProposingCluster) -> None:
    leader = cluster.lead()
    before = leader.applied_index()
    calls = [leader.submit(open_session(suffix=str(number)), f"open-{number}") for number in range(500)]
    cluster.run_until(lambda: all(call.done for call in calls))
    assert leader.applied_index() == before + 1


def test_a_batch_is_bounded_by_items_and_by_bytes() -> None:
    settings = ProposerSettings(batch_items_max=10, entry_bytes_max=16_384)
    cluster = ProposingCluster(1, proposer=settings)
    leader = cluster.lead()
    before = leader.applied_index()
    calls = [leader.submit(open_session(suffix=str(number)), f"open-{number}") for number in range(35)]
    cluster.run_until(lambda: all(call.done for call in calls))
    assert leader.applied_index() == before + 4
    calls = [leader.submit(open_session(suffix="x" * 4_000), f"large-{number}") for number in range(9)]
    cluster.run_until(lambda: all(call.done for call in calls))
    assert leader.applied_index() == before + 4 + 3


def test_what_does_not_fit_into_an_entry_is_refused_at_once(cluster: ProposingCluster) -> None:
    call = cluster.lead().submit(open_session(suffix="x" * (1 << 20)), "large")
    assert (call.failed.failure, call.failed.definite) == (Failure.TOO_LARGE, True)


def test_events_are_published_on_every_node_after_the_result(cluster: ProposingCluster) -> None:
    follower = cluster.follow()[0]
    session = cluster.open_session(follower, "open")
    cluster.acquire(follower, session)
    cluster.run_until(cluster.agree)
    for host in cluster.proposing.values():
        assert kinds(host.events_seen) == ["SESSION_OPENED", "LEASE_GRANTED"]
        assert [event.revision for event in host.events_seen] == [1, 2]


def test_unsubscribed_is_not_told(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    seen: list[Any] = []
    end = host.proposer.subscribe(seen.extend)
    end()
    end()
    cluster.open_session(host, "open")
    assert seen == []


# ---- leader changes, losses, repeats ------------------------------------------------------------


def test_a_proposal_survives_the_death_of_the_leader_and_is_applied_once(cluster: ProposingCluster) -> None:
    leader, follower = cluster.lead(), cluster.follow()[0]
    # The leader has it in its log, and nobody else has.
    cluster.drop = lambda source, target, envelope: source == leader.name and _carries_entries(envelope)
    call = follower.submit(open_session(), "open", timeout_ms=10_000)
    cluster.run(20)
    cluster.crash(leader.name)
    cluster.drop = lambda source, target, envelope: False
    assert isinstance(cluster.await_call(call), SessionOpened)
    cluster.restart(leader.name)
    cluster.run_until(cluster.agree)
    assert kinds(follower.events_seen) == ["SESSION_OPENED"]


def test_an_item_sent_again_after_silence_is_applied_once(cluster: ProposingCluster) -> None:
    """Committed by the others while this follower hears nothing of it: it repeats itself, and that is harmless."""
    leader, follower = cluster.lead(), cluster.follow()[0]
    session = cluster.open_session(follower, "open")
    cluster.drop = lambda source, target, envelope: target == follower.name and _carries_entries(envelope)
    call = follower.submit(
        AttachSession(tenant="default", session=session, connection="c1", node="n"), timeout_ms=9_000
    )
    cluster.run(700)
    assert not call.done
    assert len(cluster.sent(Forward, follower.name)) >= 3  # open, attach, attach again
    cluster.drop = lambda source, target, envelope: False
    cluster.await_call(call)
    cluster.run_until(cluster.agree)
    assert kinds(leader.events_seen).count("SESSION_ATTACHED") == 1


def test_a_forward_that_was_lost_is_sent_again(cluster: ProposingCluster) -> None:
    follower = cluster.follow()[0]
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, Forward)
    call = follower.submit(open_session(), "open", timeout_ms=9_000)
    cluster.run(200)
    cluster.drop = lambda source, target, envelope: False
    assert isinstance(cluster.await_call(call, 1_000), SessionOpened)


def test_the_same_request_twice_gives_the_first_result(cluster: ProposingCluster) -> None:
    one, other = cluster.follow()
    first = cluster.await_call(one.submit(open_session(suffix="a"), "same"))
    again = cluster.await_call(other.submit(open_session(suffix="b"), "same"))
    assert first.session == again.session


def test_a_follower_behind_in_time_proposes_again_by_itself(cluster: ProposingCluster) -> None:
    """In a quiet cluster a restarted node knows only an old stamp; its first request must not be refused as expired."""
    follower = _behind_in_time(cluster)
    call = follower.submit(open_session(), "again", timeout_ms=1_000)
    assert isinstance(cluster.await_call(call, 900), SessionOpened)


def _behind_in_time(cluster: ProposingCluster) -> ProposingHost:
    """A follower that was down for a minute in which nothing was written."""
    follower = cluster.follow()[0]
    cluster.open_session(follower, "quiet", ttl_ms=3_600_000)
    cluster.crash(follower.name)
    cluster.run(60_000, step_ms=50)
    cluster.restart(follower.name)
    cluster.run_until(lambda: follower.node is not None and follower.node.status().ready)
    assert follower.proposer.cluster_now_ms() < cluster.lead().proposer.cluster_now_ms() - 30_000
    return follower


# ---- no leader, deadlines ------------------------------------------------------------


def test_without_a_leader_the_answer_comes_within_two_seconds_and_is_definite() -> None:
    cluster = ProposingCluster(3)
    host = cluster.follow()[0]
    cluster.isolate(host.name)
    cluster.run(3_000)
    call = host.submit(open_session(), "open", timeout_ms=30_000)
    cluster.run(1_990)
    assert (call.failed.failure, call.failed.definite) == (Failure.NO_LEADER, True)


def test_a_leader_cut_off_answers_indefinitely_what_is_in_its_log() -> None:
    cluster = ProposingCluster(3)
    leader = cluster.lead()
    cluster.isolate(leader.name)
    call = leader.submit(open_session(), "open", timeout_ms=30_000)
    cluster.run(2_500)
    assert (call.failed.failure, call.failed.definite) == (Failure.NO_LEADER, False)


@pytest.mark.parametrize("leading", [True, False])
def test_silence_is_answered_in_time_though_no_connection_breaks(leading: bool) -> None:
    """L09: packets vanish, sockets stay open. Calls begun at once and a little later are answered in two seconds."""
    cluster = ProposingCluster(3)
    host = cluster.lead() if leading else cluster.follow()[0]
    session = cluster.open_session(host, "open")
    cluster.drop = lambda source, target, envelope: host.name in (source, target)
    calls = []
    for wait_ms in (0, 500, 1_000, 1_500):
        cluster.run(wait_ms)
        calls.append(host.submit(open_session(), f"late-{wait_ms}", timeout_ms=30_000))
        calls.append(host.renew(session, timeout_ms=30_000))
    cluster.run_until(lambda: all(call.done for call in calls))
    for call in calls:
        assert call.failed.failure is Failure.NO_LEADER
        assert call.took_s <= 2.0


def test_a_command_whose_caller_gave_up_is_not_applied_later() -> None:
    """R15: no quorum for a minute; what was asked meanwhile has no effect afterwards."""
    cluster = ProposingCluster(3)
    leader = cluster.lead()
    session = cluster.open_session(leader, "open", ttl_ms=3_600_000)
    cluster.isolate(leader.name)
    cluster.run(1_500)
    call = leader.submit(acquire(session), "acquire", timeout_ms=2_000)
    cluster.run(60_000, step_ms=50)
    assert call.failed.definite
    cluster.heal()
    cluster.run(3_000)
    assert all(host.machine.lease("default", "job") is None for host in cluster.proposing.values())


def test_deadline_definite_when_it_never_left_this_node(cluster: ProposingCluster) -> None:
    host = cluster.follow()[0]
    cluster.isolate(host.name)
    cluster.run(3_000)
    call = host.submit(open_session(), "open", timeout_ms=500)
    cluster.run(510)
    assert (call.failed.failure, call.failed.definite) == (Failure.DEADLINE, True)


def test_deadline_indefinite_while_it_may_be_applied(cluster: ProposingCluster) -> None:
    follower = cluster.follow()[0]
    cluster.drop = lambda source, target, envelope: target == follower.name and _carries_entries(envelope)
    call = follower.submit(open_session(), "open", timeout_ms=300)
    cluster.run(310)
    assert (call.failed.failure, call.failed.definite) == (Failure.DEADLINE, False)
    # Asked again under the same id it says what happened.
    cluster.drop = lambda source, target, envelope: False
    assert isinstance(cluster.await_call(follower.submit(open_session(), "open")), SessionOpened)
    cluster.run_until(cluster.agree)
    assert kinds(follower.events_seen) == ["SESSION_OPENED"]


def test_deadline_definite_once_time_has_passed_it_by(cluster: ProposingCluster) -> None:
    """Handed over and lost; but this node has applied a later stamp than the request may have."""
    follower = _behind_in_time(cluster)
    cluster.drop = lambda source, target, envelope: isinstance(envelope.body, Forward)
    call = follower.submit(open_session(), "lost", timeout_ms=400)
    cluster.run(100)
    cluster.open_session(cluster.lead(), "other")
    cluster.run(310)
    assert (call.failed.failure, call.failed.definite) == (Failure.DEADLINE, True)


def test_a_result_that_is_staged_is_delivered_even_if_the_deadline_passes_before_settle() -> None:
    cluster = ProposingCluster(1)
    host = cluster.lead()
    call = host.submit(open_session(), "open", timeout_ms=100)
    assert host.node is not None
    for _ in range(3):  # append, commit and apply
        turn = host.node.begin_turn()
        if host.proposer._staged:
            break
        if turn.durable is not None:
            turn.durable()
        host.node.end_turn(turn)
    assert host.proposer._staged
    cluster.clock.now_s += 1
    host.proposer.poll()  # while the disk is waited for
    assert not call.done
    if turn.durable is not None:
        turn.durable()
    host.node.end_turn(turn)
    assert isinstance(call.result, SessionOpened)


def test_withdrawn_before_it_was_handed_on_is_never_applied(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    call = host.submit(open_session(), "open")
    host.proposer.withdraw(call.handle)
    cluster.run(500)
    assert not call.outcomes and not host.machine.counts()["sessions"]
    assert host.proposer.in_flight == 0


# ---- bounds ------------------------------------------------------------


def test_bounds_are_answered_at_once() -> None:
    cluster = ProposingCluster(1, proposer=ProposerSettings(inflight_max=3, queue_max=2))
    host = cluster.lead()
    calls = [host.submit(open_session(), f"open-{number}") for number in range(4)]
    failed = [call.failed for call in calls if call.done]
    assert [(f.failure, f.definite) for f in failed] == [(Failure.OVERLOADED, True)] * 2
    assert all(f.retry_delay_ms > 0 for f in failed)
    cluster.run(100)
    assert sum(isinstance(call.result, SessionOpened) for call in calls) == 2


def test_a_kill_is_let_in_when_nothing_else_is() -> None:
    """By every bound, and so many at once that they are bounded, too."""
    kill = SetSwitch(mode=SwitchMode.KILL, actor="ann", reason="it is the load", tenant="t")
    cluster = ProposingCluster(1, proposer=ProposerSettings(inflight_max=3, queue_max=2))
    host = cluster.lead()
    calls = [host.submit(open_session(), f"open-{number}") for number in range(4)]
    assert calls[-1].failed.failure is Failure.OVERLOADED
    kills = [host.submit(kill, f"kill-{number}") for number in range(STOPS_ROOM + 2)]
    refused = [call.failed.failure for call in kills if call.done]
    assert refused == [Failure.OVERLOADED]
    cluster.run(100)
    assert sum(isinstance(call.outcomes[0], SwitchIsSet) for call in kills) == STOPS_ROOM + 1

    cluster = ProposingCluster(1)
    host = cluster.lead()
    for number in range(IN_FLIGHT_FREE + 1):
        host.submit(open_session(), f"first-{number}")
    for _ in range(6):
        host.proposer.pressure.note_lag(500)
    assert host.submit(open_session(), "open").failed.failure is Failure.OVERLOADED
    call = host.submit(kill, "kill")
    cluster.run(50)
    assert isinstance(call.result, SwitchIsSet)


def test_sheds_while_the_event_loop_is_late_and_recovers() -> None:
    cluster = ProposingCluster(1)
    host = cluster.lead()
    calls = [host.submit(open_session(), f"first-{number}") for number in range(IN_FLIGHT_FREE + 1)]
    host.proposer.pressure.note_lag(500)
    assert host.proposer.shedding() == 0, "one late turn is no overload"
    for _ in range(5):
        host.proposer.pressure.note_lag(500)
    assert host.proposer.shedding() > 0
    call = host.submit(open_session(), "open")
    assert (call.failed.failure, call.failed.definite) == (Failure.OVERLOADED, True)
    cluster.run(50)
    assert all(isinstance(call.result, SessionOpened) for call in calls)
    assert host.proposer.shedding() == 0, "little in flight: let it show how things are"
    cluster.open_session(host, "open")


def test_held_back_refuses_what_grows_and_serves_what_ends(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    session = cluster.open_session(host, "open")
    token = cluster.acquire(host, session)
    host.proposer.hold_back("the disk is full")
    assert host.submit(open_session(), "more").failed.message == "the disk is full"
    assert not isinstance(cluster.await_call(host.submit(release(session, token), "release")), Refused)
    host.proposer.hold_back("")
    cluster.open_session(host, "more")


def test_stopping_answers_everybody() -> None:
    cluster = ProposingCluster(3)
    host = cluster.follow()[0]
    cluster.isolate(host.name)
    cluster.run(3_000)
    waiting = host.submit(open_session(), "open"), host.renew("s1")
    host.proposer.stop()
    late = host.submit(open_session(), "late"), host.renew("s1")
    for call in (*waiting, *late):
        assert (call.failed.failure, call.failed.definite) == (Failure.STOPPING, True)


# ---- renewals ------------------------------------------------------------


def test_renewals_of_a_window_are_one_entry(cluster: ProposingCluster) -> None:
    host = cluster.follow()[0]
    sessions = [cluster.open_session(host, f"open-{number}") for number in range(30)]
    cluster.run_until(cluster.agree)
    cluster.run(5_000)
    before = host.applied_index()
    calls = [host.renew(session) for session in (*sessions, *sessions)]
    cluster.run(200)
    assert all(call.result == SessionsRenewed() for call in calls)
    assert host.applied_index() == before + 1
    row = host.machine.session(sessions[0])
    assert row is not None and row.deadline_ms > row.opened_ms + row.ttl_ms + 4_900


def test_a_renewal_of_a_session_that_has_ended_says_so(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    alive, gone = cluster.open_session(host, "a"), cluster.open_session(host, "b")
    cluster.await_call(host.submit(CloseSession(tenant="default", session=gone), "close"))
    good, bad = host.renew(alive), host.renew(gone)
    cluster.run(200)
    assert good.result == SessionsRenewed()
    assert isinstance(bad.result, Refused) and bad.result.reason is Reason.SESSION_NOT_FOUND


def test_a_keepalive_of_a_stream_that_no_longer_carries_the_session_does_not_count(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    session = cluster.open_session(host, "a")
    attach = AttachSession(tenant="default", session=session, connection="new", node=host.name)
    cluster.await_call(host.submit(attach))
    old, new = host.renew(session, connection="old"), host.renew(session, connection="new")
    cluster.run(300)
    assert old.result == SessionsRenewed(superseded=(session,))
    assert new.result == SessionsRenewed()


def test_a_short_ttl_shortens_the_window(cluster: ProposingCluster) -> None:
    host = cluster.lead()
    session = cluster.open_session(host, "short", ttl_ms=500)
    call = host.renew(session, timeout_ms=100)
    cluster.run(50)
    assert call.result == SessionsRenewed()


def test_a_renewal_without_a_leader_is_answered_in_time() -> None:
    cluster = ProposingCluster(3)
    host = cluster.follow()[0]
    session = cluster.open_session(host, "open")
    cluster.isolate(host.name)
    cluster.run(2_000)
    call, short = host.renew(session, timeout_ms=30_000), host.renew(session, timeout_ms=300)
    cluster.run(2_000)
    assert call.failed.failure is Failure.NO_LEADER
    assert short.failed.failure is Failure.DEADLINE


# ---- the leader's side of time ------------------------------------------------------------


def test_what_is_due_ends_by_itself_in_time_and_without_a_storm(cluster: ProposingCluster) -> None:
    leader = cluster.lead()
    sessions = [cluster.open_session(leader, f"open-{number}", ttl_ms=2_000) for number in range(20)]
    row = leader.machine.session(sessions[-1])
    assert row is not None
    before = leader.applied_index()
    cluster.run(1_900)
    assert leader.machine.counts()["sessions"] == 20
    cluster.run(400)
    assert leader.machine.counts()["sessions"] == 0
    assert leader.applied_index() - before <= 20
    idle = leader.applied_index()
    cluster.run(10_000)
    assert leader.applied_index() == idle, "no session, no writes"


def test_expiry_goes_on_after_the_leader_died(cluster: ProposingCluster) -> None:
    leader = cluster.lead()
    session = cluster.open_session(leader, "open", ttl_ms=5_000)
    cluster.acquire(leader, session)
    cluster.run_until(cluster.agree)
    cluster.run(3_000)
    cluster.crash(leader.name)
    began_s = cluster.clock.now_s
    rest = cluster.lead()
    cluster.run_until(lambda: rest.machine.lease("default", "job") is None, 10_000)
    # 5 s after the grant, not 5 s after the change of leaders, and never before.
    assert 1.9 <= cluster.clock.now_s - began_s <= 2.6
    assert kinds(rest.events_seen)[-2:] in (["SESSION_EXPIRED", "LEASE_EXPIRED"], ["LEASE_EXPIRED", "SESSION_EXPIRED"])


def test_a_new_leader_brings_its_limits() -> None:
    limits = Limits(sessions_max=2)
    cluster = ProposingCluster(3, proposer=ProposerSettings(limits=limits))
    cluster.lead()
    cluster.run_until(lambda: all(host.machine.limits == limits for host in cluster.proposing.values()))
    index = cluster.lead().applied_index()
    cluster.run(1_000)
    assert cluster.lead().applied_index() == index


def test_wall_clock_steps_change_no_ttl(cluster: ProposingCluster) -> None:
    leader = cluster.lead()
    cluster.open_session(leader, "open", ttl_ms=2_000)
    leader.clock.wall_ahead_ms = -7_200_000
    cluster.run(1_800)
    assert leader.machine.counts()["sessions"] == 1
    leader.clock.wall_ahead_ms = 7_200_000
    cluster.run(100)
    assert leader.machine.counts()["sessions"] == 1
    cluster.run(300)
    assert leader.machine.counts()["sessions"] == 0


# ---- snapshots ------------------------------------------------------------


def test_a_snapshot_that_skips_an_entry_leaves_no_caller_without_an_answer() -> None:
    cluster = ProposingCluster(3, compact_entries=20)
    leader, follower = cluster.lead(), cluster.follow()[0]
    session = cluster.open_session(follower, "open", ttl_ms=3_600_000)
    # The leader takes both, and the follower hears nothing of it until a snapshot is all that is left.
    cluster.drop = lambda source, target, envelope: target == follower.name and _carries_entries(envelope)
    keyed = follower.submit(acquire(session, "keyed"), "keyed", timeout_ms=60_000)
    bare = follower.submit(acquire(session, "bare"), timeout_ms=60_000)
    cluster.run(50)
    cluster.cut(leader.name, follower.name)
    cluster.cut(follower.name, cluster.follow()[-1].name)
    for number in range(60):
        cluster.open_session(leader, f"more-{number}", ttl_ms=3_600_000)
    cluster.run(200)
    assert leader.node is not None and leader.node.status().snapshot_index > 0
    cluster.drop = lambda source, target, envelope: False
    keyed_again = follower.submit(acquire(session, "later"), "later", timeout_ms=60_000)
    cluster.heal()
    cluster.run_until(lambda: keyed_again.done)
    cluster.run(500)
    assert follower.machine.lease("default", "keyed") is not None
    if isinstance(keyed.outcomes[0], LeaseGranted):
        assert isinstance(bare.outcomes[0], LeaseGranted) or bare.failed.failure is Failure.OUTCOME_UNKNOWN
    else:
        # Cut off for longer than the wait for a leader: then the caller was told that it is not known.
        assert (keyed.failed.failure, keyed.failed.definite) == (Failure.NO_LEADER, False)
    cluster.run_until(cluster.agree)
    assert follower.gaps == 0
    revisions = [event.revision for event in follower.events_seen]
    assert revisions == list(range(1, len(revisions) + 1)), "a snapshot must not skip events that are still held"


def proposer_alone(**settings: Any) -> tuple[Proposer, Machine, _Node, ManualClock]:
    clock = ManualClock()
    machine = Machine()
    proposer = Proposer(machine, clock, "n1", 3, settings=ProposerSettings(**settings))
    node = _Node()
    proposer.attach(node, lambda: None, lambda when_s: None)
    return proposer, machine, node, clock


class _Node:
    """A node as seen by the proposer: takes what is forwarded, or not."""

    def __init__(self) -> None:
        self.forwarded: list[bytes] = []
        self.reachable = True

    def is_leader(self) -> bool:
        return True

    def forward(self, payload: bytes) -> bool:
        if self.reachable:
            self.forwarded.append(payload)
        return self.reachable


def test_skipped_by_a_snapshot_a_keyed_command_is_repeated_and_a_bare_one_is_unknown() -> None:
    proposer, _, node, _ = proposer_alone()
    proposer.role_changed(Role.FOLLOWER, 1, "n2")
    keyed, bare, unsent = Call(), Call(), Call()
    proposer.submit(open_session(), keyed, timeout_ms=5_000, key=RequestKey("default", "", "a"))
    proposer.submit(open_session(), bare, timeout_ms=5_000)
    proposer.poll()
    node.reachable = False
    proposer.submit(open_session(), unsent, timeout_ms=5_000)
    proposer.poll()
    assert len(node.forwarded) == 1
    proposer.restore(proposer_alone()[0].capture().encode())
    assert not bare.done, "answers come in settle"
    proposer.settle()
    assert (bare.failed.failure, bare.failed.definite) == (Failure.OUTCOME_UNKNOWN, False)
    node.reachable = True
    proposer.poll()
    again = b"".join(node.forwarded[1:])
    assert encode_item(Item("n1/3", 4, _request(again, 4))) in again, "under a new sequence"
    assert not keyed.done and not unsent.done


def test_an_expired_repeat_says_nothing_of_the_try_that_a_snapshot_skipped() -> None:
    proposer, _, node, clock = proposer_alone()
    proposer.role_changed(Role.FOLLOWER, 1, "n2")
    call = Call()
    proposer.submit(AttachSession(tenant="default", session="s", connection="c", node="n"), call, timeout_ms=1_000)
    proposer.poll()
    proposer.restore(proposer_alone()[0].capture().encode())
    proposer.settle()
    proposer.poll()
    clock.now_s += 2
    request = _request(node.forwarded[1], 2)
    proposer.apply(9, encode_batch(Stamp(60_000, 60_000), [encode_item(Item("n1/3", 2, request))]))
    proposer.settle()
    assert (call.failed.failure, call.failed.definite) == (Failure.DEADLINE, False)


def _request(frame: bytes, sequence: int) -> Request:
    for item in msgspec.msgpack.decode(frame)[1]:
        if item[1] == sequence:
            return msgspec.convert(item[2], Request)
    raise AssertionError(f"no item {sequence}")


def test_events_skipped_and_no_longer_held_are_reported_as_a_gap() -> None:
    source, machine, _, _ = proposer_alone(limits=None)
    for number in range(5):
        machine.apply(Stamp(number, number), Request(command=open_session(suffix=str(number))))
    target, _, _, _ = proposer_alone()
    seen: list[Any] = []
    gaps: list[bool] = []
    target.subscribe(seen.extend, lambda: gaps.append(True))
    target.restore(source.capture().encode())
    target.settle()
    assert [event.revision for event in seen] == [1, 2, 3, 4, 5] and not gaps


def test_capture_and_restore_keep_machine_and_window(cluster: ProposingCluster) -> None:
    for number, host in enumerate(cluster.proposing.values()):
        cluster.open_session(host, f"open-{number}")
    cluster.run_until(cluster.agree)
    leader = cluster.lead()
    copy, _, _, _ = proposer_alone()
    copy.restore(leader.proposer.capture().encode())
    assert copy.digest() == leader.proposer.digest() == leader.proposer.capture().digest()


@pytest.mark.parametrize(
    "payload", [b"", b"\x00", b"\x93\x01\x02\x03", b"\xc1" * 8, msgspec.msgpack.encode([9, b"", []])]
)
def test_what_is_no_batch_and_no_snapshot_stops_the_node(payload: bytes) -> None:
    proposer, _, _, _ = proposer_alone()
    with pytest.raises(MalformedBatch):
        proposer.apply(7, payload)
    with pytest.raises(MalformedBatch):
        proposer.restore(payload)


def test_an_unknown_command_in_the_log_stops_the_node() -> None:
    item = msgspec.msgpack.encode(["n1/1", 1, [[999], None, 0]])
    proposer, _, _, _ = proposer_alone()
    with pytest.raises(MalformedBatch):
        proposer.apply(7, encode_batch(Stamp(1, 1), [item]))


def test_what_a_follower_may_not_send_does_not_enter_the_log() -> None:
    proposer, _, _, _ = proposer_alone()
    proposer.role_changed(Role.LEADER, 1, "n1")
    request = Request(command=open_session())
    for origin, sequence in (("n3/1", 1), ("n2/01", 1), ("n2", 1), ("", 1), ("n2/x", 1), ("n2/1", 0), ("n2/1", -5)):
        proposer.forwarded("n2", encode_forwarded([encode_item(Item(origin, sequence, request))]))
    for payload in (b"", b"junk", encode_forwarded([msgspec.msgpack.encode(["n2/1", 1, [[999]]])])):
        proposer.forwarded("n2", payload)
    assert proposer.queued == 0
    proposer.forwarded("n2", encode_forwarded([encode_item(Item("n2/1", 1, request))] * 3))
    assert proposer.queued == 1, "an item that waits already is not taken twice"


# ---- each item once ------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["n1/1", "n1/2", "n2/1"]), st.integers(1, 40)), max_size=200))
def test_the_window_takes_each_item_once(items: list[tuple[str, int]]) -> None:
    window, model = AppliedWindow(), set[tuple[str, int]]()
    newest: dict[str, int] = {}
    for origin, sequence in items:
        node, life = origin.split("/")
        newest[node] = max(newest.get(node, 0), int(life))
        new = (origin, sequence) not in model and int(life) == newest[node]
        assert window.holds(origin, sequence) <= (not new)
        assert window.take(origin, sequence) is new
        model.add((origin, sequence))
        window = AppliedWindow.load(
            msgspec.msgpack.decode(msgspec.msgpack.encode(window.dump()), type=list[NodeWindow])
        )
        assert window.holds(origin, sequence) or int(life) < newest[node]


def test_the_window_is_bounded_and_forgets_the_oldest() -> None:
    window = AppliedWindow()
    for sequence in range(3, 3 + 2 * WINDOW_SEQUENCES):  # 1 and 2 are never applied
        assert window.take("n1/1", sequence)
    (dumped,) = window.dump()
    assert len(dumped.above) <= WINDOW_SEQUENCES // 8
    assert not window.take("n1/1", 1), "too old to be told apart from a repeat"
    assert window.take("n1/1", 10 * WINDOW_SEQUENCES)
    for number in range(WINDOW_NODES_MAX + 10):
        window.take(f"m{number}/1", 1)
    assert len(window.dump()) == WINDOW_NODES_MAX


def test_an_item_that_fell_out_of_the_window_goes_on_under_a_new_name() -> None:
    proposer, _, _, _ = proposer_alone()
    proposer.role_changed(Role.LEADER, 1, "n1")
    call = Call()
    proposer.submit(open_session(), call, timeout_ms=5_000, key=RequestKey("default", "", "a"))
    entry = proposer.next_entry()
    assert entry is not None
    for sequence in (2 + WINDOW_SEQUENCES, 2):
        proposer.apply(sequence, encode_batch(Stamp(1, 1), [encode_item(Item("n1/3", sequence, _tick()))]))
    proposer.apply(9, entry)
    proposer.settle()
    assert not call.done
    again = proposer.next_entry()
    assert again is not None and [item.sequence for item in decode_batch(again).items] == [2]


def test_a_life_that_an_earlier_one_has_outrun_takes_the_next_number() -> None:
    """The disk was lost and the wall clock has stepped back, so this life has a lower number than the last."""
    proposer, _, _, _ = proposer_alone()
    proposer.role_changed(Role.LEADER, 1, "n1")
    call = Call()
    proposer.submit(open_session(), call, timeout_ms=5_000, key=RequestKey("default", "", "a"))
    entry = proposer.next_entry()
    assert entry is not None
    proposer.apply(2, encode_batch(Stamp(1, 1), [encode_item(Item("n1/9", 1, _tick()))]))
    proposer.apply(3, entry)
    proposer.settle()
    assert not call.done
    again = proposer.next_entry()
    assert again is not None and [item.origin for item in decode_batch(again).items] == ["n1/10"]
    proposer.apply(4, again)
    proposer.settle()
    assert isinstance(call.result, SessionOpened)


def _tick() -> Request:
    return Request(command=Tick())


# ---- cluster time ------------------------------------------------------------


class _Skewed:
    """A node's monotonic clock: an origin of its own, the same rate."""

    def __init__(self, origin_s: float) -> None:
        self.origin_s = origin_s
        self.real_s = 0.0

    def monotonic_s(self) -> float:
        return self.origin_s + self.real_s

    def wall_ms(self) -> int:
        return 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # who leads
            st.lists(st.floats(0.001, 30), min_size=1, max_size=5),  # between its entries
            st.lists(st.floats(0, 3), min_size=3, max_size=3),  # how long an entry takes to each node
            st.booleans(),  # whether everybody restarts afterwards
        ),
        min_size=1,
        max_size=8,
    )
)
def test_cluster_time_never_steps_back_and_is_never_faster_than_real_time(history: list[Any]) -> None:
    clocks = [_Skewed(1_000.0 * number) for number in range(3)]
    times = [ClusterTime(clock) for clock in clocks]
    real_s = 0.0
    last_ms, last_s = 0, 0.0
    stamped: list[tuple[int, float]] = []

    def move(to_s: float) -> None:
        nonlocal real_s
        real_s = max(real_s, to_s)
        for clock in clocks:
            clock.real_s = real_s

    for leader, pauses, latencies, restart in history:
        for pause in pauses:
            move(real_s + pause)
            stamp_ms = max(times[leader].now_ms(), last_ms)
            assert stamp_ms >= last_ms
            # Between any two entries, not only neighbours: what rounding gives is never more than its one millisecond.
            assert all(stamp_ms - ms < (real_s - s) * 1000 + 1.001 for ms, s in stamped)
            stamped.append((stamp_ms, real_s))
            last_ms, last_s = stamp_ms, real_s
        # The others get the last entry some time later; only who has it can lead next.
        for node in sorted((n for n in range(3) if n != leader), key=lambda n: latencies[n]):
            move(last_s + latencies[node])
            times[node].received(last_ms)
        if restart:
            times = [ClusterTime(clock) for clock in clocks]
            for time in times:
                time.received(last_ms)


def test_time_goes_on_through_a_leader_change_and_a_full_restart(cluster: ProposingCluster) -> None:
    cluster.open_session(cluster.lead(), "a", ttl_ms=3_600_000)
    began_s, began_ms = cluster.clock.now_s, cluster.lead().proposer.cluster_now_ms()
    for number in range(3):
        cluster.run(1_000)
        leader = cluster.lead()
        cluster.open_session(leader, f"b{number}", ttl_ms=3_600_000)
        cluster.restart(leader.name)
    passed_ms = cluster.lead().proposer.cluster_now_ms() - began_ms
    real_ms = (cluster.clock.now_s - began_s) * 1000
    assert real_ms - 100 <= passed_ms <= real_ms
    stamp_ms = cluster.lead().machine.stamp.cluster_ms
    for name in cluster.names:
        cluster.crash(name)
    cluster.clock.now_s += 500
    for name in cluster.names:
        cluster.restart(name)
    now_ms = cluster.lead().proposer.cluster_now_ms()
    assert stamp_ms <= now_ms <= stamp_ms + 10_000
    assert [kind for kind in kinds(cluster.lead().events_seen) if kind != Kind.SESSION_OPENED.name] == []


def _carries_entries(envelope: Envelope) -> bool:
    return isinstance(envelope.body, Append) and bool(envelope.body.entries)
