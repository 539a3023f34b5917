"""Chunks of one call and of several: what is acknowledged is there, and nothing else counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.uploads import uploads as receiving
from data_service.uploads.uploads import MAX_CHUNK_BYTES, WRITES_IN_FLIGHT, Chunk, Uploads
from shared.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    MillraceError,
    NotFound,
    OutOfRange,
    ResourceExhausted,
)
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.upload_calls import chunk, committed, send, send_all, sha256, started
from tests.support.upload_server import uploads_of

DATA = bytes(range(40))


def acknowledged(uploads: Uploads, name: str) -> int:
    return uploads.get(name).acknowledged_size


def test_the_last_acknowledgement_is_of_all_bytes(uploads: Uploads) -> None:
    name = started(uploads)
    sizes = send_all(uploads, name, DATA)
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(DATA) == acknowledged(uploads, name)


def test_only_the_first_chunk_of_a_call_names_the_upload(uploads: Uploads) -> None:
    name = started(uploads)
    assert send(uploads, [chunk(name, 0, b"ab"), chunk("", 2, b"c")])[-1] == 3


def test_a_call_without_a_chunk_does_nothing(uploads: Uploads) -> None:
    assert send(uploads, []) == []


def test_the_end_of_the_chunks_commits_nothing(uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    assert uploads.get(name).record.state == "OPEN"


def test_a_restarted_server_goes_on_where_it_was(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA[:20])
    restarted = uploads_of(store)
    assert acknowledged(restarted, name) == 20
    assert send_all(restarted, name, DATA, offset=20)[-1] == len(DATA)
    assert uploads_of(store).commit(name, len(DATA), sha256(DATA)).record.state == "COMMITTED"


def test_a_chunk_that_is_durable_already_is_acknowledged_again(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    before = {info.key for info in store.list(f"{name}/chunks")}
    assert send(uploads, [chunk(name, 8, DATA[8:12])]) == [len(DATA)]
    assert {info.key for info in store.list(f"{name}/chunks")} == before


@given(st.lists(st.integers(1, 12), min_size=1), st.lists(st.integers(1, 12), min_size=1))
def test_the_same_bytes_may_come_again_in_other_chunks(first: list[int], second: list[int]) -> None:
    """Whatever the two clients' cuts are, and whichever of them was at work longer."""
    import tempfile

    def cut(name: str, sizes: list[int]) -> list[Chunk]:
        offsets = [sum(sizes[:n]) for n in range(len(sizes))]
        return [chunk(name, at, DATA[at : at + n]) for at, n in zip(offsets, sizes, strict=True) if DATA[at : at + n]]

    with tempfile.TemporaryDirectory() as folder:
        uploads = uploads_of(open_store(StoreSettings(url=f"file://{folder}")))
        name = started(uploads)
        send(uploads, cut(name, first))
        send(uploads, cut(name, second))
        size = min(len(DATA), max(sum(first), sum(second)))
        assert uploads.commit(name, size, sha256(DATA[:size])).acknowledged_size == size


def test_other_bytes_at_a_place_that_is_taken_are_refused(uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    with pytest.raises(Conflict, match="byte 8"):
        send(uploads, [chunk(name, 8, b"zzzz")])


def test_of_two_writers_of_other_bytes_one_is_refused_and_the_others_bytes_are_whole(store: ObjectStore) -> None:
    outcomes: dict[bytes, int | MillraceError] = {}
    shared = uploads_of(store)
    name = started(shared)
    both = threading.Barrier(2)

    def write(letter: bytes) -> None:
        uploads = uploads_of(store)  # as in a process of its own
        both.wait(60)
        try:
            outcomes[letter] = send_all(uploads, name, letter * 4000, 100)[-1]
        except Conflict as error:
            outcomes[letter] = error

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert any(isinstance(outcome, Conflict) for outcome in outcomes.values())
    for letter, outcome in outcomes.items():
        if outcome == 4000:
            shared.commit(name, 4000, sha256(letter * 4000))


def test_a_chunk_after_a_gap_is_refused_and_what_came_before_is_kept(uploads: Uploads) -> None:
    name = started(uploads)
    sizes: list[int] = []

    async def call() -> None:
        async def given() -> AsyncIterator[Chunk]:
            yield chunk(name, 0, b"abcd")
            yield chunk(name, 5, b"efgh")

        async for size in uploads.receive(given()):
            sizes.append(size)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(OutOfRange, match="the next byte is 4"):
        asyncio.run(call())
    assert sizes == [4]
    assert acknowledged(uploads, name) == 4


def test_a_chunk_that_is_not_what_its_crc32c_says_is_not_written(uploads: Uploads) -> None:
    name = started(uploads)
    with pytest.raises(DataLoss, match="byte 4"):
        send(uploads, [chunk(name, 0, b"abcd"), Chunk(name, 4, b"efgh", 1)])
    assert acknowledged(uploads, name) == 4


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [(0, b"", "data"), (0, b"x" * (MAX_CHUNK_BYTES + 1), "data"), (-1, b"x", "offset")],
    ids=["empty", "too large", "before the first byte"],
)
def test_a_malformed_chunk_is_refused(uploads: Uploads, offset: int, data: bytes, field: str) -> None:
    name = started(uploads)
    with pytest.raises(InvalidArgument) as raised:
        send(uploads, [chunk(name, offset, data)])
    assert raised.value.fields[0][0] == field


