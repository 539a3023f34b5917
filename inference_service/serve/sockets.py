"""Unix sockets between a frontend and the replicas on its machine: a faster path than Ray's calls.

This file has both ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import os
import pickle
import queue
import socket
import stat
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from inference_service.domain.signature import Outputs, Rows
from shared.errors import MillraceError
from shared.logging_and_tracing import hidden

logger = logging.getLogger(__name__)


# --- Frames ---
# The frames that a frontend and a replica on its machine exchange over a Unix socket.
#
# A frame is a header, a pickle, and the raw bytes of the arrays, so that no array is copied into the pickle. Both ends
# are processes of one user, in a folder that no other user may enter: they trust each other as Ray's processes do.

# The call's number, the kind, the length of the pickle, and the number of buffers; the length of each buffer follows. A
# change here must also change SUFFIX: replicas of an earlier release may still run.
HEADER = struct.Struct("<QBQI")
LENGTH = struct.Struct("<Q")


class Kind(IntEnum):
    """The kind of a frame.

    The frontend sends `FORWARD` with Rows, and `CANCEL` for a call that was cancelled. The replica answers `OUTPUTS`,
    `ERROR` with an exception, or `CANCELLED` if the call never reached the model. `CLOSING` belongs to no call: the
    replica is stopping, so it answers the calls in flight, and the frontend must send no more.
    """

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
    """Return how many bytes of lengths follow a frame's header, and the length of its pickle."""
    _, _, pickled, buffers = HEADER.unpack_from(header)
    return buffers * LENGTH.size, pickled


def decode(header: bytes | bytearray | memoryview, pickled: Any, buffers: Sequence[Any]) -> Frame:
    """Decode a frame.

    Its arrays are views of `buffers`, writable if these are.
    """
    call, kind, _, _ = HEADER.unpack_from(header)
    return Frame(call, Kind(kind), pickle.loads(pickled, buffers=buffers))


def is_private(folder: Path) -> bool:
    """Return whether only this process's user may enter the folder.

    Pickles from a private folder are trusted.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


# --- Socket folders ---
# The folders in which the replicas on one machine listen: one for each application, below a folder of this user.

# The suffix names the version of the frames. A frontend ignores the sockets of replicas with another version, and calls
# these replicas through Ray Serve's handle.
SUFFIX = ".sock2"


def socket_folder(cluster: str, application: str) -> Path:
    """Return the socket folder of an application in one Ray cluster.

    The cluster is part of the name: replicas of another cluster, or those that a dead head left behind, may have the
    same application name and even the same store. The path is short because a socket's path has at most 107 bytes.
    """
    digest = hashlib.sha256(f"{cluster}\n{application}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"millrace-{os.geteuid()}" / digest


def make_private(folder: Path) -> None:
    """Create a private folder; raise `OSError` if another user could enter it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} must be this user's alone")


def remove_dead_sockets(root: Path) -> None:
    """Delete the sockets that killed replicas left behind.

    Covers the folders of all applications, since a deleted application's folder is never visited again.
    """
    for folder in root.iterdir():
        if not is_private(folder):
            continue
        with suppress(OSError):  # another process removes it too, or a replica listens here
            for path in folder.glob("*.sock*"):  # including those of earlier releases
                if _is_dead(path):
                    path.unlink(missing_ok=True)
            folder.rmdir()


def _is_dead(path: Path) -> bool:
    """Return whether no process listens on the socket.

    A live listener sees a frontend that connects and disconnects.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it is busy, or was removed
            return False
    return False


# --- The frontend's end ---
# Calls the replicas of one application on this machine over their sockets. That takes less than a millisecond a batch;
# a call of a Ray Serve handle takes several milliseconds, and as much CPU.
#
# Serve still places, restarts and health-checks the replicas. This end only keeps connections.


# One batch computes and one is in transit, as in `BATCHES_PER_REPLICA` of the batcher.
BATCHES_EACH = 2
# Room for small frames in the write buffer: the cancellations.
SMALL_FRAMES_BYTES = 64 * 1024
SETTLED_NS = 50_000_000
# A replica with an answer overdue for this long may hang; Serve's health check decides.
OWED_S = 5.0
# A dead replica restarts within this time, usually on the same machine; meanwhile the remaining ones do the work.
STARTS_TIMEOUT_S = 60.0
# The delay after a socket refused a connection or a connection broke. A process that is being killed may lose its
# connections before its listening socket, and would accept the batch again that it has just lost.
RETRY_DELAY_S = 1.0


class ReplicaLost(Exception):
    """The replica closed the connection with a batch unanswered.

    `ServeModel.forward` sends the batch once more, to another replica.
    """


class LocalReplicas:
    """Finds and connects the replicas by their sockets in `folder`.

    They are used only if all `replicas` of the application are on this machine: otherwise those elsewhere would get few
    batches. `name` is for the log. Lives on one event loop; any thread may set `replicas`.
    """

    def __init__(self, folder: Path | None, replicas: int = 1, name: str = "") -> None:
        self._folder = folder
        self._name = name
        self._reported_that_some_are_elsewhere = False
        self.replicas = replicas
        self._all_here_s = -math.inf  # when all replicas were last connected
        # The folder's modification time at the last complete search.
        self._seen_ns: int | None = None
        self._not_before_s = -math.inf
        self._connections: dict[Path, _FrontendConnection] = {}
        # Sockets whose connection broke, and the time until which each is ignored.
        self._broken_s: dict[Path, float] = {}
        self._searching = asyncio.Lock()

    async def least_loaded(self, *, busy_too: bool = False) -> _FrontendConnection | None:
        """Return the least busy connection with capacity for a batch.

        Return None if no replica here has capacity, or if other machines have replicas, too. With `busy_too`, capacity
        and location do not matter, as long as the replica takes batches.
        """
        await self._search()
        now_s = time.monotonic()
        if len(self._connections) >= max(self.replicas, 1):
            self._all_here_s = now_s
        if now_s - self._all_here_s > STARTS_TIMEOUT_S and not busy_too:
            self._report_that_some_are_elsewhere()
            return None
        usable = (connection for connection in self._connections.values() if connection.takes_batches(now_s))
        found = min(usable, key=lambda one: one.in_flight, default=None)
        return found if found is not None and (busy_too or found.in_flight < BATCHES_EACH) else None

    def _report_that_some_are_elsewhere(self) -> None:
        """Log once that some replicas are elsewhere, which makes serving slower."""
        if self._folder is None or not self.replicas or self._reported_that_some_are_elsewhere:
            return
        self._reported_that_some_are_elsewhere = True
        logger.warning(
            "%s: the sockets of %d of %d replicas are here, in %s; batches go through Serve's handle, which takes "
            "several times as long. That is as it must be where replicas are on other machines; on this one, they must "
            "see the same folder: look at TMPDIR, and at what containers share",
            self._name,
            len(self._connections),
            self.replicas,
            self._folder,
        )

    async def _search(self) -> None:
        """Connect new sockets if the folder has changed.

        An unchanged folder costs microseconds.
        """
        lost = [path for path, connection in self._connections.items() if connection.is_lost]
        for path in lost:
            del self._connections[path]
            self._broken_s[path] = time.monotonic() + RETRY_DELAY_S
            self._seen_ns = None  # the replica itself may still be alive
        if self._folder is None:
            return
        changed_ns = _changed_ns(self._folder)
        if changed_ns in (None, self._seen_ns) or time.monotonic() < self._not_before_s:
            return
        async with self._searching:
            if changed_ns == self._seen_ns or time.monotonic() < self._not_before_s:
                return
            # File timestamps are coarse: a second change within the same tick would never be noticed.
            settled = time.time_ns() - changed_ns > SETTLED_NS
            complete = True
            found = _sockets(self._folder)
            self._broken_s = {path: until_s for path, until_s in self._broken_s.items() if path in found}
            for path in found:
                if time.monotonic() < self._broken_s.get(path, -math.inf):
                    settled = False
                elif path not in self._connections:
                    complete &= await self._connect(path)
            self._seen_ns = changed_ns if settled and complete else None
            self._not_before_s = -math.inf if complete else time.monotonic() + RETRY_DELAY_S

    async def _connect(self, path: Path) -> bool:
        """Connect a socket; return False if a later try may succeed."""
        try:
            _, connection = await asyncio.get_running_loop().create_unix_connection(_FrontendConnection, str(path))
        except ConnectionRefusedError:  # its replica is dead
            _remove(path)
        except FileNotFoundError:  # its replica stopped just now
            pass
        except OSError as error:
            logger.warning("%s does not answer: %s", path, error)
            return False
        else:
            self._connections[path] = connection
        return True


def _changed_ns(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _sockets(folder: Path) -> list[Path]:
    if not (is_private(folder.parent) and is_private(folder)):
        logger.warning("%s is not this user's alone; its sockets are not used", folder)
        return []
    return list(folder.glob(f"*{SUFFIX}"))


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


class _FrontendConnection(asyncio.Protocol):
    """The connection to one replica."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Outputs]] = {}
        # When each call that is not answered was sent. Cancelled calls count, since the replica may be computing them.
        self._owed_since_s: dict[int, float] = {}
        self._read = bytearray()
        self._is_full = self._is_closing = False
        # The size of the largest batch that was sent.
        self._largest_bytes = 0
        self.is_lost = False

    @property
    def in_flight(self) -> int:
        return len(self._owed_since_s)

    def takes_batches(self, now_s: float) -> bool:
        """Return whether the replica reads, answers in time, and is not about to stop."""
        oldest_s = next(iter(self._owed_since_s.values()), now_s)
        return not (self.is_lost or self._is_closing or self._is_full) and now_s - oldest_s < OWED_S

    async def forward(self, rows: Rows) -> Outputs:
        """Send a batch and return its outputs.

        Raises `ReplicaLost` if the connection ends before the answer, and the replica's errors.
        """
        if self._transport is None or self.is_lost or self._is_closing:
            raise ReplicaLost
        call = next(self._calls)
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        encoded = encode(Frame(call, Kind.FORWARD, rows))
        self._waiting[call] = future
        self._owed_since_s[call] = time.monotonic()
        if len(encoded) > self._largest_bytes:
            # By default asyncio calls a connection full at 64 KiB of unsent data, which may be less than a row. One
            # batch in transit does not mean that the replica has stopped reading.
            self._largest_bytes = len(encoded)
            limit = len(encoded) + SMALL_FRAMES_BYTES
            self._transport.set_write_buffer_limits(high=limit, low=limit)
        self._transport.write(encoded)
        try:
            return await future
        except asyncio.CancelledError:
            if not self.is_lost and call in self._owed_since_s:
                self._transport.write(encode(Frame(call, Kind.CANCEL, None)))
            raise
        finally:
            self._waiting.pop(call, None)
            # Breaks a reference cycle: an error is in the future, and this frame in the error's traceback, so both
            # would wait for the garbage collector.
            del future, encoded

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self.is_lost = True
        self._owed_since_s.clear()
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ReplicaLost())

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (frame := self._next()) is not None:
            self._owed_since_s.pop(frame.call, None)
            if frame.kind is Kind.CLOSING:
                self._is_closing = True
            future = self._waiting.get(frame.call)
            if future is None or future.done():  # cancelled meanwhile
                continue
            if frame.kind is Kind.OUTPUTS:
                future.set_result(frame.content)
            else:
                assert isinstance(frame.content, MillraceError)
                future.set_exception(frame.content)
        if self._is_closing and not self._owed_since_s and self._transport is not None:
            self._transport.close()

    def _next(self) -> Frame | None:
        """Remove the first complete frame from the read buffer and return it."""
        if len(self._read) < HEADER.size:
            return None
        length_bytes, pickled_bytes = lengths_after(self._read)
        at = HEADER.size + length_bytes
        if len(self._read) < at:
            return None
        sizes = [LENGTH.unpack_from(self._read, HEADER.size + i)[0] for i in range(0, length_bytes, LENGTH.size)]
        end = at + pickled_bytes + sum(sizes)
        if len(self._read) < end:
            return None
        whole, self._read = self._read, self._read[end:]
        buffers: list[Any] = []
        start = at + pickled_bytes
        for size in sizes:
            buffers.append(whole[start : start + size])
            start += size
        return decode(whole, bytes(whole[at : at + pickled_bytes]), buffers)


