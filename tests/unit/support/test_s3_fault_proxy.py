"""The fault proxy does to requests what it is told, and nothing to the others."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from shared.settings import StoreSettings
from tests.support.s3_fault_proxy import (
    NONE,
    WRITES,
    S3FaultProxy,
    failing,
    fault_proxy,
    full,
    resetting,
    slow,
    unresponsive,
)

BODY = bytes(range(256)) * 400


@dataclass
class Echo:
    """A server that answers each request with the body it was sent, and remembers those that reached it."""

    endpoint: str = ""
    seen: list[tuple[str, bytes]] = field(default_factory=list)


@pytest.fixture
def echo() -> Iterator[Echo]:
    known = Echo()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            known.seen.append((self.command, body))
            self.send_response(200)
            if self.path == "/chunked":
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
                return
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Resets are what the tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    known.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield known
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[S3FaultProxy]:
    settings = StoreSettings(url="s3://bucket", s3_endpoint=echo.endpoint, s3_access_key="a", s3_secret_key="b")
    with fault_proxy(settings) as running:
        yield running


def ask(
    proxy: S3FaultProxy, method: str = "PUT", path: str = "/", body: bytes = BODY, timeout_s: float = 60.0
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_a_fault_bodies_pass_both_ways(proxy: S3FaultProxy, echo: Echo) -> None:
    assert ask(proxy) == (200, BODY)
    assert ask(proxy, "GET", "/chunked", b"") == (200, BODY)
    assert ask(proxy, "HEAD", "/", b"") == (200, b"")
    assert [method for method, _ in echo.seen] == ["PUT", "GET", "HEAD"]


def test_one_connection_takes_several_requests(proxy: S3FaultProxy) -> None:
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
    for body in (b"one", BODY, b""):
        connection.request("PUT", "/", body)
        assert connection.getresponse().read() == body
    connection.close()


def test_a_refused_request_never_reaches_the_server(proxy: S3FaultProxy, echo: Echo) -> None:
    proxy.fault = failing(503)
    status, body = ask(proxy)
    assert status == 503
    assert b"<Code>SlowDown</Code>" in body
    assert echo.seen == []
    proxy.fault = NONE
    assert ask(proxy)[0] == 200


def test_the_nth_request_alone_fails(proxy: S3FaultProxy) -> None:
    proxy.fault = failing(500, nth=2)
    assert [ask(proxy)[0] for _ in range(4)] == [200, 500, 200, 200]
    assert (proxy.requests, proxy.struck) == (4, 1)


def test_a_share_of_requests_fails(proxy: S3FaultProxy) -> None:
    proxy.fault = failing(503, share=0.3)
    statuses = [ask(proxy, body=b"")[0] for _ in range(100)]
    assert 15 <= statuses.count(503) <= 45
    assert proxy.struck == statuses.count(503)


def test_a_full_store_is_still_read(proxy: S3FaultProxy) -> None:
    proxy.fault = full()
    assert ask(proxy)[0] == 507
    assert ask(proxy, "GET")[0] == 200


def test_a_reset_of_the_response_comes_after_the_deed(proxy: S3FaultProxy, echo: Echo) -> None:
    proxy.fault = resetting("response")
    with pytest.raises(ConnectionResetError):
        ask(proxy)
    assert echo.seen == [("PUT", BODY)]


def test_a_reset_within_the_response_cuts_it(proxy: S3FaultProxy) -> None:
    proxy.fault = resetting("response", after_bytes=1000)
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask(proxy)


def test_a_reset_within_the_request_leaves_it_undone(proxy: S3FaultProxy, echo: Echo) -> None:
    proxy.fault = resetting("request", after_bytes=1000, methods=WRITES)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        ask(proxy)
    assert ask(proxy, "GET", "/", b"")[0] == 200
    assert [body for method, body in echo.seen if len(body) == len(BODY)] == []


def test_a_slow_line_takes_its_time(proxy: S3FaultProxy) -> None:
    proxy.fault = slow(bytes_per_s=1_000_000)
    began = time.monotonic()
    assert ask(proxy) == (200, BODY)
    # There and back.
    assert time.monotonic() - began > 0.9 * 2 * len(BODY) / 1_000_000


def test_a_silent_server_answers_nothing_until_it_is_well_again(proxy: S3FaultProxy, echo: Echo) -> None:
    proxy.fault = unresponsive()
    with pytest.raises(TimeoutError):
        ask(proxy, timeout_s=0.2)
    proxy.fault = NONE
    assert ask(proxy) == (200, BODY)
    assert len(echo.seen) == 1


def test_a_server_that_is_gone_resets(proxy: S3FaultProxy) -> None:
    proxy.upstream = "127.0.0.1:1"
    with pytest.raises(ConnectionResetError):
        ask(proxy)
