from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service import reading
from data_service.deletion import Deletions
from data_service.reading import MESSAGE_BYTES, Selection, read_stream
from millrace.data.v1 import data_service_pb2
from shared.dataset_version import RowGroup, VersionReader, load_version
from shared.dataset_version.parquet import _OpenFile
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, InvalidArgument, NotFound
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.transforming import SOURCE, commit_tables
from tests.support.versions import commit_version, striped_digits

MIB = 1024 * 1024
VERSION = "datasets/d/versions/v1"
TRAIN, TEST = 1500, 100


@pytest.fixture
def reader(store: ObjectStore) -> VersionReader:
    commit_version(store, VERSION, {"train": striped_digits(TRAIN), "test": striped_digits(TEST)})
    return VersionReader(store, load_version(store, VERSION))


def messages(
    reader: VersionReader, split: str = "", columns: Sequence[str] = (), offset: int = 0, limit: int = 0
) -> list[bytes]:
    selection = Selection(split=split, columns=columns, offset=offset, limit=limit)
    return [
        data_service_pb2.ReadVersionResponse.FromString(message).arrow_ipc for message in read_stream(reader, selection)
    ]


def ids(reader: VersionReader, **selection: Any) -> list[int]:
    table = pa.ipc.open_stream(b"".join(messages(reader, columns=["_row_id"], **selection))).read_all()
    found: list[int] = table["_row_id"].to_pylist()
    return found


def test_all_rows_come_in_the_order_of_their_ids(reader: VersionReader) -> None:
    table = pa.ipc.open_stream(b"".join(messages(reader))).read_all()
    assert table.schema == reader.select(None)
    images, labels = striped_digits(TRAIN)
    read = np.concatenate([chunk.to_numpy_ndarray() for chunk in table["image"].chunks])
    np.testing.assert_array_equal(read[:TRAIN], images)
    assert table["label"].to_pylist()[:TRAIN] == labels.tolist()
    assert ids(reader) == list(range(TRAIN + TEST))


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        ({"split": "test"}, range(TRAIN, TRAIN + TEST)),
        ({"offset": 300, "limit": 500}, range(300, 800)),
        ({"offset": 256, "limit": 256}, range(256, 512)),
        ({"offset": 255, "limit": 2}, range(255, 257)),
        ({"offset": TRAIN - 1, "limit": 3}, range(TRAIN - 1, TRAIN + 2)),
        ({"offset": TRAIN + TEST}, range(0)),
        ({"split": "train", "limit": 10**9}, range(TRAIN)),
        ({"offset": TRAIN}, range(TRAIN, TRAIN + TEST)),
        ({"offset": TRAIN + TEST - 1}, range(TRAIN + TEST - 1, TRAIN + TEST)),
        ({"split": "test", "offset": TEST}, range(0)),
    ],
)
def test_a_range_is_those_rows(reader: VersionReader, selection: dict[str, Any], rows: range) -> None:
    assert ids(reader, **selection) == list(rows)