# --- The replica's end ---
# A replica's Unix socket server for the frontends on its machine. Ray's own calls take milliseconds.

# The most unsent answers to one frontend, more than the batches that it may have in flight.
MAX_UNSENT = 16
# A frontend that reads nothing for this long has stopped.
SEND_TIMEOUT_S = 5.0
# The delay after an error of the listener, such as too many open files.
ACCEPT_RETRY_DELAY_S = 0.1
# Tries to open the socket: another replica that stops may delete the empty folder between two of the steps.
TRIES = 5


def listen(folder: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]) -> ReplicaSocketServer | None:
    """Serve `forward` over a socket in `folder` until closed.

    `forward` runs in `thread`. Return None if the folder cannot be made private; then only Ray's calls remain.
    """
    try:
        make_private(folder.parent)
        remove_dead_sockets(folder.parent)
        listener, path = _opened(folder, TRIES)
    except OSError as error:
        logger.warning("no socket of its own for this replica, only Ray's calls: %s", error)
        return None
    return ReplicaSocketServer(listener, path, thread, forward)


def _opened(folder: Path, tries: int) -> tuple[socket.socket, Path]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The socket gets its final name only once it listens, so that no frontend finds it refusing connections.
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


class ReplicaSocketServer:
    """A replica's socket server: the listening socket and the connections of the frontends."""

    def __init__(
        self, listener: socket.socket, path: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]
    ) -> None:
        self._listener = listener
        self._path = path
        self._thread = thread
        self._forward = forward
        self._lock = threading.Lock()
        self._connections: set[_ReplicaConnection] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="socket", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Stop accepting, and wait until the connected frontends have their answers.

        Tells the frontends to send no more. After `timeout_s` the remaining connections are closed. Must not be called
        from the model's thread; a second call has no effect.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):  # other replicas have sockets there
            self._path.parent.rmdir()
        # `close` alone would leave `accept` waiting.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.say_closing()
        until_s = time.monotonic() + timeout_s
        for connection in connections:
            if not connection.ended.wait(max(until_s - time.monotonic(), 0.0)):
                logger.warning("a frontend did not disconnect in %.1f s", timeout_s)
                connection.shut()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_RETRY_DELAY_S):
                    return
                logger.warning("a frontend cannot connect; trying again: %s", error)
                continue
            one = _ReplicaConnection(connection, self._thread, self._forward)
            with self._lock:
                self._connections.add(one)
            threading.Thread(target=self._serve, args=(one,), name="frontend", daemon=True).start()

    def _serve(self, replica_connection: _ReplicaConnection) -> None:
        try:
            if self._closed.is_set():  # it connected while the server was being closed
                replica_connection.say_closing()
            replica_connection.serve()
        finally:
            with self._lock:
                self._connections.discard(replica_connection)


