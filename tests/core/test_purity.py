"""The core's rules about itself, read from its source. tests/test_tidy.py has the list of what it may import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sidecar.core

MODULES = sorted(Path(sidecar.core.__file__).parent.glob("*.py"))
IMPURE_NAMES = {"open", "print", "input", "hash", "id", "eval", "exec", "globals", "float", "round"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_in_the_core_depends_on_anything_but_its_input(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global), where
        if isinstance(node, ast.Name):
            assert node.id not in IMPURE_NAMES, f"{where}: {node.id}"
        if isinstance(node, ast.Constant):
            assert not isinstance(node.value, float), f"{where}: a float"
        if isinstance(node, ast.BinOp | ast.AugAssign):
            assert not isinstance(node.op, ast.Div), f"{where}: a division that gives a float"
        # A set may be asked for membership (a frozenset of constants), and is never built to be walked through.
        assert not isinstance(node, ast.SetComp), f"{where}: a set"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "set", f"{where}: a set"
        if isinstance(node, ast.For | ast.comprehension):
            assert not isinstance(node.iter, ast.Set), f"{where}: a walk through a set"


def test_every_record_of_the_core_is_frozen() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases):
                frozen = [keyword for keyword in node.keywords if keyword.arg == "frozen"]
                assert frozen, f"{path.name}: {node.name}"
                assert ast.unparse(frozen[0].value) == "True", f"{path.name}: {node.name}"
