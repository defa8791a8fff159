"""A worker against a double: what is started, what is stopped, and what is said of it."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import tenure
from tenure import work as worker_module
from tenure.v1 import job_pb2, session_pb2, switch_pb2

from tests.client.double import Double, refusal
from tests.client.timed import Clock, connected, passes, settle, working
from tests.waiting import eventually


class Handler:
    """Notes what it is given, and ends when it is told to, or cancelled."""

    def __init__(self, client: tenure.Client, name: str = "digest") -> None:
        self.runs: list[tenure.Run] = []
        self.ended: dict[str, str | None] = {}  # by run: why
        self.go = asyncio.Event()
        client.job(name)(self.handle)

    async def handle(self, run: tenure.Run) -> str:
        self.runs.append(run)
        try:
            await self.go.wait()
        finally:
            self.ended[run.run_id] = run.interrupt_cause
        return "done"

    @property
    def started(self) -> list[str]:
        return [run.run_id for run in self.runs]


# ---- what is served --------------------------------------------------------------------------------------------


async def test_what_is_served_is_told_and_told_again(server: Double) -> None:
    async with connected(server) as client:
        Handler(client)
        async with working(client, server, slots=3):
            assert server.served == [("s1", ("digest",), 3)]
            Handler(client, "default/imports-*")
            await eventually(lambda: server.served[-1] == ("s1", ("digest", "imports-*"), 3))
            server.expire("s1")
            await eventually(lambda: server.served[-1] == ("s2", ("digest", "imports-*"), 3))
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 3)
            await settle(client)
        assert [slots for _, _, slots in server.served] == [3, 3, 3, 0]


async def test_what_is_refused_for_good_ends_work_whenever_it_is(server: Double) -> None:
    def refuse(operation: session_pb2.Operation) -> Any:
        wrong = operation.HasField("serve_jobs") and "bad" in operation.serve_jobs.jobs
        return refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", field="jobs") if wrong else None

    async with connected(server) as client:
        server.refuse = refuse
        handler = Handler(client)
        working_ = asyncio.create_task(client.work())
        await eventually(lambda: server.served)
        run = server.assign(client.session_id)
        await settle(client)
        Handler(client, "bad")
        await eventually(lambda: server.operations("serve_jobs")[-1].serve_jobs.slots == 0 or working_.done())
        handler.go.set()
        with pytest.raises(tenure.InvalidArgument):
            await working_
        assert server.reported(run) == ["complete"]  # in order, all the same
        with pytest.raises(tenure.InvalidArgument):
            await client.work()


async def test_the_announcement_is_patient(server: Double, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(operation: session_pb2.Operation) -> Any:
        busy = operation.HasField("serve_jobs") and len(server.operations("serve_jobs")) < 3
        return refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER") if busy else None

    async with connected(server, timeout=0.05) as client:
        server.refuse = refuse
        Handler(client)
        async with working(client, server):
            assert server.served
        assert "does not know yet" in caplog.text


async def test_a_stop_is_heard_while_nothing_can_be_announced(server: Double) -> None:
    async with connected(server, timeout=0.05) as client:
        server.refuse = lambda operation: refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
        Handler(client)
        stop = asyncio.Event()
        task = asyncio.create_task(client.work(stop=stop, finish_timeout=0.0))
        await eventually(lambda: server.operations("serve_jobs"))
        stop.set()
        await task


async def test_what_cannot_be_served_is_said_at_once(server: Double) -> None:
    async with connected(server) as client:
        with pytest.raises(ValueError, match="no handler"):
            await client.work()
        Handler(client)
        wrong: list[dict[str, Any]] = [{"slots": 0}, {"slots": 1_001}, {"finish_timeout": -1.0}]
        for options in wrong:
            with pytest.raises(ValueError, match=next(iter(options))):
                await client.work(**options)
        with pytest.raises(ValueError, match="has a handler already"):
            Handler(client)
        with pytest.raises(ValueError, match="of tenant 'acme'"):
            client.job("acme/digest")
        for name in ("", "a/b/c", "default/"):
            with pytest.raises(ValueError, match="NAME or TENANT/NAME"):
                client.job(name)

        async def generator(run: tenure.Run) -> Any:
            yield run

        with pytest.raises(TypeError, match="must be a function"):
            client.job("other")(generator)
        async with working(client, server):
            with pytest.raises(RuntimeError, match="works already"):
                await client.work()
        async with working(client, server):
            pass  # again is fine
    async with tenure.connect(server.address, session=False) as reader:
        with pytest.raises(tenure.InvalidArgument, match="session=False"):
            await reader.work()


# ---- started once ----------------------------------------------------------------------------------------------


async def test_a_run_that_is_told_again_and_again_is_started_once(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server, slots=9):
            run = server.assign(client.session_id)
            server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            await settle(client)
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 2)
            server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            await settle(client)
            assert handler.started == [run.run_id]
            handler.go.set()
            await server.until_reported(run)
            # It was on its way when the run ended.
            server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            await settle(client)
            assert handler.started == [run.run_id]
            assert server.reported(run) == ["complete"]


async def test_a_run_whose_report_was_refused_is_not_started_again(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        handler.go.set()
        async with working(client, server):
            server.refuse = lambda operation: (
                refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
                if operation.HasField("complete_run")
                else None
            )
            server.assign(client.session_id)
            await eventually(lambda: server.operations("complete_run"))
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 2)
            await settle(client)
            assert len(handler.runs) == 1


async def test_runs_that_are_still_going_are_known_however_many_came_since(
    server: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STARTED_REMEMBERED_MAX", 2)
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server, slots=9):
            runs = [server.assign(client.session_id) for _ in range(5)]
            await eventually(lambda: len(handler.runs) == 5)
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 2)
            await settle(client)
            assert handler.started == [run.run_id for run in runs]
            handler.go.set()


async def test_what_an_attach_lists(server: Double) -> None:
    """What is new begins, what is left out is lost, and of what is named only, the rest follows."""
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server, slots=9, finish_timeout=0.0):
            kept, gone, short = (server.assign(client.session_id) for _ in range(3))
            await eventually(lambda: len(handler.runs) == 3)
            del server.runs[gone.run_id]
            new = server.assign(client.session_id, push=False)
            later = server.assign(client.session_id, push=False)
            server.in_short = {short.run_id, later.run_id}
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 2 and len(handler.runs) == 4)
            await settle(client)
            assert handler.ended == {gone.run_id: "lost"}
            assert handler.started[-1] == new.run_id
            for run in (later, kept, short):
                server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            await settle(client)
            assert handler.started[4:] == [later.run_id]
            assert not server.reported(gone)


async def test_an_interrupt_of_a_run_named_only_comes_with_the_whole_of_it(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            run.interrupted, run.interrupt_cause, run.remaining_ms = True, "killed", 4_000
            server.in_short = {run.run_id}
            server.break_streams()
            await eventually(lambda: len(server.attaches) == 2)
            await settle(client)
            assert not handler.ended
            server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            assert (await server.until_reported(run))[0] == "acknowledge"
            assert 0 < handler.runs[0].remaining() <= 4 or handler.runs[0].remaining() == 0
            assert handler.ended == {run.run_id: "killed"}


async def test_what_comes_with_the_answer_to_an_attach_is_not_lost(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id, push=False)
            server.in_short = {run.run_id}
            server.with_attached = [session_pb2.Push(run_assigned=session_pb2.RunAssigned(run=run))]
            server.break_streams()
            await eventually(lambda: handler.started == [run.run_id])
            handler.go.set()


async def test_a_new_session_begins_while_runs_of_the_old_one_clean_up(server: Double) -> None:
    async with connected(server) as client:
        cleaned = asyncio.Event()
        causes: list[str | None] = []

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            if run.attempt == 2:
                return
            try:
                await asyncio.Event().wait()
            finally:
                causes.append(run.interrupt_cause)
                assert not run.valid
                await cleaned.wait()

        async with working(client, server, slots=2):
            old = server.assign(client.session_id)
            await settle(client)
            server.expire("s1")
            # What still cleans up has its slot.
            await eventually(lambda: server.served[-1] == ("s2", ("digest",), 1))
            new = server.assign("s2", attempt=2)
            assert (await server.until_reported(new))[0] == "complete"
            cleaned.set()
            await eventually(lambda: server.served[-1] == ("s2", ("digest",), 2))
            assert causes == ["session_ended"]
            assert not server.reported(old)


async def test_nothing_is_started_that_nobody_handles(server: Double) -> None:
    async with connected(server) as client:
        Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id, job="unknown")
            what, request = await server.until_reported(run)
            assert (what, request.retryable) == ("fail", True)
            assert "no handler" in request.error


async def test_the_longest_pattern_that_fits_is_taken_and_a_name_before_it(server: Double) -> None:
    async with connected(server) as client:
        handlers = {name: Handler(client, name) for name in ("*", "imports-*", "imports-eu", "imports-e*")}
        for handler in handlers.values():
            handler.go.set()
        async with working(client, server, slots=9):
            for job in ("imports-eu", "imports-es", "imports-us", "digest"):
                await server.until_reported(server.assign(client.session_id, job))
        assert {name: [run.job for run in handler.runs] for name, handler in handlers.items()} == {
            "*": ["digest"],
            "imports-*": ["imports-us"],
            "imports-eu": ["imports-eu"],
            "imports-e*": ["imports-es"],
        }


# ---- what a run is ---------------------------------------------------------------------------------------------


async def test_what_a_handler_sees(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            message = server.assign(
                client.session_id,
                payload=b'{"a": 1}',
                attempt=2,
                checkpoint=b"half",
                kill_epoch=3,
                sequence=1,
                origin=job_pb2.OCCURRENCE_ORIGIN_BACKFILL,
                traceparent="00-1-2-01",
                job_revision=4,
                remaining_ms=60_000,
            )
            await eventually(lambda: handler.runs)
            run = handler.runs[0]
            assert (run.run_id, run.job, run.tenant, run.attempt, run.token) == ("r1", "digest", "default", 2, 1)
            assert run.due.isoformat() == "2023-11-14T22:13:20+00:00"
            assert (run.sequence, run.origin, run.kill_epoch, run.job_revision) == (1, "backfill", 3, 4)
            assert (run.payload, run.json()) == (b'{"a": 1}', {"a": 1})
            assert run.last_checkpoint == b"half"
            assert run.key("mail") == f"{message.idempotency_key}/mail"
            assert run.session_id == client.session_id
            assert run.valid
            assert not run.cancelled
            assert 0 < run.remaining() <= 60
            assert run.safe_until < run.deadline  # the session's end comes first
            run.raise_if_cancelled()
            handler.go.set()
            await server.until_reported(message)
            assert not run.valid
            assert run.remaining() == 0


async def test_checkpoints(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            message = server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            run = handler.runs[0]
            assert run.last_checkpoint is None
            states: list[Any] = [b"raw", "text", {"n": 1}, b"x" * 16_384]
            for state, stored in zip(states, (b"raw", b"text", b'{"n":1}', b"x" * 16_384), strict=True):
                await run.checkpoint(state)
                assert server.runs[message.run_id].checkpoint == stored
                assert run.last_checkpoint == stored
            with pytest.raises(tenure.InvalidArgument, match="16385 bytes") as refused:
                await run.checkpoint(b"x" * 16_385)
            assert refused.value.field == "state"
            for state in (object(), "\ud800", float("nan")):
                with pytest.raises(TypeError, match="the state can be"):
                    await run.checkpoint(state)
            assert run.last_checkpoint == b"x" * 16_384
            server.runs[message.run_id].interrupted = True
            with pytest.raises(tenure.RunEnded) as over:
                await run.checkpoint("late")
            assert over.value.reason == "RUN_INTERRUPTED"
            handler.go.set()
            await server.until_reported(message)
            await eventually(lambda: run.remaining() == 0)
            with pytest.raises(tenure.RunEnded):
                await run.checkpoint("too late")
        server.expire(client.session_id)


async def test_a_checkpoint_of_a_session_that_is_gone(server: Double) -> None:
    async with connected(server) as client:
        refused: list[BaseException] = []

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                with pytest.raises(tenure.RunEnded) as caught:
                    await run.checkpoint("late")
                refused.append(caught.value)

        async with working(client, server):
            server.assign(client.session_id)
            await settle(client)
            server.expire(client.session_id)
            await eventually(lambda: refused)


# ---- how it ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "result"),
    [(None, b""), (b"raw", b"raw"), ("text", b"text"), ({"a": [1]}, b'{"a":[1]}'), (bytearray(b"x"), b"x")],
)
async def test_a_result(server: Double, value: Any, result: bytes) -> None:
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> Any:
            return value

        async with working(client, server):
            what, request = await server.until_reported(server.assign(client.session_id))
            assert (what, request.result) == ("complete", result)


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", ["\ud800", float("nan"), object(), nested(), b"x" * 16_385], ids=["text", "nan", "object", "deep", "large"]
)
async def test_what_was_done_is_done_though_its_result_cannot_be_stored(
    server: Double, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> Any:
            return value

        async with working(client, server):
            what, request = await server.until_reported(server.assign(client.session_id))
            assert (what, request.result) == ("complete", b"")
        assert "its result is not stored" in caplog.text


FAILURES: list[tuple[BaseException, str, bool, int]] = [
    (tenure.Retry("busy", after=30), "busy", True, 30_000),
    (tenure.Retry(), "the handler asked for another attempt", True, 0),
    (tenure.Retry("next week", after=7 * 86_400), "next week", True, 86_400_000),
    (tenure.Retry("some day", after=float("inf")), "some day", True, 86_400_000),
    (tenure.Permanent("bad input"), "bad input", False, 0),
    (tenure.Permanent(), "the handler failed for good", False, 0),
    (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero", True, 0),
    (ValueError(), "ValueError", True, 0),
    (ValueError("\ud800"), "ValueError: ?", True, 0),
    (ValueError("ü" * 5_000), "ValueError: " + "ü" * 2_042, True, 0),
    (asyncio.CancelledError(), "cancelled: by its own code", True, 0),
]


@pytest.mark.parametrize(("error", "text", "retryable", "after_ms"), FAILURES)
async def test_a_failure(server: Double, error: BaseException, text: str, retryable: bool, after_ms: int) -> None:
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            raise error

        async with working(client, server):
            what, request = await server.until_reported(server.assign(client.session_id))
            assert what == "fail"
            assert (request.error, request.retryable, request.retry_after_ms) == (text, retryable, after_ms)


@pytest.mark.parametrize("after", [-1.0, float("nan")])
def test_a_wait_that_is_none(after: float) -> None:
    with pytest.raises(ValueError, match="after must be"):
        tenure.Retry("no", after=after)


async def test_a_report_over_a_broken_stream_is_one(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        handler.go.set()
        async with working(client, server):
            server.drop_answers = True
            run = server.assign(client.session_id)
            await server.until_reported(run)
            server.drop_answers = False
            server.break_streams()
            await eventually(lambda: len(server.operations("complete_run")) == 2)
            await settle(client)
            first, second = server.operations("complete_run")
            assert first.id == second.id
            assert server.reported(run) == ["complete"]
            assert len(handler.runs) == 1


async def test_a_report_is_repeated_until_it_is_taken(server: Double) -> None:
    def refuse(operation: session_pb2.Operation) -> Any:
        reports = server.operations("complete_run")
        if not operation.HasField("complete_run") or len(reports) > 3:
            return None
        return refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER", definite=len(reports) != 2)

    async with connected(server, timeout=0.3) as client:
        server.refuse = refuse
        handler = Handler(client)
        handler.go.set()
        async with working(client, server):
            run = server.assign(client.session_id)
            await server.until_reported(run)
        assert server.reported(run) == ["complete"]


async def test_a_report_of_a_session_that_is_gone_is_given_up(server: Double, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        handler.go.set()
        async with working(client, server):
            server.drop_answers = True
            server.assign(client.session_id)
            await eventually(lambda: server.operations("complete_run"))
            server.drop_answers = False
            server.expire(client.session_id)
            await eventually(lambda: server.served[-1][0] == "s2")
            await eventually(lambda: "and so has the session" in caplog.text)


# ---- interrupts ------------------------------------------------------------------------------------------------


async def test_an_interrupt_is_acknowledged_when_the_handler_has_ended_and_not_before(server: Double) -> None:
    async with connected(server) as client:
        cleaned = asyncio.Event()
        runs: list[tenure.Run] = []

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            runs.append(run)
            try:
                await asyncio.Event().wait()
            finally:
                await cleaned.wait()

        async with working(client, server):
            run = server.assign(client.session_id)
            await eventually(lambda: runs)
            server.interrupt(run)
            await eventually(lambda: runs[0].cancelled)
            assert not runs[0].valid
            assert 9 < runs[0].remaining() <= 10
            assert (runs[0].interrupt_cause, runs[0].interrupt_reason, runs[0].switch_id) == ("killed", "test", "k1")
            with pytest.raises(tenure.RunEnded, match="killed"):
                runs[0].raise_if_cancelled()
            await settle(client)
            assert not server.reports
            cleaned.set()
            what, request = await server.until_reported(run)
            assert (what, request.detail) == ("acknowledge", "stopped")


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_interrupt_before_the_first_step(server: Double, kind: str) -> None:
    started: list[str] = []
    async with connected(server) as client:

        async def handle(run: tenure.Run) -> None:
            started.append(run.run_id)

        def handle_in_thread(run: tenure.SyncRun) -> None:
            started.append(run.run_id)

        client.job("digest")(handle if kind == "async" else handle_in_thread)
        async with working(client, server):
            run = server.assign(client.session_id, interrupted=True, interrupt_cause="killed")
            what, request = await server.until_reported(run)
            assert (what, request.detail) == ("acknowledge", "not started")
            if kind == "async":
                # Both in one message: the handler's task has been made and has not had its turn.
                run = server.assign(client.session_id, push=False)
                pushes = [
                    session_pb2.Push(run_assigned=session_pb2.RunAssigned(run=run)),
                    session_pb2.Push(
                        run_interrupted=session_pb2.RunInterrupted(run_id=run.run_id, cause="killed", grace_ms=1)
                    ),
                ]
                stream = server.sessions[client.session_id].stream
                assert stream is not None
                stream.outbox.put_nowait(session_pb2.ConnectResponse(pushes=pushes))
                assert (await server.until_reported(run))[0] == "acknowledge"
        assert not started


async def test_what_a_handler_returns_has_happened_also_after_an_interrupt(server: Double) -> None:
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "was done"
            return ""

        async with working(client, server):
            run = server.assign(client.session_id)
            await settle(client)
            server.interrupt(run)
            what, request = await server.until_reported(run)
            assert (what, request.result) == ("complete", b"was done")


async def test_an_interrupt_after_the_handler_returned_changes_nothing(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        handler.go.set()
        async with working(client, server):
            server.drop_answers = True
            run = server.assign(client.session_id, push=False)
            server.runs.pop(run.run_id)  # its report will not be found, and so be repeated
            server.tell(client.session_id, run_assigned=session_pb2.RunAssigned(run=run))
            await eventually(lambda: server.operations("complete_run"))
            server.tell(
                client.session_id,
                run_interrupted=session_pb2.RunInterrupted(run_id=run.run_id, cause="killed", grace_ms=1_000),
            )
            server.drop_answers = False
            server.break_streams()
            await eventually(lambda: len(server.operations("complete_run")) == 2)
            await settle(client)
            assert not server.operations("acknowledge_interrupt")
            assert handler.ended == {run.run_id: None}


async def test_an_error_of_the_cleanup_is_told_with_the_acknowledgement(server: Double) -> None:
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise OSError("disk full")

        async with working(client, server):
            run = server.assign(client.session_id)
            await settle(client)
            server.interrupt(run)
            what, request = await server.until_reported(run)
            assert (what, request.detail) == ("acknowledge", "OSError: disk full")


async def test_a_second_interrupt_does_not_cut_the_cleanup(server: Double) -> None:
    async with connected(server) as client:
        cleaned = asyncio.Event()
        cancellations = 0

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            nonlocal cancellations
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancellations += 1
                await cleaned.wait()
                raise

        async with working(client, server):
            run = server.assign(client.session_id)
            await settle(client)
            for cause in ("overlap", "killed"):
                server.interrupt(run, cause)
            await settle(client)
            cleaned.set()
            await server.until_reported(run)
            assert cancellations == 1


async def test_nothing_is_reported_of_a_lost_run(server: Double, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            server.lose(run)
            await eventually(lambda: handler.ended == {run.run_id: "timeout"})
            await settle(client)
            assert not [
                m for kind in ("complete_run", "fail_run", "acknowledge_interrupt") for m in server.operations(kind)
            ]
            server.tell(client.session_id, run_lost=session_pb2.RunLost(run_id="r99"))  # not ours
            server.tell(client.session_id, run_interrupted=session_pb2.RunInterrupted(run_id="r99"))
            await settle(client)


# ---- the right to act, by the clock ----------------------------------------------------------------------------


async def test_a_run_goes_on_for_as_long_as_everything_is_confirmed(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock) as client:
        handler = Handler(client)
        async with working(client, server, finish_timeout=0.0):
            server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            for number in range(2, 6):
                await passes(client, server, clock, 6.0)
                server.break_streams()
                await eventually(lambda number=number: len(server.attaches) == number and client.node_id)  # type: ignore[misc]
                await settle(client)
                assert handler.runs[0].valid
            assert not handler.ended


async def test_the_deadline_is_kept_by_the_clock_where_no_interrupt_comes(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id, remaining_ms=3_000)
            await eventually(lambda: handler.runs)
            await passes(client, server, clock, 2.75)
            assert handler.runs[0].valid
            await passes(client, server, clock, 0.25)
            assert not handler.runs[0].valid  # by the clock
            with pytest.raises(tenure.RunEnded, match="its time is over"):
                handler.runs[0].raise_if_cancelled()
            assert not handler.ended  # and cancelled by the sidecar's interrupt, if it comes
            await passes(client, server, clock, 0.5)
            what, request = await server.until_reported(run)
            assert (what, request.error) == ("fail", "cancelled: timeout")
            assert handler.ended == {run.run_id: "timeout"}


async def test_runs_stop_when_nothing_is_known_of_the_switches(server: Double) -> None:
    """K02: the link is silent for longer than the staleness."""
    clock = Clock()
    async with connected(server, clock) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            await passes(client, server, clock, 3.0)
            server.acknowledge = False
            await passes(client, server, clock, 3.5)
            assert handler.runs[0].valid
            await passes(client, server, clock, 1.5)
            assert not handler.runs[0].valid
            what, request = await server.until_reported(run)
            assert (what, request.error, request.retryable) == ("fail", "cancelled: switch_state_unknown", True)


async def test_fail_open_goes_on_and_says_so_each_minute(server: Double, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with connected(server, clock, fail_open=True, ttl_ms=3_600_000) as client:
        handler = Handler(client)
        async with working(client, server, finish_timeout=0.0):
            server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            server.acknowledge = False
            caplog.clear()
            await passes(client, server, clock, 6.0)
            assert client.switch_state() is tenure.SwitchState.UNKNOWN
            await passes(client, server, clock, 120.0, step=1.0)
            assert handler.runs[0].valid
            assert len([record for record in caplog.records if "fail_open" in record.message]) == 3
            assert client.went_on_unknown == 3


async def test_a_kill_that_is_known_forbids_to_act_before_its_interrupt_has_come(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server, slots=2, finish_timeout=0.0):
            server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            server.switch(switch_pb2.SWITCH_MODE_KILL, "other")
            server.switch(switch_pb2.SWITCH_MODE_PAUSE, "digest")
            await settle(client)
            assert handler.runs[0].valid
            server.switch(switch_pb2.SWITCH_MODE_KILL, "digest")
            await settle(client)
            assert not handler.runs[0].valid
            assert not handler.ended  # the interrupt says how long it has to clean up


async def test_runs_stop_before_the_session_can_be_lost(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock, switch_staleness=60.0) as client:
        handler = Handler(client)
        async with working(client, server):
            server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            server.mute = True
            await passes(client, server, clock, 12.5)
            assert not handler.ended
            await passes(client, server, clock, 0.5)
            assert list(handler.ended.values()) == ["session_in_danger"]
            assert client.session_id == "s1"
            server.mute = False


async def test_a_handler_that_looks_and_ends_has_not_failed_loudly(
    server: Double, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with connected(server, clock) as client:

        @client.job("digest")
        def handler(run: tenure.SyncRun) -> None:
            while True:
                run.raise_if_cancelled()
                run.wait_cancelled(0.01)

        async with working(client, server):
            run = server.assign(client.session_id)
            await settle(client)
            server.acknowledge = False
            await passes(client, server, clock, 5.25)
            what, request = await server.until_reported(run)
            assert (what, request.retryable) == ("fail", True)
            assert "switch_state_unknown" in request.error
            assert "handler of run" not in caplog.text


async def test_a_handler_that_outlives_its_grace_is_complained_of_once(
    server: Double, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with connected(server, clock) as client:
        cleaned = asyncio.Event()

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await cleaned.wait()

        async with working(client, server, slots=2):
            run = server.assign(client.session_id)
            await settle(client)
            server.interrupt(run, grace_ms=2_000)
            await passes(client, server, clock, 1.5)
            assert "does not end" not in caplog.text
            await passes(client, server, clock, 3.0)
            server.lose(run, "interrupted")
            await eventually(lambda: server.served[-1][2] == 1)
            cleaned.set()
            await eventually(lambda: server.served[-1][2] == 2)
        assert len([record for record in caplog.records if "does not end" in record.message]) == 1


async def test_keepalives_are_frequent_while_something_is_served_and_only_then(server: Double) -> None:
    clock = Clock()
    async with connected(server, clock) as client:

        async def keepalives(seconds: float) -> int:
            server.received.clear()
            await passes(client, server, clock, seconds)
            return len([message for message in server.received if message.HasField("keep_alive")])

        assert 1 <= await keepalives(10) <= 3
        Handler(client)
        async with working(client, server):
            assert 7 <= await keepalives(10) <= 9
            server.expire(client.session_id)
            await eventually(lambda: server.served[-1][0] == "s2")
            await settle(client)
            assert 7 <= await keepalives(10) <= 9
        await passes(client, server, clock, 2)
        assert 1 <= await keepalives(10) <= 3


# ---- threads ---------------------------------------------------------------------------------------------------


async def test_a_handler_that_is_a_function(server: Double) -> None:
    seen: list[Any] = []
    async with connected(server) as client:

        @client.job("digest")
        def handler(run: tenure.SyncRun) -> dict[str, int]:
            run.checkpoint({"page": 1})
            seen.extend([threading.current_thread(), run.valid, run.last_checkpoint, run.payload])
            with pytest.raises(tenure.InvalidArgument):
                run.checkpoint(b"x" * 16_385)
            return {"n": 1}

        async with working(client, server):
            run = server.assign(client.session_id, payload=b"p")
            what, request = await server.until_reported(run)
            assert (what, request.result) == ("complete", b'{"n":1}')
        assert seen[0] is not threading.current_thread()
        assert seen[1:] == [True, b'{"page":1}', b"p"]


async def test_a_function_that_returns_a_coroutine_has_not_run_and_is_not_reported_as_done(server: Double) -> None:
    async with connected(server) as client:

        async def hidden() -> None: ...

        client.job("digest")(lambda run: hidden())
        async with working(client, server):
            what, request = await server.until_reported(server.assign(client.session_id))
            assert (what, request.retryable) == ("fail", False)
            assert "must be an async function" in request.error


@pytest.mark.parametrize("error", [StopIteration(1), SystemExit(3), asyncio.CancelledError()])
async def test_a_thread_that_raises_what_no_future_can_hold(server: Double, error: BaseException) -> None:
    async with connected(server) as client:

        @client.job("digest")
        def handler(run: tenure.SyncRun) -> None:
            raise error

        async with working(client, server):
            what, request = await server.until_reported(server.assign(client.session_id))
            assert what == "fail"
            assert type(error).__name__ in request.error


async def test_a_thread_keeps_its_slot_until_it_ends(server: Double) -> None:
    go = threading.Event()
    seen: list[bool] = []
    async with connected(server) as client:

        @client.job("digest")
        def handler(run: tenure.SyncRun) -> str:
            go.wait(20)
            seen.append(run.cancelled)
            return "late"

        async with working(client, server, slots=2):
            run = server.assign(client.session_id)
            await settle(client)
            server.interrupt(run, grace_ms=0)
            server.lose(run, "interrupted")
            await eventually(lambda: server.served[-1][2] == 1)
            go.set()
            await eventually(lambda: server.served[-1][2] == 2)
            assert seen == [True]
            assert not server.operations("complete_run")


# ---- the end of work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["event", "stop_work", "cancel"])
async def test_work_ends_in_order(server: Double, how: str) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        stop = asyncio.Event()
        task = asyncio.create_task(client.work(slots=2, stop=stop))
        await eventually(lambda: server.served)
        run = server.assign(client.session_id)
        await eventually(lambda: handler.runs)
        ends: dict[str, Callable[[], object]] = {
            "event": stop.set, "stop_work": client.stop_work, "cancel": task.cancel
        }  # fmt: skip
        ends[how]()
        await eventually(lambda: server.served[-1][2] == 0)
        await settle(client)
        assert not task.done()
        assert handler.runs[0].valid
        handler.go.set()
        await asyncio.wait({task})
        assert task.cancelled() == (how == "cancel")
        assert server.reported(run) == ["complete"]


async def test_cancelled_twice_it_ends_at_once(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        task = asyncio.create_task(client.work())
        await eventually(lambda: server.served)
        run = server.assign(client.session_id)
        await eventually(lambda: handler.runs)
        task.cancel()
        await eventually(lambda: server.served[-1][2] == 0)
        assert not handler.ended
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert handler.ended == {run.run_id: "stopped"}
        what, request = await server.until_reported(run)
        assert (what, request.error, request.retryable) == ("fail", "cancelled: stopped", True)


async def test_what_does_not_end_in_time_is_cancelled_and_reported_before_work_returns(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        task = asyncio.create_task(client.work(finish_timeout=0.05))
        await eventually(lambda: server.served)
        run = server.assign(client.session_id)
        await eventually(lambda: handler.runs)
        client.stop_work()
        await task
        assert server.reported(run) == ["fail"]
        assert server.served[-1][2] == 0


async def test_a_run_that_was_on_its_way_when_work_was_to_end_is_done(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        handler.go.set()
        late: list[job_pb2.Run] = []

        def refuse(operation: session_pb2.Operation) -> Any:
            if operation.HasField("serve_jobs") and operation.serve_jobs.slots == 0:
                late.append(server.assign(client.session_id))  # before the answer
            return None

        server.refuse = refuse
        async with working(client, server):
            pass
        assert [server.reported(run) for run in late] == [["complete"]]


async def test_nothing_is_started_once_work_has_returned(server: Double) -> None:
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            pass
        assert server.served[-1][2] == 0
        run = server.assign(client.session_id)
        what, request = await server.until_reported(run)
        assert (what, request.retryable) == ("fail", True)
        assert "has stopped working" in request.error
        assert not handler.runs


async def test_close_ends_what_runs_and_says_what_became_of_it(server: Double) -> None:
    client = await tenure.connect(server.address)
    handler = Handler(client)

    @client.job("stubborn")
    async def stubborn(run: tenure.Run) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "was done"
        return ""

    task = asyncio.create_task(client.work(slots=2))
    await eventually(lambda: server.served)
    runs = [server.assign(client.session_id, job) for job in ("digest", "stubborn")]
    await settle(client)
    await client.close()
    await task
    assert list(handler.ended.values()) == ["client_closed"]
    assert [server.reported(run) for run in runs] == [["fail"], ["complete"]]
    assert server.closed_sessions == ["s1"]


async def test_close_does_not_wait_for_a_thread_for_ever(
    server: Double, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "STUBBORN_S", 0.05)
    go = threading.Event()
    ended: list[str] = []
    client = await tenure.connect(server.address)

    @client.job("digest")
    def handler(run: tenure.SyncRun) -> None:
        go.wait(20)
        with pytest.raises(tenure.RunEnded):
            run.checkpoint("late")
        ended.append(run.run_id)

    task = asyncio.create_task(client.work())
    await eventually(lambda: server.served)
    server.assign(client.session_id)
    await settle(client)
    await client.close()
    await task
    assert "does not end (client_closed)" in caplog.text
    go.set()
    await eventually(lambda: ended)


async def test_close_does_not_wait_for_reports_that_nobody_takes(
    server: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_WORDS_S", 0.05)
    client = await tenure.connect(server.address, timeout=0.1)
    handler = Handler(client)
    task = asyncio.create_task(client.work())
    await eventually(lambda: server.served)
    server.assign(client.session_id)
    await eventually(lambda: handler.runs)
    await server.stop()
    await client.close()
    await task
    await server.start()


async def test_close_inside_a_handler_is_refused(server: Double) -> None:
    said: list[BaseException] = []
    async with connected(server) as client:

        @client.job("digest")
        async def handler(run: tenure.Run) -> None:
            try:
                await client.close()
            except RuntimeError as error:
                said.append(error)

        async with working(client, server):
            run = server.assign(client.session_id)
            assert (await server.until_reported(run))[0] == "complete"
        assert "inside a handler" in str(said[0])


async def test_work_leaves_no_task_behind(server: Double) -> None:
    before = asyncio.all_tasks()
    async with connected(server) as client:
        handler = Handler(client)
        async with working(client, server):
            run = server.assign(client.session_id)
            await eventually(lambda: handler.runs)
            server.interrupt(run)
            await server.until_reported(run)
        assert not client._worker._runs
        assert not client._worker._tasks
    await eventually(lambda: not {t for t in asyncio.all_tasks() - before if "tenure" in str(t.get_coro())})


# ---- at random -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(8))
async def test_random_lives(server: Double, number: int) -> None:
    """Whatever happens to runs, streams and sessions: none is started twice, none that is still ours is forgotten."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    started: list[str] = []
    async with connected(server) as client:

        async def life(run: tenure.Run) -> str:
            started.append(run.run_id)
            try:
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
                if rng.random() < 0.3:
                    await run.checkpoint("x")
                if rng.random() < 0.2:
                    raise tenure.Retry
                if rng.random() < 0.6:
                    await asyncio.sleep(rng.random() / 50)
            except asyncio.CancelledError:
                if rng.random() < 0.5:
                    raise
            except tenure.RunEnded:
                pass
            return "done"

        client.job("digest")(life)
        async with working(client, server, slots=20):
            runs: list[job_pb2.Run] = []
            for _ in range(150):
                act = rng.choice(
                    ["assign", "assign", "assign", "again", "interrupt", "lose", "break", "expire", "rest"]
                )
                session = next(iter(server.sessions), None)
                alive = list(server.runs.values())
                if act == "assign" and session is not None:
                    runs.append(server.assign(session, push=rng.random() < 0.8))
                elif act == "again" and runs and session is not None:
                    again = rng.choice(runs)
                    server.tell(session, run_assigned=session_pb2.RunAssigned(run=again))
                elif act == "interrupt" and alive:
                    server.interrupt(rng.choice(alive), grace_ms=rng.choice([0, 10_000]))
                elif act == "lose" and alive:
                    server.lose(rng.choice(alive))
                elif act == "break" and rng.random() < 0.4:
                    server.break_streams()
                elif act == "expire" and session is not None and rng.random() < 0.1:
                    server.expire(session)
                else:
                    await asyncio.sleep(rng.random() / 200)
            # Those that were assigned without a push are found by the next attach.
            await eventually(lambda: client.node_id)
            attaches = len(server.attaches)
            server.break_streams()
            await eventually(lambda: len(server.attaches) > attaches and client.node_id, what=f"attached, seed {seed}")
            await eventually(lambda: not server.runs, what=f"reports of all runs, seed {seed}")
            await eventually(lambda: not client._worker._runs, what=f"the end of all handlers, seed {seed}")
            await eventually(lambda: server.served[-1][1:] == (("digest",), 20), what=f"all slots, seed {seed}")
        assert len(started) == len(set(started)), seed
        told = [request.run_id for _, request in server.reports]
        assert len(told) == len(set(told)), seed


