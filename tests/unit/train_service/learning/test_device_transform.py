"""What a worker's device makes of images is bit for bit what the loader makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from shared.dataset_version.manifest import tensor_field
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.transforms import RowKeys
from tests.support.gpu import DEVICES
from tests.support.versions import columns_of
from train_service.domain.spec import BY_DEVICE, Acceleration, TrainingSpec
from train_service.learning.ranks import ON_DEVICE, DeviceTransform
from train_service.loading.preprocessing import DEVICE_STEPS, Preprocessing, Rows

ROWS = 50
KEYS = RowKeys(7, 3, np.arange(900, 900 + ROWS))
FLIP = {"randomFlip": {"horizontalProbability": 0.5, "verticalProbability": 0.3}}
JITTER = {"colorJitter": {"brightness": 0.4, "contrast": 0.7, "saturation": 1.0}}
GRAY_JITTER = {"colorJitter": {"brightness": 0.4, "contrast": 0.7}}
NORMALIZE = {"normalize": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}
CASES: dict[str, tuple[tuple[int, ...], list[dict[str, Any]]]] = {
    "floats": ((9, 8, 3), [{"toFloat": {}}]),
    "gray floats": ((9, 8), [{"toFloat": {}}, {"normalize": {"mean": [0.1307], "std": [0.3081]}}]),
    "normalized": ((9, 8, 3), [{"toFloat": {}}, NORMALIZE]),
    "centre": ((9, 8, 3), [{"centerCrop": {"height": 4, "width": 5}}, {"toFloat": {}}]),
    "padded centre": ((5, 4, 3), [{"centerCrop": {"height": 8, "width": 9}}, {"toFloat": {}}]),
    "crops": ((9, 8, 3), [{"randomCrop": {"height": 6, "width": 5, "padding": 2}}, {"toFloat": {}}]),
    "gray crops": ((9, 8), [{"randomCrop": {"height": 12, "width": 5, "padding": 1}}, {"toFloat": {}}]),
    "flips": ((9, 8, 3), [FLIP, {"toFloat": {}}]),
    "gray flips": ((9, 8), [FLIP, {"toFloat": {}}]),
    "colours": ((9, 8, 3), [JITTER, {"toFloat": {}}]),
    "gray contrast": ((9, 8), [GRAY_JITTER, {"toFloat": {}}]),
    "all": (
        (12, 11, 3),
        [{"randomCrop": {"height": 9, "width": 8, "padding": 2}}, FLIP, JITTER, {"toFloat": {}}, NORMALIZE],
    ),
}


SPEC = TrainingSpec(
    dataset_version="datasets/d/versions/v",
    model=ModelSpec(builder="torchvision.resnet18", in_channels=3, num_classes=10),
    acceleration=Acceleration(transform_device=BY_DEVICE),
    epochs=1,
    global_batch_size=64,
)


def preprocessing(shape: tuple[int, ...], steps: list[dict[str, Any]], spec: TrainingSpec = SPEC) -> Preprocessing:
    schema = pa.schema([tensor_field("image", pa.uint8(), shape), pa.field("label", pa.int64())])
    return Preprocessing(replace(spec, transform={"steps": steps}), columns_of(schema))


def rows(shape: tuple[int, ...]) -> Rows:
    images = np.random.default_rng(4).integers(0, 256, (ROWS, *shape), np.uint8)
    return Rows({"image": images}, None, np.zeros(ROWS, np.int64), KEYS.row_ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_device_makes_the_loaders_bits(case: str, device: str) -> None:
    shape, steps = CASES[case]
    made = preprocessing(shape, steps)
    left = made.for_device(rows(shape), KEYS)

    assert left.dtype == np.uint8
    assert len(made.device_steps) == len(steps)
    there = DeviceTransform(made.device_steps)(torch.from_numpy(left).to(device), KEYS)
    np.testing.assert_array_equal(there.cpu().numpy(), made(rows(shape), KEYS))


def test_steps_before_one_that_no_device_does_stay_with_the_loader() -> None:
    shape = (12, 10, 3)
    made = preprocessing(shape, [FLIP, {"resize": {"height": 6, "width": 5}}, FLIP, {"toFloat": {}}])
    left = made.for_device(rows(shape), KEYS)

    assert [(place, step.op) for place, step in made.device_steps] == [(2, "random_flip"), (3, "to_float")]
    assert left.shape == (ROWS, 6, 5, 3)
    there = DeviceTransform(made.device_steps)(torch.from_numpy(left), KEYS)
    np.testing.assert_array_equal(there.numpy(), made(rows(shape), KEYS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_without_keys_as_in_validation_augmentations_do_not_act(case: str, device: str) -> None:
    shape, steps = CASES[case]
    made = preprocessing(shape, steps)
    left = torch.from_numpy(made.for_device(rows(shape))).to(device)

    there = DeviceTransform(made.device_steps)(left)
    np.testing.assert_array_equal(there.cpu().numpy(), made(rows(shape)))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([{"toFloat": {}}, {"normalize": {"mean": [0.5], "std": [1e-9]}}], id="may be infinite"),
        pytest.param([], id="nothing for the device"),
    ],
)
def test_a_transform_that_leaves_a_device_nothing_is_refused_by_the_field(steps: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidArgument, match="transform_device") as raised:
        preprocessing((9, 8, 3), steps)
    assert [field for field, _ in raised.value.fields] == ["spec.acceleration.transform_device"]


def test_the_loader_leaves_a_device_what_it_can_do() -> None:
    assert set(ON_DEVICE) == set(DEVICE_STEPS)


def test_without_the_field_the_loader_does_all() -> None:
    shape, steps = CASES["all"]
    plain = preprocessing(shape, steps, replace(SPEC, acceleration=Acceleration()))

    assert plain.device_steps == []
    expected = preprocessing(shape, steps)(rows(shape), KEYS)
    np.testing.assert_array_equal(plain.for_device(rows(shape), KEYS), expected)
