"""The client against a double: what it does when the sidecar is slow, silent, forgetful, or gone for a moment."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import grpc
import pytest
import tenure
from tenure.addresses import parse_addresses
from tenure.stream import Stream
from tenure.v1 import session_pb2

from tests.client.double import Double, Held, double, refusal
from tests.waiting import eventually


async def connect(server: Double, **options: object) -> tenure.Client:
    return await tenure.connect(server.address, **options)  # type: ignore[arg-type]


async def test_acquire_and_release(server: Double) -> None:
    async with tenure.connect(server.address, agent="a") as client:
        async with client.lease("job") as lease:
            assert lease.valid
            assert lease.token == server.leases["job"].token
            assert 0 < lease.remaining() <= 15
            assert await client.check("job", lease.token)
        assert not lease.valid
        assert lease.lost is None
        assert "job" not in server.leases
    assert server.closed_sessions == ["s1"]


async def test_operations_of_one_turn_share_messages(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        server.received.clear()
        await asyncio.gather(*(client.check("job", n) for n in range(100)))
        assert len(server.operations("check_lease")) == 100
        assert len([m for m in server.received if m.operations]) <= 3


async def test_an_answer_that_was_lost_is_asked_for_again_with_the_same_id(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        server.drop_answers = True
        acquiring = asyncio.create_task(client.acquire("job"))
        held = await server.until_held("job")
        server.drop_answers = False
        server.break_streams()
        lease = await acquiring
        assert lease.token == held.token
        first, second = server.operations("acquire_lease")
        assert first.id == second.id
        assert len(server.attaches) == 2
        assert server.attaches[1].session_id == "s1"
        assert lease.valid


async def test_answers_are_acknowledged(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        for n in range(3):
            await client.check("job", n)
        await client.check("job", 3)
        assert server.received[-1].acknowledged_id == 3


async def test_a_restarted_sidecar_finds_the_same_session_and_token(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        lost: list[tenure.Lease] = []
        async with client.lease("job") as lease:
            lease.on_lost(lost.append)
            token = lease.token
            await server.stop()
            await eventually(lambda: lease.in_jeopardy)
            assert lease.valid
            assert lease.remaining() > 5  # a process that is gone has cut nothing
            await server.start()
            await eventually(lambda: not lease.in_jeopardy)
            assert await lease.check()
            assert lease.token == token
        assert not lost


async def test_every_stream_of_a_session_is_counted(server: Double) -> None:
    """Also those that attached nothing: a late attach of one that was given up must be smaller than its successor's."""
    async with tenure.connect(server.address) as client:
        await client.acquire("job")
        server.break_streams()
        await eventually(lambda: len(server.attaches) >= 2)
        server.expire(client.session_id)
        await eventually(lambda: server.attaches[-1].HasField("open") and len(server.attaches) >= 3)
        first, second = server.attaches[:2]
        assert (first.generation, second.generation) == (1, 2)
        assert server.attaches[-1].generation == 1  # of another session


async def test_a_broken_stream_of_a_living_sidecar_cuts_to_the_grace_until_it_is_resumed(server: Double) -> None:
    async with tenure.connect(server.address, disconnect_grace_ms=700) as client:
        lease = await client.acquire("job")
        before = lease.remaining()
        server.mute = True
        server.break_streams()
        await eventually(lambda: lease.remaining() < 1)
        assert before > 10
        await eventually(lambda: not lease.valid)
        assert lease.lost is not None


async def test_a_silent_sidecar_makes_the_handle_invalid_in_time(server: Double) -> None:
    """L01: it accepts bytes and never answers."""
    ended_at: list[float] = []
    async with tenure.connect(server.address, ttl_ms=1_500, cancel_margin_ms=300) as client:
        lost: list[tenure.Lease] = []
        jeopardy: list[tenure.Lease] = []
        with pytest.raises(tenure.LeaseLost):
            async with client.lease("job") as lease:
                lease.on_lost(lost.append)
                lease.on_jeopardy(jeopardy.append)
                server.mute = True
                last = lease.safe_until
                try:
                    await asyncio.Event().wait()
                finally:
                    ended_at.append(tenure.now())
                    last = lease.safe_until
        assert ended_at[0] < last  # the body had ended before the lease could be lost
        await eventually(lambda: not lease.valid)
        assert len(jeopardy) == 1
        await eventually(lambda: client.session_id != "s1")
        assert len(lost) <= 1
        server.mute = False
        # The old session is ended in the cluster too, so that nothing stays held by nobody.
        await eventually(lambda: "s1" in server.closed_sessions)
        async with client.lease("job") as again:
            assert again.token > lease.token
            assert not lease.valid


