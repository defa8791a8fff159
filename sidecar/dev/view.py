"""The cluster on a terminal: a screen that is drawn again and again, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tenure.v1 import watch_pb2

from sidecar.dev.cluster import LEASE, DevCluster, agent_of
from sidecar.dev.observer import Observed
from sidecar.dev.orders import describe

KEYS = "[b]k[/] kill leader  [b]h[/] kill holder  [b]p[/] cut leader off  [b]e[/] heal  [b]r[/] restart  [b]q[/] quit"
# Panels that need a fixed number of lines: title and border included.
NODES_LINES, WORK_LINES, KEYS_LINES = 6, 6, 3


def screen(cluster: DevCluster, seen: Observed, height: int) -> RenderableType:
    """Everything at a glance, for a terminal of ``height`` lines."""
    facts = describe(cluster, seen)
    rest = height - NODES_LINES - WORK_LINES - KEYS_LINES
    notes_lines = max(3, min(7, rest // 3))
    events_lines = max(3, rest - notes_lines)
    layout = Layout()
    layout.split_column(
        box("nodes and the agents beside them", nodes_table(facts, seen), NODES_LINES),
        box(f"the job '{LEASE}'", work(facts), WORK_LINES),
        box("events of the cluster", events(seen, events_lines - 2), events_lines),
        box("what was done to it", notes(seen, notes_lines - 2), notes_lines),
        box("keys", Text.from_markup(KEYS), KEYS_LINES),
    )
    return layout


def box(title: str, content: RenderableType, lines: int) -> Layout:
    return Layout(Panel(content, title=title, title_align="left"), size=lines)


def nodes_table(facts: dict[str, Any], seen: Observed) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    for heading in ("node", "role", "term", "applied", "health", "links", "agent", "ttl left"):
        table.add_column(heading, no_wrap=True)
    sessions = {session.info.agent: session for session in seen.sessions}
    running = {agent["name"]: agent["running"] for agent in facts["agents"]}
    for node in facts["nodes"]:
        name, agent = node["name"], agent_of(node["name"])
        session = sessions.get(agent)
        table.add_row(
            Text(name, style="bold" if node["running"] else "red"),
            Text(node["role"] or "-", style="bold green" if name == facts["leader"] else ""),
            str(node["term"] or "-"),
            str(node["applied"] or "-"),
            good_or_bad(node["health"], node["health"] == "ready"),
            good_or_bad(f"cut ({node['cut_off']})" if node["cut_off"] else "whole", not node["cut_off"]),
            agent_cell(agent, running[agent], agent == facts["holder"]),
            f"{session.remaining_ms / 1000:.1f} s" if session else "-",
        )
    return table


def good_or_bad(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "red")


def agent_cell(name: str, running: bool, holder: bool) -> Text:
    if not running:
        return Text(f"{name} (down)", style="red")
    return Text(f"{name} (holder)", style="bold green") if holder else Text(name)


def work(facts: dict[str, Any]) -> RenderableType:
    held, leader, tally = "[yellow]nobody holds it[/]", "[red]no leader[/]", facts["work"]
    if facts["holder"]:
        seconds = facts["held_ms"] / 1000
        held = f"[b green]{facts['holder']}[/] holds it, token [b]{facts['token']}[/], for {seconds:.0f} s"
    if facts["leader"]:
        leader = f"leader [b green]{facts['leader']}[/], term {facts['term']}"
    counts = "  ".join(count(name, tally[name]) for name in ("twice", "never", "partial"))
    return Group(
        Text.from_markup(f"{held}   {leader}   {facts['sessions']} sessions"),
        Text(progress(facts)),
        Text.from_markup(counts),
        Text.from_markup("[dim]partial: half-written by a holder that died, until the next one repairs it[/]"),
    )


def progress(facts: dict[str, Any]) -> str:
    tally = facts["work"]
    done = f"round {tally['round']}: {tally['finished']} of {tally['documents']} documents"
    return f"{done}, {tally['posted']} posted in all"


def count(name: str, value: int) -> str:
    return f"[b {'green' if value == 0 else 'yellow' if name == 'partial' else 'red'}]{name} {value}[/]"


def events(seen: Observed, lines: int) -> Text:
    return Text("\n".join(event_line(event) for event in list(seen.events)[-lines:]), no_wrap=True, overflow="ellipsis")


def notes(seen: Observed, lines: int) -> Text:
    return Text("\n".join(list(seen.notes)[-lines:]), no_wrap=True, overflow="ellipsis")


def event_line(event: watch_pb2.Event) -> str:
    kind = watch_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower().replace("_", " ")
    details = [f"{name} {value}" for name, value in (("token", event.token), ("attempt", event.attempt)) if value]
    details += [text for text in (event.cause, event.reason) if text]
    at = time.strftime("%H:%M:%S", time.localtime(event.wall_ms / 1000))
    return f"{at} {event.revision:>6}  {kind:<18} {event.subject}" + (f"  ({', '.join(details)})" if details else "")


class Lines:
    """The same as plain lines: what changed since it was last asked, and how the work goes every few seconds."""

    SUMMARY_S = 5.0

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}
        self._summary_at = 0.0
        self._noted = 0

    def news(self, cluster: DevCluster, seen: Observed) -> Iterator[str]:
        new = min(seen.noted - self._noted, len(seen.notes))
        yield from list(seen.notes)[len(seen.notes) - new :]
        self._noted = seen.noted
        now = time.strftime("%H:%M:%S")
        yield from (f"{now} {line}" for line in self._changes(describe(cluster, seen)))

    def _changes(self, facts: dict[str, Any]) -> Iterator[str]:
        if self._changed("leader", (facts["leader"], facts["term"])):
            yield f"leader {facts['leader']}, term {facts['term']}" if facts["leader"] else "no leader"
        if self._changed("holder", (facts["holder"], facts["token"])):
            who = f"{facts['holder']} holds '{LEASE}', token {facts['token']}"
            yield who if facts["holder"] else f"nobody holds '{LEASE}'"
        for node in facts["nodes"]:
            if self._changed(node["name"], node["health"]):
                yield f"{node['name']}: {node['health']}"
        if facts["work"]["round"] and time.monotonic() - self._summary_at >= self.SUMMARY_S:
            self._summary_at = time.monotonic()
            counts = ", ".join(f"{name} {facts['work'][name]}" for name in ("twice", "never", "partial"))
            yield f"{progress(facts)}; {counts}; {facts['sessions']} sessions"

    def _changed(self, what: str, value: Any) -> bool:
        changed = self._said.get(what) != value
        self._said[what] = value
        return bool(changed)
