from __future__ import annotations

import base64
import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats import interface, parquet
from data_service.formats.interface import decoded_bytes
from data_service.formats.parquet import ParquetRows
from shared.errors import InvalidArgument
from tests.support.arrow_tables import tables, values_of
from tests.support.damage import flips, truncations
from tests.support.hostile_files import parquet_that_aborts, parquet_that_claims, parquet_that_lies_at
from tests.support.import_sources import Quarantine, found_file, in_child, source_of, table_of, whole


def rows_of(path: Path, table: pa.Table, **options: Any) -> ParquetRows:
    pq.write_table(table, path, **options)
    return ParquetRows(found_file(path))


SAMPLE = pa.table({"n": np.arange(3000), "s": [f"text {i % 7}" for i in range(3000)], "d": np.linspace(0, 1, 3000)})


@given(table=tables(), codec=st.sampled_from(["none", "snappy", "zstd", "gzip", "lz4"]), version=st.sampled_from("12"))
def test_every_type_that_a_version_keeps_comes_back(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, codec: str, version: str
) -> None:
    # Parquet has no whole seconds; they come back as milliseconds of the same value.
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    read = table_of(rows_of(path, table, compression=codec, data_page_version=f"{version}.0", row_group_size=7))
    assert values_of(read) == values_of(table)


def test_columns_keep_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "f": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 4),
            "i": pa.array([1, None, 3], pa.int16()),
            "large": pa.array(["a", "b", "c"], pa.large_string()),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "when": pa.array([1, 2, 3], pa.timestamp("us", tz="UTC")),
        }
    )
    types = {field.name: field.type for field in table_of(rows_of(tmp_path / "t.parquet", table)).schema}
    assert types["f"] == pa.fixed_shape_tensor(pa.float32(), [4])
    assert types["large"] == types["kind"] == pa.string()
    assert types["i"] == pa.int16()
    assert types["when"] == pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"_row_id": [1]}), "_row_id"),
        (pa.table({"a": [[1, 2]]}), "'a' has the type list"),
        (pa.table({"a": [{"b": 1}]}), "'a' has the type struct"),
        (pa.table({}), "needs columns"),
        (pa.table([[1], [2]], names=["a", "a"]), "a name of its own"),
    ],
    ids=["row ids", "list", "struct", "no column", "a name twice"],
)
def test_columns_that_no_version_can_keep_are_refused_by_name(tmp_path: Path, table: pa.Table, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        rows_of(tmp_path / "t.parquet", table)


@pytest.mark.parametrize("values", [[[1, None], [2, 3]], [None, [2, 3]]], ids=["in a tensor", "for a tensor"])
def test_nulls_where_a_tensor_must_be_are_bad_rows(tmp_path: Path, values: list[Any]) -> None:
    bad = Quarantine()
    rows = rows_of(tmp_path / "t.parquet", pa.table({"a": pa.array(values, pa.list_(pa.int32(), 2))}))
    assert table_of(rows, bad).num_rows == 1
    assert bad.places == ["row 1"]


def test_texts_that_are_no_utf_8_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"s": ["good", "b\u00e4d", "good"]}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace("b\u00e4d".encode(), b"b\xff\xffd"))
    bad = Quarantine()
    assert table_of(ParquetRows(found_file(path)), bad)["s"].to_pylist() == ["good", "good"]
    assert [(row.place, row.reason) for row in bad.rows] == [("row 2", "column 's' is not UTF-8")]


def test_every_truncated_copy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(SAMPLE, path)
    for size, part in truncations(path.read_bytes()):
        path.write_bytes(part)
        with pytest.raises(InvalidArgument) as refused:
            table_of(in_child(path, "parquet"))
        assert refused.value.specific_reason == "CORRUPT_SOURCE", size


def test_flipped_bits_are_refused_and_never_crash(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(SAMPLE, path, write_page_checksum=True, row_group_size=700)
    reasons = []
    for _, data in flips(path.read_bytes(), 150):
        path.write_bytes(data)
        try:
            read = table_of(in_child(path, "parquet"), Quarantine())
        except InvalidArgument as error:
            reasons.append(error.specific_reason)
        else:
            # A footer's own statistics and descriptions have no checksum.
            assert read.num_rows == 3000
    # A file whose bytes end the child is SOURCE_OVER_LIMIT.
    assert set(reasons) == {"CORRUPT_SOURCE"}
    assert len(reasons) > 100


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_few_bytes_that_are_one_row_of_millions_are_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "t.parquet"
    values = 5_000_000
    promised = pa.schema([pa.field("a", pa.list_(pa.int64(), 4))]).serialize().to_pybytes()
    one_row = pa.table({"a": pa.ListArray.from_arrays([0, values], pa.array(np.zeros(values, np.int64)))})
    with pq.ParquetWriter(path, one_row.schema, store_schema=False, data_page_version=version) as writer:
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(promised).decode()})
        writer.write_table(one_row)
    assert path.stat().st_size < 1000
    rows = in_child(path, "parquet")
    assert rows.schema.field("a").type == pa.fixed_shape_tensor(pa.int64(), [4])
    with pytest.raises(InvalidArgument, match=r"t\.parquet cannot be imported: .* lists to be of size=4"):
        table_of(rows)


