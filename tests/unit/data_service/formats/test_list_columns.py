"""Columns of lists in typed files: tensors where a type says how long each list is, and what is said if none does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.formats.typed_columns import TypedColumns
from shared.errors import InvalidArgument
from tests.support.import_sources import Quarantine, found_file, opened, source_of, whole

KINDS = ["arrow", "parquet"]


def written(folder: Path, kind: str, column: pa.Array, *, store_schema: bool = False) -> Any:
    """A source of that column, `x`, beside the rows' places, `n`."""
    table = pa.table({"n": range(len(column)), "x": column})
    if kind == "parquet":
        # As other writers leave it, without the Arrow schema: no fixed sizes, and no extensions.
        pq.write_table(table, folder / "a", store_schema=store_schema)
    else:
        with pa.OSFile(str(folder / "a"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return source_of((folder / "a").as_uri(), kind)


def tensor(value_type: str, *shape: int) -> str:
    return f"fixed_shape_tensor[value_type={value_type}, shape={list(shape)}]"


def read_as(folder: Path, source: Any, arrow_type: str) -> tuple[list[Any], list[int], Quarantine]:
    table, bad = whole(folder, source, types={"x": arrow_type})
    column = table["x"].combine_chunks()
    return column.to_numpy_ndarray().tolist(), table["n"].to_pylist(), bad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "values", "arrow_type"),
    [
        (pa.list_(pa.float32()), [[1.5, 2.5], [3.5, 4.5]], tensor("float", 2)),
        (pa.large_list(pa.float64()), [[1.5, 2.5], [3.5, 4.5]], tensor("float", 2)),
        (pa.list_(pa.uint8()), [[1, 2, 3, 4], [5, 6, 7, 8]], tensor("uint8", 2, 2)),
        (
            pa.list_(pa.list_(pa.uint8())),
            [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]],
            tensor("int16", 3, 2),
        ),
        (pa.list_(pa.int8(), 2), [[1, 2], [3, 4]], tensor("int8", 2)),
        (pa.list_(pa.list_(pa.int8(), 2), 1), [[[1, 2]], [[3, 4]]], tensor("int8", 1, 2)),
    ],
    ids=lambda one: str(one) if isinstance(one, pa.DataType) else "",
)
def test_lists_of_one_length_become_tensors_where_a_type_gives_the_length(
    tmp_path: Path, kind: str, given: pa.DataType, values: list[Any], arrow_type: str
) -> None:
    source = written(tmp_path, kind, pa.array(values, given))
    read, places, bad = read_as(tmp_path, source, arrow_type)
    flat = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert read == ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]] if values == flat else values)
    assert places == [0, 1]
    assert bad.rows == []


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_do_not_fit_are_bad_rows(tmp_path: Path, kind: str) -> None:
    lists = [[1.0, 2.0], [1.0], None, [3.0, None], [1.0, 2.0, 3.0], [], [4.0, 5.0], [1e300, 0.0], [6.0, 7.0]]
    source = written(tmp_path, kind, pa.array(lists, pa.list_(pa.float64())))
    read, places, bad = read_as(tmp_path, source, tensor("float", 2))
    assert (read, places) == ([[1, 2], [4, 5], [6, 7]], [0, 6, 8])
    assert bad.places == [f"row {row}" for row in (2, 3, 4, 5, 6, 8)]
    assert {row.reason for row in bad.rows} == {
        "column 'x' does not fit extension<arrow.fixed_shape_tensor[value_type=float, shape=[2]]>"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_lists_that_do_not_fit_are_bad_rows(tmp_path: Path, kind: str) -> None:
    good = [[1, 2], [3, 4]]
    lists: list[Any] = [good, [[1, 2, 3], [4]], None, [[1, 2]], [[1, 2], None], [[1, 2], [3, None]], [[], []], good]
    source = written(tmp_path, kind, pa.array(lists, pa.list_(pa.list_(pa.int64()))))
    read, places, bad = read_as(tmp_path, source, tensor("int64", 2, 2))
    assert (read, places) == ([good, good], [0, 7])
    assert bad.places == [f"row {row}" for row in range(2, 8)]


def test_no_row_that_fits_leaves_none(tmp_path: Path) -> None:
    source = written(tmp_path, "parquet", pa.array([[1], None], pa.list_(pa.int64())))
    assert read_as(tmp_path, source, tensor("int64", 2))[:2] == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_a_large_batch_has_its_own_lists(tmp_path: Path, kind: str) -> None:
    lists = [[float(row), -float(row)] for row in range(3000)]
    source = written(tmp_path, kind, pa.array(lists))
    read, places, _ = read_as(tmp_path, source, tensor("double", 2))
    assert read == lists
    assert places == list(range(3000))


@pytest.mark.parametrize("values", [[[1, 2]], [[[1, 2]]]], ids=["lists", "lists of lists"])
def test_the_type_that_a_refusal_names_works(tmp_path: Path, values: list[Any]) -> None:
    source = written(tmp_path, "parquet", pa.array(values))
    with pytest.raises(
        InvalidArgument, match=r"column 'x' has the type list.*where all rows have that shape"
    ) as refused:
        opened(tmp_path, source)
    named = re.search(r"column_types, such as (fixed_shape_tensor\[.*?\]\]) ", refused.value.message)
    assert named is not None
    (rows,) = opened(tmp_path, source, types={"x": named[1]})
    assert str(rows.rows.schema.field("x").type).endswith(f"{named[1]}>")


@pytest.mark.parametrize(
    ("given", "arrow_type"),
    [
        (pa.list_(pa.int64()), "int64"),
        (pa.list_(pa.int64()), "string"),
        (pa.list_(pa.string()), tensor("float", 2)),
        (pa.list_(pa.list_(pa.int64())), tensor("int64", 4)),
        (pa.list_(pa.list_(pa.int64())), tensor("int64", 1, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_that_no_list_fits_is_refused_naming_column_and_type(
    tmp_path: Path, kind: str, given: pa.DataType, arrow_type: str
) -> None:
    source = written(tmp_path, kind, pa.array([None, None], given))
    with pytest.raises(InvalidArgument, match=r"column 'x' has the type list<.*it cannot be cast to "):
        opened(tmp_path, source, types={"x": arrow_type})


def opaque(lists: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.opaque(lists.type, "t", "v"), lists)


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_size_lists_within_an_extension_become_tensors_of_their_size(tmp_path: Path, kind: str) -> None:
    values = [list(range(6)), list(range(6, 12))]
    source = written(tmp_path, kind, opaque(pa.array(values, pa.list_(pa.int64(), 6))), store_schema=True)
    for arrow_type in (tensor("int64", 6), tensor("float", 6)):
        assert read_as(tmp_path, source, arrow_type)[:2] == (values, [0, 1])
    read, _, bad = read_as(tmp_path, source, tensor("int16", 2, 3))
    assert (read, bad.rows) == ([[row[:3], row[3:]] for row in values], [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrow_type", [tensor("int64", 2), tensor("float", 2), tensor("int64", 12)])
def test_fixed_size_lists_within_an_extension_are_bad_rows_where_another_size_is_wanted(
    tmp_path: Path, kind: str, arrow_type: str
) -> None:
    lists = opaque(pa.array([list(range(6)), None, list(range(6, 12))], pa.list_(pa.int64(), 6)))
    source = written(tmp_path, kind, lists, store_schema=True)
    read, _, bad = read_as(tmp_path, source, arrow_type)
    assert read == []
    assert bad.places == ["row 1", "row 2", "row 3"]


@pytest.mark.parametrize("arrow_type", [tensor("int64", 3), tensor("double", 3)])
def test_lists_of_a_fixed_size_of_none_are_bad_rows(tmp_path: Path, arrow_type: str) -> None:
    source = written(tmp_path, "arrow", pa.array([[], None, []], pa.list_(pa.int64(), 0)))
    read, _, bad = read_as(tmp_path, source, arrow_type)
    assert read == []
    assert bad.places == ["row 1", "row 2", "row 3"]


def test_a_column_that_would_have_more_rows_than_it_came_with_is_refused(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int64(), 4))})
    (tmp_path / "a").write_bytes(b"")
    of_two = pa.schema([pa.field("x", pa.fixed_shape_tensor(pa.int64(), [2]))])
    with pytest.raises(InvalidArgument, match=r"column 'x' has 4 values for 2 rows"):
        TypedColumns(found_file(tmp_path / "a"), of_two).table(batch, Quarantine())


def test_lists_whose_offsets_are_damaged_are_refused(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"".join(one.to_bytes(4, "little") for one in (0, 10**6, 2, 4)))
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 3, [None, offsets], children=[pa.array([1, 2, 3, 4])])
    source = written(tmp_path, "arrow", lists)
    with pytest.raises(InvalidArgument, match=r"not a whole Arrow file: .*Offset"):
        read_as(tmp_path, source, tensor("int64", 2))
