"""Batches on their way to a rank's device: from pinned memory, by a thread and a stream of their own, ahead of a step.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.transforms import RowKeys
from train_service.domain.spec import REGRESSION, TrainingSpec
from train_service.learning.device_transform import DeviceTransform
from train_service.loading.loader import Batch
from train_service.loading.rows import Array
from train_service.store_retry import waiting_for


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch that is on the device, too: `device_inputs` float32 (B, *shape), `device_labels` as a loss takes them."""

    device_inputs: Tensor
    device_labels: Tensor


class DeviceBatches:
    """Puts a loader's batches onto the device, each whole and in its order."""

    def __init__(
        self, spec: TrainingSpec, device: torch.device, transform: DeviceTransform | None = None, ahead: int = 0
    ) -> None:
        """`transform` has the steps that the loader left to the device. `ahead` batches are on the device or on their
        way there while a step is computed; 0: each is copied when it is asked for."""
        self._spec = spec
        self._device = device
        self._transform = transform
        self._ahead = ahead
        self._stream: Any = None
        if ahead and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, given: Generator[Batch, None, None]) -> Generator[DeviceBatch, None, None]:
        """All of `given`, which is closed with this generator. What it raises is raised here."""
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
                # The current device and stream are a thread's own.
                with closing(given), self._on_stream():
                    for batch in given:
                        capacity.acquire()
                        if closed:
                            return
                        copied = self._copied(batch)
                        ready.put((copied, None if self._stream is None else self._stream.record_event()))
                ready.put(None)
            except BaseException as error:  # handed to the consumer, whose thread it stops
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
        """What the step computes comes after the copy, and the memory is not given away before the step is done."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        batch.device_inputs.record_stream(stream)
        batch.device_labels.record_stream(stream)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _copied(self, batch: Batch) -> DeviceBatch:
        inputs = to_device(batch.inputs, self._device)
        if self._transform is not None:
            inputs = self._transform(inputs, RowKeys(self._spec.seed, batch.epoch, batch.row_ids))
        return DeviceBatch(
            **vars(batch),
            device_inputs=laid_out(inputs, self._spec),
            device_labels=to_device(_labels(batch, self._spec), self._device),
        )


def on_device(batch: Batch, spec: TrainingSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """The inputs and labels of a batch, which may be there already."""
    if isinstance(batch, DeviceBatch):
        return batch.device_inputs, batch.device_labels
    return laid_out(to_device(batch.inputs, device), spec), to_device(_labels(batch, spec), device)


def to_device(values: Array, device: torch.device) -> Tensor:
    """On a GPU by way of pinned memory, which torch keeps and uses again: the call does not wait for the copy, and what
    the current stream computes next does."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def laid_out(inputs: Tensor, spec: TrainingSpec) -> Tensor:
    """In memory as the specification says."""
    if spec.acceleration.channels_last and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs.contiguous()


def _labels(batch: Batch, spec: TrainingSpec) -> Array:
    """Of a regression (B, K)."""
    return batch.labels.reshape(len(batch.row_ids), -1) if spec.task == REGRESSION else batch.labels
