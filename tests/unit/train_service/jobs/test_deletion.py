"""Deleting training jobs: who uses a checkpoint keeps its job, and what dies half-way is finished."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from shared.checkpoint import CheckpointRegistry, resolve
from shared.checkpoint.references import live_references, using
from shared.dataset_version.version import live_references as version_references
from shared.dataset_version.version import mark_used
from shared.errors import Conflict, FailedPrecondition, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import begin_attempt, fail, follow_deleted, request_delete, succeed
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from shared.storage.object_store import KEYS_A_DELETION
from tests.support.counting_store import CountingStore
from tests.support.snapshots import JOB, save
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import VERSION
from train_service.jobs.deletion import Deletions, GarbageCollector
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog

HOLDER = "deployments/m"


def new_job() -> JobRecord:
    # Not what creating makes, but all that the end of a job looks at.
    spec = {"training": {"dataset_version": VERSION, "initial_checkpoint": ""}}
    return JobRecord(uid=uuid.uuid4().hex, name=JOB, spec=spec, create_time=0.0, update_time=0.0)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """`trainingJobs/a`, SUCCEEDED, with two checkpoints, events, and what else a run leaves."""
    commit_version(store, VERSION, {"train": striped_digits(20)})
    made = Jobs(store, TRAIN_KIND)
    job = made.create(JOB, new_job())
    mark_used(store, VERSION, TRAIN_KIND, job.uid, JOB)
    made.transition(JOB, lambda newest: begin_attempt(newest, 1.0), attempt=1)
    save(store, 2, 4)
    EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "x"})
    for key in ("progress.json", "metrics/1.parquet", "logs/1/0/1.log", "coverage/x.arrow", "ray/attempt-00001/x"):
        store.put(f"{JOB}/{key}", b"x")
    made.transition(JOB, lambda newest: succeed(newest, {}, 2.0), attempt=1)
    return made


def files(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(JOB) if "/log/" not in info.key or "/events/" in info.key]


def use(store: ObjectStore) -> None:
    with using(store, "f", f"{JOB}/checkpoints/step-00000002", "deployment", "u1", HOLDER, ends_in="GONE"):
        pass


def delete(store: ObjectStore, etag: str = "") -> None:
    deletions = Deletions(store)
    deletions.begin(JOB, etag)
    deletions.finish(JOB)


def test_a_deleted_job_is_gone_with_all_that_it_made(store: ObjectStore, jobs: Jobs) -> None:
    assert len(files(store)) > 10

    delete(store)

    assert files(store) == []
    assert jobs.find(JOB) is None
    assert version_references(store, VERSION, 0.0) == []
    assert CheckpointRegistry(store, JOB).entries() == []
    training = TrainingJobs(store)
    for call in (
        lambda: training.get(JOB),
        lambda: training.checkpoints(JOB, 0, ""),
        lambda: training.cancel(JOB, ""),
        lambda: training.delete(JOB, ""),
        lambda: resolve(store, "f", JOB),
    ):
        with pytest.raises(NotFound):
            call()
    assert training.page(0, "") == ([], "")


@pytest.mark.usefixtures("jobs")
def test_a_job_of_many_objects_is_deleted_by_few_requests(store: ObjectStore) -> None:
    def requests() -> int:
        counting = CountingStore(store)
        counting.keys_a_deletion = KEYS_A_DELETION  # as on S3
        deletions = Deletions(counting)
        deletions.begin(JOB)
        deletions.finish(JOB)
        return len(counting.requests)

    for number in range(KEYS_A_DELETION):
        store.put(f"{JOB}/coverage/{number:04d}.arrow", b"")

    assert requests() < 100
    assert files(store) == []


def test_the_call_answers_deleting_and_the_job_is_gone_soon_after(store: ObjectStore, jobs: Jobs) -> None:
    # As a created job has it: the answer tells the whole spec.
    view = Deletions(store).begin(JOB)
    assert view.state is JobState.DELETING

    Deletions(store).finish_soon(JOB)

    wait_until(lambda: jobs.find(JOB) is None, "the end of the job")
    assert files(store) == []


def test_a_new_job_may_take_the_id_and_begins_with_nothing(store: ObjectStore, jobs: Jobs) -> None:
    delete(store)

    again = jobs.create(JOB, new_job())
    assert (again.attempt, again.first_attempt) == (1, 2)
    assert CheckpointRegistry(store, JOB).entries() == []
    assert EventLog(store, JOB).last_sequence() == 0
    jobs.transition(JOB, lambda newest: begin_attempt(newest, 3.0), attempt=2)
    assert CheckpointRegistry(store, JOB).fence(2) == []
    assert [one.attempt for one in save(store, 6, attempt=2)] == [2]


def test_a_zombie_of_a_deleted_job_commits_nothing_into_a_new_one(store: ObjectStore, jobs: Jobs) -> None:
    zombie = CheckpointRegistry(store, JOB)
    (entry, _) = zombie.entries()
    delete(store)
    jobs.create(JOB, new_job())

    with pytest.raises(StaleAttempt):
        zombie.commit(entry)

    assert CheckpointRegistry(store, JOB).entries() == []


def test_a_job_whose_checkpoint_is_in_use_stays_as_it_was_and_the_error_names_the_users(
    store: ObjectStore, jobs: Jobs
) -> None:
    use(store)
    before = jobs.get(JOB, JOB)

    with pytest.raises(FailedPrecondition, match=HOLDER) as refused:
        Deletions(store).begin(JOB)

    assert refused.value.specific_reason == "JOB_IN_USE"
    assert refused.value.metadata["users"] == HOLDER
    assert "step-00000002" in refused.value.message
    after = jobs.get(JOB, JOB)
    assert (after.state, after.update_time) == (JobState.SUCCEEDED, before.update_time)
    assert resolve(store, "f", JOB).step == 4


def test_a_job_at_work_is_refused_and_a_suspended_one_is_not(store: ObjectStore) -> None:
    jobs = Jobs(store, TRAIN_KIND)
    jobs.create(JOB, new_job())
    with pytest.raises(FailedPrecondition) as refused:
        Deletions(store).begin(JOB)
    assert refused.value.specific_reason == "JOB_AT_WORK"

    jobs.suspend(JOB, JOB)
    jobs.transition(JOB, lambda newest: JobRecord(**{**vars(newest), "state": JobState.SUSPENDED}))
    delete(store)
    assert jobs.find(JOB) is None


def test_only_the_present_etag_deletes(store: ObjectStore, jobs: Jobs) -> None:
    with pytest.raises(Conflict):
        Deletions(store).begin(JOB, "7")
    delete(store, str(jobs.get(JOB, JOB).generation))


def test_a_deletion_of_a_dead_service_is_finished_by_the_next(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0
    for dies_at in range(60):
        with monkeypatch.context() as outage:

            def dying(method: Any, last: int = dies_at) -> Any:
                def step(*arguments: Any) -> Any:
                    nonlocal writes
                    writes += 1
                    if writes > last:
                        raise Unavailable("no answer")
                    return method(*arguments)

                return step

            writes = 0
            for method in ("put_if_absent", "delete"):
                outage.setattr(store, method, dying(getattr(store, method)))
            deletions = Deletions(store)
            try:
                deletions.begin(JOB)
                deletions.finish(JOB)
            except (Unavailable, NotFound):
                assert dies_at < 3 or jobs.find(JOB) is None or jobs.get(JOB, JOB).state is JobState.DELETING
        if jobs.find(JOB) is None:
            break
        if dies_at == 0:
            assert jobs.get(JOB, JOB).state is JobState.SUCCEEDED
    GarbageCollector(store, Deletions(store)).collect()

    assert jobs.find(JOB) is None
    assert files(store) == []
    assert version_references(store, VERSION, 0.0) == []


def test_a_deletion_that_was_only_begun_is_taken_back_where_somebody_uses_a_checkpoint(
    store: ObjectStore, jobs: Jobs
) -> None:
    use(store)
    jobs.transition(JOB, lambda newest: request_delete(newest, newest.update_time))

    GarbageCollector(store, Deletions(store)).collect()

    assert jobs.get(JOB, JOB).state is JobState.SUCCEEDED
    assert resolve(store, "f", JOB).step == 4


def test_once_no_user_was_found_there_is_no_way_back(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two delete at once: one sees a user; before it takes the deletion back, the user ends and the other goes on."""

    def references_then_the_other_goes_on(*_: Any) -> dict[str, list[str]]:
        monkeypatch.undo()
        Deletions(store).finish(JOB)
        return {"x": [HOLDER]}

    monkeypatch.setattr("train_service.jobs.deletion.references_of_job", references_then_the_other_goes_on)
    Deletions(store).begin(JOB)
    Deletions(store).finish(JOB)
    assert jobs.find(JOB) is None


