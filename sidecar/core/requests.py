"""What makes requests exactly-once: the results already given (see the rules at the top of machine.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from sidecar.core.commands import AcquireLease, Command, OpenSession, Reason, Refused, RequestKey, Result
from sidecar.core.context import Context, full

_FINGERPRINT_BYTES = 16

_ENCODER = msgspec.msgpack.Encoder()


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a request, with what tells the request from another one under the same key."""

    fingerprint: bytes
    answered_ms: int
    result: Result


UnaryKey = tuple[str, str]  # tenant, the caller's request id
StreamKey = tuple[str, int]  # session, the operation's id


def fingerprint_of(command: Command) -> bytes:
    """Equal for a command and its honest repeat: what the sidecar chose by itself, anew for each call, is left out."""
    if isinstance(command, OpenSession):
        command = replace(command, suffix="", connection="", node="", generation=1)
    elif isinstance(command, AcquireLease):
        command = replace(command, wait_ms=0, waiter="")
    return blake2b(_ENCODER.encode(command), digest_size=_FINGERPRINT_BYTES).digest()


class Requests:
    """Answers by request key.

    A unary request is kept for ``request_retention_ms``; the oldest makes room for a new one when it is older than
    ``request_retention_min_ms``. An operation on a stream is kept until the client acknowledged it or its session ends.
    """

    def __init__(
        self,
        context: Context,
        unary: Iterable[tuple[UnaryKey, Answer]],
        stream: Iterable[tuple[StreamKey, Answer]],
        acknowledged: Iterable[tuple[str, int]],
    ) -> None:
        self._context = context
        # In order of answer, which is the order in which they expire.
        self.unary = dict(unary)
        self.stream = dict(stream)
        # By session: every operation up to this one may be asked for no more.
        self.acknowledged = dict(acknowledged)
        # Derived: the keys of the unary table in the same order (a plain dict is slow to take its first entries from).
        self._queue: OrderedDict[UnaryKey, None] = OrderedDict.fromkeys(self.unary)
        self._operations: dict[str, dict[int, None]] = {}
        for session, sequence in self.stream:
            self._operations.setdefault(session, {})[sequence] = None

    def __len__(self) -> int:
        return len(self.unary) + len(self.stream)

    def recall(self, key: RequestKey, fingerprint: bytes) -> Result | None:
        """The answer already given, or why there can be none; None for a new request."""
        if key.origin:
            self._acknowledge(key.origin, key.acknowledged)
            answer = self.stream.get((key.origin, key.sequence))
            if answer is None and key.sequence <= self.acknowledged.get(key.origin, 0):
                message = f"operation {key.sequence} was acknowledged by the client itself"
                return Refused(reason=Reason.REQUEST_FORGOTTEN, message=message)
        else:
            answer = self.unary.get((key.tenant, key.name))
        if answer is None:
            return None
        if answer.fingerprint != fingerprint:
            message = "this request id was used before, for another request"
            return Refused(reason=Reason.REQUEST_ID_REUSED, message=message)
        return answer.result

    def make_room(self, key: RequestKey) -> Refused | None:
        """Asked before the command runs: what cannot be remembered is not done."""
        limits = self._context.limits
        if key.origin and len(self._operations.get(key.origin, ())) >= limits.stream_requests_max:
            limit = limits.stream_requests_max
            return full(Reason.REQUESTS_FULL, "unacknowledged operations", "stream_requests_max", limit)
        while len(self) >= limits.requests_max:
            if not self._drop_oldest(limits.request_retention_min_ms):
                return full(Reason.REQUESTS_FULL, "no room for a request", "requests_max", limits.requests_max)
        return None

    def remember(self, key: RequestKey, fingerprint: bytes, result: Result) -> None:
        answer = Answer(fingerprint, self._context.now_ms, result)
        if key.origin:
            self.stream[(key.origin, key.sequence)] = answer
            self._operations.setdefault(key.origin, {})[key.sequence] = None
        else:
            self.unary[(key.tenant, key.name)] = answer
            self._queue[(key.tenant, key.name)] = None

    def amend(self, key: RequestKey | None, result: Result) -> None:
        """The outcome of a request that was answered for the time being (a waiter)."""
        if key is None:
            return
        if key.origin:
            answer = self.stream.get((key.origin, key.sequence))
            if answer is not None:
                self.stream[(key.origin, key.sequence)] = replace(answer, result=result)
        else:
            answer = self.unary.get((key.tenant, key.name))
            if answer is not None:
                self.unary[(key.tenant, key.name)] = replace(answer, result=result)

    def forget(self, key: RequestKey | None) -> None:
        if key is None:
            return
        if not key.origin:
            if self.unary.pop((key.tenant, key.name), None) is not None:
                del self._queue[(key.tenant, key.name)]
        elif self.stream.pop((key.origin, key.sequence), None) is not None:
            self._drop_operation(key.origin, key.sequence)

    def expire(self) -> None:
        while self._drop_oldest(self._context.limits.request_retention_ms):
            pass

    def end_session(self, session: str) -> None:
        for sequence in self._operations.pop(session, {}):
            del self.stream[(session, sequence)]
        self.acknowledged.pop(session, None)

    def _acknowledge(self, session: str, acknowledged: int) -> None:
        before = self.acknowledged.get(session, 0)
        if acknowledged <= before:
            return
        self.acknowledged[session] = acknowledged
        operations = self._operations.get(session, {})
        # Usually a short step of a dense sequence; never a loop over what the client made up.
        if acknowledged - before <= len(operations):
            done = [sequence for sequence in range(before + 1, acknowledged + 1) if sequence in operations]
        else:
            done = [sequence for sequence in operations if sequence <= acknowledged]
        for sequence in done:
            del self.stream[(session, sequence)]
            self._drop_operation(session, sequence)

    def _drop_operation(self, session: str, sequence: int) -> None:
        operations = self._operations[session]
        del operations[sequence]
        if not operations:
            del self._operations[session]

    def _drop_oldest(self, age_min_ms: int) -> bool:
        if not self._queue:
            return False
        oldest = next(iter(self._queue))
        if self._context.now_ms - self.unary[oldest].answered_ms < age_min_ms:
            return False
        del self.unary[oldest], self._queue[oldest]
        return True
