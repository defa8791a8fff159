"""The modules that compute due times depend on their arguments and on the pinned packages, and on nothing else."""

from __future__ import annotations

import pytest

from tests.test_tidy import ROOT, fits, imports

MODULES = ("zones", "cron", "changes", "schedules", "misfires")
OUTSIDE = {
    "__future__", "bisect", "collections", "cronsim", "datetime", "difflib", "enum", "functools", "importlib",
    "msgspec", "re", "typing", "zoneinfo",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_due_times_depend_on_no_clock_and_no_state(name: str) -> None:
    path = ROOT / "sidecar" / "scheduling" / f"{name}.py"
    used = imports(path)
    assert {module.split(".")[0] for module in used} - {"sidecar"} <= OUTSIDE
    pure = ["sidecar.core.specification", *(f"sidecar.scheduling.{other}" for other in MODULES)]
    ours = {module for module in used if fits(module, "sidecar")} - {"sidecar.scheduling"}
    assert [module for module in ours if not any(fits(module, known) for known in pure)] == []
    text = path.read_text()
    assert not [word for word in (".now(", ".today(", ".utcnow(", "astimezone()") if word in text]
