"""Losses by name: four of torch's, that of causal language models, and those of installed packages.

A loss returns one number per row, so that a step can weight every row of the global batch alike. Outputs are (rows, K)
float; labels int64 (rows,) for classification, float32 (rows, K) for regression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.errors import InvalidArgument, first_line, invalid_field
from shared.models import own_method
from shared.settings import LOSSES, load_installed
from train_service.domain.spec import NEXT_TOKEN, OWN, LossSpec

FIELD = "spec.loss"
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Loss:
    """A loss function of outputs and labels.

    It returns the loss of each row, (rows,). A loss of an installed package may return the mean over the rows, a
    scalar, instead.
    """

    each: Callable[[Tensor, Tensor], Tensor]
    # torch's own sum over rows, if it has one: the same number in one pass.
    summed: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.each(_full(outputs), labels)

    def total(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over the rows, a scalar."""
        if self.summed is not None:
            return self.summed(_full(outputs), labels)
        return total_of(self(outputs, labels), len(labels))


def total_of(loss: Tensor, rows: int) -> Tensor:
    """Return the sum over rows of a loss that is (rows,), or a scalar mean."""
    if loss.ndim == 0:
        return loss * rows
    if loss.shape == (rows,):
        return loss.sum()
    raise InvalidArgument(
        f"the loss has the shape {tuple(loss.shape)} for {rows} rows; give one number per row, or their mean",
        reason="BAD_LOSS_SHAPE",
    )


def build_loss(spec: LossSpec, model: nn.Module | None = None) -> Loss:
    """Return the loss that the spec names, or `model`'s own.

    A user's model with a `loss` method supplies its own if the spec names none. Raises `InvalidArgument` that names
    `spec.loss.name` or `spec.loss.kwargs`.
    """
    own = own_method(model, "loss") if spec.name == OWN and model is not None else None
    if own is not None:
        return Loss(own)
    built_in = _BUILT_IN.get(spec.name)
    factory = built_in or load_installed(LOSSES, spec.name, f"{FIELD}.name", ", ".join(_BUILT_IN))
    kwargs = {**spec.kwargs, **({"label_smoothing": spec.label_smoothing} if spec.label_smoothing else {})}
    try:
        made = factory(**kwargs)
    except Exception as error:  # a factory may raise anything on a client's arguments
        raise invalid_field(f"{FIELD}.kwargs", spec.kwargs, f"{spec.name} refuses them: {first_line(error)}") from None
    if isinstance(made, Loss):
        return made
    if not callable(made):
        raise invalid_field(f"{FIELD}.name", spec.name, f"it made a {type(made).__name__}, which cannot be called")
    return Loss(made)


def _cross_entropy(*, label_smoothing: float = 0.0, weight: list[float] | None = None) -> Loss:
    """Return cross entropy with one factor in `weight` per class.

    Every row counts as one in the mean, whatever its class. torch's own mean divides by the sum of the weights of all
    rows of the step, but a rank knows only its own rows.
    """
    factors = None if weight is None else torch.tensor(weight, dtype=torch.float32)
    if factors is not None and not (factors.isfinite().all() and (factors >= 0).all() and factors.any()):
        raise ValueError("weight has a factor that is negative or not finite in float32, or none above 0")

    def with_reduction(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            on_device = None if factors is None else factors.to(outputs.device, outputs.dtype)
            return F.cross_entropy(
                outputs, labels, weight=on_device, label_smoothing=label_smoothing, reduction=reduction
            )

        return loss

    return Loss(with_reduction("none"), with_reduction("sum"))


def _of_differences(elementwise: Callable[..., Tensor], **kwargs: Any) -> Loss:
    """Return a loss that averages `elementwise` over a row's K numbers."""

    def each(outputs: Tensor, labels: Tensor) -> Tensor:
        return elementwise(outputs, labels, reduction="none", **kwargs).mean(1)

    return Loss(each)


def _mse() -> Loss:
    return _of_differences(F.mse_loss)


def _l1() -> Loss:
    return _of_differences(F.l1_loss)


def _huber(*, delta: float = 1.0) -> Loss:
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not delta > 0:
        raise ValueError(f"delta is {delta!r}; use a number above 0")
    return _of_differences(F.huber_loss, delta=float(delta))


def _next_token() -> Loss:
    """Return the mean of a row's surprises, see `shared.models.transformers_models`.

    A row without one has the loss 0.
    """

    def each(outputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
        counts = ~(outputs < 0)  # of NaN, too: it must reach the loss
        total = torch.where(counts, outputs, outputs.new_zeros(())).sum(1)
        return total / counts.sum(1).clamp(min=1)

    return Loss(each)


_BUILT_IN: dict[str, Callable[..., Loss]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "l1": _l1,
    "huber": _huber,
    NEXT_TOKEN: _next_token,
}


def _full(outputs: Tensor) -> Tensor:
    """Convert outputs to float32, because losses are computed in full precision."""
    return outputs.float() if outputs.dtype in _HALVES else outputs
