"""The files of one rank of a sharded model: its rows of weights and optimizer state, and what rank 0 is told of them.

A snapshot in memory would be as large as three quarters of what a rank holds. So it is written to an unnamed file in
the folder for temporary files, and goes to the store from there while training goes on. A process that is killed leaves
no such file.

    {folder}/model-00001-of-00004.safetensors        see `shared.checkpoint.reading`
    {folder}/optimizer-00001-of-00004.safetensors
    {folder}/written/00001.json                      paths and digests of both; rank 0 removes it at the end
"""

from __future__ import annotations

import errno
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.checkpoint.reading import SHARDS, digests_of, encode_header, shard_path
from shared.errors import Internal, ResourceExhausted
from shared.storage import ObjectMissing, ObjectStore
from train_service.checkpoints.tensor_files import DTYPES, NEST, places_of, take_apart
from train_service.learning.sharding import local_rows

# Bytes that are copied from a device at a time.
COPIED_BYTES = 32 * 2**20
# The errors of a full disk, and the delay before it is tried again.
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_RETRY_S = 30.0
# How often rank 0 looks for the other ranks' shards, and for how long once the run has ended.
POLL_INTERVAL_S = 0.2
WAIT_AT_THE_END_S = 20.0


@dataclass(frozen=True)
class SpooledFile:
    """A shard on this node's disk. `path` is its path in the checkpoint."""

    path: str
    file: BinaryIO


def spool_shards(
    weights: Mapping[str, Tensor],
    state: Any,
    rank: int,
    ranks: int,
    touched: Callable[[], None] = lambda: None,
) -> list[SpooledFile]:
    """Copy this rank's rows to disk. `state` is nested, and like `weights` has the sharded tensors themselves.

    Raises `ResourceExhausted` if the disk is full, and then leaves no file.
    """
    tensors, form = take_apart(state)
    first = _spool(shard_path(WEIGHTS, rank, ranks), weights, {}, rank, touched)
    try:
        return [first, _spool(shard_path(OPTIMIZER, rank, ranks), tensors, {NEST: form}, rank, touched)]
    except BaseException:
        first.file.close()
        raise


def _spool(
    path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], rank: int, touched: Callable[[], None]
) -> SpooledFile:
    own: dict[str, Tensor] = {}
    shards: dict[str, tuple[int, list[int]]] = {}
    for name, tensor in tensors.items():
        rows, part = local_rows(tensor)
        is_shard = rows != slice(None)
        if rank and (not is_shard or not len(part)):
            continue
        own[name] = part
        if is_shard:
            shards[name] = (rows.start, list(tensor.shape))
    places = places_of(own)
    header: dict[str, Any] = {"__metadata__": {**metadata, SHARDS: json.dumps(shards, separators=(",", ":"))}}
    for name, (begin, end) in places.items():
        one = own[name]
        header[name] = {"dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [begin, end]}
    encoded = memoryview(encode_header(header))
    size_bytes = len(encoded) + sum(end - begin for begin, end in places.values())
    with _full_disk_named(path, rank, size_bytes):
        file = tempfile.TemporaryFile(prefix="millrace-shard-", buffering=0)  # noqa: SIM115 - open until it is uploaded
        try:
            _write_all(file, encoded)
            for name in places:
                touched()
                _write_tensor(file, own[name])
        except BaseException:
            file.close()
            raise
    return SpooledFile(path, file)


@contextmanager
def _full_disk_named(path: str, rank: int, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ResourceExhausted(
            f"rank {rank} needs {size_bytes:,} bytes in {tempfile.gettempdir()} for {path}, and the disk is full; free "
            "space on its node, give the node more disk, or set TMPDIR to a larger disk",
            reason="SCRATCH_FULL",
            metadata={"ranks": str(rank)},
            retry_after_s=FULL_RETRY_S,
        ) from error


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().contiguous().reshape(-1)
    each = max(1, COPIED_BYTES // tensor.element_size())
    for begin in range(0, len(flat), each):
        part = flat[begin : begin + each].cpu().view(torch.uint8)
        _write_all(file, part.numpy().data)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def upload_shards(store: ObjectStore, folder: str, spooled: Sequence[SpooledFile]) -> list[dict[str, Any]]:
    """Upload a rank's shards. Returns what the manifest says about them. May be repeated."""
    named = []
    for one in spooled:
        # The file has no name of its own.
        store.upload_file(Path(f"/proc/self/fd/{one.file.fileno()}"), f"{folder}/{one.path}")
        named.append({"path": one.path, **digests_of(one.file)})
    return named


def tell_written(store: ObjectStore, folder: str, rank: int, named: Sequence[Mapping[str, Any]]) -> None:
    """Tell rank 0 that this rank's shards are durable."""
    store.put(_note(folder, rank), json.dumps({"files": named}).encode())


def await_written(store: ObjectStore, folder: str, ranks: int, ending: threading.Event) -> list[dict[str, Any]]:
    """Wait until every other rank has written its shards. Returns what the manifest says about them.

    `ending` is set when the run ends: then ranks may be gone. Raises `Internal` for a rank that does not come.
    """
    named: list[dict[str, Any]] = []
    give_up_at = None
    for rank in range(1, ranks):
        while True:
            try:
                named += json.loads(store.get(_note(folder, rank)))["files"]
                break
            except ObjectMissing:
                pass
            if ending.is_set():
                give_up_at = give_up_at or time.monotonic() + WAIT_AT_THE_END_S
                if time.monotonic() > give_up_at:
                    raise Internal(f"rank {rank} has not written its shards of {folder}", reason="SHARD_MISSING")
            time.sleep(POLL_INTERVAL_S)
    return named


def forget_written(store: ObjectStore, folder: str, ranks: int) -> None:
    for rank in range(1, ranks):
        store.delete(_note(folder, rank))


def _note(folder: str, rank: int) -> str:
    return f"{folder}/written/{rank:05d}.json"
