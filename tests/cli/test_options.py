"""Options that commands share: who did it, where nobody says so; and words of which there are few."""

from __future__ import annotations

import getpass
import os

import pytest
from typer.testing import CliRunner

from sidecar.cli.app import app
from sidecar.cli.options import whoever


@pytest.fixture(autouse=True)
def nobody_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENURE_ACTOR", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)


def test_the_names_of_the_environment_count_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "lena")
    assert whoever() == "lena"
    monkeypatch.setenv("USER", "ulla")
    assert whoever() == "ulla"
    monkeypatch.setenv("USER", " ")
    assert whoever() == "lena"


def test_without_them_it_is_the_user_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whoever() == getpass.getuser()

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert whoever() == f"uid-{os.getuid()}"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("job resolve x 09:00 --as done --attempt 1 --reason x", "'done' is none of succeeded, failed, retry"),
        ("job occurrences --state over", "'over' is none of pending, running, retrying"),
        ("job show x -o xml", "'xml' is none of text, yaml, json"),
        ("dedup resolve k --as done --attempt 1 --reason x", "'done' is none of completed, failed"),
        ("dedup ls --state over", "'over' is none of in-progress, completed"),
    ],
)
def test_a_word_that_is_none_is_refused_with_those_there_are(command: str, said: str) -> None:
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output
