"""What learns on one rank: the model, its loss, optimizer and schedule, and one step of them.

K = outputs of the model, W = world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.models.building import own_method
from shared.models.loaded import scale_target, undo_scaling
from shared.transforms import TensorSpec
from train_service.domain.order import loss_scale
from train_service.domain.spec import FLOAT16, FSDP, TrainingSpec, learning_rate
from train_service.learning.base_learner import BaseLearner, by_compiler, compile_failed
from train_service.learning.device_settings import full_float32
from train_service.learning.dry_run_step import TrialStep
from train_service.learning.evaluation import evaluate
from train_service.learning.host_copy import HostCopy
from train_service.learning.losses import build_loss
from train_service.learning.metrics import MAX_SUMS_OF_A_STEP, Metrics
from train_service.learning.optimizers import build_optimizer, build_scheduler
from train_service.learning.ranks import Ranks, gradients_kept_local, settle_buckets
from train_service.learning.sharding import put_optimizer_state, whole_optimizer_state
from train_service.learning.sharding_units import units_of
from train_service.learning.step_parts import StepPart, diverged, parts_of
from train_service.learning.training_steps import build_training_step
from train_service.loading.loader import Batch
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.rows import RowCache


class Learner(BaseLearner):
    """Of a model whose step is ours: it is called, its loss is taken, one optimizer steps."""

    def __init__(
        self, spec: TrainingSpec, ranks: Ranks, model_input: TensorSpec, steps_per_epoch: int, total_steps: int
    ) -> None:
        """`model_input` is one row as the model takes it. Draws the first weights from the specification's seed."""
        super().__init__(spec, ranks, steps_per_epoch, total_steps)
        sharded = spec.placement.parallel == FSDP and ranks.world_size > 1
        units = units_of(spec.model, model_input.shape) if sharded else None
        self.model = self._built()
        if sharded:
            # Before the optimizer, which must hold the shards.
            ranks.wrap(self.model, FSDP, units=units)
        self._wrapped = self.model
        self._loss = build_loss(spec.loss, self.model)
        self._training_step = build_training_step(spec.training_step)
        self._own_metrics = own_method(self.model, "metrics") if spec.model.is_own else None
        self._metrics = Metrics(spec, ranks.device, max_sums=MAX_SUMS_OF_A_STEP, own=self._own_metrics)
        self._optimizer = build_optimizer(spec.optimizer, self.model, fused=_may_be_fused(spec))
        self._scheduler = build_scheduler(spec.optimizer, self._optimizer, total_steps)
        self._optimizer.register_step_post_hook(lambda *_: self._note_update())
        self._trial = TrialStep(spec, model_input.shape, self.model, self._training_step, self._loss, ranks.device)
        wraps = ranks.world_size > 1 and spec.placement.parallel != FSDP
        self._some_unused = wraps and self._trial.leaves_some_unused(ranks, self._autocast)

    def prepare(self) -> None:
        """Wraps the model for its ranks, compiles it, and takes throw-away passes, so that the first real step is like
        all others. Raises `FailedPrecondition` where it cannot be compiled."""
        if self._spec.compile:
            self.model.compile()
        if self._spec.placement.parallel != FSDP:
            self._wrapped = self._ranks.wrap(self.model, some_unused=self._some_unused)
        self._wrapped.train()
        if self._wrapped is self.model and not self._spec.compile:
            return
        try:
            with self._autocast():
                settle_buckets(self._wrapped, self.model, self._trial.loss_of)
        except Exception as error:
            if not self._spec.compile or not by_compiler(error):
                raise
            raise compile_failed(error) from error

    def step(self, batch: Batch) -> list[float]:
        """One optimiser step. Returns this rank's sums, to be added over ranks and steps: loss, rows, and metrics', of
        which the first is for a classifier the number of right answers.

        Raises `FailedPrecondition`, before anything is changed, where the loss is not finite.
        """
        self._seed_step(batch.step)
        if not self.model.training:  # after a validation; it walks through all modules
            self._wrapped.train()
        self._optimizer.zero_grad(set_to_none=True)
        parts = parts_of(batch, self._spec, self._ranks.world_size, self._ranks.device)
        loss, metrics = 0.0, torch.zeros(self._metrics.width, dtype=torch.float64)
        for number, part in enumerate(parts, start=1):
            with gradients_kept_local(self._wrapped, number < len(parts)):
                part_loss, sums = self._backward(batch, part)
            loss += part_loss
            metrics += sums
        self._update(batch.step)
        return [loss, float(len(batch.row_ids)), *metrics.tolist()]

    def describe(self, sums: Sequence[float]) -> dict[str, float]:
        """`loss`, the mean over rows, and the metrics of what steps returned, added up."""
        loss, rows, *metrics = sums
        return {"loss": loss / rows if rows else math.nan, **self._metrics.values(metrics)}

    def evaluate(self, cache: RowCache, preprocessing: Preprocessing) -> tuple[dict[str, float], int]:
        """`validation_loss` and `validation_` of each metric, over a whole split on every rank, and its rows.

        In float32 whatever the precision, as the model is served; the metrics in the target's own unit, as it is
        served, too, and the loss in that of the scaled target.
        """
        # What is measured is what is saved, and rank 0 saves.
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

    def state(self, touched: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """What, besides the weights, goes on where it was: not a copy. With FSDP every rank must call it. `touched` is
        called with each tensor that is gathered."""
        parallel = self._spec.placement.parallel
        state: dict[str, Any] = {"optimizer": whole_optimizer_state(self.model, self._optimizer, parallel, touched)}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        if self._scaler.is_enabled():
            state["scaler"] = self._scaler.state_dict()
            state["skipped_steps"] = self._skipped_steps
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """What `state` gave, whole, on every rank."""
        put_optimizer_state(self.model, self._optimizer, state["optimizer"], self._spec.placement.parallel)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
            self._skipped_steps = int(state.get("skipped_steps", 0))  # earlier releases did not count them

    def _backward(self, batch: Batch, part: StepPart) -> tuple[float, Tensor]:
        """Adds the part's gradients. Returns its summed loss, scaled as the target is, and the sums of its metrics.

        A GPU gets the backward pass before the host looks at the loss, so that it is not idle meanwhile. With others a
        rank looks first: their gradients are not to have this one's part."""
        labels = scale_target(self.target_scaling, part.labels)
        with self._autocast():
            loss_sum, outputs = self._training_step(self._wrapped, part.inputs, labels, self._loss)
        outputs = outputs.detach()
        sums = self._metrics.sums(undo_scaling(self.target_scaling, outputs), part.labels)
        found = HostCopy(torch.cat([loss_sum.detach().reshape(1).double(), sums.to(loss_sum.device)]))
        if self._ranks.world_size > 1:
            self._check(found.values(), batch, part, outputs, labels)
        scaled = loss_sum * loss_scale(self._ranks.world_size, batch.step_rows)
        self._scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        loss = self._check(found.values(), batch, part, outputs, labels)
        return loss, found.values()[1:]

    def _check(self, found: Tensor, batch: Batch, part: StepPart, outputs: Tensor, labels: Tensor) -> float:
        loss = float(found[0])
        if not math.isfinite(loss):
            raise diverged(batch, part, self._loss(outputs, labels), loss, self._ranks.rank)
        return loss

    def _update(self, step: int) -> None:
        spec = self._spec
        if self._scheduler is None:
            rate = learning_rate(spec.optimizer.schedule, spec.optimizer.learning_rate, step, self._total_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        # Noted before one of torch's schedules sets that of the next step.
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
    """Not for shards: on one worker the same run has none, and goes on with the same optimizer. Nor in float16: the
    scaler leaves it to a fused kernel to skip what overflows, which the other, that a run may have begun with, refuses.
    """
    return spec.placement.parallel != FSDP and spec.precision != FLOAT16
