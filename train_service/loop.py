"""The training loop of one rank. Ray Train runs it on every worker of an attempt."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn import functional as F

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.dataset_version import VersionReader, load_version
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import configure_logging, identity
from train_service.domain.schedule import learning_rate
from train_service.domain.seeds import noise_seed
from train_service.domain.slices import loss_scale
from train_service.domain.spec import TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.evaluation import evaluate
from train_service.events import EventKind
from train_service.loader import Batch, Loader, Plan
from train_service.patience import patient
from train_service.preprocessing import Preprocessing
from train_service.progress import ProgressMeter
from train_service.pulse import Pulse
from train_service.ranks import PendingSum, Ranks, settle_buckets
from train_service.reporting import CANCEL, GO_ON, PAUSES, PREEMPT, RESIZE, STALE, SUSPEND, Reporter
from train_service.row_cache import RowCache
from train_service.snapshots import CheckpointWriter, as_message, newest_good, restore
from train_service.version_fit import ingested_columns

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
    loop_config: LoopConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    torch.set_num_threads(loop_config.spec.threads_per_worker)
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    node_id = ray.get_runtime_context().get_node_id()
    with (
        identity(job=loop_config.job_name, attempt=str(loop_config.attempt), rank=str(ranks.rank)),
        Pulse(ranks.rank, loop_config.pulse, node_id) as pulse,
    ):
        try:
            Run(loop_config, ranks, pulse).run()
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
        self._loader = Loader(self._row_cache(self._spec.train_split), self._preprocessing, self._plan())
        self._registry = CheckpointRegistry(self._store, config.job_name)
        torch.manual_seed(self._spec.seed)
        self._model = build_model(self._spec.model).to(ranks.device)
        self._optimizer = self._build_optimizer()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            reporter, writer = None, None
            if self._ranks.rank == 0:
                pulse = self._pulse
                reporter = Reporter(self._store, self._config.job_name, self._config.attempt, lambda: pulse.wish)
                stack.enter_context(reporter)
                # Left first: a checkpoint under way is committed and told however the run ends.
                writer = stack.enter_context(self._writer(reporter))
            self._run(reporter, writer)

    def _run(self, reporter: Reporter | None, writer: CheckpointWriter | None) -> None:
        first_step = self._resume(reporter)
        model = self._ranks.wrap(self._model)
        if model is not self._model:
            settle_buckets(model, self._model, self._example())
        meter = ProgressMeter(reporter, self._loader.total_steps, self._loader.steps_per_epoch)
        self._pulse.total_steps = self._loader.total_steps
        pending: PendingSum | None = None
        with contextlib.closing(self._loader.batches(first_step)) as batches:
            for batch in batches:
                local = self._step(model, batch)
                stop = GO_ON if pending is None else meter.add(pending.result())
                if stop in PAUSES:
                    self._pause(batch, writer, reporter)
                self._stop_if_asked(stop)
                # Taken up after the next step, so that no step waits for the sum.
                pending = self._ranks.add([*local, float(reporter.stop_reason) if reporter else 0.0])
                meter.done(batch)
                self._after_step(batch, writer, reporter)
                self._pulse.at(batch.step + 1, Phase.TRAINING)
        self._pulse.at(self._loader.total_steps, Phase.SAVING)
        if pending is not None:
            meter.add(pending.result())
        if writer is not None:
            writer.wait()

    def _step(self, model: nn.Module, batch: Batch) -> list[float]:
        """One optimiser step. Returns this rank's summed loss, right answers and rows."""
        spec, step = self._spec, batch.step
        # All noise of the step depends on where it is, not on what ran before.
        torch.manual_seed(noise_seed(spec.seed, step, self._ranks.rank))
        model.train()
        inputs_BCHW = torch.from_numpy(batch.inputs).to(self._ranks.device, non_blocking=True)
        labels_B = torch.from_numpy(batch.labels).to(self._ranks.device, non_blocking=True)
        logits_BK = model(inputs_BCHW)
        loss_sum = F.cross_entropy(logits_BK, labels_B, reduction="sum")
        self._optimizer.zero_grad(set_to_none=True)
        (loss_sum * loss_scale(self._ranks.world_size, batch.step_rows)).backward()  # type: ignore[no-untyped-call]
        rate = learning_rate(spec.optimizer.schedule, spec.optimizer.learning_rate, step, self._loader.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        right = (logits_BK.argmax(1) == labels_B).sum()
        return [loss_sum.item(), right.item(), float(len(batch.labels))]

    def _pause(self, batch: Batch, writer: CheckpointWriter | None, reporter: Reporter | None) -> None:
        """Returns once the step just done is durable, whatever the rules of checkpoints say."""
        self._pulse.at(batch.step + 1, Phase.SAVING)
        self._after_step(batch, writer, reporter, pausing=True)
        if writer is not None:
            writer.wait()

    def _after_step(
        self, batch: Batch, writer: CheckpointWriter | None, reporter: Reporter | None, *, pausing: bool = False
    ) -> None:
        done = batch.step + 1
        epoch_done = done % self._loader.steps_per_epoch == 0
        metrics: dict[str, float] = {}
        if epoch_done and self._spec.validation_split:
            metrics = self._validate(batch.epoch, done, reporter)
        every = self._spec.checkpoint_every_steps
        if writer is not None and (pausing or epoch_done or (every and done % every == 0)):
            writer.save(self._content(done, metrics), self._model, self._optimizer)

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        cache = self._row_cache(self._spec.validation_split)
        cache.touched = self._pulse.tick
        # What is measured is what is saved, and rank 0 saves.
        self._ranks.share_buffers(self._model)
        loss, accuracy, rows = evaluate(self._model, cache, self._preprocessing, self._ranks)
        if reporter:
            reporter.tell(EventKind.VALIDATED, step=step, epoch=epoch, loss=loss, accuracy=accuracy, row_count=rows)
        return {"validation_loss": loss, "validation_accuracy": accuracy}

    def _resume(self, reporter: Reporter | None) -> int:
        """Restores the newest good checkpoint, which rank 0 chooses for all. Returns the first step to do."""
        chosen: dict[str, Any] | None = None
        if reporter:
            entry = patient(lambda: self._newest_good(reporter), "the newest checkpoint")
            chosen = as_message(entry)
            reporter.tell(
                EventKind.ATTEMPT_STARTED,
                num_workers=self._ranks.world_size,
                step=entry.step if entry else 0,
                checkpoint=entry.name if entry else "",
            )
        chosen = self._ranks.share(chosen)
        if chosen is None:
            return 0
        entry = CheckpointEntry(**chosen)
        state = self._model, self._optimizer, self._ranks.device
        patient(lambda: restore(self._store, entry, *state), "the checkpoint to resume from")
        logger.info("resuming from %s at step %d", entry.name, entry.step)
        return entry.step

    def _newest_good(self, reporter: Reporter) -> CheckpointEntry | None:
        entries = self._registry.fence(self._config.attempt)
        return newest_good(self._store, entries, lambda text: reporter.tell(EventKind.WARNING, text=text))

    def _stop_if_asked(self, stop_reason: int) -> None:
        """Every rank has the same sum, so all end after the same step."""
        if stop_reason == GO_ON:
            return
        raise Stopped(WHY_STOPPED[stop_reason])

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
            model=self._spec.model,
            ingested=ingested_columns(self._version),
            transforms=[*self._version.manifest.transforms, self._preprocessing.config],
            input_column=self._spec.input_column,
        )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._spec.optimizer
        kind = getattr(torch.optim, optimizer.name)
        built: torch.optim.Optimizer = kind(self._model.parameters(), lr=optimizer.learning_rate, **optimizer.kwargs)
        return built

    def _row_cache(self, split: str) -> RowCache:
        spec = self._spec
        reader = VersionReader(self._store, self._version)
        columns = self._preprocessing.columns
        return RowCache(reader, split, columns, spec.label_column, spec.model.num_classes, CACHE_BYTES)

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

    def _example(self) -> torch.Tensor:
        return torch.zeros((2, *self._preprocessing.output.shape), device=self._ranks.device)
