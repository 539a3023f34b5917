"""The records that several input columns make: their types, and which columns and rows are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shared.checkpoint.nan_values import finite_rows
from shared.models.inputs import arrays_of
from shared.transforms import RowError, ScalarType, Schema, TensorSpec, TensorType
from shared.transforms.records import (
    UnusableColumn,
    bytes_of_input,
    record_of_columns,
    row_shape_from_config,
    row_shape_to_config,
    zero_rows,
)

SCHEMA: Schema = {
    "pixels": TensorType("uint8", (2, 3)),
    "vector": TensorType("float64", (4,)),
    "age": ScalarType(pa.float64()),
    "count": ScalarType(pa.int16()),
    "flag": ScalarType(pa.bool_()),
    "name": ScalarType(pa.string()),
    "huge": ScalarType(pa.uint64()),
    "ragged": TensorType("float32", (None, 3)),
}
USABLE = ("flag", "pixels", "age", "count", "vector")


def test_fractions_whole_numbers_and_flags_have_one_type_each() -> None:
    row = record_of_columns(SCHEMA, USABLE, "inputs")

    assert row.tensors == (
        TensorSpec("flag", "bool", ()),
        TensorSpec("pixels", "int64", (2, 3)),
        TensorSpec("age", "float32", ()),
        TensorSpec("count", "int64", ()),
        TensorSpec("vector", "float32", (4,)),
    )
    assert row_shape_from_config(row_shape_to_config(row)) == row
    assert row_shape_from_config(row_shape_to_config((3, 4))) == (3, 4)
    assert bytes_of_input(row) >= 1 + 48 + 4 + 8 + 16


def test_records_hold_the_values_of_the_columns_and_are_cut_joined_and_cleared_as_rows() -> None:
    row = record_of_columns(SCHEMA, USABLE, "inputs")
    batch = {
        "pixels": np.arange(18, dtype=np.uint8).reshape(3, 2, 3),
        "vector": np.arange(12.0).reshape(3, 4),
        "age": pa.array([0.1, 0.2, 0.3]),
        "count": pa.array([-1, 2, 300], pa.int16()),
        "flag": pa.array([True, False, True]),
    }
    records = row.records(batch, "inputs")
    arrays = arrays_of(np.concatenate([records[:1], records[1:]]))

    assert isinstance(arrays, dict)
    assert list(arrays) == list(USABLE)
    assert all(np.array_equal(arrays[name], np.asarray(batch[name]).astype(arrays[name].dtype)) for name in USABLE)
    assert all(one.flags.c_contiguous and one.flags.writeable for one in arrays.values())
    records[[1]] = 0
    assert np.array_equal(records[1:2], zero_rows(row, 1))


def test_a_row_counts_as_finite_if_each_of_its_inputs_is() -> None:
    records = zero_rows(record_of_columns(SCHEMA, USABLE, "inputs"), 4)
    records["age"][1] = np.nan
    records["vector"][3, 2] = np.inf

    assert finite_rows(records).tolist() == [True, False, True, False]


@pytest.mark.parametrize("name", ["name", "huge", "ragged"])
def test_a_column_that_no_model_computes_with_is_named_with_a_remedy(name: str) -> None:
    with pytest.raises(UnusableColumn) as refused:
        record_of_columns(SCHEMA, ("age", name), "spec.input_columns")

    assert (refused.value.path, refused.value.name) == ("spec.input_columns[1]", name)
    assert "add steps such as cast" in refused.value.problem


def test_a_null_is_refused_with_its_row() -> None:
    row = record_of_columns(SCHEMA, ("age",), "inputs")

    with pytest.raises(RowError) as refused:
        row.records({"age": pa.array([1.0, None, 2.0, None])}, "spec.input_columns")

    assert (refused.value.row, refused.value.path) == (1, "spec.input_columns")
    assert "column 'age' is null" in refused.value.problem
