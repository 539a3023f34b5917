"""An S3 server without put-if-absent: a proxy before a real one that writes conditional PUTs unconditionally.

It stands for the older and simpler S3 servers that ignore `If-None-Match` and answer 200.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from shared.settings import StoreSettings
from shared.storage import open_store

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@contextmanager
def forgetful(settings: StoreSettings) -> Iterator[StoreSettings]:
    """Settings of the same store, by way of the proxy."""
    address = urlsplit(settings.s3_endpoint).netloc
    bucket = urlsplit(settings.url).netloc
    behind = open_store(replace(settings, url=f"s3://{bucket}"))

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.command == "PUT" and self.headers.get("if-none-match") == "*":
                # The header is signed: so the condition is not struck out, the object is written anew.
                behind.put(unquote(urlsplit(self.path).path.removeprefix(f"/{bucket}/")), body)
                self._answer(200, {"etag": '"forgetful"'}, b"")
                return
            connection = http.client.HTTPConnection(address)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
            connection.close()

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield replace(settings, s3_endpoint=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
