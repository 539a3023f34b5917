"""A rank's exchange with the other ranks of its attempt, and its device.

Ranks wrap the model, share values and add over ranks.

Ranks that Ray Train has not joined join a process group here. Ray Train joins its own workers with the same backend and
timeout (`attempt.ray_run`). In both cases NCCL reads its environment, NCCL_SOCKET_IFNAME and the like, from the node.

A thread with its own stream sends batches from pinned memory to the device, ahead of a step. The last steps of a
transform return bit for bit what the loader would compute from the same images. Random draws are made on the host, from
the keys of the rows, as in the loader. Products and quotients run as separate kernels of torch, because a fused kernel
would round once less. Divisors are tensors, because torch divides by a number as a product with its reciprocal.

The settings of torch choose deterministic algorithms or the fastest kernels, and which products use TF32. A CPU is
deterministic by itself for the same number of threads; a GPU is if asked.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shared.models.inputs import Inputs, arrays_of, tensors_in
from shared.transforms import RowKeys
from shared.transforms.batch import Step
from shared.transforms.steps.columns import Normalize, ToFloat
from shared.transforms.steps.images import CenterCrop, ColorJitter, ImageStep, RandomCrop, RandomFlip
from train_service.domain.spec import DDP, DETERMINISTIC, FSDP, REGRESSION, TF32, TrainingSpec
from train_service.learning.sharding import shard, sharded
from train_service.loading.loader import Batch
from train_service.loading.preprocessing import Array
from train_service.store_retry import waiting_for

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
        """Gather every rank's array (n,) on rank 0, in the order of ranks. Return None on other ranks.

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

    The next pass without it averages all accumulated gradients. It is for all micro-batches of a step but the last.
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


def warm_up_ddp_buckets(wrapped: nn.Module, model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
    """Run two warm-up passes, then restore gradients and buffers.

    `loss_of` calls the model as a step does, and returns a scalar.

    DDP reduces an attempt's first step in one bucket and rebuilds its buckets after it, which changes the last bits of
    sums over three ranks and more. So a resumed run would differ from an undisturbed one in its first step. After these
    passes every real step of every attempt uses the rebuilt buckets.
    """
    wrapped.train()
    with discarding_gradients(model):
        for _ in range(2):
            loss_of(wrapped).backward()  # type: ignore[no-untyped-call]


@contextmanager
def discarding_gradients(model: nn.Module) -> Iterator[None]:
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


# --- Batches on the device ---


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch that is also on the device.

    `device_inputs` float32 (B, *shape), or a dict of several inputs; `device_labels` as the loss takes them.
    """

    device_inputs: Inputs
    device_labels: Tensor


class DeviceBatches:
    """Copier of a loader's batches to the device, each whole and in order."""

    def __init__(
        self, spec: TrainingSpec, device: torch.device, transform: DeviceTransform | None = None, ahead: int = 0
    ) -> None:
        """Prepare the copies.

        `transform` holds the steps that the loader left to the device. Up to `ahead` batches are on the device, or
        being copied, while a step is computed. 0: each batch is copied when it is requested.
        """
        self._spec = spec
        self._device = device
        self._transform = transform
        self._ahead = ahead
        self._stream: Any = None
        if ahead and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, given: Generator[Batch, None, None]) -> Generator[DeviceBatch, None, None]:
        """Yield all of `given`, which is closed with this generator. Errors of `given` are raised here."""
        if self._ahead:
            yield from self._copied_ahead(given)
            return
        with closing(given):
            for batch in given:
                yield self._copied(batch)

    def _copied_ahead(self, given: Generator[Batch, None, None]) -> Generator[DeviceBatch, None, None]:
        ready: queue.SimpleQueue[tuple[DeviceBatch, Any] | BaseException | None] = queue.SimpleQueue()
        capacity = threading.Semaphore(self._ahead)
        closed = False

        def copy() -> None:
            try:
                # The current device and stream are per thread.
                with closing(given), self._on_stream():
                    for batch in given:
                        capacity.acquire()
                        if closed:
                            return
                        copied = self._copied(batch)
                        ready.put((copied, None if self._stream is None else self._stream.record_event()))
                ready.put(None)
            except BaseException as error:  # raised again in the consumer's thread
                ready.put(error)

        thread = threading.Thread(target=copy, name="device-batches", daemon=True)
        thread.start()
        try:
            while True:
                with waiting_for(thread):
                    item = ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                batch, copied = item
                if copied is not None:
                    self._take_over(batch, copied)
                capacity.release()
                yield batch
        finally:
            closed = True
            capacity.release()
            thread.join()

    def _take_over(self, batch: DeviceBatch, copied: torch.cuda.Event) -> None:
        """Order the step after the copy, and keep the memory until the step is done."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for inputs in tensors_in(batch.device_inputs):
            inputs.record_stream(stream)
        batch.device_labels.record_stream(stream)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _copied(self, batch: Batch) -> DeviceBatch:
        inputs = inputs_to_device(batch.inputs, self._device)
        if self._transform is not None and not isinstance(inputs, dict):
            inputs = self._transform(inputs, RowKeys(self._spec.seed, batch.epoch, batch.row_ids))
        return DeviceBatch(
            **vars(batch),
            device_inputs=inputs if isinstance(inputs, dict) else laid_out(inputs, self._spec),
            device_labels=to_device(_labels(batch, self._spec), self._device),
        )


def on_device(batch: Batch, spec: TrainingSpec, device: torch.device) -> tuple[Inputs, Tensor]:
    """Return the inputs and labels of a batch on the device. Copies them unless they are there."""
    if isinstance(batch, DeviceBatch):
        return batch.device_inputs, batch.device_labels
    inputs = inputs_to_device(batch.inputs, device)
    return inputs if isinstance(inputs, dict) else laid_out(inputs, spec), to_device(_labels(batch, spec), device)


def to_device(values: Array, device: torch.device) -> Tensor:
    """Copy an array to the device.

    On a GPU the copy goes through pinned memory, which torch keeps and reuses. The call does not wait for the copy; the
    work that the current stream computes next does.
    """
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def inputs_to_device(values: Array, device: torch.device) -> Inputs:
    """Copy a model's input to the device as `to_device` does; records become a dict of tensors."""
    arrays = arrays_of(values)
    if isinstance(arrays, dict):
        return {name: to_device(one, device) for name, one in arrays.items()}
    return to_device(arrays, device)


