"""Which part a worker was on when it died: Ray says only that one did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from data_service.transforming.plan import Part
from shared.errors import FailedPrecondition, MillraceError, Unavailable
from shared.storage import ObjectStore


@dataclass(frozen=True)
class Begun:
    """A marker in the store for each part that is being worked on, and for each whose worker died over it."""

    folder: str

    @contextmanager
    def working_on(self, store: ObjectStore, part: Part) -> Iterator[None]:
        key = f"{self.folder}/{part.number}-{uuid4().hex}"
        store.put(key, b"")
        try:
            yield
        finally:
            store.delete(key)

    def tries(self, store: ObjectStore) -> Counter[int]:
        """How often each part, by number, was begun and not ended."""
        return Counter(int(info.key.rsplit("/", 1)[-1].partition("-")[0]) for info in store.list(self.folder))

    def forget(self, store: ObjectStore) -> None:
        store.delete_folder(self.folder)


def crash_error(tries: Mapping[int, int], parts: Mapping[int, Part], *, foreign_code: bool) -> MillraceError:
    """The error for work that took its worker with it too often; `tries` and `parts` are by the parts' numbers.

    With `foreign_code`, which runs what its author likes, the work is to blame and another attempt would end the same
    way; without, whatever kills processes on this cluster.
    """
    killers = [parts[number] for number, count in tries.items() if count > 1] or [parts[number] for number in tries]
    rows = ", ".join(f"{part.first_row_id} to {part.first_row_id + part.row_count - 1}" for part in killers)
    where = f"rows {rows} of split {killers[0].split!r}" if killers else "some rows"
    metadata = {"rows": rows}
    if foreign_code:
        return FailedPrecondition(
            f"the worker died, and died again, on {where}: a custom function crashes or hangs on one of them",
            reason="TRANSFORM_CRASHED",
            metadata=metadata,
        )
    return Unavailable(f"the worker died, and died again, on {where}", reason="WORKER_LOST", metadata=metadata)
