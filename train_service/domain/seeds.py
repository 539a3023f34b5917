"""Counter-based randomness: a seed from a position, so that there is no generator state to save."""

from __future__ import annotations

import numpy as np

NOISE = 2


def noise_seed(seed: int, step: int, rank: int) -> int:
    """Seeds what the layers draw in one step on one rank, below 2^63."""
    return int(np.random.SeedSequence((seed, NOISE, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
