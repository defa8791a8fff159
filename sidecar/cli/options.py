"""Options that every command spells the same."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

E = TypeVar("E", bound=StrEnum)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")]
Address = Annotated[
    str,
    typer.Option(
        "--address", envvar="TENURE_ADDRESS", metavar="ADDRESS",
        help="The sidecar: unix:/path/of/the.sock or host:port.",
    ),
]  # fmt: skip
Tenant = Annotated[str, typer.Option("--tenant", envvar="TENURE_TENANT", help="The tenant whose names are meant.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="How long an answer may take.")]

DEFAULT_ADDRESS = "unix:/run/tenure/tenure.sock"
DEFAULT_TENANT = "default"
DEFAULT_TIMEOUT_S = 5.0

Limit = Annotated[int, typer.Option("--limit", min=0, help="Show at most this many; 0 shows all.")]


def one_of(kind: type[E]) -> Callable[[str], E]:
    """The parser of an option: one word of these, else a refusal that names them."""

    def parse(text: str) -> E:
        try:
            return kind(text.lower())
        except ValueError:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(kind)}") from None

    return parse


def whoever() -> str:
    """The name of the user who runs this. A container may have neither the variables nor an entry for the number."""
    for name in ("USER", "LOGNAME"):
        if named := os.environ.get(name, "").strip():
            return named
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return f"uid-{os.getuid()}"


Actor = Annotated[
    str,
    typer.Option(
        "--actor",
        envvar="TENURE_ACTOR",
        default_factory=whoever,
        help="Who does this; it is audited.",
        show_default="the user who runs this",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is audited.", show_default=False)]