def laid_out(inputs: Tensor, spec: TrainingSpec) -> Tensor:
    """Return the inputs in the memory format of the spec."""
    if spec.acceleration.channels_last and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs.contiguous()


def _labels(batch: Batch, spec: TrainingSpec) -> Array:
    """Return the labels (B,), or (B, K) for a regression."""
    return batch.labels.reshape(len(batch.row_ids), -1) if spec.task == REGRESSION else batch.labels


# --- Last steps of the transform ---

# Random numbers of [0, 1), (B, draws).
Draws = NDArray[np.float64]
NONE = np.empty((0, 0))


class DeviceTransform:
    """The last steps of a transform, computed on the device.

    `steps` holds each step with its index in the whole transform, from which augmentations draw.
    """

    def __init__(self, steps: Sequence[tuple[int, Step]]) -> None:
        self._steps = list(steps)

    def __call__(self, images: Tensor, keys: RowKeys | None = None) -> Tensor:
        """Transform uint8 (B, H, W) or (B, H, W, C) into float32 (B, C, H', W').

        Augmentations are applied only if `keys`, the keys of the rows, are given.
        """
        for place, step in self._steps:
            count = step.draws if isinstance(step, ImageStep) else 0
            if not count:
                images = ON_DEVICE[type(step)](step, images, NONE)
            elif keys is not None:
                images = ON_DEVICE[type(step)](step, images, keys.at(place).uniform(count))
            elif isinstance(step, RandomCrop):
                images = _center_crop(step, images, NONE)
        return images


def _center_crop(step: CenterCrop | RandomCrop, images: Tensor, _draws: Draws) -> Tensor:
    images = _padded_to(images, step.height, step.width)
    top, left = (images.shape[1] - step.height) // 2, (images.shape[2] - step.width) // 2
    return images[:, top : top + step.height, left : left + step.width]


def _random_crop(step: RandomCrop, images: Tensor, draws: Draws) -> Tensor:
    images = _padded(images, (step.padding,) * 2, (step.padding,) * 2)
    images = _padded_to(images, step.height, step.width)
    choices = (images.shape[1] - step.height + 1, images.shape[2] - step.width + 1)
    top, left = _moved(np.floor(draws * choices).astype(np.int64).T, images.device)
    down = top[:, None] + torch.arange(step.height, device=images.device)
    right = left[:, None] + torch.arange(step.width, device=images.device)
    rows = torch.arange(len(images), device=images.device)
    return images[rows[:, None, None], down[:, :, None], right[:, None, :]]


def _random_flip(step: RandomFlip, images: Tensor, draws: Draws) -> Tensor:
    chosen = (draws < (step.horizontal_probability, step.vertical_probability)).T
    sideways, over = _moved(chosen, images.device).reshape(2, -1, *[1] * (images.dim() - 1))
    images = torch.where(sideways, images.flip(2), images)
    return torch.where(over, images.flip(1), images)


