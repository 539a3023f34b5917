"""A file is read in ranges, and a damaged range costs its range."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from shared.checkpoint import reading
from shared.checkpoint.reading import StoredFile, block_bytes_of, blocks_of, read_blocks, read_pieces
from shared.errors import DataLoss
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

DATA = bytes(range(251)) * 4
KEY = "checkpoint/model.safetensors"
BLOCK = 100


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reading, "PIECE_BYTES", 60)


class Line:
    """A store whose ranges arrive damaged as often as `damages` says, by their start."""

    def __init__(self, folder: Path, damages: dict[int, int]) -> None:
        self.store: ObjectStore = open_store(StoreSettings(url=folder.as_uri()))
        self.store.put(KEY, DATA)
        self.get = self.store.get
        self.fetched: Counter[int] = Counter()
        self._damages = damages

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self.store.get_range(key, start, length)
        self.fetched[start] += 1
        return b"!" + data[1:] if self.fetched[start] <= self._damages.get(start, 0) else data


def named(*, with_blocks: bool = True) -> StoredFile:
    file = {"path": "model.safetensors", "size_bytes": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}
    return StoredFile.from_manifest("checkpoint", {**file, **(blocks_of(DATA) if with_blocks else {})})


@pytest.mark.parametrize("with_blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("offset", [0, 1, 59, 60, 100, 199, len(DATA) - 1, len(DATA)])
def test_a_file_is_read_from_any_offset(tmp_path: Path, offset: int, with_blocks: bool) -> None:
    pieces = list(read_pieces(Line(tmp_path, {}), named(with_blocks=with_blocks), offset))
    assert b"".join(pieces) == DATA[offset:]
    assert max(map(len, pieces), default=0) <= 60


def test_a_range_that_comes_damaged_is_fetched_again_by_itself(tmp_path: Path) -> None:
    line = Line(tmp_path, {300: 1, 500: 2})
    assert b"".join(read_pieces(line, named())) == DATA
    assert line.fetched == {start: {300: 2, 500: 3}.get(start, 1) for start in range(0, len(DATA), BLOCK)}


def test_a_range_that_stays_damaged_is_named_and_not_handed_over(tmp_path: Path) -> None:
    got: list[bytes] = []
    with pytest.raises(DataLoss, match="names from byte 300 to 400"):
        got.extend(read_pieces(Line(tmp_path, {300: 99}), named()))
    assert b"".join(got) == DATA[:300]


def test_single_blocks_are_read_without_the_others(tmp_path: Path) -> None:
    line = Line(tmp_path, {})
    found = list(read_blocks(line, named(), [2, 7]))
    assert found == [(200, DATA[200:300]), (700, DATA[700:800])]
    assert line.fetched == {200: 1, 700: 1}


def test_a_small_file_has_no_blocks_and_a_huge_one_not_too_many() -> None:
    assert blocks_of(DATA[:BLOCK]) == {}
    for size in (BLOCK, 10**6, 10**9, 10**12):
        assert size <= block_bytes_of(size) * reading.MAX_BLOCKS
