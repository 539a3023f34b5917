from __future__ import annotations

import datetime
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats import interface
from data_service.formats.arrow import ArrowRows
from data_service.formats.interface import RowSource
from shared.errors import InvalidArgument
from tests.support.arrow_tables import tables, values_of
from tests.support.damage import flips, truncations
from tests.support.hostile_files import arrow_that_claims
from tests.support.import_sources import Quarantine, found_file, in_child, opened, source_of, table_of, whole


def written(table: pa.Table, kind: str, compression: str | None = None, rows: int | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table.unify_dictionaries(), max_chunksize=rows)
    return bytes(sink.getvalue())


def rows_of(folder: Path, data: bytes) -> ArrowRows:
    (folder / "data.arrow").write_bytes(data)
    return ArrowRows(found_file(folder / "data.arrow"))


def child_rows_of(folder: Path, data: bytes) -> RowSource:
    (folder / "data.arrow").write_bytes(data)
    return in_child(folder / "data.arrow", "arrow")


SAMPLE = pa.table(
    {
        "n": np.arange(500),
        "s": [f"text {i % 7}" for i in range(500)],
        "k": pa.array([str(i % 3) for i in range(500)]).dictionary_encode(),
        "t": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2000, dtype=np.uint8)), 4),
    }
)


@given(table=tables(), kind=st.sampled_from(["stream", "file"]), compression=st.sampled_from([None, "lz4", "zstd"]))
def test_every_type_that_a_version_keeps_comes_back(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, kind: str, compression: str | None
) -> None:
    read = table_of(rows_of(tmp_path_factory.mktemp("arrow"), written(table, kind, compression, 5)))
    assert values_of(read) == values_of(table)
    read.validate(full=True)


@pytest.mark.parametrize("make", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
def test_messages_without_a_prefix_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """As Arrow before 0.15 wrote them."""
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    sink = pa.BufferOutputStream()
    table = SAMPLE.select(["n", "s"])
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=True)) as writer:
        writer.write_table(table, max_chunksize=100)
    data = sink.getvalue().to_pybytes()
    assert b"\xff\xff\xff\xff" not in data
    rows = rows_of(tmp_path, data)
    (part,) = rows.parts()
    assert table_of(part) == table
    with pytest.raises(InvalidArgument):
        table_of(rows_of(tmp_path, data[:-1]))


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_every_truncated_copy_is_refused(tmp_path: Path, kind: str, compression: str | None) -> None:
    data = written(SAMPLE, kind, compression, 50)
    for size, part in truncations(data):
        with pytest.raises(InvalidArgument) as refused:
            table_of(child_rows_of(tmp_path, part))
        assert refused.value.specific_reason == "CORRUPT_SOURCE", size


def test_a_stream_without_its_end_marker_is_refused_though_all_batches_are_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="close its writer"):
        table_of(rows_of(tmp_path, written(SAMPLE, "stream")[:-8]))


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="goes on after"):
        table_of(rows_of(tmp_path, written(SAMPLE, "stream") * 2))


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_flipped_bits_are_refused_or_change_a_value_and_never_crash(
    tmp_path: Path, kind: str, compression: str | None
) -> None:
    refused = 0
    for _, data in flips(written(SAMPLE, kind, compression, 100), 100):
        bad = Quarantine()
        try:
            read = table_of(child_rows_of(tmp_path, data), bad)
        except InvalidArgument:
            refused += 1
        else:
            read.validate(full=True)
            assert read.num_rows + len(bad.rows) <= 500
    assert refused


@given(data=st.binary(max_size=200), begin=st.sampled_from([b"", b"\xff\xff\xff\xff\x40\0\0\0", b"ARROW1\0\0"]))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, begin: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        table_of(child_rows_of(tmp_path_factory.mktemp("arrow"), begin + data))
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


def test_a_message_that_claims_gigabytes_costs_nothing(tmp_path: Path) -> None:
    data = written(SAMPLE.select(["n"]), "stream")
    body_bytes = list(pa.ipc.MessageReader.open_stream(data))[1].body.size
    for claimed in (2**29, 2**40, -8):
        lying = data.replace(struct.pack("<q", body_bytes), struct.pack("<q", claimed))
        assert lying != data
        with pytest.raises(
            InvalidArgument, match=r"data\.arrow cannot be imported: it is not a whole Arrow file"
        ) as refused:
            table_of(child_rows_of(tmp_path, lying))
        # No memory was asked for.
        assert refused.value.specific_reason == "CORRUPT_SOURCE"


CLAIM = r"n\.arrow cannot be imported: .* claim.* rows; "


