"""The same bits each time. A CPU gives them by itself, with as many threads; a GPU where it is asked to."""

from __future__ import annotations

import os
from typing import Any

import torch


def compute_deterministically(device: torch.device) -> None:
    """For all that this process computes on `device` from now on; call it before the first use of a GPU.

    Where torch knows no deterministic way, it warns in the worker's log and takes another.
    """
    if device.type != "cuda":
        return
    # Read as cuBLAS is first used; another value of whoever started us may be as good.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    # It would choose kernels by which was the fastest this time.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else all new memory is written to first, which finds what is read uninitialized and changes nothing else.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
