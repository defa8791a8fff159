"""stub"""

HELP = "x"


def worker() -> None: ...
