"""A replica's own door: a Unix socket for the front on its machine, beside Ray's calls, which take milliseconds."""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from inference_service.domain.rows import Outputs, Rows
from inference_service.sockets.frames import HEADER, LENGTH, Frame, Kind, decode, encode, lengths_after
from inference_service.sockets.socket_folders import SUFFIX, make_private, sweep
from shared.errors import MillraceError
from shared.telemetry import hidden

logger = logging.getLogger(__name__)

# Of one front: answers that wait to be sent, which are more than the batches that it has on their way here.
MAX_UNSENT = 16
# A front that reads nothing for so long has stopped.
SEND_WITHIN_S = 5.0
# After an error of the listener, such as too many open files.
ACCEPT_AGAIN_S = 0.1
# Another replica that stops may take the empty folder away between two of our steps.
TRIES = 5


def listen(folder: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]) -> Door | None:
    """From now on answers calls over a socket in `folder` with `forward`, run in `thread`, until it is closed. Where
    the folder cannot be had for this user alone, it does not, and Ray's calls remain."""
    try:
        make_private(folder.parent)
        sweep(folder.parent)
        listener, path = _opened(folder, TRIES)
    except OSError as error:
        logger.warning("no socket of its own for this replica, only Ray's calls: %s", error)
        return None
    return Door(listener, path, thread, forward)


def _opened(folder: Path, tries: int) -> tuple[socket.socket, Path]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Under another name until it listens, so that nobody finds it refusing.
    name = uuid.uuid4().hex[:12]
    try:
        make_private(folder)
        listener.bind(str(folder / f"{name}.new"))
        listener.listen()
        return listener, (folder / f"{name}.new").rename(folder / f"{name}{SUFFIX}")
    except OSError:
        listener.close()
        if tries == 1:
            raise
    return _opened(folder, tries - 1)


class Door:
    """A replica's listening socket, and the fronts that came in."""

    def __init__(
        self, listener: socket.socket, path: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]
    ) -> None:
        self._listener = listener
        self._path = path
        self._thread = thread
        self._forward = forward
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="socket", daemon=True).start()

    def close(self, within_s: float) -> None:
        """Lets nobody in any more, asks the fronts to send nothing more, and returns when they have what they asked for
        and have gone, or after `within_s`. To be called from another thread than the model's; once is enough."""
        if self._closed.is_set():
            return
        self._closed.set()
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):  # there are others
            self._path.parent.rmdir()
        # Closing alone would leave `accept` waiting.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for one in connections:
            one.say_closing()
        until_s = time.monotonic() + within_s
        for one in connections:
            if not one.ended.wait(max(until_s - time.monotonic(), 0.0)):
                logger.warning("a front did not take leave in %.1f s", within_s)
                one.shut()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                logger.warning("a front cannot come in; trying again: %s", error)
                continue
            one = _Connection(connection, self._thread, self._forward)
            with self._lock:
                self._connections.add(one)
            threading.Thread(target=self._serve, args=(one,), name="front", daemon=True).start()

    def _serve(self, one: _Connection) -> None:
        try:
            if self._closed.is_set():  # it came in while the door was being closed
                one.say_closing()
            one.serve()
        finally:
            with self._lock:
                self._connections.discard(one)


class _Connection:
    """One front. Its calls are read in one thread, answered in the model's, and the answers sent in a third: a front
    that does not read them keeps nobody else waiting."""

    def __init__(
        self, connection: socket.socket, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]
    ) -> None:
        self._socket = connection
        seconds = int(SEND_WITHIN_S)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, int((SEND_WITHIN_S - seconds) * 1e6))
        )
        self._thread = thread
        self._forward = forward
        self._waiting: dict[int, Future[None]] = {}
        self._unsent: queue.Queue[bytes | None] = queue.Queue(MAX_UNSENT)
        self._writer = threading.Thread(target=self._write, name="answers", daemon=True)
        self.ended = threading.Event()

    def serve(self) -> None:
        """Until the front closes it, or sends what cannot be read."""
        self._writer.start()
        try:
            while True:
                call, kind, content = self._read()
                if kind is Kind.FORWARD:
                    future = self._waiting[call] = self._thread.submit(self._answer, call, content)
                    future.add_done_callback(partial(self._forget, call))
                # Given up; one that the model works on already is worked on to its end, and answered.
                elif (given_up := self._waiting.get(call)) is not None and given_up.cancel():
                    self._send(encode(Frame(call, Kind.CANCELLED, None)))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a front sent what cannot be read, or this replica takes no more; closing its connection")
        finally:
            for future in list(self._waiting.values()):
                future.cancel()
            self.shut()
            self._writer.join()
            self._socket.close()
            self.ended.set()

    def say_closing(self) -> None:
        """The front is to send nothing more, and to close the connection when all is answered."""
        self._send(encode(Frame(0, Kind.CLOSING, None)))

    def shut(self) -> None:
        """Ends both threads, whatever they wait for."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(queue.Full):
            self._unsent.put_nowait(None)

    def _answer(self, call: int, rows: Rows) -> None:
        # Whatever a model raises, SystemExit too, ends its batch and not those who wait for it.
        try:
            encoded = encode(Frame(call, Kind.OUTPUTS, self._forward(rows)))
        except MillraceError as error:
            encoded = encode(Frame(call, Kind.ERROR, error))
        except BaseException as error:
            encoded = encode(Frame(call, Kind.ERROR, hidden(error, logger, "a batch failed")))
        self._send(encoded)

    def _forget(self, call: int, _: Future[None]) -> None:
        self._waiting.pop(call, None)

    def _send(self, encoded: bytes) -> None:
        """Never waits."""
        try:
            self._unsent.put_nowait(encoded)
        except queue.Full:
            logger.warning("a front does not take its answers; closing its connection")
            self.shut()

    def _write(self) -> None:
        try:
            while (encoded := self._unsent.get()) is not None:
                self._socket.sendall(encoded)
        except OSError as error:  # the front has gone, and with it those who wait, or it does not read
            logger.info("nobody takes the answers of batches: %s", error)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

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
