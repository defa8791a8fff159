"""The structure of the project, checked: who may import whom, what must not appear, and that no module lies dead."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "clients" / "python" / "src"

# A module of the left side may import modules of ours only if one of the right side's prefixes fits.
# The first rule whose left side fits is the one that counts.
ALLOWED: list[tuple[str, tuple[str, ...]]] = [
    ("tenure", ("tenure",)),
    ("sidecar.core", ("sidecar.core",)),
    ("sidecar.consensus", ("sidecar.consensus",)),
    ("sidecar.config", ("sidecar.core",)),
    ("sidecar.certs", ()),
    ("sidecar.observability", ("sidecar.observability",)),
    ("sidecar.proposer", ("sidecar.core", "sidecar.consensus", "sidecar.proposer")),
    ("sidecar.watch", ("sidecar.core", "sidecar.proposer")),
    (
        "sidecar.runtime",
        (
            "sidecar.config",
            "sidecar.consensus",
            "sidecar.core",
            "sidecar.proposer",
            "sidecar.scheduling",
            "sidecar.watch",
            "sidecar.observability",
        ),
    ),
    (
        "sidecar.services",
        (
            "tenure.v1",
            "sidecar.core",
            "sidecar.consensus.ports",
            "sidecar.proposer",
            "sidecar.scheduling",
            "sidecar.watch",
            "sidecar.runtime",
            "sidecar.services",
            "sidecar.observability",
            "sidecar.version",
        ),
    ),
    ("sidecar.scheduling", ("sidecar.core", "sidecar.consensus.ports", "sidecar.proposer", "sidecar.scheduling")),
    ("sidecar", ("sidecar", "tenure")),
    ("examples", ("tenure", "examples")),
    ("chaos", ("chaos", "sidecar", "tenure", "examples")),
    ("bench", ("bench", "sidecar", "tenure")),
]
OURS = ("sidecar", "tenure", "chaos", "bench", "examples", "tests")
PURE = {
    "__future__", "collections", "enum", "functools", "hashlib", "heapq", "itertools", "operator", "typing", "bisect",
    "zlib", "types", "struct", "msgspec",
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours that is not a test and not generated, by dotted name."""
    for folder in ("sidecar", "chaos", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield dotted(path, ROOT), path
    for path in sorted((CLIENT / "tenure").rglob("*.py")):
        if path.parent.name != "v1":
            yield dotted(path, CLIENT), path


def dotted(path: Path, base: Path) -> str:
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in the file; `from a import b` counts as both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def fits(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize(("name", "path"), [pytest.param(n, p, id=n) for n, p in modules()])
def test_imports_point_one_way(name: str, path: Path) -> None:
    allowed = next(right for left, right in ALLOWED if fits(name, left))
    for used in imports(path):
        if used.split(".")[0] in OURS:
            # The package part of `from a.b import c` is judged through a.b.c when that is a module, else through a.b.
            parents = [prefix for prefix in allowed if fits(used, prefix) or fits(prefix, used)]
            assert parents, f"{name} must not import {used}"


def test_the_core_is_pure() -> None:
    for name, path in modules():
        if fits(name, "sidecar.core"):
            outside = {used.split(".")[0] for used in imports(path)} - {"sidecar"} - PURE
            assert not outside, f"{name} imports {sorted(outside)}"


def test_only_consensus_knows_pysyncobj() -> None:
    for name, path in modules():
        if not fits(name, "sidecar.consensus") and not fits(name, "chaos"):
            assert not any(fits(used, "pysyncobj") for used in imports(path)), name


def test_no_unpickler_in_the_product() -> None:
    for name, path in modules():
        if fits(name, "sidecar") or fits(name, "tenure"):
            used = {used.split(".")[0] for used in imports(path)}
            assert not used & {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}, name


def test_no_module_is_dead() -> None:
    """Every module is imported by another file of the project, run as a program, or an entry point."""
    used: set[str] = set()
    files = [*(p for _, p in modules()), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    for path in files:
        used |= imports(path)
        # Modules imported by name at run time: lazy commands, processes started with -m.
        used |= set(re.findall(r"[\"'](?:-m\s+)?([a-z_]+(?:\.[a-z_]+)+)[\"':]", path.read_text()))
    for name, path in modules():
        if path.name in ("__init__.py", "__main__.py") or "if __name__ ==" in path.read_text():
            continue
        assert name in used, f"{name} is used by nothing"


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / line for line in listing.split("\0") if line and (ROOT / line).is_file()]


def test_nothing_is_left_open_or_tied_to_a_machine() -> None:
    """No leftovers, no absolute path of somebody's machine."""
    banned = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|(^|[\s\"'`(=:])/(home|root|work|Users)/")
    for path in tracked():
        if path.suffix in (".py", ".proto", ".md", ".toml", ".txt", ".yaml", ".yml", "") and "inbox" not in path.parts:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                assert not banned.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
