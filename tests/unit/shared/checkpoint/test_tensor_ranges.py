"""Tensors lie in shards of any number of ranks, and any rows of them are read into memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace_client.checkpoint_transfer import join_shards
from shared.checkpoint import reading
from shared.checkpoint.reading import (
    SHARDS,
    StoredFile,
    StoredTensor,
    Wanted,
    digests_of,
    encode_header,
    read_index,
    read_rows,
    read_whole,
    shard_path,
    whole_path,
)
from shared.errors import DataLoss
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

FOLDER = "checkpoint"
MODEL = "model.safetensors"
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "bias": np.arange(5, dtype=np.float32),
    "count": np.asarray(7, dtype=np.int64),
    "weight": np.arange(7 * 30, dtype=np.float32).reshape(7, 30),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 100)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


def encoded(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        one = tensors[name]
        kind = {"float32": "F32", "int64": "I64"}[str(one.dtype)]
        header[name] = {"dtype": kind, "shape": list(one.shape), "data_offsets": [len(data), len(data) + one.nbytes]}
        data += one.tobytes()
    return encode_header(header) + data


def save(store: ObjectStore, folder: Path, ranks: int) -> list[StoredFile]:
    """Shards by rows, as torch cuts them; one rank saves a whole file."""
    files = []
    for rank in range(ranks):
        own: dict[str, np.ndarray[Any, Any]] = {}
        shards: dict[str, tuple[int, list[int]]] = {}
        for name, tensor in TENSORS.items():
            if not tensor.shape or ranks == 1:
                if rank == 0:
                    own[name] = tensor
                continue
            each = math.ceil(len(tensor) / ranks)
            first = min(rank * each, len(tensor))
            rows = tensor[first : first + each]
            if rank == 0 or len(rows):
                own[name], shards[name] = rows, (first, list(tensor.shape))
        path = shard_path(MODEL, rank, ranks) if ranks > 1 else MODEL
        local = folder / path
        metadata = {"note": "n"} if rank == 0 else {}
        local.write_bytes(encoded(own, {**metadata, SHARDS: json.dumps(shards)} if ranks > 1 else metadata))
        store.upload_file(local, f"{FOLDER}/{path}")
        with local.open("rb") as file:
            files.append(StoredFile.from_manifest(FOLDER, {"path": path, **digests_of(file)}))
    return files


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_shards_of_any_number_of_ranks_make_the_same_file(store: ObjectStore, tmp_path: Path, ranks: int) -> None:
    files = save(store, tmp_path, ranks)
    expected = encoded(TENSORS, {"note": "n"})
    assert bytes(read_whole(store, files)) == expected
    if ranks > 1:
        assert join_shards(tmp_path, tmp_path / "joined").read_bytes() == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize(("first", "count"), [(0, 7), (0, 1), (2, 3), (6, 1), (3, 0)])
def test_any_rows_are_read_into_memory(store: ObjectStore, tmp_path: Path, ranks: int, first: int, count: int) -> None:
    tensors, metadata = read_index(store, save(store, tmp_path, ranks))
    assert metadata == {"note": "n"}
    assert {name: one.shape for name, one in tensors.items()} == {name: one.shape for name, one in TENSORS.items()}
    weight: StoredTensor = tensors["weight"]
    rows, number = bytearray(count * weight.row_bytes), bytearray(8)
    read_rows(store, [Wanted(weight, first, memoryview(rows)), Wanted(tensors["count"], 0, memoryview(number))])
    assert bytes(rows) == TENSORS["weight"][first : first + count].tobytes()
    assert int.from_bytes(number, "little") == 7


def test_a_shard_that_is_missing_or_damaged_is_data_loss(store: ObjectStore, tmp_path: Path) -> None:
    files = save(store, tmp_path, 3)
    with pytest.raises(DataLoss, match="rows of"):
        read_index(store, [files[0], files[2]])
    data = bytearray(store.get(files[1].key))
    data[-1] ^= 1
    store.put(files[1].key, bytes(data))
    with pytest.raises(DataLoss, match="digest"):
        read_whole(store, files)
    store.delete(files[1].key)
    with pytest.raises(DataLoss, match="is missing"):
        read_index(store, files)
    with pytest.raises(DataLoss, match="is missing"):
        read_index(store, [StoredFile(files[1].key, files[1].size_bytes, files[1].sha256)])


def test_a_file_has_the_same_digests_however_it_is_read(tmp_path: Path) -> None:
    for size in (0, 1, 100, 101, 350):
        (tmp_path / "file").write_bytes(data := bytes(range(256))[:size] * 1 + bytes(max(0, size - 256)))
        with (tmp_path / "file").open("rb") as file:
            found = digests_of(file)
        whole = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert found == {**whole, **reading.blocks_of(data)}


def test_the_path_of_a_shard_names_the_whole() -> None:
    assert whole_path(shard_path(MODEL, 3, 12)) == MODEL == whole_path(MODEL)
