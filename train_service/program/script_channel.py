"""The line between an attempt and the process that runs its script: JSON objects, one a line, over a pair of sockets.

The script's process asks, the attempt answers, one question at a time. JSON, so that the attempt, which holds the
store's credentials, unpickles nothing that a script made.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any

from shared.errors import error_from_record

PIECE_BYTES = 65536
# A question names facts of a trainer and the metrics of its checkpoints; more is no question.
MAX_LINE_BYTES = 64 * 1024 * 1024


class ChannelClosed(Exception):
    """The other process has ended, or has closed its end."""


class Channel:
    """One end. `receive` is for one thread, `send` and `ask` for any."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()
        self._asking = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises `ChannelClosed`."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None where there is none within `timeout_s`. Raises `ChannelClosed`."""
        while b"\n" not in self._received:
            if timeout_s is not None and not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not piece or len(self._received) > MAX_LINE_BYTES:
                raise ChannelClosed("its end is closed" if not piece else "a message is too long")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises the error that it may be, and `ChannelClosed`."""
        with self._asking:
            self.send(question)
            answer = self.receive()
        assert answer is not None
        if "error" in answer:
            raise error_from_record(answer["error"])
        return answer

    def close(self) -> None:
        self._connection.close()
