"""The facts of a user's own model.

The child process that imported its module finds them; see `entry_child`.

The model is built on torch's meta device, where its size costs nothing. Code that makes other tensors itself, for
example from NumPy, fails there. Such a model is built on the CPU, within the child's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.code_bundle_registry import adopt_code, line_in_code
from shared.errors import InvalidArgument, MillraceError, first_line, invalid_field
from shared.models import build_model, own_method
from shared.models.inputs import zero_inputs
from shared.transforms.records import RecordSpec, RowShape, lengths_of, row_shape_from_config
from train_service.checkpoints.fine_tuning import fit
from train_service.checkpoints.tensor_files import take_apart
from train_service.domain.spec import FSDP, OWN, REGRESSION, OwnModelFacts, TrainingSpec, settled
from train_service.jobs.model_check import sharding_problem
from train_service.learning.losses import build_loss, total_of
from train_service.learning.metrics import known_metrics
from train_service.learning.optimizers import check_optimizer
from train_service.learning.own_step import NOT_CALLED, StepModule, Trainer, is_step

FIELD = "spec.model.entry"
ROWS = 2
DEVICES = ("meta", "cpu")
# Steps of an epoch, for a module that reads them from its trainer during the check.
SOME_STEPS = 100


def inspect_model(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the problem or the facts of a model.

    The answer has `problem` with the wrong `field`, or an empty `problem` with the `facts` of `OwnModelFacts`.

    `asked` has the plain form of the specification as `spec` and of the `row_shape` of the model's input, the
    run's `total_steps`, and `initial`: the shapes of an initial checkpoint's tensors by name, or None.
    """
    spec = TrainingSpec.from_config(asked["spec"])
    adopt_code(spec.model.code_bundle, Path(folder))
    try:
        row_shape = row_shape_from_config(asked["row_shape"])
        trial = _tried(spec, row_shape)
        checked = settled(spec, trial.facts, lengths_of(row_shape))
        _check(checked, trial, row_shape, asked)
    except MillraceError as error:
        field, text = error.fields[0] if error.fields else (FIELD, error.message)
        return {"problem": text, "field": field}
    return {"problem": "", "facts": trial.facts.as_config()}


@dataclass(frozen=True)
class _Trial:
    """A model that was built and called. This happened on the meta device or the CPU."""

    model: nn.Module
    facts: OwnModelFacts


def _tried(spec: TrainingSpec, row_shape: RowShape) -> _Trial:
    """Try the model on the first device that works. If none works, the error of the last device is raised."""
    for device in DEVICES:
        try:
            return _tried_on(device, spec, row_shape)
        except Exception:  # a user's code may raise anything
            if device == DEVICES[-1]:
                raise
    raise AssertionError("there is a device")


