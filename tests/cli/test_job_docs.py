"""What the documentation shows is what the commands take."""

from __future__ import annotations

import re
from pathlib import Path

from tenure.v1 import job_pb2

from sidecar.cli.job_fields import forms_of
from sidecar.cli.job_files import PAYLOADS, Reader

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_a_file_is_one() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "JOBS.md").read_text(), re.DOTALL)
    reader = Reader("JOBS.md", "default")
    assert [job.name for job in reader.read(example.encode())] == ["acme/digest", "acme/sync"]
    assert reader.problems == []


def test_every_key_of_a_job_is_described() -> None:
    text = (DOCS / "JOBS.md").read_text()
    for key in (*forms_of(job_pb2.JobSpec.DESCRIPTOR), *forms_of(job_pb2.RetryPolicy.DESCRIPTOR), *PAYLOADS):
        if not key.endswith("_ms"):
            assert f"`{key}`" in text, key
