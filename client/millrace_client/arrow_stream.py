"""An Arrow IPC stream out of ReadVersion's messages, with one copy of its bytes on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from millrace.data.v1 import data_service_pb2 as pb

if TYPE_CHECKING:
    import grpc

METHOD = "/millrace.data.v1.DataService/ReadVersion"
# The first byte of a response that has `arrow_ipc`: field 1, length-delimited.
_TAG = 0x0A


def read_method(channel: grpc.Channel) -> Any:
    """`ReadVersion`, whose responses are the bytes of `arrow_ipc` as they lie in the message received."""
    return channel.unary_stream(
        METHOD, request_serializer=pb.ReadVersionRequest.SerializeToString, response_deserializer=_payload
    )


class ArrowBytes:
    """The messages' bytes one after the other, as a file that Arrow reads."""

    def __init__(self, messages: Iterator[memoryview]) -> None:
        self.closed = False
        self._messages = messages
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> Any:
        """Fewer bytes at the end alone. The memory is Arrow's own: aligned, and used again once it is free."""
        import pyarrow as pa

        buffer = pa.allocate_buffer(size, resizable=True)
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < size and self._more():
            piece = self._left[: size - filled]
            target[filled : filled + len(piece)] = piece
            self._left = self._left[len(piece) :]
            filled += len(piece)
        return buffer if filled == size else buffer.slice(0, filled)

    def close(self) -> None:
        self.closed = True

    def _more(self) -> bool:
        """Whether there are bytes left; takes the next message where the present one has none."""
        while not self._left:
            message = next(self._messages, None)
            if message is None:
                return False
            self._left = message
        return True


def _payload(message: bytes) -> memoryview:
    """The parser would copy the bytes twice; where the field stands alone, as a server sends it, it is cut out."""
    if message and message[0] == _TAG:
        length, begin = _varint(message, 1)
        if begin + length == len(message):
            return memoryview(message)[begin:]
    return memoryview(pb.ReadVersionResponse.FromString(message).arrow_ipc)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends."""
    value = shift = 0
    for index in range(position, min(position + 10, len(data))):
        value |= (data[index] & 0x7F) << shift
        if data[index] < 0x80:
            return value, index + 1
        shift += 7
    return value, len(data)
