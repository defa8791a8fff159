"""Clients of the register application: each does one thing after another, at any node, and notes what it was told."""

from __future__ import annotations

from chaos.profiles import MILLISECOND
from chaos.world import Host, World

_REFUSED_US = 50 * MILLISECOND


class RegisterClient:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._operation = 0

    def start(self) -> None:
        self._later(0)

    def _later(self, extra_us: int) -> None:
        self._world.after(extra_us + self._world.between(*self._world.shape.think_us), self._act)

    def _act(self) -> None:
        if self._world.calm:
            return
        host = self._pick()
        if not host.running:
            self._later(_REFUSED_US)
            return
        self._operation += 1
        operation = self._operation
        if self._world.chance(self._world.shape.reads_per_thousand):
            self._read(host, operation)
        else:
            self._append(host, operation)
        self._world.after(self._world.shape.patience_us, lambda: self._over(operation))

    def _pick(self) -> Host:
        names = list(self._world.hosts)
        return self._world.hosts[names[self._world.between(0, len(names) - 1)]]

    def _over(self, operation: int) -> None:
        """Answered, or out of patience: on to the next. An answer that comes later still counts for the checkers."""
        if operation == self._operation:
            self._operation += 1
            self._later(0)

    def _append(self, host: Host, operation: int) -> None:
        world = self._world
        world.commands += 1
        command = world.commands
        life = host.life

        def done(outcome: str) -> None:
            world.detail(self._name, f"command {command} at {host.name}: {outcome}")
            if host.life == life:
                self._over(operation)

        world.detail(self._name, f"command {command} to {host.name}")
        host.enter(lambda: host.process.propose(command, done) if host.process else None)

    def _read(self, host: Host, operation: int) -> None:
        world = self._world
        floor = world.checkers.read_floor()

        def done(saw: int | None) -> None:
            if saw is not None:
                world.checkers.read_answered(host.name, floor, saw)
            self._over(operation)

        host.enter(lambda: host.process.read(done) if host.process else None)
