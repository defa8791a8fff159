"""What happens to clients when the process forks.

The choice: a client belongs to the process that opened it. In a forked child every use of an inherited client or
lease raises ``ClientForkedError`` at once, and an inherited lease is not valid. So does opening a new client in the
child of a process that has used this package: gRPC's threads do not survive a fork and there is no supported way to
start them again (a new channel would hang). Start workers with ``spawn`` or ``exec``, or fork first and connect in
the children.

The child shares the parent's sockets, and gRPC ends a call that is cancelled or collected with bytes on the wire. So in
the child, inherited calls and channels are never collected and their tasks never run or get cancelled: the parent's
stream is not disturbed. gRPC's own support for forks is switched off (see environment.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import weakref
from typing import Final

from tenure.environment import FORK_SUPPORT, too_late
from tenure.errors import ClientForkedError

__all__ = ["Owner", "keep_from_child", "mark_used"]

log = logging.getLogger("tenure")

_generation = 0
_used = False
_inherited_after_use = False
_wire_objects: Final[weakref.WeakSet[object]] = weakref.WeakSet()
_tasks: Final[weakref.WeakSet[asyncio.Task[object]]] = weakref.WeakSet()


class Owner:
    """Remembers the process that made an object."""

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def here(self) -> bool:
        """Whether this is still the process that made the object."""
        return self._generation == _generation

    def check(self) -> None:
        if self._generation != _generation:
            raise ClientForkedError(
                "this client was opened before the process forked, and belongs to the parent; "
                "open clients after the fork, in a process that has not used one before, or start workers with spawn",
                reason="CLIENT_FORKED",
            )


def mark_used() -> None:
    """Called before gRPC is touched. Raises ClientForkedError where gRPC can no longer work."""
    global _used
    if _inherited_after_use:
        raise ClientForkedError(
            "this process was forked from one that had opened a tenure client, and gRPC does not work in such a child; "
            "start workers with spawn (or exec), or fork before the first client is opened",
            reason="CLIENT_FORKED",
        )
    if not _used and too_late:
        log.info("gRPC was loaded with %s on: children of a fork may crash; set it to 0", FORK_SUPPORT)
    _used = True


def keep_from_child(*, wire_object: object | None = None, task: asyncio.Task[object] | None = None) -> None:
    """Names a gRPC object that a child must never collect, or a task that must never run or be cancelled in a child."""
    if wire_object is not None:
        _wire_objects.add(wire_object)
    if task is not None:
        _tasks.add(task)


def _after_fork_in_child() -> None:
    global _generation, _inherited_after_use
    _generation += 1
    _inherited_after_use = _inherited_after_use or _used
    unregister = getattr(asyncio.tasks, "_unregister_task", None)
    for task in list(_tasks):
        _never_collect(task)
        if unregister is not None:
            # asyncio.run cancels all tasks when it ends, and a cancelled read cancels its call on the shared socket.
            unregister(task)
    for wire_object in list(_wire_objects):
        _never_collect(wire_object)


def _never_collect(thing: object) -> None:
    """One reference that nobody will ever drop, not even the interpreter's shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
