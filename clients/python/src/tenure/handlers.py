"""Handlers of jobs: which there are, and how one is started, in the event loop or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tenure import forks
from tenure.run import Permanent, Run, SyncRun

__all__ = ["Handler", "Handlers", "is_async", "job_name"]

Handler = Callable[[Any], Any]


def job_name(name: str, tenant: str) -> str:
    """The name alone of NAME or TENANT/NAME. Raises ValueError when the tenant is not the client's."""
    said, slash, rest = name.rpartition("/")
    if not rest or "/" in said:
        raise ValueError(f"a job is written NAME or TENANT/NAME, not {name!r}")
    if slash and said != tenant:
        raise ValueError(f"job {name!r} is of tenant {said!r}, this client of tenant {tenant!r}: connect(tenant=...)")
    return rest


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


class Handlers:
    """By name of the job, or by a beginning of names with ``*`` at its end."""

    def __init__(self) -> None:
        self._by_name: dict[str, Handler] = {}
        # Of handlers that are ordinary functions. A thread that does not end holds up no process that does.
        self._threads: set[threading.Thread] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def add(self, name: str, handler: Handler) -> None:
        if not callable(handler) or inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise TypeError(f"the handler of job {name!r} must be a function or coroutine function, not {handler!r}")
        if name in self._by_name:
            raise ValueError(f"job {name!r} has a handler already")
        self._by_name[name] = handler

    def of(self, job: str) -> Handler | None:
        exact = self._by_name.get(job)
        if exact is not None:
            return exact
        fitting = [name for name in self._by_name if name.endswith("*") and job.startswith(name[:-1])]
        return self._by_name[max(fitting, key=len)] if fitting else None

    def start(self, handler: Handler, run: Run) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if not is_async(handler):
            return self._in_thread(handler, SyncRun.of(run, loop), loop)
        body: asyncio.Task[Any] = loop.create_task(_awaited(handler, run), name=f"tenure-run-{run.run_id}")
        forks.keep_from_child(task=body)
        return body

    def _in_thread(self, handler: Handler, run: SyncRun, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        outcome: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            value: Any = None
            failure: BaseException | None = None
            try:
                value = context.run(_called, handler, run)
            except BaseException as error:  # noqa: BLE001  handed on, whatever it is
                failure = error
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_settle, outcome, value, failure)
            self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=work, name=f"tenure-run-{run.run_id}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as there can be
            self._threads.discard(thread)
            outcome.set_exception(error)
        return outcome

    @property
    def here(self) -> bool:
        """Whether the present thread is that of a handler."""
        return threading.current_thread() in self._threads


async def _awaited(handler: Callable[[Run], Awaitable[Any]], run: Run) -> Any:
    return await handler(run)


def _called(handler: Handler, run: SyncRun) -> Any:
    value = handler(run)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise Permanent("the handler returned something to be awaited, and was not: it must be an async function")
    return value


def _settle(outcome: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if outcome.done():
        return
    if failure is None:
        outcome.set_result(value)
    elif isinstance(failure, (StopIteration, asyncio.CancelledError)):
        # Neither can be the exception of a future.
        outcome.set_exception(RuntimeError(f"the handler raised {type(failure).__name__}"))
    else:
        outcome.set_exception(failure)
