"""One renderer of errors: what is said, how certain it is, what to do, and the exit status."""

from __future__ import annotations

import json

import grpc
import grpc.aio
import pytest
from tenure import errors
from tenure.v1 import error_pb2

from sidecar.cli.failures import CliError, explain, json_wanted, render
from sidecar.dev.errors import DevError


def rpc_error(code: grpc.StatusCode, detail: error_pb2.ErrorDetail | None = None) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    if detail is not None:
        status = error_pb2.RichStatus(code=code.value[0])
        status.details.add().Pack(detail)
        metadata = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="what the sidecar said")


def definite(reason: str) -> error_pb2.ErrorDetail:
    return error_pb2.ErrorDetail(reason=reason, outcome=error_pb2.OUTCOME_DEFINITE)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.LeaseHeld("held", reason="LEASE_HELD"), 1),
        (errors.InvalidArgument("bad name", reason="INVALID_NAME"), 2),
        (errors.OperationTimeout("no answer"), 3),
        (errors.Indefinite("the stream broke"), 3),
        (errors.Unavailable("no leader", reason="NO_LEADER"), 4),
        (errors.ConnectError("no socket"), 4),
        (errors.LeaseLost("nightly", 7, "expired"), 1),
        (CliError("no", status=2), 2),
        (DevError("no cluster"), 1),
        (rpc_error(grpc.StatusCode.FAILED_PRECONDITION, definite("TOKEN_STALE")), 1),
        (rpc_error(grpc.StatusCode.UNAVAILABLE, definite("NO_LEADER")), 4),
        (rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED), 3),
        (rpc_error(grpc.StatusCode.UNAVAILABLE), 3),
    ],
)
def test_exit_statuses(error: Exception, status: int) -> None:
    assert render(error, ["tenure"]) == status


def test_a_bug_of_ours_is_not_dressed_up() -> None:
    assert explain(KeyError("x")) is None


def test_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.LeaseHeld(
        "'nightly' is held", reason="LEASE_HELD", facts={"holder_session_id": "s1"}, retry_delay=1.5
    )
    render(error, ["tenure", "lease", "get"])
    assert capsys.readouterr() == (
        "",
        "tenure: 'nightly' is held [LEASE_HELD]\n"
        "  holder session id: s1\n"
        "  definite: it did not happen\n"
        "  trying again may help after 1500 ms\n",
    )


def test_facts_are_told_once_in_order_and_as_a_person_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"since_wall_ms": "1774767600000", "actor": "lena", "mode": "PAUSE", "wait_ms": "90000", "field": "x"}
    for order in (list(facts), sorted(facts)):
        error = errors.Definite("x is paused by lena", facts={name: facts[name] for name in order})
        render(error, ["tenure"])
        lines = capsys.readouterr().err.splitlines()[1:-1]
        assert lines == ["  mode: PAUSE", "  since: 2026-03-29 07:00:00.000Z", "  wait: 90.0 s"]


def test_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    render(errors.OperationTimeout("no answer", reason="CLIENT_TIMEOUT"), ["tenure", "status", "--json"])
    out, err = capsys.readouterr()
    assert out == ""
    error = json.loads(err)["error"]
    assert (error["reason"], error["outcome"], error["exit_status"]) == ("CLIENT_TIMEOUT", "indefinite", 3)
    assert error["todo"]


def test_json_given_to_a_command_that_is_run_for_somebody_is_not_for_us() -> None:
    assert json_wanted(["tenure", "lock", "x", "--json", "--", "true"])
    assert not json_wanted(["tenure", "lock", "x", "--", "kubectl", "--json"])
