"""The client's upload against a real server: on after breaks, within bounded memory, and resumable by name."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_service.uploads import chunks as blocks_ahead
from data_service.uploads.chunks import Block, read_block
from data_service.uploads.upload import log_of, open_upload
from data_service.uploads.uploads import Chunk, Uploads
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client import calls, uploads
from millrace_client.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from millrace_client.uploads import ChunkStream, UploadInterrupted, resume_upload, upload
from shared import errors as server_errors
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.upload_calls import chunk, send, started
from tests.support.upload_server import DATASET, UploadServer, calling, upload_server, uploads_of
from tests.support.waiting import wait_until

State = resources_pb2.Upload.State
CHUNK = 1000
DATA = bytes(range(256)) * 100 + b"end"


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


@pytest.fixture
def server(store: ObjectStore) -> Iterator[UploadServer]:
    with upload_server(store) as running:
        yield running


def content(store: ObjectStore, name: str) -> bytes:
    with open_upload(store, name) as file:
        return file.read()


def test_a_path_arrives_whole_and_is_committed(server: UploadServer, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    seen: list[tuple[int, int | None]] = []
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, path, upload_id="u", on_progress=lambda *size: seen.append(size))
    assert done.name == f"{DATASET}/uploads/u"
    assert done.state == State.STATE_COMMITTED
    assert content(server.store, done.name) == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    "source",
    [
        lambda: io.BytesIO(DATA),
        lambda: DATA,
        lambda: (DATA[at : at + 7] for at in range(0, len(DATA), 7)),
        lambda: [DATA, b""],
        lambda: io.BufferedReader(io.BytesIO(DATA), 10),
    ],
    ids=["file", "bytes", "small pieces", "one large piece", "buffered"],
)
def test_any_source_of_bytes_arrives_whole(server: UploadServer, source: Callable[[], Any]) -> None:
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, source())
    assert content(server.store, done.name) == DATA
    sizes = [info.size_bytes for info in server.store.list(f"{done.name}/chunks")]
    assert max(sizes) == CHUNK
    assert len(sizes) == -(-len(DATA) // CHUNK)


def test_an_open_file_is_read_on_from_where_it_is_and_stays_open(server: UploadServer) -> None:
    file = io.BytesIO(DATA)
    file.seek(5000)
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, file)
    assert content(server.store, done.name) == DATA[5000:]
    assert not file.closed


def test_a_source_without_a_byte_is_an_upload_without_a_byte(server: UploadServer) -> None:
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, b"")
    assert (done.state, done.size_bytes) == (State.STATE_COMMITTED, 0)


def test_an_upload_continues_after_the_server_restarted(server: UploadServer) -> None:
    restarts = []

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(DATA), CHUNK):
            if at in (5 * CHUNK, 15 * CHUNK):
                server.stop()
                restarts.append(at)
                server.start()
            yield DATA[at : at + CHUNK]

    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, pieces())
    assert len(restarts) == 2
    assert content(server.store, done.name) == DATA


def test_a_slow_sources_bytes_are_sent_as_they_come_also_after_a_break(server: UploadServer) -> None:
    name = f"{DATASET}/uploads/u"

    def arrived(size: int) -> None:
        with calling(server) as (_, stub):
            asked = pb.GetUploadRequest(name=name)
            wait_until(lambda: stub.GetUpload(asked).acknowledged_size >= size, f"{size} bytes to arrive")

    def pieces() -> Iterator[bytes]:
        yield DATA[:CHUNK]
        arrived(CHUNK)
        server.stop()
        server.start()
        yield DATA[CHUNK : 2 * CHUNK]
        yield DATA[2 * CHUNK : 3 * CHUNK]
        arrived(2 * CHUNK)
        yield DATA[3 * CHUNK :]

    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, pieces(), upload_id="u")
    assert content(server.store, done.name) == DATA


def test_an_upload_waits_for_an_absent_server(server: UploadServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:CHUNK]
        server.stop()
        back.start()
        yield DATA[CHUNK:]

    back = threading.Timer(0.3, server.start)
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, pieces())
    back.join()
    assert content(server.store, done.name) == DATA


def test_an_upload_fails_when_the_server_stays_absent_and_says_how_to_resume(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "OUTAGE_TIMEOUT_S", 0.2)

    def pieces() -> Iterator[bytes]:
        yield DATA[:CHUNK]
        server.stop()
        yield DATA[CHUNK:]

    with calling(server) as (caller, stub), pytest.raises(Unavailable) as raised:
        upload(caller, stub, DATASET, pieces(), upload_id="u")
    name = raised.value.metadata["upload"]
    assert name in raised.value.remedy
    server.start()
    with calling(server) as (caller, stub):
        assert resume_upload(caller, stub, name, DATA).state == State.STATE_COMMITTED
    assert content(server.store, name) == DATA


def test_a_server_that_takes_chunks_and_acknowledges_none_is_given_up(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Uploads, chunks: AsyncIterator[Chunk]) -> AsyncIterator[int]:
        async for _chunk in chunks:
            pass
        yield 0

    monkeypatch.setattr(Uploads, "receive", never)
    monkeypatch.setattr(uploads, "SILENCE_S", 0.1)
    monkeypatch.setattr(calls, "OUTAGE_TIMEOUT_S", 0.05)
    with calling(server) as (caller, stub), pytest.raises(DeadlineExceeded, match="silent") as raised:
        upload(caller, stub, DATASET, DATA, upload_id="u")
    assert raised.value.metadata["upload"] == f"{DATASET}/uploads/u"


def test_few_chunks_are_unacknowledged_however_fast_the_source_is(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if_absent = ObjectStore.put_if_absent
    go, taken = threading.Event(), 0

    def held(self: ObjectStore, key: str, data: bytes) -> None:
        if "/chunks/" in key:
            assert go.wait(60)
        put_if_absent(self, key, data)

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for at in range(0, len(DATA), CHUNK):
            taken += 1
            if taken == uploads.WINDOW + 1:
                assert go.is_set(), "more was taken than the window holds"
            yield DATA[at : at + CHUNK]

    monkeypatch.setattr(ObjectStore, "put_if_absent", held)
    threading.Timer(0.3, go.set).start()
    with calling(server) as (caller, stub):
        upload(caller, stub, DATASET, pieces())


def test_ctrl_c_leaves_the_upload_open_and_reports_its_name(server: UploadServer) -> None:
    def pieces() -> Iterator[bytes]:
        for at in range(0, 20 * CHUNK, CHUNK):
            yield DATA[at : at + CHUNK]
        raise KeyboardInterrupt

    with calling(server) as (caller, stub), pytest.raises(UploadInterrupted) as raised:
        upload(caller, stub, DATASET, pieces())
    name = raised.value.name
    with calling(server) as (caller, stub):
        there = stub.GetUpload(pb.GetUploadRequest(name=name))
        assert there.state == State.STATE_OPEN
        assert there.acknowledged_size > 0
        resume_upload(caller, stub, name, io.BytesIO(DATA))
    assert content(server.store, name) == DATA


def test_chunks_that_the_server_has_are_not_sent_again(server: UploadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _half_sent(server)
    sent: list[int] = []
    launch = ChunkStream.send

    def noted(self: Any, request: Any) -> None:
        sent.append(request.offset)
        launch(self, request)

    monkeypatch.setattr(ChunkStream, "send", noted)
    with calling(server) as (caller, stub):
        resume_upload(caller, stub, name, DATA)
    assert min(sent) == 12_345
    assert content(server.store, name) == DATA


def test_resuming_with_another_source_is_data_loss(server: UploadServer) -> None:
    name = _half_sent(server)
    with calling(server) as (caller, stub), pytest.raises(DataLoss, match="abort"):
        resume_upload(caller, stub, name, b"\xff" + DATA[1:])


def test_resuming_a_committed_upload_is_done_at_once(server: UploadServer) -> None:
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, DATA)
        assert resume_upload(caller, stub, done.name, DATA) == done
        with pytest.raises(FailedPrecondition):
            resume_upload(caller, stub, done.name, DATA[:-1])


class SlowReading:
    """The server reads one more part for each call of CommitUpload, and takes longer for the next than any of the first
    `short_calls` has; those after them have all the time that they need. `stuck`, it reads none until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stuck: bool = False, short_calls: int = 0) -> None:
        self.commits = 0
        self._stuck = stuck
        self._called = threading.Condition()
        check = Uploads._check_bytes

        def checked(*given: Any) -> None:
            with self._called:
                self.commits += 1
                if self.commits == short_calls:
                    monkeypatch.setattr(uploads, "COMMIT_CALL_S", 60.0)
                self._called.notify_all()
            check(*given)

        def read_slowly(store: ObjectStore, block: Block) -> bytes:
            with self._called:
                self._called.wait_for(lambda: not self._stuck and self.commits > block.offset // CHUNK, 60)
            return read_block(store, block)

        monkeypatch.setattr(Uploads, "_check_bytes", checked)
        monkeypatch.setattr(blocks_ahead, "read_block", read_slowly)

    def go_on(self) -> None:
        with self._called:
            self._stuck = False
            self._called.notify_all()


def _sent_by_url(server: UploadServer, parts: int) -> tuple[str, bytes]:
    """An upload whose parts are all there, and none was hashed."""
    data = DATA[: parts * CHUNK]
    name = started(uploads_of(server.store))
    log_of(server.store, name).update(lambda record: {**record.state, "presigned": True} if record else None)
    prefix = uploads_of(server.store).get(name).record.chunks_prefix
    for offset in range(0, len(data), CHUNK):
        server.store.put(f"{prefix}/{offset:020d}", data[offset : offset + CHUNK])
    return name, data


def test_a_commit_that_takes_longer_than_any_call_goes_on_while_the_server_gets_further(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = _sent_by_url(server, parts=4)
    reading = SlowReading(monkeypatch, short_calls=3)
    monkeypatch.setattr(calls, "OUTAGE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(uploads, "COMMIT_CALL_S", 1.0)
    monkeypatch.setattr(uploads, "REACHED_S", 0.5)
    with calling(server) as (caller, stub):
        assert resume_upload(caller, stub, name, data).state == State.STATE_COMMITTED
    assert reading.commits == 4
    assert content(server.store, name) == data


def test_a_commit_ends_when_the_server_answers_but_gets_no_further(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = _sent_by_url(server, parts=4)
    reading = SlowReading(monkeypatch, stuck=True)
    monkeypatch.setattr(uploads, "COMMIT_CALL_S", 0.5)
    monkeypatch.setattr(uploads, "COMMIT_STALLED_S", 0.5)
    with calling(server) as (caller, stub), pytest.raises(DeadlineExceeded) as raised:
        resume_upload(caller, stub, name, data)
    reading.go_on()
    assert raised.value.metadata["upload"] == name


def test_an_error_of_the_source_is_raised_as_it_is_and_reports_how_to_resume(server: UploadServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:CHUNK]
        raise OSError("the tape tore")

    with calling(server) as (caller, stub), pytest.raises(OSError, match="tape") as raised:
        upload(caller, stub, DATASET, pieces(), upload_id="u")
    assert f"{DATASET}/uploads/u" in raised.value.__notes__[0]


def test_a_path_that_is_not_there_starts_no_upload(server: UploadServer, tmp_path: Path) -> None:
    with calling(server) as (caller, stub), pytest.raises(FileNotFoundError):
        upload(caller, stub, DATASET, tmp_path / "none")
    assert not server.store.folders(f"{DATASET}/uploads")


def test_a_taken_id_is_refused(server: UploadServer) -> None:
    with calling(server) as (caller, stub):
        upload(caller, stub, DATASET, DATA, upload_id="u")
        with pytest.raises(AlreadyExists):
            upload(caller, stub, DATASET, DATA, upload_id="u")


def test_an_upload_that_is_gone_is_not_to_be_resumed(server: UploadServer) -> None:
    with calling(server) as (caller, stub), pytest.raises(NotFound) as raised:
        resume_upload(caller, stub, f"{DATASET}/uploads/none", DATA)
    assert "resume" not in raised.value.remedy


def test_another_writers_bytes_end_it(server: UploadServer, store: ObjectStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:CHUNK]
        other, name = uploads_of(store), f"{DATASET}/uploads/u"
        wait_until(lambda: other.get(name).acknowledged_size >= CHUNK, "the first chunk")
        send(other, [chunk(name, at, b"\xff" * CHUNK) for at in range(CHUNK, 10 * CHUNK, CHUNK)])
        yield DATA[CHUNK:]

    with calling(server) as (caller, stub), pytest.raises(Aborted):
        upload(caller, stub, DATASET, pieces(), upload_id="u")


def test_a_full_store_ends_it_and_it_goes_on_once_there_is_room(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if_absent = ObjectStore.put_if_absent

    def full(self: ObjectStore, key: str, data: bytes) -> None:
        if key.endswith(f"{7 * CHUNK:020d}"):
            raise server_errors.ResourceExhausted("the object store is full", reason="STORE_FULL")
        put_if_absent(self, key, data)

    monkeypatch.setattr(ObjectStore, "put_if_absent", full)
    with calling(server) as (caller, stub):
        with pytest.raises(ResourceExhausted) as raised:
            upload(caller, stub, DATASET, DATA)
        monkeypatch.undo()
        name = raised.value.metadata["upload"]
        assert resume_upload(caller, stub, name, DATA).state == State.STATE_COMMITTED


def test_a_chunk_that_was_damaged_on_the_way_is_sent_again(
    server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Uploads.receive
    damaged: list[Chunk] = []

    async def flipping(chunks: Any) -> Any:
        async for one in chunks:
            if one.offset == 3 * CHUNK and not damaged:
                damaged.append(one)
                yield Chunk(one.name, one.offset, one.data[:-1] + b"\xee", one.crc32c)
            else:
                yield one

    monkeypatch.setattr(Uploads, "receive", lambda self, chunks: receive(self, flipping(chunks)))
    with calling(server) as (caller, stub):
        done = upload(caller, stub, DATASET, DATA)
    assert damaged
    assert content(server.store, done.name) == DATA


def _half_sent(server: UploadServer) -> str:
    """Bytes of an earlier client, which cut them differently."""
    other = uploads_of(server.store)
    started, _ = other.start(DATASET, "half", request_id="", body_sha256="")
    send(other, [chunk(started.record.name, 0, DATA[:12_345])])
    return started.record.name
