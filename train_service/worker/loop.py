"""The training loop of one rank.

Ray Train, an attempt in local mode, or torchrun starts the rank.

`Run` is the loop. Below it come the reports that the ranks exchange in each step's one sum over ranks, the metrics and
the progress that users see, and the scaling of a regression's target.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.code_bundle_registry import load_code, node_folder
from shared.dataset_version import load_version
from shared.dataset_version.version import ingested_nan_counts
from shared.errors import DataLoss, FailedPrecondition, Internal, MillraceError
from shared.logging_and_tracing import configure_logging, identity
from shared.model_spec import STANDARD, TargetScaling
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from train_service.checkpoints.saving import Checkpointing, History, Lineage
from train_service.domain.spec import DETERMINISTIC, FLOAT16, RAY_DATA, TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.learning.learner import BaseLearner, Learner
from train_service.learning.own_step import OwnStepLearner
from train_service.learning.ranks import DeviceBatches, DeviceTransform, PendingSum, Ranks, set_up_device
from train_service.loading.loader import Batch, Loader, LoaderFactory, RowCache
from train_service.records.event_log import (
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
from train_service.records.logs import LogShipper
from train_service.records.metrics_log import MetricsLog
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import FAILING, HeartbeatSender, as_reported
from train_service.worker.user_process import MemoryLimit, MemoryWatch, NodeMemory, captured_output, exits_announced

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
    """Config of an attempt's workers. It holds plain values, because it is sent to them."""

    store: StoreSettings
    job_name: str
    attempt: int
    spec: TrainingSpec
    # Where ranks send heartbeats to their attempt, see `HeartbeatSender`; empty: none are sent.
    heartbeat: str = ""


def train_loop(
    config: LoopConfig,
    ranks: Ranks,
    node_id: str = "",
    ranks_of_node: int = 1,
    end_process: Callable[[MillraceError], None] | None = None,
) -> None:
    """Run the whole life of one rank.

    Return when the run is complete or was asked to stop; the job's log says which. Raises `Internal` for an error of
    the training, see `as_reported`. `node_id` is Ray's, empty without Ray. `ranks_of_node` is the number of ranks on
    this node, which share its memory.

    The code of a user's own model may fill the memory. Then `end_process` is called with the error, in another thread.
    Without it, the attempt is sent the error and this process is killed. Such a process, a worker of Ray's, also bounds
    what the model prints, and announces its `os._exit`.
    """
    torch.set_num_threads(config.spec.threads_per_worker)
    set_up_device(ranks.device, config.spec)
    is_guarded = config.spec.model.is_own and end_process is None and bool(config.heartbeat)
    # In local mode no other process could notice that the only process of the attempt is stopped.
    alone = config.spec.local
    store = open_store(config.store)
    with (
        identity(job=config.job_name, attempt=str(config.attempt), rank=str(ranks.rank)),
        LogShipper(store, config.job_name, config.attempt, ranks.rank, tees=not is_guarded) as shipper,
        captured_output(shipper.add_lines) if is_guarded else contextlib.nullcontext(),
        HeartbeatSender(ranks.rank, config.heartbeat, node_id, ends_if_held=alone) as heartbeat,
        watch_memory(config.spec, ranks.rank, ranks_of_node, heartbeat, shipper, end_process),
        announced_exit(config.spec, ranks.rank, heartbeat, shipper) if is_guarded else contextlib.nullcontext(),
    ):
        try:
            Run(config, ranks, heartbeat).run()
        except Stopped as stopped:
            logger.info("stopped early: %s", stopped)
        except Exception as error:
            reported = as_reported(error, ranks.rank, heartbeat.step, _remedy(error, config.spec))
            if reported is error:
                raise
            logger.exception("%s", reported)
            raise reported from error


