"""Joins a process group with one rank as the service does, and prints the group's properties as JSON.

python -m benchmarks.gpu_group cuda|cpu TIMEOUT_S
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as torch_group

from train_service.learning.ranks import join_process_group, timeout_of_group


def main(kind: str, timeout_s: float) -> None:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    join_process_group(device, "", timeout_s, torch_group.HashStore())
    values = torch.full((4,), 3.0, device=device)
    dist.all_reduce(values)
    nccl: Any = torch.cuda.nccl
    version = ".".join(map(str, nccl.version())) if kind == "cuda" else ""
    said = {
        "backend": dist.get_backend(),
        "version": version,
        "timeout_s": timeout_of_group(),
        "sum": values[0].item(),
    }
    dist.destroy_process_group()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
