"""The table of errors: complete, unambiguous, documented, and readable with nothing but protobuf."""

from __future__ import annotations

from pathlib import Path

import grpc
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from hypothesis import given
from hypothesis import strategies as st
from tenure.v1 import error_pb2

from sidecar.core.commands import Reason, Refused
from sidecar.proposer import Failed, Failure
from sidecar.services import errors

ROOT = Path(__file__).resolve().parents[2]


def test_every_refusal_has_exactly_one_row() -> None:
    assert set(errors.REASONS) == set(Reason)
    assert set(errors.FAILURES) == set(Failure)
    assert set(errors.PROBLEMS) == set(errors.Problem)
    names = [name for name, _ in errors.table()]
    assert len(names) == len(set(names)) == len(Reason) + len(Failure) + len(errors.Problem)


def test_the_status_tells_definite_from_indefinite() -> None:
    indefinite = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL}
    for name, row in errors.table():
        assert (row.code in indefinite) is not row.definite, name
        assert row.meaning.endswith("."), name


def test_the_documentation_is_the_table() -> None:
    assert errors.markdown() in (ROOT / "docs" / "ERRORS.md").read_text(), (
        "run: python -c 'from sidecar.services.errors import markdown; print(markdown())'"
    )


@given(st.sampled_from(Failure), st.booleans())
def test_a_failure_that_may_have_happened_says_so(failure: Failure, definite: bool) -> None:
    if failure is Failure.OUTCOME_UNKNOWN:
        definite = False
    error = errors.failed(Failed(failure=failure, definite=definite, message="m", retry_delay_ms=7))
    assert error.row.definite is definite
    assert error.detail().outcome == (error_pb2.OUTCOME_DEFINITE if definite else error_pb2.OUTCOME_INDEFINITE)
    if not definite:
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
        assert error.facts["cause"] == failure.name


@given(
    st.sampled_from(Reason),
    st.text(max_size=5_000),
    st.lists(st.tuples(st.text("abc_", min_size=1, max_size=9), st.text(max_size=600)), max_size=40),
    st.integers(0, 10_000_000),
)
def test_a_refusal_fits_into_the_trailing_metadata(
    reason: Reason, message: str, facts: list[tuple[str, str]], retry_delay_ms: int
) -> None:
    refusal = Refused(reason=reason, message=message, facts=tuple(facts), retry_delay_ms=retry_delay_ms)
    error = errors.refused(refusal)
    ((key, packed),) = error.trailing_metadata()
    assert key == "grpc-status-details-bin"
    # Base64 in a header, beside the message percent-encoded: together within the 8 KiB that gRPC allows.
    assert len(packed) * 4 / 3 + 3 * errors.MESSAGE_BYTES_MAX < 8 * 1024
    status = error_pb2.RichStatus.FromString(packed)
    assert status.code == errors.number_of(error.code)
    info, retry, detail = ErrorInfo(), RetryInfo(), error_pb2.ErrorDetail()
    assert status.details[0].Unpack(info)
    assert status.details[-1].Unpack(detail)
    assert (info.reason, info.domain) == (reason.name, "tenure")
    assert info.metadata["outcome"] == "definite"
    assert detail == error.detail() == error.on_stream().detail
    if error.retry_delay_ms:
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == detail.retry_delay_ms == error.retry_delay_ms


@given(st.text(), st.integers(8, 64))
def test_texts_are_shortened_by_bytes(text: str, bytes_max: int) -> None:
    short = errors.shorten(text, bytes_max)
    assert len(short.encode()) <= bytes_max
    if len(text.encode("utf-8", "replace")) <= bytes_max:
        assert short == text.encode("utf-8", "replace").decode()
