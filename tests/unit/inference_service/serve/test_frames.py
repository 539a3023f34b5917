"""The form of what goes over a replica's socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from inference_service.serve.sockets import HEADER, Kind, LocalReplicas, lengths_after


def test_a_batch_of_strings_may_have_more_than_4_gib() -> None:
    assert lengths_after(HEADER.pack(1, Kind.FORWARD, 2**40, 0)) == (0, 2**40)


def test_a_replica_of_a_release_with_other_frames_is_not_called_over_its_socket(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "0123456789ab.sock"))  # as its frames had 4 bytes for the pickle's length
        listener.listen()
        assert asyncio.run(LocalReplicas(folder).least_loaded(busy_too=True)) is None
