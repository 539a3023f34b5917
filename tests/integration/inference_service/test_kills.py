"""The service and a replica under load are killed, and the service is told to stop: the same is served again.

What takes a Ray head of its own is in tests/fault/test_inference_kills.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from tests.integration.inference_service.checkpoints import JOB
from tests.integration.inference_service.client import (
    Array,
    assert_same_answer,
    durable,
    eventually,
    infer_request,
    outputs,
)
from tests.integration.inference_service.conftest import Stack
from tests.support.asking import kill_a_replica_under_load

IMAGE = np.random.default_rng(4).integers(0, 256, (1, 28, 28), dtype=np.uint8)
# The claim is that calls are answered, not how soon: on a busy machine a batch that is sent again waits its turn.
DEADLINE_S = 60.0
CLIENTS = 8
REPLICA = "ray::ServeReplica"
NAME = "deployments/struck"

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Struck:
    """A service with `NAME` on two replicas; `others` are the replicas that were there before."""

    stack: Stack
    others: set[int]

    def replicas(self) -> set[int]:
        return set(self.stack.head.processes(REPLICA)) - self.others

    def ask(self) -> str:
        """The version that answers."""
        asked = infer_request("struck", IMAGE)
        return str(self.stack.client.inference.ModelInfer(asked, timeout=DEADLINE_S).model_version)

    def served(self) -> Array:
        """The answer, once there is one."""

        def answer() -> Array | None:
            try:
                return outputs(self.stack.client.infer("struck", IMAGE))["logits"]
            except grpc.RpcError:
                return None

        return eventually(answer, 180, "the model answers")


@pytest.fixture(scope="module")
def struck(stack: Stack) -> Iterator[Struck]:
    others = set(stack.head.processes(REPLICA))
    stack.client.deploy("struck", JOB, num_replicas=2)
    yield Struck(stack, others)
    stack.client.delete(NAME)


def test_a_replica_killed_under_load_costs_no_client_an_answer(struck: Struck) -> None:
    kill_a_replica_under_load(struck.ask, CLIENTS, struck.replicas)


def test_a_killed_service_started_again_serves_the_same_replicas(struck: Struck) -> None:
    service, client = struck.stack.service, struck.stack.client
    before, expected, replicas = durable(client.get(NAME)), struck.served(), struck.replicas()
    service.kill()
    service.start()
    assert_same_answer(struck.served(), expected)
    assert durable(client.get(NAME)) == before
    assert struck.replicas() == replicas


def test_a_service_asked_to_stop_exits_cleanly_and_leaves_the_replicas_alone(struck: Struck) -> None:
    service, replicas = struck.stack.service, struck.replicas()
    assert service.stop() == 0
    assert "SIGTERM received" not in service.log.read_text()
    assert struck.replicas() == replicas
    service.start()
    struck.served()
