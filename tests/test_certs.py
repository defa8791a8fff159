"""Certificates: made once, kept while good, renewed in time; and each mistake in them is named."""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import shutil
import ssl
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from sidecar import certs
from sidecar.certs import CertificateError, PeerContexts, peer_contexts, write_certificates

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NODES = {"n1": ("n1.example", "10.0.0.1", "::1"), "n2": ()}
DAY = datetime.timedelta(days=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "certs", "prod", NODES, now=NOW)
    return tmp_path / "certs"


def made(folder: Path, now: datetime.datetime = NOW, cluster: str = "prod") -> list[str]:
    """What a repetition makes anew."""
    return [issued.name for issued in write_certificates(folder, cluster, NODES, now=now) if issued.renewed]


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def use(
    folder: Path,
    node: str = "n1",
    now: datetime.datetime = NOW,
    cluster: str = "prod",
    files: Mapping[str, Path] | None = None,
) -> PeerContexts:
    paths = {"certificate": folder / f"{node}.pem", "key": folder / f"{node}.key", "authority": folder / "ca.pem"}
    return peer_contexts(**{**paths, **(files or {})}, cluster_id=cluster, node_id=node, now=now)


# ---- making ----------------------------------------------------------------------------------------------------------


def test_what_a_certificate_holds(folder: Path) -> None:
    certificate, authority = load(folder / "n1.pem"), load(folder / "ca.pem")
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["tenure://prod/n1"]
    assert names.get_values_for_type(x509.DNSName) == ["n1.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    assert certificate.not_valid_after_utc == NOW + 90 * DAY
    assert certificate.not_valid_before_utc < NOW  # clocks differ a little
    assert authority.not_valid_after_utc == NOW + 365 * DAY


def test_a_strict_verifier_agrees(folder: Path) -> None:
    policy = verification.PolicyBuilder().store(verification.Store([load(folder / "ca.pem")]))
    verified = policy.time(NOW + DAY).build_client_verifier().verify(load(folder / "n1.pem"), [])
    assert verified.subjects is not None
    assert x509.UniformResourceIdentifier("tenure://prod/n1") in verified.subjects


def test_keys_are_for_their_owner_only(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (folder / "n1.key").chmod(0o644)
    assert made(folder) == []
    assert stat.S_IMODE((folder / "n1.key").stat().st_mode) == 0o600


def test_what_is_good_is_kept(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert made(folder) == made(folder, NOW + 59 * DAY) == []
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_expires_soon_is_renewed(folder: Path) -> None:
    assert made(folder, NOW + 61 * DAY) == ["n1", "n2"]  # the authority lasts a year
    assert made(folder, NOW + 62 * DAY) == []
    assert made(folder, NOW + 340 * DAY) == ["ca", "n1", "n2"]
    use(folder, now=NOW + 341 * DAY)


def test_no_certificate_outlives_its_authority(folder: Path) -> None:
    later = NOW + 330 * DAY
    assert made(folder, later) == ["n1", "n2"]
    assert load(folder / "n1.pem").not_valid_after_utc == NOW + 365 * DAY


@pytest.mark.parametrize("name", ["n1.pem", "n1.key"])
@pytest.mark.parametrize("content", [None, b"", b"garbage"])
def test_what_is_damaged_is_renewed(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert made(folder) == ["n1"]
    use(folder)


def test_a_key_that_belongs_to_another_is_renewed(folder: Path) -> None:
    shutil.copy(folder / "n2.key", folder / "n1.key")
    assert made(folder) == ["n1"]


def test_changed_hosts_and_new_nodes_get_new_certificates(folder: Path) -> None:
    nodes = {"n1": ("other.example",), "n2": (), "n3": ()}
    assert [i.name for i in write_certificates(folder, "prod", nodes, now=NOW) if i.renewed] == ["n1", "n3"]


def test_another_cluster_gets_another_authority(folder: Path) -> None:
    assert made(folder, cluster="staging") == ["ca", "n1", "n2"]
    use(folder, cluster="staging")


def test_an_authority_without_its_key_is_not_replaced(folder: Path) -> None:
    (folder / "ca.key").unlink()
    before = hashlib.blake2b((folder / "ca.pem").read_bytes()).digest()
    with pytest.raises(CertificateError, match=r"ca\.pem.*cannot sign.*What to do"):
        made(folder)
    assert hashlib.blake2b((folder / "ca.pem").read_bytes()).digest() == before


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "x" * 65, "ca"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError):
        write_certificates(tmp_path / "certs", "prod", {name: ()})
    assert not (tmp_path / "certs").exists()


def test_bad_hosts_days_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="neither an IP address nor a host name"):
        write_certificates(tmp_path / "a", "prod", {"n1": ("bücher.example",)})
    for days in (0, 366):
        with pytest.raises(CertificateError, match="1 to 365"):
            write_certificates(tmp_path / "b", "prod", {"n1": ()}, days=days)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CertificateError, match="file"):
        write_certificates(tmp_path / "file", "prod", {"n1": ()})


def test_short_lived_certificates_are_not_renewed_at_once(tmp_path: Path) -> None:
    for expected in ([True, True], [False, False]):
        issued = write_certificates(tmp_path, "prod", {"n1": ()}, days=10, now=NOW)
        assert [one.renewed for one in issued] == expected


def _make(folder: Path) -> None:
    certs.write_development_certificates(folder, ("n1", "n2", "n3"))


def test_many_processes_at_once_make_one_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_make, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for node in ("n1", "n2", "n3"):
        use(tmp_path, node, datetime.datetime.now(datetime.UTC), "dev")


# ---- using -----------------------------------------------------------------------------------------------------------


def test_contexts_demand_certificates_and_trust_nobody_else(folder: Path) -> None:
    contexts = use(folder)
    assert contexts.expires == NOW + 90 * DAY
    for context in (contexts.server, contexts.client):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert len(context.get_ca_certs()) == 1  # not those of the system


def test_each_mistake_is_named(folder: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path / "other", "prod", NODES, now=NOW)
    (tmp_path / "empty").write_bytes(b"")
    mistakes: dict[str, dict[str, Path]] = {
        "n2.key: this key does not belong": {"key": folder / "n2.key"},
        "nowhere: No such file": {"certificate": folder / "nowhere"},
        "nothing: No such file": {"key": folder / "nothing"},
        "gone: No such file": {"authority": folder / "gone"},
        "certs: Is a directory": {"certificate": folder},
        "empty: it holds no certificate": {"certificate": tmp_path / "empty"},
        "empty: it holds no private key": {"key": tmp_path / "empty"},
        "n1.key: it holds no certificate": {"authority": folder / "n1.key"},
        "n1.pem: it was not signed by the authority": {"authority": tmp_path / "other" / "ca.pem"},
        "n2.pem: it names tenure://prod/n2, but this is tenure://prod/n1": {
            "certificate": folder / "n2.pem",
            "key": folder / "n2.key",
        },
    }
    for words, files in mistakes.items():
        with pytest.raises(CertificateError, match=words):
            use(folder, files=files)


def test_another_cluster_is_named(folder: Path) -> None:
    with pytest.raises(CertificateError, match=r"names tenure://prod/n1, but this is tenure://staging/n1.*What to do"):
        use(folder, cluster="staging")


def test_the_time_is_checked(folder: Path) -> None:
    with pytest.raises(CertificateError, match=r"n1.pem: it expired at 2026-04-01 00:00 UTC"):
        use(folder, now=NOW + 91 * DAY)
    with pytest.raises(CertificateError, match=r"not valid before.*check this machine's clock"):
        use(folder, now=NOW - DAY)
    use(folder, now=NOW + 89 * DAY)


def test_an_encrypted_key_is_said_plainly_and_asks_nobody(folder: Path, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key((folder / "n1.key").read_bytes(), None)
    (tmp_path / "encrypted").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    with pytest.raises(CertificateError, match=r"encrypted: the key is encrypted.*without a passphrase"):
        use(folder, files={"key": tmp_path / "encrypted"})


def test_a_chain_through_an_intermediate_authority_is_accepted(folder: Path, tmp_path: Path) -> None:
    """Other people's authorities: RSA, an intermediate, the chain in the certificate's file."""
    now = datetime.datetime.now(datetime.UTC)
    root_key, middle_key, key = (rsa.generate_private_key(65_537, 2_048) for _ in range(3))

    def issue(
        name: str, subject: rsa.RSAPrivateKey, issuer: str, signer: rsa.RSAPrivateKey, node: str | None
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(subject.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=node is None, path_length=None), critical=True)
        )
        if node is not None:
            uri = x509.UniformResourceIdentifier(certs.identity_uri("prod", node))
            builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        return builder.sign(signer, hashes.SHA256())

    pem = serialization.Encoding.PEM
    chain = (issue("leaf", key, "middle", middle_key, "n1"), issue("middle", middle_key, "root", root_key, None))
    (tmp_path / "n1.pem").write_bytes(b"".join(one.public_bytes(pem) for one in chain))
    (tmp_path / "ca.pem").write_bytes(issue("root", root_key, "root", root_key, None).public_bytes(pem))
    (tmp_path / "n1.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )
    contexts = use(tmp_path, now=now)
    assert contexts.expires == chain[0].not_valid_after_utc


def test_no_rights_is_said_plainly(folder: Path) -> None:
    """Root may read everything, so the child gives up its rights first if it has them."""
    program = """
import os
from pathlib import Path
from sidecar.certs import CertificateError, peer_contexts
folder = Path(".")
if os.getuid() == 0:
    os.setuid(65534)
try:
    peer_contexts(folder / "n1.pem", folder / "n1.key", folder / "ca.pem", cluster_id="prod", node_id="n1")
except CertificateError as error:
    print(error)
"""
    (folder / "n1.key").chmod(0)
    folder.chmod(0o711)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert "n1.key: Permission denied" in done.stdout
