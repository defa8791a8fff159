"""The main promise, with real processes: the work goes on through kills and a partition, and nothing is done twice,
never or partially."""

from __future__ import annotations

from chaos.smoke import Outcome
from sidecar.dev.job_checker import JobReport


def ended_well(outcome: Outcome) -> None:
    assert not outcome.failure, outcome.failure
    assert outcome.report.findings == []
    assert outcome.broken == []
    assert outcome.report.summary() == "twice 0, never 0, partial 0"
    assert outcome.ok


def test_agent_scheduled_job_leader_election_smoke(agent_scheduled_job_leader_election_smoke: Outcome) -> None:
    outcome = agent_scheduled_job_leader_election_smoke
    ended_well(outcome)
    holder, partition = outcome.steps
    assert (holder.name, partition.name) == ("kill the holder", "partition the leader")
    assert " within job/digest/" in holder.done and " within job/digest/" in partition.done
    assert holder.times_s.keys() == {"new holder"}
    assert partition.times_s.keys() == {"new leader", "new holder"}
    assert isinstance(outcome.report, JobReport)
    assert outcome.report.states == {"SUCCEEDED": outcome.report.documents}
    assert outcome.report.postings == outcome.report.documents > 6


def test_llm_scheduled_job_leader_election_smoke(llm_scheduled_job_leader_election_smoke: Outcome) -> None:
    outcome = llm_scheduled_job_leader_election_smoke
    ended_well(outcome)
    assert [step.name for step in outcome.steps] == ["the model misbehaves", "kill switch", "clear the switch"]
    assert isinstance(outcome.report, JobReport)
    assert outcome.report.states["SKIPPED"] >= 3
    assert outcome.report.states["SUCCEEDED"] == outcome.report.postings


def test_lease_leader_election_smoke(lease_leader_election_smoke: Outcome) -> None:
    outcome = lease_leader_election_smoke
    ended_well(outcome)
    holder, leader, partition = outcome.steps
    assert [step.name for step in outcome.steps] == ["kill the holder", "kill the leader", "partition the leader"]
    assert " within inbox/" in holder.done  # it left a document half-written, which was repaired
    assert holder.times_s.keys() == {"new holder"}
    assert leader.times_s.keys() == {"new leader"}
    assert partition.times_s.keys() == {"new leader", "new holder"}
    assert outcome.report.grants >= 3
