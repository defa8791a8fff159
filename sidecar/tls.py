"""TLS between peers: both sides show a certificate of the cluster's own authority.

Names are not checked here: who the other side is, is said by the URI in its certificate, which the transport compares.
"""

from __future__ import annotations

import ssl
from pathlib import Path


def peer_contexts(certificate: Path, key: Path, authority: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the accepting and for the dialling side. Raises ssl.SSLError or OSError when a file cannot be used."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    return server, client
