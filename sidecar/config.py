"""Settings of a sidecar, from flags, environment (``TENURE_*``), a TOML file and defaults, in that order.

Every setting has one name: ``heartbeat_ms`` in the file, ``TENURE_HEARTBEAT_MS`` in the environment, ``--heartbeat-ms``
as a flag. The unit comes last. ``load`` reports every mistake at once, unknown names included. There are no secrets
here: keys are files, and only their paths are settings.
"""

from __future__ import annotations

import grp
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from sidecar.core.commands import TENANT_BYTES_MAX, Limits

PREFIX = "TENURE_"
CLUSTER_SIZES = (1, 3, 5, 7)
# The kernel's limit is 108 with the final zero, and the socket is made under a slightly longer name first.
SOCKET_PATH_BYTES_MAX = 100
# Read by other programs in the same environment: the client, `tenure lock`, this loader.
OTHER_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "CONFIG",
        "ADDRESS",
        "TENANT",
        "ACTOR",
        "LEASE",
        "FENCING_TOKEN",
        "TLS_CA",
        "TLS_CERT",
        "TLS_KEY",
        "AGENT",
        "LOG",
        # Of a program that works for a job.
        "RUN_ID",
        "JOB",
        "DUE",
        "DUE_MS",
        "ATTEMPT",
        "IDEMPOTENCY_KEY",
        "DEADLINE_MS",
        "TRACEPARENT",
        "CHECKPOINT_FILE",
        "RESULT_FILE",
    )
)
# What Kubernetes adds to every container when a service is called "tenure" or "tenure-...".
_SERVICE_LINK = re.compile(r"TENURE_(.+_)?(SERVICE_(HOST|PORT)(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENANT = re.compile(rf"[A-Za-z0-9._-]{{1,{TENANT_BYTES_MAX}}}")

ID_ALLOWED = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
ADDRESS_ALLOWED = "host:port, an IPv6 host in brackets"


# ---- values --------------------------------------------------------------------------------------------------------


def split_address(address: str) -> tuple[str, int]:
    """Host and port; ValueError says what is allowed."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535 or any(c.isspace() for c in host):
        raise ValueError(f"must be {ADDRESS_ALLOWED}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parse_peers(value: object) -> object:
    if not isinstance(value, str):
        return value
    peers: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        node, equals, address = part.partition("=")
        if not equals:
            raise ValueError("must be a list like n1=host:port,n2=host:port,n3=host:port")
        if node in peers:
            raise ValueError(f"names the node {node} twice")
        peers[node] = address
    return peers


def _parse_list(value: object) -> object:
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


def _parse_octal(value: object) -> object:
    if isinstance(value, str):
        if not re.fullmatch(r"0?[0-7]{3}", value):
            raise ValueError("must be an octal mode like 0660")
        return int(value, 8)
    return value


def _check_address(value: str) -> str:
    if value:
        split_address(value)
    return value


def _check_id(value: str) -> str:
    if value and not _ID.fullmatch(value):
        raise ValueError(f"must be {ID_ALLOWED}")
    return value


def _check_peers(peers: dict[str, str]) -> dict[str, str]:
    for node, address in peers.items():
        _check_id(node)
        if split_address(address)[1] == 0:
            raise ValueError(f"the address of {node} needs a port from 1 to 65535")
    return peers


def _check_tenants(tenants: tuple[str, ...]) -> tuple[str, ...]:
    for tenant in tenants:
        if not _TENANT.fullmatch(tenant):
            allowed = f"1 to {TENANT_BYTES_MAX} letters, digits, '.', '_' or '-'"
            raise ValueError(f"each tenant must be {allowed}; {tenant!r} is not")
    if not tenants:
        raise ValueError("must name one tenant or more")
    return tuple(dict.fromkeys(tenants))


def _empty_is_none(value: object) -> object:
    return None if value == "" else value


Id = Annotated[str, AfterValidator(_check_id)]
Address = Annotated[str, AfterValidator(_check_address)]
File = Annotated[Path | None, BeforeValidator(_empty_is_none)]
Peers = Annotated[dict[str, str], NoDecode, BeforeValidator(_parse_peers), AfterValidator(_check_peers)]
Tenants = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_list), AfterValidator(_check_tenants)]
Mode = Annotated[int, BeforeValidator(_parse_octal), PlainSerializer(lambda mode: f"{mode:04o}")]


def _number(default: int, least: int, most: int, description: str) -> Any:
    return Field(default, ge=least, le=most, description=description)


def _limit(name: str, most: int = 1 << 40) -> Any:
    return Field(getattr(Limits(), name), ge=1, le=most, description="bound of the replicated state; same on all nodes")


# ---- the settings --------------------------------------------------------------------------------------------------


class Settings(BaseSettings):
    """One sidecar's settings. Constructed directly it checks single values only; ``load`` checks everything."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    # Who this is.
    node_id: Id = Field(default="", description="this node, for ever; one of peers")
    cluster_id: Id = Field(
        default="", description="the same on all nodes; stores and peers of another cluster are refused"
    )
    peers: Peers = Field(default_factory=dict, description="all voters, this one included: n1=host:port,n2=...")
    bootstrap: bool = Field(
        default=False, description="give birth to a new cluster; ignored when this node has history"
    )
    data_dir: Path = Field(default=Path("/var/lib/tenure"), description="folder of log and snapshots")
    # Peers.
    peer_listen: Address = Field(default="", description="where peers reach this node; default: its own entry in peers")
    insecure: bool = Field(default=False, description="allow plaintext between peers and for agents, on loopback only")
    peer_tls_cert: File = Field(default=None, description="certificate of this node, PEM")
    peer_tls_key: File = Field(default=None, description="its key, PEM")
    peer_tls_ca: File = Field(default=None, description="authority that signs the nodes of this cluster, PEM")
    # Agents.
    socket: str = Field(default="/run/tenure/tenure.sock", description="unix socket for agents; empty for none")
    socket_mode: Mode = Field(default=0o660, description="octal mode of the socket")
    socket_group: str = Field(
        default="", description="group of the socket, by name or number; empty keeps the process's own"
    )
    grpc_listen: Address = Field(default="", description="TCP address for agents; empty for none")
    grpc_tls_cert: File = Field(default=None, description="certificate for grpc_listen, PEM")
    grpc_tls_key: File = Field(default=None, description="its key, PEM")
    grpc_tls_client_ca: File = Field(
        default=None, description="authority of client certificates, PEM; unset asks for none"
    )
    http_listen: Address = Field(default="127.0.0.1:8321", description="metrics and health over HTTP; empty for none")
    tenants: Tenants = Field(default=("default",), description="tenants that agents may name")
    require_deadline: bool = Field(default=True, description="refuse requests without a deadline")
    # Timing.
    heartbeat_ms: int = _number(100, 10, 10_000, "between heartbeats of the leader")
    election_min_ms: int = _number(800, 50, 60_000, "silence of the leader before an election, shortest")
    election_max_ms: int = _number(1_600, 60, 120_000, "silence of the leader before an election, longest")
    renewal_window_ms: int = _number(100, 0, 1_000, "renewals of this long travel in one log entry")
    drain_timeout_ms: int = _number(25_000, 0, 600_000, "how long agents are served on after SIGTERM")
    # Overload.
    inflight_max: int = _number(10_000, 1, 1_000_000, "requests without an answer")
    queue_max: int = _number(10_000, 1, 1_000_000, "requests that wait for the leader's log")
    rpcs_max: int = _number(20_000, 1, 1_000_000, "open gRPC calls and streams")
    watchers_max: int = _number(1_000, 1, 100_000, "open watches")
    shed_latency_ms: int = _number(1_000, 10, 60_000, "average time to commit from which new work is refused")
    shed_lag_ms: int = _number(200, 10, 10_000, "lateness of the event loop from which new work is refused")
    # Log.
    snapshot_entries: int = _number(50_000, 100, 10_000_000, "log entries after which a snapshot is taken")
    snapshot_bytes: int = _number(64 << 20, 1 << 20, 1 << 34, "log size after which a snapshot is taken")
    entry_bytes_max: int = _number(1 << 20, 256 << 10, 2 << 20, "size of one log entry, a batch of requests")
    disk_reserve_bytes: int = _number(64 << 20, 0, 1 << 40, "free space below which this node takes no writes")
    # Watching over it.
    skew_max_ms: int = _number(1_000, 1, 3_600_000, "difference of wall clocks from which the leader warns")
    schedule_skew_max_ms: int = _number(
        10_000, 100, 3_600_000, "difference from most nodes' wall clocks at which a leader fires no schedules"
    )
    schedule_lag_max_ms: int = _number(
        30_000, 1_000, 3_600_000, "lateness of schedules at which the leader is not ready"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severity that is logged"
    )
    log_format: Literal["json", "console"] = Field(default="json", description="form of the log lines")
    # Bounds of the replicated state.
    limits_sessions_max: int = _limit("sessions_max")
    limits_sessions_per_tenant_max: int = _limit("sessions_per_tenant_max")
    limits_leases_max: int = _limit("leases_max")
    limits_waiters_per_lease_max: int = _limit("waiters_per_lease_max")
    limits_waiters_max: int = _limit("waiters_max")
    limits_records_max: int = _limit("records_max")
    limits_record_bytes_max: int = _limit("record_bytes_max")
    limits_requests_max: int = _limit("requests_max")
    limits_stream_requests_max: int = _limit("stream_requests_max")
    limits_request_retention_ms: int = _limit("request_retention_ms", 86_400_000)
    limits_request_retention_min_ms: int = _limit("request_retention_min_ms", 86_400_000)
    limits_events_max: int = _limit("events_max", 1_000_000)
    limits_jobs_max: int = _limit("jobs_max", 1_000_000)
    limits_job_bytes_max: int = _limit("job_bytes_max")
    limits_job_revisions_max: int = _limit("job_revisions_max", 1_000)
    limits_occurrences_max: int = _limit("occurrences_max")
    limits_starts_per_second_max: int = _limit("starts_per_second_max", 10_000)
    limits_switches_max: int = _limit("switches_max", 1_000_000)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: ``load`` reads the other sources itself, to know where each value came from."""
        return (init_settings,)

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, f"limits_{name}") for name in Limits.__struct_fields__})

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """The other voters."""
        return tuple(node for node in self.peers if node != self.node_id)

    @property
    def peers_plaintext(self) -> bool:
        """``insecure`` allows it; certificates, when given, are used all the same."""
        return self.insecure and not (self.peer_tls_cert or self.peer_tls_key or self.peer_tls_ca)

    @property
    def peer_bind(self) -> str:
        """Where this node listens for its peers."""
        return self.peer_listen or self.peers.get(self.node_id, "")


# ---- loading -------------------------------------------------------------------------------------------------------

FLAG, ENVIRONMENT, FILE, DEFAULT = "flag", "environment", "file", "default"


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake: which setting, its value, where that came from, and what is allowed."""

    setting: str
    value: str
    source: str
    allowed: str

    def __str__(self) -> str:
        where = {FLAG: flag(self.setting), ENVIRONMENT: variable(self.setting), FILE: f"key {self.setting}"}
        if self.source == DEFAULT:
            ways = f"set {variable(self.setting)}, {flag(self.setting)} or the key {self.setting} in the file"
            return f"{self.setting} is {self.value}: {self.allowed} ({ways})"
        name = self.setting if self.source not in where else f"{where[self.source]} ({self.source})"
        return f"{name} is {self.value}: {self.allowed}"


class ConfigError(Exception):
    """Every mistake in the settings, in one readable list."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
        super().__init__(f"{count} wrong:\n" + "\n".join(f"  * {problem}" for problem in problems))


@dataclass(frozen=True)
class Loaded:
    settings: Settings
    sources: Mapping[str, str]  # setting -> flag, environment, file or default
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Effective:
    """One line of ``tenure config check``."""

    setting: str
    value: str
    source: str
    variable: str
    flag: str
    description: str


def effective(loaded: Loaded) -> list[Effective]:
    """All settings as they are in force, with the source of each. None of them is a secret."""
    values = loaded.settings.model_dump()
    return [
        Effective(
            setting=name,
            value=shown(values[name]),
            source=loaded.sources.get(name, DEFAULT),
            variable=variable(name),
            flag=flag(name),
            description=info.description or "",
        )
        for name, info in Settings.model_fields.items()
    ]


def shown_defaults() -> dict[str, str]:
    """The default of every setting, as one would write it."""
    return {name: shown(value) for name, value in Settings.model_construct().model_dump().items()}


def shown(value: object) -> str:
    """A value as one would write it in the environment."""
    match value:
        case None | "":
            return "(none)"
        case bool():
            return "true" if value else "false"
        case dict():
            return ",".join(f"{key}={item}" for key, item in value.items()) or "(none)"
        case tuple() | list():
            return ",".join(str(item) for item in value) or "(none)"
    return str(value)


def load(flags: Mapping[str, object] | None = None, file: Path | None = None) -> Loaded:
    """Settings from flags (None counts as not given), the environment, the file (``file`` or TENURE_CONFIG), defaults.

    Raises ConfigError with every mistake that can be found."""
    file = file or (Path(os.environ[f"{PREFIX}CONFIG"]) if os.environ.get(f"{PREFIX}CONFIG") else None)
    problems: list[Problem] = []
    from_file = dict(_read_file(file, problems)) if file else {}
    from_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    problems += [*_unknown(from_file, FILE), *_unknown(from_flags, FLAG), *unknown_variables(os.environ)]
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for source, found in ((FILE, from_file), (ENVIRONMENT, EnvSettingsSource(Settings)()), (FLAG, from_flags)):
        for name, value in found.items():
            if name in Settings.model_fields:
                values[name] = value
                sources[name] = source
    settings, wrong = _validate(values, sources)
    problems += wrong
    spoilt = {problem.setting for problem in wrong}
    for name, value, allowed in _cross_check(settings, spoilt):
        problems.append(Problem(setting=name, value=value, source=sources.get(name, DEFAULT), allowed=allowed))
    if problems:
        raise ConfigError(problems)
    return Loaded(settings, sources, file)


def _read_file(file: Path, problems: list[Problem]) -> Mapping[str, object]:
    try:
        with file.open("rb") as opened:
            tomllib.load(opened)
        return TomlConfigSettingsSource(Settings, file)()
    except OSError as error:
        allowed = f"must be a readable TOML file ({error.strerror})"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        allowed = f"must be TOML ({error})"
    problems.append(Problem(setting="config", value=str(file), source="the settings file", allowed=allowed))
    return {}


def _unknown(found: Mapping[str, object], source: str) -> Iterator[Problem]:
    for name, value in found.items():
        if name not in Settings.model_fields:
            yield Problem(
                setting=name, value=shown(value), source=source, allowed=_no_such(name, Settings.model_fields)
            )


def unknown_variables(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Variables that look like ours and are read by no program of ours."""
    known = {variable(name) for name in Settings.model_fields} | OTHER_VARIABLES
    for name in sorted(environment):
        upper = name.upper()
        if upper.startswith(PREFIX) and upper not in known and not _SERVICE_LINK.fullmatch(upper):
            allowed = _no_such(upper, known)
            value = shown(environment[name])
            yield Problem(setting=upper.removeprefix(PREFIX).lower(), value=value, source=ENVIRONMENT, allowed=allowed)


def _no_such(name: str, known: Mapping[str, object] | set[str]) -> str:
    close = get_close_matches(name, sorted(known), 1, cutoff=0.7)
    return "there is no such setting" + (f"; did you mean {close[0]}?" if close else "")


def _validate(values: dict[str, object], sources: Mapping[str, str]) -> tuple[Settings, list[Problem]]:
    """The settings, with defaults in place of what is wrong, and what is wrong."""
    try:
        return Settings(**values), []  # type: ignore[arg-type]
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            allowed = _allowed(name, str(detail["msg"]))
            problems[name] = Problem(setting=name, value=shown(values[name]), source=sources[name], allowed=allowed)
    good = {name: value for name, value in values.items() if name not in problems}
    return Settings(**good), list(problems.values())  # type: ignore[arg-type]


def _allowed(name: str, message: str) -> str:
    info = Settings.model_fields[name]
    bounds = {type(bound): bound for bound in info.metadata if isinstance(bound, Ge | Le)}
    if len(bounds) == 2:
        return f"must be a whole number from {bounds[Ge].ge} to {bounds[Le].le}"  # type: ignore[union-attr]
    if info.annotation is bool:
        return "must be true or false"
    if choices := [choice for choice in get_args(info.annotation) if isinstance(choice, str)]:
        return f"must be one of {', '.join(choices)}"
    return message.removeprefix("Value error, ")


# ---- checks across settings, and of the machine --------------------------------------------------------------------

Mistake = tuple[str, str, str]  # setting, value, allowed


@dataclass
class _Checks:
    """Collects mistakes; a check that needs a setting which is wrong by itself is left out."""

    settings: Settings
    spoilt: set[str]
    mistakes: list[Mistake] = field(default_factory=list)

    def fine(self, *names: str) -> bool:
        return not self.spoilt.intersection(names)

    def need(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            self.mistakes.append((name, shown(self.settings.model_dump()[name]), allowed))


def _cross_check(settings: Settings, spoilt: set[str]) -> list[Mistake]:
    checks = _Checks(settings, spoilt)
    for check in (
        _check_identity,
        _check_timing,
        _check_peer_security,
        _check_agent_side,
        _check_limits,
        _check_folders,
    ):
        check(settings, checks)
    return checks.mistakes


def _check_identity(s: Settings, checks: _Checks) -> None:
    if checks.fine("node_id"):
        checks.need(bool(s.node_id), "node_id", "must be given")
    if checks.fine("cluster_id"):
        checks.need(bool(s.cluster_id), "cluster_id", "must be given")
    if not checks.fine("peers"):
        return
    checks.need(len(s.peers) in CLUSTER_SIZES, "peers", f"must name {_either(CLUSTER_SIZES)} nodes, not {len(s.peers)}")
    checks.need(len(set(s.peers.values())) == len(s.peers), "peers", "must give each node an address of its own")
    if checks.fine("node_id") and s.node_id and s.peers:
        checks.need(s.node_id in s.peers, "peers", f"must include this node, {s.node_id}")


def _either(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}"


def _check_timing(s: Settings, checks: _Checks) -> None:
    if checks.fine("heartbeat_ms", "election_min_ms"):
        beats = 3 * s.heartbeat_ms
        checks.need(s.election_min_ms > beats, "election_min_ms", f"must be more than 3 * heartbeat_ms = {beats}")
    if checks.fine("election_min_ms", "election_max_ms"):
        allowed = f"must be more than election_min_ms = {s.election_min_ms}"
        checks.need(s.election_max_ms > s.election_min_ms, "election_max_ms", allowed)
    if checks.fine("renewal_window_ms", "election_min_ms"):
        allowed = f"must be at most election_min_ms = {s.election_min_ms}"
        checks.need(s.renewal_window_ms <= s.election_min_ms, "renewal_window_ms", allowed)
    if checks.fine("shed_lag_ms", "election_min_ms"):
        allowed = f"must be less than election_min_ms = {s.election_min_ms}, or heartbeats are late before it acts"
        checks.need(s.shed_lag_ms < s.election_min_ms, "shed_lag_ms", allowed)


def _check_peer_security(s: Settings, checks: _Checks) -> None:
    tls = ("peer_tls_cert", "peer_tls_key", "peer_tls_ca")
    if not checks.fine("peers", "peer_listen", "insecure", *tls) or len(s.peers) <= 1:
        return
    if s.peers_plaintext:
        for node, address in s.peers.items():
            loopback = is_loopback(split_address(address)[0])
            checks.need(loopback, "insecure", f"plaintext is for loopback only, and the address of {node} is {address}")
        if s.peer_listen:
            allowed = "must be a loopback address when peers talk plaintext"
            checks.need(is_loopback(split_address(s.peer_listen)[0]), "peer_listen", allowed)
        return
    for name in tls:
        checks.need(getattr(s, name) is not None, name, "must be given (or insecure = true, on loopback only)")
        _check_file(s, checks, name)


def _check_agent_side(s: Settings, checks: _Checks) -> None:
    if checks.fine("socket", "grpc_listen"):
        checks.need(bool(s.socket or s.grpc_listen), "socket", "must be given, or grpc_listen: agents need a way in")
    if s.socket and checks.fine("socket"):
        size = len(os.fsencode(s.socket))
        allowed = f"must be at most {SOCKET_PATH_BYTES_MAX} bytes long, not {size}"
        checks.need(size <= SOCKET_PATH_BYTES_MAX, "socket", allowed)
        checks.need(Path(s.socket).is_absolute(), "socket", "must be an absolute path")
    if s.socket_group:
        checks.need(group_id(s.socket_group) is not None, "socket_group", "must be a group of this machine")
    for name in ("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca"):
        _check_file(s, checks, name)
    if checks.fine("grpc_tls_cert", "grpc_tls_key"):
        both = (s.grpc_tls_cert is None) == (s.grpc_tls_key is None)
        checks.need(both, "grpc_tls_cert", "grpc_tls_cert and grpc_tls_key go together")
    if s.grpc_listen and checks.fine("grpc_listen", "insecure", "grpc_tls_cert") and s.grpc_tls_cert is None:
        _check_plaintext(s, checks)


def _check_plaintext(s: Settings, checks: _Checks) -> None:
    if not is_loopback(split_address(s.grpc_listen)[0]):
        checks.need(False, "grpc_listen", "beyond loopback needs grpc_tls_cert and grpc_tls_key: plaintext is refused")
    else:
        checks.need(s.insecure, "grpc_listen", "needs grpc_tls_cert and grpc_tls_key, or insecure = true on loopback")


def _check_limits(s: Settings, checks: _Checks) -> None:
    if checks.fine("limits_request_retention_ms", "limits_request_retention_min_ms"):
        allowed = f"must be at most limits_request_retention_ms = {s.limits_request_retention_ms}"
        within = s.limits_request_retention_min_ms <= s.limits_request_retention_ms
        checks.need(within, "limits_request_retention_min_ms", allowed)


def _check_folders(s: Settings, checks: _Checks) -> None:
    if checks.fine("data_dir"):
        _check_folder(checks, "data_dir", s.data_dir)
    if s.socket and checks.fine("socket") and Path(s.socket).is_absolute():
        _check_folder(checks, "socket", Path(s.socket).parent)


def _check_folder(checks: _Checks, name: str, folder: Path) -> None:
    """It exists or can be made, and can be written to."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        checks.need(False, name, f"{existing} is not a folder")
    else:
        writable = os.access(existing, os.W_OK | os.X_OK)
        checks.need(writable, name, f"this user (uid {os.geteuid()}) cannot write to the folder {existing}")


def _check_file(s: Settings, checks: _Checks, name: str) -> None:
    path: Path | None = getattr(s, name)
    if path is not None and checks.fine(name):
        checks.need(path.is_file() and os.access(path, os.R_OK), name, "must be a file that this user can read")


def group_id(group: str) -> int | None:
    """The number of a group given by name or number; None when there is no such group."""
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None
