"""The short way between a frontend and the replicas on its machine: Unix sockets beside Ray's calls, both ends of
them.
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
from shared.telemetry import hidden

logger = logging.getLogger(__name__)


# --- Frames ---
# What the front and a replica on its machine send each other over a Unix socket.
#
# A frame is a header, a pickle, and the arrays' own bytes beside it, so that no array is copied into the pickle. Both
# ends are processes of one user, in a folder that nobody else may enter: they trust each other as Ray's processes do.

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


# --- Socket folders ---
# Where the replicas on one machine listen: a folder for each application, below one of this user's own.

# It says the form of the frames: a front does not find the sockets of replicas that have another, and calls these
# through the handle.
SUFFIX = ".sock2"


def socket_folder(cluster: str, application: str) -> Path:
    """Of an application in one Ray cluster: another cluster's replicas may have its name, and even its store, and are
    none of its own; so are those that a head left behind when it died. Short: a socket's path has 107 bytes."""
    digest = hashlib.sha256(f"{cluster}\n{application}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"millrace-{os.geteuid()}" / digest


def make_private(folder: Path) -> None:
    """Raises `OSError` where it cannot be had for this user alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} must be this user's alone")


def sweep(root: Path) -> None:
    """Takes away what replicas that were killed have left in the folders below, of whichever application: nobody may
    ever look there again."""
    for folder in root.iterdir():
        if not is_private(folder):
            continue
        with suppress(OSError):  # another sweeps, too; or one lives here
            for path in folder.glob("*.sock*"):  # of earlier releases, too
                if _is_dead(path):
                    path.unlink(missing_ok=True)
            folder.rmdir()


def _is_dead(path: Path) -> bool:
    """Whether nobody listens. To one that lives this is a front that comes and goes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it has no time for us, or has gone
            return False
    return False


# --- The frontend's end ---
# The replicas of one application on this machine, called over their own sockets: that takes less than a millisecond a
# batch, and a call of a Ray Serve handle several, and as much CPU.
#
# Serve still places them, starts them again and says what is well. Here nothing is kept but connections.


# One batch at work and one on its way, as the batcher counts them.
BATCHES_EACH = 2
# What may wait beside them: calls that are given up.
SMALL_FRAMES_BYTES = 64 * 1024
SETTLED_NS = 50_000_000
# A replica that has owed an answer for so long may hang; Serve finds out.
OWED_S = 5.0
# A replica that died is started again within this, most often on the same machine; meanwhile those left do the work.
STARTS_TIMEOUT_S = 60.0
# After a socket that could not be connected to, or whose connection broke: a process that is being killed may lose its
# connections before its listening socket, and would take the batch again that it has just lost.
RETRY_DELAY_S = 1.0


class ReplicaLost(Exception):
    """It closed the connection with a batch that it had not answered."""


class LocalReplicas:
    """Finds them by the sockets in `folder`, and is of use where all `replicas` of the application are there: else
    those on other machines would have little to do. `name` is for the log. Lives on one event loop; any thread may set
    `replicas`."""

    def __init__(self, folder: Path | None, replicas: int = 1, name: str = "") -> None:
        self._folder = folder
        self._name = name
        self._reported_that_some_are_elsewhere = False
        self.replicas = replicas
        self._all_here_s = -math.inf  # when they were, last
        # When the folder had last changed as it was looked through to its end.
        self._seen_ns: int | None = None
        self._not_before_s = -math.inf
        self._connections: dict[Path, _FrontendConnection] = {}
        # Those whose connection broke, and until when each is left alone.
        self._broken_s: dict[Path, float] = {}
        self._searching = asyncio.Lock()

    async def free(self, *, busy_too: bool = False) -> _FrontendConnection | None:
        """The least busy with room for a batch; None where there is none such on this machine, or other machines have
        replicas, too. With `busy_too`, any that takes batches."""
        await self._search()
        now_s = time.monotonic()
        if len(self._connections) >= max(self.replicas, 1):
            self._all_here_s = now_s
        if now_s - self._all_here_s > STARTS_TIMEOUT_S and not busy_too:
            self._report_that_some_are_elsewhere()
            return None
        usable = (one for one in self._connections.values() if one.takes_batches(now_s))
        found = min(usable, key=lambda one: one.in_flight, default=None)
        return found if found is not None and (busy_too or found.in_flight < BATCHES_EACH) else None

    def _report_that_some_are_elsewhere(self) -> None:
        """Once: else serving would be slow in silence."""
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
        """Looks for new sockets where the folder has changed, which costs microseconds otherwise."""
        lost = [path for path, one in self._connections.items() if one.is_lost]
        for path in lost:
            del self._connections[path]
            self._broken_s[path] = time.monotonic() + RETRY_DELAY_S
            self._seen_ns = None  # its replica may live
        if self._folder is None:
            return
        changed_ns = _changed_ns(self._folder)
        if changed_ns in (None, self._seen_ns) or time.monotonic() < self._not_before_s:
            return
        async with self._searching:
            if changed_ns == self._seen_ns or time.monotonic() < self._not_before_s:
                return
            # A file system's clock ticks slowly: what changes in the same tick would never be seen.
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
        """False where it may succeed later."""
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
    """One replica."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Outputs]] = {}
        # Since when the replica owes the answer of each call, given up or not: it may be at work on it.
        self._owed_since_s: dict[int, float] = {}
        self._read = bytearray()
        self._is_full = self._is_closing = False
        # Of a batch, as it was sent.
        self._largest_bytes = 0
        self.is_lost = False

    @property
    def in_flight(self) -> int:
        return len(self._owed_since_s)

    def takes_batches(self, now_s: float) -> bool:
        """Whether the replica reads what it is sent, answers in time, and is not about to stop."""
        oldest_s = next(iter(self._owed_since_s.values()), now_s)
        return not (self.is_lost or self._is_closing or self._is_full) and now_s - oldest_s < OWED_S

    async def forward(self, rows: Rows) -> Outputs:
        """Raises `ReplicaLost` where the connection ends before the answer, and what the replica raises."""
        if self._transport is None or self.is_lost or self._is_closing:
            raise ReplicaLost
        call = next(self._calls)
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        encoded = encode(Frame(call, Kind.FORWARD, rows))
        self._waiting[call] = future
        self._owed_since_s[call] = time.monotonic()
        if len(encoded) > self._largest_bytes:
            # By itself asyncio calls a connection full where 64 KiB wait to be read, which may be less than a row. One
            # batch on its way is no sign that the replica does not read.
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
            # An error is in the future, and this frame in its traceback: both would wait for the garbage collector.
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
            if future is None or future.done():  # given up meanwhile
                continue
            if frame.kind is Kind.OUTPUTS:
                future.set_result(frame.content)
            else:
                assert isinstance(frame.content, MillraceError)
                future.set_exception(frame.content)
        if self._is_closing and not self._owed_since_s and self._transport is not None:
            self._transport.close()

    def _next(self) -> Frame | None:
        """The first whole frame that was read, taken out."""
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
# A replica's own door: a Unix socket for the front on its machine, beside Ray's calls, which take milliseconds.

# Of one front: answers that wait to be sent, which are more than the batches that it has on their way here.
MAX_UNSENT = 16
# A front that reads nothing for so long has stopped.
SEND_TIMEOUT_S = 5.0
# After an error of the listener, such as too many open files.
ACCEPT_RETRY_DELAY_S = 0.1
# Another replica that stops may take the empty folder away between two of our steps.
TRIES = 5


def listen(folder: Path, thread: ThreadPoolExecutor, forward: Callable[[Rows], Outputs]) -> LoadShedder | None:
    """From now on answers calls over a socket in `folder` with `forward`, run in `thread`, until it is closed. Where
    the folder cannot be had for this user alone, it does not, and Ray's calls remain."""
    try:
        make_private(folder.parent)
        sweep(folder.parent)
        listener, path = _opened(folder, TRIES)
    except OSError as error:
        logger.warning("no socket of its own for this replica, only Ray's calls: %s", error)
        return None
    return LoadShedder(listener, path, thread, forward)


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


class LoadShedder:
    """A replica's listening socket, and the fronts that came in."""

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
        """Lets nobody in any more, asks the fronts to send nothing more, and returns when they have what they asked for
        and have gone, or after `timeout_s`. To be called from another thread than the model's; once is enough."""
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
        until_s = time.monotonic() + timeout_s
        for one in connections:
            if not one.ended.wait(max(until_s - time.monotonic(), 0.0)):
                logger.warning("a front did not take leave in %.1f s", timeout_s)
                one.shut()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_RETRY_DELAY_S):
                    return
                logger.warning("a front cannot come in; trying again: %s", error)
                continue
            one = _ReplicaConnection(connection, self._thread, self._forward)
            with self._lock:
                self._connections.add(one)
            threading.Thread(target=self._serve, args=(one,), name="front", daemon=True).start()

    def _serve(self, one: _ReplicaConnection) -> None:
        try:
            if self._closed.is_set():  # it came in while the door was being closed
                one.say_closing()
            one.serve()
        finally:
            with self._lock:
                self._connections.discard(one)


class _ReplicaConnection:
    """One front. Its calls are read in one thread, answered in the model's, and the answers sent in a third: a front
    that does not read them keeps nobody else waiting."""

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
