"""The HTTP port: ``/metrics`` for Prometheus, ``/healthz`` (alive?) and ``/readyz`` (give it work?) as JSON.

Live and ready are different questions: a node without a quorum is alive, and killing it would help nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from sidecar.observability.metrics import Metrics


@dataclass(frozen=True)
class Health:
    """An empty reason means yes; ``facts`` go into the body beside it."""

    reason: str
    facts: dict[str, object]


class HealthServer:
    """Serves the three paths on one TCP address."""

    def __init__(self, metrics: Metrics, live: Callable[[], Health], ready: Callable[[], Health]) -> None:
        self._metrics = metrics
        self._live = live
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """OSError when the address cannot be had. With port 0, ``port`` tells which one it became."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._serve_metrics),
                web.get("/healthz", self._serve_live),
                web.get("/readyz", self._serve_ready),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": Metrics.CONTENT_TYPE})

    async def _serve_live(self, _: web.Request) -> web.Response:
        return self._answer(self._live())

    async def _serve_ready(self, _: web.Request) -> web.Response:
        return self._answer(self._ready())

    @staticmethod
    def _answer(health: Health) -> web.Response:
        status = "ok" if not health.reason else "failing"
        body = {"status": status, "reason": health.reason, **health.facts}
        text = json.dumps(body) + "\n"
        return web.Response(text=text, status=503 if health.reason else 200, content_type="application/json")
