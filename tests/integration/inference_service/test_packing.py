"""Models that share one CPU, and what a Ray of one CPU refuses. The GPU is only Ray's word for one: there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.deployments import autoscaling
from shared.settings import StoreSettings
from tests.integration.inference_service.client import eventually
from tests.integration.inference_service.conftest import Stack, running_stack
from tests.support.ray_head import ray_head
from tests.support.refusals import refusal_of, refused

JOB = "trainingJobs/digits"
IMAGE = np.zeros((1, 28, 28), np.uint8)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """On one CPU."""
    folder = tmp_path_factory.mktemp("packing")
    with (
        ray_head(num_cpus=1, num_gpus=1) as head,
        running_stack(head, StoreSettings(url=(folder / "store").as_uri()), folder) as running,
    ):
        yield running


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
        ({"threads_per_replica": 2}, "spec.threads_per_replica"),
        ({"cpus_per_replica": 1.5}, "spec.cpus_per_replica"),
        ({"cpus_per_replica": 0.4, "num_replicas": 3}, "spec.num_replicas"),
        ({"cpus_per_replica": 0.4, "autoscaling": autoscaling(3, 4)}, "spec.autoscaling.min_replicas"),
        ({"cpus_per_replica": 0.1, "gpus_per_replica": 0.6, "num_replicas": 2}, "spec.num_replicas"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_what_no_node_could_hold_is_refused_by_field_and_leaves_nothing(
    small: Stack, spec: dict[str, Any], field: str, validate_only: bool
) -> None:
    request = pb.CreateDeploymentRequest(
        deployment_id="large", spec=pb.DeploymentSpec(checkpoint=JOB, **spec), validate_only=validate_only
    )
    refusal = refused(lambda: small.client.deployments.CreateDeployment(request, timeout=10))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NEVER_FITS")
    assert list(refusal.fields) == [field]
    assert "large" not in small.store.folders("deployments")


def test_a_gpu_that_torch_cannot_use_fails_the_deployment_and_says_so(small: Stack) -> None:
    operation = small.client.wait(small.client.create("fast", JOB, cpus_per_replica=0.5, gpus_per_replica=0.25))
    error = refusal_of(operation.error)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GPU_CANNOT_BE_USED")
    assert "gpus_per_replica=0" in error.message
    small.client.delete("deployments/fast")
    eventually(lambda: not small.head.processes("ray::ServeReplica"), 60, "its replica is gone")
