"""The order of rows in an epoch.

It is a pure function of position, over a fixed number of lanes.

The blocks of a split are its row groups, or ranges of rows if the split has few row groups. The blocks are permuted,
the permuted sequence is cut into L lanes of equal length, and each lane is shuffled within windows of its own.
Positions are dealt out to lanes like cards: position p is row p div L of lane p mod L. So any position is found without
walking to it, a step takes rows from every lane, and a rank that owns whole lanes reads contiguous ranges of the files.

The method follows the canonical-node order of MosaicML Streaming (`base/shuffle/py1s.py`), with lanes independent of
the number of workers. N = rows of the split, L = lanes, n = rows of one lane.

Each step owns a range of these positions, and each rank computes a part of that range: G = global batch, S = steps of
an epoch, W = world size (ranks). Seeds are functions of a position, too, so there is no generator state to save.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- Order of an epoch ---

Ints = NDArray[np.int64]

# The minimum number of blocks in a lane, if there are enough rows: fewer blocks would leave neighbouring rows together.
BLOCKS_PER_LANE = 4
WINDOW_ROWS = 1024
# Memory for the open windows of all lanes together. Large rows get smaller windows.
WINDOWS_BYTES = 256 * 1024 * 1024
MIN_WINDOW_ROWS = 16
# Of rows that are grouped by length, see `chunk_rows`.
CHUNK_STEPS, MIN_CHUNKS = 8, 4

# The purpose of a permutation; part of its key.
BLOCKS, WINDOW, CHUNKS = 0, 1, 3


def permutation(count: int, *key: int) -> Ints:
    """Return a permutation of range(count), determined by `key`.

    It sorts a counter-based stream (Philox 4x64-10, Salmon et al. 2011). numpy guarantees that stream for all releases,
    but not how numpy's own `permutation` uses a stream.
    """
    stream: Any = np.random.Philox(np.random.SeedSequence(key))
    return sorting(stream.random_raw(count))


def sorting(drawn: NDArray[np.uint64]) -> Ints:
    """Return the stable sorting order (argsort) of `drawn`."""
    order = np.argsort(drawn)
    # Sorting algorithms disagree only on equal numbers, and the stable one takes several times as long.
    if (np.diff(drawn[order]) == 0).any():
        order = np.argsort(drawn, kind="stable")
    return order.astype(np.int64, copy=False)


def blocks_of(row_groups: Sequence[int] | Ints, lanes: int) -> Ints:
    """Cut row groups, given as row counts, into blocks.

    Return a (blocks, 2) array of first row and row count. A block never crosses a row group. Row groups stay whole if
    there are enough of them.
    """
    counts = np.asarray(row_groups, np.int64)
    if len(counts) >= lanes * BLOCKS_PER_LANE:
        starts = np.cumsum(counts) - counts
        return np.stack([starts, counts], axis=1)[counts > 0]
    longest = max(1, -(-int(counts.sum()) // (lanes * BLOCKS_PER_LANE)))
    blocks, first = [], 0
    for rows in counts.tolist():
        pieces = -(-rows // longest)
        cuts = [first + rows * piece // pieces for piece in range(pieces + 1)]
        blocks += [(start, end - start) for start, end in itertools.pairwise(cuts) if end > start]
        first += rows
    return np.asarray(blocks, np.int64).reshape(-1, 2)


def window_rows(row_bytes: int, lanes: int) -> int:
    """Return the number of rows in a lane's window.

    `row_bytes` is the memory that one row takes. It helps to determine the order, so it must not change within a run.
    """
    return min(WINDOW_ROWS, max(MIN_WINDOW_ROWS, WINDOWS_BYTES // (max(row_bytes, 1) * lanes)))


@dataclass(frozen=True)
class EpochOrder:
    """The order of rows in one epoch. Rows are counted from 0 at the beginning of the split."""

    starts: Ints
    """The first row of each block, in the permuted sequence."""
    ends: Ints
    """The end of each block in the permuted sequence."""
    lanes: int
    seed: int
    epoch: int
    window_rows: int = WINDOW_ROWS

    @property
    def row_count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def lane_rows(self, lane: int) -> int:
        """Return n, the rows of a lane. The first N mod L lanes have one row more."""
        return self.row_count // self.lanes + (lane < self.row_count % self.lanes)

    def windows(self, lane: int) -> int:
        return -(-self.lane_rows(lane) // self.window_rows)

    def window(self, lane: int, number: int) -> Ints:
        """Return the shuffled rows of a lane's window."""
        shuffled: Ints = self.unshuffled_window(lane, number)[self.shuffle(lane, number)]
        return shuffled

    def shuffle(self, lane: int, number: int) -> Ints:
        """Return the permutation that `window` applies to `unshuffled_window`."""
        begin, end = self._bounds(lane, number)
        return permutation(end - begin, self.seed, self.epoch, WINDOW, lane, number)

    def chunks(self, number: int, rows_per_step: int) -> tuple[int, Ints]:
        """Return the rows of a chunk of window `number`, and the order of its chunks, the same for all lanes."""
        begin, end = self._bounds(self.lanes - 1, number)  # no lane has fewer rows
        rows = chunk_rows(end - begin, rows_per_step)
        return rows, permutation((end - begin) // rows, self.seed, self.epoch, CHUNKS, number)

    def unshuffled_window(self, lane: int, number: int) -> Ints:
        """Return the unshuffled rows of a lane's window. There are none beyond the last window."""
        start = self._lane_start(lane)
        begin, end = self._bounds(lane, number)
        return self._rows_at(np.arange(start + begin, start + end, dtype=np.int64))

    def _bounds(self, lane: int, number: int) -> tuple[int, int]:
        begin = min(number * self.window_rows, self.lane_rows(lane))
        return begin, min(begin + self.window_rows, self.lane_rows(lane))

    def rows(self, positions: Ints) -> Ints:
        """Return the rows at `positions` of the epoch.

        Each window that holds one of the positions is shuffled once, and only the rows at `positions` are computed.
        """
        lanes = positions % self.lanes
        numbers, places = np.divmod(positions // self.lanes, self.window_rows)
        # Number the windows across all lanes, so that sorting puts the positions of one window together.
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
        """Return where the lane begins in the permuted sequence."""
        share, extra = divmod(self.row_count, self.lanes)
        return lane * share + min(lane, extra)

    def _rows_at(self, sequence: Ints) -> Ints:
        block = np.searchsorted(self.ends, sequence, side="right")
        begins = np.where(block > 0, self.ends[block - 1], 0)
        rows: Ints = self.starts[block] + sequence - begins
        return rows


def chunk_rows(window_rows: int, rows_per_step: int) -> int:
    """Return the rows of a lane that stay together, sorted by length, of a window of so many rows.

    They suffice for several steps, because a step in which two chunks meet has rows of two lengths. There are at
    least four chunks if there are enough rows, so that their order differs from epoch to epoch.
    """
    return max(rows_per_step, min(CHUNK_STEPS * rows_per_step, window_rows // MIN_CHUNKS), 1)


def grouped_by_length(shuffle: Ints, lengths: Ints, chunk: int, chunks: Ints) -> Ints:
    """Return `shuffle`, a lane's window, with rows of similar length next to each other.

    `shuffle` (n,) are places in the window, `lengths` (n,) the length of the row at each place. Rows are sorted by
    length, equal ones in their shuffled order, and cut into chunks of `chunk` rows. `chunks` is the order of the
    first m chunks; the rows after them stay last. All lanes use the same, so that a step has rows of similar
    length from every lane.
    """
    sorted_places: Ints = shuffle[np.argsort(lengths[shuffle], kind="stable")]
    end = len(chunks) * chunk
    moved = sorted_places[:end].reshape(len(chunks), chunk)[chunks]
    return np.concatenate([moved.ravel(), sorted_places[end:]])


def epoch_order(blocks: Ints, lanes: int, seed: int, epoch: int, window_rows: int = WINDOW_ROWS) -> EpochOrder:
    """Return the order of `epoch` over `blocks` (from `blocks_of`)."""
    permuted = blocks[permutation(len(blocks), seed, epoch, BLOCKS)]
    return EpochOrder(permuted[:, 0], np.cumsum(permuted[:, 1]), lanes, seed, epoch, window_rows)


# --- Steps and ranks ---

# BatchNorm refuses a single row whose feature map is 1x1.
MIN_ROWS_PER_RANK = 2
# Divides evenly among 1, 2, 3, 4, 6, 8 and 12 ranks.
MIN_LANES = 24


@dataclass(frozen=True)
class BatchPlan:
    """The values that determine the batches.

    `global_batch` is G. `rank` and `world_size` are those of the present attempt.
    """

    seed: int
    lanes: int
    global_batch: int
    epochs: int
    rank: int
    world_size: int
    window_rows: int = WINDOW_ROWS
    # The column by whose lengths rows are grouped within windows. Empty: they are not.
    length_column: str = ""


def default_lanes(max_workers: int) -> int:
    """Return the default of L.

    It is the first multiple of `max_workers`, the most workers of the specification, that is at least `MIN_LANES` and
    at least 2·`max_workers`. So `max_workers` ranks share a step evenly, and with fewer ranks none has 1.5 times the
    mean or more. More lanes would be more even still, but each lane needs a window in memory and row groups of its own.
    """
    workers = max(max_workers, 1)
    return workers * max(2, -(-MIN_LANES // workers))


def steps_per_epoch(rows: int, global_batch: int) -> int:
    """Return S = ⌈N/G⌉."""
    return -(-rows // global_batch)


def step_bounds(rows: int, steps: int, step: int) -> tuple[int, int]:
    """Return the positions [begin, end) of one step of the epoch.

    All steps differ by at most one row, so no step is much shorter than the others.
    """
    return step * rows // steps, (step + 1) * rows // steps


def rank_positions(begin: int, end: int, lanes: int, rank: int, world_size: int) -> Ints:
    """Return the positions of a step that `rank` computes.

    They lie in the rank's own lanes: every W-th lane from `rank` on. The function generates only positions in these
    lanes, including the first and the last turn in full. With a thousand ranks a step has a thousand times as many
    positions.
    """
    own = np.arange(rank, lanes, world_size, dtype=np.int64)
    turns = np.arange(begin // lanes, -(-end // lanes), dtype=np.int64)
    positions: Ints = (turns[:, None] * lanes + own).ravel()
    first, last = np.searchsorted(positions, (begin, end)).tolist()
    return positions[first:last]


def shapes_of_steps(rows: int, steps: int, lanes: int) -> list[tuple[int, Ints]]:
    """Return the lengths of steps, with their first lanes.

    For each length these are the lanes at which steps of that length begin. The ranks' shares of an epoch's steps
    depend on nothing else. The cost is 2·L lookups, however many steps there are.

    Step s begins at position ⌊s·N/S⌋. So (s·N mod S·L) div S is the lane at which it begins. The remainder of that
    division shows whether the step is one of the N mod S steps with one row more: it then is at least S - N mod S.
    """
    length, longer = divmod(rows, steps)
    shapes = []
    for one, low, high in ((length, 0, steps - longer), (length + 1, steps - longer, steps)):
        at = [
            lane
            for lane in range(lanes)
            if low < high and _first_within(rows, steps * lanes, lane * steps + low, lane * steps + high - 1) < steps
        ]
        if at:
            shapes.append((one, np.asarray(at, np.int64)))
    return shapes


def min_rows_of_a_rank(shapes: Sequence[tuple[int, Ints]], lanes: int, world_size: int) -> int:
    """Return the smallest slice of any rank and step. The steps of an epoch have these `shapes`."""
    own = _own_lanes(lanes, world_size)
    return int(min(_slices(own, length, begins, lanes).min() for length, begins in shapes))


def max_rows_of_a_rank(step_rows: int, lanes: int, world_size: int) -> int:
    """Return the largest slice of any rank.

    The step has `step_rows` rows. The step may begin at any lane. All other ranks wait for the rank with this slice.
    With 24 lanes the result is the same for 12 ranks as for 23.
    """
    return int(_slices(_own_lanes(lanes, world_size), step_rows, np.arange(lanes), lanes).max())


@functools.lru_cache(maxsize=64)
def count_micro_batches(step_rows: int, lanes: int, world_size: int, max_workers: int, accumulation_steps: int) -> int:
    """Return the number of micro-batches of each slice.

    Each of `world_size` ranks computes its slice of a step of `step_rows` rows in this many micro-batches. On
    `max_workers` ranks the number is `accumulation_steps`. On fewer ranks the slices are larger, so the number rises
    until no micro-batch has more rows than one may have on `max_workers` ranks. It stays lower if a micro-batch of the
    smallest slice would otherwise fall below `MIN_ROWS_PER_RANK`.
    """
    if world_size >= max_workers:
        return accumulation_steps
    ours = _slices(_own_lanes(lanes, world_size), step_rows, np.arange(lanes), lanes)
    max_rows_of_a_micro_batch = -(-max_rows_of_a_rank(step_rows, lanes, max_workers) // accumulation_steps)
    wanted = -(-int(ours.max()) // max_rows_of_a_micro_batch)
    return max(accumulation_steps, min(wanted, int(ours.min()) // MIN_ROWS_PER_RANK))


def _own_lanes(lanes: int, world_size: int) -> Ints:
    """Return the ranks' counts of lanes, cumulated.

    The shape is (W, 2·L + 1): entry [w, k] is how many of the first k lanes, counted twice around, rank w owns.
    """
    owners = np.arange(2 * lanes) % lanes % world_size
    own = np.zeros((world_size, 2 * lanes + 1), np.int64)
    own[owners, np.arange(1, 2 * lanes + 1)] = 1
    return own.cumsum(axis=1)


def _slices(own: Ints, length: int, begins: Ints, lanes: int) -> Ints:
    """Return the ranks' rows in a step. The step has `length` rows and begins at each of n lanes; shape (W, n)."""
    turns, rest = divmod(length, lanes)
    slices: Ints = turns * own[:, lanes, None] + own[:, begins + rest] - own[:, begins]
    return slices


def _first_within(stride: int, modulus: int, low: int, high: int) -> float:
    """Return the least n with n·stride in bounds.

    It is the least n ≥ 0 for which n·stride mod modulus is in [low, high], or infinity if there is none. [low, high]
    lies within [0, modulus). The recursion is that of Euclid's algorithm, and takes as few rounds.
    """
    if low == 0:
        return 0
    stride %= modulus
    if stride == 0:
        return math.inf
    n = -(-low // stride)
    if n * stride <= high:
        return n
    # No multiple in the first turn around the modulus matches. After m turns a multiple of the stride is in [low, high]
    # + m·modulus if m·modulus mod stride is in [-high, -low] mod stride.
    turns = _first_within(modulus, stride, -high % stride, -low % stride)
    return turns if turns == math.inf else -(-(low + int(turns) * modulus) // stride)


def loss_scale(world_size: int, step_weight: float) -> float:
    """Return the factor for a rank's summed loss.

    The factor is W / Σ(weights of the whole step). DDP averages gradients over ranks. With this factor the average is
    the exact weighted mean over the global batch, however unequal the ranks' shares are.
    """
    return world_size / step_weight


# --- Seeds ---

NOISE = 2


def noise_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's random draws. Layers draw on one rank. The seed is below 2^63."""
    return int(np.random.SeedSequence((seed, NOISE, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
