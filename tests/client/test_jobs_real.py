"""Jobs, runs and switches by the client and real sidecars, with real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Unpack

import pytest
import tenure
from tenure.v1 import job_pb2, job_pb2_grpc

from tests.client.program import EACH_SECOND
from tests.client.sidecar_process import SidecarProcess, sidecar_process
from tests.sidecars import ROOT, Process, all_ready, three
from tests.waiting import eventually


def options(**more: Unpack[tenure.JobOptions]) -> tenure.JobOptions:
    """Of a job that is only triggered, unless ``more`` says otherwise."""
    return {"owner": "tests", "runbook_url": "https://runbooks.test/job", **more}


MANUAL = options()


@pytest.fixture
async def sidecar(folder: Path) -> AsyncIterator[SidecarProcess]:
    async with sidecar_process(folder) as running:
        yield running


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Process]]:
    processes = list(three(folder).values())
    try:
        for process in processes:
            process.start()
        await all_ready(processes)
        yield processes
    finally:
        for process in processes:
            if process.process is not None:
                process.process.send_signal(signal.SIGCONT)
            process.kill()


@asynccontextmanager
async def working(client: tenure.Client, **options: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(client.work(**options))
    try:
        yield
    finally:
        client.stop_work()
        await asyncio.wait({task})
    task.result()


async def until_served(client: tenure.Client, job: str, workers: int = 1) -> None:
    async def served() -> bool:
        try:
            return (await client.get_job(job)).workers >= workers
        except tenure.NotFound:
            return False  # its worker is about to create it

    await eventually(served, timeout_s=20.0, what=f"{job} has {workers} workers")


async def until_ended(client: tenure.Client, job: str, *, state: str) -> tenure.OccurrenceInfo:
    """The newest occurrence, once it is in this state."""
    found: list[tenure.OccurrenceInfo] = []

    async def ended() -> bool:
        try:
            found[:] = await client.occurrences(job, limit=1)
        except tenure.Unavailable:
            return False  # there is no leader for a moment
        return bool(found) and found[0].state == state

    await eventually(ended, timeout_s=30.0, what=f"{job} {state}")
    return found[0]


@asynccontextmanager
async def program(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.client.program", *arguments,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


# ---- each due time once ----------------------------------------------------------------------------------------


async def test_three_clients_at_three_sidecars_run_each_due_time_once(nodes: list[Process]) -> None:
    runs: list[tuple[int, str]] = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(tenure.connect(f"unix:{node.socket}")) for node in nodes]
        assert [client.node_id for client in clients] == ["n1", "n2", "n3"]
        for client in clients:

            @client.job("tick", **EACH_SECOND)
            async def handler(run: tenure.Run, node: str = client.node_id) -> str:
                assert run.valid
                runs.append((run.due_wall_ms, node))
                return node

            await stack.enter_async_context(working(client))
        await eventually(lambda: len(runs) >= 6, timeout_s=30.0)
        job = await clients[0].get_job("tick")
        assert (job.revision, job.owner) == (1, "tests")
        occurrences = await clients[2].occurrences("tick")
    dues = sorted(due for due, _ in runs)
    assert dues == list(range(dues[0], dues[-1] + 1, 1_000))
    assert len({node for _, node in runs}) == 3  # whoever has had the fewest is given the next
    assert {each.state for each in occurrences} <= {"succeeded", "running", "pending"}


async def test_forked_workers_of_three_processes_are_one_schedule(sidecar: SidecarProcess, folder: Path) -> None:
    """C24."""
    file = folder / "runs"
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(program("serve-forked", sidecar.address, "tick", str(file), "4"))
            for _ in range(3)
        ]
        client = await stack.enter_async_context(tenure.connect(sidecar.address))

        async def defined() -> bool:
            try:
                return (await client.get_job("tick")).workers == 12
            except tenure.NotFound:
                return False

        await eventually(defined, timeout_s=60.0, what="twelve workers")
        served_from_ms = round(datetime.now(UTC).timestamp() * 1000)

        def dues() -> list[int]:
            found = [int(line) for line in file.read_text().split()] if file.exists() else []
            return sorted(due for due in found if due > served_from_ms)

        await eventually(lambda: len(dues()) >= 20, timeout_s=60.0, what="twenty due times")
        assert (await client.get_job("tick")).revision == 1  # one create, eleven that changed nothing
        for pod in pods:
            assert pod.stdin is not None
            pod.stdin.write(b"\n")
        assert [(await line(pod), await line(pod)) for pod in pods] == [("forked", "0 0 0 0")] * 3
        found = dues()
        assert found == list(range(found[0], found[-1] + 1, 1_000))
        # A definition that differs is a conflict, and nobody's win.
        other: tenure.JobOptions = {**EACH_SECOND, "schedule": timedelta(seconds=2)}
        client.job("tick", **other)(lambda run: None)
        with pytest.raises(tenure.JobConflict):
            await client.work()
        assert (await client.get_job("tick")).revision == 1


# ---- holders that die, hang and are cut off --------------------------------------------------------------------


async def test_a_killed_holder_is_followed_by_another_with_its_checkpoint(sidecar: SidecarProcess) -> None:
    async with (
        tenure.connect(sidecar.address) as client,
        program("serve", sidecar.address, "digest") as one,
        program("serve", sidecar.address, "digest") as two,
    ):
        await client.apply_job("digest", **MANUAL)
        await until_served(client, "digest", workers=2)
        await client.trigger_job("digest")
        said = {asyncio.create_task(line(process)): process for process in (one, two)}
        (first,), _ = await asyncio.wait(said, return_when=asyncio.FIRST_COMPLETED)
        holder = said.pop(first)
        assert first.result() == "run 1 none"
        assert await line(holder) == "stored"
        holder.kill()
        ((second, _),) = said.items()
        assert await second == "run 2 half"
        occurrence = await until_ended(client, "digest", state="succeeded")
        assert occurrence.attempt == 2


async def test_an_interrupt_cancels_the_handler_and_is_acknowledged(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        runs: list[tenure.Run] = []

        @client.job("digest", **MANUAL)
        async def handler(run: tenure.Run) -> None:
            runs.append(run)
            await asyncio.Event().wait()

        async with working(client):
            await until_served(client, "digest")
            await client.trigger_job("digest")
            await eventually(lambda: runs)
            request = job_pb2.InterruptRunRequest(
                tenant="default", run_id=runs[0].run_id, actor="me", reason="enough", request_id="i"
            )
            stub = job_pb2_grpc.JobServiceStub(client._connection.channel())
            await stub.InterruptRun(request, timeout=10)
            occurrence = await until_ended(client, "digest", state="cancelled")
            assert (runs[0].interrupt_cause, runs[0].interrupt_reason) == ("operator", "enough")
            assert "operator" in occurrence.reason
            shown, text = await client.explain("digest")
            assert (shown[0].due_wall_ms, shown[0].attempt) == (runs[0].due_wall_ms, 1)
            assert text


async def test_a_timeout_interrupts_and_the_next_attempt_is_another_run(sidecar: SidecarProcess) -> None:
    async with tenure.connect(sidecar.address) as client:
        causes: list[str | None] = []

        @client.job("digest", **options(run_timeout=1.0, retry_initial=0.1, attempts_max=2))
        async def handler(run: tenure.Run) -> str:
            try:
                if run.attempt == 1:
                    await asyncio.Event().wait()
            finally:
                causes.append(run.interrupt_cause)
            return str(run.attempt)

        async with working(client):
            await until_served(client, "digest")
            await client.trigger_job("digest")
            occurrence = await until_ended(client, "digest", state="succeeded")
        assert causes == ["timeout", None]
        assert occurrence.attempt == 2


@pytest.mark.parametrize("finishes", [False, True])
async def test_a_hung_sidecar_stops_the_run_and_takes_its_report_when_it_is_back(
    sidecar: SidecarProcess, finishes: bool
) -> None:
    """K02: guarded work stops when nothing is known for longer than the staleness. The session lives on: its holder's
    word about its run counts, be it that it has stopped, or that it was done."""
    async with tenure.connect(sidecar.address, ttl_ms=60_000, switch_staleness=1.0) as client:
        causes: list[str | None] = []
        attempts: list[int] = []

        @client.job("digest", **options(retry_initial=0.1, attempts_max=3))
        async def handler(run: tenure.Run) -> str:
            attempts.append(run.attempt)
            if run.attempt == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    causes.append(run.interrupt_cause)
                    if not finishes:
                        raise
            return f"attempt {run.attempt}"

        async def guarded() -> None:
            async with client.guard("digest"):
                await asyncio.Event().wait()

        async with working(client):
            await until_served(client, "digest")
            await client.trigger_job("digest")
            await eventually(lambda: attempts)
            guard = asyncio.create_task(guarded())
            await eventually(lambda: client._worker.guards)
            sidecar.signal(signal.SIGSTOP)
            try:
                with pytest.raises(tenure.SwitchStateUnknown):
                    await guard
                await eventually(lambda: causes == ["switch_state_unknown"])
                assert client.switch_state() is tenure.SwitchState.UNKNOWN
            finally:
                sidecar.signal(signal.SIGCONT)
            occurrence = await until_ended(client, "digest", state="succeeded")
            assert occurrence.attempt == (1 if finishes else 2)
            await eventually(lambda: client.switch_state() is tenure.SwitchState.ACTIVE)


async def test_a_holder_that_was_cut_off_is_followed_and_its_late_word_does_not_count(nodes: list[Process]) -> None:
    async with AsyncExitStack() as stack:
        one, two, three = [
            await stack.enter_async_context(tenure.connect(f"unix:{node.socket}", ttl_ms=2_000)) for node in nodes
        ]
        runs: list[tuple[str, tenure.Run]] = []
        causes: list[str | None] = []

        async def handler(run: tenure.Run, name: str) -> str:
            runs.append((name, run))
            if run.attempt == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    causes.append(run.interrupt_cause)
                    return "late"  # swallowed: it says that it was done
            return "in time"

        async def by_one(run: tenure.Run) -> str:
            return await handler(run, "one")

        async def by_two(run: tenure.Run) -> str:
            return await handler(run, "two")

        one.job("digest", **MANUAL)(by_one)
        two.job("digest", **MANUAL)(by_two)
        await stack.enter_async_context(working(one))
        await until_served(three, "digest")
        await three.trigger_job("digest")
        await eventually(lambda: runs)
        await stack.enter_async_context(working(two))
        await until_served(three, "digest", workers=2)
        stopped = nodes[0].process
        assert stopped is not None
        stopped.send_signal(signal.SIGSTOP)
        occurrence = await until_ended(three, "digest", state="succeeded")
        assert occurrence.result == b""  # listed without
        assert [(name, run.attempt) for name, run in runs] == [("one", 1), ("two", 2)]
        # Cancelled before the other could begin.
        assert causes
        assert causes[0] in ("session_in_danger", "switch_state_unknown")
        assert not runs[0][1].valid
        assert runs[1][1].token > runs[0][1].token
        stopped.send_signal(signal.SIGCONT)
        await eventually(lambda: one.node_id == "n1" and one.session_id not in ("", runs[0][1].session_id), 30.0)
        shown, _ = await three.explain("digest")
        assert (shown[0].state, shown[0].attempt, shown[0].result) == ("succeeded", 2, b"in time")


# ---- the kill switch -------------------------------------------------------------------------------------------


async def test_a_kill_of_the_fleet_stops_everything_and_lets_what_was_begun_settle(sidecar: SidecarProcess) -> None:
    """K01."""
    async with tenure.connect(sidecar.address) as client, tenure.connect(sidecar.address) as operator:
        runs: list[tenure.Run] = []
        ended: list[str] = []

        @client.job("digest", **MANUAL)
        async def handler(run: tenure.Run) -> None:
            runs.append(run)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(f"run {run.interrupt_cause}")

        @client.job("tick", **EACH_SECOND)
        async def tick(run: tenure.Run) -> None: ...

        async def leased() -> None:
            async with client.lease("held"):
                await asyncio.Event().wait()

        async def guarded() -> None:
            async with client.guard():
                await asyncio.Event().wait()

        async with working(client, slots=3):
            await until_served(client, "digest")
            await client.trigger_job("digest")
            await eventually(lambda: runs)
            attempt = await client.begin("key")
            assert isinstance(attempt, tenure.Attempt)
            bodies = [asyncio.create_task(leased()), asyncio.create_task(guarded())]
            await eventually(lambda: client._worker.guards and client._bodies)
            token = (await operator.get_lease("held")).holders[0].token

            switch = await operator.set_switch("kill", "drill", fleet=True, actor="ops")
            with pytest.raises(tenure.LeaseLost) as lost:
                await bodies[0]
            assert lost.value.cause == "killed"
            with pytest.raises(tenure.SwitchedOff) as off:
                await bodies[1]
            assert (off.value.switch_id, off.value.mode, off.value.actor) == (switch.switch_id, "kill", "ops")
            cancelled = await until_ended(client, "digest", state="cancelled")
            assert ended == ["run killed"]
            assert "killed" in cancelled.reason
            for act in (
                lambda: client.acquire("other"),
                lambda: client.begin("k2"),
                lambda: client.trigger_job("digest"),
            ):
                with pytest.raises(tenure.SwitchedOff) as refused:
                    await act()
                assert refused.value.switch_id == switch.switch_id
            assert client.switch_state() is tenure.SwitchState.KILLED
            await attempt.complete(b"settled")
            assert (await client.get_record("key")).result == b"settled"
            await until_free(operator, "held")
            assert not await operator.check("held", token)

            killed = await until_ended(operator, "tick", state="skipped")
            with pytest.raises(tenure.TenureError):
                await operator.clear_switch("k999", "wrong one", fleet=True)
            cleared = await operator.clear_switch(switch.switch_id, "over", fleet=True, actor="ops")
            assert not cleared.active
            await eventually(lambda: client.switch_state() is tenure.SwitchState.ACTIVE)
            after = await until_ended(operator, "tick", state="succeeded")
            assert after.due_wall_ms > killed.due_wall_ms  # nothing is replayed
            assert len(runs) == 1
            async with client.lease("held") as again:
                assert again.token > token


async def until_free(client: tenure.Client, name: str) -> None:
    async def free() -> bool:
        return not (await client.get_lease(name)).holders

    await eventually(free, timeout_s=10.0, what=f"{name} is free")


async def test_a_kill_of_one_tenant_and_of_one_job(folder: Path) -> None:
    """Other scopes do not notice."""
    async with sidecar_process(folder) as sidecar, tenure.connect(sidecar.address) as client:
        await client.apply_job("one", **MANUAL)
        await client.apply_job("two", **MANUAL)
        switch = await client.set_switch("kill", "drill", job="default/one", expires_after=3_600)
        assert (switch.scope, switch.job, switch.mode, switch.active) == ("job", "one", "kill", True)
        await eventually(lambda: client.switch_state("one") is tenure.SwitchState.KILLED)
        assert client.switch_state("two") is tenure.SwitchState.ACTIVE
        with pytest.raises(tenure.SwitchedOff):
            await client.trigger_job("one")
        await client.trigger_job("two")
        async with client.lease("free"), client.guard("two"):
            pass
        with pytest.raises(tenure.SwitchedOff):
            async with client.guard("one"):
                pass
        with pytest.raises(ValueError, match="mode must be"):
            await client.set_switch("stop", "drill")
        with pytest.raises(ValueError, match="NAME or TENANT/NAME"):
            await client.set_switch("kill", "drill", job="")


async def test_a_lease_that_is_killed_while_its_holder_has_no_sidecar(nodes: list[Process]) -> None:
    async with (
        tenure.connect(f"unix:{nodes[0].socket}", ttl_ms=60_000) as client,
        tenure.connect(f"unix:{nodes[1].socket}") as operator,
    ):
        lease = await client.acquire("held")
        nodes[0].kill()
        await eventually(lambda: not client.node_id)
        switch = await operator.set_switch("kill", "drill")
        assert (await operator.get_lease("held")).holders  # the place stays taken until its holder has stopped
        await operator.clear_switch(switch.switch_id, "over")
        nodes[0].start()
        await eventually(lambda: lease.lost is not None, timeout_s=30.0)
        await until_free(operator, "held")
        async with client.lease("held") as again:
            assert again.token > lease.token


# ---- forks -----------------------------------------------------------------------------------------------------


async def test_what_a_handler_forks_cannot_use_or_disturb_its_run(sidecar: SidecarProcess) -> None:
    async with program("fork-work", sidecar.address, "4") as process, asyncio.timeout(60):
        out, _ = await process.communicate()
        assert out.decode().splitlines() == [
            "thread 0 0 0 0",
            "loop 0 0 0 0",
            "cleanup here",
            "states succeeded succeeded succeeded",
        ]


# ---- the synchronous client ------------------------------------------------------------------------------------


async def test_the_synchronous_client_as_a_worker(sidecar: SidecarProcess) -> None:
    await asyncio.to_thread(_synchronously, sidecar.address)


def _synchronously(address: str) -> None:
    runs: list[tenure.SyncRun] = []
    with tenure.connect_sync(address) as client:

        @client.job("digest", **MANUAL)
        def handler(run: tenure.SyncRun) -> dict[str, Any]:
            runs.append(run)
            run.checkpoint({"page": 1})
            with client.lease("under the run"):
                client.stop_work()
            return {"payload": run.payload.decode()}

        def trigger() -> None:
            while client.switch_state() is not tenure.SwitchState.ACTIVE or not served():
                pass
            client.trigger_job("digest", payload="p", reason="test", actor="me")

        def served() -> bool:
            try:
                return client.get_job("digest").free_slots == 1
            except tenure.NotFound:
                return False

        thread = threading.Thread(target=trigger)
        thread.start()
        client.work()  # until the handler says that it is enough
        thread.join()
        (occurrence,), text = client.explain("digest")
        assert (occurrence.state, occurrence.result, occurrence.attempt) == ("succeeded", b'{"payload":"p"}', 1)
        assert text
        assert [each.due_wall_ms for each in client.occurrences("digest")] == [occurrence.due_wall_ms]
        assert runs[0].due_wall_ms == occurrence.due_wall_ms
        assert client.apply_job("hourly", **options(schedule="@hourly")) == 1
        start = datetime(2030, 1, 1, 0, 30, tzinfo=UTC)
        assert client.preview_job("hourly", count=2, after=start) == [
            start.replace(hour=1, minute=0),
            start.replace(hour=2, minute=0),
        ]
        with pytest.raises(tenure.JobConflict):
            client.apply_job("hourly", expected_revision=7, **options(schedule="@daily"))
        with pytest.raises(ValueError, match="no time zone"):
            client.explain("hourly", datetime(2030, 1, 1))
        switch = client.set_switch("pause", "test", job="hourly")
        assert client.clear_switch(switch.switch_id, "test").active is False
