"""Where replicas listen, and what is taken away of those that were killed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from inference_service.serve.sockets import SUFFIX, make_private, remove_dead_sockets, socket_folder


def left_by_a_killed_replica(folder: Path) -> Path:
    """Its socket, to which nobody listens."""
    with listening(folder) as one:
        return Path(one.getsockname())


def listening(folder: Path) -> socket.socket:
    make_private(folder)
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(folder / f"a{len([*folder.iterdir()])}{SUFFIX}"))
    one.listen()
    return one


def test_each_application_of_each_cluster_has_a_folder_of_its_own() -> None:
    there = [socket_folder(*names) for names in (("c1", "a"), ("c1", "b"), ("c2", "a"), ("c", "1\na"))]
    assert len({*there}) == 4
    assert socket_folder("c1", "a") == there[0]


def test_folders_of_killed_replicas_are_removed_and_used_ones_stay(tmp_path: Path) -> None:
    dead, mixed, open_to_others = (tmp_path / name for name in ("dead", "mixed", "open"))
    left_by_a_killed_replica(dead)
    gone = left_by_a_killed_replica(mixed)
    kept = left_by_a_killed_replica(open_to_others)
    open_to_others.chmod(0o755)
    with listening(mixed) as lives:
        remove_dead_sockets(tmp_path)
        assert not dead.exists()
        assert not gone.exists()
        assert Path(lives.getsockname()).exists()
        assert kept.exists()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="this user's alone"):
        make_private(folder)
