"""Sorted keys, for listing by prefix and by pages. Derived state: rebuilt at restore, never part of a snapshot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

Key = tuple[str, str]
Entry = TypeVar("Entry", bound=tuple[Any, ...])

_CHUNK_KEYS_MAX = 1_024


class Sorted(Generic[Entry]):
    """A sorted list of distinct keys, cut into chunks so that adding and removing does not move all of them."""

    def __init__(self, keys: Iterable[Entry] = ()) -> None:
        ordered = sorted(keys)
        size = _CHUNK_KEYS_MAX // 2
        self._chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        # The last key of each chunk.
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._chunks)

    def add(self, key: Entry) -> None:
        if not self._chunks:
            self._chunks, self._lasts = [[key]], [key]
            return
        index = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        chunk = self._chunks[index]
        insort(chunk, key)
        self._lasts[index] = chunk[-1]
        if len(chunk) > _CHUNK_KEYS_MAX:
            middle = len(chunk) // 2
            self._chunks[index : index + 1] = [chunk[:middle], chunk[middle:]]
            self._lasts[index : index + 1] = [chunk[middle - 1], chunk[-1]]

    def remove(self, key: Entry) -> None:
        index = bisect_left(self._lasts, key)
        chunk = self._chunks[index]
        position = bisect_left(chunk, key)
        assert chunk[position] == key, f"{key!r} is not among the sorted keys"
        del chunk[position]
        if chunk:
            self._lasts[index] = chunk[-1]
        else:
            del self._chunks[index], self._lasts[index]


class SortedKeys(Sorted[Key]):
    """Of names within tenants."""

    def after(self, tenant: str, prefix: str, after: str) -> Iterator[Key]:
        """Keys of a tenant whose name starts with ``prefix`` and comes after ``after``, in order."""
        start, position_in = (
            ((tenant, after), bisect_right) if after >= prefix and after else ((tenant, prefix), bisect_left)
        )
        index = position_in(self._lasts, start)
        if index == len(self._lasts):
            return
        position = position_in(self._chunks[index], start)
        for chunk in self._chunks[index:]:
            for key in chunk[position:]:
                if key[0] != tenant or not key[1].startswith(prefix):
                    return
                yield key
            position = 0
