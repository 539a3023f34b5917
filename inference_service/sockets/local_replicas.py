"""The replicas of one application on this machine, called over their own sockets: that takes less than a millisecond a
batch, and a call of a Ray Serve handle several, and as much CPU.

Serve still places them, starts them again and says what is well. Here nothing is kept but connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference_service.domain.rows import Outputs, Rows
from inference_service.sockets.frames import HEADER, LENGTH, Frame, Kind, decode, encode, is_private, lengths_after
from inference_service.sockets.socket_folders import SUFFIX
from shared.errors import MillraceError

logger = logging.getLogger(__name__)

# One batch at work and one on its way, as the batcher counts them.
BATCHES_EACH = 2
# What may wait beside them: calls that are given up.
SMALL_FRAMES_BYTES = 64 * 1024
SETTLED_NS = 50_000_000
# A replica that has owed an answer for so long may hang; Serve finds out.
OWED_S = 5.0
# A replica that died is started again within this, most often on the same machine; meanwhile those left do the work.
STARTS_WITHIN_S = 60.0
# After a socket that could not be connected to, or whose connection broke: a process that is being killed may lose its
# connections before its listening socket, and would take the batch again that it has just lost.
LOOK_AGAIN_S = 1.0


class ReplicaLost(Exception):
    """It closed the connection with a batch that it had not answered."""


class LocalReplicas:
    """Finds them by the sockets in `folder`, and is of use where all `replicas` of the application are there: else
    those on other machines would have little to do. `name` is for the log. Lives on one event loop; any thread may set
    `replicas`."""

    def __init__(self, folder: Path | None, replicas: int = 1, name: str = "") -> None:
        self._folder = folder
        self._name = name
        self._told_that_some_are_elsewhere = False
        self.replicas = replicas
        self._all_here_s = -math.inf  # when they were, last
        # When the folder had last changed as it was looked through to its end.
        self._seen_ns: int | None = None
        self._not_before_s = -math.inf
        self._connections: dict[Path, _Connection] = {}
        # Those whose connection broke, and until when each is left alone.
        self._broken_s: dict[Path, float] = {}
        self._searching = asyncio.Lock()

    async def free(self, *, busy_too: bool = False) -> _Connection | None:
        """The least busy with room for a batch; None where there is none such on this machine, or other machines have
        replicas, too. With `busy_too`, any that takes batches."""
        await self._search()
        now_s = time.monotonic()
        if len(self._connections) >= max(self.replicas, 1):
            self._all_here_s = now_s
        if now_s - self._all_here_s > STARTS_WITHIN_S and not busy_too:
            self._tell_that_some_are_elsewhere()
            return None
        usable = (one for one in self._connections.values() if one.takes_batches(now_s))
        found = min(usable, key=lambda one: one.in_flight, default=None)
        return found if found is not None and (busy_too or found.in_flight < BATCHES_EACH) else None

    def _tell_that_some_are_elsewhere(self) -> None:
        """Once: else serving would be slow in silence."""
        if self._folder is None or not self.replicas or self._told_that_some_are_elsewhere:
            return
        self._told_that_some_are_elsewhere = True
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
            self._broken_s[path] = time.monotonic() + LOOK_AGAIN_S
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
            self._not_before_s = -math.inf if complete else time.monotonic() + LOOK_AGAIN_S

    async def _connect(self, path: Path) -> bool:
        """False where it may succeed later."""
        try:
            _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, str(path))
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


class _Connection(asyncio.Protocol):
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
