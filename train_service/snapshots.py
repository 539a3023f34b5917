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

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, load_checkpoint, write_checkpoint
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.errors import DataLoss
from shared.storage import ObjectStore

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

    def save(self, content: CheckpointContent, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Returns once `state` is copied; `weights` are the writer's own. Raises what the checkpoint before failed
        with."""
        self.wait()
        copied = io.BytesIO()
        torch.save(state, copied)
        self._writing = self._pool.submit(self._write, content, weights, copied.getvalue())

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
        digest, size_bytes = write_checkpoint(self._store, folder, content, files)
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
        self._registry.commit(entry)
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


def read(
    store: ObjectStore, entry: CheckpointEntry, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Whole weights, and the learner's state on `device`. Raises `DataLoss`: nothing is unpickled before its digest
    holds."""
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    weights = safetensors.torch.load(checkpoint.read(WEIGHTS))
    return weights, torch.load(io.BytesIO(checkpoint.read(OPTIMIZER)), map_location=device, weights_only=True)


def epoch_ends(entries: list[CheckpointEntry], last: CheckpointEntry, metric: str) -> list[tuple[int, float]]:
    """Epoch and value of every checkpoint up to `last` that has the metric: those at the ends of epochs."""
    return [
        (entry.epoch - 1, entry.metrics[metric])
        for entry in entries
        if entry.step <= last.step and metric in entry.metrics
    ]


def as_message(entry: CheckpointEntry | None) -> dict[str, Any] | None:
    """For sending the choice to the other ranks."""
    return asdict(entry) if entry else None
