"""Files of jobs: what they mean, and everything that is wrong with them, by line. And back: what is written is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenure.v1 import job_pb2

from sidecar.cli import job_files, job_yaml, times, yaml_nodes
from sidecar.cli.failures import CliError
from sidecar.cli.job_fields import Problem
from sidecar.cli.job_files import Located, Reader
from sidecar.services.specs import spec_message, spec_of

MINIMAL = "owner: a, runbook_url: 'https://example.org/r'"
Write = Callable[[str], Path]


def read(text: str) -> tuple[list[Located], list[str]]:
    reader = Reader("f", "default")
    found = reader.read(text.encode())
    return found, [f"{problem.line}: {problem.text}" for problem in reader.problems]


def one(fields: str) -> job_pb2.JobDefinition:
    found, wrong = read(f"jobs: [{{name: n, {MINIMAL}, {fields}}}]")
    assert wrong == []
    return found[0].definition


def wrong_with(fields: str) -> str:
    """What is said of a job with these fields, each on a line of its own."""
    lines = ["jobs:", "  - name: n", "    owner: a", "    runbook_url: https://example.org/r", *fields.split("\n")]
    _, wrong = read("\n".join("    " + line if n > 3 else line for n, line in enumerate(lines)))
    return "\n".join(wrong)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ('"0 9 * * *"', job_pb2.Schedule(cron="0 9 * * *")),
        ('"@hourly"', job_pb2.Schedule(cron="@hourly")),
        ("every 1h30m", job_pb2.Schedule(interval=job_pb2.IntervalSchedule(every_ms=5_400_000))),
        ("manual", job_pb2.Schedule(manual=job_pb2.ManualSchedule())),
        ("{manual: true}", job_pb2.Schedule(manual=job_pb2.ManualSchedule())),
        ("{manual: {}}", job_pb2.Schedule(manual=job_pb2.ManualSchedule())),
        (
            "{every: 90s, anchor: '1970-01-01T00:00:30Z'}",
            job_pb2.Schedule(interval=job_pb2.IntervalSchedule(every_ms=90_000, anchor_wall_ms=30_000)),
        ),
        (
            "{interval: {every_ms: 90000}}",
            job_pb2.Schedule(interval=job_pb2.IntervalSchedule(every_ms=90_000)),
        ),
        ("{once: '1970-01-02T00:00:00.5+01:00'}", job_pb2.Schedule(once_wall_ms=82_800_500)),
        (
            "{once: 2026-07-01 09:00, zone: Europe/Berlin}",
            job_pb2.Schedule(once_wall_ms=1_782_889_200_000, zone="Europe/Berlin"),
        ),
        (
            "{cron: 0 2 * * *, zone: Europe/Berlin, dst_policy: shift, start: 2026-01-01, end_wall_ms: 1900000000000}",
            job_pb2.Schedule(
                cron="0 2 * * *", zone="Europe/Berlin", dst_policy=job_pb2.DST_POLICY_SHIFT,
                start_wall_ms=1_767_222_000_000, end_wall_ms=1_900_000_000_000,
            ),
        ),
    ],
)  # fmt: skip
def test_schedules(schedule: str, expected: job_pb2.Schedule) -> None:
    assert one(f"schedule: {schedule}").spec.schedule == expected


def test_fields_take_both_their_names() -> None:
    long = one("schedule: manual, timeout_ms: 600_000, retry: {initial_ms: 2000}, overlap_policy: buffer_one")
    short = one("schedule: manual, timeout: 10m, retry: {initial: 2s}, overlap_policy: buffer-one")
    assert long == short
    assert long.spec.timeout_ms == 600_000


def test_text_stays_text() -> None:
    job = one("schedule: manual, labels: {version: 1.10, on: no}, selector: {version: [1.10, 2], zone: a}")
    assert dict(job.spec.labels) == {"version": "1.10", "on": "no"}
    assert [(term.key, list(term.values)) for term in job.spec.selector] == [
        ("version", ["1.10", "2"]),
        ("zone", ["a"]),
    ]


def test_a_tenant_comes_from_the_job_the_name_the_document_or_the_command() -> None:
    text = f"""
