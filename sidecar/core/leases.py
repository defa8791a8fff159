"""Leases (see the rules at the top of machine.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import (
    AcquireLease,
    CancelWait,
    Done,
    LeaseGranted,
    LeaseQueued,
    LeaseTransferred,
    Reason,
    Refused,
    ReleaseLease,
    RequestKey,
    Result,
    TransferLease,
)
from sidecar.core.context import Context, full
from sidecar.core.events import Kind
from sidecar.core.ordering import SortedKeys
from sidecar.core.requests import Requests
from sidecar.core.sessions import Session, Sessions, not_found
from sidecar.core.switches import Switches, switched_off

# A lease can be given back at any moment, so nobody is told to stay away for longer than this.
HELD_RETRY_DELAY_MAX_MS = 1_000


class Holder(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    session: str
    token: int
    granted_ms: int
    lock_delay_ms: int = 0
    metadata: str = ""
    # The waiter named by the request that was granted, and that request: a cancel takes back exactly this grant.
    waiter: str = ""
    request: RequestKey | None = None
    # The machine's at the grant. Below the floor of the tenant the token is not current any more.
    kill_epoch: int = 0


class Waiter(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    session: str
    waiter: str
    priority: int
    queued_ms: int
    deadline_ms: int
    order: int  # position of arrival, cluster-wide; FIFO within a priority
    lock_delay_ms: int = 0
    metadata: str = ""
    # The request that waits; its remembered result becomes the grant, or the refusal.
    request: RequestKey | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Exists only while it is held, waited for or delayed. Tokens come from one counter for the whole machine, so
    they grow for every name even when a free name is forgotten."""

    tenant: str
    name: str
    capacity: int
    holders: tuple[Holder, ...] = ()  # in order of token
    # In order of grant: priority, then arrival. Filled in for readers; in the table the line is kept beside the lease.
    waiters: tuple[Waiter, ...] = ()
    # Places whose holder's session expired and that nobody gets before these cluster times, in order.
    delays: tuple[int, ...] = ()

    @property
    def delayed_until_ms(self) -> int:
        """When the next delayed place comes free; 0 when none is delayed."""
        return self.delays[0] if self.delays else 0


LeaseKey = tuple[str, str]  # tenant, name
WaiterKey = tuple[str, str, str, str]  # tenant, name, session, waiter
WaiterRow = tuple[str, str, Waiter]  # how a waiter is written to a snapshot
Place = tuple[int, int, str, str]  # sorts as the line goes: lowered priority, order; then session and waiter


