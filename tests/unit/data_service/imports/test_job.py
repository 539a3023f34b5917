"""The import as an attempt runs it, without Ray around it."""

from __future__ import annotations

import dataclasses
import io
import tarfile
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_service import reconciler
from data_service.domain.import_spec import BadRows, Base, HoldOut, ImportSpec, Source
from data_service.imports import job as import_job
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import Unavailable
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt, lose_attempt, request_cancel
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.small_disk import small_disk

NAME = "datasets/d/versions/v1"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


def parquet(folder: Path, name: str, split: str, **columns: object) -> Source:
    pq.write_table(pa.table(columns), folder / name)
    return Source(split=split, format="parquet", uris={"parquet.uri": (folder / name).as_uri()})


def begun(store: ObjectStore, folder: Path, spec: ImportSpec, name: str = NAME) -> Jobs:
    """A job whose first attempt has the log."""
    jobs = Jobs(store, IMPORT_KIND)
    now = time.time()
    recorded = {"import": spec.as_record(), "import_roots": [str(folder)], "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    return jobs


def data_keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(f"{NAME}/data")]


def test_rows_keep_their_order_within_a_split(store: ObjectStore, tmp_path: Path) -> None:
    sources = [
        parquet(tmp_path, "a", "train", n=np.arange(3000)),
        parquet(tmp_path, "b", "test", n=np.arange(10_000, 10_500)),
        parquet(tmp_path, "c", "train", n=np.arange(3000, 5000)),
    ]
    cuts = [HoldOut(from_split="train", to_split=f"cut{i}", fraction=0.2, seed=i) for i in range(2)]
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=cuts))
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    assert jobs.get(NAME, NAME).state is JobState.SUCCEEDED
    reader = VersionReader(store, load_version(store, NAME))
    read = {
        split.name: pa.concat_tables(
            [reader.read(group, ["n", "_row_id"]) for group in reader.row_groups(split.name)]
        ).to_pydict()
        for split in reader.version.manifest.splits
    }
    assert {name: len(columns["n"]) for name, columns in read.items()} == {
        "train": 3000,
        "test": 500,
        "cut0": 1000,
        "cut1": 1000,
    }
    assert [row_id for columns in read.values() for row_id in columns["_row_id"]] == list(range(5500))
    for columns in read.values():
        assert columns["n"] == sorted(columns["n"])
    imported = sorted(n for name in ("train", "cut0", "cut1") for n in read[name]["n"])
    assert imported == list(range(5000))


def test_a_full_disk_of_the_node_ends_the_attempt_and_not_the_job(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parquet(tmp_path, "a", "train", noise=np.random.default_rng(7).normal(size=500_000))
    jobs = begun(store, tmp_path, ImportSpec(sources=[source], hold_outs=[]))
    with small_disk(tmp_path / "disk", 1) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
        assert list(disk.iterdir()) == []
    job = jobs.get(NAME, NAME)
    assert job.state is JobState.RECOVERING
    assert job.error is not None
    assert (job.error["kind"], job.error["reason"]) == ("ResourceExhausted", "SCRATCH_FULL")
    assert data_keys(store) == []


def test_a_column_may_be_null_where_any_source_lets_it(store: ObjectStore, tmp_path: Path) -> None:
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"n": [1]}, schema=strict), tmp_path / "a")
    sources = [
        Source(split="train", format="parquet", uris={"parquet.uri": (tmp_path / "a").as_uri()}),
        parquet(tmp_path, "b", "train", n=pa.array([None, 2])),
    ]
    begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=[]))
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    reader = VersionReader(store, load_version(store, NAME))
    assert reader.read(reader.row_groups("train")[0])["n"].to_pylist() == [1, None, 2]


