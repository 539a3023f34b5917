"""409 Conflict: something else is being done at that key. It is no object that is there, which is 412."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store

WRITES: dict[str, Callable[[ObjectStore, Path], None]] = {
    "put": lambda store, _: store.put("key", b"value"),
    "put_if_absent": lambda store, _: store.put_if_absent("key", b"value"),
    "upload_file": lambda store, path: store.upload_file(path, "key"),
}


class Busy(ThreadingHTTPServer):
    """An S3 server that is busy at every key for the first `conflicts` writes."""

    conflicts = 0
    asked = 0


@pytest.fixture
def busy() -> Iterator[Busy]:
    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server: Busy

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.server.asked += 1
            status = 409 if self.server.asked <= self.server.conflicts else 200
            body = b"<Error><Code>OperationAborted</Code></Error>" if status == 409 else b""
            self.send_response(status)
            self.send_header("etag", '"an-etag"')
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    server = Busy(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def store_at(server: Busy) -> ObjectStore:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    settings = StoreSettings(
        url="s3://millrace/x", s3_endpoint=endpoint, s3_access_key="someone", s3_secret_key="their-secret"
    )
    return open_store(settings)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_conflict_is_tried_again(busy: Busy, write: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"value")
    busy.conflicts = 2

    WRITES[write](store_at(busy), path)

    assert busy.asked == 3


@pytest.mark.parametrize("write", WRITES)
def test_a_conflict_that_stays_is_an_outage_and_no_object(
    busy: Busy, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"value")
    busy.conflicts = 1_000
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 0.2)

    with pytest.raises(Unavailable) as raised:
        WRITES[write](store_at(busy), path)

    assert raised.value.specific_reason == "STORE_CONFLICT"
    assert raised.value.retry_after_s