class Leases:
    """The table of leases and their waiting lines.

    A line is kept beside its lease, so that joining and leaving a long one does not copy it.
    """

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        requests: Requests,
        switches: Switches,
        arm_wait: Callable[[WaiterKey, int], None],
        arm_delay: Callable[[LeaseKey, int], None],
        disarm_wait: Callable[[WaiterKey], None],
        *,
        leases: Iterable[Lease],
        waiters: Iterable[WaiterRow],
        last_token: int,
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._requests = requests
        self._switches = switches
        self._arm_wait, self._arm_delay, self._disarm_wait = arm_wait, arm_delay, disarm_wait
        self.last_token = last_token
        self.table = {(row.tenant, row.name): row for row in leases}
        self.waiters = {(tenant, name, row.session, row.waiter): row for tenant, name, row in waiters}
        self._index()

    def _index(self) -> None:
        """Everything below is derived from the two tables."""
        self._order = SortedKeys(self.table)
        self._lines: dict[LeaseKey, list[Place]] = {}
        # By session: what it holds with which token, and where it waits.
        self.held: dict[str, dict[LeaseKey, int]] = {}
        self._waits: dict[str, dict[WaiterKey, None]] = {}
        self.holder_count = 0
        for key, lease in self.table.items():
            self.holder_count += len(lease.holders)
            for holder in lease.holders:
                self.held.setdefault(holder.session, {})[key] = holder.token
            for end_ms in lease.delays[:1]:
                self._arm_delay(key, end_ms)
        for waiter_key, waiter in self.waiters.items():
            self._lines.setdefault(waiter_key[:2], []).append(_place(waiter))
            self._waits.setdefault(waiter.session, {})[waiter_key] = None
            self._arm_wait(waiter_key, waiter.deadline_ms)
        for line in self._lines.values():
            line.sort()

    # ---- commands ------------------------------------------------------------------------------------------------

    def acquire(self, command: AcquireLease, request: RequestKey | None) -> Result:
        session = self._sessions.find(command.tenant, command.session)
        if isinstance(session, Refused):
            return session
        killed = self._switches.killed(command.tenant)
        if killed is not None:
            return switched_off(killed)
        key = (command.tenant, command.name)
        lease = self.table.get(key)
        if lease is None:
            if len(self.table) >= self._context.limits.leases_max:
                return full(Reason.LEASES_FULL, "no room for a lease", "leases_max", self._context.limits.leases_max)
            lease = Lease(tenant=command.tenant, name=command.name, capacity=command.capacity)
        if lease.capacity != command.capacity:
            return _capacity_mismatch(lease, command.capacity)
        token = self.held.get(command.session, {}).get(key)
        if token is not None:
            return self._acquire_again(lease, token, session, command, request)
        waiting = self.waiters.get((*key, command.session, command.waiter))
        if waiting is not None:
            return self._queued(waiting)
        if _free_places(lease):
            return self._acquire_now(lease, session, command, request)
        if command.wait_ms == 0:
            return self._held_refusal(lease)
        return self._join_line(lease, command, request)

    def _acquire_again(
        self, lease: Lease, token: int, session: Session, command: AcquireLease, request: RequestKey | None
    ) -> Result:
        """The same token; a new one, for the same place, when a kill has made the old one stale."""
        holder = _held(lease, token)
        if not self._killed_by(lease, holder):
            return self._granted(session, token, already_held=True)
        key = (lease.tenant, lease.name)
        self._take_from(key, holder)
        self._context.emit(Kind.LEASE_RELEASED, *key, session=holder.session, token=token, cause="killed")
        new = self._grant(
            self.table[key], holder.session, command.waiter, command.lock_delay_ms, command.metadata, request
        )
        return self._granted(session, new)

    def _acquire_now(self, lease: Lease, session: Session, command: AcquireLease, request: RequestKey | None) -> Result:
        """Nobody in the line is passed over: whoever could have had a free place was given it when it came free."""
        if self.holder_count >= self._context.limits.leases_max:
            return full(Reason.LEASES_FULL, "no room for a holder", "leases_max", self._context.limits.leases_max)
        token = self._grant(lease, command.session, command.waiter, command.lock_delay_ms, command.metadata, request)
        return self._granted(session, token)

    def _join_line(self, lease: Lease, command: AcquireLease, request: RequestKey | None) -> Result:
        limits = self._context.limits
        key = (lease.tenant, lease.name)
        line = self._lines.get(key, [])
        if len(line) >= limits.waiters_per_lease_max:
            limit = limits.waiters_per_lease_max
            return full(Reason.WAITERS_FULL, "no room in the line", "waiters_per_lease_max", limit)
        if len(self.waiters) >= limits.waiters_max:
            return full(Reason.WAITERS_FULL, "no room for a waiter", "waiters_max", limits.waiters_max)
        revision = self._context.emit(Kind.LEASE_WAITING, *key, session=command.session, waiter=command.waiter)
        waiter = Waiter(
            session=command.session,
            waiter=command.waiter,
            priority=command.priority,
            queued_ms=self._context.now_ms,
            deadline_ms=self._context.now_ms + command.wait_ms,
            order=revision,
            lock_delay_ms=command.lock_delay_ms,
            metadata=command.metadata,
            request=request,
        )
        self._add_waiter(key, waiter)
        return self._queued(waiter)

    def cancel(self, command: CancelWait) -> Done | Refused:
        """Whatever is undone is also forgotten as a request, so that no repeat is answered with a token given back."""
        key = (command.tenant, command.name)
        waiter = self.waiters.get((*key, command.session, command.waiter))
        if waiter is not None:
            self._remove_waiter(key, waiter)
            self._emit_wait_ended(key, waiter, "cancelled")
            self._requests.forget(waiter.request)
            self._drop_if_unused(key)
            return Done(revision=self._context.revision)
        token = self.held.get(command.session, {}).get(key)
        holder = None if token is None else _holder(self.table[key], token)
        if holder is None or not command.waiter or holder.waiter != command.waiter:
            return Refused(reason=Reason.WAIT_NOT_FOUND, message="no wait and no grant of that name")
        self._requests.forget(holder.request)
        self._end_hold(key, holder, Kind.LEASE_RELEASED, cause="cancelled")
        return Done(revision=self._context.revision)

    def release(self, command: ReleaseLease) -> Done | Refused:
        holder = self._claimed(command.tenant, command.name, command.token, command.session)
        if isinstance(holder, Refused):
            return holder
        self._end_hold(
            (command.tenant, command.name),
            holder,
            Kind.LEASE_RELEASED,
            cause="released" if command.session else "operator",
            actor=command.actor,
            reason=command.reason,
        )
        return Done(revision=self._context.revision)

    def transfer(self, command: TransferLease) -> LeaseTransferred | Refused:
        key = (command.tenant, command.name)
        holder = self._claimed(*key, command.token, command.session)
        if isinstance(holder, Refused):
            return holder
        # It is a grant, and the token of a kill gives nothing to anybody.
        killed = self._switches.killed(command.tenant)
        if killed is not None:
            return switched_off(killed)
        if self._killed_by(self.table[key], holder):
            return self._token_stale(key, command.token)
        target = self._sessions.find(command.tenant, command.to_session)
        if isinstance(target, Refused):
            return Refused(reason=Reason.TRANSFER_TARGET_INVALID, message=target.message)
        if key in self.held.get(command.to_session, {}):
            message = f"session {command.to_session} holds the lease already"
            return Refused(reason=Reason.TRANSFER_TARGET_INVALID, message=message)
        self._take_from(key, holder)
        self._context.emit(
            Kind.LEASE_TRANSFERRED,
            *key,
            session=holder.session,
            token=holder.token,
            cause="transferred" if command.session else "operator",
            actor=command.actor,
            reason=command.reason,
        )
        token = self._grant_to_target(key, target, holder.lock_delay_ms)
        revision = self._context.revision
        # The old holder may have a second place in line, which it could not be given while it held one.
        self._grant_free_places(key)
        return LeaseTransferred(token=token, revision=revision)

    def _grant_to_target(self, key: LeaseKey, target: Session, lock_delay_ms: int) -> int:
        """If the target waits, its first place in line is what is granted; else it gets the old holder's lock delay."""
        places = sorted(_place(self.waiters[wait]) for wait in self._waits.get(target.session, {}) if wait[:2] == key)
        if not places:
            return self._grant(self.table[key], target.session, "", lock_delay_ms, "", None, cause="transfer")
        return self._grant_waiter(key, self.waiters[(*key, *places[0][2:])], target, cause="transfer")

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def end_session(self, row: Session, *, expired: bool) -> None:
        """The session is gone from the table: it leaves every line, then gives back what it held, in order of token."""
        waits = self._waits.get(row.session, {})
        for wait in sorted(waits, key=lambda wait: self.waiters[wait].order):
            waiter = self.waiters[wait]
            self._remove_waiter(wait[:2], waiter)
            self._emit_wait_ended(wait[:2], waiter, "session_ended")
            self._requests.amend(waiter.request, not_found(row.session))
            self._drop_if_unused(wait[:2])
        held = self.held.get(row.session, {})
        for key, token in sorted(held.items(), key=lambda item: item[1]):
            holder = _held(self.table[key], token)
            if expired:
                delay_ends_ms = row.deadline_ms + holder.lock_delay_ms
                self._end_hold(key, holder, Kind.LEASE_EXPIRED, cause="session_expired", delay_ends_ms=delay_ends_ms)
            else:
                self._end_hold(key, holder, Kind.LEASE_RELEASED, cause="session_closed")

    def end_wait(self, wait: WaiterKey) -> None:
        key = wait[:2]
        waiter = self.waiters[wait]
        self._remove_waiter(key, waiter)
        self._emit_wait_ended(key, waiter, "timeout")
        killed = self._switches.killed(key[0])
        refusal = self._held_refusal(self.table[key]) if killed is None else switched_off(killed)
        self._requests.amend(waiter.request, refusal)
        self._drop_if_unused(key)

    def end_delay(self, key: LeaseKey) -> None:
        lease = self.table[key]
        left = tuple(end_ms for end_ms in lease.delays if end_ms > self._context.now_ms)
        self.table[key] = replace(lease, delays=left)
        if left:
            self._arm_delay(key, left[0])
        self._grant_free_places(key)

    def unkilled(self, tenant: str) -> None:
        """A kill has ended, of the tenant or ("") the fleet: who still waits in line may be granted again."""
        for key in sorted(self._lines):
            if tenant in ("", key[0]):
                self._grant_free_places(key)

    def wait_due_ms(self, wait: WaiterKey) -> int | None:
        waiter = self.waiters.get(wait)
        return None if waiter is None else waiter.deadline_ms

    def delay_due_ms(self, key: LeaseKey) -> int | None:
        lease = self.table.get(key)
        return lease.delays[0] if lease is not None and lease.delays else None

    # ---- repeats -------------------------------------------------------------------------------------------------

    def rename(
        self, command: AcquireLease, request: RequestKey, remembered: LeaseQueued | LeaseGranted
    ) -> LeaseQueued | LeaseGranted:
        """A repeat of the request takes over its place in line, or its grant, under the repeat's own waiter name.

        So a late cancel by the call that was abandoned cannot undo what the repeat was told. How long to wait is the
        repeat's to say as well: it knows how much time its caller has left.
        """
        key = (command.tenant, command.name)
        if isinstance(remembered, LeaseGranted):
            self._rename_holder(key, remembered.token, command.waiter, request)
            return remembered
        old, new = (*key, command.session, remembered.waiter), (*key, command.session, command.waiter)
        if old not in self.waiters or new in self.waiters or not command.waiter:
            return remembered
        waiter = self.waiters[old]
        self._remove_waiter(key, waiter)
        deadline_ms = self._context.now_ms + command.wait_ms if command.wait_ms else waiter.deadline_ms
        self._add_waiter(key, replace(waiter, waiter=command.waiter, deadline_ms=deadline_ms))
        return replace(remembered, waiter=command.waiter, deadline_ms=deadline_ms)

    def _rename_holder(self, key: LeaseKey, token: int, waiter: str, request: RequestKey) -> None:
        lease = self.table.get(key)
        holder = None if lease is None else _holder(lease, token)
        # A re-acquire of a lease that was held already owns nothing of the grant.
        if lease is None or holder is None or holder.request != request or not waiter:
            return
        renamed = replace(holder, waiter=waiter)
        self.table[key] = replace(
            lease, holders=tuple(renamed if other is holder else other for other in lease.holders)
        )

    # ---- reads ---------------------------------------------------------------------------------------------------

    def view(self, key: LeaseKey) -> Lease | None:
        lease = self.table.get(key)
        line = self._lines.get(key)
        if lease is None or not line:
            return lease
        return replace(lease, waiters=tuple(self.waiters[(*key, place[2], place[3])] for place in line))

    def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Lease]:
        keys = islice(self._order.after(tenant, prefix, after), limit)
        return [lease for key in keys if (lease := self.view(key)) is not None]

    def held_by(self, session: str) -> list[tuple[Lease, int]]:
        held = sorted(self.held.get(session, {}).items())
        return [(lease, token) for key, token in held if (lease := self.view(key)) is not None]

    def is_current(self, tenant: str, name: str, token: int) -> bool:
        lease = self.table.get((tenant, name))
        holder = None if lease is None else _holder(lease, token)
        return lease is not None and holder is not None and not self._killed_by(lease, holder)

    def current_facts(self, tenant: str, name: str) -> tuple[tuple[str, str], ...]:
        """Who holds it now: the facts of a refusal because of a token."""
        lease = self.table.get((tenant, name))
        if lease is None or not lease.holders:
            return (("current_token", "0"),)
        newest = lease.holders[-1]
        killed_by = self._killed_by(lease, newest)
        if killed_by:
            return (("current_token", "0"), ("holder", newest.session), ("killed_by", killed_by))
        return (("current_token", str(newest.token)), ("holder", newest.session))

    def _killed_by(self, lease: Lease, holder: Holder) -> str:
        return self._switches.killed_by(lease.tenant, holder.kill_epoch)

    # ---- grants --------------------------------------------------------------------------------------------------

    def _grant(
        self,
        lease: Lease,
        session: str,
        waiter: str,
        lock_delay_ms: int,
        metadata: str,
        request: RequestKey | None,
        cause: str = "",
    ) -> int:
        assert _free_places(lease), f"{lease.name} has no free place"
        key = (lease.tenant, lease.name)
        self.last_token += 1
        token = self.last_token
        holder = Holder(
            session=session,
            token=token,
            granted_ms=self._context.now_ms,
            lock_delay_ms=lock_delay_ms,
            metadata=metadata,
            waiter=waiter,
            request=request,
            kill_epoch=self._switches.kill_epoch,
        )
        self._put(key, replace(lease, holders=(*lease.holders, holder)))
        self.holder_count += 1
        self.held.setdefault(session, {})[key] = token
        self._context.emit(Kind.LEASE_GRANTED, *key, session=session, token=token, waiter=waiter, cause=cause)
        return token

    def _grant_waiter(self, key: LeaseKey, waiter: Waiter, session: Session, cause: str = "") -> int:
        self._remove_waiter(key, waiter)
        token = self._grant(
            self.table[key],
            waiter.session,
            waiter.waiter,
            waiter.lock_delay_ms,
            waiter.metadata,
            waiter.request,
            cause,
        )
        self._requests.amend(waiter.request, self._granted(session, token))
        return token

    def _grant_free_places(self, key: LeaseKey) -> None:
        """Gives free places to the first in line that may have one, or forgets the lease when it is of no use."""
        while _free_places(self.table[key]):
            chosen = self._first_eligible(key)
            if chosen is None:
                break
            self._grant_waiter(key, *chosen)
        self._drop_if_unused(key)

    def _first_eligible(self, key: LeaseKey) -> tuple[Waiter, Session] | None:
        """Never one whose session or wait is due at this very stamp, nor one whose session has a place already. Nobody
        while the tenant is killed: the line stays, and goes on after the clear."""
        if self._switches.killed(key[0]) is not None:
            return None
        now_ms = self._context.now_ms
        for place in self._lines.get(key, ()):
            session = self._sessions.table.get(place[2])
            waiter = self.waiters[(*key, place[2], place[3])]
            if session is None or session.deadline_ms <= now_ms or waiter.deadline_ms <= now_ms:
                continue
            if key not in self.held.get(place[2], {}):
                return waiter, session
        return None

    def _end_hold(
        self,
        key: LeaseKey,
        holder: Holder,
        kind: Kind,
        *,
        cause: str,
        actor: str = "",
        reason: str = "",
        delay_ends_ms: int = 0,
    ) -> None:
        """The holder's place comes free, at once or after a delay that is still running."""
        self._take_from(key, holder)
        self._context.emit(
            kind, *key, session=holder.session, token=holder.token, cause=cause, actor=actor, reason=reason
        )
        if delay_ends_ms > self._context.now_ms:
            lease = self.table[key]
            delays = tuple(sorted((*lease.delays, delay_ends_ms)))
            self.table[key] = replace(lease, delays=delays)
            self._arm_delay(key, delays[0])
        self._grant_free_places(key)

    def _take_from(self, key: LeaseKey, holder: Holder) -> None:
        lease = self.table[key]
        self.table[key] = replace(lease, holders=tuple(other for other in lease.holders if other is not holder))
        self.holder_count -= 1
        held = self.held[holder.session]
        del held[key]
        if not held:
            del self.held[holder.session]

    def _claimed(self, tenant: str, name: str, token: int, session: str) -> Holder | Refused:
        """The holder with that token, if the session (or, with none, an operator) may dispose of it."""
        lease = self.table.get((tenant, name))
        holder = None if lease is None else _holder(lease, token)
        if holder is None:
            if token > self.last_token:
                facts = self.current_facts(tenant, name)
                message = f"token {token} was never granted; it comes from elsewhere"
                return Refused(reason=Reason.TOKEN_UNKNOWN, message=message, facts=facts)
            return self._token_stale((tenant, name), token)
        if session and holder.session != session:
            message = f"token {token} belongs to another session"
            return Refused(reason=Reason.NOT_HOLDER, message=message, facts=(("holder", holder.session),))
        return holder

    def _token_stale(self, key: LeaseKey, token: int) -> Refused:
        facts = self.current_facts(*key)
        message = f"token {token} is not current: the lease was released, lost or granted anew"
        if facts[-1][0] == "killed_by":
            message = f"token {token} is not current: a kill has made it stale"
        return Refused(reason=Reason.TOKEN_STALE, message=message, facts=facts)

    # ---- the line ------------------------------------------------------------------------------------------------

    def _add_waiter(self, key: LeaseKey, waiter: Waiter) -> None:
        wait = (*key, waiter.session, waiter.waiter)
        if key not in self.table:
            raise AssertionError(f"a line for {key}, which is free")
        self.waiters[wait] = waiter
        insort(self._lines.setdefault(key, []), _place(waiter))
        self._waits.setdefault(waiter.session, {})[wait] = None
        self._arm_wait(wait, waiter.deadline_ms)

    def _remove_waiter(self, key: LeaseKey, waiter: Waiter) -> None:
        wait = (*key, waiter.session, waiter.waiter)
        del self.waiters[wait]
        line = self._lines[key]
        del line[bisect_left(line, _place(waiter))]
        if not line:
            del self._lines[key]
        waits = self._waits[waiter.session]
        del waits[wait]
        if not waits:
            del self._waits[waiter.session]
        self._disarm_wait(wait)

    def _emit_wait_ended(self, key: LeaseKey, waiter: Waiter, cause: str) -> None:
        self._context.emit(Kind.LEASE_WAIT_ENDED, *key, session=waiter.session, waiter=waiter.waiter, cause=cause)

    # ---- the table -----------------------------------------------------------------------------------------------

    def _put(self, key: LeaseKey, lease: Lease) -> None:
        if key not in self.table:
            self._order.add(key)
        self.table[key] = lease

    def _drop_if_unused(self, key: LeaseKey) -> None:
        lease = self.table[key]
        if not lease.holders and not lease.delays and key not in self._lines:
            del self.table[key]
            self._order.remove(key)

    # ---- results -------------------------------------------------------------------------------------------------

    def _granted(self, session: Session, token: int, *, already_held: bool = False) -> LeaseGranted:
        return LeaseGranted(
            token=token, already_held=already_held, ttl_ms=session.ttl_ms, revision=self._context.revision
        )

    def _queued(self, waiter: Waiter) -> LeaseQueued:
        return LeaseQueued(waiter=waiter.waiter, deadline_ms=waiter.deadline_ms, revision=self._context.revision)

    def _held_refusal(self, lease: Lease) -> Refused:
        now_ms = self._context.now_ms
        if lease.delays:
            left_ms = lease.delays[0] - now_ms
            message = f"a holder's session expired, and nobody is granted its place for {left_ms} ms more"
            facts = (("delayed_until_ms", str(lease.delays[0])), ("remaining_ms", str(left_ms)))
            return Refused(reason=Reason.LOCK_DELAY, message=message, facts=facts, retry_delay_ms=max(1, left_ms))
        if not lease.holders:  # the wait and the holder's session ended at the same moment
            message = "the wait ended before the lease was granted"
            return Refused(reason=Reason.LEASE_HELD, message=message, retry_delay_ms=1)
        newest = lease.holders[-1]
        session = self._sessions.table[newest.session]
        remaining_ms = max(0, session.deadline_ms - now_ms)
        return Refused(
            reason=Reason.LEASE_HELD,
            message=f"held by {newest.session} with token {newest.token}",
            facts=(
                ("holder", newest.session),
                ("token", str(newest.token)),
                ("remaining_ms", str(remaining_ms)),
                ("holders", str(len(lease.holders))),
                ("capacity", str(lease.capacity)),
                ("agent", session.agent),
                ("host", session.host),
            ),
            retry_delay_ms=max(1, min(remaining_ms, HELD_RETRY_DELAY_MAX_MS)),
        )


def _free_places(lease: Lease) -> int:
    free = lease.capacity - len(lease.holders) - len(lease.delays)
    assert free >= 0, f"{lease.name} has more holders than places"
    return free


def _holder(lease: Lease, token: int) -> Holder | None:
    for holder in lease.holders:
        if holder.token == token:
            return holder
    return None


def _held(lease: Lease, token: int) -> Holder:
    """Of a token that the index of what sessions hold knows."""
    holder = _holder(lease, token)
    assert holder is not None, f"token {token} is not among the holders of {lease.name}"
    return holder


def _place(waiter: Waiter) -> Place:
    return (-waiter.priority, waiter.order, waiter.session, waiter.waiter)


def _capacity_mismatch(lease: Lease, capacity: int) -> Refused:
    return Refused(
        reason=Reason.LEASE_CAPACITY_MISMATCH,
        message=f"the lease is in use with capacity {lease.capacity}, not {capacity}",
        facts=(("capacity", str(lease.capacity)),),
    )
