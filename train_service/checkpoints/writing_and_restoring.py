"""Writing checkpoints, restoring them, and starting a run with another job's.

Rank 0 writes in the background and chooses the checkpoint to resume from. `outlived` selects the checkpoints that
retention deletes.

A run that fine-tunes takes the tensors of the other job's weights whose name and shape match, and initializes the
others.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import safetensors.torch
import torch

from shared import names
from shared.checkpoint import (
    CheckpointContent,
    CheckpointEntry,
    CheckpointRegistry,
    load_checkpoint,
    resolve,
    write_checkpoint,
)
from shared.checkpoint.format import OPTIMIZER, OTHER_FORMAT, WEIGHTS, write_sharded
from shared.checkpoint.ranking import Ranking
from shared.checkpoint.reading import read_index
from shared.checkpoint.references import NAME_PATTERN, live_references
from shared.errors import DataLoss, FailedPrecondition, NotFound, invalid_field
from shared.model_spec import NONE, TargetScaling
from shared.storage import ObjectMissing, ObjectStore
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

if TYPE_CHECKING:
    from torch import nn

    from shared.model_spec import ModelSpec
    from train_service.domain.spec import TrainingSpec


# --- Writing and restoring ---

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
        checkpoint.name: Saved(
            name=checkpoint.name,
            step=checkpoint.step,
            metrics=checkpoint.metrics,
            final=checkpoint.final,
            damaged=checkpoint.folder in damaged,
        )
        for checkpoint in state.checkpoints
        if checkpoint.fit == fit
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
    going = [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept and checkpoint.name not in in_use]
    return [one.name for one in sorted(going, key=lambda one: one.step)]


# --- Fine-tuning ---

FIELD = "spec.initial_checkpoint"
SHOWN = 8
# What peft puts into the names of the weights of an adapted layer.
ADAPTED = ".base_layer."

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Fit:
    """Names of tensors by how they match.

    `taken` come from the checkpoint. `anew` are only in the model, `unused` only in the checkpoint.
    """

    taken: tuple[str, ...]
    anew: tuple[str, ...]
    unused: tuple[str, ...]

    def left_out(self) -> str:
        """Return in words which tensors do not match. The text is empty if all do."""
        parts = [("start anew", self.anew), ("are not used", self.unused)]
        return "; ".join(f"{_listed(one)} {what}" for what, one in parts if one)


def fit(model: Shapes, checkpoint: Shapes) -> Fit:
    """Return which tensors match in name and shape.

    A layer with an adapter also takes the weights of the same layer without one.
    """
    sources = {name: source_name(name, checkpoint) for name in model}
    taken = {
        name
        for name, shape in model.items()
        if (source := sources[name]) in checkpoint and tuple(checkpoint[source]) == tuple(shape)
    }
    used = {sources[name] for name in taken}
    return Fit(
        tuple(name for name in model if name in taken),
        tuple(name for name in model if name not in taken),
        tuple(name for name in checkpoint if name not in used),
    )


def source_name(name: str, checkpoint: Container[str]) -> str:
    """Return the checkpoint's name of a tensor of the model. It may lack the part that an adapter adds."""
    return name if name in checkpoint else name.replace(ADAPTED, ".")


def check_name(name: str) -> None:
    """Raise `InvalidArgument` unless `name` is a checkpoint's. A job's name alone is ambiguous."""
    names.parse(FIELD, name, NAME_PATTERN)


def check_fits(store: ObjectStore, entry: CheckpointEntry, model: ModelSpec) -> None:
    """Raise `InvalidArgument` if no parameter matches.

    At least one parameter of the model must be in the checkpoint. Raises `FailedPrecondition` for a damaged checkpoint.
    Imports torch.
    """
    import torch

    from shared.models import build_model

    with torch.device("meta"):
        built = build_model(model, "spec.model")
    shapes = {name: tuple(one.shape) for name, one in built.named_parameters()}
    found = fit(shapes, weight_shapes(store, entry))
    if not found.taken:
        raise invalid_field(FIELD, entry.name, f"no weights of it fit a {model.builder}; use one of the same model")


def check_scaling(store: ObjectStore, entry: CheckpointEntry, spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` if only the checkpoint is scaled.

    Its target was scaled, but the run's target is not. The model's last layer would otherwise begin in the unit of the
    scaled target.
    """
    if spec.target_scaling == NONE and kept_scaling(store, entry, spec.model) is not None:
        remedy = f"the target of {entry.name} was scaled, and its last layer answers so; use TARGET_SCALING_STANDARD"
        raise invalid_field("spec.target_scaling", spec.target_scaling, remedy)


def kept_scaling(store: ObjectStore, entry: CheckpointEntry, model: ModelSpec) -> TargetScaling | None:
    """Return the checkpoint's target scaling.

    Its last layer was trained in that scale. None if there is none, or if the layer is initialized anew because it has
    another number of outputs.
    """
    scaling = load_checkpoint(store, entry.folder, entry.manifest_sha256).content.target_scaling
    return scaling if scaling is not None and len(scaling.mean) == model.num_classes else None


def weight_shapes(store: ObjectStore, entry: CheckpointEntry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights.

    They come from the file's header; the weights are not read. Raises `FailedPrecondition` for a damaged checkpoint.
    """
    try:
        checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
        tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
        return {name: tensor.shape for name, tensor in tensors.items()}
    except (DataLoss, ObjectMissing, ValueError) as error:
        raise FailedPrecondition(
            f"{FIELD}: {entry.name} is damaged: {error}; use another",
            reason="CHECKPOINT_DAMAGED",
            metadata={"resource": entry.name},
            fields=[(FIELD, "is damaged")],
        ) from None


def load_initial(store: ObjectStore, name: str, model: nn.Module) -> tuple[CheckpointEntry, Fit]:
    """Load the matching tensors of the checkpoint into `model`.

    Every rank does this itself, and all read the same bytes.

    Raises `FailedPrecondition` if the checkpoint is missing or damaged, because another attempt would find the same.
    """
    import safetensors.torch

    from shared.models.loaded import TORCH_DTYPES
    from train_service.checkpoints.tensor_files import read_into
    from train_service.learning.sharding import put_some_weights

    own = model.state_dict()
    try:
        entry = resolve(store, FIELD, name)
        checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
        tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
        found = fit(
            {key: one.shape for key, one in own.items()}, {key: tensor.shape for key, tensor in tensors.items()}
        )
        sources = {key: source_name(key, tensors) for key in found.taken}
        if all(TORCH_DTYPES[tensors[source].dtype] == own[key].dtype for key, source in sources.items()):
            # Each rank reads its own rows, right into the model.
            read_into(store, [(tensors[source], own[key]) for key, source in sources.items()])
            return entry, found
        weights = safetensors.torch.load(checkpoint.read(WEIGHTS))
    except (NotFound, DataLoss) as error:
        raise FailedPrecondition(
            f"{FIELD}: {error.message}; start a new job from another",
            reason="INITIAL_CHECKPOINT_LOST",
            metadata={"resource": name},
            fields=[(FIELD, error.message)],
        ) from None
    put_some_weights(model, {key: weights[sources[key]] for key in found.taken})
    return entry, found


def _listed(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more
