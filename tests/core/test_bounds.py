"""Whatever an entry of the log holds, apply gives a result: out of bounds is refused, and nothing raises."""

from __future__ import annotations

import types
from enum import IntEnum
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core import bounds
from sidecar.core import commands as c
from sidecar.core.machine import Machine
from tests.core.derived import check_derived

COMMANDS: tuple[type[msgspec.Struct], ...] = get_args(c.Command)
TEXTS = st.sampled_from(["", " ", "a", "t", "x", "s1-q", "ä" * 300, "n" * 257, "n" * 5_000, "\x00", "\U0001f600"])
PAYLOADS = st.sampled_from([b"", b"r", b"\xff" * 64, b"\xff" * 65, bytes(65_536), bytes(65_537)])
NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 500, 1_000, 15_000, 2**31, 2**62, 2**63 - 1])


def values(kind: Any) -> st.SearchStrategy[Any]:
    if kind is str:
        return TEXTS
    if kind is bytes:
        return PAYLOADS
    if kind is int:
        return NUMBERS
    if kind is bool:
        return st.booleans()
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field: values(hints[field]) for field in kind.__struct_fields__})
    if isinstance(kind, types.UnionType):
        return st.one_of(*(values(each) for each in get_args(kind)))
    if kind is type(None):
        return st.none()
    if get_args(kind)[-1] is Ellipsis:
        return st.lists(values(get_args(kind)[0]), max_size=18).map(tuple)
    return st.tuples(*(values(each) for each in get_args(kind)))


REQUESTS = st.builds(
    c.Request,
    command=st.one_of(*(values(kind) for kind in COMMANDS)),
    key=values(c.RequestKey | None),
    not_after_ms=NUMBERS,
)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.lists(st.tuples(st.integers(-5, 50_000), REQUESTS), max_size=12))
def test_no_request_raises(steps: list[tuple[int, c.Request]]) -> None:
    machine = Machine()
    opened = c.OpenSession(tenant="t", suffix="q", ttl_ms=60_000)
    machine.apply(c.Stamp(0, 0), c.Request(command=opened))
    machine.apply(c.Stamp(0, 0), c.Request(command=c.AcquireLease(tenant="t", name="x", session="s1-q", waiter="a")))
    now_ms = 0
    for passing_ms, request in steps:
        now_ms += passing_ms
        result, events = machine.apply(c.Stamp(now_ms, 0), request)
        if isinstance(result, c.Refused):
            assert result.message
        assert [event.revision for event in events] == list(
            range(machine.revision - len(events) + 1, machine.revision + 1)
        )
    check_derived(machine)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_every_text_payload_and_number_of_a_command_has_a_bound(kind: type[msgspec.Struct]) -> None:
    texts, payloads, numbers = bounds._CHECKS[kind]
    bounded = {name for name, *_ in (*texts, *payloads, *numbers)}
    # Compared with the state, never stored before they were found in it.
    compared = {"token", "attempt", "fence_token", "due_ms", "sequence", "revision"}
    for name, hint in get_type_hints(kind).items():
        if hint in (str, bytes, int):
            assert name in bounded | compared, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("a" * 128, True),
        ("a" * 129, False),
        ("ä" * 64, True),
        ("ä" * 65, False),
        ("\U0001f600" * 32, True),
        ("", False),
    ],
)
def test_bounds_count_bytes_not_characters(text: str, fits: bool) -> None:
    request = c.Request(command=c.Tick(), key=c.RequestKey("t", "", text))
    assert (bounds.problem(request) is None) == fits


def test_limits_and_tags_are_what_they_were() -> None:
    """Written to logs: a tag that changes its meaning would change what old entries do."""
    tags = {kind.__name__: kind.__struct_config__.tag for kind in COMMANDS}
    assert tags == {
        "Tick": 1, "SetLimits": 2,
        "OpenSession": 10, "RenewSessions": 11, "AttachSession": 12, "DetachSession": 13, "CloseSession": 14,
        "AcquireLease": 20, "CancelWait": 21, "ReleaseLease": 22, "TransferLease": 23,
        "BeginRecord": 30, "CompleteRecord": 31, "FailRecord": 32, "ResolveRecord": 33,
        "ApplyJobs": 40, "DeleteJob": 41, "RollbackJob": 42, "SettleDue": 43, "SetTzdata": 44, "TriggerJob": 45,
        "BackfillJob": 46,
        "ServeJobs": 50, "ClaimRun": 51, "CheckpointRun": 52, "CompleteRun": 53, "FailRun": 54,
        "AcknowledgeInterrupt": 55, "InterruptRun": 56, "ResolveOccurrence": 57,
        "SetSwitch": 60, "ClearSwitch": 61,
    }  # fmt: skip
    results = {kind.__name__: kind.__struct_config__.tag for kind in get_args(c.Result)}
    assert results == {
        "Done": 1, "Refused": 2, "SessionOpened": 10, "SessionsRenewed": 11, "SessionAttached": 12,
        "LeaseGranted": 20, "LeaseQueued": 21, "LeaseTransferred": 22, "RecordBegun": 30, "RecordCompleted": 31,
        "JobsApplied": 40, "JobRolledBack": 41, "OccurrenceCreated": 42, "Backfilled": 43,
        "RunClaimed": 50, "RunFailed": 51, "SwitchIsSet": 60,
    }  # fmt: skip
