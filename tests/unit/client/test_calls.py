"""Calls across a restart of the service: made again where that is safe, and never where it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import empty_pb2
from google.protobuf.descriptor import ServiceDescriptor

from inference import grpc_service_pb2
from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace.inference.v1 import deployment_service_pb2
from millrace.train.v1 import train_service_pb2, train_service_pb2_grpc
from millrace_client import calls, connect, errors
from millrace_client.calls import READING_STREAMS, READS
from millrace_client.connection import Millrace
from tests.support.fake_servicers import Refusing
from tests.support.grpc_answers import serving, status
from tests.support.restarting_server import RestartingServer, restarting_server

SERVICES: list[ServiceDescriptor] = [
    data_service_pb2.DESCRIPTOR.services_by_name["DataService"],
    train_service_pb2.DESCRIPTOR.services_by_name["TrainService"],
    deployment_service_pb2.DESCRIPTOR.services_by_name["DeploymentService"],
    grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
]
INPUTS = {"x": np.zeros((1, 2), np.float32)}

Call = Callable[[Millrace], object]
SAFE: dict[str, Call] = {
    "GetDataset": lambda client: client.data.get_dataset("datasets/d"),
    "ListDatasets": lambda client: list(client.data.list_datasets()),
    "CreateDataset": lambda client: client.data.create_dataset("d"),
    "GetTrainingJob": lambda client: client.train.get_training_job("trainingJobs/j"),
    "CreateDeployment": lambda client: client.deployments.create_deployment("d", "trainingJobs/j"),
    "ModelReady": lambda client: client.inference.model_ready("m"),
}
UNSAFE: dict[str, Call] = {
    "DeleteDataset": lambda client: client.data.delete_dataset("datasets/d"),
    "CancelTrainingJob": lambda client: client.train.cancel_training_job("trainingJobs/j"),
    "Rollback": lambda client: client.deployments.rollback("deployments/d"),
    "ModelInfer": lambda client: client.inference.infer("m", INPUTS),
}
ALL: dict[str, Call] = {**SAFE, **UNSAFE}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartingServer]:
    with restarting_server(tmp_path) as server:
        yield server


@pytest.fixture
def client(server: RestartingServer) -> Iterator[Millrace]:
    with connect(data=server.address, train=server.address, inference=server.address, timeout_s=240) as client:
        yield client


@pytest.mark.parametrize("method", SAFE)
def test_reads_and_writes_with_a_request_id_ride_out_a_restart_in_the_middle_of_them(
    server: RestartingServer, client: Millrace, method: str
) -> None:
    server.start()
    restart = server.kill_in_the_next_call()
    SAFE[method](client)
    restart.join()
    assert [name for name, _ in server.calls] == [method] * 2
    assert len(set(server.calls)) == 1, "the same request, with the same request id"


@pytest.mark.parametrize("method", UNSAFE)
def test_a_call_that_was_sent_and_may_have_been_done_is_not_made_again(
    server: RestartingServer, client: Millrace, method: str
) -> None:
    server.start()
    restart = server.kill_in_the_next_call()
    with pytest.raises(errors.Unavailable):
        UNSAFE[method](client)
    restart.join()
    assert [name for name, _ in server.calls] == [method]
    UNSAFE[method](client)


@pytest.mark.parametrize("method", ALL)
def test_a_call_that_finds_no_server_is_made_once_that_is_there(
    server: RestartingServer, client: Millrace, method: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(ALL[method], client)
        server.start()
        calling.result()
    assert [name for name, _ in server.calls] == [method]


def test_requests_of_infer_many_that_were_never_sent_wait_for_the_server(
    server: RestartingServer, client: Millrace
) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(lambda: list(client.inference.infer_many("m", [INPUTS] * 5)))
        server.start()
        assert len(calling.result()) == 5
    assert len(server.calls) == 5


class Clock:
    """Takes the place of `time`: no pause takes any time but by it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    return clock


class Ended(grpc.RpcError):
    """A call that has ended with `code`, and no details."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no"

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(("away_s", "error"), [(8.0, errors.Unavailable), (2.0, errors.DeadlineExceeded)])
@pytest.mark.parametrize("kind", ["unary", "send"])
def test_a_call_that_ends_at_its_deadline_says_what_took_most_of_its_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, away_s: float, error: type[errors.MillraceError]
) -> None:
    """The service is away, comes back, and answers nothing."""
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.1)

    def method(_: Any, timeout: float, metadata: Any) -> Any:
        assert metadata
        if clock.now_s < away_s:
            raise Ended(grpc.StatusCode.UNAVAILABLE)
        clock.sleep(timeout)
        raise Ended(grpc.StatusCode.DEADLINE_EXCEEDED)

    request = data_service_pb2.GetDatasetRequest(name="datasets/d")
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        caller = calls.Caller(channel, "127.0.0.1:1")
        make = caller.unary if kind == "unary" else caller.send
        given: Any = request if kind == "unary" else lambda: iter([request])
        with pytest.raises(error):
            make(method, given, resources_pb2.Dataset, timeout_s=10.0)


class NeverSent(Ended):
    """A call that found no connection."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE)

    def details(self) -> str:
        return "failed to connect to all addresses; last error: refused"


