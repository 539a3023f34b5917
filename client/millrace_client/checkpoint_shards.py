"""One file of safetensors out of the shards of a downloaded checkpoint, without holding a tensor in memory.

A job with `placement.parallel` FSDP saves a file for each rank. Each has the rows of that rank, and in its header the
metadata `shards`: for each tensor of which it has only some rows the first of them, and the shape of the whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from millrace_client.errors import DataLoss

LENGTH_BYTES = 8
SHARDS = "shards"
COPIED_BYTES = 1 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def join_shards(directory: str | os.PathLike[str], target: str | os.PathLike[str], name: str = "model") -> Path:
    """Write the shards of `name` (`model` or `optimizer`) of a downloaded checkpoint as one file, and return its path.

    The file is the one that a single rank would have saved. `target` is written anew; it must not lie in `directory`
    if the checkpoint is to be recognised by a later download. Raises `FileNotFoundError` if there are no shards, and
    `DataLoss` if one is missing.
    """
    paths = sorted(Path(directory).glob(f"{name}-*-of-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{directory} has no shards of {name}: a checkpoint that is not sharded is one file")
    tensors: dict[str, _Tensor] = {}
    metadata: dict[str, str] = {}
    for number, path in enumerate(paths):
        header, start = _header(path)
        of_file: dict[str, str] = header.pop("__metadata__", {})
        shards: dict[str, Any] = json.loads(of_file.pop(SHARDS, "{}"))
        if not number:
            metadata = of_file
        for key, one in header.items():
            first, shape = shards.get(key, (0, one["shape"]))
            begin, end = one["data_offsets"]
            tensors.setdefault(key, _Tensor(one["dtype"], shape)).rows.append((first, path, start + begin, end - begin))
    partial = Path(f"{os.fspath(target)}.partial")
    with partial.open("wb") as joined:
        joined.write(_joined_header(tensors, metadata))
        for key in _order(tensors):
            _write(joined, key, tensors[key])
        joined.flush()
        os.fsync(joined.fileno())
    return partial.replace(target)


class _Tensor:
    def __init__(self, dtype: str, shape: list[int]) -> None:
        self.dtype = dtype
        self.shape = shape
        # First row, file, where its bytes begin and how many they are.
        self.rows: list[tuple[int, Path, int, int]] = []

    @property
    def size_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for one in self.shape:
            size *= one
        return size


def _order(tensors: dict[str, _Tensor]) -> list[str]:
    """Return the names in the order of the file. Wide elements come first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda key: (-ITEM_BYTES[tensors[key].dtype], key))


def _joined_header(tensors: dict[str, _Tensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for key in _order(tensors):
        tensor = tensors[key]
        end = at + tensor.size_bytes
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def _write(joined: BinaryIO, key: str, tensor: _Tensor) -> None:
    if sum(size for _, _, _, size in tensor.rows) != tensor.size_bytes:
        raise DataLoss(f"rows of {key} are missing: a shard is not there", remedy="download the checkpoint again")
    for _, path, begin, size in sorted(tensor.rows, key=lambda rows: rows[0]):
        with path.open("rb") as shard:
            shard.seek(begin)
            left = size
            while left:
                piece = shard.read(min(left, COPIED_BYTES))
                joined.write(piece)
                left -= len(piece)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return header, LENGTH_BYTES + length
