"""Folders with short names (a unix socket's path has room for some 100 bytes), and a double to talk to."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.client.double import Double, double


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tn-") as name:
        yield Path(name)


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Double]:
    async with double(folder) as running:
        yield running
