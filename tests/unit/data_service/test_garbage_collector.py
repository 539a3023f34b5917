"""What no manifest and no log names goes; what is alive or committed stays."""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from data_service.datasets import OPERATION_PREFIXES, Datasets, record_operation
from data_service.deletion import ORPHAN_GRACE_PERIOD_S, REQUEST_CLAIM_S, Deletions, GarbageCollector
from data_service.domain.dataset import Retention
from data_service.reading import verify
from shared.dataset_version import load_version
from shared.dataset_version.pages import page_path
from shared.dataset_version.version import IMPORT_KIND, mark_used
from shared.errors import NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, confirm_cancel, fail, request_cancel, request_delete
from shared.settings import StoreSettings
from shared.storage import ObjectStore
from shared.streaming import operation_ids_after
from tests.support.paged_versions import make_versions_paged
from tests.support.quarantined_version import commit_with_quarantine
from tests.support.versions import commit_version, striped_digits

DATASET = "datasets/d"
VERSION = f"{DATASET}/versions/v1"


class Collecting:
    """A garbage collector with a clock of its own. It records the calls that concern uploads."""

    def __init__(self, store: ObjectStore) -> None:
        self.now = time.time()
        self.datasets = Datasets(store)
        self.jobs = Jobs(store, IMPORT_KIND)
        self.collected_uploads: list[float] = []
        self.deleted_uploads: list[str] = []
        self.garbage_collector = GarbageCollector(
            store,
            self.datasets,
            Deletions(store, self.jobs, lambda: self.now),
            collect_uploads=self.collected_uploads.append,
            delete_uploads=lambda name, _uid: self.deleted_uploads.append(name),
            clock=lambda: self.now,
        )

    def create_dataset(self, retention: Retention | None = None) -> None:
        self.datasets.create(
            "d",
            display_name="",
            description="",
            request_id="",
            body_sha256="",
            validate_only=False,
            retention=retention or Retention(),
        )

    def delete_dataset(self) -> None:
        self.datasets.delete(DATASET, "", check_uploads=lambda *_: None, delete_uploads=lambda *_: None)


@pytest.fixture
def collecting(store: ObjectStore) -> Collecting:
    return Collecting(store)


def commit(store: ObjectStore, name: str = VERSION) -> None:
    commit_version(store, name, {"train": striped_digits(10)})


def attempts(store: ObjectStore, name: str = VERSION) -> list[str]:
    return list(store.folders(f"{name}/data"))


def running(jobs: Jobs, name: str) -> JobRecord:
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec={}, create_time=0.0, update_time=0.0))
    return jobs.transition(name, lambda newest: begin_attempt(newest, 1.0), attempt=1)


