"""Who did it, where nobody says so."""

from __future__ import annotations

import getpass
import os

import pytest

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
