"""Checkpoints of all ranks at the same step, and resumption from them.

Every rank records the rows that it consumed and contributes its part. Rank 0 has the writer and reports the events.

`CheckpointTrigger` decides when: after a number of steps or seconds, at the same step on every rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.dataset_version import DatasetVersion
from shared.errors import STORE_OUTAGES, DataLoss, Internal
from shared.model_spec import STANDARD
from shared.storage import ObjectStore
from train_service.checkpoints.coverage_records import CoverageChain, Taken, gather, orphans
from train_service.checkpoints.fine_tuning import kept_scaling, load_initial
from train_service.checkpoints.tensor_files import NotByRows, restore_shards
from train_service.checkpoints.writing_and_restoring import (
    BackgroundWriter,
    CheckpointWriter,
    ShardWriter,
    as_message,
    new_folder,
    newest_good,
    restore,
)
from train_service.domain.order import Ints
from train_service.domain.spec import TrainingSpec
from train_service.learning.learner import BaseLearner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import Batch
from train_service.loading.preprocessing import Preprocessing, class_names, ingested_columns
from train_service.records.event_log import EventKind, Reporter
from train_service.records.metrics_log import MetricsLog
from train_service.store_retry import retry_on_outage, store_call

# --- Saving ---

logger = logging.getLogger(__name__)

# For early stopping: each epoch and its measured value.
History = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The content that all checkpoints of a run share."""

    job_name: str
    attempt: int
    spec: TrainingSpec
    version: DatasetVersion
    preprocessing: Preprocessing
    steps_per_epoch: int
    total_steps: int
    # Number of NaN values in each column of the training split as ingested, if known.
    nan_counts: Mapping[str, int] | None = None


