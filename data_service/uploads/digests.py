"""SHA-256 of uploads: as their bytes arrive, so that a commit need not read them again, and as they are read."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from data_service.uploads.blocks_ahead import read_ahead
from data_service.uploads.chunks import Chain, read_block
from shared.errors import Cancelled
from shared.storage import ObjectStore

KEPT_DIGESTS = 1024


@dataclass
class RunningDigest:
    """Of the bytes from 0 to `end`."""

    end: int
    sha256: Any

    @classmethod
    def empty(cls) -> RunningDigest:
        return cls(0, hashlib.sha256())

    def update(self, data: bytes) -> None:
        self.sha256.update(data)
        self.end += len(data)

    def copy(self) -> RunningDigest:
        return RunningDigest(self.end, self.sha256.copy())


class PassingDigest:
    """SHA-256 of bytes as they go by, in a thread beside the reading of the next."""

    def __init__(self) -> None:
        self.end = 0
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload-hash")
        self._last: Future[None] | None = None

    def update(self, data: memoryview) -> None:
        if self._last:
            self._last.result()  # at most one block waits
        self.end += len(data)
        self._last = self._thread.submit(self._sha256.update, data)

    def hexdigest(self) -> str:
        if self._last:
            self._last.result()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class KeptDigests:
    """The digests of the uploads last written in this process, by their uid; merely a saving of time.

    `objects` names the very objects that the bytes lie in, for uploads whose objects can be written over; a digest is
    of no use once these are others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, RunningDigest]] = OrderedDict()

    def get(self, uid: str, objects: str = "") -> RunningDigest:
        """A copy that is the caller's own; the empty digest where none is kept."""
        with self._lock:
            of, kept = self._kept.get(uid, ("", None))
            return kept.copy() if kept and of == objects else RunningDigest.empty()

    def hashed_size(self, uid: str) -> int:
        """The bytes from 0 on that the digest is of."""
        with self._lock:
            _, kept = self._kept.get(uid, ("", None))
            return kept.end if kept else 0

    def keep(self, uid: str, digest: RunningDigest, objects: str = "") -> None:
        """Unless one of the same objects that goes further is kept: both are of the same bytes."""
        with self._lock:
            of, kept = self._kept.get(uid, ("", None))
            if kept is None or of != objects or kept.end < digest.end:
                self._kept[uid] = (objects, digest.copy())
            self._kept.move_to_end(uid)
            while len(self._kept) > KEPT_DIGESTS:
                self._kept.popitem(last=False)

    def forget(self, uid: str) -> None:
        with self._lock:
            self._kept.pop(uid, None)


def catch_up(store: ObjectStore, chain: Chain, digest: RunningDigest, end: int) -> None:
    """Reads the bytes up to `end` that the digest has not seen. Raises `DataLoss` where some are missing."""
    for block in chain.between(digest.end, end):
        digest.update(read_block(store, block))


def digest_of(
    store: ObjectStore,
    chain: Chain,
    kept: KeptDigests,
    uid: str,
    objects: str = "",
    given_up: Callable[[], bool] = lambda: False,
) -> RunningDigest:
    """Of the whole chain, from where the digest that is kept ends; each block that is read is kept in turn, so that
    another call goes on where this one failed.

    Raises `DataLoss` where some bytes are missing, and `Cancelled` at the next block once nobody waits any more.
    """
    digest = kept.get(uid, objects)
    with closing(read_ahead(store, chain.between(digest.end, chain.end))) as pieces:
        for piece in pieces:
            digest.update(piece)
            kept.keep(uid, digest, objects)
            if given_up() and digest.end < chain.end:
                raise Cancelled("nobody waits for the digest of the upload any more; commit it again")
    return digest
