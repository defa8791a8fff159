"""Capture, encode, restore, digest: the picture is immutable, and the same bytes come from the same log everywhere."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest

from sidecar.core import commands as c
from sidecar.core import snapshot
from sidecar.core.machine import Machine, SnapshotError
from tests.core.derived import check_derived, restored
from tests.core.history import Step, random_history


def run(machine: Machine, steps: list[Step]) -> list[c.Result]:
    return [machine.apply(stamp, request)[0] for stamp, request in steps]


@pytest.mark.parametrize("seed", range(8))
def test_a_restore_at_any_point_changes_nothing_after_it(seed: int) -> None:
    chance = random.Random(seed)
    steps = random_history(seed, 600)
    direct, broken = Machine(), Machine()
    results = run(direct, steps)
    cut = chance.randrange(len(steps))
    before = run(broken, steps[:cut])
    assert before + run(restored(broken), steps[cut:]) == results
    for _ in range(5):
        broken = Machine()
        for start in range(0, len(steps), 100):
            run(broken, steps[start : start + 100])
            broken = restored(broken)
    assert broken.digest() == direct.digest()
    assert broken.capture().encode() == direct.capture().encode()
    check_derived(direct)


def test_a_picture_does_not_change_when_the_machine_goes_on() -> None:
    steps = random_history(3, 600)
    machine = Machine()
    run(machine, steps[:300])
    picture, digest = machine.capture(), machine.digest()
    run(machine, steps[300:])
    assert machine.digest() != digest
    assert picture.digest() == digest


def test_a_picture_is_encoded_on_another_thread_while_the_machine_goes_on() -> None:
    steps = random_history(4, 2_000)
    machine = Machine()
    run(machine, steps[:1_000])
    picture, expected = machine.capture(), machine.capture().encode()
    encoded: list[bytes] = []
    thread = threading.Thread(target=lambda: encoded.extend(picture.encode() for _ in range(5)))
    thread.start()
    run(machine, steps[1_000:])
    thread.join()
    assert encoded == [expected] * 5


def test_the_digest_sees_every_table() -> None:
    machine, seen = Machine(), [Machine().digest()]
    for stamp, request in random_history(5, 200):
        revision = machine.revision
        machine.apply(stamp, request)
        if machine.revision != revision:
            seen.append(machine.digest())
    assert len(set(seen)) == len(seen)


def test_another_format_is_refused_by_name() -> None:
    wire = msgspec.msgpack.decode(Machine().capture().encode())
    wire[0] = snapshot.FORMAT + 1
    with pytest.raises(SnapshotError, match="format 2, this version reads 1"):
        Machine().restore(msgspec.msgpack.encode(wire))


def test_damage_is_refused_and_leaves_the_state_as_it_was() -> None:
    machine = Machine()
    run(machine, random_history(6, 300))
    payload, digest = machine.capture().encode(), machine.digest()
    damaged = [b"", b"\x00", payload[:-1], payload + b"\x00", payload[: len(payload) // 2], b"\xff" * 64]
    for bad in damaged:
        with pytest.raises(SnapshotError):
            machine.restore(bad)
    assert machine.digest() == digest


def test_the_limits_travel_with_the_state() -> None:
    machine = Machine()
    limits = c.Limits(sessions_max=7)
    machine.apply(c.Stamp(1, 1), c.Request(command=c.SetLimits(limits=limits)))
    assert restored(machine).limits == limits
    assert restored(machine).stamp == c.Stamp(1, 1)


def test_rows_are_immutable() -> None:
    machine = Machine()
    run(machine, random_history(7, 300))
    rows = [
        *machine.sessions("t", "", 10),
        *machine.leases("t", "", "", 10),
        *machine.records("t", "", "", 10, None),
        *machine.events_from(machine.first_revision(), 10),
    ]
    assert len({type(row) for row in rows}) == 4
    for row in rows:
        with pytest.raises(AttributeError):
            setattr(row, "tenant", "other")  # noqa: B010 - as an assignment it would not pass the type check
