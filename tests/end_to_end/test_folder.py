"""The state folder of a development cluster: one owner, nothing wiped that is not ours, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.dev.errors import DevError
from sidecar.dev.folder import SOCKET_FOLDER_BYTES_MAX, Folder


def test_a_second_owner_is_refused_with_the_first_ones_process_id(tmp_path: Path) -> None:
    first, second = Folder(tmp_path / "dev"), Folder(tmp_path / "dev")
    first.open(keep=False)
    with pytest.raises(DevError, match=rf"already runs in .*dev \(process {os.getpid()}\): stop it, or"):
        second.open(keep=False)
    first.close(keep=False)
    second.open(keep=False)
    second.close(keep=False)


def test_nothing_is_left_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path / ".tenure" / "dev")
    folder.open(keep=False)
    (folder.data("n1")).mkdir()
    folder.close(keep=True)
    assert folder.data("n1").is_dir()
    folder.open(keep=True)
    assert folder.data("n1").is_dir()
    folder.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_start_wipes_what_a_killed_one_left(tmp_path: Path) -> None:
    """The lock of a process that was killed is free, whatever the lock file says."""
    root = tmp_path / "dev"
    script = f"""
import os, signal
from pathlib import Path
from sidecar.dev.folder import Folder
folder = Folder(Path({str(root)!r}))
folder.open(keep=False)
folder.ledger.touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    folder = Folder(root)
    assert folder.ledger.exists()
    folder.open(keep=False)
    assert not folder.ledger.exists()
    folder.close(keep=False)


def test_somebody_elses_folder_is_not_wiped(tmp_path: Path) -> None:
    root = tmp_path / "precious"
    root.mkdir()
    (root / "thesis.txt").touch()
    folder = Folder(root)
    with pytest.raises(DevError, match="is not the folder of a development cluster"):
        folder.open(keep=False)
    assert (root / "thesis.txt").exists()


def test_sockets_move_to_a_short_folder_when_the_path_is_long(tmp_path: Path) -> None:
    folder = Folder(tmp_path / ("x" * SOCKET_FOLDER_BYTES_MAX) / "dev")
    folder.open(keep=False)
    assert len(os.fsencode(folder.control_socket)) <= SOCKET_FOLDER_BYTES_MAX + len("/control.sock")
    folder.control_socket.touch()
    assert Folder(folder.root).find_control_socket() == folder.control_socket
    folder.close(keep=False)
    assert not folder.sockets.exists()


def test_without_a_cluster_there_is_nobody_to_take_orders(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="start one with 'tenure dev'"):
        Folder(tmp_path / "dev").find_control_socket()
