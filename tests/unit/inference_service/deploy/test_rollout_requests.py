"""Wishes for rollouts in a real store: what is written, whose checkpoints are marked, what is taken back."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from inference_service.deploy.deployments import Cluster, DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment, TrafficChange, VersionPolicy
from inference_service.domain.rollout_transitions import with_next_step
from shared.checkpoint import CheckpointRegistry
from shared.checkpoint import references as checkpoint_references
from shared.checkpoint.references import references_of_job
from shared.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound, ResourceExhausted
from shared.storage import ObjectStore
from tests.unit.inference_service.wishes import JOB, NAME, load, request, weights

LONG_AFTER = 1e12


@pytest.mark.usefixtures("ready")
def test_a_rollout_is_durable_and_keeps_its_checkpoint(
    store: ObjectStore, deployments: Deployments, operations: DeploymentOperations, rollouts: RolloutManager
) -> None:
    made = rollouts.begin(request())
    assert deployments.get(NAME) == made
    assert made.rollout is not None
    assert made.versions[1].checkpoint == f"{JOB}/checkpoints/c2"
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 2)}
    operation = operations.get(made.rollout.operation)
    assert (operation.name, operation.done) == (made.rollout.operation, False)
    assert made.rollout.operation.removeprefix("operations/") in operations.ids_after("", 10)
    assert operations.get(made.operation).done


@pytest.mark.usefixtures("ready")
def test_a_repeated_request_gets_its_own_rollout_even_after_a_later_one(
    deployments: Deployments, operations: DeploymentOperations, rollouts: RolloutManager
) -> None:
    request_id = str(uuid.uuid4())
    first = rollouts.begin(request(request_id=request_id))
    assert first.rollout is not None
    assert rollouts.begin(request(request_id=request_id)) == first
    back = rollouts.back(NAME, "")
    second = rollouts.begin(request(request_id=str(uuid.uuid4())))
    assert second.rollout is not None
    again = rollouts.begin(request(request_id=request_id))
    assert again.rollout == back.rollout
    assert operations.get(first.rollout.operation).error.message.endswith("rolled back on request")
    assert not operations.get(second.rollout.operation).done
    assert len(deployments.get(NAME).versions) == 3
    with pytest.raises(AlreadyExists):
        rollouts.begin(request(request_id=request_id, digest="another"))


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_rollout_whose_two_versions_never_fit_side_by_side_is_refused_and_leaves_nothing(
    store: ObjectStore, deployments: Deployments, operations: DeploymentOperations, validate_only: bool
) -> None:
    before = {info.key for info in store.list()}
    cluster = Cluster({"CPU": 1.0})
    with pytest.raises(FailedPrecondition, match="2 versions") as error:
        RolloutManager(store, deployments, operations, cluster).begin(request(validate_only=validate_only))
    assert error.value.specific_reason == "NEVER_SCHEDULABLE"
    assert [field for field, _ in error.value.fields] == ["name"]
    assert {info.key for info in store.list()} == before
    RolloutManager(store, deployments, operations, Cluster({"CPU": 2.0})).begin(request(validate_only=validate_only))


@pytest.mark.usefixtures("ready")
def test_checking_only_and_what_is_refused_write_no_rollout_and_take_no_mark_away(
    store: ObjectStore, rollouts: RolloutManager
) -> None:
    before = {info.key for info in store.list()}
    checked = rollouts.begin(request(validate_only=True))
    assert weights(checked) == {"1": 100, "2": 0}
    for refused, error in (
        (request(etag="old"), Conflict),
        (request(name="deployments/nobody"), NotFound),
        (request("trainingJobs/nobody"), NotFound),
    ):
        with pytest.raises(error):
            rollouts.begin(refused)
    assert {info.key for info in store.list()} == before
    rollouts.begin(request(f"{JOB}/checkpoints/c1"))
    with pytest.raises(FailedPrecondition, match="rolling out"):
        rollouts.begin(request(f"{JOB}/checkpoints/c1"))
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


def test_a_request_that_loses_a_race_leaves_the_mark_of_a_version_that_has_it(
    store: ObjectStore,
    deployments: Deployments,
    rollouts: RolloutManager,
    ready: Deployment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts.begin(request())
    monkeypatch.setattr(deployments, "find", lambda _name: ready)  # as read before the other wish was written
    for number, references in ((1, [NAME]), (2, [NAME])):
        with pytest.raises(FailedPrecondition, match="rolling out"):
            rollouts.begin(request(f"{JOB}/checkpoints/c{number}"))
        assert references_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c{number}"] == references


@pytest.mark.usefixtures("ready")
def test_a_request_that_comes_again_while_its_first_call_is_at_work_gets_the_same_rollout(
    deployments: Deployments,
    operations: DeploymentOperations,
    rollouts: RolloutManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request_id = str(uuid.uuid4())
    record, again = operations.record_rollout, []

    def meanwhile(operation: str, there: Deployment) -> None:
        monkeypatch.setattr(operations, "record_rollout", record)
        record(operation, there)
        again.append(rollouts.begin(request(request_id=request_id)))

    monkeypatch.setattr(operations, "record_rollout", meanwhile)
    first = rollouts.begin(request(request_id=request_id))
    assert again == [first]
    assert len(deployments.get(NAME).versions) == 2
    assert rollouts.begin(request(request_id=request_id)) == first


@pytest.mark.usefixtures("ready")
def test_a_store_that_is_full_takes_no_mark_of_a_served_version(
    store: ObjectStore, operations: DeploymentOperations, rollouts: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ResourceExhausted("the store is full")

    monkeypatch.setattr(operations, "record_rollout", full)
    with pytest.raises(ResourceExhausted):
        rollouts.begin(request(f"{JOB}/checkpoints/c1"))
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


@pytest.mark.usefixtures("ready")
def test_a_best_that_changes_while_it_is_marked_takes_no_mark_of_a_served_version(
    store: ObjectStore, rollouts: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = checkpoint_references.put_marker

    def better_meanwhile(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(checkpoint_references, "put_marker", mark)
        mark(*arguments, **named)
        registry = CheckpointRegistry(store, JOB)
        best = next(one for one in registry.entries() if one.name.endswith("c2"))
        registry.commit(
            replace(
                best,
                name=f"{JOB}/checkpoints/c3",
                folder=f"{JOB}/checkpoints/data/c3",
                step=3,
                metrics={"validation_accuracy": 0.99},
            )
        )

    monkeypatch.setattr(checkpoint_references, "put_marker", better_meanwhile)
    assert rollouts.begin(request(JOB)).versions[1].checkpoint == f"{JOB}/checkpoints/c3"
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 3)}


@pytest.mark.usefixtures("ready")
def test_a_service_that_dies_before_the_rollout_is_written_keeps_its_checkpoint_for_a_while_only(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Deployment:
        raise KeyboardInterrupt

    monkeypatch.setattr(deployments, "request", dies)
    with pytest.raises(KeyboardInterrupt):
        rollouts.begin(request())
    c1, c2 = (f"{JOB}/checkpoints/c{number}" for number in (1, 2))
    assert references_of_job(store, JOB, time.time()) == {c1: [NAME], c2: [NAME]}
    assert references_of_job(store, JOB, time.time() + 3600) == {c1: [NAME]}


@pytest.mark.usefixtures("ready")
def test_cancelling_the_operation_rolls_back(
    deployments: Deployments, operations: DeploymentOperations, rollouts: RolloutManager
) -> None:
    made = load(deployments, rollouts.begin(request()))
    assert made.rollout is not None
    assert weights(made) == {"1": 90, "2": 10}
    operations.cancel(made.rollout.operation)
    assert weights(deployments.get(NAME)) == {"1": 100, "2": 0}
    assert deployments.get(NAME).etag != made.etag
    assert operations.get(made.rollout.operation).error.message.endswith("was cancelled")


@pytest.mark.usefixtures("ready")
def test_a_retired_version_that_a_policy_keeps_is_marked_again(
    store: ObjectStore, deployments: Deployments, rollouts: RolloutManager
) -> None:
    made = load(deployments, rollouts.begin(request()))
    assert made.rollout is not None
    for step in (0, 1):
        next_step = partial(with_next_step, uid=made.rollout.uid, step=step, now_s=time.time())
        deployments.transition(NAME, made.uid, next_step)
    ended = deployments.get(NAME)
    assert [one.number for one in ended.versions if one.retired_at is not None] == ["1"]
    deployments.release(ended, ended.versions[:1])  # by what lets it go, and has read the log before the wish
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}
    kept = rollouts.change(NAME, TrafficChange(policy=VersionPolicy(count=2)), "")
    assert [one.number for one in kept.versions if one.retired_at is None] == ["1", "2"]
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 2)}
