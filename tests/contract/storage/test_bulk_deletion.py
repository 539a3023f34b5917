"""`delete_all`: many objects are deleted by few requests, and all of them or the call raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.errors import Unavailable
from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store
from shared.storage.object_store import KEYS_A_DELETION
from tests.support.s3_fault_proxy import WRITES, Fault, failing, fault_proxy, resetting

AWKWARD = ("space and %2F percent", "a+b&c=d", "<tag>", "é/ü", "it's")


def test_all_are_deleted_and_missing_ones_are_no_error(store: ObjectStore) -> None:
    for key in ("kept", *AWKWARD):
        store.put(key, b"x")

    store.delete_all([*AWKWARD, "never/was", *AWKWARD])
    store.delete_all([])

    assert [info.key for info in store.list()] == ["kept"]


def test_a_thousand_take_one_request(s3_store: StoreSettings) -> None:
    keys = [f"many/{number:04d}" for number in range(KEYS_A_DELETION + 1)]
    direct = open_store(s3_store)
    for key in keys:
        direct.put(key, b"")
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        store.delete_all(keys)
        assert proxy.requests == 2

        for key in keys:
            direct.put(key, b"")
        store.delete_folder("many")

    assert proxy.requests == 2 + 2 + 2  # a listing has a thousand keys, too
    assert not list(direct.list("many"))


@pytest.mark.parametrize(
    "fault",
    [resetting("request", 1, nth=1, methods=WRITES), resetting("response", nth=1, methods=WRITES), failing(503, nth=1)],
    ids=["no-request", "no-answer", "503"],
)
def test_a_deletion_outlives_a_fault(s3_store: StoreSettings, fault: Fault) -> None:
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        for key in ("a/1", "a/2"):
            store.put(key, b"x")
        proxy.fault = fault

        store.delete_all(["a/1", "a/2"])

        assert proxy.struck == 1
        assert not list(store.list())


class Refusing(ThreadingHTTPServer):
    """An S3 server that answers 200 to deletions, and in the answer refuses one object by each of `codes` in turn."""

    codes: list[str]
    asked = 0


@contextmanager
def refusing(*codes: str) -> Iterator[tuple[ObjectStore, Refusing]]:
    class Answer(BaseHTTPRequestHandler):
        server: Refusing

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.server.asked += 1
            refused = self.server.codes.pop(0) if self.server.codes else ""
            error = f"<Error><Key>a</Key><Code>{refused}</Code><Message>no</Message></Error>" if refused else ""
            body = f"<DeleteResult>{error or '<Deleted><Key>a</Key></Deleted>'}</DeleteResult>".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    server = Refusing(("127.0.0.1", 0), Answer)
    server.codes = list(codes)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    settings = StoreSettings(url="s3://bucket", s3_endpoint=url, s3_access_key="a", s3_secret_key="b")
    try:
        yield open_store(settings), server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_object_that_the_server_did_not_delete_is_asked_for_again() -> None:
    with refusing("InternalError", "SlowDown", "ServiceUnavailable") as (store, server):
        store.delete_all(["a"])

    assert server.asked == 4


def test_an_object_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 0.0)
    with refusing("Other", "AccessDenied") as (store, _):
        with pytest.raises(Unavailable, match="does not answer"):
            store.delete_all(["a"])
        with pytest.raises(Unavailable) as denied:
            store.delete_all(["a"])

    assert denied.value.specific_reason == "STORE_REFUSED"
