"""Two frontend processes on one port: one is killed under load, or hangs, and the other goes on answering."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from inference import grpc_service_pb2 as oip
from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.client import Client, environment, eventually, infer_request
from tests.support.faults import Faults
from tests.support.frontends_of import frontends_of, listens
from tests.support.process_states import stop_process
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import ServiceProcess, running_service

# A Ray head, two frontends, and each of them again.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

IMAGE = np.random.default_rng(4).integers(0, 256, (1, 28, 28), dtype=np.uint8)
DEADLINE_S = 60.0
CLIENTS = 8


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(num_cpus=4) as started:
        yield started


@pytest.fixture(scope="module")
def service(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("inference-frontends")
    settings = StoreSettings(url=(folder / "store").as_uri())
    for checkpoint in ("c1", "c2"):
        write(open_store(settings), checkpoint)
    environ = {**environment(settings, head.address), "MILLRACE_FRONTENDS": "2"}
    with running_service("inference_service", environ, folder / "service.log") as running:
        with Client(running.address) as client:
            client.deploy("digits", "trainingJobs/digits/checkpoints/c1")
        yield running


def frontends(service: ServiceProcess) -> dict[int, int]:
    """The pids by their numbers."""
    return frontends_of(service.pid)


class Asking:
    """Each client has a connection of its own, so that the kernel gives some to each frontend.

    It opens a new one now and then.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.answers: Counter[str] = Counter()
        self.errors: list[grpc.RpcError] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        wanted = self.answers.total() + more
        eventually(lambda: self.answers.total() >= wanted, 180, f"{more} more answers")

    def _run(self) -> None:
        while not self._stop.is_set():
            with Client(self._address) as client:
                try:
                    for _ in range(20):
                        answer = client.inference.ModelInfer(infer_request("digits", IMAGE), timeout=DEADLINE_S)
                        self.answers[str(answer.model_version)] += 1
                except grpc.RpcError as error:
                    self.errors.append(error)


def wait_until_all_know(service: ServiceProcess) -> None:
    """A frontend reads what another has written within half a second."""

    def all_answer() -> bool:
        for _ in range(10):
            with Client(service.address) as client:
                try:
                    client.infer("digits", IMAGE)
                except grpc.RpcError:
                    return False
        return True

    eventually(lambda: all(listens(service.pid, number) for number in (0, 1)), 180, "both frontends listen")
    eventually(all_answer, 180, "both frontends answer")


@pytest.mark.parametrize("victim", [1, 0])
def test_a_frontend_killed_under_load_costs_only_the_calls_that_it_had(
    head: RayHead, service: ServiceProcess, victim: int, faults: Faults
) -> None:
    wait_until_all_know(service)
    before = frontends(service)
    replicas = set(head.processes("ray::ServeReplica"))
    with Asking(service.address) as asking:
        asking.wait_for(200)
        assert asking.errors == []
        os.kill(before[victim], signal.SIGKILL)
        faults.add("SIGKILL frontend", "under load", "file")
        eventually(lambda: frontends(service).get(victim) not in (None, before[victim]), 180, "another is started")
        asking.wait_for(100)  # by the one that is left
        eventually(lambda: listens(service.pid, victim), 180, "the other listens")
        # Twenty connections that the kernel shares out among both.
        asking.wait_for(400)
    # What it was at work on breaks with its connections, one call a client at most, and each can tell and ask again.
    # Nobody has begun a call whose connection was never made: the kernel closes the port after those that there are.
    assert {error.code() for error in asking.errors} <= {grpc.StatusCode.UNAVAILABLE}
    never_connected = [error for error in asking.errors if "Failed to connect" in str(error.details())]
    assert len(asking.errors) - len(never_connected) <= CLIENTS
    assert len(never_connected) <= CLIENTS
    assert frontends(service)[1 - victim] == before[1 - victim]
    # The one that comes reconciles again, and takes nothing away.
    assert set(head.processes("ray::ServeReplica")) == replicas


def counted(service: ServiceProcess) -> int:
    """The rows that were answered, as the frontend of this connection reports them."""
    with Client(service.address) as client:
        reported = client.inference.ModelStatistics(oip.ModelStatisticsRequest(name="digits"), timeout=DEADLINE_S)
    return int(sum(one.inference_count for one in reported.model_stats))


def test_every_frontend_reports_what_all_have_answered(service: ServiceProcess) -> None:
    wait_until_all_know(service)
    with Asking(service.address) as asking:
        asking.wait_for(200)

    def all_tell_the_same() -> bool:
        requests = {counted(service) for _ in range(10)}
        return len(requests) == 1 and requests.pop() >= 200

    eventually(all_tell_the_same, 180, "each to have left its numbers")  # once a second


def test_a_frontend_that_hangs_is_killed_and_another_has_its_place(service: ServiceProcess, faults: Faults) -> None:
    wait_until_all_know(service)
    before = frontends(service)
    stop_process(before[0])  # the one that leads
    faults.add("SIGSTOP frontend", "idle", "file")
    eventually(lambda: frontends(service).get(0) not in (None, before[0]), 150, "another is started")
    wait_until_all_know(service)
    assert frontends(service)[1] == before[1]


def test_a_rollout_moves_the_traffic_of_all_frontends_and_no_request_is_dropped(service: ServiceProcess) -> None:
    wait_until_all_know(service)
    with Client(service.address) as client, Asking(service.address) as asking:
        asking.wait_for(50)
        spec = rollout_pb2.RolloutSpec(checkpoint="trainingJobs/digits/checkpoints/c2")
        spec.steps.add(percent=50).interval.seconds = 3
        spec.steps.add(percent=100)
        request = pb.RolloutRequest(name="deployments/digits", spec=spec)
        assert client.wait(client.deployments.Rollout(request, timeout=60)).HasField("response")
        eventually(lambda: [one.number for one in client.get("deployments/digits").versions] == ["2"], 180, "1 is gone")
        with Asking(service.address) as later:
            later.wait_for(200)
    assert set(later.answers) == {"2"}
    assert asking.errors == later.errors == []