def keys_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the objects that are got from now on."""
    read: list[str] = []
    get = store.get

    def noted(key: str) -> bytes:
        read.append(key)
        return get(key)

    monkeypatch.setattr(store, "get", noted)
    return read


def test_attempts_that_lost_go_and_the_committed_one_stays(store: ObjectStore, collecting: Collecting) -> None:
    commit(store)
    committed = attempts(store)
    store.put(f"{VERSION}/data/a00001-lost/train.parquet", b"x")
    store.put(f"{VERSION}/data/a00007-zombie/manifest.json", b"x")
    collecting.garbage_collector.collect()
    assert attempts(store) == committed
    load_version(store, VERSION)


def test_of_a_committed_attempt_stays_what_its_manifest_names_and_nothing_else(
    store: ObjectStore, collecting: Collecting
) -> None:
    folder = commit_with_quarantine(store, VERSION, b"{}\n")
    named = {info.key for info in store.list(folder)}
    assert {f"{folder}/manifest.json", f"{folder}/report.json", f"{folder}/quarantine.jsonl"} < named
    for left in ("begun/0-abc", "part-of-nothing.parquet", "report.json.bak"):
        store.put(f"{folder}/{left}", b"x")

    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} > named, "it may still be at its last act"
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    for _ in range(2):
        collecting.garbage_collector.collect()
        assert {info.key for info in store.list(folder)} == named
    assert not [one.damages for one in verify(store, load_version(store, VERSION)) if one.damages]


def test_the_pages_of_a_manifest_stay_and_their_files_too(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions_paged(monkeypatch, file_bytes=1000)
    folder = commit_with_quarantine(store, VERSION, b"{}\n")
    named = {info.key for info in store.list(folder)}
    assert f"{folder}/{page_path(0, 0)}" in named
    store.put(f"{folder}/{page_path(7, 0)}", b"x")
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} == named


def test_where_a_page_is_damaged_nothing_of_the_attempt_goes(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions_paged(monkeypatch, file_bytes=1000)
    folder = commit_with_quarantine(store, VERSION, b"{}\n")
    store.put(f"{folder}/{page_path(0, 0)}", b"x")
    store.put(f"{folder}/begun/0-abc", b"")
    before = {info.key for info in store.list(folder)}
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} == before


@pytest.mark.parametrize("manifest", [b"{}", None], ids=["damaged", "gone"])
def test_where_the_manifest_is_not_what_was_committed_nothing_of_the_attempt_goes(
    store: ObjectStore, collecting: Collecting, manifest: bytes | None
) -> None:
    folder = commit_with_quarantine(store, VERSION, b"{}\n")
    store.put(f"{folder}/begun/0-abc", b"")
    if manifest is None:
        store.delete(f"{folder}/manifest.json")
    else:
        store.put(f"{folder}/manifest.json", manifest)
    before = {info.key for info in store.list(folder)}
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} == before


def test_a_committed_attempt_is_looked_through_until_nobody_can_be_writing_there(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store)
    read = keys_read(store, monkeypatch)
    counts = []
    for passed_s in (0.0, ORPHAN_GRACE_PERIOD_S + 60, 0.0, ORPHAN_GRACE_PERIOD_S):
        collecting.now += passed_s
        collecting.garbage_collector.collect()
        counts.append(sum(key.endswith("/manifest.json") for key in read))
    assert counts == [1, 2, 2, 2]


def test_a_file_that_is_young_when_its_folder_is_looked_through_goes_at_a_later_pass(
    store: ObjectStore, collecting: Collecting, file_store: StoreSettings
) -> None:
    folder = commit_with_quarantine(store, VERSION, b"{}\n")
    named = {info.key for info in store.list(folder)}
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    store.put(f"{folder}/late.parquet", b"x")
    os.utime(Path(urlsplit(file_store.url).path) / folder / "late.parquet", (collecting.now, collecting.now))
    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} > named

    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    collecting.garbage_collector.collect()
    assert {info.key for info in store.list(folder)} == named


def test_files_that_killed_writers_never_finished_go_after_a_while(
    store: ObjectStore, collecting: Collecting, file_store: StoreSettings
) -> None:
    root = Path(urlsplit(file_store.url).path)
    commit(store)
    torn = [
        root / f"{VERSION}/data/a00001-lost/train-00000.parquet#1",
        root / f"{DATASET}/uploads/u/chunks/x/000000000000#2",
    ]
    for path in torn:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
    collecting.garbage_collector.collect()
    assert all(path.exists() for path in torn)
    collecting.now += ORPHAN_GRACE_PERIOD_S + 60
    collecting.garbage_collector.collect()
    assert not any(path.exists() for path in torn)
    load_version(store, VERSION)


def test_of_a_version_that_failed_nothing_stays(store: ObjectStore, collecting: Collecting) -> None:
    running(collecting.jobs, VERSION)
    store.put(f"{VERSION}/data/a00001-x/train.parquet", b"x")
    collecting.jobs.transition(VERSION, lambda newest: fail(newest, NotFound("x"), 1.0), attempt=1)
    collecting.garbage_collector.collect()
    assert attempts(store) == []


def test_a_version_that_is_being_made_is_left_alone(store: ObjectStore, collecting: Collecting) -> None:
    running(collecting.jobs, VERSION)
    store.put(f"{VERSION}/data/a00001-x/train.parquet", b"x")
    collecting.garbage_collector.collect()
    assert attempts(store) == ["a00001-x"]


def test_a_deletion_that_was_left_half_way_is_finished(store: ObjectStore, collecting: Collecting) -> None:
    commit(store)
    collecting.jobs.transition(VERSION, lambda newest: request_delete(newest, newest.update_time))
    collecting.garbage_collector.collect()
    assert collecting.jobs.find(VERSION) is None
    assert attempts(store) == []


def test_writes_of_a_fenced_process_into_a_deleted_version_are_removed(
    store: ObjectStore, collecting: Collecting
) -> None:
    commit(store)
    Deletions(store, collecting.jobs).delete(VERSION)
    store.put(f"{VERSION}/data/a00001-late/train.parquet", b"x")
    collecting.garbage_collector.collect()
    assert attempts(store) == []


def test_retention_takes_the_old_and_spares_the_used_and_the_newest(store: ObjectStore, collecting: Collecting) -> None:
    collecting.create_dataset(Retention(max_age_s=3600))
    for number in (1, 2, 3):
        commit(store, f"{DATASET}/versions/v{number}")
    mark_used(store, VERSION, "deploy", "m", "deployments/m", is_job=False)
    collecting.garbage_collector.collect()
    assert len(collecting.datasets.version_names(DATASET)) == 3
    collecting.now += 2 * 3600
    collecting.garbage_collector.collect()
    assert collecting.datasets.version_names(DATASET) == [VERSION, f"{DATASET}/versions/v3"]


def test_markers_of_users_that_ended_or_never_came_go(store: ObjectStore, collecting: Collecting) -> None:
    commit(store)
    jobs = Jobs(store, "train")
    mark_used(store, VERSION, "train", "ended", "trainingJobs/ended", now=collecting.now - 60)
    jobs.create(
        "trainingJobs/ended",
        JobRecord(uid="ended", name="trainingJobs/ended", spec={}, create_time=0.0, update_time=0.0),
    )
    jobs.transition("trainingJobs/ended", lambda newest: fail(newest, NotFound("x"), collecting.now))
    mark_used(store, VERSION, "train", "never", "trainingJobs/never", now=collecting.now - 3600)
    mark_used(store, VERSION, "train", "coming", "trainingJobs/coming", now=collecting.now)
    mark_used(store, VERSION, "deploy", "m", "deployments/m", is_job=False, now=collecting.now - 3600)
    collecting.garbage_collector.collect()
    left = sorted(info.key.rsplit("/", 1)[-1] for info in store.list(f"{VERSION}/users"))
    assert left == ["deploy-m.json", "train-coming.json"]


def test_old_request_claims_go(store: ObjectStore, collecting: Collecting) -> None:
    store.put("requests/data/a.json", b"{}")
    store.put("requests/train/b.json", b"{}")
    collecting.garbage_collector.collect()
    assert store.exists("requests/data/a.json")
    collecting.now += REQUEST_CLAIM_S + 60
    collecting.garbage_collector.collect()
    assert [info.key for info in store.list("requests")] == ["requests/train/b.json"]


def test_operations_whose_job_was_never_made_go(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.deletion.OPERATIONS_A_PASS", 2)

    def operation(uid: str, version: str, maker: str) -> JobRecord:
        job = JobRecord(uid=uid, name=f"{DATASET}/versions/{version}", spec={maker: {}}, create_time=0, update_time=0)
        record_operation(store, job)
        return job

    for uid, version, maker in (("a", "v1", "import"), ("b", "v2", "transform"), ("c", "v3", "predict")):
        job = operation(uid, version, maker)
        collecting.jobs.create(job.name, job)
    for uid, version in (("d", "v4"), ("e", "v1")):
        operation(uid, version, "predict")
    store.put("operations/deploy-x/operation.json", b"{}")
    collecting.garbage_collector.collect()
    assert len(operation_ids_after(store, OPERATION_PREFIXES, "", 100)) == 5

    collecting.now += REQUEST_CLAIM_S + 60
    for _ in range(3):
        collecting.garbage_collector.collect()
    assert operation_ids_after(store, OPERATION_PREFIXES, "", 100) == ["import-a", "import-c", "transform-b"]
    assert store.exists("operations/deploy-x/operation.json")


def test_an_operation_whose_job_was_found_is_not_read_again(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store)
    record_operation(store, collecting.jobs.get(VERSION, VERSION))
    collecting.now += REQUEST_CLAIM_S + 60
    read = keys_read(store, monkeypatch)
    collecting.garbage_collector.collect()
    assert [key for key in read if key.startswith("operations/")]
    read.clear()
    collecting.garbage_collector.collect()
    assert not [key for key in read if key.startswith("operations/")]

    Deletions(store, collecting.jobs, lambda: collecting.now).delete(VERSION)
    collecting.garbage_collector.collect()
    assert operation_ids_after(store, OPERATION_PREFIXES, "", 100) == []


def test_uploads_are_swept_and_those_of_a_deleted_dataset_deleted(collecting: Collecting) -> None:
    collecting.create_dataset()
    collecting.garbage_collector.collect()
    assert collecting.collected_uploads == [collecting.now]
    assert collecting.deleted_uploads == []
    collecting.delete_dataset()
    collecting.garbage_collector.collect()
    assert collecting.deleted_uploads == [DATASET]


def test_a_deleted_dataset_in_which_there_is_a_version_exists_again(store: ObjectStore, collecting: Collecting) -> None:
    collecting.create_dataset()
    collecting.delete_dataset()
    commit(store)
    collecting.garbage_collector.collect()
    assert collecting.datasets.get(DATASET).name == DATASET
    assert collecting.deleted_uploads == []


def test_a_deleted_dataset_does_not_come_back_for_a_version_that_was_cancelled(
    store: ObjectStore, collecting: Collecting
) -> None:
    collecting.create_dataset()
    collecting.delete_dataset()
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(VERSION, JobRecord(uid="u1", name=VERSION, spec={"import": {}}, create_time=1.0, update_time=1.0))
    jobs.transition(VERSION, lambda job: confirm_cancel(request_cancel(job, 2.0), 2.0))

    collecting.garbage_collector.collect()

    with pytest.raises(NotFound):
        collecting.datasets.get(DATASET)
    assert jobs.find(VERSION) is None


def test_a_deleted_dataset_waits_for_a_version_that_is_being_cancelled(collecting: Collecting) -> None:
    """It lost the race with the deletion; whether the cancel came in time only its attempt knows."""
    collecting.create_dataset()
    collecting.delete_dataset()
    running(collecting.jobs, VERSION)
    collecting.jobs.cancel(VERSION, VERSION)
    collecting.garbage_collector.collect()
    assert (last := collecting.datasets.newest(DATASET))
    assert last.deleted
    assert collecting.deleted_uploads == []

    collecting.jobs.transition(VERSION, lambda job: confirm_cancel(job, 2.0), attempt=1)
    collecting.garbage_collector.collect()
    assert (last := collecting.datasets.newest(DATASET))
    assert last.deleted
    assert collecting.jobs.find(VERSION) is None
    assert collecting.deleted_uploads == [DATASET]


def test_one_damaged_log_does_not_stop_the_rest(store: ObjectStore, collecting: Collecting) -> None:
    store.put(f"{DATASET}/versions/a/log/000000000001.json", b"not json")
    commit(store)
    store.put(f"{VERSION}/data/a00009-lost/x", b"x")
    collecting.garbage_collector.collect()
    assert len(attempts(store)) == 1


def test_an_outage_ends_the_pass(store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def fails(prefix: str) -> Any:
        looked.append(prefix)
        if prefix != "datasets":
            raise Unavailable("no answer")
        return ["d", "e"]

    monkeypatch.setattr(store, "folders", fails)
    with pytest.raises(Unavailable):
        collecting.garbage_collector.collect()
    assert looked == ["datasets", "datasets/d/versions"]


def test_a_pass_is_bounded_and_the_next_goes_on_behind_it(
    store: ObjectStore, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.deletion.VERSIONS_A_PASS", 2)
    names = [f"datasets/{dataset}/versions/v{number}" for dataset in "abc" for number in (1, 2)]
    for name in names:
        commit(store, name)
        store.put(f"{name}/data/a00009-lost/x", b"x")
    left = []
    for _ in range(3):
        collecting.garbage_collector.collect()
        left.append(sum(len(attempts(store, name)) - 1 for name in names))
    assert left == [4, 2, 0]


def test_garbage_collectors_at_the_same_time_do_no_harm(store: ObjectStore) -> None:
    for number in (1, 2, 3, 4):
        name = f"{DATASET}/versions/v{number}"
        commit(store, name)
        store.put(f"{name}/data/a00009-lost/x", b"x")
    doomed = f"{DATASET}/versions/v4"
    Jobs(store, IMPORT_KIND).transition(doomed, lambda newest: request_delete(newest, newest.update_time))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Collecting(store).garbage_collector.collect(), range(4)))
    assert Datasets(store).version_names(DATASET) == [f"{DATASET}/versions/v{number}" for number in (1, 2, 3)]
    for name in Datasets(store).version_names(DATASET):
        load_version(store, name)
        assert len(attempts(store, name)) == 1