@pytest.mark.parametrize("size", [1, 3, 8, 784])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_lists_that_are_all_alike_are_no_bomb(tmp_path: Path, size: int, version: str) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(5000 * size, np.uint8)), size)
    rows = rows_of(tmp_path / "t.parquet", pa.table({"a": lists}), data_page_version=version, compression="zstd")
    assert table_of(rows).num_rows == 5000


def of_long_lists(path: Path, wanted: int, rows: int, values: int, **options: Any) -> ParquetRows:
    """Rows of that many values, each in a row group of its own, where lists of `wanted` values are wanted."""
    row = pa.table({"a": pa.ListArray.from_arrays([0, values], pa.array(np.zeros(values, np.int64)))})
    with pq.ParquetWriter(path, row.schema, store_schema=False, **options) as writer:
        for _ in range(rows):
            writer.write_table(row)
    return ParquetRows(found_file(path), {"a": pa.fixed_shape_tensor(pa.int8(), [wanted])})


def test_rows_that_may_have_a_large_page_each_are_decoded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = of_long_lists(tmp_path / "t.parquet", wanted=4000, rows=12, values=4000)
    decoded: list[int] = []

    def noted(batch: pa.RecordBatch) -> int:
        decoded.append(batch.num_rows)
        return decoded_bytes(batch)

    monkeypatch.setattr(parquet, "decoded_bytes", noted)
    table_of(rows)
    assert decoded == [12]
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 8 * 4000 * 7 // 2)
    # They still come together: what becomes of a table takes its time for each.
    (table,) = rows.tables(Quarantine(fail=True))
    assert len(table) == 12
    assert decoded == [12, 3, 3, 3, 3]


def test_a_list_that_goes_on_from_page_to_page_is_refused_where_pages_together_decode_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = {"data_page_size": 1, "write_batch_size": 500}
    rows = of_long_lists(tmp_path / "t.parquet", wanted=400, rows=3, values=4000, **paged)
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 8 * 4000 * 2)
    with pytest.raises(
        InvalidArgument, match=r"column 'a.*' has 12000 values in lists, where 3 rows of 400 are wanted"
    ):
        table_of(rows, Quarantine())


def test_lists_of_a_few_times_the_wanted_values_are_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_long_lists(tmp_path / "t.parquet", wanted=500, rows=12, values=4000)
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 8 * 4000 * 7 // 2)
    bad = Quarantine()
    assert table_of(rows, bad).num_rows == 0
    assert len(bad.rows) == 12


def test_a_batch_that_decodes_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 1000)
    with pytest.raises(InvalidArgument, match="decode to"):
        table_of(rows_of(tmp_path / "t.parquet", pa.table({"s": ["x" * 100] * 50})))


def test_a_long_text_that_many_rows_share_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), pa.array(["x" * 10_000_000]))
    with pytest.raises(InvalidArgument, match=r"of its rows decode to \d+ bytes"):
        table_of(rows_of(tmp_path / "bomb.parquet", pa.table({"s": text})))


def test_rows_are_counted_and_not_taken_from_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": np.arange(1000)}), path)
    # num_rows is 1000 three times in the footer, as a zigzag varint: the file's, the row group's, the column's.
    path.write_bytes(path.read_bytes().replace(b"\xd0\x0f", b"\xfe\x7f"))
    with pytest.raises(InvalidArgument):
        table_of(ParquetRows(found_file(path)))


@pytest.mark.parametrize("claimed", [(2**63 - 1, 2**63 - 1), (2**63 - 1, 1000), (1001, 1000), (-1, -1), (1000, -1)])
def test_a_number_of_rows_that_cannot_be_right_is_unknown(tmp_path: Path, claimed: tuple[int, int]) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_that_claims(*claimed))
    rows = ParquetRows(found_file(path))
    assert rows.row_count is None
    assert [part.row_count for part in rows.parts()] == [None]
    path.write_bytes(parquet_that_claims(1000, 1000))
    assert ParquetRows(found_file(path)).row_count == 1000


