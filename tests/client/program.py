"""Small programs that tests run as processes of their own: ``python -m tests.client.program WHAT ...``.

They print one word a line when something has happened, and are killed, or end, as the test wants it.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import tenure
from tenure.switches import Guard

from tests.waiting import eventually


def say(*words: object) -> None:
    print(*words, flush=True)


async def hold(address: str, name: str) -> None:
    """Holds a lease until it is killed. Its ttl is an hour: only its grace can end it sooner."""
    async with tenure.connect(address, ttl_ms=3_600_000) as client, client.lease(name, wait=10) as lease:
        say("token", lease.token)
        await asyncio.Event().wait()


async def begin(address: str, key: str, on_owner_loss: str) -> None:
    """Begins an attempt and never ends it."""
    async with tenure.connect(address) as client:
        await client.begin(key, on_owner_loss="unknown" if on_owner_loss == "unknown" else "retry")
        say("begun")
        await asyncio.Event().wait()


# ---- jobs ------------------------------------------------------------------------------------------------------

EACH_SECOND: tenure.JobOptions = {
    "owner": "tests",
    "runbook_url": "https://runbooks.test/tick",
    "schedule": timedelta(seconds=1),
    "overlap_policy": "allow",
    "concurrent_max": 10,
}


async def serve(address: str, job: str) -> None:
    """Serves a job. The first attempt stores a checkpoint and hangs; the next one says what it was given, and ends."""
    async with tenure.connect(address) as client:

        @client.job(job)
        async def handler(run: tenure.Run) -> None:
            say("run", run.attempt, (run.last_checkpoint or b"none").decode())
            if run.attempt == 1:
                await run.checkpoint("half")
                say("stored")
                await asyncio.Event().wait()

        await client.work()


def serve_forked(address: str, job: str, file: str, workers: str) -> None:
    """Forked workers that all define and serve one job: each run appends its due time to a file."""

    def worker() -> None:
        # The children are ended with their parent: each of them reads from a pipe that only the parent holds open.
        os.close(write_end)
        signal.alarm(0)
        with tenure.connect_sync(address) as client:

            @client.job(job, **EACH_SECOND)
            def handler(run: tenure.SyncRun) -> None:
                line = f"{run.due_wall_ms}\n".encode()
                out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(out, line)
                os.close(out)

            def until_told() -> None:
                os.read(read_end, 1)
                client.stop_work()

            threading.Thread(target=until_told, daemon=True).start()
            client.work()

    read_end, write_end = os.pipe()
    children = [in_child(worker) for _ in range(int(workers))]
    os.close(read_end)
    say("forked")
    sys.stdin.readline()
    os.close(write_end)
    say(*[reap(pid, 60.0) for pid in children])


# ---- forks -----------------------------------------------------------------------------------------------------


def in_child(body: Callable[[], None], *, clean_exit: bool = False) -> int:
    """Forks; the child runs ``body`` and exits 0 when it found what it expected, 3 otherwise."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(20)  # a child that hangs is a failure, and must not outlive the test
    code = 3
    try:
        body()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        if code or not clean_exit:
            os._exit(code)
    sys.exit(0)


def reap(pid: int, within: float = 10.0) -> int:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        code = look(pid)
        if code is not None:
            return code
        time.sleep(0.005)
    return -1  # it has its own alarm


