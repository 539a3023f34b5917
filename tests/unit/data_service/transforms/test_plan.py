"""Parts cover a version, in order, each row once, and depend on nothing but the version and the new columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.transforms import passes
from data_service.transforms.passes import parts_of, plan_parts
from shared.dataset_version import VersionReader, load_version
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.paged_versions import make_versions_paged
from tests.support.transforming import SOURCE, commit_tables


@pytest.fixture
def reader(store: ObjectStore) -> VersionReader:
    n = np.arange(30_000)
    commit_tables(store, {"train": pa.table({"n": n}), "test": pa.table({"n": n[:5000]})})
    return VersionReader(store, load_version(store, SOURCE))


def test_parts_follow_each_other_within_one_split_each(reader: VersionReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 50_000)
    parts = plan_parts(reader, pa.schema([("n", pa.int64())]))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert len(parts) > 4
    first_row_id = 0
    for part in parts:
        assert part.first_row_id == first_row_id
        first_row_id += part.row_count
        assert (part.split == "train") == (first_row_id <= 30_000)
    assert first_row_id == 35_000


@pytest.mark.parametrize("output", [pa.int64(), pa.string()], ids=["equal widths", "unequal widths"])
def test_a_version_in_pages_has_the_parts_of_one_that_has_none(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, output: pa.DataType
) -> None:
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 20_000)
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_FILE_BYTES", 20_000)
    n = np.arange(5_000)
    words = [f"word {number % 7}" * (number % 11) for number in n.tolist()]
    whole = pa.table({"n": n, "word": pa.array(words).cast(pa.string())})
    tables = {"train": whole, "test": whole.slice(100, 1500)}
    commit_tables(store, tables)
    found: dict[tuple[str, ...], list[Any]] = {}
    for page_files in (0, 1, 3):
        if page_files:
            make_versions_paged(monkeypatch, page_files=page_files, file_bytes=20_000)
        name = f"datasets/d/versions/pages-of-{page_files}"
        commit_tables(store, tables, name=name)
        version = load_version(store, name)
        assert (version.manifest.pages is None) == (page_files == 0)
        schema = pa.schema([("out", output)])
        for splits in ((), ("test",)):
            parts = plan_parts(VersionReader(store, version), schema, splits)
            found.setdefault(splits, []).append([(part.split, list(part.groups), part.row_count) for part in parts])
    for plans in found.values():
        assert plans[0] == plans[1] == plans[2]
        assert len(plans[0]) > 1


def test_the_first_part_needs_one_page_of_a_large_version(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 50_000)
    make_versions_paged(monkeypatch, children=100)
    commit_tables(store, {"train": pa.table({"n": np.arange(100_000)})})
    counting = CountingStore(store)
    reader = VersionReader(counting, load_version(store, SOURCE))
    schema = reader.select(None)
    counting.forget()
    parts = parts_of(reader, schema)
    next(parts)
    assert len(counting.requests) <= 1
    assert sum(part.row_count for part in parts) < 100_000
    assert reader.version.manifest.pages is not None
    assert len(counting.requests) == reader.version.manifest.pages.page_count - 1, "the schema has read the first page"


def test_wide_results_make_smaller_parts(reader: VersionReader) -> None:
    narrow, wide = (
        plan_parts(reader, pa.schema([("t", pa.fixed_shape_tensor(pa.float32(), [width]))])) for width in (1, 1000)
    )
    assert len(narrow) == 2
    assert len(wide) > 4


def test_texts_are_taken_for_what_they_weigh(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 100_000)
    noise = np.random.default_rng(0).integers(32, 127, (2000, 500), np.uint8)
    commit_tables(store, {"train": pa.table({"text": [bytes(row).decode() for row in noise]})})
    parts = plan_parts(VersionReader(store, load_version(store, SOURCE)), pa.schema([("text", pa.string())]))
    assert len(parts) > 4


def test_parts_of_unequal_rows_weigh_alike_not_count_alike(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 300_000)
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_FILE_BYTES", 100_000)
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_UNEQUAL_GROUP_BYTES", 50_000)
    noise = np.random.default_rng(0)
    images = [noise.bytes(9) for _ in range(20_000)] + [noise.bytes(20_000) for _ in range(60)]
    commit_tables(store, {"train": pa.table({"image": pa.array(images, pa.binary())})})
    reader = VersionReader(store, load_version(store, SOURCE))

    parts = plan_parts(reader, pa.schema([("image", pa.binary())]))

    first_row_id = 0
    for part in parts:
        assert part.first_row_id == first_row_id
        rows = images[first_row_id : first_row_id + part.row_count]
        assert sum(map(len, rows)) < 300_000
        first_row_id += part.row_count
    assert first_row_id == len(images)
    assert max(part.row_count for part in parts) > 1000
