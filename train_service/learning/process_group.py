"""The process group of ranks that no Ray Train has joined: its backend, its timeout, and what NCCL is told.

Ray Train joins its own workers by the same backend and timeout (`attempt.ray_run`); what NCCL reads of the environment,
NCCL_SOCKET_IFNAME and the like, is that of the node in both.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# As Ray Train has it: where a collective operation fails or is late, the process ends, and with it the attempt. Else
# the other ranks would wait for ever.
ABORTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def backend_for(device: torch.device, backend: str = "") -> str:
    """The one asked for; else nccl between GPUs, and gloo between CPUs."""
    return backend or ("nccl" if device.type == "cuda" else "gloo")


def join_process_group(device: torch.device, backend: str, timeout_s: float, store: Any = None) -> None:
    """Joins the group that torchrun's environment describes; with `store`, one of torch's, a group of this rank alone.
    A collective operation that takes longer than `timeout_s` ends the process.

    nccl is bound to `device` and connects at once: so a wrong network is found before the first step.
    """
    chosen = backend_for(device, backend)
    if chosen == "nccl":
        for name, value in ABORTS.items():
            os.environ.setdefault(name, value)
    dist.init_process_group(
        chosen,
        store=store,
        rank=-1 if store is None else 0,
        world_size=-1 if store is None else 1,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if chosen == "nccl" else None,
    )


def timeout_of_group() -> float:
    """Seconds, as the backend of the process's group has it."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options: timedelta = group._get_backend(device).options._timeout
    return options.total_seconds()
