"""Simulated agents: the client's side of the promises, in virtual time.

An agent opens a session, keeps it alive, works under leases, records idempotency keys, hands leases over, gives up,
crashes, and tries again at another node when one does not answer. It follows the rules of the real client: what it
holds it trusts until ``safe_until`` on its own clock, counted from when it SENT its last confirmed renewal; a request
is repeated under its own name until an answer is certain.

Each agent is a generator, so that its life reads from top to bottom: it yields what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from chaos.core import TENANT, Belief, CoreProcess, Ledger, is_expired
from chaos.profiles import MILLISECOND, SECOND
from chaos.world import Host, HostClock, HostState, World
from sidecar.core.commands import (
    AcquireLease,
    AttachSession,
    BeginOutcome,
    BeginRecord,
    CancelWait,
    CloseSession,
    Command,
    CompleteRecord,
    DetachSession,
    FailRecord,
    LeaseGranted,
    LeaseQueued,
    LeaseTransferred,
    OpenSession,
    OwnerLoss,
    RecordBegun,
    RecordCompleted,
    Refused,
    ReleaseLease,
    RequestKey,
    Resolution,
    ResolveRecord,
    Result,
    SessionAttached,
    SessionOpened,
    SessionsRenewed,
    TransferLease,
)
from sidecar.core.events import Event, Kind
from sidecar.proposer import Failed

LEASES = ("report", "mail", "index")
_LOCAL_US = (100, 3_000)  # between an agent and a sidecar, one way
_CALL_TIMEOUT_MS = 1_500
_GRACE_MS = 400

Wait = Callable[[Callable[[Any], None]], None]  # starts something, and calls back with its outcome
Step = Generator[Wait, Any, Any]
Ask = Callable[[CoreProcess, Callable[[Any], None]], None]  # of a sidecar; called back with its answer


def _is_definite(outcome: object) -> bool:
    """It did not happen and will not."""
    return (isinstance(outcome, Failed) and outcome.definite) or (isinstance(outcome, Refused) and is_expired(outcome))


class SessionOver(Exception):
    """The session has ended, or cannot be trusted any more: begin a new life."""


class Agent:
    def __init__(self, world: World, ledger: Ledger, name: str, tenant: str = TENANT) -> None:
        self._world = world
        self._ledger = ledger
        self.name = name
        self._tenant = tenant
        self._clock = HostClock(world, world.between(1, 1_000_000) * MILLISECOND, 0)
        self._clock.drift(world.between(-world.shape.drift_ppm, world.shape.drift_ppm))
        self._names = 0
        self._life = 0
        self._home = self._any_host()
        self._session = ""
        self._connection = ""  # of the stream; empty for a session kept by unary calls
        self._generation = 0  # how many streams this session has had
        self._operations = 0  # over streams, in this session
        self._ttl_ms = 1_000
        self._safe_until_us = 0  # on the agent's own clock
        self._tokens: dict[str, int] = {}  # lease -> token: what this agent believes to hold
        self._finished_tokens: dict[int, bool] = {}
        self._granted: dict[str, Callable[[Any], None]] = {}  # waiter -> who waits for its grant
        self._early: dict[str, Event] = {}

    # ---- the story of a life

    def start(self) -> None:
        self._world.crash_listeners.append(self._host_crashed)
        self._world.after(self._world.between(0, 2 * SECOND), self._begin)

    def _begin(self) -> None:
        if self._world.calm:
            return
        self._life += 1
        self._run(self._live(), self._life)

    def _run(self, script: Step, life: int, *, beside: bool = False) -> None:
        """Drive the generator: each thing it yields is started, and its outcome resumes it. With its end ends the life,
        but for one that runs ``beside`` another."""

        def resume(value: Any = None) -> None:
            if life != self._life:
                return
            try:
                wait = script.send(value)
            except (StopIteration, SessionOver) as end:
                if not beside or isinstance(end, SessionOver):
                    self._end_life()
                return
            answered = False

            def once(outcome: Any) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    resume(outcome)

            wait(once)

        resume()

    def _end_life(self) -> None:
        self._life += 1
        self._forget_everything()
        self._world.after(self._world.between(50 * MILLISECOND, 800 * MILLISECOND), self._begin)

    def _forget_everything(self) -> None:
        for lease in list(self._tokens):
            self._drop(lease)
        self._granted.clear()
        self._early.clear()
        self._ledger.session_safe.pop(self._session, None)
        self._session = self._connection = ""
        self._safe_until_us = 0

    def _live(self) -> Step:
        yield from self._open()
        for _ in range(self._world.between(2, 12)):
            if self._world.calm:
                break
            yield self._sleep(self._world.between(5 * MILLISECOND, 200 * MILLISECOND))
            if self._world.chance(60):
                self._crash()
                return
            yield from self._work_under_lease(LEASES[self._world.between(0, len(LEASES) - 1)])
        if self._world.chance(700):
            session = self._session
            self._forget_everything()
            yield from self._call(CloseSession(tenant=self._tenant, session=session))

    def _open(self) -> Step:
        self._ttl_ms = self._world.between(700, 2_500)
        connection = self._new_name("stream") if self._world.chance(500) else ""
        sent_us = self._clock.monotonic_us()
        result = yield from self._call(self._open_command(connection))
        if not isinstance(result, SessionOpened):
            raise SessionOver
        self._begin_session(result.session, connection, sent_us)
        self._listen()
        if connection:
            yield from self._attach()  # the open may have been answered by another node, or be a repeat
        self._keep_alive(self._life)

    def _open_command(self, connection: str, labels: tuple[tuple[str, str], ...] = ()) -> OpenSession:
        return OpenSession(
            tenant=self._tenant,
            suffix=f"{self._world.between(0, 1 << 40):x}",
            agent=self.name,
            labels=labels,
            ttl_ms=self._ttl_ms,
            disconnect_grace_ms=_GRACE_MS,
            connection=connection,
            node=self._home.name if connection else "",
        )

    def _begin_session(self, session: str, connection: str, sent_us: int) -> None:
        self._session, self._connection = session, connection
        self._generation = 1 if connection else 0
        self._operations = 0
        self._trust_from(sent_us)
        self._ledger.session_safe[self._session] = self._safe_until_virtual_us

    def _work_under_lease(self, lease: str) -> Step:
        token = yield from self._acquire(lease)
        if not token:
            return
        for _ in range(self._world.between(0, 3)):
            yield from self._record_something(lease, token)
            yield self._sleep(self._world.between(1 * MILLISECOND, 150 * MILLISECOND))
        if lease not in self._tokens or self._world.chance(150):
            return  # lost, or kept until the session ends
        self._drop(lease)
        other = self._another_session()
        if other and self._world.chance(200):
            command = TransferLease(tenant=TENANT, name=lease, token=token, to_session=other, session=self._session)
            result = yield from self._call(command)
            if isinstance(result, LeaseTransferred):
                self._world.reach("lease transferred")
                return
        yield from self._call(ReleaseLease(tenant=TENANT, name=lease, token=token, session=self._session))

    def _acquire(self, lease: str) -> Step:
        key = self._new_key()
        wait_ms = self._world.between(100, 3_000) if self._world.chance(500) else 0
        waiters: list[str] = []

        def command() -> Command:
            waiters.append(self._new_name("waiter"))
            return AcquireLease(
                tenant=TENANT, name=lease, session=self._session, wait_ms=wait_ms, waiter=waiters[-1],
                lock_delay_ms=0 if self._world.chance(800) else 200,
            )  # fmt: skip

        result = yield from self._call(command, key=key)
        if isinstance(result, LeaseQueued):
            self._world.reach("acquire waited in line")
            result = yield from self._wait_in_line(lease, waiters, key)
        if not isinstance(result, LeaseGranted) or not self._alive():
            return 0
        self._hold(lease, result.token)
        return result.token

    def _wait_in_line(self, lease: str, waiters: list[str], key: RequestKey) -> Step:
        waiter = waiters[-1]
        patience_us = self._world.between(50 * MILLISECOND, 3_500 * MILLISECOND)

        def wait(done: Callable[[Any], None]) -> None:
            if waiter in self._early:
                done(self._early.pop(waiter))
                return
            self._granted[waiter] = done
            self._world.after(patience_us, lambda: done(None))

        event = yield wait
        self._granted.pop(waiter, None)
        if isinstance(event, Event) and event.kind is Kind.LEASE_GRANTED:
            return LeaseGranted(token=event.token, already_held=False, ttl_ms=self._ttl_ms, revision=event.revision)
        if isinstance(event, Event):
            return None
        # Nothing heard: gives up. Whatever the waiter was granted meanwhile is given back.
        self._ledger.forgotten(key)
        for each in waiters:
            yield from self._call(
                CancelWait(tenant=TENANT, name=lease, session=self._session, waiter=each), natural=True
            )
        self._world.reach("waiter gave up")
        return None

    def _record_something(self, lease: str, token: int) -> Step:
        key = f"{lease}-{self._world.documents.get(lease, 0)}"
        begin = BeginRecord(
            tenant=TENANT, key=key, session=self._session, fingerprint=b"f",
            owner_loss=OwnerLoss.RETRY if self._world.chance(700) else OwnerLoss.UNKNOWN,
            fence_lease=lease, fence_token=token,
        )  # fmt: skip
        begun = yield from self._call(begin)
        if not isinstance(begun, RecordBegun):
            return
        if begun.outcome is BeginOutcome.COMPLETED:
            self._ledger.told_completed(self.name, key, begun.result)
            self._next_document(lease, key)
        elif begun.outcome is BeginOutcome.UNKNOWN:
            resolution = Resolution.RETRY if self._world.chance(500) else Resolution.FORGET
            if key not in self._ledger.told_complete:
                resolve = ResolveRecord(
                    tenant=TENANT, key=key, attempt=begun.attempt, resolution=resolution, actor=self.name, reason="sim"
                )
                yield from self._call(resolve)
        elif begun.outcome is BeginOutcome.NEW:
            yield self._sleep(self._world.between(1 * MILLISECOND, 100 * MILLISECOND))
            yield from self._finish_record(lease, key, begun.attempt)

    def _finish_record(self, lease: str, key: str, attempt: int) -> Step:
        if self._world.chance(100):
            yield from self._call(
                FailRecord(tenant=TENANT, key=key, session=self._session, attempt=attempt, retryable=True, error="sim")
            )
            return
        result = f"{self.name} {attempt}".encode()
        complete = CompleteRecord(tenant=TENANT, key=key, session=self._session, attempt=attempt, result=result)
        completed = yield from self._call(complete)
        if isinstance(completed, RecordCompleted):
            self._ledger.told_completed(self.name, key, result)
            self._next_document(lease, key)

    def _next_document(self, lease: str, key: str) -> None:
        number = self._world.documents.get(lease, 0)
        if key == f"{lease}-{number}":
            self._world.documents[lease] = number + 1

    # ---- trust

    def _margin_us(self) -> int:
        return max(self._ttl_ms * 10, 5 * MILLISECOND)

    def _trust_from(self, sent_us: int) -> None:
        self._world.detail(self.name, f"its session {self._session} is confirmed")
        self._safe_until_us = max(self._safe_until_us, sent_us + self._ttl_ms * MILLISECOND - self._margin_us())
        self._update_beliefs()
        life = self._life
        delay_us = self._clock.until_us(self._safe_until_us / 1_000_000)
        self._world.after(delay_us, lambda: self._lapse(life))

    def _safe_until_virtual_us(self) -> int:
        left_us = self._safe_until_us - self._clock.monotonic_us()
        return self._world.now_us + left_us * 1_000_000 // (1_000_000 + self._clock.rate_ppm)

    def _alive(self) -> bool:
        return bool(self._session) and self._clock.monotonic_us() < self._safe_until_us

    def _lapse(self, life: int) -> None:
        """safe_until has passed without a confirmed renewal: whatever was held is lost, and the work was cancelled."""
        if life == self._life and self._session and not self._alive():
            self._lose_everything()

    def _lose_everything(self) -> None:
        if self._tokens:
            self._world.reach("lease lost by its holder's own clock")
        for lease in list(self._tokens):
            self._drop(lease)

    def _update_beliefs(self) -> None:
        until_us = self._safe_until_virtual_us()
        for lease, token in self._tokens.items():
            self._ledger.believe(lease, Belief(self.name, token, until_us))

    def _hold(self, lease: str, token: int) -> None:
        if token in self._finished_tokens or not self._alive():
            return
        self._tokens[lease] = token
        self._ledger.believe(lease, Belief(self.name, token, self._safe_until_virtual_us()))

    def _drop(self, lease: str) -> None:
        token = self._tokens.pop(lease, None)
        if token is not None:
            self._finished_tokens[token] = True
            self._ledger.disbelieve(lease, self.name)

    # ---- keeping the session

    def _keep_alive(self, life: int) -> None:
        def again(delay_us: int) -> None:
            self._world.after(delay_us, lambda: self._keep_alive(life))

        if life != self._life or not self._session:
            return
        sent_us = self._clock.monotonic_us()
        session, connection, home = self._session, self._connection, self._home

        def answered(outcome: Any) -> None:
            if life != self._life or session != self._session:
                return
            if isinstance(outcome, SessionsRenewed) and not outcome.superseded:
                if self._connection == connection:
                    self._trust_if_not_lapsed(sent_us)
                again(self._keepalive_us())
            elif isinstance(outcome, Refused):
                self._end_life()
            else:
                if home is self._home and not isinstance(outcome, SessionsRenewed):
                    self._leave_home()
                elif isinstance(outcome, SessionsRenewed) and connection == self._connection:
                    self._spawn_attach()
                again(self._ttl_ms * MILLISECOND // 10)

        timeout_ms = max(self._ttl_ms // 5, 50)
        self._send(
            home,
            lambda process, done: process.renew(session, connection, timeout_ms, done),
            timeout_ms,
            answered,
        )

    def _trust_if_not_lapsed(self, sent_us: int) -> None:
        if not self._alive():
            for lease in list(self._tokens):
                self._drop(lease)
        self._trust_from(sent_us)

    def _keepalive_us(self) -> int:
        return self._ttl_ms * MILLISECOND // 3

    def _leave_home(self) -> None:
        """Its sidecar does not answer: on to another one. Ending a stream oneself shortens what may be relied on."""
        old, connection = self._home, self._connection
        others = [host for host in self._world.hosts.values() if host is not old]
        if others:
            self._home = others[self._world.between(0, len(others) - 1)]
        if not connection:
            self._listen()
            return
        grace_us = self._clock.monotonic_us() + _GRACE_MS * MILLISECOND - self._margin_us()
        self._safe_until_us = min(self._safe_until_us, grace_us)
        self._update_beliefs()
        life = self._life
        self._world.after(self._clock.until_us(self._safe_until_us / 1_000_000), lambda: self._lapse(life))
        session = self._session
        self._notice_broken_stream(old, session, connection)
        self._spawn_attach()

    def _notice_broken_stream(self, host: Host, session: str, connection: str) -> None:
        """The sidecar reads the end of the stream and says so to the cluster."""

        def detach() -> None:
            process = host.process
            if isinstance(process, CoreProcess):
                process.listeners.pop(session, None)
                process.submit(DetachSession(session=session, connection=connection), None, 5_000, lambda _: None)

        life = host.life
        self._world.after(self._world.between(*_LOCAL_US), lambda: host.run(life, detach))

    def _spawn_attach(self) -> None:
        """Beside the main script: a new connection takes the session over."""
        command = self._attach_command()
        self._listen()
        life, connection, home = self._life, self._connection, self._home
        sent_us = self._clock.monotonic_us()

        def answered(outcome: Any) -> None:
            if life != self._life or connection != self._connection:
                return
            if isinstance(outcome, SessionAttached):
                self._world.reach("session attached again")
                self._trust_if_not_lapsed(sent_us)
            elif isinstance(outcome, Refused) and not is_expired(outcome):
                self._end_life()

        self._send(home, self._attachment(command), _CALL_TIMEOUT_MS, answered)

    def _attachment(self, command: AttachSession) -> Ask:
        return lambda process, done: process.submit(command, None, _CALL_TIMEOUT_MS, done)

    def _attach_command(self) -> AttachSession:
        """A new stream: the next in the client's own count, so that an attach that is overtaken cannot take it back."""
        self._connection = self._new_name("stream")
        self._generation += 1
        return AttachSession(
            tenant=self._tenant,
            session=self._session,
            connection=self._connection,
            node=self._home.name,
            generation=self._generation,
        )

    def _attach(self) -> Step:
        sent_us = self._clock.monotonic_us()
        command = self._attach_command()
        connection = self._connection
        result = yield from self._call(command, natural=True)
        if isinstance(result, SessionAttached) and connection == self._connection:
            self._trust_if_not_lapsed(sent_us)

    def _listen(self) -> None:
        """Hear of events of one's own session from the sidecar one talks to."""
        session, home, life = self._session, self._home, self._life

        def hear(event: Event | None) -> None:
            self._world.after(self._world.between(*_LOCAL_US), lambda: self._heard(life, session, event))

        def register() -> None:
            if isinstance(home.process, CoreProcess):
                home.process.listeners[session] = hear

        host_life = home.life
        self._world.after(self._world.between(*_LOCAL_US), lambda: home.run(host_life, register))

    def _heard(self, life: int, session: str, event: Event | None) -> None:
        if life != self._life or session != self._session or event is None:
            return
        if event.kind in (Kind.LEASE_GRANTED, Kind.LEASE_WAIT_ENDED) and event.waiter:
            if event.waiter in self._granted:
                self._granted[event.waiter](event)
            else:
                self._early[event.waiter] = event  # the answer that one waits at all is still under way
        elif (
            event.kind is Kind.LEASE_GRANTED and event.cause == "transfer" and event.token not in self._finished_tokens
        ):
            self._world.reach("lease received by transfer")
            self._hold(event.subject, event.token)

    def _host_crashed(self, host: Host) -> None:
        """The socket to one's sidecar broke: it is gone. safe_until counts as before."""
        if host is not self._home:
            return
        life = self._life

        def notice() -> None:
            if life == self._life and host is self._home:
                self._home = self._any_host()
                if self._session:
                    self._listen()
                    if self._connection:
                        self._spawn_attach()

        self._world.after(self._world.between(*_LOCAL_US), notice)

    def _crash(self) -> None:
        """The agent's process is gone, and believes nothing any more. Its sidecar sees the stream break."""
        self._world.reach("agent crashed")
        session, connection, home = self._session, self._connection, self._home
        if connection:
            self._notice_broken_stream(home, session, connection)

    # ---- calls

    def _call(
        self, command: Command | Callable[[], Command], *, key: RequestKey | None = None, natural: bool = False
    ) -> Step:
        """Repeats a request under its own name until its outcome is certain, or until it is given up.

        Returns the result; None when given up. ``natural``: idempotent by nature, needs no name."""
        if key is None and not natural:
            key = self._new_key()
        only_definite = True
        for attempt in range(8):
            built = command if isinstance(command, Command) else command()
            home = self._home
            outcome = yield self._submission(home, built, key)
            if isinstance(outcome, Result) and not is_expired(outcome):
                return outcome
            only_definite = only_definite and _is_definite(outcome)
            if only_definite and key is not None and self._world.chance(300):
                self._ledger.told_never(self.name, key)
                self._world.reach("gave up after a definite failure")
                return None
            if attempt > 0 and self._world.chance(300):
                self._try_another_home()
            yield self._sleep(self._world.between(10 * MILLISECOND, 300 * MILLISECOND))
        return None

    def _try_another_home(self) -> None:
        self._home = self._any_host()
        if self._session:
            self._listen()

    def _new_key(self) -> RequestKey:
        """Over a stream, an operation is named by its number in the session; all before it have been answered."""
        if not self._connection:
            return RequestKey(tenant=self._tenant, origin="", name=self._new_name("request"))
        self._operations += 1
        return RequestKey(
            tenant=self._tenant,
            origin=self._session,
            name="",
            sequence=self._operations,
            acknowledged=self._operations - 1,
        )

    def _submission(self, home: Host, command: Command, key: RequestKey | None) -> Wait:
        def ask(process: CoreProcess, answer: Callable[[Any], None]) -> None:
            process.submit(command, key, _CALL_TIMEOUT_MS, answer)

        return lambda done: self._send(home, ask, _CALL_TIMEOUT_MS, done)

    def _send(
        self,
        host: Host,
        ask: Ask,
        timeout_ms: int,
        done: Callable[[Any], None],
    ) -> None:
        """There and back again over the local socket. No answer in time: None."""
        world = self._world
        answered = False

        def answer(outcome: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(outcome)

        def arrive() -> None:
            process = host.process
            if isinstance(process, CoreProcess):
                ask(process, lambda outcome: self._arrive(lambda: answer(outcome)))

        world.after(timeout_ms * MILLISECOND + 50 * MILLISECOND, lambda: answer(None))
        if host.state is HostState.DOWN:
            return
        life = host.life
        world.after(world.between(*_LOCAL_US), lambda: host.run(life, arrive))

    def _arrive(self, action: Callable[[], None]) -> None:
        """Something that a sidecar sends now gets here."""
        self._world.after(self._world.between(*_LOCAL_US), action)

    # ---- small things

    def _sleep(self, delay_us: int) -> Wait:
        return lambda done: self._world.after(delay_us, lambda: done(None))

    def _new_name(self, what: str) -> str:
        self._names += 1
        return f"{self.name}-{what}-{self._names}"

    def _any_host(self) -> Host:
        hosts = list(self._world.hosts.values())
        return hosts[self._world.between(0, len(hosts) - 1)]

    def _another_session(self) -> str:
        sessions = [session for session in self._ledger.session_safe if session != self._session]
        return sessions[self._world.between(0, len(sessions) - 1)] if sessions else ""


class Reader:
    """Reads the revision at any node behind a read barrier, and expects to see at least what was known before."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self) -> None:
        self._world.after(self._world.between(5 * MILLISECOND, 100 * MILLISECOND), self._read)

    def _read(self) -> None:
        world = self._world
        if world.calm:
            return
        hosts = list(world.hosts.values())
        host = hosts[world.between(0, len(hosts) - 1)]
        floor = world.checkers.read_floor()

        def done(saw: int | None) -> None:
            if saw is not None:
                world.checkers.read_answered(host.name, floor, saw)

        if host.running:
            host.enter(lambda: host.process.read(done) if host.process else None)
        self.start()


def populate(world: World, ledger: Ledger) -> None:
    for number in range(world.shape.clients + world.shape.agents):
        Agent(world, ledger, f"a{number + 1}").start()
    Reader(world).start()
