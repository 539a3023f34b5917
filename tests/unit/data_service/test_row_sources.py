from __future__ import annotations

import struct
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service import row_sources
from data_service.row_sources import IdxPair, ParquetRows
from data_service.source_files import SourceFile, SourceFiles
from shared.errors import InvalidArgument
from tests.support.idx import digits, idx_bytes, write_idx


def source(path: Path, field: str = "sources[0].parquet.uri") -> SourceFile:
    return SourceFiles([PurePosixPath(path.parent)], None).find(field, path.as_uri())


def pair(folder: Path) -> IdxPair:
    return IdxPair(source(folder / "images", "idx.images_uri"), source(folder / "labels", "idx.labels_uri"))


def parquet(path: Path, table: pa.Table) -> ParquetRows:
    pq.write_table(table, path)
    return ParquetRows(source(path))


def test_an_idx_pair_gives_its_images_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sources, "CHUNK_BYTES", 784 * 7)
    images, labels = digits(50)
    write_idx(tmp_path / "images", images)
    write_idx(tmp_path / "labels", labels)
    rows = pair(tmp_path)
    tables = list(rows.tables())
    assert {table.num_rows for table in tables} == {7, 1}
    table = pa.concat_tables(tables)
    assert table.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), [28, 28])
    assert sum(rows.scan()) == 50
    np.testing.assert_array_equal(table["image"].combine_chunks().to_numpy_ndarray(), images)
    assert table["label"].to_pylist() == labels.tolist()


def test_wide_labels_and_coloured_images_are_read(tmp_path: Path) -> None:
    write_idx(tmp_path / "images", np.zeros((3, 4, 5, 3), np.uint8))
    write_idx(tmp_path / "labels", np.array([-1, 70000, 5], np.int32))
    table = pa.concat_tables(pair(tmp_path).tables())
    assert table.schema.field("image").type.shape == [4, 5, 3]
    assert table["label"].to_pylist() == [-1, 70000, 5]


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((3, 2, 2), np.uint8), np.zeros(4, np.uint8), "labels_uri: .* 4 labels for 3 images"),
        (np.zeros((3, 2, 2), np.int32), np.zeros(3, np.uint8), "images_uri: .* images are uint8"),
        (np.zeros(3, np.uint8), np.zeros(3, np.uint8), "images_uri: .* images are uint8"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros((3, 2, 2), np.uint8), "labels_uri: .* labels are integers"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros(3, np.float32), "labels_uri: .* labels are integers"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path, images: np.ndarray, labels: np.ndarray, said: str) -> None:
    write_idx(tmp_path / "images", images)
    write_idx(tmp_path / "labels", labels)
    with pytest.raises(InvalidArgument, match=said) as refused:
        pair(tmp_path)
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


def test_truncated_labels_are_blamed_and_not_the_images(tmp_path: Path) -> None:
    write_idx(tmp_path / "images", np.zeros((3, 2, 2), np.uint8))
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(3, np.uint8))[:-1])
    with pytest.raises(InvalidArgument, match=r"labels_uri: .* ends after 2"):
        list(pair(tmp_path).scan())


def test_a_header_that_claims_four_billion_rows_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + b"\0" * 784)
    (tmp_path / "labels").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1) + b"\0")
    with pytest.raises(InvalidArgument, match="ends after 1"):
        list(pair(tmp_path).scan())


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    tensors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 4)
    table = pa.table(
        {
            "f": tensors,
            "i": pa.array([1, None, 3], pa.int16()),
            "s": pa.array(["a", None, "c"]),
            "large": pa.array(["a", "b", "c"], pa.large_string()),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "when": pa.array([1, 2, 3], pa.timestamp("us", tz="UTC")),
            "raw": pa.array([b"1", b"22", b""], pa.binary()),
            "ok": pa.array([True, False, None]),
        }
    )
    rows = parquet(tmp_path / "t.parquet", table)
    read = pa.concat_tables(rows.tables())
    types = {field.name: field.type for field in read.schema}
    assert types["f"] == pa.fixed_shape_tensor(pa.float32(), [4])
    assert types["large"] == types["kind"] == types["s"] == pa.string()
    for name in ("i", "s", "large", "kind", "when", "raw", "ok"):
        assert read[name].to_pylist() == table[name].to_pylist()
    np.testing.assert_array_equal(read["f"].combine_chunks().to_numpy_ndarray(), np.arange(12).reshape(3, 4))


def test_a_stored_tensor_keeps_its_shape(tmp_path: Path) -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    read = pa.concat_tables(parquet(tmp_path / "t.parquet", pa.table({"image": tensor})).tables())
    assert read.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), [3, 4])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"_row_id": [1]}), "_row_id"),
        (pa.table({"a": [[1, 2]]}), "'a' has the type list"),
        (pa.table({"a": [{"b": 1}]}), "'a' has the type struct"),
        (pa.table({}), "needs columns"),
        (pa.table([[1], [2]], names=["a", "a"]), "a name of its own"),
        (pa.table({"a": pa.array([[1, None]], pa.list_(pa.int32(), 2))}), "'a' has nulls"),
        (pa.table({"a": pa.array([[1, 2], None], pa.list_(pa.int32(), 2))}), "'a' has nulls"),
    ],
    ids=["row ids", "list", "struct", "no column", "a name twice", "null in a tensor", "null for a tensor"],
)
def test_columns_that_no_version_can_keep_are_refused_by_name(tmp_path: Path, table: pa.Table, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        list(parquet(tmp_path / "t.parquet", table).tables())


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flip", "footer"])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": np.arange(10_000)}), path, write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[2000] ^= 1
    if damage == "footer":
        data[-20] ^= 0xFF
        data[-60:-20] = b"\xff" * 40
    path.write_bytes({"empty": b"", "text": b"not parquet", "cut": bytes(data[:-100])}.get(damage, bytes(data)))
    with pytest.raises(InvalidArgument) as refused:
        list(ParquetRows(source(path)).tables())
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


def test_a_batch_that_decodes_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sources, "MAX_BATCH_BYTES", 1000)
    rows = parquet(tmp_path / "t.parquet", pa.table({"s": ["x" * 100] * 50}))
    with pytest.raises(InvalidArgument, match="decode to"):
        list(rows.tables())


def test_a_long_text_that_many_rows_share_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), pa.array(["x" * 10_000_000]))
    rows = parquet(tmp_path / "bomb.parquet", pa.table({"s": text}))
    with pytest.raises(InvalidArgument, match=r"1024 of its rows decode to 10240000000 bytes"):
        list(rows.tables())


def test_rows_are_counted_and_not_taken_from_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": np.arange(1000)}), path)
    data = path.read_bytes()
    # num_rows is 1000 three times in the footer, as a zigzag varint: the file's, the row group's, the column's.
    path.write_bytes(data.replace(b"\xd0\x0f", b"\xfe\x7f"))
    with pytest.raises(InvalidArgument):
        sum(ParquetRows(source(path)).scan())


def test_wide_rows_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    wide = pa.table({"image": [bytes([i]) * 1_000_000 for i in range(20)]})
    tables = list(parquet(tmp_path / "t.parquet", wide).tables())
    assert max(table.num_rows for table in tables) <= 4
    assert pa.concat_tables(tables)["image"].to_pylist() == wide["image"].to_pylist()