def test_whole_seconds_stay_seconds_and_take_the_same_file_again(store: ObjectStore, tmp_path: Path) -> None:
    given = pa.table(
        {
            "at": pa.array([0, -1, None, 2**63 // 1000], pa.timestamp("s")),
            "zoned": pa.array([1, None, 2, 3], pa.timestamp("s", "Europe/Berlin")),
            "time": pa.array([0, 86_399, None, 7], pa.time32("s")),
            "fine": pa.array([0, 86_399_999, None, 7], pa.time32("ms")),
        }
    )
    with pa.ipc.new_file(tmp_path / "a.arrow", given.schema) as file:
        file.write_table(given)
    source = Source(split="train", format="arrow", uris={"arrow.uri": (tmp_path / "a.arrow").as_uri()})
    first = begun(store, tmp_path, ImportSpec(sources=[source], hold_outs=[]))
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    assert first.get(NAME, NAME).state is JobState.SUCCEEDED
    version = load_version(store, NAME)
    reader = VersionReader(store, version)
    # Parquet has no whole seconds.
    stored = pq.read_schema(pa.BufferReader(store.get(f"{version.folder}/{version.manifest.files[0].path}")))
    assert [str(stored.field(name).type) for name in ("at", "time")] == ["timestamp[ms]", "time32[ms]"]
    assert [column.arrow_type for column in version.columns] == list(map(str, given.schema.types))
    assert reader.read(reader.row_groups("train")[0]).equals(given)

    appended = "datasets/d/versions/v2"
    spec = ImportSpec(sources=[source], hold_outs=[], base=Base(version=NAME, mode="append"))
    jobs = begun(store, tmp_path, spec, appended)
    run_attempt(reconciler.run, store, IMPORT_KIND, appended, 1)
    assert (jobs.get(appended, appended).state, jobs.get(appended, appended).error) == (JobState.SUCCEEDED, None)
    both = VersionReader(store, load_version(store, appended))
    assert both.read(both.row_groups("train")[0]).equals(pa.concat_tables([given, given]).combine_chunks())


NOT_NULL = {"column": "n", "notNull": {}, "action": "ACTION_QUARANTINE"}


@pytest.mark.parametrize("held_out", [[], ["validation"]], ids=["one pass", "counted before"])
def test_a_split_of_which_every_row_was_left_out_says_so(
    store: ObjectStore, tmp_path: Path, held_out: list[str]
) -> None:
    sources = [
        parquet(tmp_path, "a", "train", n=pa.array([1, None, 3, 4], pa.int64())),
        parquet(tmp_path, "b", "test", n=pa.array([None, None, None], pa.int64())),
    ]
    cuts = [HoldOut(from_split="test", to_split=one, fraction=0.1, seed=1) for one in held_out]
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=cuts, checks=[NOT_NULL]))
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    error = jobs.get(NAME, NAME).error
    assert error is not None
    assert (error["kind"], error["reason"]) == ("FailedPrecondition", "EMPTY_SPLIT")
    assert error["metadata"] == {"field": "sources", "split": "test", "rows_left_out": "3"}
    assert "'test'" in error["message"]
    assert "3 rows were left out" in error["message"]
    assert "n is null" in error["message"]


@pytest.mark.parametrize("held_out", [[], ["validation"]], ids=["one pass", "counted before"])
def test_a_split_whose_sources_are_empty_is_a_fault_of_the_request(
    store: ObjectStore, tmp_path: Path, held_out: list[str]
) -> None:
    sources = [
        parquet(tmp_path, "a", "train", n=pa.array([1, None, 3, 4], pa.int64())),
        parquet(tmp_path, "b", "test", n=pa.array([], pa.int64())),
    ]
    cuts = [HoldOut(from_split="test", to_split=one, fraction=0.1, seed=1) for one in held_out]
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=cuts, checks=[NOT_NULL]))
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    error = jobs.get(NAME, NAME).error
    assert error is not None
    assert (error["kind"], error["message"]) == ("InvalidArgument", "sources: the split 'test' has no rows")


