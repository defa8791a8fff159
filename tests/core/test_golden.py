"""The golden scenarios: each script in testdata/*.txt gives exactly what is written in it.

To accept a change of behaviour, run with REWRITE=1 in the environment and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core.golden import play

SCRIPTS = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_golden_scenario(path: Path) -> None:
    script = path.read_text()
    played = play(script)
    if os.environ.get("REWRITE"):
        path.write_text(played)
        return
    assert played == script


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_golden_scenario_with_a_restore_before_every_line(path: Path) -> None:
    script = path.read_text()
    assert play(script, restore_always=True) == play(script)