def _remedy(error: Exception, spec: TrainingSpec) -> str:
    """Return what a client can change about `error`, or nothing."""
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    fields = f"lower spec.global_batch_size ({spec.global_batch_size})"
    if spec.acceleration.algorithms == DETERMINISTIC:
        fields += (
            ", or set spec.acceleration.algorithms to ALGORITHMS_FASTEST: deterministic attention keeps a number for "
            "each pair of tokens"
        )
    return fields


def watch_memory(
    spec: TrainingSpec,
    rank: int,
    ranks_of_node: int,
    heartbeat: HeartbeatSender,
    shipper: LogShipper,
    end_process: Callable[[MillraceError], None] | None,
) -> contextlib.AbstractContextManager[object]:
    """Return the watch over the memory of a rank that runs a user's own model. Other models need none."""
    if not spec.model.is_own:
        return contextlib.nullcontext()

    def leave(error: MillraceError) -> None:
        """End this process at once, before it can allocate more."""
        if end_process is None:
            with contextlib.suppress(TimeoutError, ConnectionError):  # then the attempt sees the process end
                heartbeat.ask({"kind": FAILING, "error": error.as_record()}, timeout_s=5.0)
        shipper.end(5.0)
        if end_process is not None:
            end_process(error)
        os.kill(os.getpid(), signal.SIGKILL)

    limit = MemoryLimit.for_rank(
        spec.placement.resources_per_worker.get("memory", 0.0), ranks_of_node, NodeMemory.read()
    )
    return MemoryWatch(rank, limit, leave, _code_folder(spec))


def announced_exit(
    spec: TrainingSpec, rank: int, heartbeat: HeartbeatSender, shipper: LogShipper
) -> contextlib.AbstractContextManager[object]:
    """Return the context in which `os._exit` sends the attempt its status and line."""

    def announce(status: int, where: str) -> None:
        line = where.removeprefix(f"{_code_folder(spec)}/")
        text = f"os._exit({status}) on rank {rank} at {line}: the process ended before the run"
        error = Internal(text, reason="PROGRAM_EXITED", metadata={"ranks": str(rank), "line": line})
        with contextlib.suppress(TimeoutError, ConnectionError):  # then the attempt sees the process end
            heartbeat.ask({"kind": FAILING, "error": error.as_record()}, timeout_s=5.0)
        shipper.end(5.0)

    return exits_announced(announce)


def _code_folder(spec: TrainingSpec) -> Path:
    return node_folder() / spec.model.code_bundle.rpartition("/")[2]


class Stopped(Exception):
    """Request to end the run before its last step."""


