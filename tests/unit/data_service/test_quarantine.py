"""Rows that were left out are read in pieces, and only where all of them are what was committed."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from data_service.datasets import Datasets, Versions
from data_service.deletion import Deletions
from data_service.servicer import DataServicer
from millrace.data.v1 import data_service_pb2
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import DataLoss, NotFound
from shared.jobs import Jobs
from shared.storage import ObjectStore
from tests.support.quarantined_version import commit_with_quarantine

MIB = 1024 * 1024
VERSION = "datasets/d/versions/v1"
LINES = b"".join(b'{"source": "file:///s.csv", "place": "line %d"}\n' % n for n in range(600_000))


def commit(store: ObjectStore, lines: bytes = b"") -> str:
    """The key of the quarantined rows of a new version; with none, of what would be there."""
    return f"{commit_with_quarantine(store, VERSION, lines)}/quarantine.jsonl"


def read(store: ObjectStore, take: Callable[[bytes], object]) -> None:
    """Give what a call answers, message by message."""
    given: Any = None
    versions = Versions(store, Jobs(store, IMPORT_KIND), Datasets(store))
    servicer = DataServicer(given, given, versions, given, given, given)

    async def call() -> None:
        request = data_service_pb2.ReadQuarantineRequest(name=VERSION)
        async for message in servicer.ReadQuarantine(request, given):
            take(message.json_lines)

    asyncio.run(call())


@pytest.mark.parametrize("lines", [b"", b"{}\n", LINES[: 3 * MIB]], ids=["none", "one", "several pieces"])
def test_the_rows_come_as_they_were_committed(store: ObjectStore, lines: bytes) -> None:
    commit(store, lines)
    pieces: list[bytes] = []
    read(store, pieces.append)
    assert b"".join(pieces) == lines
    assert all(0 < len(piece) <= MIB for piece in pieces)


def test_a_call_holds_a_few_pieces_of_them_however_many_there_are(store: ObjectStore) -> None:
    commit(store, LINES)
    tracemalloc.start()
    try:
        read(store, len)
        assert tracemalloc.get_traced_memory()[1] < len(LINES) / 3
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[: 2 * MIB],
        lambda data: data + b"{}\n",
        None,
    ],
    ids=["last byte", "short", "long", "gone"],
)
def test_of_a_damaged_file_no_row_is_given_out(store: ObjectStore, damage: Callable[[bytes], bytes] | None) -> None:
    data = LINES[: 3 * MIB]
    key = commit(store, data)
    if damage:
        store.put(key, damage(data))
    else:
        store.delete(key)
    pieces: list[bytes] = []
    with pytest.raises(DataLoss, match=r"quarantine\.jsonl of datasets/d/versions/v1 is not what was committed"):
        read(store, pieces.append)
    assert not pieces


def test_a_version_that_is_deleted_while_its_rows_are_read_is_not_found(store: ObjectStore) -> None:
    commit(store, LINES[: 3 * MIB])
    jobs = Jobs(store, IMPORT_KIND)
    versions = Versions(store, jobs, Datasets(store))
    version = versions.active(VERSION)
    pieces = versions.quarantine(version)
    next(pieces)
    Deletions(store, jobs).delete(VERSION)
    with pytest.raises(NotFound, match="deleted while it was read"):
        list(pieces)
    for read_more in (lambda: list(versions.quarantine(version)), lambda: versions.report(version)):
        with pytest.raises(NotFound, match="deleted while it was read"):
            read_more()
