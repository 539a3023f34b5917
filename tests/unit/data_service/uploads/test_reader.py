"""An upload as a file: read in order and at random, while it grows and once it is whole."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.uploads import chunks
from data_service.uploads import upload as reader
from data_service.uploads.upload import PinnedBlocks, UploadRecord, log_of, open_upload, verify
from data_service.uploads.uploads import Uploads
from shared.errors import Cancelled, DataLoss, FailedPrecondition, InvalidArgument, NotFound
from shared.storage import ObjectStore
from tests.support.upload_calls import chunk, committed, send, send_all, sha256, started

DATA = bytes(range(256)) * 10


@pytest.fixture(params=[8 << 20, 7], ids=["whole chunks", "parts of chunks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Large chunks, such as parts put by URL, are read in several blocks."""
    monkeypatch.setattr(chunks, "BLOCK_BYTES", request.param)
    return int(request.param)


def sole_chunk(store: ObjectStore, name: str) -> str:
    (info,) = store.list(f"{name}/chunks")
    return info.key


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("chunk_bytes", [1000, 64, len(DATA)])
def test_the_bytes_come_back_in_order(store: ObjectStore, uploads: Uploads, chunk_bytes: int) -> None:
    name = committed(uploads, DATA, chunk_bytes=chunk_bytes)
    with open_upload(store, name) as file:
        assert file.read() == DATA
        assert file.read(1) == b""
        verify(file)


@pytest.mark.usefixtures("blocks")
def test_any_place_can_be_read(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=100)
    with open_upload(store, name) as file:
        assert file.seek(-5, io.SEEK_END) == len(DATA) - 5
        assert file.read() == DATA[-5:]
        file.seek(123)
        assert file.read(500) == DATA[123:623]
        file.seek(7, io.SEEK_CUR)
        assert file.tell() == 630
        assert file.read(2) == DATA[630:632]
        assert file.seek(len(DATA) + 10) == len(DATA) + 10
        assert file.read(1) == b""
        verify(file)


def test_a_parquet_file_is_read_as_from_a_disk(store: ObjectStore, uploads: Uploads) -> None:
    table = pa.table({"a": range(5000), "b": [str(n) for n in range(5000)]})
    data = io.BytesIO()
    pq.write_table(table, data, row_group_size=1000)
    name = committed(uploads, data.getvalue(), chunk_bytes=4096)
    with open_upload(store, name) as file:
        assert pq.ParquetFile(file).read().equals(table)
        verify(file)


def test_an_error_of_the_upload_comes_through_arrow_as_it_is(store: ObjectStore, uploads: Uploads) -> None:
    data = io.BytesIO()
    pq.write_table(pa.table({"a": range(5000)}), data, row_group_size=1000)
    name = committed(uploads, data.getvalue(), chunk_bytes=4096)
    with open_upload(store, name) as file:
        opened = pq.ParquetFile(file)
        store.delete_folder(f"{name}/chunks")
        file.seek(0)
        with pytest.raises(DataLoss, match="is gone"):
            opened.read()


def test_an_upload_without_a_byte_is_an_empty_file(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, b"")
    with open_upload(store, name) as file:
        assert file.read() == b""
        assert file.seek(0, io.SEEK_END) == 0
        verify(file)


@pytest.mark.parametrize(("name", "kind"), [("datasets/d/uploads/none", NotFound), ("d", InvalidArgument)])
def test_open_upload_refuses_a_malformed_or_unknown_name(
    store: ObjectStore, uploads: Uploads, name: str, kind: type[Exception]
) -> None:
    assert uploads
    with pytest.raises(kind):
        open_upload(store, name)


def test_a_name_is_refused_under_the_field_that_gave_it(store: ObjectStore) -> None:
    with pytest.raises(InvalidArgument, match=r"sources\[0\].uri"):
        open_upload(store, "d", field="sources[0].uri")


def test_a_damaged_chunk_is_data_loss_before_the_last_bytes_are_given(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=len(DATA))
    store.put(sole_chunk(store, name), b"\xff" + DATA[1:])
    with open_upload(store, name) as file, pytest.raises(DataLoss, match="not those that were committed"):
        file.read()


def test_damage_that_was_not_read_in_order_is_found_by_verifying(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=1000)
    store.put(sorted(info.key for info in store.list(f"{name}/chunks"))[1], b"\xff" * 1000)
    with open_upload(store, name) as file:
        file.seek(2500)
        file.read(10)
        with pytest.raises(DataLoss):
            verify(file)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_missing_chunk_is_data_loss(store: ObjectStore, uploads: Uploads, which: int) -> None:
    name = committed(uploads, DATA, chunk_bytes=1000)
    store.delete(sorted(info.key for info in store.list(f"{name}/chunks"))[which])
    with open_upload(store, name) as file, pytest.raises(DataLoss, match="is gone"):
        file.read()


def test_a_chunk_that_goes_away_while_it_is_read_is_data_loss(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=1000)
    with open_upload(store, name) as file:
        store.delete_folder(f"{name}/chunks")
        with pytest.raises(DataLoss, match="is gone"):
            file.read()


def test_a_chunk_that_is_shorter_than_it_was_is_data_loss(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=len(DATA))
    with open_upload(store, name) as file:
        store.put(sole_chunk(store, name), DATA[:-1])
        with pytest.raises(DataLoss, match="it had"):
            file.read()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the result waits for its end."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> Any:
        thread.join(120)
        assert outcome, "it still waits"
        return outcome[0]

    return ended


