"""Which checkpoints of programs are deployed, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Creation, State
from shared.checkpoint.references import references_of_job
from shared.errors import FailedPrecondition, InvalidArgument
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.checkpoint_exports import BUNDLE, commit_program
from tests.unit.inference_service.wishes import JOB, NAME, creation, load, request

TRUSTED = OwnCode(is_trusted=True)


@pytest.fixture
def trusting(store: ObjectStore, deployments: Deployments, operations: DeploymentOperations) -> DeploymentManager:
    return DeploymentManager(store, deployments, operations, Cluster(None), TRUSTED)


def of(checkpoint: str, predictor: str = "", **changes: Any) -> Creation:
    made = creation(**changes)
    return replace(made, spec=replace(made.spec, checkpoint=checkpoint, predictor=predictor))


def test_a_programs_checkpoint_is_deployed_where_own_code_is_trusted(
    store: ObjectStore, trusting: DeploymentManager
) -> None:
    entry = commit_program(store)
    made = trusting.create(of(entry.name, "serve:Predictor"))
    (version,) = made.versions
    assert (made.state, made.spec.predictor, version.code_bundle) == (State.LOADING, "serve:Predictor", BUNDLE)
    assert references_of_job(store, JOB, 0) == {entry.name: [NAME]}


@pytest.mark.parametrize("validate_only", [True, False])
def test_a_predictor_is_refused_where_own_code_is_off(
    store: ObjectStore, manager: DeploymentManager, validate_only: bool
) -> None:
    entry = commit_program(store)
    with pytest.raises(FailedPrecondition, match="MILLRACE_OWN_CODE=trusted") as refused:
        manager.create(of(entry.name, validate_only=validate_only))
    assert refused.value.specific_reason == "OWN_CODE_OFF"
    assert references_of_job(store, JOB, 0) == {}


@pytest.mark.parametrize("validate_only", [True, False])
def test_a_predictor_of_a_model_is_refused_by_its_field(trusting: DeploymentManager, validate_only: bool) -> None:
    with pytest.raises(InvalidArgument, match=r"spec\.predictor.*leave it out"):
        trusting.create(of(f"{JOB}/checkpoints/c1", "serve:Predictor", validate_only=validate_only))


def test_a_rollout_to_a_programs_checkpoint_needs_the_same_trust(
    store: ObjectStore, trusting: DeploymentManager, deployments: Deployments, operations: DeploymentOperations
) -> None:
    first, second = commit_program(store, 1), commit_program(store, 2)
    load(deployments, trusting.create(of(first.name)))
    with pytest.raises(FailedPrecondition, match="MILLRACE_OWN_CODE=trusted"):
        RolloutManager(store, deployments, operations, Cluster(None)).begin(request(second.name))
    rolled = RolloutManager(store, deployments, operations, Cluster(None), TRUSTED).begin(request(second.name))
    assert [one.checkpoint for one in rolled.versions] == [first.name, second.name]