def test_one_call_writes_to_one_upload(uploads: Uploads) -> None:
    name, other = started(uploads), started(uploads, "other")
    with pytest.raises(InvalidArgument, match=name):
        send(uploads, [chunk(name, 0, b"a"), chunk(other, 1, b"b")])


def test_an_upload_that_never_was_takes_nothing(uploads: Uploads) -> None:
    with pytest.raises(NotFound):
        send(uploads, [chunk("datasets/d/uploads/nope", 0, b"a")])


def test_a_committed_upload_takes_nothing_more(uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    with pytest.raises(FailedPrecondition):
        send(uploads, [chunk(name, len(DATA), b"a")])


def test_a_long_call_hears_of_the_commit(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "POLL_INTERVAL_S", 0.0)
    name = started(uploads)

    async def given() -> AsyncIterator[Chunk]:
        yield chunk(name, 0, b"abcd")
        while uploads.get(name).acknowledged_size < 4:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0)
        uploads.commit(name, 4, sha256(b"abcd"))
        yield chunk(name, 4, b"e")

    async def call() -> None:
        async for _ in uploads.receive(given()):
            pass

    with pytest.raises(FailedPrecondition, match="no more chunks"):
        asyncio.run(call())
    assert uploads.get(name).acknowledged_size == 4


def test_a_long_call_does_not_go_on_in_the_next_upload_of_the_name(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "POLL_INTERVAL_S", 0.0)
    name = started(uploads)

    async def given() -> AsyncIterator[Chunk]:
        yield chunk(name, 0, b"abcd")
        while uploads.get(name).acknowledged_size < 4:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0)
        uploads.abort(name)
        started(uploads)
        yield chunk(name, 4, b"e")

    async def call() -> None:
        async for _ in uploads.receive(given()):
            pass

    with pytest.raises(FailedPrecondition, match="no more chunks"):
        asyncio.run(call())
    assert uploads.get(name).acknowledged_size == 0


def test_a_full_store_is_reported_after_what_came_before(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    name = started(uploads)
    put_if_absent = ObjectStore.put_if_absent

    def full(self: ObjectStore, key: str, data: bytes) -> None:
        if key.endswith(f"{8:020d}"):
            raise ResourceExhausted("full", reason="STORE_FULL")
        put_if_absent(self, key, data)

    monkeypatch.setattr(ObjectStore, "put_if_absent", full)
    with pytest.raises(ResourceExhausted):
        send_all(uploads, name, DATA)
    assert acknowledged(uploads, name) == 8
    monkeypatch.undo()
    assert send_all(uploads, name, DATA, offset=8)[-1] == len(DATA)
    uploads.commit(name, len(DATA), sha256(DATA))


def test_few_chunks_are_in_memory_however_slow_the_store_is(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    name = started(uploads)
    taken = 0
    most = []
    go = threading.Event()
    put_if_absent = ObjectStore.put_if_absent

    def slow(self: ObjectStore, key: str, data: bytes) -> None:
        go.wait(60)
        put_if_absent(self, key, data)

    async def given() -> AsyncIterator[Chunk]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield chunk(name, number, b"x")

    async def call() -> list[int]:
        sizes = uploads.receive(given())
        first = asyncio.ensure_future(anext(sizes))
        while taken <= WRITES_IN_FLIGHT:  # noqa: ASYNC110 - another task counts
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        most.append(taken)
        go.set()
        return [await first] + [size async for size in sizes]

    monkeypatch.setattr(ObjectStore, "put_if_absent", slow)
    assert asyncio.run(call())[-1] == 20
    assert most[0] == WRITES_IN_FLIGHT + 1


def test_a_cancelled_call_leaves_whole_chunks_only(uploads: Uploads) -> None:
    name = started(uploads)

    async def call() -> None:
        async def given() -> AsyncIterator[Chunk]:
            yield chunk(name, 0, b"abcd")
            yield chunk(name, 4, b"efgh")
            await asyncio.Event().wait()

        async for _ in uploads.receive(given()):
            pass

    async def cancelled() -> None:
        task = asyncio.create_task(call())
        while uploads.get(name).acknowledged_size < 8:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert acknowledged(uploads, name) == 8
    assert send(uploads, [chunk(name, 8, b"ij")]) == [10]
    uploads.commit(name, 10, sha256(b"abcdefghij"))