def _tried_on(device: str, spec: TrainingSpec, row_shape: RowShape) -> _Trial:
    with torch.device(device):
        model = build_model(spec.model, "spec.model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise invalid_field(FIELD, spec.model.entry, "the model has no parameter that is trained")
        poll = _facts_of_step if is_step(model) else _facts_of_model
        return _Trial(model, poll(model, spec, row_shape))


def _facts_of_model(model: nn.Module, spec: TrainingSpec, row_shape: RowShape) -> OwnModelFacts:
    model.train()
    takes = f"forward does not take {_described(row_shape)}"
    output = _asked(spec, lambda: model(zero_inputs(row_shape, ROWS)), takes)
    shape = tuple(output.shape) if isinstance(output, Tensor) else None
    if shape is None or len(shape) != 2 or shape[0] != ROWS:
        made = shape or type(output).__name__
        remedy = f"in training it must give one tensor of (rows, classes or numbers), not {made}"
        raise invalid_field(FIELD, spec.model.entry, f"{remedy}; a model with a training_step may give anything")
    labels = torch.zeros(shape) if spec.task == REGRESSION else torch.zeros(ROWS, dtype=torch.int64)
    has_loss = own_method(model, "loss") is not None
    if has_loss and spec.loss.name == OWN:
        loss = build_loss(spec.loss, model)
        given = _asked(spec, lambda: loss(output, labels), "loss does not take outputs and labels like its")
        _check_shape("loss", spec, given)
    names: tuple[str, ...] = ()
    if (measure := own_method(model, "metrics")) is not None:
        measured = _asked(
            spec, lambda: measure(output.detach(), labels), "metrics does not take outputs and labels like its"
        )
        names = _names(spec, measured)
    return OwnModelFacts(num_classes=shape[1], has_loss=has_loss, metrics=names)


def _facts_of_step(model: nn.Module, spec: TrainingSpec, row_shape: RowShape) -> OwnModelFacts:
    """Return the facts of a model with a training step.

    Its forward may take anything: a GAN's is no function of the rows.
    """
    if refused := [name for name in NOT_CALLED if own_method(model, name) is not None]:
        remedy = f"its {refused[0]} would never be called here; leave it out, or train by a loop of your own"
        raise invalid_field(FIELD, spec.model.entry, remedy)
    trainer = Trainer(spec.epochs, SOME_STEPS, SOME_STEPS * spec.epochs, rank=0, world_size=1)
    module = StepModule(model, trainer, lambda _: None)
    has_optimizers = own_method(model, "configure_optimizers") is not None
    if module.is_manual and not has_optimizers:
        raise invalid_field(FIELD, spec.model.entry, "it optimizes by hand, so it needs configure_optimizers")
    if has_optimizers:
        try:
            _asked(spec, module.configure, "configure_optimizers raises")
            # A checkpoint may hold nothing that runs code when it is read.
            states = [rate.scheduler.state_dict() for rate in module.rates]
            _asked(spec, lambda: take_apart(states), "schedulers have a state that no checkpoint can hold")
        except InvalidArgument as error:
            if error.fields:
                raise
            raise invalid_field(FIELD, spec.model.entry, f"its {error.message}") from error
    return OwnModelFacts(
        num_classes=_width(model, row_shape),
        is_step=True,
        is_manual=module.is_manual,
        has_optimizers=has_optimizers,
    )


def _described(row_shape: RowShape) -> str:
    if not isinstance(row_shape, RecordSpec):
        return f"inputs of {(ROWS, *row_shape)}"
    inputs = (f"{one.name!r} {one.dtype} {(ROWS, *one.shape)}" for one in row_shape.tensors)
    return f"one dict of inputs with {', '.join(inputs)}"


def _width(model: nn.Module, row_shape: RowShape) -> int:
    """Return the width of the model's output. It is 0 if the output is not (rows, width) for such rows."""
    model.eval()
    try:
        with torch.no_grad():
            output = model(zero_inputs(row_shape, ROWS))
    except Exception:  # a user's code may raise anything
        return 0
    is_table = isinstance(output, Tensor) and output.ndim == 2 and len(output) == ROWS
    return int(output.shape[1]) if is_table else 0


def _asked(spec: TrainingSpec, call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except MillraceError:
        raise
    except Exception as error:  # a user's code may raise anything
        where = line_in_code(error)
        problem = f"{where}{': ' if where else ''}{type(error).__name__}: {first_line(error)}"
        raise invalid_field(FIELD, spec.model.entry, f"its {what}: {problem}") from error


def _check_shape(method: str, spec: TrainingSpec, given: Any) -> None:
    if not isinstance(given, Tensor):
        text = (
            f"its {method} gives a {type(given).__name__}; it must give a number for each row, (rows,), or their mean"
        )
        raise invalid_field(FIELD, spec.model.entry, text)
    try:
        total_of(given, ROWS)
    except MillraceError as error:
        raise invalid_field(FIELD, spec.model.entry, f"its {method}: {error.message}") from None


def _names(spec: TrainingSpec, given: Any) -> tuple[str, ...]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        remedy = "its metrics must give a dict of names, each an identifier, and numbers"
        raise invalid_field(FIELD, spec.model.entry, remedy)
    ours = ["loss", *known_metrics(spec.task)]
    if taken := [name for name in given if name in ours]:
        remedy = f"its metrics gives {taken[0]!r}, which is a name of Millrace's; use another"
        raise invalid_field(FIELD, spec.model.entry, remedy)
    for name, value in given.items():
        _check_shape(f"metrics[{name!r}]", spec, torch.as_tensor(value))
    return tuple(given)


def _check(spec: TrainingSpec, trial: _Trial, row_shape: RowShape, asked: dict[str, Any]) -> None:
    """Check what depends on more than the model. `spec` is settled."""
    shapes = {name: tuple(one.shape) for name, one in trial.model.named_parameters()}
    if spec.optimizer.name != OWN:
        check_optimizer(spec.optimizer, shapes.values(), asked["total_steps"])
    if spec.placement.parallel == FSDP and (problem := _sharding_problem(trial.model, row_shape)):
        raise invalid_field("spec.placement.parallel", FSDP, f"{problem}; use DDP, or change that module")
    initial = asked.get("initial")
    if initial is not None and not fit(shapes, initial).taken:
        remedy = "no weights of it fit the model; use one of the same model"
        raise invalid_field("spec.initial_checkpoint", spec.initial_checkpoint, remedy)


def _sharding_problem(model: nn.Module, row_shape: RowShape) -> str:
    import torch.distributed as dist

    if any(not parameter.is_meta for parameter in model.parameters()):
        return "FSDP builds the model on torch's meta device first, and its code makes tensors that do not go with that"
    # Use a group of one process: the child has no network, which gloo would look for.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return sharding_problem(model, row_shape)
