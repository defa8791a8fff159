"""Fields of a message from a YAML mapping, by the message's own descriptor: what is wrong is collected, not raised."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from sidecar.cli import times, yaml_nodes
from sidecar.cli.yaml_nodes import Entry, Items, Text

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
    from google.protobuf.message import Message

    AnyDescriptor = Descriptor | Any

_WHOLE_NUMBER = re.compile(r"[+-]?\d{1,19}")
LISTED_MAX = 10
# Words of other schedulers, and what they are here.
MEANT = {
    "forbid": "skip", "replace": "cancel_running", "concurrent": "allow", "queue": "buffer_all", "none": "skip",
    "dry": "shadow", "dry_run": "shadow", "exactly_once": "at_least_once", "hold": "hold_for_person",
    "coalesce": "latest", "ignore": "skip", "fire_once": "latest",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class Report:
    """All that is wrong with one file."""

    file: str
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, line: int, text: str) -> None:
        self.problems.append(Problem(self.file, line, text))


class Form(Enum):
    TEXT = auto()
    NUMBER = auto()
    TRUTH = auto()
    DURATION = auto()
    MOMENT = auto()
    CHOICE = auto()
    MESSAGE = auto()


def forms_of(descriptor: AnyDescriptor) -> dict[str, tuple[FieldDescriptor, Form]]:
    """How a field may be called in a file, and what is then expected there. Repeated fields are left out."""
    forms: dict[str, tuple[FieldDescriptor, Form]] = {}
    for each in descriptor.fields:
        name: str = each.name
        if each.is_repeated or each.type == each.TYPE_BYTES:
            continue
        if each.message_type is not None:
            forms[name] = (each, Form.MESSAGE)
        elif each.enum_type is not None:
            forms[name] = (each, Form.CHOICE)
        elif each.type == each.TYPE_BOOL:
            forms[name] = (each, Form.TRUTH)
        elif each.type == each.TYPE_STRING:
            forms[name] = (each, Form.TEXT)
        else:
            forms[name] = (each, Form.NUMBER)
            if name.endswith("_wall_ms"):
                forms[name.removesuffix("_wall_ms")] = (each, Form.MOMENT)
            elif name.endswith("_ms"):
                forms[name.removesuffix("_ms")] = (each, Form.DURATION)
    return forms


def hint(key: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """What a key that is not known was possibly meant to be. ``elsewhere``: keys and where they belong."""
    known = list(known)
    if key in elsewhere:
        return f"; it belongs under {elsewhere[key]}"
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known are {', '.join(known)}" if len(known) <= LISTED_MAX else ""


class Fields:
    """Reads into messages. ``lines`` takes the line of each field, by its path in the specification."""

    def __init__(self, report: Report, lines: dict[str, int], zone: str | None = None) -> None:
        self._report, self._lines, self._zone = report, lines, zone

    def fill(
        self, message: Message, entries: Mapping[str, Entry], path: str, where: str, elsewhere: Mapping[str, str]
    ) -> None:
        """``path`` ends with a dot, or is empty. ``where`` completes "x is no key of ..."."""
        forms = forms_of(message.DESCRIPTOR)
        given: dict[str, str] = {}
        for key, entry in entries.items():
            if key not in forms:
                self._report.wrong(entry.line, f"{key!r} is no key of {where}{hint(key, forms, elsewhere)}")
                continue
            described, form = forms[key]
            if described.name in given:
                self._report.wrong(entry.line, f"{given[described.name]} and {key} are the same; say one of them")
                continue
            given[described.name] = key
            self._lines[path + described.name] = entry.line
            if form is Form.MESSAGE:
                self._inner(message, described, entry, path)
            else:
                self._set(message, described, self.read(entry, key, form, described.enum_type), entry, key)

    def _inner(self, message: Message, described: FieldDescriptor, entry: Entry, path: str) -> None:
        if not isinstance(entry.value, yaml_nodes.Mapping):
            self._report.wrong(entry.line, f"{described.name} must be a mapping")
            return
        inner = getattr(message, described.name)
        inner.SetInParent()
        self.fill(inner, entry.value.entries, f"{path}{described.name}.", described.name, {})

    def _set(self, message: Message, described: FieldDescriptor, meant: Any, entry: Entry, key: str) -> None:
        if meant is None:
            return
        try:
            setattr(message, described.name, meant)
        except ValueError:
            self._report.wrong(entry.line, f"{key} is {meant}; that number is too large")

    # ---- values; None when it was wrong, which has been reported

    def read(self, entry: Entry, key: str, form: Form, kind: EnumDescriptor | None = None) -> Any:
        if form is Form.CHOICE:
            assert kind is not None
            return self.choice(entry, key, kind)
        reads = {
            Form.TEXT: self.text, Form.NUMBER: self.number, Form.TRUTH: self.truth, Form.DURATION: self.duration,
            Form.MOMENT: self.moment,
        }  # fmt: skip
        return reads[form](entry, key)

    def plain(self, entry: Entry, key: str, wanted: str) -> str | None:
        node = entry.value
        if not isinstance(node, Text):
            found = "list" if isinstance(node, Items) else "mapping"
            self._report.wrong(entry.line, f"{key} is a {found}; it must be {wanted}")
            return None
        if node.plain and node.text.lower() in ("", "~", "null"):
            self._report.wrong(entry.line, f"{key} has no value; leave the key out to have the default")
            return None
        return node.text

    def text(self, entry: Entry, key: str) -> str | None:
        return self.plain(entry, key, "text")

    def number(self, entry: Entry, key: str) -> int | None:
        text = self.plain(entry, key, "a whole number")
        if text is None:
            return None
        digits = text.replace("_", "")
        if not digits.isascii() or not _WHOLE_NUMBER.fullmatch(digits):
            self._report.wrong(entry.line, f"{key} is {text!r}; it must be a whole number")
            return None
        return int(digits)

    def truth(self, entry: Entry, key: str) -> bool | None:
        text = self.plain(entry, key, "true or false")
        if text is None:
            return None
        if text.lower() not in ("true", "false"):
            self._report.wrong(entry.line, f"{key} is {text!r}; it must be true or false")
            return None
        return text.lower() == "true"

    def duration(self, entry: Entry, key: str) -> int | None:
        text = self.plain(entry, key, "a duration")
        try:
            return None if text is None else times.parse_duration(text)
        except ValueError as error:
            self._report.wrong(entry.line, f"{key}: {error}")
            return None

    def moment(self, entry: Entry, key: str) -> int | None:
        text = self.plain(entry, key, "a time")
        try:
            return None if text is None else times.parse_moment(text, self._zone)
        except ValueError as error:  # also for a zone that is not known
            self._report.wrong(entry.line, f"{key}: {error}")
            return None

    def choice(self, entry: Entry, key: str, kind: EnumDescriptor) -> int | None:
        text = self.plain(entry, key, "one word")
        if text is None:
            return None
        words = words_of(kind)
        word = text.lower().replace("-", "_")
        if word not in words:
            near = [MEANT[word]] if MEANT.get(word) in words else difflib.get_close_matches(word, words, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self._report.wrong(entry.line, f"{key} is {text!r}; it must be one of {', '.join(words)}{meant}")
            return None
        return words[word]


def words_of(kind: EnumDescriptor) -> dict[str, int]:
    """``OVERLAP_POLICY_BUFFER_ONE`` is the word ``buffer_one``; what is unspecified has no word."""
    prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
    return {each.name.removeprefix(prefix).lower(): each.number for each in kind.values if each.number}


def spelled(kind: EnumDescriptor, number: int) -> str:
    return next((word for word, each in words_of(kind).items() if each == number), str(number))


def listed(names: Sequence[str]) -> str:
    return " and ".join(names)
