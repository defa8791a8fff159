"""Must be imported before ``grpc`` is: gRPC reads its environment once, when it is loaded.

gRPC's support for forks starts new threads in a forked child. They read from the connections that the child shares with
its parent, and they crash. So it is switched off, unless the environment says what it wants.
"""

from __future__ import annotations

import os
import sys

__all__ = ["FORK_SUPPORT", "too_late"]

FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def _switch_off() -> bool:
    """Returns whether gRPC is, or may be, on its own way already."""
    loaded_before = "grpc" in sys.modules and FORK_SUPPORT not in os.environ
    return os.environ.setdefault(FORK_SUPPORT, "0").lower() not in ("0", "false", "no") or loaded_before


# Whether children of a fork may crash although they never touch a client.
too_late = _switch_off()
