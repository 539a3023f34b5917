"""What a training job reads of its version, and what it makes of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.transforms import RowKeys
from shared.transforms.steps import images as decoding
from tests.support.versions import columns_of
from tests.support.watched_decodes import watched_decodes
from tests.unit.shared.transforms.samples import encoded
from train_service.domain.spec import TrainingSpec
from train_service.loading.preprocessing import Preprocessing, Rows

COLUMNS = columns_of(
    pa.schema(
        [("a", pa.float64()), ("b", pa.float64()), ("name", pa.string()), ("photo", pa.binary()), ("label", pa.int64())]
    )
)
CONCAT: dict[str, Any] = {"concat": {"columns": ["b", "a"], "into": "x"}}


def preprocessing(*steps: dict[str, Any], input_column: str = "x", **changes: Any) -> Preprocessing:
    spec = TrainingSpec(
        dataset_version="datasets/d/versions/v",
        input_column=input_column,
        transform={"steps": list(steps)},
        model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
        epochs=1,
        global_batch_size=64,
        **changes,
    )
    return Preprocessing(spec, COLUMNS)


def rows(**columns: list[Any]) -> Rows:
    count = len(next(iter(columns.values())))
    arrays = {name: pa.array(values) for name, values in columns.items()}
    return Rows({}, pa.RecordBatch.from_pydict(arrays), np.zeros(count, np.int64), np.arange(100, 100 + count))


def test_only_the_columns_that_the_input_is_made_of_are_read() -> None:
    assert preprocessing(CONCAT).columns == ["a", "b"]
    assert preprocessing({"column": "b", "standardize": {"mean": 1, "deviation": 2}}, CONCAT).columns == ["a", "b"]


def test_steps_on_columns_that_are_not_read_are_left_out() -> None:
    one = preprocessing(
        {"column": "name", "ordinalEncode": {"categories": ["x"]}},
        {"select": {"columns": ["label", "a", "b", "photo"]}},
        {"drop": {"columns": ["photo"]}},
        CONCAT,
    )

    assert one.columns == ["a", "b"]
    assert one(rows(a=[1.0, 2.0], b=[3.0, 4.0])).tolist() == [[3, 1], [4, 2]]


def test_the_whole_transform_goes_into_a_checkpoint_each_step_with_its_column() -> None:
    one = preprocessing({"decodeImage": {}}, {"centerCrop": {"height": 4, "width": 4}}, input_column="photo")

    assert [step["column"] for step in one.config["steps"]] == ["photo", "photo"]


def test_a_row_that_a_step_cannot_work_on_is_reported_by_its_id() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^spec.transform.steps\[0\]: row 102 of datasets/d/versions/v: "
    ) as raised:
        preprocessing(CONCAT)(rows(a=[1.0, 2.0, None], b=[1.0, 2.0, 3.0]))

    assert raised.value.metadata["row_id"] == "102"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_an_input_that_is_not_finite_is_refused_with_its_column_row_and_split(value: float) -> None:
    made = preprocessing(CONCAT, validation_split="validation")
    given = rows(a=[1.0, 2.0, value], b=[1.0, 2.0, 3.0])
    for keys, split in ((RowKeys(1, 0, given.row_ids), "train"), (None, "validation")):
        with pytest.raises(InvalidArgument, match=r"nan_as_null.*spec\.allow_non_finite") as raised:
            made(given, keys)
        assert f"row 102 of split {split!r} of datasets/d/versions/v: column 'a' is {value};" in raised.value.message
        assert raised.value.specific_reason == "NON_FINITE_VALUES"
        assert (raised.value.metadata["row_id"], raised.value.metadata["column"]) == ("102", "a")


def test_a_number_that_a_step_makes_infinite_is_reported_as_the_steps_doing() -> None:
    given = rows(a=[1.0, 1e300], b=[1.0, 2.0])
    with pytest.raises(InvalidArgument, match=r"row 101 .*its values are finite.* makes inf .*column 'x'"):
        preprocessing(CONCAT)(given)


def test_inputs_that_are_not_finite_are_given_on_where_they_are_allowed() -> None:
    made = preprocessing(CONCAT, allow_non_finite=True)(rows(a=[math.nan, 1e300], b=[1.0, 2.0]))
    assert np.array_equal(made, np.array([[1, math.nan], [2, math.inf]], np.float32), equal_nan=True)


def test_the_largest_finite_inputs_are_taken() -> None:
    most = float(np.finfo(np.float32).max)
    assert preprocessing(CONCAT)(rows(a=[most, most], b=[most, -most])).tolist() == [[most, most], [-most, most]]


def test_columns_whose_nan_reach_the_input_are_known_before_any_row() -> None:
    scaled: dict[str, Any] = {"column": "a", "standardize": {"mean": 1, "deviation": 2}}
    clipped: dict[str, Any] = {"column": "a", "minMaxScale": {"min": 0, "max": 1, "clip": True}}
    assert preprocessing(scaled, CONCAT).carried_floats == ["a", "b"]
    assert preprocessing(clipped, CONCAT).carried_floats == ["b"], "clipped infinities are finite"
    assert preprocessing({"column": "b", "bucketize": {"boundaries": [1]}}, CONCAT).carried_floats == ["a"]


def test_a_step_draws_the_same_for_a_row_whatever_else_the_transform_makes() -> None:
    image = np.random.default_rng(1).integers(0, 256, (8, 20, 20), np.uint8)
    given = Rows({"image": image}, None, np.zeros(8, np.int64), np.arange(8))
    columns = columns_of(pa.schema([("image", pa.fixed_shape_tensor(pa.uint8(), [20, 20])), ("name", pa.string())]))
    crop: list[dict[str, Any]] = [{"randomCrop": {"height": 8, "width": 8}}, {"toFloat": {}}]

    def cropped(*first: dict[str, Any]) -> bytes:
        spec = TrainingSpec(
            dataset_version="datasets/d/versions/v",
            transform={"steps": [*first, *crop]},
            model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
            epochs=1,
            global_batch_size=64,
        )
        return Preprocessing(spec, columns)(given, RowKeys(1, 0, given.row_ids)).tobytes()

    # Neither step is needed, so neither is run; the crop keeps the place that it has in the transform.
    unneeded = cropped({"column": "name", "cast": {"arrowType": "string"}})
    assert unneeded == cropped({"drop": {"columns": ["name"]}})
    assert unneeded != cropped()


def test_images_are_decoded_a_few_at_a_time_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (16, 30, 20, 3), np.uint8)
    given = rows(photo=[encoded(one) for one in pixels])
    one = preprocessing(
        {"decodeImage": {}}, {"randomCrop": {"height": 8, "width": 8}}, {"toFloat": {}}, input_column="photo"
    )
    decoded = watched_decodes(monkeypatch)
    for keys in (None, RowKeys(1, 0, given.row_ids)):
        at_once = one(given, keys)
        with monkeypatch.context() as bounded:
            bounded.setattr(decoding, "PIXELS_AT_ONCE", 4 * 600)
            cut = one(given, keys)
        assert cut.tobytes() == at_once.tobytes()
        assert cut.shape == (16, 3, 8, 8)
        assert (cut.flags.c_contiguous, cut.flags.writeable) == (True, True)
        assert len(one(given.slice(0, 0))) == 0
    assert [len(images) for images in decoded] == [16, 4, 4, 4, 4, 0] * 2

    broken = rows(photo=[encoded(pixels[0])] * 9 + [b"no image"])
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 4 * 600)
    with pytest.raises(InvalidArgument, match=r"^spec.transform.steps\[0\]: row 109 of "):
        one(broken)