@pytest.mark.parametrize("offset", [2**62, 2**44, 10_000, -5, 2])
def test_a_column_outside_of_its_file_is_no_failing_disk(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_that_lies_at(4))
    assert table_of(in_child(path, "parquet")).num_rows == 1000
    path.write_bytes(parquet_that_lies_at(offset))
    with pytest.raises(InvalidArgument, match="column 'n' lies outside of the file"):
        table_of(in_child(path, "parquet"))


@pytest.mark.parametrize("groups", [[3, 1, 2], [1], [2, 1]], ids=str)
def test_rows_that_arrow_leaves_out_are_missed(tmp_path: Path, groups: list[int]) -> None:
    """As it does where lists of a row group of one row are in several pages."""
    lists = pa.list_(pa.int64(), 3)
    with pq.ParquetWriter(tmp_path / "t.parquet", pa.schema([("a", lists)]), data_page_size=1) as writer:
        for rows in groups:
            writer.write_table(pa.table({"a": pa.array([[1, 2, 3]] * rows, lists)}))
    rows_read = ParquetRows(found_file(tmp_path / "t.parquet"))
    with pytest.raises(InvalidArgument, match=f"{sum(groups) - 1} rows are decoded, and its footer has {sum(groups)}"):
        table_of(rows_read)


def test_who_wants_no_more_rows_may_stop(tmp_path: Path) -> None:
    tables = rows_of(tmp_path / "t.parquet", SAMPLE).tables(Quarantine(fail=True))
    assert len(next(tables)) == 1024
    tables.close()  # type: ignore[attr-defined]


def test_wide_rows_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    wide = pa.table({"image": [bytes([i]) * 1_000_000 for i in range(20)]})
    read = list(rows_of(tmp_path / "t.parquet", wide).tables(Quarantine(fail=True)))
    assert max(table.num_rows for table in read) <= 4
    assert pa.concat_tables(read)["image"].to_pylist() == wide["image"].to_pylist()


@pytest.mark.parametrize("columns", [10_001, 150_000])
def test_more_columns_than_a_version_keeps_are_refused(tmp_path: Path, columns: int) -> None:
    # The footer alone: its size is what matters, and no such file need be whole.
    schema = pa.schema([pa.field(str(i), pa.int8()) for i in range(columns)])
    pq.write_metadata(schema, tmp_path / "t.parquet")
    with pytest.raises(InvalidArgument, match=f"{columns} columns; at most 10000|size limit") as refused:
        ParquetRows(found_file(tmp_path / "t.parquet"))
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


@pytest.mark.parametrize("data", [b"a,b\n1,2\n" * 100, b"PAR1" + bytes(100)], ids=["a CSV file", "cut off"])
def test_a_file_that_is_no_parquet_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(InvalidArgument, match="it is not a whole Parquet file: it does not end with a footer"):
        ParquetRows(found_file(tmp_path / "t.parquet"))


def test_a_footer_beyond_all_bounds_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1" + bytes(100) + struct.pack("<I", 2**31) + b"PAR1")
    with pytest.raises(InvalidArgument, match="its footer claims 2147483648 bytes"):
        ParquetRows(found_file(tmp_path / "t.parquet"))


def test_columns_can_be_given_other_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 70000, 3], "t": ["2024-01-01", "2024-01-02", "never"]}), tmp_path / "t.parquet")
    source = source_of((tmp_path / "t.parquet").as_uri(), "parquet")
    read, bad = whole(tmp_path, source, types={"n": "int16", "t": "date32"})
    assert read["n"].to_pylist() == [1]
    assert [(row.place, row.reason) for row in bad.rows] == [
        ("row 2", "column 'n' does not fit int16"),
        ("row 3", "column 't' does not fit date32[day]"),
    ]
    assert bad.rows[0].excerpt == "n=70000, t='2024-01-02'"


FAR_TIMES = ["0001-01-01T00:00:00", "1754-08-30T22:43:41.128654", "2024-05-01T12:00:00.123456", "9999-12-31T00:00:00"]


@pytest.mark.parametrize("unit", ["us", "ns"], ids="written by a table of {}".format)
def test_int96_timestamps_keep_their_year(tmp_path: Path, unit: str) -> None:
    texts = FAR_TIMES if unit == "us" else FAR_TIMES[1:3]
    when = pa.array(texts).cast(pa.timestamp(unit))
    rows = rows_of(tmp_path / "t.parquet", pa.table({"when": when}), use_deprecated_int96_timestamps=True)
    read = table_of(rows)
    assert read["when"].type == pa.timestamp("us")
    assert read["when"].to_pylist() == pa.array(texts).cast(pa.timestamp("us")).to_pylist()


