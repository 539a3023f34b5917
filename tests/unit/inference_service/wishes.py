"""What tests of deployments and of their rollouts ask for, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from inference_service.deploy.deployments import Deployments
from inference_service.domain.deployment import Creation, Deployment, check_spec
from inference_service.domain.rollout import (
    RolloutChange,
    RolloutLimits,
    RolloutStep,
    check_plan,
)
from inference_service.domain.rollout_transitions import with_version_loaded
from inference_service.domain.signature import Signature, TensorSpec
from tests.support.inference_server import IMAGES

JOB = "trainingJobs/j"
NAME = "deployments/digits"
DATASET = "datasets/digits/versions/v1"
DIGITS = replace(IMAGES, raw=(TensorSpec("image", "UINT8", (-1, 28, 28)),))


def creation(deployment_id: str = "digits", **changes: Any) -> Creation:
    spec = check_spec(
        checkpoint=JOB,
        num_replicas=0,
        threads_per_replica=0,
        max_batch_size=0,
        max_batch_delay_s=None,
        max_queued_rows=0,
    )
    wanted = Creation(deployment_id=deployment_id, spec=spec, request_id="", digest="d", validate_only=False)
    return replace(wanted, **changes)


def load(
    deployments: Deployments, deployment: Deployment, signature: Signature = IMAGES, dataset_version: str = ""
) -> Deployment:
    """Its newest version has been loaded, of a model that was trained on that dataset version."""
    version = replace(deployment.versions[-1], signature=signature, dataset_version=dataset_version)
    after = deployments.transition(
        deployment.name, deployment.uid, lambda before: with_version_loaded(before, version, time.time())
    )
    assert after is not None
    return after


def request(checkpoint: str = f"{JOB}/checkpoints/c2", **changes: Any) -> RolloutChange:
    limits = changes.pop("limits", RolloutLimits())
    steps = changes.pop("steps", [RolloutStep(10, 0.0), RolloutStep(100, 0.0)])
    comparison = changes.pop("comparison", None)
    plan = check_plan(checkpoint=checkpoint, steps=steps, limits=limits, comparison=comparison)
    made = RolloutChange(name=NAME, plan=plan, etag="", request_id="", digest="d", validate_only=False)
    return replace(made, **changes)


def weights(deployment: Deployment) -> dict[str, int]:
    return {version.number: version.weight for version in deployment.versions}
