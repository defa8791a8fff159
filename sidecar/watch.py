"""Delivers the change stream to watchers: from any revision that is still held, then live.

Rules:

1. A watcher is a cursor into the machine's event history, which all watchers share: a slow one costs no memory here.
2. Every event is delivered exactly once and in order, or the watcher is told that it cannot be: ``CompactedError``
   when the cursor points before the first revision still held (at that revision itself the event is delivered),
   ``SlowWatcherError`` when it lags by more than the bound and its reader has been busy for a while. Both say where to
   go on. Nothing is skipped silently.
3. ``from_revision`` 0 means: what happens from now on. The next revision to come is a valid start. One further
   ahead is refused (``FutureRevisionError``) after a read barrier has shown that no node can know it.
4. The first delivery comes at once, empty if need be: it says that the watch stands, and from where it resumes. A
   watcher whose filter matches nothing gets an empty delivery when its revision has moved on, every few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from sidecar.core.events import Event, Kind
from sidecar.proposer import Failed, Subscriber


class WatchFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What a watcher wants to see; everything by default."""

    tenants: frozenset[str] = frozenset()
    kinds: frozenset[Kind] = frozenset()
    subject_prefix: str = ""

    def matches(self, event: Event) -> bool:
        return (
            (not self.tenants or event.tenant in self.tenants)
            and (not self.kinds or event.kind in self.kinds)
            and event.subject.startswith(self.subject_prefix)
        )


class Delivery(NamedTuple):
    """Everything up to ``revision`` has been delivered. ``events`` may be empty: then only the revision moves on."""

    events: list[Event]
    revision: int


class WatchError(Exception):
    """A watch cannot begin, or cannot go on."""


class CompactedError(WatchError):
    def __init__(self, first_revision: int) -> None:
        super().__init__(f"the revision is not held any more; the first that is held is {first_revision}")
        self.first_revision = first_revision


class FutureRevisionError(WatchError):
    def __init__(self, revision: int) -> None:
        super().__init__(f"the revision lies in the future; the last one so far is {revision}")
        self.revision = revision


class SlowWatcherError(WatchError):
    def __init__(self, resume_revision: int) -> None:
        super().__init__(f"the watcher is too slow and was cut off; resume from revision {resume_revision}")
        self.resume_revision = resume_revision


class TooManyWatchersError(WatchError):
    def __init__(self, watchers_max: int) -> None:
        super().__init__(f"this node serves at most {watchers_max} watchers")
        self.watchers_max = watchers_max


class UnconfirmedRevisionError(WatchError):
    """Whether the revision lies in the future cannot be known now: no quorum."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class History(Protocol):
    """The machine's side of the change stream."""

    @property
    def revision(self) -> int: ...
    def first_revision(self) -> int: ...
    def events_from(self, revision: int, limit: int) -> list[Event]: ...


class Changes(Protocol):
    """The proposer's side."""

    def subscribe(self, subscriber: Subscriber, on_gap: Callable[[], None] | None = None) -> Callable[[], None]: ...


class _Watcher:
    """A cursor: everything before ``next_revision`` was delivered or did not match."""

    def __init__(self, next_revision: int, on_cut: Callable[[], None] | None) -> None:
        self.next_revision = next_revision
        self.on_cut = on_cut
        self.cut = False
        self.handed_s: float | None = (
            None  # since when its reader has been busy with a delivery; None: it waits for more
        )
        self.wakeup: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.wakeup is not None and not self.wakeup.done():
            self.wakeup.set_result(None)


