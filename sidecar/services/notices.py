"""Brings committed events to those on this node who wait for them: calls in line, for an outcome or for a run,
observers of a lease, agent streams. One subscription for all; an event nobody waits for costs a few look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from sidecar.core.events import Event, Kind

if TYPE_CHECKING:
    from sidecar.proposer import AsyncProposer

K = TypeVar("K", bound=Hashable)

Notice = Callable[[Event | None], None]  # None: events were skipped (a snapshot), look at the state again
NameKey = tuple[str, str]  # tenant, lease name or idempotency key

_OF_LEASES = range(Kind.LEASE_GRANTED, Kind.RECORD_BEGUN)
_OF_RECORDS = range(Kind.RECORD_BEGUN, Kind.JOB_APPLIED)
_OF_SWITCHES = (Kind.SWITCH_SET, Kind.SWITCH_CLEARED)
# After these there may be a run for somebody who waits for one.
_OF_WORK = frozenset(
    {
        Kind.OCCURRENCE_CREATED,
        Kind.OCCURRENCE_ENDED,
        Kind.OCCURRENCE_RESOLVED,
        Kind.RUN_ENDED,
        Kind.SWITCH_CLEARED,
    }
)
FLEET = ""


class StreamSink(Protocol):
    """An agent's stream, as far as events matter to it."""

    def noticed(self, event: Event | None) -> None: ...


class Registry(Generic[K]):
    """Several callbacks per key."""

    def __init__(self) -> None:
        self._by_key: dict[K, dict[int, Notice]] = {}
        self._count = 0

    def add(self, key: K, notice: Notice) -> Callable[[], None]:
        """Returns the function that takes it out again; harmless when called twice."""
        self._count += 1
        number = self._count
        self._by_key.setdefault(key, {})[number] = notice

        def remove() -> None:
            notices = self._by_key.get(key)
            if notices is not None and notices.pop(number, None) is not None and not notices:
                del self._by_key[key]

        return remove

    def tell(self, key: K, event: Event) -> None:
        notices = self._by_key.get(key)
        if notices is not None:
            for notice in list(notices.values()):
                notice(event)

    def tell_all(self) -> None:
        for notices in list(self._by_key.values()):
            for notice in list(notices.values()):
                notice(None)

    def __len__(self) -> int:
        return len(self._by_key)


class Notices:
    def __init__(self, proposer: AsyncProposer) -> None:
        self.waiters: Registry[str] = Registry()  # by the waiter's name, which is unique
        self.records: Registry[NameKey] = Registry()
        self.leases: Registry[NameKey] = Registry()
        self.work: Registry[str] = Registry()  # by tenant
        self.switches: Registry[str] = Registry()  # by tenant; those of the fleet by ""
        self.streams: dict[str, StreamSink] = {}  # by session
        proposer.subscribe(self._committed, self._skipped)

    def _committed(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.waiter and event.kind is not Kind.LEASE_WAITING:  # that it is in line, the caller knows
                self.waiters.tell(event.waiter, event)
            if event.kind in _OF_LEASES:
                self.leases.tell((event.tenant, event.subject), event)
            elif event.kind in _OF_RECORDS:
                self.records.tell((event.tenant, event.subject), event)
            elif event.kind > Kind.RECORD_FORGOTTEN:
                self._of_jobs(event)
            sink = self.streams.get(event.session)
            if sink is not None:
                sink.noticed(event)

    def _of_jobs(self, event: Event) -> None:
        if event.kind in _OF_SWITCHES:
            self.switches.tell(event.tenant, event)
        if event.kind not in _OF_WORK:
            return
        if event.tenant == FLEET:
            self.work.tell_all()
        else:
            self.work.tell(event.tenant, event)

    def _skipped(self) -> None:
        self.waiters.tell_all()
        self.work.tell_all()
        self.leases.tell_all()
        self.records.tell_all()
        self.switches.tell_all()
        for sink in list(self.streams.values()):
            sink.noticed(None)
