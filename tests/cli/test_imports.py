"""Crontabs and CronJobs as jobs: what is carried over, what is reported, and that 'apply' takes the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenure.v1 import job_pb2
from typer.testing import CliRunner

from sidecar.cli import import_cronjob, import_crontab, imports
from sidecar.cli.app import app
from sidecar.cli.imports import Imported, Report
from sidecar.cli.job_files import Reader

OWN = ("acme", "ops", "https://example.org/r")
runner = CliRunner()


def crontab(text: str, zone: str = "UTC", *, user_field: bool = False) -> tuple[list[Imported], list[str]]:
    report = Report()
    found = import_crontab.read(text, "tab", *OWN, zone, report, user_field=user_field)
    kept = imports.checked(imports.unique(found), report)
    reader = Reader("again", "acme")
    again = reader.read(imports.file_of(kept).encode()) if kept else []
    assert reader.problems == []
    assert [each.definition for each in again] == [each.definition for each in kept]
    return kept, report.lines


def cronjobs(text: str) -> tuple[list[Imported], list[str]]:
    report = Report()
    found = import_cronjob.read(text.encode(), "k8s", *OWN, "", report)
    return imports.checked(imports.unique(found), report), report.lines


def test_a_line_keeps_what_cron_means_by_it() -> None:
    (job,), lines = crontab("30 4 * * mon-fri\t/usr/local/bin/backup.sh --all\n")
    spec = job.definition.spec
    assert (job.definition.tenant, job.definition.name) == ("acme", "backup")
    assert (spec.schedule.cron, spec.schedule.zone) == ("30 4 * * mon-fri", "UTC")
    assert spec.payload == b'{"command":"/usr/local/bin/backup.sh --all"}'
    assert spec.misfire_policy == job_pb2.MISFIRE_POLICY_SKIP
    assert spec.delivery == job_pb2.DELIVERY_AT_MOST_ONCE
    assert lines == []
    assert "tenure worker --job acme/backup -- /bin/sh -c '/usr/local/bin/backup.sh --all'" in imports.file_of([job])


def test_what_is_set_before_a_line_counts() -> None:
    text = 'CRON_TZ=Europe/Berlin\nMAILTO=me@example.org\nRANDOM_DELAY = 90\nPATH="/bin:/opt"\n@daily x\n'
    text += "CRON_TZ=Asia/Tokyo\n@hourly y"
    (first, second), lines = crontab(text, zone="")
    assert [each.definition.spec.schedule.zone for each in (first, second)] == ["Europe/Berlin", "Asia/Tokyo"]
    assert first.definition.spec.jitter_ms == 5_400_000
    assert b'"env":{"PATH":"/bin:/opt"}' in first.definition.spec.payload
    for said in ("RANDOM_DELAY=90: jitter", "PATH=/bin:/opt: set it", "NOT carried over: MAILTO=me@example.org"):
        assert any(said in line for line in lines), lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("@reboot /bin/x", "tab:1: NOT carried over: @reboot has no due time"),
        ("0 25 * * * x", "tab:1: NOT carried over: x: schedule.cron hour is '25'"),
        ("0 0 30 2 * x", "never fires"),
        ("0~30 * * * * x", "random times"),
        ("not a line", "not understood: 'not a line'"),
        ("* * * * *", "not understood"),
        ("RANDOM_DELAY=soon", "which is no number of minutes"),
        ("* * * * * %input", "has no command"),
        ("CRON_TZ=Mars/Olympus\n@daily x", "schedule.zone is 'Mars/Olympus'"),
    ],
)
def test_what_cannot_be_carried_over_is_said(line: str, said: str) -> None:
    found, lines = crontab(line)
    assert found == []
    assert any(said in each for each in lines), lines


def test_input_users_and_signs() -> None:
    (job,), lines = crontab("-5 4 * * * root  mail -s 100\\% you%hello%there", user_field=True)
    assert job.definition.spec.payload == b'{"command":"mail -s 100% you","stdin":"hello\\nthere\\n"}'
    assert job.definition.spec.labels["cron-user"] == "root"
    assert len(lines) == 3


BLANKS = st.text(alphabet=" \t", min_size=1, max_size=3)
COMMANDS = st.lists(st.text(alphabet="ab/-|&.\"'$\\(\xa0\x0b\u2028", min_size=1, max_size=6), min_size=1, max_size=4)


@given(data=st.data(), gaps=st.lists(BLANKS, min_size=7, max_size=7), words=COMMANDS, user_field=st.booleans())
def test_any_blanks_between_the_fields_are_alike(
    data: st.DataObject, gaps: list[str], words: list[str], *, user_field: bool
) -> None:
    command = " ".join(words)
    when = data.draw(st.sampled_from([("25", "6", "*", "*", "mon-fri"), ("@daily",)]))
    fields = [*when, *(["root"] if user_field else [])]
    line = gaps.pop() + "".join(field + gaps.pop() for field in fields) + command
    (job,), _ = crontab(line + "\n", user_field=user_field)
    assert job.definition.spec.schedule.cron == " ".join(when)
    assert json.loads(job.definition.spec.payload) == {"command": command}
    assert job.definition.spec.labels.get("cron-user") == ("root" if user_field else None)


def test_a_user_where_none_is_expected_and_none_where_one_is() -> None:
    root = "25 6\t* * *\troot\ttest -x /usr/sbin/anacron || run-parts /etc/cron.daily\n"
    hint = "every command begins with a user of this machine"
    assert any(hint in line for line in crontab(root)[1])
    assert not any(hint in line for line in crontab(root + "@daily /srv/x\n")[1])
    assert not any(hint in line for line in crontab(root, user_field=True)[1])
    found, lines = crontab("@daily /srv/x --all\n", user_field=True)
    assert found == []
    assert any("'/srv/x' stands where --user-field expects a user" in line for line in lines)
    (_,), lines = crontab("@daily nobody-here x\n", user_field=True)
    assert any("nobody-here, which this machine does not know" in line for line in lines)


def test_the_machines_zone_is_asked_for() -> None:
    _, lines = crontab("@daily x", zone="")
    assert "cron went by the zone of its machine" in lines[0]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("cd /srv/app && ./bin/sync.sh", "sync"), ("python3 /opt/report.py", "report"),
        ("flock -n -w 5 /l/x.lock /srv/hourly", "hourly"), ("timeout -k 5 90s sudo -u app /srv/nightly", "nightly"),
        ("python3 -u /srv/poll.py", "poll"), ("cd && ./tidy", "tidy"), ("sleep 5; x", "x"),
        ('sh -c "cd /x; ./deploy now"', "deploy"), ("A=b nice -n 10 /x/tidy", "tidy"), ("[ -x /x ] && /bin/[", "x"),
        ("'unbalanced", "unbalanced"), ("((", "job"), ("/opt/ä", "job"),
    ],
)  # fmt: skip
def test_names_are_found(command: str, name: str) -> None:
    assert imports.valid_name(import_crontab.name_of(command)) == name


def test_names_are_unique() -> None:
    found, _ = crontab("@daily a.sh\n@hourly a.sh\n@weekly /x/a\n")
    assert [each.definition.name for each in found] == ["a", "a-2", "a-3"]
    assert "--job acme/a-3 --" in imports.file_of(found)


FULL = """
apiVersion: batch/v1
kind: CronJob
metadata: {name: report, namespace: prod, labels: {app: r}, annotations: {note: x}}
spec:
  schedule: "0 7 * * 1-5"
  timeZone: Europe/Berlin
  concurrencyPolicy: Replace
  suspend: true
  startingDeadlineSeconds: 200
  successfulJobsHistoryLimit: 3
  jobTemplate:
    spec:
      backoffLimit: 2
      activeDeadlineSeconds: 600
      parallelism: 2
      template:
        spec:
          restartPolicy: Never
          serviceAccountName: reporter
          containers:
            - name: main
              image: reports:1.2
              command: [python, -m, report]
              args: ["--day", yesterday]
              resources: {limits: {cpu: 1}}
              env:
                - {name: LEVEL, value: info}
                - {name: TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}
            - {name: side, image: proxy}
