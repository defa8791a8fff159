"""Python client for Tenure: scheduled jobs, leases with fencing tokens, and effects that happen at most once.

::

    async with tenure.connect() as client:

        @client.job("report", owner="team-a", runbook_url="https://wiki.example/report", schedule="0 6 * * *")
        async def report(run: tenure.Run) -> None:
            await write_report(fencing_token=run.token, idempotency_key=run.idempotency_key)

        await client.work()

or, where something else decides when it is time::

    async with tenure.connect() as client:
        async with client.lease("nightly-report", wait=60) as lease:
            await write_report(fencing_token=lease.token)
"""

from tenure import environment as _environment  # noqa: F401  first of all, see there
from tenure.client import Client, ConnectOptions, connect
from tenure.clock import now
from tenure.dedup import (
    Attempt,
    BeginResult,
    Completed,
    Failed,
    InProgress,
    JsonSerializer,
    Serializer,
    UnknownOutcome,
)
from tenure.errors import (
    AttemptStale,
    ClientClosed,
    ClientForkedError,
    Compacted,
    ConnectError,
    Definite,
    Indefinite,
    InvalidArgument,
    JobConflict,
    LeaseHeld,
    LeaseLost,
    LimitReached,
    NotFound,
    OperationTimeout,
    Overloaded,
    PermissionDenied,
    RecordFailed,
    RecordInProgress,
    RecordMismatch,
    RecordUnknown,
    RunEnded,
    SessionLost,
    StaleToken,
    SwitchedOff,
    SwitchStateUnknown,
    TenureError,
    Unavailable,
)
from tenure.fingerprint import fingerprint
from tenure.jobs import CanaryOptions, JobInfo, JobOptions, OccurrenceInfo
from tenure.lease import Lease
from tenure.run import Permanent, Retry, Run, SyncRun
from tenure.switches import SwitchInfo, SwitchState
from tenure.sync import SyncAttempt, SyncClient, SyncLease, connect_sync
from tenure.values import Event, EventKind, LeaseHolder, LeaseInfo, LeaseWaiter, RecordInfo, RecordState, TokenCheck
from tenure.watching import Watch

__all__ = [
    "Attempt",
    "AttemptStale",
    "BeginResult",
    "CanaryOptions",
    "Client",
    "ClientClosed",
    "ClientForkedError",
    "Compacted",
    "Completed",
    "ConnectError",
    "ConnectOptions",
    "Definite",
    "Event",
    "EventKind",
    "Failed",
    "InProgress",
    "Indefinite",
    "InvalidArgument",
    "JobConflict",
    "JobInfo",
    "JobOptions",
    "JsonSerializer",
    "Lease",
    "LeaseHeld",
    "LeaseHolder",
    "LeaseInfo",
    "LeaseLost",
    "LeaseWaiter",
    "LimitReached",
    "NotFound",
    "OccurrenceInfo",
    "OperationTimeout",
    "Overloaded",
    "Permanent",
    "PermissionDenied",
    "RecordFailed",
    "RecordInProgress",
    "RecordInfo",
    "RecordMismatch",
    "RecordState",
    "RecordUnknown",
    "Retry",
    "Run",
    "RunEnded",
    "Serializer",
    "SessionLost",
    "StaleToken",
    "SwitchInfo",
    "SwitchState",
    "SwitchStateUnknown",
    "SwitchedOff",
    "SyncAttempt",
    "SyncClient",
    "SyncLease",
    "SyncRun",
    "TenureError",
    "TokenCheck",
    "Unavailable",
    "UnknownOutcome",
    "Watch",
    "connect",
    "connect_sync",
    "fingerprint",
    "now",
]