@pytest.mark.parametrize("kind", ["image_folder", "image_tar"])
@pytest.mark.parametrize("quarantines", [False, True], ids=["refused", "left out"])
def test_images_without_a_folder_of_a_class_are_bad_rows_also_where_there_are_no_others(
    store: ObjectStore, tmp_path: Path, kind: str, quarantines: bool
) -> None:
    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "PNG")
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        (images / name).write_bytes(image.getvalue())
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(images / "a.png", "a.png")
        tar.add(images / "b.png", "b.png")
    given = {"image_folder": images.as_uri() + "/", "image_tar": (tmp_path / "images.tar").as_uri()}
    source = Source(split="train", format=kind, uris={f"{kind}.uri": given[kind]})
    bad_rows = BadRows(action="quarantine" if quarantines else "fail")
    spec = ImportSpec(sources=[source], hold_outs=[], bad_rows=bad_rows)
    jobs = begun(store, tmp_path, spec)
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    job = jobs.get(NAME, NAME)
    assert job.error is not None
    assert (job.state, job.failures) == (JobState.FAILED, 0)
    said = (job.error["kind"], job.error["reason"])
    assert said == (("FailedPrecondition", "EMPTY_SPLIT") if quarantines else ("InvalidArgument", "BAD_ROW"))
    assert "it lies in no folder of a class" in job.error["message"]


def test_an_attempt_that_fails_takes_its_files_away(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.dataset_version.parquet.MAX_FILE_BYTES", 10_000)
    sources = [parquet(tmp_path, "a", "train", n=np.arange(20_000))]
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=[]))
    seen = []

    def losing_its_store(context: AttemptContext) -> dict[str, object]:
        def put(*_: object) -> None:
            seen.extend(data_keys(store))
            raise Unavailable("the store does not answer")

        monkeypatch.setattr(store, "put", put)
        try:
            return reconciler.run(context)
        finally:
            monkeypatch.undo()

    run_attempt(losing_its_store, store, IMPORT_KIND, NAME, 1)
    assert jobs.get(NAME, NAME).state is JobState.RECOVERING
    assert data_keys(store) == []
    assert seen


def test_a_later_attempt_removes_what_a_killed_one_left(store: ObjectStore, tmp_path: Path) -> None:
    jobs = begun(store, tmp_path, ImportSpec(sources=[parquet(tmp_path, "a", "train", n=[1, 2])], hold_outs=[]))
    store.put(f"{NAME}/data/a00001-dead/train-00000.parquet", b"half")
    jobs.transition(NAME, lambda job: lose_attempt(job, Unavailable("killed"), time.time()), attempt=1)
    jobs.transition(NAME, lambda job: begin_attempt(job, time.time()), attempt=2)
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 2)
    assert jobs.get(NAME, NAME).state is JobState.SUCCEEDED
    assert sorted(key.rsplit("/", 1)[-1] for key in data_keys(store)) == [
        "manifest.json",
        "report.json",
        "train-00000.parquet",
    ]


def test_a_cancelled_import_stops_between_rows_and_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    sources = [parquet(tmp_path, "a", "train", n=np.arange(20_000))]
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=[]))

    def cancelled_by_then(context: AttemptContext) -> dict[str, object]:
        context._newest = dataclasses.replace(jobs.transition(NAME, lambda job: request_cancel(job, time.time())))
        return reconciler.run(context)

    run_attempt(cancelled_by_then, store, IMPORT_KIND, NAME, 1)
    assert jobs.get(NAME, NAME).state is JobState.CANCELLED
    assert data_keys(store) == []


@pytest.mark.parametrize("rows_then", [99, 101])
def test_a_source_that_changes_under_the_import_fails_it(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_then: int
) -> None:
    sources = [parquet(tmp_path, "a", "train", n=np.arange(100))]
    hold_out = HoldOut(from_split="train", to_split="validation", fraction=0.1, seed=1)
    jobs = begun(store, tmp_path, ImportSpec(sources=sources, hold_outs=[hold_out]))
    count = import_job._Import._counted

    def change_after_counting(self: import_job._Import) -> object:
        counted = count(self)
        parquet(tmp_path, "a", "train", n=np.arange(rows_then))
        return counted

    monkeypatch.setattr(import_job._Import, "_counted", change_after_counting)
    run_attempt(reconciler.run, store, IMPORT_KIND, NAME, 1)
    error = jobs.get(NAME, NAME).error
    assert error is not None
    assert error["reason"] == "SOURCE_CHANGED"
    assert data_keys(store) == []
