"""Zones come from the pinned tables only, and every change of theirs is found."""

from __future__ import annotations

import struct
import time
import zoneinfo
from datetime import datetime, timedelta
from importlib import metadata, resources
from pathlib import Path

import pytest

from sidecar.core.specification import WALL_MAX_MS
from sidecar.scheduling.zones import Change, UnknownZoneError, _load, local, names, tzdata_version, zone
from tests.scheduling.times import DAY, ms


def changes_of_table(name: str) -> list[Change]:
    """The changes since 1970 that the file lists (RFC 8536, version 2), without what its rule says of later years."""
    data = resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
    isut, isstd, leap, times, types, chars = struct.unpack(">6L", data[20:44])
    start = 44 + times * 5 + types * 6 + chars + leap * 8 + isstd + isut
    _, _, _, times, types, _ = struct.unpack(">6L", data[start + 20 : start + 44])
    start += 44
    moments = struct.unpack(f">{times}q", data[start : start + 8 * times])
    indexes = data[start + 8 * times : start + 9 * times]
    start += 9 * times
    offsets = [struct.unpack(">l", data[start + 6 * i : start + 6 * i + 4])[0] for i in range(types)]
    found, before = [], offsets[0]
    for moment, index in zip(moments, indexes, strict=True):
        if offsets[index] != before and moment >= 0:
            found.append(Change(moment * 1000, before * 1000, offsets[index] * 1000))
        before = offsets[index]
    return found


def test_the_changes_of_all_zones_are_those_of_the_tables() -> None:
    for name in sorted(names()):
        expected = changes_of_table(name)
        if expected:
            assert zone(name).changes(0, expected[-1].at_ms + 1) == expected, name


def test_changes_of_later_years_follow_the_rule() -> None:
    found = zone("Europe/Berlin").changes(ms("2190-01-01"), ms("2191-01-01"))
    assert [change.at_ms for change in found] == [ms("2190-03-28T01:00"), ms("2190-10-31T01:00")]
    assert [change.new_ms for change in found] == [7_200_000, 3_600_000]


def test_a_range_of_changes_is_closed_at_its_start_and_open_at_its_end() -> None:
    change = ms("2026-03-29T01:00")
    berlin = zone("Europe/Berlin")
    assert len(berlin.changes(change, change + 1)) == 1
    assert berlin.changes(change + 1, change + DAY) == []
    assert berlin.changes(change - DAY, change) == []


def test_the_database_of_the_host_is_not_read(tmp_path: Path) -> None:
    tokyo = resources.files("tzdata").joinpath("zoneinfo", "Asia", "Tokyo").read_bytes()
    (tmp_path / "Europe").mkdir()
    (tmp_path / "Europe" / "Berlin").write_bytes(tokyo)
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[str(tmp_path)])
    _load.cache_clear()
    try:
        assert zoneinfo.ZoneInfo.no_cache("Europe/Berlin").utcoffset(datetime(2026, 1, 1)) == timedelta(hours=9)
        assert zone("Europe/Berlin").offset_ms(ms("2026-01-01")) == 3_600_000
    finally:
        zoneinfo.reset_tzpath(to=before)
        _load.cache_clear()


def test_no_name_means_utc_whatever_the_host_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert zone("").name == "UTC"
        assert zone("").offset_ms(0) == 0
        assert local(0, "") == "1970-01-01 00:00:00 +00:00 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("europe/berlin", "Europe/Berlin"),
        ("Berlin", "Europe/Berlin"),
        ("America/New York", "America/New_York"),
        ("Europe/Berln", "Europe/Berlin"),
        ("new_york", "America/New_York"),
    ],
)
def test_an_unknown_zone_is_refused_with_what_was_meant(name: str, near: str) -> None:
    with pytest.raises(UnknownZoneError, match=near) as caught:
        zone(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["../zones", "/etc/localtime", "Europe", "Europe/", "zone.tab", "\0", "x" * 300])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(UnknownZoneError):
        zone(name)


def test_the_version_is_that_of_the_package() -> None:
    assert tzdata_version() == metadata.version("tzdata")


@pytest.mark.parametrize(
    ("at", "name", "text"),
    [
        ("2026-03-29T01:00", "Europe/Berlin", "2026-03-29 03:00:00 +02:00 CEST"),
        ("2026-10-25T00:30", "Europe/Berlin", "2026-10-25 02:30:00 +02:00 CEST"),
        ("2026-10-25T01:30", "Europe/Berlin", "2026-10-25 02:30:00 +01:00 CET"),
        ("2026-01-01T00:00", "America/Sao_Paulo", "2025-12-31 21:00:00 -03:00"),
    ],
)
def test_local_times_are_told_apart_by_their_offset(at: str, name: str, text: str) -> None:
    assert local(ms(at), name) == text


def test_milliseconds_are_shown_if_there_are_any() -> None:
    assert local(1_500, "UTC") == "1970-01-01 00:00:01.500 +00:00 UTC"


def test_the_far_end_of_time_can_be_computed_with() -> None:
    for name in ("Pacific/Kiritimati", "Pacific/Pago_Pago", "America/New_York"):
        assert zone(name).offset_ms(WALL_MAX_MS + 1)
        assert zone(name).changes(WALL_MAX_MS - 400 * DAY, WALL_MAX_MS + 1) is not None
