"""The machines that live in virtual time.

A ``Host`` is a machine: it has a disk that outlives its process, clocks of its own, and at most one process. A host is
``RUNNING``, ``PAUSED`` (its process is stopped by a signal: what happens to it waits) or ``DOWN``.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from chaos.checkers import Checkers
from chaos.disk import Disk, SimCrash
from chaos.profiles import SECOND, Shape
from chaos.timeline import Timeline


class ProcessStopped(Exception):
    """The process ended by its own decision (its store refused). ``reason`` is what it would have logged."""


class HostState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DOWN = "down"


class Process(Protocol):
    """What runs on a host: the node under test with its simulated ports."""

    def start(self) -> None: ...
    def peer_connected(self, peer: str) -> None: ...
    def peer_disconnected(self, peer: str, reset: bool) -> None: ...
    def frame_received(self, peer: str, frame: object) -> None: ...

    # -- what workload and faults may ask of any process
    def propose(self, command: int, done: Callable[[str], None]) -> None:
        """``done`` gets "acked", "refused" (definitely did not happen) or "unknown"."""

    def read(self, done: Callable[[int | None], None]) -> None:
        """``done(index)``: the applied index the read saw; None when the node would not answer."""

    def applied_index(self) -> int: ...
    def digest(self) -> str: ...
    def holds(self, command: int) -> bool: ...
    def is_leader(self) -> bool: ...
    def transfer(self, to: str) -> None: ...
    def snapshot(self) -> None: ...


class Connections(Protocol):
    """What is between hosts: see ``network.py``."""

    frames: int

    def host_up(self, host: Host) -> None: ...
    def host_down(self, host: Host, *, silent: bool) -> None: ...
    def connected(self, host: str, peer: str) -> bool: ...
    def send(self, host: str, peer: str, frame: object, size_bytes: int) -> bool: ...
    def reset(self, one: str, two: str) -> None: ...
    def hold(self, directions: list[tuple[str, str]]) -> Callable[[], None]: ...
    def partition(self, directions: list[tuple[str, str]]) -> Callable[[], None]: ...
    def heal(self) -> None: ...


class HostClock:
    """The host's monotonic and wall clock: they run at a rate of their own (parts per million off), wall time steps."""

    def __init__(self, world: World, started_us: int, wall_offset_us: int) -> None:
        self._world = world
        self._base_us = started_us
        self._since_us = world.now_us
        self.rate_ppm = 0
        self.wall_offset_us = wall_offset_us
        self._stopped_wall_us: int | None = None

    def monotonic_us(self) -> int:
        elapsed_us = self._world.now_us - self._since_us
        return self._base_us + elapsed_us + elapsed_us * self.rate_ppm // 1_000_000

    def monotonic_s(self) -> float:
        return self.monotonic_us() / 1_000_000

    def wall_us(self) -> int:
        if self._stopped_wall_us is not None:
            return self._stopped_wall_us
        elapsed_us = self._world.now_us + self._world.now_us * self.rate_ppm // 1_000_000
        return self.wall_offset_us + elapsed_us

    def wall_ms(self) -> int:
        return self.wall_us() // 1_000

    def stop_wall(self) -> None:
        """Wall time stands still."""
        self._stopped_wall_us = self.wall_us()

    def start_wall(self) -> None:
        """It goes on from where it stood."""
        if self._stopped_wall_us is not None:
            self.set_wall(self._stopped_wall_us)

    def set_wall(self, wall_us: int) -> None:
        self._stopped_wall_us = None
        self.wall_offset_us += wall_us - self.wall_us()

    def drift(self, rate_ppm: int) -> None:
        self._base_us = self.monotonic_us()
        self._since_us = self._world.now_us
        self.rate_ppm = rate_ppm

    def reboot(self) -> None:
        """The machine itself started again: the monotonic clock begins anew."""
        self._base_us = 1_000_000
        self._since_us = self._world.now_us

    def until_us(self, monotonic_s: float) -> int:
        """How much virtual time passes until this clock shows ``monotonic_s``; rounded up: no timer fires early."""
        ahead_us = int(monotonic_s * 1_000_000) + 1 - self.monotonic_us()
        if ahead_us <= 0:
            return 0
        return ahead_us * 1_000_000 // (1_000_000 + self.rate_ppm) + 1


