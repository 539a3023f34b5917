"""Saving and restoring a run: rank 0 writes checkpoints in the background and chooses the one to resume from."""

from __future__ import annotations

import io
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import safetensors.torch
import torch
from torch import nn

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, load_checkpoint, write_checkpoint
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.errors import DataLoss
from shared.models import load_weights
from shared.storage import ObjectStore
from train_service.patience import patient

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time; a step waits only for the copy, and for the one before if it is still going.

    Use as a context: leaving it lets the one under way finish, and hides the error that it may meet.
    """

    def __init__(
        self, store: ObjectStore, registry: CheckpointRegistry, attempt: int, told: Callable[[CheckpointEntry], None]
    ) -> None:
        """`told` is called with each committed checkpoint, in the writer's thread."""
        self._store = store
        self._registry = registry
        self._attempt = attempt
        self._told = told
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, content: CheckpointContent, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copies the state as it is now and returns; raises what the checkpoint before failed with."""
        self.wait()
        weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        state = io.BytesIO()
        torch.save(optimizer.state_dict(), state)
        self._writing = self._pool.submit(self._write, content, weights, state.getvalue())

    def wait(self) -> None:
        """Returns once the checkpoint under way is committed. Raises `StaleAttempt` and what the store raises."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def _write(self, content: CheckpointContent, weights: dict[str, torch.Tensor], optimizer: bytes) -> None:
        checkpoint_id = f"step-{content.step:08d}"
        # A fresh folder each: a stale attempt may be writing the same step.
        folder = f"{self._registry.data_folder}/{checkpoint_id}-a{self._attempt:05d}-{uuid.uuid4().hex[:8]}"
        files = {WEIGHTS: safetensors.torch.save(weights), OPTIMIZER: optimizer}
        digest, size_bytes = patient(lambda: write_checkpoint(self._store, folder, content, files), "a checkpoint")
        entry = CheckpointEntry(
            name=f"{content.training_job}/checkpoints/{checkpoint_id}",
            folder=folder,
            manifest_sha256=digest,
            step=content.step,
            epoch=content.epoch,
            attempt=self._attempt,
            size_bytes=size_bytes,
            create_time=time.time(),
            metrics=content.metrics,
        )
        patient(lambda: self._registry.commit(entry), "a checkpoint")
        self._told(entry)


def newest_good(
    store: ObjectStore, entries: list[CheckpointEntry], warn: Callable[[str], None]
) -> CheckpointEntry | None:
    """The checkpoint furthest on whose every digest holds; each damaged one on the way is told to `warn`."""
    for entry in sorted(entries, key=lambda one: one.step, reverse=True):
        try:
            load_checkpoint(store, entry.folder, entry.manifest_sha256).verify()
        except DataLoss as error:
            warn(f"{entry.name} is damaged and skipped: {error.message}")
            continue
        return entry
    return None


def restore(
    store: ObjectStore, entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Loads weights, buffers and optimizer state. Raises `DataLoss`: nothing is unpickled before its digest holds."""
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    load_weights(model, safetensors.torch.load(checkpoint.read(WEIGHTS)))
    state = torch.load(io.BytesIO(checkpoint.read(OPTIMIZER)), map_location=device, weights_only=True)
    optimizer.load_state_dict(state)


def as_message(entry: CheckpointEntry | None) -> dict[str, Any] | None:
    """For sending the choice to the other ranks."""
    return asdict(entry) if entry else None