jobs: [{{name: a, schedule: manual, {MINIMAL}}}, {{name: acme/b, schedule: manual, {MINIMAL}}}]
---
tenant: second
jobs: [{{name: c, schedule: manual, {MINIMAL}}}, {{name: d, tenant: third, schedule: manual, {MINIMAL}}}]
"""
    found, wrong = read(text)
    assert wrong == []
    assert [job.name for job in found] == ["default/a", "acme/b", "second/c", "third/d"]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("payload: plain text", b"plain text"),
        ("payload: '123'", b"123"),
        ("payload: 123", b"123"),
        ("payload_json: {a: [1, 2.5, true, null, x, '7', no, 1.2.3]}", b'{"a":[1,2.5,true,null,"x","7","no","1.2.3"]}'),
        ("payload_json: text", b'"text"'),
        ("payload_base64: AAH/", b"\x00\x01\xff"),
    ],
)
def test_payloads(payload: str, expected: bytes) -> None:
    assert one(f"schedule: manual, {payload}").spec.payload == expected


def test_a_payload_file_lies_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "p.bin").write_bytes(b"\x00payload")
    (tmp_path / "big.bin").write_bytes(bytes(70_000))
    file = tmp_path / "jobs.yaml"
    file.write_text(f"jobs: [{{name: n, schedule: manual, payload_file: p.bin, {MINIMAL}}}]")
    assert job_files.load([str(file)], "default")[0].definition.spec.payload == b"\x00payload"
    for name, said in (("gone.bin", "No such file"), ("big.bin", "at most 65536")):
        file.write_text(f"jobs: [{{name: n, schedule: manual, payload_file: {name}, {MINIMAL}}}]")
        with pytest.raises(CliError, match=said):
            job_files.load([str(file)], "default")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("timout: 3m\nschedule: manual", "5: 'timout' is no key of a job; did you mean timeout?"),
        ("schedule: manual\ncron: x", "6: 'cron' is no key of a job; it belongs under schedule"),
        ("schedule: manual\nretry: {attempts: 3}", "6: 'attempts' is no key of retry; did you mean attempts_max?"),
        ("schedule: manual\ntimeout: 10", "6: timeout: '10' is not a number with its unit"),
        ("schedule: manual\ntimeout: 3m\ntimeout_ms: 1", "7: timeout and timeout_ms are the same; say one of them"),
        ("schedule: manual\ntimeout:", "6: timeout has no value"),
        ("schedule: manual\ntimeout: 3m\ntimeout: 4m", "7: key 'timeout' stands there twice, first in line 6"),
        ("schedule: manual\npriority: high", "6: priority is 'high'; it must be a whole number"),
        ("schedule: manual\npriority: 99999999999", "6: priority is 99999999999; that number is too large"),
        ("schedule: manual\npriority: 101", "6: priority is 101; allowed: -100 to 100"),
        ("schedule: manual\nretry: {on_failure: yes}", "6: on_failure is 'yes'; it must be true or false"),
        ("schedule: manual\noverlap_policy: skipp", "did you mean skip?"),
        ("schedule: manual\nmisfire_policy: all", "catch_up_max is 0; allowed: 1 to 1000, required with all"),
        ("schedule: manual\npayload: {a: 1}", "6: payload: it must be text; payload_json takes mappings and lists"),
        ("schedule: manual\npayload: a\npayload_json: b", "7: payload and payload_json are the same"),
        ("schedule: manual\npayload_json: .inf", "6: payload_json: .inf is no number of JSON"),
        ("schedule: manual\npayload_base64: '?'", "6: payload_base64: not base64"),
        ("schedule: manual\nlabels: [a]", "6: labels must be a mapping"),
        ("schedule: manual\nselector: a", "6: selector must be a mapping"),
        ("schedule: manual\nselector: [{key: a}]", "6: a term of a selector is a mapping of key and values"),
        ("schedule: manual\nowner: [a]", "owner"),
        ("schedule: 0 25 * * *", "5: schedule.cron hour is '25'; allowed: 0-23"),
        ("schedule:\n  cron: 0 0 30 2 *", "never fires"),
        ("schedule:\n  cron: 0 9 * * *\n  zone: Europe/Berln", "7: schedule.zone is 'Europe/Berln'"),
        ("schedule: {}", "5: a schedule has one of cron, every, once and manual; this one has none"),
        ("schedule: {cron: 0 9 * * *, every: 5m}", "not cron and every"),
        ("schedule: every 1", "5: every: '1' is not a number with its unit"),
        ("schedule: every 10ms", "5: schedule.every is 10ms: nothing is finer than one second; allowed: 1s to 366d"),
        ("schedule: 5m", "5: schedule is '5m'; did you mean 'every 5m'?"),
        ("schedule: every 5 min", "5: every: '5 min' is not a number with its unit: ms, s, m, h or d, as in 90s"),
        ("schedule: every 5 min", "did you mean 5m?"),
        ("schedule: 0 30 2 * * *", "'0 30 2 * * *': it has 6: finer than one minute, or with a year; allowed: five"),
        ("schedule: manual\njitter: 2h", "6: jitter is 2h; allowed: less than starting_deadline (1h), or what is"),
        ("schedule: manual\ntimeout_ms: 5", "6: timeout is 5ms; allowed: 1s to 7d"),
        (
            "schedule: {every: 1d, start: 2026-01-02T00:00:00Z, end: 2026-01-01T00:00:00Z}",
            "5: schedule.end is 2026-01-01T00:00:00Z; allowed: after start (2026-01-02T00:00:00Z)",
        ),
        ("schedule: manual\noverlap_policy: Forbid", "did you mean skip?"),
        ("schedule: manual\nmode: dry", "did you mean shadow?"),
        ("schedule:\n  once: 2026-03-29 02:30\n  zone: Europe/Berlin", "6: once: '2026-03-29 02:30' does not exist in"),
        ("schedule:\n  once: 2026-10-25 02:30\n  zone: Europe/Berlin", "comes twice in Europe/Berlin"),
        ("schedule:\n  once: 2026-10-25 02:30", "6: once: '2026-10-25 02:30' does not say its offset"),
        ("schedule:\n  once: 2026-13-25T02:30:00Z", "6: once: '2026-13-25T02:30:00Z' is not a time"),
        ("schedule: !!python/object:os.system x", "5: tag tag:yaml.org,2002:python/object:os.system"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(fields: str, said: str) -> None:
    assert said in wrong_with(fields)


def test_everything_is_reported_at_once_and_by_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("jobs:\n- name: x\n  schedule: nonsense\n- nothing\n")
    second.write_text(
        f"jobs:\n- {{name: y, schedule: manual, {MINIMAL}}}\n- {{name: y, schedule: manual, {MINIMAL}}}\n"
    )
    with pytest.raises(CliError) as caught:
        job_files.load([str(first), str(second)], "default")
    assert caught.value.status == 2
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 mistakes, nothing is applied"
    for said in (f"{first}:2: x has no owner", f"{first}:3: schedule.cron is 'nonsense'", f"{first}:4: a job is a"):
        assert any(said in line for line in lines), lines
    assert f"{second}:3: default/y stands there twice" in lines[-1]
    found = [Problem(str(second), 1, "b"), Problem(str(first), 9, "a")]
    with pytest.raises(CliError, match=r"(?s)a\.yaml.*b\.yaml"):
        job_files.refuse(found, [str(first), str(second)])


@pytest.mark.parametrize(
    ("fields", "mistakes"),
    [
        # What cannot be read does not hide what is wrong beside it,
        ("schedule: 0 0 30 2 *\npayload: a\npayload_json: b\npriority: 101", [5, 7, 8]),
        ("schedule: every 0s\ntimout: 5m", [5, 6]),
        ("schedule:\n  every: 1 x\n  anchor: 2026-01-01T00:00:00Z\nlabels: [a]", [6, 8]),
        # and leads to no second mistake.
        ("schedule: manual\nmisfire_policy: all\ncatch_up_max: many", [7]),
        ("schedule: manual\nstarting_dedline: 5h\njitter: 2h", [6]),
        ("schedule: manual\nowner:", [6]),
        ("timeout: 5m", [2]),
    ],
)
def test_mistakes_of_all_kinds_are_found_together_and_once(fields: str, mistakes: list[int]) -> None:
    assert [int(line.partition(":")[0]) for line in wrong_with(fields).splitlines()] == mistakes, wrong_with(fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no jobs in"),
        ("jobs: {}", "jobs must be a list"),
        ("- a", "a document is a mapping with 'jobs:'"),
        ("jobs: []\njbos: []", "'jbos' is no key of a document; did you mean jobs?"),
        ("a: [", "not YAML"),
        ("a: \x01", "not YAML"),
        ("jobs: *a", "no such anchor"),
        ("jobs: &a [*a]", "stands inside of what it names"),
        ("[" * 100, "nested deeper than"),
        ("[" * 100_000, "nest"),
        ("? [a]\n: b", "a key must be text"),
    ],
)
def test_files_that_are_none(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(CliError, match=said) as caught:
        job_files.load([str(file)], "default")
    assert caught.value.status == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="No such file"):
        job_files.load([str(tmp_path / "gone")], "default")
    (tmp_path / "latin").write_bytes(b"jobs: []\n# \xe4")
    with pytest.raises(CliError, match="latin:2: not UTF-8"):
        job_files.load([str(tmp_path / "latin")], "default")
    with pytest.raises(CliError, match="twice"):
        job_files.load(["-", "-"], "default")


def test_aliases_do_not_explode() -> None:
    lines = ["x-0: &a0 [xxxxxxxxxxxxxxxx]"]
    lines += [f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    _, wrong = read("\n".join([*lines, "jobs: []"]))
    assert any("with its aliases written out" in each for each in wrong)


def test_anchors_and_merges_are_fine() -> None:
    text = f"""