class Host:
    """A machine. Everything its process does happens inside ``enter``, so that a crash ends exactly that."""

    def __init__(self, world: World, name: str, disk: Disk, clock: HostClock, boot: Callable[[Host], Process]) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.clock = clock
        self.state = HostState.DOWN
        self.process: Process | None = None
        self.life = 0
        self._boot = boot
        self._deferred: deque[Callable[[], None]] = deque()
        self._inside = False

    # ---- running code on this host

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        """Run ``action`` on this host's thread later, unless this life of the process has ended by then."""
        life = self.life
        self.world.after(delay_us, lambda: self.run(life, action))

    def run(self, life: int, action: Callable[[], None]) -> None:
        if life != self.life or self.state is HostState.DOWN:
            return
        if self.state is HostState.PAUSED:
            self._deferred.append(action)
            return
        self.enter(action)

    def enter(self, action: Callable[[], None]) -> None:
        if self._inside:
            action()
            return
        self._inside = True
        try:
            action()
        except SimCrash:
            self.disk.dying = True
        except ProcessStopped as stop:
            self.world.note(self.name, f"process stopped itself: {stop}")
            self.world.checkers.stopped(self.name, str(stop))
            self.disk.dying = True
        except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a finding, and recorded
            self.world.checkers.code_crashed(self.name, error, traceback.format_exc())
            self.disk.dying = True
        finally:
            self._inside = False
        if self.disk.dying:
            self.crash("in the middle of a step")

    # ---- life and death

    def boot(self) -> None:
        if self.state is not HostState.DOWN:
            return
        self.life += 1
        self.state = HostState.RUNNING
        self.disk.dying = False
        self.world.note(self.name, f"boots (life {self.life})")
        self.enter(self._start)

    def _start(self) -> None:
        self.process = self._boot(self)
        self.process.start()
        self.world.network.host_up(self)

    def crash(self, how: str, *, power: bool = False) -> None:
        """The process is gone at once. ``power``: the machine is, with everything that was not on the disk."""
        if self.state is HostState.DOWN:
            return
        self.world.note(self.name, f"crashes ({how})")
        self.world.reach("crash with power cut" if power else "crash")
        self.state = HostState.DOWN
        self.process = None
        self._deferred.clear()
        self.disk.crash(power=power)
        if power:
            self.clock.reboot()
        self.world.network.host_down(self, silent=power)
        self.world.checkers.crashed(self.name)
        for listener in self.world.crash_listeners:
            listener(self)
        self.world.bounce_later(self)

    def pause(self) -> None:
        if self.state is HostState.RUNNING:
            self.world.note(self.name, "paused")
            self.state = HostState.PAUSED

    def resume(self) -> None:
        if self.state is not HostState.PAUSED:
            return
        self.world.note(self.name, f"resumed, {len(self._deferred)} events waited")
        self.world.reach("resume after a pause")
        self.state = HostState.RUNNING
        life = self.life
        while self._deferred and self.life == life and self.state is HostState.RUNNING:
            self.enter(self._deferred.popleft())

    @property
    def running(self) -> bool:
        return self.state is HostState.RUNNING and self.process is not None


class World(Timeline):
    """The hosts, what is between them, and who looks on."""

    network: Connections
    checkers: Checkers
    documents: dict[str, int]  # applications core and jobs only: lease -> number of the document that is next

    def __init__(self, seed: int, shape: Shape, *, verbose: bool = False) -> None:
        super().__init__(seed, shape, verbose=verbose)
        self.hosts: dict[str, Host] = {}
        self.crash_listeners: list[Callable[[Host], None]] = []
        self.commands = 0  # numbers of commands given out to clients
        self.epoch_us = 1_700_000_000 * SECOND  # the true wall time at which the world begins
        # By how much a majority of wall clocks is wrong at the most; 0: nobody knows.
        self.wall_error_max_ms = 0
        self.wall_changed_us = 0  # when a fault set one the last time

    # ---- the true time

    def true_wall_ms(self) -> int:
        return (self.epoch_us + self.now_us) // 1_000

    # ---- hosts

    def bounce_later(self, host: Host) -> None:
        low_us, high_us = self.shape.down_us
        self.after(self.between(low_us, high_us), host.boot)
