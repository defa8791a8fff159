"""YAML as trees of nodes that know their lines: text stays text, and nothing can grow beyond a bound.

Not the loader of the library: that one reads ``1.10`` as a number and ``no`` as false, forgets lines, takes the last of
two equal keys in silence, and follows aliases without end. Here a node is text, a list or a mapping; what the text
means is for whoever knows what belongs there. Tags are refused, so nothing is ever constructed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

BYTES_MAX = 4_000_000
# All of a document with its aliases written out: each node counts its text and a little for itself.
WEIGHT_MAX = 16_000_000
NODE_WEIGHT = 16
DEPTH_MAX = 64
MERGE = "<<"


class YamlError(ValueError):
    """What is wrong, and in which line (from 1)."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class Node:
    line: int
    weight: int = NODE_WEIGHT
    height: int = 1

    def take(self, child: Node) -> None:
        self.weight += child.weight
        self.height = max(self.height, child.height + 1)


@dataclass(slots=True)
class Text(Node):
    text: str = ""
    # Written without quotes, so it may mean something else than text.
    plain: bool = False


@dataclass(slots=True)
class Items(Node):
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Mapping(Node):
    # In the order of the file, with what ``<<`` brings in at the end.
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class Entry:
    line: int
    value: Node
    merged: bool = False


def documents(content: bytes) -> tuple[list[Node], list[YamlError]]:
    """The documents of a file without empty ones, and all that is wrong. What cannot be read ends the reading; keys
    that stand there twice do not."""
    import yaml

    if len(content) > BYTES_MAX:
        return [], [YamlError(1, f"the file has {len(content)} bytes; allowed: at most {BYTES_MAX}")]
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return [], [YamlError(content[: error.start].count(b"\n") + 1, "not UTF-8")]
    composer = _Composer(yaml)
    found: list[Node] = []
    try:
        found.extend(composer.compose(text))
    except YamlError as error:
        composer.problems.append(error)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        composer.problems.append(YamlError(line, f"not YAML: {error.problem or error.context}"))
    except yaml.YAMLError as error:  # a character that YAML does not allow
        position = getattr(error, "position", 0)
        line = text[:position].count("\n") + 1 if isinstance(position, int) else 1
        composer.problems.append(YamlError(line, f"not YAML: {getattr(error, 'reason', error)}"))
    return found, composer.problems


class _Composer:
    """Events to nodes, with a stack of its own: no depth of nesting exhausts Python's."""

    def __init__(self, yaml: Any) -> None:
        self.problems: list[YamlError] = []
        self._yaml = yaml
        self._anchors: dict[str, Node | None] = {}  # None: not complete yet
        self._open: list[tuple[Node, str | None]] = []
        self._keys: list[Text | None] = []  # of the open mappings: the key whose value comes next
        self._root: Node | None = None

    def compose(self, text: str) -> Iterator[Node]:
        yaml = self._yaml
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors, self._root = {}, None
            elif isinstance(event, yaml.DocumentEndEvent):
                if self._root is not None and not _empty(self._root):
                    yield self._root
            elif isinstance(event, yaml.NodeEvent):
                self._node(event)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                node, anchor = self._open.pop()
                if isinstance(node, Mapping):
                    self._keys.pop()
                self._complete(node, anchor)

    def _node(self, event: Any) -> None:
        yaml, line = self._yaml, event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            self._add(self._aliased(event.anchor, line), line)
            return
        if event.tag not in (None, "!"):
            raise YamlError(line, f"tag {event.tag}: tags are not accepted here")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            text = event.value
            plain = not event.style and event.tag is None
            self._complete(Text(line, NODE_WEIGHT + len(text), text=text, plain=plain), event.anchor)
            return
        if len(self._open) >= DEPTH_MAX:
            raise YamlError(line, f"nested deeper than {DEPTH_MAX} levels")
        mapping = isinstance(event, yaml.MappingStartEvent)
        self._open.append((Mapping(line) if mapping else Items(line), event.anchor))
        if mapping:
            self._keys.append(None)

    def _aliased(self, anchor: str, line: int) -> Node:
        if anchor not in self._anchors:
            raise YamlError(line, f"*{anchor}: no such anchor before it")
        node = self._anchors[anchor]
        if node is None:
            raise YamlError(line, f"*{anchor} stands inside of what it names")
        return node

    def _complete(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        self._add(node, node.line)

    def _add(self, node: Node, line: int) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1][0]
        parent.take(node)
        if parent.weight > WEIGHT_MAX:
            raise YamlError(line, f"with its aliases written out this is larger than {WEIGHT_MAX} bytes")
        if parent.height > DEPTH_MAX:
            raise YamlError(line, f"with its aliases written out this is nested deeper than {DEPTH_MAX} levels")
        if isinstance(parent, Items):
            parent.items.append(node)
        elif isinstance(parent, Mapping):
            self._entry(parent, node, line)

    def _entry(self, parent: Mapping, node: Node, line: int) -> None:
        key = self._keys[-1]
        if key is None:
            if not isinstance(node, Text):
                raise YamlError(line, "a key must be text")
            self._keys[-1] = node
            return
        self._keys[-1] = None
        if key.text == MERGE and key.plain:
            self._merge(parent, node, line)
            return
        before = parent.entries.get(key.text)
        if before is not None and not before.merged:
            self.problems.append(
                YamlError(key.line, f"key {key.text!r} stands there twice, first in line {before.line}")
            )
            return
        parent.entries.pop(key.text, None)
        parent.entries[key.text] = Entry(key.line, node)

    def _merge(self, parent: Mapping, node: Node, line: int) -> None:
        """Of several mappings the first one wins, and the mapping's own keys win over all."""
        for source in node.items if isinstance(node, Items) else [node]:
            if not isinstance(source, Mapping):
                raise YamlError(line, f"{MERGE} takes a mapping, or a list of mappings")
            for name, entry in source.entries.items():
                if name not in parent.entries:
                    parent.entries[name] = Entry(entry.line, entry.value, merged=True)


def _empty(node: Node) -> bool:
    return isinstance(node, Text) and node.plain and not node.text


def value(node: Node) -> Any:
    """What the node means to JSON: null, true, false and numbers where they are written without quotes, else text.
    Raises YamlError for numbers that JSON does not have."""
    if isinstance(node, Items):
        return [value(item) for item in node.items]
    if isinstance(node, Mapping):
        return {name: value(entry.value) for name, entry in node.entries.items()}
    assert isinstance(node, Text)
    return _meant(node) if node.plain else node.text


def _meant(node: Text) -> Any:
    """By the core schema of YAML 1.2, in which ``no`` is text."""
    text, folded = node.text, node.text.lower()
    if folded in ("", "~", "null"):
        return None
    if folded in ("true", "false"):
        return folded == "true"
    digits = text.lstrip("+-")
    if len(text) - len(digits) <= 1 and digits.isascii() and digits[:1] not in ("", "_") and "_" not in digits:
        if digits.isdigit() and len(digits) < 4_000:
            return int(text)
        if digits[0] in ".0123456789" and set(digits) <= set("0123456789.eE+-"):
            return _float(node)
    if folded.lstrip("+-") in (".inf", ".nan"):
        _no_json(node)
    return text


def _float(node: Text) -> Any:
    try:
        number = float(node.text)
    except ValueError:
        return node.text
    return number if abs(number) != float("inf") else _no_json(node)


def _no_json(node: Text) -> NoReturn:
    raise YamlError(node.line, f"{node.text} is no number of JSON; quote it if it is text")
