"""Creating, reading and deleting deployments, and what is refused."""

from __future__ import annotations

import json
import urllib.request
import uuid
from typing import Any

import grpc
import numpy as np
import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.checkpoint.format import WEIGHTS
from tests.integration.inference_service.checkpoints import write, write_job_without_checkpoint
from tests.integration.inference_service.client import durable, eventually
from tests.integration.inference_service.conftest import Stack
from tests.support.refusals import refusal_of, refused

JOB = "trainingJobs/digits"
IMAGES = np.zeros((1, 28, 28), np.uint8)


def applications(stack: Stack) -> str:
    """What Ray Serve itself says that it runs."""
    with urllib.request.urlopen(f"{stack.head.dashboard}/api/serve/applications/", timeout=60) as answer:
        found = json.load(answer)
    return " ".join(found["applications"])


def leaves_nothing(stack: Stack, deployment_id: str) -> bool:
    """No such deployment, and no folder of it."""
    name = f"deployments/{deployment_id}"
    missing = refused(lambda: stack.client.get(name)).code is grpc.StatusCode.NOT_FOUND
    return missing and deployment_id not in stack.store.folders("deployments")


def test_a_deployment_shows_its_defaults_its_lineage_and_its_operation(stack: Stack, deployed: pb.Deployment) -> None:
    entry = stack.checkpoint.entry
    assert deployed.name == "deployments/digits"
    assert deployed.state == pb.Deployment.STATE_READY
    assert (deployed.spec.num_replicas, deployed.spec.threads_per_replica) == (1, 1)
    assert deployed.spec.max_batch_delay.ToMicroseconds() == 2000
    assert deployed.lineage.checkpoint == entry.name
    assert deployed.lineage.checkpoint_sha256 == entry.manifest_sha256
    assert deployed.lineage.dataset_version == "datasets/digits/versions/v1"
    assert durable(stack.client.get(deployed.name)) == deployed
    operation = stack.client.wait(operations_pb2.Operation(name=deployed.operation))
    metadata = pb.DeploymentMetadata()
    assert operation.metadata.Unpack(metadata)
    assert metadata.deployment == deployed.name
    listed = stack.client.operations.ListOperations(operations_pb2.ListOperationsRequest(name="operations"))
    assert deployed.operation in [one.name for one in listed.operations]
    assert deployed.uid in applications(stack)


def test_a_job_means_its_best_checkpoint_at_the_time_of_the_call(stack: Stack) -> None:
    job = "trainingJobs/two"
    best = write(stack.store, "c1", job=job, accuracy=0.8, weights=b"")
    write(stack.store, "c2", job=job, accuracy=0.7, weights=b"")
    checked = stack.client.deployments.CreateDeployment(
        pb.CreateDeploymentRequest(deployment_id="checked", spec=pb.DeploymentSpec(checkpoint=job), validate_only=True)
    )
    deployment = pb.Deployment()
    assert checked.response.Unpack(deployment)
    assert deployment.lineage.checkpoint == best.entry.name
    assert leaves_nothing(stack, "checked")


