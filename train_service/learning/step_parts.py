"""A rank's rows of a step, cut into the parts that are computed one after another, and which of them went wrong."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.errors import FailedPrecondition
from train_service.domain.order import parts_of_step
from train_service.domain.spec import TrainingSpec
from train_service.learning.device_batches import on_device
from train_service.loading.loader import Batch
from train_service.loading.rows import Array

MAX_REPORTED_ROW_IDS = 20


@dataclass(frozen=True)
class StepPart:
    """On the job's device: `inputs` (rows, *shape), `labels` (rows,) or for regression (rows, K), `row_ids` (rows,)."""

    inputs: Tensor
    labels: Tensor
    row_ids: Array


def parts_of(
    batch: Batch, spec: TrainingSpec, world_size: int, device: torch.device, *, whole: bool = False
) -> list[StepPart]:
    """As many as `parts_of_step` says, all ranks the same number: what fits a device when all workers are there does
    so when some are gone. `whole`: one."""
    count = (
        1 if whole else parts_of_step(batch.step_rows, spec.lanes, world_size, spec.max_ranks, spec.accumulation_steps)
    )
    inputs, labels = on_device(batch, spec, device)
    rows = len(batch.row_ids)
    bounds = [rows * number // count for number in range(count + 1)]
    return [
        StepPart(inputs[begin:end], labels[begin:end], batch.row_ids[begin:end])
        for begin, end in itertools.pairwise(bounds)
    ]


def diverged(batch: Batch, part: StepPart, losses: Tensor, loss: float, rank: int) -> FailedPrecondition:
    """Of a part whose `loss` is not finite; `losses` is what the loss gave of it. Rows whose own loss is not finite are
    told first; where all or none can be told apart, the part's first."""
    row_ids = part.row_ids
    if losses.shape == (len(row_ids),):
        bad = ~np.isfinite(losses.detach().float().cpu().numpy())
        row_ids = row_ids[bad] if bad.any() else row_ids
    told = ", ".join(map(str, row_ids[:MAX_REPORTED_ROW_IDS].tolist()))
    return FailedPrecondition(
        f"the loss of step {batch.step} (epoch {batch.epoch}) is {loss} on rank {rank}, with the rows {told}; look at "
        "these rows, or start a new job with a lower learning rate or max_gradient_norm",
        reason="NON_FINITE_LOSS",
        metadata={"step": str(batch.step), "epoch": str(batch.epoch), "rank": str(rank), "row_ids": told},
    )
