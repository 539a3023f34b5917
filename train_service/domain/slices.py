"""Which positions a step owns, and which of them a rank computes.

N = rows of the split, G = global batch, S = steps of an epoch, L = lanes, W = world size (ranks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train_service.domain.order import WINDOW_ROWS, Ints

# BatchNorm refuses a single row whose feature map is 1x1.
MIN_ROWS_PER_RANK = 2
# Even among 1, 2, 3, 4, 6, 8 and 12 ranks.
MIN_LANES = 24


@dataclass(frozen=True)
class SlicePlan:
    """What fixes the batches. `global_batch` is G; rank and world size are those of this attempt."""

    seed: int
    lanes: int
    global_batch: int
    epochs: int
    rank: int
    world_size: int
    window_rows: int = WINDOW_ROWS


def default_lanes(max_workers: int) -> int:
    """L where a specification does not say: the first multiple of its most workers from 24 up, and two for each at
    least.

    So all of them together share a step evenly, and on fewer none has half as much again as the mean. More would be
    more even still; but each takes a window in memory, and row groups of its own.
    """
    workers = max(max_workers, 1)
    return workers * max(2, -(-MIN_LANES // workers))


def steps_per_epoch(rows: int, global_batch: int) -> int:
    """S = ⌈N/G⌉."""
    return -(-rows // global_batch)


def step_bounds(rows: int, steps: int, step: int) -> tuple[int, int]:
    """The positions [begin, end) of one step of the epoch: all steps differ by one row at most, none is a sliver."""
    return step * rows // steps, (step + 1) * rows // steps


def rank_positions(begin: int, end: int, lanes: int, rank: int, world_size: int) -> Ints:
    """The positions of a step that `rank` computes: those in its own lanes, every W-th lane from `rank` on.

    Only these are made, and those of its lanes in the first and the last turn: with a thousand ranks a step has a
    thousand times as many.
    """
    own = np.arange(rank, lanes, world_size, dtype=np.int64)
    turns = np.arange(begin // lanes, -(-end // lanes), dtype=np.int64)
    positions: Ints = (turns[:, None] * lanes + own).ravel()
    first, last = np.searchsorted(positions, (begin, end)).tolist()
    return positions[first:last]


def shapes_of_steps(rows: int, steps: int, lanes: int) -> list[tuple[int, Ints]]:
    """All that the ranks' shares of an epoch's steps depend on: each length that a step has, and the lanes at which
    steps of that length begin. Takes time for 2·L lookups, however many steps there are.

    Step s begins at position ⌊s·N/S⌋. So s·N modulo S·L tells, divided by S, the lane at which it begins; and the rest
    of that division whether it is one of the N mod S steps that have a row more, which then is S - N mod S or above.
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
    """The smallest slice that any rank gets in any step of an epoch whose steps have these `shapes`."""
    own = _own_lanes(lanes, world_size)
    return int(min(_slices(own, length, begins, lanes).min() for length, begins in shapes))


def max_rows_of_a_rank(step_rows: int, lanes: int, world_size: int) -> int:
    """The largest slice that any rank gets of a step of `step_rows` rows, at whichever lane that begins: all others
    wait for that rank. At 24 lanes it is the same on 12 ranks as on 23."""
    return int(_slices(_own_lanes(lanes, world_size), step_rows, np.arange(lanes), lanes).max())


@functools.lru_cache(maxsize=64)
def parts_of_step(step_rows: int, lanes: int, world_size: int, max_workers: int, accumulation_steps: int) -> int:
    """In how many parts each of `world_size` ranks computes its slice of a step of `step_rows` rows.

    As many as the specification says, on `max_workers` ranks; on fewer, whose slices are larger, so many that no part
    has more rows than one may have there. But where rows are so few that a part of the smallest slice would be below
    `MIN_ROWS_PER_RANK`, fewer.
    """
    if world_size >= max_workers:
        return accumulation_steps
    ours = _slices(_own_lanes(lanes, world_size), step_rows, np.arange(lanes), lanes)
    max_rows_of_a_part = -(-max_rows_of_a_rank(step_rows, lanes, max_workers) // accumulation_steps)
    wanted = -(-int(ours.max()) // max_rows_of_a_part)
    return max(accumulation_steps, min(wanted, int(ours.min()) // MIN_ROWS_PER_RANK))


def _own_lanes(lanes: int, world_size: int) -> Ints:
    """(W, 2·L + 1): of so many lanes, counted twice around, how many are the rank's."""
    owners = np.arange(2 * lanes) % lanes % world_size
    own = np.zeros((world_size, 2 * lanes + 1), np.int64)
    own[owners, np.arange(1, 2 * lanes + 1)] = 1
    return own.cumsum(axis=1)


def _slices(own: Ints, length: int, begins: Ints, lanes: int) -> Ints:
    """(W, n): the rows of each rank in a step of `length` rows that begins at each of these n lanes."""
    turns, rest = divmod(length, lanes)
    slices: Ints = turns * own[:, lanes, None] + own[:, begins + rest] - own[:, begins]
    return slices


def _first_within(stride: int, modulus: int, low: int, high: int) -> float:
    """The least n ≥ 0 for which n·stride mod modulus is in [low, high], which is within [0, modulus); infinity where
    there is none. As Euclid's algorithm, in as few rounds."""
    if low == 0:
        return 0
    stride %= modulus
    if stride == 0:
        return math.inf
    n = -(-low // stride)
    if n * stride <= high:
        return n
    # Not in the first turn around the modulus. After m turns a multiple of the stride is in [low, high] + m·modulus
    # where m·modulus mod stride is in [-high, -low] mod stride.
    turns = _first_within(modulus, stride, -high % stride, -low % stride)
    return turns if turns == math.inf else -(-(low + int(turns) * modulus) // stride)


def loss_scale(world_size: int, step_weight: float) -> float:
    """What a rank multiplies its summed loss by: W / Σ(weights of the whole step).

    DDP averages gradients over ranks; so scaled, that average is the exact weighted mean over the global batch, however
    unequal the ranks' shares are.
    """
    return world_size / step_weight
