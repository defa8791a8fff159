"""The one place that turns an error into words for a person (or JSON for a program) and an exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.cli import shown

if TYPE_CHECKING:
    from tenure.errors import TenureError

DONE, REFUSED, USAGE, UNKNOWN, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

MEANING = {
    REFUSED: "definite: it did not happen",
    USAGE: "definite: nothing was tried",
    UNKNOWN: "indefinite: it may have happened; ask what is so before you repeat it",
    UNREACHABLE: "definite: it did not happen, nobody could be reached who may do it",
}

# Facts that a sentence is made of; and how long another one must be to be found in it by no accident.
SENTENCE = ("field", "value", "allowed", "part")
SAID_CHARS = 3

# What to do about a refusal whose message says only what is so.
NEXT_STEPS = {
    "JOB_NOT_FOUND": "'tenure job ls' lists the jobs of a tenant; TENANT/NAME means one of another",
    "JOB_REVISION_MISMATCH": "'tenure job history JOB' shows who changed it; look at that, then apply again",
    "OCCURRENCE_NOT_FOUND": "'tenure job occurrences JOB' lists what is kept",
    "OCCURRENCE_NOT_HELD": "'tenure job held' lists those that wait for a person",
    "RUN_NOT_FOUND": "'tenure runs' lists what runs",
    "SWITCHED_OFF": "'tenure switch ls' shows what is stopped and why; 'tenure resume' lets it go on",
    "SWITCH_NOT_FOUND": "'tenure switch ls --all' lists those that are kept",
    "SWITCH_STALE": "'tenure switch ls' shows what is in force now",
    "SWITCH_STRONGER": "'tenure resume' ends the one that is in force",
}  # fmt: skip


class CliError(Exception):
    """A failure that a command reports in its own words. ``todo`` says what the reader can do about it."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        status: int = REFUSED,
        todo: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.status, self.todo, self.facts = reason, status, todo, facts or {}


@dataclass(frozen=True)
class Failure:
    message: str
    status: int
    reason: str = ""
    todo: str = ""
    retry_delay_ms: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        outcome = "indefinite" if self.status == UNKNOWN else "definite"
        error = {
            "reason": self.reason, "message": self.message, "outcome": outcome, "todo": self.todo,
            "retry_delay_ms": self.retry_delay_ms, "facts": dict(self.facts), "exit_status": self.status,
        }  # fmt: skip
        return json.dumps({"error": error})

    def as_text(self) -> str:
        lines = [f"tenure: {self.message}" + (f" [{self.reason}]" if self.reason else "")]
        lines += told(self.message, self.facts)
        if self.status in MEANING:  # a command's own statuses say it in their message
            lines.append(f"  {MEANING[self.status]}")
        if self.retry_delay_ms:
            lines.append(f"  trying again may help after {self.retry_delay_ms} ms")
        if self.todo:
            lines.append(f"  {self.todo}")
        return "\n".join(lines)


def told(message: str, facts: Mapping[str, str]) -> list[str]:
    """The facts that the message has not said, always in the same order, as a person reads them."""
    lines = []
    for name, value in sorted(facts.items()):
        if not value or (value in message and (len(value) >= SAID_CHARS or name in SENTENCE)):
            continue
        if value.isdigit() and name.endswith("_wall_ms"):
            name, value = name.removesuffix("_wall_ms"), shown.wall(int(value))
        elif value.isdigit() and name.endswith("_ms"):
            name, value = name.removesuffix("_ms"), shown.duration(int(value))
        lines.append(f"  {name.replace('_', ' ')}: {value}")
    return lines


def render(error: Exception, argv: Sequence[str]) -> int | None:
    """Report a failure on standard error and return its exit status; None for an error that is a bug of ours."""
    failure = explain(error)
    if failure is None:
        return None
    print(failure.as_json() if json_wanted(argv) else failure.as_text(), file=sys.stderr)
    return failure.status


def json_wanted(argv: Sequence[str]) -> bool:
    """Whether ``--json`` was given to us, and not to a command that we run for somebody."""
    ours = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in ours


def explain(error: Exception) -> Failure | None:
    from sidecar.dev.errors import DevError

    if isinstance(error, CliError):
        return Failure(str(error), error.status, reason=error.reason, todo=error.todo, facts=error.facts)
    if isinstance(error, DevError):
        return Failure(str(error), REFUSED)
    if type(error).__module__ == "sidecar.config":  # ConfigError, without importing pydantic to find out
        return Failure(str(error), USAGE, reason="CONFIG", todo="'tenure config check' shows the settings in force")
    # Importing gRPC takes longer than the rest of a command; only an error that is gRPC's needs it.
    if any(base.__module__.split(".")[0] in ("tenure", "grpc") for base in type(error).__mro__):
        return explain_call(error)
    return None


def explain_call(error: Exception) -> Failure | None:
    """An error of a call to the sidecar, by the client's classes or as gRPC raised it."""
    import grpc
    from tenure.errors import TenureError, from_rpc_error

    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        error = from_rpc_error(error, error.trailing_metadata())
    return Failure(
        error.message, status_of(error), reason=error.reason, todo=todo_of(error),
        retry_delay_ms=round(error.retry_delay * 1000), facts=error.facts,
    ) if isinstance(error, TenureError) else None  # fmt: skip


def status_of(error: TenureError) -> int:
    from tenure import errors

    if isinstance(error, errors.Unavailable):
        return UNREACHABLE
    if isinstance(error, errors.InvalidArgument):
        return USAGE
    return UNKNOWN if isinstance(error, errors.Indefinite) else REFUSED


def todo_of(error: TenureError) -> str:
    from tenure import errors

    if isinstance(error, errors.ConnectError):
        return ""  # its message says what to do
    if isinstance(error, errors.Unavailable):
        return "ask each node which of them are up and whom they follow: 'tenure status --address ADDRESS'"
    if isinstance(error, errors.Indefinite):
        return "the same call with the same request id would tell; a get or list shows what is so"
    return NEXT_STEPS.get(error.reason, "")
