"""Who runs what: ready occurrences meet free workers (see the rules at the top of machine.py).

All of it is derived. At rest, no occurrence that may start has a fitting worker with a free slot, unless the start rate
holds it back. So only what changed is looked at: lines of jobs that changed, and workers that got a free slot.

Workers that serve the same jobs form a group. A group keeps its free workers in a heap, least busy first, and by what
an occurrence asks of a worker (its demand) the heads of the jobs' lines. Entries of heaps are never taken out when they
become stale, but passed over when they come up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from sidecar.core.jobs import Job
from sidecar.core.occurrences import SLOTS, Line, Occurrence, Occurrences, place_of, slot_of
from sidecar.core.ordering import Key
from sidecar.core.sessions import Session
from sidecar.core.specification import Canary

# Lowered priority, ready_ms, due_ms, tenant, job, sequence: who is first.
Head = tuple[int, int, int, str, str, int]
# The selector, the canary, and whether a canary is asked for.
Demand = tuple[tuple[tuple[str, tuple[str, ...]], ...], Canary | None, bool]
Free = tuple[int, int, str]  # how busy, when last assigned, session: least is next
GroupKey = tuple[str, tuple[str, ...]]  # tenant, what is served
QueueKey = tuple[GroupKey, Demand]

# Groups without workers that are kept for sessions that poll.
POLLED_GROUPS_MAX = 64
_SLACK = 64


class Group:
    """Of workers that serve the same jobs."""

    __slots__ = ("free", "key", "members", "queues", "queues_max")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        self.members: dict[str, None] = {}
        self.free: list[Free] = []
        self.queues: dict[Demand, list[Head]] = {}
        # The length at which a queue is cleared of stale entries.
        self.queues_max: dict[Demand, int] = {}


class Groups:
    """All groups, found by the jobs they serve."""

    def __init__(self) -> None:
        self.table: dict[GroupKey, Group] = {}
        self._exact: dict[Key, dict[GroupKey, Group]] = {}
        self._prefix: dict[Key, dict[GroupKey, Group]] = {}
        # By tenant: how many prefixes there are of each length.
        self._lengths: dict[str, dict[int, int]] = {}

    def add(self, key: GroupKey) -> Group:
        group = self.table[key] = Group(key)
        for pattern in key[1]:
            if pattern.endswith("*"):
                self._prefix.setdefault((key[0], pattern[:-1]), {})[key] = group
                lengths = self._lengths.setdefault(key[0], {})
                lengths[len(pattern) - 1] = lengths.get(len(pattern) - 1, 0) + 1
            else:
                self._exact.setdefault((key[0], pattern), {})[key] = group
        return group

    def remove(self, key: GroupKey) -> None:
        del self.table[key]
        for pattern in key[1]:
            table, name = (self._prefix, pattern[:-1]) if pattern.endswith("*") else (self._exact, pattern)
            found = table[(key[0], name)]
            del found[key]
            if not found:
                del table[(key[0], name)]
            if pattern.endswith("*"):
                self._drop_length(key[0], len(name))

    def _drop_length(self, tenant: str, length: int) -> None:
        lengths = self._lengths[tenant]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
            if not lengths:
                del self._lengths[tenant]

    def serving(self, tenant: str, job: str) -> list[Group]:
        found: dict[GroupKey, Group] = dict(self._exact.get((tenant, job), ()))
        for length in self._lengths.get(tenant, ()):
            if length <= len(job):
                found.update(self._prefix.get((tenant, job[:length]), ()))
        return list(found.values())


class Assignment:
    def __init__(
        self,
        occurrences: Occurrences,
        job: Callable[[Key], Job | None],
        session: Callable[[str], Session | None],
        free: Callable[[str], Free | None],
    ) -> None:
        """``free(session)``: its place among those with a free slot; None when it has none."""
        self._occurrences = occurrences
        self._job, self._session, self._free = job, session, free
        self.groups = Groups()
        self._group_of: dict[str, Group] = {}
        self._polled: dict[GroupKey, None] = {}
        # Queues to look at: a head came to them, or a worker got a free slot. Then the heads of those that are looked
        # at now, in order; a queue has one candidate, the one that is noted, others of it are stale.
        self._eager: dict[QueueKey, None] = {}
        self._candidates: list[tuple[Head, int, QueueKey]] = []
        self._candidate_of: dict[QueueKey, Head] = {}
        self._count = 0
        # Groups and demands for which there is no free worker, within one round.
        self._in_vain: dict[QueueKey, None] = {}

    # ---- workers -------------------------------------------------------------------------------------------------

    def join(self, session: str, tenant: str, jobs: Iterable[str]) -> None:
        self.leave(session)
        group = self._group((tenant, tuple(sorted(dict.fromkeys(jobs)))))
        group.members[session] = None
        self._group_of[session] = group
        self.freed(session)

    def leave(self, session: str) -> None:
        group = self._group_of.pop(session, None)
        if group is not None:
            del group.members[session]
            self._drop_if_unused(group)

    def freed(self, session: str) -> None:
        """It may have a free slot that it had not before."""
        if self._list_free(session):
            group = self._group_of[session]
            for demand in group.queues:
                self._eager[(group.key, demand)] = None

    def _list_free(self, session: str) -> bool:
        group, free = self._group_of.get(session), self._free(session)
        if group is None or free is None:
            return False
        heapq.heappush(group.free, free)
        if len(group.free) > 2 * len(group.members) + _SLACK:
            listed = [place for member in group.members if (place := self._free(member)) is not None]
            heapq.heapify(listed)
            group.free = listed
        return True

    def _group(self, key: GroupKey) -> Group:
        group = self.groups.table.get(key)
        if group is None:
            group = self.groups.add(key)
            for line in self._ready_lines(key):
                for head, demand in self._heads(line):
                    self._queue(group, head, demand)
        return group

    def _drop_if_unused(self, group: Group) -> None:
        if not group.members and group.key not in self._polled:
            self.groups.remove(group.key)

    def _ready_lines(self, key: GroupKey) -> Iterable[Line]:
        lines, found = self._occurrences.lines, dict[Key, Line]()
        for pattern in key[1]:
            if pattern.endswith("*"):
                found.update(
                    (each, lines[each]) for each in self._occurrences.ready_order.after(key[0], pattern[:-1], "")
                )
            elif (key[0], pattern) in lines:
                found[(key[0], pattern)] = lines[(key[0], pattern)]
        return found.values()

    # ---- heads ---------------------------------------------------------------------------------------------------

    def _heads(self, line: Line) -> Iterable[tuple[Head, Demand]]:
        """The first of each slot of a job's line, if the job lets it start."""
        job = self._job(line.key)
        if job is None or not line.ready:
            return
        for slot in SLOTS:
            places = line.ready.get(slot)
            if places and self._occurrences.may_start(line, slot[0]):
                lowered, ready_ms, due_ms, sequence = places[0]
                yield (lowered, ready_ms, due_ms, *line.key, sequence), demand_of(job, slot[1])

    def _row(self, head: Head, demand: Demand) -> Occurrence | None:
        """The occurrence, if it is (still) the first of its slot, may start, and makes that demand."""
        tenant, name = head[3:5]
        line = self._occurrences.lines.get((tenant, name))
        row = self._occurrences.table.get((tenant, name, head[2], head[5]))
        if line is None or row is None:
            return None
        slot, place = slot_of(row), place_of(row)
        places = line.ready.get(slot)
        if not places or places[0] != place or place[:2] != head[:2]:
            return None
        job = self._job(line.key)
        if job is None or demand_of(job, row.canary) != demand:
            return None
        return row if self._occurrences.may_start(line, slot[0]) else None

    def _queue(self, group: Group, head: Head, demand: Demand) -> None:
        queue = group.queues.setdefault(demand, [])
        heapq.heappush(queue, head)
        if len(queue) > group.queues_max.get(demand, _SLACK):
            queue = [each for each in dict.fromkeys(queue) if self._row(each, demand) is not None]
            heapq.heapify(queue)
            group.queues[demand] = queue
            group.queues_max[demand] = 2 * len(queue) + _SLACK

    def _best(self, group: Group, session: Session) -> Head | None:
        """The first head that the group serves and that fits the session."""
        best: Head | None = None
        for demand in list(group.queues):
            head = self._head(group, demand)
            if head is not None and (best is None or head < best) and fits(session, demand):
                best = head
        return best

    def _head(self, group: Group, demand: Demand) -> Head | None:
        """The first in a queue that is not stale."""
        queue = group.queues.get(demand, [])
        while queue and self._row(queue[0], demand) is None:
            heapq.heappop(queue)
        if queue:
            return queue[0]
        group.queues.pop(demand, None)
        group.queues_max.pop(demand, None)
        return None

    # ---- the round -----------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """What changed since: to be called before ``next`` and before ``poll``."""
        changed = self._occurrences.changed
        for key in changed:
            line = self._occurrences.lines.get(key)
            if line is None:
                continue
            for head, demand in self._heads(line):
                for group in self.groups.serving(*key):
                    self._queue(group, head, demand)
                    self._eager[(group.key, demand)] = None
        changed.clear()

    def next(self) -> tuple[Occurrence, Session] | None:
        """The first occurrence that may start and the worker that it goes to; None when there is no such pair.

        Unless the occurrence is then started, ended or put off, the same pair is given again.
        """
        self.offer()
        for key in self._eager:
            self._nominate(key)
        self._eager.clear()
        while self._candidates:
            head, _, key = self._candidates[0]
            if self._candidate_of.get(key) == head:
                row = self._row(head, key[1])
                worker = None if row is None else self._worker_for(row)
                if row is not None and worker is not None:
                    return row, worker
                del self._candidate_of[key]
                if row is None:
                    self._nominate(key)
                    continue
            heapq.heappop(self._candidates)
        return None

    def _nominate(self, key: QueueKey) -> None:
        """The head of a queue becomes its candidate."""
        group = self.groups.table.get(key[0])
        head = None if group is None else self._head(group, key[1])
        if head is not None and self._candidate_of.get(key) != head:
            self._candidate_of[key] = head
            self._count += 1  # so that nothing behind it is ever compared
            heapq.heappush(self._candidates, (head, self._count, key))

    def begin_round(self) -> None:
        self._in_vain.clear()

    def assigned(self, session: str) -> None:
        """It was given the last pair's occurrence, and has a slot less."""
        self._list_free(session)

    def _worker_for(self, row: Occurrence) -> Session | None:
        """The least busy of those that fit."""
        job = self._job((row.tenant, row.job))
        assert job is not None, f"{row.job} may start and is no job"
        demand = demand_of(job, row.canary)
        best: Free | None = None
        for group in self.groups.serving(row.tenant, row.job):
            if (group.key, demand) in self._in_vain:
                continue
            free = self._first_free(group, demand)
            if free is None:
                self._in_vain[(group.key, demand)] = None
            elif best is None or free < best:
                best = free
        return None if best is None else self._session(best[2])

    def _first_free(self, group: Group, demand: Demand) -> Free | None:
        passed: list[Free] = []
        found: Free | None = None
        while group.free and found is None:
            free = group.free[0]
            session = self._session(free[2])
            if session is None or free[2] not in group.members or self._free(free[2]) != free:
                heapq.heappop(group.free)
            elif fits(session, demand):
                found = free
            else:
                passed.append(heapq.heappop(group.free))
        for free in dict.fromkeys(passed):
            heapq.heappush(group.free, free)
        return found

    # ---- sessions that poll --------------------------------------------------------------------------------------

    def poll(self, session: Session, jobs: Iterable[str]) -> Occurrence | None:
        """The first occurrence of these jobs that may start and fits the session."""
        key = (session.tenant, tuple(sorted(dict.fromkeys(jobs))))
        self.offer()
        group = self._group(key)
        self._polled.pop(key, None)
        self._polled[key] = None
        head = self._best(group, session)
        if len(self._polled) > POLLED_GROUPS_MAX:
            oldest = next(iter(self._polled))
            del self._polled[oldest]
            self._drop_if_unused(self.groups.table[oldest])
        return None if head is None else self._occurrences.table[(head[3], head[4], head[2], head[5])]

    # ---- reads ---------------------------------------------------------------------------------------------------

    def workers_of(self, job: Job, canary: bool | None) -> list[str]:
        """Sessions that serve the job and fit its canaries, its other occurrences, or (None) either."""
        demands = [demand_of(job, each) for each in (False, True) if canary in (None, each)]
        return [
            member
            for group in self.groups.serving(job.tenant, job.name)
            for member in group.members
            if (session := self._session(member)) is not None and any(fits(session, demand) for demand in demands)
        ]


def demand_of(job: Job, canary: bool) -> Demand:
    return (job.spec.selector, job.spec.canary, canary)


def fits(session: Session, demand: Demand) -> bool:
    """Whether the session has all that the selector asks for, and is a canary if one is asked for, and else none."""
    selector, canary, wanted = demand
    if canary is not None and ((canary.label, canary.value) in session.labels) != wanted:
        return False
    return all(_attribute(session, key) in values for key, values in selector)


def _attribute(session: Session, key: str) -> str | None:
    if key in ("agent", "version", "host"):
        value: str = getattr(session, key)
        return value
    return next((value for label, value in session.labels if label == key), None)
