"""One fingerprint for equal payloads, whatever the order of their keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["fingerprint"]

_EXACT_FLOAT_MAX = 2**53


def fingerprint(payload: object, exclude: Iterable[str] = ()) -> bytes:
    """32 bytes that are equal for payloads that mean the same, and differ otherwise.

    ``payload`` is JSON-like: None, bool, int, float, str, sequences, and mappings with string keys. The order of keys
    does not count, the order of a sequence does; ``1`` and ``"1"``, and null and missing, differ; ``1.0`` equals
    ``1``, as it does once it has been through another language's JSON. ``exclude`` names fields that do not count:
    ``"ts"`` at the top level, ``"meta.ts"`` below ``meta`` (through lists too).

    Raises TypeError for a value that JSON cannot say, ValueError for NaN and infinities.
    """
    if isinstance(exclude, str):
        raise TypeError("exclude takes a list of field names, not one string")
    canonical = _canonical(payload, frozenset(exclude), "")
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"tenure-payload-1").digest()


def _canonical(value: object, exclude: frozenset[str], path: str) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT_FLOAT_MAX else value
    if isinstance(value, Mapping):
        return _canonical_mapping(value, exclude, path)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_canonical(item, exclude, path) for item in value]
    raise TypeError(f"{path or 'payload'}: {type(value).__name__} has no canonical form; pass what JSON can say")


def _canonical_mapping(value: Mapping[object, object], exclude: frozenset[str], path: str) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            # json would turn 1 into "1", and two different payloads into one.
            raise TypeError(f"{path or 'payload'}: keys must be strings, not {type(key).__name__}")
        below = f"{path}.{key}" if path else key
        if below not in exclude:
            result[key] = _canonical(item, exclude, below)
    return result
