"""What every server of ours has: health, reflection, request ids."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import connect, errors
from shared.settings import StoreSettings
from tests.support.service_process import running_service, store_environ
from tests.support.training import TrainStack


def test_the_server_says_that_it_serves(file_stack: TrainStack) -> None:
    with grpc.insecure_channel(file_stack.service.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]

        assert check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING


def test_a_stranger_learns_the_contract_by_reflection(file_stack: TrainStack) -> None:
    with grpc.insecure_channel(file_stack.service.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)

        services = set(database.get_services())
        file = database.FindFileContainingSymbol("millrace.train.v1.TrainService")

    assert {"millrace.train.v1.TrainService", "grpc.health.v1.Health"} <= services
    assert [method.name for method in file.service[0].method] == [
        "CreateTrainingJob",
        "SuggestTrainingSpec",
        "GetTrainingJob",
        "ListTrainingJobs",
        "CancelTrainingJob",
        "WatchTrainingJob",
        "SuspendTrainingJob",
        "ResumeTrainingJob",
        "DeleteTrainingJob",
        "ListCheckpoints",
        "GetCheckpoint",
        "ImportCheckpoint",
        "GetImportedWeights",
        "GetCoverage",
        "ListMetrics",
        "StreamLogs",
        "GetClusterUse",
        "CreateSweep",
        "GetSweep",
        "ListSweeps",
        "CancelSweep",
        "DeleteSweep",
        "CreateCodeBundle",
        "GetCodeBundle",
        "ListCodeBundles",
        "DeleteCodeBundle",
    ]


def test_a_callers_request_id_comes_back(file_stack: TrainStack) -> None:
    call = file_stack.client.rpc.ListTrainingJobs.with_call
    _, answered = call(pb.ListTrainingJobsRequest(), timeout=60, metadata=(("x-request-id", "mine-1"),))

    assert ("x-request-id", "mine-1") in [(one.key, one.value) for one in answered.trailing_metadata()]


def test_with_a_token_it_answers_those_who_bring_it(file_store: StoreSettings, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-the-tests")
    token_file.chmod(0o600)
    environ = {**store_environ(file_store), "RAY_ADDRESS": "", "MILLRACE_TOKEN_FILE": str(token_file)}
    with running_service("train_service", environ, tmp_path / "service.log") as service:
        with connect(train=service.address, token="") as stranger:
            with pytest.raises(errors.Unauthenticated, match="demands a token"):
                stranger.train.get_training_job("trainingJobs/j")
            with pytest.raises(errors.Unauthenticated, match="demands a token"):
                list(stranger.train.watch_training_job("trainingJobs/j"))
        with connect(train=service.address, token="a-token-of-the-tests") as client:
            assert list(client.train.list_training_jobs()) == []
            with pytest.raises(errors.NotFound):
                list(client.train.watch_training_job("trainingJobs/j"))
