"""The ranks of one attempt: wrapping the model, sharing values, adding over ranks.

Ranks that Ray Train has not joined join a process group here. Ray Train joins its own workers with the same backend and
timeout (`attempt.ray_run`). In both cases NCCL reads its environment, NCCL_SOCKET_IFNAME and the like, from the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_service.domain.spec import DDP, FSDP
from train_service.learning.sharding import shard, sharded

# --- Ranks ---

# Gradients are copied in buckets of this size when they are averaged.
BUCKET_BYTES = 32 * 2**20


class Ranks:
    """One rank in the process group of an attempt.

    The group exists before this is created; a single rank needs none.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def wrap(
        self, model: nn.Module, parallel: str = DDP, *, some_unused: bool = False, units: Sequence[str] | None = None
    ) -> nn.Module:
        """Return the model with gradients averaged over ranks in backward.

        With FSDP it is `model` itself, its parameters and gradients sharded over the ranks by `units`, see `shard`;
        build its optimizer after that.

        `some_unused`, the same on all ranks: a step may leave parameters without a gradient. DDP then looks for them in
        each pass; otherwise it would wait for their gradients. FSDP needs no such setting.
        """
        if self.world_size == 1:
            return model
        if parallel == FSDP:
            return shard(model, self.device.type, self.world_size, units)
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=some_unused,
        )

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_all(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank, in the order of ranks."""
        boxes = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(boxes, value)
        return boxes

    def share_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers to every rank. DDP itself does so only when the next step begins."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def share_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy rank 0's tensors to every rank, in place. Many small tensors take few messages."""
        if self.world_size > 1:
            for group in _in_buckets(tensors):
                flat = torch.cat([one.detach().reshape(-1) for one in group])
                dist.broadcast(flat, src=0)
                _put_back(flat, group)

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average each gradient that exists on some rank over all ranks.

        Ranks without that gradient count as 0. Parameters without a gradient on any rank keep none. Gradients that are
        already averaged change by rounding only.
        """
        if self.world_size == 1:
            return
        has = torch.tensor([float(one.grad is not None) for one in parameters], device=self.device)
        dist.all_reduce(has)
        gradients = []
        for parameter, count in zip(parameters, has.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                gradients.append(parameter.grad)
        for group in _in_buckets(gradients):
            flat = torch.cat([one.reshape(-1) for one in group])
            dist.all_reduce(flat)
            _put_back(flat.div_(self.world_size), group)

    def gather(self, values: NDArray[np.int64]) -> list[NDArray[np.int64]] | None:
        """Gather every rank's array (n,) on rank 0, in the order of ranks. Returns None on other ranks.

        The arrays may have different lengths.
        """
        if self.world_size == 1:
            return [values]
        # gloo gathers only in host memory.
        device = torch.device("cpu") if dist.get_backend() == "gloo" else self.device
        mine = torch.from_numpy(values).to(device)
        lengths = torch.zeros(self.world_size, dtype=torch.int64, device=device)
        lengths[self.rank] = len(values)
        dist.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.nn.functional.pad(mine, (0, longest - len(values)))
        boxes = [torch.empty_like(padded) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(padded, boxes, dst=0)
        if boxes is None:
            return None
        return [box[:length].cpu().numpy() for box, length in zip(boxes, lengths.tolist(), strict=True)]

    def add(self, values: list[float] | torch.Tensor) -> PendingSum:
        """Start adding (n,) over ranks, in float64.

        The result may be read later, and is the same on every rank. A tensor on the ranks' device is overwritten. With
        one rank the tensor stays on its device, because a copy would wait for the GPU.
        """
        tensor = torch.as_tensor(values, dtype=torch.float64)
        if self.world_size > 1 and tensor.device != self.device:
            host = tensor.pin_memory() if self.device.type == "cuda" else tensor
            tensor = host.to(self.device, non_blocking=True)
        work = dist.all_reduce(tensor, async_op=True) if self.world_size > 1 else None
        return PendingSum(tensor, work)


class PendingSum:
    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self._tensor = tensor
        self._work = work

    def summed(self) -> torch.Tensor:
        """Wait for the sum and return it. Further calls return the same sum.

        The sum is on the ranks' device; with one rank it is where the values were.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor

    def result(self) -> list[float]:
        values: list[float] = self.summed().tolist()
        return values


def _in_buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive tensors of one dtype, up to `BUCKET_BYTES` per group."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _put_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [one.numel() for one in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def gradients_kept_local(wrapped: nn.Module, local: bool = True) -> Iterator[None]:
    """Accumulate gradients on this rank without averaging, while `local`.

    The next pass without it averages all accumulated gradients. It is for all parts of a step but the last.
    """
    if local and isinstance(wrapped, DistributedDataParallel):
        with wrapped.no_sync():
            yield
    elif local and sharded(wrapped):
        model: Any = wrapped
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def settle_buckets(wrapped: nn.Module, model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
    """Run two throw-away passes, then restore gradients and buffers.

    `loss_of` calls the model as a step does, and returns a scalar.

    DDP reduces an attempt's first step in one bucket and rebuilds its buckets after it, which changes the last bits of
    sums over three ranks and more. So a resumed run would differ from an undisturbed one in its first step. After these
    passes every real step of every attempt uses the rebuilt buckets.
    """
    wrapped.train()
    with thrown_away(model):
        for _ in range(2):
            loss_of(wrapped).backward()  # type: ignore[no-untyped-call]


@contextmanager
def thrown_away(model: nn.Module) -> Iterator[None]:
    """Clear the gradients and restore the buffers after passes through the model."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


# --- Process group ---

# As in Ray Train: if a collective operation fails or times out, the process ends, and with it the attempt. Otherwise
# the other ranks would wait forever.
ABORTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def backend_for(device: torch.device, backend: str = "") -> str:
    """Return the requested backend. By default nccl for GPUs, and gloo for CPUs."""
    return backend or ("nccl" if device.type == "cuda" else "gloo")


def join_process_group(device: torch.device, backend: str, timeout_s: float, store: Any = None) -> None:
    """Join the group that torchrun's environment describes.

    With `store`, a store of torch's, the group has this rank only. A collective operation that takes longer than
    `timeout_s` ends the process.

    nccl is bound to `device` and connects at once, so that a wrong network is found before the first step.
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
    """Return the timeout of the process group in seconds, read from its backend."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options: timedelta = group._get_backend(device).options._timeout
    return options.total_seconds()
