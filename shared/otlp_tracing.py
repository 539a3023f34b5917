"""Tracing with export: OpenTelemetry's SDK, with OTLP over HTTP in its own thread.

A receiver that is down or hangs costs only spans: they wait in a bounded queue, and the oldest are dropped.
`shared.logging_and_tracing` decides when this module is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared import logging_and_tracing
from shared.errors import MillraceError
from shared.grpc_errors import status_code
from shared.logging_and_tracing import Headers

W3C = TraceContextTextMapPropagator()
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# By OpenTelemetry's conventions only these statuses are faults of a server; the others are the client's.
FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


class OtlpTracing(logging_and_tracing.Tracing):
    def __init__(self, service: str) -> None:
        # A private provider, because Ray and FastAPI would use the process's global one for their own traces.
        self._provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("millrace")

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> logging_and_tracing.Call:
        service, _, name = method.strip("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        parent = W3C.extract(_carrier(metadata))
        return _Call(self._tracer.start_span(f"{service}/{name}", parent, SpanKind.SERVER, attributes))

    def span(self, name: str, *, outgoing: bool = False, **attributes: str | int) -> AbstractContextManager[object]:
        if not trace.get_current_span().is_recording():
            return nullcontext()
        kind = SpanKind.CLIENT if outgoing else SpanKind.INTERNAL
        return _within(self._tracer.start_span(name, kind=kind, attributes=_named(attributes)))

    def describe(self, **attributes: str | int) -> None:
        trace.get_current_span().set_attributes(_named(attributes))

    def waiting(self, rows: int) -> logging_and_tracing.QueueSpan | None:
        asking = trace.get_current_span()
        if not asking.is_recording():
            return None
        return _QueueSpan(asking, self._tracer.start_span("queue", attributes=_named({"rows": rows})))

    @contextmanager
    def batch(self, served: Iterable[logging_and_tracing.QueueSpan | None], rows: int) -> Iterator[None]:
        asking = [one.asking for one in served if isinstance(one, _QueueSpan)]
        if not asking:  # the present span belongs to another request
            with use_span(INVALID_SPAN):
                yield
            return
        links = [Link(one.get_span_context()) for one in asking]
        attributes = _named({"rows": rows, "requests": len(asking)})
        parent = trace.set_span_in_context(asking[0], otel_context.Context())
        span = self._tracer.start_span("batch", parent, attributes=attributes, links=links)
        for one in asking:
            if one.is_recording():  # the request may have ended
                one.add_link(span.get_span_context())
        with _within(span):
            yield

    def headers(self) -> Headers | None:
        if not trace.get_current_span().is_recording():
            return None
        made: dict[str, str] = {}
        W3C.inject(made)
        return made

    def received(self, name: str, headers: Headers | None, **attributes: str | int) -> AbstractContextManager[object]:
        if headers is None:
            return nullcontext()
        span = self._tracer.start_span(name, W3C.extract(headers), SpanKind.SERVER, _named(attributes))
        return _within(span)

    def parts(self, began_ns: int, **seconds: float) -> None:
        if not trace.get_current_span().is_recording():
            return
        for name, took_s in seconds.items():
            span = self._tracer.start_span(name, start_time=began_ns)
            began_ns += round(took_s * 1e9)
            span.end(began_ns)

    def close(self, timeout_s: float = logging_and_tracing.EXPORT_TIMEOUT_S) -> None:
        # In a thread, because the exporter's own timeouts apply to each attempt and not to all of them.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout_s)


@contextmanager
def _within(span: Span) -> Iterator[None]:
    """Make the span current, and end it afterwards.

    Errors of the client do not mark it as failed, and internals of unexpected errors are not recorded.
    """
    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except Exception as error:
            if not isinstance(error, MillraceError):
                span.set_status(Status(StatusCode.ERROR))
            elif status_code(error).name in FAULTS:
                span.set_status(Status(StatusCode.ERROR, error.message))
            raise


class _Call:
    def __init__(self, span: Span) -> None:
        self._span = span
        self._token = otel_context.attach(trace.set_span_in_context(span, otel_context.Context()))
        ids = span.get_span_context()
        self.ids = {"trace_id": trace.format_trace_id(ids.trace_id), "span_id": trace.format_span_id(ids.span_id)}

    def end(self, status: str, message: str = "") -> None:
        self._span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[status].value[0])
        if status in FAULTS:
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()
        otel_context.detach(self._token)


class _QueueSpan:
    """The time of a request in the queue. `asking` is the request's span."""

    def __init__(self, asking: Span, span: Span) -> None:
        self.asking = asking
        self._span = span

    def end(self) -> None:
        self._span.end()


def _carrier(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return a call's W3C headers.

    Several parents count as none. States from several headers are joined.
    """
    parents: list[str] = []
    states: list[str] = []
    for key, value in metadata:
        if isinstance(value, str) and key in (TRACEPARENT, TRACESTATE):
            (parents if key == TRACEPARENT else states).append(value)
    if len(parents) != 1:
        return {}
    return {TRACEPARENT: parents[0], **({TRACESTATE: ",".join(states)} if states else {})}


def _resource(service: str) -> Resource:
    attributes: dict[str, str | int] = {"process.pid": os.getpid()}
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        attributes["service.name"] = f"millrace-{service}"
    return Resource.create(attributes)


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"millrace.{name}": value for name, value in attributes.items()}