def look(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


async def reap_async(pid: int) -> int:
    # No thread: a pool's threads would be missing in the next child, and its loop would wait for them at its end.
    for _ in range(2_000):
        code = look(pid)
        if code is not None:
            return code
        await asyncio.sleep(0.005)
    return -1  # it has its own alarm


def expect_forked(act: Callable[[], object]) -> None:
    try:
        act()
    except tenure.ClientForkedError:
        return
    raise AssertionError("the inherited client could be used")


def fork_sync(address: str, rounds: str) -> None:
    """A parent with a synchronous client forks children that try to use it."""
    with tenure.connect_sync(address, ttl_ms=10_000) as client, client.lease("sync", wait=10) as lease:

        def child() -> None:
            if lease.valid or lease.remaining():
                raise AssertionError("the inherited lease is valid")
            expect_forked(lambda: client.acquire("other"))
            expect_forked(lease.release)
            expect_forked(lambda: client.check("sync", lease.token))
            expect_forked(lambda: tenure.connect_sync(address))
            client.close()

        for number in range(int(rounds)):
            children = [in_child(child, clean_exit=number % 2 == 0) for _ in range(4)]
            codes = [reap(pid) for pid in children]
            if any(codes):
                say("round", number, codes)
                raise SystemExit(1)
            if not lease.valid or not lease.check():
                say("the parent lost its lease in round", number)
                raise SystemExit(1)
        say("token", lease.token, "session", client.session_id)
    say("ok")


async def fork_async(address: str, rounds: str) -> None:
    """A parent with an asynchronous client forks from inside a coroutine, also into children that end their loop."""
    async with tenure.connect(address, ttl_ms=10_000) as client, client.lease("async", wait=10) as lease:
        node_session = client.session_id
        for number in range(int(rounds)):
            pids = []
            for _ in range(4):
                pid = os.fork()
                if pid == 0:
                    await _child_of_coroutine(client, lease, address, leave_loop=number % 2 == 0)
                pids.append(pid)
            codes = [await reap_async(pid) for pid in pids]
            if any(codes):
                say("round", number, codes)
                raise SystemExit(1)
            if not lease.valid or not await lease.check() or client.session_id != node_session:
                say("the parent lost its lease in round", number)
                raise SystemExit(1)
        say("token", lease.token, "session", client.session_id)
    say("ok")


async def _child_of_coroutine(client: tenure.Client, lease: tenure.Lease, address: str, *, leave_loop: bool) -> None:
    signal.alarm(20)
    code = 0
    if lease.valid:
        code = 4
    for act in (lambda: client.acquire("other"), lease.release, lambda: client.check("async", 1)):
        try:
            await act()
            code = 5
        except tenure.ClientForkedError:
            pass
    try:
        await tenure.connect(address)
        code = 6
    except tenure.ClientForkedError:
        pass
    if leave_loop and code == 0:
        # Ends like any program: the lease's context, the client's, and the event loop with all its tasks.
        raise SystemExit(0)
    os._exit(code)


async def _child_of_handler(client: tenure.Client, run: tenure.Run, guard: Guard) -> None:
    signal.alarm(20)
    try:
        await run.checkpoint("x")
    except tenure.ClientForkedError:
        await guard.__aexit__(None, None, None)
        # It leaves its parent's guard where it is, and ends like any program.
        raise SystemExit(4 if run.valid or guard not in client._worker.guards else 0) from None
    os._exit(5)


async def fork_work(address: str, rounds: str) -> None:
    """Handlers that fork, one in the loop and one in a thread. What runs here is not cleaned up in the children."""
    async with tenure.connect(address) as client:
        parent = os.getpid()
        waiting = asyncio.Event()

        @client.job("beside")
        async def beside(run: tenure.Run) -> None:
            try:
                await waiting.wait()
            finally:
                say("cleanup", "here" if os.getpid() == parent else "in a child")

        @client.job("thread")
        def in_thread(run: tenure.SyncRun) -> None:
            def child() -> None:
                if run.valid:
                    raise AssertionError("the inherited run is valid")
                expect_forked(lambda: run.checkpoint("x"))

            say("thread", *[reap(in_child(child)) for _ in range(int(rounds))])

        @client.job("loop")
        async def in_loop(run: tenure.Run) -> None:
            codes = []
            guard = client.guard("loop")
            async with guard:
                for _ in range(int(rounds)):
                    pid = os.fork()
                    if pid == 0:
                        await _child_of_handler(client, run, guard)
                    codes.append(await reap_async(pid))
            say("loop", *codes)
            if not run.valid:
                raise AssertionError("the run is not valid any more")
            await run.checkpoint("mine")

        async def succeeded(job: str) -> bool:
            return (await client.occurrences(job))[0].state == "succeeded"

        for job in ("beside", "thread", "loop"):
            await client.apply_job(job, owner="tests", runbook_url="https://runbooks.test/fork")
        working = asyncio.create_task(client.work(slots=3))
        await client.trigger_job("beside")
        for job in ("thread", "loop"):
            await client.trigger_job(job)
            await eventually(functools.partial(succeeded, job))
        waiting.set()
        client.stop_work()
        await working
        say("states", *[(await client.occurrences(job))[0].state for job in ("beside", "thread", "loop")])


def fork_first(address: str) -> None:
    """Children that were forked before the parent used a client connect by themselves."""

    def child() -> None:
        with tenure.connect_sync(address) as client, client.lease(f"child-{os.getpid()}") as lease:
            if not lease.check():
                raise AssertionError("not held")

    children = [in_child(child) for _ in range(3)]
    say(*[reap(pid) for pid in children])


def fork_multiprocessing(address: str) -> None:
    """A fork by multiprocessing, as workers of a server are made."""
    with tenure.connect_sync(address) as client, client.lease("mp") as lease:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def work() -> None:
            try:
                client.check("mp", lease.token)
            except tenure.ClientForkedError:
                queue.put("forked")

        process = context.Process(target=work)
        process.start()
        say(queue.get())
        process.join()
        say("valid" if lease.check() else "stale")


PROGRAMS: dict[str, Callable[..., object]] = {
    "hold": hold,
    "begin": begin,
    "serve": serve,
    "serve-forked": serve_forked,
    "fork-sync": fork_sync,
    "fork-async": fork_async,
    "fork-first": fork_first,
    "fork-work": fork_work,
    "fork-multiprocessing": fork_multiprocessing,
}


def main() -> None:
    program = PROGRAMS[sys.argv[1]]
    result = program(*sys.argv[2:])
    if asyncio.iscoroutine(result):
        asyncio.run(result)


if __name__ == "__main__":
    main()
