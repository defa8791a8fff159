"""Generates the Python stubs from proto/ into the client package; ``--check`` fails when the committed ones differ."""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "clients" / "python" / "src"


def generate(out: Path) -> None:
    """Write the stubs of every .proto file below proto/ to ``out``."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}",
        f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}",
        *sources,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=PROTO)
    (out / "tenure" / "v1" / "__init__.py").write_text('"""Stubs generated from proto/tenure/v1; do not edit."""\n')


def main() -> int:
    """Entry point; the exit status says whether the committed stubs are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = sorted(p.name for p in (Path(folder) / "tenure" / "v1").iterdir())
        committed = sorted(p.name for p in (TARGET / "tenure" / "v1").iterdir() if p.is_file())
        _, differ, missing = filecmp.cmpfiles(
            Path(folder) / "tenure" / "v1", TARGET / "tenure" / "v1", names, shallow=False
        )
        stale = sorted(set(differ) | set(missing) | (set(committed) - set(names)))
    if stale:
        print(f"stubs differ from proto/: {', '.join(stale)}; run 'make proto'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
