"""What a job is: its schedule, its policies, and their bounds. A specification is one frozen value, kept by revision.

The core stores specifications and decides by them, but computes no due times: cron and time zones need tables that
differ between machines. The leader computes due times (scheduling/), and the log carries them.

Like commands, these structs are written to the log and to snapshots: a number is never reused, a field never moved or
removed, only added at the end with a default.
"""

from __future__ import annotations

from enum import IntEnum, unique

import msgspec

JOB_NAME_BYTES_MAX = 128
TEXT_BYTES_MAX = 256  # owner, zone, an expression
URL_BYTES_MAX = 1_024
PAYLOAD_BYTES_MAX = 65_536
CHECKPOINT_BYTES_MAX = 16_384
OUTCOME_BYTES_MAX = 16_384  # the result of a run
INTERVAL_MIN_MS, INTERVAL_MAX_MS = 1_000, 366 * 86_400_000
JITTER_MAX_MS = 86_400_000
CATCH_UP_MAX = 1_000
CATCH_UP_WINDOW_MAX_MS = 31 * 86_400_000
STARTING_DEADLINE_MIN_MS, STARTING_DEADLINE_MAX_MS = 1_000, 31 * 86_400_000
# An occurrence this late is no misfire yet: a leader change costs a second or two.
MISFIRE_THRESHOLD_MS = 10_000
BUFFER_MAX = 1_000
CONCURRENT_MAX = 1_000
TIMEOUT_MIN_MS, TIMEOUT_MAX_MS = 1_000, 7 * 86_400_000
GRACE_MAX_MS = 600_000
ATTEMPTS_MAX = 100
BACKOFF_MAX_MS = 86_400_000
PRIORITY_MIN, PRIORITY_MAX = -100, 100
LABELS_MAX = 16
SELECTOR_TERMS_MAX, SELECTOR_VALUES_MAX = 8, 16
HISTORY_COUNT_MAX = 1_000
HISTORY_AGE_MIN_MS, HISTORY_AGE_MAX_MS = 60_000, 366 * 86_400_000
# The far end of time: the last millisecond of the year 9998, so that adding a day never leaves what calendars know.
WALL_MAX_MS = 253_370_764_799_999


@unique
class ScheduleKind(IntEnum):
    CRON = 1
    INTERVAL = 2
    ONCE = 3
    MANUAL = 4


@unique
class DstPolicy(IntEnum):
    """What becomes of local times that a clock change leaves out (gap) or repeats (fold). Matters to cron only."""

    # As Debian's cron: a fixed-time job in the gap runs once at its end, and in the fold at the first passing only;
    # one with a * in its minute or hour follows elapsed time: only times that exist, each passing of the fold.
    VIXIE = 1
    # Gap: not at all. Fold: the first passing.
    SKIP = 2
    # Gap: not at all. Fold: both passings. Plain matching of the wall clock.
    TWICE = 3
    # Gap: later by the length of the gap. Fold: the first passing.
    SHIFT = 4


class Schedule(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """When a job is due. Times are UTC wall milliseconds."""

    kind: ScheduleKind
    cron: str = ""  # five fields, or @hourly and the like
    # INTERVAL: due at anchor_ms + n * interval_ms, n any integer.
    interval_ms: int = 0
    anchor_ms: int = 0
    at_ms: int = 0  # ONCE
    zone: str = "UTC"  # an IANA name
    dst: DstPolicy = DstPolicy.VIXIE
    # The active window: due times before start_ms, and at end_ms or later, do not exist. 0: open.
    start_ms: int = 0
    end_ms: int = 0


@unique
class Misfire(IntEnum):
    """What becomes of due times that passed more than MISFIRE_THRESHOLD_MS ago when the leader gets to them."""

    SKIP = 1
    LATEST = 2
    ALL = 3  # the latest catch_up_max of them, in order, one after another


@unique
class Overlap(IntEnum):
    """What becomes of an occurrence that comes while another one of the job is unfinished."""

    SKIP = 1
    BUFFER_ONE = 2  # one waits; while it does, later ones are skipped
    BUFFER_ALL = 3  # up to buffer_max wait
    CANCEL_RUNNING = 4  # the running one is interrupted; of those that wait only the newest is left
    ALLOW = 5  # up to concurrent_max run at once, more are skipped


@unique
class Delivery(IntEnum):
    AT_MOST_ONCE = 1  # one attempt, whatever happens
    AT_LEAST_ONCE = 2


@unique
class HolderLoss(IntEnum):
    """What becomes of an occurrence whose run lost its holder (its session ended)."""

    RETRY = 1
    SKIP = 2  # outcome unknown; the schedule goes on
    HOLD_FOR_PERSON = 3  # outcome unknown until somebody resolves it; the schedule goes on


@unique
class Mode(IntEnum):
    LIVE = 1
    SHADOW = 2  # occurrences are computed, claimed and recorded, but not handed out


class Retry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Attempts of one occurrence, the first one counted; those after the loss of a holder, too.

    Attempt n+1 waits initial_ms * multiplier_percent ** (n - 1) / 100 ** (n - 1), at most max_ms, with up to
    jitter_percent of that added. The jitter is derived from the occurrence and the attempt.
    """

    attempts_max: int = 3
    initial_ms: int = 1_000
    multiplier_percent: int = 200
    max_ms: int = 60_000
    jitter_percent: int = 20
    on_failure: bool = True  # the handler failed, and did not say that trying again is useless
    on_timeout: bool = True


class Canary(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``percent`` of the occurrences (chosen by a hash of job and due time) go to workers with the label only, the
    others to workers without it."""

    percent: int
    label: str
    value: str


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    owner: str
    runbook_url: str
    schedule: Schedule
    jitter_ms: int = 0
    misfire: Misfire = Misfire.LATEST
    catch_up_max: int = 0  # for Misfire.ALL, required there
    catch_up_window_ms: int = 3_600_000  # older due times are missed
    starting_deadline_ms: int = 3_600_000  # after its due time an occurrence starts within this, or is missed
    overlap: Overlap = Overlap.SKIP
    buffer_max: int = 100
    concurrent_max: int = 1
    timeout_ms: int = 3_600_000  # of one run
    interrupt_grace_ms: int = 10_000  # from an interrupt until the run counts as ended without an acknowledgement
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    on_holder_loss: HolderLoss = HolderLoss.RETRY
    retry: Retry = Retry()
    priority: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    # All terms must fit: key and accepted values. Keys agent, version and host are of the session itself, every
    # other key is one of its labels.
    selector: tuple[tuple[str, tuple[str, ...]], ...] = ()
    payload: bytes = b""
    estimated_cost_micros: int = 0  # of one run, in millionths of the budget's unit
    mode: Mode = Mode.LIVE
    canary: Canary | None = None
    history_count: int = 100
    history_age_ms: int = 30 * 86_400_000
    description: str = ""
