"""Runs a function on W real processes joined by gloo, as Ray Train's workers are, or in one process.

They are forked from a process that has imported what they need, and done nothing else.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from train_service.learning.ranks import Ranks

# What ranks import while they train: each rank would take longer for it than for its training.
IMPORTED = [
    "train_service.worker.loop",
    "torch._dynamo",  # by DistributedDataParallel
    "torch.distributed.checkpoint.state_dict",  # by sharded models, as the next two
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchmetrics.classification",
    "torchvision",
    "tests.unit.train_service.learners",
]


def in_ranks(world_size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(ranks, *arguments)` returned on each rank; `folder` is empty and for this call alone."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    processes: Any = multiprocessing
    arguments = (world_size, work, str(folder), arguments)
    processes.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def forked_process(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A started process that calls `work(*arguments)`.

    It is forked from the process that ranks are forked from, so it need not import torch.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    processes: Any = multiprocessing
    process: BaseProcess = processes.get_context("forkserver").Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _rank(rank: int, world_size: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    result = work(Ranks(rank, world_size, torch.device("cpu")), *arguments)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may outlive the interpreter's end and abort the process then; the result is written by now.
    os._exit(0)
