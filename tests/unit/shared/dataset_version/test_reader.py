from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shared.dataset_version import RowGroup, VersionReader, load_version
from shared.errors import DataLoss, InvalidArgument, Unavailable
from shared.storage import ObjectStore
from tests.support.cpu_time import cpu_at_most
from tests.support.versions import commit_version, striped_digits

OPENED = ObjectStore.local_file


@pytest.fixture(params=["here", "elsewhere"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files: Arrow reads local ones by itself, and of others what was fetched."""
    if request.param == "elsewhere":
        monkeypatch.setattr(ObjectStore, "local_file", lambda *_: nullcontext())


@pytest.fixture
def reader(store: ObjectStore, committed: str) -> VersionReader:
    return VersionReader(store, load_version(store, committed))


def damage(store: ObjectStore, reader: VersionReader, position: int) -> None:
    key = f"{reader.version.folder}/{reader.version.manifest.files[0].path}"
    data = bytearray(store.get(key))
    data[position] ^= 1
    store.put(key, data)


def test_row_groups_cover_each_split_once_in_order(reader: VersionReader) -> None:
    assert reader.row_groups("train") == [RowGroup(0, 0, 0, 256), RowGroup(0, 1, 256, 256), RowGroup(0, 2, 512, 88)]
    assert reader.row_groups("test") == [RowGroup(1, 0, 600, 100)]


def test_rows_come_back_with_their_ids(reader: VersionReader) -> None:
    tables = [reader.read(group, ["_row_id", "image"]) for group in reader.row_groups("train")]
    table = pa.concat_tables(tables)
    assert table.schema.names == ["_row_id", "image"]
    assert table["_row_id"].to_pylist() == list(range(600))
    images = np.concatenate([chunk.to_numpy_ndarray() for chunk in table["image"].chunks])
    np.testing.assert_array_equal(images.reshape(-1), np.arange(600 * 784, dtype=np.uint32).astype(np.uint8))


def test_without_names_all_columns_but_the_row_ids_are_read(reader: VersionReader) -> None:
    table = reader.read(reader.row_groups("test")[0])
    assert table.schema == reader.select(["image", "label"])
    assert [column.num_chunks for column in table.columns] == [1, 1]


@pytest.mark.parametrize("columns", [["_row_id", "image"], ["label"], ["label", "image", "_row_id"]])
def test_groups_read_together_are_the_groups_read_one_by_one(reader: VersionReader, columns: list[str]) -> None:
    train, test = reader.row_groups("train"), reader.row_groups("test")
    for groups in (train, [*train, *test], [train[2], train[0]], [train[1]]):
        together = reader.read_many(groups, columns)
        assert together.equals(pa.concat_tables([reader.read(group, columns) for group in groups]))
        assert [column.num_chunks for column in together.columns] == [1] * len(columns)
    assert reader.read_many([], columns).schema == reader.select(columns)


@pytest.mark.parametrize(("gap_bytes", "requests"), [(512 * 1024, 1), (64 * 1024, 3)])
def test_neighbouring_groups_are_one_request_and_far_ones_several(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, gap_bytes: int, requests: int
) -> None:
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_GAP_BYTES", gap_bytes)
    monkeypatch.setattr(ObjectStore, "local_file", lambda *_: nullcontext())
    labels = striped_digits(600)[1]
    commit_version(store, "datasets/d/versions/v1", {"train": striped_digits(600)})
    reader = VersionReader(store, load_version(store, "datasets/d/versions/v1"))
    groups = reader.row_groups("train")
    reader.read(groups[0])  # fetches the footer
    asked: list[int] = []
    ranged = store.get_ranges

    def counted(key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        asked.extend(length for _, length in ranges)
        return ranged(key, ranges)

    monkeypatch.setattr(store, "get_ranges", counted)
    assert reader.read_many(groups, ["label"])["label"].to_pylist() == labels.tolist()
    assert len(asked) == requests


def test_nothing_is_fetched_of_groups_between_those_that_are_wanted(store: ObjectStore) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (5 * 256, 28, 28), np.uint8)
    commit_version(store, "datasets/d/versions/v1", {"train": (noise, np.zeros(len(noise), np.int64))})

    def fetched(*numbers: int) -> int:
        reader = VersionReader(store, load_version(store, "datasets/d/versions/v1"))
        groups = reader.row_groups("train")
        reader.read_many([groups[number] for number in numbers], ["image"])
        return reader.bytes_fetched

    group = noise.nbytes // 5
    assert group <= fetched(0, 1) - fetched(0) < 1.1 * group
    assert group <= fetched(0, 3) - fetched(0) < 1.1 * group


def test_groups_come_in_the_order_asked_for_and_as_often(reader: VersionReader) -> None:
    first, second, third = reader.row_groups("train")
    (other,) = reader.row_groups("test")
    asked = [third, first, other, first, second]
    table = reader.read_many(asked, ["_row_id"])
    rows = [range(group.first_row_id, group.first_row_id + group.row_count) for group in asked]
    assert table["_row_id"].to_pylist() == [row for group in rows for row in group]


def test_threads_may_share_a_reader(reader: VersionReader) -> None:
    groups = [*reader.row_groups("train"), *reader.row_groups("test")] * 8
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda group: reader.read(group, ["_row_id"]), groups))
    for group, table in zip(groups, tables, strict=True):
        assert table["_row_id"][0].as_py() == group.first_row_id


@pytest.mark.parametrize("columns", [["absent"], ["label", "label"], [""]])
def test_a_column_that_is_not_there_is_refused_by_name(reader: VersionReader, columns: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"columns\["):
        reader.read(reader.row_groups("test")[0], columns)


def test_an_unknown_split_is_refused_with_those_there_are(reader: VersionReader) -> None:
    with pytest.raises(InvalidArgument, match="train, test"):
        reader.row_groups("validation")


def test_a_flipped_bit_never_reads_as_another_row(store: ObjectStore, reader: VersionReader) -> None:
    file = reader.version.manifest.files[0]
    whole = [reader.read(group, ["image", "label", "_row_id"]) for group in reader.row_groups("train")]
    noticed = 0
    for position in np.random.default_rng(0).integers(4, file.size_bytes, 200).tolist():
        damage(store, reader, position)
        fresh = VersionReader(store, reader.version)
        for group, expected in zip(reader.row_groups("train"), whole, strict=True):
            try:
                assert fresh.read(group, ["image", "label", "_row_id"]).equals(expected)
            except DataLoss:
                noticed += 1
        damage(store, reader, position)
    assert noticed > 150


def test_a_changed_footer_is_noticed(store: ObjectStore, reader: VersionReader) -> None:
    damage(store, reader, reader.version.manifest.files[0].size_bytes - 30)
    with pytest.raises(DataLoss, match="footer"):
        reader.read(reader.row_groups("train")[0])


@pytest.mark.parametrize("change", ["gone", "cut", "longer"])
def test_a_file_of_another_size_is_noticed(store: ObjectStore, reader: VersionReader, change: str) -> None:
    key = f"{reader.version.folder}/{reader.version.manifest.files[0].path}"
    data = store.get(key)
    if change == "gone":
        store.delete(key)
    else:
        store.put(key, data[:-50] if change == "cut" else data[:4] + b"?" + data[4:])
    with pytest.raises(DataLoss, match=r"train-00000\.parquet of datasets/digits/versions/v1"):
        reader.read(reader.row_groups("train")[0])


def test_a_local_file_that_was_appended_to_is_noticed(
    store: ObjectStore, reader: VersionReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranges are all as they were, and so is what a store elsewhere gives of it."""
    monkeypatch.setattr(ObjectStore, "local_file", OPENED)
    key = f"{reader.version.folder}/{reader.version.manifest.files[0].path}"
    store.put(key, store.get(key) + b"?")
    with pytest.raises(DataLoss, match="size"):
        reader.read(reader.row_groups("train")[0])


def test_a_disk_that_cannot_be_read_is_an_outage_and_no_damage(
    store: ObjectStore, reader: VersionReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stale:
        def size(self) -> int:
            raise OSError(errno.ESTALE, "Stale file handle")

    @contextmanager
    def stale(key: str) -> Iterator[Stale]:
        with OPENED(store, key):
            yield Stale()

    monkeypatch.setattr(store, "local_file", stale)
    with pytest.raises(Unavailable):
        reader.read(reader.row_groups("train")[0])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_failed_read_keeps_no_file_open(store: ObjectStore, reader: VersionReader) -> None:
    group = reader.row_groups("train")[0]
    damage(store, reader, 100)
    before = open_files()
    kept = []
    for _ in range(10):
        with pytest.raises(DataLoss) as raised:
            reader.read(group)
        kept.append(raised.value)
    assert open_files() < before + len(kept)


@pytest.mark.timed
def test_very_many_columns_are_selected_soon(reader: VersionReader) -> None:
    names = [f"c{number}" for number in range(10_000)]
    reader._schema = pa.schema([(name, pa.int64()) for name in names])
    with cpu_at_most(0.5):
        assert reader.select(names[::-1]).names == names[::-1]
        with pytest.raises(InvalidArgument, match=r"columns\[10000\].*once"):
            reader.select([*names, "c7"])
