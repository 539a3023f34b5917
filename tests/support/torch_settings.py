"""How torch computes in this process, for tests that change it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch


@contextmanager
def kept_torch_settings() -> Iterator[None]:
    """Afterwards they are as before, and so is the environment."""
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils).deterministic
    matmul = torch.backends.cuda.matmul
    before = (torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory)
    flags = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    attention = attention_kernels()
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = flags
        allow_attention_kernels(*attention)


def attention_kernels() -> tuple[bool, bool, bool, bool]:
    """Whether torch may compute attention by its kernels: flash, memory-efficient, cuDNN's and the plain one."""
    backend: Any = torch.backends.cuda
    return (
        backend.flash_sdp_enabled(),
        backend.mem_efficient_sdp_enabled(),
        backend.cudnn_sdp_enabled(),
        backend.math_sdp_enabled(),
    )


def allow_attention_kernels(flash: bool, memory_efficient: bool, cudnn: bool, plain: bool) -> None:
    backend: Any = torch.backends.cuda
    backend.enable_flash_sdp(flash)
    backend.enable_mem_efficient_sdp(memory_efficient)
    backend.enable_cudnn_sdp(cudnn)
    backend.enable_math_sdp(plain)
