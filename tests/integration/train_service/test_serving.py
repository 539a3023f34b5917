"""What every server of ours has: health, reflection, request ids."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from millrace.train.v1 import train_service_pb2 as pb
from tests.support.training import TrainStack


def test_the_server_says_that_it_serves(file_stack: TrainStack) -> None:
    with grpc.insecure_channel(file_stack.service.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]

        assert check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING


def test_a_stranger_learns_the_contract_by_reflection(file_stack: TrainStack) -> None:
    with grpc.insecure_channel(file_stack.service.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)

        services = set(database.get_services())
        file = database.FindFileContainingSymbol("millrace.train.v1.TrainService")

    assert {"millrace.train.v1.TrainService", "grpc.health.v1.Health"} <= services
    assert [method.name for method in file.service[0].method] == [
        "CreateTrainingJob",
        "GetTrainingJob",
        "ListTrainingJobs",
        "CancelTrainingJob",
        "WatchTrainingJob",
        "SuspendTrainingJob",
        "ResumeTrainingJob",
        "DeleteTrainingJob",
        "ListCheckpoints",
        "GetCoverage",
        "ListMetrics",
        "StreamLogs",
        "GetClusterUse",
        "CreateSweep",
        "GetSweep",
        "ListSweeps",
        "CancelSweep",
        "DeleteSweep",
    ]


def test_a_callers_request_id_comes_back(file_stack: TrainStack) -> None:
    call = file_stack.client.rpc.ListTrainingJobs.with_call
    _, answered = call(pb.ListTrainingJobsRequest(), timeout=30, metadata=(("x-request-id", "mine-1"),))

    assert ("x-request-id", "mine-1") in [(one.key, one.value) for one in answered.trailing_metadata()]
