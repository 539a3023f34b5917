"""The frames between a reader process and its parent: a JSON object, bytes, and open descriptors."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

_PREFIX = struct.Struct("<IQ")
MAX_DESCRIPTORS = 32
MAX_HEADER_BYTES = 256 * 1024 * 1024


class FrameError(ValueError):
    """The bytes are no frame, or one beyond the limits."""


def send_frame(to: socket.socket, header: dict[str, Any], payload: Any = b"", descriptors: Sequence[int] = ()) -> None:
    """Sends a frame: a JSON object, and bytes. Descriptors are sent along with its first byte."""
    encoded = json.dumps(header).encode()
    view = memoryview(payload).cast("B")
    start = _PREFIX.pack(len(encoded), len(view)) + encoded
    sent = socket.send_fds(to, [start], descriptors) if descriptors else 0
    to.sendall(start[sent:])
    if len(view):
        to.sendall(view)


class FrameReader:
    """Reads frames. `receive_into` fills a whole buffer; `allocate` returns one of a size."""

    def __init__(self, receive_into: Callable[[memoryview], None], allocate: Callable[[int], Any], most: int) -> None:
        self._receive_into, self._allocate, self._most = receive_into, allocate, most

    def frame(self) -> tuple[dict[str, Any], Any]:
        """Returns the next frame. Raises `FrameError`."""
        prefix = bytearray(_PREFIX.size)
        self._receive_into(memoryview(prefix))
        header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > self._most:
            raise FrameError(f"a frame has {header_bytes} and {payload_bytes} bytes")
        encoded = bytearray(header_bytes)
        self._receive_into(memoryview(encoded))
        try:
            header = json.loads(encoded)
        except ValueError:
            raise FrameError("a frame's header is no JSON") from None
        if not isinstance(header, dict):
            raise FrameError("a frame's header is no object")
        payload = self._allocate(payload_bytes)
        if payload_bytes:
            self._receive_into(memoryview(payload).cast("B"))
        return header, payload
