"""Models from their specification: the one that is trained is the one that is served; what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace
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


MLP = ModelSpec(builder="mlp", in_channels=6, num_classes=3)


def layers(**kwargs: Any) -> list[str]:
    model = build_model(replace(MLP, kwargs=kwargs))
    return [f"{one.in_features}x{one.out_features}" if isinstance(one, nn.Linear) else type(one).__name__
            for one in model.children()]  # fmt: skip


def test_an_mlp_takes_vectors_through_its_hidden_layers() -> None:
    assert layers() == ["6x128", "ReLU", "128x64", "ReLU", "64x3"]
    assert layers(hidden=[]) == ["6x3"]
    assert layers(hidden=[5], dropout=0.1, activation="gelu") == ["6x5", "GELU", "Dropout", "5x3"]
    assert build_model(MLP)(torch.zeros(2, 6)).shape == (2, 3)


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("", {"widths": [3]}),
        *[(".hidden", {"hidden": value}) for value in (5, [0], [-1], [2.5], [True], "64", [70_000], [1] * 65, None)],
        *[(".dropout", {"dropout": value}) for value in (1, -0.1, "a", True, None)],
        *[(".activation", {"activation": value}) for value in ("ReLU", "", "relu6", 3, ["relu"])],
    ],
    ids=str,
)
def test_arguments_that_an_mlp_does_not_take_are_refused_by_their_field(path: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build_model(replace(MLP, kwargs=kwargs), "spec.model")

    assert refused.value.fields[0][0] == f"spec.model.kwargs{path}"


def test_a_spec_of_an_older_checkpoint_is_that_of_a_classifier() -> None:
    config = MLP.as_config()
    del config["task"]

    assert ModelSpec.from_config(config) == MLP


def test_every_builder_that_may_be_named_is_a_classifier_of_torchvision() -> None:
    known = known_builders()

    assert {"torchvision.resnet18", "torchvision.mobilenet_v3_small", "torchvision.vit_b_16"} <= known
    assert not any("fcn" in name or "rcnn" in name or "raft" in name for name in known)