x-base: &base {{{MINIMAL}, schedule: manual, timeout: 5m}}
jobs:
  - {{<<: *base, name: a}}
  - {{<<: *base, name: b, timeout: 6m}}
"""
    found, wrong = read(text)
    assert wrong == []
    assert [job.definition.spec.timeout_ms for job in found] == [300_000, 360_000]


ANY_TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, print_blob=True)
@given(payload=st.binary(max_size=64) | ANY_TEXT.map(str.encode) | JSON.map(job_files.compact_json))
def test_every_payload_is_written_so_that_it_is_read(payload: bytes) -> None:
    job = job_pb2.JobDefinition(tenant="t", name="n", spec=one("schedule: manual").spec)
    job.spec.payload = payload
    found, wrong = read(job_yaml.file_of([job]))
    assert wrong == []
    assert found[0].definition == job


PRINTABLE = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable() and text.strip() == text)


@st.composite
def specs(draw: st.DrawFn) -> job_pb2.JobSpec:
    spec = job_pb2.JobSpec(
        owner=draw(PRINTABLE), runbook_url="https://example.org/r", description=draw(ANY_TEXT),
        jitter_ms=draw(st.integers(0, 900)), timeout_ms=draw(st.integers(1_000, 600_000_000)),
        priority=draw(st.integers(-100, 100)), payload=draw(st.binary(max_size=20)),
        overlap_policy=draw(st.sampled_from(list(job_pb2.OverlapPolicy.values())[:5])),
        buffer_max=draw(st.sampled_from([1, 100, 1000])), mode=draw(st.sampled_from(job_pb2.JobMode.values())),
        labels=draw(st.dictionaries(PRINTABLE, ANY_TEXT, max_size=3)),
        delivery=draw(st.sampled_from(job_pb2.Delivery.values())),
    )  # fmt: skip
    if draw(st.booleans()):
        spec.canary.percent, spec.canary.label, spec.canary.value = (
            draw(st.integers(1, 99)),
            draw(PRINTABLE),
            draw(ANY_TEXT),
        )
    for key in draw(st.sets(PRINTABLE, max_size=3)):
        spec.selector.add(key=key, values=draw(st.lists(ANY_TEXT, min_size=1, max_size=3)))
    kind = draw(st.sampled_from(["cron", "interval", "once", "manual"]))
    if kind == "cron":
        spec.schedule.cron = draw(st.sampled_from(["*/5 * * * *", "@hourly", "0 9 * * mon-fri", "0 0 L * *"]))
    elif kind == "interval":
        spec.schedule.interval.every_ms = draw(st.integers(1_000, 10**9))
        spec.schedule.interval.anchor_wall_ms = draw(st.integers(0, 10**13))
    elif kind == "once":
        spec.schedule.once_wall_ms = draw(st.integers(1, 10**13))
    else:
        spec.schedule.manual.SetInParent()
    spec.schedule.zone = draw(st.sampled_from(["", "Europe/Berlin", "Asia/Kathmandu"]))
    return spec


@settings(deadline=None, print_blob=True)
@given(spec=specs())
def test_what_is_shown_is_what_apply_accepts(spec: job_pb2.JobSpec) -> None:
    meant = spec_of(spec, "spec")
    job = job_pb2.JobDefinition(tenant="t", name="n", spec=spec_message(meant))
    found, wrong = read(job_yaml.file_of([job]))
    assert wrong == []
    assert spec_of(found[0].definition.spec, "spec") == meant


def test_a_diff_shows_what_changed() -> None:
    before = one("schedule: manual, timeout: 10m").spec
    after = one("schedule: manual, timeout: 20m, payload: x").spec
    lines = job_yaml.spec_diff("t/n", before, after, "revision 1", "revision 2")
    assert lines[:2] == ["--- t/n (revision 1)", "+++ t/n (revision 2)"]
    assert {line for line in lines[3:] if line[0] in "+-"} == {"-timeout: 10m", "+timeout: 20m", "+payload: x"}
    assert job_yaml.spec_diff("t/n", before, before, "a", "b") == []


@given(ms=st.integers(0, 10**13))
def test_durations_and_moments_come_back(ms: int) -> None:
    assert times.parse_duration(times.write_duration(ms)) == ms
    if ms:
        assert times.parse_moment(times.rfc3339(ms), None) == ms
        assert times.parse_moment(times.rfc3339(ms, "America/St_Johns"), None) == ms


def test_moments_as_they_are_said() -> None:
    now = times.parse_moment("2026-03-30T01:30:00+02:00", None)  # still the 29th in UTC
    berlin = "Europe/Berlin"
    assert times.parse_when("09:00", berlin, now) == times.parse_moment("2026-03-30T09:00:00+02:00", None)
    assert times.parse_when("yesterday  9:00", berlin, now) == times.parse_moment("2026-03-29T09:00:00+02:00", None)
    assert times.parse_when("2026-03-28 09:00", berlin, now) == times.parse_moment("2026-03-28T09:00:00+01:00", None)
    assert times.parse_when(str(now), berlin, 0) == now
    for text in ("noon", "25:00", "2026-02-30", "yesterday 02:30", "2026-03-28T09:00:00+25:00", "99999999999999999"):
        with pytest.raises(ValueError, match="not"):
            times.parse_when(text, berlin, now)


@given(text=st.text(alphabet="ab:{}[],&*<>-\n \"'|?!#%0.", max_size=60))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    documents, wrong = yaml_nodes.documents(text.encode())
    for document in documents:
        try:
            yaml_nodes.value(document)
        except yaml_nodes.YamlError as error:
            wrong.append(error)
    assert all(error.line >= 1 for error in wrong)
