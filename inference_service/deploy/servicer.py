"""`millrace.inference.v1.DeploymentService`: which checkpoints are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.longrunning import operations_pb2
from grpc import aio

from inference_service.deploy.convert import (
    change_from_proto,
    creation_from_proto,
    deployment_to_proto,
    rollout_change_from_proto,
)
from inference_service.deploy.deployments import (
    DeploymentManager,
    checked_operation,
    checked_rollout_operation,
    operation_of,
    rollout_operation_of,
)
from inference_service.deploy.rollout_manager import RolloutManager
from inference_service.domain.deployment import Deployment, ModelVersion
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc

POLL_INTERVAL_S = 0.5

Context = aio.ServicerContext[Any, Any]


class DeploymentServicer(pb_grpc.DeploymentServiceServicer):
    """Serves `DeploymentService`.

    `changed` is called with each deployment whose log was written, so that the change takes effect at once. `replicas`
    returns a version's present replicas, None if unknown.
    """

    def __init__(
        self,
        manager: DeploymentManager,
        rollouts: RolloutManager,
        changed: Callable[[Deployment], None],
        replicas: Callable[[Deployment, ModelVersion], int | None],
    ) -> None:
        self._manager = manager
        self._rollouts = rollouts
        self._changed = changed
        self._replicas = replicas

    async def CreateDeployment(self, request: pb.CreateDeploymentRequest, context: Context) -> operations_pb2.Operation:
        deployment = await asyncio.to_thread(self._manager.create, creation_from_proto(request))
        if request.validate_only:
            return checked_operation(deployment)
        self._changed(deployment)
        return operation_of(deployment)

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Context) -> pb.Deployment:
        return self._as_message(await asyncio.to_thread(self._manager.get, request.name))

    async def WatchDeployment(
        self, request: pb.WatchDeploymentRequest, context: Context
    ) -> AsyncIterator[pb.Deployment]:
        poll = await asyncio.to_thread(self._manager.follow, request.name)
        last = None
        while (now := await asyncio.to_thread(poll)) is not None:
            message = self._as_message(now)
            if message != last:
                last = message
                yield message
            await asyncio.sleep(POLL_INTERVAL_S)

    async def ListDeployments(self, request: pb.ListDeploymentsRequest, context: Context) -> pb.ListDeploymentsResponse:
        found, token = await asyncio.to_thread(self._manager.page, request.page_size, request.page_token)
        return pb.ListDeploymentsResponse(deployments=map(self._as_message, found), next_page_token=token)

    async def DeleteDeployment(
        self, request: pb.DeleteDeploymentRequest, context: Context
    ) -> pb.DeleteDeploymentResponse:
        self._changed(await asyncio.to_thread(self._manager.delete, request.name, request.etag))
        return pb.DeleteDeploymentResponse()

    async def Rollout(self, request: pb.RolloutRequest, context: Context) -> operations_pb2.Operation:
        deployment = await asyncio.to_thread(self._rollouts.begin, rollout_change_from_proto(request))
        if request.validate_only:
            return checked_rollout_operation(deployment)
        # If the request is repeated after its roll-out has ended, nothing changes.
        if deployment.rollout is not None and deployment.rollout.under_way:
            self._changed(deployment)
        return rollout_operation_of(deployment)

    async def UpdateDeployment(self, request: pb.UpdateDeploymentRequest, context: Context) -> pb.Deployment:
        deployment = await asyncio.to_thread(self._rollouts.change, *change_from_proto(request))
        self._changed(deployment)
        return self._as_message(deployment)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.Deployment:
        deployment = await asyncio.to_thread(self._rollouts.back, request.name, request.etag)
        self._changed(deployment)
        return self._as_message(deployment)

    def _as_message(self, deployment: Deployment) -> pb.Deployment:
        return deployment_to_proto(deployment, self._replicas)
