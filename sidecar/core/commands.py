"""Every input of the state machine, every result it can give, and every reason for which it refuses.

The tags are written to the log and to snapshots. A tag is never reused and never changes its meaning; a field
is never moved or removed, only added at the end with a default (structs are encoded as arrays).

Times are integer milliseconds. ``*_ms`` fields of commands are durations; fields of records are cluster times
unless they say otherwise.
"""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec

from sidecar.core.specification import JobSpec

# ---- bounds (one place; services quote them in their errors) ------------------------------------------------

TTL_MIN_MS, TTL_MAX_MS, TTL_DEFAULT_MS = 500, 3_600_000, 15_000
DISCONNECT_GRACE_DEFAULT_MS = 1_000
LOCK_DELAY_MAX_MS = 3_600_000
WAIT_MAX_MS = 86_400_000
CAPACITY_MAX = 10_000
PRIORITY_MIN, PRIORITY_MAX = -100, 100
RETENTION_MIN_MS, RETENTION_MAX_MS, RETENTION_DEFAULT_MS = 1_000, 90 * 86_400_000, 86_400_000
NAME_BYTES_MAX = 256
KEY_BYTES_MAX = 512
TENANT_BYTES_MAX = 64
REQUEST_ID_BYTES_MAX = 128
METADATA_BYTES_MAX = 1_024
INFO_FIELD_BYTES_MAX, LABELS_MAX = 128, 16
FINGERPRINT_BYTES_MAX = 64
RESULT_BYTES_MAX = 65_536
ERROR_BYTES_MAX = 4_096
ACTOR_BYTES_MAX, REASON_BYTES_MAX = 128, 1_024
APPLY_JOBS_MAX = 1_000
SETTLEMENTS_MAX = 2_000
# Of one settlement. Due times beyond it follow with the next one.
DUE_MAX = 1_000
BACKFILL_MAX = 1_000
SERVED_JOBS_MAX, SLOTS_MAX = 1_000, 1_000
DETAIL_BYTES_MAX = 4_096
RETRY_AFTER_MAX_MS = 86_400_000
SWITCH_EXPIRY_MIN_MS, SWITCH_EXPIRY_MAX_MS = 1_000, 31 * 86_400_000


class Limits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Bounds on the size of the replicated state. Part of the cluster's configuration: equal on all nodes.

    Carried in the log by ``SetLimits`` so that no node ever evicts or refuses by a value of its own.
    """

    sessions_max: int = 20_000
    sessions_per_tenant_max: int = 20_000
    # Names in use, and also holders of all names together.
    leases_max: int = 200_000
    waiters_per_lease_max: int = 10_000
    records_max: int = 1_000_000
    # Keys, fingerprints, results and errors, with a reserve for each attempt whose outcome is still to come.
    record_bytes_max: int = 256 * 1024 * 1024
    requests_max: int = 200_000
    # How long the result of a unary request is kept, and how old it must be to make room for another.
    request_retention_ms: int = 300_000
    request_retention_min_ms: int = 30_000
    events_max: int = 10_000
    waiters_max: int = 200_000
    # Operations of one stream whose answers the client has not acknowledged.
    stream_requests_max: int = 10_000
    jobs_max: int = 20_000
    # Specifications of all kept revisions, and what their occurrences carry: payloads, checkpoints, results, errors.
    job_bytes_max: int = 256 * 1024 * 1024
    job_revisions_max: int = 20
    # Of all jobs together, ended ones too. When it is reached, what becomes due is recorded as missed.
    occurrences_max: int = 500_000
    # The fleet never starts more runs than this in any second.
    starts_per_second_max: int = 200
    switches_max: int = 10_000


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The time of a batch, decided by the leader: cluster time (never steps back) and UTC wall time."""

    cluster_ms: int
    wall_ms: int


class _Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    pass


class Tick(_Command, frozen=True, tag=1):
    """Lets time pass: whatever ends at or before the batch's stamp ends now."""


class SetLimits(_Command, frozen=True, tag=2):
    """Replaces the limits. Proposed by a new leader when its configuration differs from the state's."""

    limits: Limits


