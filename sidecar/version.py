"""The version of this sidecar."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("tenure-sidecar")
