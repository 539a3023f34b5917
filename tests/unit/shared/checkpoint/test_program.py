"""The files of a program's checkpoint are read piece by piece, in order, some ahead, and held against their digest."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from shared.checkpoint import reading
from shared.checkpoint.format import ProgramFile, read_program_file
from shared.errors import DataLoss
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

FOLDER = "trainingJobs/own/checkpoints/data/report-00000001-a00001-00000000"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 10)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


def saved(store: ObjectStore, data: bytes) -> ProgramFile:
    file = ProgramFile(path="model.pt", rank=0, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    store.put(f"{FOLDER}/{file.object}", data)
    return file


@pytest.mark.parametrize("size", [0, 1, 10, 11, 20, 95])
def test_pieces_come_in_their_order(store: ObjectStore, size: int) -> None:
    data = bytes(range(size))
    pieces = list(read_program_file(store, FOLDER, saved(store, data)))
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [10] * (size // 10) + [size % 10] * bool(size % 10)


def test_the_next_pieces_are_on_their_way_while_one_is_used(store: ObjectStore) -> None:
    file = saved(store, bytes(range(50)))
    together = threading.Barrier(2)

    class Waiting:
        """Answers only where two ask at the same time."""

        get = store.get

        def get_range(self, key: str, start: int, length: int) -> bytes:
            if start < 40:
                together.wait(60)
            return store.get_range(key, start, length)

    assert b"".join(read_program_file(Waiting(), FOLDER, file)) == bytes(range(50))


def test_a_missing_short_or_changed_file_is_reported(store: ObjectStore) -> None:
    data = bytes(range(95))
    file = saved(store, data)
    key = f"{FOLDER}/{file.object}"
    store.put(key, data[:94] + b"x")
    with pytest.raises(DataLoss, match="does not have the digest that its manifest names"):
        list(read_program_file(store, FOLDER, file))
    store.put(key, data[:37])
    with pytest.raises(DataLoss, match="ends before byte"):
        list(read_program_file(store, FOLDER, file))
    store.delete(key)
    with pytest.raises(DataLoss, match=r"model\.pt is missing"):
        list(read_program_file(store, FOLDER, file))
