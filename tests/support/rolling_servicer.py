"""An inference service that knows one deployment, of which version 2 is being rolled out."""

from __future__ import annotations

from typing import Any

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc
from millrace.inference.v1 import rollout_pb2
from tests.support.grpc_answers import status

Rollout = rollout_pb2.Rollout
OPERATION = "operations/rollout-x"


class Rolling(pb_grpc.DeploymentServiceServicer, operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """One deployment, whose rollout is a step further at each poll, and ends in the given state."""

    def __init__(self, final: Any = Rollout.STATE_SUCCEEDED) -> None:
        self.requests: list[Any] = []
        self._final = final
        self._polls = 0

    def Rollout(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:
        self.requests.append(request)
        return self._operation(Rollout.STATE_LOADING, 0)

    def UpdateDeployment(self, request: Any, context: grpc.ServicerContext) -> pb.Deployment:
        self.requests.append(request)
        return self._deployment(Rollout.STATE_SUCCEEDED, 0, "1")

    def Rollback(self, request: Any, context: grpc.ServicerContext) -> pb.Deployment:
        self.requests.append(request)
        return self._deployment(Rollout.STATE_ROLLED_BACK, 0, "1")

    def GetDeployment(self, request: Any, context: grpc.ServicerContext) -> pb.Deployment:
        return self._deployment(Rollout.STATE_LOADING, 0, "1")

    def WaitOperation(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:
        self._polls += 1
        if self._polls <= 4:
            return self._operation(Rollout.STATE_SHIFTING, (self._polls - 1) // 2)
        return self._operation(self._final, 1)

    def _deployment(self, state: Any, step: int, serving: str) -> pb.Deployment:
        made = pb.Deployment(name="deployments/digits", lineage={"model_version": serving, "checkpoint": "c"})
        made.rollout.CopyFrom(Rollout(state=state, version="2", operation=OPERATION, step=step))
        for percent in (5, 100):
            made.rollout.spec.steps.add(percent=percent).interval.seconds = 60
        return made

    def _operation(self, state: Any, step: int) -> operations_pb2.Operation:
        deployment = self._deployment(state, step, "2")
        operation = operations_pb2.Operation(name=OPERATION)
        operation.metadata.Pack(pb.RolloutMetadata(deployment=deployment.name, rollout=deployment.rollout))
        if state == Rollout.STATE_SUCCEEDED:
            operation.done = True
            operation.response.Pack(deployment)
        elif state == Rollout.STATE_ROLLED_BACK:
            operation.done = True
            operation.error.CopyFrom(status(grpc.StatusCode.FAILED_PRECONDITION, "version 2: too slow"))
        return operation
