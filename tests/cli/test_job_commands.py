"""The commands for jobs, switches and runs, as processes against a real sidecar: what they print, what they mean."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sidecars
from tests.cli.agent import agent
from tests.waiting import wait_until

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
MANUAL = """
jobs:
  - name: {name}
    owner: team-a
    runbook_url: https://example.org/runbook
    schedule: manual
    {more}
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = sidecars.one(tmp_path_factory.mktemp("j"), tenants="default,acme")
    process.start()
    try:
        asyncio.run(process.ready())
        yield f"unix:{process.socket}"
        process.terminate()
        assert asyncio.run(process.ended()) == 0, process.lines()[-5:]
    finally:
        process.kill()


@pytest.fixture
def run(address: str) -> Run:
    def call(*arguments: str, given: str = "", **environment: str) -> Done:
        settings = CLEAN | {"TENURE_ADDRESS": address, "COLUMNS": "200", "TENURE_ACTOR": "on-call"} | environment
        return subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments], input=given, capture_output=True, text=True, check=False,
            env=settings, timeout=60,
        )  # fmt: skip

    return call


def ok(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def parsed(done: Done) -> Any:
    return json.loads(ok(done))


def refused(done: Done, status: int, said: str) -> str:
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def apply(run: Run, name: str, more: str = "", schedule: str = "manual") -> Done:
    text = MANUAL.format(name=name, more=more).replace("schedule: manual", f"schedule: {schedule}")
    return run("job", "apply", "-f", "-", given=text)


def test_jobs_are_applied_shown_changed_and_rolled_back(run: Run, tmp_path: Path) -> None:
    name = "acme/report"
    daily = "{cron: 0 9 * * *, zone: Europe/Berlin}"
    assert "dry run, nothing is changed: 1 created" in ok(
        run("job", "apply", "-f", "-", "--dry-run", given=MANUAL.format(name=name, more=""))
    )
    refused(run("job", "show", name), 1, "JOB_NOT_FOUND")
    created = ok(apply(run, name, "timeout: 10m", daily))
    assert "acme/report: created, revision 1" in created
    assert created.endswith("1 created, 0 changed, 0 unchanged\n")

    shown = ok(run("job", "show", name))
    for text in (
        "acme/report, revision 1",
        "team-a",
        "https://example.org/runbook",
        "zone Europe/Berlin",
        "NO session",
    ):
        assert text in shown
    file = tmp_path / "shown.yaml"
    file.write_text(ok(run("job", "show", name, "-o", "yaml")))
    assert ok(run("job", "apply", "-f", str(file))).endswith("0 created, 0 changed, 1 unchanged\n")
    file.write_text(file.read_text().replace("timeout: 10m", "timeout: 20m"))
    changed = ok(run("job", "apply", "-f", str(file), "--reason", "it got slow"))
    assert "-timeout: 10m\n+timeout: 20m\n" in changed
    assert parsed(run("job", "show", name, "--json"))["revision"] == 2

    history = ok(run("job", "history", name))
    assert "it got slow" in history
    assert "on-call" in history
    assert "+timeout: 20m" in ok(run("job", "history", name, "--diff"))
    refused(run("job", "rollback", name, "--to", "9", "--reason", "x"), 1, "kept are 1, 2")
    assert "-timeout: 20m\n+timeout: 10m\n" in ok(run("job", "rollback", name, "--reason", "x", "--dry-run"))
    back = ok(run("job", "rollback", name, "--reason", "that was worse"))
    assert "-timeout: 20m\n+timeout: 10m\n" in back
    assert "revision 3 is what 1 was" in back
    assert parsed(run("job", "history", name, "--json"))[0]["rolled_back_to"] == 1

    listed = ok(run("job", "ls", "--tenant", "acme"))
    assert "0 9 * * * Europe/Berlin" in listed
    assert "team-a" in listed
    assert "deleted acme/report" in ok(run("job", "delete", name, "--reason", "not needed"))
    assert "report" not in ok(run("job", "ls", "--tenant", "acme"))


def test_a_file_is_applied_whole_or_not_at_all(run: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(MANUAL.format(name="whole", more=""))
    bad.write_text(MANUAL.format(name="broken", more="schedule: 0 25 * * *"))
    said = refused(run("job", "apply", "-f", str(good), "-f", str(bad)), 2, "mistake")
    assert f"{bad}:7: key 'schedule' stands there twice, first in line 6" in said
    assert parsed(run("job", "ls", "whole", "--json")) == []
    # What only the sidecar knows is said with the line, too.
    bad.write_text(MANUAL.format(name="nobody/broken", more=""))
    said = refused(run("job", "apply", "-f", str(good), "-f", str(bad)), 1, "TENANT_NOT_FOUND")
    assert parsed(run("job", "ls", "whole", "--json")) == []
    bad.write_text(MANUAL.format(name="broken", more="expected_revision: 7"))
    refused(run("job", "apply", "-f", str(good), "-f", str(bad)), 1, "JOB_REVISION_MISMATCH")
    assert parsed(run("job", "ls", "whole", "--json")) == []


def test_due_times_are_previewed(run: Run, tmp_path: Path) -> None:
    asked = (
        "job",
        "preview",
        "--cron",
        "30 2 * * *",
        "--zone",
        "Europe/Berlin",
        "--from",
        "2026-03-28 12:00",
        "-n",
        "2",
    )
    shown = ok(run(*asked))
    assert "2026-03-29 01:00:00Z  2026-03-29 03:00:00 +02:00 CEST  02:30 is in the gap, moved to 03:00" in shown
    assert "2026-03-30 00:30:00Z" in shown
    skipping = parsed(run(*asked, "--dst-policy", "skip", "--json"))
    assert skipping["due"][0]["utc"] == "2026-03-30 00:30:00Z"
    file = tmp_path / "f.yaml"
    file.write_text(MANUAL.format(name="a", more="").replace("manual", "every 1h"))
    assert ok(run("job", "preview", "-f", str(file), "-n", "3")).count(":00:00Z") == 3
    refused(run("job", "preview", "--cron", "61 * * * *"), 2, "minute")
    refused(run("job", "preview"), 2, "say one of JOB, -f FILE and --cron")
    refused(run("job", "preview", "--cron", "@daily", "--dst-policy", "summer"), 2, "vixie, skip, twice, shift")


def test_of_several_sidecars_one_that_is_ready_is_asked(run: Run, address: str, tmp_path: Path) -> None:
    ok(apply(run, "found"))
    other = sidecars.one(tmp_path, bootstrap="false")  # it listens, and never gets a leader
    other.start()
    try:
        alone = f"unix:{other.socket}"
        wait_until(lambda: run("status", TENURE_ADDRESS=alone).returncode == 0, sidecars.START_S)
        both = f"{alone},{address}"
        done = run("job", "show", "found", TENURE_ADDRESS=both)
        assert "default/found, revision 1" in ok(done)
        assert f"passing over the sidecar at {alone} (it is not ready: " in done.stderr
        assert "NOT READY" in ok(run("status", TENURE_ADDRESS=both))
        refused(run("job", "show", "found", TENURE_ADDRESS=alone), 4, "tenure status --address ADDRESS")
    finally:
        other.kill()


async def test_a_triggered_run_is_followed_to_its_outcome_and_explained(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "hand", "retry: {initial: 0s}"))
    async with agent(address) as worker:
        trigger = ("job", "trigger", "hand", "--reason", "try it", "--payload", "by hand", "--wait")
        waiting = asyncio.create_task(asyncio.to_thread(run, *trigger))
        first = await worker.claim("hand")
        assert first.payload == b"by hand"
        (shown,) = [row.split() for row in ok(await asyncio.to_thread(run, "runs")).splitlines()[1:]]
        assert (shown[:2], shown[4:7]) == ([first.run_id, "hand"], ["1", "crawler", "host-7"])
        await worker.fail(first, "no connection", retryable=True)
        second = await worker.claim("hand")
        await worker.complete(second, b"42 rows")
        done = await waiting
    assert ok(done).splitlines()[0].endswith(", succeeded")
    assert "result: 42 rows" in done.stdout
    told = ok(await asyncio.to_thread(run, "explain", "hand"))
    for text in (
        "default/hand: succeeded", "triggered by hand", "by on-call: try it", "attempt 1 given to crawler on host-7",
        f"run {first.run_id}): failed: no connection", "attempt 2 given to crawler", "result    42 rows", "attempts  2",
        "owner     team-a", "runbook   https://example.org/runbook",
    ):  # fmt: skip
        assert text in told, told


async def test_a_failure_is_the_exit_status(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "fails"))
    async with agent(address) as worker:
        waiting = asyncio.create_task(asyncio.to_thread(run, "job", "trigger", "fails", "--reason", "x", "--wait"))
        await worker.fail(await worker.claim("fails"), "bad data", retryable=False)
        done = await waiting
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "error: bad data" in done.stdout
    impatient = ("job", "trigger", "fails", "--reason", "x", "--wait", "--wait-max", "1ms")
    never = await asyncio.to_thread(run, *impatient, "--json")
    assert never.returncode == 3
    assert json.loads(never.stdout)["state"] == "OCCURRENCE_STATE_PENDING"


