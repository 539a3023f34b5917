"""The seekable loader: from any step on, the batches of one rank, read and prepared ahead by a thread.

Which rows a batch holds is a pure function of (seed, epoch, step, rank, world size); nothing is kept that a resumed run
would have to restore.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidArgument
from shared.transforms import RowKeys
from train_service.domain.order import Ints, SlicePlan, blocks_of, rank_positions, step_bounds, steps_per_epoch
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.row_cache import RowCache
from train_service.loading.rows import Array, Rows
from train_service.loading.windows import Windows
from train_service.store_retry import waiting_for

# Of large batches, and at most of small ones.
BATCHES_AHEAD, SMALL_BATCHES_AHEAD = 4, 16
SMALL_BATCHES_BYTES = 16 * 1024 * 1024
# Of small ones so many are prepared in one go, while they fit a processor's cache.
TOGETHER, TOGETHER_BYTES = 4, 2 * 1024 * 1024
# Being woken costs as much as making a small batch, so who finds none ready waits for this long before it asks to be:
# several small ones are ready by then, and a large one takes longer anyway.
NAP_S = 5e-4


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step: `inputs` float32 (rows, *shape), `labels` int64 (rows,), `row_ids` int64 (rows,).
    For a device that does the last steps itself, `inputs` are uint8 images.

    `step` counts over all epochs from 0; `step_rows` is the number of rows over all ranks.
    """

    step: int
    epoch: int
    inputs: Array
    labels: Ints
    row_ids: Ints
    step_rows: int


class Loader:
    """Batches of the train split, any number of times; not shared between threads, since its cache is not."""

    def __init__(
        self, cache: RowCache, preprocessing: Preprocessing, plan: SlicePlan, *, for_device: bool = False
    ) -> None:
        """`for_device`: the inputs are what `Preprocessing.for_device` gives."""
        self._cache = cache
        self._preprocessing = preprocessing
        self._plan = plan
        self._prepare = preprocessing.for_device if for_device else preprocessing
        self._blocks = blocks_of(cache.row_groups, plan.lanes)
        self._rows = sum(cache.row_groups)
        self.steps_per_epoch = steps_per_epoch(self._rows, plan.global_batch)
        self.total_steps = self.steps_per_epoch * plan.epochs
        self.lanes = plan.lanes

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """From `first_step` to the end of the run. Whatever the reading raises is raised here.

        The thread that reads ahead ends with the generator: close it where the last batch is not taken.
        """
        ahead: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        capacity = threading.Semaphore(self._batches_ahead())
        closed = False

        def read() -> None:
            try:
                for batch in self._read(first_step):
                    capacity.acquire()
                    if closed:
                        return
                    ahead.put(batch)
                ahead.put(None)
            except BaseException as error:  # handed to the consumer, whose thread it stops
                ahead.put(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        thread.start()

        def taken() -> Batch | BaseException | None:
            if ahead.empty():
                time.sleep(NAP_S)
            with waiting_for(thread):
                return ahead.get()

        try:
            while (item := taken()) is not None:
                if isinstance(item, BaseException):
                    raise item
                capacity.release()
                yield item
        finally:
            closed = True
            capacity.release()
            thread.join()

    def _batch_bytes(self) -> int:
        rows = -(-self._plan.global_batch // self._plan.world_size)
        return max(rows * math.prod(self._preprocessing.output.shape) * np.float32().itemsize, 1)

    def _batches_ahead(self) -> int:
        return min(max(SMALL_BATCHES_BYTES // self._batch_bytes(), BATCHES_AHEAD), SMALL_BATCHES_AHEAD)

    def _batches_together(self) -> int:
        return min(max(TOGETHER_BYTES // self._batch_bytes(), 1), TOGETHER) if self._preprocessing.is_quick else 1

    def _read(self, first_step: int) -> Iterator[Batch]:
        plan, together = self._plan, self._batches_together()
        for epoch in range(first_step // self.steps_per_epoch, plan.epochs):
            windows = Windows(self._cache, self._blocks, plan, epoch)
            begin = max(first_step - epoch * self.steps_per_epoch, 0)
            for step in range(begin, self.steps_per_epoch, together):
                yield from self._prepared(windows, epoch, range(step, min(step + together, self.steps_per_epoch)))

    def _prepared(self, windows: Windows, epoch: int, steps: range) -> Iterator[Batch]:
        """The batches of steps of an epoch that follow each other, their rows read together."""
        plan = self._plan
        bounds = [step_bounds(self._rows, self.steps_per_epoch, step) for step in steps]
        rows = windows.rows(bounds[0][0], bounds[-1][1])
        counts = [len(rank_positions(*one, plan.lanes, plan.rank, plan.world_size)) for one in bounds]
        ends = np.cumsum(counts).tolist()
        parts = [rows.slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        for step, (begin, end), part, inputs in zip(
            steps, bounds, parts, self._inputs(epoch, rows, parts), strict=True
        ):
            yield Batch(
                step=epoch * self.steps_per_epoch + step,
                epoch=epoch,
                inputs=inputs,
                labels=part.labels,
                row_ids=part.row_ids,
                step_rows=end - begin,
            )

    def _inputs(self, epoch: int, rows: Rows, parts: Sequence[Rows]) -> Iterator[Array]:
        """The model's inputs of each part of `rows`, made at once: a row comes out the same in any company."""

        def made(some: Rows) -> Array:
            return self._prepare(some, RowKeys(self._plan.seed, epoch, some.row_ids))

        try:
            whole = made(rows)
        except InvalidArgument:
            if len(parts) == 1:
                raise
            # Those before the row that is wrong are good batches.
            yield from map(made, parts)
        else:
            yield from np.split(whole, np.cumsum([len(part.row_ids) for part in parts])[:-1])
