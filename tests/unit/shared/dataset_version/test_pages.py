"""A version with many files has them in pages, and is read as one that has them in its manifest."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from shared.dataset_version import DatasetVersion, RowGroup, RowGroups, VersionReader, load_version
from shared.dataset_version import pages as paging
from shared.dataset_version import parquet as writing
from shared.dataset_version.manifest import Column, DataFile, FilesInPages, Manifest, Split, sha256_hex
from shared.dataset_version.pages import PageCache, VersionFiles, manifest_with, open_files, page_path
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, NotFound
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.transforming import commit_tables

NAME = "datasets/d/versions/v"
SPLITS = {"train": 37, "test": 5, "validation": 11}


def files_of(splits: dict[str, int], seed: int = 0) -> list[DataFile]:
    """Files of one to five groups of one to nine rows each; `splits` are their numbers of files."""
    rng = np.random.default_rng(seed)
    files, first = [], 0
    for split, count in splits.items():
        for number in range(count):
            groups = rng.integers(1, 10, rng.integers(1, 6)).tolist()
            digest = sha256_hex(f"{split} {number}".encode())
            files.append(
                DataFile(
                    path=f"{split}-{number:05d}.parquet",
                    split=split,
                    first_row_id=first,
                    row_count=sum(groups),
                    row_groups=groups,
                    size_bytes=1000 + number,
                    sha256=digest,
                    footer_bytes=100 + number,
                    footer_sha256=digest[::-1],
                    raw_bytes=None if number % 3 else 10 * number,
                )
            )
            first += sum(groups)
    return files


def manifest_of(files: list[DataFile]) -> Manifest:
    splits = []
    for name, own in itertools.groupby(files, lambda file: file.split):
        there = list(own)
        rows = sum(file.row_count for file in there)
        splits.append(Split(name=name, first_row_id=there[0].first_row_id, row_count=rows))
    return Manifest(columns=[Column(name="n", arrow_type="int64", shape=[])], splits=splits, files=files)


def groups_of(files: list[DataFile]) -> list[RowGroup]:
    found = []
    for file_index, file in enumerate(files):
        first = file.first_row_id
        for group_index, rows in enumerate(file.row_groups):
            found.append(RowGroup(file_index, group_index, first, rows))
            first += rows
    return found


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of at most three files or nine groups, and three pages of a page: 53 files need three levels."""
    for name, limit in {
        "MAX_INLINE_FILES": 2,
        "MAX_PAGE_FILES": 3,
        "MAX_PAGE_GROUPS": 9,
        "MAX_CHILDREN": 3,
    }.items():
        monkeypatch.setattr(paging, name, limit)


def paged(store: ObjectStore, files: list[DataFile]) -> DatasetVersion:
    """The version as a reader finds it in the store."""
    data = manifest_with(manifest_of(files), store, "v", files).to_json()
    return DatasetVersion(NAME, Manifest.from_json(data, sha256_hex(data)), sha256_hex(data), "v")


