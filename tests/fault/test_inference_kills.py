"""The inference service loses a replica or Serve's controller under load, or all of Ray. It serves the same again.

That it loses itself, or a replica that it asks over a socket, is in tests/integration/inference_service/test_kills.py.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.client import (
    Array,
    Client,
    assert_same_answer,
    durable,
    environment,
    eventually,
    infer_request,
    outputs,
)
from tests.support.asking import Load, kill_a_replica_under_load
from tests.support.faults import Faults
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import ServiceProcess

# A Ray head, two replicas, and all of it again.
pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]

IMAGE = np.random.default_rng(4).integers(0, 256, (1, 28, 28), dtype=np.uint8)
# The claim is that calls are answered, not how soon: on a busy machine a batch that is sent again waits its turn.
DEADLINE_S = 60.0
CLIENTS = 8
REPLICA = "ray::ServeReplica"
CONTROLLER = "ray::ServeController"
EXIT_RAY_LOST = 75


class Process(ServiceProcess):
    """A service whose end can be waited for."""

    def exit_status(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(num_cpus=4) as started:
        yield started


@pytest.fixture(scope="module")
def service(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("inference-faults")
    settings = StoreSettings(url=(folder / "store").as_uri())
    for checkpoint in ("c1", "c2"):
        write(open_store(settings), checkpoint)
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
        made.deploy("digits", "trainingJobs/digits/checkpoints/c1", num_replicas=2)
        yield made


@contextmanager
def supervised(service: Process) -> Iterator[None]:
    """Start the service again whenever it ends, as its supervisor does."""
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


def ask(client: Client) -> str:
    """The version that answers."""
    return str(client.inference.ModelInfer(infer_request("digits", IMAGE), timeout=DEADLINE_S).model_version)


def is_shifting(client: Client) -> bool:
    return client.get("deployments/digits").rollout.state == rollout_pb2.Rollout.STATE_SHIFTING


def running_replicas(head: RayHead) -> set[int]:
    """The processes of those that Serve's controller itself calls RUNNING; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"{head.dashboard}/api/serve/applications/", timeout=60) as answer:
            applications = json.load(answer)["applications"].values()
    except OSError:
        return set()
    deployments = [one for application in applications for one in application["deployments"].values()]
    found = [replica for one in deployments for replica in one["replicas"]]
    return {replica["pid"] for replica in found if replica["state"] == "RUNNING"}


def test_a_replica_killed_under_load_costs_no_client_an_answer_where_batches_go_through_serves_handle(
    head: RayHead, service: Process, client: Client, faults: Faults
) -> None:
    assert service.stop() == 0
    service.start(MILLRACE_REPLICA_SOCKETS="0")
    wait_until_served(client)
    kill_a_replica_under_load(lambda: ask(client), CLIENTS, lambda: set(head.processes(REPLICA)))
    faults.add("SIGKILL replica", "under load", "file")
    assert service.stop() == 0
    service.start()
    wait_until_served(client)


def test_serves_controller_killed_under_load_costs_no_client_an_answer_and_knows_all_that_is_deployed_again(
    head: RayHead, client: Client, faults: Faults
) -> None:
    # One that it was still starting is replaced by the next controller.
    eventually(lambda: running_replicas(head) == set(head.processes(REPLICA)), 180, "both replicas run")
    before, replicas = durable(client.get("deployments/digits")), set(head.processes(REPLICA))
    assert len(replicas) == 2
    (controller,) = head.processes(CONTROLLER)
    with Load(lambda: ask(client), CLIENTS) as load:
        load.wait_for(50)
        os.kill(controller, signal.SIGKILL)
        faults.add("SIGKILL Serve's controller", "under load", "file")
        load.wait_for(50)
        eventually(lambda: set(head.processes(CONTROLLER)) - {controller}, 180, "another controller is started")
        eventually(lambda: running_replicas(head) == replicas, 180, "it has found the replicas")
        load.wait_for(50)
    load.assert_all_answered()
    assert set(head.processes(REPLICA)) == replicas
    assert durable(client.get("deployments/digits")) == before

    spec = rollout_pb2.RolloutSpec(checkpoint="trainingJobs/digits/checkpoints/c2", steps=[{"percent": 100}])
    asked = pb.RolloutRequest(name="deployments/digits", spec=spec)
    done = client.wait(client.deployments.Rollout(asked, timeout=60))
    assert done.HasField("response"), done.error
    assert {ask(client) for _ in range(10)} == {"2"}
    eventually(lambda: len(head.processes(REPLICA)) == 2, 180, "the replicas of version 1 are gone")
    assert not replicas & set(head.processes(REPLICA))


def test_all_of_ray_killed_half_way_through_a_rollout_ends_the_service_and_a_new_head_serves_the_same(
    head: RayHead, service: Process, client: Client, faults: Faults
) -> None:
    expected = wait_until_served(client)
    spec = rollout_pb2.RolloutSpec(checkpoint="trainingJobs/digits/checkpoints/c2")
    spec.steps.add(percent=50).interval.seconds = 3600
    spec.steps.add(percent=100)
    client.deployments.Rollout(pb.RolloutRequest(name="deployments/digits", spec=spec), timeout=60)
    eventually(lambda: is_shifting(client), 180, "the new version has half of the traffic")
    before = durable(client.get("deployments/digits"))
    head.kill()
    faults.add("SIGKILL Ray head", "rollout", "file")
    assert service.exit_status(timeout_s=240) == EXIT_RAY_LOST
    with supervised(service):
        eventually(lambda: _answers(client), 180, "Get is answered without Ray")
        assert durable(client.get("deployments/digits")) == before
        assert not client.is_healthy()
        with ray_head(num_cpus=4, port=int(head.address.rpartition(":")[2])):
            # Both are of the same weights, so either answers alike.
            assert_same_answer(wait_until_served(client), expected)
            assert durable(client.get("deployments/digits")) == before
            both = {version.number for version in before.versions}
            eventually(lambda: {ask(client) for _ in range(20)} == both, 180, "both versions answer again")
            assert durable(client.get("deployments/digits")) == before


def _answers(client: Client) -> bool:
    try:
        client.get("deployments/digits")
    except grpc.RpcError:
        return False
    return True
