"""What a model of a user's own brings with it, and the specification that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shared.durable import fields_of
from shared.errors import invalid_field, invalid_fields
from shared.model_spec import NONE
from train_service.domain.spec import (
    CLASSIFICATION,
    FLOAT16,
    FSDP,
    OWN,
    OptimizerSpec,
    TrainingSpec,
    default_loss,
    default_metrics,
)


@dataclass(frozen=True, kw_only=True)
class OwnModelFacts:
    """`num_classes` is the width of its output, 0 where that is not (rows, width). `has_optimizers`: it configures
    them; `is_manual`: its training step steps them itself. `metrics` are the names that its `metrics` gives."""

    num_classes: int
    is_step: bool = False
    is_manual: bool = False
    has_optimizers: bool = False
    has_loss: bool = False
    metrics: tuple[str, ...] = ()

    def as_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OwnModelFacts:
        """Raises `ValueError` for values of another kind: a user's code may have made them up."""
        facts = cls(**{**fields_of(cls, config), "metrics": tuple(config["metrics"])})
        flags = (facts.is_step, facts.is_manual, facts.has_optimizers, facts.has_loss)
        names = all(isinstance(name, str) and name.isidentifier() for name in facts.metrics)
        if type(facts.num_classes) is not int or not names or not all(isinstance(one, bool) for one in flags):
            raise ValueError(f"no facts of a model: {config!r:.200}")
        return facts


def settled(spec: TrainingSpec, facts: OwnModelFacts, row_shape: Sequence[int]) -> TrainingSpec:
    """The specification with all that follows from the model; `row_shape` is that of one row of its input.

    Raises `InvalidArgument` for fields that the model takes the place of, or does not go with.
    """
    classes = spec.task == CLASSIFICATION
    width = spec.model.num_classes or facts.num_classes
    if not width:
        remedy = "the output of the model's forward for these rows is not (rows, width), so it does not say it; set it"
        raise invalid_field("spec.model.num_classes", 0, remedy)
    if facts.num_classes and width != facts.num_classes:
        remedy = f"the model's output is (rows, {facts.num_classes}); leave it out, or change the model"
        raise invalid_field("spec.model.num_classes", width, remedy)
    if classes and width < 2:
        remedy = "the model has one output, and a class is one of two or more; use TASK_REGRESSION, or give it more"
        raise invalid_field("spec.model.num_classes", width, remedy)
    if facts.is_step:
        _refuse_what_a_step_does_itself(spec, facts)
    loss, optimizer, metrics = spec.loss, spec.optimizer, spec.metrics
    if loss.name == OWN and not facts.is_step and not facts.has_loss:
        loss = replace(loss, name=default_loss(spec.task))
    if optimizer.name == OWN and not facts.has_optimizers:
        optimizer = replace(optimizer, name=OptimizerSpec().name)
    if not facts.is_step:
        metrics = tuple(dict.fromkeys((*(metrics or default_metrics(spec.task)), *facts.metrics)))
    return replace(
        spec,
        model=replace(spec.model, in_channels=row_shape[0], num_classes=width, is_step=facts.is_step),
        loss=loss,
        optimizer=optimizer,
        metrics=metrics,
    )


def settled_base(base: TrainingSpec, trials: Sequence[TrainingSpec]) -> TrainingSpec:
    """Of a sweep: the specification that all trials share, with what follows from the model; `trials` are some that
    were checked. Raises `InvalidArgument` where their models do not have that in common."""
    first = trials[0]
    for other in trials:
        if (other.model.num_classes, other.model.is_step, other.metrics) != (
            first.model.num_classes,
            first.model.is_step,
            first.metrics,
        ):
            remedy = "trials of a sweep are compared, so their models must have the same outputs, metrics and methods"
            raise invalid_field("spec.model.kwargs", other.model.kwargs, remedy)
    model = replace(
        base.model,
        in_channels=first.model.in_channels,
        num_classes=first.model.num_classes,
        is_step=first.model.is_step,
    )
    return replace(
        base,
        model=model,
        loss=replace(base.loss, name=first.loss.name),
        optimizer=replace(base.optimizer, name=first.optimizer.name),
        metrics=first.metrics,
    )


def _refuse_what_a_step_does_itself(spec: TrainingSpec, facts: OwnModelFacts) -> None:
    has_step = "the model has a training_step of its own, which makes it; leave it out"
    manual = "the model optimizes by hand (automatic_optimization is False), which does not go with it; leave it out"
    refused = [
        (spec.loss.name != OWN, "loss.name", spec.loss.name, has_step),
        (bool(spec.metrics), "metrics", ", ".join(spec.metrics), "a training_step logs its own; leave it out"),
        (bool(spec.training_step), "training_step", spec.training_step, has_step),
        (spec.target_scaling != NONE, "target_scaling", spec.target_scaling, "a training_step scales; leave it out"),
        (
            facts.has_optimizers and spec.optimizer != OptimizerSpec(name=OWN),
            "optimizer.name",
            spec.optimizer.name,
            "the model has configure_optimizers; leave it out",
        ),
        (facts.is_manual and spec.accumulation_steps > 1, "accumulation_steps", spec.accumulation_steps, manual),
        (facts.is_manual and spec.precision == FLOAT16, "precision", spec.precision, manual),
        (facts.is_manual and spec.max_gradient_norm > 0, "max_gradient_norm", spec.max_gradient_norm, manual),
        (facts.is_manual and spec.placement.parallel == FSDP, "placement.parallel", FSDP, manual),
    ]
    broken = [(f"spec.{path}", value, remedy) for holds, path, value, remedy in refused if holds]
    if broken:
        raise invalid_fields(broken)
