"""The training loop of one rank, whoever started the rank: Ray Train, an attempt in local mode, or torchrun.

`Run` is the loop. Below it: what the ranks tell each other of a step, in the one sum over ranks that each step has
anyway; the metrics and the progress that people watch; the scaling of a regression's target.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.code_loading import load_code
from shared.dataset_version import load_version
from shared.dataset_version.version import ingested_nan_counts
from shared.errors import DataLoss, FailedPrecondition
from shared.model_spec import STANDARD, TargetScaling
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import configure_logging, identity
from train_service.checkpoints.saving import Checkpointing, History, Lineage
from train_service.domain.spec import FLOAT16, RAY_DATA, TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.learning.device import DeviceBatches, DeviceTransform, set_up_device
from train_service.learning.learner import BaseLearner, Learner
from train_service.learning.own_step import OwnStepLearner
from train_service.learning.ranks import PendingSum, Ranks
from train_service.loading.loader import Batch, Batches, Loader
from train_service.loading.rows import RowCache
from train_service.records.logs import LogShipper
from train_service.records.metrics_log import MetricsLog
from train_service.records.reporting import (
    CANCEL,
    GO_ON,
    PAUSES,
    PREEMPT,
    REPORT_INTERVAL_S,
    RESIZE,
    STALE,
    SUSPEND,
    EventKind,
    Reporter,
)
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import HeartbeatSender, as_reported

# --- The loop ---

logger = logging.getLogger(__name__)

WHY_STOPPED = {
    RESIZE: "there is room for more workers",
    PREEMPT: "a node will be taken away",
    SUSPEND: "suspended",
    CANCEL: "cancelled",
    STALE: "a later attempt has taken over",
}


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What an attempt tells its workers; plain values, for they travel."""

    store: StoreSettings
    job_name: str
    attempt: int
    spec: TrainingSpec
    # Where the attempt hears of its ranks, see `HeartbeatSender`; empty: nowhere.
    heartbeat: str = ""


def train_loop(config: LoopConfig, ranks: Ranks, node_id: str = "") -> None:
    """All that one rank does. Returns when the run is done, or when it was asked to end; the job's log says which.
    Raises `Internal` for what the training raised, see `as_reported`.

    `node_id` is Ray's, empty where there is none.
    """
    torch.set_num_threads(config.spec.threads_per_worker)
    set_up_device(ranks.device, config.spec)
    # Nobody could notice from outside that the only process of an attempt is held.
    alone = config.spec.local
    with (
        identity(job=config.job_name, attempt=str(config.attempt), rank=str(ranks.rank)),
        LogShipper(open_store(config.store), config.job_name, config.attempt, ranks.rank),
        HeartbeatSender(ranks.rank, config.heartbeat, node_id, ends_if_held=alone) as heartbeat,
    ):
        try:
            Run(config, ranks, heartbeat).run()
        except Stopped as stopped:
            logger.info("stopped early: %s", stopped)
        except Exception as error:
            told = as_reported(error, ranks.rank, heartbeat.step)
            if told is error:
                raise
            logger.exception("%s", told)
            raise told from error


class Stopped(Exception):
    """The run should end before its last step."""


