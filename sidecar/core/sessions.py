"""Sessions (see the rules at the top of machine.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import (
    AttachSession,
    DetachSession,
    OpenSession,
    Reason,
    Refused,
    RenewSessions,
    SessionAttached,
    SessionOpened,
    SessionsRenewed,
)
from sidecar.core.context import Context, full
from sidecar.core.events import Kind
from sidecar.core.ordering import SortedKeys


class Session(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    session: str
    tenant: str
    agent: str
    version: str
    host: str
    labels: tuple[tuple[str, str], ...]
    ttl_ms: int
    disconnect_grace_ms: int
    opened_ms: int
    deadline_ms: int
    connection: str = ""
    node: str = ""
    # Of the latest stream that carried it, as the client counts them; 0 before the first.
    generation: int = 0


class Sessions:
    """The table of living sessions. What ends with a session is the machine's to arrange: it calls ``remove`` last."""

    def __init__(self, context: Context, rows: Iterable[Session], arm: Callable[[Session], None]) -> None:
        """``arm`` puts a session's deadline on the agenda; needed only when the deadline comes nearer."""
        self._context = context
        self._arm = arm
        self.table = {row.session: row for row in rows}
        self.connected = 0
        self._per_tenant: dict[str, int] = {}
        for row in self.table.values():
            self._count(row, 1)
            arm(row)
        self._order = SortedKeys((row.tenant, row.session) for row in self.table.values())

    def find(self, tenant: str, session: str) -> Session | Refused:
        found = self.table.get(session)
        if found is None:
            return not_found(session)
        if found.tenant != tenant:
            return Refused(reason=Reason.SESSION_FOREIGN, message=f"session {session} belongs to another tenant")
        return found

    def count_of(self, tenant: str) -> int:
        return self._per_tenant.get(tenant, 0)

    def open(self, command: OpenSession) -> SessionOpened | Refused:
        context, limits = self._context, self._context.limits
        if len(self.table) >= limits.sessions_max:
            return full(Reason.SESSIONS_FULL, "no room for a session", "sessions_max", limits.sessions_max)
        if self.count_of(command.tenant) >= limits.sessions_per_tenant_max:
            limit = limits.sessions_per_tenant_max
            return full(Reason.SESSIONS_FULL, "no room for a session", "sessions_per_tenant_max", limit)
        # The revision makes it unique, the suffix makes it hard to guess.
        session = f"s{context.revision + 1}-{command.suffix}"
        row = Session(
            session=session,
            tenant=command.tenant,
            agent=command.agent,
            version=command.version,
            host=command.host,
            labels=command.labels,
            ttl_ms=command.ttl_ms,
            disconnect_grace_ms=command.disconnect_grace_ms,
            opened_ms=context.now_ms,
            deadline_ms=context.now_ms + command.ttl_ms,
            connection=command.connection,
            node=command.node,
            generation=command.generation if command.connection else 0,
        )
        self.table[session] = row
        self._order.add((row.tenant, session))
        self._count(row, 1)
        self._arm(row)
        revision = context.emit(Kind.SESSION_OPENED, row.tenant, session, session=session)
        return SessionOpened(session=session, opened_ms=row.opened_ms, deadline_ms=row.deadline_ms, revision=revision)

    def renew(self, command: RenewSessions) -> SessionsRenewed:
        table, now_ms = self.table, self._context.now_ms
        ended: list[str] = []
        superseded: list[str] = []
        connections = command.connections or ("",) * len(command.sessions)
        for session, connection in zip(command.sessions, connections, strict=True):
            row = table.get(session)
            if row is None:
                ended.append(session)
            elif connection and connection != row.connection:
                superseded.append(session)
            else:
                # Not armed: the agenda finds the later deadline when the earlier one comes up.
                table[session] = replace(row, deadline_ms=now_ms + row.ttl_ms)
        return SessionsRenewed(ended=tuple(ended), superseded=tuple(superseded))

    def attach(self, command: AttachSession) -> SessionAttached | Refused:
        row = self.find(command.tenant, command.session)
        if isinstance(row, Refused):
            return row
        if command.generation and command.generation < row.generation:
            message = f"stream {command.generation} of the session was overtaken by stream {row.generation}"
            return Refused(reason=Reason.SESSION_TAKEN_OVER, message=message)
        context = self._context
        deadline_ms = context.now_ms + row.ttl_ms
        moved = (row.connection, row.node) != (command.connection, command.node)
        attached = replace(
            row,
            connection=command.connection,
            node=command.node,
            deadline_ms=deadline_ms,
            generation=max(row.generation, command.generation),
        )
        self._replace(row, attached)
        if moved:
            context.emit(Kind.SESSION_ATTACHED, row.tenant, row.session, session=row.session)
        return SessionAttached(deadline_ms=deadline_ms, ttl_ms=row.ttl_ms, revision=context.revision)

    def detach(self, command: DetachSession) -> None:
        """A grace of 0 leaves a session that is due at once."""
        row = self.table.get(command.session)
        if row is None or not row.connection or row.connection != command.connection:
            return
        context = self._context
        deadline_ms = min(row.deadline_ms, context.now_ms + row.disconnect_grace_ms)
        cut = replace(row, connection="", node="", deadline_ms=deadline_ms)
        self._replace(row, cut)
        self._arm(cut)
        context.emit(Kind.SESSION_DETACHED, row.tenant, row.session, session=row.session)

    def remove(self, row: Session) -> None:
        del self.table[row.session]
        self._order.remove((row.tenant, row.session))
        self._count(row, -1)

    def page(self, tenant: str, after: str, limit: int) -> list[Session]:
        return [self.table[key[1]] for key in islice(self._order.after(tenant, "", after), limit)]

    def _replace(self, row: Session, by: Session) -> None:
        self.connected += bool(by.connection) - bool(row.connection)
        self.table[row.session] = by

    def _count(self, row: Session, change: int) -> None:
        self.connected += change * bool(row.connection)
        in_tenant = self._per_tenant.get(row.tenant, 0) + change
        if in_tenant:
            self._per_tenant[row.tenant] = in_tenant
        else:
            del self._per_tenant[row.tenant]


def not_found(session: str) -> Refused:
    return Refused(
        reason=Reason.SESSION_NOT_FOUND,
        message=f"session {session} does not live: it expired, was closed, or never was",
    )
