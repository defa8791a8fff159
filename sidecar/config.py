"""Settings of a sidecar, from flags, environment (``TENURE_*``), a TOML file and defaults, in that order."""

from __future__ import annotations


class Settings:
    """Replaced by the settings model."""
