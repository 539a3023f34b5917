"""The order of rows in an epoch: a pure function of position, over a fixed number of lanes.

The blocks of a split (its row groups, or ranges of rows where there are few) are permuted; the permuted sequence is cut
into L lanes of equal length, and each lane is shuffled within windows of its own. Positions are dealt out to lanes like
cards: position p is row p div L of lane p mod L. So any position is found without walking to it, a step takes rows from
every lane, and whoever owns whole lanes reads whole stretches of the files.

After the canonical-node order of MosaicML Streaming (`base/shuffle/py1s.py`), with lanes independent of the number of
workers. N = rows of the split, L = lanes, n = rows of one lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# So many blocks a lane at least, where the rows allow: fewer would leave neighbours together.
BLOCKS_PER_LANE = 4
WINDOW_ROWS = 1024
# Of the open windows of all lanes together: rows that are large are shuffled within fewer.
WINDOWS_BYTES = 256 * 1024 * 1024
MIN_WINDOW_ROWS = 16

# What a permutation is for; part of its key.
BLOCKS, WINDOW = 0, 1


def permutation(count: int, *key: int) -> Ints:
    """A permutation of range(count) that depends on nothing but `key`.

    The sort of a counter-based stream (Philox 4x64-10, Salmon et al. 2011): numpy promises that stream for ever, but
    not how its own `permutation` uses one.
    """
    stream: Any = np.random.Philox(np.random.SeedSequence(key))
    return sorting(stream.random_raw(count))


def sorting(drawn: NDArray[np.uint64]) -> Ints:
    """The places of these numbers in their order, equal ones in that of their places."""
    order = np.argsort(drawn)
    # Sorts differ in equal numbers alone, and the stable one takes several times as long.
    if (np.diff(drawn[order]) == 0).any():
        order = np.argsort(drawn, kind="stable")
    return order.astype(np.int64, copy=False)


def blocks_of(row_groups: Sequence[int], lanes: int) -> Ints:
    """Cuts row groups, given as row counts, into blocks: an (blocks, 2) array of first row and row count.

    A block never crosses a row group. Row groups stay whole when there are enough of them.
    """
    if len(row_groups) >= lanes * BLOCKS_PER_LANE:
        counts = np.asarray(row_groups, np.int64)
        starts = np.cumsum(counts) - counts
        return np.stack([starts, counts], axis=1)[counts > 0]
    longest = max(1, -(-sum(row_groups) // (lanes * BLOCKS_PER_LANE)))
    blocks, first = [], 0
    for rows in row_groups:
        pieces = -(-rows // longest)
        cuts = [first + rows * piece // pieces for piece in range(pieces + 1)]
        blocks += [(start, end - start) for start, end in itertools.pairwise(cuts) if end > start]
        first += rows
    return np.asarray(blocks, np.int64).reshape(-1, 2)


def window_rows(row_bytes: int, lanes: int) -> int:
    """How many rows a lane's window has; `row_bytes` is what one takes in memory, and part of what fixes the order."""
    return min(WINDOW_ROWS, max(MIN_WINDOW_ROWS, WINDOWS_BYTES // (max(row_bytes, 1) * lanes)))


@dataclass(frozen=True)
class EpochOrder:
    """One epoch's order. Rows are counted from 0 at the beginning of the split."""

    starts: Ints
    """The first row of each block, in the permuted sequence."""
    ends: Ints
    """Where each block ends in the permuted sequence."""
    lanes: int
    seed: int
    epoch: int
    window_rows: int = WINDOW_ROWS

    @property
    def row_count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def lane_rows(self, lane: int) -> int:
        """n: the first N mod L lanes have one row more."""
        return self.row_count // self.lanes + (lane < self.row_count % self.lanes)

    def windows(self, lane: int) -> int:
        return -(-self.lane_rows(lane) // self.window_rows)

    def window(self, lane: int, number: int) -> Ints:
        """The rows of one window of a lane, in their order."""
        shuffled: Ints = self.stretch(lane, number)[self.shuffle(lane, number)]
        return shuffled

    def shuffle(self, lane: int, number: int) -> Ints:
        """What `window` makes of `stretch`."""
        begin, end = self._bounds(lane, number)
        return permutation(end - begin, self.seed, self.epoch, WINDOW, lane, number)

    def stretch(self, lane: int, number: int) -> Ints:
        """The rows of one window of a lane before they are shuffled; none beyond the last window."""
        start = self._lane_start(lane)
        begin, end = self._bounds(lane, number)
        return self._rows_at(np.arange(start + begin, start + end, dtype=np.int64))

    def _bounds(self, lane: int, number: int) -> tuple[int, int]:
        begin = min(number * self.window_rows, self.lane_rows(lane))
        return begin, min(begin + self.window_rows, self.lane_rows(lane))

    def rows(self, positions: Ints) -> Ints:
        """The rows at these positions of the epoch. Each window that they are in is shuffled once; of its rows only
        those at these positions are worked out."""
        lanes = positions % self.lanes
        numbers, places = np.divmod(positions // self.lanes, self.window_rows)
        # Windows of all lanes, counted through, so that the positions of one stand together once they are sorted.
        windows = numbers * self.lanes + lanes
        by_window = np.argsort(windows, kind="stable")
        cuts = np.flatnonzero(np.diff(windows[by_window], prepend=-1))
        sequence = np.empty(len(positions), np.int64)
        for begin, end in itertools.pairwise([*cuts.tolist(), len(positions)]):
            mine = by_window[begin:end]
            number, lane = divmod(int(windows[mine[0]]), self.lanes)
            first = self._lane_start(lane) + self._bounds(lane, number)[0]
            sequence[mine] = first + self.shuffle(lane, number)[places[mine]]
        return self._rows_at(sequence)

    def _lane_start(self, lane: int) -> int:
        """Where the lane begins in the permuted sequence."""
        share, extra = divmod(self.row_count, self.lanes)
        return lane * share + min(lane, extra)

    def _rows_at(self, sequence: Ints) -> Ints:
        block = np.searchsorted(self.ends, sequence, side="right")
        begins = np.where(block > 0, self.ends[block - 1], 0)
        rows: Ints = self.starts[block] + sequence - begins
        return rows


def epoch_order(blocks: Ints, lanes: int, seed: int, epoch: int, window_rows: int = WINDOW_ROWS) -> EpochOrder:
    """The order of `epoch` over `blocks` (from `blocks_of`)."""
    permuted = blocks[permutation(len(blocks), seed, epoch, BLOCKS)]
    return EpochOrder(permuted[:, 0], np.cumsum(permuted[:, 1]), lanes, seed, epoch, window_rows)
