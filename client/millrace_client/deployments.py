"""Deployments: which checkpoints are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.longrunning import operations_pb2

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc
from millrace_client.calls import Caller, new_request_id
from millrace_client.operations import Operation
from millrace_client.paging import every_page


class DeploymentClient:
    """Names: `deployments/{m}`; `m` is the model's name in the Open Inference Protocol."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = deployment_service_pb2_grpc.DeploymentServiceStub(caller.channel)

    def create_deployment(self, deployment_id: str, checkpoint: str, **fields: Any) -> Operation[pb.Deployment]:
        """Starts to serve `trainingJobs/{j}/checkpoints/{c}`, or the best one of `trainingJobs/{j}`.

        `fields` are further fields of `DeploymentSpec`, e.g. `num_replicas=2`, `max_batch_size=64`.
        """
        request = pb.CreateDeploymentRequest(
            deployment_id=deployment_id,
            spec=pb.DeploymentSpec(checkpoint=checkpoint, **fields),
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.CreateDeployment, request, operations_pb2.Operation)
        return Operation(self._caller, operation, pb.Deployment, pb.DeploymentMetadata)

    def get_deployment(self, name: str) -> pb.Deployment:
        return self._caller.unary(self._stub.GetDeployment, pb.GetDeploymentRequest(name=name), pb.Deployment)

    def list_deployments(self) -> Iterator[pb.Deployment]:
        """All of them, in the order of their names."""
        request = pb.ListDeploymentsRequest()
        return every_page(self._caller, self._stub.ListDeployments, request, "deployments")

    def delete_deployment(self, name: str) -> None:
        """Takes it out of service; requests in flight are answered first."""
        request = pb.DeleteDeploymentRequest(name=name)
        self._caller.unary(self._stub.DeleteDeployment, request, pb.DeleteDeploymentResponse)
