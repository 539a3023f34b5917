"""The rows of a rank in the order of an epoch: one shuffle window of all its lanes is open, and the next on its way."""

from __future__ import annotations

import numpy as np

from train_service.domain.order import Ints, SlicePlan, epoch_order, rank_positions
from train_service.loading.row_cache import RowCache
from train_service.loading.rows import RowBuffers, Rows


class Windows:
    """Positions only ever grow within an epoch, so the lanes of a rank go from window to window together."""

    def __init__(self, cache: RowCache, blocks: Ints, plan: SlicePlan, epoch: int, *, read_ahead: bool = True) -> None:
        """`read_ahead`: whoever opens a window will want the next one too."""
        self._cache = cache
        self._read_ahead = read_ahead
        self._plan = plan
        self._order = epoch_order(blocks, plan.lanes, plan.seed, epoch, plan.window_rows)
        self._lanes = range(plan.rank, plan.lanes, plan.world_size)
        self._number = -1
        # The window whose rows were worked out last, and these.
        self._stretches: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        # Of the open window: the rows, lane after lane; the positions that the rank computes; the row of each of these.
        self._rows: Rows | None = None
        self._buffers: RowBuffers = {}
        self._positions = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)

    def rows(self, begin: int, end: int) -> Rows:
        """Of the positions [begin, end) of the epoch, the rows that the rank computes."""
        span = self._plan.lanes * self._order.window_rows
        parts = []
        for number in range(begin // span, -(-end // span)):
            opened = self._open(number)
            first, last = np.searchsorted(self._positions, (begin, end)).tolist()
            parts.append(opened.take(self._places[first:last]))
        return Rows.joined(parts)

    def _open(self, number: int) -> Rows:
        if self._rows is None or number != self._number:
            self._rows = None  # before the next is made, where they lie
            stretches = self._rows_of(number)
            if self._read_ahead:
                self._cache.read_ahead(stretches)
                self._cache.read_ahead(self._rows_of(number + 1))
            self._shuffle(number)
            self._rows = self._cache.rows(stretches, self._buffers)
            self._number = number
        return self._rows

    def _rows_of(self, number: int) -> Ints:
        """The rows of a window, lane after lane, before they are shuffled."""
        if self._stretches[0] != number:
            self._stretches = number, np.concatenate([self._order.stretch(lane, number) for lane in self._lanes])
        return self._stretches[1]

    def _shuffle(self, number: int) -> None:
        plan, order = self._plan, self._order
        span = plan.lanes * order.window_rows
        end = min((number + 1) * span, order.row_count)
        self._positions = rank_positions(number * span, end, plan.lanes, plan.rank, plan.world_size)
        self._places = np.empty_like(self._positions)
        base = 0
        # Positions are dealt out to lanes like cards.
        for place, lane in enumerate(self._lanes):
            shuffle = order.shuffle(lane, number)
            self._places[place :: len(self._lanes)] = base + shuffle
            base += len(shuffle)
