"""Pipelines: pure, the same for any cut of the rows into batches, and refused by the name of the step."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from millrace.common.v1 import transform_pb2
from shared.errors import InvalidArgument
from shared.transforms import Pipeline, TensorSpec, TensorType

GRAY = TensorSpec("image", "uint8", (28, 28))
COLOUR = TensorSpec("image", "uint8", (8, 6, 3))


def to_float(column: str = "") -> transform_pb2.TransformStep:
    return transform_pb2.TransformStep(column=column, to_float=transform_pb2.ToFloat())


def normalize(mean: Sequence[float], std: Sequence[float]) -> transform_pb2.TransformStep:
    return transform_pb2.TransformStep(normalize=transform_pb2.Normalize(mean=mean, std=std))


def pipeline(*steps: transform_pb2.TransformStep) -> Pipeline:
    return Pipeline.from_proto(transform_pb2.Transform(steps=steps), "image")


def applied(transform: Pipeline, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the column `image` alone: (B, *shape) → (B, *shape after all steps)."""
    made = transform({"image": rows})["image"]
    assert isinstance(made, np.ndarray)
    return made


def made_of(transform: Pipeline, given: TensorSpec, field: str = "") -> TensorSpec:
    made = transform.output({given.name: TensorType(given.dtype, given.shape)}, field)[given.name]
    assert isinstance(made, TensorType)
    return TensorSpec(given.name, made.dtype, tuple(length for length in made.shape if length is not None))


MNIST = pipeline(to_float(), normalize([0.1307], [0.3081]))


def images(rows: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), np.uint8)


@given(cuts=st.lists(st.integers(0, 67), max_size=5), seed=st.integers(0, 2**32 - 1))
def test_any_cut_into_batches_gives_the_same_bits(cuts: list[int], seed: int) -> None:
    rows = images(67, (5, 7), seed)
    whole = applied(MNIST, rows)

    parts = [applied(MNIST, part) for part in np.split(rows, sorted(cuts))]

    assert np.concatenate(parts).tobytes() == whole.tobytes()


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=4, min_side=1, max_side=9)))
def test_memory_layout_does_not_change_a_bit(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    given_bytes = rows.tobytes()
    expected = applied(MNIST, np.ascontiguousarray(rows))

    for same in (np.asfortranarray(rows), rows[::-1].copy()[::-1]):
        assert applied(MNIST, same).tobytes() == expected.tobytes()
    assert expected.flags.c_contiguous
    assert rows.tobytes() == given_bytes  # never in place


def test_gray_images_gain_a_channel_and_colours_come_first() -> None:
    assert made_of(pipeline(to_float()), GRAY) == TensorSpec("image", "float32", (1, 28, 28))
    assert made_of(pipeline(to_float()), COLOUR) == TensorSpec("image", "float32", (3, 8, 6))

    out = applied(pipeline(to_float()), images(4, (8, 6, 3)))

    assert (out.shape, out.dtype.name) == ((4, 3, 8, 6), "float32")
    assert out[2, 1, 7, 5] == np.float32(images(4, (8, 6, 3))[2, 7, 5, 1]) / np.float32(255)


@pytest.mark.parametrize("spec", [GRAY, COLOUR], ids=["gray", "colour"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_announced_shape_and_dtype_are_what_comes_out(spec: TensorSpec, rows: int) -> None:
    announced = made_of(MNIST, spec)

    out = applied(MNIST, images(rows, spec.shape))

    assert (out.shape, out.dtype.name) == ((rows, *announced.shape), announced.dtype)


def test_a_pipeline_equals_torchvisions_totensor_and_normalize_bit_for_bit() -> None:
    from torchvision import transforms

    for shape, mean, std in (
        ((28, 28), [0.1307], [0.3081]),
        ((8, 6, 3), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ):
        rows = images(16, shape)
        theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])

        ours = applied(pipeline(to_float(), normalize(mean, std)), rows)

        for row, out in zip(rows, ours, strict=True):
            assert theirs(row).numpy().tobytes() == out.tobytes()


def test_without_steps_the_rows_go_through() -> None:
    rows = images(3)

    assert applied(pipeline(), rows) is rows
    assert made_of(pipeline(), GRAY) == GRAY


FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS.filter(lambda std: std > 0)), min_size=1, max_size=4))
def test_a_checkpoints_config_builds_the_very_same_pipeline(values: list[tuple[float, float]]) -> None:
    built = pipeline(to_float(), normalize([mean for mean, _ in values], [std for _, std in values]))

    read = Pipeline.from_config(json.loads(json.dumps(built.config)), "image")

    assert read.config == built.config
    assert read.steps == built.steps


def test_light_processes_may_import_transforms() -> None:
    heavy = "sorted({'torch', 'torchvision', 'ray', 'scipy', 'matplotlib', 'pandas'} & set(sys.modules))"
    command = [sys.executable, "-c", f"import sys, shared.transforms; print({heavy})"]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


REFUSED = {
    "an empty step": ([transform_pb2.TransformStep()], 0, "choose one of to_float, normalize, select"),
    "no mean": ([to_float(), normalize([], [])], 1, "at least one each"),
    "fewer std than mean": ([normalize([0.1, 0.2], [1.0])], 0, "as many values of std as of mean"),
    "std of 0": ([normalize([0.1], [0.0])], 0, "every std above 0"),
    "negative std": ([normalize([0.1], [-1.0])], 0, "every std above 0"),
    "mean that is no number": ([normalize([math.nan], [1.0])], 0, "finite"),
    "infinite std": ([normalize([0.0], [math.inf])], 0, "finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_makes_no_sense_is_refused_by_its_path(case: str) -> None:
    steps, index, why = REFUSED[case]

    with pytest.raises(InvalidArgument, match=why) as refused:
        Pipeline.from_proto(transform_pb2.Transform(steps=steps), "image", "spec.transform")

    assert refused.value.fields[0][0] == f"spec.transform.steps[{index}]"
    assert refused.value.specific_reason == "INVALID_FIELD"


def test_a_column_that_is_not_there_is_refused_and_the_own_one_may_be_named() -> None:
    assert made_of(pipeline(to_float("image")), GRAY).dtype == "float32"
    with pytest.raises(InvalidArgument, match="there are image") as refused:
        made_of(pipeline(to_float(), to_float("label")), GRAY)
    assert refused.value.fields[0][0] == "transform.steps[1].column"


@pytest.mark.parametrize(
    ("steps", "spec", "index"),
    [
        ([to_float()], TensorSpec("image", "int64", ()), 0),
        ([to_float()], TensorSpec("image", "float32", (28, 28)), 0),
        ([to_float()], TensorSpec("image", "uint8", (28,)), 0),
        ([to_float(), to_float()], GRAY, 1),
        ([normalize([0.1], [0.3])], GRAY, 0),
        ([to_float(), normalize([0.1, 0.2], [0.3, 0.4])], GRAY, 1),
        ([to_float(), normalize([0.1, 0.2], [0.3, 0.4])], COLOUR, 1),
    ],
    ids=["scalar", "float", "flat", "twice", "not float", "two for one channel", "two for three"],
)
def test_a_step_that_does_not_fit_the_column_is_refused_by_its_path(
    steps: list[transform_pb2.TransformStep], spec: TensorSpec, index: int
) -> None:
    built = pipeline(*steps)

    with pytest.raises(InvalidArgument) as refused:
        made_of(built, spec, "spec.transform")

    assert refused.value.fields[0][0] == f"spec.transform.steps[{index}]"
