"""A training step of two rows of zeros, thrown away: whether it leaves parameters out, and passes like it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shared.errors import first_line
from train_service.domain.spec import REGRESSION, TrainingSpec
from train_service.learning.losses import Loss
from train_service.learning.ranks import Ranks, thrown_away
from train_service.learning.training_steps import TrainingStep

logger = logging.getLogger(__name__)

ROWS = 2


class TrialStep:
    """Of a job's own training step, with labels of 0. Try it on the weights that the seed draws, before others are
    loaded: then every attempt finds the same, and adds gradients up in the same order."""

    def __init__(
        self,
        spec: TrainingSpec,
        shape: tuple[int, ...],
        model: nn.Module,
        step: TrainingStep,
        loss: Loss,
        device: torch.device,
    ) -> None:
        """`shape` is that of one row of the model's input."""
        self._numbers = spec.task == REGRESSION
        self._labels_shape = (ROWS, spec.model.num_classes) if self._numbers else (ROWS,)
        self._shape = shape
        self._device = device
        self._model = model
        self._step = step
        self._loss = loss
        self._works = False

    def leaves_some_unused(self, ranks: Ranks, autocast: Callable[[], AbstractContextManager[object]]) -> bool:
        """Whether it gives some parameter no gradient, on whichever rank; False where it cannot take such rows."""
        unused = broken = 0
        self._model.train()
        try:
            with thrown_away(self._model):
                with autocast():
                    loss, _ = self._step(self._model, *self._rows(), self._loss)
                loss.backward()  # type: ignore[no-untyped-call]
                unused = sum(one.requires_grad and one.grad is None for one in self._model.parameters())
        except Exception as error:  # a step of a user's own, which need not take rows like these: all ranks hear of it
            logger.info("the training step takes no %d rows of zeros: %s", ROWS, first_line(error))
            broken = 1
        all_unused, all_broken = ranks.add([float(unused), float(broken)]).result()
        self._works = not all_broken
        return self._works and all_unused > 0

    def loss_of(self, model: nn.Module) -> Tensor:
        """A scalar: of the step, where it works, so that a pass uses what a step does; else of the outputs alone."""
        if self._works:
            return self._step(model, *self._rows(), self._loss)[0]
        total: Tensor = model(self._rows()[0]).sum()
        return total

    def _rows(self) -> tuple[Tensor, Tensor]:
        kind = next(self._model.parameters()).dtype
        inputs = torch.zeros((ROWS, *self._shape), dtype=kind, device=self._device)
        labels_kind = kind if self._numbers else torch.int64
        return inputs, torch.zeros(self._labels_shape, dtype=labels_kind, device=self._device)
