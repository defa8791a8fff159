"""What a request may say: properties of the checks, and of page tokens."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenure.v1 import dedup_pb2, lease_pb2, session_pb2

from sidecar.core import commands
from sidecar.services import pages, translate
from sidecar.services import validation as check
from sidecar.services.errors import ApiError


@given(st.text(max_size=300))
def test_an_accepted_name_is_harmless(name: str) -> None:
    try:
        check.lease_name(name)
    except ApiError as error:
        assert error.reason == "NAME_INVALID"
        assert error.facts["field"] == "name"
        return
    assert 1 <= len(name.encode()) <= commands.NAME_BYTES_MAX
    assert name.isprintable()
    assert name == name.strip(" /")
    assert "\n" not in name


@given(st.text(max_size=600))
def test_an_accepted_key_is_bounded(key: str) -> None:
    with contextlib.suppress(ApiError):
        check.key(key)
        assert 1 <= len(key.encode()) <= commands.KEY_BYTES_MAX
        assert not key.isspace()


@given(st.text(max_size=80))
def test_tenants(tenant: str) -> None:
    with pytest.raises(ApiError) as caught:
        check.tenant(tenant, ())
    assert caught.value.reason in ("TENANT_INVALID", "TENANT_NOT_FOUND")
    if caught.value.reason == "TENANT_NOT_FOUND":
        assert tenant.isascii()


@given(st.text(), st.text(min_size=1), st.text(max_size=3_000))
def test_page_tokens_survive_the_trip_and_nothing_else_does(prefix: str, after: str, noise: str) -> None:
    scope = ("leases", "default", prefix)
    token = pages.encoded(scope, after)
    if len(token) <= pages.TOKEN_BYTES_MAX:
        assert pages.Page(scope, 0, token).after == after
    for other, given_token in ((("records", "default", prefix), token), (scope, noise)):
        if given_token:
            with pytest.raises(ApiError) as caught:
                pages.Page(other, 0, given_token)
            assert caught.value.reason == "PAGE_TOKEN_INVALID"


@given(st.binary(max_size=200))
def test_no_bytes_get_past_the_checks_by_an_unexpected_way(data: bytes) -> None:
    """Whatever parses is translated or refused, never anything else."""
    for kind, translated in (
        (session_pb2.OpenSessionRequest, lambda r: translate.open_session(r, "default")),
        (lease_pb2.AcquireLeaseRequest, lambda r: translate.acquire_lease(r, "default", "s")),
        (lease_pb2.ReleaseLeaseRequest, lambda r: translate.release_lease(r, "default", "s")),
        (lease_pb2.TransferLeaseRequest, lambda r: translate.transfer_lease(r, "default", "s")),
        (dedup_pb2.BeginRecordRequest, lambda r: translate.begin_record(r, "default", "s")),
        (dedup_pb2.CompleteRecordRequest, lambda r: translate.complete_record(r, "default", "s")),
        (dedup_pb2.ResolveRecordRequest, lambda r: translate.resolve_record(r, "default")),
    ):
        message = kind()
        with contextlib.suppress(Exception):  # does not parse: refused before it comes here
            message = kind.FromString(data)
        with contextlib.suppress(ApiError):
            assert translated(message) is not None
