"""The training loop of one rank. Ray Train runs it on every worker of an attempt."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray.train
import ray.train.torch
import torch

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import configure_logging, identity
from train_service.domain.spec import CLASSIFICATION, TrainingSpec
from train_service.events import EventKind
from train_service.learner import Learner
from train_service.loader import Batch, Loader, Plan
from train_service.preprocessing import Preprocessing
from train_service.progress import ProgressMeter
from train_service.ranks import PendingSum, Ranks
from train_service.reporting import CANCEL, GO_ON, Reporter
from train_service.row_cache import RowCache
from train_service.snapshots import CheckpointWriter, as_message, epoch_ends, newest_good, read
from train_service.version_fit import ingested_columns

logger = logging.getLogger(__name__)

CACHE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What an attempt tells its workers; plain values, for they travel."""

    store: StoreSettings
    job_name: str
    attempt: int
    spec: TrainingSpec


def train_loop(config: dict[str, Any]) -> None:
    """Entry point of a worker. Returns when the run is done, or when it was asked to end; the job's log says which."""
    loop_config: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    torch.set_num_threads(loop_config.spec.threads_per_worker)
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    with identity(job=loop_config.job_name, attempt=str(loop_config.attempt), rank=str(ranks.rank)):
        try:
            Run(loop_config, ranks).run()
        except Stopped as stopped:
            logger.info("stopped early: %s", stopped)


class Stopped(Exception):
    """The run should end before its last step."""


