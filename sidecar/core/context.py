"""What the parts of the machine share while one request is applied: its time, the limits, and the change stream."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.core.commands import Limits, Reason, Refused, Stamp
from sidecar.core.events import Event, Kind

# Events that have left the history but still lie before it in its list; then the list is cut.
_TRIM_EVENTS = 1_024

# When the state has no room, trying again helps as soon as something of it has ended.
FULL_RETRY_DELAY_MS = 1_000


class Context:
    def __init__(self, limits: Limits, stamp: Stamp, revision: int, history: Iterable[Event]) -> None:
        self.limits = limits
        self.stamp = stamp
        self.now_ms = stamp.cluster_ms
        self.revision = revision
        # The last events up to limits.events_max: self._events[self._start:].
        self._events = list(history)
        self._start = 0
        self._fresh: list[Event] = []

    def move_to(self, stamp: Stamp) -> None:
        """Time never steps back: a stamp before the last one counts as the last one."""
        self.now_ms = max(stamp.cluster_ms, self.now_ms)
        self.stamp = Stamp(self.now_ms, stamp.wall_ms)

    def emit(
        self,
        kind: Kind,
        tenant: str,
        subject: str,
        *,
        session: str = "",
        token: int = 0,
        attempt: int = 0,
        waiter: str = "",
        cause: str = "",
        actor: str = "",
        reason: str = "",
        due_ms: int = 0,
        sequence: int = 0,
        run: str = "",
        count: int = 0,
    ) -> int:
        """Adds the event to the change stream and returns its revision."""
        self.revision += 1
        event = Event(
            revision=self.revision,
            kind=kind,
            tenant=tenant,
            subject=subject,
            cluster_ms=self.now_ms,
            wall_ms=self.stamp.wall_ms,
            session=session,
            token=token,
            attempt=attempt,
            waiter=waiter,
            cause=cause,
            actor=actor,
            reason=reason,
            due_ms=due_ms,
            sequence=sequence,
            run=run,
            count=count,
        )
        self._events.append(event)
        self._fresh.append(event)
        self._trim()
        return self.revision

    def take_fresh(self) -> list[Event]:
        """The events of this apply."""
        if not self._fresh:
            return []
        fresh, self._fresh = self._fresh, []
        return fresh

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self._trim()

    # ---- the history: a contiguous run of revisions that ends with the last one ---------------------------------

    def history(self) -> list[Event]:
        return self._events[self._start :]

    def history_length(self) -> int:
        return len(self._events) - self._start

    def first_revision(self) -> int:
        return self.revision - self.history_length() + 1

    def events_from(self, revision: int, limit: int) -> list[Event]:
        first = self.first_revision()
        assert revision >= first, f"revision {revision} is no longer held, the first is {first}"
        position = self._start + revision - first
        return self._events[position : position + limit]

    def _trim(self) -> None:
        surplus = self.history_length() - self.limits.events_max
        if surplus > 0:
            self._start += surplus
            if self._start >= max(_TRIM_EVENTS, self.limits.events_max):
                del self._events[: self._start]
                self._start = 0


def full(reason: Reason, what: str, limit_name: str, limit: int) -> Refused:
    """The state has no room. Never remembered for the request: the same request may be tried again."""
    return Refused(
        reason=reason,
        message=f"{what}: the limit {limit_name} of {limit} is reached",
        facts=(("limit", limit_name), ("limit_value", str(limit))),
        retry_delay_ms=FULL_RETRY_DELAY_MS,
    )
