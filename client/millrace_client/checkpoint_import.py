"""Sending weights from elsewhere to the train service, which makes a checkpoint of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace.train.v1 import checkpoint_import_pb2 as pb
from millrace_client.calls import Caller, new_request_id

CHUNK_BYTES = 1024 * 1024
# To be sent, read by a child of the service and written to its store; a byte of a file takes so long at the most.
BASE_S, BYTES_PER_S = 300.0, 10 * 1024**2
# What of a Hugging Face folder is weights, the first that there is; and what tells of them.
WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
)
CONFIG = "config.json"


def import_weights(
    caller: Caller,
    stub: Any,
    training_job_id: str,
    source: str | os.PathLike[str],
    spec: pb.ImportSpec,
    *,
    validate_only: bool = False,
) -> pb.ImportCheckpointResponse:
    """See `TrainClient.import_checkpoint`."""
    root, paths = _files_of(Path(source))
    files = [_described(root, path) for path in paths]
    header = pb.ImportCheckpointRequest.Header(
        training_job_id=training_job_id,
        spec=spec,
        files=files,
        request_id=new_request_id(),
        validate_only=validate_only,
    )

    def requests() -> Iterator[pb.ImportCheckpointRequest]:
        yield pb.ImportCheckpointRequest(header=header)
        for path in paths:
            with path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    yield pb.ImportCheckpointRequest(chunk=data)

    timeout_s = BASE_S + sum(one.size_bytes for one in files) / BYTES_PER_S
    # The header has a request id, by which the service knows it again.
    return caller.send(stub.ImportCheckpoint, requests, pb.ImportCheckpointResponse, timeout_s=timeout_s)


def _files_of(source: Path) -> tuple[Path, Sequence[Path]]:
    """The folder that paths are relative to, and the files to send. Raises `FileNotFoundError` and `ValueError`."""
    if not source.is_dir():
        source.stat()
        return source.parent, [source]
    for patterns in WEIGHTS:
        if not (source / patterns[0]).is_file():
            continue
        found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
        if (source / CONFIG).is_file():
            found.add(source / CONFIG)
        return source, sorted(found)
    names = ", ".join(patterns[0] for patterns in WEIGHTS)
    raise ValueError(f"{source} has none of {names}; name a file, or a folder that Hugging Face's libraries have saved")


def _described(root: Path, path: Path) -> pb.ImportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return pb.ImportedFile(path=path.relative_to(root).as_posix(), size_bytes=file.tell(), sha256=digest)