class OpenSession(_Command, frozen=True, tag=10):
    tenant: str
    # Random, chosen by the proposing sidecar; no part of the request's fingerprint.
    suffix: str
    agent: str = ""
    version: str = ""
    host: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    ttl_ms: int = TTL_DEFAULT_MS
    disconnect_grace_ms: int = DISCONNECT_GRACE_DEFAULT_MS
    # The stream that carries the session and the sidecar it ends at; empty for a session kept by unary calls.
    # No part of the request's fingerprint.
    connection: str = ""
    node: str = ""
    # Which stream of the session opens it, see AttachSession. Not in the request's fingerprint: a repeat of it comes
    # over another stream, and the one that opens the session need not be the first that asked.
    generation: int = 1


class RenewSessions(_Command, frozen=True, tag=11):
    """All renewals of one window. Sessions that have ended are reported, never revived."""

    sessions: tuple[str, ...]
    # Empty, or for each session the stream its keepalive came over, "" for a unary call. A keepalive of a stream
    # counts only while that stream carries the session, so one that was still under way when its stream broke cannot
    # undo the cut of the deadline. A unary renewal always counts: whoever sends it is alive.
    connections: tuple[str, ...] = ()


class AttachSession(_Command, frozen=True, tag=12):
    """A stream took the session over; it counts as a renewal. A later detach of an older connection has no effect."""

    tenant: str
    session: str
    connection: str
    node: str
    # The client counts the streams it ties to a session, from 1 for the one that opened it. An attach that was
    # overtaken by a later one is refused: it would take the session back for a stream that is gone. 0 is not ordered.
    generation: int = 0


class DetachSession(_Command, frozen=True, tag=13):
    """The stream broke: the deadline is cut to the disconnect grace, unless another connection has attached since."""

    session: str
    connection: str


class CloseSession(_Command, frozen=True, tag=14):
    tenant: str
    session: str


class AcquireLease(_Command, frozen=True, tag=20):
    tenant: str
    name: str
    session: str
    capacity: int = 1
    # 0 tries once. The place in line ends at the stamp plus this.
    wait_ms: int = 0
    priority: int = 0
    lock_delay_ms: int = 0
    metadata: str = ""
    # Names this very call, so that CancelWait undoes what it was given and nothing else. Required when wait_ms > 0.
    # Neither it nor wait_ms is part of the request's fingerprint: a repeat has a name of its own and less time left,
    # and takes over the place in line, or the grant, under its own name.
    waiter: str = ""


class CancelWait(_Command, frozen=True, tag=21):
    """The caller gave up: leaves the line, or releases the lease if this very waiter was granted it meanwhile.

    The request that is undone is forgotten with it: a repeat is a fresh try.
    """

    tenant: str
    name: str
    session: str
    waiter: str


class ReleaseLease(_Command, frozen=True, tag=22):
    tenant: str
    name: str
    token: int
    # Empty for an operator, who must be named.
    session: str = ""
    actor: str = ""
    reason: str = ""


class TransferLease(_Command, frozen=True, tag=23):
    tenant: str
    name: str
    token: int
    to_session: str
    session: str = ""
    actor: str = ""
    reason: str = ""


class OwnerLoss(IntEnum):
    RETRY = 1
    UNKNOWN = 2


class BeginRecord(_Command, frozen=True, tag=30):
    tenant: str
    key: str
    session: str
    fingerprint: bytes = b""
    owner_loss: OwnerLoss = OwnerLoss.RETRY
    retention_ms: int = RETENTION_DEFAULT_MS
    # A lease that must be current, with this token, at begin and at complete; empty for none.
    fence_lease: str = ""
    fence_token: int = 0


class CompleteRecord(_Command, frozen=True, tag=31):
    tenant: str
    key: str
    session: str
    attempt: int
    result: bytes = b""


class FailRecord(_Command, frozen=True, tag=32):
    tenant: str
    key: str
    session: str
    attempt: int
    retryable: bool
    error: str = ""


class Resolution(IntEnum):
    COMPLETED = 1
    FAILED = 2
    RETRY = 3
    FORGET = 4


class ResolveRecord(_Command, frozen=True, tag=33):
    tenant: str
    key: str
    attempt: int
    resolution: Resolution
    result: bytes = b""
    error: str = ""
    actor: str = ""
    reason: str = ""


# ---- jobs


class JobDefinition(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tenant: str
    name: str
    spec: JobSpec
    # -1: whatever there is; 0: only if there is none; n: only if n is its revision.
    expected_revision: int = -1


class ApplyJobs(_Command, frozen=True, tag=40):
    """All of them or none. One that is equal already is left as it is."""

    jobs: tuple[JobDefinition, ...]
    actor: str
    reason: str = ""


class DeleteJob(_Command, frozen=True, tag=41):
    tenant: str
    name: str
    actor: str
    reason: str


class RollbackJob(_Command, frozen=True, tag=42):
    """Makes the specification of a kept revision the newest revision."""

    tenant: str
    name: str
    # 0: the one before the present one.
    to_revision: int
    actor: str
    reason: str


class Due(msgspec.Struct, frozen=True, array_like=True):
    """An occurrence to create. Times are UTC wall milliseconds."""

    due_ms: int
    catch_up: bool = False


class Missed(msgspec.Struct, frozen=True, array_like=True):
    """Due times in a row that are not run, and why."""

    first_due_ms: int
    last_due_ms: int
    count: int
    reason: str


class Settlement(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What became of a job's due times in (settled_ms, through_ms], and which one is next.

    Applied only if the job still has this revision and is settled through ``settled_ms``: so each due time is dealt
    with once, however often the leader changes, or the proposal is repeated. ``next_due_ms`` 0: none any more.
    """

    tenant: str
    name: str
    revision: int
    settled_ms: int
    through_ms: int
    next_due_ms: int
    due: tuple[Due, ...] = ()
    missed: tuple[Missed, ...] = ()


class SettleDue(_Command, frozen=True, tag=43):
    """The leader's: those that do not fit (any more) are passed over."""

    settlements: tuple[Settlement, ...]


class SetTzdata(_Command, frozen=True, tag=44):
    """The time-zone rules by which the leader computes due times. A change lets it compute every next due time anew;
    what is settled stays settled."""

    version: str


class TriggerJob(_Command, frozen=True, tag=45):
    tenant: str
    name: str
    actor: str
    reason: str
    # None: the job's own.
    payload: bytes | None = None


class BackfillJob(_Command, frozen=True, tag=46):
    """Due times of the past, computed by the schedule of ``revision``; refused when that is not the job's any more."""

    tenant: str
    name: str
    revision: int
    due_ms: tuple[int, ...]
    actor: str
    reason: str


class ServeJobs(_Command, frozen=True, tag=50):
    """What a session works for: names, or prefixes that end with ``*``. Replaces what it served before."""

    tenant: str
    session: str
    jobs: tuple[str, ...]
    slots: int


class ClaimRun(_Command, frozen=True, tag=51):
    """The next run of these jobs for a session that polls. It gets one although it has no slots."""

    tenant: str
    session: str
    jobs: tuple[str, ...]


class CheckpointRun(_Command, frozen=True, tag=52):
    tenant: str
    session: str
    run: str
    token: int
    state: bytes


class CompleteRun(_Command, frozen=True, tag=53):
    tenant: str
    session: str
    run: str
    token: int
    result: bytes = b""


class FailRun(_Command, frozen=True, tag=54):
    tenant: str
    session: str
    run: str
    token: int
    error: str
    retryable: bool
    retry_after_ms: int = 0


class AcknowledgeInterrupt(_Command, frozen=True, tag=55):
    tenant: str
    session: str
    run: str
    token: int
    detail: str = ""


class InterruptRun(_Command, frozen=True, tag=56):
    tenant: str
    run: str
    actor: str
    reason: str


class OccurrenceResolution(IntEnum):
    SUCCEEDED = 1
    FAILED = 2
    RETRY = 3


class ResolveOccurrence(_Command, frozen=True, tag=57):
    tenant: str
    job: str
    due_ms: int
    sequence: int
    attempt: int
    resolution: OccurrenceResolution
    actor: str
    reason: str
    result: bytes = b""
    error: str = ""


# ---- switches


class SwitchMode(IntEnum):
    """In order of strength."""

    PAUSE = 1
    DRAIN = 2
    KILL = 3


class SetSwitch(_Command, frozen=True, tag=60):
    """Scope: the fleet when tenant and job are empty, a tenant when job is empty, else a job."""

    mode: SwitchMode
    actor: str
    reason: str
    tenant: str = ""
    job: str = ""
    # 0: until it is cleared.
    expires_after_ms: int = 0


class ClearSwitch(_Command, frozen=True, tag=61):
    # Of the switch; empty for the fleet's.
    tenant: str
    switch: str
    actor: str
    reason: str


Command = (
    Tick
    | SetLimits
    | OpenSession
    | RenewSessions
    | AttachSession
    | DetachSession
    | CloseSession
    | AcquireLease
    | CancelWait
    | ReleaseLease
    | TransferLease
    | BeginRecord
    | CompleteRecord
    | FailRecord
    | ResolveRecord
    | ApplyJobs
    | DeleteJob
    | RollbackJob
    | SettleDue
    | SetTzdata
    | TriggerJob
    | BackfillJob
    | ServeJobs
    | ClaimRun
    | CheckpointRun
    | CompleteRun
    | FailRun
    | AcknowledgeInterrupt
    | InterruptRun
    | ResolveOccurrence
    | SetSwitch
    | ClearSwitch
)


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """What makes a request exactly-once: the same key with the same command gives the first result again.

    A unary call: origin ``""``, name = the caller's request id, sequence 0; kept for the request retention.
    An operation on a stream: origin = the session id, name ``""``, sequence = the operation's id; kept until
    the client has acknowledged it (``acknowledged``: every sequence up to it may be forgotten) or the session ends.
    """

    tenant: str
    origin: str
    name: str
    sequence: int = 0
    acknowledged: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One command with what the state machine must know about the request that carries it."""

    command: Command
    # None: idempotent by nature (ticks, renewals, attach and detach, cancelled waits).
    key: RequestKey | None = None
    # Not applied when the batch's cluster time is past this; 0 means no bound. The caller has given up by then.
    not_after_ms: int = 0


# ---- results ---------------------------------------------------------------------------------------------------


@unique
class Reason(IntEnum):
    """Why the state machine refused. services/errors.py maps each to one gRPC status."""

    EXPIRED_REQUEST = 1  # the caller's deadline passed before the command was applied
    REQUEST_ID_REUSED = 2  # same request key, another command
    REQUEST_FORGOTTEN = 3  # a stream operation that the client has itself acknowledged
    REQUESTS_FULL = 4
    INVALID_COMMAND = 5  # out of bounds: the net below the services' own validation
    SESSION_NOT_FOUND = 10  # never existed, expired or closed
    SESSION_FOREIGN = 11  # belongs to another tenant
    SESSIONS_FULL = 12
    SESSION_TAKEN_OVER = 13  # an attach that a later stream of the same client has overtaken
    LEASE_HELD = 20
    LEASE_CAPACITY_MISMATCH = 21
    LEASES_FULL = 22
    WAITERS_FULL = 23
    TOKEN_STALE = 24
    TOKEN_UNKNOWN = 25  # larger than any token ever granted for this name: a token from the future
    NOT_HOLDER = 26  # the token is current but belongs to another session
    LOCK_DELAY = 27
    TRANSFER_TARGET_INVALID = 28  # target session unknown, foreign, or already a holder
    WAIT_NOT_FOUND = 29
    RECORD_MISMATCH = 30  # fingerprint differs from the record's
    RECORD_NOT_FOUND = 31
    RECORD_NOT_RUNNING = 32  # complete or fail of a record that has no running attempt
    ATTEMPT_STALE = 33
    FENCE_STALE = 34
    RECORDS_FULL = 35
    RECORD_RESULT_MISMATCH = 36  # completed before with another result
    RECORD_OWNED_BY_OTHER = 37
    JOB_NOT_FOUND = 40
    JOB_REVISION_MISMATCH = 41  # expected another revision, or that there is none
    JOB_REVISION_GONE = 42  # never was, or is no longer kept
    JOBS_FULL = 43
    JOB_BEHIND = 44  # due times of the present schedule are not settled yet: try again in a moment
    OCCURRENCE_NOT_FOUND = 45
    OCCURRENCE_NOT_HELD = 46  # only an occurrence whose outcome is unknown can be resolved
    OCCURRENCES_FULL = 47
    RUN_NOT_FOUND = 48  # never was, or has ended
    RUN_STALE = 49  # the token is not the run's, or the run is another session's
    RUN_INTERRUPTED = 50  # nothing but its end is accepted of an interrupted run
    SWITCHED_OFF = 51  # a switch in force forbids it: pause, drain or kill
    SWITCH_NOT_FOUND = 52
    SWITCH_STALE = 53  # the switch has ended; another one may be in force
    SWITCH_STRONGER = 54  # a stronger one is in force
    SWITCHES_FULL = 55


class _Result(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    pass


class Done(_Result, frozen=True, tag=1):
    """It happened, and there is nothing more to say. ``revision`` is that of the last event so far."""

    revision: int = 0


class Refused(_Result, frozen=True, tag=2):
    """It did not happen. ``facts`` are key and value pairs for the caller (current holder, token, limit, ...)."""

    reason: Reason
    message: str
    facts: tuple[tuple[str, str], ...] = ()
    retry_delay_ms: int = 0


class SessionOpened(_Result, frozen=True, tag=10):
    session: str
    opened_ms: int
    deadline_ms: int
    revision: int


class SessionsRenewed(_Result, frozen=True, tag=11):
    """Deadlines are stamp + ttl now, but for two kinds of sessions of the command.

    ``ended``: no longer live. ``superseded``: live, but another stream carries them, or none, so this did not count.
    """

    ended: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()


class SessionAttached(_Result, frozen=True, tag=12):
    deadline_ms: int
    ttl_ms: int
    revision: int


class LeaseGranted(_Result, frozen=True, tag=20):
    token: int
    already_held: bool
    ttl_ms: int
    revision: int


class LeaseQueued(_Result, frozen=True, tag=21):
    """In line. The grant, or the end of the wait, follows as an event that names the waiter."""

    waiter: str
    deadline_ms: int
    revision: int


class LeaseTransferred(_Result, frozen=True, tag=22):
    token: int
    revision: int


@unique
class BeginOutcome(IntEnum):
    NEW = 1
    IN_PROGRESS = 2
    COMPLETED = 3
    FAILED = 4
    UNKNOWN = 5


class RecordBegun(_Result, frozen=True, tag=30):
    outcome: BeginOutcome
    attempt: int
    # Of the record as it is now; result and error only where the outcome carries them.
    owner: str = ""
    result: bytes = b""
    error: str = ""
    expires_ms: int = 0
    revision: int = 0


class RecordCompleted(_Result, frozen=True, tag=31):
    already_completed: bool
    revision: int


@unique
class JobChange(IntEnum):
    CREATED = 1
    CHANGED = 2
    UNCHANGED = 3


class AppliedJob(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    name: str
    change: JobChange
    revision: int


class JobsApplied(_Result, frozen=True, tag=40):
    jobs: tuple[AppliedJob, ...]
    revision: int


class JobRolledBack(_Result, frozen=True, tag=41):
    from_revision: int
    job_revision: int
    revision: int


class OccurrenceCreated(_Result, frozen=True, tag=42):
    """Of a trigger. It may have been skipped at once, by the overlap policy: its state says so."""

    due_ms: int
    sequence: int
    revision: int


class Backfilled(_Result, frozen=True, tag=43):
    """For each due time: the sequence of what was created, or 0 with why not (succeeded, running, pending)."""

    due: tuple[tuple[int, int, str], ...]
    revision: int


class RunClaimed(_Result, frozen=True, tag=50):
    """``run`` is empty when there is nothing to run."""

    run: str
    token: int
    revision: int


class RunFailed(_Result, frozen=True, tag=51):
    retrying: bool
    retry_in_ms: int
    revision: int


class SwitchIsSet(_Result, frozen=True, tag=60):
    switch: str
    replaced: str
    revision: int


Result = (
    Done
    | Refused
    | SessionOpened
    | SessionsRenewed
    | SessionAttached
    | LeaseGranted
    | LeaseQueued
    | LeaseTransferred
    | RecordBegun
    | RecordCompleted
    | JobsApplied
    | JobRolledBack
    | OccurrenceCreated
    | Backfilled
    | RunClaimed
    | RunFailed
    | SwitchIsSet
)