def test_a_slow_deleter_leaves_the_files_of_a_new_job_of_that_name(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Deletions(store)
    job = slow.begin(JOB)
    listed = store.list

    def overtaken(prefix: str = "") -> Any:
        monkeypatch.undo()
        Deletions(store).finish(JOB)
        jobs.create(JOB, new_job())
        store.put(f"{JOB}/progress.json", b"{}")
        return listed(prefix)

    monkeypatch.setattr(store, "list", overtaken)
    assert not slow.remove_files(job)
    assert files(store) == [f"{JOB}/progress.json"]


def test_a_deleted_fine_tuning_job_lets_its_first_weights_go(store: ObjectStore, jobs: Jobs) -> None:
    name = f"{JOB}/checkpoints/step-00000004"
    tuner = "trainingJobs/tuner"
    spec = {"training": {"dataset_version": VERSION, "initial_checkpoint": name}}
    record = JobRecord(uid="t", name=tuner, spec=spec, create_time=0.0, update_time=0.0)
    with using(store, "f", name, TRAIN_KIND, "t", tuner):
        jobs.create(tuner, record)
    with pytest.raises(FailedPrecondition, match=tuner):
        Deletions(store).begin(JOB)
    jobs.transition(tuner, lambda newest: fail(newest, NotFound("x"), 1.0))
    deletions = Deletions(store)
    deletions.begin(tuner)
    deletions.finish(tuner)

    assert live_references(store, name, 0.0) == []
    assert not [info for info in store.list(JOB) if "/users/" in info.key]
    delete(store)
    assert follow_deleted(new_job(), record_of(jobs)).first_attempt == 2


def record_of(jobs: Jobs) -> JobRecord:
    found = jobs.newest(JOB)
    assert found is not None
    return found
