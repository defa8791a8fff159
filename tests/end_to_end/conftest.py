"""Fixtures with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaos import smoke
from sidecar.dev.cluster import DevCluster, Pace
from sidecar.dev.folder import Folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def agent_scheduled_job_leader_election_smoke(tmp_path_factory: pytest.TempPathFactory) -> smoke.Outcome:
    """Three sidecars, three agents, one job; the holder and the leader killed, the leader cut off. What came of it."""
    folder: Path = tmp_path_factory.mktemp("smoke")
    return asyncio.run(smoke.smoke(folder / "dev"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[DevCluster]:
    """Not started: its processes are down."""
    cluster = DevCluster(Folder(tmp_path / "dev"), EXAMPLES, Pace(), lambda text: None)
    yield cluster
    await cluster.mesh.stop()
