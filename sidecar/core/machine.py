"""The pure, deterministic state machine of Tenure."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.core.commands import Limits, Request, Result, Stamp
from sidecar.core.dedup import Record, RecordState
from sidecar.core.events import Event
from sidecar.core.leases import Lease
from sidecar.core.sessions import Session


class Captured:
    """An immutable picture of the state, cheap to take; ``encode`` may run on another thread."""

    def encode(self) -> bytes: ...


class Machine:
    limits: Limits
    stamp: Stamp  # of the last applied request; cluster_ms never steps back
    revision: int  # of the last event; 0 before the first
    last_token: int

    def apply(self, stamp: Stamp, request: Request) -> tuple[Result, Sequence[Event]]:
        """First ends what is due at ``stamp`` (in order of deadline), then runs the command once. Never raises for input."""
        ...

    def next_deadline_ms(self) -> int | None:
        """Cluster time at which something ends by itself; the leader proposes a Tick then."""
        ...

    def capture(self) -> Captured: ...
    def restore(self, payload: bytes) -> None: ...
    def digest(self) -> str: ...

    # ---- reads (return records; never mutate) --------------------------------------------------------------
    def session(self, session: str) -> Session | None: ...
    def sessions(self, tenant: str, after: str, limit: int) -> list[Session]: ...
    def session_leases(self, session: str) -> list[tuple[Lease, int]]:
        """The leases a session holds, each with its token, ordered by name."""
        ...

    def lease(self, tenant: str, name: str) -> Lease | None: ...
    def leases(self, tenant: str, prefix: str, after: str, limit: int) -> list[Lease]: ...
    def record(self, tenant: str, key: str) -> Record | None: ...
    def records(
        self, tenant: str, prefix: str, after: str, limit: int, state: RecordState | None
    ) -> list[Record]: ...
    def counts(self) -> dict[str, int]:
        """Sizes for metrics: sessions, connected_sessions, leases, holders, waiters, records, record_bytes, requests, events."""
        ...

    # ---- the change stream -----------------------------------------------------------------------------------
    def first_revision(self) -> int:
        """The first revision still held; every later one is. revision + 1 when nothing is held."""
        ...

    def events_from(self, revision: int, limit: int) -> list[Event]: ...
