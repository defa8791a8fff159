"""A crontab as jobs. What cron means by a line is kept: one attempt, no catching up, and no limit but a day."""

from __future__ import annotations

import pwd
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from sidecar.cli import times
from sidecar.cli.imports import Imported, Report, valid_name

if TYPE_CHECKING:
    from tenure.v1 import job_pb2

# What separates fields: to cron nothing else is blank, and any mixture of the two is.
BLANKS = " \t"
_SETTING = re.compile(r"""([A-Za-z_]\w*|"[^"]*"|'[^']*')[ \t]*=[ \t]*(.*)""", re.DOTALL)
_ENTRY = re.compile(r"(@[^ \t]+|(?:[^ \t]+[ \t]+){4}[^ \t]+)[ \t]+(.*)", re.DOTALL)
_USER = re.compile(r"[A-Za-z0-9_][\w.@:+\\-]*\$?")
# Words that start a command without saying what it is for.
WRAPPERS = {
    "cd", "test", "[", "[[", "sh", "bash", "dash", "zsh", "nice", "ionice", "env", "exec", "sudo", "timeout", "flock",
    "nohup", "command", "chronic", "setsid", "time", "python", "python3", "perl", "ruby", "php", "node", "java",
    "systemd-cat", "logger", "sleep", "set", "export", "source", ".", "if",
}  # fmt: skip
# Of these the next word that is no option belongs to them, and so does what follows an option in the second table.
TAKES_WORD = {"cd", "flock", "timeout", "sleep"}
TAKES_VALUE = {
    "sudo": {"-u", "-g"}, "timeout": {"-s", "-k"}, "flock": {"-w", "-E"}, "ionice": {"-c", "-n"}, "nice": {"-n"},
    "logger": {"-t", "-p"}, "systemd-cat": {"-t", "-p"},
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
    for number, line in enumerate(text.split("\n"), 1):
        stripped, place = trimmed(line), f"{file}:{number}"
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
    if found and not user_field and all(begins_with_user(each.argument) for each in found):
        report.note(
            file, "every command begins with a user of this machine, as in /etc/crontab: is --user-field missing?"
        )
    return found


def trimmed(line: str) -> str:
    """Without the blanks around it; but one at the end that a backslash keeps is a part of the command."""
    line = line.lstrip(BLANKS).removesuffix("\r")
    shorter = line.rstrip(BLANKS)
    return line if shorter.endswith("\\") else shorter


def begins_with_user(command: str) -> bool:
    """The first word is a user, with a command behind it, and no program."""
    user, command = split_word(command)
    return bool(command) and is_user(user) and shutil.which(user) is None


def is_user(name: str) -> bool:
    try:
        return bool(pwd.getpwnam(name))
    except KeyError:
        return False


def split_word(text: str) -> tuple[str, str]:
    """The first word and the rest, as cron takes a line apart."""
    word, *rest = re.split(r"[ \t]+", text, maxsplit=1)
    return word, "".join(rest)


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
        user, command = split_word(command)
        if not _USER.fullmatch(user):
            report.lose(place, f"{user!r} stands where --user-field expects a user; crontabs of a user have none")
            return False
        spec.labels["cron-user"] = user
        known = "" if is_user(user) else ", which this machine does not know"
        report.note(place, f"it ran as {user}{known}: run its worker as that user")
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
    spec.schedule.cron, spec.schedule.zone = re.sub(r"[ \t]+", " ", when), around.zone
    spec.jitter_ms = around.jitter_ms
    like_cron(spec)
    fill_payload(spec, command, text, around)
    job.definition.name = valid_name(name_of(command))
    job.comments.append(f"{place}: {line}")
    job.argument = command
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
    return trimmed(words[0]), "\n".join(words[1:]) + "\n" if len(words) > 1 else None


def name_of(command: str) -> str:
    """After the program that matters: not the shell, and not what only prepares."""
    try:
        words = shlex.split(command, comments=False)
    except ValueError:
        words = command.split()
    wrapper, taking = "", False
    for word in words:
        if not any(c.isalnum() for c in word):  # "&&" and the like: a new command
            wrapper, taking = "", False
            continue
        stem, skip = PurePosixPath(word.rstrip(";")).name, taking
        taking = False
        if skip or word.startswith("-"):
            taking = not skip and word in TAKES_VALUE.get(wrapper, ())
        elif wrapper in TAKES_WORD:
            wrapper = ""
        elif stem in WRAPPERS:
            wrapper = stem
        elif "=" not in word and not stem.isdigit():
            # 'sh -c "..."': the program is in the quotes.
            return name_of(word) if " " in word and word != command else re.sub(r"\.\w{1,4}$", "", stem)
    return "job"
