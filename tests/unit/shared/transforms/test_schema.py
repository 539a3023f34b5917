"""Schemas and batches: what a version's columns are to the steps, and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shared.dataset_version.manifest import Column, shape_of, tensor_array, tensor_field
from shared.errors import InvalidArgument
from shared.transforms import (
    RaggedImages,
    ScalarType,
    TensorType,
    arrow_schema,
    arrow_type_of,
    batch_of,
    row_count,
    schema_of,
    schema_of_columns,
    table_of,
)

TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.binary(7),
    pa.date32(),
    pa.time32("ms"),
    pa.time64("ns"),
    pa.timestamp("us"),
    pa.timestamp("s", "UTC"),
    pa.timestamp("ns", "America/Argentina/Buenos_Aires"),
    pa.timestamp("ms", "+02:00"),
    pa.decimal128(10, 2),
    pa.decimal128(5, 5),
]
TENSORS = [
    tensor_field("bytes", pa.uint8(), (28, 28)),
    tensor_field("floats", pa.float32(), (3,)),
    tensor_field("halves", pa.float16(), (2, 1)),
    tensor_field("longs", pa.int64(), (1,)),
]


@pytest.mark.parametrize("arrow_type", TYPES, ids=str)
def test_a_type_is_read_back_from_its_spelling(arrow_type: pa.DataType) -> None:
    assert arrow_type_of(str(arrow_type)) == arrow_type


@pytest.mark.parametrize("spelling", ["", "int", "timestamp[us, tz=]", "decimal128(99, 2)", "list<item: int8>"])
def test_other_spellings_are_refused(spelling: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        arrow_type_of(spelling)


def test_logical_columns_a_manifests_columns_and_schemas_say_the_same() -> None:
    arrow = pa.schema([*(pa.field(str(one), one) for one in TYPES), *TENSORS])
    columns = [Column(name=one.name, arrow_type=str(one.type), shape=shape_of(one.type)) for one in arrow]

    assert arrow_schema(schema_of(arrow)).equals(arrow)
    assert schema_of_columns(columns) == schema_of(arrow)
    assert schema_of(arrow)["floats"] == TensorType("float32", (3,))
    assert not arrow_schema({"x": ScalarType(pa.int8(), nullable=False)}).field("x").nullable


@pytest.mark.parametrize("zone", ["A B", "weird.zone", "a]b", "one, tz=two", "two\nlines"])
def test_a_zone_that_an_older_version_kept_is_read_back(zone: str) -> None:
    arrow_type = pa.timestamp("us", zone)

    assert schema_of_columns([Column(name="t", arrow_type=str(arrow_type), shape=[])]) == {"t": ScalarType(arrow_type)}


def test_a_shape_that_is_not_fixed_has_no_column() -> None:
    with pytest.raises(ValueError, match=r"'x' is uint8 of shape \(\?, \?, 3\); fix its shape"):
        arrow_schema({"x": TensorType("uint8", (None, None, 3))})


def table() -> pa.Table:
    images = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    halves = np.arange(6, dtype=np.float16).reshape(6, 1)
    columns = {"x": pa.array([1, None, 3, 4, 5, 6]), "image": tensor_array(images), "half": tensor_array(halves)}
    return pa.table(columns)


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5), slice(3, 3)])
def test_tables_become_batches_and_tables_again(rows: slice) -> None:
    given = table()[rows]

    for batch in (batch_of(given), batch_of(given.combine_chunks().to_batches()[0]) if len(given) else batch_of(given)):
        assert row_count(batch) == len(given)
        assert batch["image"].tolist() == np.arange(24, dtype=np.uint8).reshape(6, 2, 2)[rows].tolist()
        assert table_of(batch, given.schema).to_pydict() == given.to_pydict()


def test_tables_of_many_chunks_or_none_become_batches_too() -> None:
    whole = table()
    chunked = pa.concat_tables([whole[:2], whole[2:2], whole[2:]])

    assert batch_of(chunked)["image"].tolist() == batch_of(whole)["image"].tolist()
    assert batch_of(whole.schema.empty_table())["image"].shape == (0, 2, 2)


def test_tensors_come_without_a_copy() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)

    assert np.shares_memory(batch_of(pa.table({"image": tensor_array(images)}))["image"], images)


def test_nulls_in_tensors_and_batches_that_do_not_fit_are_refused() -> None:
    storage = pa.array([[1, 2], None], pa.list_(pa.int64(), 2))
    with pytest.raises(InvalidArgument, match="has nulls"):
        batch_of(pa.table({"t": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), [2]), storage)}))
    with pytest.raises(ValueError, match="no column 'y', only x"):
        table_of({"x": pa.array([1])}, pa.schema([("y", pa.int64())]))
    with pytest.raises(ValueError, match="'x' is int64, not string"):
        table_of({"x": pa.array([1])}, pa.schema([("x", pa.string())]))
    with pytest.raises(ValueError, match="unequal sizes"):
        table_of({"x": RaggedImages((), (None, None, 3))}, pa.schema([("x", pa.binary())]))
