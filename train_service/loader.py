"""The seekable loader: from any step on, the batches of one rank, read and prepared ahead by a thread.

Which rows a batch holds is a pure function of (seed, epoch, step, rank, world size); nothing is kept that a resumed run
would have to restore.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from shared.transforms import RowKeys
from train_service.domain.order import Ints, blocks_of
from train_service.domain.slices import Plan, step_bounds, steps_per_epoch
from train_service.patience import waiting_for
from train_service.preprocessing import Preprocessing
from train_service.row_cache import RowCache
from train_service.rows import Array
from train_service.windows import Windows

# Of large batches, and at most of small ones.
BATCHES_AHEAD, SMALL_BATCHES_AHEAD = 4, 16
SMALL_BATCHES_BYTES = 16 * 1024 * 1024
# Being woken costs as much as making a small batch, so who finds none ready waits for this long before it asks to be:
# several small ones are ready by then, and a large one takes longer anyway.
NAP_S = 5e-4


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step: `inputs` float32 (rows, *shape), `labels` int64 (rows,), `row_ids` int64 (rows,).

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

    def __init__(self, cache: RowCache, preprocessing: Preprocessing, plan: Plan) -> None:
        self._cache = cache
        self._preprocessing = preprocessing
        self._plan = plan
        self._blocks = blocks_of(cache.row_groups, plan.lanes)
        self._rows = sum(cache.row_groups)
        self.steps_per_epoch = steps_per_epoch(self._rows, plan.global_batch)
        self.total_steps = self.steps_per_epoch * plan.epochs

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """From `first_step` to the end of the run. Whatever the reading raises is raised here.

        The thread that reads ahead ends with the generator: close it where the last batch is not taken.
        """
        ahead: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        room = threading.Semaphore(self._batches_ahead())
        closed = False

        def read() -> None:
            try:
                for batch in self._read(first_step):
                    room.acquire()
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
                room.release()
                yield item
        finally:
            closed = True
            room.release()
            thread.join()

    def _batches_ahead(self) -> int:
        output = self._preprocessing.output
        rows = -(-self._plan.global_batch // self._plan.world_size)
        fitting = SMALL_BATCHES_BYTES // max(rows * math.prod(output.shape) * np.float32().itemsize, 1)
        return min(max(fitting, BATCHES_AHEAD), SMALL_BATCHES_AHEAD)

    def _read(self, first_step: int) -> Iterator[Batch]:
        plan = self._plan
        for epoch in range(first_step // self.steps_per_epoch, plan.epochs):
            windows = Windows(self._cache, self._blocks, plan, epoch)
            begin = max(first_step - epoch * self.steps_per_epoch, 0)
            for step in range(begin, self.steps_per_epoch):
                bounds = step_bounds(self._rows, self.steps_per_epoch, step)
                rows = windows.rows(*bounds)
                yield Batch(
                    step=epoch * self.steps_per_epoch + step,
                    epoch=epoch,
                    inputs=self._preprocessing(rows, RowKeys(plan.seed, epoch, rows.row_ids)),
                    labels=rows.labels,
                    row_ids=rows.row_ids,
                    step_rows=bounds[1] - bounds[0],
                )
