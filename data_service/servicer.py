"""`millrace.data.v1.DataService`: convert, delegate, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from google.longrunning import operations_pb2
from grpc import aio

from data_service import converters, reading
from data_service.datasets import Datasets
from data_service.import_operations import ImportOperations
from data_service.versions import Versions
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, resources_pb2
from shared.requests import body_digest

Context = aio.ServicerContext[Any, Any]


class DataServicer(data_service_pb2_grpc.DataServiceServicer):
    def __init__(self, datasets: Datasets, versions: Versions, operations: ImportOperations) -> None:
        self._datasets = datasets
        self._versions = versions
        self._operations = operations

    async def CreateDataset(
        self, request: data_service_pb2.CreateDatasetRequest, context: Context
    ) -> resources_pb2.Dataset:
        dataset = await asyncio.to_thread(
            self._datasets.create,
            request.dataset_id,
            display_name=request.display_name,
            description=request.description,
            request_id=request.request_id,
            body_sha256=body_digest(request),
            validate_only=request.validate_only,
        )
        return converters.dataset_message(dataset)

    async def GetDataset(self, request: data_service_pb2.GetDatasetRequest, context: Context) -> resources_pb2.Dataset:
        return converters.dataset_message(await asyncio.to_thread(self._datasets.get, request.name))

    async def ListDatasets(
        self, request: data_service_pb2.ListDatasetsRequest, context: Context
    ) -> data_service_pb2.ListDatasetsResponse:
        found, token = await asyncio.to_thread(self._datasets.list, request.page_size, request.page_token)
        return data_service_pb2.ListDatasetsResponse(
            datasets=[converters.dataset_message(dataset) for dataset in found], next_page_token=token
        )

    async def ImportVersion(
        self, request: data_service_pb2.ImportVersionRequest, context: Context
    ) -> operations_pb2.Operation:
        job = await asyncio.to_thread(
            self._versions.start_import,
            request.parent,
            request.version_id,
            converters.import_spec_from(request),
            request_id=request.request_id,
            body_sha256=body_digest(request),
            validate_only=request.validate_only,
        )
        if request.validate_only:
            return converters.checked_operation(job)
        return await asyncio.to_thread(self._operations.of, job)

    async def GetVersion(
        self, request: data_service_pb2.GetVersionRequest, context: Context
    ) -> resources_pb2.DatasetVersion:
        return converters.version_message(await asyncio.to_thread(self._versions.get, request.name))

    async def ListVersions(
        self, request: data_service_pb2.ListVersionsRequest, context: Context
    ) -> data_service_pb2.ListVersionsResponse:
        found, token = await asyncio.to_thread(
            self._versions.list, request.parent, request.page_size, request.page_token
        )
        return data_service_pb2.ListVersionsResponse(
            versions=[converters.version_message(version) for version in found], next_page_token=token
        )

    async def PreviewVersion(
        self, request: data_service_pb2.PreviewVersionRequest, context: Context
    ) -> data_service_pb2.PreviewVersionResponse:
        version = await asyncio.to_thread(self._versions.active, request.name)
        preview = await asyncio.to_thread(reading.preview, version.reader, request.rows_per_split)
        return data_service_pb2.PreviewVersionResponse(
            version=converters.version_message(version),
            arrow_ipc=preview.arrow_ipc,
            contact_sheet_png=preview.contact_sheet_png,
        )

    async def ReadVersion(
        self, request: data_service_pb2.ReadVersionRequest, context: Context
    ) -> AsyncIterator[data_service_pb2.ReadVersionResponse]:
        version = await asyncio.to_thread(self._versions.active, request.name)
        async for piece in _in_threads(reading.read_stream(version.reader, converters.selection_from(request))):
            yield data_service_pb2.ReadVersionResponse(arrow_ipc=piece)


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Takes each piece in a thread, and only when the one before was sent: a slow client holds up its own reading."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
