"""The state folder of a development cluster: one owner at a time, fresh at each start.

A lock file beside the folder makes a second ``tenure dev`` in the same place fail with a clear message. The kernel
drops the lock when its owner dies, however it dies, so a stale folder is recognised and wiped by the next start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from sidecar.dev.errors import DevError

# The kernel allows 108 bytes in the name of a unix socket, 104 elsewhere; the longest file name below is 12.
SOCKET_FOLDER_BYTES_MAX = 80
MARKER = ".tenure-dev"
DEFAULT = Path(".tenure/dev")


class Folder:
    """Paths of one cluster. ``open`` takes ownership, ``close`` gives it up."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.sockets = self.root
        self._lock: IO[str] | None = None

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.db"

    @property
    def certificates(self) -> Path:
        return self.root / "certs"

    @property
    def control_socket(self) -> Path:
        return self.sockets / "control.sock"

    def data(self, name: str) -> Path:
        return self.root / name

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def history(self, name: str) -> Path:
        return self.root / "histories" / f"{name}.jsonl"

    def histories(self) -> list[Path]:
        return sorted((self.root / "histories").glob("*.jsonl"))

    def socket(self, name: str) -> Path:
        return self.sockets / f"{name}.sock"

    @property
    def _lock_path(self) -> Path:
        return self.root.with_name(self.root.name + ".lock")

    def open(self, *, keep: bool) -> None:
        """Take the folder, empty it unless ``keep``, make what the cluster needs. ``DevError`` when it is in use."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            if not keep:
                self._wipe()
            for folder in (self.root, self.certificates, self.root / "logs", self.root / "histories"):
                folder.mkdir(exist_ok=True, mode=0o700)
            (self.root / MARKER).touch()
            self._choose_sockets()
        except BaseException:
            self._give_up_lock()
            raise

    def close(self, *, keep: bool) -> None:
        """Remove the sockets, and everything else unless ``keep``; then let the next one have the place."""
        for path in self.sockets.glob("*.sock"):
            path.unlink(missing_ok=True)
        if self.sockets != self.root:
            shutil.rmtree(self.sockets, ignore_errors=True)
            (self.root / "sockets").unlink(missing_ok=True)
        if not keep:
            self._wipe()
        self._give_up_lock()
        if not keep and self.root.parent.name == DEFAULT.parts[0] and not any(self.root.parent.iterdir()):
            self.root.parent.rmdir()

    def find_control_socket(self) -> Path:
        """The control socket of the cluster that runs here now. ``DevError`` when there is none."""
        pointer = self.root / "sockets"
        path = (Path(os.readlink(pointer)) if pointer.is_symlink() else self.root) / "control.sock"
        if not path.exists():
            raise DevError(f"no development cluster runs in {self.root}: start one with 'tenure dev'")
        return path

    def _take_lock(self) -> IO[str]:
        while True:
            lock = self._lock_path.open("a+")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                lock.close()
                raise DevError(
                    f"a development cluster already runs in {self.root} (process {owner}): "
                    "stop it, or choose another folder with --state-dir"
                ) from None
            # The one who held it may have removed the file between our open and our lock; then it guards nothing.
            if self._lock_path.exists() and os.path.samestat(os.fstat(lock.fileno()), self._lock_path.stat()):
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
                return lock
            lock.close()

    def _give_up_lock(self) -> None:
        assert self._lock is not None
        self._lock_path.unlink(missing_ok=True)  # while it is ours: nobody else can have taken it
        self._lock.close()
        self._lock = None

    def _wipe(self) -> None:
        """Remove the folder if it is one of ours."""
        if not self.root.exists():
            return
        if not (self.root / MARKER).exists() and any(self.root.iterdir()):
            raise DevError(f"{self.root} is not the folder of a development cluster: choose another with --state-dir")
        shutil.rmtree(self.root)

    def _choose_sockets(self) -> None:
        """Sockets lie in the folder itself, or where a long path would not fit, in a short one that is linked."""
        pointer = self.root / "sockets"
        if pointer.is_symlink():
            pointer.unlink()
        if len(os.fsencode(self.root)) > SOCKET_FOLDER_BYTES_MAX:
            self.sockets = Path(tempfile.mkdtemp(prefix="tenure-"))
            pointer.symlink_to(self.sockets)
