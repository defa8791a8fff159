"""Certificates that are renewed while the sidecar runs: the files are looked at now and then, and new connections use
what is in them. Connections that are open stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from sidecar.certs import CertificateError

log = structlog.get_logger("tenure.certificates")


class Renewal:
    """The files of one side. To be made before they are read for the first time."""

    def __init__(self, of: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        """``reload`` puts into use what the files hold, or raises CertificateError and changes nothing."""
        self._of = of
        self._files = tuple(files)
        self._reload = reload
        self._seen = self._look()

    def check(self) -> None:
        """Reload if a file has changed. Files that do not fit together (yet) are tried again at the next check."""
        seen = self._look()
        if seen == self._seen:
            return
        try:
            self._reload()
        except CertificateError as error:
            log.warning(
                "changed certificates cannot be used, the ones before stay in use", of=self._of, error=str(error)
            )
            return
        self._seen = seen
        log.info("certificates were renewed", of=self._of)

    def _look(self) -> tuple[object, ...]:
        """Through links: a mounted secret is renewed by turning one to another folder."""
        return tuple(map(_state, self._files))


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
