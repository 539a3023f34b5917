"""Hypothesis strategies: tables with a column of every type that a version keeps."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

_MOMENTS = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))


def _whole(bits: int, signed: bool) -> st.SearchStrategy[Any]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


def _seconds(moments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return moments.map(lambda moment: moment.replace(microsecond=0))


SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    **{getattr(pa, f"int{bits}")(): _whole(bits, True) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): _whole(bits, False) for bits in (8, 16, 32, 64)},
    pa.float16(): st.floats(width=16, allow_nan=False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=9),
    pa.large_string(): st.text(st.characters(codec="utf-8"), max_size=9),
    pa.string_view(): st.text(st.characters(codec="utf-8"), max_size=30),
    pa.binary(): st.binary(max_size=9),
    pa.large_binary(): st.binary(max_size=9),
    pa.binary_view(): st.binary(max_size=30),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.dates(),
    pa.timestamp("s"): _seconds(_MOMENTS),
    pa.timestamp("ms"): _seconds(_MOMENTS),
    pa.timestamp("us"): _MOMENTS,
    pa.timestamp("ns"): _MOMENTS,
    pa.timestamp("us", tz="UTC"): _MOMENTS.map(lambda moment: moment.replace(tzinfo=datetime.UTC)),
    pa.time32("s"): _seconds(st.times()),
    pa.time32("ms"): _seconds(st.times()),
    pa.time64("us"): st.times(),
    pa.time64("ns"): st.times(),
    pa.decimal128(9, 2): st.decimals(-9999, 9999, places=2).map(lambda one: one.quantize(decimal.Decimal("0.01"))),
}


@st.composite
def tables(draw: st.DrawFn, types: list[pa.DataType] | None = None) -> pa.Table:
    """0 to 12 rows; scalars may be null, some are dictionaries, some columns are tensors."""
    rows = draw(st.integers(0, 12))
    columns: dict[str, pa.Array] = {}
    for index in range(draw(st.integers(1, 5))):
        arrow_type = draw(st.sampled_from(types or list(SCALARS)))
        values = draw(st.lists(st.none() | SCALARS[arrow_type], min_size=rows, max_size=rows))
        column = pa.array(values, arrow_type)
        if arrow_type == pa.string() and draw(st.booleans()):
            column = column.dictionary_encode()
        columns[f"c{index}"] = column
    if types is None and draw(st.booleans()):
        numbers = draw(st.lists(st.integers(0, 255), min_size=rows * 6, max_size=rows * 6))
        lists = pa.FixedSizeListArray.from_arrays(pa.array(numbers, pa.uint8()), 6)
        tensor = pa.fixed_shape_tensor(pa.uint8(), [2, 3])
        columns["t"] = pa.ExtensionArray.from_storage(tensor, lists) if draw(st.booleans()) else lists
    return pa.table(columns)


def values_of(table: pa.Table) -> dict[str, list[Any]]:
    """The values as Python's, whatever their encoding: tensors as flat lists."""
    return {
        name: [one.as_py() for one in _plain(column)]
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if isinstance(column.type, pa.FixedShapeTensorType):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], type=column.type.storage_type)
    return column
