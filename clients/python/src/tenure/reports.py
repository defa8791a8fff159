"""How the end of a run is told to the cluster.

Rules:

* What a handler returned is reported, also after an interrupt: it has happened. That its result cannot be stored
  changes nothing about that.
* A handler that was interrupted by the sidecar and has ended otherwise is reported as stopped; one that was cancelled
  for another reason has failed, and may be tried again.
* A report is repeated until it is answered or the session has ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tenure import errors
from tenure.connection import Connection
from tenure.run import Permanent, Retry, Run, encoded
from tenure.session import ACKNOWLEDGE, COMPLETE_RUN, FAIL_RUN, Kind
from tenure.v1 import job_pb2

__all__ = ["Reports"]

log = logging.getLogger("tenure")

RESULT_BYTES_MAX = 16_384
ERROR_BYTES_MAX = 4_096
RETRY_AFTER_MAX_S = 86_400
REPORT_RETRY_S = 0.2


class Reports:
    """See the rules at the top of this file."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ended(self, run: Run, body: asyncio.Future[Any]) -> None:
        """``body`` is done."""
        if body.cancelled():
            await self._stopped(run, "stopped", f"cancelled: {run.interrupt_cause or 'by its own code'}")
            return
        error = body.exception()
        if error is None:
            await self._succeeded(run, body.result())
        elif run.interrupted_by_sidecar:
            await self._acknowledge(run, _text(error))
        elif isinstance(error, Retry):
            await self.failed(run, str(error) or "the handler asked for another attempt", after=error.after)
        elif isinstance(error, Permanent):
            await self.failed(run, str(error) or "the handler failed for good", retryable=False)
        else:
            # One that looked whether it may go on, and ended when it might not, has done what it should.
            if not isinstance(error, errors.RunEnded):
                log.error("the handler of run %s of %s failed", run.run_id, run.job, exc_info=error)
            await self.failed(run, _text(error))

    async def not_started(self, run: Run) -> None:
        """It was to end before it could begin."""
        await self._stopped(run, "not started", f"not started: {run.interrupt_cause}")

    async def failed(self, run: Run, text: str, *, after: float = 0.0, retryable: bool = True) -> None:
        request = job_pb2.FailRunRequest(
            run_id=run.run_id,
            token=run.token,
            error=_bounded(text),
            retryable=retryable,
            retry_after_ms=round(min(after, RETRY_AFTER_MAX_S) * 1000),
        )
        await self._tell(run, FAIL_RUN, request)

    async def _stopped(self, run: Run, acknowledgement: str, failure: str) -> None:
        if run.interrupted_by_sidecar:
            await self._acknowledge(run, acknowledgement)
        else:
            await self.failed(run, failure)

    async def _succeeded(self, run: Run, value: object) -> None:
        result, problem = b"", ""
        try:
            result = encoded(value, "result")
        except TypeError as error:
            problem = str(error)
        if len(result) > RESULT_BYTES_MAX:
            problem = f"it has {len(result)} bytes, at most {RESULT_BYTES_MAX} are kept"
        if problem:
            log.error("run %s of %s is done, but its result is not stored: %s", run.run_id, run.job, problem)
            result = b""
        request = job_pb2.CompleteRunRequest(run_id=run.run_id, token=run.token, result=result)
        await self._tell(run, COMPLETE_RUN, request)

    async def _acknowledge(self, run: Run, detail: str) -> None:
        request = job_pb2.AcknowledgeInterruptRequest(run_id=run.run_id, token=run.token, detail=_bounded(detail))
        await self._tell(run, ACKNOWLEDGE, request)

    async def _tell(self, run: Run, kind: Kind[Any, Any], request: Any) -> None:
        uncertain = False
        while True:
            try:
                await self._connection.call(
                    kind, lambda: request, timeout=self._connection.options.timeout, session=run._session
                )
                return
            except (errors.SessionLost, errors.ClientClosed):
                log.warning("run %s of %s has ended (%s), and so has the session", run.run_id, run.job, kind.field)
                return
            except errors.RunEnded as error:
                if not uncertain:
                    log.warning("run %s of %s was over before it was reported: %s", run.run_id, run.job, error)
                return
            except errors.Indefinite:
                uncertain = True
            except (errors.Unavailable, errors.Overloaded) as error:
                log.warning("the end of run %s of %s is not reported yet: %s", run.run_id, run.job, error)
            except errors.TenureError as error:
                log.error("the end of run %s of %s was refused: %s", run.run_id, run.job, error)
                return
            await asyncio.sleep(REPORT_RETRY_S)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _bounded(text: str) -> str:
    return text.encode("utf-8", "replace")[:ERROR_BYTES_MAX].decode("utf-8", "ignore")
