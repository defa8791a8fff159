"""What a client knows of kill switches, how fresh that is, and what guarded bodies and killed leases make of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest
import tenure
from tenure.switches import Switches, SwitchState, switch_info
from tenure.v1 import session_pb2, switch_pb2

from tests.client.double import Double, refusal
from tests.client.timed import Clock, connected, passes, settle
from tests.waiting import eventually

PAUSE, DRAIN, KILL = switch_pb2.SWITCH_MODE_PAUSE, switch_pb2.SWITCH_MODE_DRAIN, switch_pb2.SWITCH_MODE_KILL


# ---- states ----------------------------------------------------------------------------------------------------


def test_a_state_is_no_truth_value() -> None:
    """K03."""
    for state in SwitchState:
        with pytest.raises(TypeError, match="no truth value"):
            bool(state)


def test_before_anything_was_learnt_it_is_unknown() -> None:
    switches = Switches(5.0, False, Clock())
    assert switches.state(None) is SwitchState.UNKNOWN
    assert isinstance(switches.forbids_beginning(None), tenure.SwitchStateUnknown)
    assert isinstance(switches.forbids_going_on("digest"), tenure.SwitchStateUnknown)


async def test_the_strongest_that_concerns_it_counts(server: Double) -> None:
    async with connected(server) as client:
        assert client.switch_state() is SwitchState.ACTIVE
        for mode, job, of_job, of_tenant in (
            (PAUSE, "digest", SwitchState.PAUSED, SwitchState.ACTIVE),
            (DRAIN, "digest", SwitchState.DRAINING, SwitchState.ACTIVE),
            (PAUSE, "", SwitchState.DRAINING, SwitchState.PAUSED),
            (KILL, "digest", SwitchState.KILLED, SwitchState.PAUSED),
        ):
            server.switch(mode, job)
            await settle(client)
            assert client.switch_state("digest") is of_job
            assert client.switch_state("default/digest") is of_job
            assert client.switch_state("digest2") is of_tenant
            assert client.switch_state() is of_tenant
        server.clear()
        await settle(client)
        assert client.switch_state("digest") is SwitchState.ACTIVE
        with pytest.raises(ValueError, match="NAME or TENANT/NAME"):
            client.switch_state("")


async def test_what_is_newer_than_this_client_is_a_kill_of_everything(server: Double) -> None:
    """K03: what cannot be judged is judged as a kill."""
    async with connected(server) as client:
        for mode, scope in ((99, 2), (3, 99)):
            switch = switch_pb2.Switch(
                switch_id="k1",
                mode=switch_pb2.SwitchMode.ValueType(mode),
                scope=switch_pb2.SwitchScope.ValueType(scope),
            )
            server.push(session_pb2.Push(switches=session_pb2.SwitchesChanged(switches=[switch])))
            await settle(client)
            assert client.switch_state("digest") is SwitchState.KILLED
        assert switch_info(switch).scope == "99"


async def test_a_sidecar_that_does_not_speak_of_switches_says_nothing_of_them(server: Double) -> None:
    server.switches = None
    async with connected(server) as client:
        assert client.switch_state() is SwitchState.UNKNOWN
        server.switches = session_pb2.SwitchesChanged()
        server.break_streams()
        await eventually(lambda: len(server.attaches) == 2 and client.node_id)
        assert client.switch_state() is SwitchState.ACTIVE
        server.switches = None
        server.break_streams()
        await eventually(lambda: len(server.attaches) == 3 and client.node_id)
        assert client.switch_state() is SwitchState.UNKNOWN


async def test_a_switch_that_was_set_while_there_was_no_stream(server: Double) -> None:
    async with connected(server) as client:
        await server.stop()
        server.switch(KILL)
        await server.start()
        await eventually(lambda: client.switch_state() is SwitchState.KILLED)


async def test_what_a_superseded_stream_still_says_is_not_heard(server: Double) -> None:
    """It may be older than what the new one has told."""
    async with connected(server) as client:
        link = server.sessions[client.session_id].stream
        stream = client._connection._stream
        assert link is not None
        assert stream is not None
        stream.supersede()
        server.switch(KILL)
        link.outbox.put_nowait(session_pb2.ConnectResponse())
        checking = asyncio.create_task(client.check("nothing", 1))
        await eventually(lambda: server.operations("check_lease"))
        server.break_streams()
        await checking  # answered on the next stream
        assert client.switch_state() is SwitchState.KILLED
        assert len(server.attaches) == 2


# ---- staleness -------------------------------------------------------------------------------------------------


async def test_knowledge_is_as_old_as_the_sending_of_what_confirmed_it(server: Double) -> None:
    """K02."""
    clock = Clock()
    async with connected(server, clock, ttl_ms=60_000) as client:
        async with client.guard():
            await passes(client, server, clock, 20.0)
            assert client.switch_state() is SwitchState.ACTIVE
        server.acknowledge = False
        await passes(client, server, clock, 3.5)
        assert client.switch_state() is SwitchState.ACTIVE
        await passes(client, server, clock, 1.5)
        assert client.switch_state() is SwitchState.UNKNOWN
        with pytest.raises(tenure.SwitchStateUnknown):
            async with client.guard():
                pass
        server.acknowledge = True
        await passes(client, server, clock, 5.0)
        assert client.switch_state() is SwitchState.ACTIVE


async def test_a_guard_is_cut_when_the_knowledge_is_stale_and_not_before(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock, switch_staleness=2.0) as client:
        cut: list[float] = []
        with pytest.raises(tenure.SwitchStateUnknown, match="for 2 s"):
            async with client.guard("digest"):
                server.acknowledge = False
                began = clock.now
                passing = asyncio.create_task(passes(client, server, clock, 4.0, step=0.125))
                try:
                    await asyncio.Event().wait()
                finally:
                    cut.append(clock.now - began)
        await passing
        assert 1.5 <= cut[0] <= 2.25  # the last keepalive that was confirmed was the attach


async def test_a_guard_outlives_a_session_but_not_what_is_known(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock) as client:
        async with client.guard():
            server.expire(client.session_id)
            await eventually(lambda: client.session_id == "s2")
            await passes(client, server, clock, 8.0)
        with pytest.raises(tenure.SwitchStateUnknown):
            async with client.guard():
                server.mute = True
                server.push(session_pb2.Push(session_lost=session_pb2.SessionLost(cause="expired")))
                await eventually(lambda: not client.session_id)
                await passes(client, server, clock, 3.5)
                with pytest.raises(asyncio.CancelledError):
                    await passes(client, server, clock, 1.75)
                raise asyncio.CancelledError
        server.mute = False


async def test_under_fail_open_a_kill_that_was_known_stays_one(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock, fail_open=True) as client:
        server.switch(KILL, "digest")
        await settle(client)
        server.acknowledge = False
        await passes(client, server, clock, 6.0)
        assert client.switch_state("digest") is SwitchState.UNKNOWN
        with pytest.raises(tenure.SwitchedOff):
            async with client.guard("digest"):
                pass
        async with client.guard("other"):
            await passes(client, server, clock, 1.0)


# ---- guards ----------------------------------------------------------------------------------------------------


async def test_a_kill_cuts_the_body_and_says_who_set_it(server: Double) -> None:
    async with connected(server) as client:
        cleaned = False
        with pytest.raises(tenure.SwitchedOff) as caught:
            async with client.guard("digest"):
                server.switch(KILL)
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    cleaned = True
        assert cleaned
        assert (caught.value.switch_id, caught.value.mode, caught.value.actor) == ("k1", "kill", "ops")
        assert "test" in str(caught.value)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        with pytest.raises(tenure.SwitchedOff):
            async with client.guard("digest"):
                raise AssertionError("entered")
        assert not client._worker.guards


@pytest.mark.parametrize("mode", [PAUSE, DRAIN])
async def test_a_pause_lets_no_one_in_and_nobody_out(server: Double, mode: int) -> None:
    async with connected(server) as client:
        async with client.guard("digest"):
            server.switch(mode, "digest")
            await settle(client)
        with pytest.raises(tenure.SwitchedOff):
            async with client.guard("digest"):
                raise AssertionError("entered")
        async with client.guard():
            pass


async def test_a_body_that_ends_in_the_same_turn(server: Double) -> None:
    async with connected(server) as client:
        done = asyncio.Event()
        ended: list[str] = []

        async def body() -> None:
            async with client.guard():
                await done.wait()
                ended.append("body")

        task = asyncio.create_task(body())
        await settle(client)
        done.set()  # it would end in its next step, and is told before that
        (guard,) = client._worker.guards
        guard.cut(tenure.SwitchedOff("now"))
        with pytest.raises(tenure.SwitchedOff):
            await task
        assert not ended
        guard.cut(tenure.SwitchedOff("late"))  # whoever comes after its end does no harm
        assert task.cancelling() == 0


async def test_a_body_that_swallows_the_cancellation_is_told_all_the_same(server: Double) -> None:
    async with connected(server) as client:
        with pytest.raises(tenure.SwitchedOff):
            async with client.guard():
                server.switch(KILL)
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()


async def test_an_error_of_the_body_stays_with_a_note(server: Double) -> None:
    async with connected(server) as client:
        with pytest.raises(ZeroDivisionError) as caught:
            async with client.guard():
                server.switch(KILL)
                try:
                    await asyncio.Event().wait()
                finally:
                    _ = 1 // 0
        assert "switched off" in caught.value.__notes__[0]


@pytest.mark.parametrize("killed", ["outer", "inner", "both"])
async def test_nested_guards(server: Double, killed: str) -> None:
    async with connected(server) as client:
        seen: list[str] = []
        try:
            async with client.guard("outer"):
                try:
                    async with client.guard("inner"):
                        server.switch(KILL, "" if killed == "both" else killed)
                        await asyncio.Event().wait()
                except BaseException as error:
                    seen.append(type(error).__name__)
                    raise
        except tenure.SwitchedOff:
            seen.append("SwitchedOff")
        assert seen == ["SwitchedOff" if killed == "inner" else "CancelledError", "SwitchedOff"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_cancellation_by_somebody_else_stays_one(server: Double) -> None:
    async with connected(server) as client:

        async def body() -> None:
            async with client.guard():
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await settle(client)
        (guard,) = client._worker.guards
        guard.cut(tenure.SwitchedOff("now"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_guard_within_a_cleanup_says_why(server: Double) -> None:
    """The task has a cancellation pending already when it enters."""
    async with connected(server) as client:
        entered = asyncio.Event()
        seen: list[str] = []

        async def body() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                try:
                    async with client.guard():
                        entered.set()
                        await asyncio.Event().wait()
                except tenure.SwitchedOff:
                    seen.append("why")

        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        await entered.wait()
        server.switch(KILL)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["why"]


async def test_close_cuts_guards_and_is_refused_inside_of_one(server: Double) -> None:
    client = await tenure.connect(server.address)

    async def body() -> None:
        async with client.guard():
            with pytest.raises(RuntimeError, match="inside a handler or a guard"):
                await client.close()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await settle(client)
    await client.close()
    await eventually(task.done, what="the body was cut")
    with pytest.raises(tenure.ClientClosed):
        await task


async def test_how_a_guard_is_written(server: Double) -> None:
    async with connected(server) as client:
        guard = client.guard()
        with pytest.raises(TypeError, match=r"async with client\.guard"), guard:  # type: ignore[attr-defined]
            pass
        async with guard:
            pass
        with pytest.raises(RuntimeError, match="entered once"):
            await guard.__aenter__()


# ---- leases under a kill ---------------------------------------------------------------------------------------


def killed(name: str, token: int) -> session_pb2.Push:
    return session_pb2.Push(lease_lost=session_pb2.LeaseLost(name=name, token=token, cause="killed"))


async def test_the_place_of_a_killed_lease_is_given_back_when_its_body_has_ended(server: Double) -> None:
    async with connected(server) as client:
        cleaned = asyncio.Event()

        async def body() -> None:
            async with client.lease("job"):
                try:
                    await asyncio.Event().wait()
                finally:
                    await cleaned.wait()

        task = asyncio.create_task(body())
        held = await server.until_held("job")
        server.push(killed("job", held.token))
        await settle(client)
        assert "job" in server.leases
        cleaned.set()
        with pytest.raises(tenure.LeaseLost) as caught:
            await task
        assert caught.value.cause == "killed"
        await eventually(lambda: "job" not in server.leases)


async def test_the_place_of_a_killed_lease_without_a_body_is_given_back_until_that_is_taken(server: Double) -> None:
    async with connected(server, timeout=0.2) as client:
        lease = await client.acquire("job")
        server.refuse = lambda operation: (
            refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER") if len(server.operations("release_lease")) < 3 else None
        )
        server.push(killed("job", lease.token))
        await eventually(lambda: "job" not in server.leases)
        assert lease.lost is not None
        assert lease.lost.cause == "killed"


async def test_a_kill_during_the_release_does_not_end_it(server: Double) -> None:
    async with connected(server, timeout=0.2) as client:
        lease = await client.acquire("job")
        server.refuse = lambda operation: refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
        releasing = asyncio.create_task(lease.release(timeout=10))
        await eventually(lambda: server.operations("release_lease"))
        server.push(killed("job", lease.token))
        await eventually(lambda: ("job", lease.token) not in client._connection.session.leases)
        server.refuse = lambda operation: None
        await releasing
        assert "job" not in server.leases
        assert lease.lost is None


@pytest.mark.parametrize("in_force", [True, False])
async def test_a_lease_that_was_killed_while_there_was_no_stream(server: Double, in_force: bool) -> None:
    """The attach does not list it as held, and the kill may have been cleared since. Its place is taken in any case."""
    async with connected(server) as client:
        lease = await client.acquire("job")
        place = server.leases.pop("job")
        released = server.operations("release_lease")
        if in_force:
            server.switch(KILL)
        server.break_streams()
        await eventually(lambda: lease.lost is not None)
        assert lease.lost is not None
        assert lease.lost.cause == ("killed" if in_force else "lost")
        assert place.token == lease.token
        await eventually(lambda: len(server.operations("release_lease")) > len(released))
        assert server.operations("release_lease")[-1].release_lease.token == lease.token
