"""An upload's parts, with a URL each, are one message that clients take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from data_service.datasets import Datasets
from data_service.servicer import UploadServicerPart
from data_service.uploads.uploads import DEFAULT_PART_BYTES, MAX_PART_BYTES, MAX_PARTS, PresignedPut, Uploads, parts_of
from millrace.data.v1 import data_service_pb2
from shared.errors import InvalidArgument
from shared.settings import StoreSettings
from shared.storage import ObjectStore
from shared.storage.presigning import Presigner
from tests.support.upload_server import DATASET, uploads_of

# What gRPC's clients take, where nobody told them otherwise.
CLIENT_BYTES = 4 * 1024 * 1024
# An S3 key may have 1,024 bytes, a bucket 63, a host 253.
LONGEST = StoreSettings(
    url=f"s3://{'b' * 63}/{'p' * 850}",
    s3_access_key="k" * 128,
    s3_secret_key="secret",
    s3_region="ap-southeast-1",
    public_s3_endpoint=f"https://{'h' * 245}.example:9000",
)


def test_the_most_parts_are_one_message_also_where_urls_are_long(store: ObjectStore) -> None:
    uploads_of(store)  # makes the dataset
    servicer = UploadServicerPart(Uploads(store, Datasets(store), Presigner(LONGEST)))
    context: Any = None
    request = data_service_pb2.StartUploadRequest(parent=DATASET, upload_id="u" * 63)
    request.presigned.size_bytes = MAX_PARTS * MAX_PART_BYTES
    answer = asyncio.run(servicer.StartUpload(request, context))
    assert len(answer.presigned_parts) == MAX_PARTS
    assert len(answer.presigned_parts[-1].url) > 1_500
    assert answer.ByteSize() < CLIENT_BYTES


def test_where_no_size_is_asked_for_parts_are_as_large_as_must() -> None:
    few, more = (parts_of(PresignedPut(MAX_PARTS * DEFAULT_PART_BYTES + one)) for one in (0, 1))
    assert {part.size_bytes for part in few} == {DEFAULT_PART_BYTES}
    assert len(more) <= MAX_PARTS
    assert more[0].size_bytes == DEFAULT_PART_BYTES + 1024 * 1024
    assert sum(part.size_bytes for part in more) == MAX_PARTS * DEFAULT_PART_BYTES + 1


def test_a_file_that_no_number_of_parts_can_hold_is_refused_by_field() -> None:
    with pytest.raises(InvalidArgument, match="at most 2000 parts"):
        parts_of(PresignedPut(MAX_PARTS * MAX_PART_BYTES + 1, MAX_PART_BYTES))
    with pytest.raises(InvalidArgument) as refused:
        parts_of(PresignedPut(MAX_PARTS * MAX_PART_BYTES + 1))
    assert [field for field, _ in refused.value.fields] == ["presigned.size_bytes"]
