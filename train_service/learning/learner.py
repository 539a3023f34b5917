"""The learning of one rank: model, loss, optimizer, schedule, training step and validation.

`Learner.step` seeds the generators by the step's number, cuts the batch into micro-batches, and runs forward and
backward for each. There are several if the job accumulates gradients. The last backward averages the gradients over
ranks. Then `_update` clips them and steps the optimizer and the schedule. A loss that is not finite raises before any
weight is changed. With float16, a step whose gradients are not finite changes no weight and counts as skipped.

A micro-batch is computed by `_default_training_step`, or by a training step that an installed package registers.

An entry point of `millrace.training_steps` is a callable with this protocol:

    step(model, inputs, labels, loss) -> (the loss of each row, (rows,), or their mean, a scalar; the model's outputs)

- `model` is the model that is trained. Call it at least once, so that its gradients are averaged over ranks.
- `inputs` are float32 (rows, *shape), or a dict of tensors for a model of several inputs. `labels` are int64 (rows,),
  or float32 (rows, K) for regression. Both hold one rank's rows, or a micro-batch of them if the job accumulates
  gradients. They are on the job's device, under autocast if the job asks for it.
- `loss` is the job's own loss: `loss(outputs, labels)` returns the loss of each row.
- The step must not call `backward`, step an optimizer or communicate with other ranks. Gradients are weighted so that
  their mean over ranks is the mean over the rows of the whole step. A scalar is taken as the mean over these rows.
- Random numbers come from torch's generator, which is seeded by the position of the step, so that a resumed run draws
  the same numbers. The step keeps no state of its own between calls.
- Metrics are measured on the outputs, (rows, K). Validation calls only the model and the loss.

K = outputs of the model, W = world size.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import FailedPrecondition, InvalidArgument, first_line, invalid_field
from shared.model_spec import TargetScaling
from shared.models import build_model, own_method
from shared.models.inputs import Inputs, part_of, zero_inputs
from shared.models.loaded import scale_target, undo_scaling
from shared.settings import TRAINING_STEPS, load_installed
from shared.transforms.records import ModelInput, RowShape
from train_service.domain.order import count_micro_batches, loss_scale, noise_seed
from train_service.domain.spec import BFLOAT16, FLOAT16, FSDP, REGRESSION, TrainingSpec, learning_rate, should_stop
from train_service.learning.losses import Loss, build_loss, total_of
from train_service.learning.metrics import MAX_SUMS_OF_A_STEP, Metrics
from train_service.learning.optimizers import build_optimizer, build_scheduler
from train_service.learning.ranks import (
    DeviceTransform,
    Ranks,
    discarding_gradients,
    full_float32,
    gradients_kept_local,
    inputs_to_device,
    on_device,
    to_device,
    warm_up_ddp_buckets,
)
from train_service.learning.sharding import (
    local_rows,
    put_optimizer_state,
    put_weights,
    sharded,
    sharded_optimizer_state,
    start_sharded,
    units_of,
    whole_optimizer_state,
    whole_weights,
)
from train_service.loading.loader import Batch, RowCache
from train_service.loading.preprocessing import Array, Preprocessing, Rows

logger = logging.getLogger(__name__)

# --- Common to all learners ---

AUTOCAST = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


class BaseLearner(ABC):
    """One rank's part of the learning.

    Build the learner, `load` the saved state if there is any, call `prepare`, then `step`. Every rank makes the same
    calls in the same order, because most of them are collective.
    """

    model: nn.Module

    def __init__(self, spec: TrainingSpec, ranks: Ranks, steps_per_epoch: int, total_steps: int) -> None:
        self._spec = spec
        self._ranks = ranks
        # A user's own model may draw from generators that Millrace's own models do not use.
        self._seeds_all_kinds = spec.model.is_own
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=spec.precision == FLOAT16)
        # With float16 the scaler skips the optimizer in a step whose gradients overflow.
        self._stepped = True
        self._skipped_steps = 0
        self._learning_rate = math.nan
        # Set for a regression with a scaled target before the first step. None: the model learns the target unscaled.
        self.target_scaling: TargetScaling | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the model on all ranks before the first step.

        Raises `FailedPrecondition` if the model cannot be compiled.
        """

    @abstractmethod
    def step(self, batch: Batch) -> list[float]:
        """Take one optimizer step.

        Return this rank's sums, which are added over ranks and steps: the loss, the rows, and the sums of the metrics.
        For a classifier the first sum of the metrics is the number of right answers.

        Raises `FailedPrecondition` if the loss is not finite, before any weight or the optimizer is changed.
        """

    @abstractmethod
    def describe(self, sums: Sequence[float]) -> dict[str, float]:
        """Return `loss`, the mean over rows, and the metrics, from added-up results of `step`."""

    @abstractmethod
    def evaluate(self, cache: RowCache, preprocessing: Preprocessing) -> tuple[dict[str, float], int]:
        """Validate on a whole split, on every rank.

        Return the measurements by name, and the number of rows; both are empty if the learner does not validate.
        """

    def end_epoch(self, metrics: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Finish an epoch and return additional metrics.

        It is called after the epoch's last step and validation, which measured `metrics`, and before the checkpoint.
        Only the metrics that rank 0 returns are used.
        """
        return {}

    @abstractmethod
    def state(self, note_progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return the state to resume from, without the weights.

        The state is not a copy. With FSDP every rank must call this. `note_progress` is called with each tensor that is
        gathered.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, unsharded, on every rank."""

    @property
    def shards(self) -> tuple[nn.Module, torch.optim.Optimizer] | None:
        """The model and its optimizer, if both lie in shards that can be read and written by themselves."""
        return None

    def sharded_state(self) -> dict[str, Any]:
        """Return what `state` does, with the sharded tensors themselves. With FSDP every rank must call this."""
        raise NotImplementedError

    def check_shards(self, note_progress: Callable[[], None] = lambda: None) -> None:
        """Raise `FailedPrecondition` on every rank if a weight on any rank is not finite."""
        bad = ""
        for name, tensor in self.model.state_dict().items():
            note_progress()
            own = local_rows(tensor)[1]
            if not own.sum().isfinite() and not own.isfinite().all():
                bad = name
                break
        if self._ranks.add([float(bool(bad))]).result()[0]:
            raise _not_finite(next(one for one in self._ranks.share_all(bad) if one))

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned besides the optimizer's state, which is loaded already."""
        raise NotImplementedError

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any] | None = None) -> None:
        """Load unsharded weights, and the state if this resumes a run.

        Call it on every rank, before `prepare`.
        """
        put_weights(self.model, weights)
        if state is not None:
            self.load_state(state)

    def weights(self, note_progress: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Return unsharded weights and buffers on rank 0, and nothing on other ranks.

        The weights are not a copy. With FSDP every rank must call this. `note_progress` is called with each tensor, as
        a sign of progress.

        Raises `FailedPrecondition` if a weight is not finite, so that such weights never become the newest good
        checkpoint.
        """
        if self._ranks.rank != 0 and self._spec.placement.parallel != FSDP:
            return {}
        weights = whole_weights(self.model, note_progress)
        for name, tensor in weights.items():
            note_progress()
            # The sum is faster to check, but it may overflow; only then every element is checked.
            if not tensor.sum().isfinite() and not tensor.isfinite().all():
                raise _not_finite(name)
        return weights

    def should_stop(self, history: Sequence[tuple[int, float]]) -> bool:
        """Return whether early stopping ends the run.

        `history` holds (epoch, value of `spec.early_stopping.metric`) for each epoch so far.
        """
        return should_stop(self._spec.early_stopping, history)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step. NaN before the first step."""
        return self._learning_rate

    @property
    def skipped(self) -> bool:
        """Whether the loss scaler skipped the last step, on all ranks.

        A skipped step changes no weight. Steps are skipped with FLOAT16 only.
        """
        return not self._stepped

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps of the run so far, earlier attempts included."""
        return self._skipped_steps

    def _built(self) -> nn.Module:
        """Build the model on this rank's device.

        The seed draws the initial weights, so they are the same on all ranks.
        """
        seed_generators(self._spec.seed, self._ranks.device, all_kinds=self._seeds_all_kinds)
        model = build_model(self._spec.model, "spec.model").to(self._ranks.device)
        return model.to(memory_format=torch.channels_last) if self._spec.acceleration.channels_last else model

    def _seed_step(self, step: int) -> None:
        """Seed all noise of the step by its position, independent of what ran before."""
        seed = noise_seed(self._spec.seed, step, self._ranks.rank)
        seed_generators(seed, self._ranks.device, all_kinds=self._seeds_all_kinds)

    def _rows_per_call(self) -> int:
        """Return how many rows validation computes in one call.

        It is at most the rows that a training step computes at once: the memory suffices for these, and a call takes no
        longer than a step.
        """
        parts = max(self._ranks.world_size, self._spec.max_ranks) * self._spec.accumulation_steps
        return max(1, min(ROWS_PER_CALL, self._spec.global_batch_size // parts))

    def _note_update(self) -> None:
        self._stepped = True

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._spec.precision not in AUTOCAST:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, AUTOCAST[self._spec.precision])


def seed_generators(seed: int, device: torch.device, *, all_kinds: bool = False) -> None:
    """Seed the generators of the host and of the device.

    With `all_kinds` NumPy's and Python's generators are seeded, too, because users' code may draw from them. On a CPU
    `torch.manual_seed` is avoided: for each kind of device that this process does not use it records its caller, which
    takes a millisecond.
    """
    if all_kinds:
        np.random.seed(seed % 2**32)
        random.seed(seed)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _not_finite(name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} of the model has values that are not finite; start a new job with a lower learning rate "
        "or max_gradient_norm, whose initial_checkpoint may be the last checkpoint of this one",
        reason="NON_FINITE_WEIGHTS",
        metadata={"tensor": name},
    )


def by_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def compile_failed(error: BaseException) -> FailedPrecondition:
    return FailedPrecondition(
        f"spec.compile: torch.compile does not work for this model on this node: {first_line(error)}; leave it out, or "
        "install what it misses",
        reason="COMPILE_FAILED",
        fields=[("spec.compile", first_line(error))],
    )


# --- The learner ---


class Learner(BaseLearner):
    """Learner for a model that is called once per micro-batch, with a loss and one optimizer."""

    def __init__(
        self, spec: TrainingSpec, ranks: Ranks, model_input: ModelInput, steps_per_epoch: int, total_steps: int
    ) -> None:
        """Build the model with the initial weights that the spec's seed draws.

        `model_input` describes one row of the model's input.
        """
        super().__init__(spec, ranks, steps_per_epoch, total_steps)
        # Shard before the optimizer is built, because it must hold the shards.
        if spec.placement.parallel == FSDP and ranks.world_size > 1:
            self.model = self._built_sharded(units_of(spec.model, model_input.shape))
        else:
            self.model = self._built()
        self._wrapped = self.model
        self._loss = build_loss(spec.loss, self.model)
        self._training_step = build_training_step(spec.training_step)
        self._own_metrics = own_method(self.model, "metrics") if spec.model.is_own else None
        self._metrics = Metrics(spec, ranks.device, max_sums=MAX_SUMS_OF_A_STEP, own=self._own_metrics)
        self._optimizer = build_optimizer(spec.optimizer, self.model, fused=_may_be_fused(spec))
        self._scheduler = build_scheduler(spec.optimizer, self._optimizer, total_steps)
        self._optimizer.register_step_post_hook(lambda *_: self._note_update())
        self._dry_run = DryRunStep(spec, model_input.shape, self.model, self._training_step, self._loss, ranks.device)
        wraps = ranks.world_size > 1 and spec.placement.parallel != FSDP
        self._some_unused = wraps and self._dry_run.leaves_some_unused(ranks, self._autocast)

    def _built_sharded(self, units: Sequence[str]) -> nn.Module:
        """Build the model of which this rank has a shard, with the same initial weights as `_built`."""
        spec, ranks = self._spec, self._ranks
        if spec.acceleration.channels_last:
            return ranks.wrap(self._built(), FSDP, units=units)
        return start_sharded(
            lambda: build_model(spec.model, "spec.model"),
            lambda: seed_generators(spec.seed, ranks.device, all_kinds=spec.model.is_own),
            ranks.device,
            ranks.world_size,
            units,
        )

    def prepare(self) -> None:
        """Wrap and compile the model and take warm-up passes.

        After that the first real step is like all others.

        Raises `FailedPrecondition` if the model cannot be compiled.
        """
        if self._spec.compile:
            self.model.compile()
        if self._spec.placement.parallel != FSDP:
            self._wrapped = self._ranks.wrap(self.model, some_unused=self._some_unused)
        self._wrapped.train()
        if self._wrapped is self.model and not self._spec.compile:
            return
        try:
            with self._autocast():
                warm_up_ddp_buckets(self._wrapped, self.model, self._dry_run.loss_of)
        except Exception as error:
            if not self._spec.compile or not by_compiler(error):
                raise
            raise compile_failed(error) from error

    def step(self, batch: Batch) -> list[float]:
        """Take one optimizer step.

        Return this rank's sums, which are added over ranks and steps: the loss, the rows, and the sums of the metrics.
        For a classifier the first sum of the metrics is the number of right answers.

        Raises `FailedPrecondition` if the loss is not finite, before any weight or the optimizer is changed.
        """
        self._seed_step(batch.step)
        if not self.model.training:  # after a validation; train() visits all modules
            self._wrapped.train()
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = split_into_micro_batches(batch, self._spec, self._ranks.world_size, self._ranks.device)
        loss, metrics = 0.0, torch.zeros(self._metrics.width, dtype=torch.float64)
        # The wrapped model averages gradients over ranks in the backward pass of the last micro-batch. The
        # micro-batches before only add to their own rank's gradients.
        for number, micro_batch in enumerate(micro_batches, start=1):
            with gradients_kept_local(self._wrapped, number < len(micro_batches)):
                micro_batch_loss, sums = self._forward_backward(batch, micro_batch)
            loss += micro_batch_loss
            metrics += sums
        self._update(batch.step)
        return [loss, float(len(batch.row_ids)), *metrics.tolist()]

    def describe(self, sums: Sequence[float]) -> dict[str, float]:
        """Return `loss`, the mean over rows, and the metrics, from added-up results of `step`."""
        loss, rows, *metrics = sums
        return {"loss": loss / rows if rows else math.nan, **self._metrics.values(metrics)}

    def evaluate(self, cache: RowCache, preprocessing: Preprocessing) -> tuple[dict[str, float], int]:
        """Return `validation_loss`, `validation_` and each metric, and the rows, over a whole split on every rank.

        Validation computes in float32 whatever the precision, as the model is served. The metrics are in the target's
        own unit, as it is served; the loss is that of the scaled target.
        """
        # Rank 0 saves the model, so all ranks validate with its buffers.
        self._ranks.share_buffers(self.model)
        metrics = Metrics(self._spec, self._ranks.device, own=self._own_metrics)
        with full_float32():
            loss, measured, rows = evaluate(
                self.model,
                self._loss,
                metrics,
                cache,
                preprocessing,
                self._ranks,
                self._rows_per_call(),
                self.target_scaling,
            )
        return {"validation_loss": loss, **{f"validation_{name}": one for name, one in measured.items()}}, rows

    def state(self, note_progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return the state to resume from, without the weights.

        The state is not a copy. With FSDP every rank must call this. `note_progress` is called with each tensor that is
        gathered.
        """
        parallel = self._spec.placement.parallel
        return self._with_rest(whole_optimizer_state(self.model, self._optimizer, parallel, note_progress))

    def sharded_state(self) -> dict[str, Any]:
        return self._with_rest(sharded_optimizer_state(self.model, self._optimizer))

    def _with_rest(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": optimizer}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        if self._scaler.is_enabled():
            state["scaler"] = self._scaler.state_dict()
            state["skipped_steps"] = self._skipped_steps
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, unsharded, on every rank."""
        put_optimizer_state(self.model, self._optimizer, state["optimizer"], self._spec.placement.parallel)
        self.load_rest(state)

    @property
    def shards(self) -> tuple[nn.Module, torch.optim.Optimizer] | None:
        return (self.model, self._optimizer) if sharded(self.model) else None

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load the state of schedule and scaler."""
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
            self._skipped_steps = int(state.get("skipped_steps", 0))  # earlier releases did not count them

    def _forward_backward(self, batch: Batch, micro_batch: MicroBatch) -> tuple[float, Tensor]:
        """Add the micro-batch's gradients, and return its summed loss and the sums of its metrics.

        The loss is that of the scaled target. On one rank the backward pass starts before the host reads the loss, so
        that a GPU is not idle meanwhile. With several ranks the loss is checked first, so that a loss that is not
        finite never enters the other ranks' gradients.
        """
        labels = scale_target(self.target_scaling, micro_batch.labels)
        with self._autocast():
            loss_sum, outputs = self._training_step(self._wrapped, micro_batch.inputs, labels, self._loss)
        outputs = outputs.detach()
        sums = self._metrics.sums(undo_scaling(self.target_scaling, outputs), micro_batch.labels)
        found = HostCopy(torch.cat([loss_sum.detach().reshape(1).double(), sums.to(loss_sum.device)]))
        if self._ranks.world_size > 1:
            self._check(found.values(), batch, micro_batch, outputs, labels)
        scaled = loss_sum * loss_scale(self._ranks.world_size, batch.step_rows)
        self._scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        loss = self._check(found.values(), batch, micro_batch, outputs, labels)
        return loss, found.values()[1:]

    def _check(self, found: Tensor, batch: Batch, micro_batch: MicroBatch, outputs: Tensor, labels: Tensor) -> float:
        loss = float(found[0])
        if not math.isfinite(loss):
            raise diverged(batch, micro_batch, self._loss(outputs, labels), loss, self._ranks.rank)
        return loss

    def _update(self, step: int) -> None:
        spec = self._spec
        if self._scheduler is None:
            rate = learning_rate(spec.optimizer.schedule, spec.optimizer.learning_rate, step, self._total_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        # Read the rate before a schedule of torch's sets that of the next step.
        self._learning_rate = float(self._optimizer.param_groups[0]["lr"])
        if spec.max_gradient_norm:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), spec.max_gradient_norm)
        self._stepped = False
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._skipped_steps += int(self.skipped)
        if self._scheduler is not None:
            self._scheduler.step()


def _may_be_fused(spec: TrainingSpec) -> bool:
    """Return whether the optimizer may use its fused kernel.

    FSDP: no. The same run on one worker has no shards, and must continue with the same optimizer. FLOAT16: no. A fused
    kernel itself skips gradients that overflow, and a run that began with the optimizer that is not fused could not
    continue so.
    """
    return spec.placement.parallel != FSDP and spec.precision != FLOAT16


# --- Micro-batches ---

MAX_REPORTED_ROW_IDS = 20


@dataclass(frozen=True)
class MicroBatch:
    """Some of a rank's rows in a step, on the job's device.

    `inputs` (rows, *shape), or a dict of several, `labels` (rows,) or (rows, K) for regression, `row_ids` (rows,).
    """

    inputs: Inputs
    labels: Tensor
    row_ids: Array


def split_into_micro_batches(
    batch: Batch, spec: TrainingSpec, world_size: int, device: torch.device, *, whole: bool = False
) -> list[MicroBatch]:
    """Cut a batch into as many micro-batches as `count_micro_batches` returns, the same on all ranks.

    So micro-batches that fit a device with all workers also fit it with fewer workers. `whole` makes one of all rows.
    """
    sizes = (batch.step_rows, spec.lanes, world_size, spec.max_ranks, spec.accumulation_steps)
    count = 1 if whole else count_micro_batches(*sizes)
    inputs, labels = on_device(batch, spec, device)
    rows = len(batch.row_ids)
    bounds = [rows * number // count for number in range(count + 1)]
    return [
        MicroBatch(part_of(inputs, begin, end), labels[begin:end], batch.row_ids[begin:end])
        for begin, end in itertools.pairwise(bounds)
    ]


def diverged(batch: Batch, micro_batch: MicroBatch, losses: Tensor, loss: float, rank: int) -> FailedPrecondition:
    """Return the error for a micro-batch whose `loss` is not finite.

    `losses` is what the loss function returned for the micro-batch. The error lists the rows whose own loss is not
    finite. If no row can be singled out, it lists the micro-batch's first rows.
    """
    row_ids = micro_batch.row_ids
    if losses.shape == (len(row_ids),):
        bad = ~np.isfinite(losses.detach().float().cpu().numpy())
        row_ids = row_ids[bad] if bad.any() else row_ids
    shown_ids = ", ".join(map(str, row_ids[:MAX_REPORTED_ROW_IDS].tolist()))
    return FailedPrecondition(
        f"the loss of step {batch.step} (epoch {batch.epoch}) is {loss} on rank {rank}, with the rows "
        f"{shown_ids}; look at "
        "these rows, or start a new job with a lower learning rate or max_gradient_norm",
        reason="NON_FINITE_LOSS",
        metadata={"step": str(batch.step), "epoch": str(batch.epoch), "rank": str(rank), "row_ids": shown_ids},
    )


# --- Training steps ---

TRAINING_STEP_FIELD = "spec.training_step"
# Returns the summed loss, a scalar, and the outputs.
TrainingStep = Callable[[nn.Module, Inputs, Tensor, Loss], tuple[Tensor, Tensor]]


def build_training_step(name: str) -> TrainingStep:
    """Return the training step of that name.

    Raises `InvalidArgument` that names `spec.training_step`.
    """
    if not name:
        return _default_training_step
    installed = load_installed(TRAINING_STEPS, name, TRAINING_STEP_FIELD, "")
    if not callable(installed):
        raise invalid_field(TRAINING_STEP_FIELD, name, f"it is a {type(installed).__name__}, which cannot be called")

    def step(model: nn.Module, inputs: Inputs, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        given = installed(model, inputs, labels, loss)
        if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(one, Tensor) for one in given):
            raise InvalidArgument(
                f"the training step {name!r} must return two tensors, the loss and the model's outputs",
                reason="BAD_TRAINING_STEP",
            )
        return total_of(given[0], len(labels)), given[1]

    return step


def _default_training_step(model: nn.Module, inputs: Inputs, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    outputs = model(inputs)
    return loss.total(outputs, labels), outputs


# --- Copies to the host ---


class HostCopy:
    """Asynchronous host copy of a tensor.

    The copy holds the value that the tensor has when all work queued on the device so far is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def values(self) -> Tensor:
        """Return the copy in host memory.

        This waits for the copy, but not for work that was queued after it.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


# --- Validation ---

ROWS_PER_CALL = 256
# Rows are read ahead for this many calls.
AHEAD_CALLS = 8
# Rows are prepared in portions that take about this long.
SIGN_EVERY_S = 1.0


class _Preparing:
    """Preparation of rows in portions, with a sign of life after each.

    Rows that are prepared quickly are taken all at once. Where Ray's tasks prepare the training rows, this thread alone
    may take longer for the rows of one call than a rank may go without a sign of life.
    """

    def __init__(self, preprocessing: Preprocessing, note_progress: Callable[[], None]) -> None:
        self._preprocessing = preprocessing
        self._note_progress = note_progress
        self._rows_at_once = 1

    def __call__(self, rows: Rows) -> Array:
        """Return `Preprocessing.for_device` of these rows."""
        parts = []
        begin, end = 0, len(rows.row_ids)
        while begin < end:
            few = min(end, begin + self._rows_at_once)
            began = time.monotonic()
            parts.append(self._preprocessing.for_device(rows.slice(begin, few)))
            self._note_progress()
            is_quick = time.monotonic() - began < SIGN_EVERY_S
            self._rows_at_once = min(self._rows_at_once * 2, ROWS_PER_CALL) if is_quick else max(1, (few - begin) // 2)
            begin = few
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def evaluate(
    model: nn.Module,
    loss: Loss,
    metrics: Metrics,
    cache: RowCache,
    preprocessing: Preprocessing,
    ranks: Ranks,
    rows_per_call: int = ROWS_PER_CALL,
    target_scaling: TargetScaling | None = None,
) -> tuple[float, dict[str, float], int]:
    """Return the mean loss, the metrics and the number of rows of the whole split, on every rank.

    Augmentations are off. The loss is that of the scaled target, the metrics are in the target's own unit.
    """
    sums = torch.zeros(2 + metrics.width, dtype=torch.float64)
    model.eval()
    numbers = metrics.task == REGRESSION
    with torch.no_grad():
        for inputs, labels, is_padding in validation_batches(
            cache, preprocessing, ranks, rows_per_call, numbers=numbers
        ):
            outputs = model(inputs)
            if not is_padding:
                total = loss.total(outputs, scale_target(target_scaling, labels)).item()
                values = undo_scaling(target_scaling, outputs)
                sums += torch.cat(
                    [torch.tensor([total, len(labels)], dtype=torch.float64), metrics.sums(values, labels).cpu()]
                )
    sums = ranks.add(sums).summed()
    total, seen = sums[:2].tolist()
    return total / seen, metrics.values(sums[2:]), int(seen)


def validation_batches(
    cache: RowCache, preprocessing: Preprocessing, ranks: Ranks, rows_per_call: int, *, numbers: bool
) -> Iterator[tuple[Inputs, Tensor, bool]]:
    """Yield a rank's share of a split: inputs (rows, *shape) or a dict of several, labels, and whether they are
    padding.

    Labels are (rows,), or (rows, K) if `numbers`. Inputs and labels are on the rank's device. Every rank yields the
    same number of batches, because calls of a sharded model are collective: a rank that has no rows left yields
    padding, which does not count.
    """
    rows = cache.row_count
    # Each rank takes a contiguous range, so that it reads whole row groups.
    first, end = (rows * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    max_rows = math.ceil(rows / ranks.world_size)
    calls = math.ceil(max_rows / rows_per_call)
    prepare, on_device = _Preparing(preprocessing, cache.note_progress), DeviceTransform(preprocessing.device_steps)
    for start in range(first, first + calls * rows_per_call, rows_per_call):
        positions = np.arange(start, min(start + rows_per_call, end), dtype=np.int64)
        cache.read_ahead(np.arange(start, min(start + AHEAD_CALLS * rows_per_call, end), dtype=np.int64))
        batch = cache.rows(positions if len(positions) else np.asarray([max(0, min(start, rows) - 1)], np.int64))
        labels = to_device(batch.labels, ranks.device)
        if numbers:
            labels = labels.reshape(len(labels), -1)
        inputs = inputs_to_device(prepare(batch), ranks.device)
        yield on_device(inputs) if isinstance(inputs, Tensor) else inputs, labels, not len(positions)


# --- Dry run ---

DRY_RUN_ROWS = 2


class DryRunStep:
    """Dry run of the job's training step on rows of zeros, with labels of 0.

    Run it on the initial weights that the seed draws, before others are loaded. Then every attempt finds the same
    result, and adds gradients in the same order.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        shape: RowShape,
        model: nn.Module,
        step: TrainingStep,
        loss: Loss,
        device: torch.device,
    ) -> None:
        """Prepare the dry run. `shape` is that of one row of the model's input."""
        self._numbers = spec.task == REGRESSION
        self._labels_shape = (DRY_RUN_ROWS, spec.model.num_classes) if self._numbers else (DRY_RUN_ROWS,)
        self._shape = shape
        self._device = device
        self._model = model
        self._step = step
        self._loss = loss
        self._works = False

    def leaves_some_unused(self, ranks: Ranks, autocast: Callable[[], AbstractContextManager[object]]) -> bool:
        """Return whether the step leaves a parameter without gradient, on any rank.

        Return False if the step fails on such rows.
        """
        unused = broken = 0
        self._model.train()
        try:
            with discarding_gradients(self._model):
                with autocast():
                    loss, _ = self._step(self._model, *self._rows(), self._loss)
                loss.backward()  # type: ignore[no-untyped-call]
                unused = sum(
                    parameter.requires_grad and parameter.grad is None for parameter in self._model.parameters()
                )
        except Exception as error:  # a user's own step may refuse rows like these; all ranks learn that below
            logger.info("the training step takes no %d rows of zeros: %s", DRY_RUN_ROWS, first_line(error))
            broken = 1
        all_unused, all_broken = ranks.add([float(unused), float(broken)]).result()
        self._works = not all_broken
        return self._works and all_unused > 0

    def loss_of(self, model: nn.Module) -> Tensor:
        """Return the loss of the training step, or the sum of the outputs if the step fails in the dry run.

        Both are scalars. A warm-up pass thus uses the same parameters as a real step, if the step works.
        """
        if self._works:
            return self._step(model, *self._rows(), self._loss)[0]
        total: Tensor = model(self._rows()[0]).sum()
        return total

    def _rows(self) -> tuple[Inputs, Tensor]:
        kind = next(self._model.parameters()).dtype
        inputs = zero_inputs(self._shape, DRY_RUN_ROWS, kind, self._device)
        labels_kind = kind if self._numbers else torch.int64
        return inputs, torch.zeros(self._labels_shape, dtype=labels_kind, device=self._device)
