"""The inference service's server without Ray: its own servicer, models and batchers, and a model that tests control."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

from inference import grpc_service_pb2 as oip
from inference import grpc_service_pb2_grpc as oip_grpc
from inference_service.deploy.deployments import Deployments
from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import Deployment, ModelVersion, State, application_name, check_spec
from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec
from inference_service.frontend_processes import Peers
from inference_service.serve.batcher import Batcher
from inference_service.serve.infer import Dispatcher, Inference, InFlightBytes
from inference_service.serve.models import Models
from inference_service.serve.repository import ModelRepository, SummedStatistics
from inference_service.servicer import OpenInferenceServicer
from shared.grpc_server import BearerToken
from shared.grpc_server.interceptor import DEFAULT_DEADLINE_S
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.grpc_kit import Kit, running

CLASSES = 4
IMAGES = Signature(
    (TensorSpec("image", "UINT8", (-1, CLASSES)),),
    TensorSpec("image", "FP32", (-1, CLASSES)),
    (TensorSpec("logits", "FP32", (-1, CLASSES)), TensorSpec("label", "INT64", (-1,))),
)


def deployment(name: str = "m", signature: Signature | None = IMAGES, **changes: Any) -> Deployment:
    """READY, with one version, unless `changes` say otherwise."""
    version = ModelVersion(
        number="1",
        checkpoint="trainingJobs/j/checkpoints/c",
        folder="f",
        checkpoint_sha256="00",
        training_job="trainingJobs/j",
        signature=signature,
    )
    spec = check_spec(
        checkpoint="trainingJobs/j",
        num_replicas=2,
        threads_per_replica=0,
        max_batch_size=8,
        max_batch_delay_s=0.001,
        max_queued_rows=100,
    )
    made = Deployment(
        name=f"deployments/{name}",
        uid=f"uid-{name}",
        spec=spec,
        state=State.READY,
        generation=1,
        operation="operations/o",
        request_id="",
        versions=(version,),
        create_time=1.0,
        update_time=1.0,
    )
    return replace(made, **changes)


class Classifier:
    """Its logits are its input; it works while `may_work` is set, and remembers its batches' first numbers."""

    def __init__(self) -> None:
        self.may_work = asyncio.Event()
        self.may_work.set()
        self.at_work = 0
        self.batches: list[list[int]] = []

    async def forward(self, rows: Rows) -> Outputs:
        values = next(iter(rows.values.values()))
        self.batches.append([int(row[0]) for row in values])
        self.at_work += 1
        try:
            await self.may_work.wait()
        finally:
            self.at_work -= 1
        logits = values.astype(np.float32)
        return Outputs([logits, logits.argmax(axis=1)], input_s=0.25, infer_s=0.5)


@dataclass
class Server:
    """`models` are what the process knows, `deployments` the logs, of which a test writes those that it wants."""

    models: Models
    deployments: Deployments
    model: Classifier
    kit: Kit

    @property
    def stub(self) -> Any:
        return oip_grpc.GRPCInferenceServiceStub(self.kit.channel)


def attach(models: Models, one: Deployment, model: Any, number: str = "1", **limits: Any) -> None:
    """Have `model` answer for the deployment's version of that number."""
    defaults: dict[str, Any] = {"max_rows": 8, "max_delay_s": 0.0, "max_queued_rows": 100, "max_in_flight": 1}
    version = next(version for version in one.versions if version.number == number)
    batcher = Batcher(model, Limits(**{**defaults, **limits}), BatchTimes(), models.statistics(one, version))
    models.attach(application_name(one, version), batcher)


@asynccontextmanager
async def inference_server(
    one: Deployment | None = None,
    model: Any = None,
    default_deadline_s: float = DEFAULT_DEADLINE_S,
    held: InFlightBytes | None = None,
    peers: Peers | None = None,
    token: BearerToken | None = None,
    **limits: Any,
) -> AsyncIterator[Server]:
    """`one` (by default `m`, of four numbers a row), answered by `model`."""
    one, models, classifier = one or deployment(), Models(), Classifier()
    models.replace([one])
    attach(models, one, model or classifier, **limits)
    with tempfile.TemporaryDirectory() as folder:
        deployments = Deployments(open_store(StoreSettings(url=Path(folder).as_uri())))
        inference = Inference(models, Dispatcher(models, held))
        statistics = SummedStatistics(models, peers or Peers())
        servicer = OpenInferenceServicer(models, inference, ModelRepository(deployments), statistics, models.put)

        def register(server: aio.Server) -> list[str]:
            oip_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
            return ["inference.GRPCInferenceService"]

        async with running(register, default_deadline_s=default_deadline_s, token=token) as kit:
            yield Server(models, deployments, classifier, kit)
            classifier.may_work.set()


def served(
    scenario: Callable[[Server], Awaitable[None]],
    one: Deployment | None = None,
    *,
    timeout_s: float = 240.0,
    **options: Any,
) -> None:
    """Run the scenario against a fresh server."""

    async def main() -> None:
        async with asyncio.timeout(timeout_s), inference_server(one, **options) as server:
            await scenario(server)

    asyncio.run(main())


def ask(*firsts: int, model: str = "m", **fields: Any) -> oip.ModelInferRequest:
    """A row for each of `firsts`, which begins with it; the greatest number of the rest is the last."""
    values = np.array([[first, 1, 2, 3] for first in firsts], np.uint8)
    tensor = oip.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=values.shape)
    return oip.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[values.tobytes()], **fields)


async def until(holds: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Return once `holds()`, without holding up the event loop."""
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {timeout_s:g} s for {what}") from None
