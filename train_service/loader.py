"""The seekable loader: from any step on, the batches of one rank, read and prepared ahead by a thread.

Which rows a batch holds is a pure function of (seed, epoch, step, rank, world size); nothing is kept that a resumed run
would have to restore.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from shared.transforms import RowKeys
from train_service.domain.order import Ints, blocks_of, epoch_order
from train_service.domain.slices import rank_positions, step_bounds, steps_per_epoch
from train_service.preprocessing import Preprocessing
from train_service.row_cache import Array, RowCache, Rows, gather

BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Plan:
    """What fixes the batches. `global_batch` is G; rank and world size are those of this attempt."""

    seed: int
    lanes: int
    global_batch: int
    epochs: int
    rank: int
    world_size: int


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
        ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES_AHEAD)
        closed = threading.Event()

        def offer(item: Batch | BaseException | None) -> None:
            while not closed.is_set():
                try:
                    ahead.put(item, timeout=0.2)
                    return
                except queue.Full:
                    continue

        def read() -> None:
            try:
                for batch in self._read(first_step):
                    offer(batch)
                    if closed.is_set():
                        return
                offer(None)
            except BaseException as error:  # handed to the consumer, whose thread it stops
                offer(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        thread.start()
        try:
            while (item := ahead.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()

    def _read(self, first_step: int) -> Iterator[Batch]:
        plan = self._plan
        for epoch in range(first_step // self.steps_per_epoch, plan.epochs):
            windows = Windows(self._cache, self._blocks, plan, epoch)
            begin = max(first_step - epoch * self.steps_per_epoch, 0)
            for step in range(begin, self.steps_per_epoch):
                bounds = step_bounds(self._rows, self.steps_per_epoch, step)
                rows = windows.rows(rank_positions(*bounds, plan.lanes, plan.rank, plan.world_size))
                yield Batch(
                    step=epoch * self.steps_per_epoch + step,
                    epoch=epoch,
                    inputs=self._preprocessing(rows, RowKeys(plan.seed, epoch, rows.row_ids)),
                    labels=rows.labels,
                    row_ids=rows.row_ids,
                    step_rows=bounds[1] - bounds[0],
                )


class Windows:
    """The open shuffle window of each lane that a rank owns; positions only ever grow within an epoch."""

    def __init__(self, cache: RowCache, blocks: Ints, plan: Plan, epoch: int) -> None:
        self._cache = cache
        self._lanes = plan.lanes
        self._order = epoch_order(blocks, plan.lanes, plan.seed, epoch)
        self._open: dict[int, tuple[int, Rows]] = {}

    def rows(self, positions: Ints) -> Rows:
        lanes, indices = positions % self._lanes, positions // self._lanes
        parts, places = [], []
        for lane in np.unique(lanes).tolist():
            of_lane = np.flatnonzero(lanes == lane)
            numbers = indices[of_lane] // self._order.window_rows
            for number in np.unique(numbers).tolist():
                mine = of_lane[numbers == number]
                parts.append((self._window(lane, number), indices[mine] % self._order.window_rows))
                places.append(mine)
        return gather(parts, places)

    def _window(self, lane: int, number: int) -> Rows:
        open_number, rows = self._open.get(lane, (-1, None))
        if rows is None or open_number != number:
            rows = self._cache.rows(self._order.window(lane, number))
            self._open[lane] = (number, rows)
        return rows
