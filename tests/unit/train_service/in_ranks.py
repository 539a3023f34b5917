"""Runs a function on W real processes joined by gloo, as Ray Train's workers are.

They are forked from a process that has imported what they need, and done nothing else.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from train_service.learning.ranks import Ranks


def in_ranks(world_size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(ranks, *arguments)` returned on each rank; `folder` is empty and for this call alone."""
    # DistributedDataParallel imports torch._dynamo, which takes longer than all the rest.
    multiprocessing.set_forkserver_preload(["train_service.worker.loop", "torch._dynamo"])
    processes: Any = multiprocessing
    arguments = (world_size, work, str(folder), arguments)
    processes.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    result = work(Ranks(rank, world_size, torch.device("cpu")), *arguments)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may outlive the interpreter's end and abort the process then; the result is written by now.
    os._exit(0)
