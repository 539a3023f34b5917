"""Measuring the model on a split, each rank its share of the rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from shared.model_spec import TargetScaling
from shared.models.loaded import scale_target, undo_scaling
from train_service.domain.spec import REGRESSION
from train_service.learning.device_batches import to_device
from train_service.learning.device_transform import DeviceTransform
from train_service.learning.losses import Loss
from train_service.learning.metrics import Metrics
from train_service.learning.ranks import Ranks
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.rows import Array, RowCache, Rows

ROWS_PER_CALL = 256
# The rows of so many calls are on their way.
AHEAD_CALLS = 8
# Rows are prepared in parts that take about as long.
SIGN_EVERY_S = 1.0


class _Preparing:
    """Prepares rows a few at a time, with a sign of life after each few; of quick ones it takes all at once.

    Where Ray's tasks prepare training rows, one thread may need longer for a call's than a rank may stand still.
    """

    def __init__(self, preprocessing: Preprocessing, touched: Callable[[], None]) -> None:
        self._preprocessing = preprocessing
        self._touched = touched
        self._rows_at_once = 1

    def __call__(self, rows: Rows) -> Array:
        """What `Preprocessing.for_device` makes of these rows."""
        parts = []
        begin, end = 0, len(rows.row_ids)
        while begin < end:
            few = min(end, begin + self._rows_at_once)
            began = time.monotonic()
            parts.append(self._preprocessing.for_device(rows.slice(begin, few)))
            self._touched()
            is_quick = time.monotonic() - began < SIGN_EVERY_S
            self._rows_at_once = min(self._rows_at_once * 2, ROWS_PER_CALL) if is_quick else max(1, (few - begin) // 2)
            begin = few
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def evaluate(
    model: nn.Module,
    loss: Loss,
    metrics: Metrics,
    cache: RowCache,
    preprocessing: Preprocessing,
    ranks: Ranks,
    rows_per_call: int = ROWS_PER_CALL,
    target_scaling: TargetScaling | None = None,
) -> tuple[float, dict[str, float], int]:
    """Mean loss, the metrics, and the number of rows, over the whole split on every rank. Augmentations do not act.
    The loss is that of the scaled target, the metrics are in the target's own unit."""
    sums = torch.zeros(2 + metrics.width, dtype=torch.float64)
    model.eval()
    numbers = metrics.task == REGRESSION
    with torch.no_grad():
        for inputs, labels, is_own in validation_batches(cache, preprocessing, ranks, rows_per_call, numbers=numbers):
            outputs = model(inputs)
            if is_own:
                total = loss.total(outputs, scale_target(target_scaling, labels)).item()
                values = undo_scaling(target_scaling, outputs)
                sums += torch.cat(
                    [torch.tensor([total, len(labels)], dtype=torch.float64), metrics.sums(values, labels).cpu()]
                )
    sums = ranks.add(sums).summed()
    total, seen = sums[:2].tolist()
    return total / seen, metrics.values(sums[2:]), int(seen)


def validation_batches(
    cache: RowCache, preprocessing: Preprocessing, ranks: Ranks, rows_per_call: int, *, numbers: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """A rank's share of a split: inputs (rows, *shape), labels (rows,) or of `numbers` (rows, K), on its device; and
    whether they are its own. As many on every rank: calls of a sharded model are collective, so a rank that has run out
    of rows keeps the others company with some that do not count."""
    rows = sum(cache.row_groups)
    # Stretches, not strides: a rank reads whole row groups.
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    max_rows = math.ceil(rows / ranks.world_size)
    calls = math.ceil(max_rows / rows_per_call)
    prepare, on_device = _Preparing(preprocessing, cache.touched), DeviceTransform(preprocessing.device_steps)
    for start in range(first, first + calls * rows_per_call, rows_per_call):
        positions = np.arange(start, min(start + rows_per_call, end), dtype=np.int64)
        cache.read_ahead(np.arange(start, min(start + AHEAD_CALLS * rows_per_call, end), dtype=np.int64))
        batch = cache.rows(positions if len(positions) else np.asarray([max(0, min(start, rows) - 1)], np.int64))
        labels = to_device(batch.labels, ranks.device)
        if numbers:
            labels = labels.reshape(len(labels), -1)
        yield on_device(to_device(prepare(batch), ranks.device)), labels, len(positions) > 0
