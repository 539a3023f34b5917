"""Lists, sweeps and deletions of datasets cost by the versions that exist, and not by those that ever did."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from data_service import deletion, version_jobs
from data_service.convert import version_message
from data_service.datasets import Datasets, IndexedVersion, Versions
from data_service.deletion import ORPHAN_GRACE_PERIOD_S, Deletions, GarbageCollector
from data_service.domain.dataset import Retention
from data_service.version_jobs import VersionNames, open_version_index
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import FailedPrecondition
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import JobIndex
from shared.jobs.transitions import begin_attempt, confirm_delete, fail, request_delete
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.versions import commit_version, striped_digits


@dataclass
class Catalog:
    """The parts of the data service that know versions, on a store that counts."""

    store: CountingStore
    index: JobIndex
    datasets: Datasets
    versions: Versions
    now: float

    def listed(self, dataset: str, size: int = 0) -> list[str]:
        """The ids of all versions, page by page."""
        ids: list[str] = []
        token = ""
        while True:
            found, token = self.versions.list(f"datasets/{dataset}", size, token)
            ids += [version.job.name.rpartition("/")[2] for version in found]
            if not token:
                return ids

    def collect(self) -> None:
        deletions = Deletions(self.store, Jobs(self.store, IMPORT_KIND), lambda: self.now)
        GarbageCollector(
            self.store,
            self.datasets,
            deletions,
            collect_uploads=lambda _: None,
            delete_uploads=lambda *_: None,
            clock=lambda: self.now,
            index=self.index,
        ).collect()


def create_dataset(store: ObjectStore, dataset: str, retention: Retention | None = None) -> None:
    Datasets(store).create(
        dataset,
        display_name="",
        description="",
        request_id="",
        body_sha256="",
        validate_only=False,
        retention=retention or Retention(),
    )


@pytest.fixture
def catalog(store: ObjectStore) -> Catalog:
    """With the datasets `a`, `a-b` and `b`, and an index that is built."""
    for dataset in ("a", "a-b", "b"):
        create_dataset(store, dataset)
    return open_catalog(store)


def open_catalog(store: ObjectStore) -> Catalog:
    counted = CountingStore(store)
    index = open_version_index(counted)
    index.build()
    datasets = Datasets(counted, index)
    return Catalog(
        counted, index, datasets, Versions(counted, Jobs(counted, IMPORT_KIND), datasets, index), time.time()
    )


def fail_version(store: ObjectStore, name: str, uid: str = "u") -> None:
    """Create a version that is FAILED."""
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(name, JobRecord(uid=f"{uid}-{name}", name=name, spec={}, create_time=1.0, update_time=1.0))
    jobs.transition(name, lambda job: fail(begin_attempt(job, 1.0), FailedPrecondition("no"), 2.0), attempt=1)
    for live in jobs.live():
        jobs.forget(live)


def delete_version(store: ObjectStore, name: str) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(name, lambda job: confirm_delete(request_delete(job, 3.0), 4.0))


def delete_versions(store: ObjectStore, dataset: str, first: int, count: int) -> None:
    """Leave so many tombstones of versions."""
    for number in range(first, first + count):
        name = f"datasets/{dataset}/versions/t{number:03d}"
        fail_version(store, name)
        delete_version(store, name)


def test_a_list_has_the_versions_of_its_dataset_before_and_after_a_merge(catalog: Catalog) -> None:
    for name in ("a/versions/v1", "a/versions/v1-x", "a/versions/v2", "a-b/versions/v3", "b/versions/v4"):
        fail_version(catalog.store, f"datasets/{name}")
    delete_version(catalog.store, "datasets/a/versions/v2")
    for _ in range(2):
        assert [catalog.listed(dataset, 1) for dataset in ("a", "a-b", "b")] == [["v1", "v1-x"], ["v3"], ["v4"]]
        assert catalog.listed("a") == ["v1", "v1-x"]
        catalog.index.merge()
    fail_version(catalog.store, "datasets/a/versions/v2", "another")
    assert catalog.listed("a") == ["v1", "v1-x", "v2"]


def test_a_committed_version_is_listed_from_the_index_as_its_manifest_has_it(catalog: Catalog) -> None:
    name = "datasets/a/versions/v1"
    commit_version(catalog.store, name, {"train": striped_digits(10)})
    catalog.index.merge()
    catalog.store.forget()
    ((version,), _) = catalog.versions.list("datasets/a", 0, "")
    assert not any("manifest" in request for request in catalog.store.requests)
    assert isinstance(version, IndexedVersion)
    assert version_message(version, brief=True) == version_message(catalog.versions.get(name), brief=True)


def test_a_version_whose_message_is_large_is_listed_from_its_manifest(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_jobs, "SHOWN_BYTES", 1)
    name = "datasets/a/versions/v1"
    commit_version(catalog.store, name, {"train": striped_digits(10)})
    catalog.index.merge()
    ((version,), _) = catalog.versions.list("datasets/a", 0, "")
    assert not isinstance(version, IndexedVersion)
    assert version_message(version, brief=True) == version_message(catalog.versions.get(name), brief=True)


def test_a_version_that_is_being_deleted_is_not_shown_as_it_was(catalog: Catalog) -> None:
    name = "datasets/a/versions/v1"
    commit_version(catalog.store, name, {"train": striped_digits(10)})
    catalog.index.merge()
    jobs = Jobs(catalog.store, IMPORT_KIND)
    jobs.transition(name, lambda job: request_delete(job, 3.0))
    ((version,), _) = catalog.versions.list("datasets/a", 0, "")
    assert version.job.state == "DELETING"
    assert not isinstance(version, IndexedVersion)


def requests(catalog: Catalog, tombstones: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """The requests of a page, of a sweep and of a refused deletion of dataset `a`, with so many tombstones."""
    monkeypatch.setattr(deletion, "VERSIONS_IN_TURNS", 2)
    before = len(VersionNames(catalog.store).all())
    delete_versions(catalog.store, "a", before, tombstones - before)
    catalog.index.merge()
    catalog.collect()
    counts: list[int] = []

    def delete() -> None:
        with pytest.raises(FailedPrecondition, match=r"has 2 version\(s\): datasets/a/versions/v1, "):
            catalog.datasets.delete("datasets/a", "", check_uploads=lambda *_: None, delete_uploads=lambda *_: None)

    for act in (lambda: catalog.listed("a"), catalog.collect, delete):
        catalog.store.forget()
        act()
        counts.append(len(catalog.store.requests))
    page, collect, refused = counts
    return page, collect, refused


def test_tombstones_cost_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("v1", "v2"):
        fail_version(catalog.store, f"datasets/a/versions/{version}")
    catalog.now += 2 * ORPHAN_GRACE_PERIOD_S
    few, many = (requests(catalog, count, monkeypatch) for count in (10, 40))
    assert few == many
    assert max(many[0], many[2]) <= 8


def test_a_settled_version_is_swept_again_once_it_changes(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "VERSIONS_IN_TURNS", 0)
    name = "datasets/a/versions/v1"
    commit_version(catalog.store, name, {"train": striped_digits(10)})
    catalog.index.merge()
    catalog.now += 2 * ORPHAN_GRACE_PERIOD_S
    catalog.collect()
    left = f"{name}/data/a00009-lost/x"
    catalog.store.put(left, b"x")
    catalog.collect()
    assert catalog.store.exists(left)  # it is settled, and its turn has not come
    Jobs(catalog.store, IMPORT_KIND).transition(name, lambda job: request_delete(job, 3.0))
    catalog.index.merge()
    catalog.collect()
    assert not catalog.store.exists(left)
    assert catalog.listed("a") == []


def test_each_collection_deletes_leftover_attempt_folders_of_the_next_failed_versions(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "VERSIONS_IN_TURNS", 1)
    names = [f"datasets/{dataset}/versions/v1" for dataset in ("a", "b")]
    for name in names:
        fail_version(catalog.store, name)
    catalog.index.merge()
    catalog.now += 2 * ORPHAN_GRACE_PERIOD_S
    catalog.collect()
    for name in names:
        catalog.store.put(f"{name}/data/a00009-lost/x", b"x")
    for _ in range(4):
        catalog.collect()
    assert not any(catalog.store.exists(f"{name}/data/a00009-lost/x") for name in names)


def test_the_retention_of_a_dataset_ends_versions_that_are_settled(store: ObjectStore) -> None:
    create_dataset(store, "kept", Retention(keep_newest=1))
    for version in ("v1", "v2"):
        commit_version(store, f"datasets/kept/versions/{version}", {"train": striped_digits(10)})
    catalog = open_catalog(store)
    catalog.now += 2 * ORPHAN_GRACE_PERIOD_S
    for _ in range(2):
        catalog.collect()
    assert catalog.listed("kept") == ["v2"]


def test_a_pass_over_many_versions_continues_where_the_last_one_stopped(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "VERSIONS_A_PASS", 2)
    collected: list[str] = []
    monkeypatch.setattr(GarbageCollector, "_collect_version", lambda _, name: collected.append(name.rpartition("/")[2]))
    monkeypatch.setattr(deletion, "VERSIONS_IN_TURNS", 0)
    for number in range(5):
        fail_version(catalog.store, f"datasets/a/versions/v{number}")
    catalog.index.merge()
    jobs = Jobs(catalog.store, IMPORT_KIND)
    catalog.now = 3.0  # none is settled yet
    garbage_collector = GarbageCollector(
        catalog.store,
        catalog.datasets,
        Deletions(catalog.store, jobs),
        collect_uploads=lambda _: None,
        delete_uploads=lambda *_: None,
        clock=lambda: catalog.now,
        index=catalog.index,
    )
    for _ in range(4):
        garbage_collector.collect()
    assert collected == ["v0", "v1", "v2", "v3", "v4", "v0", "v1"]


def test_names_are_found_in_turns_over_all_datasets(catalog: Catalog) -> None:
    names = [f"datasets/{one}" for one in ("a/versions/v1", "a/versions/v1-x", "a-b/versions/v3", "b/versions/v4")]
    for name in names:
        fail_version(catalog.store, name)
    of_store = VersionNames(catalog.store)
    assert sorted(of_store.all()) == of_store.all() == sorted(names)
    found: list[str] = []
    name = "datasets/"
    while some := of_store.after(name, 1):
        found += some
        name = some[-1]
    assert sorted(found) == sorted(names)
    assert sorted(of_store.after("", 10)) == sorted(names)


def test_names_in_turns_cost_the_same_among_many_datasets(catalog: Catalog) -> None:
    def requests() -> int:
        catalog.store.forget()
        assert list(VersionNames(catalog.store).after("datasets/a/versions/v1", 1)) == ["datasets/z/versions/v2"]
        return len(catalog.store.requests)

    for name in ("datasets/a/versions/v1", "datasets/z/versions/v2"):
        fail_version(catalog.store, name)
    before = requests()
    for number in range(30):
        create_dataset(catalog.store, f"c-{number}")

    assert requests() == before == 1


def test_the_index_is_built_from_versions_that_were_there_before(store: ObjectStore) -> None:
    create_dataset(store, "a")
    commit_version(store, "datasets/a/versions/v1", {"train": striped_digits(10)})
    delete_versions(store, "a", 0, 2)
    for info in list(store.list("index")):
        store.delete(info.key)
    catalog = open_catalog(store)
    assert catalog.listed("a") == ["v1"]
    ((version,), _) = catalog.versions.list("datasets/a", 0, "")
    assert isinstance(version, IndexedVersion)
    catalog.index.catch_up()
    assert catalog.listed("a") == ["v1"]


def test_an_older_version_of_a_name_does_not_come_back(catalog: Catalog) -> None:
    name = "datasets/a/versions/v1"
    fail_version(catalog.store, name)
    delete_version(catalog.store, name)
    catalog.index.merge()
    jobs = Jobs(catalog.store, IMPORT_KIND)
    jobs.create(name, JobRecord(uid="new", name=name, spec={}, create_time=1.0, update_time=1.0))
    assert catalog.listed("a") == ["v1"]
    ((version,), _) = catalog.versions.list("datasets/a", 0, "")
    assert version.job.uid == "new"
