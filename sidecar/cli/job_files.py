"""Files of jobs: YAML to job definitions. Everything that is wrong is reported at once, each with its file and line.

A document has ``jobs``, a list; ``tenant``, for those that do not name theirs; and keys that start with ``x-``, which
hold anchors and mean nothing. A job has the fields of ``JobSpec`` by their names in the API, and

* durations also without ``_ms``: ``timeout: 10m`` is ``timeout_ms: 600000``;
* times also without ``_wall_ms``, in RFC 3339, or as local time of the zone that the schedule names:
  ``once: 2026-03-29 09:00``;
* ``schedule: "0 9 * * *"``, ``schedule: every 10m`` and ``schedule: manual`` beside the mapping;
* ``payload`` as text, ``payload_json`` as any value, ``payload_file`` beside the file, or ``payload_base64``;
* ``labels`` and ``selector`` as mappings.

What only the sidecar refuses (a mix of policies, say) is reported with its line, too: see ``Located.line_of``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sidecar.cli import shown, times, yaml_nodes
from sidecar.cli.failures import USAGE, CliError
from sidecar.cli.job_fields import Fields, Problem, Report, forms_of, hint, listed
from sidecar.cli.yaml_nodes import Entry, Items, Mapping, Node, Text, YamlError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tenure.v1 import job_pb2

    from sidecar.core.specification import Schedule
    from sidecar.scheduling.schedules import Problem as ScheduleProblem

STDIN = "-"
PAYLOAD_BYTES_MAX = 65_536
PROBLEMS_SHOWN_MAX = 50
PAYLOADS = ("payload", "payload_json", "payload_file", "payload_base64")
OWN_KEYS = ("tenant", "name", "expected_revision")
REQUIRED = ("owner", "runbook_url", "schedule")
DOCUMENT_KEYS = ("jobs", "tenant")
# What ``every`` and ``anchor`` beside the zone mean: an interval.
FLAT_INTERVAL = ("every", "every_ms", "anchor", "anchor_wall_ms")
KINDS = ("cron", "interval", "once", "once_wall_ms", "manual")
# Fields of a compiled schedule's problems, and what they are called in a file.
SCHEDULE_FIELDS = {
    "interval_ms": "interval.every_ms", "anchor_ms": "interval.anchor_wall_ms", "at_ms": "once_wall_ms",
    "start_ms": "start_wall_ms", "end_ms": "end_wall_ms",
}  # fmt: skip
# What is judged by another field as well, and so not where one of the job could not be read.
TOGETHER = ("catch_up_max", "concurrent_max", "jitter_ms", "on_holder_loss", "retry.attempts_max")
_ENUM = re.compile(r"\b(?:DST_POLICY|MISFIRE_POLICY|OVERLAP_POLICY|HOLDER_LOSS_POLICY|DELIVERY|JOB_MODE)_([A-Z_]+)")
_MS = re.compile(r"\S*?(_wall)?_ms is ")
_MS_NAME = re.compile(r"\b([a-z]\w*?)(?:_wall)?_ms\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d+\b")
_RANGE = re.compile(r"-?\d+ to -?\d+")


@dataclass
class Located:
    """A definition, and the lines of its fields by their paths in the specification: ``schedule.cron``, say."""

    definition: job_pb2.JobDefinition
    file: str
    line: int
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.definition.tenant}/{self.definition.name}"

    def line_of(self, path: str) -> int:
        """The line of a field, or of the next one around it that has a line."""
        while path.rpartition(".")[0] and path not in self.lines:
            path = path.rpartition(".")[0]
        return self.lines.get(path.partition("[")[0], self.line)

    def at(self, path: str) -> str:
        return f"{self.file}:{self.line_of(path)}"


def load(files: Sequence[str], tenant: str) -> list[Located]:
    """The jobs of these files (``-``: standard input). Raises CliError that lists everything that is wrong."""
    found: list[Located] = []
    problems: list[Problem] = []
    if files.count(STDIN) > 1:
        raise CliError("standard input can be read once: -f - stands there twice", reason="USAGE", status=USAGE)
    for file in files:
        reader = Reader(file, tenant)
        found += reader.read(content_of(file))
        problems += reader.problems
    problems += twice(found)
    if problems:
        refuse(problems, files)
    if not found:
        todo = "a file of jobs has 'jobs:', a list; 'tenure job show JOB -o yaml' prints one"
        raise CliError(f"no jobs in {listed(files)}", reason="JOB_FILE", status=USAGE, todo=todo)
    return found


def label_of(file: str) -> str:
    """What it is called in messages."""
    return "stdin" if file == STDIN else file


def content_of(file: str) -> bytes:
    try:
        if file == STDIN:
            return sys.stdin.buffer.read(yaml_nodes.BYTES_MAX + 1)
        with Path(file).open("rb") as opened:
            return opened.read(yaml_nodes.BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", reason="USAGE", status=USAGE) from error


def twice(jobs: Iterable[Located]) -> list[Problem]:
    first: dict[str, Located] = {}
    problems = []
    for job in jobs:
        before = first.setdefault(job.name, job)
        if before is not job and job.definition.name:
            text = f"{job.name} stands there twice, first at {before.file}:{before.line}"
            problems.append(Problem(job.file, job.line, text))
    return problems


def refuse(problems: Iterable[Problem], files: Sequence[str]) -> NoReturn:
    """In the order of the files and their lines."""
    order = {label_of(file): number for number, file in enumerate(files)}
    problems = sorted(problems, key=lambda problem: (order[problem.file], problem.line))
    lines = [str(problem) for problem in problems[:PROBLEMS_SHOWN_MAX]]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    said = f"{shown.counted(len(problems), 'mistake')}, nothing is applied"
    raise CliError("\n  ".join([said, *lines]), reason="JOB_FILE", status=USAGE)


class Reader:
    """One file. What is wrong is collected in ``problems``; what cannot be read counts as not there."""

    def __init__(self, file: str, tenant: str) -> None:
        self._report = Report(label_of(file))
        self._tenant = tenant
        self._folder = Path() if file == STDIN else Path(file).parent

    @property
    def problems(self) -> list[Problem]:
        return sorted(self._report.problems, key=lambda problem: problem.line)

    def read(self, content: bytes) -> list[Located]:
        documents, wrong = yaml_nodes.documents(content)
        for error in wrong:
            self._report.wrong(error.line, str(error))
        return [job for document in documents for job in self._document(document)]

    def _document(self, document: Node) -> list[Located]:
        wrong = self._report.wrong
        if not isinstance(document, Mapping) or "jobs" not in document.entries:
            wrong(document.line, "a document is a mapping with 'jobs:', a list of jobs")
            return []
        for key, entry in document.entries.items():
            if key not in DOCUMENT_KEYS and not key.startswith("x-"):
                wrong(entry.line, f"{key!r} is no key of a document{hint(key, DOCUMENT_KEYS, {})}")
        tenant = self._tenant
        if "tenant" in document.entries:
            tenant = Fields(self._report, {}).text(document.entries["tenant"], "tenant") or tenant
        jobs = document.entries["jobs"].value
        if not isinstance(jobs, Items):
            wrong(jobs.line, "jobs must be a list: each job starts with '- name: ...'")
            return []
        return [job for each in jobs.items if (job := self._job(each, tenant)) is not None]

    def _job(self, node: Node, tenant: str) -> Located | None:
        from tenure.v1 import job_pb2

        if not isinstance(node, Mapping):
            self._report.wrong(node.line, "a job is a mapping: name, owner, runbook_url, schedule, ...")
            return None
        job = Located(job_pb2.JobDefinition(tenant=tenant), self._report.file, node.line)
        entries = dict(node.entries)
        before = len(self._report.problems)
        named: dict[str, Entry] = {key: entries.pop(key) for key in OWN_KEYS if key in entries}
        self._named(job, named)
        self._payload(job, {key: entries.pop(key) for key in PAYLOADS if key in entries})
        for key, read in (("labels", self._labels), ("selector", self._selector), ("schedule", self._schedule)):
            if key in entries:
                job.lines[key] = entries[key].line
                read(job, entries.pop(key))
        fields = Fields(self._report, job.lines)
        fields.fill(job.definition.spec, entries, "", "a job", elsewhere())
        for key in REQUIRED:
            if key not in node.entries:
                self._report.wrong(node.line, f"{job.definition.name or 'this job'} has no {key}; it is required")
        self._check(job, self._report.problems[before:])
        return job

    def _named(self, job: Located, entries: dict[str, Entry]) -> None:
        Fields(self._report, job.lines).fill(job.definition, entries, "", "a job", {})
        if "name" not in entries:
            self._report.wrong(job.line, "this job has no name; it is required")
        tenant, slash, name = job.definition.name.partition("/")
        if slash:
            job.definition.tenant, job.definition.name = tenant, name

    def _labels(self, job: Located, entry: Entry) -> None:
        if not isinstance(entry.value, Mapping):
            self._report.wrong(entry.line, "labels must be a mapping of names to text")
            return
        fields = Fields(self._report, job.lines)
        for name, each in entry.value.entries.items():
            text = fields.text(each, f"label {name}")
            if text is not None:
                job.definition.spec.labels[name] = text

    def _selector(self, job: Located, entry: Entry) -> None:
        """A mapping; or a list of terms, which can say a key twice."""
        if isinstance(entry.value, Mapping):
            terms = list(entry.value.entries.items())
        elif isinstance(entry.value, Items):
            terms = [term for item in entry.value.items if (term := self._term(item)) is not None]
        else:
            self._report.wrong(entry.line, "selector must be a mapping: agent, version, host or a label to its values")
            return
        fields = Fields(self._report, job.lines)
        for key, each in terms:
            nodes = each.value.items if isinstance(each.value, Items) else [each.value]
            values = [fields.text(Entry(node.line, node), f"selector {key}") for node in nodes]
            job.definition.spec.selector.add(key=key, values=[text for text in values if text is not None])

    def _term(self, item: Node) -> tuple[str, Entry] | None:
        entries = item.entries if isinstance(item, Mapping) else {}
        if set(entries) != {"key", "values"}:
            self._report.wrong(item.line, "a term of a selector is a mapping of key and values")
            return None
        key = Fields(self._report, {}).text(entries["key"], "key")
        return None if key is None else (key, entries["values"])

    def _payload(self, job: Located, given: dict[str, Entry]) -> None:
        for key in list(given)[1:]:
            self._report.wrong(given[key].line, f"{next(iter(given))} and {key} are the same; say one of them")
        for key, entry in list(given.items())[:1]:
            job.lines["payload"] = entry.line
            try:
                payload = self._bytes(key, entry)
            except YamlError as error:
                self._report.wrong(error.line, f"{key}: {error}")
                return
            if len(payload) > PAYLOAD_BYTES_MAX:
                text = f"{key} has {len(payload)} bytes or more; allowed: at most {PAYLOAD_BYTES_MAX}"
                self._report.wrong(entry.line, text)
            job.definition.spec.payload = payload

    def _bytes(self, key: str, entry: Entry) -> bytes:
        if key == "payload_json":
            return compact_json(yaml_nodes.value(entry.value))
        if not isinstance(entry.value, Text):
            raise YamlError(entry.line, "it must be text; payload_json takes mappings and lists")
        text = entry.value.text
        if key == "payload":
            return text.encode()
        if key == "payload_base64":
            try:
                return base64.b64decode("".join(text.split()), validate=True)
            except (binascii.Error, ValueError) as error:
                raise YamlError(entry.line, "not base64") from error
        try:
            with (self._folder / text).open("rb") as file:
                return file.read(PAYLOAD_BYTES_MAX + 1)
        except (OSError, ValueError) as error:
            raise YamlError(entry.line, f"{text}: {getattr(error, 'strerror', error)}") from error

    # ---- the schedule

    def _schedule(self, job: Located, entry: Entry) -> None:
        if isinstance(entry.value, Mapping):
            self._mapping(job, dict(entry.value.entries))
        else:
            self._shorthand(job, entry)

    def _shorthand(self, job: Located, entry: Entry) -> None:
        fields, schedule = Fields(self._report, job.lines), job.definition.spec.schedule
        text = fields.plain(entry, "schedule", "a cron expression, 'every 10m', 'manual' or a mapping")
        if text is None:
            return
        first, _, rest = text.strip().partition(" ")
        if times.is_duration(text.strip()):
            self._report.wrong(entry.line, f"schedule is {text!r}; did you mean 'every {text.strip()}'?")
        elif text.strip() == "manual":
            schedule.manual.SetInParent()
        elif first == "every":
            every = fields.duration(Entry(entry.line, Text(entry.line, text=rest.strip())), "every")
            schedule.interval.every_ms = every or 0
        else:
            schedule.cron = text

    def _mapping(self, job: Located, entries: dict[str, Entry]) -> None:
        schedule = job.definition.spec.schedule
        line = job.lines["schedule"]
        flat = {key: entries.pop(key) for key in FLAT_INTERVAL if key in entries}
        kinds = [key for key in entries if key in KINDS] + list(flat)[:1]
        if len(kinds) != 1:
            said = f"not {listed(kinds)}" if kinds else "this one has none of them"
            self._report.wrong(line, f"a schedule has one of cron, every, once and manual; {said}")
            return
        manual = entries.get("manual")
        if manual is not None and isinstance(manual.value, Text):
            del entries["manual"]
            if Fields(self._report, {}).truth(manual, "manual") is False:
                self._report.wrong(manual.line, "manual is true, or not there")
            schedule.manual.SetInParent()
        zone = Fields(self._report, {}).text(entries["zone"], "zone") if "zone" in entries else None
        fields = Fields(self._report, job.lines, zone)
        fields.fill(schedule, entries, "schedule.", "a schedule", {})
        if flat:
            fields.fill(schedule.interval, flat, "schedule.interval.", "a schedule", {})

    # ---- what the sidecar would refuse

    def _check(self, job: Located, known: Sequence[Problem]) -> None:
        """By the sidecar's own rules, so that all mistakes of a file are known at once, with their lines. ``known`` is
        what is wrong with the job already, and is not said again in other words."""
        from tenure.v1 import job_pb2

        from sidecar.scheduling.schedules import problems
        from sidecar.services.errors import ApiError
        from sidecar.services.specs import spec_of
        from sidecar.services.validation import job_name

        try:
            job_name(job.definition.name or "none")
        except ApiError as error:
            self._report.wrong(job.line_of("name"), error.message)
        tried = job_pb2.JobSpec()
        tried.CopyFrom(job.definition.spec)
        kind = tried.schedule.WhichOneof("kind")
        wrong = problems(as_schedule(tried.schedule)) if kind else []
        for each in wrong:
            self._of_schedule(job, each, known)
        if wrong or not kind:
            tried.schedule.Clear()
            tried.schedule.manual.SetInParent()
        if known:
            make_whole(tried)
        seen: set[str] = set()
        while True:
            try:
                spec_of(tried, "spec")
                return
            except ApiError as error:
                path = dict(error.facts).get("field", "").removeprefix("spec.")
                if path in seen:
                    return
                seen.add(path)
                alone = path not in TOGETHER or _RANGE.fullmatch(error.facts.get("allowed", ""))
                line = job.line_of(path)
                if not known or (alone and not said_at(known, line)):
                    self._report.wrong(line, in_words(error.message.replace("spec.", "")))
                clear(tried, path)

    def _of_schedule(self, job: Located, wrong: ScheduleProblem, known: Sequence[Problem]) -> None:
        first, _, part = wrong.field.partition(" ")
        field = f"schedule.{SCHEDULE_FIELDS.get(first, first)}"
        value = wrong.value if first.endswith("_ms") else repr(wrong.value)
        if not said_at(known, job.line_of(field)):
            self._report.wrong(job.line_of(field), in_words(f"{f'{field} {part}'.strip()} is {value}{wrong.said}"))


def said_at(known: Sequence[Problem], line: int) -> bool:
    return any(problem.line == line for problem in known)


def make_whole(spec: job_pb2.JobSpec) -> None:
    """What is missing, and has been said to be, is not missed a second time."""
    spec.owner = spec.owner or "nobody"
    spec.runbook_url = spec.runbook_url or "https://example.org/"


def clear(spec: job_pb2.JobSpec, path: str) -> None:
    """Takes a wrong field away, so that what is wrong beside it is found, too."""
    holder: Message = spec
    *around, name = path.partition("[")[0].partition(" ")[0].split(".")
    for each in around:
        holder = getattr(holder, each)
    if name in holder.DESCRIPTOR.fields_by_name:
        holder.ClearField(name)


def in_words(text: str) -> str:
    """What is said of the API's fields, as a file has them: ``timeout_ms is 5; allowed: 1000 to 604800000`` becomes
    ``timeout is 5ms; allowed: 1s to 7d``, and ``MISFIRE_POLICY_ALL`` becomes ``all``."""
    text = _ENUM.sub(lambda found: found[1].lower(), text)
    found = _MS.match(text)
    if found is not None:
        write = moment_shown if found[1] else times.write_duration
        rest = _NUMBER.sub(lambda number: write(int(number[0])), text[found.end() :])
        text = found[0] + rest.replace(", in milliseconds since 1970", "").replace(" milliseconds", "")
    return _MS_NAME.sub(lambda name: name[1], re.sub(r"\binterval\.(?=every|anchor)", "", text))


def moment_shown(ms: int) -> str:
    return times.rfc3339(ms) if 0 < ms <= times.MS_MAX else str(ms)


def elsewhere() -> dict[str, str]:
    """Keys that are not a job's own, and where they belong."""
    from tenure.v1 import job_pb2

    known = forms_of(job_pb2.JobSpec.DESCRIPTOR)
    inner = [
        ("schedule", job_pb2.Schedule.DESCRIPTOR),
        ("retry", job_pb2.RetryPolicy.DESCRIPTOR),
        ("canary", job_pb2.Canary.DESCRIPTOR),
    ]
    found = {key: name for name, message in inner for key in forms_of(message) if key not in known}
    return found | {"every": "schedule", "anchor": "schedule"}


def compact_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def as_schedule(given: job_pb2.Schedule) -> Schedule:
    """The API's schedule as the one that is computed with."""
    from sidecar.core.specification import DstPolicy, Schedule, ScheduleKind

    kinds = {
        "cron": ScheduleKind.CRON, "interval": ScheduleKind.INTERVAL, "once_wall_ms": ScheduleKind.ONCE,
        "manual": ScheduleKind.MANUAL,
    }  # fmt: skip
    return Schedule(
        kind=kinds[given.WhichOneof("kind") or "manual"],
        cron=given.cron,
        interval_ms=given.interval.every_ms,
        anchor_ms=given.interval.anchor_wall_ms,
        at_ms=given.once_wall_ms,
        zone=given.zone or "UTC",
        dst=DstPolicy(given.dst_policy or DstPolicy.VIXIE),
        start_ms=given.start_wall_ms,
        end_ms=given.end_wall_ms,
    )
