"""Whether a model and an optimizer can be built at all: tried without memory, on torch's meta device.

The first call imports torch and torchvision, which takes seconds.
"""

from __future__ import annotations

from typing import Any

from shared.errors import invalid_field
from shared.models import build_model
from shared.transforms import TensorSpec
from train_service.domain.spec import TrainingSpec

ROWS = 2


def check_model(spec: TrainingSpec, model_input: TensorSpec) -> None:
    """Raises `InvalidArgument` naming the field of `spec.model` or `spec.optimizer` that does not work."""
    import torch

    with torch.device("meta"):
        model = build_model(spec.model, "spec.model")
        try:
            output = model(torch.zeros((ROWS, *model_input.shape)))
        except (RuntimeError, ValueError) as error:
            remedy = f"the model does not take images of {model_input.shape}: {_first_line(error)}"
            raise invalid_field("spec.model.builder", spec.model.builder, remedy) from None
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else None
    if shape != (ROWS, spec.model.num_classes):
        remedy = f"in training it must give one tensor of logits, not {shape or type(output).__name__}; choose another"
        raise invalid_field("spec.model.builder", spec.model.builder, remedy)
    _check_optimizer(spec, model)


def _check_optimizer(spec: TrainingSpec, model: Any) -> None:
    import torch

    kind = getattr(torch.optim, spec.optimizer.name)
    try:
        kind(model.parameters(), lr=spec.optimizer.learning_rate, **spec.optimizer.kwargs)
    except (TypeError, ValueError) as error:
        remedy = f"{spec.optimizer.name} refuses them: {_first_line(error)}"
        raise invalid_field("spec.optimizer.kwargs", spec.optimizer.kwargs, remedy) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
