"""The index of jobs: logs that cannot be read, and what an earlier release has written."""

from __future__ import annotations

import pytest

from shared.errors import NotFound
from shared.jobs import JobRecord, Jobs, JobState, index
from shared.jobs.index import JobIndex
from shared.jobs.registry import Changes, folder_of_index
from shared.jobs.transitions import fail, request_cancel
from shared.storage import ObjectStore

KIND, COLLECTION = "train", "trainingJobs"


def create(store: ObjectStore, job_id: str) -> None:
    name = f"{COLLECTION}/{job_id}"
    Jobs(store, KIND).create(name, JobRecord(uid=job_id, name=name, spec={}, create_time=1.0, update_time=1.0))


def cancel(store: ObjectStore, job_id: str) -> None:
    Jobs(store, KIND).transition(f"{COLLECTION}/{job_id}", lambda job: request_cancel(job, 2.0))


def states(one: JobIndex) -> dict[str, JobState]:
    page = one.page(f"{COLLECTION}/", 100)
    assert page is not None
    return {job.record.uid: job.record.state for job in page[0]}


@pytest.fixture
def broken(store: ObjectStore) -> JobIndex:
    """An index of three jobs of which one has got a record that cannot be read, and another one was cancelled."""
    one = JobIndex(store, KIND, COLLECTION)
    for job_id in "abc":
        create(store, job_id)
    one.keep()
    for job_id in "bc":
        cancel(store, job_id)
    (newest,) = [info.key for info in store.list(f"{COLLECTION}/b/log") if info.key.endswith("0002.json")]
    store.put(newest, b"{")
    return one


def test_a_job_that_cannot_be_read_is_listed_as_it_was_and_the_others_as_they_are(broken: JobIndex) -> None:
    assert states(broken) == {"a": JobState.PENDING, "b": JobState.PENDING, "c": JobState.CANCELLING}


def test_a_job_that_cannot_be_read_costs_no_root_at_each_merge(store: ObjectStore, broken: JobIndex) -> None:
    broken.merge()  # the cancelled one
    roots = [info.key for info in store.list(f"{folder_of_index(KIND)}/roots")]

    broken.merge()

    assert [info.key for info in store.list(f"{folder_of_index(KIND)}/roots")] == roots
    assert {change.name for change in Changes(store, KIND).read()} == {f"{COLLECTION}/b"}


def test_a_service_that_begins_compares_all_jobs_with_their_logs_once_a_few_at_a_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "JOBS_A_COMMIT", 2)
    for job_id in "abcde":
        create(store, job_id)
    JobIndex(store, KIND, COLLECTION).keep()
    jobs = Jobs(store, KIND)
    for live in jobs.live():
        jobs.forget(live)
    JobIndex(store, KIND, COLLECTION).refresh()
    with monkeypatch.context() as earlier_release:
        earlier_release.setattr(Changes, "note", lambda *_: None)
        for job_id in "abcde":
            jobs.transition(f"{COLLECTION}/{job_id}", lambda job: fail(job, NotFound("x"), 2.0))
    started = JobIndex(store, KIND, COLLECTION)
    monkeypatch.setattr(started, "refresh", lambda: None)

    ended = []
    for _ in range(4):
        started.keep()
        ended.append(sum(state is JobState.FAILED for state in states(started).values()))

    assert ended == [2, 4, 5, 5]