@pytest.mark.parametrize(
    ("deployment_id", "spec", "field"),
    [
        ("", {"checkpoint": JOB}, "deployment_id"),
        ("Digits", {"checkpoint": JOB}, "deployment_id"),
        ("a" * 64, {"checkpoint": JOB}, "deployment_id"),
        ("../x", {"checkpoint": JOB}, "deployment_id"),
        ("fine", {"checkpoint": ""}, "spec.checkpoint"),
        ("fine", {"checkpoint": "datasets/digits"}, "spec.checkpoint"),
        ("fine", {"checkpoint": f"{JOB}/checkpoints/"}, "spec.checkpoint"),
        ("fine", {"checkpoint": JOB, "num_replicas": 65}, "spec.num_replicas"),
        ("fine", {"checkpoint": JOB, "num_replicas": -1}, "spec.num_replicas"),
        ("fine", {"checkpoint": JOB, "threads_per_replica": 1000}, "spec.threads_per_replica"),
        ("fine", {"checkpoint": JOB, "max_batch_size": 2000}, "spec.max_batch_size"),
        ("fine", {"checkpoint": JOB, "max_batch_delay": Duration(seconds=2)}, "spec.max_batch_delay"),
        ("fine", {"checkpoint": JOB, "max_batch_delay": Duration(seconds=-1)}, "spec.max_batch_delay"),
        ("fine", {"checkpoint": JOB, "max_batch_delay": Duration(seconds=10**15)}, "spec.max_batch_delay"),
        ("fine", {"checkpoint": JOB, "max_queued_rows": -1}, "spec.max_queued_rows"),
        ("fine", {"checkpoint": JOB, "request_id": "not-a-uuid"}, "request_id"),
    ],
)
def test_a_malformed_creation_is_refused_by_field_and_leaves_nothing(
    stack: Stack, deployment_id: str, spec: dict[str, Any], field: str
) -> None:
    refusal = refused(lambda: stack.client.create(deployment_id, **spec))
    assert (refusal.code, list(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert "fine" not in stack.store.folders("deployments")


def test_a_creation_without_a_spec_is_refused(stack: Stack) -> None:
    request = pb.CreateDeploymentRequest(deployment_id="fine")
    assert refused(lambda: stack.client.deployments.CreateDeployment(request)).fields.keys() == {"spec"}


@pytest.mark.parametrize(
    "missing", ["trainingJobs/nobody", "trainingJobs/nobody/checkpoints/c1", f"{JOB}/checkpoints/c9"]
)
def test_a_job_or_checkpoint_that_is_not_there_is_not_found(stack: Stack, missing: str) -> None:
    refusal = refused(lambda: stack.client.create("fine", missing))
    assert refusal.code is grpc.StatusCode.NOT_FOUND
    assert "does not exist" in refusal.message
    assert leaves_nothing(stack, "fine")


def test_a_job_without_a_checkpoint_cannot_be_deployed_yet(stack: Stack) -> None:
    write_job_without_checkpoint(stack.store, "trainingJobs/young")
    refusal = refused(lambda: stack.client.create("fine", "trainingJobs/young"))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHECKPOINT")
    assert leaves_nothing(stack, "fine")


@pytest.mark.usefixtures("deployed")
def test_a_taken_id_is_refused(stack: Stack) -> None:
    assert refused(lambda: stack.client.create("digits", JOB)).code is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    "name", ["", "deployments", "deployments/", "deployments/UP", "datasets/digits", "deployments/a/b"]
)
def test_a_malformed_name_is_refused(stack: Stack, name: str) -> None:
    for call in (
        lambda: stack.client.get(name),
        lambda: stack.client.deployments.DeleteDeployment(pb.DeleteDeploymentRequest(name=name)),
    ):
        refusal = refused(call)
        assert (refusal.code, list(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["name"])


def test_an_absent_deployment_is_not_found(stack: Stack) -> None:
    delete = pb.DeleteDeploymentRequest(name="deployments/nobody")
    operation = operations_pb2.GetOperationRequest(name="operations/deploy-nobody")
    for call in (
        lambda: stack.client.get("deployments/nobody"),
        lambda: stack.client.deployments.DeleteDeployment(delete),
        lambda: stack.client.operations.GetOperation(operation),
    ):
        assert refused(call).code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("fields", "field"), [({"page_size": -1}, "page_size"), ({"page_token": "???"}, "page_token")])
def test_a_bad_page_is_refused(stack: Stack, fields: dict[str, Any], field: str) -> None:
    request = pb.ListDeploymentsRequest(**fields)
    assert refused(lambda: stack.client.deployments.ListDeployments(request)).fields.keys() == {field}


def test_a_request_id_gives_the_first_answer_again_and_refuses_another_body(stack: Stack) -> None:
    request_id = str(uuid.uuid4())
    first = stack.client.create("twice", JOB, request_id=request_id)
    try:
        again = stack.client.create("twice", JOB, request_id=request_id)
        assert again.name == first.name
        refusal = refused(lambda: stack.client.create("twice", JOB, num_replicas=2, request_id=request_id))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        refusal = refused(lambda: stack.client.create("thrice", JOB, request_id=request_id))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        assert leaves_nothing(stack, "thrice")
    finally:
        stack.client.delete("deployments/twice")


def test_a_loading_model_is_unavailable_until_its_operation_is_done_and_gone_after_its_deletion(stack: Stack) -> None:
    operation = stack.client.create("brief", JOB)
    refusal = refused(lambda: stack.client.infer("brief", IMAGES))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")
    before = pb.Deployment()
    assert stack.client.wait(operation).response.Unpack(before)
    assert stack.client.infer("brief", IMAGES).model_version == "1"

    stale = pb.DeleteDeploymentRequest(name=before.name, etag="stale")
    assert refused(lambda: stack.client.deployments.DeleteDeployment(stale)).code is grpc.StatusCode.ABORTED
    stack.client.deployments.DeleteDeployment(pb.DeleteDeploymentRequest(name=before.name, etag=before.etag))
    assert refused(lambda: stack.client.infer("brief", IMAGES)).code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.NOT_FOUND,
    )

    def gone() -> bool:
        return refused(lambda: stack.client.infer("brief", IMAGES)).code is grpc.StatusCode.NOT_FOUND

    eventually(gone, 180, "the model is gone")
    assert before.uid not in applications(stack)
    assert before.name not in [
        one.name for one in stack.client.deployments.ListDeployments(pb.ListDeploymentsRequest()).deployments
    ]
    # What the operation made is history, and its id is free for another.
    assert stack.client.wait(operation).HasField("response")
    again = stack.client.create("brief", JOB)
    try:
        assert again.name != operation.name
    finally:
        stack.client.delete("deployments/brief")
    cancelled = refusal_of(stack.client.wait(again).error)
    assert (cancelled.code, cancelled.reason) == (grpc.StatusCode.CANCELLED, "DELETED")


def test_a_damaged_checkpoint_fails_with_data_loss_and_leaves_nothing_in_serve(stack: Stack) -> None:
    """Other ways in which a checkpoint cannot be served are in test_replica.py: they end the same."""
    job = "trainingJobs/damaged"
    written = write(stack.store, job=job, weights=b"some weights")
    stack.store.put(f"{written.entry.folder}/{WEIGHTS}", b"same wei\0hts")
    operation = stack.client.wait(stack.client.create("failing", job))
    error = refusal_of(operation.error)
    assert error.code is grpc.StatusCode.DATA_LOSS
    assert WEIGHTS in error.message
    deployment = stack.client.get("deployments/failing")
    assert deployment.state == pb.Deployment.STATE_FAILED
    assert refusal_of(deployment.error).code is grpc.StatusCode.DATA_LOSS
    eventually(lambda: deployment.uid not in applications(stack), 180, "its application is gone")
    stack.client.delete("deployments/failing")
