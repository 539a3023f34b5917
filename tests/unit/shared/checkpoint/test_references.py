"""Users of checkpoints: who has marked one and found it named has it until it ends."""

from __future__ import annotations

import time

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.references import keep, live_references, markers, references_of_job, release, using
from shared.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import fail, request_delete
from shared.reference_markers import REFERENCE_APPEARS_TIMEOUT_S, put_marker
from shared.resource_log import ResourceLog
from shared.storage import ObjectStore
from tests.support.checkpoint_samples import JOB, entry

NAME = f"{JOB}/checkpoints/step-10"
HOLDER = "deployments/m"
NOW = 1e9


@pytest.fixture(autouse=True)
def committed(store: ObjectStore) -> None:
    for step, accuracy in ((10, 0.9), (20, 0.5)):
        CheckpointRegistry(store, JOB).commit(entry(step, validation_accuracy=accuracy))


def use(store: ObjectStore, name: str = NAME, uid: str = "u1") -> CheckpointEntry:
    with using(store, "spec.checkpoint", name, "deployment", uid, HOLDER, ends_in="GONE") as found:
        return found


def deployment(store: ObjectStore, uid: str, state: str) -> None:
    ResourceLog(store, f"{HOLDER}/log").update(lambda _: {"uid": uid, "state": state})


def test_a_jobs_name_marks_its_best(store: ObjectStore) -> None:
    assert use(store, JOB).step == 10
    assert [one.folder for one in markers(store, NAME)] == [entry(10).folder]
    assert references_of_job(store, JOB, 0.0) == {NAME: [HOLDER]}


def test_the_mark_is_there_before_the_checkpoint_is_final(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best changes while it is marked: the newer best is what is marked in the end."""

    def better_comes(*arguments: object, **values: object) -> None:
        monkeypatch.undo()
        put_marker(*arguments, **values)  # type: ignore[arg-type]
        CheckpointRegistry(store, JOB).commit(entry(30, validation_accuracy=0.99))

    monkeypatch.setattr("shared.checkpoint.references.put_marker", better_comes)

    assert use(store, JOB).step == 30
    assert list(references_of_job(store, JOB, 0.0)) == [f"{JOB}/checkpoints/step-30"]


def test_one_that_is_retired_while_it_is_marked_is_not_found_and_not_marked(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:

    def retired(*arguments: object, **values: object) -> None:
        monkeypatch.undo()
        registry = CheckpointRegistry(store, JOB)
        registry.retire([entry(10)])
        put_marker(*arguments, **values)  # type: ignore[arg-type]

    monkeypatch.setattr("shared.checkpoint.references.put_marker", retired)

    with pytest.raises(NotFound) as refused:
        use(store)
    assert refused.value.fields == [("spec.checkpoint", "does not exist")]
    assert markers(store, NAME) == []


def test_a_refused_user_leaves_no_mark_and_one_whose_outcome_is_unknown_does(store: ObjectStore) -> None:
    def make(error: Exception) -> None:
        with using(store, "f", NAME, "deployment", "u1", HOLDER, ends_in="GONE"):
            raise error

    with pytest.raises(AlreadyExists):
        make(AlreadyExists("taken"))
    assert markers(store, NAME) == []
    with pytest.raises(Unavailable):
        make(Unavailable("no answer"))
    assert live_references(store, NAME, 0.0) == [HOLDER]


def test_a_call_that_is_refused_takes_nothing_from_an_equal_one_that_has_made_its_user_or_does_so(
    store: ObjectStore,
) -> None:
    def refused() -> None:
        with using(store, "f", NAME, "deployment", "u1", HOLDER, ends_in="GONE"):
            raise AlreadyExists("taken")

    with using(store, "f", NAME, "deployment", "u1", HOLDER, ends_in="GONE"):
        with pytest.raises(AlreadyExists):
            refused()
        deployment(store, "u1", "LOADING")
    assert live_references(store, NAME, NOW * 9) == [HOLDER]

    with pytest.raises(AlreadyExists):
        refused()
    assert live_references(store, NAME, NOW * 9) == [HOLDER]
    assert [one.folder for one in markers(store, NAME)] == [entry(10).folder]


def test_a_mark_counts_until_its_resource_has_ended_or_never_came(store: ObjectStore) -> None:
    use(store)
    marked_at = markers(store, NAME)[0].marked_at
    assert live_references(store, NAME, marked_at + REFERENCE_APPEARS_TIMEOUT_S - 1) == [HOLDER]
    assert live_references(store, NAME, marked_at + REFERENCE_APPEARS_TIMEOUT_S + 1) == []
    deployment(store, "u1", "LOADING")
    assert live_references(store, NAME, marked_at + NOW) == [HOLDER]
    deployment(store, "u1", "DELETING")
    assert live_references(store, NAME, marked_at + NOW) == [HOLDER]
    deployment(store, "u1", "GONE")
    assert live_references(store, NAME, 0.0) == []
    deployment(store, "u2", "READY")  # another of its name
    assert live_references(store, NAME, marked_at + NOW) == []


def test_a_training_job_uses_its_first_weights_until_it_is_final(store: ObjectStore) -> None:
    tuner = "trainingJobs/tuner"
    with using(store, "f", NAME, "train", "t1", tuner):
        Jobs(store, "train").create(tuner, JobRecord(uid="t1", name=tuner, spec={}, create_time=0.0, update_time=0.0))
    assert live_references(store, NAME, NOW * 9) == [tuner]

    Jobs(store, "train").transition(tuner, lambda job: fail(job, NotFound("x"), time.time()))
    assert live_references(store, NAME, 0.0) == []


def test_a_released_one_is_free_and_releasing_twice_is_no_error(store: ObjectStore) -> None:
    use(store)
    release(store, NAME, "deployment", "u1")
    release(store, NAME, "deployment", "u1")
    assert references_of_job(store, JOB, 0.0) == {}


def test_keeping_reports_whether_it_is_still_named(store: ObjectStore) -> None:
    assert keep(store, NAME, entry(10).folder, "deployment", "u1", HOLDER, ends_in="GONE")
    assert not keep(store, NAME, "trainingJobs/j/checkpoints/data/other", "deployment", "u1", HOLDER, ends_in="GONE")


def test_nothing_of_a_job_that_is_being_deleted_can_be_used(store: ObjectStore) -> None:
    jobs = Jobs(store, "train")
    jobs.create(JOB, JobRecord(uid="u", name=JOB, spec={}, create_time=0.0, update_time=0.0))
    jobs.transition(JOB, lambda job: fail(job, NotFound("x"), 1.0))
    jobs.transition(JOB, lambda job: request_delete(job, 1.0))

    for name in (JOB, NAME):
        with pytest.raises(FailedPrecondition) as refused:
            use(store, name)
        assert refused.value.specific_reason == "JOB_DELETING"
    assert references_of_job(store, JOB, 0.0) == {}
