"""``tenure serve``: run a sidecar."""

from __future__ import annotations

import typer

from sidecar.cli.settings_flags import load_settings, parser

HELP = "Run a sidecar until SIGTERM. Its settings: tenure serve --help."


def serve(context: typer.Context) -> None:
    loaded = load_settings(parser("serve", "Run a sidecar until SIGTERM."), context.args)
    from sidecar.server import run

    raise typer.Exit(run(loaded))
