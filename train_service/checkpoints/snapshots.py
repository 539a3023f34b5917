"""Writing and restoring checkpoints.

Rank 0 writes in the background and chooses the checkpoint to resume from.

`outlived` selects the checkpoints that retention deletes.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import safetensors.torch
import torch

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, load_checkpoint, write_checkpoint
from shared.checkpoint.format import OPTIMIZER, OTHER_FORMAT, WEIGHTS
from shared.checkpoint.ranking import Ranking
from shared.checkpoint.references import live_references
from shared.errors import DataLoss
from shared.storage import ObjectStore
from train_service.checkpoints.tensor_files import NEST, TensorFile, put_together, take_apart
from train_service.domain.spec import CheckpointPolicy
from train_service.store_retry import retry_on_outage, store_call

# --- Snapshots ---

logger = logging.getLogger(__name__)


# A write that took longer than this is reported: the store was unavailable, or is slow.
REPORTED_AFTER_S = 5.0

T = TypeVar("T")


class CheckpointWriter:
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
        told: Callable[[CheckpointEntry], None],
        *,
        policy: CheckpointPolicy | None = None,
        damaged: Collection[str] = (),
        warn: Callable[[str], None] = logger.warning,
        touched: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the writer.

        `told` is called with each committed checkpoint and `warn` with the cause of a delay, both in the writer's
        thread. `touched` is called while `save` copies, as a sign of progress.

        Without a `policy` all checkpoints are kept. `damaged` are the folders that were found damaged when the attempt
        began.
        """
        self._store = store
        self._registry = registry
        self._attempt = attempt
        self._told = told
        self._policy = policy
        self._damaged = frozenset(damaged)
        self._warn = warn
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._weights, self._state = TensorFile(touched), TensorFile(touched)
        # Seconds that the loop has waited in `save` and `wait`.
        self.stalled_s = 0.0

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

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with store_call():
            self._pool.shutdown(wait=True)

    def _write(self, describe: Callable[[], CheckpointContent], files: dict[str, memoryview], final: bool) -> None:
        content = self._retry_on_outage(describe)
        checkpoint_id = f"step-{content.step:08d}"
        # Use a new folder each time: a stale attempt may be writing the same step.
        folder = f"{self._registry.data_folder}/{checkpoint_id}-a{self._attempt:05d}-{uuid.uuid4().hex[:8]}"
        digest, size_bytes = self._retry_on_outage(lambda: write_checkpoint(self._store, folder, content, files))
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
            final=final,
            code_bundle=content.model.code_bundle,
            model_entry=content.model.entry,
        )
        self._retry_on_outage(lambda: self._registry.commit(entry))
        self._told(entry)
        if self._policy is not None and self._policy.keep_newest:
            policy = self._policy
            self._retry_on_outage(lambda: retain(self._store, self._registry, policy, self._attempt, self._damaged))

    def _retry_on_outage(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        answer = retry_on_outage(call, "a checkpoint")
        if (waited_s := time.monotonic() - began) > REPORTED_AFTER_S:
            self._warn(f"a checkpoint took {waited_s:.0f} s to reach the object store")
        return answer


def retain(
    store: ObjectStore,
    registry: CheckpointRegistry,
    policy: CheckpointPolicy,
    attempt: int,
    damaged: Collection[str] = (),
    fit: int = 0,
) -> list[CheckpointEntry]:
    """Delete and return the checkpoints of run `fit` that outlived `policy`.

    Run 0 is that of a job whose code is no script. Each run of a script keeps its own.

    Checkpoints in use stay. `damaged` are folders. Raises `StaleAttempt`. Deletions that an earlier attempt left
    unfinished are finished first.
    """
    registry.settle(attempt)
    state = registry.read()
    saved = {
        one.name: Saved(
            name=one.name, step=one.step, metrics=one.metrics, final=one.final, damaged=one.folder in damaged
        )
        for one in state.checkpoints
        if one.fit == fit
    }
    going = outlived(list(saved.values()), policy.keep_newest, policy.keep_best, state.ranking)
    # Look up references only of the checkpoints that would be deleted.
    used = {name for name in going if live_references(store, name, time.time())}
    return registry.retire([one for one in state.checkpoints if one.name in going and one.name not in used], attempt)


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


# --- Retention ---


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved checkpoint as retention sees it.

    A `damaged` one counts for nothing. A `final` one is of the run's last step.
    """

    name: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    damaged: bool = False


def outlived(
    checkpoints: Sequence[Saved], keep_newest: int, keep_best: int, ranking: Ranking, in_use: Collection[str] = ()
) -> list[str]:
    """Return the names of the checkpoints to delete.

    The oldest comes first.

    The `keep_newest` newest stay, or all if that is 0, and in addition the `keep_best` best. Final ones and those
    `in_use` (names) always stay, and count among the newest and the best like any other.
    """
    if keep_newest == 0:
        return []
    good = sorted((one for one in checkpoints if not one.damaged), key=lambda one: one.step, reverse=True)
    kept = {one.name for one in good[:keep_newest]}
    kept |= {one.name for one in ranking.best_first(good)[:keep_best]}
    kept |= {one.name for one in good if one.final}
    # Until there is a good checkpoint, a damaged one may be all that is left to examine.
    if not good:
        return []
    going = [one for one in checkpoints if one.name not in kept and one.name not in in_use]
    return [one.name for one in sorted(going, key=lambda one: one.step)]
