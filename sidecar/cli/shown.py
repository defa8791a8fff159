"""How values of the API are shown to a person."""

from __future__ import annotations

import datetime
from typing import Any


def duration(ms: int) -> str:
    """1500 as ``1.5 s``; negative as ``-`` (not known)."""
    if ms < 0:
        return "-"
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 120_000:
        return f"{ms / 1_000:.1f} s"
    if ms < 7_200_000:
        return f"{ms / 60_000:.1f} min"
    if ms < 172_800_000:
        return f"{ms / 3_600_000:.1f} h"
    return f"{ms / 86_400_000:.1f} d"


def counted(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def wall(ms: int) -> str:
    """Wall time in UTC, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(ms / 1_000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{ms % 1_000:03d}Z"


def enum(message: Any, field: str) -> str:
    """``RECORD_STATE_IN_PROGRESS`` as ``in progress``."""
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
    name: str = kind.values_by_number[getattr(message, field)].name
    return name.removeprefix(prefix).lower().replace("_", " ")


def content(data: bytes) -> str:
    """Bytes as text when they are text, else as hexadecimal digits."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "0x" + data.hex()
    return text if text.isprintable() else repr(text)
