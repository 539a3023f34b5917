"""Where a replica's model runs: on what Ray gave the replica. Only replicas import this: torch takes seconds."""

from __future__ import annotations

import ray
import torch

from shared.errors import FailedPrecondition


def assigned_device() -> torch.device:
    """The GPU that Ray keeps for this replica, or keeps a part of, and alone shows to it; the CPU where there is none.

    Raises `FailedPrecondition` where torch cannot use it.
    """
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", []) if ray.is_initialized() else []
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FailedPrecondition(
            f"Ray gave this replica GPU {gpus[0]} of its node, which torch {torch.__version__} cannot use there; "
            "install a driver and a torch for it, or deploy with gpus_per_replica=0",
            reason="GPU_CANNOT_BE_USED",
        )
    return torch.device("cuda", 0)
