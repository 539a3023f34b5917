"""Replicas come with the load and go with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace_client.inference import autoscaling
from tests.integration.inference_service.client import Client, eventually, infer_request
from tests.integration.inference_service.conftest import Stack
from tests.support.asking import Load

JOB = "trainingJobs/digits"
IMAGE = np.random.default_rng(5).integers(0, 256, (1, 28, 28), dtype=np.uint8)


def replicas(client: Client, name: str) -> int:
    return client.get(name).versions[0].replicas


@contextmanager
def deployed(stack: Stack, deployment_id: str, **spec: object) -> Iterator[pb.Deployment]:
    made = stack.client.deploy(deployment_id, JOB, **spec)
    try:
        yield made
    finally:
        stack.client.delete(made.name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_replicas_grow_under_load_and_shrink_when_idle_and_no_request_is_lost(stack: Stack) -> None:
    client = stack.client

    def ask() -> str:
        return str(client.inference.ModelInfer(infer_request("elastic", IMAGE), timeout=60).model_version)

    bounds = autoscaling(1, 2, rows_per_replica=3, scale_up_after_s=0, scale_down_after_s=2)
    with deployed(stack, "elastic", autoscaling=bounds, cpus_per_replica=0.5) as made:
        assert replicas(client, made.name) == 1
        # One client goes on: what it asks while replicas go is answered, too, and one row is no load for two.
        with Load(ask, 1) as steady:
            with Load(ask, 8) as heavy:
                eventually(lambda: replicas(client, made.name) == 2, 180, "a second replica answers")
                heavy.wait_for(100)
            eventually(lambda: replicas(client, made.name) == 1, 180, "the second replica has gone")
            steady.wait_for(20)
        assert (heavy.errors, steady.errors) == ([], [])
