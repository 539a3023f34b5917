from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.dataset_version import parquet as writing
from shared.dataset_version.manifest import DataFile, sha256_hex, tensor_field
from shared.dataset_version.parquet import SplitWriter, group_rows
from shared.storage import ObjectStore

TABLE = pa.table({"n": np.arange(5000), "s": [f"row {i}" for i in range(5000)]})


def write(
    store: ObjectStore, scratch: Path, folder: str, pieces: list[pa.Table], first_row_id: int = 0
) -> list[DataFile]:
    writer = SplitWriter(store, folder, scratch, schema=TABLE.schema, split="train", first_row_id=first_row_id)
    for piece in pieces:
        writer.write(piece)
    return writer.close()


@given(cuts=st.lists(st.integers(0, 5000), max_size=8))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_files_do_not_depend_on_how_the_rows_arrive(store: ObjectStore, tmp_path: Path, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 5000]
    pieces = [TABLE.slice(begin, end - begin) for begin, end in itertools.pairwise(edges)]
    assert write(store, tmp_path, "a", pieces) == write(store, tmp_path, "b", [TABLE])


@given(cuts=st.lists(st.integers(0, 5000), max_size=8), first_row_id=st.integers(0, 10_000_000))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_grown_groups_do_not_depend_on_how_the_rows_arrive(
    store: ObjectStore, tmp_path: Path, cuts: list[int], first_row_id: int
) -> None:
    edges = [0, *sorted(cuts), 5000]
    pieces = [TABLE.slice(begin, end - begin) for begin, end in itertools.pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BLOCK_ROWS", 300)
        arrived = write(store, tmp_path, "a", pieces, first_row_id)
    assert arrived == write(store, tmp_path, "b", [TABLE], first_row_id)


def test_row_ids_take_hardly_any_bytes(store: ObjectStore, tmp_path: Path) -> None:
    (file,) = write(store, tmp_path, "a", [TABLE], first_row_id=123_456_789)
    metadata = pq.read_metadata(pa.BufferReader(store.get(f"a/{file.path}")))
    place = metadata.schema.names.index("_row_id")
    ids = sum(metadata.row_group(index).column(place).total_compressed_size for index in range(metadata.num_row_groups))
    assert ids < 5000


def test_each_file_is_what_its_entry_says(store: ObjectStore, tmp_path: Path) -> None:
    (file,) = write(store, tmp_path, "a", [TABLE], first_row_id=70)
    data = store.get(f"a/{file.path}")
    assert (file.path, file.split, file.first_row_id, file.row_count) == ("train-00000.parquet", "train", 70, 5000)
    assert (len(data), sha256_hex(data)) == (file.size_bytes, file.sha256)
    assert sha256_hex(data[-file.footer_bytes :]) == file.footer_sha256
    table = pq.read_table(pa.BufferReader(data))
    assert table["_row_id"].to_pylist() == list(range(70, 5070))
    assert table.schema.names[-1] == "_row_id"
    assert file.row_groups == [256] * 19 + [136]
    assert not list(tmp_path.glob("*.parquet"))


def test_files_end_before_they_grow_too_large(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 20_000)
    files = write(store, tmp_path, "a", [TABLE])
    assert len(files) > 3
    assert [file.first_row_id for file in files[1:]] == [file.first_row_id + file.row_count for file in files[:-1]]
    assert sum(file.row_count for file in files) == 5000


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((28, 28), 256), ((4,), 4096), ((64, 64, 3), 256), ((512, 512, 3), 32), ((8192, 8192, 3), 1)],
)
def test_row_groups_are_about_a_quarter_of_a_mebibyte(shape: tuple[int, ...], rows: int) -> None:
    assert group_rows(pa.schema([tensor_field("x", pa.uint8(), shape)])) == rows


UNEQUAL = pa.schema([("image", pa.binary()), ("word", pa.string()), ("label", pa.int64())])
# Half a MiB to a group, so that tests need not write many bytes.
GROUP_BYTES = 512 * 1024


def unequal(sizes: Sequence[int | None]) -> pa.Table:
    """A row for each size of its image; None is a null."""
    images = [None if size is None else bytes([index % 251]) * size for index, size in enumerate(sizes)]
    words = [None if index % 7 == 3 else f"row {index}" for index in range(len(sizes))]
    columns = [pa.array(images, pa.binary()), pa.array(words, pa.string()), pa.array(range(len(sizes)), pa.int64())]
    return pa.Table.from_arrays(columns, schema=UNEQUAL)


def write_unequal(store: ObjectStore, scratch: Path, folder: str, pieces: list[pa.Table]) -> list[DataFile]:
    writer = SplitWriter(store, folder, scratch, schema=UNEQUAL, split="train", first_row_id=0)
    for piece in pieces:
        writer.write(piece)
    return writer.close()


SIZES = st.one_of(st.none(), st.just(0), st.integers(1, 100), st.integers(60_000, 300_000), st.just(GROUP_BYTES + 9))


@given(sizes=st.lists(SIZES, max_size=40), many=st.integers(0, 600), data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_very_unequal_rows_do_not_depend_on_how_they_arrive(
    store: ObjectStore, tmp_path: Path, sizes: list[int | None], many: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(sizes)))
    table = unequal([*sizes[:place], *[3] * many, *sizes[place:]])
    cuts = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=8)))
    pieces = [table.slice(begin, end - begin) for begin, end in itertools.pairwise([0, *cuts, table.num_rows])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "MAX_UNEQUAL_GROUP_BYTES", GROUP_BYTES)
        patch.setattr(writing, "MAX_FILE_BYTES", 4 * GROUP_BYTES)
        expected = write_unequal(store, tmp_path, "b", [table])
        for block_bytes in (1, 4 * 1024 * 1024):
            patch.setattr(writing, "BLOCK_BYTES", block_bytes)
            assert write_unequal(store, tmp_path, "a", pieces) == expected
    groups = [rows for file in expected for rows in file.row_groups]
    assert sum(groups) == table.num_rows
    images = table["image"].to_pylist()
    first = 0
    for rows in groups:
        taken = sum(len(image or b"") for image in images[first : first + rows])
        assert rows <= 256
        assert rows == 1 or taken <= GROUP_BYTES
        first += rows


def test_large_rows_make_small_groups_and_small_rows_keep_theirs(store: ObjectStore, tmp_path: Path) -> None:
    mib = 1024 * 1024
    (file,) = write_unequal(store, tmp_path, "a", [unequal([9] * 300 + [mib] * 6 + [9 * mib] + [9] * 300)])
    assert file.row_groups == [256, 44 + 3, 3, 1, 256, 44]
    assert pq.read_table(pa.BufferReader(store.get(f"a/{file.path}"))).num_rows == 607


def test_the_writer_holds_a_few_groups_whatever_the_rows_weigh(store: ObjectStore, tmp_path: Path) -> None:
    writer = SplitWriter(store, "a", tmp_path, schema=UNEQUAL, split="train", first_row_id=0)
    before, most = pa.total_allocated_bytes(), 0
    for _ in range(40):
        writer.write(unequal([2 * 1024 * 1024]))
        most = max(most, pa.total_allocated_bytes() - before)
    assert [file.row_count for file in writer.close()] == [31, 9]
    assert most < 16 * 1024 * 1024
