"""An object store in memory that counts requests and bytes, and adds up the time that a real one would have taken.

Nothing sleeps: `waited_s` grows by `LATENCY_S` a request and by the bytes over `BYTES_PER_S`, as for sequential
requests. Concurrent requests count in full, so `waited_s` is an upper bound.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from itertools import takewhile

import pyarrow as pa

from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectMissing, ObjectStore
from shared.storage.object_store import KEYS_A_DELETION, KEYS_A_LISTING, ObjectInfo

LATENCY_S = 0.015
BYTES_PER_S = 1e9
# The bytes of objects that have only zeros.
ZEROS = memoryview(bytes(64 * 1024 * 1024))


@functools.lru_cache(maxsize=4)
def _zeros(size_bytes: int) -> bytes:
    """Return cached zeros: copying a terabyte of them is no cost of the code that reads it."""
    return bytes(size_bytes)


class SimulatedStore(ObjectStore):
    def __init__(self) -> None:
        self.settings = StoreSettings(url="file:///simulated")
        self._objects: dict[str, bytes | int] = {}
        # Keys in order, for listings, by their first folder; of a folder whose keys were not sorted yet, none.
        self._sorted: dict[str, MutableSequence[str]] = {}
        self._lock = threading.RLock()
        # Objects by key suffix: each stands for all keys with that suffix.
        self._aliases: dict[str, bytes] = {}
        self.requests = 0
        self.bytes = 0

    @property
    def waited_s(self) -> float:
        return self.requests * LATENCY_S + self.bytes / BYTES_PER_S

    def put_zeros(self, key: str, size_bytes: int) -> None:
        """Add an object of zeros that takes no memory; not counted as a request."""
        self._objects[key] = size_bytes
        self._sorted.clear()

    def put_alias(self, ending: str, data: bytes) -> None:
        """Make `data` the content of all keys with that suffix; not counted as a request."""
        self._aliases[ending] = data

    def copy_folder(self, folder: str, *targets: str) -> None:
        """Copies all objects below `folder` to each target, replacing the folder's name in their bytes; not counted as
        requests.
        """
        for key in [key for key in self._objects if key.startswith(f"{folder}/")]:
            data = self._objects[key]
            assert isinstance(data, bytes)
            for to in targets:
                self._objects[f"{to}/{key[len(folder) + 1 :]}"] = data.replace(folder.encode(), to.encode())
        self._sorted.clear()

    def get(self, key: str) -> bytes:
        data = self._found(key)
        self._count(len(data))
        return _zeros(len(data)) if isinstance(self._objects.get(key), int) else bytes(data)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        data = self._found(key)
        for _, length in ranges:
            self._count(length)
        return [data[start : start + length] for start, length in ranges]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self.get_ranges(key, [(start, length)])[0])

    @contextmanager
    def local_file(self, key: str) -> Iterator[pa.NativeFile | None]:  # noqa: ARG002 - as `ObjectStore`
        yield None

    def size(self, key: str) -> int | None:
        self._count(0)
        try:
            return len(self._found(key))
        except ObjectMissing:
            return None

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._count(len(data))
        with self._lock:
            known = self._sorted.get(_top(key))
            if known is not None and key not in self._objects:
                insort(known, key)
            self._objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        with self._lock:
            if key in self._objects:
                self._count(0)
                raise ObjectExists(key)
            self.put(key, data)

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.put(key, b"".join(pieces()))

    def delete(self, key: str) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Iterable[str]) -> None:
        for number, key in enumerate(keys):
            if number % KEYS_A_DELETION == 0:
                self._count(0)
            with self._lock:
                known = self._sorted.get(_top(key))
                if self._objects.pop(key, None) is not None and known is not None:
                    del known[bisect_left(known, key)]

    def delete_folder(self, prefix: str) -> None:
        self.delete_all([info.key for info in self.list(prefix)])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._count(0)
        for number, key in enumerate(self._below(prefix), 1):
            if number % KEYS_A_LISTING == 0:
                self._count(0)
            data = self._objects[key]
            yield ObjectInfo(key, data if isinstance(data, int) else len(data))

    def folders(self, prefix: str) -> Sequence[str]:
        start = len(prefix.rstrip("/")) + 1
        found = sorted({key[start:].split("/", 1)[0] for key in self._below(prefix) if "/" in key[start:]})
        for _ in range(0, max(len(found), 1), KEYS_A_LISTING):
            self._count(0)
        return found

    def keys_after(self, prefix: str, after: str) -> Sequence[str]:
        self._count(0)
        keys = self._sorted_of(prefix)
        begin = max(bisect_left(keys, f"{prefix}/"), bisect_right(keys, after))
        return list(takewhile(lambda key: key.startswith(f"{prefix}/"), keys[begin : begin + KEYS_A_LISTING]))

    def _below(self, prefix: str) -> Sequence[str]:
        if not prefix:
            return sorted(self._objects)
        keys, folder = self._sorted_of(prefix), f"{prefix.rstrip('/')}/"
        return keys[bisect_left(keys, folder) : bisect_left(keys, f"{folder}\U0010ffff")]

    def _sorted_of(self, prefix: str) -> Sequence[str]:
        """Return all keys in the first folder of `prefix`, in order."""
        top = _top(prefix)
        with self._lock:
            if top not in self._sorted:
                self._sorted[top] = sorted(key for key in self._objects if _top(key) == top)
            return self._sorted[top]

    def _found(self, key: str) -> memoryview:
        data = self._objects.get(key)
        if data is None:
            data = next((alias for ending, alias in self._aliases.items() if key.endswith(ending)), None)
        if data is None:
            self._count(0)
            raise ObjectMissing(key)
        return ZEROS[:data] if isinstance(data, int) else memoryview(data)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.requests += 1
            self.bytes += size_bytes


def _top(key: str) -> str:
    return key.split("/", 1)[0]
