"""The watch hub over a real state machine: nothing lost, nothing twice, or the watcher is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commands import Limits, OpenSession, Request, SetLimits, Stamp
from sidecar.core.events import Event, Kind
from sidecar.core.machine import Machine
from sidecar.proposer import Failed, Failure, Subscriber
from sidecar.watch import (
    CompactedError,
    Delivery,
    FutureRevisionError,
    SlowWatcherError,
    TooManyWatchersError,
    UnconfirmedRevisionError,
    WatchError,
    WatchFilter,
    WatchHub,
)
from tests.waiting import eventually


class Source:
    """A machine that is written to directly, and tells its subscribers, as the proposer does after each turn."""

    def __init__(self, events_max: int = 10_000) -> None:
        self.machine = Machine()
        self.now_ms = 0
        self.subscribers: list[Subscriber] = []
        self.failed: Failed | None = None
        self.barriers = 0
        self.on_barrier: Callable[[], None] = lambda: None
        if events_max != 10_000:
            self.apply(SetLimits(limits=Limits(events_max=events_max)))

    def subscribe(self, subscriber: Subscriber, on_gap: Callable[[], None] | None = None) -> Callable[[], None]:
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    async def barrier(self, timeout_ms: int) -> Failed | None:
        self.barriers += 1
        self.on_barrier()
        return self.failed

    def apply(self, command: OpenSession | SetLimits) -> Sequence[Event]:
        self.now_ms += 1
        return self.machine.apply(Stamp(self.now_ms, self.now_ms), Request(command=command))[1]

    def write(self, count: int = 1, tenant: str = "default") -> None:
        """Events of one turn."""
        events = [e for _ in range(count) for e in self.apply(OpenSession(tenant=tenant, suffix="x", ttl_ms=3_600_000))]
        for subscriber in self.subscribers:
            subscriber(events)

    def hub(self, **settings: int | float) -> WatchHub:
        return WatchHub(self.machine, self, self.barrier, **settings)  # type: ignore[arg-type]


class Reader:
    """Reads a watch in a task."""

    def __init__(self, hub: WatchHub, from_revision: int, wanted: WatchFilter | None = None) -> None:
        self.deliveries: list[Delivery] = []
        self.error: BaseException | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.cut = False
        self.task = asyncio.create_task(self._read(hub, from_revision, wanted))

    async def _read(self, hub: WatchHub, from_revision: int, wanted: WatchFilter | None) -> None:
        try:
            async with aclosing(hub.watch(from_revision, wanted, on_cut=self._on_cut)) as deliveries:
                async for delivery in deliveries:
                    self.deliveries.append(delivery)
                    await self.may_go_on.wait()
        except WatchError as error:
            self.error = error

    def _on_cut(self) -> None:
        self.cut = True

    @property
    def revisions(self) -> list[int]:
        return [event.revision for delivery in self.deliveries for event in delivery.events]

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_from_now_on() -> None:
    source = Source()
    source.write(3)
    reader = Reader(source.hub(), 0)
    await eventually(lambda: reader.deliveries)
    assert reader.deliveries == [Delivery([], 3)], "at once, and empty: the watch stands"
    source.write(2)
    await eventually(lambda: reader.revisions == [4, 5])
    assert reader.deliveries[-1].revision == 5
    await reader.end()


async def test_history_then_live_without_a_seam() -> None:
    source = Source()
    source.write(1_000)
    reader = Reader(source.hub(), 1)
    await eventually(lambda: reader.revisions)
    for _ in range(20):
        source.write(7)
        await asyncio.sleep(0)
    await eventually(lambda: len(reader.revisions) == 1_140)
    assert reader.revisions == list(range(1, 1_141))
    assert max(len(delivery.events) for delivery in reader.deliveries) <= 256
    await reader.end()


async def test_the_boundary_of_compaction() -> None:
    """W02: the first revision still held is delivered, the one before is gone, the next to come is nothing yet."""
    source = Source(events_max=10)
    source.write(25)
    hub = source.hub()
    assert source.machine.first_revision() == 16
    early, edge, ahead = Reader(hub, 15), Reader(hub, 16), Reader(hub, 26)
    await eventually(lambda: early.error and edge.revisions and ahead.deliveries)
    assert isinstance(early.error, CompactedError) and early.error.first_revision == 16
    assert edge.revisions == list(range(16, 26))
    assert ahead.deliveries == [Delivery([], 25)]
    await edge.end()
    await ahead.end()


async def test_a_revision_in_the_future_is_refused_once_a_barrier_has_shown_it() -> None:
    source = Source()
    source.write(5)
    hub = source.hub()
    reader = Reader(hub, 7)
    await eventually(lambda: reader.error)
    assert isinstance(reader.error, FutureRevisionError) and reader.error.revision == 5
    assert source.barriers == 1
    # Another node was ahead of this one, and the barrier brings it up to date.
    source.on_barrier = lambda: source.write(3)
    fine = Reader(hub, 8)
    await eventually(lambda: fine.revisions == [8])
    await fine.end()
    source.failed = Failed(failure=Failure.NO_LEADER, definite=True, message="no leader")
    unknown = Reader(hub, 50)
    await eventually(lambda: unknown.error)
    assert isinstance(unknown.error, UnconfirmedRevisionError)
    assert hub.count == 0


async def test_filters() -> None:
    source = Source()
    hub = source.hub()
    source.write(1, "a")
    source.write(2, "b")
    tenants = Reader(hub, 1, WatchFilter(tenants=frozenset({"b"})))
    kinds = Reader(hub, 1, WatchFilter(kinds=frozenset({Kind.LEASE_GRANTED})))
    prefix = Reader(hub, 1, WatchFilter(subject_prefix="s3-"))
    await eventually(lambda: tenants.revisions and kinds.deliveries and prefix.revisions)
    assert tenants.revisions == [2, 3]
    assert kinds.deliveries == [Delivery([], 3)]
    assert prefix.revisions == [3]
    for reader in (tenants, kinds, prefix):
        await reader.end()


async def test_a_quiet_watcher_learns_how_far_it_is() -> None:
    source = Source()
    reader = Reader(source.hub(progress_s=0.05), 0, WatchFilter(tenants=frozenset({"nobody"})))
    await eventually(lambda: reader.deliveries)
    source.write(4)
    await eventually(lambda: reader.deliveries[-1] == Delivery([], 4))
    source.write(1)
    await eventually(lambda: reader.deliveries[-1] == Delivery([], 5))
    assert len(reader.deliveries) == 3, "and only when it has moved on"
    await reader.end()


async def test_a_stuck_watcher_is_cut_off_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchHub, "SLOW_AFTER_S", 0.05)
    source = Source()
    hub = source.hub(lag_max=100)
    stuck, lively = Reader(hub, 0), Reader(hub, 0)
    stuck.may_go_on.clear()
    await eventually(lambda: stuck.deliveries and lively.deliveries)
    written = 0

    def write_until_cut() -> bool:
        nonlocal written
        source.write(50)
        written += 50
        return stuck.cut

    await eventually(write_until_cut)
    assert hub.count == 1, "its place is free at once"
    stuck.may_go_on.set()
    await eventually(lambda: stuck.error)
    assert isinstance(stuck.error, SlowWatcherError)
    await eventually(lambda: len(lively.revisions) == written)
    # From where it was told to, nothing is missing.
    resumed = Reader(hub, stuck.error.resume_revision)
    await eventually(lambda: stuck.revisions + resumed.revisions == list(range(1, written + 1)))
    await lively.end()
    await resumed.end()


async def test_a_burst_makes_nobody_slow() -> None:
    source = Source()
    reader = Reader(source.hub(lag_max=100), 0)
    await eventually(lambda: reader.deliveries)
    source.write(5_000)
    await eventually(lambda: len(reader.revisions) == 5_000)
    await reader.end()


async def test_a_watcher_overtaken_by_compaction_is_told() -> None:
    source = Source(events_max=10)
    reader = Reader(source.hub(), 0)
    reader.may_go_on.clear()
    await eventually(lambda: reader.deliveries)
    source.write(30)
    reader.may_go_on.set()
    await eventually(lambda: reader.error)
    assert isinstance(reader.error, CompactedError) and reader.error.first_revision == 21


async def test_the_number_of_watchers_is_bounded_and_their_places_come_back() -> None:
    source = Source()
    hub = source.hub(watchers_max=2)
    one, two = Reader(hub, 0), Reader(hub, 0)
    await eventually(lambda: one.deliveries and two.deliveries)
    three = Reader(hub, 0)
    await eventually(lambda: three.error)
    assert isinstance(three.error, TooManyWatchersError)
    await one.end()
    four = Reader(hub, 0)
    await eventually(lambda: four.deliveries)
    await two.end()
    await four.end()
    assert hub.count == 0


async def test_close_ends_every_watch() -> None:
    source = Source()
    hub = source.hub()
    readers = [Reader(hub, 0) for _ in range(3)]
    await eventually(lambda: all(reader.deliveries for reader in readers))
    hub.close()
    await asyncio.gather(*(reader.task for reader in readers))
    assert not source.subscribers and all(reader.error is None for reader in readers)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30), st.integers(5, 60), st.integers(1, 40))
def test_every_event_is_delivered_once_or_reported_as_compacted(
    steps: list[tuple[int, bool]], events_max: int, from_revision: int
) -> None:
    async def scenario() -> None:
        source = Source(events_max=events_max)
        reader = Reader(source.hub(delivery_max=7), from_revision)
        for count, pause in steps:
            if count:
                source.write(count)
            if pause:
                await asyncio.sleep(0)
        for _ in range(300):
            await asyncio.sleep(0)
        last = source.machine.revision
        if isinstance(reader.error, CompactedError):
            expected = list(range(from_revision, from_revision + len(reader.revisions)))
            assert expected == reader.revisions and source.machine.first_revision() > from_revision + len(expected)
        elif reader.error is None:
            assert reader.revisions == list(range(from_revision, last + 1))
        else:
            assert isinstance(reader.error, FutureRevisionError)
        await reader.end()

    asyncio.run(scenario())