async def test_a_lost_holder_is_held_for_a_person(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "once", "delivery: at_most_once"))
    async with agent(address) as worker:
        ok(await asyncio.to_thread(run, "job", "trigger", "once", "--reason", "x"))
        lost = await worker.claim("once")
    held = ok(await asyncio.to_thread(run, "job", "held", "once"))
    assert "unknown (holder_lost), HELD for a person" in held
    command = next(line for line in held.splitlines() if line.strip().startswith("tenure job resolve"))
    assert command.strip() in ok(await asyncio.to_thread(run, "explain", "once"))
    words = command.split()[1:]
    assert words[:3] == ["job", "resolve", "default/once"]
    assert words[4] == "--sequence"
    words = words[:4]  # there is only one of that time
    decided = ("--as", "succeeded", "--result", "seen", "--reason", "it is there")
    resolve, stale = (*words, "--attempt", "1", *decided), (*words, "--attempt", "2", *decided)
    refused(await asyncio.to_thread(run, *stale), 1, "ATTEMPT_STALE")
    assert "succeeded" in ok(await asyncio.to_thread(run, *resolve))
    assert parsed(await asyncio.to_thread(run, "job", "held", "--json")) == []
    assert lost.run_id in ok(await asyncio.to_thread(run, "explain", "once"))


