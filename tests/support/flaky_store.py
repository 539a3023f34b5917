"""A real store that stops answering writes when a test says so."""

from __future__ import annotations

from shared.errors import MillraceError, Unavailable
from shared.storage import ObjectStore


class FlakyStore(ObjectStore):
    """The same objects as `store`. While `error` is set every `put` raises it; `refused` counts them."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.error: MillraceError | None = None
        self.refused = 0
        self.puts = 0

    def go_away(self) -> None:
        self.error = Unavailable("the object store does not answer; try again")

    def come_back(self) -> None:
        self.error = None

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error
        self.puts += 1
        super().put(key, data)
