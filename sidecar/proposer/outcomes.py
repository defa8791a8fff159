"""What a proposal can come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import Protocol

import msgspec

from sidecar.core.commands import Result
from sidecar.core.events import Event


@unique
class Failure(IntEnum):
    """Why a proposal has no result. ``Failed.definite`` is told apart: whether it can still have happened."""

    NO_LEADER = 1
    OVERLOADED = 2  # queue or in-flight bound reached; retry_delay_ms says when to come back
    DEADLINE = 3
    TOO_LARGE = 4
    STOPPING = 5
    OUTCOME_UNKNOWN = 6  # a snapshot skipped the entry, and the command cannot be repeated without harm


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """No result. ``definite``: this proposal did not happen and will not happen later."""

    failure: Failure
    definite: bool
    message: str
    retry_delay_ms: int = 0


Outcome = Result | Failed
Done = Callable[[Outcome], None]


class Subscriber(Protocol):
    def __call__(self, events: Sequence[Event], /) -> None: ...
