"""What ranks consume and gather; a module of its own, for real processes import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from train_service.checkpoints.coverage_records import gather
from train_service.checkpoints.saving import ConsumedRows
from train_service.learning.ranks import Ranks


def what_a_rank_consumed(ranks: Ranks) -> Any:
    """The rows of three steps as rank 0 has them, and how many there are after the next exchange; None elsewhere."""
    noted = ConsumedRows()
    for step in range(3):
        # Unequal shares, and none at all for one rank.
        noted.add(step, step // 2, np.arange(ranks.rank * 2, dtype=np.int64) + 1000 * step + 100 * ranks.rank)
    first = gather(ranks, noted.take())
    nothing = gather(ranks, noted.take())
    return None if first is None or nothing is None else (first.to_pylist(), nothing.num_rows)
