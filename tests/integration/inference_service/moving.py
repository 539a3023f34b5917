"""A deployment that goes from checkpoint to checkpoint, whose answers tell which of them gave them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from safetensors.torch import save

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from shared.storage import ObjectStore
from tests.integration.inference_service.checkpoints import make_module, write
from tests.integration.inference_service.client import Array, Client, eventually, infer_request, outputs
from tests.integration.inference_service.conftest import Stack

JOB = "trainingJobs/moving"
IMAGE = np.random.default_rng(4).integers(0, 256, (1, 28, 28), dtype=np.uint8)
DEADLINE_S = 60.0


def prepared_bias(shift: float) -> bytes:
    """Weights whose logits are those of `make_module`, and `shift` more."""
    state = dict(make_module().state_dict())
    state["fc.bias"] = state["fc.bias"] + shift
    return save(state)


def write_versions(store: ObjectStore) -> dict[str, Array]:
    """Three checkpoints of `JOB`, and the logits of `IMAGE` that each must give."""
    logits: dict[str, Array] = {}
    for number, shift in (("c1", 0.0), ("c2", 1.0), ("c3", 2.0)):
        written = write(store, number, job=JOB, weights=prepared_bias(shift))
        entered = written.content.serving()({"image": IMAGE})["image"]
        with torch.inference_mode():
            logits[number] = make_module()(torch.from_numpy(entered)).numpy() + np.float32(shift)
    return logits


@dataclass
class Moving:
    """A deployment `id`, and which checkpoint each of its versions must answer as."""

    client: Client
    id: str
    logits: dict[str, Array]
    checkpoints: dict[str, str]

    @property
    def name(self) -> str:
        return f"deployments/{self.id}"

    def ask(self) -> str:
        """Ask once; the version that answered, which must have answered what it is."""
        answer = self.client.inference.ModelInfer(infer_request(self.id, IMAGE), timeout=DEADLINE_S)
        version = str(answer.model_version)
        expected = self.logits[self.checkpoints[version]]
        np.testing.assert_allclose(outputs(answer)["logits"], expected, rtol=1e-3, atol=1e-3)
        assert answer.parameters["checkpoint"].string_param == f"{JOB}/checkpoints/{self.checkpoints[version]}"
        return version

    def rollout(
        self, checkpoint: str, *steps: tuple[int, float], comparison: Any = None, **limits: Any
    ) -> operations_pb2.Operation:
        number = str(len(self.checkpoints) + 1)
        self.checkpoints[number] = checkpoint
        spec = rollout_pb2.RolloutSpec(
            checkpoint=f"{JOB}/checkpoints/{checkpoint}",
            steps=[rollout_pb2.RolloutStep(percent=one, interval=seconds(interval_s)) for one, interval_s in steps],
            limits=rollout_pb2.RolloutLimits(**limits),
            comparison=comparison,
        )
        return self.client.deployments.Rollout(pb.RolloutRequest(name=self.name, spec=spec), timeout=60)

    def get(self) -> pb.Deployment:
        return self.client.get(self.name)

    def weights(self) -> dict[str, int]:
        return {version.number: version.weight for version in self.get().versions}

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            now = self.get().rollout
            return now.state == rollout_pb2.Rollout.STATE_SHIFTING and now.step == step

        eventually(there, 180, f"step {step}")


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(number * 1e6))
    return duration


@contextmanager
def moving(client: Client, deployment_id: str, logits: dict[str, Array], **spec: Any) -> Iterator[Moving]:
    """A READY deployment of c1."""
    client.deploy(deployment_id, f"{JOB}/checkpoints/c1", **spec)
    try:
        yield Moving(client, deployment_id, logits, {"1": "c1"})
    finally:
        client.delete(f"deployments/{deployment_id}")


def versions_in_serve(stack: Stack, uid: str) -> list[str]:
    """What Ray Serve itself says that it runs of a deployment."""
    with urllib.request.urlopen(f"{stack.head.dashboard}/api/serve/applications/", timeout=60) as answer:
        found = json.load(answer)["applications"]
    return sorted(name.rpartition("-v")[2] for name in found if uid in name)
