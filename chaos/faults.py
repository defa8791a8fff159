"""What goes wrong, and when it ends. Each fault is a small function; its name is what a profile lists."""

from __future__ import annotations

from collections.abc import Callable

from chaos.disk import NO_SPACE, LogVolume
from chaos.profiles import MILLISECOND, SECOND
from chaos.world import Host, HostState, World

Direction = tuple[str, str]


class Faults:
    """Draws a fault every now and then until the world is calm."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._weights = world.shape.faults
        self._total = sum(weight for _, weight in self._weights)
        self._actions: dict[str, Callable[[], None]] = {
            "reset": self._reset,
            "hold": self._hold,
            "isolate": self._isolate,
            "one_way": self._one_way,
            "cut": self._cut,
            "split": self._split,
            "pause": self._pause,
            "kill": self._kill,
            "kill_in_step": self._kill_in_step,
            "kill_in_snapshot": self._kill_in_snapshot,
            "kill_voter": self._kill_voter,
            "power": self._power,
            "power_all": self._power_all,
            "slow_disk": self._slow_disk,
            "full_disk": self._full_disk,
            "wall_step": self._wall_step,
            "wall_nudge": self._wall_nudge,
            "wall_of_one": self._wall_of_one,
            "wall_step_all": self._wall_step_all,
            "wall_stop": self._wall_stop,
            "drift": self._drift,
            "transfer": self._transfer,
            "snapshot": self._snapshot,
            "wipe": self._wipe,
        }

    def start(self) -> None:
        if self._total and len(self._world.hosts) > 0:
            self._later()

    def _later(self) -> None:
        self._world.after(self._world.between(*self._world.shape.gap_us), self._strike)

    def _strike(self) -> None:
        if self._world.calm:
            return
        ticket = self._world.between(1, self._total)
        for name, weight in self._weights:
            ticket -= weight
            if ticket <= 0:
                self._actions[name]()
                break
        self._later()

    # ---- drawing

    def _host(self) -> Host:
        names = list(self._world.hosts)
        return self._world.hosts[names[self._world.between(0, len(names) - 1)]]

    def _target(self) -> Host:
        """Half of the time a leader: that is where it hurts."""
        leaders = [
            host for host in self._world.hosts.values() if host.running and host.process and host.process.is_leader()
        ]
        if leaders and self._world.chance(500):
            return leaders[self._world.between(0, len(leaders) - 1)]
        return self._host()

    def _pair(self) -> Direction | None:
        names = list(self._world.hosts)
        if len(names) < 2:
            return None
        one = self._world.between(0, len(names) - 1)
        two = self._world.between(0, len(names) - 2)
        return names[one], names[two if two < one else two + 1]

    def _for_a_while(self, what: str, lift: Callable[[], None], *, longest_us: int | None = None) -> None:
        low_us, high_us = self._world.shape.fault_us
        lasts_us = self._world.between(low_us, longest_us or high_us)
        self._world.note("fault", f"{what} for {lasts_us // MILLISECOND} ms")
        self._world.after(lasts_us, lift)

    # ---- the network

    def _reset(self) -> None:
        pair = self._pair()
        if pair is not None:
            self._world.note("fault", f"reset {pair[0]} - {pair[1]}")
            self._world.network.reset(*pair)

    def _hold(self) -> None:
        pair = self._pair()
        if pair is not None:
            directions = [pair] if self._world.chance(500) else [pair, (pair[1], pair[0])]
            self._for_a_while(f"hold {directions}", self._world.network.hold(directions))

    def _partition(self, what: str, directions: list[Direction]) -> None:
        if directions:
            self._for_a_while(what, self._world.network.partition(directions))

    def _isolate(self) -> None:
        name = self._target().name
        others = [other for other in self._world.hosts if other != name]
        self._partition(
            f"partition {name} from all", [*((name, other) for other in others), *((other, name) for other in others)]
        )

    def _one_way(self) -> None:
        name = self._target().name
        others = [other for other in self._world.hosts if other != name]
        if self._world.chance(500):
            self._partition(f"nothing reaches {name}", [(other, name) for other in others])
        else:
            self._partition(f"nothing leaves {name}", [(name, other) for other in others])

    def _cut(self) -> None:
        pair = self._pair()
        if pair is not None:
            self._partition(f"partition {pair[0]} - {pair[1]}", [pair, (pair[1], pair[0])])

    def _split(self) -> None:
        names = list(self._world.hosts)
        if len(names) < 2:
            return
        start, size = self._world.between(0, len(names) - 1), self._world.between(1, len(names) - 1)
        side = [names[(start + step) % len(names)] for step in range(size)]
        rest = [name for name in names if name not in side]
        directions = [(one, two) for one in side for two in rest]
        self._partition(f"partition {side} from {rest}", [*directions, *((two, one) for one, two in directions)])

    # ---- processes and machines

    def _pause(self) -> None:
        host = self._target()
        if host.state is HostState.RUNNING:
            host.pause()
            self._for_a_while(f"pause {host.name}", host.resume)

    def _kill(self) -> None:
        self._target().crash("kill -9")

    def _kill_in_step(self) -> None:
        host = self._target()
        steps = self._world.between(1, 40)
        self._world.note("fault", f"{host.name} will be killed in its storage step {steps} from now")
        host.disk.arm(steps)

    def _kill_in_snapshot(self) -> None:
        """In a step of writing, receiving or deleting snapshots, of which there are too few to be hit by chance."""
        host = self._target()
        steps = self._world.between(1, 6)
        self._world.note("fault", f"{host.name} will be killed in its snapshot step {steps} from now")
        host.disk.arm(steps, only="snapshot")
        if self._world.chance(500) and host.running and host.process is not None:
            host.enter(host.process.snapshot)

    def _kill_voter(self) -> None:
        """Right after its next vote has left: does it remember the vote when it comes back?"""
        host = self._host()
        self._world.note("fault", f"{host.name} will be killed right after its next vote")
        self._world.checkers.doomed_voters[host.name] = self._kill_soon

    def _kill_soon(self, name: str) -> None:
        host = self._world.hosts[name]
        self._world.reach("killed right after its vote")
        host.after(self._world.between(0, 2_000), lambda: host.crash("kill -9 after a vote"))

    def _power(self) -> None:
        self._target().crash("power cut", power=True)

    def _power_all(self) -> None:
        for host in self._world.hosts.values():
            host.crash("power cut of all", power=True)

    def _slow_disk(self) -> None:
        disk = self._target().disk
        slow_us = self._world.between(20 * MILLISECOND, 900 * MILLISECOND)
        disk.sync_us = (slow_us // 2, slow_us)

        def lift() -> None:
            disk.sync_us = self._world.shape.sync_us

        self._for_a_while(f"{disk.host} syncs in up to {slow_us // MILLISECOND} ms", lift)

    def _full_disk(self) -> None:
        disk = self._target().disk
        if NO_SPACE not in self._world.checkers.expected_stops:
            self._world.checkers.expected_stops.append(NO_SPACE)
        disk.full = True

        def lift() -> None:
            disk.full = False

        self._for_a_while(f"{disk.host}'s disk is full", lift)

    def _wall_step(self) -> None:
        host = self._host()
        step_us = self._world.between(-8 * 3600, 8 * 3600) * SECOND
        host.clock.set_wall(host.clock.wall_us() + step_us)
        self._world.note("fault", f"{host.name}'s wall clock steps by {step_us // SECOND} s")

    def _wall_nudge(self) -> None:
        """As when a time daemon corrects it."""
        host = self._host()
        step_us = self._world.between(-3_000, 3_000) * MILLISECOND
        host.clock.set_wall(host.clock.wall_us() + step_us)
        self._world.note("fault", f"{host.name}'s wall clock is put right by {step_us // MILLISECOND} ms")

    def _wall_of_one(self) -> None:
        """Always the same machine's: the others' clocks are right."""
        clock = next(iter(self._world.hosts.values())).clock
        wrong_s = 0 if self._world.chance(250) else self._world.between(-7_200, 7_200)
        clock.set_wall(self._world.epoch_us + self._world.now_us + wrong_s * SECOND)
        self._world.wall_changed_us = self._world.now_us
        self._world.note("fault", f"the first machine's wall clock is wrong by {wrong_s} s")

    def _wall_step_all(self) -> None:
        """The whole site slept, or was given another time: mostly a later one."""
        low_s, high_s = (-7_200, 0) if self._world.chance(250) else (10, 7_200)
        step_us = self._world.between(low_s, high_s) * SECOND
        self._world.note("fault", f"all wall clocks step by {step_us // SECOND} s")
        for host in self._world.hosts.values():
            host.clock.set_wall(host.clock.wall_us() + step_us)

    def _wall_stop(self) -> None:
        clock = self._host().clock
        clock.stop_wall()
        self._for_a_while("a wall clock stands still", clock.start_wall)

    def _drift(self) -> None:
        host = self._host()
        limit = self._world.shape.drift_ppm
        host.clock.drift(self._world.between(-limit, limit))
        self._world.note("fault", f"{host.name}'s clocks run {host.clock.rate_ppm} ppm fast")

    # ---- requests of an operator

    def _transfer(self) -> None:
        for host in self._world.hosts.values():
            process = host.process
            if host.running and process is not None and process.is_leader() and len(self._world.hosts) > 1:
                pair = self._pair()
                assert pair is not None
                to = pair[0] if pair[0] != host.name else pair[1]
                self._world.note("fault", f"{host.name} hands over to {to}")
                host.enter(lambda process=process, to=to: process.transfer(to))  # type: ignore[misc]
                return

    def _snapshot(self) -> None:
        host = self._host()
        process = host.process
        if host.running and process is not None:
            self._world.note("fault", f"{host.name} is asked for a snapshot")
            host.enter(process.snapshot)

    def _wipe(self) -> None:
        """A disk is lost, one at a time: not before the last one that was lost belongs to a voter again."""
        hosts = list(self._world.hosts.values())
        volumes = [host.disk.volume for host in hosts]
        sound = all(isinstance(volume, LogVolume) and volume.durable.amnesiac_term != 0 for volume in volumes)
        fresh = any(isinstance(volume, LogVolume) and not volume.durable.entries for volume in volumes)
        if len(hosts) < 3 or not sound or fresh or not self._world.checkers.acks:
            return
        host = self._target()
        volume = host.disk.volume
        assert isinstance(volume, LogVolume)
        if host.state is HostState.DOWN:
            return
        host.crash("its disk is lost", power=True)
        volume.wipe()
        self._world.checkers.wiped(host.name)
