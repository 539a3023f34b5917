"""The inference service loses processes: itself, a replica under load, all of Ray. It serves the same again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest

from shared.settings import StoreSettings
from shared.storage import open_store
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.client import Array, Client, environment, eventually, infer_request, outputs
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.timeout(600)  # a Ray head, two replicas, and all of it again

IMAGE = np.random.default_rng(4).integers(0, 256, (1, 28, 28), dtype=np.uint8)
DEADLINE_S = 5.0
CLIENTS = 8
EXIT_RAY_LOST = 75


class Process(ServiceProcess):
    """A service whose end can be waited for."""

    def exit_status(self, within_s: float) -> int:
        assert self._process is not None
        return self._process.wait(within_s)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(num_cpus=4) as started:
        yield started


@pytest.fixture(scope="module")
def service(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("inference-faults")
    settings = StoreSettings(url=(folder / "store").as_uri())
    write(open_store(settings))
    process = Process("inference_service", environment(settings, head.address), folder / "service.log")
    try:
        process.start()
        yield process
    finally:
        if process.is_running():
            process.stop()


@pytest.fixture(scope="module")
def client(service: Process) -> Iterator[Client]:
    """With `deployments/digits` on two replicas."""
    with Client(service.address) as made:
        made.deploy("digits", "trainingJobs/digits", num_replicas=2)
        yield made


@contextmanager
def supervised(service: Process) -> Iterator[None]:
    """Starts the service again whenever it ends, as its supervisor does."""
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(0.2):
            if not service.is_running():
                with suppress(RuntimeError):  # it ended again, or had no Ray to be well with
                    service.start()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        yield
    finally:
        over.set()
        supervisor.join()


def logits(client: Client) -> Array:
    return outputs(client.infer("digits", IMAGE))["logits"]


def wait_until_served(client: Client) -> Array:
    def served() -> Array | None:
        try:
            return logits(client)
        except grpc.RpcError:
            return None

    return eventually(served, 180, "the model answers again")


class Load:
    """Clients that ask without a pause, each call with a deadline, and note every error."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self.answers = 0
        self.errors: list[grpc.RpcError] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Returns after so many more answers."""
        wanted = self.answers + more
        eventually(lambda: self.answers >= wanted or bool(self.errors), 120, f"{more} more answers")

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                self._client.inference.ModelInfer(infer_request("digits", IMAGE), timeout=DEADLINE_S)
                self.answers += 1
            except grpc.RpcError as error:
                self.errors.append(error)


def test_a_replica_killed_under_load_costs_no_client_an_answer(head: RayHead, client: Client) -> None:
    replicas = set(head.processes("ray::ServeReplica"))
    assert len(replicas) == 2
    with Load(client) as load:
        load.wait_for(50)
        victim = min(replicas)
        os.kill(victim, signal.SIGKILL)
        load.wait_for(50)
        eventually(
            lambda: len(set(head.processes("ray::ServeReplica")) - {victim}) == 2, 120, "a new replica is started"
        )
        load.wait_for(50)
    assert load.errors == []


def test_a_killed_service_started_again_serves_the_same_replicas(
    head: RayHead, service: Process, client: Client
) -> None:
    before, expected = client.get("deployments/digits"), wait_until_served(client)
    replicas = head.processes("ray::ServeReplica")
    service.kill()
    service.start()
    assert wait_until_served(client).tobytes() == expected.tobytes()
    assert client.get("deployments/digits") == before
    assert set(head.processes("ray::ServeReplica")) == set(replicas)


def test_a_service_told_to_stop_exits_cleanly_and_leaves_the_replicas_alone(
    head: RayHead, service: Process, client: Client
) -> None:
    replicas = head.processes("ray::ServeReplica")
    assert service.stop() == 0
    assert "SIGTERM received" not in service.log.read_text()
    assert set(head.processes("ray::ServeReplica")) == set(replicas)
    service.start()
    wait_until_served(client)


@pytest.mark.chaos
def test_all_of_ray_killed_ends_the_service_and_a_new_head_serves_the_same(
    head: RayHead, service: Process, client: Client
) -> None:
    expected = wait_until_served(client)
    before = client.get("deployments/digits")
    head.kill()
    assert service.exit_status(within_s=90) == EXIT_RAY_LOST
    with supervised(service):
        eventually(lambda: _answers(client), 60, "Get is answered without Ray")
        assert client.get("deployments/digits") == before
        assert not client.is_healthy()
        with ray_head(num_cpus=4, port=int(head.address.rpartition(":")[2])):
            assert wait_until_served(client).tobytes() == expected.tobytes()
            assert client.get("deployments/digits") == before


def _answers(client: Client) -> bool:
    try:
        client.get("deployments/digits")
    except grpc.RpcError:
        return False
    return True
