"""Certificates of a cluster: an authority and one certificate for each node, made on the spot, and the TLS contexts.

Made for development and for small installations that have no authority of their own. Files in one folder: ``ca.pem``,
``ca.key``, and for each node ``<node>.pem`` and ``<node>.key``; keys are readable by their owner only. Making them
again keeps what is still good, and renews what is damaged, about to expire, or no longer fits.

A node is known by the URI ``tenure://<cluster>/<node>`` among its subject alternative names. Host names and addresses
are there as well, for other programs; peers do not look at them, so that addresses may change.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NODE_DAYS = 90
AUTHORITY_DAYS = 365
RENEW_BEFORE_DAYS = 30
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_CLOCK_SKEW = datetime.timedelta(minutes=5)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CertificateError(Exception):
    """A certificate, key or authority cannot be made or used. Names the file and says what to do."""


@dataclass(frozen=True)
class Issued:
    """One certificate of the folder. ``renewed``: it was made now, the one before (if any) was not good any more."""

    name: str
    certificate: Path
    key: Path
    expires: datetime.datetime
    renewed: bool


@dataclass(frozen=True)
class PeerContexts:
    """TLS in both directions between peers, and when our own certificate expires (UTC)."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    expires: datetime.datetime


def identity_uri(cluster_id: str, node_id: str) -> str:
    """The name by which peers know a node."""
    return f"tenure://{quote(cluster_id, safe='')}/{quote(node_id, safe='')}"


# ---- making ----------------------------------------------------------------------------------------------------------


def write_certificates(
    folder: Path,
    cluster_id: str,
    nodes: Mapping[str, Sequence[str]],
    *,
    days: int = NODE_DAYS,
    now: datetime.datetime | None = None,
) -> list[Issued]:
    """An authority (first of the list) and a certificate for each node; ``nodes`` gives the hosts of each.

    Safe to repeat, also by several processes at once. Raises CertificateError, and OSError never.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    for name in (cluster_id, *nodes):
        if not _NAME.fullmatch(name):
            raise CertificateError(f"{name!r} cannot be the id of a cluster or a node")
    if "ca" in nodes:
        raise CertificateError("a node cannot be called ca: its files would be those of the authority")
    if not 1 <= days <= AUTHORITY_DAYS:
        raise CertificateError(f"a certificate of {days} days: 1 to {AUTHORITY_DAYS} are allowed")
    try:
        with _locked(folder):
            authority, authority_key, issued = _authority(folder, cluster_id, now)
            made = [
                _node(folder, authority, authority_key, cluster_id, node, hosts, days, now)
                for node, hosts in nodes.items()
            ]
            return [issued, *made]
    except OSError as error:
        raise CertificateError(f"{error.filename or folder}: {error.strerror or error}") from error


def write_development_certificates(folder: Path, nodes: Sequence[str], cluster_id: str = "dev") -> list[Issued]:
    """``write_certificates`` for nodes that all run on this machine."""
    return write_certificates(folder, cluster_id, dict.fromkeys(nodes, LOCAL_HOSTS))


def _authority(
    folder: Path, cluster_id: str, now: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, Issued]:
    path, key_path = folder / "ca.pem", folder / "ca.key"
    if path.exists() and not key_path.exists():
        raise CertificateError(
            f"{path}: the authority is here, but its key {key_path.name} is not, so it cannot sign. What to do: bring "
            f"the key, or have the certificates made where it is, or choose an empty folder"
        )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Tenure cluster {cluster_id}")])
    certificate, key = _load_pair(path, key_path)
    good = (
        certificate is not None
        and key is not None
        and certificate.subject == subject
        and _lasts(certificate, now, RENEW_BEFORE_DAYS)
    )
    if not good or certificate is None or key is None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, subject, key, now, now + datetime.timedelta(days=AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        _write_pair(path, certificate, key_path, key)
    return certificate, key, Issued("ca", path, key_path, certificate.not_valid_after_utc, not good)


def _node(
    folder: Path,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    cluster_id: str,
    node_id: str,
    hosts: Sequence[str],
    days: int,
    now: datetime.datetime,
) -> Issued:
    path, key_path = folder / f"{node_id}.pem", folder / f"{node_id}.key"
    names = x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier(identity_uri(cluster_id, node_id)), *map(_host, hosts)]
    )
    certificate, key = _load_pair(path, key_path)
    good = (
        certificate is not None
        and key is not None
        and _signed_by(certificate, authority)
        and _names(certificate) == names
        and _lasts(certificate, now, min(RENEW_BEFORE_DAYS, days // 3))
    )
    if not good or certificate is None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id)])
        expires = min(now + datetime.timedelta(days=days), authority.not_valid_after_utc)
        builder = _builder(subject, authority.subject, key, now, expires)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        for extension, critical in (
            (names, False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (usages, False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        certificate = builder.sign(authority_key, hashes.SHA256())
        _write_pair(path, certificate, key_path, key)
    return Issued(node_id, path, key_path, certificate.not_valid_after_utc, not good)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    expires: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise CertificateError(f"{host!r} is neither an IP address nor a host name in ASCII") from None


# ---- judging ---------------------------------------------------------------------------------------------------------


def _load_pair(path: Path, key_path: Path) -> tuple[x509.Certificate | None, ec.EllipticCurvePrivateKey | None]:
    """Certificate and key of our own making; None for what is missing, damaged or does not belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (FileNotFoundError, ValueError, TypeError, UnsupportedAlgorithm):
        return None, None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        return None, None
    os.chmod(key_path, 0o600)
    return certificate, key


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None


