"""Who calls, and how a repeat of the call is recognised: the same for a unary call and for an operation on a stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from sidecar.core.commands import RequestKey
from sidecar.services import validation as check
from sidecar.services.errors import ApiError, Problem, problem

# Called exactly once, on the event loop, with the answer.
Answer = Callable[[Message | ApiError], None]
# Tells a running operation that its caller gave up.
Cancel = Callable[[], None]


@dataclass(slots=True, frozen=True)
class Caller:
    """``timeout_ms``: what is left for the operation. ``session`` (with its ``tenant``) and ``sequence`` are set for an
    operation on a stream: they take the place of the session and the request id in the request."""

    tenants: Sequence[str]
    timeout_ms: int
    tenant: str = ""
    session: str = ""
    sequence: int = 0
    acknowledged: int = 0

    def tenant_of(self, stated: str, field: str = "tenant") -> str:
        if self.tenant and stated in ("", self.tenant):
            return self.tenant
        known = check.tenant(stated, self.tenants, field)
        if self.tenant:
            message = f"the stream belongs to tenant {self.tenant}; leave the field empty"
            raise problem(Problem.FIELD_INVALID, message, field=field, value=stated)
        return known

    def within(self, timeout_ms: int) -> Caller:
        """The same caller, with less time."""
        return replace(self, timeout_ms=timeout_ms)

    def session_of(self, stated: str) -> str:
        """Of whoever acts; required."""
        if self.session and stated in ("", self.session):
            return self.session
        check.session_id(stated)
        if self.session:
            message = f"the stream carries session {self.session}; leave the field empty"
            raise problem(Problem.FIELD_INVALID, message, field="session_id", value=stated)
        return stated

    def session_or_operator(self, stated: str) -> str:
        """Empty for an operator, who makes unary calls."""
        return self.session_of(stated) if stated or self.session else ""

    def key(self, tenant: str, request_id: str) -> RequestKey:
        """Without a request id a unary call can not be repeated, but its own retries below are still exactly-once."""
        if self.session:
            return RequestKey(tenant, self.session, "", self.sequence, self.acknowledged)
        return RequestKey(tenant, "", check.request_id(request_id) or secrets.token_hex(16))


def attempt(make: Callable[[Any], Message], value: object) -> Message | ApiError:
    """The answer that ``make`` makes of ``value``; it may raise ApiError, which is an answer, too."""
    try:
        return make(value)
    except ApiError as error:
        return error


class Once:
    """Passes the first answer on and drops the others."""

    __slots__ = ("_answer", "answered")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.answered = False

    def __call__(self, answer: Message | ApiError) -> None:
        if not self.answered:
            self.answered = True
            self._answer(answer)
