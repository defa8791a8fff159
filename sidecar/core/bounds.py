"""The last net below the services' own validation: a command out of bounds never reaches the state.

Services say which field of the caller's request is wrong and why. Here it only matters that a log entry, wherever
it came from, can neither break an invariant nor grow the state without limit.
"""

from __future__ import annotations

import msgspec

from sidecar.core import commands as c

_TEXT_MAX = {
    "tenant": c.TENANT_BYTES_MAX,
    "name": c.NAME_BYTES_MAX,
    "key": c.KEY_BYTES_MAX,
    "session": c.NAME_BYTES_MAX,
    "to_session": c.NAME_BYTES_MAX,
    "suffix": c.INFO_FIELD_BYTES_MAX,
    "agent": c.INFO_FIELD_BYTES_MAX,
    "version": c.INFO_FIELD_BYTES_MAX,
    "host": c.INFO_FIELD_BYTES_MAX,
    "connection": c.NAME_BYTES_MAX,
    "node": c.NAME_BYTES_MAX,
    "metadata": c.METADATA_BYTES_MAX,
    "waiter": c.NAME_BYTES_MAX,
    "actor": c.ACTOR_BYTES_MAX,
    "reason": c.REASON_BYTES_MAX,
    "error": c.ERROR_BYTES_MAX,
    "fence_lease": c.NAME_BYTES_MAX,
}
_BYTES_MAX = {"fingerprint": c.FINGERPRINT_BYTES_MAX, "result": c.RESULT_BYTES_MAX}
_RANGE = {
    "ttl_ms": (c.TTL_MIN_MS, c.TTL_MAX_MS),
    "disconnect_grace_ms": (0, c.TTL_MAX_MS),
    "generation": (0, 2**62),
    "capacity": (1, c.CAPACITY_MAX),
    "wait_ms": (0, c.WAIT_MAX_MS),
    "priority": (c.PRIORITY_MIN, c.PRIORITY_MAX),
    "lock_delay_ms": (0, c.LOCK_DELAY_MAX_MS),
    "retention_ms": (c.RETENTION_MIN_MS, c.RETENTION_MAX_MS),
}
# By type: what must not be empty. A session, token or attempt that does not exist is refused by the state itself.
_REQUIRED: dict[type, tuple[str, ...]] = {
    c.OpenSession: ("tenant", "suffix"),
    c.AttachSession: ("connection",),
    c.AcquireLease: ("tenant", "name"),
    c.BeginRecord: ("tenant", "key"),
    c.ResolveRecord: ("actor", "reason"),
}
_Check = tuple[str, int, int]


def _checks(kind: type[msgspec.Struct]) -> tuple[tuple[_Check, ...], tuple[_Check, ...], tuple[_Check, ...]]:
    fields, required = kind.__struct_fields__, _REQUIRED.get(kind, ())
    texts = tuple((name, int(name in required), _TEXT_MAX[name]) for name in fields if name in _TEXT_MAX)
    payloads = tuple((name, 0, _BYTES_MAX[name]) for name in fields if name in _BYTES_MAX)
    numbers = tuple((name, *_RANGE[name]) for name in fields if name in _RANGE)
    return texts, payloads, numbers


_CHECKS: dict[type[msgspec.Struct], tuple[tuple[_Check, ...], tuple[_Check, ...], tuple[_Check, ...]]] = {
    kind: _checks(kind)
    for kind in (
        c.Tick, c.SetLimits, c.OpenSession, c.RenewSessions, c.AttachSession, c.DetachSession, c.CloseSession,
        c.AcquireLease, c.CancelWait, c.ReleaseLease, c.TransferLease,
        c.BeginRecord, c.CompleteRecord, c.FailRecord, c.ResolveRecord,
    )
}  # fmt: skip


def problem(request: c.Request) -> str | None:
    """What is out of bounds in a request; None when nothing is."""
    command = request.command
    texts, payloads, numbers = _CHECKS[type(command)]
    for name, low, high in numbers:
        if not low <= getattr(command, name) <= high:
            return f"{name} must be {low} to {high}"
    for name, low, high in texts:
        if not _fits(getattr(command, name), low, high):
            return f"{name} must be {low} to {high} bytes of UTF-8"
    for name, _, high in payloads:
        if len(getattr(command, name)) > high:
            return f"{name} must be at most {high} bytes"
    key = request.key
    if key is not None and not (
        _fits(key.tenant, 0, c.TENANT_BYTES_MAX)
        and _fits(key.origin, 0, c.NAME_BYTES_MAX)
        and _fits(key.name, not key.origin, c.REQUEST_ID_BYTES_MAX)
    ):
        return f"the request id must be 1 to {c.REQUEST_ID_BYTES_MAX} bytes of UTF-8"
    return _across_fields(command)


def _fits(text: str, low: int, high: int) -> bool:
    """Bytes are counted only when the characters alone (4 bytes each at most) do not decide it."""
    length = len(text)
    return low <= length and (length * 4 <= high or (length <= high and len(text.encode()) <= high))


def _across_fields(command: c.Command) -> str | None:
    if isinstance(command, c.AcquireLease):
        return "waiter is required when wait_ms is over 0" if command.wait_ms and not command.waiter else None
    if isinstance(command, c.ReleaseLease | c.TransferLease):
        operator = bool(command.actor and command.reason)
        return None if command.session or operator else "an operator must give actor and reason"
    if isinstance(command, c.OpenSession):
        if command.disconnect_grace_ms > command.ttl_ms:
            return "disconnect_grace_ms must be at most ttl_ms"
        return None if _labels_fit(command.labels) else f"labels must be at most {c.LABELS_MAX}, each bounded"
    if isinstance(command, c.RenewSessions):
        matched = not command.connections or len(command.connections) == len(command.sessions)
        return None if matched else "connections must be empty or as many as sessions"
    if isinstance(command, c.SetLimits):
        return None if all(value >= 1 for value in msgspec.structs.astuple(command.limits)) else "limits must be over 0"
    return None


def _labels_fit(labels: tuple[tuple[str, str], ...]) -> bool:
    high = c.INFO_FIELD_BYTES_MAX
    return len(labels) <= c.LABELS_MAX and all(_fits(key, 1, high) and _fits(value, 0, high) for key, value in labels)
