"""Pages of lists: at most 1,000 items and less than 1 MiB, with an opaque token that names the last item given out,
so that items that come and go elsewhere do not disturb the walk.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from google.protobuf.message import Message

from sidecar.services import validation as check
from sidecar.services.errors import ApiError, Problem

R = TypeVar("R")
M = TypeVar("M", bound=Message)

SIZE_DEFAULT, SIZE_MAX = 100, 1_000
TOKEN_BYTES_MAX = 2_048
# Of items; what else the message has fits into the rest of the mebibyte.
ITEM_BYTES_MAX = 900 * 1024


class _Token(msgspec.Struct, array_like=True):
    version: int
    scope: tuple[str, ...]
    after: str


class Page:
    """One page being filled. ``scope`` names the list and its filters: a token is good for its own list only.

    ``form``: what the names of its items look like, where they are more than text.
    """

    def __init__(self, scope: tuple[str, ...], size: int, token: str, form: str = "") -> None:
        self._scope = scope
        self._size = check.number(size, "page_size", 0, SIZE_MAX) or SIZE_DEFAULT
        self.after = _decoded(token, scope) if token else ""
        if self.after and form and not re.fullmatch(form, self.after, re.ASCII | re.DOTALL):
            raise _refusal(token)
        self._bytes = self._count = 0
        self._finished = False

    @property
    def limit(self) -> int:
        """How many rows to fetch: one more than fits tells whether there is a next page."""
        return self._size + 1

    @property
    def next_token(self) -> str:
        """Empty on the last page."""
        return "" if self._finished else encoded(self._scope, self.after)

    def fill(self, rows: Sequence[R], name_of: Callable[[R], str], translated: Callable[[R], M]) -> list[M]:
        """Items of ``rows``, which were fetched with ``after`` and ``limit``, as far as they fit."""
        items: list[M] = []
        for row in rows:
            item = translated(row)
            if not self.take(name_of(row), item):
                return items
            items.append(item)
        self.finish()
        return items

    def take(self, name: str, item: Message) -> bool:
        """Whether the item is on this page. The first always is, whatever its size."""
        size = item.ByteSize()
        if self._count == self._size or (self._count and self._bytes + size > ITEM_BYTES_MAX):
            return False
        self._count += 1
        self._bytes += size
        self.after = name
        return True

    def skip(self, name: str) -> None:
        """The walk passes an item that the filter leaves out."""
        self.after = name

    def finish(self) -> None:
        """There is nothing after this page."""
        self._finished = True


def encoded(scope: tuple[str, ...], after: str) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(_Token(1, scope, after))).decode().rstrip("=")


def _decoded(token: str, scope: tuple[str, ...]) -> str:
    found = None
    if len(token) <= TOKEN_BYTES_MAX and token.isascii():
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            found = msgspec.msgpack.decode(raw, type=_Token)
        except (ValueError, msgspec.MsgspecError):
            raise _refusal(token) from None
    if found is None or found.version != 1 or found.scope != scope or not found.after:
        raise _refusal(token)
    return found.after


def _refusal(token: str) -> ApiError:
    allowed = "empty, or the next_page_token of the page before, for the same list"
    return check.invalid(Problem.PAGE_TOKEN_INVALID, "page_token", token, allowed)
