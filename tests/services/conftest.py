"""Clusters for tests: a fresh one each, or one shared by a module."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.services.cluster import Cluster, running_cluster


@pytest_asyncio.fixture(loop_scope="function")
async def cluster() -> AsyncIterator[Cluster]:
    """One sidecar, a cluster by itself."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder)) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    """One sidecar for the whole module: tests use names of their own."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder)) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="function")
async def trio() -> AsyncIterator[Cluster]:
    """Three sidecars."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder), 3) as running:
            yield running
