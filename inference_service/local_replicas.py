"""The replicas of one application on this machine, called over their own sockets: that takes less than a millisecond a
batch, and a call of a Ray Serve handle several, and as much CPU.

Serve still places them, starts them again and says what is well. Here nothing is kept but connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference_service.domain.rows import Outputs, Rows
from inference_service.frames import HEADER, LENGTH, Frame, Kind, decode, encode, is_private, lengths_after
from inference_service.replica_socket import SUFFIX
from shared.errors import MillraceError

logger = logging.getLogger(__name__)

# One batch at work and one on its way, as the batcher counts them.
BATCHES_EACH = 2
SETTLED_NS = 50_000_000


class ReplicaLost(Exception):
    """It closed the connection with a batch that it had not answered."""


class LocalReplicas:
    """Finds them by the sockets in `folder`. Lives on one event loop."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen_ns: int | None = 0
        self._connections: dict[Path, _Connection] = {}
        self._searching = asyncio.Lock()

    async def free(self, *, busy_too: bool = False) -> _Connection | None:
        """The least busy with room for a batch, or even without with `busy_too`; None where there is none such on this
        machine."""
        await self._search()
        found = min(self._connections.values(), key=lambda one: one.in_flight, default=None)
        return found if found is not None and (busy_too or found.in_flight < BATCHES_EACH) else None

    async def _search(self) -> None:
        """Looks for new sockets where the folder has changed, which costs microseconds otherwise."""
        lost = [path for path, one in self._connections.items() if one.is_lost]
        for path in lost:
            del self._connections[path]
        if self._folder is None:
            return
        changed_ns = _changed_ns(self._folder)
        if changed_ns in (None, self._seen_ns):
            return
        async with self._searching:
            if changed_ns == self._seen_ns:
                return
            # A file system's clock ticks slowly: what changes in the same tick would never be seen.
            self._seen_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else 0
            for path in _sockets(self._folder):
                if path not in self._connections:
                    await self._connect(path)

    async def _connect(self, path: Path) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, str(path))
        except ConnectionRefusedError:  # its replica is dead
            _remove(path)
        except OSError as error:
            logger.warning("%s does not answer: %s", path, error)
        else:
            self._connections[path] = connection


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
        self._read = bytearray()
        self.is_lost = False

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    async def forward(self, rows: Rows) -> Outputs:
        """Raises `ReplicaLost` where the connection ends before the answer, and what the replica raises."""
        if self._transport is None or self.is_lost:
            raise ReplicaLost
        call = next(self._calls)
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        self._transport.write(encode(Frame(call, Kind.FORWARD, rows)))
        try:
            return await future
        except asyncio.CancelledError:
            if not self.is_lost:
                self._transport.write(encode(Frame(call, Kind.CANCEL, None)))
            raise
        finally:
            self._waiting.pop(call, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self.is_lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ReplicaLost())

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (frame := self._next()) is not None:
            future = self._waiting.get(frame.call)
            if future is None or future.done():  # given up meanwhile
                continue
            if frame.kind is Kind.OUTPUTS:
                future.set_result(frame.content)
            else:
                assert isinstance(frame.content, MillraceError)
                future.set_exception(frame.content)

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