def test_int96_timestamps_lose_the_digits_below_the_microsecond_and_nothing_else(tmp_path: Path) -> None:
    when = pa.array([1_000_000_001_999, -1], pa.timestamp("ns"))
    rows = rows_of(tmp_path / "t.parquet", pa.table({"when": when}), use_deprecated_int96_timestamps=True)
    assert table_of(rows)["when"].cast(pa.int64()).to_pylist() == [1_000_000_001, -1]


def test_a_footer_of_three_bytes_a_column_chunk_is_refused(tmp_path: Path) -> None:
    root, leaf, chunk = b"\x48\x01r\x15\x02\x00", b"\x15\x04\x25\x00\x18\x01a\x00", b"\x26\x00\x00"
    group = b"\x19\xfc\xa0\x8d\x06" + chunk * 100_000 + b"\x16\x00\x16\x00\x00"
    footer = b"\x15\x02\x19\x2c" + root + leaf + b"\x16\x00\x19\x3c" + group * 3 + b"\x00"
    (tmp_path / "t.parquet").write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    with pytest.raises(InvalidArgument, match="its footer is damaged: a row group has other columns than the file"):
        in_child(tmp_path / "t.parquet", "parquet")


def test_a_column_chunk_that_contradicts_itself_ends_the_reading_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_that_aborts())
    with pytest.raises(
        InvalidArgument, match=r"t\.parquet cannot be imported: .* by SIGABRT; write it anew"
    ) as refused:
        table_of(in_child(path, "parquet"))
    assert refused.value.specific_reason == "SOURCE_OVER_LIMIT"
    pq.write_table(pa.table({"n": [1, None, 3]}), path)
    assert table_of(in_child(path, "parquet"))["n"].to_pylist() == [1, None, 3]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_texts_written_as_differences_are_read(tmp_path: Path, encoding: str, version: str) -> None:
    table = pa.table(
        {"s": [f"https://example.org/{i}" for i in range(3000)], "b": [b"x" * (i % 9) for i in range(3000)]}
    )
    rows = rows_of(
        tmp_path / "t.parquet",
        table,
        use_dictionary=False,
        column_encoding=dict.fromkeys(table.column_names, encoding),
        data_page_version=version,
    )
    assert table_of(rows).to_pydict() == table.to_pydict()


def test_a_long_text_that_many_rows_repeat_as_differences_is_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"s": ["x" * 1_000_000] * 100})
    rows = rows_of(tmp_path / "t.parquet", table, use_dictionary=False, column_encoding={"s": "DELTA_BYTE_ARRAY"})
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 8_000_000)
    assert max(len(one) for one in rows.tables(Quarantine(fail=True))) <= 8


@pytest.mark.parametrize("groups", [0, 1])
def test_a_file_of_no_rows_has_no_rows(tmp_path: Path, groups: int) -> None:
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("s", pa.string())])
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for _ in range(groups):
            writer.write_table(schema.empty_table())
    assert table_of(ParquetRows(found_file(tmp_path / "t.parquet"))).num_rows == 0


class _Requests(io.BytesIO):
    """An object's bytes; notes each read."""

    def __init__(self, data: bytes, noted: list[int]) -> None:
        super().__init__(data)
        self._noted = noted

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._noted.append(len(data))
        return data


def test_column_chunks_of_an_object_are_fetched_at_once(tmp_path: Path) -> None:
    table = pa.table({f"c{column}": np.arange(20_000) * column for column in range(50)})
    path = tmp_path / "wide.parquet"
    pq.write_table(table, path, row_group_size=5_000, data_page_size=1_000)
    noted: list[int] = []
    data = path.read_bytes()
    file = replace(found_file(path), open=lambda: _Requests(data, noted))
    rows = ParquetRows(file)
    assert noted.pop() <= parquet.TAIL_BYTES
    assert not noted
    assert table_of(rows) == table
    # The footer with what is before it, and the chunks.
    assert len(noted) == 2
    assert sum(noted) <= len(data) + parquet.TAIL_BYTES


def test_column_chunks_beyond_the_budget_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "FETCHED_BYTES", 10_000)
    table = pa.table({"n": np.random.default_rng(0).integers(0, 2**62, 400_000)})
    path = tmp_path / "long.parquet"
    pq.write_table(table, path, use_dictionary=False)
    noted: list[int] = []
    data = path.read_bytes()
    rows = ParquetRows(replace(found_file(path), open=lambda: _Requests(data, noted)))
    assert table_of(rows) == table
    assert max(noted) < len(data) // 2
