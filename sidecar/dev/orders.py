"""What a person may do to the cluster, by key or from a second terminal, and the socket the second terminal uses.

One JSON object a line each way: ``{"order": "kill", "target": "leader"}`` is answered by ``{"said": "..."}``,
``{"status": {...}}`` or ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from tenure.v1 import job_pb2, switch_pb2
from tenure.v1.job_pb2 import OccurrenceState
from tenure.v1.switch_pb2 import SwitchMode

from sidecar.dev.cluster import DevCluster, node_of
from sidecar.dev.errors import DevError
from sidecar.dev.observer import LEADER, Observed, Observer

REPLY_TIMEOUT_S = 15.0
# A run of a job that is due every few seconds comes within this.
RUN_TIMEOUT_S = 8.0
LINE_BYTES_MAX = 65_536


class Orders:
    """Carries out one order after the other. ``DevError`` when it cannot be."""

    def __init__(self, cluster: DevCluster, observer: Observer) -> None:
        self._cluster, self._observer = cluster, observer

    async def kill(self, target: str) -> str:
        """``leader``, ``holder``, a node (``n2`` or ``2``) or an agent (``agent-2``)."""
        name = await self._resolve(target)
        await self._cluster.kill(name)
        return f"killed {name}" + (f", the {target}" if target != name else "")

    async def partition(self, target: str, one_way: bool) -> str:
        name = await self._resolve(target)
        node = node_of(name) if name in self._cluster.agents else name
        self._cluster.partition(node, one_way=one_way)
        return f"{node} is cut off" + (" one way: it hears the others and they do not hear it" if one_way else "")

    async def heal(self) -> str:
        self._cluster.heal()
        return "all links are whole"

    async def trigger(self, job: str = "") -> str:
        name = self._job(job)
        occurrence = await self._observer.jobs().trigger(name)
        return self._said(
            f"triggered {name}: {outcome_of(occurrence)}{f' ({occurrence.reason})' if occurrence.reason else ''}"
        )

    async def switch(self, mode: str, job: str = "") -> str:
        """``pause``, ``drain`` or ``kill`` a job."""
        name = self._job(job)
        switch = await self._observer.jobs().set_switch(name, mode)
        return self._said(f"{mode} of {name} is in force, switch {switch.switch_id}")

    async def resume(self, job: str = "") -> str:
        """Clear the switch of a job. What it suppressed is not made up for."""
        name = self._job(job)
        await self._observer.refresh()
        switch = self._observer.seen.work.switch(name)
        if switch is None:
            raise DevError(f"no switch is in force for {name}")
        ended = await self._observer.jobs().clear_switch(switch)
        return self._said(f"{name} goes on; switch {ended.switch_id} suppressed {ended.suppressed}")

    def _job(self, job: str) -> str:
        name = job or self._observer.seen.chosen
        if not name:
            raise DevError("no job is known yet")
        return name

    def _said(self, text: str) -> str:
        self._observer.seen.note(text)
        return text

    async def restart(self, target: str) -> str:
        """A node, or ``all`` that are down."""
        names = await self._cluster.restart("" if target == "all" else await self._resolve(target))
        return f"started {', '.join(names)}" if names else "no node is down"

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """One order from the socket, and the answer to it."""
        match order:
            case {"order": "kill", "target": str(target)}:
                return {"said": await self.kill(target)}
            case {"order": "partition", "target": str(target), "one_way": bool(one_way)}:
                return {"said": await self.partition(target, one_way)}
            case {"order": "heal"}:
                return {"said": await self.heal()}
            case {"order": "restart", "target": str(target)}:
                return {"said": await self.restart(target)}
            case {"order": "trigger", "target": str(target)}:
                return {"said": await self.trigger(target)}
            case {"order": "pause" | "drain" as mode, "target": str(target)}:
                return {"said": await self.switch(mode, target)}
            case {"order": "kill_job", "target": str(target)}:
                return {"said": await self.switch("kill", target)}
            case {"order": "resume", "target": str(target)}:
                return {"said": await self.resume(target)}
            case {"order": "status"}:
                return {"status": describe(self._cluster, self._observer.seen)}
        raise DevError(f"not an order: {order}")

    async def _resolve(self, target: str) -> str:
        if target not in ("leader", "holder"):
            return f"n{target}" if target.isdigit() else target
        deadline = asyncio.get_running_loop().time() + (RUN_TIMEOUT_S if self._observer.with_jobs else 0)
        while True:
            seen = await self._observer.refresh()
            if found := seen.leader if target == "leader" else seen.holder_agent:
                return found
            # A holder of a job comes with its next run; without any job there is none to wait for.
            if target == "leader" or not seen.chosen or asyncio.get_running_loop().time() > deadline:
                raise DevError(f"there is no {target} now")
            await asyncio.sleep(0.02)


def describe(cluster: DevCluster, seen: Observed) -> dict[str, Any]:
    """The cluster in plain values."""
    holder, tally = seen.holder, seen.tally
    return {
        "program": cluster.program.module,
        "leader": seen.leader,
        "term": seen.term,
        "holder": seen.holder_agent,
        "token": seen.token,
        "held_ms": seen.cluster_ms - holder.granted_ms if holder else 0,
        "sessions": len(seen.sessions),
        "nodes": [describe_node(cluster, seen, name) for name in cluster.nodes],
        "agents": [
            {"name": name, "running": agent.running, "pid": agent.pid if agent.running else 0}
            for name, agent in cluster.agents.items()
        ],
        "work": {
            "round": tally.round, "finished": tally.finished, "documents": tally.documents, "posted": tally.posted,
            "twice": tally.twice, "never": tally.never, "partial": tally.partial,
        },
        "jobs": [describe_job(job, seen) for _, job in sorted(seen.work.jobs.items())],
        "switches": [describe_switch(switch) for switch in seen.work.switches],
        "http": {name: f"http://127.0.0.1:{port}" for name, port in cluster.http_ports.items()},
    }  # fmt: skip


def describe_node(cluster: DevCluster, seen: Observed, name: str) -> dict[str, Any]:
    process, status = cluster.nodes[name], seen.statuses.get(name)
    node = {
        "name": name,
        "running": process.running,
        "pid": process.pid if process.running else 0,
        "cut_off": cluster.mesh.cut_off(name),
        "address": cluster.address(name),
    }
    if status is None:
        reason = "starting or not answering" if process.running else f"down, status {process.exit_status}"
        return node | {"role": "", "term": 0, "applied": 0, "health": reason}
    role = "leader" if status.role == LEADER else "follower" if status.leader_id else "looking for a leader"
    health = "ready" if status.ready else status.not_ready_reason or "not ready"
    return node | {"role": role, "term": status.term, "applied": status.applied_index, "health": health}


def describe_job(job: job_pb2.Job, seen: Observed) -> dict[str, Any]:
    return {
        "name": job.name,
        "chosen": job.name == seen.chosen,
        "schedule": job.schedule_text,
        "next_due_ms": job.next_due_wall_ms,
        "runs": [
            {"run": run.run_id, "agent": run.agent, "attempt": run.attempt, "token": run.token} for run in job.runs
        ],
        "pending": job.pending,
        "switch": job.switch_id,
        "mode": SwitchMode.Name(job.switch_mode).removeprefix("SWITCH_MODE_").lower() if job.switch_id else "",
        "last": [
            {"due_ms": each.due_wall_ms, "outcome": outcome_of(each), "reason": each.reason, "attempt": each.attempt}
            for each in job.recent
        ],
        "totals": {
            "succeeded": job.succeeded_total, "failed": job.failed_total, "skipped": job.skipped_total,
            "missed": job.missed_total, "cancelled": job.cancelled_total, "unknown": job.unknown_total,
        },
    }  # fmt: skip


def outcome_of(occurrence: job_pb2.Occurrence) -> str:
    return OccurrenceState.Name(occurrence.state).removeprefix("OCCURRENCE_STATE_").lower()


def describe_switch(switch: switch_pb2.Switch) -> dict[str, Any]:
    scope = switch.job or (f"tenant {switch.tenant}" if switch.tenant else "the fleet")
    mode = SwitchMode.Name(switch.mode).removeprefix("SWITCH_MODE_").lower()
    return {
        "id": switch.switch_id, "scope": scope, "mode": mode, "actor": switch.actor, "reason": switch.reason,
        "runs_left": switch.runs_left, "suppressed": switch.suppressed, "effect_ms": switch.effect_ms,
    }  # fmt: skip


class ControlServer:
    """Takes orders on a unix socket that only this user can open (its folder is private)."""

    def __init__(self, orders: Orders, path: str) -> None:
        self._orders, self._path = orders, path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_BYTES_MAX)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the other end has gone away
            writer.write(json.dumps(await self._answer(await reader.readline())).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return await self._orders.obey(json.loads(line))
        except (DevError, ValueError) as error:
            return {"error": str(error)}


async def send(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Give an order to the cluster whose control socket is ``path``. ``DevError`` when it was not carried out."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
    except OSError as error:
        raise DevError(
            f"the development cluster does not answer ({error.strerror}): start one with 'tenure dev'"
        ) from error
    try:
        writer.write(json.dumps(order).encode() + b"\n")
        line = await asyncio.wait_for(reader.readline(), REPLY_TIMEOUT_S)
        answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        raise DevError("the development cluster ended, or took too long to answer") from error
    finally:
        writer.close()
    if "error" in answer:
        raise DevError(answer["error"])
    return answer
