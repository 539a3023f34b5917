"""What the front and a replica on its machine send each other over a Unix socket.

A frame is a header, a pickle, and the arrays' own bytes beside it, so that no array is copied into the pickle. Both
ends are processes of one user, in a folder that nobody else may enter: they trust each other as Ray's processes do.
"""

from __future__ import annotations

import os
import pickle
import stat
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

# The call's number, the kind, the length of the pickle, and how many buffers there are; then the length of each buffer.
# Where this changes, so does the suffix of the sockets: replicas of an earlier release may still run.
HEADER = struct.Struct("<QBQI")
LENGTH = struct.Struct("<Q")


class Kind(IntEnum):
    """The front sends `FORWARD` with Rows, and `CANCEL` for a call that nobody waits for; the replica answers
    `OUTPUTS`, or `ERROR` with an exception, or `CANCELLED` where the call never reached the model. `CLOSING`, of no
    call, says that the replica stops: what is on its way is answered, and nothing more is to be sent."""

    FORWARD = 1
    CANCEL = 2
    OUTPUTS = 3
    ERROR = 4
    CANCELLED = 5
    CLOSING = 6


class Frame(NamedTuple):
    call: int
    kind: Kind
    content: Any


def encode(frame: Frame) -> bytes:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(frame.content, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"<{len(raws)}Q", *(raw.nbytes for raw in raws))
    return b"".join((HEADER.pack(frame.call, frame.kind, len(pickled), len(raws)), lengths, pickled, *raws))


def lengths_after(header: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Of a frame's header: how many bytes of lengths follow it, and of its pickle."""
    _, _, pickled, buffers = HEADER.unpack_from(header)
    return buffers * LENGTH.size, pickled


def decode(header: bytes | bytearray | memoryview, pickled: Any, buffers: Sequence[Any]) -> Frame:
    """Arrays look into `buffers`, and may be written to where these may."""
    call, kind, _, _ = HEADER.unpack_from(header)
    return Frame(call, Kind(kind), pickle.loads(pickled, buffers=buffers))


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this process's user that nobody else may enter: what is pickled in it is trusted."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
