"""Speed, measured against something in the same run: ``python -m bench``."""

from tenure import environment as _environment  # noqa: F401  before gRPC is loaded, since workers are started later
