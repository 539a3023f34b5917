"""What Ray Train runs on every worker of an attempt."""

from __future__ import annotations

from typing import Any

import ray
import ray.train
import ray.train.torch

from shared.telemetry import configure_logging
from train_service.learning.ranks import Ranks
from train_service.worker.loop import LoopConfig, train_loop


def work(config: dict[str, Any]) -> None:
    """`config["loop"]` is the attempt's `LoopConfig`."""
    loop: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    train_loop(loop, ranks, ray.get_runtime_context().get_node_id())