# ---- definitions -----------------------------------------------------------------------------------------------

DEFINED: dict[str, Any] = {"owner": "team", "runbook_url": "https://runbooks.test/digest", "schedule": "@hourly"}


async def test_a_job_is_created_with_its_handler(server: Double, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def one(**options: Any) -> None:
        async with connected(server) as client:
            client.job("digest", **options)(Handler(client, "other").handle)
            async with working(client, server):
                pass

    await asyncio.gather(*(one(**DEFINED) for _ in range(12)))
    assert server.jobs["digest"].owner == "team"
    other = {**DEFINED, "schedule": "@daily"}
    with pytest.raises(tenure.JobConflict, match="another specification"):
        await one(**other)
    assert server.jobs["digest"].schedule.cron == "@hourly"
    await one(**other, replace=True)
    assert server.jobs["digest"].schedule.cron == "@daily"


async def test_definitions_are_patient_and_come_before_the_announcement(server: Double) -> None:
    def refuse(operation: session_pb2.Operation) -> Any:
        early = operation.HasField("apply_jobs") and len(server.operations("apply_jobs")) < 3
        return refusal(grpc.StatusCode.UNAVAILABLE, "NO_LEADER") if early else None

    async with connected(server, timeout=0.05) as client:
        server.refuse = refuse
        client.job("digest", **DEFINED)(Handler(client, "other").handle)
        async with working(client, server):
            assert "digest" in server.jobs
            client.job("late", **DEFINED)(Handler(client, "more").handle)
            await eventually(lambda: "late" in server.jobs and "late" in server.served[-1][1])


async def test_what_cannot_be_a_definition_is_said_at_the_decorator(server: Double) -> None:
    async with connected(server) as client:
        with pytest.raises(TypeError, match=r"no option ownr \(did you mean owner\?\); it has: owner"):
            client.job("digest", ownr="team")  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="misfire_policy must be one of skip, latest, all"):
            client.job("digest", misfire_policy="sometimes")
        with pytest.raises(ValueError, match="stands for many jobs"):
            client.job("imports-*", **DEFINED)
        assert not client._worker._definitions
