"""The simulated network: a connection between each two hosts, FIFO in each direction, with everything that goes wrong.

A ``Link`` is one connection. What is sent on it arrives in order, or not at all. The order of what happens to one end
is the order of its queue: first OPEN, then frames, then CLOSE. A replaced connection is dead: nothing of it is
delivered any more (except in the profile ``stale``, which shows what the library's own transport does).

Verbs: ``partition`` and ``repair`` (nothing passes; the connection dies of it after a while), ``hold`` and ``release``
(a stall: everything arrives later, in order), ``reset`` (a prefix of what is under way still arrives).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chaos.profiles import Shape
from chaos.world import Host, HostState, World

_OPEN = object()
_CLOSE_RESET = object()
_CLOSE_QUIET = object()


class Link:
    """One connection. ``queue[host]`` holds what is under way to that host."""

    __slots__ = ("ends", "last_us", "number", "open", "queue", "severed")

    def __init__(self, number: int, ends: tuple[str, str], now_us: int) -> None:
        self.number = number
        self.ends = ends
        self.open = {ends[0]: False, ends[1]: False}
        self.severed = False  # one side is gone: whatever is sent from now on is lost
        self.queue: dict[str, deque[tuple[int, object]]] = {ends[0]: deque(), ends[1]: deque()}
        self.last_us = {ends[0]: now_us, ends[1]: now_us}

    def other(self, host: str) -> str:
        return self.ends[1] if host == self.ends[0] else self.ends[0]


class Network:
    def __init__(self, world: World, shape: Shape) -> None:
        self.world = world
        self.shape = shape
        self.frames = 0
        # What each host believes to be its connection to a peer.
        self.current: dict[tuple[str, str], Link] = {}
        self._blocked: dict[tuple[str, str], int] = {}  # direction -> how many faults block it
        self._held: dict[tuple[str, str], int] = {}
        self._stalled: dict[tuple[str, str], list[Link]] = {}
        self._dialing: dict[tuple[str, str], bool] = {}
        self._links = 0

    # ---- used by processes

    def connected(self, host: str, peer: str) -> bool:
        link = self.current.get((host, peer))
        return link is not None and link.open[host]

    def send(self, host: str, peer: str, frame: object, size_bytes: int) -> bool:
        link = self.current.get((host, peer))
        if link is None or not link.open[host]:
            self.world.reach("send without a connection")
            return False
        if link.severed:
            return True  # the kernel took it; nobody will ever read it
        if len(link.queue[peer]) >= self.shape.link_frames_max:
            self.world.detail(host, f"queue to {peer} is full, connection dropped")
            self.world.reach("queue full")
            self._close_end(link, host, reset=False)
            return False
        self.frames += 1
        low_us, high_us = self.shape.latency_us
        arrival_us = self.world.now_us + self.world.between(low_us, high_us) + size_bytes // self.shape.bytes_per_us
        self._enqueue(link, peer, arrival_us, frame)
        return True

    def _enqueue(self, link: Link, to: str, arrival_us: int, item: object) -> None:
        arrival_us = max(arrival_us, link.last_us[to])
        link.last_us[to] = arrival_us
        link.queue[to].append((arrival_us, item))
        self.world.after(arrival_us - self.world.now_us, lambda: self._arrive(link, to))

    def _arrive(self, link: Link, to: str) -> None:
        """Deliver what is due, in order, unless the direction is stalled (then ``_resume`` calls again)."""
        direction = (link.other(to), to)
        queue = link.queue[to]
        while queue and queue[0][0] <= self.world.now_us:
            if direction in self._blocked or direction in self._held:
                waiting = self._stalled.setdefault(direction, [])
                if not any(link is known for known in waiting):
                    waiting.append(link)
                return
            self._deliver(link, to, queue.popleft()[1])

    def _deliver(self, link: Link, to: str, item: object) -> None:
        host = self.world.hosts[to]
        peer = link.other(to)
        if item is _OPEN:
            host.run(host.life, lambda: self._opened(link, host, peer))
        elif item is _CLOSE_RESET or item is _CLOSE_QUIET:
            host.run(host.life, lambda: self._closed(link, host, peer, reset=item is _CLOSE_RESET))
        else:
            host.run(host.life, lambda: self._received(link, host, peer, item))

    def _received(self, link: Link, host: Host, peer: str, frame: object) -> None:
        if self.current.get((host.name, peer)) is not link:
            if not self.shape.replaced_links_deliver:
                return
        elif not link.open[host.name]:
            return
        if host.process is not None:
            host.process.frame_received(peer, frame)

    def _opened(self, link: Link, host: Host, peer: str) -> None:
        if link.severed and not self.shape.replaced_links_deliver:
            return
        old = self.current.get((host.name, peer))
        if old is not None and old.number > link.number:
            return
        if old is not None and old.open[host.name]:
            old.open[host.name] = False
            self.world.reach("connection replaced")
            if host.process is not None and not self.shape.replaced_links_deliver:
                host.process.peer_disconnected(peer, False)
        self.current[host.name, peer] = link
        link.open[host.name] = True
        if host.process is not None:
            self.world.detail(host.name, f"connected to {peer} (connection {link.number})")
            host.process.peer_connected(peer)

    def _closed(self, link: Link, host: Host, peer: str, *, reset: bool) -> None:
        if link.open[host.name] and self.current.get((host.name, peer)) is link:
            del self.current[host.name, peer]
            link.open[host.name] = False
            self.world.detail(host.name, f"lost {peer} (connection {link.number}, {'reset' if reset else 'gave up'})")
            if host.process is not None:
                host.process.peer_disconnected(peer, reset)
        if not self.connected(host.name, peer):
            self._dial_later(host.name, peer)

    def _close_end(self, link: Link, host_name: str, *, reset: bool) -> None:
        """This side gives up the connection; the other side reads the end of it when that can reach it."""
        host = self.world.hosts[host_name]
        peer = link.other(host_name)
        if not link.severed:
            link.severed = True
            self._enqueue(link, peer, self.world.now_us + self.world.between(*self.shape.latency_us), _CLOSE_RESET)
        host.after(0, lambda: self._closed(link, host, peer, reset=reset))

    # ---- dialling

    def host_up(self, host: Host) -> None:
        for other in self.world.hosts:
            if other != host.name:
                self._dial_later(host.name, other)

    def _dial_later(self, one: str, two: str) -> None:
        pair = (one, two) if one < two else (two, one)
        if pair in self._dialing:
            return
        self._dialing[pair] = True
        delay_us = self.world.between(*self.shape.redial_us)
        if self.world.calm:
            delay_us = min(delay_us, self.shape.redial_us[0] + 200_000)
        self.world.after(delay_us, lambda: self._dial(pair))

    def _dial(self, pair: tuple[str, str]) -> None:
        del self._dialing[pair]
        one, two = pair
        hosts = self.world.hosts
        if hosts[one].state is HostState.DOWN or hosts[two].state is HostState.DOWN:
            return  # whoever boots dials
        links = self.current.get((one, two)), self.current.get((two, one))
        if links[0] is not None and links[0] is links[1] and links[0].open[one] and links[0].open[two]:
            return
        if (one, two) in self._blocked or (two, one) in self._blocked:
            self._dial_later(one, two)
            return
        self._links += 1
        link = Link(self._links, pair, self.world.now_us)
        for old in links:
            if old is not None and not old.severed and not self.shape.replaced_links_deliver:
                old.severed = True
        for end in pair:
            self._enqueue(link, end, self.world.now_us + self.world.between(*self.shape.latency_us), _OPEN)

    # ---- faults

    def host_down(self, host: Host, *, silent: bool) -> None:
        """The process is gone. Its kernel resets the connections; without power nothing is said, and peers find out."""
        for name in self.world.hosts:
            if name == host.name:
                continue
            mine = self.current.pop((host.name, name), None)
            theirs = self.current.get((name, host.name))
            for link in (mine, theirs):
                if link is None or link.severed:
                    continue
                link.severed = True
                link.open[host.name] = False
                link.queue[host.name].clear()
                quiet_us = self.world.between(*self.shape.idle_timeout_us)
                delay_us = quiet_us if silent else self.world.between(*self.shape.latency_us)
                item = _CLOSE_QUIET if silent else _CLOSE_RESET
                self._enqueue(link, name, self.world.now_us + delay_us, item)

    def reset(self, one: str, two: str) -> None:
        """Cut the connection: of what is under way a prefix still arrives, in each direction, then the end of it."""
        seen: list[Link] = []
        for link in (self.current.get((one, two)), self.current.get((two, one))):
            if link is None or link.severed or any(link is known for known in seen):
                continue
            seen.append(link)
            link.severed = True
            for end in link.ends:
                queue = link.queue[end]
                kept = self.world.between(0, len(queue))
                while len(queue) > kept:
                    queue.pop()
                delay_us = self.world.between(*self.shape.latency_us)
                self._enqueue(link, end, self.world.now_us + delay_us, _CLOSE_RESET)

    def partition(self, directions: list[tuple[str, str]]) -> Callable[[], None]:
        """Nothing passes in these directions. Whoever hears nothing gives the connection up after a while."""
        for direction in directions:
            self._blocked[direction] = self._blocked.get(direction, 0) + 1
            source, target = direction
            link = self.current.get((target, source))
            if link is not None:
                self._give_up_later(link, target, direction)
        return lambda: self._lift(self._blocked, directions)

    def _give_up_later(self, link: Link, host: str, direction: tuple[str, str]) -> None:
        def give_up() -> None:
            if direction in self._blocked and link.open[host] and self.current.get((host, direction[0])) is link:
                self._close_end(link, host, reset=False)

        self.world.after(self.world.between(*self.shape.idle_timeout_us), give_up)

    def hold(self, directions: list[tuple[str, str]]) -> Callable[[], None]:
        """A stall: everything in these directions waits, and arrives in order after the release."""
        for direction in directions:
            self._held[direction] = self._held.get(direction, 0) + 1
        return lambda: self._lift(self._held, directions)

    def _lift(self, faults: dict[tuple[str, str], int], directions: list[tuple[str, str]]) -> None:
        for direction in directions:
            left = faults.get(direction, 0) - 1
            if left > 0:
                faults[direction] = left
            else:
                faults.pop(direction, None)
                self._resume(direction)

    def _resume(self, direction: tuple[str, str]) -> None:
        if direction in self._blocked or direction in self._held:
            return
        for link in self._stalled.pop(direction, []):
            self._arrive(link, direction[1])

    def heal(self) -> None:
        for faults in (self._blocked, self._held):
            faults.clear()
        for direction in list(self._stalled):
            self._resume(direction)
        names = list(self.world.hosts)
        for index, one in enumerate(names):
            for two in names[index + 1 :]:
                self._dial_later(one, two)
