"""Spans of what happens to a call, for OpenTelemetry: off, and nothing of its SDK imported, unless an exporter is
configured by its standard variables (`configure_tracing`).

Names in here are those of the W3C's Trace Context: `headers` are `traceparent` and, where there is one, `tracestate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

from shared.settings import SettingsError

PREFIX = "OTEL_"
# What a process that ends may wait for its last spans.
EXPORT_TIMEOUT_S = 2.0
PROTOCOL = "http/protobuf"

Headers = Mapping[str, str]
_NOTHING = nullcontext()


class Call(Protocol):
    """The span of a call, which is the present one until it ends. `ids` are those that its logs carry."""

    @property
    def ids(self) -> Mapping[str, str]: ...

    def end(self, status: str, message: str = "") -> None:
        """`status` is gRPC's, by its name."""


class QueueSpan(Protocol):
    """Of rows that wait for a batch."""

    def end(self) -> None: ...


class Tracing:
    """Switched off. Whatever is on does the same, and tells it (`OtlpTracing`).

    A span is of a call, or of what a call that is recorded brought about: outside of one, none is begun.
    """

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Call | None:
        """Begins the span of a call that came with this metadata. It is to be ended in the same task."""
        return None

    def span(self, name: str, *, outgoing: bool = False, **attributes: str | int) -> AbstractContextManager[object]:
        """A part of what the present span is of."""
        return _NOTHING

    def describe(self, **attributes: str | int) -> None:
        """Says more about the present span."""

    def waiting(self, rows: int) -> QueueSpan | None:
        """Begins the span of so many rows of the present one in a queue."""
        return None

    def batch(self, served: Iterable[QueueSpan | None], rows: int) -> AbstractContextManager[object]:
        """One span for many: a part of the first one's, with a link to each that it serves, and from each."""
        return _NOTHING

    def headers(self) -> Headers | None:
        """What makes another process's spans parts of the present one; None where it need not begin any."""
        return None

    def received(self, name: str, headers: Headers | None, **attributes: str | int) -> AbstractContextManager[object]:
        """A part of another process's span."""
        return _NOTHING

    def parts(self, began_ns: int, **seconds: float) -> None:
        """Parts of the present span that followed one another from `began_ns`, since the epoch."""

    def close(self, timeout_s: float = EXPORT_TIMEOUT_S) -> None:
        """Exports what is left, as far as there is time."""


_tracing = Tracing()


def tracing() -> Tracing:
    """This process's."""
    return _tracing


def configure_tracing(service: str, environ: Mapping[str, str]) -> None:
    """Switches it on where an exporter is configured. Call once, when a process starts; the SDK reads the rest of its
    variables from the process's own environment. Raises `SettingsError`."""
    global _tracing
    if is_wanted(environ):
        # Takes half a second, and is of no use to whoever exports nothing.
        from shared.otlp_tracing import OtlpTracing

        try:
            _tracing = OtlpTracing(service)
        except ValueError as error:  # a number out of bounds
            raise SettingsError(f"OpenTelemetry refuses one of the {PREFIX}* variables: {error}") from error


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether spans are to be exported. Raises `SettingsError` for what the exporter cannot do."""
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
    """OpenTelemetry's variables, for other processes; none where nothing is exported. Raises `SettingsError`."""
    return {name: value for name, value in environ.items() if name.startswith(PREFIX)} if is_wanted(environ) else {}


def _of_traces(environ: Mapping[str, str], what: str) -> str:
    """What is said of traces alone goes before what is said of all signals."""
    return (environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{what}") or environ.get(f"OTEL_EXPORTER_OTLP_{what}", "")).strip()