def opened_claim(folder: Path, claimed: int, batches: int, column_type: pa.DataType) -> RowSource:
    (folder / "n.arrow").write_bytes(arrow_that_claims(claimed, batches, column_type))
    (one,) = opened(folder, source_of((folder / "n.arrow").as_uri(), "arrow"), types={"n": "int8"})
    return one.rows


@pytest.mark.parametrize(("claimed", "batches"), [(2**62, 1), (2**33 + 1, 3), (-1, 2), (2**33, 129)])
def test_rows_without_bytes_that_no_file_has_are_refused_before_the_file_is_read(
    tmp_path: Path, claimed: int, batches: int
) -> None:
    """A column of nulls has no bytes that a number of rows would have to fit."""
    with pytest.raises(InvalidArgument, match=CLAIM) as refused:
        opened_claim(tmp_path, claimed, batches, pa.null())
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


@pytest.mark.parametrize(("claimed", "batches"), [(2**62, 1), (2**33 + 1, 3), (-1, 2), (2**33, 129)])
def test_a_large_file_whose_footer_names_rows_that_no_file_has_is_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int, batches: int
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    rows = opened_claim(tmp_path, claimed, batches, pa.int32())
    with pytest.raises(InvalidArgument, match=CLAIM) as refused:
        rows.parts()
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


@pytest.mark.parametrize("claimed", [2**62, 2**33 + 1, -1])
def test_a_batch_that_claims_rows_that_none_has_is_not_read(tmp_path: Path, claimed: int) -> None:
    rows = opened_claim(tmp_path, claimed, 2, pa.int32())
    (part,) = rows.parts()
    with pytest.raises(InvalidArgument, match=CLAIM):
        next(iter(part.tables(Quarantine())))


def test_a_stream_of_more_rows_than_any_file_has_ends_before_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "MAX_ROWS", 499)
    tables = iter(rows_of(tmp_path, written(SAMPLE, "stream", rows=100)).tables(Quarantine()))
    assert [next(tables).num_rows for _ in range(4)] == [100] * 4
    with pytest.raises(InvalidArgument, match="claim to have more than 499 rows"):
        next(tables)


def test_a_buffer_that_claims_to_decompress_to_too_much_is_refused_for_its_memory(tmp_path: Path) -> None:
    data = written(pa.table({"n": np.zeros(1_000_000)}), "stream", "zstd")
    claim = struct.pack("<q", 8_000_000)
    assert data.count(claim) == 1
    with pytest.raises(InvalidArgument, match=r"data\.arrow cannot be .* more than 4096 MiB of memory") as refused:
        table_of(child_rows_of(tmp_path, data.replace(claim, struct.pack("<q", 2**40))))
    assert refused.value.specific_reason == "SOURCE_OVER_LIMIT"
    assert table_of(child_rows_of(tmp_path, data)).num_rows == 1_000_000


def test_a_long_text_that_many_rows_share_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), pa.array(["x" * 2_000_000]))
    rows = rows_of(tmp_path, written(pa.table({"s": text}), "stream"))
    tables = rows.tables(Quarantine())
    assert next(tables).num_rows * 2_000_000 <= interface.MAX_DECODED_BYTES


def test_one_row_that_decodes_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "MAX_DECODED_BYTES", 1000)
    with pytest.raises(InvalidArgument, match="decode to"):
        table_of(rows_of(tmp_path, written(pa.table({"s": ["x" * 10_000] * 5}), "stream")))


def test_more_columns_than_a_version_keeps_are_refused(tmp_path: Path) -> None:
    table = pa.table({str(i): pa.array([1], pa.int8()) for i in range(10_001)})
    with pytest.raises(InvalidArgument, match="10001 columns; at most 10000"):
        rows_of(tmp_path, written(table, "stream"))


def test_the_metadata_that_a_million_columns_take_is_not_read(tmp_path: Path) -> None:
    per_column = len(pa.schema([pa.field(str(i), pa.int8()) for i in range(10_000)]).serialize()) / 10_000
    data = b"\xff\xff\xff\xff" + struct.pack("<i", int(per_column * 1_000_000)) + bytes(1000)
    with pytest.raises(InvalidArgument, match="metadata bytes, but only read 1000") as refused:
        child_rows_of(tmp_path, data)
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([[1, 2]]), "has the type list"),
        (pa.array([{"a": 1}]), "has the type struct"),
        (pa.nulls(1), "has the type null"),
        (pa.array([b""], pa.binary(0)), "no bytes"),
        (pa.array([None], pa.decimal128(5, -1)), r"'a' has the type decimal128\(5, -1\).* scale of 0"),
        (pa.array([None], pa.decimal128(5, 7)), r"'a' has the type decimal128\(5, 7\).* scale of 0"),
        (pa.array([1], pa.timestamp("us", "A B")), "'a' has the type timestamp.* such as UTC"),
    ],
)
def test_columns_that_no_version_keeps_are_refused_by_name(tmp_path: Path, column: pa.Array, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        rows_of(tmp_path, written(pa.table({"a": column}), "stream"))


def test_texts_that_are_no_utf_8_damage_the_whole(tmp_path: Path) -> None:
    data = written(pa.table({"s": ["good", "b\u00e4d", "good"], "n": [1, 2, 3]}), "stream")
    broken = data.replace("b\u00e4d".encode(), b"b\xff\xffd")
    with pytest.raises(InvalidArgument):
        table_of(rows_of(tmp_path, broken))


def test_tensors_with_nulls_are_bad_rows(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int32(), 2))
    bad = Quarantine()
    read = table_of(rows_of(tmp_path, written(pa.table({"t": lists, "n": [1, 2, 3, 4]}), "stream")), bad)
    assert read["n"].to_pylist() == [1, 4]
    assert read["t"].combine_chunks().to_numpy_ndarray().tolist() == [[1, 2], [5, 6]]
    assert bad.places == ["row 2", "row 3"]
    assert bad.rows[0].reason == "column 't' has nulls, and a tensor has no place for them"