async def test_a_kill_waits_for_its_effect(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "acme/costly"))
    async with agent(address, tenant="acme") as worker:
        ok(await asyncio.to_thread(run, "job", "trigger", "acme/costly", "--reason", "x"))
        running = await worker.claim("costly")
        killing = asyncio.create_task(asyncio.to_thread(run, "kill", "acme/costly", "--reason", "too expensive"))
        await worker.acknowledge(running)
        done = await killing
    assert "job acme/costly is killed (switch k" in ok(done)
    assert "1 of 1 run ended, the slowest after" in done.stdout
    refused(await asyncio.to_thread(run, "job", "trigger", "acme/costly", "--reason", "x"), 1, "SWITCHED_OFF")
    told = ok(await asyncio.to_thread(run, "explain", "acme/costly"))
    assert "cancelled (killed)" in told
    assert "tenure switch show k" in told
    assert "KILLED by k" in ok(await asyncio.to_thread(run, "job", "ls", "--tenant", "acme"))
    assert "1 IN FORCE" in ok(await asyncio.to_thread(run, "status"))
    assert "too expensive" in ok(await asyncio.to_thread(run, "resume", "acme/costly", "--reason", "paid"))
    shown = ok(await asyncio.to_thread(run, "switch", "ls", "--all"))
    assert "cleared" in shown


async def test_a_kill_names_who_did_not_acknowledge(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "acme/deaf", "interrupt_grace: 100ms"))
    async with agent(address, "silent-agent", "acme") as worker:
        ok(await asyncio.to_thread(run, "job", "trigger", "acme/deaf", "--reason", "x"))
        await worker.claim("deaf")
        done = await asyncio.to_thread(run, "kill", "acme/deaf", "--reason", "stop")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "1 of them WITHOUT an acknowledgement" in done.stdout
    assert "silent-agent on host-7" in done.stdout
    ok(await asyncio.to_thread(run, "resume", "acme/deaf", "--reason", "x"))


