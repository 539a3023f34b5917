"""Pushes code to the train service, which checks and stores it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from millrace.train.v1 import code_bundle_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.calls import Caller
from shared.code_packing import NotABundle, pack

__all__ = ["NotABundle", "bundle_name", "push"]

CHUNK_BYTES = 1024 * 1024
# A bundle has at most 64 MiB, which the service checks and writes to the store.
PUSHED_TIMEOUT_S = 300.0


def push(caller: Caller, stub: Any, source: str | os.PathLike[str]) -> code_bundle_pb2.CodeBundle:
    """Pack and store a folder, a wheel or one Python file. A bundle that is already stored is returned.

    Raises `NotABundle`, a `ValueError` that names the path, if it cannot be packed.
    """
    with tempfile.TemporaryFile() as file:
        facts = pack(Path(source), file)

        def requests() -> Iterator[pb.CreateCodeBundleRequest]:
            header = pb.CreateCodeBundleRequest.Header(sha256=facts.sha256, size_bytes=facts.size_bytes)
            yield pb.CreateCodeBundleRequest(header=header)
            yield from _chunks(file)

        # The same bytes make no second bundle, so the call may be repeated.
        return caller.send(stub.CreateCodeBundle, requests, code_bundle_pb2.CodeBundle, timeout_s=PUSHED_TIMEOUT_S)


def bundle_name(source: str | os.PathLike[str]) -> str:
    """Return the name, `codeBundles/{sha256}`, that pushing the source would give. Raises `NotABundle`."""
    with tempfile.TemporaryFile() as file:
        return f"codeBundles/{pack(Path(source), file).sha256}"


def _chunks(file: BinaryIO) -> Iterator[pb.CreateCodeBundleRequest]:
    file.seek(0)
    while data := file.read(CHUNK_BYTES):
        yield pb.CreateCodeBundleRequest(chunk=data)
