"""How this process computes on its device: the same bits each time or the fastest kernels, and in which products.

A CPU gives the same bits by itself, with as many threads; a GPU where it is asked to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from train_service.domain.spec import DETERMINISTIC, TF32, TrainingSpec

# A folder of a node's that keeps what torch.compile made, also when the node's /tmp is emptied.
COMPILE_CACHE = "MILLRACE_COMPILE_CACHE"


def set_up_device(device: torch.device, spec: TrainingSpec, environ: Mapping[str, str] = os.environ) -> None:
    """For all that this process computes on `device` from now on; call it before the first use of a GPU."""
    if spec.compile:
        _keep_compiled(environ.get(COMPILE_CACHE, ""))
    if device.type != "cuda":
        return
    is_tf32 = spec.precision == TF32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    # torch allows it to convolutions by default, and not to products of matrices.
    torch.backends.cudnn.allow_tf32 = is_tf32
    if spec.acceleration.algorithms == DETERMINISTIC:
        _compute_deterministically()
    else:
        # It tries the kernels for each shape at first. All steps but an epoch's last have the same.
        torch.backends.cudnn.benchmark = True


@contextmanager
def full_float32() -> Iterator[None]:
    """Meanwhile no product is rounded to TF32: what is measured is what is served."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _compute_deterministically() -> None:
    """Where torch knows no deterministic way, it warns in the worker's log and takes another."""
    # Read as cuBLAS is first used; another value of whoever started us may be as good.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    # It would choose kernels by which was the fastest this time.
    torch.backends.cudnn.benchmark = False
    # The compiler heeds it, too: else it chooses how a sum is added up by which way was the fastest this time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else all new memory is written to first, which finds what is read uninitialized and changes nothing else.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def _keep_compiled(folder: str) -> None:
    """torch itself keeps it below /tmp, by the user's name."""
    if folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
