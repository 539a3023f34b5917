"""Which positions a step owns, and which of them a rank computes.

N = rows of the split, G = global batch, S = steps of an epoch, L = lanes, W = world size (ranks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train_service.domain.order import WINDOW_ROWS, Ints

# BatchNorm refuses a single row whose feature map is 1x1.
FEWEST_ROWS_PER_RANK = 2


@dataclass(frozen=True)
class Plan:
    """What fixes the batches. `global_batch` is G; rank and world size are those of this attempt."""

    seed: int
    lanes: int
    global_batch: int
    epochs: int
    rank: int
    world_size: int
    window_rows: int = WINDOW_ROWS


def steps_per_epoch(rows: int, global_batch: int) -> int:
    """S = ⌈N/G⌉."""
    return -(-rows // global_batch)


def step_bounds(rows: int, steps: int, step: int) -> tuple[int, int]:
    """The positions [begin, end) of one step of the epoch: all steps differ by one row at most, none is a sliver."""
    return step * rows // steps, (step + 1) * rows // steps


def rank_positions(begin: int, end: int, lanes: int, rank: int, world_size: int) -> Ints:
    """The positions of a step that `rank` computes: those in its own lanes, every W-th lane from `rank` on."""
    positions = np.arange(begin, end, dtype=np.int64)
    mine: Ints = positions[positions % lanes % world_size == rank]
    return mine


def fewest_rows_of_a_rank(rows: int, steps: int, lanes: int, world_size: int) -> int:
    """The smallest slice that any rank gets in any step of an epoch.

    A step's shares depend only on where it begins among the lanes and how long it is, so each such pair counts once.
    """
    seen = {(begin % lanes, end - begin) for begin, end in (step_bounds(rows, steps, step) for step in range(steps))}
    return min(
        int(np.bincount(np.arange(phase, phase + length) % lanes % world_size, minlength=world_size).min())
        for phase, length in seen
    )


def loss_scale(world_size: int, step_weight: float) -> float:
    """What a rank multiplies its summed loss by: W / Σ(weights of the whole step).

    DDP averages gradients over ranks; so scaled, that average is the exact weighted mean over the global batch, however
    unequal the ranks' shares are.
    """
    return world_size / step_weight
