"""How large objects are cut: never into more parts than S3 allows, and in bounded memory."""

from __future__ import annotations

import pytest

from shared.storage.object_store import PART_BYTES, parts_for

GIB = 1 << 30


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 100 * GIB, 156 * GIB, 160 * GIB, 1000 * GIB, 5 * 1024 * GIB])
def test_no_object_has_more_parts_than_s3_allows(size: int) -> None:
    parts = parts_for(size)
    assert -(-size // parts["chunk_size"]) <= 10_000
    assert PART_BYTES <= parts["chunk_size"] <= 5 * GIB
    assert parts["chunk_size"] * parts["max_concurrency"] <= max(4 * PART_BYTES, parts["chunk_size"])


def test_an_object_of_up_to_145_gib_is_cut_as_ever() -> None:
    assert parts_for(145 * GIB) == {"chunk_size": PART_BYTES, "max_concurrency": 4}
