"""The composition root: startup -> run -> drain -> stop.

Fail-stop: when the node raises (its store, the state machine, a broken invariant), or an exception of the replicated
core reaches nobody, the process ends with a status that is not 0. It never goes on half dead.

SIGTERM or SIGINT: not ready, no new sessions, Raft leadership handed over; agents are served on until their streams
have ended or ``drain_timeout_ms`` has passed. A second signal ends the drain at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import traceback
from collections.abc import Callable, Mapping
from enum import IntEnum, unique
from typing import Any

import grpc
import structlog
import uvloop

from sidecar.certs import CertificateError, PeerContexts, peer_contexts
from sidecar.clock import SystemClock
from sidecar.config import Loaded, Settings, split_address
from sidecar.consensus.log_store import SqliteLogStore, disk_space
from sidecar.consensus.loop import NodeLoop
from sidecar.consensus.node import Node, NodeSettings
from sidecar.consensus.ports import StoreError, StoreIdentity
from sidecar.consensus.snapshots import FileSnapshotStore
from sidecar.consensus.transport import TcpPeerTransport, TransportError, TransportSettings
from sidecar.core.machine import Machine
from sidecar.listeners import ListenError, TcpCertificates, UnixSocket, add_tcp_port
from sidecar.observability import logs
from sidecar.observability.http import Health, HealthServer
from sidecar.observability.metrics import Metrics
from sidecar.proposer import AsyncProposer, Proposer, ProposerSettings
from sidecar.renewal import Renewal
from sidecar.runtime import Runtime
from sidecar.sampler import Sampler
from sidecar.scheduling.scheduler import Scheduler, SchedulerSettings, SchedulerTimer
from sidecar.services import SERVER_OPTIONS, add_services
from sidecar.version import VERSION
from sidecar.watch import WatchHub

log = structlog.get_logger("tenure.server")

HANDOVER_S = 2.0
STOP_GRACE_S = 1.0  # for unary calls that are being answered when everybody else has gone
TURN_LATE_S = 10.0  # without a turn of the node for this long the process counts as dead
# An agent without a stream renews its session by calls of its own; one that did so this lately is still there.
UNARY_QUIET_S = 5.0
CORE = ("sidecar.core", "sidecar.consensus", "sidecar.proposer", "sidecar.scheduling")


@unique
class Status(IntEnum):
    """Exit statuses of ``tenure serve``."""

    STOPPED = 0  # as asked, by SIGTERM or SIGINT
    CONFIG = 2  # settings are wrong: said by the command line, before a sidecar exists
    STORE = 3  # the data folder cannot be used: corrupt, foreign, locked, full; or another process is this node
    LISTEN = 4  # an address or the socket cannot be had, or a certificate cannot be used
    FAILED = 5  # the node failed while it was running


class StartError(Exception):
    """The sidecar cannot start; one message that says what to do."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Sidecar:
    """One sidecar on the running event loop. ``start``, then ``run``, then ``stop``, also after a failed start."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._clock = SystemClock()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._signals = 0
        self._ending = asyncio.Event()  # a signal, a failure, or another process in our place
        self._place_taken = False
        self._renewals: list[Renewal] = []
        self._cleanup = contextlib.AsyncExitStack()
        self._session_call_s = float("-inf")

    # ---- startup ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything is up and agents can connect. Raises StartError."""
        try:
            self._open_store()
            self._open_transport()
            self._build_node()
            await self._start_http()
            self._start_node()
            await self._start_grpc()
        except StoreError as error:
            raise StartError(Status.STORE, str(error)) from error
        except (TransportError, ListenError, CertificateError) as error:
            raise StartError(Status.LISTEN, str(error)) from error
        self._start_sampler()
        log.info(
            "serving",
            version=VERSION,
            node=self.settings.node_id,
            cluster=self.settings.cluster_id,
            peers=sorted(self.settings.peers),
            peer_port=self._peer_port or None,
            socket=self.settings.socket or None,
            grpc_port=self.grpc_port or None,
            http_port=self._http.port or None,
            data_dir=str(self.settings.data_dir),
            pid=os.getpid(),
        )

    def _open_store(self) -> None:
        identity = StoreIdentity(self.settings.cluster_id, self.settings.node_id)
        self._store = SqliteLogStore(self.settings.data_dir, identity)
        self._cleanup.callback(self._close_store)
        self._snapshots = FileSnapshotStore(self.settings.data_dir, identity)

    def _close_store(self) -> None:
        try:
            self._store.close()
        except StoreError as error:
            log.error("the store could not be closed in order", error=str(error))

    def _open_transport(self) -> None:
        settings = self.settings
        tls: PeerContexts | None = None
        files = (settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca)
        if all(files):
            self._renewals.append(Renewal("peers", [*filter(None, files)], self._renew_peer_tls))
            tls = self._load_peer_tls()
        self._transport = TcpPeerTransport(
            TransportSettings(
                cluster_id=settings.cluster_id,
                node_id=settings.node_id,
                listen=split_address(settings.peer_bind),
                peers={peer: split_address(settings.peers[peer]) for peer in settings.peer_ids},
                insecure=settings.peers_plaintext or not settings.peer_ids,
                frame_bytes_max=node_settings(settings).frame_bytes_max(),
                store_id=self._store.store_id,
            ),
            tls.server if tls else None,
            tls.client if tls else None,
        )
        self._transport.on_displaced = self._displaced
        # A single node has nobody to listen to.
        self._peer_port = self._transport.open() if settings.peer_ids else 0
        self._cleanup.push_async_callback(self._transport.stop)

    def _load_peer_tls(self) -> PeerContexts:
        settings = self.settings
        assert settings.peer_tls_cert and settings.peer_tls_key and settings.peer_tls_ca
        files = (settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca)
        tls = peer_contexts(*files, cluster_id=settings.cluster_id, node_id=settings.node_id)
        self.metrics.certificate_expires.set(tls.expires.timestamp())
        return tls

    def _renew_peer_tls(self) -> None:
        tls = self._load_peer_tls()
        self._transport.use_tls(tls.server, tls.client)

    def _build_node(self) -> None:
        settings, clock = self.settings, self._clock
        self._machine = Machine()
        proposer = Proposer(
            self._machine,
            clock,
            settings.node_id,
            self._store.incarnation,
            settings=proposer_settings(settings),
            observer=self.metrics,
        )
        self._loop = NodeLoop(clock, self.metrics.turn_done)
        self._node = Node(
            node_settings(settings),
            proposer,
            self._store,
            self._snapshots,
            self._transport,
            clock,
            random.SystemRandom(),
            self._loop.wake,
            self._loop.background,
        )
        facade = AsyncProposer(proposer, clock)
        facade.attach(self._node, self._loop.wake)
        hub = WatchHub(self._machine, facade, facade.read_barrier, watchers_max=settings.watchers_max)
        scheduler = Scheduler(proposer, self._node, clock, scheduler_settings(settings))
        self._scheduler = SchedulerTimer(scheduler, clock)
        self.runtime = Runtime(settings, clock, self._node, facade, hub, scheduler, self.metrics)
        self.runtime.started_s = clock.monotonic_s()
        self.runtime.observe_request = self._observe_request
        self.runtime.displaced = self._transport.displaced

    async def _start_http(self) -> None:
        self._http = HealthServer(self.metrics, self._live, self._ready)
        if not self.settings.http_listen:
            return
        try:
            await self._http.start(*split_address(self.settings.http_listen))
        except OSError as error:
            message = f"cannot listen on http_listen {self.settings.http_listen}: {error.strerror or error}"
            raise ListenError(message) from error
        self._cleanup.push_async_callback(self._http.stop)

    def _start_node(self) -> None:
        running_loop = asyncio.get_running_loop()
        running_loop.set_exception_handler(self._unhandled)
        task = running_loop.create_task(self._loop.run(self._node))
        task.add_done_callback(self._task_ended)
        self._scheduler.start()

        async def stop() -> None:
            self._scheduler.stop()
            self.runtime.proposer.stop()
            self._loop.stop()
            await asyncio.wait([task])

        self._cleanup.push_async_callback(stop)

    async def _start_grpc(self) -> None:
        self.grpc_port = 0
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=self.settings.rpcs_max)
        self._grpc = server
        add_services(server, self.runtime)
        # Also when a bind fails below: the library warns about a server that was never stopped.
        self._cleanup.push_async_callback(self._stop_grpc)
        if self.settings.grpc_listen:
            self.grpc_port = add_tcp_port(server, self.settings, self._tcp_certificates())
        if self.settings.socket:
            place = UnixSocket(self.settings.socket, self.settings.socket_mode, self.settings.socket_group)
            address = place.claim()
            self._cleanup.callback(place.close)
            try:
                server.add_insecure_port(address)
            except RuntimeError as error:
                raise ListenError(f"cannot listen on the socket {self.settings.socket}: {error}") from error
            place.publish()
        await server.start()

    def _tcp_certificates(self) -> TcpCertificates | None:
        if self.settings.grpc_tls_cert is None:
            return None
        certificates = TcpCertificates(self.settings)
        self._renewals.append(Renewal("agents", certificates.files, certificates.reload))
        return certificates

    async def _stop_grpc(self) -> None:
        self.runtime.stopping = True
        self.runtime.hub.close()
        await self._grpc.stop(0 if self._failure.done() else STOP_GRACE_S)

    def _start_sampler(self) -> None:
        settings = self.settings
        sampler = Sampler(
            self.runtime,
            self._store,
            self._transport.counters,
            lambda: disk_space(settings.data_dir, settings.disk_reserve_bytes),
            self._renewals,
        )
        task = asyncio.get_running_loop().create_task(sampler.run())
        task.add_done_callback(self._task_ended)
        self._sampler = sampler
        self._cleanup.callback(task.cancel)

    # ---- run -------------------------------------------------------------------------------------------------------

    async def run(self) -> Status:
        """Until a signal, and then the drain; or until the node fails, or may not be part of its cluster."""
        await self._ending.wait()
        if not (self._failure.done() or self._place_taken):
            await self._drain()
        if self._failed():
            return Status.FAILED
        return Status.STORE if self._place_taken else Status.STOPPED

    def signal(self, name: str) -> None:
        """SIGTERM or SIGINT came; the second one hurries."""
        self._signals += 1
        log.info("stopping" if self._signals == 1 else "stopping at once", signal=name)
        self._ending.set()

    def fail(self, error: BaseException) -> None:
        """The process must not go on. The first cause counts."""
        if not self._failure.done():
            log.critical("the node failed; this process stops", error=repr(error), exc_info=error)
            self.runtime.trouble = f"the node failed: {error!r}"
            self._failure.set_exception(error)
            self._ending.set()

    def _displaced(self, reason: str) -> None:
        """No peer has ever accepted this process, so nobody is served by it."""
        if not self._ending.is_set():
            log.critical("another process is this node; this one stops", error=reason)
            self._place_taken = True
            self._ending.set()

    def _failed(self) -> bool:
        return self._failure.done() and self._failure.exception() is not None

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """What no task and no callback caught. From the replicated core it is fatal, from elsewhere it is logged."""
        error = context.get("exception")
        message = str(context.get("message", "unhandled exception"))
        if error is not None and any(
            _module(frame).startswith(CORE) for frame, _ in traceback.walk_tb(error.__traceback__)
        ):
            self.fail(error)
        else:
            log.error("unhandled in the event loop", what=message, error=repr(error), exc_info=error)

    def _observe_request(self, service: str, method: str, code: str, seconds: float) -> None:
        if method in ("OpenSession", "RenewSession"):
            self._session_call_s = self._clock.monotonic_s()
        streaming = method in ("Connect", "Watch", "Observe")
        self.metrics.request_done(service.rpartition(".")[2], method, code, None if streaming else seconds)

    def _live(self) -> Health:
        if self._failed():
            return Health(self.runtime.trouble, {})
        last_s = self._loop.last_turn_s or self.runtime.started_s
        late_s = self._clock.monotonic_s() - last_s
        reason = f"no turn of the node for {late_s:.1f} s" if late_s > TURN_LATE_S else ""
        return Health(reason, {"node": self.settings.node_id})

    def _ready(self) -> Health:
        status = self._node.status()
        facts: dict[str, object] = {
            "node": self.settings.node_id,
            "role": status.role.name.lower(),
            "leader": status.leader,
            "term": status.term,
            "applied_index": status.applied_index,
            "commit_index": status.commit_index,
        }
        return Health(self.runtime.ready(), facts)

    # ---- drain -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        runtime, timeout_s = self.runtime, self.settings.drain_timeout_ms / 1000
        runtime.draining = True
        self._sampler.check_ready()
        for tell in list(runtime.streams.values()):
            tell(self.settings.drain_timeout_ms)
        # Leadership moves while agents are served on: they are no reason to wait.
        handover = asyncio.ensure_future(self._hand_over())
        served = await self._until(self._agents_gone, timeout_s)
        await handover
        if not served and not self._failure.done():
            log.warning(
                "agents are still connected", streams=len(runtime.streams), waited_ms=self.settings.drain_timeout_ms
            )

    async def _hand_over(self) -> None:
        if not self.settings.peer_ids or not self._node.is_leader():
            return
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def ended(error: str | None) -> None:
            if not done.done():
                done.set_result(error)

        self._node.transfer_leadership(None, ended)
        await self._until(done.done, HANDOVER_S)
        if not done.done() or done.result() is not None:
            log.warning("leadership was not handed over", error=done.result() if done.done() else "not in time")

    def _agents_gone(self) -> bool:
        quiet = self._clock.monotonic_s() - self._session_call_s > UNARY_QUIET_S
        return not self.runtime.streams and quiet

    async def _until(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Whether it held within that time; a second signal or a failure ends the waiting."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while not condition():
            if self._clock.monotonic_s() >= deadline_s or self._signals > 1 or self._failure.done():
                return False
            await asyncio.sleep(0.02)
        return True

    # ---- stop ------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Undo whatever was started, the last first."""
        await self._cleanup.aclose()
        if self._failure.done():
            self._failure.exception()  # seen: it was logged when it happened
        log.info("stopped", node=self.settings.node_id)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def node_settings(settings: Settings) -> NodeSettings:
    return NodeSettings(
        cluster_id=settings.cluster_id,
        node_id=settings.node_id,
        peers=settings.peer_ids,
        bootstrap=settings.bootstrap,
        heartbeat_ms=settings.heartbeat_ms,
        election_min_ms=settings.election_min_ms,
        election_max_ms=settings.election_max_ms,
        fast_election_max_ms=min(100, settings.election_min_ms),
        entry_bytes_max=settings.entry_bytes_max,
        compact_entries=settings.snapshot_entries,
        compact_bytes=settings.snapshot_bytes,
    )


def scheduler_settings(settings: Settings) -> SchedulerSettings:
    return SchedulerSettings(nodes=len(settings.peer_ids) + 1, skew_max_ms=settings.schedule_skew_max_ms)


def proposer_settings(settings: Settings) -> ProposerSettings:
    return ProposerSettings(
        limits=settings.limits,
        renewal_window_ms=settings.renewal_window_ms,
        inflight_max=settings.inflight_max,
        queue_max=settings.queue_max,
        entry_bytes_max=settings.entry_bytes_max,
        shed_latency_ms=settings.shed_latency_ms,
        shed_lag_ms=settings.shed_lag_ms,
    )


async def serve(settings: Settings) -> Status:
    """Run one sidecar until it is told to stop. Logs must have been configured."""
    sidecar = Sidecar(settings)
    running_loop = asyncio.get_running_loop()
    try:
        # Before the start: a signal that comes meanwhile ends the process in order, right after it.
        for number in (signal.SIGTERM, signal.SIGINT):
            running_loop.add_signal_handler(number, sidecar.signal, number.name)
        await sidecar.start()
        return await sidecar.run()
    except StartError as error:
        log.critical("cannot start", status=error.status.name.lower(), error=str(error))
        return error.status
    finally:
        await sidecar.stop()


def run(loaded: Loaded) -> int:
    """``tenure serve`` with settings that were loaded: returns the exit status (see ``Status``)."""
    logs.configure(loaded.settings.log_level, loaded.settings.log_format)
    return uvloop.run(serve(loaded.settings))
