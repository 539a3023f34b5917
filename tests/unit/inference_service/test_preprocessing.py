"""From a request's rows to the model's input; the rows that it cannot be made of are told one by one."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from inference_service.domain.rows import PREPARED, RAW, Rows
from inference_service.preprocessing import Preprocessing
from shared.checkpoint import CheckpointContent
from shared.dataset_version.manifest import Column
from shared.errors import FailedPrecondition, InvalidArgument
from tests.support.checkpoint_samples import content
from tests.support.versions import columns_of


def said(columns: list[Column], *steps: dict[str, Any], input_column: str = "x") -> CheckpointContent:
    """A checkpoint whose version was made by the first of these steps, and whose training did the others."""
    transforms = [{"steps": [*steps[:1]]}, {"steps": [*steps[1:]]}]
    return content(ingested=columns, transforms=transforms, input_column=input_column)


PHOTOS = columns_of(pa.schema([("photo", pa.binary()), ("label", pa.int64()), ("taken", pa.timestamp("us"))]))
TABLE = columns_of(
    pa.schema([("a", pa.float64()), ("s", pa.string()), ("label", pa.int64()), ("price", pa.decimal128(9, 2))])
)


def photos() -> Preprocessing:
    steps: list[dict[str, Any]] = [
        {"column": "photo", "decodeImage": {}},
        {"column": "photo", "resize": {"height": 4, "width": 5}},
        {"column": "photo", "toFloat": {}},
    ]
    return Preprocessing(said(PHOTOS, *steps, input_column="photo"))


def table() -> Preprocessing:
    steps: list[dict[str, Any]] = [
        {"column": "s", "oneHotEncode": {"categories": ["ja", "nein"], "unknown": "UNKNOWN_VALUE_ERROR"}},
        {"concat": {"columns": ["a", "s"], "into": "x"}},
    ]
    return Preprocessing(said(TABLE, *steps))


def png(shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (6, 6), (shade, shade, shade)).save(data, "PNG")
    return data.getvalue()


def objects(*items: bytes) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def test_raw_rows_have_a_tensor_for_each_column_that_the_input_is_made_of() -> None:
    assert [(spec.name, str(spec)) for spec in photos().raw] == [("photo", "BYTES [-1]")]
    assert [(spec.name, str(spec)) for spec in table().raw] == [("a", "FP64 [-1]"), ("s", "BYTES [-1]")]
    assert (photos().prepared.name, str(photos().prepared)) == ("photo", "FP32 [-1, 3, 4, 5]")
    assert (table().prepared.name, str(table().prepared)) == ("x", "FP32 [-1, 3]")


def test_a_checkpoint_of_one_tensor_column_looks_on_the_wire_as_its_column() -> None:
    one = Preprocessing(content())

    assert [(spec.name, str(spec), spec.nullable) for spec in one.raw] == [("image", "UINT8 [-1, 28, 28]", False)]
    assert (one.prepared.name, str(one.prepared)) == ("image", "FP32 [-1, 1, 28, 28]")


def test_an_image_that_does_not_decode_is_refused_alone() -> None:
    rows = Rows(RAW, {"photo": objects(png(10), b"no image", png(30))})

    prepared, refused = photos().prepare(rows)

    assert list(refused) == [1]
    assert refused[1].startswith("tensor 'photo': ")
    for row, shade in ((0, 10), (2, 30)):
        alone, none = photos().prepare(Rows(RAW, {"photo": objects(png(shade))}))
        assert not none
        assert prepared[row].tobytes() == alone[0].tobytes()
        assert np.unique(prepared[row]).tolist() == [np.float32(shade) / np.float32(255)]
    assert not prepared[1].any()


def jpeg_that_claims(width: int, height: int) -> bytes:
    """A small file whose header names another size."""
    data = io.BytesIO()
    Image.new("RGB", (6, 6)).save(data, "JPEG")
    small = data.getvalue()
    size = small.index(b"\xff\xc0") + 5  # the frame's header: length, precision, then height and width
    return small[:size] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + small[size + 4 :]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_a_hundred_megapixels_is_refused_before_it_is_decoded() -> None:
    started_s = time.process_time()
    _, refused = photos().prepare(Rows(RAW, {"photo": objects(jpeg_that_claims(10_000, 10_000), png(3))}))
    assert [*refused] == [0]
    assert "tensor 'photo': " in refused[0]
    assert "10000×10000 pixels; use fewer than 100,000,000" in refused[0]
    assert time.process_time() - started_s < 0.5  # decoding it takes more


def test_one_row_that_is_bad_is_refused() -> None:
    prepared, refused = photos().prepare(Rows(RAW, {"photo": objects(b"")}))

    assert list(refused) == [0]
    assert prepared.shape == (1, 3, 4, 5)


def test_a_refused_row_names_the_tensors_that_the_step_works_on() -> None:
    rows = Rows(
        RAW,
        {"a": np.array([1.0, 2.0, 3.0, 4.0]), "s": objects(b"ja", b"vielleicht", b"\xff", b"nein")},
        {"a": np.array([True, False, False, False])},
    )

    prepared, refused = table().prepare(rows)

    assert sorted(refused) == [0, 1, 2]
    assert refused[0].startswith("tensor 'a', 's': ")  # concat: one of both is null
    assert refused[1].startswith("tensor 's': ")
    assert refused[2].startswith("tensor 's' ")
    assert prepared[3].tolist() == [4, 0, 1]


def test_prepared_rows_go_as_they_are() -> None:
    given = np.random.default_rng(1).random((2, 3), np.float32)

    prepared, refused = table().prepare(Rows(PREPARED, {"x": given}))

    assert prepared is given
    assert not refused


def test_a_column_that_cannot_be_sent_is_refused_where_the_input_needs_it_and_only_there() -> None:
    assert table().raw  # `price` is a decimal, too, and not needed
    cast: dict[str, Any] = {"column": "price", "cast": {"arrowType": "double"}}
    with pytest.raises(FailedPrecondition, match="column 'price'"):
        Preprocessing(said(TABLE, cast, {"concat": {"columns": ["price"], "into": "x"}}))


def test_steps_that_do_not_fit_the_ingested_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="no column 'b'"):
        Preprocessing(said(TABLE, {"concat": {"columns": ["b"], "into": "x"}}))
    with pytest.raises(FailedPrecondition, match="not float32"):
        Preprocessing(said(TABLE, {"rename": {"columns": {"a": "x"}}}))


@pytest.mark.parametrize("allowed", [(), ("os:getcwd",)])
def test_a_function_that_the_operator_does_not_allow_is_never_called(allowed: tuple[str, ...]) -> None:
    custom = {"custom": {"function": "tests.unit.inference_service.test_preprocessing:explode", "columns": ["a"]}}

    with pytest.raises(FailedPrecondition) as refused:
        Preprocessing(said(TABLE, custom, {"concat": {"columns": ["a"], "into": "x"}}), allowed)

    assert refused.value.specific_reason == "CUSTOM_FUNCTION_NOT_ALLOWED"


def explode(_: pa.RecordBatch) -> pa.RecordBatch:
    raise AssertionError("it was called")
