"""Simulated agents that work for jobs.

A worker serves jobs over its stream, or polls for runs. It follows the rules of the real client: it acts on a run only
while its session is safe by its own clock, while what it knows of switches is not stale, and until the end of the grace
once it was asked to stop. Some do what broken agents do: hang, are deaf to an interrupt, crash in the middle.

``SidecarStream`` is the sidecar's end of the stream. Which runs are told, and in what order, is decided by the
product's ``RunFeed``; what it sends arrives in order, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from tenure.v1 import job_pb2, session_pb2

from chaos.agents import Agent, Ask, SessionOver, Step, Wait
from chaos.core import CoreProcess, Ledger
from chaos.job_ledger import PARTS, STALENESS_US, JobKey, RunBelief
from chaos.profiles import MILLISECOND, SECOND
from chaos.world import Host, World
from sidecar.core.commands import (
    AcknowledgeInterrupt,
    AttachSession,
    BeginOutcome,
    BeginRecord,
    CheckpointRun,
    ClaimRun,
    CloseSession,
    Command,
    CompleteRecord,
    CompleteRun,
    FailRun,
    OwnerLoss,
    RecordBegun,
    RecordCompleted,
    Refused,
    RequestKey,
    RunClaimed,
    ServeJobs,
    SessionAttached,
    SessionOpened,
)
from sidecar.core.events import Event, Kind
from sidecar.proposer import Failed
from sidecar.services.feed import OF_RUNS, RunFeed
from sidecar.services.views import Views

_CALL_TIMEOUT_MS = 1_500
_UNSENT_MAX = 3  # of pushes; what is beyond waits in the feed

Push = session_pb2.Push | session_pb2.Attached


class SidecarStream:
    """The sidecar's end of a worker's stream."""

    def __init__(self, process: CoreProcess, session: str, connection: str, send: Callable[[Push], None]) -> None:
        """``send`` takes what goes to the agent; ``sent`` is to be called when it has left."""
        self._machine = process.machine
        self._session, self._connection = session, connection
        self._send, self._unsent = send, 0
        runtime = SimpleNamespace(clock=process.clock, proposer=process.proposer)
        self._views = Views(cast(Any, runtime))
        self._feed = RunFeed(self._machine, self._views, session, self._push, lambda: self._unsent < _UNSENT_MAX)

    def attached(self) -> session_pb2.Attached:
        return session_pb2.Attached(runs=self._feed.attached())

    def claimed(self, run: str) -> job_pb2.Run | None:
        row = self._machine.run(run)
        return None if row is None else self._views.run(row)

    def heard(self, event: Event | None) -> None:
        if event is None or event.kind is Kind.SESSION_ATTACHED:
            row = self._machine.session(self._session)
            if row is None:
                self._send(session_pb2.Push(session_lost=session_pb2.SessionLost(cause="expired")))
            elif event is None and row.connection == self._connection:
                self._feed.skipped()
        elif event.kind in OF_RUNS:
            self._feed.noticed(event)
        elif event.kind in (Kind.SESSION_EXPIRED, Kind.SESSION_CLOSED):
            self._send(session_pb2.Push(session_lost=session_pb2.SessionLost(cause="expired")))

    def _push(self, push: session_pb2.Push) -> None:
        self._unsent += 1
        self._send(push)

    def sent(self) -> None:
        self._unsent -= 1
        self._feed.send()


@dataclass
class Work:
    """A run, as its agent sees it."""

    run: job_pb2.Run
    claimed: bool  # by a poll, not given over the stream
    cause: str = ""  # it was asked to stop
    until_us: int = 0  # then: by the agent's clock, the end of the grace
    grace_us: int = 0
    deaf: bool = False  # goes on in spite of an interrupt, until the end of the grace
    dropped: bool = False  # nothing is done for it any more
    wake: list[Callable[[Any], None]] = field(default_factory=list)

    @property
    def key(self) -> JobKey:
        return (self.run.tenant, self.run.job)


class Worker(Agent):
    def __init__(self, world: World, ledger: Ledger, name: str, tenant: str, jobs: tuple[str, ...]) -> None:
        assert ledger.jobs is not None
        self._own_sidecar: Host | None = None
        super().__init__(world, ledger, name, tenant)
        self._jobs, self._book = jobs, ledger.jobs
        # Has one sidecar, in its own pod; the others know the addresses of all.
        self._own_sidecar = self._home if world.chance(500) else None
        self._labels = (("cohort", "new" if world.chance(300) else "old"),)
        self._work: dict[str, Work] = {}
        self._finished: dict[str, None] = {}  # runs that are over for this agent
        self._unanswered: dict[int, None] = {}
        self._fresh_us = 0  # by its own clock: what it knows of runs and switches is not older than this
        self._arrival_us = 0
        self._stream: SidecarStream | None = None
        self.leaving = False

    # ---- the story of a life -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.leaving:
            self._life += 1
            self._run(self._live(), self._life)

    def _live(self) -> Step:
        world = self._world
        yield from self._open()
        slots = world.between(1, 3)
        polls = world.chance(200)
        if not polls:
            yield from self._serve(self._jobs, slots)
        for _ in range(world.between(3, 12)):
            if self.leaving:
                break
            yield self._sleep(world.between(100 * MILLISECOND, 1_500 * MILLISECOND))
            if world.chance(60) and not world.calm:
                self._crash()
                return
            if polls and len(self._work) < slots:
                yield from self._poll()
            elif not polls and world.chance(100):
                served = self._jobs if world.chance(700) else self._jobs[:2]
                yield from self._serve(served, world.between(1, 3))
        yield from self._leave(polls=polls)

    def _serve(self, jobs: tuple[str, ...], slots: int) -> Step:
        yield from self._call(ServeJobs(tenant=self._tenant, session=self._session, jobs=jobs, slots=slots))

    def _leave(self, *, polls: bool) -> Step:
        """Gracefully: no new runs, those that there are come to their end."""
        if not polls:
            yield from self._serve((), 0)
        for _ in range(40):
            if not self._work:
                break
            yield self._sleep(100 * MILLISECOND)
        session = self._session
        self._forget_everything()
        yield from self._call(CloseSession(tenant=self._tenant, session=session))

    def _open(self) -> Step:
        self._ttl_ms = self._world.between(900, 6_000)
        connection = self._new_name("stream")
        sent_us = self._clock.monotonic_us()
        self._connection = ""  # the request is named as a unary one
        result = yield from self._call(self._open_command(connection, self._labels))
        if not isinstance(result, SessionOpened):
            raise SessionOver
        self._unanswered.clear()
        self._begin_session(result.session, connection, sent_us)
        yield from self._connect()
        self._keep_alive(self._life)

    def _connect(self) -> Step:
        for _ in range(8):
            sent_us = self._clock.monotonic_us()
            command = self._attach_command()
            outcome = yield self._attach_once(command)
            if isinstance(outcome, SessionAttached) and command.connection == self._connection:
                self._trust_if_not_lapsed(sent_us)
                return
            if isinstance(outcome, Refused):
                break
            yield self._sleep(self._world.between(10 * MILLISECOND, 200 * MILLISECOND))
            self._home = self._any_host()
        raise SessionOver

    def _attach_once(self, command: AttachSession) -> Wait:
        return lambda done: self._send(self._home, self._attachment(command), _CALL_TIMEOUT_MS, done)

    def _poll(self) -> Step:
        claimed: list[job_pb2.Run | None] = []
        command = ClaimRun(tenant=self._tenant, session=self._session, jobs=self._jobs)
        result = yield from self._call(command)
        if not isinstance(result, RunClaimed) or not result.run:
            return
        stream, home = self._stream, self._home

        def look(process: CoreProcess, done: Callable[[Any], None]) -> None:
            if stream is not None and process.listeners.get(self._session) == stream.heard:
                claimed.append(stream.claimed(result.run))
            done(None)

        yield lambda done: self._send(home, look, _CALL_TIMEOUT_MS, done)
        if claimed and claimed[0] is not None:
            self._start_work(claimed[0], claimed=True)

    # ---- the stream ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Events are heard over the stream, from the attach on."""

    def _attachment(self, command: AttachSession) -> Ask:
        life, connection = self._life, command.connection

        def receive(push: Push, stream: list[SidecarStream]) -> None:
            def arrive() -> None:
                if life == self._life and connection == self._connection:
                    self._pushed(push)

            def leave() -> None:
                if stream and isinstance(push, session_pb2.Push) and not push.HasField("session_lost"):
                    stream[0].sent()

            self._world.after(self._world.between(50, 20_000), leave)
            self._arrive(arrive)

        def ask(process: CoreProcess, done: Callable[[Any], None]) -> None:
            def answered(outcome: Any) -> None:
                row = process.machine.session(command.session)
                if isinstance(outcome, SessionAttached) and row is not None and row.connection == connection:
                    made: list[SidecarStream] = []
                    made.append(SidecarStream(process, command.session, connection, lambda push: receive(push, made)))
                    process.listeners[command.session] = made[0].heard
                    self._stream = made[0]
                    done(outcome)
                    receive(made[0].attached(), made)
                elif isinstance(outcome, SessionAttached):
                    done(None)  # taken over meanwhile
                else:
                    done(outcome)

            process.submit(command, None, _CALL_TIMEOUT_MS, answered)

        return ask

    def _arrive(self, action: Callable[[], None]) -> None:
        """In the order in which it was sent."""
        now_us, connection = self._world.now_us, self._connection
        self._arrival_us = max(self._arrival_us, now_us + self._world.between(100, 3_000))

        def arrive() -> None:
            if connection == self._connection:
                action()

        self._world.after(self._arrival_us - now_us, arrive)

    def _pushed(self, push: Push) -> None:
        if not self._session:
            return
        if isinstance(push, session_pb2.Attached):
            self._compare_runs(list(push.runs))
        elif push.HasField("run_assigned"):
            self._start_work(push.run_assigned.run)
        elif push.HasField("run_interrupted"):
            told = push.run_interrupted
            self._interrupted(told.run_id, told.cause, told.grace_ms)
        elif push.HasField("run_lost"):
            self._world.reach("run lost by its holder")
            self._stop_work(push.run_lost.run_id)
        elif push.HasField("session_lost"):
            self._end_life()

    def _compare_runs(self, runs: list[job_pb2.Run]) -> None:
        """What a new stream says that the session has."""
        alive = {run.run_id: run for run in runs}
        for name, work in list(self._work.items()):
            if name not in alive and not work.claimed:
                self._world.reach("run lost while the stream was broken")
                self._stop_work(name)
        for run in runs:
            if run.job:
                self._start_work(run)
            if run.interrupted:
                self._interrupted(run.run_id, run.interrupt_cause, run.remaining_ms)

    def _any_host(self) -> Host:
        return self._own_sidecar or super()._any_host()

    def _leave_home(self) -> None:
        if self._own_sidecar is None:
            super()._leave_home()

    def _try_another_home(self) -> None:
        self._leave_home()

    def _keepalive_us(self) -> int:
        return min(super()._keepalive_us(), STALENESS_US // 4)

    # ---- trust ---------------------------------------------------------------------------------------------------

    def _trust_from(self, sent_us: int) -> None:
        self._fresh_us = max(self._fresh_us, sent_us)
        super()._trust_from(sent_us)
        life = self._life
        delay_us = self._clock.until_us((self._fresh_us + STALENESS_US) / 1_000_000)
        self._world.after(delay_us, lambda: self._look_at_freshness(life))

    def _trust_if_not_lapsed(self, sent_us: int) -> None:
        if not self._alive():
            self._lose_everything()
        super()._trust_if_not_lapsed(sent_us)

    def _is_fresh(self) -> bool:
        return self._clock.monotonic_us() < self._fresh_us + STALENESS_US

    def _look_at_freshness(self, life: int) -> None:
        """Nothing is known of switches any more: fail closed."""
        if life == self._life and self._session and not self._is_fresh() and self._work:
            self._world.reach("work stopped because nothing is known of switches")
            for name in list(self._work):
                self._let_go(self._work[name])

    def _lose_everything(self) -> None:
        super()._lose_everything()
        for name in list(self._work):
            self._world.reach("run lost by its holder's own clock")
            self._stop_work(name)

    def _forget_everything(self) -> None:
        for name in list(self._work):
            self._stop_work(name)
        self._finished.clear()
        self._fresh_us = 0
        super()._forget_everything()

    def _crash(self) -> None:
        if self._work:
            self._world.reach("agent crashed in the middle of a run")
        super()._crash()

    # ---- runs ----------------------------------------------------------------------------------------------------

    def _start_work(self, run: job_pb2.Run, *, claimed: bool = False) -> None:
        if run.run_id in self._work or run.run_id in self._finished or not self._alive() or not self._is_fresh():
            return
        if not self._book.knows(self.name, run.run_id, run.token):
            return
        work = self._work[run.run_id] = Work(run, claimed, deaf=self._world.chance(250))
        self._book.told_checkpoint(self.name, run.run_id, run.checkpoint)
        self._book.believe(work.key, run.run_id, RunBelief(self.name, run.token, self._safe_until_virtual_us))
        self._run(self._do(work), self._life, beside=True)

    def _interrupted(self, name: str, cause: str, grace_ms: int) -> None:
        work = self._work.get(name)
        if work is not None and not work.cause:
            work.cause, work.grace_us = cause, grace_ms * MILLISECOND
            work.until_us = self._clock.monotonic_us() + work.grace_us
            life = self._life
            self._world.after(self._clock.until_us(work.until_us / 1_000_000), lambda: self._grace_over(work, life))
            self._wake(work)

    def _grace_over(self, work: Work, life: int) -> None:
        if life == self._life:
            self._let_go(work)

    def _stop_work(self, name: str) -> None:
        work = self._work.pop(name, None)
        if work is not None:
            self._finished[name] = None
            self._let_go(work)

    def _let_go(self, work: Work) -> None:
        """The agent does nothing for it any more, and may still say so."""
        work.dropped = True
        self._book.disbelieve(work.key, work.run.token)
        self._wake(work)

    def _wake(self, work: Work) -> None:
        waiting, work.wake = work.wake, []
        for resume in waiting:
            self._world.after(0, partial(resume, None))

    def _may_act(self, work: Work) -> bool:
        if work.dropped or not self._alive() or not self._is_fresh():
            return False
        return not work.cause or (work.deaf and self._clock.monotonic_us() < work.until_us)

    # ---- the work of a run ---------------------------------------------------------------------------------------

    def _do(self, work: Work) -> Step:
        """Its effect in parts; then how it ended."""
        if work.run.job.startswith("recorded"):
            yield from self._do_recorded(work)
            return
        done = yield from self._do_parts(work)
        if done:
            yield from self._finish(work)
        else:
            yield from self._give_up(work)

    def _do_parts(self, work: Work) -> Step:
        """Whether all of it is done. It begins where an earlier attempt has stored that it came to."""
        world, effects = self._world, self._book.effects
        if not self._may_act(work) or not effects.open(work.run.run_id):
            return False
        longest_us = (2_500 if work.run.job.startswith("long") else 500) * MILLISECOND
        for part in range(int(work.run.checkpoint or b"0"), PARTS):
            yield self._pause(work, world.between(10 * MILLISECOND, longest_us))
            if world.chance(40) and not world.calm:
                world.reach("run hangs")
                yield self._pause(work, 60 * SECOND)
            if not self._may_act(work) or not effects.write(self.name, work.run.run_id, part, work.grace_us):
                return False
            if world.chance(60) and not world.calm:
                return False  # the handler fails
            if world.chance(40) and not world.calm:
                self._crash()
                raise SessionOver
            if world.chance(300):
                yield from self._checkpoint(work, part + 1)
        return True

    def _pause(self, work: Work, delay_us: int) -> Wait:
        """Until then, or until something happens to the run."""

        def wait(done: Callable[[Any], None]) -> None:
            work.wake.append(done)
            self._world.after(delay_us, lambda: done(None))

        return wait

    def _checkpoint(self, work: Work, parts: int) -> Step:
        run, state = work.run, str(parts).encode()
        yield from self._call(
            CheckpointRun(tenant=run.tenant, session=self._session, run=run.run_id, token=run.token, state=state)
        )

    def _do_recorded(self, work: Work) -> Step:
        """The effect under a record of its own: made by one attempt, whatever becomes of the runs."""
        run = work.run
        owner_loss = OwnerLoss.RETRY if self._world.chance(700) else OwnerLoss.UNKNOWN
        begin = BeginRecord(
            tenant=run.tenant, key=run.idempotency_key, session=self._session, fingerprint=b"f", owner_loss=owner_loss
        )
        begun = yield from self._call(begin)
        if isinstance(begun, RecordBegun) and begun.outcome is BeginOutcome.COMPLETED:
            self._world.reach("effect found in its record")
            yield from self._finish(work)
            return
        done = False
        if isinstance(begun, RecordBegun) and begun.outcome is BeginOutcome.NEW:
            done = yield from self._do_parts(work)
            if done:
                complete = CompleteRecord(
                    tenant=run.tenant, key=run.idempotency_key, session=self._session, attempt=begun.attempt
                )
                done = isinstance((yield from self._call(complete)), RecordCompleted)
        if done:
            yield from self._finish(work)
        else:
            yield from self._give_up(work)

    # ---- how it ends ---------------------------------------------------------------------------------------------

    def _finish(self, work: Work) -> Step:
        run = work.run
        yield from self._say(
            work, CompleteRun(tenant=run.tenant, session=self._session, run=run.run_id, token=run.token)
        )

    def _give_up(self, work: Work) -> Step:
        run, world = work.run, self._world
        if work.cause:
            if work.deaf and world.chance(500):
                self._stop_work(run.run_id)  # it says nothing
                return
            acknowledge = AcknowledgeInterrupt(
                tenant=run.tenant, session=self._session, run=run.run_id, token=run.token, detail="sim"
            )
            yield from self._say(work, acknowledge)
            return
        fail = FailRun(
            tenant=run.tenant, session=self._session, run=run.run_id, token=run.token, error="sim",
            retryable=world.chance(850), retry_after_ms=500 if world.chance(100) else 0,
        )  # fmt: skip
        yield from self._say(work, fail)

    def _say(self, work: Work, command: Command) -> Step:
        """From now on it does nothing for the run, whatever becomes of what it says. An interrupt that comes before
        the answer makes no difference."""
        name = work.run.run_id
        if name not in self._work:
            return
        self._stop_work(name)
        result = yield from self._call(command)
        self._world.reach(_answer(command, result))

    # ---- calls: many at a time -----------------------------------------------------------------------------------

    def _new_key(self) -> RequestKey:
        """Operations before the oldest one without an answer have theirs."""
        if not self._connection:
            return super()._new_key()
        self._operations += 1
        self._unanswered[self._operations] = None
        return RequestKey(
            tenant=self._tenant,
            origin=self._session,
            name="",
            sequence=self._operations,
            acknowledged=next(iter(self._unanswered)) - 1,
        )

    def _call(
        self, command: Command | Callable[[], Command], *, key: RequestKey | None = None, natural: bool = False
    ) -> Step:
        if key is None and not natural:
            key = self._new_key()
        result = yield from super()._call(command, key=key, natural=natural)
        if key is not None and key.origin == self._session:
            self._unanswered.pop(key.sequence, None)
        return result


_SAID: dict[type, str] = {CompleteRun: "completion", FailRun: "failure", AcknowledgeInterrupt: "acknowledgement"}


def _answer(command: Command, result: object) -> str:
    said = _SAID[type(command)]
    if isinstance(result, Refused):
        return f"{said} refused: {result.reason.name.lower()}"
    return f"{said} {'not answered' if result is None or isinstance(result, Failed) else 'accepted'}"
