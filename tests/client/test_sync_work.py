"""The synchronous client as a worker, against a double that runs in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tenure
from tenure.v1 import switch_pb2

from tests.client.double import Double
from tests.waiting import eventually


class Worker:
    """A thread that serves ``digest``; its handler ends when it is told to, or when its run is cancelled."""

    def __init__(self, server: Double) -> None:
        self.go = threading.Event()
        self.runs: list[tenure.SyncRun] = []
        self.causes: list[str | None] = []
        self.client = tenure.connect_sync(server.address)
        self.client.job("digest")(self.handle)
        self.thread = threading.Thread(target=self.client.work, kwargs={"slots": 2})

    def handle(self, run: tenure.SyncRun) -> str:
        self.runs.append(run)
        while not self.go.wait(0.005) and not run.cancelled:
            pass
        self.causes.append(run.interrupt_cause)
        return "done"


async def started(server: Double) -> Worker:
    worker = await asyncio.to_thread(Worker, server)
    worker.thread.start()
    await eventually(lambda: server.served)
    return worker


async def test_stop_work_from_another_thread_ends_it_in_order(server: Double) -> None:
    worker = await started(server)
    assert server.served == [("s1", ("digest",), 2)]
    run = server.assign("s1", payload=b"p")
    await eventually(lambda: worker.runs)
    assert worker.runs[0].payload == b"p"
    worker.client.stop_work()
    await eventually(lambda: server.served[-1][2] == 0)
    assert worker.thread.is_alive()
    worker.go.set()
    await asyncio.to_thread(worker.thread.join)
    assert (await server.until_reported(run))[0] == "complete"
    assert worker.causes == [None]
    await asyncio.to_thread(worker.client.close)
    worker.client.stop_work()  # harmless


async def test_close_ends_handlers_and_work(server: Double) -> None:
    worker = await started(server)
    run = server.assign("s1")
    await eventually(lambda: worker.runs)
    await asyncio.to_thread(worker.client.close)
    await asyncio.to_thread(worker.thread.join)
    assert worker.causes == ["client_closed"]
    assert server.reported(run) == ["complete"]
    assert server.closed_sessions == ["s1"]


async def test_close_ends_a_handler_that_is_in_the_body_of_a_lease(server: Double) -> None:
    def body() -> None:
        with tenure.connect_sync(server.address) as client:

            @client.job("digest")
            def handler(run: tenure.SyncRun) -> None:
                with pytest.raises(RuntimeError, match="inside a handler"):
                    client.close()
                with client.lease("under the run") as lease:
                    assert lease.valid
                    assert run.wait_cancelled(20)

            thread = threading.Thread(target=client.work)
            thread.start()
            assert held.wait(20)
        thread.join(20)
        assert not thread.is_alive()

    held = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(body))
    await eventually(lambda: server.served)
    server.assign("s1")
    await server.until_held("under the run")
    held.set()
    await running
    assert "under the run" not in server.leases


async def test_errors_of_work_reach_the_caller(server: Double) -> None:
    def body() -> None:
        with tenure.connect_sync(server.address) as client:
            with pytest.raises(ValueError, match="no handler"):
                client.work()

            async def coroutine(run: tenure.Run) -> None: ...

            with pytest.raises(TypeError, match="asynchronous client"):
                client.job("digest")(coroutine)
            with pytest.raises(ValueError, match="misfire_policy"):
                client.job("digest", misfire_policy="sometimes")
        with pytest.raises(tenure.ClientClosed):
            client.work()

    await asyncio.to_thread(body)


async def test_switch_states(server: Double) -> None:
    def body(check: Callable[[tenure.SyncClient], Any]) -> Any:
        with tenure.connect_sync(server.address) as client:
            return check(client)

    assert await asyncio.to_thread(body, lambda client: client.switch_state()) is tenure.SwitchState.ACTIVE
    server.switch(switch_pb2.SWITCH_MODE_DRAIN, "digest")
    assert await asyncio.to_thread(body, lambda client: client.switch_state("digest")) is tenure.SwitchState.DRAINING


PROGRAM = """
import sys, tenure
with tenure.connect_sync(sys.argv[1]) as client:
    @client.job("digest")
    def handler(run):
        run.wait_cancelled(60)
        return run.interrupt_cause
    try:
        client.work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("times", [1, 2])
async def test_an_interrupted_program_ends_in_order_and_at_the_second_time_at_once(server: Double, times: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, server.address, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        await eventually(lambda: server.served, timeout_s=30)
        run = server.assign("s1")
        await eventually(lambda: server.operations("serve_jobs"))
        process.send_signal(signal.SIGINT)
        await eventually(lambda: server.served[-1][2] == 0)
        if times == 1:
            assert not server.reported(run)
            server.interrupt(run, "operator")
            what, request = await server.until_reported(run)
            assert (what, request.result) == ("complete", b"operator")
        else:
            process.send_signal(signal.SIGINT)
            what, request = await server.until_reported(run)
            assert (what, request.result) in {("complete", b"stopped"), ("complete", b"client_closed")}
        out, _ = await asyncio.wait_for(process.communicate(), 30)
        assert out == b"interrupted\n"
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
