"""``tenure dev``: run a cluster until somebody ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live

from sidecar.dev import view
from sidecar.dev.cluster import DIGEST, DevCluster, Pace, Program
from sidecar.dev.errors import DevError
from sidecar.dev.folder import Folder
from sidecar.dev.observer import Observed, Observer
from sidecar.dev.orders import ControlServer, Orders

FRAME_S = 0.25
LINES_S = 0.5


@dataclass(frozen=True)
class Options:
    state: Path
    examples: Path
    keep: bool = False
    plain: bool = False
    pace: Pace = field(default_factory=Pace)
    program: Program = DIGEST


@dataclass
class Running:
    """A cluster that has been started, and the ways to look at it and to break it."""

    folder: Folder
    cluster: DevCluster
    observer: Observer
    orders: Orders


@contextlib.asynccontextmanager
async def running(options: Options) -> AsyncIterator[Running]:
    """Start a cluster; on leaving, end all of it and remove its files (unless ``keep``, or its nodes did not start)."""
    folder = Folder(options.state)
    folder.open(keep=options.keep)
    keep = options.keep
    seen = Observed()
    try:
        cluster = DevCluster(folder, options.examples, options.pace, seen.note, options.program)
        observer = Observer(cluster, seen)
        orders = Orders(cluster, observer)
        control = ControlServer(orders, str(folder.control_socket))
        try:
            await cluster.start()
            observer.start()
            await control.start()
            yield Running(folder, cluster, observer, orders)
            keep = keep or bool(cluster.failure())
        finally:
            await control.stop()
            await observer.stop()
            await cluster.stop()
    finally:
        folder.close(keep=keep)


async def run(options: Options) -> int:
    """Until Ctrl-C, SIGTERM, SIGHUP or the key q. Returns the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    console = Console()
    interactive = console.is_terminal and sys.stdin.isatty() and not options.plain
    async with running(options) as dev:
        show = show_screen if interactive else show_lines
        await show(dev, console, stop)
        failure = dev.cluster.failure()
        say(console, "stopping: agents give back what they hold, then the nodes end")
    if failure:
        raise DevError(f"{failure}\nThe logs are in {dev.folder.root / 'logs'}.")
    left = f"the data is kept in {dev.folder.root}" if options.keep else "nothing is left behind"
    say(console, f"stopped; {left}")
    return 0


async def show_lines(dev: Running, console: Console, stop: asyncio.Event) -> None:
    """What changes, as it changes, for logs and pipes."""
    lines = view.Lines()
    say(console, f"three sidecars and three agents, state in {dev.folder.root}; Ctrl-C ends them all")
    while not stop.is_set() and not dev.cluster.failure():
        dev.observer.raise_if_failed()
        for line in lines.news(dev.cluster, dev.observer.seen):
            say(console, line)
        await wait_for(stop, LINES_S)


def say(console: Console, line: str) -> None:
    """One line, whatever the width of the terminal, at once."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.file.flush()


async def show_screen(dev: Running, console: Console, stop: asyncio.Event) -> None:
    """The live view, with keys."""
    keys: dict[str, Callable[[], Awaitable[str]]] = {
        "k": lambda: dev.orders.kill("leader"),
        "h": lambda: dev.orders.kill("holder"),
        "p": lambda: dev.orders.partition("leader", False),
        "e": dev.orders.heal,
        "r": lambda: dev.orders.restart("all"),
        "t": dev.orders.trigger,
        "u": lambda: dev.orders.switch("pause"),
        "x": lambda: dev.orders.switch("kill"),
        "c": dev.orders.resume,
    }
    acts: set[asyncio.Task[None]] = set()

    async def act(key: str) -> None:
        try:
            await keys[key]()
        except DevError as error:
            dev.observer.seen.note(str(error))

    def pressed(key: str) -> None:
        if key in ("q", "\x03"):
            stop.set()
        elif key == "j":
            dev.observer.seen.choose_next()
        elif key in keys:
            task = asyncio.get_running_loop().create_task(act(key))
            acts.add(task)
            task.add_done_callback(acts.discard)

    with keyboard(pressed), Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        while not stop.is_set() and not dev.cluster.failure():
            dev.observer.raise_if_failed()
            live.update(view.screen(dev.cluster, dev.observer.seen, console.size.height), refresh=True)
            await wait_for(stop, FRAME_S)
    await asyncio.gather(*acts)


@contextlib.contextmanager
def keyboard(pressed: Callable[[str], None]) -> Iterator[None]:
    """Single keys without Enter, and the terminal as it was afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)

    def readable() -> None:
        for key in os.read(descriptor, 64).decode(errors="replace") or "q":  # nothing to read: the terminal is gone
            pressed(key)

    loop.add_reader(descriptor, readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def wait_for(stop: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), timeout_s)
