"""The training loop of one rank. Ray Train runs it on every worker of an attempt."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import configure_logging, identity
from train_service.domain.slices import Plan
from train_service.domain.spec import RAY_DATA, TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.events import EventKind
from train_service.learner import Learner
from train_service.loader import Batch, Loader
from train_service.logs import LogShipper
from train_service.metrics_log import MetricsLog
from train_service.patience import patient
from train_service.preprocessing import Preprocessing
from train_service.progress import ProgressMeter, StepTaken
from train_service.pulse import Pulse
from train_service.ranks import PendingSum, Ranks
from train_service.reporting import CANCEL, GO_ON, PAUSES, PREEMPT, RESIZE, STALE, SUSPEND, Reporter
from train_service.row_cache import RowCache
from train_service.saving import Checkpointing, History, Lineage

logger = logging.getLogger(__name__)

WHY_STOPPED = {
    RESIZE: "there is room for more workers",
    PREEMPT: "a node will be taken away",
    SUSPEND: "suspended",
    CANCEL: "cancelled",
    STALE: "a later attempt has taken over",
}
CACHE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What an attempt tells its workers; plain values, for they travel."""

    store: StoreSettings
    job_name: str
    attempt: int
    spec: TrainingSpec
    # Where the attempt hears of its ranks, see `Pulse`; empty: nowhere.
    pulse: str = ""


def train_loop(config: dict[str, Any]) -> None:
    """Entry point of a worker. Returns when the run is done, or when it was asked to end; the job's log says which."""
    loop: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    torch.set_num_threads(loop.spec.threads_per_worker)
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    node_id = ray.get_runtime_context().get_node_id()
    with (
        identity(job=loop.job_name, attempt=str(loop.attempt), rank=str(ranks.rank)),
        LogShipper(open_store(loop.store), loop.job_name, loop.attempt, ranks.rank),
        Pulse(ranks.rank, loop.pulse, node_id) as pulse,
    ):
        try:
            Run(loop, ranks, pulse).run()
        except Stopped as stopped:
            logger.info("stopped early: %s", stopped)


class Stopped(Exception):
    """The run should end before its last step."""