"""


def test_a_cronjob() -> None:
    (job,), lines = cronjobs(FULL)
    spec = job.definition.spec
    assert (spec.schedule.cron, spec.schedule.zone) == ("0 7 * * 1-5", "Europe/Berlin")
    assert spec.overlap_policy == job_pb2.OVERLAP_POLICY_CANCEL_RUNNING
    assert spec.starting_deadline_ms == spec.catch_up_window_ms == 200_000
    assert (spec.retry.attempts_max, spec.timeout_ms, spec.interrupt_grace_ms) == (3, 600_000, 30_000)
    assert dict(spec.labels) == {"app": "r", "namespace": "prod"}
    assert spec.payload == (
        b'{"image":"reports:1.2","command":["python","-m","report"],"args":["--day","yesterday"],"env":{"LEVEL":"info"}}'
    )
    for said in (
        "metadata.annotations", "suspend: true. After apply: tenure pause acme/report", "spec.parallelism",
        "serviceAccountName", "containers[0].resources", "env TOKEN", "container side",
    ):  # fmt: skip
        assert any("NOT carried over" in line and said in line for line in lines), (said, lines)


def minimal(name: str, spec: str) -> str:
    template = "jobTemplate: {spec: {template: {spec: {containers: [{image: i}]}}}}"
    return f"{{kind: CronJob, metadata: {{name: {name}}}, spec: {{schedule: 0 1 * * *, {template}, {spec}}}}}"


def test_lists_documents_and_other_kinds() -> None:
    text = f"kind: List\nitems: [{minimal('a', '')}, {{kind: Service}}]\n---\n{minimal('a', '')}\n---\n- 1\n"
    text += f"---\nkind: CronJobList\nitems: [{minimal('b', '').replace('kind: CronJob, ', '')}]\n"
    found, lines = cronjobs(text)
    assert [each.definition.name for each in found] == ["a", "a-2", "b"]
    assert any("a Service: only CronJob" in line for line in lines)
    assert any("no object of Kubernetes" in line for line in lines)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("concurrencyPolicy: Allow", "concurrencyPolicy Allow: up to 10"),
        ("concurrencyPolicy: Other", "concurrencyPolicy 'Other' is not known"),
        ("startingDeadlineSeconds: 99999999", "the nearest is taken"),
        ("startingDeadlineSeconds: soon", "'soon' is no whole number"),
        ("x: 1", "says no timeZone"),
    ],
)
def test_what_a_cronjob_says_oddly(spec: str, said: str) -> None:
    found, lines = cronjobs(minimal("a", spec))
    assert len(found) == 1
    assert any(said in line for line in lines), lines


def test_zones_and_intervals_inside_of_a_schedule() -> None:
    (job,), _ = cronjobs(minimal("a", "x: 1").replace("0 1 * * *", "'CRON_TZ=Asia/Tokyo 0 1 ? * *'"))
    assert (job.definition.spec.schedule.cron, job.definition.spec.schedule.zone) == ("0 1 * * *", "Asia/Tokyo")
    (job,), _ = cronjobs(minimal("a", "x: 1").replace("0 1 * * *", "'@every 1h30m'"))
    assert job.definition.spec.schedule.interval.every_ms == 5_400_000


def test_the_command_prints_jobs_and_reports_the_rest(tmp_path: Path) -> None:
    tab = tmp_path / "tab"
    tab.write_text("@daily backup\n@reboot x\n")
    given_ = ["job", "import", "crontab", str(tab), "--owner", "o", "--runbook-url", "https://example.org/"]
    done = runner.invoke(app, given_)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("jobs:\n")
    assert "NOT carried over: @reboot" in done.stderr
    assert "1 job; 1 thing not carried over, 2 remarks above" in done.stderr
    out = tmp_path / "jobs.yaml"
    done = runner.invoke(app, [*given_, "--out", str(out)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert out.read_text().startswith("jobs:\n")
    tab.write_text("@reboot x\n")
    assert runner.invoke(app, given_).exit_code != 0


@given(text=st.text(alphabet="*/0159 -,@~%\\=\"'\tabSHMAILTO#\n\x01ä:&;(", max_size=80))
def test_no_crontab_makes_it_raise(text: str) -> None:
    crontab(text)