class Run:
    """One rank's part of one attempt."""

    def __init__(self, config: LoopConfig, ranks: Ranks) -> None:
        self._config = config
        self._spec = config.spec
        self._ranks = ranks
        self._store: ObjectStore = open_store(config.store)
        self._version = load_version(self._store, self._spec.dataset_version)
        self._preprocessing = Preprocessing(self._spec, self._version.columns)
        self._loader = Loader(self._row_cache(self._spec.train_split), self._preprocessing, self._plan())
        self._registry = CheckpointRegistry(self._store, config.job_name)
        self._learner = Learner(
            self._spec, ranks, self._preprocessing.output, self._loader.steps_per_epoch, self._loader.total_steps
        )
        # What early stopping goes by: each epoch, and what it measured.
        self._history: list[tuple[int, float]] = []

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            reporter, writer = None, None
            if self._ranks.rank == 0:
                reporter = Reporter(self._store, self._config.job_name, self._config.attempt)
                stack.enter_context(reporter)
                # Left first: a checkpoint under way is committed and told however the run ends.
                writer = stack.enter_context(self._writer(reporter))
            self._run(reporter, writer)

    def _run(self, reporter: Reporter | None, writer: CheckpointWriter | None) -> None:
        first_step = self._resume(reporter)
        if self._learner.should_stop(self._history):
            return
        self._learner.prepare()
        meter = ProgressMeter(reporter, self._loader.total_steps, self._loader.steps_per_epoch)
        pending: PendingSum | None = None
        with contextlib.closing(self._loader.batches(first_step)) as batches:
            for batch in batches:
                local = self._learner.step(batch)
                if pending is not None:
                    self._stop_if_asked(meter.add(self._for_meter(pending.result())))
                # Taken up after the next step, so that no step waits for the sum.
                pending = self._ranks.add([*local, float(reporter.stop_reason) if reporter else 0.0])
                meter.done(batch)
                self._after_step(batch, writer, reporter)
                if self._learner.should_stop(self._history):
                    break
        if pending is not None:
            meter.add(self._for_meter(pending.result()))
        if writer is not None:
            writer.wait()

    def _for_meter(self, sums: list[float]) -> list[float]:
        """Summed loss, right answers, rows and stop reason."""
        loss, rows, *metrics, stop_reason = sums
        return [loss, metrics[0] if self._spec.task == CLASSIFICATION else 0.0, rows, stop_reason]

    def _after_step(self, batch: Batch, writer: CheckpointWriter | None, reporter: Reporter | None) -> None:
        done = batch.step + 1
        epoch_done = done % self._loader.steps_per_epoch == 0
        metrics: dict[str, float] = {}
        if epoch_done and self._spec.validation_split:
            metrics = self._validate(batch.epoch, done, reporter)
        every = self._spec.checkpoint_every_steps
        if epoch_done or (every and done % every == 0):
            # Of a sharded model every rank has a part.
            weights, state = self._learner.weights(), self._learner.state()
            if writer is not None:
                writer.save(self._content(done, metrics), weights, state)

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        metrics, rows = self._learner.evaluate(self._row_cache(self._spec.validation_split), self._preprocessing)
        if self._spec.early_stopping:
            self._history.append((epoch, metrics[self._spec.early_stopping.metric]))
        if reporter:
            others = {name.removeprefix("validation_"): value for name, value in metrics.items()}
            loss, accuracy = others.pop("loss"), others.pop("accuracy", 0.0)
            reporter.tell(
                EventKind.VALIDATED,
                step=step,
                epoch=epoch,
                loss=loss,
                accuracy=accuracy,
                row_count=rows,
                **({"metrics": others} if others else {}),
            )
        return metrics

    def _resume(self, reporter: Reporter | None) -> int:
        """Restores the newest good checkpoint, which rank 0 chooses for all. Returns the first step to do."""
        chosen: dict[str, Any] | None = None
        if reporter:
            entries = self._registry.fence(self._config.attempt)
            entry = newest_good(self._store, entries, lambda text: reporter.tell(EventKind.WARNING, text=text))
            chosen = as_message(entry)
            reporter.tell(
                EventKind.ATTEMPT_STARTED,
                num_workers=self._ranks.world_size,
                step=entry.step if entry else 0,
                checkpoint=entry.name if entry else "",
            )
            if entry and self._spec.early_stopping:
                self._history = epoch_ends(entries, entry, self._spec.early_stopping.metric)
        chosen, self._history = self._ranks.share((chosen, self._history))
        if chosen is None:
            return 0
        entry = CheckpointEntry(**chosen)
        self._learner.load(*read(self._store, entry, self._ranks.device))
        logger.info("resuming from %s at step %d", entry.name, entry.step)
        return entry.step

    def _stop_if_asked(self, stop_reason: int) -> None:
        """Every rank has the same sum, so all end after the same step."""
        if stop_reason == GO_ON:
            return
        raise Stopped("cancelled" if stop_reason == CANCEL else "a later attempt has taken over")

    def _writer(self, reporter: Reporter) -> CheckpointWriter:
        def told(entry: CheckpointEntry) -> None:
            reporter.tell(EventKind.CHECKPOINT_COMMITTED, **asdict(entry))

        return CheckpointWriter(self._store, self._registry, self._config.attempt, told)

    def _content(self, step: int, metrics: dict[str, float]) -> CheckpointContent:
        return CheckpointContent(
            training_job=self._config.job_name,
            dataset_version=self._spec.dataset_version,
            dataset_manifest_sha256=self._version.manifest_sha256,
            step=step,
            epoch=step // self._loader.steps_per_epoch,
            seed=self._spec.seed,
            metrics=metrics,
            model=replace(self._spec.model, task=self._spec.task),
            ingested=ingested_columns(self._version),
            transforms=[*self._version.manifest.transforms, self._preprocessing.config],
            input_column=self._spec.input_column,
        )

    def _row_cache(self, split: str) -> RowCache:
        spec = self._spec
        reader = VersionReader(self._store, self._version)
        columns = self._preprocessing.columns
        return RowCache(reader, split, columns, spec.label_column, spec.model.num_classes, CACHE_BYTES, spec.task)

    def _plan(self) -> Plan:
        spec = self._spec
        return Plan(
            seed=spec.seed,
            lanes=spec.lanes,
            global_batch=spec.global_batch_size,
            epochs=spec.epochs,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