def test_an_open_upload_is_read_as_it_grows_until_its_commit(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    waits = threading.Semaphore(0)
    with open_upload(store, name, on_wait=waits.release) as file:
        ended = in_thread(file.read)
        for offset in range(0, len(DATA), 100):
            assert waits.acquire(timeout=60)  # it has read all there is
            send(uploads, [chunk(name, offset, DATA[offset : offset + 100])])
        uploads.commit(name, len(DATA), sha256(DATA))
        assert ended() == DATA
        verify(file)


def test_received_bytes_of_an_open_upload_are_read_at_once(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA[:1000], 100)

    def never() -> None:
        raise AssertionError("it waits")

    with open_upload(store, name, on_wait=never) as file:
        assert file.read1(100) == DATA[:100]  # type: ignore[attr-defined]
        file.seek(900)
        assert file.read1(100) == DATA[900:1000]  # type: ignore[attr-defined]


def test_the_end_of_an_open_upload_is_known_with_its_commit(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA, 100)
    waiting = threading.Event()
    with open_upload(store, name, on_wait=waiting.set) as file:
        ended = in_thread(lambda: file.seek(0, io.SEEK_END))
        assert waiting.wait(60)
        uploads.commit(name, len(DATA), sha256(DATA))
        assert ended() == len(DATA)


def test_following_ends_when_the_upload_is_aborted(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    waiting = threading.Event()
    with open_upload(store, name, on_wait=waiting.set) as file:
        ended = in_thread(file.read)
        assert waiting.wait(60)
        uploads.abort(name)
        outcome = ended()
    assert isinstance(outcome, FailedPrecondition)
    assert "aborted" in outcome.message


def test_following_does_not_mistake_the_next_upload_of_the_id_for_its_own(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    with open_upload(store, name) as file:
        uploads.abort(name)
        committed(uploads, DATA)
        with pytest.raises(FailedPrecondition, match="aborted"):
            file.read()


def test_an_upload_that_was_sent_anew_is_not_opened_as_the_one_before(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    uid = uploads.get(name).record.uid
    open_upload(store, name, uid=uid).close()
    uploads.abort(name)
    committed(uploads, DATA)
    with pytest.raises(FailedPrecondition, match="aborted"):
        open_upload(store, name, uid=uid)


def test_following_ends_when_no_byte_comes(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA, 100)
    with (
        open_upload(store, name, outage_timeout_s=0.05) as file,
        pytest.raises(FailedPrecondition, match="no byte came"),
    ):
        file.read()


def test_a_waiting_reader_can_be_stopped(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)

    def stop() -> None:
        raise Cancelled("stop")

    with open_upload(store, name, on_wait=stop) as file, pytest.raises(Cancelled):
        file.read()


def test_bytes_that_came_after_the_count_of_the_commit_are_no_part_of_it(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA, chunk_bytes=1000)
    upload = uploads.get(name).record
    store.put(f"{upload.chunks_prefix}/{len(DATA):020d}", b"late")
    with open_upload(store, name) as file:
        assert file.read() == DATA


def test_bytes_given_out_that_the_commit_then_leaves_out_are_reported(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA, 1000)
    upload = uploads.get(name).record
    with open_upload(store, name) as file:
        late = f"{upload.chunks_prefix}/{len(DATA):020d}"
        store.put(late, b"late")
        file.seek(len(DATA))
        assert file.read1(4) == b"late"  # type: ignore[attr-defined]
        store.delete(late)  # as if it had come between the commit's count and the commit
        uploads.commit(name, len(DATA), sha256(DATA))
        with pytest.raises(DataLoss):
            file.read()


def presigned(store: ObjectStore, uploads: Uploads) -> UploadRecord:
    """An open upload whose parts are put into the store by the client."""
    name = started(uploads)
    log_of(store, name).update(lambda record: {**record.state, "presigned": True} if record else None)
    return uploads.get(name).record


def put_part(store: ObjectStore, upload: UploadRecord, offset: int, data: bytes) -> None:
    store.put(f"{upload.chunks_prefix}/{offset:020d}", data)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("cut", [300, 500])
@pytest.mark.parametrize("read_by", ["reading", "verifying"])
def test_a_part_that_was_read_and_put_again_with_another_size_is_data_loss(
    store: ObjectStore, uploads: Uploads, read_by: str, cut: int
) -> None:
    upload = presigned(store, uploads)
    put_part(store, upload, 0, b"\xff" * 400)
    with open_upload(store, upload.name) as file:
        assert file.read(400) == b"\xff" * 400
        put_part(store, upload, 0, DATA[:cut])
        put_part(store, upload, cut, DATA[cut:])
        uploads.commit(upload.name, len(DATA), sha256(DATA))
        with pytest.raises(DataLoss):
            file.read() if read_by == "reading" else verify(file)


def test_a_part_that_nobody_read_may_be_put_again(store: ObjectStore, uploads: Uploads) -> None:
    upload = presigned(store, uploads)
    put_part(store, upload, 0, DATA[:400])
    with open_upload(store, upload.name) as file:
        put_part(store, upload, 0, DATA[:500])
        put_part(store, upload, 500, DATA[500:])
        uploads.commit(upload.name, len(DATA), sha256(DATA))
        file.seek(600)
        assert file.read(10) == DATA[600:610]
        verify(file)


@pytest.mark.usefixtures("blocks")
def test_a_part_put_again_between_its_reading_and_the_commit_is_data_loss(store: ObjectStore, uploads: Uploads) -> None:
    upload = presigned(store, uploads)
    put_part(store, upload, 0, b"\xff" * len(DATA))
    with open_upload(store, upload.name) as file:
        assert file.read(len(DATA)) == b"\xff" * len(DATA)
        put_part(store, upload, 0, DATA)
        uploads.commit(upload.name, len(DATA), sha256(DATA))
        with pytest.raises(DataLoss, match="not those that were committed"):
            file.read()


@pytest.mark.parametrize("change", ["bytes", "cut"])
def test_a_verified_upload_that_changed_before_the_read_raises_data_loss(
    store: ObjectStore, uploads: Uploads, change: str
) -> None:
    upload = presigned(store, uploads)
    put_part(store, upload, 0, DATA[:500])
    put_part(store, upload, 500, DATA[500:])
    uploads.commit(upload.name, len(DATA), sha256(DATA))
    pins = PinnedBlocks()
    with open_upload(store, upload.name, pins=pins) as file:
        verify(file)
    if change == "bytes":
        put_part(store, upload, 500, b"\0" * len(DATA[500:]))
    else:
        put_part(store, upload, 500, DATA[500:1000])
        put_part(store, upload, 1000, DATA[1000:])
    with open_upload(store, upload.name, pins=pins) as file, pytest.raises(DataLoss):
        file.seek(1500) and file.read(10)


def test_a_block_that_is_read_again_is_the_same_or_data_loss(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "KEPT_BLOCKS", 1)
    monkeypatch.setattr(reader, "BUFFER_BYTES", 10)
    upload = presigned(store, uploads)
    for offset in range(0, len(DATA), 640):
        put_part(store, upload, offset, DATA[offset : offset + 640])
    uploads.commit(upload.name, len(DATA), sha256(DATA))
    with open_upload(store, upload.name) as file:
        assert file.read(10) == DATA[:10]
        file.seek(2000)
        file.read(10)
        put_part(store, upload, 0, b"\xff" * 640)
        file.seek(0)
        with pytest.raises(DataLoss):
            file.read(10)