class _ReplicaConnection:
    """The connection to one frontend.

    One thread reads the calls, the model's thread answers them, and a third sends the answers, so that a frontend that
    does not read delays no other.
    """

    def __init__(
        self, connection: socket.socket, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]
    ) -> None:
        self._socket = connection
        seconds = int(SEND_TIMEOUT_S)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, int((SEND_TIMEOUT_S - seconds) * 1e6))
        )
        self._thread = thread
        self._forward = forward
        self._waiting: dict[int, Future[None]] = {}
        self._unsent: queue.Queue[bytes | None] = queue.Queue(MAX_UNSENT)
        self._writer = threading.Thread(target=self._write, name="answers", daemon=True)
        self.ended = threading.Event()

    def serve(self) -> None:
        """Serve until the frontend closes the connection or sends an unreadable frame."""
        self._writer.start()
        try:
            while True:
                call, kind, content = self._read()
                if kind is Kind.FORWARD:
                    future = self._waiting[call] = self._thread.submit(self._answer, call, content)
                    future.add_done_callback(partial(self._forget, call))
                # A cancelled call. If the model has already begun it, it is completed and answered.
                elif (given_up := self._waiting.get(call)) is not None and given_up.cancel():
                    self._send(encode(Frame(call, Kind.CANCELLED, None)))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception(
                "a frontend sent what cannot be read, or this replica takes no more; closing its connection"
            )
        finally:
            for future in list(self._waiting.values()):
                future.cancel()
            self.shut()
            self._writer.join()
            self._socket.close()
            self.ended.set()

    def say_closing(self) -> None:
        """Ask the frontend to send no more, and to close once all calls are answered."""
        self._send(encode(Frame(0, Kind.CLOSING, None)))

    def shut(self) -> None:
        """Stop both threads, even while they wait."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(queue.Full):
            self._unsent.put_nowait(None)

    def _answer(self, call: int, rows: Rows) -> None:
        # Any exception of the model, SystemExit too, must fail its batch and must not stop the server.
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
        """Queue an answer without waiting."""
        try:
            self._unsent.put_nowait(encoded)
        except queue.Full:
            logger.warning("a frontend does not take its answers; closing its connection")
            self.shut()

    def _write(self) -> None:
        try:
            while (encoded := self._unsent.get()) is not None:
                self._socket.sendall(encoded)
        except OSError as error:  # the frontend has closed the connection, or does not read
            logger.info("the answers of batches are not read: %s", error)
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
        """Read `count` bytes; raise `EOFError` if the frontend has closed the connection."""
        read = bytearray(count)
        view, at = memoryview(read), 0
        while at < count:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return read
