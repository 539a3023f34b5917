from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from shared.dataset_version.manifest import (
    TENSOR_KEY,
    logical_field,
    logical_schema,
    row_bytes,
    stored_schema,
    tensor_array,
    tensor_field,
    to_logical,
    to_stored,
)
from shared.errors import InvalidArgument

CODES = ["u1", "i1", "u2", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


@given(
    values=st_numpy.arrays(
        dtype=st.sampled_from([np.dtype(code) for code in CODES]),
        shape=st_numpy.array_shapes(min_dims=2, max_dims=4, max_side=5),
    ),
    cut=st.data(),
)
def test_tensors_come_back_from_storage_bit_for_bit(values: np.ndarray[Any, Any], cut: st.DataObject) -> None:
    tensors = tensor_array(values)
    schema = pa.schema([tensor_field("x", tensors.type.value_type, values.shape[1:])])
    begin = cut.draw(st.integers(0, len(values) - 1))
    table = pa.Table.from_arrays([tensors], schema=schema).slice(begin)
    stored = to_stored(table)
    assert logical_schema(stored.schema, {}) == schema
    back = to_logical(stored, schema)["x"].chunk(0).to_numpy_ndarray()
    assert back.dtype == values.dtype
    assert back.tobytes() == values[begin:].tobytes()


def test_a_tensor_is_stored_as_bytes_that_say_what_they_are() -> None:
    stored = stored_schema(pa.schema([tensor_field("image", pa.uint8(), (28, 28))])).field("image")
    assert stored.type == pa.binary(784)
    assert json.loads(stored.metadata[TENSOR_KEY]) == {"value_type": "uint8", "shape": [28, 28]}


def test_other_columns_are_stored_as_they_are() -> None:
    schema = pa.schema([pa.field("a", pa.string()), pa.field("b", pa.binary(3)), pa.field("c", pa.float64())])
    assert stored_schema(schema) == schema
    assert logical_schema(schema, {}) == schema


def test_milliseconds_are_seconds_where_the_manifest_says_so() -> None:
    whole = pa.schema([("a", pa.timestamp("s", "UTC")), ("b", pa.time32("s"))])
    fine = pa.schema([("a", pa.timestamp("ms", "UTC")), ("b", pa.time32("ms"))])
    assert logical_schema(fine, {field.name: str(field.type) for field in whole}) == whole
    assert logical_schema(fine, {field.name: str(field.type) for field in fine}) == fine
    assert logical_schema(fine, {"a": "timestamp[s]", "b": "timestamp[s]"}) == fine


def test_several_chunks_become_one() -> None:
    schema = pa.schema([tensor_field("x", pa.uint8(), (2, 2)), pa.field("y", pa.int64())])
    pieces = [
        pa.Table.from_arrays([tensor_array(np.full((2, 2, 2), i, np.uint8)), pa.array([i, i])], schema=schema)
        for i in range(3)
    ]
    back = to_logical(to_stored(pa.concat_tables(pieces)), schema)
    assert [column.num_chunks for column in back.columns] == [1, 1]
    assert back["x"].chunk(0).to_numpy_ndarray()[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("given_type", "kept"),
    [
        (pa.large_string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.list_(pa.float32(), 3), pa.fixed_shape_tensor(pa.float32(), [3])),
        (pa.decimal128(10, 2), pa.decimal128(10, 2)),
    ],
)
def test_encodings_are_taken_off(given_type: pa.DataType, kept: pa.DataType) -> None:
    assert logical_field(pa.field("a", given_type)).type == kept


@pytest.mark.parametrize(
    "given_type",
    [
        pa.list_(pa.int8()),
        pa.struct([("a", pa.int8())]),
        pa.map_(pa.string(), pa.int8()),
        pa.list_(pa.string(), 2),
        pa.list_(pa.bool_(), 2),
        pa.fixed_shape_tensor(pa.uint8(), [2, 3], permutation=[1, 0]),
        pa.null(),
        pa.month_day_nano_interval(),
        pa.decimal128(5, -1),
        pa.decimal128(5, 7),
        pa.binary(0),
        pa.timestamp("us", "A B"),
        pa.timestamp("us", "weird.zone"),
        pa.timestamp("us", "Z" * 65),
        pa.dictionary(pa.int8(), pa.decimal128(5, 7)),
    ],
    ids=str,
)
def test_a_type_that_has_no_place_is_refused_by_name(given_type: pa.DataType) -> None:
    with pytest.raises(InvalidArgument, match="'odd' has the type") as refused:
        logical_field(pa.field("odd", given_type))
    assert refused.value.specific_reason == "UNSUPPORTED_COLUMN"


def test_the_width_of_a_row_is_known_where_all_columns_have_one() -> None:
    schema = pa.schema([tensor_field("x", pa.float32(), (2, 3)), pa.field("y", pa.int64()), pa.field("z", pa.bool_())])
    assert row_bytes(schema) == 24 + 8 + 1
    assert row_bytes(schema.append(pa.field("s", pa.string()))) is None
