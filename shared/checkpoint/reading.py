"""A checkpoint's file, read in ranges, each compared with its digest; and rows of tensors, read right into their
memory.

A manifest has one digest for a file, and for a file larger than `BLOCK_BYTES` also one for each of its blocks. A block
that arrives damaged is fetched again by itself. Without digests of blocks, as in checkpoints of earlier releases, the
damage of any byte is found at the file's end.

A range that is cut off goes on where it was (`ObjectStore.get_range`), and waits as long as bytes arrive.

The second part reads files of safetensors into the memory where their rows belong.

A tensor lies in one file, or in shards: pieces of consecutive rows in the files of several ranks. A shard's header has,
besides what the format asks for, the metadata `shards`: for each tensor of which the file has only some rows the first
of them and the shape of the whole. So the number of ranks that read is independent of that of those that wrote.

    {stem}.safetensors                        one file with whole tensors
    {stem}-{rank:05d}-of-{ranks:05d}.safetensors    the shards of that rank; rank 0 has the tensors that are not sharded
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from shared.errors import DataLoss
from shared.storage import ObjectMissing

# --- Ranges of a file ---

logger = logging.getLogger(__name__)

# Ranges on their way at a time, and the bytes of one: so a reader holds 16 MiB besides what it has handed over.
READERS = 4
PIECE_BYTES = 4 * 1024 * 1024
# The bytes of a block. They double for each `MAX_BLOCKS` blocks, because a manifest is read whole.
BLOCK_BYTES = 4 * 1024 * 1024
MAX_BLOCKS = 8192
# How often a block is fetched that does not have its digest. The damage may lie in the store, or on the way from it.
TRIES = 3


class Readable(Protocol):
    """The store's methods that reading a checkpoint needs. Both raise `ObjectMissing`."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...


@dataclass(frozen=True)
class StoredFile:
    """A file in the store, as a manifest names it. `blocks` are the SHA-256 of its blocks, in their order, or empty."""

    key: str
    size_bytes: int
    sha256: str
    block_bytes: int = 0
    blocks: Sequence[str] = ()

    @classmethod
    def from_manifest(cls, folder: str, file: Mapping[str, Any]) -> StoredFile:
        blocks = file.get("blocks", {})
        return cls(
            f"{folder}/{file['path']}",
            file["size_bytes"],
            file["sha256"],
            blocks.get("size_bytes", 0),
            blocks.get("sha256", ()),
        )


