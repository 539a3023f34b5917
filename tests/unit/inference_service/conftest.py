"""A store with two checkpoints of one job, and what keeps deployments in it."""

from __future__ import annotations

import pytest

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment
from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.unit.inference_service.wishes import JOB, creation, load


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    """With `c1`, the better one, and `c2` of `trainingJobs/j`."""
    made = open_store(file_store)
    registry = CheckpointRegistry(made, JOB)
    registry.fence(1)
    for number, accuracy in ((1, 0.9), (2, 0.8)):
        registry.commit(
            CheckpointEntry(
                name=f"{JOB}/checkpoints/c{number}",
                folder=f"{JOB}/checkpoints/data/c{number}",
                manifest_sha256=f"{number}" * 64,
                step=number,
                epoch=number,
                attempt=1,
                size_bytes=1,
                create_time=1.0,
                metrics={"validation_accuracy": accuracy},
            )
        )
    return made


@pytest.fixture
def deployments(store: ObjectStore) -> Deployments:
    return Deployments(store)


@pytest.fixture
def operations(store: ObjectStore, deployments: Deployments) -> DeploymentOperations:
    return DeploymentOperations(store, deployments)


@pytest.fixture
def manager(store: ObjectStore, deployments: Deployments, operations: DeploymentOperations) -> DeploymentManager:
    return DeploymentManager(store, deployments, operations, Cluster(None))


@pytest.fixture
def rollouts(store: ObjectStore, deployments: Deployments, operations: DeploymentOperations) -> RolloutManager:
    return RolloutManager(store, deployments, operations, Cluster(None))


@pytest.fixture
def ready(manager: DeploymentManager, deployments: Deployments) -> Deployment:
    """`deployments/digits`, of the job's best checkpoint, c1."""
    return load(deployments, manager.create(creation()))
