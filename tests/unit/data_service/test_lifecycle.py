"""Deleting versions: who uses one keeps it, and what dies half-way is finished."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from data_service.datasets import OPERATION_PREFIXES, Datasets, Versions, record_operation
from data_service.deletion import Deletions
from shared.dataset_version import load_version
from shared.dataset_version.version import IMPORT_KIND, mark_used
from shared.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import begin_attempt, request_delete
from shared.storage import ObjectStore
from shared.streaming import operation_ids_after
from tests.support.versions import commit_version, striped_digits

VERSION = "datasets/d/versions/v1"
HOLDER = "trainingJobs/j"


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    commit_version(store, VERSION, {"train": striped_digits(20)})
    return Jobs(store, IMPORT_KIND)


@pytest.fixture
def deletions(store: ObjectStore, jobs: Jobs) -> Deletions:
    return Deletions(store, jobs)


def files(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(VERSION) if "/log/" not in info.key]


def new_job() -> JobRecord:
    return JobRecord(uid=uuid.uuid4().hex, name=VERSION, spec={}, create_time=0.0, update_time=0.0)


def test_a_deleted_version_is_gone_with_its_files_and_its_operation(
    store: ObjectStore, jobs: Jobs, deletions: Deletions
) -> None:
    record_operation(store, jobs.get(VERSION, VERSION))
    store.put(f"{VERSION}/progress.json", b"{}")
    deletions.delete(VERSION)
    assert files(store) == []
    assert operation_ids_after(store, OPERATION_PREFIXES, "", 100) == []
    assert jobs.find(VERSION) is None
    with pytest.raises(NotFound):
        deletions.delete(VERSION)
    with pytest.raises(NotFound):
        load_version(store, VERSION)


def test_the_id_is_free_again(jobs: Jobs, deletions: Deletions) -> None:
    deletions.delete(VERSION)
    commit_again = new_job()
    jobs.create(VERSION, commit_again)
    assert jobs.get(VERSION, VERSION).uid == commit_again.uid


def test_a_version_in_use_stays_as_it_was_and_the_error_names_the_user(
    store: ObjectStore, jobs: Jobs, deletions: Deletions
) -> None:
    mark_used(store, VERSION, "train", "u1", HOLDER)
    before = jobs.get(VERSION, VERSION)
    with pytest.raises(FailedPrecondition, match=HOLDER) as refused:
        deletions.delete(VERSION)
    assert refused.value.specific_reason == "VERSION_IN_USE"
    assert refused.value.metadata["users"] == HOLDER
    after = jobs.get(VERSION, VERSION)
    assert (after.state, after.update_time) == (JobState.SUCCEEDED, before.update_time)
    load_version(store, VERSION)


def test_a_version_that_is_being_made_is_refused_with_its_operation(store: ObjectStore, jobs: Jobs) -> None:
    other = "datasets/d/versions/v2"
    job = jobs.create(other, JobRecord(uid="u2", name=other, spec={}, create_time=0.0, update_time=0.0))
    jobs.transition(other, lambda newest: begin_attempt(newest, 1.0), attempt=1)
    with pytest.raises(FailedPrecondition, match=f"operations/import-{job.uid}") as refused:
        Deletions(store, jobs).delete(other)
    assert refused.value.specific_reason == "VERSION_IN_CREATION"
    assert jobs.get(other, other).state is JobState.RUNNING


def test_only_the_present_etag_deletes(jobs: Jobs, deletions: Deletions) -> None:
    with pytest.raises(Conflict):
        deletions.delete(VERSION, etag="7")
    deletions.delete(VERSION, etag=str(jobs.get(VERSION, VERSION).generation))


@pytest.mark.parametrize("name", ["datasets/d", "datasets/../versions/v1", "datasets/d/versions/V"])
def test_a_malformed_name_is_refused(deletions: Deletions, name: str) -> None:
    with pytest.raises(InvalidArgument):
        deletions.delete(name)


# Two appends, two files, the operation's pointer, and the tombstone.
@pytest.mark.parametrize("dies_at", range(6))
def test_whatever_an_outage_leaves_is_finished_by_the_next(
    store: ObjectStore, jobs: Jobs, deletions: Deletions, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    writes = 0

    def dying(method: Any) -> Any:
        def step(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > dies_at:
                raise Unavailable("no answer")
            return method(*arguments)

        return step

    with monkeypatch.context() as outage:
        for method in ("put_if_absent", "delete"):
            outage.setattr(store, method, dying(getattr(store, method)))
        with pytest.raises(Unavailable):
            deletions.delete(VERSION)
    if dies_at == 0:
        load_version(store, VERSION)  # nothing was said yet
        return
    deletions.finish(VERSION)
    assert files(store) == []
    assert jobs.find(VERSION) is None


def test_a_deletion_that_was_only_begun_is_taken_back_where_somebody_uses_the_version(
    store: ObjectStore, jobs: Jobs, deletions: Deletions
) -> None:
    mark_used(store, VERSION, "train", "u1", HOLDER)
    jobs.transition(VERSION, lambda newest: request_delete(newest, newest.update_time))
    with pytest.raises(FailedPrecondition):
        deletions.finish(VERSION)
    load_version(store, VERSION)


def test_once_no_user_was_found_there_is_no_way_back(
    store: ObjectStore, jobs: Jobs, deletions: Deletions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two delete at once: one sees a user; before it takes the deletion back, the user ends and the other goes on."""
    other = Deletions(store, jobs)

    def references_then_the_other_goes_on(*_: Any) -> list[str]:
        monkeypatch.undo()
        other.finish(VERSION)
        return [HOLDER]

    monkeypatch.setattr("data_service.deletion.live_references", references_then_the_other_goes_on)
    deletions.delete(VERSION)
    assert jobs.find(VERSION) is None
    assert files(store) == []


def test_a_slow_deleter_leaves_the_files_of_a_new_version_of_that_name(
    store: ObjectStore, jobs: Jobs, deletions: Deletions, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = store.list

    def overtaken(prefix: str = "") -> Any:
        monkeypatch.undo()
        Deletions(store, jobs).finish(VERSION)
        commit_version(store, VERSION, {"train": striped_digits(10)})
        return listed(prefix)

    jobs.transition(VERSION, lambda newest: request_delete(newest, newest.update_time))
    monkeypatch.setattr("data_service.deletion.live_references", lambda *_: [])
    monkeypatch.setattr(store, "list", overtaken)
    deletions.finish(VERSION)
    assert load_version(store, VERSION).manifest.row_count == 10


def test_a_deletion_that_means_another_of_the_same_name_does_nothing(
    store: ObjectStore, jobs: Jobs, deletions: Deletions
) -> None:
    with pytest.raises(NotFound):
        deletions.delete(VERSION, uid="another")

    assert jobs.get(VERSION, VERSION).state is JobState.SUCCEEDED
    assert load_version(store, VERSION).manifest.row_count == 20


def test_a_version_that_is_deleted_while_versions_are_listed_is_left_out(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = Datasets(store)
    datasets.create("d", display_name="", description="", request_id="", body_sha256="", validate_only=False)
    commit_version(store, "datasets/d/versions/v2", {"train": striped_digits(10)})
    get = store.get

    def deleted_before(key: str) -> bytes:
        if key.startswith(f"{VERSION}/data/"):
            monkeypatch.undo()
            Deletions(store, jobs).delete(VERSION)
        return get(key)

    monkeypatch.setattr(store, "get", deleted_before)
    found, _ = Versions(store, jobs, datasets).list("datasets/d", 0, "")
    assert [one.job.name for one in found] == ["datasets/d/versions/v2"]
