"""The client and a real sidecar process, with real kills and real forks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tenure

from tests.client.sidecar_process import SidecarProcess, nothing_left, sidecar_process
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def sidecar(folder: Path) -> AsyncIterator[SidecarProcess]:
    async with sidecar_process(folder) as running:
        yield running


async def start_program(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.client.program",
        *arguments,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"},
        stdout=asyncio.subprocess.PIPE,
    )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


async def output(process: asyncio.subprocess.Process, timeout: float = 60.0) -> str:
    async with asyncio.timeout(timeout):
        out, _ = await process.communicate()
    return out.decode()


# ---- leases ----------------------------------------------------------------------------------------------------


async def test_the_life_of_a_lease(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address, agent="tester", version="1", labels={"a": "b"}) as client:
        assert client.node_id == "n1"
        async with client.lease("job", metadata="first") as lease:
            assert lease.valid
            assert await lease.check()
            info = await client.get_lease("job")
            assert [holder.token for holder in info.holders] == [lease.token]
            assert info.holders[0].session_id == client.session_id
            assert info.holders[0].metadata == "first"
            assert info.holders[0].agent == "tester"
            assert [each.name async for each in client.list_leases("j")] == ["job"]
        assert not (await client.get_lease("job")).held
        assert not await client.check("job", lease.token)
        async with client.lease("job") as again:
            assert again.token > lease.token
            # L14: the name of the holder is the same, the token decides.
            assert not await client.check("job", lease.token)
            assert await client.check("job", again.token)


async def test_two_clients_contend(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as one, tenure.connect(sidecar.address) as two:
        first = await one.acquire("job")
        with pytest.raises(tenure.LeaseHeld) as caught:
            await two.acquire("job")
        assert caught.value.token == first.token
        assert caught.value.holder == one.session_id
        with pytest.raises(tenure.LeaseHeld):
            await two.acquire("job", wait=0.05)
        waiting = asyncio.create_task(two.acquire("job", wait=20))

        async def in_line() -> bool:
            return len((await one.get_lease("job")).waiters) == 1

        await eventually(in_line)
        await first.release()
        second = await waiting
        assert second.token > first.token
        await second.release()


async def test_names_and_bounds_are_refused_with_the_field(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        for name in ("", "x" * 300):
            with pytest.raises(tenure.InvalidArgument) as caught:
                await client.acquire(name)
            assert caught.value.field == "name"
        with pytest.raises(tenure.InvalidArgument):
            await client.acquire("job", priority=101)
        with pytest.raises(tenure.InvalidArgument):
            await client.begin("  ")
        await client.acquire("job")
    with pytest.raises(tenure.NotFound):
        await tenure.connect(sidecar.address, tenant="nobody")


async def test_a_killed_holder_is_replaced_within_its_grace(sidecar: SidecarProcess) -> None:
    process = await start_program("hold", sidecar.address, "job")
    try:
        word, token = (await line(process)).split()
        assert word == "token"
        async with tenure.connect(sidecar.address) as client:
            waiting = asyncio.create_task(client.acquire("job", wait=20))

            async def in_line() -> bool:
                return len((await client.get_lease("job")).waiters) == 1

            await eventually(in_line)
            process.kill()
            lease = await waiting
            assert lease.token > int(token)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_transfer_to_one_that_waits_and_to_one_that_does_not(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as one, tenure.connect(sidecar.address) as two:
        got: list[tenure.Lease] = []
        two.on_granted(got.append)
        lease = await one.acquire("job")
        token = await lease.transfer(two.session_id)
        await eventually(lambda: got)
        assert got[0].token == token > lease.token
        assert await got[0].check()
        waiting = asyncio.create_task(one.acquire("job", wait=20))

        async def in_line() -> bool:
            return len((await one.get_lease("job")).waiters) == 1

        await eventually(in_line)
        token = await got[0].transfer(one.session_id)
        back = await waiting
        assert back.token == token
        assert await back.check()
        with pytest.raises(tenure.Definite):
            await back.transfer("s999-none")
        assert back.valid
        assert got == [got[0]]
        await back.release()
    await nothing_left(sidecar.address)


async def test_a_killed_sidecar_that_is_back_in_time_finds_the_same_token(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        lost: list[tenure.Lease] = []
        async with client.lease("job") as lease:
            lease.on_lost(lost.append)
            session, token = client.session_id, lease.token
            await sidecar.kill()
            await eventually(lambda: lease.in_jeopardy)
            waiting = asyncio.create_task(client.get_lease("job", timeout=30))
            await sidecar.start()
            info = await waiting
            assert [holder.token for holder in info.holders] == [token]
            await eventually(lambda: not lease.in_jeopardy)
            assert lease.valid
            assert client.session_id == session
            assert await lease.check()
        assert not lost
    await nothing_left(sidecar.address)


async def test_a_sidecar_that_is_told_to_stop_leaves_the_leases_alone(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address, ttl_ms=30_000) as client, client.lease("job") as lease:
        token = lease.token
        watch = client.watch(1)
        await anext(watch)
        # It goes on serving the agents it has; a second signal ends it at once.
        sidecar.signal(signal.SIGTERM)
        assert await lease.check()
        await sidecar.kill()
        await sidecar.start()
        await eventually(lambda: not lease.in_jeopardy and client.node_id, timeout_s=15.0)
        assert await lease.check()
        assert lease.token == token
        await watch.aclose()


async def test_a_stopped_sidecar_costs_the_lease_in_time(sidecar: SidecarProcess) -> None:
    """L01 with a real process: SIGSTOP, so that it accepts bytes and never answers."""
    async with tenure.connect(sidecar.address, ttl_ms=1_500, cancel_margin_ms=300) as client:
        try:
            with pytest.raises(tenure.LeaseLost):
                async with client.lease("job") as lease:
                    sidecar.signal(signal.SIGSTOP)
                    try:
                        await asyncio.Event().wait()
                    finally:
                        assert tenure.now() < lease.safe_until
        finally:
            sidecar.signal(signal.SIGCONT)
        async with client.lease("job", wait=10) as again:
            assert again.token > lease.token
            assert not lease.valid


async def test_random_cancellations_leave_nothing_behind(sidecar: SidecarProcess) -> None:
    """L12."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with tenure.connect(sidecar.address) as one, tenure.connect(sidecar.address) as two:

        async def worker(client: tenure.Client, name: str, wait: float, work: float) -> None:
            if rng.random() < 0.5:
                async with client.lease(name, wait=wait):
                    await asyncio.sleep(work)
            else:
                lease = await client.acquire(name, wait=wait)
                try:
                    await asyncio.sleep(work)
                finally:
                    await lease.release()

        tasks = [
            asyncio.create_task(
                worker(rng.choice([one, two]), rng.choice("abcd"), rng.choice([0, 5]), rng.random() / 100)
            )
            for _ in range(400)
        ]
        for task in rng.sample(tasks, 300):
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 200)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        allowed = (asyncio.CancelledError, tenure.LeaseHeld)
        strange = [result for result in results if result is not None and not isinstance(result, allowed)]
        assert not strange, (seed, strange)
        await nothing_left(sidecar.address)


