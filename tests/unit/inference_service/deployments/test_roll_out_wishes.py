"""Wishes for roll-outs in a real store: what is written, whose checkpoints are marked, what is taken back."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from inference_service.deploy.capacity import Cluster
from inference_service.deploy.deployments import DeploymentOperations, Deployments
from inference_service.deploy.rollout_manager import RollOutManager
from inference_service.domain.deployment import Deployment, TrafficChange, VersionPolicy
from inference_service.domain.rollout_transitions import with_next_step
from shared.checkpoint import CheckpointRegistry
from shared.checkpoint import users as checkpoint_users
from shared.checkpoint.users import users_of_job
from shared.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound, ResourceExhausted
from shared.storage import ObjectStore
from tests.unit.inference_service.wishes import JOB, NAME, load, weights, wish

LONG_AFTER = 1e12


@pytest.mark.usefixtures("ready")
def test_a_roll_out_is_durable_and_keeps_its_checkpoint(
    store: ObjectStore, deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    made = roll_outs.begin(wish())
    assert deployments.get(NAME) == made
    assert made.roll_out is not None
    assert made.versions[1].checkpoint == f"{JOB}/checkpoints/c2"
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 2)}
    operation = operations.get(made.roll_out.operation)
    assert (operation.name, operation.done) == (made.roll_out.operation, False)
    assert made.roll_out.operation.removeprefix("operations/") in operations.list_ids()
    assert operations.get(made.operation).done


@pytest.mark.usefixtures("ready")
def test_a_repeated_request_gets_its_own_roll_out_even_after_a_later_one(
    deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    request_id = str(uuid.uuid4())
    first = roll_outs.begin(wish(request_id=request_id))
    assert first.roll_out is not None
    assert roll_outs.begin(wish(request_id=request_id)) == first
    back = roll_outs.back(NAME, "")
    second = roll_outs.begin(wish(request_id=str(uuid.uuid4())))
    assert second.roll_out is not None
    again = roll_outs.begin(wish(request_id=request_id))
    assert again.roll_out == back.roll_out
    assert operations.get(first.roll_out.operation).error.message.endswith("rolled back by wish")
    assert not operations.get(second.roll_out.operation).done
    assert len(deployments.get(NAME).versions) == 3
    with pytest.raises(AlreadyExists):
        roll_outs.begin(wish(request_id=request_id, digest="another"))


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_roll_out_whose_two_versions_never_fit_side_by_side_is_refused_and_leaves_nothing(
    store: ObjectStore, deployments: Deployments, operations: DeploymentOperations, validate_only: bool
) -> None:
    before = {info.key for info in store.list()}
    cluster = Cluster({"CPU": 1.0})
    with pytest.raises(FailedPrecondition, match="2 versions") as error:
        RollOutManager(store, deployments, operations, cluster).begin(wish(validate_only=validate_only))
    assert error.value.specific_reason == "NEVER_FITS"
    assert [field for field, _ in error.value.fields] == ["name"]
    assert {info.key for info in store.list()} == before
    RollOutManager(store, deployments, operations, Cluster({"CPU": 2.0})).begin(wish(validate_only=validate_only))


@pytest.mark.usefixtures("ready")
def test_checking_only_and_what_is_refused_write_no_roll_out_and_take_no_mark_away(
    store: ObjectStore, roll_outs: RollOutManager
) -> None:
    before = {info.key for info in store.list()}
    checked = roll_outs.begin(wish(validate_only=True))
    assert weights(checked) == {"1": 100, "2": 0}
    for refused, error in (
        (wish(etag="old"), Conflict),
        (wish(name="deployments/nobody"), NotFound),
        (wish("trainingJobs/nobody"), NotFound),
    ):
        with pytest.raises(error):
            roll_outs.begin(refused)
    assert {info.key for info in store.list()} == before
    roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    with pytest.raises(FailedPrecondition, match="rolling out"):
        roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


def test_a_wish_that_loses_a_race_leaves_the_mark_of_a_version_that_has_it(
    store: ObjectStore,
    deployments: Deployments,
    roll_outs: RollOutManager,
    ready: Deployment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roll_outs.begin(wish())
    monkeypatch.setattr(deployments, "find", lambda _name: ready)  # as read before the other wish was written
    for number, users in ((1, [NAME]), (2, [NAME])):
        with pytest.raises(FailedPrecondition, match="rolling out"):
            roll_outs.begin(wish(f"{JOB}/checkpoints/c{number}"))
        assert users_of_job(store, JOB, LONG_AFTER)[f"{JOB}/checkpoints/c{number}"] == users


@pytest.mark.usefixtures("ready")
def test_a_request_that_comes_again_while_its_first_call_is_at_work_gets_the_same_roll_out(
    deployments: Deployments,
    operations: DeploymentOperations,
    roll_outs: RollOutManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request_id = str(uuid.uuid4())
    record, again = operations.record_roll_out, []

    def meanwhile(operation: str, there: Deployment) -> None:
        monkeypatch.setattr(operations, "record_roll_out", record)
        record(operation, there)
        again.append(roll_outs.begin(wish(request_id=request_id)))

    monkeypatch.setattr(operations, "record_roll_out", meanwhile)
    first = roll_outs.begin(wish(request_id=request_id))
    assert again == [first]
    assert len(deployments.get(NAME).versions) == 2
    assert roll_outs.begin(wish(request_id=request_id)) == first


@pytest.mark.usefixtures("ready")
def test_a_store_that_is_full_takes_no_mark_of_a_served_version(
    store: ObjectStore, operations: DeploymentOperations, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ResourceExhausted("the store is full")

    monkeypatch.setattr(operations, "record_roll_out", full)
    with pytest.raises(ResourceExhausted):
        roll_outs.begin(wish(f"{JOB}/checkpoints/c1"))
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [NAME]}


@pytest.mark.usefixtures("ready")
def test_a_best_that_changes_while_it_is_marked_takes_no_mark_of_a_served_version(
    store: ObjectStore, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = checkpoint_users.put_marker

    def better_meanwhile(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(checkpoint_users, "put_marker", mark)
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

    monkeypatch.setattr(checkpoint_users, "put_marker", better_meanwhile)
    assert roll_outs.begin(wish(JOB)).versions[1].checkpoint == f"{JOB}/checkpoints/c3"
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 3)}


@pytest.mark.usefixtures("ready")
def test_a_service_that_dies_before_the_roll_out_is_written_keeps_its_checkpoint_for_a_while_only(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Deployment:
        raise KeyboardInterrupt

    monkeypatch.setattr(deployments, "wish", dies)
    with pytest.raises(KeyboardInterrupt):
        roll_outs.begin(wish())
    c1, c2 = (f"{JOB}/checkpoints/c{number}" for number in (1, 2))
    assert users_of_job(store, JOB, time.time()) == {c1: [NAME], c2: [NAME]}
    assert users_of_job(store, JOB, time.time() + 3600) == {c1: [NAME]}


@pytest.mark.usefixtures("ready")
def test_cancelling_the_operation_rolls_back(
    deployments: Deployments, operations: DeploymentOperations, roll_outs: RollOutManager
) -> None:
    made = load(deployments, roll_outs.begin(wish()))
    assert made.roll_out is not None
    assert weights(made) == {"1": 90, "2": 10}
    operations.cancel(made.roll_out.operation)
    assert weights(deployments.get(NAME)) == {"1": 100, "2": 0}
    assert deployments.get(NAME).etag != made.etag
    assert operations.get(made.roll_out.operation).error.message.endswith("was cancelled")


@pytest.mark.usefixtures("ready")
def test_what_a_policy_keeps_that_had_retired_is_marked_again(
    store: ObjectStore, deployments: Deployments, roll_outs: RollOutManager
) -> None:
    made = load(deployments, roll_outs.begin(wish()))
    assert made.roll_out is not None
    for step in (0, 1):
        next_step = partial(with_next_step, uid=made.roll_out.uid, step=step, now_s=time.time())
        deployments.transition(NAME, made.uid, next_step)
    ended = deployments.get(NAME)
    assert [one.number for one in ended.versions if one.retired_at is not None] == ["1"]
    deployments.release(ended, ended.versions[:1])  # by what lets it go, and has read the log before the wish
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c2": [NAME]}
    kept = roll_outs.change(NAME, TrafficChange(policy=VersionPolicy(count=2)), "")
    assert [one.number for one in kept.versions if one.retired_at is None] == ["1", "2"]
    assert users_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c{number}": [NAME] for number in (1, 2)}