class Run:
    """One rank's part of one attempt."""

    def __init__(self, config: LoopConfig, ranks: Ranks, heartbeat: HeartbeatSender | None = None) -> None:
        self._config = config
        self._heartbeat = heartbeat or HeartbeatSender(ranks.rank)
        self._spec = config.spec
        self._ranks = ranks
        self._store: ObjectStore = open_store(config.store)
        if self._spec.model.is_own:
            # From here on this process can build it.
            retry_on_outage(lambda: load_code(self._store, self._spec.model.code_bundle), "the code of the model")
        self._version = retry_on_outage(
            lambda: load_version(self._store, self._spec.dataset_version), "the dataset version"
        )
        self._batches = Batches(self._store, self._version, self._spec)
        self._preprocessing = self._batches.preprocessing
        self._loader = self._build_loader()
        kind = OwnStepLearner if self._spec.model.is_step else Learner
        self._learner: BaseLearner = kind(
            self._spec, ranks, self._preprocessing.output, self._loader.steps_per_epoch, self._loader.total_steps
        )
        steps = self._preprocessing.device_steps
        self._on_device = DeviceBatches(
            self._spec,
            ranks.device,
            DeviceTransform(steps) if steps else None,
            # To a CPU nothing is copied; steps that are left to it are computed beside the model's.
            self._spec.acceleration.prefetch_batches if ranks.device.type == "cuda" or steps else 0,
        )
        self._gpu = GpuMeter(ranks.device)
        self._validated = False
        # What early stopping goes by.
        self._history: History = []

    def run(self) -> None:
        config = self._config
        with contextlib.ExitStack() as stack:
            reporter = None
            if self._ranks.rank == 0:
                reporter = Reporter(self._store, config.job_name, config.attempt, lambda: self._heartbeat.request)
                stack.enter_context(reporter)
            # Left first: a checkpoint under way is committed and told however the run ends.
            saving = stack.enter_context(self._checkpointing(reporter))
            first_step, self._history = saving.begin()
            self._scale_target()
            log = None
            if reporter is not None:
                log = stack.enter_context(MetricsLog(self._store, config.job_name, config.attempt, first_step))
            if not self._learner.should_stop(self._history):
                self._train(first_step, saving, reporter, log)

    def _scale_target(self) -> None:
        """A run that goes on, or that starts from a checkpoint whose target was scaled, has its scaling by now."""
        if self._spec.target_scaling == STANDARD and self._learner.target_scaling is None:
            labels = self._batches.labels(self._heartbeat.tick)
            outputs = self._spec.model.num_classes
            self._learner.target_scaling = fit_target_scaling(labels, outputs, self._ranks)
            logger.info("the target is scaled by %s", self._learner.target_scaling)

    def _train(self, first_step: int, saving: Checkpointing, reporter: Reporter | None, log: MetricsLog | None) -> None:
        self._heartbeat.at(first_step, Phase.STARTING)
        self._learner.prepare()
        meter = ProgressMeter(reporter, log, self._learner.describe, self._loader.total_steps)
        self._heartbeat.total_steps = self._loader.total_steps
        pending: PendingReport | None = None
        stalled_s = saving.stalled_s
        with contextlib.closing(self._on_device.batches(self._loader.batches(first_step))) as batches:
            while True:
                began = time.monotonic()
                if (batch := next(batches, None)) is None:
                    break
                waited_s = time.monotonic() - began
                local = self._learner.step(batch)
                saving.note(batch, skipped=self._learner.skipped)
                stop = GO_ON
                if pending is not None:
                    report = pending.result()
                    saving.clock.heard(report.checkpoint_requested)
                    meter.add(report)
                    stop = report.stop_reason
                # Taken up after the next step, so that no step waits for the sum.
                request, reason = (saving.clock.ask(), reporter.stop_reason) if reporter else (0.0, GO_ON)
                pending = PendingReport(self._ranks, local, waited_s, checkpoint_requested=request, stop_reason=reason)
                meter.done(self._taken(batch, saving.stalled_s - stalled_s))
                stalled_s = saving.stalled_s
                over = self._after_step(batch, pending, meter, saving, reporter, log, pausing=stop in PAUSES)
                # Every rank has the same sum, so all end after the same step.
                if stop != GO_ON:
                    meter.add(pending.result())
                    saving.wait()
                    raise Stopped(WHY_STOPPED[stop])
                self._heartbeat.at(batch.step + 1, Phase.TRAINING)
                if over:
                    break
        self._heartbeat.at(self._loader.total_steps, Phase.SAVING)
        if pending is not None:
            meter.add(pending.result())
        saving.wait()
        saving.tidy()

    def _after_step(
        self,
        batch: Batch,
        pending: PendingReport,
        meter: ProgressMeter,
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
        if epoch_done:
            metrics = {**metrics, **self._learner.end_epoch(metrics)}
            if log is not None and metrics:
                log.add(done, batch.epoch, metrics)
        over = done == self._loader.total_steps or (epoch_done and self._learner.should_stop(self._history))
        if pausing or epoch_done or saving.clock.due(done):
            self._heartbeat.at(done, Phase.SAVING)
            # Taken up now, for the step's metrics are to be durable with its weights; the ranks wait here anyway.
            meter.add(pending.result())
            saving.take(done, metrics, self._history, log, final=over)
        return over

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        cache = self._batches.cache(self._spec.validation_split, self._heartbeat.tick)
        # The first one may compile the model for its own shapes.
        starting = self._spec.compile and not self._validated
        self._heartbeat.at(step, Phase.STARTING if starting else Phase.TRAINING)
        self._validated = True
        metrics, rows = self._learner.evaluate(cache, self._preprocessing)
        if self._spec.early_stopping:
            self._history.append((epoch, self._measured(metrics, self._spec.early_stopping.metric)))
        if reporter and rows:
            others = {name.removeprefix("validation_"): value for name, value in metrics.items()}
            # Of numbers there is no accuracy to tell.
            told = {name: others.pop(name) for name in ("loss", "accuracy") if name in others}
            reporter.tell(EventKind.VALIDATED, step=step, epoch=epoch, row_count=rows, **told, metrics=others)
        return metrics

    def _measured(self, metrics: dict[str, float], name: str) -> float:
        if name not in metrics:  # of a training step of a user's own, which measures what it likes
            has = ", ".join(metrics) or "nothing"
            raise FailedPrecondition(
                f"spec.early_stopping.metric: validation measured {has}, and not {name!r}; log it in validation_step",
                reason="METRIC_NOT_MEASURED",
                fields=[("spec.early_stopping.metric", f"{name!r} is not measured")],
            )
        return metrics[name]

    def _taken(self, batch: Batch, stalled_s: float) -> StepTaken:
        learner = self._learner
        skipped = learner.skipped_steps if self._spec.precision == FLOAT16 else None
        return StepTaken(
            batch.step + 1, batch.epoch, learner.learning_rate, stalled_s, self._gpu.values(), skipped_steps=skipped
        )

    def _checkpointing(self, reporter: Reporter | None) -> Checkpointing:
        lineage = Lineage(
            job_name=self._config.job_name,
            attempt=self._config.attempt,
            spec=self._spec,
            version=self._version,
            preprocessing=self._preprocessing,
            steps_per_epoch=self._loader.steps_per_epoch,
            total_steps=self._loader.total_steps,
            nan_counts=self._nan_counts() if self._ranks.rank == 0 else None,  # which writes the checkpoints
        )
        return Checkpointing(self._store, lineage, self._ranks, self._learner, reporter, self._heartbeat.tick)

    def _nan_counts(self) -> dict[str, int] | None:
        """Of the training split as it was ingested; None where that cannot be read, which is no reason not to train."""
        try:
            return retry_on_outage(
                lambda: ingested_nan_counts(self._store, self._version, self._spec.train_split),
                "the statistics of the training rows",
            )
        except DataLoss as error:
            logger.warning("the checkpoints will not say where the training rows had NaN: %s", error.message)
            return None

    def _build_loader(self) -> Loader:
        spec, ranks = self._spec, self._ranks
        # Rows that are slow to come are no hang while they come.
        touched = self._heartbeat.tick
        if spec.ingest == RAY_DATA:
            from train_service.loading.cluster_loader import ClusterLoader  # ray.data takes seconds to import

            cache = self._batches.cache(spec.train_split, touched)
            plan = self._batches.plan(ranks.rank, ranks.world_size)
            run = run_name(self._config, ranks.rank)
            return ClusterLoader(cache, self._preprocessing, plan, spec, self._config.store, run=run)
        return self._batches.loader(ranks.rank, ranks.world_size, touched, for_device=True)


def run_name(config: LoopConfig, rank: int) -> str:
    """By which Ray can be asked for the tasks that prepare rows for that rank."""
    return f"{config.job_name.rpartition('/')[2]}-attempt-{config.attempt:05d}-rank-{rank}"


# --- What the ranks say of a step ---


@dataclass(frozen=True)
class StepReport:
    """The same on every rank, so all of them do the same upon it."""

    # As `Learner.step` gives them, of all ranks together.
    sums: list[float]
    # What rank 0 asked for: see `CheckpointClock.ask`, and `Reporter.stop_reason`.
    checkpoint_requested: float
    stop_reason: int
    # Seconds; of the rank that waited the longest for its rows, and so of all, for they wait for it in their sums.
    data_wait_s: float


class PendingReport:
    """A step's report that is under way."""

    def __init__(
        self,
        ranks: Ranks,
        sums: Sequence[float],
        data_wait_s: float,
        *,
        checkpoint_requested: float = 0.0,
        stop_reason: int = 0,
    ) -> None:
        """Starts adding it up; all ranks do so after the same step. The wishes are rank 0's."""
        self._world_size = ranks.world_size
        # A place for each rank's wait, so that the sum has them all.
        waits = [0.0] * ranks.world_size
        waits[ranks.rank] = data_wait_s
        self._pending: PendingSum = ranks.add([checkpoint_requested, float(stop_reason), *waits, *sums])

    def result(self) -> StepReport:
        """Waits for it; asked again, it is the same."""
        request, stop, *rest = self._pending.result()
        waits, sums = rest[: self._world_size], rest[self._world_size :]
        return StepReport(sums, request, int(stop), max(waits))


# --- Metrics and progress ---

# Sums over steps, as `Learner.step` gives them, → the values of their metrics by name.
Describe = Callable[[Sequence[float]], dict[str, float]]


@dataclass(frozen=True)
class StepTaken:
    """One step of this rank. `step` is the number done, over all epochs."""

    step: int
    epoch: int
    learning_rate: float
    # Seconds that rank 0, which copies checkpoints, made all ranks wait.
    checkpoint_stall_s: float
    # Other values to keep of it, by name.
    others: dict[str, float]
    # Of the run so far, by the loss scaler; None where there is none.
    skipped_steps: int | None = None


class ProgressMeter:
    """Keeps the metrics of every step and reports about once a second. On other ranks than 0 it does nothing."""

    def __init__(self, reporter: Reporter | None, log: MetricsLog | None, describe: Describe, total_steps: int) -> None:
        self._reporter = reporter
        self._log = log
        self._describe = describe
        self._total_steps = total_steps
        # Computed, their reports still under way; and how long each took.
        self._taken: deque[tuple[StepTaken, float]] = deque()
        self._sums: list[float] = []
        self._data_wait_s = self._checkpoint_stall_s = 0.0
        self._steps = 0
        self._started = self._reported = self._done = time.monotonic()

    def done(self, taken: StepTaken) -> None:
        """Notes that a step was computed; its report comes with a later `add`, in the same order."""
        seconds, self._done = time.monotonic() - self._done, time.monotonic()
        if self._reporter:
            self._taken.append((taken, seconds))

    def add(self, report: StepReport) -> None:
        """Takes the report of the oldest step whose own has not come; nothing where all have."""
        if not self._reporter or not self._taken:
            return
        taken, seconds = self._taken.popleft()
        now = time.monotonic()
        self._keep(taken, report, seconds)
        self._sums = [one + new for one, new in zip(self._sums or [0.0] * len(report.sums), report.sums, strict=True)]
        self._data_wait_s += report.data_wait_s
        self._checkpoint_stall_s += taken.checkpoint_stall_s
        self._steps += 1
        if now - self._reported >= REPORT_INTERVAL_S or taken.step == self._total_steps:
            self._tell(self._reporter, taken, now)

    def _keep(self, taken: StepTaken, report: StepReport, seconds: float) -> None:
        if self._log is not None:
            values = {
                **self._describe(report.sums),
                "learning_rate": taken.learning_rate,
                "rows_per_second": report.sums[1] / max(seconds, 1e-9),
                "data_wait_s": report.data_wait_s,
                "checkpoint_stall_s": taken.checkpoint_stall_s,
                **({} if taken.skipped_steps is None else {"skipped_steps": float(taken.skipped_steps)}),
                **taken.others,
            }
            self._log.add(taken.step, taken.epoch, {name: one for name, one in values.items() if math.isfinite(one)})

    def _tell(self, reporter: Reporter, taken: StepTaken, now: float) -> None:
        seconds = max(now - self._reported, 1e-9)
        values = self._describe(self._sums)
        others = {name: one for name, one in values.items() if name not in ("loss", "accuracy") and math.isfinite(one)}
        reporter.tell(
            EventKind.PROGRESS,
            step=taken.step,
            total_steps=self._total_steps,
            epoch=taken.epoch,
            loss=values["loss"],
            accuracy=values.get("accuracy", 0.0),
            rows_per_second=self._sums[1] / seconds,
            seconds_left=(now - self._started) / self._steps * (self._total_steps - taken.step),
            data_wait_share=min(1.0, self._data_wait_s / seconds),
            checkpoint_stall_share=min(1.0, self._checkpoint_stall_s / seconds),
            metrics=others,
            skipped_steps=taken.skipped_steps or 0,
        )
        self._sums = []
        self._data_wait_s = self._checkpoint_stall_s = 0.0
        self._reported = now


# --- Use of the GPU ---

# NVML averages over about as long.
UTILIZATION_EVERY_S = 1.0

Read = Callable[[torch.device], float]


class GpuMeter:
    """`memory` gives the most bytes that tensors had so far, `utilization` the per cent of time in which the GPU was at
    work; None where it cannot be read."""

    def __init__(self, device: torch.device, memory: Read | None = None, utilization: Read | None = None) -> None:
        self._device = device
        self._memory = memory or torch.cuda.max_memory_allocated
        self._utilization = utilization or _nvml()
        self._share: float | None = None
        self._read_at = 0.0

    def values(self) -> dict[str, float]:
        """`gpu_memory_bytes`, and `gpu_utilization`, 0..1, where NVML is there; nothing of a CPU."""
        if self._device.type != "cuda":
            return {}
        values = {"gpu_memory_bytes": float(self._memory(self._device))}
        if self._utilization is not None:
            now = time.monotonic()
            if not self._read_at or now - self._read_at >= UTILIZATION_EVERY_S:
                self._share, self._read_at = self._read(self._utilization), now
            if self._share is not None:
                values["gpu_utilization"] = self._share
        return values

    def _read(self, utilization: Read) -> float | None:
        """None where NVML does not tell, as of a part of a GPU: a run does not end for that."""
        try:
            return utilization(self._device) / 100.0
        except Exception as error:
            logger.warning("the utilization of %s cannot be read and is left out: %s", self._device, error)
            self._utilization = None
            return None


def _nvml() -> Read | None:
    """torch asks NVML through the package nvidia-ml-py, which the extra `gpu` brings."""
    return torch.cuda.utilization if importlib.util.find_spec("pynvml") else None


# --- Scaling of the target ---

ROWS_PER_READ = 65_536
# The rows of so many reads are on their way.
AHEAD_READS = 4
# A deviation below this share of the mean is rounding: labels are float32, whose neighbours differ by a ten-millionth.
ROUNDING = 1e-9


def fit_target_scaling(labels: RowCache, outputs: int, ranks: Ranks) -> TargetScaling:
    """Of the population, in float64, a number for each of the model's `outputs`. Each rank reads its share of the rows,
    and all get the same; the last bits hang on the number of ranks. NaN and infinities, where the job allows them,
    count for nothing; an output that has no other labels stays as it is.

    Raises `InvalidArgument` naming the row for a label that is missing or, unless such are allowed, not finite.
    """
    rows = sum(labels.row_groups)
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    count, mean, squares = np.zeros(outputs), np.zeros(outputs), np.zeros(outputs)
    for begin in range(first, end, ROWS_PER_READ):
        labels.read_ahead(np.arange(begin, min(begin + AHEAD_READS * ROWS_PER_READ, end), dtype=np.int64))
        read = labels.rows(np.arange(begin, min(begin + ROWS_PER_READ, end), dtype=np.int64)).labels
        # (rows, K), merged into what was read before (Chan, Golub and LeVeque 1979): stable for any mean.
        values = read.reshape(len(read), -1).astype(np.float64)
        finite = np.isfinite(values)
        own_count = finite.sum(0)
        own_mean = np.where(finite, values, 0.0).sum(0) / np.maximum(own_count, 1)
        apart = own_mean - mean
        both = count + own_count
        share = own_count / np.maximum(both, 1)
        squares = squares + (np.where(finite, values - own_mean, 0.0) ** 2).sum(0) + apart**2 * count * share
        mean = mean + apart * share
        count = both
    counts, sums = np.asarray(ranks.add([*count, *(mean * count)]).result()).reshape(2, outputs)
    counts = np.maximum(counts, 1)
    whole_mean = sums / counts
    whole_squares = np.asarray(ranks.add([*(squares + count * (mean - whole_mean) ** 2)]).result())
    deviation = np.sqrt(whole_squares / counts)
    deviation = np.where(deviation > ROUNDING * np.abs(whole_mean), deviation, 1.0)
    return TargetScaling(mean=tuple(whole_mean.tolist()), deviation=tuple(deviation.tolist()))


# --- Entry of a worker of Ray Train ---


def work(config: dict[str, Any]) -> None:
    """`config["loop"]` is the attempt's `LoopConfig`."""
    # A run without Ray imports this module, too.
    import ray
    import ray.train
    import ray.train.torch

    loop: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    train_loop(loop, ranks, ray.get_runtime_context().get_node_id())