class Run:
    """One rank's part of one attempt.

    `run` restores the newest good checkpoint, and `_train` takes the steps after it. Each step:

    1. takes the rank's next batch, which the loader's threads have read and prepared (`loading.loader`); for a GPU a
       thread with a stream of its own has copied it, some batches ahead (`learning.ranks.DeviceBatches`)
    2. computes the loss and its gradients, averages them over ranks and updates the weights (`learning.learner`)
    3. notes the rows as consumed (`checkpoints.coverage_records`)
    4. starts the sum over ranks of this step's report, and reads the sum of the step before: a step never waits for its
       own. All ranks read the same sum, so they agree on checkpoints and on a stop.
    5. at an epoch's end validates; takes a checkpoint where one is due (`checkpoints.saving`)

    Rank 0 alone writes events, metrics and the checkpoints' names.

    During an outage of the store a call waits up to `store_retry.OUTAGE_TIMEOUT_S`. Then the attempt fails, and the
    next one resumes from the newest good checkpoint.
    """

    def __init__(self, config: LoopConfig, ranks: Ranks, heartbeat: HeartbeatSender | None = None) -> None:
        self._config = config
        self._heartbeat = heartbeat or HeartbeatSender(ranks.rank)
        self._spec = config.spec
        self._ranks = ranks
        self._store: ObjectStore = open_store(config.store)
        if self._spec.model.is_own:
            # From here on this process can build the model.
            bundle, note_progress = self._spec.model.code_bundle, self._heartbeat.note_progress
            retry_on_outage(
                lambda: load_code(self._store, bundle, note_progress=note_progress), "the code of the model"
            )
        self._version = retry_on_outage(
            lambda: load_version(self._store, self._spec.dataset_version), "the dataset version"
        )
        self._loader_factory = LoaderFactory(self._store, self._version, self._spec)
        self._preprocessing = self._loader_factory.preprocessing
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
            # Prefetch for the copies to a GPU, or for device steps, which a CPU computes beside the model's step.
            self._spec.acceleration.prefetch_batches if ranks.device.type == "cuda" or steps else 0,
        )
        self._gpu = GpuMeter(ranks.device)
        self._validated = False
        # The values that early stopping compares.
        self._history: History = []

    def run(self) -> None:
        config = self._config
        with contextlib.ExitStack() as stack:
            reporter = None
            if self._ranks.rank == 0:
                reporter = Reporter(self._store, config.job_name, config.attempt, lambda: self._heartbeat.request)
                stack.enter_context(reporter)
            # Entered last and so left first: a pending checkpoint is committed and reported however the run ends.
            saving = stack.enter_context(self._checkpointing(reporter))
            first_step, self._history = saving.restore()
            self._scale_target()
            log = None
            if reporter is not None:
                log = stack.enter_context(MetricsLog(self._store, config.job_name, config.attempt, first_step))
            if not self._learner.should_stop(self._history):
                self._train(first_step, saving, reporter, log)

    def _scale_target(self) -> None:
        """Fit the scaling of the target, unless a checkpoint brought it."""
        if self._spec.target_scaling == STANDARD and self._learner.target_scaling is None:
            labels = self._loader_factory.labels(self._heartbeat.note_progress)
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
                    saving.trigger.receive_sum(report.checkpoint_requested)
                    meter.add(report)
                    stop = report.stop_reason
                # The sum is read after the next step, so that no step waits for it.
                request, reason = (saving.trigger.request(), reporter.stop_reason) if reporter else (0.0, GO_ON)
                pending = PendingReport(self._ranks, local, waited_s, checkpoint_requested=request, stop_reason=reason)
                meter.done(self._taken(batch, saving.stalled_s - stalled_s))
                stalled_s = saving.stalled_s
                over = self._after_step(batch, pending, meter, saving, reporter, log, pausing=stop in PAUSES)
                # Every rank has the same sum, so all stop after the same step.
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
        saving.delete_unreferenced_coverage()

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
        """Validate and checkpoint if due. Return whether the run is complete."""
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
        if pausing or epoch_done or saving.trigger.due(done):
            self._heartbeat.at(done, Phase.SAVING)
            # Read the sum now, so that the step's metrics are durable with its weights. The ranks wait here anyway.
            meter.add(pending.result())
            saving.take(done, metrics, self._history, log, final=over)
        return over

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        cache = self._loader_factory.cache(self._spec.validation_split, self._heartbeat.note_progress)
        # The first validation may compile the model for its own shapes.
        starting = self._spec.compile and not self._validated
        self._heartbeat.at(step, Phase.STARTING if starting else Phase.TRAINING)
        self._validated = True
        metrics, rows = self._learner.evaluate(cache, self._preprocessing)
        if self._spec.early_stopping:
            self._history.append((epoch, self._measured(metrics, self._spec.early_stopping.metric)))
        if reporter and rows:
            others = {name.removeprefix("validation_"): value for name, value in metrics.items()}
            # A regression has no accuracy.
            main_metrics = {name: others.pop(name) for name in ("loss", "accuracy") if name in others}
            reporter.emit(EventKind.VALIDATED, step=step, epoch=epoch, row_count=rows, **main_metrics, metrics=others)
        return metrics

    def _measured(self, metrics: dict[str, float], name: str) -> float:
        if name not in metrics:  # a user's own training step chooses what it measures
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
            nan_counts=self._nan_counts() if self._ranks.rank == 0 else None,  # only rank 0 writes the manifest
        )
        return Checkpointing(self._store, lineage, self._ranks, self._learner, reporter, self._heartbeat.note_progress)

    def _nan_counts(self) -> dict[str, int] | None:
        """Return the NaN counts of the training split as ingested.

        Return None if they cannot be read; training continues without them.
        """
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
        # While rows arrive, however slowly, the rank does not count as hung.
        note_progress = self._heartbeat.note_progress
        if spec.ingest == RAY_DATA:
            from train_service.loading.cluster_loader import ClusterLoader  # ray.data takes seconds to import

            cache = self._loader_factory.cache(spec.train_split, note_progress)
            plan = self._loader_factory.plan(ranks.rank, ranks.world_size)
            run = run_name(self._config, ranks.rank)
            return ClusterLoader(cache, self._preprocessing, plan, spec, self._config.store, run=run)
        return self._loader_factory.loader(ranks.rank, ranks.world_size, note_progress, for_device=True)


