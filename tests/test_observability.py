"""Metrics, logs and the HTTP port."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import aiohttp
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from sidecar.observability import logs
from sidecar.observability.http import Health, HealthServer
from sidecar.observability.logs import BURST, WINDOW_S, RateLimit
from sidecar.observability.metrics import METHODS_MAX, Metrics


@pytest.fixture
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


# ---- metrics -----------------------------------------------------------------------------------------------------


def test_names_from_outside_make_no_series() -> None:
    """M01: hostile method names end up in one series, and the exposition stays parseable."""
    metrics = Metrics()
    for number in range(10_000):
        metrics.request_done("LeaseService", f'Acquire{number}\n{{}}"\\', "OK", 0.001)
    text = metrics.render().decode()
    families = list(text_string_to_metric_families(text))
    series = [s for family in families for s in family.samples if s.name == "tenure_requests_total"]
    assert len(series) == METHODS_MAX + 1
    others = [s.value for s in series if s.labels["method"] == "other"]
    assert others == [10_000 - METHODS_MAX]


def test_a_fresh_exposition_is_small() -> None:
    text = Metrics().render()
    assert len(text) < 50_000
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {
        "tenure_raft_is_leader",
        "tenure_raft_leader_changes",
        "tenure_raft_applied_index",
        "tenure_log_sync_seconds",
        "tenure_clock_skew_seconds",
        "tenure_disk_free_bytes",
        "tenure_shed",
        "tenure_batch_items",
    } <= names


def test_gauges_are_read_when_somebody_asks() -> None:
    metrics = Metrics()
    asked: list[int] = []
    metrics.before_scrape.append(lambda: asked.append(1))
    metrics.render()
    metrics.render()
    assert len(asked) == 2


def test_counters_of_others_are_read_when_somebody_asks() -> None:
    metrics, counted = Metrics(), {"silent": 1}
    metrics.counted_elsewhere("things_dropped", "by cause", lambda: counted)
    metrics.counted_elsewhere("things", "all of them", lambda: sum(counted.values()))
    counted |= {"silent": 2, "late": 3}
    text = metrics.render().decode()
    assert 'tenure_things_dropped_total{cause="late"} 3.0' in text
    assert 'tenure_things_dropped_total{cause="silent"} 2.0' in text
    assert "tenure_things_total 5.0" in text


# ---- logs --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restore_logging")
def test_json_lines_from_both_kinds_of_loggers() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    structlog.get_logger("tenure.test").info("serving", port=7)
    logging.getLogger("tenure.consensus").warning("%s is slow", "n2")
    logging.getLogger("tenure.consensus").debug("not shown")
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger("tenure.test").error("failed", exc_info=error)
    first, second, third = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["event"], first["port"], first["level"], first["logger"]) == ("serving", 7, "info", "tenure.test")
    assert (second["event"], second["level"]) == ("n2 is slow", "warning")
    assert "ValueError: broken" in third["exception"]
    assert first["timestamp"].endswith("Z")


@pytest.mark.usefixtures("restore_logging")
def test_console_tracebacks_show_no_values() -> None:
    stream = io.StringIO()
    logs.configure("info", "console", stream)
    private = "what an agent sent"
    try:
        raise ValueError(len(private))
    except ValueError as error:
        structlog.get_logger("tenure.test").error("failed", exc_info=error)
    assert "ValueError: 18" in stream.getvalue() and private not in stream.getvalue()


@pytest.mark.usefixtures("restore_logging")
def test_repeated_warnings_are_cut_down() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    for number in range(100):
        logging.getLogger("tenure.test").warning("cannot reach %s", f"n{number}")
        structlog.get_logger("tenure.test").info("every one", number=number)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sum(line["level"] == "warning" for line in lines) == BURST
    assert sum(line["level"] == "info" for line in lines) == 100


def test_after_the_window_it_says_how_many_were_left_out() -> None:
    now_s = 0.0
    limit = RateLimit(lambda: now_s)

    def line(text: str) -> dict[str, object] | None:
        try:
            return dict(limit(None, "warning", {"event": text, "level": "warning", "logger": "x"}))
        except structlog.DropEvent:
            return None

    assert [line("a") is not None for _ in range(8)] == [True] * BURST + [False] * 3
    assert line("b") is not None
    now_s += WINDOW_S
    again = line("a")
    assert again is not None and again["left_out"] == 3
    for number in range(5_000):
        line(str(number))
    assert len(limit._windows) <= logs.KEYS_MAX


# ---- HTTP --------------------------------------------------------------------------------------------------------


async def test_the_three_paths() -> None:
    reasons = {"live": "", "ready": ""}
    server = HealthServer(
        Metrics(), lambda: Health(reasons["live"], {}), lambda: Health(reasons["ready"], {"leader": "n2"})
    )
    await server.start("127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/readyz") as response:
                assert (response.status, await response.json()) == (
                    200,
                    {"status": "ok", "reason": "", "leader": "n2"},
                )
            reasons["ready"] = "no leader is known"
            async with session.get(f"{base}/readyz") as response:
                assert response.status == 503
                assert (await response.json())["reason"] == "no leader is known"
            async with session.get(f"{base}/healthz") as response:
                assert response.status == 200
            async with session.get(f"{base}/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain")
                assert "tenure_ready" in await response.text()
            async with session.get(f"{base}/other") as response:
                assert response.status == 404
    finally:
        await server.stop()


async def test_an_address_in_use_is_an_error() -> None:
    first = HealthServer(Metrics(), lambda: Health("", {}), lambda: Health("", {}))
    second = HealthServer(Metrics(), lambda: Health("", {}), lambda: Health("", {}))
    await first.start("127.0.0.1", 0)
    try:
        with pytest.raises(OSError):
            await second.start("127.0.0.1", first.port)
    finally:
        await first.stop()
        await second.stop()