class Checkpointing:
    """One rank's side of checkpointing.

    Use as a context. On exit the checkpoint that is being written is committed, however the run ends. `trigger` says
    when a checkpoint is due.
    """

    def __init__(
        self,
        store: ObjectStore,
        lineage: Lineage,
        ranks: Ranks,
        learner: BaseLearner,
        reporter: Reporter | None,
        note_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Create one rank's side.

        `note_progress` is called while a checkpoint is gathered and copied, as a sign of progress.
        """
        self._store = store
        self._lineage = lineage
        self._ranks = ranks
        self._learner = learner
        self._reporter = reporter
        self._note_progress = note_progress
        self._registry = CheckpointRegistry(store, lineage.job_name)
        self._consumed = ConsumedRows()
        self._chain = CoverageChain(store, lineage.job_name)
        # Name and digest of the checkpoint with the first weights.
        self._initial = ("", "")
        self._writer: CheckpointWriter | None = None
        # Of a sharded model, on the other ranks.
        self._shard_writer: ShardWriter | None = None
        spec = lineage.spec
        self.trigger = CheckpointTrigger(spec.checkpoint_every_steps, spec.checkpoints.every_s)

    def __enter__(self) -> Checkpointing:
        return self

    def __exit__(self, *exception: object) -> None:
        if (writing := self._background) is not None:
            writing.__exit__(*exception)

    @property
    def _background(self) -> BackgroundWriter | None:
        return self._writer or self._shard_writer

    @property
    def stalled_s(self) -> float:
        """Seconds that this rank has waited for checkpoints."""
        return self._background.stalled_s if self._background is not None else 0.0

    def restore(self) -> tuple[int, History]:
        """Restore the newest good checkpoint.

        Rank 0 chooses it for all ranks. Return the first step to do, and the history for early stopping.
        """
        chosen: dict[str, Any] | None = None
        if self._reporter is not None:
            chosen = as_message(self._choose(self._reporter))
        chosen = self._ranks.share(chosen)
        if chosen is None:
            if self._lineage.spec.initial_checkpoint:
                self._begin_from(self._lineage.spec.initial_checkpoint)
            return 0, []
        entry = CheckpointEntry.from_state(chosen)
        content, state = retry_on_outage(lambda: self._restore(entry), "the checkpoint to resume from")
        history = state["history"]
        self._learner.target_scaling = content.target_scaling
        self._initial = (content.initial_checkpoint, content.initial_checkpoint_sha256)
        self._chain = CoverageChain(self._store, self._lineage.job_name, content.coverage)
        logger.info("resuming from %s at step %d", entry.name, entry.step)
        return entry.step, [(int(epoch), float(value)) for epoch, value in history]

    def _restore(self, entry: CheckpointEntry) -> tuple[CheckpointContent, dict[str, Any]]:
        """Load the checkpoint into the learner. Return its content and the saved state."""
        try:
            if (shards := self._learner.shards) is not None:
                try:
                    content, state = restore_shards(self._store, entry, *shards, self._note_progress)
                    self._learner.load_rest(state)
                    return content, state
                except NotByRows as why:
                    logger.info("%s is loaded whole: %s", entry.name, why)
            restored = restore(self._store, entry)
            self._learner.load(restored.weights, restored.state)
            return restored.content, restored.state
        except DataLoss as error:
            # Rank 0 has just verified it; the next attempt verifies and chooses again.
            raise Internal(f"{entry.name} was read damaged: {error.message}", reason="READ_DAMAGED") from error

    def note(self, batch: Batch, *, skipped: bool = False) -> None:
        """Record the rows of a batch after the optimizer's step.

        The rows are then in the weights, unless the step was `skipped`.
        """
        self._consumed.add(batch.step, batch.epoch, batch.row_ids, skipped=skipped)

    def take(
        self, step: int, metrics: dict[str, float], history: History, log: MetricsLog | None, *, final: bool
    ) -> None:
        """Take a checkpoint of the run after `step` steps.

        `log` holds the metrics of these steps, if there is one. Every rank calls this at the same step. It returns once
        all data of the checkpoint is copied. Raises the error of the previous checkpoint.
        """
        table = gather(self._ranks, self._consumed.take())
        if self._learner.shards is not None:
            self._take_shards(step, lambda: self._content(step, metrics, table, log), history, final=final)
            self.trigger.note_taken()
            return
        # Every rank has a part of a sharded model.
        weights, state = self._learner.weights(self._note_progress), self._learner.state(self._note_progress)
        if self._writer is not None and table is not None:
            self._writer.save(
                lambda: self._content(step, metrics, table, log), weights, {**state, "history": history}, final=final
            )
        self.trigger.note_taken()

    def _take_shards(
        self, step: int, content: Callable[[], CheckpointContent], history: History, *, final: bool
    ) -> None:
        """Take a checkpoint of which every rank writes its own shards. Rank 0 commits it."""
        self._learner.check_shards(self._note_progress)
        weights, state = self._learner.model.state_dict(), {**self._learner.sharded_state(), "history": history}
        lineage, ranks = self._lineage, self._ranks
        folder = ranks.share(new_folder(self._registry, step, lineage.attempt) if self._writer is not None else None)
        if self._writer is not None:
            self._writer.save_shards(content, folder, ranks.world_size, weights, state, final=final)
            return
        if self._shard_writer is None:
            self._shard_writer = ShardWriter(self._store, ranks.rank, ranks.world_size, self._note_progress)
        self._shard_writer.save(folder, weights, state)

    def wait(self) -> None:
        """Wait until the last checkpoint is durable."""
        if self._background is not None:
            self._background.wait()

    def delete_unreferenced_coverage(self) -> None:
        """Delete coverage records that no checkpoint names. The run must be over, and its last checkpoint durable."""
        if self._writer is None:
            return
        try:
            with store_call():
                self._store.delete_all(
                    orphans(self._store, self._lineage.job_name, self._registry.entries(), self._chain.parts)
                )
        except STORE_OUTAGES as error:
            logger.warning("old records of consumed rows stay until the job is deleted: %s", error.message)

    def _choose(self, reporter: Reporter) -> CheckpointEntry | None:
        """Open the registry and create the writer.

        Rank 0 does this for the attempt. Return the checkpoint to resume from.
        """
        lineage, damaged = self._lineage, set[str]()

        def newest() -> CheckpointEntry | None:
            entries = self._registry.fence(lineage.attempt, lineage.spec.checkpoints.ranking)
            return newest_good(self._store, entries, _warning(reporter), damaged)

        def on_committed(entry: CheckpointEntry) -> None:
            reporter.emit(EventKind.CHECKPOINT_COMMITTED, **entry.as_state())

        entry = retry_on_outage(newest, "the newest checkpoint")
        self._writer = CheckpointWriter(
            self._store,
            self._registry,
            lineage.attempt,
            on_committed,
            policy=lineage.spec.checkpoints,
            damaged=damaged,
            warn=_warning(reporter),
            note_progress=self._note_progress,
        )
        reporter.emit(
            EventKind.ATTEMPT_STARTED,
            num_workers=self._ranks.world_size,
            step=entry.step if entry else 0,
            checkpoint=entry.name if entry else "",
        )
        return entry

    def _begin_from(self, name: str) -> None:
        entry, fit = retry_on_outage(
            lambda: load_initial(self._store, name, self._learner.model), "the initial checkpoint"
        )
        self._initial = (entry.name, entry.manifest_sha256)
        if self._lineage.spec.target_scaling == STANDARD:
            kept = retry_on_outage(
                lambda: kept_scaling(self._store, entry, self._lineage.spec.model), "the initial checkpoint"
            )
            self._learner.target_scaling = kept
            if kept is None and self._reporter is not None:
                text = f"{entry.name} has no scaling of this target: it is learnt anew, and the last layer must follow"
                _warning(self._reporter)(text)
        if self._reporter is not None and fit.left_out():
            _warning(self._reporter)(f"of {entry.name} not everything fits: {fit.left_out()}")

    def _content(
        self, step: int, metrics: dict[str, float], consumed: Any, log: MetricsLog | None
    ) -> CheckpointContent:
        """Return the content of a checkpoint.

        This runs in the writer's thread. The metrics and coverage of its steps become durable before the checkpoint,
        because no later attempt repeats these steps.
        """
        if log is not None:
            log.write()
        lineage, spec = self._lineage, self._lineage.spec
        return CheckpointContent(
            training_job=lineage.job_name,
            dataset_version=spec.dataset_version,
            dataset_manifest_sha256=lineage.version.manifest_sha256,
            step=step,
            epoch=step // lineage.steps_per_epoch,
            seed=spec.seed,
            metrics=metrics,
            model=replace(spec.model, task=spec.task),
            ingested=ingested_columns(lineage.version),
            transforms=[*lineage.version.manifest.transforms, lineage.preprocessing.config],
            input_column=spec.input_column,
            input_columns=spec.input_columns,
            class_names=class_names(spec, lineage.version),
            target_scaling=self._learner.target_scaling,
            initial_checkpoint=self._initial[0],
            initial_checkpoint_sha256=self._initial[1],
            coverage=self._chain.append(consumed),
            nan_counts=lineage.nan_counts,
        )


def _warning(reporter: Reporter) -> Callable[[str], None]:
    return lambda text: reporter.emit(EventKind.WARNING, text=text)


# --- Trigger ---


class ConsumedRows:
    """One rank's records since the last checkpoint. Not shared between threads."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, int, int]] = []
        self._row_ids: list[Ints] = []

    def add(self, step: int, epoch: int, row_ids: Ints, *, skipped: bool = False) -> None:
        """Record the rows of a step's batch.

        `step` counts from 0. Call this once the optimizer has stepped or, if the step is `skipped`, was kept from
        stepping.
        """
        self._steps.append((step, epoch, len(row_ids), int(skipped)))
        self._row_ids.append(row_ids)

    def take(self) -> Taken:
        """Return the new records, and forget them. They are the records since the last call."""
        steps = np.asarray(self._steps, np.int64).reshape(-1, 4)
        row_ids = np.concatenate([np.empty(0, np.int64), *self._row_ids])
        self._steps, self._row_ids = [], []
        return Taken(steps, row_ids)


class CheckpointTrigger:
    """Decides on one rank when a checkpoint is due.

    Every rank counts steps. Only rank 0 measures seconds; it requests a checkpoint through the step's all-reduced sum.

    Every rank learns the sum one step later, at the same place, so all take the checkpoint after the same step. Rank 0
    requests a checkpoint once, until `note_taken` is called. If the step is saved for another reason, that checkpoint
    also fulfils the request that its sum brings afterwards.
    """

    def __init__(self, every_steps: int, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Create the trigger. 0 disables a rule."""
        self._every_steps = every_steps
        self._every_s = every_s
        self._now = now
        self._last = now()
        self._announced = False
        self._requested = False
        # The next sum belongs to a step that was saved.
        self._saved = False

    def request(self) -> float:
        """Return what rank 0 adds to a step's sum.

        1.0 requests a checkpoint that is due by time; otherwise it is 0.0.
        """
        if not self._every_s or self._announced or self._now() - self._last < self._every_s:
            return 0.0
        self._announced = True
        return 1.0

    def receive_sum(self, summed: float) -> None:
        """Receive the sum over the ranks. Call this once for each step, before `note_taken`."""
        self._requested = self._requested or (summed > 0 and not self._saved)
        self._saved = False

    def due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is due after this step. Checkpoints at the ends of epochs are not included."""
        return self._requested or bool(self._every_steps and steps_done % self._every_steps == 0)

    def note_taken(self) -> None:
        """Note that a checkpoint was taken.

        It was taken, for any reason, after the step whose sum comes next. The seconds are counted from here.
        """
        self._last = self._now()
        self._announced = self._requested = False
        self._saved = True
