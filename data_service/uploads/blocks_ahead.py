"""An upload's blocks, fetched by threads before they are asked for."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import google_crc32c

from data_service.uploads.chunks import Block, read_block
from shared.storage import ObjectStore

BLOCKS_AHEAD = 3
# Those last read, for files whose readers go back and forth, as those of Parquet do.
KEPT_BLOCKS = 6


class BlocksAhead:
    """Reads ahead where blocks are asked for in their order. Not for several threads at once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="upload-read")
        self._kept: OrderedDict[int, Future[tuple[bytes, int]]] = OrderedDict()
        self._last_index = -1

    def read(self, blocks: Sequence[Block], index: int) -> tuple[bytes, int]:
        """The bytes of `blocks[index]` and their CRC32C. Raises as `read_block`."""
        ahead = BLOCKS_AHEAD if index in (self._last_index, self._last_index + 1) else 0
        self._last_index = index
        for one in range(index, min(index + ahead + 1, len(blocks))):
            if one not in self._kept:
                self._kept[one] = self._threads.submit(_fetch, self._store, blocks[one])
        self._kept.move_to_end(index)
        while len(self._kept) > KEPT_BLOCKS:
            _, oldest = self._kept.popitem(last=False)
            oldest.cancel()
        return self._kept[index].result()

    def clear(self) -> None:
        """Forgets what was read: there are other blocks now."""
        self._kept.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()


def read_ahead(store: ObjectStore, blocks: Iterable[Block]) -> Generator[bytes]:
    """The bytes of each block, in order; `BLOCKS_AHEAD` more are fetched meanwhile. Raises as `read_block`."""
    threads = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="upload-hash-read")
    coming: deque[Future[bytes]] = deque()
    try:
        for block in blocks:
            coming.append(threads.submit(read_block, store, block))
            if len(coming) > BLOCKS_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _fetch(store: ObjectStore, block: Block) -> tuple[bytes, int]:
    data = read_block(store, block)
    return data, google_crc32c.value(data)