def counted_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first rows of the row groups that are made from now on."""
    made: list[int] = []

    def counted(file_index: int, group_index: int, first_row_id: int, row_count: int) -> RowGroup:
        made.append(first_row_id)
        return RowGroup(file_index, group_index, first_row_id, row_count)

    monkeypatch.setattr("shared.dataset_version.pages.RowGroup", counted)
    return made


@pytest.mark.parametrize(
    ("selection", "first"),
    [({}, 0), ({"offset": 12_000}, 12_000), ({"offset": 20_010}, 20_010), ({"split": "test"}, 20_000)],
)
def test_ten_rows_of_a_version_of_many_groups_meet_only_their_own(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, selection: dict[str, Any], first: int
) -> None:
    """A terabyte has millions of groups."""
    table = pa.table({"text": [f"row {row}" for row in range(20_000)]})
    commit_tables(store, {"train": table, "test": table.slice(0, 2_000)})
    reader = VersionReader(store, load_version(store, SOURCE))
    made = counted_groups(monkeypatch)

    assert ids(reader, limit=10, **selection) == list(range(first, first + 10))
    assert 1 <= len(made) <= 3


def test_groups_outside_the_range_are_not_read(reader: VersionReader, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = VersionReader.read_many

    def counted(self: VersionReader, groups: Sequence[Any], columns: Any = None) -> Any:
        read.extend(group.first_row_id for group in groups)
        return whole(self, groups, columns)

    monkeypatch.setattr(VersionReader, "read_many", counted)
    ids(reader, offset=600, limit=10)
    assert read == [512]


@pytest.mark.parametrize("field", ["offset", "limit"])
def test_a_negative_range_is_refused_by_field(reader: VersionReader, field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        ids(reader, **{field: -1})


def test_a_message_holds_whole_arrow_messages_and_fits_most_clients(
    reader: VersionReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 500_000)
    sent = messages(reader)
    assert len(sent) == 2 + 3  # the schema and the end; 2 or 3 groups, of at most 200 kB, a chunk
    for message in sent[1:-1]:
        batches = pa.ipc.open_stream(sent[0] + message).read_all()
        assert batches.num_rows > 0
        assert len(message) <= MESSAGE_BYTES


def test_a_row_larger_than_a_message_is_cut(reader: VersionReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MESSAGE_BYTES", 600)
    monkeypatch.setattr(reading, "BATCH_BYTES", 500)
    sent = messages(reader, split="test", limit=5)
    assert max(map(len, sent[1:])) <= 600
    assert pa.ipc.open_stream(b"".join(sent)).read_all()["label"].to_pylist() == striped_digits(5)[1].tolist()


def test_a_taker_that_goes_away_ends_the_reading(reader: VersionReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1)
    read: list[int] = []
    whole = VersionReader.read_many

    def counted(self: VersionReader, groups: Sequence[Any], columns: Any = None) -> Any:
        read.append(1)
        return whole(self, groups, columns)

    monkeypatch.setattr(VersionReader, "read_many", counted)
    stream = read_stream(reader, Selection(split="", columns=[], offset=0, limit=0))
    next(stream), next(stream)
    stream.close()
    assert 1 <= len(read) <= 1 + reading.READ_AHEAD


@pytest.mark.parametrize("taken_again", [False, True])
def test_a_version_that_is_deleted_while_it_is_read_is_not_found(
    store: ObjectStore, reader: VersionReader, taken_again: bool
) -> None:
    stream = read_stream(reader, Selection(split="", columns=[], offset=0, limit=0))
    next(stream)
    Deletions(store, Jobs(store, IMPORT_KIND)).delete(VERSION)
    if taken_again:
        commit_version(store, VERSION, {"train": striped_digits(10)})
    with pytest.raises(NotFound, match="deleted while it was read"):
        list(stream)


def test_damage_is_raised_where_it_is(store: ObjectStore, reader: VersionReader) -> None:
    key = f"{reader.version.folder}/{reader.version.manifest.files[1].path}"
    store.put(key, b"x" * store.get(key).__len__())
    stream = read_stream(reader, Selection(split="", columns=[], offset=0, limit=0))
    with pytest.raises(DataLoss, match="test-00000"):
        list(stream)
    assert ids(reader, split="train") == list(range(TRAIN))


def sizes_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, columns: list[str]) -> list[int]:
    """Of each table that is read on the way through the source's rows."""
    reader = VersionReader(store, load_version(store, SOURCE))
    sizes: list[int] = []
    whole = VersionReader.read_many

    def measured(self: VersionReader, groups: Sequence[Any], names: Any = None) -> Any:
        table = whole(self, groups, names)
        sizes.append(table.nbytes)
        return table

    monkeypatch.setattr(VersionReader, "read_many", measured)
    assert sum(1 for _ in read_stream(reader, Selection(split="", columns=columns, offset=0, limit=0))) > 2
    return sizes


