"""What a step computes: ours, or one that an installed package registers.

The protocol of an entry point of `millrace.training_steps`: a callable

    step(model, inputs, labels, loss) -> (the loss of each row, (rows,), or their mean, a scalar; the model's outputs)

- `model` is the model as it is trained: call it, at least once, so that its gradients are averaged over ranks.
- `inputs` float32 (rows, *shape) and `labels`, int64 (rows,) or for regression float32 (rows, K), are one rank's rows,
  or a part of them where the job accumulates; on the job's device, autocast where the job says so.
- `loss` is the job's own: `loss(outputs, labels)` gives the loss of each row.
- It must not call `backward`, step an optimizer or talk to other ranks: gradients are weighed so that their mean over
  ranks is that over the rows of the whole step. A scalar is taken for the mean over these rows.
- Random numbers come from torch's generator, which is seeded by the position of the step; so a resumed run repeats
  them. It keeps no state of its own between steps.
- The outputs (rows, K) are what metrics are measured on. Validation calls the model and the loss alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shared.errors import InvalidArgument, invalid_field
from shared.installed import TRAINING_STEPS, load_installed
from train_service.learning.losses import Loss, total_of

FIELD = "spec.training_step"
# Gives the summed loss, a scalar, and the outputs.
TrainingStep = Callable[[nn.Module, Tensor, Tensor, Loss], tuple[Tensor, Tensor]]


def build_training_step(name: str) -> TrainingStep:
    """Raises `InvalidArgument` naming `spec.training_step`."""
    if not name:
        return _ours
    installed = load_installed(TRAINING_STEPS, name, FIELD, "")
    if not callable(installed):
        raise invalid_field(FIELD, name, f"it is a {type(installed).__name__}, which cannot be called")

    def step(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        given = installed(model, inputs, labels, loss)
        if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(one, Tensor) for one in given):
            raise InvalidArgument(
                f"the training step {name!r} must return two tensors, the loss and the model's outputs",
                reason="BAD_TRAINING_STEP",
            )
        return total_of(given[0], len(labels)), given[1]

    return step


def _ours(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    outputs = model(inputs)
    return loss.total(outputs, labels), outputs
