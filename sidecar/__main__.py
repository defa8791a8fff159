"""``python -m sidecar`` is ``tenure``."""

from sidecar.cli import main

if __name__ == "__main__":
    main()
