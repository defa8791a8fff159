"""Options that every command spells the same."""

from __future__ import annotations

from typing import Annotated

import typer

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
Actor = Annotated[str, typer.Option("--actor", envvar=["TENURE_ACTOR", "USER"], help="Who does this; it is audited.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is audited.", show_default=False)]
