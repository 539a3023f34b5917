"""A network without BatchNorm or noise in float64, and its gradients as the training loop computes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from train_service.domain.order import loss_scale, rank_positions
from train_service.learning.ranks import Ranks, warm_up_ddp_buckets

ROWS, LANES = 61, 24


def network() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10), nn.Tanh())
    return nn.Sequential(layers, nn.Linear(10, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    images_BCHW = torch.randn(ROWS, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images_BCHW, torch.randint(0, 3, (ROWS,), generator=generator)


def full_batch_gradients() -> list[torch.Tensor]:
    """Of the plain mean over all rows, in one process."""
    model, (images_BCHW, labels_B) = network(), batch()
    F.cross_entropy(model(images_BCHW), labels_B).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def gradients_of_rank(ranks: Ranks) -> list[torch.Tensor]:
    """After DDP's average over ranks, each of which computed its own slice."""
    model, (images_BCHW, labels_B) = network(), batch()
    wrapped = ranks.wrap(model)
    if wrapped is not model:
        warm_up_ddp_buckets(wrapped, model, lambda one: one(images_BCHW[:2]).sum())
    mine = torch.from_numpy(rank_positions(0, ROWS, LANES, ranks.rank, ranks.world_size))
    loss_sum = F.cross_entropy(wrapped(images_BCHW[mine]), labels_B[mine], reduction="sum")
    (loss_sum * loss_scale(ranks.world_size, ROWS)).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def what_ranks_agree_on(ranks: Ranks) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], object, list[float]]:
    """This rank's gradients, its buffers once they were settled and shared, rank 0's value, and a sum."""
    made = gradients_of_rank(ranks)
    torch.manual_seed(1)
    normed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 36, 3))
    before = {name: buffer.clone() for name, buffer in normed.named_buffers()}
    wrapped = ranks.wrap(normed)
    if wrapped is not normed:
        warm_up_ddp_buckets(wrapped, normed, lambda one: one(torch.zeros(2, 1, 8, 8)).sum())
    assert all(torch.equal(before[name], buffer) for name, buffer in normed.named_buffers())
    assert all(parameter.grad is None for parameter in normed.parameters())
    torch.manual_seed(ranks.rank)
    wrapped.train()
    wrapped(torch.randn(4, 1, 8, 8))
    ranks.share_buffers(normed)
    buffers = {name: buffer.clone() for name, buffer in normed.named_buffers()}
    return made, buffers, ranks.share({"from": ranks.rank}), ranks.add([float(np.float64(ranks.rank)), 1.0]).result()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
