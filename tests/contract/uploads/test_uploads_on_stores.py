"""The upload RPCs on a real server over each kind of store, and parts put by URL."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest

from data_service.uploads.upload import open_upload, verify
from data_service.uploads.uploads import MIN_PART_BYTES
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from shared.errors import DataLoss
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.contract.storage.test_presigning import put
from tests.support.small_disk import small_disk
from tests.support.upload_server import DATASET, UploadServer, stub_of, upload_server

State = resources_pb2.Upload.State
DATA = bytes(range(256)) * 40_000  # about 10 MB
CHUNK = 1 << 20


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    return open_store(store_settings)


@pytest.fixture
def server(store: ObjectStore) -> Iterator[UploadServer]:
    with upload_server(store) as running:
        yield running


@pytest.fixture
def stub(server: UploadServer) -> Iterator[Any]:
    with stub_of(server) as opened:
        yield opened


def requests(name: str, data: bytes, start: int = 0) -> Iterator[pb.UploadChunksRequest]:
    for offset in range(start, len(data), CHUNK):
        piece = data[offset : offset + CHUNK]
        yield pb.UploadChunksRequest(name=name, offset=offset, data=piece, crc32c=google_crc32c.value(piece))


def start(stub: Any, **fields: Any) -> resources_pb2.Upload:
    upload = stub.StartUpload(pb.StartUploadRequest(parent=DATASET, **fields))
    assert isinstance(upload, resources_pb2.Upload)
    return upload


def commit(stub: Any, name: str, data: bytes) -> resources_pb2.Upload:
    digest = hashlib.sha256(data).hexdigest()
    upload = stub.CommitUpload(pb.CommitUploadRequest(name=name, size_bytes=len(data), sha256=digest))
    assert isinstance(upload, resources_pb2.Upload)
    return upload


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_an_upload_is_sent_committed_read_and_aborted(store: ObjectStore, stub: Any) -> None:
    name = start(stub, upload_id="u").name
    sizes = [answer.acknowledged_size for answer in stub.UploadChunks(requests(name, DATA))]
    assert sizes[-1] == len(DATA)
    opened = stub.GetUpload(pb.GetUploadRequest(name=name))
    assert (opened.state, opened.acknowledged_size) == (State.STATE_OPEN, len(DATA))
    done = commit(stub, name, DATA)
    assert (done.state, done.size_bytes) == (State.STATE_COMMITTED, len(DATA))
    assert done == commit(stub, name, DATA)
    assert done.expire_time.seconds > done.create_time.seconds
    with open_upload(store, name) as file:
        assert file.read() == DATA
    stub.AbortUpload(pb.AbortUploadRequest(name=name))
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetUpload(pb.GetUploadRequest(name=name))
    assert code_of(raised) is grpc.StatusCode.NOT_FOUND


def test_a_client_that_goes_away_has_committed_nothing_and_goes_on_at_a_restarted_server(
    server: UploadServer, store: ObjectStore
) -> None:
    with stub_of(server) as stub:
        name = start(stub).name
        call = stub.UploadChunks(requests(name, DATA))
        next(call)
        call.cancel()
    server.stop()
    server.start()
    with stub_of(server) as stub:
        there = stub.GetUpload(pb.GetUploadRequest(name=name))
        assert there.state == State.STATE_OPEN
        assert 0 < there.acknowledged_size <= len(DATA)
        for answer in stub.UploadChunks(requests(name, DATA, there.acknowledged_size)):
            assert answer.acknowledged_size >= there.acknowledged_size
        assert commit(stub, name, DATA).state == State.STATE_COMMITTED
    with open_upload(store, name) as file:
        verify(file)


def test_an_error_in_a_call_comes_after_what_was_acknowledged(stub: Any) -> None:
    name = start(stub).name

    def damaged() -> Iterator[pb.UploadChunksRequest]:
        yield from requests(name, DATA[:CHUNK])
        yield pb.UploadChunksRequest(name=name, offset=CHUNK, data=b"x", crc32c=0)

    call = stub.UploadChunks(damaged())
    assert next(call).acknowledged_size == CHUNK
    with pytest.raises(grpc.RpcError) as raised:
        next(call)
    assert code_of(raised) is grpc.StatusCode.DATA_LOSS


@pytest.fixture
def s3_stub(s3_store: StoreSettings) -> Iterator[tuple[ObjectStore, Any]]:
    store = open_store(s3_store)
    with upload_server(store) as server, stub_of(server) as stub:
        yield store, stub


def presigned(stub: Any, size_bytes: int, **fields: Any) -> resources_pb2.Upload:
    parts = pb.PresignedParts(size_bytes=size_bytes, part_size_bytes=MIN_PART_BYTES)
    return start(stub, presigned=parts, **fields)


def part_of(data: bytes, part: resources_pb2.PresignedPart) -> bytes:
    return data[part.offset : part.offset + part.size_bytes]


def test_parts_put_by_url_count_once_all_before_them_are_there(s3_stub: tuple[ObjectStore, Any]) -> None:
    store, stub = s3_stub
    upload = presigned(stub, len(DATA))
    first, second = upload.presigned_parts
    sizes = []
    for part in (second, first):
        put(part.url, part_of(DATA, part))
        sizes.append(stub.GetUpload(pb.GetUploadRequest(name=upload.name)).acknowledged_size)
    assert sizes == [0, len(DATA)]
    assert commit(stub, upload.name, DATA).state == State.STATE_COMMITTED
    with open_upload(store, upload.name) as file:
        assert file.read() == DATA


def test_a_part_that_is_put_again_after_the_commit_is_found(s3_stub: tuple[ObjectStore, Any]) -> None:
    store, stub = s3_stub
    upload = presigned(stub, len(DATA))
    for part in upload.presigned_parts:
        put(part.url, part_of(DATA, part))
    commit(stub, upload.name, DATA)
    put(upload.presigned_parts[0].url, b"\0" * upload.presigned_parts[0].size_bytes)
    with closing(open_upload(store, upload.name)) as file, pytest.raises(DataLoss):
        file.read()


def test_wrong_bytes_put_by_url_are_not_committed(s3_stub: tuple[ObjectStore, Any]) -> None:
    _, stub = s3_stub
    upload = presigned(stub, len(DATA))
    for part in upload.presigned_parts:
        put(part.url, b"\0" * part.size_bytes)
    with pytest.raises(grpc.RpcError) as raised:
        commit(stub, upload.name, DATA)
    assert code_of(raised) is grpc.StatusCode.DATA_LOSS


def test_the_same_request_gets_fresh_urls_of_the_same_upload(s3_stub: tuple[ObjectStore, Any]) -> None:
    _, stub = s3_stub
    request_id = str(uuid.uuid4())
    first = presigned(stub, len(DATA), request_id=request_id)
    again = presigned(stub, len(DATA), request_id=request_id)
    assert again.name == first.name
    assert [part.offset for part in again.presigned_parts] == [part.offset for part in first.presigned_parts]
    assert put(again.presigned_parts[0].url, part_of(DATA, again.presigned_parts[0])) == 200


def test_missing_parts_of_a_presigned_upload_can_be_sent_as_chunks(s3_stub: tuple[ObjectStore, Any]) -> None:
    _, stub = s3_stub
    upload = presigned(stub, len(DATA))
    put(upload.presigned_parts[0].url, part_of(DATA, upload.presigned_parts[0]))
    list(stub.UploadChunks(requests(upload.name, DATA, MIN_PART_BYTES)))
    assert commit(stub, upload.name, DATA).state == State.STATE_COMMITTED


def test_a_local_store_gives_no_urls(file_store: StoreSettings) -> None:
    with (
        upload_server(open_store(file_store)) as server,
        stub_of(server) as stub,
        pytest.raises(grpc.RpcError) as raised,
    ):
        presigned(stub, len(DATA))
    assert code_of(raised) is grpc.StatusCode.FAILED_PRECONDITION


def test_an_upload_that_meets_a_full_disk_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 12) as disk,
        upload_server(open_store(StoreSettings(url=(disk / "store").as_uri()))) as server,
        stub_of(server) as stub,
    ):
        other = start(stub, upload_id="other").name
        list(stub.UploadChunks(requests(other, DATA[: 4 * CHUNK])))
        name = start(stub, upload_id="u").name
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.UploadChunks(requests(name, DATA)))
        assert code_of(raised) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "free space" in (raised.value.details() or "")
        there = stub.GetUpload(pb.GetUploadRequest(name=name)).acknowledged_size
        assert 0 < there < len(DATA)
        stub.AbortUpload(pb.AbortUploadRequest(name=other))
        list(stub.UploadChunks(requests(name, DATA, there)))
        assert commit(stub, name, DATA).state == State.STATE_COMMITTED
