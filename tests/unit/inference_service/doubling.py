"""A model that doubles numbers, and the deployment that it answers for."""

from __future__ import annotations

import asyncio

from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import Deployment, application_name
from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec, WireTensor
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher
from inference_service.serve.models import Models
from tests.support.inference_server import deployment

SIGNATURE = Signature(
    (TensorSpec("x", "UINT8", (-1,)),),
    TensorSpec("x", "FP32", (-1,)),
    (TensorSpec("double", "UINT8", (-1,)), TensorSpec("same", "UINT8", (-1,))),
)
READY = deployment("m", SIGNATURE, uid="u")
VERSION = READY.versions[0]


class Doubler:
    """Answers while it has a replica, and keeps what comes before that waiting."""

    def __init__(self) -> None:
        self.has_replica = asyncio.Event()
        self.has_replica.set()
        self.sizes: list[int] = []

    async def forward(self, rows: Rows) -> Outputs:
        self.sizes.append(len(rows))
        await self.has_replica.wait()
        return Outputs([rows.values["x"] * 2, rows.values["x"]])


def attach(
    models: Models, one: Deployment = READY, doubler: Doubler | None = None, statistics: Statistics | None = None
) -> Doubler:
    limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
    doubler = doubler or Doubler()
    batcher = Batcher(doubler, limits, BatchTimes(), statistics or Statistics())
    models.attach(application_name(one, VERSION), batcher)
    return doubler


def tensor(*values: int) -> WireTensor:
    return WireTensor("inputs[0]", "x", "UINT8", (len(values),), bytes(values), {})
