"""The content of a log store."""

from __future__ import annotations

from sidecar.consensus.ports import Entry, SnapshotMeta

Operation = tuple[str, object]


class LogImage:
    """The content of a log store: what one sees of it in memory, or what of it is durable."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bytes = 0
        self.term = 0
        self.vote: str | None = None
        self.commit_index = 0
        self.snapshot: SnapshotMeta | None = None
        self.amnesiac_term: int | None = None
        self.incarnation = 0
        self.created = False

    def copy(self) -> LogImage:
        twin = LogImage()
        twin.__dict__.update(self.__dict__)
        twin.entries = list(self.entries)
        return twin

    def apply(self, operation: Operation) -> None:
        kind, value = operation
        if kind == "append":
            assert isinstance(value, Entry)
            self.entries.append(value)
            self.bytes += len(value.command)
        elif kind == "truncate_from":
            assert isinstance(value, int)
            self.bytes -= sum(len(entry.command) for entry in self.entries[value:])
            del self.entries[value:]
        elif kind == "truncate_to":
            assert isinstance(value, int)
            self.bytes -= sum(len(entry.command) for entry in self.entries[:value])
            del self.entries[:value]
        elif kind == "reset":
            assert isinstance(value, list)
            self.entries = list(value)
            self.bytes = sum(len(entry.command) for entry in self.entries)
        elif kind == "term":
            assert isinstance(value, tuple)
            self.term, self.vote = value
        else:
            setattr(self, kind, value)

    def covers(self, index: int, term: int) -> bool:
        """Whether this store holds the committed entry (index, term), itself or inside its snapshot."""
        if not self.entries:
            return False
        first = self.entries[0].index
        if index < first:
            return True
        position = index - first
        return position < len(self.entries) and self.entries[position].term == term
