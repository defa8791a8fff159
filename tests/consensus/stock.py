"""The library's own class, driven by hand: what each repair is a repair of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.syncobj import SyncObj, replicated
from pysyncobj.transport import Transport

from sidecar.consensus.library import NO_POLLER, use_clock
from tests.consensus.harness import ManualClock

Message = dict[str, Any]


class HandTransport(Transport):
    def __init__(self) -> None:
        super().__init__(None, None, None)  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, Message]] = []

    def send(self, node: Node, message: Message) -> bool:
        self.sent.append((node.id, message))
        return True


class StockMember:
    """One stock SyncObj. Its inner state is read and set by name, as the audit's directed runs did."""

    def __init__(self, name: str, peers: list[str], clock: ManualClock, **conf: Any) -> None:
        use_clock(clock)
        self.clock = clock
        self.transport = HandTransport()
        self.nodes = {peer: _node(peer) for peer in peers}
        settings = SyncObjConf(  # type: ignore[no-untyped-call]
            autoTick=False, pollerType=NO_POLLER, appendEntriesUseBatch=True, **conf
        )
        self.object: Any = _Register(_node(name), list(self.nodes.values()), conf=settings, transport=self.transport)
        for node in self.nodes.values():
            self.transport._onNodeConnected(node)  # type: ignore[no-untyped-call]

    def inner(self, name: str) -> Any:
        return getattr(self.object, "_SyncObj__" + name)

    def set_inner(self, name: str, value: Any) -> None:
        setattr(self.object, "_SyncObj__" + name, value)

    def receive(self, peer: str, message: Message) -> None:
        use_clock(self.clock)
        self.transport._onMessageReceived(self.nodes[peer], message)  # type: ignore[no-untyped-call]

    def tick(self) -> None:
        use_clock(self.clock)
        self.object.doTick(0)

    def log(self) -> list[tuple[int, int]]:
        """Index and term of every entry."""
        return [(index, term) for _, index, term in self.inner("raftLog")[:]]

    def take_sent(self, kind: str | None = None) -> list[tuple[str, Message]]:
        sent, self.transport.sent = self.transport.sent, []
        return [item for item in sent if kind in (None, item[1]["type"])]

    def propose(self, value: int, callback: Callable[..., None] | None = None) -> None:
        self.object.put(value, callback=callback)

    def lead(self, term: int = 1) -> None:
        """Make it leader of ``term`` as if it had been elected."""
        use_clock(self.clock)
        self.object._SyncObj__setCurrentTerm(term, self.object.selfNode.id)
        self.object._SyncObj__onBecomeLeader()


def _node(name: str) -> Node:
    return Node(name)  # type: ignore[no-untyped-call]


class _Register(SyncObj):
    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.values: list[int] = []
        super().__init__(*args, **keywords)  # type: ignore[no-untyped-call]

    @replicated  # type: ignore[untyped-decorator]
    def put(self, value: int) -> None:
        self.values.append(value)


def append(term: int, previous: tuple[int, int], entries: list[tuple[int, int]], commit: int = 1) -> Message:
    """An append_entries message of no-ops with these (index, term)."""
    return {
        "type": "append_entries",
        "term": term,
        "commit_index": commit,
        "prevLogIdx": previous[0],
        "prevLogTerm": previous[1],
        "entries": [(b"\x01", index, entry_term) for index, entry_term in entries],
    }
