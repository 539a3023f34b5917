"""A rank's count of the indices that its prepared DataLoaders gave to the program.

A DataLoader asks its batch sampler ahead of time, and Ray's wrapper has the next batch on its way to the device. So the
drawn batches wait here in their order until the program gets them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from train_service.domain.coverage import (
    MAX_LOADERS,
    MAX_PASSES,
    MAX_PASSES_A_REPORT,
    MAX_ROWS,
    NONE,
    PREFIX,
    Flags,
    Record,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

END = object()


class DrawnIndices:
    """The indices that all loaders of a rank gave since the last report. Threads may take turns."""

    def __init__(self, begin: Mapping[str, Record] | None = None) -> None:
        """`begin` has the number of passes that were done, by loader, at the checkpoint that the run resumes from."""
        self._begin = dict(begin or {})
        self._loaders: list[LoaderRecord] = []

    def watch(self, loader: Any) -> Any:
        """Count the indices that a prepared loader gives. Returns the loader.

        One whose sampler draws no indices, or too many to keep, is not counted.
        """
        base = getattr(loader, "_dataloader", loader)
        rows = _row_count(base)
        if rows is None or len(self._loaders) >= MAX_LOADERS:
            return loader
        name = f"{PREFIX}{len(self._loaders)}"
        record = LoaderRecord(name, rows, int(self._begin.get(name, {}).get("done", 0)))
        self._loaders.append(record)
        drawn = _DrawnBatches(base.batch_sampler, record)
        # DataLoader forbids the attribute's change, since its other attributes would not follow. These do not depend
        # on which object draws the same batches.
        for one in {id(base): base, id(loader): loader}.values():
            object.__setattr__(one, "batch_sampler", drawn)
        if hasattr(base.sampler, "set_epoch"):
            _follow_epochs(base.sampler, record)
        loader._millrace_record = record
        loader.__class__ = _counting(type(loader))
        return loader

    def take(self) -> dict[str, Record]:
        """Return the records since the last call."""
        return {loader.name: said for loader in self._loaders if (said := loader.take()) is not None}


class LoaderRecord:
    def __init__(self, name: str, row_count: int, done: int) -> None:
        self.name = name
        self._row_count = row_count
        # Passes that this rank has ended, the earlier attempts' included.
        self._done = done
        self._reported_done = done
        self._next = done
        self._set: int | None = None
        self._pass = done
        self._drawn: deque[Sequence[int]] = deque()
        # Whether the sampler has drawn the last batch of the pass.
        self._exhausted = False
        # The sets of the passes since the last report, as a report has them, and the flags of the pass that goes on.
        self._passes: dict[int, list[str]] = {}
        self._current: tuple[int, Flags, Flags] | None = None
        # No report can have the passes that follow.
        self._stopped = False
        self._lock = threading.Lock()

    def set_epoch(self, epoch: int) -> None:
        """The sampler's next pass has this number."""
        self._set = epoch

    def begin(self) -> None:
        """The sampler begins a pass."""
        with self._lock:
            number = self._set if self._set is not None and self._set >= 0 else self._next
            if number >= MAX_PASSES:
                self._stop(f"pass {number} has a number of {MAX_PASSES} or more")
            if self._stopped:
                return
            self._encode_current()
            self._pass = number
            self._set, self._next = None, self._pass + 1
            # The program has left the passes before, whether or not it took all of their batches.
            self._done = max(self._done, self._pass)
            self._drawn.clear()
            self._exhausted = False

    def drew(self, batch: Sequence[int]) -> None:
        if not self._stopped:
            self._drawn.append(batch)

    def exhaust(self) -> None:
        """The sampler has drawn the last batch of its pass."""
        with self._lock:
            self._exhausted = True

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. Each one's indices count when the program gets it."""
        # Ray's wrapper is its own iterator, and a `for` would ask it for a counted one again.
        while (batch := next(batches, END)) is not END:
            self._give()
            yield batch
        with self._lock:
            if not self._stopped:
                self._done = max(self._done, self._pass + 1)
                self._encode_current()

    def take(self) -> Record | None:
        with self._lock:
            self._encode_current()
            passes, self._passes = self._passes, {}
            if not passes and self._done == self._reported_done:
                return None
            self._reported_done = self._done
            sets = {str(number): texts for number, texts in passes.items()}
            return {"row_count": self._row_count, "done": self._done, "passes": sets}

    def _give(self) -> None:
        with self._lock:
            if not self._drawn:
                return  # the loader draws by other means than its batch sampler
            indices = np.asarray(self._drawn.popleft(), np.int64).reshape(-1)
            if self._current is None or self._current[0] != self._pass:
                self._encode_current()
                if self._pass not in self._passes and len(self._passes) >= MAX_PASSES_A_REPORT:
                    self._stop(f"it had {MAX_PASSES_A_REPORT} passes without a report")
                    return
                texts = self._passes.pop(self._pass, [NONE, NONE])
                self._current = (self._pass, decode(texts[0], self._row_count), decode(texts[1], self._row_count))
            _, seen, again = self._current
            valid = indices[(indices >= 0) & (indices < self._row_count)]
            found, times = np.unique(valid, return_counts=True)
            again[found] |= seen[found] | (times > 1)
            seen[found] = True
            # The program may report within its last step, before it asks for a batch after the last one.
            if self._exhausted and not self._drawn:
                self._done = max(self._done, self._pass + 1)

    def _encode_current(self) -> None:
        if self._current is not None:
            number, seen, again = self._current
            self._passes[number], self._current = [encode(seen), encode(again)], None

    def _stop(self, why: str) -> None:
        """Count no further pass: the coordinator would refuse the report, and the training goes on without it."""
        if not self._stopped:
            self._stopped = True
            self._drawn.clear()
            logger.warning("%s is not counted any more: %s", self.name, why)


class _DrawnBatches:
    """A batch sampler that records what another one draws."""

    def __init__(self, batches: Any, record: LoaderRecord) -> None:
        self._batches = batches
        self._record = record

    def __iter__(self) -> Iterator[Any]:
        self._record.begin()
        for batch in self._batches:
            self._record.drew(batch)
            yield batch
        self._record.exhaust()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


def _counting(kind: type) -> type:
    class Counting(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            batches = super().__iter__()
            counted: Iterator[Any] = self._millrace_record.counted(batches)
            return counted

    Counting.__name__, Counting.__qualname__ = kind.__name__, kind.__qualname__
    return Counting


def _follow_epochs(sampler: Any, record: LoaderRecord) -> None:
    inner = sampler.set_epoch

    def set_epoch(epoch: int) -> None:
        inner(epoch)
        record.set_epoch(int(epoch))

    sampler.set_epoch = set_epoch


def _row_count(base: Any) -> int | None:
    """Return the rows of the loader's dataset, or None if its sampler draws no indices that can be counted."""
    if not isinstance(base, DataLoader) or base.batch_sampler is None or isinstance(base.dataset, IterableDataset):
        return None
    try:
        rows = len(base.dataset)  # type: ignore[arg-type]
    except TypeError:
        return None
    if not 1 <= rows <= MAX_ROWS:
        logger.info("a DataLoader of %d rows is not counted: its indices would take too much memory", rows)
        return None
    return rows
