"""What learns on one rank: the model, its loss, optimizer and schedule, and one step of them.

K = outputs of the model, W = world size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import FailedPrecondition, first_line
from shared.models import build_model
from shared.models.own_model import own_method
from shared.models.scaled_target import scale_target, undo_scaling
from shared.target_scaling import TargetScaling
from shared.transforms import TensorSpec
from train_service.domain.early_stopping import should_stop
from train_service.domain.schedule import learning_rate
from train_service.domain.seeds import noise_seed
from train_service.domain.slices import loss_scale
from train_service.domain.spec import BFLOAT16, FLOAT16, FLOAT32, FSDP, TrainingSpec
from train_service.learning.evaluation import ROWS_PER_CALL, evaluate
from train_service.learning.losses import build_loss
from train_service.learning.metrics import MOST_SUMS_OF_A_STEP, Metrics
from train_service.learning.optimizers import build_optimizer, build_scheduler
from train_service.learning.ranks import Ranks, gradients_kept_local, settle_buckets
from train_service.learning.sharding import put_optimizer_state, put_weights, whole_optimizer_state, whole_weights
from train_service.learning.sharding_units import units_of
from train_service.learning.step_parts import Part, diverged, parts_of
from train_service.learning.training_steps import build_training_step
from train_service.learning.trial_step import TrialStep
from train_service.loading.loader import Batch
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.row_cache import RowCache

AUTOCAST = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


class Learner:
    """One rank's part of the learning. Build it, `load` what was saved if anything was, `prepare` it, then step.

    All ranks do the same in the same order: most of it is collective.
    """

    def __init__(
        self, spec: TrainingSpec, ranks: Ranks, model_input: TensorSpec, steps_per_epoch: int, total_steps: int
    ) -> None:
        """`model_input` is one row as the model takes it. Draws the first weights from the specification's seed."""
        self._spec = spec
        self._ranks = ranks
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps
        sharded = spec.placement.parallel == FSDP and ranks.world_size > 1
        units = units_of(spec.model, model_input.shape) if sharded else None
        seed_generators(spec.seed, ranks.device, all_kinds=spec.model.is_own)
        self.model = build_model(spec.model, "spec.model").to(ranks.device)
        if sharded:
            # Before the optimizer, which must hold the shards.
            ranks.wrap(self.model, FSDP, units=units)
        self._wrapped = self.model
        self._loss = build_loss(spec.loss, self.model)
        self._training_step = build_training_step(spec.training_step)
        self._own_metrics = own_method(self.model, "metrics") if spec.model.is_own else None
        self._metrics = Metrics(spec, ranks.device, most_sums=MOST_SUMS_OF_A_STEP, own=self._own_metrics)
        self._optimizer = build_optimizer(spec.optimizer, self.model, fused=_may_be_fused(spec))
        self._scheduler = build_scheduler(spec.optimizer, self._optimizer, total_steps)
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=spec.precision == FLOAT16)
        # The scaler leaves the optimizer alone in a step whose gradients overflow.
        self._stepped = True
        self._optimizer.register_step_post_hook(lambda *_: self._note_update())
        self._skipped_steps = 0
        self._learning_rate = math.nan
        # Of a regression, before the first step; None: the model learns the target as it is.
        self.target_scaling: TargetScaling | None = None
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
            if not self._spec.compile or not _by_compiler(error):
                raise
            raise FailedPrecondition(
                f"spec.compile: torch.compile does not work for this model on this node: {first_line(error)}; leave it "
                "out, or install what it misses",
                reason="COMPILE_FAILED",
                fields=[("spec.compile", first_line(error))],
            ) from error

    def step(self, batch: Batch) -> list[float]:
        """One optimiser step. Returns this rank's sums, to be added over ranks and steps: loss, rows, and metrics', of
        which the first is for a classifier the number of right answers.

        Raises `FailedPrecondition`, before anything is changed, where the loss is not finite.
        """
        # All noise of the step depends on where it is, not on what ran before.
        seed = noise_seed(self._spec.seed, batch.step, self._ranks.rank)
        seed_generators(seed, self._ranks.device, all_kinds=self._spec.model.is_own)
        if not self.model.training:  # after a validation; it walks through all modules
            self._wrapped.train()
        self._optimizer.zero_grad(set_to_none=True)
        parts = parts_of(batch, self._spec, self._ranks.world_size, self._ranks.device)
        loss, metrics = 0.0, torch.zeros(self._metrics.width, dtype=torch.float64)
        for number, part in enumerate(parts, start=1):
            with gradients_kept_local(self._wrapped, number < len(parts)):
                part_loss, outputs = self._backward(batch, part)
            loss += part_loss
            metrics += self._metrics.sums(undo_scaling(self.target_scaling, outputs), part.labels).cpu()
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

    def _rows_per_call(self) -> int:
        """No more than a step computes at once: so much memory there is, and a call takes no longer than a step."""
        parts = max(self._ranks.world_size, self._spec.most_ranks) * self._spec.accumulation_steps
        return max(1, min(ROWS_PER_CALL, self._spec.global_batch_size // parts))

    def should_stop(self, history: Sequence[tuple[int, float]]) -> bool:
        """`history`: of each epoch so far its number and what it measured of `spec.early_stopping.metric`."""
        return should_stop(self._spec.early_stopping, history)

    @property
    def learning_rate(self) -> float:
        """That of the last step, not of the next; not a number before the first one."""
        return self._learning_rate

    @property
    def skipped(self) -> bool:
        """Whether the loss scaler skipped the last step: it changed no weight, on any rank. Only with FLOAT16."""
        return not self._stepped

    @property
    def skipped_steps(self) -> int:
        """How many steps of the run so far were, in this attempt and in those that led to it."""
        return self._skipped_steps

    def weights(self, touched: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Whole weights and buffers on rank 0, not a copy, and nothing elsewhere; with FSDP every rank must call it.
        `touched` is called with each tensor, as a sign that it gets on.

        Raises `FailedPrecondition` where they are not finite, so that no such checkpoint is ever the newest good one.
        """
        if self._ranks.rank != 0 and self._spec.placement.parallel != FSDP:
            return {}
        weights = whole_weights(self.model, touched)
        for name, tensor in weights.items():
            touched()
            # The sum is the quicker look, and may overflow.
            if not tensor.sum().isfinite() and not tensor.isfinite().all():
                raise FailedPrecondition(
                    f"{name} of the model has values that are not finite; start a new job with a lower learning rate "
                    "or max_gradient_norm, whose initial_checkpoint may be the last checkpoint of this one",
                    reason="NON_FINITE_WEIGHTS",
                    metadata={"tensor": name},
                )
        return weights

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

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any] | None = None) -> None:
        """Whole weights, and the state unless these are for a new run; before `prepare`, on every rank."""
        put_weights(self.model, weights)
        if state is not None:
            self.load_state(state)

    def _backward(self, batch: Batch, part: Part) -> tuple[float, Tensor]:
        """Adds the part's gradients. Returns its summed loss, and the model's outputs, both scaled as the target is."""
        labels = scale_target(self.target_scaling, part.labels)
        with self._autocast():
            loss_sum, outputs = self._training_step(self._wrapped, part.inputs, labels, self._loss)
        outputs = outputs.detach()
        loss = loss_sum.item()
        if not math.isfinite(loss):
            raise diverged(batch, part, self._loss(outputs, labels), loss, self._ranks.rank)
        scaled = loss_sum * loss_scale(self._ranks.world_size, batch.step_rows)
        self._scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        return loss, outputs

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

    def _note_update(self) -> None:
        self._stepped = True

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._spec.precision == FLOAT32:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, AUTOCAST[self._spec.precision])


def _may_be_fused(spec: TrainingSpec) -> bool:
    """Not for shards: on one worker the same run has none, and goes on with the same optimizer. Nor in float16: the
    scaler leaves it to a fused kernel to skip what overflows, which the other, that a run may have begun with, refuses.
    """
    return spec.placement.parallel != FSDP and spec.precision != FLOAT16


def seed_generators(seed: int, device: torch.device, *, all_kinds: bool = False) -> None:
    """Of the host, and of the device; with `all_kinds` NumPy's and Python's, too, from which users' code may draw.
    `torch.manual_seed` alone notes who called it for each kind of device that this process does not use, which takes a
    millisecond."""
    if all_kinds:
        np.random.seed(seed % 2**32)
        random.seed(seed)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _by_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
