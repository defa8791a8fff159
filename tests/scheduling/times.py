"""Helpers of the scheduling tests: times as text, and specifications in one line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sidecar.core.specification import DstPolicy, JobSpec, Schedule, ScheduleKind
from sidecar.scheduling.schedules import Compiled, compile_schedule

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
V, K, N, S = DstPolicy.VIXIE, DstPolicy.TWICE, DstPolicy.SKIP, DstPolicy.SHIFT


def ms(text: str) -> int:
    """Of an ISO time in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


def iso(at_ms: int) -> str:
    assert at_ms % MINUTE == 0
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M")


def cron(expression: str, zone: str = "UTC", dst: DstPolicy = V, **window: Any) -> Schedule:
    return Schedule(kind=ScheduleKind.CRON, cron=expression, zone=zone, dst=dst, **window)


def every(interval_ms: int, anchor_ms: int = 0, **window: Any) -> Schedule:
    return Schedule(kind=ScheduleKind.INTERVAL, interval_ms=interval_ms, anchor_ms=anchor_ms, **window)


def once(at_ms: int, **window: Any) -> Schedule:
    return Schedule(kind=ScheduleKind.ONCE, at_ms=at_ms, **window)


def compiled(expression: str, zone: str = "UTC", dst: DstPolicy = V, **window: Any) -> Compiled:
    return compile_schedule(cron(expression, zone, dst, **window))


def job(schedule: Schedule, **more: Any) -> JobSpec:
    return JobSpec(owner="ops@acme.example", runbook_url="https://acme.example/runbook", schedule=schedule, **more)
