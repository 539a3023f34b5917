"""The part of `millrace.train.v1.TrainService` that is about sweeps: convert, delegate, convert."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import Any

from grpc import aio

from millrace.train.v1 import sweep_pb2, train_service_pb2, train_service_pb2_grpc
from shared.requests import body_digest
from train_service.sweeps.converters import sweep_spec_from_proto, sweep_to_proto
from train_service.sweeps.sweeps import Sweeps

Context = aio.ServicerContext[Any, Any]


class SweepServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, sweeps: Sweeps, custom_allowed: Collection[str]) -> None:
        self._sweeps = sweeps
        self._allowed_in_sweeps = custom_allowed

    async def CreateSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        within_s = context.time_remaining()
        return await asyncio.to_thread(self._create, request, math.inf if within_s is None else within_s)

    def _create(self, request: Any, within_s: float) -> sweep_pb2.Sweep:
        """In a thread: a sweep may list many values, and others' calls are answered meanwhile."""
        spec = sweep_spec_from_proto(request.spec, self._allowed_in_sweeps)
        digest = body_digest(request)
        view = self._sweeps.create(request.sweep_id, spec, request.request_id, digest, request.validate_only, within_s)
        return sweep_to_proto(view)

    async def GetSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.get, request.name))

    async def ListSweeps(self, request: Any, context: Context) -> train_service_pb2.ListSweepsResponse:
        views, token = await asyncio.to_thread(self._sweeps.page, request.page_size, request.page_token)
        return train_service_pb2.ListSweepsResponse(
            sweeps=[sweep_to_proto(view) for view in views], next_page_token=token
        )

    async def CancelSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.cancel, request.name, request.etag))

    async def DeleteSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.delete, request.name, request.etag))
