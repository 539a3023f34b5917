"""The chunks of one upload: an object each, named by the offset at which its bytes begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore

# One read of the store. Chunks that clients stream are no larger; parts put by URL may be of some GiB.
BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Block:
    """`length` bytes of an upload from `offset` on, which lie in one object from `start` on."""

    key: str
    offset: int
    start: int
    length: int
    # The object has no other bytes.
    whole: bool


@dataclass
class Chain:
    """The chunks that follow one another without a gap from byte 0 on: an upload's bytes as far as they are there."""

    prefix: str
    end: int = 0
    _blocks: list[Block] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def key(self, offset: int) -> str:
        return f"{self.prefix}/{offset:020d}"

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    def extend(self, size_bytes: int) -> None:
        """Takes in the chunk at `end`, of so many bytes."""
        key = self.key(self.end)
        for start in range(0, size_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, size_bytes - start)
            self._blocks.append(Block(key, self.end + start, start, length, whole=length == size_bytes))
            self._offsets.append(self.end + start)
        self.end += size_bytes

    def block_index(self, offset: int) -> int:
        """The block that holds the byte at `offset`, which must be below `end`."""
        return bisect_right(self._offsets, offset) - 1

    def between(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks that hold these bytes, the first and last in part."""
        if start >= stop:
            return
        for block in self._blocks[self.block_index(start) : self.block_index(stop - 1) + 1]:
            skipped = max(0, start - block.offset)
            length = min(block.offset + block.length, stop) - block.offset - skipped
            yield Block(
                block.key, block.offset + skipped, block.start + skipped, length, block.whole and length == block.length
            )


def chain_of(prefix: str, sizes: Iterable[tuple[int, int]]) -> Chain:
    """`sizes` are (offset, bytes) of the objects there are, in any order; those after a gap, or within another chunk,
    are left out."""
    there = dict(sizes)
    chain = Chain(prefix)
    while size_bytes := there.get(chain.end, 0):
        chain.extend(size_bytes)
    return chain


def stored_chain(store: ObjectStore, prefix: str) -> Chain:
    return chain_of(prefix, ((int(info.key.rsplit("/", 1)[-1]), info.size_bytes) for info in store.list(prefix)))


def read_block(store: ObjectStore, block: Block) -> bytes:
    """Raises `DataLoss` where the chunk is gone or shorter than it was."""
    try:
        if not block.whole:
            return store.get_range(block.key, block.start, block.length)
        data = store.get(block.key)
    except ObjectMissing:
        raise DataLoss(
            f"the chunk of the upload at byte {block.offset} is gone; abort the upload and send it again",
            reason="CHUNK_MISSING",
            metadata={"object": block.key},
        ) from None
    if len(data) != block.length:
        raise DataLoss(
            f"the chunk of the upload at byte {block.offset} has {len(data)} bytes, it had {block.length}; abort the "
            "upload and send it again",
            reason="CHUNK_CHANGED",
            metadata={"object": block.key},
        )
    return data