async def test_watch_goes_on_after_a_restart_without_a_gap(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        watch = client.watch(1, kinds=[tenure.EventKind.LEASE_GRANTED], subject_prefix="job")
        await (await client.acquire("job-1")).release()
        first = await anext(watch)
        assert first.kind is tenure.EventKind.LEASE_GRANTED
        await sidecar.kill()
        await sidecar.start()
        await (await client.acquire("job-2", timeout=30)).release()
        await (await client.acquire("other")).release()
        await (await client.acquire("job-3")).release()
        async with asyncio.timeout(20):
            assert [(await anext(watch)).subject for _ in range(2)] == ["job-2", "job-3"]
        await watch.aclose()


async def test_watch_from_now_on_misses_nothing_that_comes_after_it(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        await (await client.acquire("before")).release()
        watch = client.watch(subject_prefix="after")
        next_one = asyncio.ensure_future(anext(watch))
        await eventually(lambda: watch.revision > 0)
        await (await client.acquire("after")).release()
        assert (await next_one).subject == "after"
        await watch.aclose()


async def test_observe(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        seen = client.observe("job")
        async with asyncio.timeout(20):
            assert not (await anext(seen)).held
            lease = await client.acquire("job")
            while not (info := await anext(seen)).held:
                pass
            assert info.holders[0].token == lease.token
            await lease.release()
            while (await anext(seen)).held:
                pass


# ---- dedup -----------------------------------------------------------------------------------------------------


async def test_begin_complete_replay(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        attempt = await client.begin("key", {"a": 1, "b": [2, 3]})
        assert isinstance(attempt, tenure.Attempt)
        assert attempt.number == 1
        running = await client.begin("key", {"b": [2, 3], "a": 1})
        assert isinstance(running, tenure.InProgress)
        with pytest.raises(tenure.RecordMismatch):
            await client.begin("key", {"a": 2})
        with pytest.raises(tenure.InvalidArgument):
            await attempt.complete(b"x" * 70_000)
        waiting = asyncio.create_task(client.begin("key", {"a": 1, "b": [2, 3]}, wait=10))
        await attempt.complete(b"done")
        await attempt.complete(b"done")
        with pytest.raises(tenure.RecordMismatch):
            await attempt.complete(b"other")
        replayed = await waiting
        assert isinstance(replayed, tenure.Completed)
        assert replayed.result == b"done"
        record = await client.get_record("key")
        assert record.state is tenure.RecordState.COMPLETED


async def test_failures(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        attempt = await client.begin("key")
        assert isinstance(attempt, tenure.Attempt)
        await attempt.fail("not now", retryable=True)
        second = await client.begin("key")
        assert isinstance(second, tenure.Attempt)
        assert second.number == 2
        with pytest.raises(tenure.AttemptStale):
            await attempt.complete(b"late")
        await second.fail("never", retryable=False)
        failed = await client.begin("key")
        assert isinstance(failed, tenure.Failed)
        assert failed.error == "never"


async def test_a_fence_refuses_a_completion_under_a_stale_token(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        lease = await client.acquire("job")
        attempt = await client.begin("key", fence=lease)
        assert isinstance(attempt, tenure.Attempt)
        await lease.release()
        with pytest.raises(tenure.StaleToken):
            await attempt.complete(b"late")


@pytest.mark.parametrize("policy", ["retry", "unknown"])
async def test_the_owner_of_an_attempt_is_killed(sidecar: SidecarProcess, policy: str) -> None:
    process = await start_program("begin", sidecar.address, "key", policy)
    assert await line(process) == "begun"
    process.kill()
    await process.wait()
    async with tenure.connect(sidecar.address) as client:
        begun = await client.begin("key", on_owner_loss="unknown" if policy == "unknown" else "retry", wait=20)
        if policy == "retry":
            assert isinstance(begun, tenure.Attempt)
            assert begun.number == 2
        else:
            assert isinstance(begun, tenure.UnknownOutcome)


async def test_an_idempotent_function_takes_effect_once(sidecar: SidecarProcess) -> None:
    effects: list[str] = []
    async with tenure.connect(sidecar.address) as one, tenure.connect(sidecar.address) as two:

        def make(client: tenure.Client, wait: float) -> object:
            @client.idempotent(key=lambda order: f"charge/{order['id']}", wait=wait)
            async def charge(order: dict[str, object]) -> dict[str, object]:
                effects.append(str(order["id"]))
                order["id"] = "changed by the function"
                await asyncio.sleep(0)
                return {"charged": (1, 2)}

            return charge

        charges = [make(one, 10), make(two, 10)]
        results = await asyncio.gather(*(charges[n % 2]({"id": "7"}) for n in range(20)))  # type: ignore[operator]
        assert effects == ["7"]
        assert all(result == {"charged": [1, 2]} for result in results)


async def test_an_idempotent_function_that_fails_runs_again_and_one_that_fails_for_good_does_not(
    sidecar: SidecarProcess,
) -> None:
    calls = 0
    async with tenure.connect(sidecar.address) as client:

        @client.idempotent(key=lambda n: f"k{n}", final_errors=(ValueError,))
        async def work(n: int) -> int:
            nonlocal calls
            calls += 1
            if n == 1 and calls == 1:
                raise OSError("try again")
            if n == 2:
                raise ValueError("never")
            return n

        with pytest.raises(OSError, match="try again"):
            await work(1)
        assert await work(1) == 1
        assert await work(1) == 1
        assert calls == 2
        with pytest.raises(ValueError, match="never"):
            await work(2)
        with pytest.raises(tenure.RecordFailed, match="ValueError: never"):
            await work(2)
        assert calls == 3


async def test_a_result_that_cannot_be_stored_is_not_done_again(sidecar: SidecarProcess) -> None:
    calls = 0
    async with tenure.connect(sidecar.address) as client:

        @client.idempotent(key=lambda: "key")
        async def work() -> object:
            nonlocal calls
            calls += 1
            return object()

        with pytest.raises(TypeError):
            await work()
        with pytest.raises(tenure.RecordFailed, match="its result cannot be stored"):
            await work()
        assert calls == 1


async def test_a_plain_function_that_is_cancelled_counts_when_it_has_run(sidecar: SidecarProcess) -> None:
    started, go = threading.Event(), threading.Event()
    async with tenure.connect(sidecar.address) as client:

        @client.idempotent(key=lambda: "key")
        def work() -> str:
            started.set()
            go.wait(20)
            return "done"

        task = asyncio.create_task(_as_coroutine(work()))
        await asyncio.to_thread(started.wait)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await work() == "done"
        assert (await client.get_record("key")).attempt == 1


async def _as_coroutine(awaitable: object) -> object:
    return await awaitable  # type: ignore[misc]


async def test_a_timeout_around_an_idempotent_function_stays_a_timeout(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:

        @client.idempotent(key=lambda: "key", on_owner_loss="unknown")
        async def work() -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await work()
        # It was stopped in the middle of what must not be done twice.
        with pytest.raises(tenure.RecordFailed, match="interrupted"):
            await work()


# ---- forks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fork-sync", "fork-async"])
async def test_forked_children_cannot_use_or_disturb_the_client(sidecar: SidecarProcess, kind: str) -> None:
    """G02."""
    async with tenure.connect(sidecar.address, session=False) as observer:
        watch = observer.watch(kinds=[tenure.EventKind.SESSION_DETACHED, tenure.EventKind.LEASE_RELEASED])
        seen: list[tenure.Event] = []

        async def collect() -> None:
            async for event in watch:
                seen.append(event)

        async with tenure.connect(sidecar.address):
            pass  # so that there is a revision to watch from
        collecting = asyncio.create_task(collect())
        await eventually(lambda: watch.revision > 0)
        out = await output(await start_program(kind, sidecar.address, "25"), timeout=120)
        assert out.splitlines()[-1:] == ["ok"], out
        session = out.split()[out.split().index("session") + 1]
        await eventually(lambda: any(event.session_id == session for event in seen))
        collecting.cancel()
        await asyncio.wait({collecting})
        # The parent's stream never broke, and its lease was given back once: by itself.
        kinds = [event.kind for event in seen if event.session_id == session]
        assert kinds == [tenure.EventKind.LEASE_RELEASED], (kinds, out)


async def test_children_forked_before_the_first_use_connect_by_themselves(sidecar: SidecarProcess) -> None:
    assert (await output(await start_program("fork-first", sidecar.address))).split() == ["0", "0", "0"]


async def test_multiprocessing_children(sidecar: SidecarProcess) -> None:
    out = await output(await start_program("fork-multiprocessing", sidecar.address))
    assert out.split() == ["forked", "valid"], out


# ---- the synchronous client ------------------------------------------------------------------------------------


async def test_the_synchronous_client(sidecar: SidecarProcess) -> None:
    await asyncio.to_thread(_synchronously, sidecar.address)
    await nothing_left(sidecar.address)


def _synchronously(address: str) -> None:
    effects: list[int] = []
    with tenure.connect_sync(address, agent="sync") as client:
        with client.lease("job", metadata="m") as lease:
            assert lease.valid
            assert lease.check()
            with pytest.raises(tenure.LeaseHeld):
                client.acquire("job")
            assert [each.name for each in client.list_leases()] == ["job"]
            assert client.get_lease("job").holders[0].token == lease.token
            events = client.watch(1, kinds=[tenure.EventKind.LEASE_GRANTED])
            assert next(iter(events)).token == lease.token
            with pytest.raises(RuntimeError, match="leave the body first"):
                client.close()
        assert not lease.valid
        held = client.acquire("two")
        held.release()
        held.release()

        @client.idempotent(key=lambda n: f"n{n}")
        def work(n: int) -> int:
            effects.append(threading.get_ident())
            return n * 2

        assert work(4) == 8
        assert work(4) == 8
        assert effects == [threading.get_ident()]
        attempt = client.begin("k", {"x": 1})
        assert isinstance(attempt, tenure.SyncAttempt)
        attempt.fail("no", retryable=True)
        again = client.begin("k", {"x": 1})
        assert isinstance(again, tenure.SyncAttempt)
        again.complete(b"r")
        assert client.get_record("k").result == b"r"
    with pytest.raises(tenure.ClientClosed):
        client.acquire("job")
    client.close()


async def test_a_lost_lease_of_a_synchronous_body_is_reported_at_its_end(sidecar: SidecarProcess) -> None:
    def body() -> None:
        lost = threading.Event()
        with tenure.connect_sync(sidecar.address, ttl_ms=1_000) as client:
            with pytest.raises(tenure.LeaseLost), client.lease("job") as lease:
                lease.on_lost(lambda _: lost.set())
                sidecar.signal(signal.SIGSTOP)
                assert lost.wait(20)
                assert not lease.valid
                with pytest.raises(tenure.LeaseLost):
                    lease.raise_if_lost()
                sidecar.signal(signal.SIGCONT)
            with client.lease("job", wait=10) as again:
                assert again.token > lease.token

    await asyncio.to_thread(body)
