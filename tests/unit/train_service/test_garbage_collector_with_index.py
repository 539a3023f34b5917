"""A sweep reads jobs that may have left something, and the others in turns."""

from __future__ import annotations

import pytest

from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.index import JobIndex
from shared.jobs.transitions import begin_attempt, request_cancel, request_delete, succeed
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from train_service.jobs import deletion
from train_service.jobs.deletion import SETTLED_AFTER_S, Deletions, GarbageCollector
from train_service.records.event_log import TRAIN_KIND

OVER_AT = 1000.0
LATER = OVER_AT + SETTLED_AFTER_S + 1


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """`trainingJobs/a` to `d`, which ended at `OVER_AT`, and `trainingJobs/live`."""
    jobs = Jobs(store, TRAIN_KIND)
    for job_id in ("a", "b", "c", "d", "live"):
        name = f"trainingJobs/{job_id}"
        jobs.create(name, JobRecord(uid=job_id, name=name, spec={}, create_time=0.0, update_time=0.0))
        if job_id != "live":
            jobs.transition(name, lambda job: begin_attempt(job, 1.0), attempt=1)
            jobs.transition(name, lambda job: succeed(job, {}, OVER_AT), attempt=1)
    return jobs


@pytest.fixture
def index(store: ObjectStore, jobs: Jobs) -> JobIndex:
    index = JobIndex(store, jobs.kind, "trainingJobs")
    index.keep()
    return index


def collect(store: ObjectStore, index: JobIndex, now: float) -> None:
    GarbageCollector(store, Deletions(store), lambda: now, index).collect()


def swept(store: ObjectStore, index: JobIndex, now: float, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The jobs that one sweep looks at."""
    seen: set[str] = set()
    with monkeypatch.context() as patched:
        patched.setattr(GarbageCollector, "collect_job", lambda _, name: seen.add(name.rpartition("/")[2]))
        collect(store, index, now)
    return seen


def test_jobs_that_ended_long_ago_are_swept_once_more_and_then_in_turns(
    store: ObjectStore, index: JobIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "JOBS_IN_TURNS", 1)
    assert swept(store, index, OVER_AT + 1, monkeypatch) == {"a", "b", "c", "d", "live"}
    assert swept(store, index, LATER, monkeypatch) == {"a", "b", "c", "d", "live"}

    assert swept(store, index, LATER, monkeypatch) == {"c", "live"}
    assert swept(store, index, LATER, monkeypatch) == {"d", "live"}
    assert swept(store, index, LATER, monkeypatch) == {"live"}
    assert swept(store, index, LATER, monkeypatch) == {"live"}  # the turns have come to their end
    assert swept(store, index, LATER, monkeypatch) == {"a", "live"}


def test_a_settled_job_that_is_deleted_or_changes_is_swept_again(
    store: ObjectStore, jobs: Jobs, index: JobIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "JOBS_IN_TURNS", 1)
    collect(store, index, LATER)
    jobs.transition("trainingJobs/d", lambda job: request_delete(job, LATER))
    store.put("trainingJobs/d/left.txt", b"x")
    index.merge()

    collect(store, index, LATER)

    assert jobs.find("trainingJobs/d") is None
    assert not store.exists("trainingJobs/d/left.txt")
    index.merge()
    page = index.page("", 10)
    assert page is not None
    assert [job.record.uid for job in page[0]] == ["a", "b", "c", "live"]


def test_a_collection_costs_by_the_jobs_that_are_not_settled(
    store: ObjectStore, index: JobIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "JOBS_IN_TURNS", 1)
    collect(store, index, LATER)
    counted = CountingStore(store)

    GarbageCollector(
        counted, Deletions(counted), lambda: LATER, JobIndex(counted, TRAIN_KIND, "trainingJobs")
    ).collect()

    read = {request.split("/")[1] for request in counted.requests if "trainingJobs/" in request}
    assert read == {"a", "live"}


def test_until_the_index_has_all_jobs_every_job_is_swept(store: ObjectStore, jobs: Jobs) -> None:
    jobs.transition("trainingJobs/d", lambda job: request_delete(job, LATER))

    collect(store, JobIndex(store, TRAIN_KIND, "trainingJobs"), LATER)

    assert jobs.find("trainingJobs/d") is None


def test_the_markers_of_live_jobs_are_read_once(store: ObjectStore, jobs: Jobs) -> None:
    counted = CountingStore(store)
    looking = Jobs(counted, TRAIN_KIND)
    first = looking.live()
    counted.forget()

    assert looking.live() == first
    assert counted.requests == ["list live/train"]
    for live in first[:3]:
        jobs.forget(live)
    jobs.transition("trainingJobs/live", lambda job: request_cancel(job, 3.0))
    assert looking.live() == first[3:]
    assert jobs.get("trainingJobs/live", "").state is JobState.CANCELLING
