"""A source divided into parts yields what the whole yields: the same rows, and bad rows with the same places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle

from data_service.formats import RowSource, interface, open_sources
from data_service.formats.parquet import ParquetRows
from data_service.storage.source_files import SourceFiles
from data_service.uploads import reader
from shared.errors import InvalidArgument
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.import_sources import Bad, Quarantine, found_file, opened, source_of, table_of
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of


def read(*parts: RowSource) -> tuple[pa.Table, list[Bad]]:
    bad = Quarantine()
    return pa.concat_tables([table_of(part, bad) for part in parts]), bad.rows


def parts_of(rows: RowSource, at_least: int = 2) -> list[RowSource]:
    """The parts, each as it is in another process, after a look at what they say of themselves."""
    parts = [cloudpickle.loads(cloudpickle.dumps(part)) for part in rows.parts()]  # type: ignore[no-untyped-call]
    assert len(parts) >= at_least
    for part in parts:
        assert part.schema == rows.schema
        assert part.class_names == rows.class_names
        assert len(part.parts()) == 1
        table, bad = read(part)
        assert part.row_count is not None
        assert table.num_rows <= part.row_count <= table.num_rows + sum(row.rows for row in bad)
    assert rows.row_count == sum(part.row_count or 0 for part in parts)
    return parts


# --- Typed files ---

TYPED = pa.table(
    {
        "n": np.arange(3000) * 22,
        "s": [f"text {i % 7}" for i in range(3000)],
        "t": pa.FixedSizeListArray.from_arrays(pa.array([None if i % 900 == 1 else float(i) for i in range(6000)]), 2),
    }
)


def test_parquet_is_divided_into_runs_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=170)
    rows = ParquetRows(found_file(tmp_path / "t.parquet"))
    parts = parts_of(rows, at_least=3)
    table, bad = read(rows)
    assert read(*parts) == (table, bad)
    assert len(bad) == 7
    assert len(parts) < 18  # some have several row groups
    assert sum(part.size_bytes for part in parts) <= rows.size_bytes


def test_a_row_group_that_is_larger_is_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=1000)
    parts = parts_of(ParquetRows(found_file(tmp_path / "t.parquet")))
    assert [part.row_count for part in parts] == [1000, 1000, 1000]


def test_a_small_or_empty_parquet_file_is_one_part(tmp_path: Path) -> None:
    for table in (TYPED, TYPED.slice(0, 0)):
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=170)
        rows = ParquetRows(found_file(tmp_path / "t.parquet"))
        assert len(rows.parts()) == 1
        assert rows.row_count == table.num_rows


def test_a_part_of_a_file_that_was_written_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    pq.write_table(TYPED, tmp_path / "t.parquet", row_group_size=170)
    last = ParquetRows(found_file(tmp_path / "t.parquet")).parts()[-1]
    pq.write_table(TYPED.slice(0, 2999), tmp_path / "t.parquet", row_group_size=170)
    with pytest.raises(InvalidArgument, match="it changed while it was read"):
        table_of(last)


def test_a_cast_counts_the_rows_that_the_file_left_out(tmp_path: Path) -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array([None, 1, 2, 3, 4, 5, None, 7]), 2)
    pq.write_table(pa.table({"n": [1, 300, 3, 300], "t": values}), tmp_path / "t.parquet")
    (one,) = opened(tmp_path, source_of((tmp_path / "t.parquet").as_uri(), "parquet"), types={"n": "int8"})
    table, bad = read(one.rows)
    assert table["n"].to_pylist() == [3]
    assert [row.place for row in bad] == ["row 1", "row 4", "row 2"]


def test_casts_and_partitions_are_those_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 20_000)
    (tmp_path / "day=3").mkdir()
    pq.write_table(TYPED, tmp_path / "day=3" / "t.parquet", row_group_size=170)
    (one,) = opened(tmp_path, source_of(f"{tmp_path.as_uri()}/", "parquet"), types={"n": "uint16", "day": "int16"})
    table, bad = read(one.rows)
    assert table.num_rows == 2972
    parted, parted_bad = read(*parts_of(one.rows, at_least=3))
    assert parted == table
    # A file's own bad rows come first in each table, and tables end elsewhere in parts.
    assert sorted(parted_bad, key=lambda row: row.place) == sorted(bad, key=lambda row: row.place)
    assert len({row.place for row in bad}) == len(bad)


def test_parts_of_an_upload_do_not_read_it_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 200_000)
    monkeypatch.setattr(reader, "BUFFER_BYTES", 1000)
    sink = pa.BufferOutputStream()
    numbers = np.random.default_rng(0).integers(0, 2**60, 100_000)
    pq.write_table(pa.table({"n": numbers}), sink, row_group_size=10_000, use_dictionary=False)
    uploads = uploads_of(store)
    name = committed(uploads, sink.getvalue().to_pybytes(), chunk_bytes=20_000)
    counting = CountingStore(store)
    (one,) = open_sources([source_of(name, "parquet")], SourceFiles([], None, counting), {})
    assert read(*parts_of(one.rows)) == read(one.rows)
    last = one.rows.parts()[-1]
    counting.forget()
    assert table_of(last)["n"].to_pylist() == numbers[-20_000:].tolist()
    chunks = {request for request in counting.requests if request.startswith("get") and "/chunks/" in request}
    assert 0 < len(chunks) < len(list(store.list(f"{name}/chunks"))) // 2