def run_name(config: LoopConfig, rank: int) -> str:
    """Return the name by which Ray lists the tasks that prepare rows for that rank."""
    return f"{config.job_name.rpartition('/')[2]}-attempt-{config.attempt:05d}-rank-{rank}"


# --- Reports of a step ---


@dataclass(frozen=True)
class StepReport:
    """Report of one step, the same on every rank, so that all ranks act alike."""

    # The sums that `Learner.step` returned, added over all ranks.
    sums: list[float]
    # Rank 0's requests: see `CheckpointTrigger.request` and `Reporter.stop_reason`.
    checkpoint_requested: float
    stop_reason: int
    # Seconds that the slowest rank waited for its rows. All ranks wait as long, because their sums wait for that rank.
    data_wait_s: float


class PendingReport:
    """A step's report whose sum over ranks is pending."""

    def __init__(
        self,
        ranks: Ranks,
        sums: Sequence[float],
        data_wait_s: float,
        *,
        checkpoint_requested: float = 0.0,
        stop_reason: int = 0,
    ) -> None:
        """Start the sum over ranks. Every rank does so after the same step.

        The requests are rank 0's.
        """
        self._world_size = ranks.world_size
        # One element per rank, so that the sum holds every rank's wait.
        waits = [0.0] * ranks.world_size
        waits[ranks.rank] = data_wait_s
        self._pending: PendingSum = ranks.add([checkpoint_requested, float(stop_reason), *waits, *sums])

    def result(self) -> StepReport:
        """Wait for the report and return it. Further calls return the same report."""
        request, stop, *rest = self._pending.result()
        waits, sums = rest[: self._world_size], rest[self._world_size :]
        return StepReport(sums, request, int(stop), max(waits))


# --- Metrics and progress ---

# Maps the sums over steps that `Learner.step` returned to metrics by name.
Describe = Callable[[Sequence[float]], dict[str, float]]


@dataclass(frozen=True)
class StepTaken:
    """One step of this rank. `step` is the number of steps done, over all epochs."""

    step: int
    epoch: int
    learning_rate: float
    # Seconds that all ranks waited while rank 0 copied a checkpoint.
    checkpoint_stall_s: float
    # Other values to log with the step, by name.
    others: dict[str, float]
    # Steps that the loss scaler skipped in the run so far; None without a loss scaler.
    skipped_steps: int | None = None


