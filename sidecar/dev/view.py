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

KEYS = (
    "[b]k[/] kill leader  [b]h[/] kill holder  [b]p[/] cut leader off  [b]e[/] heal  [b]r[/] restart nodes",
    "[b]j[/] next job  [b]t[/] trigger it  [b]u[/] pause it  [b]x[/] kill switch  [b]c[/] clear switch  [b]q[/] quit",
)
# Panels that need a fixed number of lines: title and border included.
NODES_LINES, LEASE_LINES, KEYS_LINES = 6, 6, 4
JOBS_MAX = 6
LAST = {
    "succeeded": ("ok", "green"),
    "failed": ("failed", "red"),
    "unknown": ("unknown", "red"),
    "missed": ("missed", "red"),
}


def screen(cluster: DevCluster, seen: Observed, height: int) -> RenderableType:
    """Everything at a glance, for a terminal of ``height`` lines."""
    facts = describe(cluster, seen)
    if facts["program"] == "inbox_agent":
        middle = box(f"the lease '{LEASE}'", work(facts), LEASE_LINES)
    else:
        middle = box("jobs", jobs(facts), jobs_lines(facts))
    assert middle.size is not None
    rest = height - NODES_LINES - middle.size - KEYS_LINES
    notes_lines = max(3, min(7, rest // 3))
    events_lines = max(3, rest - notes_lines)
    layout = Layout()
    layout.split_column(
        box("nodes and the agents beside them", nodes_table(facts, seen), NODES_LINES),
        middle,
        box("events of the cluster", events(seen, events_lines - 2), events_lines),
        box("what was done to it", notes(seen, notes_lines - 2), notes_lines),
        box("keys", Text.from_markup("\n".join(KEYS)), KEYS_LINES),
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


def jobs_lines(facts: dict[str, Any]) -> int:
    """Border, headings, jobs, counts; and the switches, if any."""
    return 4 + max(1, min(len(facts["jobs"]), JOBS_MAX)) + bool(facts["switches"])


def jobs(facts: dict[str, Any]) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    for heading, share in (("job", 4), ("due", 2), ("now", 5), ("last, newest first", 6)):
        table.add_column(heading, no_wrap=True, ratio=share)
    for heading in ("ok", "failed", "other"):
        table.add_column(heading, no_wrap=True, justify="right", min_width=6)
    for job in facts["jobs"][:JOBS_MAX]:
        totals = job["totals"]
        other = sum(count for outcome, count in totals.items() if outcome not in ("succeeded", "failed"))
        table.add_row(
            Text(f"> {job['name']}" if job["chosen"] else f"  {job['name']}", style="bold" if job["chosen"] else ""),
            due_in(job["next_due_ms"]), now_cell(job), last_cell(job["last"]),
            str(totals["succeeded"]), str(totals["failed"]), str(other),
        )  # fmt: skip
    if not facts["jobs"]:
        table.add_row("none yet", "", "", "", "", "", "")
    tally = facts["work"]
    counts = "  ".join(count(name, tally[name]) for name in ("twice", "never", "partial"))
    leader = f"leader [b green]{facts['leader']}[/]" if facts["leader"] else "[red]no leader[/]"
    line = Text.from_markup(f"{leader}   {facts['sessions']} sessions   {tally['posted']} posted in all   {counts}")
    switches = [Text(switch_line(facts["switches"]), style="bold red", no_wrap=True, overflow="ellipsis")]
    return Group(table, line, *(switches if facts["switches"] else []))


def due_in(due_ms: int) -> str:
    if due_ms <= 0:
        return "-"
    left_ms = due_ms - time.time() * 1_000
    return f"in {left_ms / 1_000:.0f} s" if left_ms >= 0 else "now"


def now_cell(job: dict[str, Any]) -> Text:
    """Who is at it, or why nobody is."""
    parts = [run["agent"] + (f", attempt {run['attempt']}" if run["attempt"] > 1 else "") for run in job["runs"]]
    if job["pending"]:
        parts.append(f"{job['pending']} waiting")
    if job["mode"]:
        return Text("; ".join([f"{job['mode']} ({job['switch']})", *parts]), style="bold red")
    return Text("; ".join(parts) or "-", style="bold green" if job["runs"] else "")


def last_cell(last: list[dict[str, Any]]) -> Text:
    text = Text()
    for each in last:
        word, style = LAST.get(each["outcome"], (each["outcome"], "yellow"))
        text.append(f"{word} ", style=style)
    return text


def switch_line(switches: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{each['mode']} of {each['scope']} ({each['id']}, by {each['actor']}: {each['reason']}), "
        f"{each['suppressed']} suppressed, {each['runs_left']} runs left"
        for each in switches
    )


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
    if facts["program"] != "inbox_agent":
        return f"{tally['posted']} posted in all"
    done = f"round {tally['round']}: {tally['finished']} of {tally['documents']} documents"
    return f"{done}, {tally['posted']} posted in all"


def count(name: str, value: int) -> str:
    return f"[b {'green' if value == 0 else 'yellow' if name == 'partial' else 'red'}]{name} {value}[/]"


def events(seen: Observed, lines: int) -> Text:
    """The last ones; checkpoints are too many to be news."""
    news = [event for event in seen.events if event.kind != watch_pb2.EVENT_KIND_RUN_CHECKPOINTED]
    return Text("\n".join(map(event_line, news[-lines:])), no_wrap=True, overflow="ellipsis")


def notes(seen: Observed, lines: int) -> Text:
    return Text("\n".join(list(seen.notes)[-lines:]), no_wrap=True, overflow="ellipsis")


def event_line(event: watch_pb2.Event) -> str:
    kind = watch_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower().replace("_", " ")
    details = [f"{name} {value}" for name, value in (("token", event.token), ("attempt", event.attempt)) if value]
    if event.due_wall_ms:
        details.insert(0, f"due {clock(event.due_wall_ms)}")
    details += [f"{event.count} due times"] if event.count > 1 else []
    details += [text for text in (event.cause, event.reason) if text]
    more = f"  ({', '.join(details)})" if details else ""
    return f"{clock(event.wall_ms)} {event.revision:>6}  {kind:<18} {event.subject}{more}"


def clock(wall_ms: int) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ms / 1000))


class Lines:
    """The same as plain lines: what changed since it was last asked, and how the work goes every few seconds."""

    SUMMARY_S = 5.0

    def __init__(self) -> None:
        self._said: dict[str, Any] = {"switches": []}
        self._summary_at = 0.0
        self._noted = 0
        self._last_due: dict[str, int] = {}

    def news(self, cluster: DevCluster, seen: Observed) -> Iterator[str]:
        new = min(seen.noted - self._noted, len(seen.notes))
        yield from list(seen.notes)[len(seen.notes) - new :]
        self._noted = seen.noted
        now = time.strftime("%H:%M:%S")
        yield from (f"{now} {line}" for line in self._changes(describe(cluster, seen)))

    def _changes(self, facts: dict[str, Any]) -> Iterator[str]:
        if self._changed("leader", (facts["leader"], facts["term"])):
            yield f"leader {facts['leader']}, term {facts['term']}" if facts["leader"] else "no leader"
        if facts["program"] != "inbox_agent":
            yield from self._job_changes(facts)
        elif self._changed("holder", (facts["holder"], facts["token"])):
            who = f"{facts['holder']} holds '{LEASE}', token {facts['token']}"
            yield who if facts["holder"] else f"nobody holds '{LEASE}'"
        for node in facts["nodes"]:
            if self._changed(node["name"], node["health"]):
                yield f"{node['name']}: {node['health']}"
        if (facts["work"]["round"] or facts["jobs"]) and time.monotonic() - self._summary_at >= self.SUMMARY_S:
            self._summary_at = time.monotonic()
            counts = ", ".join(f"{name} {facts['work'][name]}" for name in ("twice", "never", "partial"))
            yield f"{progress(facts)}; {counts}; {facts['sessions']} sessions"

    def _job_changes(self, facts: dict[str, Any]) -> Iterator[str]:
        """What has ended since, oldest first, and which switches came and went."""
        for job in facts["jobs"]:
            before = self._last_due.get(job["name"], 0)
            for each in reversed(job["last"]):
                if each["due_ms"] > before:
                    why = f" ({each['reason']})" if each["reason"] else ""
                    tried = f", attempt {each['attempt']}" if each["attempt"] > 1 else ""
                    yield f"{job['name']} due {clock(each['due_ms'])}: {each['outcome']}{why}{tried}"
            self._last_due[job["name"]] = max([before, *(each["due_ms"] for each in job["last"])])
        if self._changed("switches", [(each["id"], each["mode"]) for each in facts["switches"]]):
            yield switch_line(facts["switches"]) or "no switch is in force"

    def _changed(self, what: str, value: Any) -> bool:
        changed = self._said.get(what) != value
        self._said[what] = value
        return bool(changed)
