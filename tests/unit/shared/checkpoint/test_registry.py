"""Which checkpoints count, which is the best, and what a name means."""

from __future__ import annotations

import math

import pytest

from shared.checkpoint import CheckpointRegistry, resolve
from shared.checkpoint.registry import best, latest
from shared.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.jobs import JobRecord, Jobs
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.support.checkpoint_samples import JOB, entry


def make_job(store: ObjectStore) -> None:
    Jobs(store, "train").create(JOB, JobRecord(uid="u", name=JOB, spec={}, create_time=1.0, update_time=1.0))


def test_committed_checkpoints_are_listed_oldest_first(store: ObjectStore) -> None:
    registry = CheckpointRegistry(store, JOB)
    assert registry.entries() == []

    for step in (10, 20, 30):
        registry.commit(entry(step))

    assert [one.step for one in CheckpointRegistry(store, JOB).entries()] == [10, 20, 30]
    assert CheckpointRegistry(store, JOB).entries()[1] == entry(20)


def test_a_checkpoint_of_the_same_position_is_replaced(store: ObjectStore) -> None:
    registry = CheckpointRegistry(store, JOB)
    registry.commit(entry(10))
    registry.commit(entry(20))

    registry.commit(entry(10, attempt=2))

    assert [(one.step, one.attempt) for one in registry.entries()] == [(20, 1), (10, 2)]


def test_once_a_later_attempt_has_opened_it_an_earlier_one_cannot_commit(store: ObjectStore) -> None:
    zombie = CheckpointRegistry(store, JOB)
    assert zombie.fence(1) == []
    zombie.commit(entry(10))

    found = CheckpointRegistry(store, JOB).fence(2)

    assert found == [entry(10)]
    with pytest.raises(StaleAttempt):
        zombie.commit(entry(20))
    with pytest.raises(StaleAttempt):
        zombie.fence(1)
    assert CheckpointRegistry(store, JOB).entries() == [entry(10)]
    CheckpointRegistry(store, JOB).commit(entry(20, attempt=2))


def test_a_late_clearing_leaves_the_checkpoints_of_the_job_that_was_made_anew(store: ObjectStore) -> None:
    """A new job's attempts go on behind those of the deleted one."""
    registry = CheckpointRegistry(store, JOB)
    registry.commit(entry(10))
    registry.clear(2)
    assert registry.entries() == []

    registry.commit(entry(20, attempt=2))
    registry.clear(2)
    assert registry.entries() == [entry(20, attempt=2)]


def test_fencing_twice_by_the_same_attempt_changes_nothing(store: ObjectStore) -> None:
    CheckpointRegistry(store, JOB).fence(1)
    CheckpointRegistry(store, JOB).commit(entry(10))

    assert CheckpointRegistry(store, JOB).fence(1) == [entry(10)]


def test_the_latest_is_the_furthest_on_and_not_the_last_written() -> None:
    assert latest([]) is None
    assert latest([entry(10), entry(30), entry(20)]) == entry(30)


def test_the_best_has_the_highest_accuracy_and_of_equals_the_later() -> None:
    good = [entry(10, validation_accuracy=0.9), entry(20, validation_accuracy=0.95), entry(30)]

    assert best(good) == good[1]
    assert best([*good, entry(40, validation_accuracy=0.95)]) == entry(40, validation_accuracy=0.95)
    assert best([*good, entry(40, validation_accuracy=0.1)]) == good[1]
    assert best([]) is None


def test_without_any_measured_the_best_is_the_furthest_on() -> None:
    assert best([entry(10), entry(20, training_loss=0.1)]) == entry(20, training_loss=0.1)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_an_accuracy_that_is_no_number_is_never_the_best(first: bool) -> None:
    diverged, good = entry(30, validation_accuracy=math.nan), entry(10, validation_accuracy=0.2)

    assert best([diverged, good] if first else [good, diverged]) == good
    assert best([diverged]) == diverged


def test_a_checkpoints_name_means_itself_and_a_jobs_name_its_best(store: ObjectStore) -> None:
    make_job(store)
    registry = CheckpointRegistry(store, JOB)
    registry.commit(entry(10, validation_accuracy=0.9))
    registry.commit(entry(20, validation_accuracy=0.5))

    assert resolve(store, "checkpoint", f"{JOB}/checkpoints/step-20").step == 20
    assert resolve(store, "checkpoint", JOB).step == 10


@pytest.mark.parametrize(
    "name",
    ["", "trainingJobs", "trainingJobs/J", "datasets/d", f"{JOB}/checkpoints", f"{JOB}/checkpoints/", f"{JOB}/x/c"],
    ids=repr,
)
def test_resolve_refuses_a_malformed_checkpoint_name_with_its_field(store: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolve(store, "spec.checkpoint", name)

    assert refused.value.fields[0][0] == "spec.checkpoint"


def test_a_missing_job_and_a_missing_checkpoint_have_different_errors(store: ObjectStore) -> None:
    for name in (JOB, f"{JOB}/checkpoints/step-10"):
        with pytest.raises(NotFound, match=f"{JOB} does not exist"):
            resolve(store, "checkpoint", name)

    make_job(store)
    with pytest.raises(FailedPrecondition) as refused:
        resolve(store, "checkpoint", JOB)
    assert refused.value.specific_reason == "NO_CHECKPOINT"
    with pytest.raises(NotFound, match="checkpoints/step-10"):
        resolve(store, "checkpoint", f"{JOB}/checkpoints/step-10")

    CheckpointRegistry(store, JOB).commit(entry(10))
    with pytest.raises(NotFound, match="checkpoints/step-99"):
        resolve(store, "checkpoint", f"{JOB}/checkpoints/step-99")
