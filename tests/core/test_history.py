"""The logs and snapshots of each release, read for ever: an entry means what it meant when it was written.

When this fails, the change behind it would make the nodes of a cluster disagree while it is being upgraded. Such a
change needs a new command, or a new field with a default under which old entries do what they did. history.py adds
the files of a release.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from sidecar.core.commands import Reason
from sidecar.core.events import Kind
from sidecar.core.machine import Machine
from tests.core.derived import check_derived
from tests.core.history import DATA, Batch, replay


class Expected(NamedTuple):
    digest: str
    revision: int
    last_token: int


RELEASES = {
    "0_1": Expected("e14357bcb523a2af65e52dd5fd02af92d9fb062eef417aabc8b1a58652860340", 1477, 240),
    "0_1_jobs": Expected("ad915ea702937ea5991ceb9a391fbba5898aba2bdad72ad748fe5976823fa3d2", 3922, 291),
}


@pytest.mark.parametrize("release", RELEASES)
def test_the_log_of_a_release_gives_the_state_it_gave(release: str) -> None:
    machine = replay((DATA / f"history_{release}.bin").read_bytes())
    assert Expected(machine.digest(), machine.revision, machine.last_token) == RELEASES[release]
    check_derived(machine)


@pytest.mark.parametrize("release", RELEASES)
def test_the_snapshot_of_a_release_is_that_state(release: str) -> None:
    machine = Machine()
    machine.restore((DATA / f"snapshot_{release}.bin").read_bytes())
    assert Expected(machine.digest(), machine.revision, machine.last_token) == RELEASES[release]


def test_the_logs_are_worth_replaying() -> None:
    """Together: every kind of event, and every reason to refuse but a full state."""
    kinds: list[Kind] = []
    reasons: list[Reason | None] = []
    for release in RELEASES:
        machine = Machine()
        for entry in msgspec.msgpack.decode((DATA / f"history_{release}.bin").read_bytes(), type=list[bytes]):
            batch = msgspec.msgpack.decode(entry, type=Batch)
            for request in batch.requests:
                result, events = machine.apply(batch.stamp, request)
                kinds.extend(event.kind for event in events)
                reasons.append(getattr(result, "reason", None))
    assert [kind for kind in Kind if kind not in kinds] == []
    never = [reason.name for reason in Reason if reason not in reasons and not reason.name.endswith("_FULL")]
    assert never == []
