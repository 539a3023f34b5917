"""Creating a job when several calls do so at once, and resuming one that is over."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from shared.dataset_version.version import live_references
from shared.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.model_spec import ModelSpec
from shared.reference_markers import REFERENCE_APPEARS_TIMEOUT_S
from shared.resource_log import claimed
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import VERSION
from train_service.domain.spec import TrainingSpec
from train_service.jobs import training_jobs, trial_limit
from train_service.jobs.deletion import Deletions, using_inputs
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records.event_log import TRAIN_KIND

SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}]},
    model=ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=20,
)


@pytest.fixture(autouse=True)
def small_version(store: ObjectStore) -> None:
    commit_version(store, VERSION, {"train": striped_digits(40)})


def create(store: ObjectStore, request_id: str) -> JobView:
    return TrainingJobs(store).create("a", SPEC, request_id, "digest", validate_only=False)


def overtaken(store: ObjectStore, request_id: str, monkeypatch: pytest.MonkeyPatch) -> list[JobView]:
    """Let another call come between the next one's checks and the job that it makes; return the other's answer."""
    put, answers = store.put, list[JobView]()

    def put_after_the_other(key: str, data: bytes) -> None:
        if "/users/" in key and not answers:
            answers.append(create(open_store(store.settings), request_id))
        put(key, data)

    monkeypatch.setattr(store, "put", put_after_the_other)
    return answers


def references(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(f"{VERSION}/users")]


def test_a_call_overtaken_by_its_own_second_try_gives_the_same_answer(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    answers = overtaken(store, request_id, monkeypatch)

    assert create(store, request_id) == answers[0]
    assert create(store, request_id) == answers[0]
    assert len(references(store)) == 1


def test_a_call_overtaken_by_anothers_of_the_same_id_is_refused_and_leaves_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = overtaken(store, str(uuid.uuid4()), monkeypatch)

    with pytest.raises(AlreadyExists):
        create(store, str(uuid.uuid4()))

    assert len(references(store)) == len(answers) == 1
    assert len(list(store.list("requests"))) == 1
    assert len(list(store.list("live"))) == 1


def test_a_repeated_call_is_not_answered_with_another_callers_job(store: ObjectStore) -> None:
    request_id = str(uuid.uuid4())
    # The first try died after it had claimed its id, and then somebody else took the name.
    with claimed(store, TRAIN_KIND, request_id, "digest", "trainingJobs/a"):
        pass
    create(store, str(uuid.uuid4()))

    with pytest.raises(AlreadyExists):
        create(store, request_id)


def test_a_repeated_call_gets_its_answer_when_the_version_is_gone(store: ObjectStore) -> None:
    request_id = str(uuid.uuid4())
    first = create(store, request_id)
    store.delete_folder(VERSION)

    assert create(store, request_id) == first
    with pytest.raises(AlreadyExists, match="another body"):
        TrainingJobs(store).create("a", SPEC, request_id, "of another", validate_only=False)


def test_a_repeated_call_is_answered_with_a_job_from_when_uids_were_random(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    with monkeypatch.context() as then:
        then.setattr(training_jobs, "uid_of", lambda *_: uuid.uuid4().hex)
        first = create(store, request_id)

    assert create(store, request_id) == first
    with pytest.raises(AlreadyExists):
        create(store, str(uuid.uuid4()))
    deleted(store, "trainingJobs/a")
    with pytest.raises(NotFound, match="deleted since"):
        create(store, request_id)


def deleted(store: ObjectStore, name: str) -> None:
    Jobs(store, TRAIN_KIND).transition(name, lambda job: replace(job, state=JobState.SUCCEEDED))
    Deletions(store).begin(name)
    Deletions(store).finish(name)


def test_a_repeated_call_does_not_make_anew_what_was_deleted_since(store: ObjectStore) -> None:
    """Also where another job has the name by now."""
    request_id = str(uuid.uuid4())
    create(store, request_id)
    deleted(store, "trainingJobs/a")

    with pytest.raises(NotFound, match="deleted since"):
        create(store, request_id)
    anothers = create(store, str(uuid.uuid4()))
    with pytest.raises(NotFound, match="deleted since"):
        create(store, request_id)

    assert TrainingJobs(store).get("trainingJobs/a") == anothers
    assert len(references(store)) == 1


def test_a_call_overtaken_by_its_own_second_try_makes_nothing_anew_where_that_was_deleted(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    create_job = Jobs.create

    def after_the_others_end(jobs: Jobs, folder: str, job: JobRecord) -> JobRecord:
        if jobs.find(folder) is None:
            create_job(jobs, folder, job)
            deleted(store, folder)
        return create_job(jobs, folder, job)

    monkeypatch.setattr(Jobs, "create", after_the_others_end)

    with pytest.raises(NotFound, match="deleted since"):
        create(store, request_id)
    assert not list(store.list("live"))
    assert not references(store)


def test_checking_only_refuses_an_id_that_is_taken(store: ObjectStore) -> None:
    create(store, "")

    with pytest.raises(AlreadyExists):
        TrainingJobs(store).create("a", SPEC, "", "digest", validate_only=True)


def test_a_call_is_answered_while_another_asks_for_a_model_without_end(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both as much as they are, a busy machine is not done with the first while the second waits for it.
    monkeypatch.setattr(trial_limit, "MAX_CALLS", 10_000)
    monkeypatch.setattr(training_jobs, "CHECK_WAIT_S", 500.0)
    jobs = TrainingJobs(store)
    endless = replace(
        SPEC,
        model=ModelSpec(
            builder="torchvision.mobilenet_v2",
            in_channels=1,
            num_classes=10,
            kwargs={"inverted_residual_setting": [[1, 16, 10_000_000, 1]]},
        ),
    )
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(jobs.create, "endless", endless, "", "digest", validate_only=True)
        wait_until(jobs._checking.locked, "the check of the first")
        assert jobs.create("b", SPEC, "", "digest", validate_only=True).record.name == "trainingJobs/b"
        with pytest.raises(InvalidArgument, match="too large"):
            refused.result()


def test_a_call_does_not_wait_for_ever_for_the_models_of_others(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_jobs, "CHECK_WAIT_S", 0.1)
    jobs = TrainingJobs(store)

    with jobs._checking, pytest.raises(ResourceExhausted, match="try again later"):
        jobs.create("a", SPEC, "", "digest", validate_only=True)


@pytest.mark.parametrize(("sequence", "said"), [(-1, "-1 must be 0 or more"), (1, "1 is beyond the last event, 0")])
def test_a_sequence_number_that_no_event_has_is_refused_as_what_it_is(
    store: ObjectStore, sequence: int, said: str
) -> None:
    create(store, "")

    with pytest.raises(OutOfRange, match=said) as refused:
        TrainingJobs(store).check_sequence("trainingJobs/a", sequence)

    assert [field for field, _ in refused.value.fields] == ["after_sequence"]


def over(store: ObjectStore, state: JobState) -> Jobs:
    """The job `a`, in a state in which no attempt works on it."""
    create(store, "")
    jobs = Jobs(store, TRAIN_KIND)
    jobs.transition("trainingJobs/a", lambda job: replace(job, state=state, failures=4, update_time=time.time()))
    return jobs


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.SUSPENDED])
def test_a_job_that_is_over_goes_on_with_nothing_counted_and_keeps_its_version_again(
    store: ObjectStore, state: JobState
) -> None:
    over(store, state)
    for key in references(store):
        store.delete(key)

    resumed = TrainingJobs(store).resume("trainingJobs/a", "")

    assert (resumed.record.state, resumed.record.failures) == (JobState.RECOVERING, 0)
    assert len(references(store)) == 1


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.SUSPENDED])
def test_a_resumption_that_is_refused_leaves_the_mark_that_another_or_the_pause_needs(
    store: ObjectStore, state: JobState
) -> None:
    etag = str(over(store, state).get("trainingJobs/a", "trainingJobs/a").generation)
    if state is JobState.FAILED:
        TrainingJobs(store).resume("trainingJobs/a", etag)
        # The slower one has read the job before.
        TrainingJobs(store)._jobs.transition("trainingJobs/a", lambda job: replace(job, state=JobState.FAILED))
    else:
        etag = "77"

    with pytest.raises(Conflict):
        TrainingJobs(store).resume("trainingJobs/a", etag)

    assert len(references(store)) == 1


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_keeps_its_version_from_before_its_log_says_that_it_goes_on(store: ObjectStore, state: JobState) -> None:
    job = over(store, state).get("trainingJobs/a", "trainingJobs/a")
    assert live_references(store, VERSION, time.time()) == []

    with using_inputs(store, TRAIN_KIND, job, SPEC):
        assert live_references(store, VERSION, time.time()) == ["trainingJobs/a"]

    # Its resumption was refused, or died before it was written.
    assert live_references(store, VERSION, time.time() + REFERENCE_APPEARS_TIMEOUT_S) == []


def test_a_job_whose_version_is_gone_does_not_go_on_and_leaves_no_marker(store: ObjectStore) -> None:
    jobs = over(store, JobState.CANCELLED)
    store.delete_folder(VERSION)

    with pytest.raises(FailedPrecondition, match="train anew") as refused:
        TrainingJobs(store).resume("trainingJobs/a", "")

    assert refused.value.specific_reason == "VERSION_GONE"
    assert jobs.get("trainingJobs/a", "trainingJobs/a").state is JobState.CANCELLED
    assert not references(store)


def test_the_reason_for_waiting_is_reported_while_a_job_waits_and_not_later(store: ObjectStore) -> None:
    create(store, "")
    jobs = Jobs(store, TRAIN_KIND)
    jobs.wait_for("trainingJobs/a", "2 workers of 1 CPU")
    assert TrainingJobs(store).get("trainingJobs/a").waiting_for == "2 workers of 1 CPU"

    TrainingJobs(store).suspend("trainingJobs/a", "")
    assert TrainingJobs(store).get("trainingJobs/a").waiting_for == ""
