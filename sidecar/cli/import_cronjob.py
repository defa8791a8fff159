"""Kubernetes CronJobs as jobs. The command, its arguments and environment become the payload; a worker runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sidecar.cli import times, yaml_nodes
from sidecar.cli.failures import USAGE, CliError
from sidecar.cli.imports import Imported, Report, valid_name
from sidecar.cli.yaml_nodes import YamlError

if TYPE_CHECKING:
    from tenure.v1 import job_pb2

TIMEOUT_MS = times.DAY_MS
# What Kubernetes takes where nothing is said.
BACKOFF_LIMIT, BACKOFF_FIRST_MS, BACKOFF_MAX_MS, GRACE_S = 6, 10_000, 360_000, 30
CONCURRENT_MAX = 10
LABELS_MAX, LABEL_BYTES_MAX = 16, 128
DEADLINE_MAX_S, GRACE_MAX_S, TIMEOUT_MAX_S, ATTEMPTS_MAX = 31 * 86_400, 600, 7 * 86_400, 100
_ZONE = re.compile(r"(?:CRON_)?TZ=(\S+)\s+(.*)", re.DOTALL)
_EVERY = re.compile(r"@every\s+((?:\d+(?:h|m|s))+)")

# What is carried over, or means nothing here; everything else of these objects is reported.
OF_SPEC = {
    "schedule", "timeZone", "concurrencyPolicy", "suspend", "startingDeadlineSeconds", "jobTemplate",
    "successfulJobsHistoryLimit", "failedJobsHistoryLimit",
}  # fmt: skip
OF_JOB = {"backoffLimit", "activeDeadlineSeconds", "template", "ttlSecondsAfterFinished"}
OF_POD = {
    "containers", "restartPolicy", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "schedulerName",
    "dnsPolicy",
}  # fmt: skip
OF_CONTAINER = {
    "name", "image", "command", "args", "env", "workingDir", "imagePullPolicy", "terminationMessagePath",
    "terminationMessagePolicy",
}  # fmt: skip
OF_METADATA = {
    "name", "namespace", "labels", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
}  # fmt: skip


def read(
    content: bytes, file: str, tenant: str, owner: str, runbook_url: str, zone: str, report: Report
) -> list[Imported]:
    nodes, wrong = yaml_nodes.documents(content)
    if wrong:
        said = "\n  ".join(f"{file}:{error.line}: {error}" for error in wrong)
        raise CliError(f"it cannot be read\n  {said}", reason="IMPORT", status=USAGE)
    found = []
    for node in nodes:
        try:
            objects = list(objects_of(yaml_nodes.value(node), report, f"{file}:{node.line}"))
        except YamlError as error:
            raise CliError(f"{file}:{error.line}: {error}", reason="IMPORT", status=USAGE) from error
        for each in objects:
            name = str(mapping(each.get("metadata")).get("name") or "")
            job = imported(each, f"{file}: {name or 'a CronJob without a name'}", tenant, zone, report)
            job.definition.spec.owner, job.definition.spec.runbook_url = owner, runbook_url
            found.append(job)
    return found


def objects_of(value: Any, report: Report, place: str) -> Iterator[Mapping[str, Any]]:
    """The CronJobs of a document, also inside of lists."""
    if not isinstance(value, dict):
        report.lose(place, "a document that is no object of Kubernetes")
        return
    kind = value.get("kind")
    if kind == "CronJob":
        yield value
    elif kind in ("List", "CronJobList"):
        for item in sequence(value.get("items")):
            # The items of a typed list need not say their kind.
            known = item | {"kind": "CronJob"} if kind == "CronJobList" and isinstance(item, dict) else item
            yield from objects_of(known, report, place)
    else:
        report.lose(place, f"a {kind or 'document without a kind'}: only CronJob and lists of them are read")


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def imported(value: Mapping[str, Any], place: str, tenant: str, zone: str, report: Report) -> Imported:
    from tenure.v1 import job_pb2

    metadata, spec = mapping(value.get("metadata")), mapping(value.get("spec"))
    definition = job_pb2.JobDefinition(tenant=tenant, name=valid_name(str(metadata.get("name") or "cronjob")))
    job = Imported(definition, place, [f"from {place}"])
    template = mapping(mapping(spec.get("jobTemplate")).get("spec"))
    pod = mapping(mapping(template.get("template")).get("spec"))
    left_out(metadata, OF_METADATA, "metadata", place, report)
    left_out(spec, OF_SPEC, "spec", place, report)
    left_out(template, OF_JOB, "spec.jobTemplate.spec", place, report)
    left_out(pod, OF_POD, "spec.jobTemplate.spec.template.spec", place, report)
    labels(definition.spec, metadata, place, report)
    schedule(definition.spec.schedule, spec, zone, place, report)
    policies(job, spec, report)
    attempts(definition.spec, template, pod, place, report)
    payload(definition.spec, pod, place, report)
    return job


def left_out(value: Mapping[str, Any], known: set[str], where: str, place: str, report: Report) -> None:
    for key in value:
        if key not in known and value[key] not in (None, {}, []):
            report.lose(place, f"{where}.{key}")


def labels(spec: job_pb2.JobSpec, metadata: Mapping[str, Any], place: str, report: Report) -> None:
    every = {str(key): str(text) for key, text in mapping(metadata.get("labels")).items()}
    if metadata.get("namespace"):
        every["namespace"] = str(metadata["namespace"])
    for key, text in every.items():
        if (
            len(spec.labels) >= LABELS_MAX
            or len(key.encode()) > LABEL_BYTES_MAX
            or len(text.encode()) > LABEL_BYTES_MAX
        ):
            report.lose(place, f"label {key}: there are at most {LABELS_MAX}, of {LABEL_BYTES_MAX} bytes")
        else:
            spec.labels[key] = text


def schedule(made: job_pb2.Schedule, spec: Mapping[str, Any], zone: str, place: str, report: Report) -> None:
    text = str(spec.get("schedule") or "").strip()
    inside = _ZONE.fullmatch(text)
    if inside is not None:
        zone, text = inside[1], inside[2]
    made.zone = str(spec.get("timeZone") or zone)
    if not made.zone:
        report.note(place, "it says no timeZone: Kubernetes went by its controller's, mostly UTC, which is taken here")
    every = _EVERY.fullmatch(text)
    if every is not None:
        made.interval.every_ms = times.parse_duration(every[1])
        report.note(place, "@every counts from 1970 here, so it is due at round times; say anchor for others")
    else:
        made.cron = " ".join(text.replace("?", "*").split())


def policies(job: Imported, spec: Mapping[str, Any], report: Report) -> None:
    from tenure.v1 import job_pb2

    made, place = job.definition.spec, job.place
    concurrency = str(spec.get("concurrencyPolicy") or "Allow")
    if concurrency == "Allow":
        made.overlap_policy, made.concurrent_max = job_pb2.OVERLAP_POLICY_ALLOW, CONCURRENT_MAX
        report.note(
            place, f"concurrencyPolicy Allow: up to {CONCURRENT_MAX} at once; most jobs want overlap_policy skip"
        )
    elif concurrency == "Replace":
        made.overlap_policy = job_pb2.OVERLAP_POLICY_CANCEL_RUNNING
    else:
        made.overlap_policy = job_pb2.OVERLAP_POLICY_SKIP
        if concurrency != "Forbid":
            report.lose(place, f"concurrencyPolicy {concurrency!r} is not known; skip is taken")
    made.misfire_policy = job_pb2.MISFIRE_POLICY_LATEST
    seconds = number(spec, "startingDeadlineSeconds", place, report)
    if seconds is not None:
        seconds = bounded(seconds, 1, DEADLINE_MAX_S, "startingDeadlineSeconds", place, report)
        made.starting_deadline_ms = made.catch_up_window_ms = seconds * 1_000
    kept = [number(spec, f"{which}JobsHistoryLimit", place, report) for which in ("successful", "failed")]
    if any(each is not None for each in kept):
        report.note(place, "its history limits are about pods; the outcomes of the last 100 due times are kept here")
    if spec.get("suspend") is True:
        name = f"{job.definition.tenant}/{job.definition.name}"
        report.lose(place, f"suspend: true. After apply: tenure pause {name} --reason 'was suspended'")
        job.comments.append(f"it was suspended: tenure pause {name} --reason 'was suspended'")


def attempts(
    made: job_pb2.JobSpec, template: Mapping[str, Any], pod: Mapping[str, Any], place: str, report: Report
) -> None:
    limit = number(template, "backoffLimit", place, report)
    wanted = (BACKOFF_LIMIT if limit is None else limit) + 1
    made.retry.attempts_max = bounded(wanted, 1, ATTEMPTS_MAX, "backoffLimit + 1", place, report)
    made.retry.initial_ms, made.retry.max_ms = BACKOFF_FIRST_MS, BACKOFF_MAX_MS
    own = number(pod, "activeDeadlineSeconds", place, report)
    whole = number(template, "activeDeadlineSeconds", place, report)
    seconds = own if own is not None else whole
    if own is None and whole is not None:
        report.note(place, "activeDeadlineSeconds was for all attempts together; timeout is for each of them")
    if seconds is None:
        report.note(place, "it had no activeDeadlineSeconds; timeout is a day: say how long it really may take")
        made.timeout_ms = TIMEOUT_MS
    else:
        made.timeout_ms = bounded(seconds, 1, TIMEOUT_MAX_S, "activeDeadlineSeconds", place, report) * 1_000
    grace = number(pod, "terminationGracePeriodSeconds", place, report)
    grace = GRACE_S if grace is None else grace
    made.interrupt_grace_ms = bounded(grace, 0, GRACE_MAX_S, "terminationGracePeriodSeconds", place, report) * 1_000


def number(value: Mapping[str, Any], key: str, place: str, report: Report) -> int | None:
    found = value.get(key)
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    report.lose(place, f"{key}: {found!r} is no whole number")
    return None


def bounded(value: int, least: int, most: int, key: str, place: str, report: Report) -> int:
    if not least <= value <= most:
        report.lose(place, f"{key} of {value}: allowed are {least} to {most}; the nearest is taken")
    return min(max(value, least), most)


def payload(made: job_pb2.JobSpec, pod: Mapping[str, Any], place: str, report: Report) -> None:
    """Of the first container: what a worker needs to do the same work."""
    from sidecar.cli.job_files import compact_json

    containers = [each for each in sequence(pod.get("containers")) if isinstance(each, dict)]
    if not containers:
        report.lose(place, "it has no container, so there is no command")
        return
    for other in containers[1:]:
        report.lose(place, f"container {other.get('name')}: only the first one is carried over")
    first = containers[0]
    left_out(first, OF_CONTAINER, "containers[0]", place, report)
    environment = {}
    for each in sequence(first.get("env")):
        name = str(mapping(each).get("name") or "")
        if "valueFrom" in mapping(each):
            report.lose(place, f"env {name}, which comes from a secret, a config map or the pod: give it to the worker")
        elif name:
            environment[name] = str(mapping(each).get("value", ""))
    kept: dict[str, Any] = {key: first[key] for key in ("image", "command", "args", "workingDir") if first.get(key)}
    if environment:
        kept["env"] = environment
    made.payload = compact_json(kept)
    report.note(place, f"image {first.get('image')}: the worker that serves the job must bring what is in it")