def reading(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> list[str]:
    """The keys that are read from now on."""
    read: list[str] = []
    get_ranges = store.get_ranges

    def noted(key: str, ranges: paging.Ranges) -> list[memoryview]:
        read.append(key)
        return get_ranges(key, ranges)

    monkeypatch.setattr(store, "get_ranges", noted)
    return read


# --- The same version in both forms ---


@pytest.mark.usefixtures("small_pages")
def test_files_in_pages_are_those_of_the_manifest(store: ObjectStore) -> None:
    files = files_of(SPLITS)
    version = paged(store, files)
    found = open_files(store, version)
    assert version.manifest.pages is not None
    assert version.manifest.pages.index.level == 2
    assert list(found) == files
    assert [found[place] for place in range(len(files))] == files
    assert found[-1] == files[-1]
    assert found[5:7] == files[5:7]
    assert len(found) == len(files)
    with pytest.raises(IndexError):
        found[len(files)]
    whole = manifest_of(files)
    assert version.manifest.size_bytes == whole.size_bytes
    assert version.manifest.row_count == whole.row_count
    for split in SPLITS:
        assert version.manifest.bytes_of_split(split) == whole.bytes_of_split(split)
    keys = {info.key for info in store.list("v")}
    assert keys == {f"v/{path}" for path in found.page_paths()}
    assert len(keys) == version.manifest.pages.page_count


@pytest.mark.usefixtures("small_pages")
def test_row_groups_are_found_by_row_in_pages_as_in_the_manifest(store: ObjectStore) -> None:
    files = files_of(SPLITS)
    version, whole = paged(store, files), DatasetVersion(NAME, manifest_of(files), "", "v")
    expected = groups_of(files)
    for found in (open_files(store, version), VersionFiles(store, whole)):
        rows = version.manifest.row_count
        for first, end in [(0, rows), *((row, min(row + 40, rows)) for row in range(0, rows, 7)), (5, 5), (rows, rows)]:
            wanted = [one for one in expected if one.first_row_id < end and one.first_row_id + one.row_count > first]
            assert found.row_groups(first, end) == (wanted if first < end else [])
    reader = VersionReader(store, version)
    for split in version.manifest.splits:
        own = [one for one in expected if files[one.file_index].split == split.name]
        assert reader.row_groups(split.name) == own
        for offset in (0, 1, split.row_count // 2, split.row_count - 1, split.row_count, split.row_count + 9):
            after = [one for one in own if one.first_row_id + one.row_count > split.first_row_id + offset]
            assert list(reader.row_groups_from(split.name, offset)) == after


def test_a_small_version_has_its_files_in_its_manifest(store: ObjectStore) -> None:
    files = files_of({"train": 256})
    assert manifest_with(manifest_of(files), store, "v", files) == manifest_of(files)
    assert list(store.list("v")) == []
    many = replace(files[0], row_groups=[1] * 4097)
    for more in (files_of({"train": 257}), [many]):
        assert manifest_with(manifest_of(more), store, "v", more).pages is not None


def test_manifests_without_pages_have_the_digests_that_they_had(store: ObjectStore) -> None:
    """A digest is what an earlier release wrote for these files."""
    files = files_of({"train": 2, "test": 1})
    data = manifest_with(manifest_of(files), store, "v", files).to_json()
    assert sha256_hex(data) == "00fe9d3adf03861dedc721adeda05071de41aac8739e5801ee028419a25c13a5"


@pytest.mark.usefixtures("small_pages")
def test_equal_files_make_equal_manifests(store: ObjectStore) -> None:
    files = files_of(SPLITS)
    first, again = (manifest_with(manifest_of(files), store, folder, files) for folder in ("one", "two"))
    assert first.to_json() == again.to_json()
    other = [*files[:-1], replace(files[-1], sha256="0" * 64)]
    assert manifest_with(manifest_of(files), store, "other", other).to_json() != first.to_json()


@pytest.mark.usefixtures("small_pages")
def test_rows_of_a_version_in_pages_are_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 40_000)
    table = pa.table({"n": np.arange(50_000)})
    commit_tables(store, {"train": table, "test": table.slice(0, 3000)}, name=NAME)
    version = load_version(store, NAME)
    assert version.manifest.pages is not None
    reader = VersionReader(store, version)
    read = reader.read_many(reader.row_groups("train"))
    assert read.equals(table)
    (last,) = list(reader.row_groups_from("train", 49_999))
    assert reader.read(last)["n"].to_pylist()[-1] == 49_999


def test_files_in_pages_are_no_list_of_the_manifest(store: ObjectStore) -> None:
    files = files_of({"train": 300})
    manifest = paged(store, files).manifest
    assert manifest.files == FilesInPages()
    for use in (len, list, lambda one: one[0]):
        with pytest.raises(TypeError, match="open_files"):
            use(manifest.files)


# --- Cost ---


def test_reading_a_few_rows_costs_the_same_in_small_and_in_large_versions(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "MAX_INLINE_FILES", 2)
    monkeypatch.setattr(paging, "MAX_PAGE_FILES", 10)
    costs = []
    for count in (30, 300):
        version = paged(store, files_of({"train": count}))
        read = reading(monkeypatch, store)
        files = open_files(store, version)
        middle = version.manifest.row_count // 2
        groups = next(files.row_groups_by_page(middle, version.manifest.row_count))[1]
        assert groups[0].first_row_id <= middle < groups[0].first_row_id + groups[0].row_count
        assert files[groups[0].file_index].row_count
        costs.append(len(read))
    assert costs == [1, 1]


@pytest.mark.usefixtures("small_pages")
def test_pages_are_read_once_and_leave_a_cache_that_is_full(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = paged(store, files_of(SPLITS))
    read = reading(monkeypatch, store)
    cache = PageCache()
    for _ in range(2):
        assert len(list(VersionFiles(store, version, cache))) == sum(SPLITS.values())
    assert len(read) == len(set(read)) == len(cache)

    read.clear()
    tight = PageCache(max_bytes=5000)
    assert len(list(VersionFiles(store, version, tight))) == sum(SPLITS.values())
    assert len(tight) < len(read)


# --- Damage ---


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone"])
def test_a_damaged_page_is_named(store: ObjectStore, level: int, damage: str) -> None:
    version = paged(store, files_of(SPLITS))
    path = page_path(level, 0)
    key = f"{version.folder}/{path}"
    if damage == "gone":
        store.delete(key)
    elif damage == "shorter":
        store.put(key, store.get(key)[:-1])
    else:
        data = bytearray(store.get(key))
        data[70] ^= 1
        store.put(key, data)
    with pytest.raises(DataLoss, match=f"{path}.*{NAME}") as lost:
        VersionReader(store, version, check_there=lambda _: None).row_groups("train")
    assert lost.value.specific_reason == "DAMAGED_FILE"
    assert lost.value.metadata == {"resource": NAME, "file": path}


@pytest.mark.usefixtures("small_pages")
def test_a_page_of_a_deleted_version_is_not_lost(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 4000)
    commit_tables(store, {"train": pa.table({"n": np.arange(10_000)})}, name=NAME)
    reader = VersionReader(store, load_version(store, NAME))
    Jobs(store, IMPORT_KIND).transition(NAME, lambda job: replace(job, state=job.state.DELETING))
    store.delete_folder(reader.version.folder)
    with pytest.raises(NotFound, match="deleted"):
        reader.row_groups("train")


# --- Row groups as arrays ---


def test_row_groups_are_a_sequence_of_row_groups() -> None:
    files = files_of({"train": 9})
    wanted = groups_of(files)
    whole = VersionFiles(None, DatasetVersion(NAME, manifest_of(files), "", "v")).row_groups(0, 10**9)  # type: ignore[arg-type]
    assert len(whole) == len(wanted)
    assert whole == wanted
    assert whole != wanted[1:]
    assert [whole[place] for place in range(-len(wanted), len(wanted))] == [*wanted, *wanted]
    with pytest.raises(IndexError):
        whole[len(wanted)]
    for begin, end in itertools.combinations_with_replacement(range(len(wanted) + 1), 2):
        part = whole[begin:end]
        assert list(part) == wanted[begin:end]
        assert [part[place] for place in range(len(part))] == wanted[begin:end]
        assert part.row_count == sum(one.row_count for one in wanted[begin:end])
        assert RowGroups.joined([whole[:begin], part, whole[end:]]) == wanted
        middle = len(part) // 2
        assert list(part[middle:]) == wanted[begin:end][middle:]
    assert pickle.loads(pickle.dumps(whole[3:7])) == wanted[3:7]
    assert repr(pickle.loads(pickle.dumps(whole[3:7]))) == repr(whole[3:7]) != repr(whole[3:8])


def test_row_groups_of_many_pages_are_in_memory_once(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MAX_PAGE_GROUPS", 5_000)
    monkeypatch.setattr(paging, "MAX_INLINE_GROUPS", 10)
    (template,) = files_of({"train": 1})
    group_rows, count = [3] * 1000, 100
    files = [
        replace(template, path=f"{number}", row_groups=group_rows, row_count=3000, first_row_id=3000 * number)
        for number in range(count)
    ]
    opened = open_files(store, paged(store, files))
    tracemalloc.start()
    try:
        found = opened.row_groups(0, 3000 * count)
        assert (len(found), found.row_count) == (1000 * count, 3000 * count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * found.row_counts.nbytes