@pytest.mark.parametrize("away_s", [8.0, 2.0])
def test_a_write_that_was_sent_at_last_and_not_answered_may_have_been_done(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    """The service is away, comes back, does what it is asked, and answers too late."""
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.1)
    done: list[str] = []

    def method(request: Any, timeout: float, metadata: Any) -> Any:
        assert metadata
        if clock.now_s < away_s:
            raise NeverSent
        done.append(request.name)
        clock.sleep(timeout)
        raise Ended(grpc.StatusCode.DEADLINE_EXCEEDED)

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        caller = calls.Caller(channel, "127.0.0.1:1")
        request = data_service_pb2.DeleteDatasetRequest(name="datasets/d")
        with pytest.raises(errors.DeadlineExceeded, match="the last try was sent and may have been done") as raised:
            caller.unary(method, request, empty_pb2.Empty, timeout_s=10.0)
    assert done == ["datasets/d"]
    assert raised.value.remedy == "find out whether it was done before you try again"
    assert raised.value.request_id


@pytest.mark.parametrize(("away_s", "error"), [(8.0, errors.Unavailable), (2.0, errors.DeadlineExceeded)])
def test_a_prediction_that_is_late_after_an_outage_has_changed_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, away_s: float, error: type[errors.MillraceError]
) -> None:
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.1)

    def method(_: Any, timeout: float, metadata: Any) -> Any:
        assert metadata
        if clock.now_s < away_s:
            raise NeverSent
        clock.sleep(timeout)
        raise Ended(grpc.StatusCode.DEADLINE_EXCEEDED)

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        caller = calls.Caller(channel, "127.0.0.1:1")
        request = grpc_service_pb2.ModelInferRequest(model_name="m")
        with pytest.raises(error) as raised:
            caller.unary(method, request, grpc_service_pb2.ModelInferResponse, timeout_s=10.0)
    assert "may have been done" not in raised.value.message


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("options", [{"timeout_s": 90}, {"reconnect_for_s": 0.3}, {"reconnect_for_s": 0.0}], ids=str)
def test_where_nobody_comes_back_the_call_says_so_when_its_time_is_over(options: dict[str, float]) -> None:
    with connect(data="127.0.0.1:1", **options) as client, pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):  # type: ignore[arg-type]
        client.data.get_dataset("datasets/d")


@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)]
)
def test_whatever_else_a_server_answers_is_raised_at_once(code: grpc.StatusCode) -> None:
    servicer = Counting(status(code, "no"))
    with (
        serving(lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)) as address,
        connect(train=address) as client,
        pytest.raises(errors.MillraceError),
    ):
        client.train.get_training_job("trainingJobs/j")
    assert servicer.count == 1


class Counting(Refusing):
    count = 0

    def GetTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.count += 1
        return super().GetTrainingJob(request, context)


def test_a_message_that_is_too_large_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    too_large = {"x": np.zeros((17 * 2**20, 4), np.uint8)}
    with (
        serving(lambda _: None) as address,
        connect(inference=address) as client,
        pytest.raises(errors.ResourceExhausted),
    ):
        list(client.inference.infer_many("m", [too_large]))
    assert pauses == []


def test_every_method_that_reads_is_known_and_none_that_writes() -> None:
    """A new method must be taken for one or the other on purpose."""
    reads = {
        method.name
        for service in SERVICES
        for method in service.methods
        if method.input_type.name.startswith(READS) and not method.server_streaming
    }
    assert reads == {
        "GetDataset",
        "ListDatasets",
        "GetUpload",
        "GetVersion",
        "ListVersions",
        "PreviewVersion",
        "GetTrainingJob",
        "ListTrainingJobs",
        "ListCheckpoints",
        "GetCoverage",
        "GetClusterUse",
        "GetCodeBundle",
        "ListCodeBundles",
        "SuggestTrainingSpec",
        "ListMetrics",
        "GetSweep",
        "GetImportedWeights",
        "ListSweeps",
        "GetDeployment",
        "ListDeployments",
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
    }


def test_every_stream_of_answers_to_one_request_is_begun_again() -> None:
    streams = {
        service.full_name: {one.name for one in service.methods if one.server_streaming and not one.client_streaming}
        for service in SERVICES
    }
    assert {name: methods for name, methods in streams.items() if methods} == {
        service: set(methods) for service, methods in READING_STREAMS.items()
    }


def test_pauses_double_up_to_a_bound_and_differ_between_clients() -> None:
    bounds = [min(calls.FIRST_PAUSE_S * 2**turn, calls.LONGEST_PAUSE_S) for turn in range(12)]
    clients = [calls.Backoff(), calls.Backoff()]
    pauses = [[backoff.next_s() for _ in bounds] for backoff in clients]
    for one in pauses:
        assert all(bound / 2 <= pause <= bound for bound, pause in zip(bounds, one, strict=True))
    assert pauses[0] != pauses[1]


def test_a_pause_is_no_longer_than_the_caller_s_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    waiting = calls.RetryBudget()
    for _ in range(10):
        waiting.pause_after(errors.Unavailable("away"), at_most_s=0.02)
    assert slept == [0.02] * 10
