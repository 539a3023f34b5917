"""Writing checkpoints, and restoring them.

Rank 0 writes in the background and chooses the checkpoint to resume from.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import safetensors.torch
import torch

from shared.checkpoint import (
    CheckpointContent,
    CheckpointEntry,
    CheckpointRegistry,
    load_checkpoint,
    write_checkpoint,
)
from shared.checkpoint.format import OPTIMIZER, OTHER_FORMAT, WEIGHTS, write_sharded
from shared.errors import DataLoss
from shared.storage import ObjectStore
from train_service.checkpoints.retention import retain
from train_service.checkpoints.tensor_files import (
    NEST,
    SpooledFile,
    TensorFile,
    await_written,
    forget_written,
    put_together,
    spool_shards,
    take_apart,
    tell_written,
    upload_shards,
)
from train_service.domain.spec import CheckpointPolicy
from train_service.store_retry import retry_on_outage, store_call

logger = logging.getLogger(__name__)


# A write that took longer than this is reported: the store was unavailable, or is slow.
REPORTED_AFTER_S = 5.0

T = TypeVar("T")


class BackgroundWriter:
    """A thread that writes one checkpoint at a time, while training goes on.

    Use as a context. On exit the present checkpoint is completed, and an error of it is suppressed.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # Set when the run ends.
        self._ending = threading.Event()
        # Seconds that the loop has waited for checkpoints.
        self.stalled_s = 0.0

    def wait(self) -> None:
        """Wait until the present checkpoint is committed.

        Raises `StaleAttempt` and the store's errors, except `Unavailable`, which it waits out.
        """
        began = time.monotonic()
        try:
            if self._writing is not None:
                writing, self._writing = self._writing, None
                with store_call():
                    writing.result()
        finally:
            self.stalled_s += time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with store_call():
            self._pool.shutdown(wait=True)


