"""The service's own DeploymentService on a real store, without Ray, and the `millrace` command that asks it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from click.testing import CliRunner, Result
from grpc import aio

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment
from inference_service.servicer import DeploymentServicer
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc
from millrace_client.cli import millrace
from shared.storage import ObjectStore
from tests.support.grpc_kit import running
from tests.support.inference_server import deployment

REPLICAS = 2


def weighed(name: str, *weights: int, **changes: Any) -> Deployment:
    """READY, with a loaded version for each weight."""
    (first,) = deployment(name).versions
    numbered = (replace(first, number=str(place), weight=weight) for place, weight in enumerate(weights, 1))
    return deployment(name, versions=tuple(numbered), numbers_used=len(weights), **changes)


def commanded(store: ObjectStore, *arguments: str, answer: str | None = None) -> Result:
    """What the command says to a service over the store, of whose versions each has `REPLICAS`; `answer` is typed in
    where it asks."""
    deployments = Deployments(store)
    operations, cluster = DeploymentOperations(store, deployments), Cluster(None)
    manager = DeploymentManager(store, deployments, operations, cluster)
    rollouts = RolloutManager(store, deployments, operations, cluster)
    servicer = DeploymentServicer(manager, rollouts, lambda _deployment: None, lambda *_: REPLICAS)

    def register(server: aio.Server) -> list[str]:
        pb_grpc.add_DeploymentServiceServicer_to_server(servicer, server)
        return ["millrace.inference.v1.DeploymentService"]

    async def main() -> Result:
        async with asyncio.timeout(60), running(register) as kit:
            command = [*arguments, "--inference-address", kit.address]
            return await asyncio.to_thread(CliRunner().invoke, millrace, command, answer)

    result = asyncio.run(main())
    assert "Traceback" not in result.output
    return result
