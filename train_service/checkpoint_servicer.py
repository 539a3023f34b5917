"""The part of `millrace.train.v1.TrainService` for checkpoints that leave and come in: convert, delegate, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc import aio

from millrace.train.v1 import checkpoint_import_pb2, train_service_pb2, train_service_pb2_grpc
from shared.streaming import DOWNLOADS, IMPORTS, Slot, Slots, in_threads
from train_service.converters.checkpoints import (
    import_parts_from_proto,
    imported_to_proto,
    part_to_protos,
    sources_to_proto,
)
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.checkpoint_reading import CheckpointReader

Context = aio.ServicerContext[Any, Any]

# Each holds two pieces of 4 MiB and a message, and a thread at times.
MAX_DOWNLOADS = 8
# Each has its files on the disk, and a child that may take as much memory as they have bytes.
MAX_IMPORTS = 2


class CheckpointServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(
        self, checkpoints: CheckpointReader, imports: CheckpointImports, custom_allowed: Collection[str]
    ) -> None:
        self._checkpoints = checkpoints
        self._imports = imports
        self._custom_allowed = custom_allowed
        self._downloads = Slots(MAX_DOWNLOADS, wording=DOWNLOADS)
        self._intakes = Slots(MAX_IMPORTS, wording=IMPORTS)

    async def GetCheckpoint(
        self, request: Any, context: Context
    ) -> AsyncIterator[train_service_pb2.GetCheckpointResponse]:
        with self._downloads.one() as slot:
            parts = self._checkpoints.read(request.name, request.manifest_sha256, request.path, request.offset)
            async for part in in_threads(parts):
                for message in part_to_protos(part):
                    with slot.waiting():
                        yield message

    async def ImportCheckpoint(
        self, request: AsyncIterator[Any], context: Context
    ) -> checkpoint_import_pb2.ImportCheckpointResponse:
        with self._intakes.one() as slot:
            parts = import_parts_from_proto(_awaited(request, slot), self._custom_allowed)
            return imported_to_proto(await self._imports.receive(parts))

    async def GetImportedWeights(self, request: Any, context: Context) -> checkpoint_import_pb2.ImportedWeights:
        return sources_to_proto(await asyncio.to_thread(self._imports.sources, request.name))


async def _awaited(requests: AsyncIterator[Any], slot: Slot) -> AsyncIterator[Any]:
    """The same, with the time for which the sender is waited for."""
    while True:
        with slot.waiting():
            request = await anext(requests, None)
        if request is None:
            return
        yield request
