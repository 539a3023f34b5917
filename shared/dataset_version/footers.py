"""Parquet footers in memory: parsed once, and kept while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import pyarrow.parquet as pq

# Of all footers together, parsed.
MOST_BYTES = 256 * 1024 * 1024
# Measured: parsed, a footer takes 9 to 10 times its bytes, 27 MiB for a file of 100 columns of doubles.
PARSED = 10


class Footers:
    """Thread-safe; several readers may share one. Least recently used footers leave first, the last one stays."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[pq.FileMetaData, int]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> pq.FileMetaData | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, footer: pq.FileMetaData, footer_bytes: int) -> None:
        """`footer_bytes` are those that it has in its file."""
        with self._lock:
            if key in self._kept:  # of two threads that read it at the same time
                return
            self._kept[key] = footer, footer_bytes * PARSED
            self._kept_bytes += footer_bytes * PARSED
            while self._kept_bytes > self._most_bytes and len(self._kept) > 1:
                _, (_, left_bytes) = self._kept.popitem(last=False)
                self._kept_bytes -= left_bytes
