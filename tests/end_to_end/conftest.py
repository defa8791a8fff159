"""Fixtures with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaos import smoke_jobs, smoke_lease, smoke_llm
from chaos.smoke import Outcome
from sidecar.dev.cluster import INBOX, DevCluster, Pace
from sidecar.dev.folder import Folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def agent_scheduled_job_leader_election_smoke(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A job every second; the agent at work killed, the leader and the agent beside it cut off."""
    folder: Path = tmp_path_factory.mktemp("smoke")
    return asyncio.run(smoke_jobs.smoke(folder / "dev", ("kill_holder", "partition_leader")))


@pytest.fixture(scope="session")
def llm_scheduled_job_leader_election_smoke(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A job that asks a model server; the server misbehaves, and the job is killed. Shorter than by ``make smoke``."""
    folder: Path = tmp_path_factory.mktemp("smoke")
    return asyncio.run(smoke_llm.smoke(folder / "dev", ("misbehave", "kill_switch", "clear_switch")))


@pytest.fixture(scope="session")
def lease_leader_election_smoke(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One lease, three agents; the holder and the leader killed, the leader cut off."""
    folder: Path = tmp_path_factory.mktemp("smoke")
    return asyncio.run(smoke_lease.smoke(folder / "dev"))


@pytest.fixture
async def lease_cluster(tmp_path: Path) -> AsyncIterator[DevCluster]:
    """The same, of the slice without jobs."""
    cluster = DevCluster(Folder(tmp_path / "dev"), EXAMPLES, Pace(), lambda text: None, INBOX)
    yield cluster
    await cluster.mesh.stop()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[DevCluster]:
    """Not started: its processes are down."""
    cluster = DevCluster(Folder(tmp_path / "dev"), EXAMPLES, Pace(), lambda text: None)
    yield cluster
    await cluster.mesh.stop()
