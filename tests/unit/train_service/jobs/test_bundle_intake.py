"""Bundles as they are streamed in: whatever comes instead of one is refused and leaves nothing."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.code_bundle_registry import BundleRecord, CodeBundles
from shared.code_packing import MAX_BUNDLE_BYTES
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError, ResourceExhausted
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.code_folders import LOOP, packed_bytes
from train_service.jobs.own_code import MAX_CHUNK_BYTES, BundleIntake, Header

DATA = packed_bytes({"train.py": LOOP})
DIGEST = hashlib.sha256(DATA).hexdigest()
HEADER = Header(DIGEST, len(DATA))


def send(store: ObjectStore, *parts: Header | bytes) -> BundleRecord:
    async def stream() -> AsyncIterator[Header | bytes]:
        for part in parts:
            yield part

    return asyncio.run(BundleIntake(CodeBundles(store), OwnCode(is_trusted=True)).receive(stream()))


def test_a_bundle_may_come_in_any_pieces(store: ObjectStore) -> None:
    record = send(store, HEADER, *(DATA[at : at + 700] for at in range(0, len(DATA), 700)))
    assert record == CodeBundles(store).get(f"codeBundles/{DIGEST}")


@pytest.mark.parametrize(
    ("parts", "kind", "text"),
    [
        ((), InvalidArgument, "header: None: send it first"),
        ((DATA,), InvalidArgument, "header: None: send it first"),
        ((HEADER, HEADER), InvalidArgument, "send it once"),
        ((HEADER, DATA[:-1]), InvalidArgument, f"header.size_bytes: {len(DATA)}: only {len(DATA) - 1} bytes came"),
        ((HEADER,), InvalidArgument, "only 0 bytes came"),
        ((HEADER, DATA, b"x"), InvalidArgument, "more bytes came"),
        ((HEADER, bytes(MAX_CHUNK_BYTES + 1)), InvalidArgument, "chunk: "),
        ((Header("ABC", 3), b"abc"), InvalidArgument, "header.sha256: 'ABC'"),
        ((Header(DIGEST, 0),), InvalidArgument, "header.size_bytes: 0"),
        ((Header(DIGEST, -1),), InvalidArgument, "header.size_bytes: -1"),
        ((Header("0" * 64, len(DATA)), DATA), InvalidArgument, "header.sha256: "),
        ((Header(DIGEST, MAX_BUNDLE_BYTES + 1),), ResourceExhausted, "at most 67,108,864 bytes"),
    ],
)
def test_other_streams_are_refused_and_leave_nothing(
    store: ObjectStore,
    parts: tuple[Header | bytes, ...],
    kind: type[MillraceError],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(kind) as caught:
        send(store, *parts)
    assert text in caught.value.message
    assert list(temporary.iterdir()) == []
    assert list(store.list()) == []


def test_no_bundle_is_taken_where_own_code_is_off(store: ObjectStore) -> None:
    read = []

    async def parts() -> AsyncIterator[Header | bytes]:
        read.append(HEADER)
        yield HEADER

    with pytest.raises(FailedPrecondition) as caught:
        asyncio.run(BundleIntake(CodeBundles(store)).receive(parts()))
    assert caught.value.specific_reason == "OWN_CODE_OFF"
    assert not read
