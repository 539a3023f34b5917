"""Columns of types that no version keeps: another that is given for them, and what is said where none is."""

from __future__ import annotations

import base64
import datetime
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.formats import interface
from data_service.formats.interface import decoded_bytes
from shared.errors import InvalidArgument
from tests.support.import_sources import Quarantine, opened, source_of, table_of, whole

Write = Callable[[Path, pa.Table], None]


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path)


FOREIGN = [
    (pa.nulls(2), "int32", [None, None]),
    (pa.nulls(2), "timestamp[us, tz=UTC]", [None, None]),
    (pa.nulls(2), "fixed_size_binary[3]", [None, None]),
    (pa.array([86_400_000, None], pa.date64()), "date32", [datetime.date(1970, 1, 2), None]),
    (pa.array([5, None], pa.duration("ms")), "int64", [5, None]),
    (pa.array([Decimal("1.50"), None], pa.decimal256(60, 2)), "decimal128(10, 2)", [Decimal("1.50"), None]),
    (pa.array([Decimal("1.50"), None], pa.decimal64(6, 2)), "double", [1.5, None]),
    (pa.array([0, None], pa.timestamp("us", "A B")), "timestamp[us]", [datetime.datetime(1970, 1, 1), None]),
]


@pytest.mark.parametrize(("column", "arrow_type", "values"), FOREIGN, ids=lambda one: str(getattr(one, "type", "")))
@pytest.mark.parametrize(("kind", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
def test_a_given_type_saves_a_column(
    tmp_path: Path, kind: str, write: Write, column: pa.Array, arrow_type: str, values: list[Any]
) -> None:
    write(tmp_path / "a", pa.table({"n": [1, 2], "x": column}))
    read, bad = whole(tmp_path, source_of((tmp_path / "a").as_uri(), kind), types={"x": arrow_type})
    assert read["x"].to_pylist() == values
    assert read["n"].to_pylist() == [1, 2]
    assert bad.rows == []


NAIVE = [
    pa.array([datetime.datetime(2024, 7, 1, 12)] * 2),
    pa.array([datetime.date(2024, 7, 1)] * 2),
    pa.array([86_400_000] * 2, pa.date64()),
]


@pytest.mark.parametrize("column", NAIVE, ids=lambda one: str(one.type))
@pytest.mark.parametrize(("kind", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
def test_times_without_a_zone_are_not_given_one(tmp_path: Path, kind: str, write: Write, column: pa.Array) -> None:
    write(tmp_path / "a", pa.table({"x": column}))
    source = source_of((tmp_path / "a").as_uri(), kind)
    wanted = "timestamp[us, tz=Europe/Berlin]"
    with pytest.raises(InvalidArgument, match=r"has no time zone.*keep it as timestamp\[us\]") as refused:
        whole(tmp_path, source, types={"x": wanted})
    assert "column 'x'" in refused.value.message


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("csv", "x\n2024-07-01T12:00:00\n2024-07-01T12:00:00+02:00\n"),
        ("json_lines", '{"x": "2024-07-01T12:00:00"}\n{"x": "2024-07-01T12:00:00+02:00"}\n'),
    ],
)
def test_texts_of_times_without_an_offset_are_bad_rows_where_a_zone_is_given(
    tmp_path: Path, kind: str, content: str
) -> None:
    (tmp_path / "a").write_text(content)
    source = source_of((tmp_path / "a").as_uri(), kind)
    read, bad = whole(tmp_path, source, types={"x": "timestamp[us, tz=Europe/Berlin]"})
    assert read["x"].cast(pa.int64()).to_pylist() == [1_719_828_000_000_000]
    assert len(bad.rows) == 1
    assert "needs its offset, such as 2024-07-01T12:00:00+02:00" in bad.rows[0].reason


def test_a_category_without_any_value_is_saved_too(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a", pa.table({"x": pa.nulls(2).dictionary_encode()}))
    source = source_of((tmp_path / "a").as_uri(), "arrow")
    assert whole(tmp_path, source, types={"x": "string"})[0]["x"].to_pylist() == [None, None]


def test_values_that_do_not_fit_it_are_bad_rows(tmp_path: Path) -> None:
    long = pa.array([Decimal(1), Decimal("1" * 45)], pa.decimal256(60, 0))
    write_arrow(tmp_path / "a", pa.table({"x": long}))
    source = source_of((tmp_path / "a").as_uri(), "arrow")
    read, bad = whole(tmp_path, source, types={"x": "decimal128(38, 0)"})
    assert read["x"].to_pylist() == [Decimal(1)]
    assert bad.places == ["row 2"]
    assert bad.rows[0].reason == "column 'x' does not fit decimal128(38, 0)"


def test_files_of_nulls_stand_beside_files_of_values(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a", pa.table({"x": pa.nulls(1)}))
    write_parquet(tmp_path / "b", pa.table({"x": pa.array([7], pa.int16())}))
    sources = [source_of((tmp_path / name).as_uri(), "parquet") for name in "ab"]
    assert whole(tmp_path, *sources, types={"x": "int32"})[0]["x"].to_pylist() == [None, 7]


@pytest.mark.parametrize(("column", "arrow_type", "values"), FOREIGN, ids=lambda one: str(getattr(one, "type", "")))
def test_the_type_that_a_refusal_names_works(
    tmp_path: Path, column: pa.Array, arrow_type: str, values: list[Any]
) -> None:
    write_arrow(tmp_path / "a", pa.table({"x": column}))
    source = source_of((tmp_path / "a").as_uri(), "arrow")
    with pytest.raises(InvalidArgument, match="or give it another type by column_types, such as") as refused:
        opened(tmp_path, source)
    named = re.search(r"column_types, such as (.*)$", refused.value.message.partition("; mend")[0])
    assert named is not None, (arrow_type, values)
    (rows,) = opened(tmp_path, source, types={"x": named[1]})
    assert table_of(rows.rows, Quarantine()).num_rows == 2


def test_no_type_is_named_for_a_column_that_has_none(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a", pa.table({"x": pa.array([{"b": 1}])}))
    source = source_of((tmp_path / "a").as_uri(), "arrow")
    with pytest.raises(
        InvalidArgument, match=r"'x' has the type struct<b: int64>.*write each of its fields"
    ) as refused:
        opened(tmp_path, source)
    assert "column_types" not in refused.value.message
    with pytest.raises(InvalidArgument, match=r"'x' has the type .*cannot be cast to int64"):
        opened(tmp_path, source, types={"x": "int64"})


def test_a_given_type_that_the_column_cannot_have_is_refused_with_one_that_it_can(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a", pa.table({"x": pa.array([0], pa.date64())}))
    source = source_of((tmp_path / "a").as_uri(), "arrow")
    with pytest.raises(InvalidArgument, match=r"such as timestamp\[ms\]; it cannot be cast to binary"):
        opened(tmp_path, source, types={"x": "binary"})


def opaque(values: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.opaque(values.type, "numeric", "PostgreSQL"), values)


def json_texts(values: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.json_(values.type), values)


def uuids(values: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), values)


BEYOND = ["1.5", "1e400", None, "n/a", "-2"]


@pytest.mark.parametrize(
    ("extension", "values", "arrow_type", "places"),
    [
        (opaque, pa.array(BEYOND), "double", ["row 2", "row 4"]),
        (opaque, pa.array(BEYOND, pa.large_string()), "double", ["row 2", "row 4"]),
        (opaque, pa.array(BEYOND, pa.string_view()), "double", ["row 2", "row 4"]),
        (opaque, pa.array(["1.5", "n/a"]), "halffloat", ["row 2"]),
        (opaque, pa.array(["12:00", "25:00", "noon"]), "time32[s]", ["row 2", "row 3"]),
        (opaque, pa.array(["a", None]), "string", []),
        (opaque, pa.array([b"a", b"\xff"]), "string", ["row 2"]),
        (opaque, pa.array([1.5, 1e300, float("inf")]), "float", ["row 2"]),
        (opaque, pa.array([1, 300, None]), "int8", ["row 2"]),
        (opaque, pa.array([1, None]), "string", []),
        (opaque, pa.array([1000, 1, None], pa.timestamp("ms")), "timestamp[s]", ["row 2"]),
        (json_texts, pa.array(["1", "null", "{}", None]), "int64", ["row 2", "row 3"]),
        (uuids, pa.array([b"x" * 16, b"\xff" * 16], pa.binary(16)), "string", ["row 2"]),
        (uuids, pa.array([b"x" * 16, None], pa.binary(16)), "binary", []),
    ],
    ids=lambda one: str(getattr(one, "type", "")),
)
@pytest.mark.parametrize(("kind", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
def test_values_of_an_extension_are_those_of_the_plain_column(
    tmp_path: Path,
    kind: str,
    write: Write,
    extension: Callable[[pa.Array], pa.Array],
    values: pa.Array,
    arrow_type: str,
    places: list[str],
) -> None:
    write(tmp_path / "plain", pa.table({"n": range(len(values)), "x": values}))
    write(tmp_path / "extended", pa.table({"n": range(len(values)), "x": extension(values)}))
    (plain, bad), (read, bad_of_extension) = (
        whole(tmp_path, source_of((tmp_path / name).as_uri(), kind), types={"x": arrow_type})
        for name in ("plain", "extended")
    )
    assert read.equals(plain)
    assert (bad_of_extension.places, bad.places) == (places, places)
    assert [row.reason for row in bad_of_extension.rows] == [row.reason for row in bad.rows]


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(["x" * 10_000]).dictionary_encode().take(pa.array([0] * 100)),
        pa.array(["x" * 10_000] * 100, pa.string_view()),
    ],
    ids=["categories", "views"],
)
def test_texts_of_an_extension_that_rows_share_count_for_each_of_them(texts: pa.Array) -> None:
    assert decoded_bytes(pa.record_batch({"x": opaque(texts)})) == decoded_bytes(pa.record_batch({"x": texts})) >= 10**6


def test_a_long_text_of_an_extension_in_parquet_that_rows_share_is_decoded_for_few_of_them_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 4_000_000)
    promised = pa.schema([pa.field("x", pa.json_())]).serialize().to_pybytes()
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 200_000]))
    with pq.ParquetWriter(tmp_path / "a", pa.schema({"x": text.type}), store_schema=False) as writer:
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(promised).decode()})
        writer.write_table(pa.table({"x": text}))
    (rows,) = opened(tmp_path, source_of((tmp_path / "a").as_uri(), "parquet"), types={"x": "string"})
    sizes = [table.nbytes for table in rows.rows.tables(Quarantine())]
    assert sum(sizes) > 200_000_000
    assert max(sizes) < 4_100_000


def test_an_extension_of_texts_whose_offsets_are_damaged_is_refused(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"".join(one.to_bytes(4, "little") for one in (0, 10**6, 2, 4)))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"1234")])
    write_arrow(tmp_path / "a", pa.table({"x": opaque(texts)}))
    with pytest.raises(InvalidArgument, match=r"not a whole Arrow file: .*Offset"):
        whole(tmp_path, source_of((tmp_path / "a").as_uri(), "arrow"), types={"x": "int64"})


def test_an_extension_of_categories_is_read_from_arrow_and_refused_of_parquet(tmp_path: Path) -> None:
    table = pa.table({"x": opaque(pa.array(BEYOND).dictionary_encode())})
    write_arrow(tmp_path / "arrow", table)
    write_parquet(tmp_path / "parquet", table)
    source = source_of((tmp_path / "arrow").as_uri(), "arrow")
    read, bad = whole(tmp_path, source, types={"x": "double"})
    assert (read["x"].to_pylist(), bad.places) == ([1.5, None, -2.0], ["row 2", "row 4"])
    with pytest.raises(InvalidArgument, match="write its values without a dictionary"):
        opened(tmp_path, source_of((tmp_path / "parquet").as_uri(), "parquet"), types={"x": "double"})
