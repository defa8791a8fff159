"""A crontab as jobs. What cron means by a line is kept: one attempt, no catching up, and no limit but a day."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from sidecar.cli import times
from sidecar.cli.imports import Imported, Report, valid_name

if TYPE_CHECKING:
    from tenure.v1 import job_pb2

_SETTING = re.compile(r"""([A-Za-z_]\w*|"[^"]*"|'[^']*')\s*=\s*(.*)""", re.DOTALL)
_ENTRY = re.compile(r"(@\S+|(?:\S+\s+){4}\S+)\s+(.*)", re.DOTALL)
# Words that start a command without saying what it is for.
WRAPPERS = {
    "cd", "test", "[", "[[", "sh", "bash", "dash", "zsh", "nice", "ionice", "env", "exec", "sudo", "timeout", "flock",
    "nohup", "command", "chronic", "setsid", "time", "python", "python3", "perl", "ruby", "php", "node", "java",
    "systemd-cat", "logger", "sleep", "set", "export", "source", ".", "if",
}  # fmt: skip
TIMEOUT_MS = times.DAY_MS
STARTING_DEADLINE_MS = 3_600_000  # where nothing is said
# Settings that cron itself reads, and the environment of the command does not need.
CRON_OWN = {"CONTENT_TYPE", "CONTENT_TRANSFER_ENCODING"}


@dataclass
class Around:
    """What the lines before an entry have set."""

    zone: str
    jitter_ms: int = 0
    environment: dict[str, str] = field(default_factory=dict)


def read(
    text: str, file: str, tenant: str, owner: str, runbook_url: str, zone: str, report: Report, *, user_field: bool
) -> list[Imported]:
    from tenure.v1 import job_pb2

    around, found = Around(zone), []
    for number, line in enumerate(text.splitlines(), 1):
        stripped, place = line.strip(), f"{file}:{number}"
        if not stripped or stripped.startswith("#"):
            continue
        setting = _SETTING.fullmatch(stripped)
        if setting is not None and not stripped.startswith("@"):
            set_(around, setting[1].strip("\"'"), unquoted(setting[2].strip()), place, report)
            continue
        definition = job_pb2.JobDefinition(tenant=tenant)
        definition.spec.owner, definition.spec.runbook_url = owner, runbook_url
        job = Imported(definition, place)
        if entry(job, stripped, around, report, user_field=user_field):
            found.append(job)
    if found and not all(each.definition.spec.schedule.zone for each in found):
        report.note(file, "cron went by the zone of its machine; without --zone the jobs go by UTC")
    return found


def unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def set_(around: Around, name: str, value: str, place: str, report: Report) -> None:
    if name == "CRON_TZ":
        around.zone = value
    elif name == "RANDOM_DELAY":
        if value.isascii() and value.isdigit() and len(value) < 6:
            around.jitter_ms = int(value) * 60_000
            report.note(place, f"RANDOM_DELAY={value}: jitter of {value} minutes, which is the same at each due time")
        else:
            report.lose(place, f"RANDOM_DELAY={value}, which is no number of minutes")
    elif name in ("MAILTO", "MAILFROM"):
        if value:
            report.lose(place, f"{name}={value}: no mail is sent. Alert on failed runs, or let the command send it")
    elif name in CRON_OWN:
        report.lose(place, f"{name}, which is about mail")
    else:
        around.environment[name] = value
        report.note(place, f"{name}={value}: set it in the environment of the worker; it stands in the payload's env")


def entry(job: Imported, line: str, around: Around, report: Report, *, user_field: bool) -> bool:
    """Fills the job in. False for a line that is none."""
    place, spec = job.place, job.definition.spec
    if line.startswith("-") and not line[1:2].isspace():
        report.note(place, "the '-' before the time kept it out of the system's log; it means nothing here")
        line = line[1:]
    parts = _ENTRY.fullmatch(line)
    if parts is None:
        report.lose(place, f"not understood: {line!r}")
        return False
    when, command = parts[1], parts[2]
    if user_field:
        user, _, command = command.partition(" ")
        command = command.strip()
        spec.labels["cron-user"] = user
        report.note(place, f"it ran as {user}: run its worker as that user")
    if when == "@reboot":
        report.lose(place, f"@reboot has no due time: start {command!r} with the machine by other means")
        return False
    if "~" in when:
        report.lose(place, f"{when!r}: random times ('~'); choose one, and say jitter for a spread")
        return False
    command, text = split_input(command)
    if not command:
        report.lose(place, f"{line!r} has no command")
        return False
    if text is not None:
        report.lose(place, "input after '%': it stands in the payload's stdin, which the command must read from there")
    spec.schedule.cron, spec.schedule.zone, spec.jitter_ms = " ".join(when.split()), around.zone, around.jitter_ms
    like_cron(spec)
    fill_payload(spec, command, text, around)
    job.definition.name = valid_name(name_of(command))
    job.comments.append(f"{place}: {line}")
    job.command = f"/bin/sh -c {shlex.quote(command)}"
    return True


def like_cron(spec: job_pb2.JobSpec) -> None:
    """What cron does, said in the words of a job."""
    from tenure.v1 import job_pb2

    spec.misfire_policy = job_pb2.MISFIRE_POLICY_SKIP
    spec.overlap_policy = job_pb2.OVERLAP_POLICY_SKIP
    spec.delivery = job_pb2.DELIVERY_AT_MOST_ONCE
    spec.timeout_ms = TIMEOUT_MS
    if spec.jitter_ms >= STARTING_DEADLINE_MS:
        spec.starting_deadline_ms = spec.jitter_ms + STARTING_DEADLINE_MS


def fill_payload(spec: job_pb2.JobSpec, command: str, text: str | None, around: Around) -> None:
    from sidecar.cli.job_files import compact_json

    payload: dict[str, object] = {"command": command}
    if around.environment:
        payload["env"] = around.environment
    if text is not None:
        payload["stdin"] = text
    spec.payload = compact_json(payload)


def split_input(command: str) -> tuple[str, str | None]:
    r"""The command, and what cron gave it as input: after the first % that is not \%, where further ones end lines."""
    parts = re.split(r"(?<!\\)%", command)
    words = [part.replace("\\%", "%") for part in parts]
    return words[0].strip(), "\n".join(words[1:]) + "\n" if len(words) > 1 else None


def name_of(command: str) -> str:
    """After the program that matters: not the shell, and not what only prepares."""
    try:
        words = shlex.split(command, comments=False)
    except ValueError:
        words = command.split()
    after_cd = False
    for word in words:
        skip = after_cd or word.startswith("-") or "=" in word or not any(c.isalnum() for c in word)
        after_cd = word == "cd"
        stem = PurePosixPath(word.rstrip(";")).name
        if skip or stem in WRAPPERS or stem.isdigit():
            continue
        # 'sh -c "..."': the program is in the quotes.
        return name_of(word) if " " in word and word != command else re.sub(r"\.\w{1,4}$", "", stem)
    return "job"
