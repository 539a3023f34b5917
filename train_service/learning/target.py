"""Fitting the scaling of a regression's target: mean and deviation of the training split's labels, output by output."""

from __future__ import annotations

import numpy as np

from shared.model_spec import TargetScaling
from train_service.learning.ranks import Ranks
from train_service.loading.rows import RowCache

ROWS_PER_READ = 65_536
# The rows of so many reads are on their way.
AHEAD_READS = 4
# A deviation below this share of the mean is rounding: labels are float32, whose neighbours differ by a ten-millionth.
ROUNDING = 1e-9


def fit_target_scaling(labels: RowCache, outputs: int, ranks: Ranks) -> TargetScaling:
    """Of the population, in float64, a number for each of the model's `outputs`. Each rank reads its share of the rows,
    and all get the same; the last bits hang on the number of ranks. NaN and infinities, where the job allows them,
    count for nothing; an output that has no other labels stays as it is.

    Raises `InvalidArgument` naming the row for a label that is missing or, unless such are allowed, not finite.
    """
    rows = sum(labels.row_groups)
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    count, mean, squares = np.zeros(outputs), np.zeros(outputs), np.zeros(outputs)
    for begin in range(first, end, ROWS_PER_READ):
        labels.read_ahead(np.arange(begin, min(begin + AHEAD_READS * ROWS_PER_READ, end), dtype=np.int64))
        read = labels.rows(np.arange(begin, min(begin + ROWS_PER_READ, end), dtype=np.int64)).labels
        # (rows, K), merged into what was read before (Chan, Golub and LeVeque 1979): stable for any mean.
        values = read.reshape(len(read), -1).astype(np.float64)
        finite = np.isfinite(values)
        own_count = finite.sum(0)
        own_mean = np.where(finite, values, 0.0).sum(0) / np.maximum(own_count, 1)
        apart = own_mean - mean
        both = count + own_count
        share = own_count / np.maximum(both, 1)
        squares = squares + (np.where(finite, values - own_mean, 0.0) ** 2).sum(0) + apart**2 * count * share
        mean = mean + apart * share
        count = both
    counts, sums = np.asarray(ranks.add([*count, *(mean * count)]).result()).reshape(2, outputs)
    counts = np.maximum(counts, 1)
    whole_mean = sums / counts
    whole_squares = np.asarray(ranks.add([*(squares + count * (mean - whole_mean) ** 2)]).result())
    deviation = np.sqrt(whole_squares / counts)
    deviation = np.where(deviation > ROUNDING * np.abs(whole_mean), deviation, 1.0)
    return TargetScaling(mean=tuple(whole_mean.tolist()), deviation=tuple(deviation.tolist()))
