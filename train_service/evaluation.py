"""Measuring the model on a split, each rank its share of the rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from train_service.preprocessing import Preprocessing
from train_service.ranks import Ranks
from train_service.row_cache import RowCache

ROWS_PER_CALL = 256


def evaluate(model: nn.Module, cache: RowCache, preprocessing: Preprocessing, ranks: Ranks) -> tuple[float, float, int]:
    """Mean cross-entropy, share of right answers, and the number of rows, over the whole split on every rank.

    Augmentations do not act.
    """
    rows = sum(cache.row_groups)
    # Stretches, not strides: a rank reads whole row groups.
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    loss = right = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(first, end, ROWS_PER_CALL):
            batch = cache.rows(np.arange(start, min(start + ROWS_PER_CALL, end), dtype=np.int64))
            labels_B = torch.from_numpy(batch.labels).to(ranks.device)
            logits_BK = model(torch.from_numpy(preprocessing(batch)).to(ranks.device))
            loss += F.cross_entropy(logits_BK, labels_B, reduction="sum").item()
            right += (logits_BK.argmax(1) == labels_B).sum().item()
    loss, right, seen = ranks.add([loss, right, float(end - first)]).result()
    return loss / seen, right / seen, int(seen)
