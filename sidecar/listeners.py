"""Where agents come in: the unix socket and the TCP port of the gRPC server.

The unix socket is made under another name, given its mode and group, and only then renamed to its place: nobody can
connect to it before, and a stale file is replaced in one step. A live owner is never displaced: whoever serves a
socket holds a lock on the file beside it, and a socket that somebody else answers on is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections import deque
from pathlib import Path
from typing import Any

import grpc

from sidecar.certs import CertificateError, check_server_files
from sidecar.config import Settings, group_id, split_address


class ListenError(Exception):
    """Agents cannot be served there: says why, and what to do."""


class UnixSocket:
    """The place of one unix socket, owned until ``close``."""

    def __init__(self, path: str, mode: int, group: str) -> None:
        self._path = Path(path)
        self._draft = Path(f"{path}.new")
        self._mode = mode
        self._group = group
        self._lock: int | None = None
        self._inode: int | None = None

    def claim(self) -> str:
        """Become the owner. Returns the gRPC address to bind. ListenError when somebody else is."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._refuse_others()
            self._draft.unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise ListenError(f"the socket {self._path} cannot be made: {error.strerror or error}") from error
        except ListenError:
            self.close()
            raise
        return f"unix:{self._draft}"

    def publish(self) -> None:
        """The server is bound: give the socket its mode and group, and put it in its place."""
        try:
            if self._group:
                os.chown(self._draft, -1, group_id(self._group) or 0)
            self._draft.chmod(self._mode)
            self._inode = self._draft.stat().st_ino
            self._draft.rename(self._path)
        except OSError as error:
            raise ListenError(f"mode or group of {self._path} cannot be set: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove the socket if it is still ours, and let go of its place."""
        with contextlib.suppress(FileNotFoundError):
            if self._inode is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()
        self._inode = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> int:
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            message = f"the socket {self._path} is served by another sidecar (process {owner})"
            raise ListenError(f"{message}: stop it, or set another socket") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _refuse_others(self) -> None:
        """What is at the path must be nothing, or a socket on which nobody answers."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ListenError(f"{self._path} is there and is not a socket: remove it, or set another socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            result = probe.connect_ex(str(self._path))
        if result not in (errno.ECONNREFUSED, errno.ENOENT):
            raise ListenError(f"somebody else serves the socket {self._path}: stop that process, or set another socket")


class TcpCertificates:
    """What ``grpc_listen`` shows and trusts. Every handshake uses what was read last."""

    def __init__(self, settings: Settings) -> None:
        assert settings.grpc_tls_cert and settings.grpc_tls_key
        self._certificate, self._key = settings.grpc_tls_cert, settings.grpc_tls_key
        self._authority = settings.grpc_tls_client_ca
        self._renewed: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(filter(None, (self._certificate, self._key, self._authority)))

    def credentials(self) -> grpc.ServerCredentials:
        """Raises CertificateError."""
        take: Any = self._take  # the stubs do not know that it may answer None
        return grpc.dynamic_ssl_server_credentials(
            self._read(), take, require_client_authentication=self._authority is not None
        )

    def reload(self) -> None:
        """Raises CertificateError, and then nothing has changed."""
        self._renewed.append(self._read())

    def _take(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake, on a thread of its own; None: as before."""
        try:
            return self._renewed.popleft()
        except IndexError:
            return None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_server_files(self._certificate, self._key, self._authority)
        try:
            authority = self._authority.read_bytes() if self._authority else None
            pair = (self._key.read_bytes(), self._certificate.read_bytes())
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror or error}") from error
        return grpc.ssl_server_certificate_configuration([pair], authority)


def add_tcp_port(server: grpc.aio.Server, settings: Settings, certificates: TcpCertificates | None) -> int:
    """Bind ``grpc_listen``, in plaintext without certificates; the port. Raises ListenError and CertificateError."""
    host, port = split_address(settings.grpc_listen)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, certificates.credentials())
    except (RuntimeError, OSError) as error:
        raise ListenError(f"cannot listen on grpc_listen {settings.grpc_listen}: {error}") from error
    if bound == 0:
        raise ListenError(f"cannot listen on grpc_listen {settings.grpc_listen}: is it in use, or not of this machine?")
    return bound
