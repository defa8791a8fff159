"""Results on standard output: JSON for programs, tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns, cut to no width: a pipe gets every character."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)
