"""Three sidecars, three agents beside them, and the links between the sidecars: started, broken, mended, stopped.

Rules:
1. A node that was killed stays down until ``restart``, so that its absence can be watched.
2. An agent that ended is started again after ``AGENT_RESTART_S``, as an orchestrator would, then at doubling intervals.
3. Nodes reach each other only through the mesh; an agent reaches only the node beside it.
4. ``stop`` ends everything: agents first, so that they give back what they hold, then nodes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidecar.dev.errors import DevError
from sidecar.dev.folder import Folder
from sidecar.dev.links import Mesh
from sidecar.dev.ports import free_ports
from sidecar.dev.processes import Process, last_words

CLUSTER_ID = "dev"
LEASE = "inbox"
ACTOR = "tenure dev"
NODES = ("n1", "n2", "n3")
AGENT_RESTART_S = 2.0
AGENT_RESTART_MAX_S = 15.0
# A process that ran this long before it ended is not failing at start.
HEALTHY_S = 10.0
AGENT_STOP_S = 3.0
NODE_STOP_S = 5.0


@dataclass(frozen=True)
class Pace:
    """How fast agents work and how soon they are missed. All in milliseconds."""

    ttl_ms: int = 5_000
    grace_ms: int = 1_000
    # Between the steps of a piece of work, which stand for the slow work of a real agent.
    step_ms: int = 200


@dataclass(frozen=True)
class Program:
    """What the three agents run: a module of the examples, what it is told besides, and the file of its jobs."""

    module: str = "digest_agent"
    arguments: tuple[str, ...] = ()
    # Applied when the cluster is ready; empty: nothing is.
    jobs: str = "jobs.yaml"
    # The jobs whose runs write to the ledger.
    writers: tuple[str, ...] = ("digest",)


DIGEST = Program()
# The slice without jobs: one of three holds a lease and works for as long as it does.
INBOX = Program("inbox_agent", ("--every-ms", "2000"), jobs="", writers=())


class DevCluster:
    """Everything that runs. ``note`` is told what happened, in words."""

    def __init__(
        self, folder: Folder, examples: Path, pace: Pace, note: Callable[[str], None], program: Program = DIGEST
    ) -> None:
        if not (examples / f"{program.module}.py").is_file():
            raise DevError(f"no {program.module}.py in {examples}: say where the examples are with --examples")
        self.folder, self.examples, self.program = folder, examples.absolute(), program
        peer_ports = free_ports(2 * len(NODES))
        self.http_ports = dict(zip(NODES, peer_ports[len(NODES) :], strict=True))
        self._peer_ports = dict(zip(NODES, peer_ports, strict=False))
        self.mesh = Mesh(self._peer_ports)
        self.nodes = {name: self._node(name) for name in NODES}
        self.agents = {agent_of(name): self._agent(name, pace) for name in NODES}
        self._note = note
        self._pauses_s = dict.fromkeys(self.agents, AGENT_RESTART_S)
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Start everything. Nodes come up while this returns; ``Observer`` tells when they are ready."""
        from sidecar.certs import write_development_certificates

        write_development_certificates(self.folder.certificates, NODES, CLUSTER_ID)
        await self.mesh.start()
        for process in (*self.nodes.values(), *self.agents.values()):
            await process.start()

    async def stop_agents(self) -> None:
        """Let the agents finish what they are at, and end. They are not started again."""
        self._stopping = True
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(agent.stop(AGENT_STOP_S) for agent in self.agents.values()))

    async def stop(self) -> None:
        self.mesh.heal()  # a held link would make the nodes wait for each other
        await self.stop_agents()
        await asyncio.gather(*(node.stop(NODE_STOP_S) for node in self.nodes.values()))
        await self.mesh.stop()

    async def kill(self, name: str) -> None:
        """Kill -9 of a node or an agent."""
        process = self.nodes.get(name) or self.agents.get(name)
        if process is None:
            raise DevError(f"no node or agent is called {name}: there are {', '.join((*self.nodes, *self.agents))}")
        if not process.running:
            raise DevError(f"{name} is not running")
        await process.kill()
        self._note(f"killed {name} (kill -9)")

    async def restart(self, name: str = "") -> list[str]:
        """Start a node that is down (kill it first when it is not), or all that are down. Returns their names."""
        if name and name not in self.nodes:
            raise DevError(f"no node is called {name}: there are {', '.join(self.nodes)}")
        names = [name] if name else [node for node, process in self.nodes.items() if not process.running]
        for node in names:
            process = self.nodes[node]
            await process.stop(NODE_STOP_S)
            await process.start()
            self._note(f"started {node} again")
        return names

    def partition(self, node: str, *, one_way: bool = False) -> None:
        if node not in self.nodes:
            raise DevError(f"no node is called {node}: there are {', '.join(self.nodes)}")
        self.mesh.partition(node, one_way=one_way)
        self._note(f"{node} is cut off: " + ("nobody hears it" if one_way else "it hears nobody and nobody hears it"))

    def heal(self) -> None:
        self.mesh.heal()
        self._note("all links are whole")

    def failure(self) -> str:
        """Why this cluster cannot work, once all of its nodes have ended by themselves; else ``""``."""
        nodes = self.nodes.values()
        if any(node.running or node.killed or node.exit_status is None for node in nodes):
            return ""
        return "\n".join(
            f"{node.name} ended with status {node.exit_status}: {last_words(node.log_tail(100))}" for node in nodes
        )

    def address(self, node: str) -> str:
        return f"unix:{self.folder.socket(node)}"

    def _node(self, name: str) -> Process:
        folder, certificates = self.folder, self.folder.certificates
        reach = {
            other: self.mesh.links[name, other].port if other != name else self._peer_ports[name] for other in NODES
        }
        environment = {
            "TENURE_NODE_ID": name,
            "TENURE_CLUSTER_ID": CLUSTER_ID,
            "TENURE_PEERS": ",".join(f"{other}=127.0.0.1:{port}" for other, port in reach.items()),
            "TENURE_PEER_LISTEN": f"127.0.0.1:{self._peer_ports[name]}",
            "TENURE_DATA_DIR": str(folder.data(name)),
            "TENURE_BOOTSTRAP": "true",
            "TENURE_PEER_TLS_CERT": str(certificates / f"{name}.pem"),
            "TENURE_PEER_TLS_KEY": str(certificates / f"{name}.key"),
            "TENURE_PEER_TLS_CA": str(certificates / "ca.pem"),
            "TENURE_SOCKET": str(folder.socket(name)),
            "TENURE_HTTP_LISTEN": f"127.0.0.1:{self.http_ports[name]}",
            "TENURE_DRAIN_TIMEOUT_MS": "1000",
        }
        return Process(name, [sys.executable, "-m", "sidecar", "serve"], environment, folder.log(name), self._ended)

    def _agent(self, node: str, pace: Pace) -> Process:
        name = agent_of(node)
        command = [
            sys.executable, "-m", f"{self.examples.name}.{self.program.module}",
            "--name", name,
            "--inbox", str(self.examples / "inbox"), "--ledger", str(self.folder.ledger),
            "--history", str(self.folder.history(name)),
            "--ttl-ms", str(pace.ttl_ms), "--grace-ms", str(pace.grace_ms),
            "--step-ms", str(pace.step_ms), *self.program.arguments,
        ]  # fmt: skip
        environment = {"TENURE_ADDRESS": self.address(node)}
        return Process(name, command, environment, self.folder.log(name), self._ended, folder=self.examples.parent)

    def _ended(self, process: Process) -> None:
        if self._stopping:
            return
        if not process.killed:
            why = last_words(process.log_tail(100))
            self._note(f"{process.name} ended by itself, status {process.exit_status}: {why}")
        if process.name in self.agents:
            task = asyncio.get_running_loop().create_task(self._start_again(process))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _start_again(self, agent: Process) -> None:
        """Start an agent after a pause that grows while it keeps failing at once."""
        lived_s = asyncio.get_running_loop().time() - agent.started_at
        failing = not agent.killed and lived_s < HEALTHY_S
        pause_s = min(2 * self._pauses_s[agent.name], AGENT_RESTART_MAX_S) if failing else AGENT_RESTART_S
        self._pauses_s[agent.name] = pause_s
        await asyncio.sleep(pause_s)
        await agent.start()
        self._note(f"started {agent.name} again")


def agent_of(node: str) -> str:
    """The agent beside a node: n1 has agent-1."""
    return f"agent-{node.removeprefix('n')}"


def node_of(agent: str) -> str:
    return f"n{agent.removeprefix('agent-')}"
