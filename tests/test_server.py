"""The sidecar process: starting, refusing to start, being killed, draining, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import tempfile
import time
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tenure.v1 import job_pb2, job_pb2_grpc, lease_pb2, session_pb2

from sidecar.certs import write_certificates
from sidecar.config import Settings
from sidecar.dev.ports import free_ports
from sidecar.listeners import ListenError, UnixSocket
from sidecar.server import Sidecar, Status
from tests.sidecars import Process, all_ready, leases, one, sessions, three
from tests.waiting import eventually


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: a socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield Path(made)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes a test started; none outlives it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()


async def hold(channel: grpc.aio.Channel, name: str = "job") -> tuple[str, int]:
    """A session with a lease, by unary calls."""
    session = await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=10)
    session_id = session.session.session_id
    request = lease_pb2.AcquireLeaseRequest(tenant="default", name=name, session_id=session_id)
    return session_id, (await leases(channel).AcquireLease(request, timeout=10)).token


def jobs(channel: grpc.aio.Channel) -> job_pb2_grpc.JobServiceAsyncStub:
    return job_pb2_grpc.JobServiceStub(channel)


# ---- a single process ------------------------------------------------------------------------------------------------


async def test_start_serve_kill_restart_stop(folder: Path, started: list[Process]) -> None:
    node = one(folder)
    started.append(node)
    node.start()
    await node.ready()
    assert stat.S_IMODE(node.socket.stat().st_mode) == 0o660
    assert node.get("healthz")[0] == 200
    assert "tenure_raft_is_leader 1.0" in node.get("metrics")[1]
    async with node.channel() as channel:
        session_id, token = await hold(channel)
    # kill -9: the stale socket is recovered, and nothing that was acknowledged is gone.
    node.kill()
    assert node.socket.exists()
    node.start()
    await node.ready()
    async with node.channel() as channel:
        request = lease_pb2.GetLeaseRequest(tenant="default", name="job")
        (holder,) = (await leases(channel).GetLease(request, timeout=10)).lease.holders
        assert (holder.session_id, holder.token) == (session_id, token)
    node.terminate()
    assert await node.ended() == Status.STOPPED
    assert not node.socket.exists()
    serving = [event for event in node.events() if event["event"] == "serving"]
    assert len(serving) == 2 and serving[0]["socket"] == str(node.socket) and serving[0]["http_port"] == node.http_port


async def test_wrong_settings_end_with_every_mistake(folder: Path, started: list[Process]) -> None:
    node = one(folder, heartbeat_ms=1, log_level="loud")
    started.append(node)
    node.start()
    assert await node.ended() == Status.CONFIG
    text = "\n".join(node.lines())
    assert "TENURE_HEARTBEAT_MS" in text and "TENURE_LOG_LEVEL" in text and "Traceback" not in text


async def test_nobody_is_displaced(folder: Path, started: list[Process]) -> None:
    first = one(folder)
    started.append(first)
    first.start()
    await first.ready()

    async def refused(status: Status, words: str, **settings: object) -> None:
        other = one(folder / "other", **settings)
        other.folder.mkdir(exist_ok=True)
        started.append(other)
        other.start()
        assert await other.ended() == status, other.lines()
        assert words in other.lines()[-2] and "Traceback" not in "".join(other.lines())
        other.log.unlink()

    await refused(Status.LISTEN, "is served by another sidecar", socket=first.socket)
    await refused(Status.LISTEN, "http_listen", http_listen=f"127.0.0.1:{first.http_port}")
    await refused(Status.STORE, "in use by another process", data_dir=folder / "n1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        await refused(Status.LISTEN, "grpc_listen", grpc_listen=f"127.0.0.1:{taken.getsockname()[1]}")
    async with first.channel() as channel:
        await hold(channel)


async def test_a_store_of_another_cluster_is_refused(folder: Path, started: list[Process]) -> None:
    node = one(folder)
    started.append(node)
    node.start()
    await node.ready()
    node.terminate()
    assert await node.ended() == Status.STOPPED
    node.settings["cluster_id"] = "c2"
    node.start()
    assert await node.ended() == Status.STORE
    assert "c1" in node.lines()[-2] and "c2" in node.lines()[-2]


async def test_tcp_with_tls(folder: Path, started: list[Process]) -> None:
    authority, issued = write_certificates(folder / "certs", "c1", {"n1": ["127.0.0.1"]})
    port = free_ports(1)[0]
    files = {
        "grpc_tls_cert": issued.certificate,
        "grpc_tls_key": issued.key,
        "grpc_tls_client_ca": authority.certificate,
    }
    node = one(folder, grpc_listen=f"127.0.0.1:{port}", socket="", insecure="false", **files)
    started.append(node)
    node.start()
    await node.ready()
    root = authority.certificate.read_bytes()
    pair = issued.key.read_bytes(), issued.certificate.read_bytes()
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root, *pair)) as channel:
        await hold(channel)
    for credentials in (grpc.ssl_channel_credentials(root), grpc.ssl_channel_credentials()):
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await hold(channel)


# ---- the socket ------------------------------------------------------------------------------------------------------


def test_a_socket_somebody_answers_on_is_left_alone(folder: Path) -> None:
    path = folder / "t.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ListenError, match="somebody else serves"):
            UnixSocket(str(path), 0o660, "").claim()
        assert path.exists()
    # Nobody answers any more: it is stale.
    place = UnixSocket(str(path), 0o660, "")
    place.claim()
    place.close()


def test_what_is_no_socket_is_not_removed(folder: Path) -> None:
    path = folder / "t.sock"
    path.write_text("something else")
    with pytest.raises(ListenError, match="is not a socket"):
        UnixSocket(str(path), 0o660, "").claim()
    assert path.read_text() == "something else"


def test_mode_and_group_are_set_before_the_socket_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "t.sock"
    group = os.getgid()
    seen: list[tuple[int, int]] = []
    rename = Path.rename

    def watched(self: Path, target: Any) -> Path:
        assert not path.exists()
        facts = self.stat()
        seen.append((stat.S_IMODE(facts.st_mode), facts.st_gid))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    place = UnixSocket(str(path), 0o600, str(group))
    address = place.claim()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.removeprefix("unix:"))
        server.listen()
        place.publish()
        assert seen == [(0o600, group)] and path.exists()
        with pytest.raises(ListenError, match="another sidecar"):
            UnixSocket(str(path), 0o600, "").claim()
        place.close()
        assert not path.exists()


# ---- three processes -------------------------------------------------------------------------------------------------


def peer_counter(node: Process, name: str) -> float:
    """What the node shows; 0 for a series that is not there (yet)."""
    _, text = node.get("metrics")
    series = f"tenure_peer_{name} " if "_total" in name else f"tenure_peer_{name}_total "
    found = [line for line in text.splitlines() if line.startswith(series)]
    return float(found[0].removeprefix(series)) if found else 0.0


async def test_three_nodes_lose_their_leader_twice(folder: Path, started: list[Process]) -> None:
    authority, *issued = write_certificates(folder / "certs", "c1", {name: [] for name in ("n1", "n2", "n3")})
    nodes = three(folder, insecure="false", peer_tls_ca=authority.certificate)
    for name, certificate in zip(nodes, issued, strict=True):
        nodes[name].settings |= {"peer_tls_cert": certificate.certificate, "peer_tls_key": certificate.key}
        started.append(nodes[name])
    # G11: one alone is alive and not ready, and says so in time.
    nodes["n1"].start()
    await eventually(lambda: nodes["n1"].get("healthz")[0] == 200, 30)
    status, body = nodes["n1"].get("readyz")
    assert status == 503 and body["reason"]
    async with nodes["n1"].channel() as channel:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5  # two seconds, and what a busy machine adds
    nodes["n2"].start()
    nodes["n3"].start()
    await all_ready(list(nodes.values()))
    assert peer_counter(nodes["n1"], "connections") >= 2
    assert peer_counter(nodes["n1"], "frames_received") > 0 and peer_counter(nodes["n1"], "bytes_sent") > 0
    leader = nodes[nodes["n1"].get("readyz")[1]["leader"]]
    other = next(node for node in nodes.values() if node is not leader)
    async with other.channel() as channel:
        session_id, token = await hold(channel)
        leader.kill()
        await eventually(lambda: peer_counter(other, 'connections_dropped_total{cause="reset"}') == 1)
        await eventually(lambda: other.get("readyz")[1]["leader"] not in (leader.node, None), 20)
        renew = session_pb2.RenewSessionRequest(tenant="default", session_id=session_id)
        await sessions(channel).RenewSession(renew, timeout=10)
        leader.start()
        await leader.ready()
        # SIGTERM to the second leader: leadership goes to another before the process ends.
        second = nodes[other.get("readyz")[1]["leader"]]
        second.terminate()
        rest = next(node for node in nodes.values() if node is not second)
        await eventually(lambda: rest.get("readyz")[1]["leader"] not in (second.node, None), 10)
        if second is not other:
            renewed = await sessions(channel).RenewSession(renew, timeout=10)
            assert renewed.ttl_ms == 15_000
    assert await second.ended() == Status.STOPPED
    async with rest.channel() as channel:
        request = lease_pb2.GetLeaseRequest(tenant="default", name="job")
        (holder,) = (await leases(channel).GetLease(request, timeout=10)).lease.holders
        assert holder.token == token
    assert not [event for event in second.events() if event["event"] == "leadership was not handed over"]


async def test_a_second_process_with_a_node_id_says_so_and_ends(folder: Path, started: list[Process]) -> None:
    nodes = three(folder)
    started += nodes.values()
    for node in nodes.values():
        node.start()
    await all_ready(list(nodes.values()))
    (folder / "second").mkdir()
    second = Process(folder / "second", "n3", {})
    second.settings |= {"peers": nodes["n3"].settings["peers"], "peer_listen": f"127.0.0.1:{free_ports(1)[0]}"}
    started.append(second)
    second.start()
    await eventually(lambda: "refused this process" in (second.get("readyz")[1] or {}).get("reason", ""), 30)
    assert await second.ended() == Status.STORE
    (said,) = [event["error"] for event in second.events() if event["event"].startswith("another process is this node")]
    assert "another one runs" in said and "node_id" in said
    for node in (nodes["n1"], nodes["n2"]):
        assert peer_counter(node, 'connections_refused_total{cause="double"}') > 0
        assert peer_counter(node, 'connections_dropped_total{cause="replaced"}') == 0
    assert nodes["n3"].get("readyz")[0] == 200


# ---- drain -----------------------------------------------------------------------------------------------------------


class Agent:
    """An agent's stream, by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.requests: asyncio.Queue[session_pb2.ConnectRequest | None] = asyncio.Queue()
        self.responses: list[session_pb2.ConnectResponse] = []
        self._call = sessions(channel).Connect(self._outgoing())
        self._reader = asyncio.create_task(self._read())

    async def _outgoing(self) -> AsyncIterator[session_pb2.ConnectRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        async for response in self._call:
            self.responses.append(response)

    async def open(self) -> None:
        attach = session_pb2.Attach(tenant="default", open=session_pb2.OpenSessionRequest(request_id="a"))
        await self.requests.put(session_pb2.ConnectRequest(attach=attach))
        await eventually(lambda: self.responses and self.responses[0].HasField("attached"))

    async def do(self, number: int, **body: Any) -> session_pb2.OperationResult:
        operation = session_pb2.Operation(id=number, timeout_ms=10_000, **body)
        await self.requests.put(session_pb2.ConnectRequest(operations=[operation]))
        await eventually(lambda: self._result(number) is not None)
        result = self._result(number)
        assert result is not None
        return result

    def _result(self, number: int) -> session_pb2.OperationResult | None:
        results = [result for response in self.responses for result in response.results if result.id == number]
        return results[0] if results else None

    def told_to_drain(self) -> bool:
        return any(push.HasField("draining") for response in self.responses for push in response.pushes)

    async def close(self) -> None:
        await self.requests.put(None)
        await asyncio.wait([self._reader])
        self._reader.exception()


async def test_agents_are_served_on_until_they_have_ended(folder: Path, started: list[Process]) -> None:
    """G08: SIGTERM to both; the agent needs a while, and its release and its goodbye still work."""
    node = one(folder, drain_timeout_ms=60_000)
    started.append(node)
    node.start()
    await node.ready()
    async with node.channel() as channel:
        agent = Agent(channel)
        await agent.open()
        granted = await agent.do(1, acquire_lease=lease_pb2.AcquireLeaseRequest(name="job"))
        node.terminate()
        await eventually(agent.told_to_drain)
        assert node.get("readyz")[1]["reason"] == "draining"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        token = granted.acquire_lease.token
        released = await agent.do(2, release_lease=lease_pb2.ReleaseLeaseRequest(name="job", token=token))
        assert released.HasField("release_lease")
        assert node.process is not None and node.process.poll() is None
        await agent.close()
        assert await node.ended() == Status.STOPPED


async def test_the_drain_ends_after_its_bound_and_at_a_second_signal(folder: Path, started: list[Process]) -> None:
    node = one(folder, drain_timeout_ms=300)
    started.append(node)
    for hurry in (False, True):
        node.settings["drain_timeout_ms"] = 600_000 if hurry else 300
        node.start()
        await node.ready()
        async with node.channel() as channel:
            agent = Agent(channel)
            await agent.open()
            node.terminate()
            await eventually(agent.told_to_drain)
            if hurry:
                assert node.process is not None
                node.process.send_signal(signal.SIGINT)
            assert await node.ended() == Status.STOPPED
            await agent.close()


# ---- in this process -------------------------------------------------------------------------------------------------


def settings(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "node_id": "n1",
        "cluster_id": "c1",
        "peers": {"n1": f"127.0.0.1:{free_ports(1)[0]}"},
        "data_dir": folder / "n1",
        "socket": str(folder / "t.sock"),
        "http_listen": "127.0.0.1:0",
        "bootstrap": True,
        "heartbeat_ms": 20,
        "election_min_ms": 100,
        "election_max_ms": 200,
        "shed_lag_ms": 90,
        **changes,
    }
    return Settings(**values)


@pytest.mark.parametrize("where", ["apply", "settle", "poll"])
async def test_a_failure_of_the_replicated_core_ends_the_process(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R06: whatever raises, the sidecar does not go on without consensus."""
    sidecar = Sidecar(settings(folder))
    await sidecar.start()
    try:
        await eventually(lambda: not sidecar.runtime.ready())

        def broken(*_: object) -> None:
            raise RuntimeError("injected")

        # The fault is inside the core, as the event loop's last resort has to recognise it.
        inside = types.FunctionType(broken.__code__, {**globals(), "__name__": "sidecar.core.broken"})
        monkeypatch.setattr(sidecar.runtime.proposer.core, where, inside)
        running = asyncio.ensure_future(sidecar.run())
        async with grpc.aio.insecure_channel(f"unix:{folder / 't.sock'}") as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=1)
        assert await asyncio.wait_for(running, 10) is Status.FAILED
    finally:
        await sidecar.stop()


async def test_a_disk_that_is_nearly_full_takes_no_new_work(folder: Path) -> None:
    sidecar = Sidecar(settings(folder, disk_reserve_bytes=1 << 40))
    await sidecar.start()
    try:
        await eventually(lambda: "bytes left" in sidecar.runtime.ready())
        async with grpc.aio.insecure_channel(f"unix:{folder / 't.sock'}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "disk" in (caught.value.details() or "")
    finally:
        await sidecar.stop()


async def test_renewed_certificates_are_used_without_a_restart(folder: Path) -> None:
    authorities = [write_certificates(folder / name, "c1", {"n1": ["127.0.0.1"]}) for name in ("old", "new")]
    shown = {"grpc_tls_cert": folder / "cert", "grpc_tls_key": folder / "key", "grpc_tls_client_ca": folder / "ca"}

    def put(which: int, *names: str) -> None:
        authority, issued = authorities[which]
        sources = {"cert": issued.certificate, "key": issued.key, "ca": authority.certificate}
        for name in names:
            (folder / name).write_bytes(sources[name].read_bytes())

    async def works(which: int) -> bool:
        authority, issued = authorities[which]
        files = (authority.certificate, issued.key, issued.certificate)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{sidecar.grpc_port}", credentials, options) as channel:
            try:
                await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=10)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False
        return True

    put(0, "cert", "key", "ca")
    sidecar = Sidecar(settings(folder, grpc_listen="127.0.0.1:0", **shown))
    await sidecar.start()
    try:
        await eventually(lambda: not sidecar.runtime.ready())
        assert await works(0) and not await works(1)
        put(1, "key")  # the certificate does not belong to it: only half of them has been written
        sidecar._sampler.check_certificates()
        assert await works(0) and not await works(1)
        put(1, "cert", "ca")
        sidecar._sampler.check_certificates()
        assert await works(1) and not await works(0)
    finally:
        await sidecar.stop()


# ---- what is measured of jobs ----------------------------------------------------------------------------------------


async def test_what_becomes_of_jobs_is_measured(folder: Path, started: list[Process]) -> None:
    """M02: that nothing runs can be seen, and why."""
    node = one(folder)
    started.append(node)
    node.start()
    await node.ready()
    async with node.channel() as channel:
        spec = job_pb2.JobSpec(owner="me", runbook_url="https://runbooks.test/x")
        spec.schedule.manual.SetInParent()
        spec.retry.attempts_max = 1
        definition = job_pb2.JobDefinition(tenant="default", name="report", spec=spec)
        await jobs(channel).ApplyJobs(job_pb2.ApplyJobsRequest(jobs=[definition], actor="me"), timeout=10)
        session = await sessions(channel).OpenSession(session_pb2.OpenSessionRequest(tenant="default"), timeout=10)
        mine = {"tenant": "default", "session_id": session.session.session_id}
        trigger = job_pb2.TriggerJobRequest(tenant="default", name="report", actor="me", reason="test")
        for ending in ("complete", "fail", "interrupt"):
            await jobs(channel).TriggerJob(trigger, timeout=10)
            claim = job_pb2.ClaimRunRequest(**mine, jobs=["report"], wait_ms=5_000)
            run = (await jobs(channel).ClaimRun(claim, timeout=10)).run
            own = {**mine, "run_id": run.run_id, "token": run.token}
            await end(jobs(channel), ending, own)
        await jobs(channel).TriggerJob(trigger, timeout=10)
        await jobs(channel).TriggerJob(trigger, timeout=10)  # skipped: the one before waits
    text = node.get("metrics")[1]
    for line in (
        'tenure_occurrences_ended_total{outcome="succeeded",reason=""} 1.0',
        'tenure_occurrences_ended_total{outcome="failed",reason="attempts_used_up"} 1.0',
        'tenure_occurrences_ended_total{outcome="cancelled",reason="operator"} 1.0',
        'tenure_occurrences_ended_total{outcome="skipped",reason="overlap"} 1.0',
        'tenure_runs_ended_total{cause="interrupted"} 1.0',
        "tenure_run_start_lateness_seconds_count 3.0",
        "tenure_interrupt_acknowledged_seconds_count 1.0",
        "tenure_jobs 1.0",
        "tenure_occurrences_pending 1.0",
        "tenure_scheduler_running 1.0",
        "tenure_schedule_lag_seconds 0.0",
        "tenure_tzdata_mismatch 0.0",
    ):
        assert line in text, line


async def end(stub: job_pb2_grpc.JobServiceAsyncStub, ending: str, own: dict[str, Any]) -> None:
    if ending == "complete":
        await stub.CompleteRun(job_pb2.CompleteRunRequest(**own), timeout=10)
    elif ending == "fail":
        await stub.FailRun(job_pb2.FailRunRequest(**own, error="no", retryable=True), timeout=10)
    else:
        by = {"tenant": "default", "run_id": own["run_id"], "actor": "me", "reason": "test"}
        await stub.InterruptRun(job_pb2.InterruptRunRequest(**by), timeout=10)
        await stub.AcknowledgeInterrupt(job_pb2.AcknowledgeInterruptRequest(**own), timeout=10)