def repeated(texts: list[str], rows: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(texts * (256 // len(texts)))] * (rows // 256))


def test_a_long_text_that_very_many_rows_share_is_in_memory_for_few_of_them_at_a_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 20 * 256
    texts = repeated(["x" * 16_384], rows)
    commit_tables(store, {"train": pa.table({"text": texts, "n": range(rows)})})
    sizes = sizes_read(store, monkeypatch, ["text"])
    assert sum(sizes) > 80 * MIB
    assert max(sizes) < 4.1 * MIB


def long_texts_among_tiny_ones(store: ObjectStore) -> None:
    """Of 790 groups ten in the middle share a long text; on the average a group hides little."""
    tiny, long = ["x"] * 256, ["y" * 15_000] * 256
    texts = pa.chunked_array([pa.array(tiny)] * 390 + [pa.array(long)] * 10 + [pa.array(tiny)] * 390)
    commit_tables(store, {"train": pa.table({"text": texts})})


def test_groups_of_long_texts_among_many_of_tiny_ones_are_in_memory_a_few_at_a_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_texts_among_tiny_ones(store)
    sizes = sizes_read(store, monkeypatch, [])
    assert sum(sizes) > 36 * MIB
    assert max(sizes) <= 12 * MIB
    assert len(sizes) < 20


def test_arrow_messages_of_long_rows_among_tiny_ones_fit_ours(store: ObjectStore) -> None:
    long_texts_among_tiny_ones(store)
    sent = messages(VersionReader(store, load_version(store, SOURCE)))
    assert max(map(len, sent)) <= MESSAGE_BYTES
    rows = sum(pa.ipc.open_stream(sent[0] + message).read_all().num_rows for message in sent[1:-1])
    assert rows == 790 * 256


def test_short_texts_are_read_many_groups_at_a_time(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 200 * 256
    few, many = repeated(["yes", "no"], rows), [f"row {number} of them" for number in range(rows)]
    commit_tables(store, {"train": pa.table({"few": few, "many": many, "n": range(rows)})})
    assert len(sizes_read(store, monkeypatch, ["few", "n"])) < 10
    assert len(sizes_read(store, monkeypatch, ["few", "many"])) < 25
    assert len(sizes_read(store, monkeypatch, ["n"])) == 1


@pytest.mark.parametrize("rows", [2_560, 20_000])
def test_a_small_file_of_short_texts_is_read_at_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    cities = np.random.default_rng(1).choice(["Berlin", "Paris", "Rome", "Oslo"], rows)
    notes = [f"n{number}" for number in np.random.default_rng(2).integers(0, 10**6, rows)]
    commit_tables(store, {"train": pa.table({"id": range(rows), "city": cities.tolist(), "note": notes})})
    chunks = sizes_read(store, monkeypatch, [])
    assert len(chunks) <= 2
    assert max(chunks) < reading.CHUNK_BYTES


def test_a_version_that_was_made_before_files_recorded_the_size_of_their_values_is_read_as_well(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = _OpenFile.describe
    monkeypatch.setattr(_OpenFile, "describe", lambda *given: replace(describe(*given), raw_bytes=None))
    rows = 20 * 256
    commit_tables(store, {"train": pa.table({"text": repeated(["x" * 16_384], rows)})})
    version = load_version(store, SOURCE)
    assert [file.raw_bytes for file in version.manifest.files] == [None] * 2
    sizes = sizes_read(store, monkeypatch, [])
    assert sum(sizes) > 80 * MIB
    assert max(sizes) < 4.1 * MIB


def test_a_caption_beside_images_is_not_taken_for_as_large_as_they_are(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [np.random.default_rng(row).bytes(50_000) for row in range(640)]
    table = pa.table({"image": pa.array(images * 2, pa.binary()), "caption": ["a dog", "a cat"] * 640})
    commit_tables(store, {"train": table})
    assert len(sizes_read(store, monkeypatch, ["caption"])) <= 2
