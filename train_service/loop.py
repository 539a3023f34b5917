"""The training loop of one rank. Ray Train runs it on every worker of an attempt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

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
from train_service.checkpoint_clock import CheckpointClock
from train_service.domain.schedule import learning_rate
from train_service.domain.seeds import noise_seed
from train_service.domain.slices import loss_scale
from train_service.domain.spec import TrainingSpec
from train_service.evaluation import evaluate
from train_service.events import EventKind
from train_service.fine_tuning import load_initial
from train_service.loader import Batch, Loader, Plan
from train_service.preprocessing import Preprocessing
from train_service.progress import ProgressMeter
from train_service.ranks import PendingSum, Ranks, settle_buckets
from train_service.reporting import CANCEL, GO_ON, Reporter
from train_service.row_cache import RowCache
from train_service.snapshots import CheckpointWriter, as_message, newest_good, restore
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
        torch.manual_seed(self._spec.seed)
        self._model = build_model(self._spec.model).to(ranks.device)
        self._optimizer = self._build_optimizer()
        self._clock = CheckpointClock(self._spec.checkpoint_every_steps, self._spec.checkpoints.every_s)
        # Where the first weights came from: name and digest.
        self._initial = ("", "")
        # Folders of checkpoints that were found damaged when this attempt began.
        self._damaged: set[str] = set()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            reporter, writer = None, None
            if self._ranks.rank == 0:
                reporter = Reporter(self._store, self._config.job_name, self._config.attempt)
                stack.enter_context(reporter)
            first_step = self._resume(reporter)
            if reporter is not None:
                # Left first: a checkpoint under way is committed and told however the run ends.
                writer = stack.enter_context(self._writer(reporter))
            self._run(first_step, reporter, writer)

    def _run(self, first_step: int, reporter: Reporter | None, writer: CheckpointWriter | None) -> None:
        model = self._ranks.wrap(self._model)
        if model is not self._model:
            settle_buckets(model, self._model, self._example())
        meter = ProgressMeter(reporter, self._loader.total_steps, self._loader.steps_per_epoch)
        pending: PendingSum | None = None
        with contextlib.closing(self._loader.batches(first_step)) as batches:
            for batch in batches:
                local = self._step(model, batch)
                if pending is not None:
                    *sums, wish = pending.result()
                    self._clock.heard(wish)
                    self._stop_if_asked(meter.add(sums))
                # Taken up after the next step, so that no step waits for the sum.
                wishes = [float(reporter.stop_reason), self._clock.ask()] if reporter else [0.0, 0.0]
                pending = self._ranks.add([*local, *wishes])
                meter.done(batch)
                self._after_step(batch, writer, reporter)
        if pending is not None:
            meter.add(pending.result()[:-1])
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

    def _after_step(self, batch: Batch, writer: CheckpointWriter | None, reporter: Reporter | None) -> None:
        done = batch.step + 1
        epoch_done = done % self._loader.steps_per_epoch == 0
        metrics: dict[str, float] = {}
        if epoch_done and self._spec.validation_split:
            metrics = self._validate(batch.epoch, done, reporter)
        if epoch_done or self._clock.due(done):
            if writer is not None:
                final = done == self._loader.total_steps
                writer.save(self._content(done, metrics), self._model, self._optimizer.state_dict(), final=final)
            self._clock.taken()

    def _validate(self, epoch: int, step: int, reporter: Reporter | None) -> dict[str, float]:
        cache = self._row_cache(self._spec.validation_split)
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
            entries = self._registry.fence(self._config.attempt, self._spec.checkpoints.ranking)
            entry = newest_good(self._store, entries, _warning(reporter), self._damaged)
            chosen = as_message(entry)
            reporter.tell(
                EventKind.ATTEMPT_STARTED,
                num_workers=self._ranks.world_size,
                step=entry.step if entry else 0,
                checkpoint=entry.name if entry else "",
            )
        chosen = self._ranks.share(chosen)
        if chosen is None:
            if self._spec.initial_checkpoint:
                self._begin_from(self._spec.initial_checkpoint, reporter)
            return 0
        entry = CheckpointEntry(**chosen)
        restored = restore(self._store, entry, self._model)
        self._optimizer.load_state_dict(restored.state)
        self._initial = (restored.content.initial_checkpoint, restored.content.initial_checkpoint_sha256)
        logger.info("resuming from %s at step %d", entry.name, entry.step)
        return entry.step

    def _begin_from(self, name: str, reporter: Reporter | None) -> None:
        entry, fit = load_initial(self._store, name, self._model)
        self._initial = (entry.name, entry.manifest_sha256)
        if reporter and fit.left_out():
            reporter.tell(EventKind.WARNING, text=f"of {entry.name} not everything fits: {fit.left_out()}")

    def _stop_if_asked(self, stop_reason: int) -> None:
        """Every rank has the same sum, so all end after the same step."""
        if stop_reason == GO_ON:
            return
        raise Stopped("cancelled" if stop_reason == CANCEL else "a later attempt has taken over")

    def _writer(self, reporter: Reporter) -> CheckpointWriter:
        def told(entry: CheckpointEntry) -> None:
            reporter.tell(EventKind.CHECKPOINT_COMMITTED, **asdict(entry))

        return CheckpointWriter(
            self._store,
            self._registry,
            self._config.attempt,
            told,
            policy=self._spec.checkpoints,
            damaged=self._damaged,
            warn=_warning(reporter),
        )

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
            initial_checkpoint=self._initial[0],
            initial_checkpoint_sha256=self._initial[1],
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


def _warning(reporter: Reporter) -> Callable[[str], None]:
    return lambda text: reporter.tell(EventKind.WARNING, text=text)
