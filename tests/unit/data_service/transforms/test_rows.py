"""Rows are read in batches that are bounded in their bytes as in their number."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from data_service.transforms import passes as reading
from data_service.transforms.passes import VersionRows, plan_parts
from shared.dataset_version import VersionReader, load_version
from shared.storage import ObjectStore
from tests.support.transforming import SOURCE, commit_tables

MIB = 1024 * 1024


@pytest.mark.parametrize("columns", [["image", "n"], ["n"], []])
def test_batches_of_unequal_rows_cover_a_part_in_order_and_stay_small(store: ObjectStore, columns: list[str]) -> None:
    sizes = [3] * 700 + [MIB] * 12 + [6 * MIB, 0] + [5] * 300
    noise = np.random.default_rng(0)
    table = pa.table({"image": pa.array([noise.bytes(size) for size in sizes], pa.binary()), "n": range(len(sizes))})
    commit_tables(store, {"train": table})
    version = load_version(store, SOURCE)
    parts = plan_parts(VersionReader(store, version), table.schema)
    source = VersionRows(store.settings, version, None, reading.DEFAULT_BATCH_ROWS)

    batches = [batch for part in parts for batch in source.divided(part, columns)]

    assert np.concatenate([batch.row_ids for batch in batches]).tolist() == list(range(len(sizes)))
    assert all(len(batch.row_ids) <= reading.DEFAULT_BATCH_ROWS for batch in batches)
    if "n" in columns:
        assert [n for batch in batches for n in batch.table["n"].to_pylist()] == list(range(len(sizes)))
    if "image" in columns:
        bytes_of = [(batch.table.nbytes, batch.table.num_rows) for batch in batches]
        assert all(size <= reading.READ_BYTES + 64 * 1024 or rows == 1 for size, rows in bytes_of)


def test_narrow_rows_are_still_read_many_at_a_time(store: ObjectStore) -> None:
    commit_tables(store, {"train": pa.table({"word": [f"row {n}" for n in range(5000)]})})
    version = load_version(store, SOURCE)
    source = VersionRows(store.settings, version, None, reading.DEFAULT_BATCH_ROWS)
    (part,) = plan_parts(VersionReader(store, version), pa.schema([("word", pa.string())]))

    assert [len(batch.row_ids) for batch in source.divided(part, ["word"])] == [1024] * 4 + [904]


def test_equal_texts_are_not_taken_for_what_their_dictionary_weighs(store: ObjectStore) -> None:
    commit_tables(store, {"train": pa.table({"text": ["x" * 64 * 1024] * 640})})
    version = load_version(store, SOURCE)
    source = VersionRows(store.settings, version, None, reading.DEFAULT_BATCH_ROWS)
    parts = plan_parts(VersionReader(store, version), pa.schema([("text", pa.string())]))

    batches = [batch for part in parts for batch in source.divided(part, ["text"])]

    assert sum(len(batch.row_ids) for batch in batches) == 640
    assert max(batch.table.nbytes for batch in batches) <= 16 * MIB
