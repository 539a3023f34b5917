"""The part of `millrace.train.v1.TrainService` that is about bundles of code: convert, delegate, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from millrace.train.v1 import code_bundle_pb2, train_service_pb2, train_service_pb2_grpc
from train_service.converters.records import bundle_to_proto, parts_from_proto
from train_service.jobs.bundle_intake import BundleIntake

Context = aio.ServicerContext[Any, Any]


class BundleServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, intake: BundleIntake) -> None:
        self._intake = intake

    async def CreateCodeBundle(self, request: AsyncIterator[Any], context: Context) -> code_bundle_pb2.CodeBundle:
        return bundle_to_proto(await self._intake.receive(parts_from_proto(request)))

    async def GetCodeBundle(self, request: Any, context: Context) -> code_bundle_pb2.CodeBundle:
        return bundle_to_proto(await asyncio.to_thread(self._intake.bundles.get, request.name))

    async def ListCodeBundles(self, request: Any, context: Context) -> train_service_pb2.ListCodeBundlesResponse:
        records, token = await asyncio.to_thread(self._intake.bundles.page, request.page_size, request.page_token)
        return train_service_pb2.ListCodeBundlesResponse(
            code_bundles=map(bundle_to_proto, records), next_page_token=token
        )

    async def DeleteCodeBundle(self, request: Any, context: Context) -> train_service_pb2.DeleteCodeBundleResponse:
        await asyncio.to_thread(self._intake.bundles.delete, request.name)
        return train_service_pb2.DeleteCodeBundleResponse()