class ShardWriter(BackgroundWriter):
    """The writer of a rank's shards, on every rank but rank 0."""

    def __init__(
        self, store: ObjectStore, rank: int, ranks: int, note_progress: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._note_progress = note_progress

    def save(self, folder: str, weights: Mapping[str, torch.Tensor], state: Any) -> None:
        """Copy this rank's rows to disk, and return. Raises the error of the previous checkpoint."""
        self.wait()
        began = time.monotonic()
        spooled = spool_shards(weights, state, self._rank, self._ranks, self._note_progress)
        self._writing = self._pool.submit(self._write, folder, spooled)
        self.stalled_s += time.monotonic() - began

    def _write(self, folder: str, spooled: Sequence[SpooledFile]) -> None:
        with closing_all(spooled):
            named = retry_on_outage(lambda: upload_shards(self._store, folder, spooled), "a checkpoint")
        retry_on_outage(lambda: tell_written(self._store, folder, self._rank, named), "a checkpoint")


class CheckpointWriter(BackgroundWriter):
    """A writer of one checkpoint at a time.

    A step waits only for the copy, and for the previous checkpoint if it is still being written. The writer's thread
    waits for an unavailable store. Use as a context. On exit the present checkpoint is completed, and an error of it is
    suppressed.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: CheckpointRegistry,
        attempt: int,
        on_committed: Callable[[CheckpointEntry], None],
        *,
        policy: CheckpointPolicy | None = None,
        damaged: Collection[str] = (),
        warn: Callable[[str], None] = logger.warning,
        note_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the writer.

        `on_committed` is called with each committed checkpoint and `warn` with the cause of a delay, both in the
        writer's thread. `note_progress` is called while `save` copies, as a sign of progress.

        Without a `policy` all checkpoints are kept. `damaged` are the folders that were found damaged when the attempt
        began.
        """
        super().__init__()
        self._store = store
        self._registry = registry
        self._attempt = attempt
        self._note_progress = note_progress
        self._on_committed = on_committed
        self._policy = policy
        self._damaged = frozenset(damaged)
        self._warn = warn
        self._weights, self._state = TensorFile(note_progress), TensorFile(note_progress)

    def save(
        self,
        content: Callable[[], CheckpointContent],
        weights: Mapping[str, torch.Tensor],
        state: dict[str, Any],
        *,
        final: bool = False,
    ) -> None:
        """Copy weights and state, and return.

        `state` is that of optimizer and scheduler. Later changes do not affect the copies. `content` is called in the
        writer's thread, again if the store was unavailable. `final` means that no step follows. Raises the error of the
        previous checkpoint, and `TypeError` for a state that does not consist of tensors and plain values.
        """
        self.wait()
        began = time.monotonic()
        tensors, form = take_apart(state)
        files = {WEIGHTS: self._weights.fill(weights), OPTIMIZER: self._state.fill(tensors, {NEST: form})}
        self._writing = self._pool.submit(self._write, content, files, final)
        self.stalled_s += time.monotonic() - began

    def save_shards(
        self,
        content: Callable[[], CheckpointContent],
        folder: str,
        ranks: int,
        weights: Mapping[str, torch.Tensor],
        state: Any,
        *,
        final: bool = False,
    ) -> None:
        """Copy rank 0's shards to disk, and return.

        The checkpoint is committed once all ranks have written theirs below `folder`. All else is as in `save`.
        """
        self.wait()
        began = time.monotonic()
        spooled = spool_shards(weights, state, 0, ranks, self._note_progress)
        self._writing = self._pool.submit(self._write_shards, content, folder, ranks, spooled, final)
        self.stalled_s += time.monotonic() - began

    def _write_shards(
        self,
        describe: Callable[[], CheckpointContent],
        folder: str,
        ranks: int,
        spooled: Sequence[SpooledFile],
        final: bool,
    ) -> None:
        with closing_all(spooled):
            content = self._retry_on_outage(describe)
            named = self._retry_on_outage(lambda: upload_shards(self._store, folder, spooled))
        named += self._retry_on_outage(lambda: await_written(self._store, folder, ranks, self._ending))
        digest, size_bytes = self._retry_on_outage(lambda: write_sharded(self._store, folder, content, named))
        self._commit(content, folder, digest, size_bytes, final)
        self._retry_on_outage(lambda: forget_written(self._store, folder, ranks))

    def _write(self, describe: Callable[[], CheckpointContent], files: dict[str, memoryview], final: bool) -> None:
        content = self._retry_on_outage(describe)
        folder = new_folder(self._registry, content.step, self._attempt)
        digest, size_bytes = self._retry_on_outage(lambda: write_checkpoint(self._store, folder, content, files))
        self._commit(content, folder, digest, size_bytes, final)

    def _commit(self, content: CheckpointContent, folder: str, digest: str, size_bytes: int, final: bool) -> None:
        entry = CheckpointEntry(
            name=f"{content.training_job}/checkpoints/step-{content.step:08d}",
            folder=folder,
            manifest_sha256=digest,
            step=content.step,
            epoch=content.epoch,
            attempt=self._attempt,
            size_bytes=size_bytes,
            create_time=time.time(),
            metrics=content.metrics,
            final=final,
            code_bundle=content.model.code_bundle,
            model_entry=content.model.entry,
        )
        self._retry_on_outage(lambda: self._registry.commit(entry))
        self._on_committed(entry)
        if self._policy is not None and self._policy.keep_newest:
            policy = self._policy
            self._retry_on_outage(lambda: retain(self._store, self._registry, policy, self._attempt, self._damaged))

    def _retry_on_outage(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        answer = retry_on_outage(call, "a checkpoint")
        if (waited_s := time.monotonic() - began) > REPORTED_AFTER_S:
            self._warn(f"a checkpoint took {waited_s:.0f} s to reach the object store")
        return answer


def new_folder(registry: CheckpointRegistry, step: int, attempt: int) -> str:
    """Return a folder that is new each time: a stale attempt may be writing the same step."""
    return f"{registry.data_folder}/step-{step:08d}-a{attempt:05d}-{uuid.uuid4().hex[:8]}"


@contextmanager
def closing_all(spooled: Sequence[SpooledFile]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in spooled:
            one.file.close()


def newest_good(
    store: ObjectStore, entries: Sequence[CheckpointEntry], warn: Callable[[str], None], damaged: set[str] | None = None
) -> CheckpointEntry | None:
    """Return the newest checkpoint whose every digest holds.

    Each damaged checkpoint of a higher step is reported to `warn`, and its folder added to `damaged`.
    """
    for entry in sorted(entries, key=lambda one: one.step, reverse=True):
        try:
            load_checkpoint(store, entry.folder, entry.manifest_sha256).verify()
        except DataLoss as error:
            warn(f"{entry.name} is damaged and skipped: {error.message}")
            # A checkpoint in another release's format is not damaged and must not be deleted.
            if damaged is not None and error.specific_reason != OTHER_FORMAT:
                damaged.add(entry.folder)
            continue
        return entry
    return None


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint in host memory.

    It has whole weights, and the `state` of optimizer and scheduler as saved.
    """

    content: CheckpointContent
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


def restore(store: ObjectStore, entry: CheckpointEntry) -> Restored:
    """Return the restored checkpoint. Raises `DataLoss` before anything with a wrong digest is loaded."""
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    weights, state = checkpoint.read(WEIGHTS), checkpoint.read(OPTIMIZER)
    return Restored(checkpoint.content, safetensors.torch.load(weights), put_together(state))


def as_message(entry: CheckpointEntry | None) -> dict[str, Any] | None:
    """Return the choice as a message to other ranks."""
    return entry.as_state() if entry else None
