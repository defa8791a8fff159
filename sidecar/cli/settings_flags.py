"""A flag for every setting of a sidecar, made from the settings themselves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.config import Loaded

# How typer hands over what it does not know, for the parser here; it also answers --help.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

EPILOG = """Every setting can also be given as an environment variable (--node-id as TENURE_NODE_ID) or as a key of the
file (node_id = "n1"). A flag wins over the environment, the environment over the file."""


def parser(command: str, description: str) -> argparse.ArgumentParser:
    from sidecar.config import Settings, flag, shown_defaults

    made = argparse.ArgumentParser(
        prog=f"tenure {command}", usage="%(prog)s [FLAGS]", description=description, epilog=EPILOG, allow_abbrev=False
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings (TENURE_CONFIG)")
    defaults = shown_defaults()
    for name, info in Settings.model_fields.items():
        text = f"{info.description} [{defaults[name]}]".replace("%", "%%")
        if info.annotation is bool:
            made.add_argument(flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            made.add_argument(flag(name), metavar=name.upper().rsplit("_", 1)[-1], help=text)
    return made


def load_settings(made: argparse.ArgumentParser, arguments: Sequence[str]) -> Loaded:
    """Settings from these arguments, the environment and the file. Ends with status 2 for a flag that is not known."""
    from sidecar.config import Settings, load

    given = vars(made.parse_args(arguments))
    return load({name: given[name] for name in Settings.model_fields}, given["config"])
