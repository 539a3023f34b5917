"""Models from their specification: the one that is trained is the one that is served; what cannot be is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.models import build_model, known_builders


def a_spec(**values: Any) -> ModelSpec:
    return ModelSpec(**{"builder": "torchvision.resnet18", "in_channels": 1, "num_classes": 10, **values})


@pytest.fixture
def on_meta() -> Any:
    """Shapes without weights, so that refusals cost no memory."""
    with torch.device("meta"):
        yield


def first_convolution(model: nn.Module) -> nn.Conv2d:
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d))


def test_resnet18_takes_one_channel_and_gives_ten_logits() -> None:
    model = build_model(a_spec()).eval()

    with torch.inference_mode():
        logits = model(torch.zeros(2, 1, 28, 28))

    assert (logits.shape, logits.dtype) == ((2, 10), torch.float32)


def test_only_the_channels_of_the_first_convolution_are_changed() -> None:
    theirs, ours = first_convolution(build_model(a_spec(in_channels=3))), first_convolution(build_model(a_spec()))

    assert (theirs.in_channels, ours.in_channels) == (3, 1)
    for same in ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(ours, same) == getattr(theirs, same)
    assert (ours.bias is None) == (theirs.bias is None)


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        return build_model(a_spec()).state_dict()

    one, other = weights(), weights()

    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("on_meta")
def test_arguments_reach_the_builder() -> None:
    wide = build_model(a_spec(builder="torchvision.resnet50", kwargs={"width_per_group": 128}))

    assert sum(parameter.numel() for parameter in wide.parameters()) > 60e6


def test_a_spec_survives_the_manifest_of_a_checkpoint() -> None:
    spec = a_spec(kwargs={"zero_init_residual": True})

    assert ModelSpec.from_config(json.loads(json.dumps(spec.as_config()))) == spec


@pytest.mark.parametrize(
    "builder",
    [
        "",
        "resnet18",
        "torchvision.",
        "torchvision.resnet18000",
        "torchvision.models.resnet18",
        "torchvision.get_model",
        "torchvision.fcn_resnet50",
        "os.system",
        "torchvision.__class__",
        "torchvision.resnet18 ",
    ],
    ids=repr,
)
def test_an_unknown_builder_is_refused_by_its_field(builder: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build_model(a_spec(builder=builder), "spec.model")

    assert refused.value.fields[0][0] == "spec.model.builder"


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"no_such_argument": 1},
        {"num_classes": 5},
        {"weights": "DEFAULT"},
        {"groups": 2},
        {"groups": 0},
        {"width_per_group": -64},
        {"width_per_group": "wide"},
        {"norm_layer": "BatchNorm2d"},
        {"replace_stride_with_dilation": [True]},
        {"replace_stride_with_dilation": 3.0},
    ],
    ids=str,
)
def test_arguments_that_the_builder_does_not_take_are_refused_by_their_field(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build_model(a_spec(kwargs=kwargs), "spec.model")

    assert refused.value.fields[0][0] == "spec.model.kwargs"


def test_every_builder_that_may_be_named_is_a_classifier_of_torchvision() -> None:
    known = known_builders()

    assert {"torchvision.resnet18", "torchvision.mobilenet_v3_small", "torchvision.vit_b_16"} <= known
    assert not any("fcn" in name or "rcnn" in name or "raft" in name for name in known)
