"""Rows come from the bytes that were really read, and bytes that are not what they should be are refused."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.dataset_version import RowGroup, VersionReader, load_version
from shared.dataset_version.manifest import sha256_hex
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, InvalidArgument
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, succeed
from shared.storage import ObjectStore
from tests.support.paged_versions import make_versions_paged
from tests.support.transforming import commit_tables
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import VERSION, Committed
from train_service.domain.spec import CLASSIFICATION, REGRESSION
from train_service.loading.loader import RowCache
from train_service.loading.preprocessing import Array, Rows


def cache_of(store: ObjectStore, *, num_classes: int = 10, task: str = CLASSIFICATION) -> RowCache:
    reader = VersionReader(store, load_version(store, VERSION))
    return RowCache(reader, "train", ["image"], "label", num_classes, 2**30, task)


def commit_labels(store: ObjectStore, labels: Array) -> None:
    images, _ = striped_digits(len(labels))
    commit_version(store, VERSION, {"train": (images, labels)})


def test_rows_come_in_the_order_asked_for(committed: Committed) -> None:
    images, labels = striped_digits(700)
    asked = np.asarray([699, 0, 255, 256, 3, 511, 512, 3], np.int64)

    rows = committed.cache().rows(asked)

    assert rows.row_ids.tolist() == asked.tolist()
    assert np.array_equal(rows.tensors["image"], images[asked])
    assert np.array_equal(rows.labels, labels[asked])


def test_rows_and_their_order_are_the_same_in_a_version_in_pages(
    store: ObjectStore, committed: Committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions_paged(monkeypatch, page_files=1, file_bytes=250_000)
    commit_version(store, VERSION, {"train": striped_digits(700), "validation": striped_digits(90, 1)})
    assert load_version(store, VERSION).manifest.pages is not None
    paged, whole = cache_of(store), committed.cache()

    assert paged.row_groups.tolist() == whole.row_groups.tolist()
    assert paged.row_count == 700
    asked = np.random.default_rng(0).permutation(700)
    assert np.array_equal(paged.rows(asked).row_ids, asked)
    assert np.array_equal(paged.rows(asked).labels, whole.rows(asked).labels)
    # It determines the windows of the order.
    assert paged.row_bytes == whole.row_bytes


def test_no_rows_of_a_split_of_one_row_group_have_its_columns(store: ObjectStore) -> None:
    commit_labels(store, np.arange(10, dtype=np.int64))

    rows = cache_of(store).rows(np.asarray([], np.int64))

    assert rows.tensors["image"].shape == (0, 28, 28)
    assert rows.labels.shape == rows.row_ids.shape == (0,)


def test_the_rows_of_a_later_split_carry_the_versions_own_ids(committed: Committed) -> None:
    rows = committed.cache("validation").rows(np.asarray([0, 89], np.int64))

    assert rows.row_ids.tolist() == [700, 789]


def test_row_groups_are_read_once_while_there_is_room_for_them(committed: Committed) -> None:
    cache = committed.cache()
    everything = np.arange(700, dtype=np.int64)

    read = [cache.rows(everything) and cache.bytes_read for _ in range(3)]

    assert read == [700 * (28 * 28 + 8 + 8)] * 3


class CountingReader(VersionReader):
    """Knows how often each row group was read; the first `broken` reads find damage."""

    def __init__(self, store: ObjectStore, name: str, broken: int = 0) -> None:
        super().__init__(store, load_version(store, name))
        self.reads: Counter[int] = Counter()
        self._broken = broken

    def read_many(self, row_groups: Sequence[RowGroup], columns: Sequence[str] | None = None) -> pa.Table:
        self.reads.update(group.group_index for group in row_groups)
        if self._broken:
            self._broken -= 1
            raise DataLoss("a bad moment")
        return super().read_many(row_groups, columns)


def test_prefetched_rows_are_not_read_again(committed: Committed) -> None:
    reader = CountingReader(committed.store, committed.name)
    cache, asked = RowCache(reader, "train", ["image"], "label", 10, 2**30), np.arange(10, 600, dtype=np.int64)

    cache.read_ahead(asked[:300])
    cache.read_ahead(asked)
    wait_until(lambda: reader.reads == {0: 1, 1: 1, 2: 1}, "all to be read before anybody asks")

    assert cache.rows(asked).row_ids.tolist() == asked.tolist()
    assert reader.reads == {0: 1, 1: 1, 2: 1}


def test_no_more_is_read_ahead_than_there_is_room_for(committed: Committed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_service.loading.loader.AHEAD_BYTES", 600 * 28 * 28)
    reader = CountingReader(committed.store, committed.name)
    cache, everything = RowCache(reader, "train", ["image"], "label", 10, 2**30), np.arange(700, dtype=np.int64)

    cache.read_ahead(everything[:256])
    cache.read_ahead(everything)  # the third row group would be too much

    assert set(cache._coming) == {0, 1}
    wait_until(lambda: reader.reads == {0: 1, 1: 1}, "the first two to be read")
    assert cache.rows(everything).row_ids.tolist() == everything.tolist()
    assert reader.reads == {0: 1, 1: 1, 2: 1}


def test_damage_met_ahead_of_time_is_reported_to_the_caller_and_read_anew_after(committed: Committed) -> None:
    reader = CountingReader(committed.store, committed.name, broken=1)
    cache, asked = RowCache(reader, "train", ["image"], "label", 10, 2**30), np.arange(5, dtype=np.int64)

    cache.read_ahead(asked)

    with pytest.raises(DataLoss, match="a bad moment"):
        cache.rows(asked)
    assert cache.rows(asked).row_ids.tolist() == asked.tolist()


def test_row_groups_that_failed_together_are_all_read_anew(
    committed: Committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_service.loading.loader.READERS", 1)
    reader = CountingReader(committed.store, committed.name, broken=1)
    cache, asked = RowCache(reader, "train", ["image"], "label", 10, 2**30), np.arange(700, dtype=np.int64)
    cache.read_ahead(asked)

    with pytest.raises(DataLoss, match="a bad moment"):
        cache.rows(asked)

    assert cache.rows(asked).row_ids.tolist() == asked.tolist()


def test_no_rows_have_the_columns_of_rows(committed: Committed) -> None:
    none = committed.cache().rows(np.empty(0, np.int64))

    assert none.tensors["image"].shape == (0, 28, 28)
    assert none.tensors["image"].dtype == "uint8"
    assert (none.labels.tolist(), none.row_ids.tolist()) == ([], [])


def test_the_bytes_of_a_row_are_known_before_any_is_read(committed: Committed, store: ObjectStore) -> None:
    """From the shape of tensors and the width of scalars; else from the bytes in the files."""
    assert committed.cache().row_bytes == 28 * 28
    images = [bytes(np.random.default_rng(row).integers(0, 256, 5000, np.uint8)) for row in range(50)]
    table = pa.table({"image": pa.array(images, pa.binary()), "size": [1.5] * 50, "label": [0] * 50})
    commit_tables(store, {"train": table}, VERSION)
    reader = CountingReader(store, VERSION)

    cache = RowCache(reader, "train", ["image", "size"], "label", 10, 2**30)

    assert 5000 + 8 <= cache.row_bytes <= 5200
    assert not reader.reads


def test_texts_and_images_count_towards_the_capacity(store: ObjectStore) -> None:
    images = [bytes(1000 + row) for row in range(50)]
    table = pa.table({"image": pa.array(images, pa.binary()), "label": [0] * 50})
    commit_tables(store, {"train": table}, VERSION)
    reader = VersionReader(store, load_version(store, VERSION))
    cache = RowCache(reader, "train", ["image"], "label", 10, 2**30)

    rows = cache.rows(np.asarray([49, 0, 7], np.int64))

    assert rows.batch()["image"].to_pylist() == [images[49], images[0], images[7]]
    assert 0 <= cache.bytes_read - sum(map(len, images)) - 50 * (8 + 8) <= 50 * 8


def test_nulls_stay_nulls_in_columns_that_a_transform_reads(store: ObjectStore) -> None:
    numbers = [None if row % 3 == 0 else row / 2 for row in range(30)]
    commit_tables(store, {"train": pa.table({"x": pa.array(numbers, pa.float64()), "label": [0] * 30})}, VERSION)
    cache = RowCache(VersionReader(store, load_version(store, VERSION)), "train", ["x"], "label", 10, 2**30)

    rows = cache.rows(np.arange(29, -1, -1, dtype=np.int64))

    assert rows.batch()["x"].to_pylist() == numbers[::-1]


def test_removed_row_groups_make_room_for_as_many_as_before(committed: Committed) -> None:
    reader = CountingReader(committed.store, committed.name)
    two_groups = 2 * 256 * (28 * 28 + 8 + 8)
    cache = RowCache(reader, "train", ["image"], "label", 10, two_groups)

    for group in (0, 1, 2, 1):
        cache.rows(np.asarray([256 * group], np.int64))

    assert reader.reads == {0: 1, 1: 1, 2: 1}


def test_row_groups_leave_when_there_is_no_room_for_them(committed: Committed) -> None:
    cache = committed.cache(capacity=1)

    for _ in range(2):
        cache.rows(np.asarray([0], np.int64))
        cache.rows(np.asarray([300], np.int64))

    assert cache.bytes_read == 4 * 256 * (28 * 28 + 8 + 8)


@pytest.mark.parametrize(("label", "classes"), [(-1, 10), (10, 10), (9, 9), (2**40, 10)])
def test_a_label_out_of_range_is_refused_with_its_row_and_field(store: ObjectStore, label: int, classes: int) -> None:
    labels = np.zeros(300, np.int64)
    labels[277] = label
    commit_labels(store, labels)

    with pytest.raises(InvalidArgument, match=rf"row 277 has the label {label} in column 'label'") as refused:
        cache_of(store, num_classes=classes).rows(np.asarray([299], np.int64))

    assert refused.value.specific_reason == "LABEL_OUT_OF_RANGE"
    assert [path for path, _ in refused.value.fields] == ["spec.model.num_classes"]


def rewrite(store: ObjectStore, scratch: Path, change: dict[str, pa.Array]) -> None:
    """Commit 300 rows with other stored columns and all digests in order, as a faulty writer would."""
    commit_version(store, "datasets/digits/versions/right", {"train": striped_digits(300)})
    right = load_version(store, "datasets/digits/versions/right")
    table = pq.read_table(pa.BufferReader(store.get(f"{right.folder}/train-00000.parquet")))
    for name, values in change.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name).with_type(values.type).with_nullable(True), values)
    path = scratch / "train-00000.parquet"
    pq.write_table(table, path, row_group_size=256, compression="lz4", write_page_checksum=True, use_dictionary=False)
    data = path.read_bytes()
    footer = data[-(int.from_bytes(data[-8:-4], "little") + 8) :]

    manifest = json.loads(right.manifest.to_json())
    manifest["files"][0] |= {
        "size_bytes": len(data),
        "sha256": sha256_hex(data),
        "footer_bytes": len(footer),
        "footer_sha256": sha256_hex(footer),
    }
    folder = f"{VERSION}/data/a00001-{uuid.uuid4().hex[:8]}"
    encoded = json.dumps(manifest).encode()
    store.put(f"{folder}/train-00000.parquet", data)
    store.put(f"{folder}/manifest.json", encoded)
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(VERSION, JobRecord(uid="v1", name=VERSION, spec={}, create_time=0, update_time=0))
    result = {"manifest": f"{folder}/manifest.json", "manifest_sha256": sha256_hex(encoded)}
    jobs.transition(VERSION, lambda job: begin_attempt(job, time.time()), attempt=1)
    jobs.transition(VERSION, lambda job: succeed(job, result, time.time()), attempt=1)


@pytest.mark.parametrize(
    "wrong",
    [range(1, 301), range(299, -1, -1), [0, *range(299)], [0] * 300],
    ids=["shifted", "backwards", "one-repeated", "all-zero"],
)
def test_row_ids_are_those_of_the_bytes_read_and_not_of_the_plan(
    store: ObjectStore, tmp_path: Path, wrong: list[int]
) -> None:
    rewrite(store, tmp_path, {"_row_id": pa.array(wrong, pa.int64())})

    with pytest.raises(DataLoss, match="carry other row ids") as lost:
        cache_of(store).rows(np.arange(300, dtype=np.int64))

    assert lost.value.specific_reason == "WRONG_ROW_IDS"


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION])
def test_a_missing_label_is_refused_with_its_column_and_row(store: ObjectStore, tmp_path: Path, task: str) -> None:
    rewrite(store, tmp_path, {"label": pa.array([1, 1, None, *[1] * 297], pa.int64())})

    with pytest.raises(InvalidArgument, match="column 'label' has nulls, the first in row 2;") as refused:
        cache_of(store, task=task).rows(np.asarray([5], np.int64))

    assert refused.value.specific_reason == "NULL_VALUES"


def numbers_cache(store: ObjectStore, labels: pa.Array, width: int = 1) -> RowCache:
    rows = len(labels)
    table = pa.table({"x": pa.array(range(rows)), "y": labels})
    commit_tables(store, {"other": table.slice(0, 10), "train": table}, VERSION)
    reader = VersionReader(store, load_version(store, VERSION))
    return RowCache(reader, "train", ["x"], "y", width, 2**30, REGRESSION)


@pytest.mark.parametrize("arrow_type", [pa.float64(), pa.float32(), pa.int16(), pa.float16()], ids=str)
def test_numbers_to_learn_come_as_float32(store: ObjectStore, arrow_type: pa.DataType) -> None:
    values = np.arange(-20, 20).astype(arrow_type.to_pandas_dtype())

    rows = numbers_cache(store, pa.array(values)).rows(np.asarray([39, 0, 7], np.int64))

    assert rows.labels.dtype == np.float32
    assert rows.labels.tolist() == [19, -20, -13]


def test_several_numbers_a_row_come_as_they_are_shaped(store: ObjectStore) -> None:
    values = np.arange(60, dtype=np.float64).reshape(20, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)

    rows = numbers_cache(store, tensors, 3).rows(np.asarray([19, 2], np.int64))

    assert rows.labels.dtype == np.float32
    assert rows.labels.tolist() == values[[19, 2]].tolist()


def test_numbers_that_are_not_finite_are_learnt_where_they_are_allowed(store: ObjectStore) -> None:
    table = pa.table({"x": [1, 2, 3], "y": [1.5, np.nan, np.inf]})
    commit_tables(store, {"train": table}, VERSION)
    reader = VersionReader(store, load_version(store, VERSION))
    cache = RowCache(reader, "train", ["x"], "y", 1, 2**30, REGRESSION, allow_non_finite=True)

    labels = cache.rows(np.arange(3, dtype=np.int64)).labels

    assert np.array_equal(labels, np.array([1.5, np.nan, np.inf], np.float32), equal_nan=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39], ids=str)
def test_a_number_that_is_not_finite_is_refused_with_its_row(store: ObjectStore, value: float) -> None:
    values = np.zeros(40)
    values[[33, 38]] = value

    with pytest.raises(InvalidArgument, match=r"row 43 has the label .* in column 'y'") as refused:
        numbers_cache(store, pa.array(values)).rows(np.asarray([0], np.int64))

    assert refused.value.specific_reason == "NON_FINITE_LABEL"
    assert [path for path, _ in refused.value.fields] == ["spec.label_column"]


def test_a_tensor_with_a_number_that_is_not_finite_is_refused_with_its_row(store: ObjectStore) -> None:
    values = np.zeros((20, 3), np.float32)
    values[12, 1] = np.nan

    with pytest.raises(InvalidArgument, match="row 22 has the label"):
        numbers_cache(store, pa.FixedShapeTensorArray.from_numpy_ndarray(values), 3).rows(np.asarray([0], np.int64))


def test_rows_of_several_parts_are_taken_whole() -> None:
    def rows(*ids: int) -> Rows:
        numbers = np.asarray(ids, np.int64)
        scalars = pa.RecordBatch.from_pydict({"name": pa.array([f"row {one}" if one < 7 else None for one in ids])})
        return Rows({"pair": numbers[:, None] * np.ones((1, 2))}, scalars, numbers * 10, numbers)

    together = Rows.joined([rows(8, 5, 7), rows(6)]).take(np.asarray([1, 3, 2]))

    assert together.row_ids.tolist() == [5, 6, 7]
    assert together.labels.tolist() == [50, 60, 70]
    assert together.tensors["pair"].tolist() == [[5, 5], [6, 6], [7, 7]]
    assert together.batch()["name"].to_pylist() == ["row 5", "row 6", None]