def _color_jitter(step: ColorJitter, images: Tensor, draws: Draws) -> Tensor:
    strengths = (step.brightness, step.contrast, step.saturation)
    factors = np.stack([1 + (2 * draws[:, place] - 1) * strength for place, strength in enumerate(strengths)])
    brighter, harder, richer = _moved(factors, images.device).reshape(3, -1, *[1] * (images.dim() - 1))
    if step.brightness:
        images = _pixels(images.double() * brighter)
    if step.contrast:
        gray = _luma(images) if images.dim() == 4 and images.shape[3] == 3 else images
        sums = gray.flatten(1).sum(1, dtype=torch.int64).double()
        means = sums / torch.full_like(sums, max(math.prod(gray.shape[1:]), 1))
        images = _blended(images, means.reshape(brighter.shape), harder)
    if step.saturation:
        images = _blended(images, _luma(images)[..., None].double(), richer)
    return images


def _to_float(_step: ToFloat, images: Tensor, _draws: Draws) -> Tensor:
    channels_first = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return channels_first.float() / torch.full((1,), 255.0, device=images.device)


def _normalize(step: Normalize, images: Tensor, _draws: Draws) -> Tensor:
    mean, std = (
        _moved(np.asarray(one, np.float32).reshape(1, -1, 1, 1), images.device) for one in (step.mean, step.std)
    )
    return (images - mean) / std


# The function of each step on a device. Other steps run in the loader.
ON_DEVICE: dict[type[Step], Callable[[Any, Tensor, Draws], Tensor]] = {
    CenterCrop: _center_crop,
    RandomCrop: _random_crop,
    RandomFlip: _random_flip,
    ColorJitter: _color_jitter,
    ToFloat: _to_float,
    Normalize: _normalize,
}


def _padded_to(images: Tensor, height: int, width: int) -> Tensor:
    down, right = (max(wanted - given, 0) for wanted, given in zip((height, width), images.shape[1:3], strict=True))
    return _padded(images, (down // 2, down - down // 2), (right // 2, right - right // 2))


def _padded(images: Tensor, down: tuple[int, int], right: tuple[int, int]) -> Tensor:
    """Pad with zeros: `down` is (above, below), `right` is (left, right)."""
    if not any((*down, *right)):
        return images
    last = (0, 0) if images.dim() == 4 else ()
    return F.pad(images, (*last, *right, *down))


def _luma(images: Tensor) -> Tensor:
    """Return the luma as the loader computes it: (…, 3) → (…)."""
    red, green, blue = images.long().unbind(-1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)


def _blended(images: Tensor, gray: Tensor, factor: Tensor) -> Tensor:
    return _pixels(gray + (images.double() - gray) * factor)


def _pixels(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _moved(values: NDArray[Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


# --- Settings of the process ---

# A folder of the node that keeps the output of torch.compile, also if the node's /tmp is emptied.
COMPILE_CACHE = "MILLRACE_COMPILE_CACHE"


def set_up_device(device: torch.device, spec: TrainingSpec, environ: Mapping[str, str] = os.environ) -> None:
    """Apply the spec's settings to this process. Call it before the first use of a GPU."""
    if spec.compile:
        _keep_compiled(environ.get(COMPILE_CACHE, ""))
    if device.type != "cuda":
        return
    is_tf32 = spec.precision == TF32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    # By default torch uses TF32 for convolutions, but not for products of matrices.
    torch.backends.cudnn.allow_tf32 = is_tf32
    if spec.acceleration.algorithms == DETERMINISTIC:
        _compute_deterministically()
    else:
        # cuDNN tries its kernels when a shape first occurs. All steps except an epoch's last have the same shape.
        torch.backends.cudnn.benchmark = True


@contextmanager
def full_float32() -> Iterator[None]:
    """Round no product to TF32 in this context, so that validation measures the model as it is served."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _compute_deterministically() -> None:
    """Choose deterministic algorithms.

    If torch has none for an operation, it warns in the worker's log and uses another.
    """
    # cuBLAS reads it at its first use. A value that is already set may be as good.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    # The benchmark would choose kernels by the timings of this run.
    torch.backends.cudnn.benchmark = False
    # The compiler obeys it, too; otherwise it would choose the order of a sum by the timings of this run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # While torch only warns, the fused kernels of attention add up gradients in any order. The plain one does not.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Otherwise all new memory is written first, which only serves to detect uninitialized reads.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def _keep_compiled(folder: str) -> None:
    """Set the folder for compiled code. torch's default is below /tmp, by the user's name."""
    if folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
