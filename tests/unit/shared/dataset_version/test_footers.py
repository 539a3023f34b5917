"""Footers are parsed once for all that is read of a file in a row, and few are in memory at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service import datasets
from data_service.datasets import Datasets, Versions
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.parquet import PARSED, Footers, GroupSizes
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.transforming import SOURCE, commit_tables

FILES, COLUMNS, GROUP_ROWS = 20, 60, 512


@pytest.fixture
def wide(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two versions of as many files, of two row groups each."""
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_FILE_BYTES", 2 * GROUP_ROWS * 8 * (COLUMNS + 1))
    numbers = np.random.default_rng(5).random(FILES * 2 * GROUP_ROWS)
    table = pa.table({f"c{place}": numbers for place in range(COLUMNS)})
    names = [SOURCE, f"{SOURCE}-2"]
    for name in names:
        commit_tables(store, {"train": table}, name)
    return names


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each footer that was parsed."""
    sizes: list[int] = []
    parse = pq.read_metadata

    def counted(data: Any) -> pq.FileMetaData:
        sizes.append(data.size)
        return parse(data)

    monkeypatch.setattr(pq, "read_metadata", counted)
    return sizes


def read_all(reader: VersionReader) -> None:
    sizes = GroupSizes(reader, ["c0", "c7"])
    for group in reader.row_groups("train"):
        assert sizes.reported_bytes(group) >= 2 * 8 * GROUP_ROWS
        assert reader.read(group, ["c0", "c7"]).num_rows == GROUP_ROWS


def test_the_footers_last_used_are_kept_and_no_more_than_there_is_room_for(
    store: ObjectStore, wide: list[str], parsed: list[int]
) -> None:
    version = load_version(store, wide[0])
    assert len(version.manifest.files) == FILES
    footers = Footers(3 * PARSED * max(file.footer_bytes for file in version.manifest.files))
    reader = VersionReader(store, version, footers)
    read_all(reader)
    assert len(footers) == 3
    assert len(parsed) == FILES
    reader.read(reader.row_groups("train")[-1])
    assert len(parsed) == FILES


def test_a_footer_larger_than_the_room_is_kept_until_the_next(
    store: ObjectStore, wide: list[str], parsed: list[int]
) -> None:
    footers = Footers(max_bytes=1)
    reader = VersionReader(store, load_version(store, wide[0]), footers)
    read_all(reader)
    assert (len(footers), len(parsed)) == (1, FILES)


def test_all_versions_that_the_service_reads_share_the_room(
    store: ObjectStore, wide: list[str], parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "FOOTER_BYTES", 1)
    served = Versions(store, Jobs(store, IMPORT_KIND), Datasets(store))
    first, second = (served.active(name).reader for name in wide)
    read_all(first)
    read_all(second)
    assert len(parsed) == 2 * FILES
    first.read(first.row_groups("train")[-1])
    assert len(parsed) == 2 * FILES + 1
