"""A store without room says so, leaves nothing of what did not fit, and goes on once there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared.errors import ResourceExhausted
from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store
from shared.storage.object_store import PART_BYTES, ensure_bucket
from tests.support.s3_server import S3Program, running
from tests.support.small_disk import small_disk

MIB = 1024 * 1024
FITTING = b"x" * (3 * MIB)
TOO_LARGE = b"y" * (14 * MIB)

Write = Callable[[ObjectStore, Path], None]
WRITES: dict[str, Write] = {
    "put": lambda store, _: store.put("key", TOO_LARGE),
    "put_if_absent": lambda store, _: store.put_if_absent("key", TOO_LARGE),
    "upload_file": lambda store, file: store.upload_file(file, "key"),
}


@pytest.fixture(autouse=True)
def short_patience_with_a_full_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stays full is waited for two seconds; a request that is to succeed has as long as it needs."""
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=2))


@pytest.fixture(params=["file", "s3"])
def small_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """With room for 12 MiB."""
    with small_disk(tmp_path / "disk", 12) as disk:
        if request.param == "file":
            yield open_store(StoreSettings(url=(disk / "store").as_uri()))
            return
        program: S3Program = request.getfixturevalue("s3_program")
        if program.name == "minio":
            pytest.skip("MinIO does not start on so small a disk")
        with running(program, disk) as server:
            settings = server.settings("s3://millrace/store")
            ensure_bucket(settings)
            yield open_store(settings)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(TOO_LARGE)
    return path


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_does_not_fit_is_refused_and_leaves_nothing(
    small_store: ObjectStore, large_file: Path, write: str
) -> None:
    small_store.put("before", FITTING)
    with pytest.raises(ResourceExhausted, match="free space") as raised:
        WRITES[write](small_store, large_file)
    assert raised.value.specific_reason == "STORE_FULL"
    assert raised.value.retry_after_s
    assert [info.key for info in small_store.list()] == ["before"]
    assert small_store.get("before") == FITTING
    # Nor does the room stay taken by what was begun; the library frees it in a thread, a moment later.
    for key in ("after", "last"):
        _put_soon(small_store, key)


def _put_soon(store: ObjectStore, key: str) -> None:
    give_up_at = time.monotonic() + 60
    while True:
        try:
            store.put(key, FITTING)
            return
        except ResourceExhausted:
            if time.monotonic() > give_up_at:
                raise


@pytest.mark.parametrize("write", ["put", "upload_file"])
def test_an_object_in_parts_that_does_not_fit_is_refused_and_is_not_there(
    small_store: ObjectStore, tmp_path: Path, write: str
) -> None:
    in_parts = b"z" * (PART_BYTES + len(FITTING))
    file = tmp_path / "in-parts"
    file.write_bytes(in_parts)

    with pytest.raises(ResourceExhausted, match="free space"):
        small_store.put("key", in_parts) if write == "put" else small_store.upload_file(file, "key")

    assert list(small_store.list()) == []


def test_an_object_that_was_to_be_written_over_is_as_it_was(small_store: ObjectStore) -> None:
    small_store.put("key", FITTING)
    with pytest.raises(ResourceExhausted):
        small_store.put("key", TOO_LARGE)
    assert small_store.get("key") == FITTING


def test_a_full_store_takes_writes_again_once_there_is_room(small_store: ObjectStore) -> None:
    written: list[str] = []

    def fill() -> None:
        while True:
            small_store.put_if_absent(f"{len(written)}", FITTING)
            written.append(f"{len(written)}")

    with pytest.raises(ResourceExhausted):
        fill()
    assert sorted(info.key for info in small_store.list()) == written
    small_store.delete(written[0])
    small_store.put_if_absent("again", FITTING)
    assert small_store.get("again") == FITTING


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """An S3 server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (507, "InsufficientStorage"),
        (507, "XMinioStorageFull"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        (403, "QuotaExceeded"),
    ],
)
def test_each_servers_word_for_full_is_understood(status: int, code: str) -> None:
    settings = StoreSettings(url="s3://millrace/x", s3_access_key="someone", s3_secret_key="their-secret")
    with answering(status, code) as endpoint, pytest.raises(ResourceExhausted) as raised:
        open_store(replace(settings, s3_endpoint=endpoint)).put_if_absent("key", b"value")
    assert raised.value.specific_reason == "STORE_FULL"
