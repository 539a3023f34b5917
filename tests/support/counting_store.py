"""A real store that counts what is asked of it, and fails a request when a test says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shared.errors import Unavailable
from shared.storage import ObjectStore
from shared.storage.object_store import KEYS_A_DELETION, ObjectInfo

T = TypeVar("T")


class CountingStore(ObjectStore):
    """The same objects as `store`. The request number `fails_at` (from 1) raises `Unavailable`: before anything is
    done, or, where `is_done`, after the store has done it."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.requests: list[str] = []
        self.bytes_written = 0
        self.fails_at = 0
        self.is_done = False

    def get(self, key: str) -> bytes:
        return self._asked("get", key, lambda: ObjectStore.get(self, key))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._asked("get_ranges", key, lambda: ObjectStore.get_ranges(self, key, ranges))

    def size(self, key: str) -> int | None:
        return self._asked("size", key, lambda: ObjectStore.size(self, key))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.bytes_written += len(data)
        self._asked("put", key, lambda: ObjectStore.put(self, key, data))

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.bytes_written += len(data)
        self._asked("put_if_absent", key, lambda: ObjectStore.put_if_absent(self, key, data))

    def delete(self, key: str) -> None:
        self._asked("delete", key, lambda: ObjectStore.delete(self, key))

    def delete_all(self, keys: Iterable[str]) -> None:
        def delete(some: Sequence[str]) -> None:
            for key in some:
                ObjectStore.delete(self, key)

        left = iter(keys)
        while some := tuple(itertools.islice(left, KEYS_A_DELETION)):
            self._asked("delete_all", some[0], partial(delete, some))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._asked("list", prefix, lambda: ObjectStore.list(self, prefix))

    def folders(self, prefix: str) -> Sequence[str]:
        return self._asked("folders", prefix, lambda: ObjectStore.folders(self, prefix))

    def keys_after(self, prefix: str, after: str) -> Sequence[str]:
        return self._asked("keys_after", prefix, lambda: ObjectStore.keys_after(self, prefix, after))

    def forget(self) -> None:
        """Count from nothing again."""
        self.requests, self.bytes_written = [], 0

    def _asked(self, what: str, key: str, ask: Callable[[], T]) -> T:
        self.requests.append(f"{what} {key}")
        if len(self.requests) != self.fails_at:
            return ask()
        if self.is_done:
            ask()
        raise Unavailable("the object store does not answer; try again")