async def test_on_lost_is_called_once_and_the_handle_stays_invalid(server: Double) -> None:
    """L02."""
    async with tenure.connect(server.address) as client:
        lost: list[tenure.Lease] = []
        lease = await client.acquire("job")
        lease.on_lost(lost.append)
        del server.leases["job"]
        push = session_pb2.Push(
            lease_lost=session_pb2.LeaseLost(name="job", token=lease.token, cause="operator", current_token=99)
        )
        server.push(push)
        server.push(push)
        await eventually(lambda: lost)
        again = await client.acquire("job")
        assert again.token > lease.token
        assert again.valid
        assert not lease.valid
        assert lease.lost is not None
        assert lease.lost.cause == "operator"
        assert lease.lost.current_token == 99
        await lease.release()  # harmless
        assert again.valid
        assert lost == [lease]


async def test_a_lease_lost_while_disconnected_is_noticed_at_the_resume(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        lease = await client.acquire("job")
        server.leases["job"].token += 1
        server.leases["job"].session_id = "another"
        server.break_streams()
        await eventually(lambda: lease.lost is not None)


async def test_a_lost_session_is_told_once_and_replaced(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        lost: list[tenure.Lease] = []
        one, two = await client.acquire("one"), await client.acquire("two")
        one.on_lost(lost.append)
        two.on_lost(lost.append)
        server.expire("s1")
        await eventually(lambda: len(lost) == 2)
        assert not one.valid
        async with client.lease("one") as lease:
            assert client.session_id == "s2"
            assert lease.token > two.token
        assert len(lost) == 2


async def test_the_body_is_cancelled_and_the_loss_surfaces_after_cleanup(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        cleaned = False
        with pytest.raises(tenure.LeaseLost) as caught:
            async with client.lease("job") as lease:
                lost = session_pb2.LeaseLost(name="job", token=lease.token, cause="transferred", current_token=7)
                server.push(session_pb2.Push(lease_lost=lost))
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    cleaned = True
        assert cleaned
        assert caught.value.cause == "transferred"
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_cancellation_from_outside_stays_one_and_gives_the_lease_back(server: Double) -> None:
    async with tenure.connect(server.address) as client:

        async def body() -> None:
            async with client.lease("job"):
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await server.until_held("job")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: "job" not in server.leases)


async def test_a_timeout_around_the_body_stays_a_timeout(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), client.lease("job"):
                await asyncio.Event().wait()
        await eventually(lambda: "job" not in server.leases)


async def test_a_lost_outer_lease_does_not_blame_the_inner_one(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        with pytest.raises(tenure.LeaseLost) as caught:
            async with client.lease("outer") as outer, client.lease("inner"):
                lost = session_pb2.LeaseLost(name="outer", token=outer.token, cause="operator")
                server.push(session_pb2.Push(lease_lost=lost))
                await asyncio.Event().wait()
        assert caught.value.name == "outer"
        await eventually(lambda: "inner" not in server.leases)


async def test_an_error_of_the_body_is_kept_when_the_lease_is_lost_too(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        with pytest.raises(ZeroDivisionError) as caught:
            async with client.lease("job") as lease:
                lost = session_pb2.LeaseLost(name="job", token=lease.token, cause="operator")
                server.push(session_pb2.Push(lease_lost=lost))
                try:
                    await asyncio.Event().wait()
                finally:
                    _ = 1 // 0
        assert "is lost: operator" in caught.value.__notes__[0]


async def test_the_release_comes_after_the_body(server: Double) -> None:
    """L04."""
    async with tenure.connect(server.address) as client:
        stop = asyncio.Event()

        async def body() -> None:
            async with client.lease("job"):
                try:
                    await asyncio.Event().wait()
                finally:
                    await stop.wait()

        task = asyncio.create_task(body())
        await server.until_held("job")
        task.cancel()
        await client.check("job", 0)  # a round trip later
        assert "job" in server.leases
        stop.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "job" not in server.leases


async def test_close_waits_for_bodies(server: Double) -> None:
    client = await connect(server)
    stop = asyncio.Event()

    async def body() -> None:
        async with client.lease("job"):
            try:
                await asyncio.Event().wait()
            finally:
                await stop.wait()

    task = asyncio.create_task(body())
    await server.until_held("job")
    closing = asyncio.create_task(client.close())
    await client.check("job", 0)
    assert "job" in server.leases
    stop.set()
    await closing
    with pytest.raises(tenure.LeaseLost):
        await task
    assert "job" not in server.leases


async def test_close_inside_a_body_is_refused(server: Double) -> None:
    async with tenure.connect(server.address) as client, client.lease("job"):
        with pytest.raises(RuntimeError, match="leave the body first"):
            await client.close()


async def test_a_cancelled_acquire_leaves_the_line(server: Double) -> None:
    """L12."""
    server.last_token += 1
    server.leases["job"] = Held(server.last_token, "another")
    async with tenure.connect(server.address) as client:
        acquiring = asyncio.create_task(client.acquire("job", wait=60))
        await eventually(lambda: server.waiting.get("job"))
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await eventually(lambda: not server.waiting["job"])


async def test_an_acquire_cancelled_after_the_grant_gives_it_back(server: Double) -> None:
    """L12: the answer was lost, the caller gave up, and the sidecar is back only then."""
    async with tenure.connect(server.address) as client:
        server.drop_answers = True
        acquiring = asyncio.create_task(client.acquire("job"))
        await server.until_held("job")
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        server.drop_answers = False
        server.break_streams()
        await eventually(lambda: "job" not in server.leases)


async def test_a_begin_that_nobody_waits_for_frees_its_key(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        server.drop_answers = True
        beginning = asyncio.create_task(client.begin("key"))
        await eventually(lambda: "key" in server.records)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        server.drop_answers = False
        server.break_streams()
        await eventually(lambda: server.records["key"].state == 5)


async def test_a_release_that_was_cancelled_goes_on(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        lease = await client.acquire("job")
        server.drop_answers = True
        releasing = asyncio.create_task(lease.release())
        await eventually(lambda: "job" not in server.leases)
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await releasing
        assert not lease.valid
        assert lease.token == 1
        server.drop_answers = False
        server.break_streams()
        await lease.release()
        await lease.release()


async def test_random_cancellations_leave_nothing_behind(server: Double) -> None:
    """L12."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with tenure.connect(server.address) as one, tenure.connect(server.address) as two:

        async def worker(client: tenure.Client) -> None:
            async with client.lease(rng.choice("abc"), wait=rng.choice([0, 5])):
                await asyncio.sleep(rng.random() / 200)

        tasks = [asyncio.create_task(worker(rng.choice([one, two]))) for _ in range(300)]
        for task in rng.sample(tasks, 250):
            await asyncio.sleep(rng.random() / 500)
            task.cancel()
            if rng.random() < 0.03:
                server.break_streams()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: not server.leases, what=f"leases free, seed {seed}")
        assert not any(server.waiting.values()), seed
        assert not one._line._waiting
        assert not two._line._waiting


async def test_one_name_is_held_by_one_task_of_a_client(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        first = await client.acquire("job")
        with pytest.raises(tenure.LeaseHeld) as caught:
            await client.acquire("job")
        assert caught.value.token == first.token
        waiting = asyncio.create_task(client.acquire("job", wait=10))
        await client.check("job", 1)
        assert not waiting.done()
        await first.release()
        second = await waiting
        assert second.token > first.token


async def test_many_acquires_and_releases_leave_no_renewal_behind(server: Double) -> None:
    """L13."""
    rng = random.Random(7)
    async with tenure.connect(server.address) as client:
        for _ in range(200):
            lease = await client.acquire("job")
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() / 200)
            await lease.release()
        assert "job" not in server.leases
        assert not client._connection.session.leases
        assert len(client._connection._background) <= 2


async def test_a_refusal_says_who_holds_it(server: Double) -> None:
    async with tenure.connect(server.address) as one, tenure.connect(server.address) as two:
        lease = await one.acquire("job")
        with pytest.raises(tenure.LeaseHeld) as caught:
            await two.acquire("job")
        assert caught.value.holder == one.session_id
        assert caught.value.token == lease.token
        assert caught.value.retry_delay == 0.5


async def test_a_definite_refusal_is_tried_again_and_not_before_its_delay(server: Double) -> None:
    """B07."""
    times: list[float] = []

    def shed(operation: session_pb2.Operation) -> object:
        times.append(tenure.now())
        if len(times) < 3:
            return refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_delay_ms=100)
        return None

    async with tenure.connect(server.address) as client:
        server.refuse = shed  # type: ignore[assignment]
        await client.acquire("job")
        assert times[1] - times[0] >= 0.1
        assert times[2] - times[1] >= 0.1
        assert len({operation.id for operation in server.operations("acquire_lease")}) == 3


async def test_an_indefinite_answer_is_asked_for_again_with_the_same_id(server: Double) -> None:
    answers = 0

    def unsure(operation: session_pb2.Operation) -> object:
        nonlocal answers
        answers += 1
        if answers < 3:
            return refusal(grpc.StatusCode.UNAVAILABLE, "LEADER_CHANGED", definite=False)
        return None

    async with tenure.connect(server.address) as client:
        server.refuse = unsure  # type: ignore[assignment]
        await client.acquire("job")
        assert len({operation.id for operation in server.operations("acquire_lease")}) == 1


async def test_no_answer_is_indefinite_for_a_change_and_unavailable_for_a_read(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        lease = await client.acquire("job")
        server.mute = True
        with pytest.raises(tenure.OperationTimeout) as caught:
            await client.acquire("other", timeout=0.1)
        assert isinstance(caught.value, tenure.Indefinite)
        with pytest.raises(tenure.Unavailable):
            await client.check("job", lease.token, timeout=0.1)
        server.mute = False


async def test_what_was_never_sent_did_not_happen(server: Double) -> None:
    async with tenure.connect(server.address) as client:
        await server.stop()
        await eventually(lambda: not client.node_id)
        with pytest.raises(tenure.Unavailable) as caught:
            await client.acquire("job", timeout=0.2)
        assert isinstance(caught.value, tenure.Definite)
        assert not client._connection.session.in_flight
        await server.start()
        await client.acquire("job")


async def test_the_number_of_unanswered_operations_is_bounded(server: Double) -> None:
    async with tenure.connect(server.address, in_flight_max=5) as client:
        server.mute = True
        results = await asyncio.gather(
            *(client.check("job", n, timeout=0.3) for n in range(10)), return_exceptions=True
        )
        assert all(isinstance(result, tenure.TenureError) for result in results)
        assert sum(isinstance(result, tenure.Overloaded) for result in results) == 5
        server.mute = False


async def test_a_second_address_takes_over_from_a_silent_one(folder: Path, server: Double) -> None:
    (folder / "b").mkdir()
    async with double(folder / "b") as other:
        other.sessions = server.sessions
        other.leases = server.leases
        async with tenure.connect([server.address, other.address], ttl_ms=3_000) as client:
            lease = await client.acquire("job")
            first = client._connection._stream
            server.mute = True
            await eventually(lambda: other.attaches and not lease.in_jeopardy, timeout_s=4.0)
            assert first is not None
            assert first._superseded
            assert lease.valid
            assert other.attaches[0].session_id == "s1"
            await other.until_held("job")
            await lease.release()


async def test_transfer(server: Double) -> None:
    async with tenure.connect(server.address) as one, tenure.connect(server.address) as two:
        got: list[tenure.Lease] = []
        two.on_granted(got.append)
        lease = await one.acquire("job")
        lost: list[tenure.Lease] = []
        lease.on_lost(lost.append)
        token = await lease.transfer(two.session_id)
        assert not lease.valid
        granted = session_pb2.LeaseGranted(name="job", token=token)
        server.sessions[two.session_id].stream.outbox.put_nowait(  # type: ignore[union-attr]
            session_pb2.ConnectResponse(pushes=[session_pb2.Push(granted=granted)])
        )
        await eventually(lambda: got)
        assert got[0].token == token > lease.token
        assert got[0].valid
        assert not lost


async def test_a_transferred_lease_that_nobody_looks_after_is_given_back(server: Double) -> None:
    async with tenure.connect(server.address) as one, tenure.connect(server.address) as two:
        lease = await one.acquire("job")
        token = await lease.transfer(two.session_id)
        granted = session_pb2.LeaseGranted(name="job", token=token)
        server.push(session_pb2.Push(granted=granted))
        await eventually(lambda: "job" not in server.leases)


async def test_no_socket(folder: Path) -> None:
    with pytest.raises(tenure.ConnectError) as caught:
        await tenure.connect(f"unix:{folder}/none.sock", connect_timeout=0.2)
    assert "there is no such socket" in str(caught.value)
    assert "tenure serve" in str(caught.value)


async def test_a_socket_that_nobody_listens_on(server: Double, folder: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{folder}/dead.sock")
    dead.close()
    with pytest.raises(tenure.ConnectError, match="nobody listens"):
        await tenure.connect(f"unix:{folder}/dead.sock", connect_timeout=0.2)


async def test_a_socket_that_speaks_something_else(folder: Path) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    other = await asyncio.start_unix_server(garbage, f"{folder}/garbage.sock")
    async with other:
        with pytest.raises(tenure.ConnectError):
            await tenure.connect(f"unix:{folder}/garbage.sock", connect_timeout=0.5)


async def test_an_attach_that_never_left_is_told_from_one_that_may_have_arrived(folder: Path, server: Double) -> None:
    """Only the second may have attached a session, and cut it when it was given up."""
    left: list[str] = []

    async def dial(address: str) -> str:
        (where,) = parse_addresses(address)
        with pytest.raises(tenure.ConnectError) as refused:
            await Stream.dial(where, None, session_pb2.Attach(), 0.3, tenure.now, lambda: left.append(address))
        return refused.value.reason

    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(f"{folder}/hung.sock")
        hung.listen()
        await dial(f"unix:{folder}/hung.sock")
    assert not left
    server.mute = True
    assert await dial(server.address) == "NO_ANSWER"
    assert left == [server.address]


async def test_a_slow_start_is_waited_for(folder: Path) -> None:
    server = Double(folder / "late.sock")
    connecting = asyncio.ensure_future(_await(tenure.connect(server.address)))
    await asyncio.sleep(0)
    await server.start()
    client = await connecting
    await client.close()
    await server.stop()


async def test_a_session_that_was_long_in_opening_is_a_fresh_one(server: Double) -> None:
    """As when the cluster has no leader yet: its ttl counts from the try that was answered, not from the first."""
    server.mute = True
    connecting = asyncio.ensure_future(_await(tenure.connect(server.address, ttl_ms=600)))
    await eventually(lambda: len(server.attaches) == 1)
    server.mute = False
    client = await connecting  # by the second try: the first is given up after a second, which is more than the ttl
    assert len(server.attaches) == 2
    assert server.attaches[0].open.request_id == server.attaches[1].open.request_id
    async with client.lease("job"):
        assert client.session_id == "s1"
    assert not server.closed_sessions
    await client.close()


async def _await(connecting: object) -> tenure.Client:
    return await connecting  # type: ignore[misc,no-any-return]


async def test_close_leaves_no_task_behind(server: Double) -> None:
    before = asyncio.all_tasks()
    async with tenure.connect(server.address) as client:
        await client.acquire("job")
        watch = asyncio.ensure_future(anext(client.watch()))
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.wait({watch})
    await eventually(lambda: not {t for t in asyncio.all_tasks() - before if "tenure" in str(t.get_coro())})
    with pytest.raises(tenure.ClientClosed):
        await client.acquire("job")
    await client.close()
