from __future__ import annotations

import time

import pytest

from shared.dataset_version import load_version
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, fail, request_delete
from shared.storage import ObjectStore


def test_a_committed_version_is_found(store: ObjectStore, committed: str) -> None:
    version = load_version(store, committed)
    assert version.name == committed
    assert [(split.name, split.first_row_id, split.row_count) for split in version.manifest.splits] == [
        ("train", 0, 600),
        ("test", 600, 100),
    ]
    assert version.split("test").first_row_id == 600
    assert [column.name for column in version.columns] == ["image", "label"]


def test_a_version_that_never_was_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        load_version(store, "datasets/digits/versions/v9")


@pytest.mark.parametrize("name", ["", "datasets/d", "datasets/../versions/v", "datasets/d/versions/V"])
def test_a_malformed_name_never_reaches_the_store(store: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidArgument):
        load_version(store, name)


def test_only_an_active_version_can_be_used(store: ObjectStore) -> None:
    name = "datasets/digits/versions/v2"
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(name, JobRecord(uid="u", name=name, spec={}, create_time=0, update_time=0))
    with pytest.raises(FailedPrecondition, match="not ACTIVE: it is still being made"):
        load_version(store, name)
    gone = NotFound("/in/x is gone")
    jobs.transition(name, lambda job: fail(begin_attempt(job, time.time()), gone, time.time()))
    with pytest.raises(FailedPrecondition, match="making it failed: /in/x is gone"):
        load_version(store, name)


def test_a_damaged_manifest_is_noticed(store: ObjectStore, committed: str) -> None:
    key = f"{load_version(store, committed).folder}/manifest.json"
    store.put(key, store.get(key).replace(b'"row_count":600', b'"row_count":601'))
    with pytest.raises(DataLoss):
        load_version(store, committed)
    store.delete(key)
    with pytest.raises(DataLoss, match="is gone"):
        load_version(store, committed)


def test_a_version_that_is_deleted_while_it_is_looked_for_is_not_damaged(
    store: ObjectStore, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, get = Jobs(store, IMPORT_KIND), store.get

    def deleted_before(key: str) -> bytes:
        if key.endswith("/manifest.json"):
            monkeypatch.undo()
            jobs.transition(committed, lambda job: request_delete(job, 1.0))
            store.delete(key)
        return get(key)

    monkeypatch.setattr(store, "get", deleted_before)
    with pytest.raises(NotFound, match="deleted while it was read"):
        load_version(store, committed)
