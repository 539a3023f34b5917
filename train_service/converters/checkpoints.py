"""Between the protobuf contract and checkpoints that leave."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.train.v1.train_service_pb2 import GetCheckpointResponse
from train_service.converters.jobs import checkpoint_to_proto
from train_service.jobs.checkpoint_reading import CheckpointListing, FileBegin, Part

MAX_CHUNK_BYTES = 1024 * 1024


def part_to_protos(part: Part) -> Iterator[GetCheckpointResponse]:
    """Its messages; bytes are cut into chunks."""
    if isinstance(part, CheckpointListing):
        header = GetCheckpointResponse.Header(
            checkpoint=checkpoint_to_proto(part.entry),
            file_count=len(part.files),
            size_bytes=sum(one.size_bytes for one in part.files),
        )
        yield GetCheckpointResponse(header=header)
    elif isinstance(part, FileBegin):
        file = GetCheckpointResponse.File(
            path=part.file.path, size_bytes=part.file.size_bytes, sha256=part.file.sha256, offset=part.offset
        )
        yield GetCheckpointResponse(file=file)
    else:
        for start in range(0, len(part), MAX_CHUNK_BYTES):
            yield GetCheckpointResponse(chunk=part[start : start + MAX_CHUNK_BYTES])
