"""What a request may say. Every error names the field, the value (shortened) and what is allowed.

Allowed:
* tenant: 1 to 64 characters out of a-z, A-Z, 0-9, ``.``, ``_`` and ``-``, and configured on this sidecar;
* lease name: 1 to 256 bytes of printable UTF-8 (no control characters), without a space or a slash at either end;
* job name: 1 to 128 bytes of printable UTF-8, without a slash, a space at either end, or a ``*`` at the end;
* idempotency key: 1 to 512 bytes of UTF-8, not only white space;
* ids (session, request): at most 128 bytes, printable;
* free text (metadata, agent info, errors, actor, reason): any UTF-8 up to the field's limit.

That text is UTF-8 at all is checked by the protobuf parser (see handlers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sidecar.core import commands
from sidecar.core.specification import JOB_NAME_BYTES_MAX
from sidecar.services.errors import ApiError, Problem, problem, shorten

SESSION_ID_BYTES_MAX = 128
NODE_ID_BYTES_MAX = 128
TOKEN_MAX = 2**63 - 1
ATTEMPT_MAX = 2**31 - 1
# Longer deadlines are served as if they were this long.
DEADLINE_MAX_MS = commands.WAIT_MAX_MS + 60_000

_TENANT = re.compile(r"[A-Za-z0-9._-]+")
_SHOWN_BYTES_MAX = 64


def invalid(what: Problem, field: str, value: object, allowed: str) -> ApiError:
    """Names the field, the value and what is allowed."""
    shown = shorten(repr(value) if isinstance(value, (str, bytes)) else str(value), _SHOWN_BYTES_MAX)
    return problem(what, f"{field} is {shown}; allowed: {allowed}", field=field, value=shown, allowed=allowed)


def size_of(text: str) -> int:
    """Length in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def tenant(value: str, configured: Sequence[str], field: str = "tenant") -> str:
    """A configured tenant; NOT_FOUND when it is well formed but unknown here."""
    if value in configured:
        return value
    if not _TENANT.fullmatch(value) or len(value) > commands.TENANT_BYTES_MAX:
        allowed = f"1 to {commands.TENANT_BYTES_MAX} characters out of a-z, A-Z, 0-9, '.', '_' and '-'"
        raise invalid(Problem.TENANT_INVALID, field, value, allowed)
    message = f"this sidecar has no tenant {value!r}; TENURE_TENANTS of the sidecar lists those it has"
    raise problem(Problem.TENANT_NOT_FOUND, message, field=field, value=value)


def lease_name(value: str, field: str = "name") -> str:
    if not value or size_of(value) > commands.NAME_BYTES_MAX or not value.isprintable() or value.strip(" /") != value:
        allowed = f"1 to {commands.NAME_BYTES_MAX} bytes of printable UTF-8 without a space or a slash at either end"
        raise invalid(Problem.NAME_INVALID, field, value, allowed)
    return value


def job_name(value: str, field: str = "name") -> str:
    fits = size_of(value) <= JOB_NAME_BYTES_MAX and value.isprintable() and value.strip() == value
    if not value or not fits or "/" in value or value.endswith("*"):
        allowed = f"1 to {JOB_NAME_BYTES_MAX} bytes of printable UTF-8 without '/', outer spaces, or '*' at the end"
        raise invalid(Problem.NAME_INVALID, field, value, allowed)
    return value


def job_patterns(values: Sequence[str], field: str = "jobs") -> tuple[str, ...]:
    """Names, or beginnings of names that end with ``*``; each once, in the order given."""
    number(len(values), field, 0, commands.SERVED_JOBS_MAX)
    for index, value in enumerate(values):
        if value.endswith("*"):
            start = value[:-1]
            if size_of(start) > JOB_NAME_BYTES_MAX or not start.isprintable() or "/" in start or start[-1:] == "*":
                allowed = "a job's name, or the beginning of names and one '*'"
                raise invalid(Problem.NAME_INVALID, f"{field}[{index}]", value, allowed)
        else:
            job_name(value, f"{field}[{index}]")
    return tuple(dict.fromkeys(values))


def prefix(value: str, bytes_max: int) -> str:
    """The beginning of a name or key; may be empty."""
    return text(value, "prefix", bytes_max)


def key(value: str) -> str:
    if not value or size_of(value) > commands.KEY_BYTES_MAX or value.isspace():
        allowed = f"1 to {commands.KEY_BYTES_MAX} bytes of UTF-8, not only white space"
        raise invalid(Problem.KEY_INVALID, "key", value, allowed)
    return value


def identifier(value: str, field: str, bytes_max: int) -> str:
    """A session, request or node id that must be present."""
    if not value:
        raise problem(Problem.FIELD_REQUIRED, f"{field} is required", field=field)
    return optional_identifier(value, field, bytes_max)


def optional_identifier(value: str, field: str, bytes_max: int) -> str:
    if size_of(value) > bytes_max or not value.isprintable():
        raise invalid(Problem.FIELD_INVALID, field, value, f"at most {bytes_max} bytes, printable")
    return value


def session_id(value: str, field: str = "session_id") -> str:
    return identifier(value, field, SESSION_ID_BYTES_MAX)


def request_id(value: str) -> str:
    """May be empty: the sidecar then makes one."""
    return optional_identifier(value, "request_id", commands.REQUEST_ID_BYTES_MAX)


def text(value: str, field: str, bytes_max: int) -> str:
    """Free text, may be empty."""
    size = size_of(value)
    if size > bytes_max:
        raise too_large(field, size, bytes_max)
    return value


def required_text(value: str, field: str, bytes_max: int) -> str:
    if not value.strip():
        raise problem(Problem.FIELD_REQUIRED, f"{field} is required", field=field)
    return text(value, field, bytes_max)


def payload(value: bytes, field: str, bytes_max: int) -> bytes:
    if len(value) > bytes_max:
        raise too_large(field, len(value), bytes_max)
    return value


def too_large(field: str, size: int, bytes_max: int) -> ApiError:
    return problem(
        Problem.FIELD_TOO_LARGE,
        f"{field} has {size} bytes; allowed: at most {bytes_max}",
        field=field,
        size_bytes=size,
        limit_bytes=bytes_max,
    )


def number(value: int, field: str, least: int, most: int) -> int:
    if not least <= value <= most:
        raise invalid(Problem.VALUE_OUT_OF_RANGE, field, value, f"{least} to {most}")
    return value


def token(value: int, field: str = "token") -> int:
    return number(value, field, 1, TOKEN_MAX)


def attempt(value: int) -> int:
    return number(value, "attempt", 1, ATTEMPT_MAX)


def choice(value: int, field: str, names: Mapping[int, str]) -> int:
    """A number of an enum; proto3 lets unknown ones through."""
    if value not in names:
        raise invalid(Problem.FIELD_INVALID, field, value, ", ".join(names.values()))
    return value


def labels(value: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Ordered by name, so that equal requests have equal commands."""
    number(len(value), "info.labels", 0, commands.LABELS_MAX)
    for name, content in value.items():
        identifier(name, "info.labels (name)", commands.INFO_FIELD_BYTES_MAX)
        text(content, f"info.labels[{shorten(name, 32)}]", commands.INFO_FIELD_BYTES_MAX)
    return tuple(sorted(value.items()))