class ProgressMeter:
    """Log of every step's metrics, with a progress report about once a second.

    It does nothing on ranks other than 0.
    """

    def __init__(self, reporter: Reporter | None, log: MetricsLog | None, describe: Describe, total_steps: int) -> None:
        self._reporter = reporter
        self._log = log
        self._describe = describe
        self._total_steps = total_steps
        # Steps computed whose reports are pending, each with its duration in seconds.
        self._taken: deque[tuple[StepTaken, float]] = deque()
        self._sums: list[float] = []
        self._data_wait_s = self._checkpoint_stall_s = 0.0
        self._steps = 0
        self._started = self._reported = self._done = time.monotonic()

    def done(self, taken: StepTaken) -> None:
        """Record that a step was computed. Its report comes with a later `add`, in the same order."""
        seconds, self._done = time.monotonic() - self._done, time.monotonic()
        if self._reporter:
            self._taken.append((taken, seconds))

    def add(self, report: StepReport) -> None:
        """Take the report of the oldest step that has none yet. Does nothing if no step waits."""
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
            self._report_progress(self._reporter, taken, now)

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
            self._log.add(
                taken.step, taken.epoch, {name: value for name, value in values.items() if math.isfinite(value)}
            )

    def _report_progress(self, reporter: Reporter, taken: StepTaken, now: float) -> None:
        seconds = max(now - self._reported, 1e-9)
        values = self._describe(self._sums)
        others = {
            name: value for name, value in values.items() if name not in ("loss", "accuracy") and math.isfinite(value)
        }
        reporter.emit(
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

# NVML averages over about this long.
UTILIZATION_EVERY_S = 1.0

Read = Callable[[torch.device], float]


class GpuMeter:
    """Meter of a GPU's memory and utilization.

    `memory` returns the most bytes that tensors had so far. `utilization` returns the percentage of time in which the
    GPU was busy; None if it cannot be read.
    """

    def __init__(self, device: torch.device, memory: Read | None = None, utilization: Read | None = None) -> None:
        self._device = device
        self._memory = memory or torch.cuda.max_memory_allocated
        self._utilization = utilization or _nvml()
        self._share: float | None = None
        self._read_at = 0.0

    def values(self) -> dict[str, float]:
        """Return `gpu_memory_bytes`, and `gpu_utilization`, 0..1, if NVML is installed; nothing on a CPU."""
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
        """Return the utilization, or None if NVML cannot measure it, as for a part of a GPU.

        A run does not fail for that.
        """
        try:
            return utilization(self._device) / 100.0
        except Exception as error:
            logger.warning("the utilization of %s cannot be read and is left out: %s", self._device, error)
            self._utilization = None
            return None


def _nvml() -> Read | None:
    """Return torch's reader, which needs the package nvidia-ml-py from the extra `gpu`."""
    return torch.cuda.utilization if importlib.util.find_spec("pynvml") else None


# --- Scaling of the target ---

ROWS_PER_READ = 65_536
# Rows are read ahead for this many reads.
AHEAD_READS = 4
# A deviation below this share of the mean counts as rounding: neighbouring float32 labels differ by about 1e-7.
ROUNDING = 1e-9


def fit_target_scaling(labels: RowCache, outputs: int, ranks: Ranks) -> TargetScaling:
    """Return the mean and deviation of the labels, for each of the model's `outputs`.

    They are of the population, in float64. Each rank reads its share of the rows, and all ranks return the same values;
    the last bits depend on the number of ranks. NaN and infinities, where the job allows them, are left out. An output
    without finite labels stays unscaled.

    Raises `InvalidArgument` that names the row of a label that is missing or, unless the job allows such, not finite.
    """
    rows = labels.row_count
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    count, mean, squares = np.zeros(outputs), np.zeros(outputs), np.zeros(outputs)
    for begin in range(first, end, ROWS_PER_READ):
        labels.read_ahead(np.arange(begin, min(begin + AHEAD_READS * ROWS_PER_READ, end), dtype=np.int64))
        read = labels.rows(np.arange(begin, min(begin + ROWS_PER_READ, end), dtype=np.int64)).labels
        # (rows, K), merged into the rows read before (Chan, Golub and LeVeque 1979), which is stable for any mean.
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


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Run a worker of Ray Train. `config["loop"]` is the attempt's `LoopConfig`."""
    # Imported here, because a run without Ray imports this module, too.
    import ray
    import ray.train
    import ray.train.torch

    loop: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    node_id, beside = ray.get_runtime_context().get_node_id(), context.get_local_world_size()
    train_loop(loop, ranks, node_id, beside)
