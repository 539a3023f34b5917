"""Numbers of a device on their way to the host, while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Of a tensor as it is when what was asked of the device so far is done."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def values(self) -> Tensor:
        """In host memory. Waits for the copy, and not for what the device was asked for after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy
