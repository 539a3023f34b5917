"""The part of `millrace.train.v1.TrainService` that hands checkpoints out: convert, delegate, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from millrace.train.v1 import train_service_pb2, train_service_pb2_grpc
from shared.streaming import DOWNLOADS, Slots, in_threads
from train_service.converters.checkpoints import part_to_protos
from train_service.jobs.checkpoint_reading import CheckpointReader

Context = aio.ServicerContext[Any, Any]

# Each holds two pieces of 4 MiB and a message, and a thread at times.
MAX_DOWNLOADS = 8


class CheckpointServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, checkpoints: CheckpointReader) -> None:
        self._checkpoints = checkpoints
        self._downloads = Slots(MAX_DOWNLOADS, wording=DOWNLOADS)

    async def GetCheckpoint(
        self, request: Any, context: Context
    ) -> AsyncIterator[train_service_pb2.GetCheckpointResponse]:
        with self._downloads.one() as slot:
            parts = self._checkpoints.read(request.name, request.manifest_sha256, request.path, request.offset)
            async for part in in_threads(parts):
                for message in part_to_protos(part):
                    with slot.waiting():
                        yield message
