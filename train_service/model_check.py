"""Whether a model and an optimizer can be built at all: tried without memory, on torch's meta device.

The first call imports torch and torchvision, which takes seconds.
"""

from __future__ import annotations

from shared.errors import first_line, invalid_field
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
        except Exception as error:  # each model has its own way of refusing images
            remedy = f"the model does not take images of {model_input.shape}: {first_line(error)}"
            raise invalid_field("spec.model.builder", spec.model.builder, remedy) from None
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else None
    if shape != (ROWS, spec.model.num_classes):
        remedy = f"in training it must give one tensor of logits, not {shape or type(output).__name__}; choose another"
        raise invalid_field("spec.model.builder", spec.model.builder, remedy)
    _check_optimizer(spec)


def _check_optimizer(spec: TrainingSpec) -> None:
    """Some arguments are refused only by a step, so one is taken, on two numbers."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    kind = getattr(torch.optim, spec.optimizer.name)
    try:
        kind([parameter], lr=spec.optimizer.learning_rate, **spec.optimizer.kwargs).step()
    except Exception as error:  # whatever torch makes of a client's arguments
        remedy = f"{spec.optimizer.name} refuses them: {first_line(error)}"
        raise invalid_field("spec.optimizer.kwargs", spec.optimizer.kwargs, remedy) from None
