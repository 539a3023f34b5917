"""An inference service on which every deployment is READY at once."""

from __future__ import annotations

from typing import Any

import grpc
from google.longrunning import operations_pb2

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc


class Deploying(pb_grpc.DeploymentServiceServicer):
    """Remembers what is to be deployed."""

    def __init__(self) -> None:
        self.specs: list[pb.DeploymentSpec] = []

    def CreateDeployment(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:
        self.specs.append(request.spec)
        operation = operations_pb2.Operation(name="operations/deploy-x", done=True)
        operation.metadata.Pack(pb.DeploymentMetadata(deployment="deployments/m"))
        operation.response.Pack(pb.Deployment(name="deployments/m"))
        return operation