class Run:
    """One rank's part of one attempt."""

    def __init__(self, config: LoopConfig, ranks: Ranks, pulse: Pulse | None = None) -> None:
        self._config = config
        self._pulse = pulse or Pulse(ranks.rank)
        self._spec = config.spec
        self._ranks = ranks
        self._store: ObjectStore = open_store(config.store)
        self._version = patient(lambda: load_version(self._store, self._spec.dataset_version), "the dataset version")
        self._preprocessing = Preprocessing(self._spec, self._version.columns)
        self._loader = self._build_loader()
        self._learner = Learner(
            self._spec, ranks, self._preprocessing.output, self._loader.steps_per_epoch, self._loader.total_steps
        )
        self._validated = False
        # What early stopping goes by.
        self._history: History = []

    def run(self) -> None:
        config = self._config
        with contextlib.ExitStack() as stack:
            reporter = None
            if self._ranks.rank == 0:
                reporter = Reporter(self._store, config.job_name, config.attempt, lambda: self._pulse.wish)
                stack.enter_context(reporter)
            # Left first: a checkpoint under way is committed and told however the run ends.
            saving = stack.enter_context(self._checkpointing(reporter))
            first_step, self._history = saving.begin()
            log = None
            if reporter is not None:
                log = stack.enter_context(MetricsLog(self._store, config.job_name, config.attempt, first_step))
            if not self._learner.should_stop(self._history):
                self._train(first_step, saving, reporter, log)

    def _train(self, first_step: int, saving: Checkpointing, reporter: Reporter | None, log: MetricsLog | None) -> None:
        self._learner.prepare()
        meter = ProgressMeter(reporter, log, self._learner.describe, self._loader.total_steps)
        self._pulse.total_steps = self._loader.total_steps
        pending: PendingSum | None = None
        stalled_s = saving.stalled_s
        with contextlib.closing(self._loader.batches(first_step)) as batches:
            while True:
                began = time.monotonic()
                if (batch := next(batches, None)) is None:
                    break
                waited_s = time.monotonic() - began
                local = self._learner.step(batch)
                saving.note(batch)
                stop = GO_ON
                if pending is not None:
                    *sums, wish, reason = pending.result()
                    saving.clock.heard(wish)
                    meter.add(sums)
                    stop = int(reason)
                # Taken up after the next step, so that no step waits for the sum.
                wishes = [saving.clock.ask(), float(reporter.stop_reason)] if reporter else [0.0, 0.0]
                pending = self._ranks.add([*local, *wishes])
                meter.done(self._taken(batch, waited_s, saving.stalled_s - stalled_s))
                stalled_s = saving.stalled_s
                over = self._after_step(batch, saving, reporter, log, pausing=stop in PAUSES)
                # Every rank has the same sum, so all end after the same step.
                if stop != GO_ON:
                    meter.add(pending.result()[:-2])
                    saving.wait()
                    raise Stopped(WHY_STOPPED[stop])
                self._pulse.at(batch.step + 1, Phase.TRAINING)
                if over:
                    break
        self._pulse.at(self._loader.total_steps, Phase.SAVING)
        if pending is not None:
            meter.add(pending.result()[:-2])
        saving.wait()
        saving.tidy()

    def _after_step(
        self,
        batch: Batch,
        saving: Checkpointing,
        reporter: Reporter | None,
        log: MetricsLog | None,
        *,
        pausing: bool,
    ) -> bool:
        """Validates and takes a checkpoint where it is time. Whether the run is over."""
        done = batch.step + 1
        epoch_done = done % self._loader.steps_per_epoch == 0
        metrics: dict[str, float] = {}
        if epoch_done and self._spec.validation_split:
            metrics = self._validate(batch.epoch, done, reporter)
            if log is not None:
                log.add(done, batch.epoch, metrics)
        over = done == self._loader.total_steps or (epoch_done and self._learner.should_stop(self._history))
        if pausing or epoch_done or saving.clock.due(done):
            self._pulse.at(done, Phase.SAVING)
            saving.take(done, metrics, self._history, final=over)
        return over

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        cache = self._row_cache(self._spec.validation_split)
        cache.touched = self._pulse.tick
        # The first one may compile the model for its own shapes.
        starting = self._spec.compile and not self._validated
        self._pulse.at(step, Phase.STARTING if starting else Phase.TRAINING)
        self._validated = True
        metrics, rows = self._learner.evaluate(cache, self._preprocessing)
        if self._spec.early_stopping:
            self._history.append((epoch, metrics[self._spec.early_stopping.metric]))
        if reporter:
            others = {name.removeprefix("validation_"): value for name, value in metrics.items()}
            loss, accuracy = others.pop("loss"), others.pop("accuracy", 0.0)
            told = {"step": step, "epoch": epoch, "loss": loss, "accuracy": accuracy, "row_count": rows}
            reporter.tell(EventKind.VALIDATED, **told, metrics=others)
        return metrics

    def _taken(self, batch: Batch, waited_s: float, stalled_s: float) -> StepTaken:
        others = {}
        if self._ranks.device.type == "cuda":
            others["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._ranks.device))
        return StepTaken(batch.step + 1, batch.epoch, self._learner.learning_rate, waited_s, stalled_s, others)

    def _checkpointing(self, reporter: Reporter | None) -> Checkpointing:
        lineage = Lineage(
            job_name=self._config.job_name,
            attempt=self._config.attempt,
            spec=self._spec,
            version=self._version,
            preprocessing=self._preprocessing,
            steps_per_epoch=self._loader.steps_per_epoch,
            total_steps=self._loader.total_steps,
        )
        return Checkpointing(self._store, lineage, self._ranks, self._learner, reporter)

    def _row_cache(self, split: str) -> RowCache:
        spec, columns = self._spec, self._preprocessing.columns
        reader = VersionReader(self._store, self._version)
        return RowCache(reader, split, columns, spec.label_column, spec.model.num_classes, CACHE_BYTES, spec.task)

    def _build_loader(self) -> Loader:
        spec = self._spec
        cache = self._row_cache(spec.train_split)
        # Rows that are slow to come are no hang while they come.
        cache.touched = self._pulse.tick
        ranks = self._ranks
        plan = Plan(spec.seed, spec.lanes, spec.global_batch_size, spec.epochs, ranks.rank, ranks.world_size)
        if spec.ingest == RAY_DATA:
            from train_service.cluster_loader import ClusterLoader  # ray.data takes seconds to import

            return ClusterLoader(cache, self._preprocessing, plan, spec, self._config.store)
        return Loader(cache, self._preprocessing, plan)
