"""Models and optimizers that cannot work are refused before a job is made of them, by the field that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.transforms import TensorSpec
from train_service.domain.spec import OptimizerSpec, TrainingSpec
from train_service.model_check import check_model

IMAGE = TensorSpec("image", "float32", (1, 28, 28))
SPEC = TrainingSpec(
    dataset_version="datasets/d/versions/v",
    model=ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=64,
)


def with_model(builder: str, **kwargs: Any) -> TrainingSpec:
    model = ModelSpec(builder=f"torchvision.{builder}", in_channels=1, num_classes=10, kwargs=kwargs)
    return replace(SPEC, model=model)


def with_optimizer(name: str, **kwargs: Any) -> TrainingSpec:
    return replace(SPEC, optimizer=OptimizerSpec(name=name, kwargs=kwargs))


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        with_model("resnet18", zero_init_residual=True),
        with_model("squeezenet1_1", dropout=0.1),
        with_optimizer("SGD", momentum=0.9, nesterov=True),
        with_optimizer("Adam", betas=[0.9, 0.99], weight_decay=0.01, amsgrad=True),
        with_optimizer("AdamW", foreach=False),
    ],
    ids=["shufflenet", "resnet", "squeezenet", "sgd", "adam", "adamw"],
)
def test_what_works_is_taken(spec: TrainingSpec) -> None:
    check_model(spec, IMAGE)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("model.builder", with_model("no_such_model")),
        ("model.builder", with_model("alexnet")),
        ("model.builder", with_model("googlenet")),
        ("model.builder", with_model("vit_b_16")),
        ("model.builder", with_model("inception_v3")),
        ("model.kwargs", with_model("resnet18", no_such_argument=1)),
        ("model.kwargs", with_model("resnet18", weights="DEFAULT")),
        ("model.kwargs", with_model("resnet18", norm_layer="BatchNorm2d")),
        ("model.kwargs", with_model("resnet50", groups=0)),
        ("model.kwargs", with_model("resnet50", width_per_group=-64)),
        ("optimizer.kwargs", with_optimizer("SGD", nesterov=True)),
        ("optimizer.kwargs", with_optimizer("SGD", params=[])),
        ("optimizer.kwargs", with_optimizer("Adam", betas=[0.9])),
        ("optimizer.kwargs", with_optimizer("Adam", betas=[0.9, 2])),
        ("optimizer.kwargs", with_optimizer("Adam", eps="small")),
        ("optimizer.kwargs", with_optimizer("AdamW", fused=True, foreach=True)),
        ("optimizer.kwargs", with_optimizer("AdamW", capturable=True)),
        ("optimizer.kwargs", with_optimizer("AdamW", **{"x" * 5000: 1})),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(path: str, spec: TrainingSpec) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_model(spec, IMAGE)

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]
    assert len(refused.value.message) < 1000