async def test_one_run_is_interrupted(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "single"))
    async with agent(address) as worker:
        ok(await asyncio.to_thread(run, "job", "trigger", "single", "--reason", "x"))
        running = await worker.claim("single")
        assert "is told to stop" in ok(
            await asyncio.to_thread(run, "interrupt", running.run_id, "--reason", "wrong day")
        )
        await worker.acknowledge(running)
    assert "cancelled (operator)" in ok(await asyncio.to_thread(run, "explain", "single"))
    refused(await asyncio.to_thread(run, "interrupt", running.run_id, "--reason", "x"), 1, "RUN_NOT_FOUND")


def test_switches_are_set_replaced_and_cleared_by_id(run: Run) -> None:
    ok(apply(run, "acme/switched"))
    refused(run("pause", "--reason", "x"), 2, "say what is meant: JOB, --tenant TENANT, or --fleet")
    refused(run("pause", "--reason", "x", TENURE_TENANT="acme"), 2, "say what is meant")
    said = refused(run("pause", "acme/swtiched", "--reason", "x"), 1, "JOB_NOT_FOUND")
    assert "did you mean acme/switched?" in said
    paused = parsed(run("pause", "acme/switched", "--reason", "wait", "--for", "30m", "--json"))["switch"]
    assert 0 < paused["remaining_ms"] <= 1_800_000
    drained = ok(run("drain", "acme/switched", "--reason", "upgrade"))
    assert f"it took the place of switch {paused['switch_id']}" in drained
    refused(run("pause", "acme/switched", "--reason", "x"), 1, "SWITCH_STRONGER")
    refused(run("resume", "acme/switched", "--reason", "x", "--id", paused["switch_id"]), 1, "SWITCH_STALE")
    refused(run("switch", "clear", paused["switch_id"], "--reason", "x"), 1, "SWITCH_STALE")
    assert "replaced" in ok(run("switch", "show", paused["switch_id"]))
    ok(run("resume", "acme/switched", "--reason", "done"))
    refused(run("resume", "acme/switched", "--reason", "x"), 1, "no switch is in force for job acme/switched")
    whole = parsed(run("pause", "--tenant", "acme", "--reason", "all of it", "--json"))["switch"]
    assert (whole["scope"], whole["tenant"], whole["job"]) == ("SWITCH_SCOPE_TENANT", "acme", "")
    said = refused(run("resume", "acme/switched", "--reason", "x"), 1, "SWITCH_NOT_FOUND")
    assert f"tenant acme is under switch {whole['switch_id']}" in said
    ok(run("resume", "--tenant", "acme", "--reason", "x"))
    fleet = ok(run("pause", "--fleet", "--reason", "x"))
    assert "the fleet is paused" in fleet
    ok(run("resume", "--fleet", "--reason", "x"))
    assert parsed(run("switch", "ls", "--json")) == []


async def test_what_was_missed_is_backfilled(run: Run, address: str) -> None:
    ok(await asyncio.to_thread(apply, run, "tick", "misfire_policy: skip", "every 1h"))
    shown = ok(await asyncio.to_thread(
        run, "job", "backfill", "tick", "2026-03-29 09:30", "2026-03-29T11:30:00Z", "--reason", "outage", "--dry-run"
    ))  # fmt: skip
    assert shown.endswith("2 of 2 due times would run\n")
    made = ok(await asyncio.to_thread(
        run, "job", "backfill", "tick", "2026-03-29 09:30", "2026-03-29T11:30:00Z", "--reason", "outage"
    ))  # fmt: skip
    assert made.endswith("2 of 2 due times will run\n")
    async with agent(address) as worker:
        for _ in range(2):
            backfilled = await worker.claim("tick")
            await worker.complete(backfilled)
    asked = ("job", "backfill", "tick", "2026-03-29 09:30", "2026-03-29T11:30:00Z", "--reason", "x", "--dry-run")
    again = ok(await asyncio.to_thread(run, *asked))
    assert again.count("has succeeded") == 2
    rows = parsed(await asyncio.to_thread(run, "job", "occurrences", "tick", "--state", "succeeded", "--json"))
    assert [row["origin"] for row in rows] == ["OCCURRENCE_ORIGIN_BACKFILL"] * 2
    refused(await asyncio.to_thread(run, "job", "backfill", "tick", "09:30", "noon", "--reason", "x"), 2, "TO: 'noon'")
    future = ("job", "backfill", "tick", "2026-01-01", "2099-01-01", "--reason", "x")
    refused(await asyncio.to_thread(run, *future), 2, "TO is 2099-01-01 00:00:00Z, which is still to come")
    backwards = ("job", "backfill", "tick", "now", "2026-01-01", "--reason", "x")
    refused(await asyncio.to_thread(run, *backwards), 2, "which is not before TO, 2026-01-01 00:00:00Z")


