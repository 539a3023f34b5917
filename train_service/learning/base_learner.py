"""What every kind of learning on one rank has alike: weights that are saved and loaded, seeds, precision."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import FailedPrecondition, first_line
from shared.model_spec import TargetScaling
from shared.models import build_model
from train_service.domain.order import noise_seed
from train_service.domain.spec import BFLOAT16, FLOAT16, FSDP, TrainingSpec, should_stop
from train_service.learning.evaluation import ROWS_PER_CALL
from train_service.learning.ranks import Ranks
from train_service.learning.sharding import put_weights, whole_weights
from train_service.loading.loader import Batch
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.rows import RowCache

AUTOCAST = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


class BaseLearner(ABC):
    """One rank's part of the learning. Build it, `load` what was saved if anything was, `prepare` it, then step.

    All ranks do the same in the same order: most of it is collective.
    """

    model: nn.Module

    def __init__(self, spec: TrainingSpec, ranks: Ranks, steps_per_epoch: int, total_steps: int) -> None:
        self._spec = spec
        self._ranks = ranks
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=spec.precision == FLOAT16)
        # The scaler leaves the optimizer alone in a step whose gradients overflow.
        self._stepped = True
        self._skipped_steps = 0
        self._learning_rate = math.nan
        # Of a regression, before the first step; None: the model learns the target as it is.
        self.target_scaling: TargetScaling | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Makes the model ready for its ranks, so that the first real step is like all others. Raises
        `FailedPrecondition` where it cannot be compiled."""

    @abstractmethod
    def step(self, batch: Batch) -> list[float]:
        """One optimiser step. Returns this rank's sums, to be added over ranks and steps: loss, rows, and metrics', of
        which the first is for a classifier the number of right answers.

        Raises `FailedPrecondition`, before anything is changed, where the loss is not finite.
        """

    @abstractmethod
    def describe(self, sums: Sequence[float]) -> dict[str, float]:
        """`loss`, the mean over rows, and the metrics of what steps returned, added up."""

    @abstractmethod
    def evaluate(self, cache: RowCache, preprocessing: Preprocessing) -> tuple[dict[str, float], int]:
        """What validation measures over a whole split on every rank, by name, and its rows; none where it measures
        nothing."""

    def end_epoch(self, metrics: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """After an epoch's last step and its validation, which gave `metrics`, and before its checkpoint. Returns more
        of them; only rank 0's are read."""
        return {}

    @abstractmethod
    def state(self, touched: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """What, besides the weights, goes on where it was: not a copy. With FSDP every rank must call it. `touched` is
        called with each tensor that is gathered."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """What `state` gave, whole, on every rank."""

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any] | None = None) -> None:
        """Whole weights, and the state unless these are for a new run; before `prepare`, on every rank."""
        put_weights(self.model, weights)
        if state is not None:
            self.load_state(state)

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

    def _built(self) -> nn.Module:
        """On this rank's device, with the first weights that the seed draws, the same on all ranks."""
        seed_generators(self._spec.seed, self._ranks.device, all_kinds=self._spec.model.is_own)
        model = build_model(self._spec.model, "spec.model").to(self._ranks.device)
        return model.to(memory_format=torch.channels_last) if self._spec.acceleration.channels_last else model

    def _seed_step(self, step: int) -> None:
        """All noise of the step depends on where it is, not on what ran before."""
        seed = noise_seed(self._spec.seed, step, self._ranks.rank)
        seed_generators(seed, self._ranks.device, all_kinds=self._spec.model.is_own)

    def _rows_per_call(self) -> int:
        """No more than a step computes at once: so much memory there is, and a call takes no longer than a step."""
        parts = max(self._ranks.world_size, self._spec.max_ranks) * self._spec.accumulation_steps
        return max(1, min(ROWS_PER_CALL, self._spec.global_batch_size // parts))

    def _note_update(self) -> None:
        self._stepped = True

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._spec.precision not in AUTOCAST:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, AUTOCAST[self._spec.precision])


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


def by_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def compile_failed(error: BaseException) -> FailedPrecondition:
    return FailedPrecondition(
        f"spec.compile: torch.compile does not work for this model on this node: {first_line(error)}; leave it out, or "
        "install what it misses",
        reason="COMPILE_FAILED",
        fields=[("spec.compile", first_line(error))],
    )
