"""What the holder of a session must know of its runs: given, to be stopped, taken away.

Rules:
1. The news of one run keep their order. They wait here, by name only, while much is to be sent already: payloads are
   large, and a burst of runs must not cut off an agent that reads.
2. A run is shown as it is when it is sent; one that has ended by then is not sent at all.
3. How a run ended is news only when the holder has not brought it about. A run that came by an answered claim is known
   to whoever claimed it.
4. When events were skipped, what the holder knows is compared with what is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure.v1 import job_pb2, session_pb2

from sidecar.core.events import Event, Kind
from sidecar.core.runs import NO_ACKNOWLEDGEMENT, Run
from sidecar.services.views import Views

if TYPE_CHECKING:
    from sidecar.core.machine import Machine

# Of the runs shown when a stream attaches; those beyond it are named, and follow.
ATTACHED_BYTES_MAX = 1 << 20
WAITING_MAX = 8_192
OF_RUNS = (Kind.RUN_ASSIGNED, Kind.RUN_INTERRUPTED, Kind.RUN_ENDED)
_GIVEN, _STOPPED, _LOST = "given", "stopped", "lost"


class RunFeed:
    """Of one stream. ``room`` says whether more may be sent now."""

    def __init__(
        self,
        machine: Machine,
        views: Views,
        session: str,
        push: Callable[[session_pb2.Push], None],
        room: Callable[[], bool],
    ) -> None:
        self._machine, self._views, self._session = machine, views, session
        self._push, self._room = push, room
        self._waiting: deque[tuple[str, str, str]] = deque()  # what, run, cause
        self._known: dict[str, None] = {}  # to the holder, as far as this stream has told

    @property
    def overfull(self) -> bool:
        return len(self._waiting) > WAITING_MAX

    def attached(self) -> list[job_pb2.Run]:
        """The runs that were given to the session. Those beyond the bound have no more than their names, and are
        pushed."""
        shown: list[job_pb2.Run] = []
        size = 0
        for row in self._machine.session_runs(self._session):
            if row.claimed:
                # Not listed; but its interrupt may have come while there was no stream to tell it on.
                if row.interrupt_cause:
                    self._waiting.append((_STOPPED, row.run, row.interrupt_cause))
                continue
            run = self._views.run(row)
            size += run.ByteSize()
            if shown and size > ATTACHED_BYTES_MAX:
                run = job_pb2.Run(run_id=row.run, token=row.token)
                self._waiting.append((_GIVEN, row.run, ""))
            else:
                self._known[row.run] = None
            shown.append(run)
        return shown

    def noticed(self, event: Event) -> None:
        """One of OF_RUNS, of this session."""
        if event.kind is Kind.RUN_ASSIGNED:
            row = self._machine.run(event.run)
            if row is not None and not row.claimed:
                self._waiting.append((_GIVEN, event.run, ""))
        elif event.kind is Kind.RUN_INTERRUPTED:
            self._waiting.append((_STOPPED, event.run, event.cause))
        elif event.reason.endswith(NO_ACKNOWLEDGEMENT):
            self._waiting.append((_LOST, event.run, event.cause))
        else:
            self._known.pop(event.run, None)
        self.send()

    def skipped(self) -> None:
        """Some events were not seen."""
        rows = {row.run: row for row in self._machine.session_runs(self._session)}
        for run in self._known:
            if run not in rows:
                self._waiting.append((_LOST, run, "interrupted"))
        for row in rows.values():
            if row.run not in self._known and not row.claimed:
                self._waiting.append((_GIVEN, row.run, ""))
            elif row.interrupt_cause:
                self._waiting.append((_STOPPED, row.run, row.interrupt_cause))
        self.send()

    def send(self) -> None:
        """As much as there is room for."""
        while self._waiting and self._room():
            what, run, cause = self._waiting.popleft()
            row = self._machine.run(run)
            if what == _LOST:
                self._known.pop(run, None)
                self._push(session_pb2.Push(run_lost=session_pb2.RunLost(run_id=run, cause=cause)))
            elif row is None or row.session != self._session:
                continue
            elif what == _GIVEN:
                self._known[run] = None
                self._push(session_pb2.Push(run_assigned=session_pb2.RunAssigned(run=self._views.run(row))))
            else:
                self._push(session_pb2.Push(run_interrupted=self._interrupted(row)))

    def _interrupted(self, row: Run) -> session_pb2.RunInterrupted:
        return session_pb2.RunInterrupted(
            run_id=row.run,
            cause=row.interrupt_cause,
            reason=row.interrupt_reason,
            switch_id=row.interrupt_switch,
            grace_ms=max(0, row.deadline_ms - self._views.now_ms()),
        )
