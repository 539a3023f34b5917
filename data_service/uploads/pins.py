"""What the blocks of an upload were when they were first read, so that whatever is read later is the same."""

from __future__ import annotations

from data_service.uploads.chunks import Block, Chain


class PinnedBlocks:
    """Holds the CRC32C of each block that was given out. Parts that clients put by URL can be written over at any time,
    even after the commit: a digest says something of bytes that are read again only as long as they are the same.

    For one upload, and for any number of files that are open on it.
    """

    def __init__(self) -> None:
        # By object and place in it: the length, and the CRC32C.
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        self._proven = False

    def holds(self, block: Block, crc32c: int) -> bool:
        """Whether the block is what it was; a first reading pins it, until the whole was proven."""
        now = (block.length, crc32c)
        if self._proven:
            return self._known.get((block.key, block.start)) == now
        return self._known.setdefault((block.key, block.start), now) == now

    def fit(self, chain: Chain) -> bool:
        """Whether all pinned blocks lie in the chain as they did."""
        there = {(block.key, block.start): block.length for block in chain.blocks}
        return all(there.get(place) == length for place, (length, _) in self._known.items())

    def set_proven(self) -> None:
        """All blocks went by in order and have the committed digest together: from here on there are no others."""
        self._proven = True