def test_why_nothing_ran_is_explained(run: Run) -> None:
    ok(apply(run, "quiet", schedule="{cron: 0 9 * * *, zone: Europe/Berlin}"))
    before = ok(run("explain", "quiet", "2026-03-28 09:00"))
    assert "2026-03-28 08:00:00Z (2026-03-28 09:00:00 +01:00 CET)" in before
    assert "why       " in before
    other = ok(run("explain", "quiet", "2026-03-28T10:00:00Z"))
    assert "before    due 2026-03-28 08:00:00Z" in other
    assert "after     due 2026-03-29 07:00:00Z (2026-03-29 09:00:00 +02:00 CEST)" in other
    refused(run("explain", "quiet", "2026-03-29 02:30"), 2, "and the job is not due in its place")
    assert refused(run("explain", "quiet", "soon"), 2, "TIME: 'soon' is not a time").count("write") == 1
    assert "did you mean" not in refused(run("explain", "no such job"), 1, "JOB_NOT_FOUND")
    assert "did you mean quiet?" in refused(run("explain", "quite"), 1, "JOB_NOT_FOUND")
    ok(apply(run, "moved", schedule="{cron: 30 2 * * *, zone: Europe/Berlin}"))
    moved = run("explain", "moved", "2026-03-29 02:30")
    assert "2026-03-29 03:00:00 +02:00 CEST" in ok(moved)
    assert "does not exist in Europe/Berlin" in moved.stderr
    ok(apply(run, "asked"))
    asked = ok(run("explain", "asked"))
    assert "it runs only when it is triggered" in asked
    assert "tenure job trigger default/asked" in asked
    past = ok(apply(run, "past", schedule="{once: 2020-03-28T02:30:00Z}"))
    assert "warning: schedule: all its times are past" in past
    refused(run("job", "rollback", "past", "--reason", "x"), 1, "there is no older revision than 1")


def test_who_waits_for_a_worker_is_told_so(run: Run) -> None:
    ok(apply(run, "unserved"))
    trigger = ("job", "trigger", "unserved", "--reason", "x")
    assert "  no session serves the job; it is missed if" in ok(run(*trigger))
    second = run(*trigger, "--wait")
    assert second.returncode == 1
    assert "another one of the job was unfinished: the one of " in second.stdout
    assert "now pending: no session serves the job" in second.stdout
    told = ok(run("explain", "unserved"))
    assert "tenure worker --job default/unserved -- COMMAND   # nobody serves the job now" in told
    ok(run("job", "delete", "unserved", "--reason", "x"))
    refused(run("explain", "a/b/c"), 2, "write NAME or TENANT/NAME")


def test_what_is_imported_is_applied(run: Run, tmp_path: Path) -> None:
    tab = tmp_path / "tab"
    tab.write_text("CRON_TZ=Europe/Berlin\n*/5 * * * * /opt/sync.sh\n@daily /opt/sync.sh --all\n")
    own = ("--owner", "ops", "--runbook-url", "https://example.org/r", "--tenant", "acme")
    jobs = ok(run("job", "import", "crontab", str(tab), *own))
    assert "2 created" in ok(run("job", "apply", "-f", "-", "--dry-run", given=jobs))
    assert "2 created" in ok(run("job", "apply", "-f", "-", given=jobs))
    assert parsed(run("job", "show", "acme/sync-2", "--json"))["spec"]["owner"] == "ops"


async def test_pages_are_fetched_one_after_another(run: Run) -> None:
    text = "jobs:\n" + "".join(
        f"  - {{name: many-{n:04}, owner: a, runbook_url: 'https://example.org/', schedule: manual}}\n"
        for n in range(1_000)
    )
    assert "1000 created" in ok(await asyncio.to_thread(run, "job", "apply", "-f", "-", given=text))
    rows = parsed(await asyncio.to_thread(run, "job", "ls", "many-", "--json"))
    assert [row["name"] for row in rows] == [f"many-{n:04}" for n in range(1_000)]
