"""Delivers the change stream to watchers: revisions, bounded buffers, resume."""

from __future__ import annotations


class WatchHub:
    """Replaced by the hub."""
