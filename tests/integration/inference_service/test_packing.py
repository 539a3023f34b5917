"""Models that share one CPU, and what a node refuses that can never hold it. The GPU is only Ray's word for one: there
is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.inference import autoscaling
from shared.settings import StoreSettings
from tests.integration.inference_service.client import eventually
from tests.integration.inference_service.conftest import CPUS, Stack, running_stack
from tests.support.ray_head import ray_head
from tests.support.refusals import refusal_of, refused

JOB = "trainingJobs/digits"
REPLICA = "ray::ServeReplica"
IMAGE = np.zeros((1, 28, 28), np.uint8)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Stack]:
    """On one CPU."""
    with (
        ray_head(num_cpus=1) as head,
        running_stack(head, StoreSettings(url=(tmp_path / "store").as_uri()), tmp_path) as running,
    ):
        yield running


@pytest.mark.long  # with a head and a service of its own
def test_two_models_share_one_cpu(small: Stack) -> None:
    client = small.client
    for operation in [client.create(model, JOB, cpus_per_replica=0.5) for model in ("left", "right")]:
        assert client.wait(operation).HasField("response")
    for model in ("left", "right"):
        assert client.infer(model, IMAGE).model_name == model
    for model in ("left", "right"):
        client.delete(f"deployments/{model}")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"threads_per_replica": CPUS + 1}, "spec.threads_per_replica"),
        ({"cpus_per_replica": CPUS + 0.5}, "spec.cpus_per_replica"),
        ({"cpus_per_replica": 0.4 * CPUS, "num_replicas": 3}, "spec.num_replicas"),
        ({"cpus_per_replica": 0.4 * CPUS, "autoscaling": autoscaling(3, 4)}, "spec.autoscaling.min_replicas"),
        ({"cpus_per_replica": 0.1, "gpus_per_replica": 0.6, "num_replicas": 2}, "spec.num_replicas"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_replica_that_no_node_could_hold_is_refused_by_field_and_leaves_nothing(
    stack: Stack, spec: dict[str, Any], field: str, validate_only: bool
) -> None:
    request = pb.CreateDeploymentRequest(
        deployment_id="large", spec=pb.DeploymentSpec(checkpoint=JOB, **spec), validate_only=validate_only
    )
    refusal = refused(lambda: stack.client.deployments.CreateDeployment(request, timeout=60))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NEVER_SCHEDULABLE")
    assert list(refusal.fields) == [field]
    assert "large" not in stack.store.folders("deployments")


def test_a_gpu_that_torch_cannot_use_fails_the_deployment_and_says_so(stack: Stack) -> None:
    before = set(stack.head.processes(REPLICA))
    operation = stack.client.wait(stack.client.create("fast", JOB, cpus_per_replica=0.5, gpus_per_replica=0.25))
    error = refusal_of(operation.error)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GPU_CANNOT_BE_USED")
    assert "gpus_per_replica=0" in error.message
    stack.client.delete("deployments/fast")
    eventually(lambda: set(stack.head.processes(REPLICA)) <= before, 180, "its replica is gone")
