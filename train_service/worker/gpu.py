"""What a rank's GPU is used for, as metrics of a step."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

# NVML averages over about as long.
UTILIZATION_EVERY_S = 1.0

Read = Callable[[torch.device], float]


class GpuMeter:
    """`memory` gives the most bytes that tensors had so far, `utilization` the per cent of time in which the GPU was at
    work; None where it cannot be read."""

    def __init__(self, device: torch.device, memory: Read | None = None, utilization: Read | None = None) -> None:
        self._device = device
        self._memory = memory or torch.cuda.max_memory_allocated
        self._utilization = utilization or _nvml()
        self._share: float | None = None
        self._read_at = 0.0

    def values(self) -> dict[str, float]:
        """`gpu_memory_bytes`, and `gpu_utilization`, 0..1, where NVML is there; nothing of a CPU."""
        if self._device.type != "cuda":
            return {}
        values = {"gpu_memory_bytes": float(self._memory(self._device))}
        if self._utilization is not None:
            now = time.monotonic()
            if not self._read_at or now - self._read_at >= UTILIZATION_EVERY_S:
                self._share, self._read_at = self._read(self._utilization), now
            if self._share is not None:
                values["gpu_utilization"] = self._share
        return values

    def _read(self, utilization: Read) -> float | None:
        """None where NVML does not tell, as of a part of a GPU: a run does not end for that."""
        try:
            return utilization(self._device) / 100.0
        except Exception as error:
            logger.warning("the utilization of %s cannot be read and is left out: %s", self._device, error)
            self._utilization = None
            return None


def _nvml() -> Read | None:
    """torch asks NVML through the package nvidia-ml-py, which the extra `gpu` brings."""
    return torch.cuda.utilization if importlib.util.find_spec("pynvml") else None