def _lasts(certificate: x509.Certificate, now: datetime.datetime, days: int) -> bool:
    left = certificate.not_valid_after_utc - now
    return certificate.not_valid_before_utc <= now and left > datetime.timedelta(days=days)


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


# ---- using -----------------------------------------------------------------------------------------------------------


def peer_contexts(
    certificate: Path,
    key: Path,
    authority: Path,
    *,
    cluster_id: str,
    node_id: str,
    now: datetime.datetime | None = None,
) -> PeerContexts:
    """TLS contexts for peers: TLS 1.2 or newer, both sides show a certificate, and only ``authority`` is trusted.

    Raises CertificateError when a file is missing, unreadable or damaged, the key does not match, the certificate is
    expired, not of this authority, or of another node.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    chain, private, trusted = _certificates(certificate), _private_key(key), _certificates(authority)
    own = chain[0]
    if own.public_key() != private.public_key():
        raise CertificateError(f"{key}: this key does not belong to the certificate {certificate}")
    for path, judged in ((certificate, own), (authority, trusted[0])):
        _check_time(path, judged, now)
    if not any(_signed_by(own, issuer) for issuer in (*trusted, *chain[1:])):
        raise CertificateError(f"{certificate}: it was not signed by the authority in {authority}")
    names, wanted = _names(own), identity_uri(cluster_id, node_id)
    found = names.get_values_for_type(x509.UniformResourceIdentifier) if names is not None else []
    if wanted not in found:
        raise CertificateError(
            f"{certificate}: it names {', '.join(found) or 'no node'}, but this is {wanted}. What to do: correct "
            f"node_id, cluster_id or peer_tls_cert, or make a certificate with this subject alternative name (URI)"
        )
    return PeerContexts(
        _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority),
        _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority),
        own.not_valid_after_utc,
    )


def check_server_files(certificate: Path, key: Path, client_authority: Path | None) -> None:
    """Raises CertificateError when a server could not use them: missing, damaged, or the key does not match."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: b"")  # never ask on the terminal
        if client_authority is not None:
            context.load_verify_locations(client_authority)
    except (ssl.SSLError, OSError) as error:
        files = ", ".join(str(file) for file in (certificate, key, client_authority) if file is not None)
        raise CertificateError(f"{files}: OpenSSL refuses them: {error}") from error


def _context(protocol: int, certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the identity is the URI, and the transport checks it
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections last; none is resumed
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # never ask on the terminal
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise CertificateError(f"{certificate}, {key}, {authority}: OpenSSL refuses them: {error}") from error
    return context


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError:
        raise CertificateError(f"{path}: it holds no certificate in PEM form") from None


def _private_key(path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(_read(path), None)
    except TypeError:
        raise CertificateError(f"{path}: the key is encrypted. What to do: give it without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError(f"{path}: it holds no private key in PEM form") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror or error}") from error


def _check_time(path: Path, certificate: x509.Certificate, now: datetime.datetime) -> None:
    if now > certificate.not_valid_after_utc:
        raise CertificateError(f"{path}: it expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        raise CertificateError(
            f"{path}: it is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC. What to do: check "
            f"this machine's clock"
        )


# ---- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two processes must not make two authorities at once."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_pair(path: Path, certificate: x509.Certificate, key_path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """The key first: a crash in between leaves a pair that does not match, which is made anew the next time."""
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(key_path, encoded, 0o600)
    _replace(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    os.rename(draft, path)
