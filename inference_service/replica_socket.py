"""A replica's own door: a Unix socket for the front on its machine, beside Ray's calls, which take milliseconds."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from inference_service.domain.rows import Outputs, Rows
from inference_service.frames import HEADER, LENGTH, Frame, Kind, decode, encode, is_private, lengths_after
from shared.errors import Internal, MillraceError

logger = logging.getLogger(__name__)

SUFFIX = ".sock"


def listen(folder: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]) -> None:
    """From now on answers calls over a socket in `folder` with `forward`, run in `thread`, as long as this process
    lives. Where the folder cannot be had for this user alone, it does not, and Ray's calls remain."""
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (is_private(folder.parent) and is_private(folder)):
            raise PermissionError(f"{folder} and its parent must be this user's alone")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Under another name until it listens, so that nobody finds it refusing.
        name = uuid.uuid4().hex[:12]
        listener.bind(str(folder / f"{name}.new"))
        listener.listen()
        (folder / f"{name}.new").rename(folder / f"{name}{SUFFIX}")
    except OSError as error:
        logger.warning("no socket of its own for this replica, only Ray's calls: %s", error)
        return

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_Connection(connection, thread, forward).serve, daemon=True).start()

    threading.Thread(target=accept, name="socket", daemon=True).start()


class _Connection:
    """One front. Its calls are read here, and answered from the model's thread."""

    def __init__(
        self, connection: socket.socket, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]
    ) -> None:
        self._socket = connection
        self._thread = thread
        self._forward = forward
        self._waiting: dict[int, Future[None]] = {}

    def serve(self) -> None:
        """Until the front closes it."""
        try:
            while True:
                call, kind, content = self._read()
                if kind is Kind.FORWARD:
                    self._waiting[call] = self._thread.submit(self._answer, call, content)
                elif (future := self._waiting.pop(call, None)) is not None:
                    # Given up; one that the model works on already is worked on to its end.
                    future.cancel()
        except (EOFError, OSError):
            for future in self._waiting.values():
                future.cancel()
            self._socket.close()

    def _answer(self, call: int, rows: Rows) -> None:
        try:
            frame = Frame(call, Kind.OUTPUTS, self._forward(rows))
        except MillraceError as error:
            frame = Frame(call, Kind.ERROR, error)
        except Exception as error:
            logger.exception("a batch failed")
            frame = Frame(call, Kind.ERROR, Internal(f"the model failed: {type(error).__name__}: {error}"))
        self._waiting.pop(call, None)
        try:
            self._socket.sendall(encode(frame))
        except OSError:  # the front has gone, and with it those who wait
            logger.info("nobody takes the answer of a batch")

    def _read(self) -> Frame:
        header = self._exactly(HEADER.size)
        length_bytes, pickled_bytes = lengths_after(header)
        lengths = self._exactly(length_bytes)
        pickled = self._exactly(pickled_bytes)
        sizes = [LENGTH.unpack_from(lengths, at)[0] for at in range(0, length_bytes, LENGTH.size)]
        return decode(header, pickled, [self._exactly(size) for size in sizes])

    def _exactly(self, count: int) -> bytearray:
        """Raises `EOFError` where the front has closed it."""
        read = bytearray(count)
        view, at = memoryview(read), 0
        while at < count:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return read
