"""An OTLP receiver over HTTP, as a collector is one: it keeps the spans that it gets, or hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.waiting import wait_until

# So that tests need not wait for the exporter's own pace.
ENVIRON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}


@dataclass(frozen=True)
class Seen:
    """A span; ids are hexadecimal, `parent` is empty where there is none, and `links` are span ids."""

    trace: str
    id: str
    parent: str
    name: str
    kind: str
    links: tuple[str, ...]
    attributes: dict[str, str | int]
    resource: dict[str, str | int]
    failed: bool
    state: str
    began_ns: int
    ended_ns: int


class OtlpReceiver:
    """`may_answer` is set unless it hangs; `exports` have begun, answered or not."""

    def __init__(self) -> None:
        self.exports = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                receiver.exports += 1
                receiver.may_answer.wait()
                receiver._take(self.path, ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def environ(self) -> dict[str, str]:
        """What has a process export to it."""
        return {**ENVIRON, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}"}

    def spans(self, trace: str = "") -> list[Seen]:
        """All that came, or those of one trace."""
        with self._lock:
            return [one for one in self._seen if trace in ("", one.trace)]

    def wait_for(self, trace: str, *names: str, timeout_s: float = 120.0) -> dict[str, Seen]:
        """The spans of a trace by name, once those names are all there."""
        wait_until(
            lambda: {*names} <= {one.name for one in self.spans(trace)}, f"spans {names} of trace {trace}", timeout_s
        )
        return {one.name: one for one in self.spans(trace)}

    def stop(self) -> None:
        """From now on nobody listens there."""
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, request: ExportTraceServiceRequest) -> None:
        assert path == "/v1/traces"
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                with self._lock:
                    # An exporter that did not hear in time that its spans arrived sends them once more.
                    known = {(one.trace, one.id) for one in self._seen}
                    found = [_seen(span, resource) for span in of_scope.spans]
                    self._seen += [one for one in found if (one.trace, one.id) not in known]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    try:
        yield receiver
    finally:
        receiver.stop()


def _seen(span: Span, resource: dict[str, str | int]) -> Seen:
    return Seen(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        tuple(link.span_id.hex() for link in span.links),
        _attributes(span.attributes),
        resource,
        span.status.code == 2,
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _attributes(pairs: Any) -> dict[str, str | int]:
    return {one.key: one.value.string_value or one.value.int_value for one in pairs}
