"""Job definitions as YAML that ``tenure job apply`` reads: everything that is set, in the order of the API."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sidecar.cli import times, yaml_nodes
from sidecar.cli.job_fields import spelled

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message
    from tenure.v1 import job_pb2

# Values of fields that say nothing beside the policies of most jobs.
BUFFER_DEFAULT, CONCURRENT_DEFAULT = 100, 1

# Line ends to YAML, and so only safe where they are escaped.
LINE_ENDS = frozenset("\r\x85\u2028\u2029")


def file_of(jobs: Iterable[job_pb2.JobDefinition]) -> str:
    """A file with these jobs."""
    return dump({"jobs": [fields_of(job) for job in jobs]})


def fields_of(job: job_pb2.JobDefinition) -> dict[str, Any]:
    own: dict[str, Any] = {"tenant": job.tenant, "name": job.name}
    if job.HasField("expected_revision"):
        own["expected_revision"] = job.expected_revision
    return own | spec_fields(job.spec)


def spec_fields(spec: job_pb2.JobSpec) -> dict[str, Any]:
    """The fields of a specification, as a file has them."""
    from tenure.v1 import job_pb2

    shown: dict[str, Any] = {}
    for described in spec.DESCRIPTOR.fields:
        name: str = described.name
        if name == "schedule":
            shown[name] = schedule_fields(spec.schedule)
        elif name == "payload":
            shown |= payload_fields(spec.payload)
        elif name == "labels":
            shown |= {name: dict(sorted(spec.labels.items()))} if spec.labels else {}
        elif name == "selector":
            shown |= {name: selector_fields(spec.selector)} if spec.selector else {}
        else:
            shown |= field_of(spec, described)
    if spec.buffer_max == BUFFER_DEFAULT and spec.overlap_policy != job_pb2.OVERLAP_POLICY_BUFFER_ALL:
        shown.pop("buffer_max", None)
    if spec.concurrent_max == CONCURRENT_DEFAULT and spec.overlap_policy != job_pb2.OVERLAP_POLICY_ALLOW:
        shown.pop("concurrent_max", None)
    return shown


def schedule_fields(schedule: job_pb2.Schedule) -> Any:
    shown = {k: v for described in schedule.DESCRIPTOR.fields for k, v in field_of(schedule, described).items()}
    if schedule.HasField("manual"):
        shown["manual"] = True
    if schedule.HasField("interval"):
        shown = shown.pop("interval") | shown
    return shown


def selector_fields(terms: Sequence[job_pb2.SelectorTerm]) -> Any:
    if len({term.key for term in terms}) < len(terms):
        return [{"key": term.key, "values": list(term.values)} for term in terms]
    return {term.key: list(term.values) for term in terms}


def payload_fields(payload: bytes) -> dict[str, Any]:
    """In the most readable form that gives the same bytes again."""
    import json

    from sidecar.cli.job_files import compact_json

    if not payload:
        return {}
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}
    if text[:1] in "{[":
        try:
            meant = json.loads(text)
            written = dump({"payload_json": meant})
            nodes, _ = yaml_nodes.documents(written.encode())
            assert isinstance(nodes[0], yaml_nodes.Mapping)
            if compact_json(yaml_nodes.value(nodes[0].entries["payload_json"].value)) == payload:
                return {"payload_json": meant}
        except (ValueError, RecursionError, IndexError):
            pass
    return {"payload": text}


def field_of(message: Message, described: FieldDescriptor) -> dict[str, Any]:
    """A field that is set, under its shortest name; nothing for others."""
    name: str = described.name
    value = getattr(message, name)
    if not (message.HasField(name) if described.has_presence else value):
        return {}
    if described.message_type is not None:
        return {name: {k: v for each in value.DESCRIPTOR.fields for k, v in field_of(value, each).items()}}
    if described.enum_type is not None:
        return {name: spelled(described.enum_type, value)}
    if name.endswith("_wall_ms"):
        return {name.removesuffix("_wall_ms"): times.rfc3339(value)} if value > 0 else {name: value}
    if name.endswith("_ms"):
        return {name.removesuffix("_ms"): times.write_duration(value)} if value >= 0 else {name: value}
    return {name: value}


def dump(value: Any) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Indented lists, and text of several lines as such."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        style = '"' if LINE_ENDS.intersection(data) else "|" if "\n" in data else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100_000)


def diff(before: str, after: str, name: str, old: str, new: str) -> list[str]:
    """Lines of a unified diff; empty when nothing differs."""
    made = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} ({old})", f"{name} ({new})", lineterm=""
    )
    return list(made)


def spec_diff(name: str, before: job_pb2.JobSpec, after: job_pb2.JobSpec, old: str, new: str) -> list[str]:
    return diff(dump(spec_fields(before)), dump(spec_fields(after)), name, old, new)