class WatchHub:
    """All watchers of one node. Belongs to one event loop."""

    SLOW_AFTER_S = 1.0  # a burst of events alone makes nobody slow

    def __init__(
        self,
        machine: History,
        changes: Changes,
        barrier: Callable[[int], Awaitable[Failed | None]],
        *,
        watchers_max: int = 1_000,
        lag_max: int = 1_000,
        delivery_max: int = 256,
        progress_s: float = 5.0,
    ) -> None:
        """``barrier(timeout_ms)`` makes the machine as recent as the cluster, or says why it cannot. ``lag_max`` and
        ``delivery_max`` count events."""
        self._machine = machine
        self._barrier = barrier
        self._watchers_max = watchers_max
        self._lag_max = lag_max
        self._delivery_max = delivery_max
        self._progress_s = progress_s
        self._watchers: set[_Watcher] = set()
        self._unsubscribe = changes.subscribe(self._changed, self._wake_all)
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._watchers)

    async def watch(
        self,
        from_revision: int,
        wanted: WatchFilter | None = None,
        *,
        timeout_ms: int = 2_000,
        on_cut: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Delivery, None]:
        """Deliveries until the consumer closes it or the hub is closed. Raises a WatchError, see the rules above.

        ``timeout_ms`` bounds only the question whether the revision lies in the future. ``on_cut`` is called when the
        watcher is cut off while its reader is stuck in a delivery; the reader's next step raises SlowWatcherError."""
        if len(self._watchers) >= self._watchers_max:
            raise TooManyWatchersError(self._watchers_max)
        watcher = _Watcher(from_revision or self._machine.revision + 1, on_cut)
        wanted = wanted or WatchFilter()
        self._watchers.add(watcher)
        try:
            if from_revision > self._machine.revision + 1:
                await self._confirm(from_revision, timeout_ms)
            told_s = -self._progress_s
            told = -1  # so that the first delivery comes at once
            while not self._closed:
                events = self._scan(watcher, wanted)
                revision = watcher.next_revision - 1
                progress_s = told_s + self._progress_s if revision > told else None
                if events or (progress_s is not None and self._now_s() >= progress_s):
                    told, told_s = revision, self._now_s()
                    watcher.handed_s = told_s
                    yield Delivery(events, revision)
                    watcher.handed_s = None
                elif revision < self._machine.revision:
                    await asyncio.sleep(0)  # a long stretch without a match must not hold up the node
                else:
                    await self._wait(watcher, progress_s)
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Ends all watches; each delivers what it has and stops."""
        self._closed = True
        self._unsubscribe()
        self._wake_all()

    async def _confirm(self, from_revision: int, timeout_ms: int) -> None:
        """Another node may have shown a revision that this one has not applied yet."""
        failed = await self._barrier(timeout_ms)
        if failed is not None:
            raise UnconfirmedRevisionError(failed)
        if from_revision > self._machine.revision + 1:
            raise FutureRevisionError(self._machine.revision)

    def _scan(self, watcher: _Watcher, wanted: WatchFilter) -> list[Event]:
        """Moves the cursor over the next few events, and returns those that match."""
        if watcher.cut:
            raise SlowWatcherError(watcher.next_revision)
        first_revision = self._machine.first_revision()
        if watcher.next_revision < first_revision:
            raise CompactedError(first_revision)
        events = self._machine.events_from(watcher.next_revision, self._delivery_max)
        if events:
            watcher.next_revision = events[-1].revision + 1
        return [event for event in events if wanted.matches(event)]

    async def _wait(self, watcher: _Watcher, until_s: float | None) -> None:
        """For news, at most until then."""
        loop = asyncio.get_running_loop()
        watcher.wakeup = loop.create_future()
        timer = loop.call_at(until_s, watcher.wake) if until_s is not None else None
        try:
            await watcher.wakeup
        finally:
            watcher.wakeup = None
            if timer is not None:
                timer.cancel()

    def _changed(self, events: Sequence[Event]) -> None:
        now_s = self._now_s()
        newest = events[-1].revision
        for watcher in list(self._watchers):
            watcher.wake()
            stuck = watcher.handed_s is not None and now_s - watcher.handed_s >= self.SLOW_AFTER_S
            if stuck and newest - watcher.next_revision >= self._lag_max:
                self._cut_off(watcher)

    def _cut_off(self, watcher: _Watcher) -> None:
        watcher.cut = True
        self._watchers.discard(watcher)
        if watcher.on_cut is not None:
            watcher.on_cut()

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.wake()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
