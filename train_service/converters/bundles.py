"""Between the protobuf contract and bundles of code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from millrace.train.v1 import code_bundle_pb2
from shared.code_bundle import BundleRecord
from train_service.converters.jobs import timestamp
from train_service.jobs.bundle_intake import Header


async def parts_from_proto(requests: AsyncIterator[Any]) -> AsyncIterator[Header | bytes]:
    async for request in requests:
        if request.WhichOneof("content") == "header":
            yield Header(request.header.sha256, request.header.size_bytes)
        else:
            yield request.chunk


def bundle_to_proto(record: BundleRecord) -> code_bundle_pb2.CodeBundle:
    return code_bundle_pb2.CodeBundle(
        name=record.name,
        size_bytes=record.size_bytes,
        unpacked_size_bytes=record.unpacked_size_bytes,
        file_count=record.file_count,
        requirements=record.requirements,
        modules=record.modules,
        create_time=timestamp(record.create_time),
    )
