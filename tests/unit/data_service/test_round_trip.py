"""Whatever Arrow file a version takes comes back as it was given: from its files, and from the stream of its rows."""

from __future__ import annotations

import decimal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_service.formats.arrow import ArrowRows
from data_service.reading import Selection, read_stream
from millrace.data.v1 import data_service_pb2
from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms import schema_of, schema_of_columns
from tests.support.arrow_tables import SCALARS
from tests.support.import_sources import found_file, table_of
from tests.support.transforming import SOURCE, commit_tables

ZONES = [None, "UTC", "+02:00", "-11:30", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5"]
A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
NUMBERS = [one for one in SCALARS if kinds.is_integer(one) or kinds.is_floating(one)]
OTHERS = [
    one for one in SCALARS if not (kinds.is_temporal(one) or kinds.is_floating(one) or kinds.is_fixed_size_binary(one))
]

timestamps = st.builds(pa.timestamp, st.sampled_from(sorted(A_DAY)), st.sampled_from(ZONES))
times = st.sampled_from([pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")])
decimals = st.integers(1, 38).flatmap(lambda digits: st.builds(pa.decimal128, st.just(digits), st.integers(0, digits)))
scalars = st.one_of(
    st.sampled_from(OTHERS),
    st.sampled_from([pa.float16(), pa.float32(), pa.float64()]),
    timestamps,
    times,
    st.just(pa.date32()),
    decimals,
    st.builds(pa.binary, st.integers(1, 20)),
)
dictionaries = st.builds(
    pa.dictionary,
    st.sampled_from([pa.int8(), pa.uint16(), pa.int64()]),
    st.one_of(st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.int32(), pa.float64()]), timestamps),
)
tensors = st.builds(
    pa.fixed_shape_tensor, st.sampled_from(NUMBERS), st.lists(st.integers(1, 4), min_size=1, max_size=3)
)
lists = st.builds(pa.list_, st.sampled_from(NUMBERS), st.integers(1, 6))


def numbers_of(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([low, high]) | st.integers(low, high)


def values_of(arrow_type: pa.DataType) -> st.SearchStrategy[Any]:
    """Of a type of scalars; what counts days or fractions of seconds as the numbers that it keeps."""
    if kinds.is_floating(arrow_type):
        return st.floats(width=arrow_type.bit_width)
    if kinds.is_timestamp(arrow_type):
        most = 2**63 - 1 if arrow_type.unit != "s" else (2**63 - 1) // 1000  # as Parquet has no whole seconds
        return numbers_of(-most, most)
    if kinds.is_time(arrow_type):
        return numbers_of(0, A_DAY[arrow_type.unit] - 1)
    if kinds.is_date32(arrow_type):
        return numbers_of(-(2**31), 2**31 - 1)
    if kinds.is_decimal(arrow_type):
        most = 10**arrow_type.precision - 1
        exact = decimal.Context(prec=40)
        return numbers_of(-most, most).map(lambda one: decimal.Decimal(one).scaleb(-arrow_type.scale, exact))
    if kinds.is_fixed_size_binary(arrow_type):
        return st.binary(min_size=arrow_type.byte_width, max_size=arrow_type.byte_width)
    return SCALARS[arrow_type]


def array_of(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if kinds.is_temporal(arrow_type):
        return pa.array(values, pa.int32() if arrow_type.bit_width == 32 else pa.int64()).view(arrow_type)
    return pa.array(values, arrow_type)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(1, 9))
    columns: dict[str, pa.Array] = {}
    for index, arrow_type in enumerate(
        draw(st.lists(st.one_of(scalars, dictionaries, tensors, lists), min_size=1, max_size=6))
    ):
        if kinds.is_fixed_size_list(arrow_type) or isinstance(arrow_type, pa.FixedShapeTensorType):
            storage = arrow_type if kinds.is_fixed_size_list(arrow_type) else arrow_type.storage_type
            count = rows * storage.list_size
            numbers = draw(st.lists(values_of(storage.value_type), min_size=count, max_size=count))
            column = pa.FixedSizeListArray.from_arrays(array_of(numbers, storage.value_type), storage.list_size)
            column = column if storage == arrow_type else pa.ExtensionArray.from_storage(arrow_type, column)
        elif kinds.is_dictionary(arrow_type):
            # A dictionary may have what no row has, and a null in place of an index.
            words = draw(st.lists(values_of(arrow_type.value_type), min_size=1, max_size=4))
            entries = array_of(words, arrow_type.value_type)
            indices = draw(st.lists(st.none() | st.integers(0, len(entries) - 1), min_size=rows, max_size=rows))
            column = pa.DictionaryArray.from_arrays(pa.array(indices, arrow_type.index_type), entries)
        else:
            column = array_of(
                draw(st.lists(st.none() | values_of(arrow_type), min_size=rows, max_size=rows)), arrow_type
            )
        columns[f"c{index}"] = column
    return pa.table(columns)


def kept(given_type: pa.DataType) -> pa.DataType:
    """What a version makes of a type: without encodings, and lists as tensors."""
    if kinds.is_dictionary(given_type):
        return kept(given_type.value_type)
    if kinds.is_fixed_size_list(given_type):
        return pa.fixed_shape_tensor(given_type.value_type, [given_type.list_size])
    for plain, same in (
        (pa.string(), (pa.large_string(), pa.string_view())),
        (pa.binary(), (pa.large_binary(), pa.binary_view())),
    ):
        if given_type in same:
            return plain
    return given_type


def bits(column: pa.ChunkedArray) -> pa.Array:
    """Without encodings, and of floats the bits, so that one NaN is like another."""
    values = column.combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    values = values.storage if isinstance(values, pa.ExtensionArray) else values
    values = values.flatten() if kinds.is_fixed_size_list(values.type) else values
    if kinds.is_floating(values.type):
        return values.view(getattr(pa, f"int{values.type.bit_width}")())
    return values.cast(kept(values.type))


def assert_same(read: pa.Table, table: pa.Table) -> None:
    assert read.column_names == table.column_names
    assert [field.type for field in read.schema] == [kept(field.type) for field in table.schema]
    for name in table.column_names:
        assert bits(read[name]).equals(bits(table[name])), name


@given(table=tables())
@example(pa.table({"f": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]), "h": np.array([np.nan] * 5, np.float16)}))
@example(pa.table({"s": array_of([0, None], pa.timestamp("s", "UTC")), "t": array_of([86_399, None], pa.time32("s"))}))
@settings(max_examples=120)
def test_every_value_comes_back_bit_for_bit_and_every_type_as_the_manifest_names_it(table: pa.Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.arrow"
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
        store = open_store(StoreSettings(url=(Path(folder) / "store").as_uri()))
        given_rows = table_of(ArrowRows(found_file(path)))
        assert_same(given_rows, table)

        commit_tables(store, {"train": given_rows})
        version = load_version(store, SOURCE)
        reader = VersionReader(store, version)
        assert [column.arrow_type for column in version.columns] == [str(one) for one in reader.select(None).types]
        assert schema_of_columns(version.columns) == schema_of(reader.select(None))
        assert_same(pa.concat_tables([reader.read(group) for group in reader.row_groups("train")]), table)

        selection = Selection(split="", columns=[], offset=0, limit=0)
        messages = [
            data_service_pb2.ReadVersionResponse.FromString(one).arrow_ipc for one in read_stream(reader, selection)
        ]
        assert_same(pa.ipc.open_stream(b"".join(messages)).read_all(), table)
