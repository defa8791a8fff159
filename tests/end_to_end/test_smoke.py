"""The main promise, with real processes: the job goes on through kills and a partition, and nothing is done twice,
never or partially."""

from __future__ import annotations

from chaos.smoke import Outcome


def test_agent_scheduled_job_leader_election_smoke(agent_scheduled_job_leader_election_smoke: Outcome) -> None:
    outcome = agent_scheduled_job_leader_election_smoke
    assert not outcome.failure, outcome.failure
    assert outcome.report.findings == []
    assert [step.name for step in outcome.steps] == ["kill the holder", "kill the leader", "partition the leader"]
    assert outcome.report.summary() == "twice 0, never 0, partial 0"
    assert outcome.ok


def test_every_step_really_happened(agent_scheduled_job_leader_election_smoke: Outcome) -> None:
    holder, leader, partition = agent_scheduled_job_leader_election_smoke.steps
    assert holder.holder_s is not None
    assert leader.leader_s is not None
    assert partition.leader_s is not None
    assert partition.holder_s is not None
    report = agent_scheduled_job_leader_election_smoke.report
    assert report.grants >= 3
    assert report.postings == report.documents or report.postings > report.documents  # a round may have been begun


def test_a_holder_killed_within_a_document_left_it_half_written_and_it_was_repaired(
    agent_scheduled_job_leader_election_smoke: Outcome,
) -> None:
    holder = agent_scheduled_job_leader_election_smoke.steps[0]
    assert " within inbox/" in holder.done
