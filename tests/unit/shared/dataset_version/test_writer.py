from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.dataset_version import writer as writing
from shared.dataset_version.columns import tensor_field
from shared.dataset_version.manifest import DataFile, sha256_hex
from shared.dataset_version.writer import SplitWriter, group_rows
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
