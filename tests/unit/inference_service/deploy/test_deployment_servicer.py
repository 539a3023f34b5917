"""Watching a deployment and changing its traffic, over a real server and a real store; nothing is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from grpc import aio

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment
from inference_service.domain.rollout_transitions import with_traffic_back
from inference_service.servicer import DeploymentServicer
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc
from millrace.inference.v1 import rollout_pb2
from millrace_client.inference import autoscaling
from shared.errors import DataLoss
from shared.storage import ObjectStore
from tests.support.grpc_kit import call_error, running
from tests.unit.inference_service.deploy.test_registry import remove
from tests.unit.inference_service.wishes import JOB, NAME, creation, load

INVALID = grpc.StatusCode.INVALID_ARGUMENT

Scenario = Callable[[Any], Awaitable[None]]


@pytest.fixture
def ready(manager: DeploymentManager, deployments: Deployments) -> Deployment:
    return load(deployments, manager.create(creation()))


@pytest.fixture
def served(
    store: ObjectStore, manager: DeploymentManager, deployments: Deployments, operations: DeploymentOperations
) -> Callable[[Scenario], None]:
    """Run a scenario with a stub of the service."""

    def run(scenario: Scenario) -> None:
        def register(server: aio.Server) -> list[str]:
            rollouts = RolloutManager(store, deployments, operations, Cluster(None))
            servicer = DeploymentServicer(manager, rollouts, lambda _deployment: None, lambda *_: 2)
            pb_grpc.add_DeploymentServiceServicer_to_server(servicer, server)
            return ["millrace.inference.v1.DeploymentService"]

        async def main() -> None:
            async with asyncio.timeout(240), running(register) as kit:
                await scenario(pb_grpc.DeploymentServiceStub(kit.channel))

        asyncio.run(main())

    return run


def update(*paths: str, name: str = NAME, etag: str = "", **traffic: Any) -> pb.UpdateDeploymentRequest:
    return pb.UpdateDeploymentRequest(
        deployment=pb.Deployment(name=name, etag=etag, traffic=pb.Traffic(**traffic)),
        update_mask=FieldMask(paths=paths),
    )


def rollout(checkpoint: str) -> pb.RolloutRequest:
    spec = rollout_pb2.RolloutSpec(checkpoint=f"{JOB}/checkpoints/{checkpoint}")
    return pb.RolloutRequest(name=NAME, spec=spec)


def test_a_watcher_receives_each_state_and_the_end(
    served: Callable[[Scenario], None],
    deployments: Deployments,
    ready: Deployment,
) -> None:
    async def scenario(stub: Any) -> None:
        watch = stub.WatchDeployment(pb.WatchDeploymentRequest(name=NAME))
        first = await watch.read()
        assert (first.state, first.HasField("rollout")) == (pb.Deployment.STATE_READY, False)
        await stub.Rollout(rollout("c2"))
        assert (await watch.read()).rollout.state == rollout_pb2.Rollout.STATE_LOADING
        load(deployments, deployments.get(NAME))
        shifting = await watch.read()
        assert shifting.rollout.state == rollout_pb2.Rollout.STATE_SHIFTING
        assert dict(shifting.traffic.weights) == {"1": 95, "2": 5}
        remove(deployments, ready)
        while (one := await watch.read()) is not aio.EOF:  # it may go so fast that nobody sees it going
            assert one.state == pb.Deployment.STATE_DELETING

    served(scenario)


def test_watching_what_is_not_there_is_refused(served: Callable[[Scenario], None]) -> None:
    async def scenario(stub: Any) -> None:
        for name, code in ((NAME, grpc.StatusCode.NOT_FOUND), ("digits", INVALID)):
            watch = stub.WatchDeployment(pb.WatchDeploymentRequest(name=name))
            assert (await call_error(watch.read())).code is code

    served(scenario)


@pytest.mark.usefixtures("ready")
def test_only_what_the_mask_names_is_changed(served: Callable[[Scenario], None], deployments: Deployments) -> None:
    async def scenario(stub: Any) -> None:
        await stub.Rollout(rollout("c2"))
        load(deployments, deployments.get(NAME))
        route = pb.HeaderRoute(header="x-canary", value="yes", version="2")
        first = await stub.UpdateDeployment(
            update("traffic.routes", routes=[route], shadow=pb.Shadow(version="2", percent=9))
        )
        assert (list(first.traffic.routes), first.traffic.HasField("shadow")) == ([route], False)
        second = await stub.UpdateDeployment(
            update("traffic.shadow", shadow=pb.Shadow(version="2", percent=9), etag=first.etag)
        )
        assert (list(second.traffic.routes), second.traffic.shadow.percent) == ([route], 9)
        request = update("spec.version_policy", etag=second.etag)
        request.deployment.spec.version_policy.all.SetInParent()
        third = await stub.UpdateDeployment(request)
        assert third.spec.version_policy.WhichOneof("choice") == "all"
        assert list(third.traffic.routes) == [route]
        roll = deployments.get(NAME).rollout
        assert roll is not None
        deployments.transition(NAME, third.uid, lambda before: with_traffic_back(before, roll.uid, DataLoss("x"), 9.0))
        last = await stub.UpdateDeployment(update("traffic.weights", weights={"1": 7}))
        assert dict(last.traffic.weights) == {"1": 7}

    served(scenario)


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.UpdateDeploymentRequest(), INVALID, "deployment"),
        (update(*["traffic.weights"] * 5000), INVALID, "update_mask"),
        (
            update("traffic.weights", weights={str(number): 1 for number in range(5000)}),
            INVALID,
            "deployment.traffic.weights",
        ),
        (update("traffic.routes", routes=[{}] * 5000), INVALID, "deployment.traffic.routes"),
        (update(), INVALID, "update_mask"),
        (update("traffic"), INVALID, "update_mask"),
        (
            update("traffic.weights", name="digits", weights={"1": 1}),
            INVALID,
            "deployment.name",
        ),
        (
            update("traffic.weights", weights={"7": 1}),
            INVALID,
            "deployment.traffic.weights[7]",
        ),
        (update("traffic.weights", name="deployments/nobody", weights={"1": 1}), grpc.StatusCode.NOT_FOUND, ""),
        (update("traffic.weights", etag="old", weights={"1": 1}), grpc.StatusCode.ABORTED, ""),
    ],
)
@pytest.mark.usefixtures("ready")
def test_an_update_that_makes_no_sense_is_refused(
    served: Callable[[Scenario], None], request_: pb.UpdateDeploymentRequest, code: grpc.StatusCode, field: str
) -> None:
    async def scenario(stub: Any) -> None:
        refusal = await call_error(stub.UpdateDeployment(request_))
        assert refusal.code is code
        assert [name for name, _ in refusal.violations] == ([field] if field else [])

    served(scenario)


@pytest.mark.usefixtures("ready")
def test_a_deployment_says_how_many_replicas_run(served: Callable[[Scenario], None]) -> None:
    async def scenario(stub: Any) -> None:
        got = await stub.GetDeployment(pb.GetDeploymentRequest(name=NAME))
        listed = (await stub.ListDeployments(pb.ListDeploymentsRequest())).deployments
        assert [one.versions[0].replicas for one in (got, *listed)] == [2, 2]

    served(scenario)


def test_a_specification_comes_back_with_its_defaults(served: Callable[[Scenario], None]) -> None:
    async def checked(stub: Any, **spec: Any) -> pb.DeploymentSpec:
        request = pb.CreateDeploymentRequest(
            deployment_id="fresh", spec=pb.DeploymentSpec(checkpoint=JOB, **spec), validate_only=True
        )
        deployment = pb.Deployment()
        assert (await stub.CreateDeployment(request)).response.Unpack(deployment)
        assert not deployment.versions[0].HasField("replicas")
        return deployment.spec

    async def scenario(stub: Any) -> None:
        plain = await checked(stub)
        assert (plain.num_replicas, plain.HasField("autoscaling"), plain.HasField("cpus_per_replica")) == (
            1,
            False,
            False,
        )
        scaled = await checked(
            stub, autoscaling=autoscaling(0, 3, scale_down_after_s=7), max_batch_size=8, cpus_per_replica=0.5
        )
        assert scaled.autoscaling == autoscaling(1, 3, rows_per_replica=8, scale_up_after_s=5, scale_down_after_s=7)
        assert (scaled.num_replicas, scaled.cpus_per_replica, scaled.gpus_per_replica) == (0, 0.5, 0)
        again = {field.name: value for field, value in scaled.ListFields() if field.name != "checkpoint"}
        assert await checked(stub, **again) == scaled

    served(scenario)


def test_autoscaling_out_of_range_is_refused_by_field(served: Callable[[Scenario], None]) -> None:
    async def scenario(stub: Any) -> None:
        spec = pb.DeploymentSpec(checkpoint=JOB, num_replicas=2, autoscaling=autoscaling(3, 2), gpus_per_replica=2)
        refusal = await call_error(stub.CreateDeployment(pb.CreateDeploymentRequest(deployment_id="fresh", spec=spec)))
        assert refusal.code is INVALID
        assert [name for name, _ in refusal.violations] == [
            "spec.gpus_per_replica",
            "spec.autoscaling.max_replicas",
            "spec.num_replicas",
        ]

    served(scenario)