def read_pieces(
    store: Readable, file: StoredFile, offset: int = 0, note_progress: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """Yield the bytes of a file from `offset` on, in pieces.

    `DataLoss` is raised instead of a damaged block. Without digests of blocks, a file that is read from its beginning
    is compared with its digest after the last piece; with an offset the reader must compare it, because it has the
    bytes before. Raises `DataLoss` also if the object is missing or too short. `note_progress` is called for each
    piece.
    """
    if file.blocks:
        for start, piece in read_blocks(store, file, range(offset // file.block_bytes, len(file.blocks))):
            note_progress()
            # A block may be larger than a piece.
            for begin in range(max(0, offset - start), len(piece), PIECE_BYTES):
                yield piece[begin : begin + PIECE_BYTES]
        return
    digest = hashlib.sha256()
    starts = range(offset, file.size_bytes, PIECE_BYTES)
    for piece in _ahead(lambda start: fetch(store, file, start, PIECE_BYTES), starts):
        if not offset:
            digest.update(piece)
        note_progress()
        yield piece
    if not offset and digest.hexdigest() != file.sha256:
        raise damaged(file)


def read_blocks(store: Readable, file: StoredFile, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each of these blocks. Raises `DataLoss` for one that stays damaged."""
    found = _ahead(lambda number: _block(store, file, number), numbers)
    for number, data in zip(numbers, found, strict=True):
        yield number * file.block_bytes, data


def _block(store: Readable, file: StoredFile, number: int) -> bytes:
    start = number * file.block_bytes
    for tries in range(1, TRIES + 1):
        data = fetch(store, file, start, file.block_bytes)
        if hashlib.sha256(data).hexdigest() == file.blocks[number]:
            return data
        logger.warning("bytes %d to %d of %s came damaged (try %d)", start, start + len(data), file.key, tries)
    raise damaged(file, f" from byte {start} to {start + len(data)}")


def fetch(store: Readable, file: StoredFile, start: int, length: int) -> bytes:
    """Return up to `length` bytes of a file from `start`, as they come. Raises `DataLoss` if it is missing."""
    try:
        return store.get_range(file.key, start, min(length, file.size_bytes - start))
    except ObjectMissing:
        raise DataLoss(f"{file.key} is missing", metadata={"file": file.key}) from None


def _ahead(fetch: Callable[[int], bytes], places: Sequence[int]) -> Iterator[bytes]:
    """Yield what is fetched for each place, in their order. While one is used, the next ones are being fetched."""
    if len(places) < 2:
        yield from map(fetch, places)
        return
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-ranges")
    coming: deque[Future[bytes]] = deque()
    try:
        for place in places:
            coming.append(readers.submit(fetch, place))
            if len(coming) == READERS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        readers.shutdown(wait=False, cancel_futures=True)


def blocks_of(data: memoryview | bytes) -> dict[str, Any]:
    """Return what a manifest says about the blocks of a file with these bytes; nothing for a small file."""
    view = memoryview(data)
    size = block_bytes_of(len(view))
    if len(view) <= size:
        return {}
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-digests") as pool:
        starts = range(0, len(view), size)
        digests = list(pool.map(lambda start: hashlib.sha256(view[start : start + size]).hexdigest(), starts))
    return {"blocks": {"size_bytes": size, "sha256": digests}}


def digests_of(file: BinaryIO) -> dict[str, Any]:
    """Return what a manifest says about a file, besides its path, which is read once and never held whole."""
    size_bytes = os.fstat(file.fileno()).st_size
    block_bytes, whole, blocks = block_bytes_of(size_bytes), hashlib.sha256(), []
    file.seek(0)
    for _ in range(0, size_bytes, block_bytes):
        block, left = hashlib.sha256(), block_bytes
        while left and (data := file.read(min(left, PIECE_BYTES))):
            block.update(data)
            whole.update(data)
            left -= len(data)
        blocks.append(block.hexdigest())
    named = {"size_bytes": size_bytes, "sha256": whole.hexdigest()}
    return named if len(blocks) < 2 else {**named, "blocks": {"size_bytes": block_bytes, "sha256": blocks}}


def block_bytes_of(size_bytes: int) -> int:
    block = BLOCK_BYTES
    while block * MAX_BLOCKS < size_bytes:
        block *= 2
    return block


def damaged(file: StoredFile, where: str = "") -> DataLoss:
    return DataLoss(f"{file.key} does not have the digest that its manifest names{where}", metadata={"file": file.key})


# --- Rows of tensors ---

LENGTH_BYTES = 8
SHARDS = "shards"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SHARD_PATH = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")


def shard_path(path: str, rank: int, ranks: int) -> str:
    """Return the path of one rank's shards of the file `path`."""
    return f"{path.removesuffix('.safetensors')}-{rank:05d}-of-{ranks:05d}.safetensors"


def whole_path(path: str) -> str:
    """Return the path of the file whose shard this one is; of another file its own."""
    found = SHARD_PATH.fullmatch(path)
    return f"{found['stem']}.safetensors" if found else path


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a tensor in a file, from byte `begin` on."""

    file: StoredFile
    begin: int
    first: int
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, wherever its rows lie. A tensor without dimensions counts as one row."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[_Rows, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Wanted:
    """Rows of a tensor from `first` on, and the memory for them: its size says how many."""

    tensor: StoredTensor
    first: int
    memory: memoryview


def read_index(store: Readable, files: Sequence[StoredFile]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors that the files have together, by name, and the metadata of the first file.

    Raises `DataLoss` for a damaged header, and for a tensor of which rows are missing.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, list[_Rows]] = {}
    metadata: dict[str, str] = {}
    for number, file in enumerate(files):
        header, start = _header(store, file)
        of_file: dict[str, str] = header.pop("__metadata__", {})
        shards: Mapping[str, Any] = json.loads(of_file.pop(SHARDS, "{}"))
        if not number:
            metadata = of_file
        for name, one in header.items():
            first, shape = shards.get(name, (0, one["shape"]))
            count = one["shape"][0] if one["shape"] else 1
            _check_range(file, name, one, start)
            shapes.setdefault(name, (one["dtype"], tuple(shape)))
            pieces.setdefault(name, []).append(_Rows(file, start + one["data_offsets"][0], first, count))
    found = {
        name: StoredTensor(dtype, shape, tuple(sorted(pieces[name], key=lambda piece: piece.first)))
        for name, (dtype, shape) in shapes.items()
    }
    for name, tensor in found.items():
        at = 0
        for piece in tensor.pieces:
            if piece.count and piece.first != at:
                break
            at += piece.count
        if at != tensor.rows:
            raise DataLoss(f"{files[0].key}: rows of {name} are missing", metadata={"file": files[0].key})
    return found, metadata


def read_rows(store: Readable, wanteds: Sequence[Wanted], note_progress: Callable[[], None] = lambda: None) -> None:
    """Fill the memory of all that is wanted. Of each file only the blocks are read that have any of it.

    Holds a few ranges besides. Raises `DataLoss` for damaged bytes: what was filled must then not be used.
    """
    spans: dict[str, list[tuple[int, memoryview]]] = {}
    files: dict[str, StoredFile] = {}
    for wanted in wanteds:
        row_bytes = wanted.tensor.row_bytes
        end = wanted.first + (len(wanted.memory) // row_bytes if row_bytes else 0)
        for piece in wanted.tensor.pieces:
            first, last = max(piece.first, wanted.first), min(piece.first + piece.count, end)
            if first < last:
                memory = wanted.memory[(first - wanted.first) * row_bytes : (last - wanted.first) * row_bytes]
                spans.setdefault(piece.file.key, []).append((piece.begin + (first - piece.first) * row_bytes, memory))
                files[piece.file.key] = piece.file
    for key, of_file in spans.items():
        _scatter(_ranges(store, files[key], of_file), sorted(of_file, key=lambda span: span[0]), note_progress)


def _ranges(store: Readable, file: StoredFile, spans: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, bytes]]:
    """Yield verified ranges of the file, in their order, that have all bytes of the spans."""
    if file.blocks:
        size = file.block_bytes
        numbers = {number for at, memory in spans for number in range(at // size, (at + len(memory) - 1) // size + 1)}
        yield from read_blocks(store, file, sorted(numbers))
        return
    # The one digest is that of the whole file.
    at = 0
    for piece in read_pieces(store, file):
        yield at, piece
        at += len(piece)


def _scatter(
    ranges: Iterator[tuple[int, bytes]], spans: Sequence[tuple[int, memoryview]], note_progress: Callable[[], None]
) -> None:
    at = 0
    for start, data in ranges:
        note_progress()
        end = start + len(data)
        while at < len(spans) and spans[at][0] + len(spans[at][1]) <= start:
            at += 1
        for begin, memory in spans[at:]:
            if begin >= end:
                break
            first, last = max(begin, start), min(begin + len(memory), end)
            if first < last:
                memory[first - begin : last - begin] = data[first - start : last - start]


def _header(store: Readable, file: StoredFile) -> tuple[dict[str, Any], int]:
    """Return a file's header, and where its tensors begin."""
    try:
        length = int.from_bytes(_first(store, file, LENGTH_BYTES), "little")
        if length > file.size_bytes:
            raise ValueError
        header: dict[str, Any] = json.loads(_first(store, file, LENGTH_BYTES + length)[LENGTH_BYTES:])
    except ValueError:
        raise DataLoss(f"{file.key} has no header of safetensors", metadata={"file": file.key}) from None
    return header, LENGTH_BYTES + length


def _check_range(file: StoredFile, name: str, one: Mapping[str, Any], start: int) -> None:
    """Raise `DataLoss` unless the file has as many bytes for a tensor as its type and shape need."""
    begin, end = one["data_offsets"]
    size_bytes = math.prod(one["shape"]) * ITEM_BYTES.get(one["dtype"], 0)
    if one["dtype"] not in ITEM_BYTES or not 0 <= begin <= end <= file.size_bytes - start or end - begin != size_bytes:
        raise DataLoss(f"{file.key}: the header's entry of {name!r} is wrong", metadata={"file": file.key})


def _first(store: Readable, file: StoredFile, length: int) -> bytes:
    """Return the first bytes of a file. They are verified where blocks have digests; else who reads the rest does."""
    if not file.blocks:
        return fetch(store, file, 0, length)
    blocks = read_blocks(store, file, range(-(-length // file.block_bytes)))
    return b"".join(data for _, data in blocks)[:length]


# --- Whole files ---


def whole_file(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str], int]:
    """Return the header of a file with all these tensors, their names in its order, and its size in bytes.

    It is the file that a rank with the whole model would have written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    for name in names:
        tensor = tensors[name]
        end = at + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return encode_header(header), names, at


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Return what stands before the tensors in a file of safetensors: the length, and JSON up to the alignment."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def read_whole(store: Readable, files: Sequence[StoredFile]) -> bytearray:
    """Return the bytes of the whole file of which `files` are the shards."""
    tensors, metadata = read_index(store, files)
    header, names, size_bytes = whole_file(tensors, metadata)
    data = bytearray(len(header) + size_bytes)
    data[: len(header)] = header
    at, view = len(header), memoryview(data)
    wanted = []
    for name in names:
        wanted.append(Wanted(tensors[name], 0, view[at : at + tensors[name].size_bytes]))
        at += tensors[name].size_bytes
    read_rows(store, wanted)
    return data
