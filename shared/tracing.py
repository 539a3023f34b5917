"""Spans of calls for OpenTelemetry.

Tracing is off, and OpenTelemetry's SDK is not imported, unless its standard variables configure an exporter
(`configure_tracing`).

Header names are those of the W3C's Trace Context: `headers` are `traceparent` and, if it exists, `tracestate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

from shared.settings import SettingsError

PREFIX = "OTEL_"
# How long a process waits for its last spans at its end.
EXPORT_TIMEOUT_S = 2.0
PROTOCOL = "http/protobuf"

Headers = Mapping[str, str]
_NOTHING = nullcontext()


class Call(Protocol):
    """The span of a call, which is current until it ends. `ids` are added to the call's log lines."""

    @property
    def ids(self) -> Mapping[str, str]: ...

    def end(self, status: str, message: str = "") -> None:
        """End the span. `status` is gRPC's name."""


class QueueSpan(Protocol):
    """The span of rows that wait for a batch."""

    def end(self) -> None: ...


class Tracing:
    """Tracing that is switched off. `OtlpTracing` has the same methods and exports spans.

    A span belongs to a call, or to work that a recorded call caused. Outside of a recorded call no span begins.
    """

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Call | None:
        """Begin the span of a call with this metadata. The same task must end it."""
        return None

    def span(self, name: str, *, outgoing: bool = False, **attributes: str | int) -> AbstractContextManager[object]:
        """Begin a child of the current span."""
        return _NOTHING

    def describe(self, **attributes: str | int) -> None:
        """Add attributes to the current span."""

    def waiting(self, rows: int) -> QueueSpan | None:
        """Begin the queue span of `rows` rows of the current span."""
        return None

    def batch(self, served: Iterable[QueueSpan | None], rows: int) -> AbstractContextManager[object]:
        """Begin one span for several requests.

        It is a child of the first request's span, and is linked with each request that it serves, in both directions.
        """
        return _NOTHING

    def headers(self) -> Headers | None:
        """Return the headers that make another process's spans children of the current one.

        None if that process need not begin any.
        """
        return None

    def received(self, name: str, headers: Headers | None, **attributes: str | int) -> AbstractContextManager[object]:
        """Begin a child of another process's span."""
        return _NOTHING

    def parts(self, began_ns: int, **seconds: float) -> None:
        """Record consecutive children of the current span, from `began_ns` since the epoch."""

    def close(self, timeout_s: float = EXPORT_TIMEOUT_S) -> None:
        """Export the remaining spans within the time limit."""


_tracing = Tracing()


def tracing() -> Tracing:
    """Return this process's tracing."""
    return _tracing


def configure_tracing(service: str, environ: Mapping[str, str]) -> None:
    """Switch tracing on if an exporter is configured.

    Call this once, when a process starts. The SDK reads its other variables from the process's own environment. Raises
    `SettingsError`.
    """
    global _tracing
    if is_wanted(environ):
        # The import takes half a second, which a process without an exporter saves.
        from shared.otlp_tracing import OtlpTracing

        try:
            _tracing = OtlpTracing(service)
        except ValueError as error:  # a number out of bounds
            raise SettingsError(f"OpenTelemetry refuses one of the {PREFIX}* variables: {error}") from error


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether spans are to be exported. Raises `SettingsError` for what the exporter cannot do."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter not in ("", "otlp", "none"):
        raise SettingsError(f"OTEL_TRACES_EXPORTER={exporter!r}: use otlp or none")
    endpoint = _of_traces(environ, "ENDPOINT")
    if exporter == "none" or not (endpoint or exporter):
        return False
    protocol = _of_traces(environ, "PROTOCOL")
    if protocol not in ("", PROTOCOL):
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: use {PROTOCOL}, for which collectors listen on port 4318"
        )
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise SettingsError(f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint!r}: use http://host:4318 or https://host:4318")
    return True


def tracing_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return OpenTelemetry's variables for other processes. None if nothing is exported.

    Raises `SettingsError`.
    """
    return {name: value for name, value in environ.items() if name.startswith(PREFIX)} if is_wanted(environ) else {}


def _of_traces(environ: Mapping[str, str], what: str) -> str:
    """Return a variable's value. The variable for traces takes precedence over that for all signals."""
    return (environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{what}") or environ.get(f"OTEL_EXPORTER_OTLP_{what}", "")).strip()
