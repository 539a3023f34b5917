"""The chunks that follow one another without a gap, and the blocks that they are read in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.uploads.chunks import BLOCK_BYTES, chain_of


@pytest.mark.parametrize(
    ("sizes", "end"),
    [
        ([], 0),
        ([(0, 3), (3, 4)], 7),
        ([(3, 4), (0, 3)], 7),
        ([(0, 3), (4, 4)], 3),
        ([(3, 4)], 0),
        ([(0, 8), (4, 2), (8, 1)], 9),
        ([(0, 0)], 0),
        ([(0, 3), (3, 0), (4, 1)], 3),
    ],
    ids=["none", "in order", "out of order", "a gap", "no first", "one within another", "empty", "empty between"],
)
def test_only_bytes_without_a_gap_before_them_count(sizes: list[tuple[int, int]], end: int) -> None:
    assert chain_of("p", sizes).end == end


def test_a_large_part_is_read_in_blocks() -> None:
    chain = chain_of("p", [(0, 2 * BLOCK_BYTES + 5), (2 * BLOCK_BYTES + 5, 7)])
    assert [(block.offset, block.start, block.length) for block in chain.blocks] == [
        (0, 0, BLOCK_BYTES),
        (BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES),
        (2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 5),
        (2 * BLOCK_BYTES + 5, 0, 7),
    ]
    assert [block.whole for block in chain.blocks] == [False, False, False, True]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_the_blocks_between_two_places_hold_just_those_bytes(sizes: list[int], data: st.DataObject) -> None:
    offsets = [sum(sizes[:n]) for n in range(len(sizes))]
    total = sum(sizes)
    stored = {f"p/{at:020d}": bytes(range(at, at + n)) for at, n in zip(offsets, sizes, strict=True)}
    chain = chain_of("p", zip(offsets, sizes, strict=True))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    read = b"".join(stored[one.key][one.start : one.start + one.length] for one in chain.between(start, stop))
    assert read == bytes(range(start, stop))
    for block in chain.between(start, stop):
        assert block.whole == (block.length == len(stored[block.key]))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_each_byte_is_found_in_its_block(sizes: list[int], data: st.DataObject) -> None:
    offsets = [sum(sizes[:n]) for n in range(len(sizes))]
    chain = chain_of("p", zip(offsets, sizes, strict=True))
    place = data.draw(st.integers(0, sum(sizes) - 1))
    block = chain.blocks[chain.block_index(place)]
    assert block.offset <= place < block.offset + block.length