@pytest.mark.parametrize(
    ("column", "arrow_type", "wanted", "places"),
    [
        (pa.array([1, 300, None]), "uint8", [1, None], ["row 2"]),
        (pa.array([1.0, 1.5]), "int64", [1], ["row 2"]),
        (pa.array(["1", "x"]), "int64", [1], ["row 2"]),
        (pa.array([1e300, 0.1]), "float", [pytest.approx(0.1)], ["row 1"]),
        (pa.array([b"\xff", b"a"]), "string", ["a"], ["row 1"]),
        (pa.array([2**31 - 1, 61], pa.int32()), "time32[s]", [datetime.time(0, 1, 1)], ["row 1"]),
    ],
)
def test_values_that_do_not_fit_a_given_type_are_bad_rows(
    tmp_path: Path, column: pa.Array, arrow_type: str, wanted: list[Any], places: list[str]
) -> None:
    (tmp_path / "a.arrow").write_bytes(written(pa.table({"a": column}), "stream"))
    read, bad = whole(tmp_path, source_of((tmp_path / "a.arrow").as_uri(), "arrow"), types={"a": arrow_type})
    assert read["a"].to_pylist() == wanted
    assert bad.places == places


def test_a_tensor_can_be_given_another_shape_and_value_type(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(written(SAMPLE.select(["t"]), "stream"))
    wanted = "extension<arrow.fixed_shape_tensor[value_type=float, shape=[2,2]]>"
    read, _ = whole(tmp_path, source_of((tmp_path / "a.arrow").as_uri(), "arrow"), types={"t": wanted})
    assert str(read.schema.field("t").type) == wanted
    np.testing.assert_array_equal(
        read["t"].combine_chunks().to_numpy_ndarray(), np.arange(2000, dtype=np.uint8).reshape(-1, 2, 2)
    )


def test_a_type_that_no_value_has_is_refused_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(written(SAMPLE, "stream"))
    with pytest.raises(InvalidArgument, match=r"column_types\[0\].arrow_type"):
        whole(tmp_path, source_of((tmp_path / "a.arrow").as_uri(), "arrow"), types={"t": "int64"})


def test_rows_come_before_the_stream_has_ended(tmp_path: Path) -> None:
    """As from an upload that still grows: nothing asks for the end before it must."""
    data = written(SAMPLE, "stream", rows=100)
    rows = rows_of(tmp_path, data)
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(data[: len(data) // 2])
    tables = ArrowRows(found_file(cut)).tables(Quarantine())
    assert next(tables).num_rows == 100
    assert rows.schema.names == SAMPLE.column_names


@pytest.mark.parametrize("tz", [None, "UTC"])
def test_seconds_beyond_what_a_version_keeps_are_bad_rows(tmp_path: Path, tz: str | None) -> None:
    times = pa.array([0, 2**63 - 1, None, -(2**63) + 1], pa.timestamp("s", tz))
    bad = Quarantine()
    read = table_of(rows_of(tmp_path, written(pa.table({"t": times}), "stream")), bad)
    assert read["t"].combine_chunks().equals(times.take([0, 2]))
    assert bad.places == ["row 2", "row 4"]
    assert bad.rows[0].reason == "column 't' is beyond the times that milliseconds can tell"


def test_numbers_beyond_the_seconds_that_a_version_keeps_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "data.arrow").write_bytes(written(pa.table({"t": [0, 2**63 - 1]}), "stream"))
    source = source_of((tmp_path / "data.arrow").as_uri(), "arrow")
    read, bad = whole(tmp_path, source, types={"t": "timestamp[s]"})
    assert read.num_rows == 1
    assert bad.places == ["row 2"]
