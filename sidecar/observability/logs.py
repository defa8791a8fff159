"""Structured logs on standard error: JSON lines, or coloured text for a person. The standard library's loggers
(asyncio, grpc, aiohttp, our own) come out the same way.

A warning or error that repeats is cut down: a few a window, then one line that says how many were left out.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.types import Processor

WINDOW_S = 10.0
BURST = 5
KEYS_MAX = 1_000
# Chatty at "info" without telling an operator anything.
QUIET = ("aiohttp.access", "asyncio", "grpc", "grpc._cython")


class RateLimit:
    """Lets ``BURST`` equal messages through each window. Equal: same logger, level, and text without its values."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._windows: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        level = str(event.get("level", method))
        if level not in ("warning", "error"):
            return event
        record = event.get("_record")
        text = str(record.msg) if record is not None else str(event.get("event"))
        key = (str(event.get("logger", "")), level, text)
        now_s = self._now_s()
        began_s, count = self._windows.pop(key, (now_s, 0))
        left_out = 0
        if now_s - began_s >= WINDOW_S:
            left_out = max(0, count - BURST)
            began_s, count = now_s, 0
        self._windows[key] = (began_s, count + 1)
        if len(self._windows) > KEYS_MAX:
            self._windows.popitem(last=False)
        if count >= BURST:
            raise structlog.DropEvent
        if left_out:
            event["left_out"] = left_out
        return event


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """``level``: debug, info, warning or error; ``form``: json or console. Replaces whatever was configured before."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    render: list[Processor] = [RateLimit(), structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # The plain form: the decorated one prints the variables of every frame, and with them what agents sent.
        plain = structlog.dev.plain_traceback
        render += [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    handler = _DroppingHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _DroppingHandler(logging.StreamHandler[TextIO]):
    """A formatter may decide to drop a line (DropEvent)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except structlog.DropEvent:
            return
        self.stream.write(line + self.terminator)
        self.flush()
