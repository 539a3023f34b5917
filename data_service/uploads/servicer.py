"""The uploads of `millrace.data.v1.DataService`: convert, delegate, convert."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from data_service.uploads.receiving import Chunk
from data_service.uploads.record import Upload, UploadState
from data_service.uploads.uploads import PresignedPut, UploadPart, Uploads
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, resources_pb2
from shared.idempotency import body_digest
from shared.streaming import UPLOADS, Slot, Slots

Context = aio.ServicerContext[Any, Any]

# The limit of concurrent senders of chunks; each holds about 40 MiB.
MAX_SENDS = 32

STATES = {
    UploadState.OPEN: resources_pb2.Upload.State.STATE_OPEN,
    UploadState.COMMITTED: resources_pb2.Upload.State.STATE_COMMITTED,
}


class UploadServicerPart(data_service_pb2_grpc.DataServiceServicer):
    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._sends = Slots(MAX_SENDS, wording=UPLOADS)

    async def StartUpload(self, request: data_service_pb2.StartUploadRequest, context: Context) -> resources_pb2.Upload:
        upload, parts = await asyncio.to_thread(
            self._uploads.start,
            request.parent,
            request.upload_id,
            request_id=request.request_id,
            body_sha256=body_digest(request),
            presigned=_presigned_put(request),
        )
        message = upload_message(upload)
        message.presigned_parts.extend(_part_message(part) for part in parts)
        return message

    async def UploadChunks(
        self, request_iterator: AsyncIterator[data_service_pb2.UploadChunksRequest], context: Context
    ) -> AsyncIterator[data_service_pb2.UploadChunksResponse]:
        with self._sends.slot() as slot:
            async with aclosing(self._uploads.receive(_chunks(request_iterator, slot))) as sizes:
                async for size in sizes:
                    with slot.waiting():
                        yield data_service_pb2.UploadChunksResponse(acknowledged_size=size)

    async def GetUpload(self, request: data_service_pb2.GetUploadRequest, context: Context) -> resources_pb2.Upload:
        return upload_message(await asyncio.to_thread(self._uploads.get, request.name))

    async def CommitUpload(
        self, request: data_service_pb2.CommitUploadRequest, context: Context
    ) -> resources_pb2.Upload:
        # When the call ends, for whatever reason, this coroutine is cancelled; its thread, which may read for long, is
        # not, so it polls `over`.
        over = threading.Event()
        try:
            upload = await asyncio.to_thread(
                self._uploads.commit, request.name, request.size_bytes, request.sha256, over.is_set
            )
        finally:
            over.set()
        return upload_message(upload)

    async def AbortUpload(self, request: data_service_pb2.AbortUploadRequest, context: Context) -> Empty:
        await asyncio.to_thread(self._uploads.abort, request.name)
        return Empty()


def upload_message(upload: Upload) -> resources_pb2.Upload:
    record = upload.record
    return resources_pb2.Upload(
        name=record.name,
        state=STATES[record.state],
        create_time=_timestamp(record.create_time),
        expire_time=_timestamp(upload.expire_time),
        acknowledged_size=upload.acknowledged_size,
        size_bytes=record.size_bytes,
        sha256=record.sha256,
        hashed_size=upload.hashed_size,
    )


def _presigned_put(request: data_service_pb2.StartUploadRequest) -> PresignedPut | None:
    if not request.HasField("presigned"):
        return None
    return PresignedPut(request.presigned.size_bytes, request.presigned.part_size_bytes)


def _part_message(part: UploadPart) -> resources_pb2.PresignedPart:
    return resources_pb2.PresignedPart(url=part.url, offset=part.offset, size_bytes=part.size_bytes)


async def _chunks(requests: AsyncIterator[data_service_pb2.UploadChunksRequest], slot: Slot) -> AsyncIterator[Chunk]:
    given = aiter(requests)
    while True:
        with slot.waiting():
            request = await anext(given, None)
        if request is None:
            return
        yield Chunk(request.name, request.offset, request.data, request.crc32c)


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000) * 1000)
