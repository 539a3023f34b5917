"""Structured logs, one JSON object per line on standard error with the identity of its context, and spans of calls.

A separate thread writes the lines, so logging never waits for the reader. An unread pipe takes some 64 KiB and then
blocks every write until its reader continues. An event loop that logs would be blocked, too, and health checks with it.
Lines therefore wait in memory, up to a limit. Lines above it are dropped, and their number is logged once lines are
written again.

`hidden` turns an unexpected exception into what a caller may see. Its internals are in the log alone.
`current_frames` gives the current frames of all threads, without the deadlock of Python 3.11.

Tracing is off, and OpenTelemetry's SDK is not imported, unless its standard variables configure an exporter
(`configure_tracing`). Header names are those of the W3C's Trace Context: `headers` are `traceparent` and, if it exists,
`tracestate`.
"""

from __future__ import annotations

import contextvars
import gc
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from types import FrameType
from typing import Protocol, TextIO
from urllib.parse import urlsplit

from shared.errors import Internal
from shared.settings import SettingsError

# --- Log lines ---

# `json.dumps` would make an encoder for each line.
_encode = json.JSONEncoder(default=str).encode
_identity: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("identity", default={})  # noqa: B039


@contextmanager
def identity(**values: str) -> Iterator[None]:
    """Add ids (request_id, job, model_version, …) to every log line written inside."""
    token = _identity.set({**_identity.get(), **values})
    try:
        yield
    finally:
        _identity.reset(token)


def identify(**values: str) -> None:
    """Add ids to every further log line of this task, until the enclosing `identity` ends."""
    _identity.set({**_identity.get(), **values})


def log_outcome(
    logger: logging.Logger, what: str, status: str, duration_s: float, why: str = "", **fields: object
) -> None:
    """Log the outcome of a call, or of a request of a stream.

    `status` is gRPC's name, `why` the problem; `fields` are added to the common ones.
    """
    duration_ms = duration_s * 1000
    logged = {"status": status, "duration_ms": round(duration_ms, 3), **fields}
    logger.info("%s %s %.1f ms%s", what, status, duration_ms, f": {why}" if why else "", extra={"fields": logged})


class JsonFormatter(logging.Formatter):
    """Formatter of a record as JSON. The members include its `fields` (`extra={"fields": …}`) and `always`."""

    def __init__(self, service: str, **always: str) -> None:
        super().__init__()
        self._always = {"service": service, **always}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._always,
            "logger": record.name,
            "message": record.getMessage(),
            **_identity.get(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


def configure_logging(service: str, level: str, **always: str) -> None:
    """Send all logs of this process to standard error as JSON lines, each with the ids in `always`.

    Call this once, when the process starts. Logging does not wait for the reader, see `BackgroundHandler`; call
    `flush_logs` before `os._exit`.
    """
    handler: logging.Handler
    try:
        handler = BackgroundHandler(sys.stderr)
    except (OSError, ValueError, AttributeError):  # standard error was replaced by an object that is no file
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, **always))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def flush_logs() -> None:
    """Wait, for at most FLUSH_TIMEOUT_S, until logged lines are written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


# --- Writing in the background ---

MAX_WAITING_BYTES = 8 * 1024 * 1024
# Writes of up to this size are not mixed with those of other processes on the same pipe (POSIX: PIPE_BUF).
WRITE_BYTES = 4096
# The pause between two writes. Waking the thread for each line would slow down the callers that log.
PAUSE_S = 0.01
# How long a process waits at its end for a blocked reader.
FLUSH_TIMEOUT_S = 2.0


class BackgroundHandler(logging.Handler):
    """Handler that writes lines in the order in which they were logged, from its own thread.

    `flush`, which `logging.shutdown` calls at the end of a process, waits at most `FLUSH_TIMEOUT_S` seconds until they
    are written. In a forked child, which has no such thread, lines are written at once.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # Writes bypass Python's buffers: a thread that is blocked in a buffered write holds the buffer's lock, and
        # Python aborts a process that ends meanwhile.
        self._file = stream.fileno()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        # Bytes of the lines in the queue, and of those that are being written.
        self._waiting_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._is_forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def descriptor(self) -> int:
        """The descriptor of the file that lines are written to."""
        return self._file

    def write_to(self, descriptor: int) -> None:
        """Write further lines to another file.

        Waiting lines are written first, within `FLUSH_TIMEOUT_S` seconds.
        """
        self.flush()
        self._file = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Formatted here and not in the thread, because a line's identity belongs to the context that logs it.
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:
            self.handleError(record)
            return
        if self._is_forked:
            self._write([line])
            return
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = [*self._lines]
                self._lines.clear()
            self._write(lines)
            with self._changed:
                self._waiting_bytes -= sum(map(len, lines))
                self._report_dropped()
                self._changed.notify_all()
            time.sleep(PAUSE_S)

    def _report_dropped(self) -> None:
        if self._dropped:
            message = "%d log lines were dropped: those before them were not read in time"
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (self._dropped,), None)
            line = self.format(record).encode() + b"\n"
            self._dropped = 0
            self._lines.append(line)
            self._waiting_bytes += len(line)

    def _write(self, lines: list[bytes]) -> None:
        """Write whole lines, grouped so that they are not mixed with those of other processes.

        If the file can no longer be written, the lines are discarded.
        """
        chunk = b""
        for line in lines:
            if chunk and len(chunk) + len(line) > WRITE_BYTES:
                self._write_chunk(chunk)
                chunk = b""
            chunk += line
        self._write_chunk(chunk)

    def _write_chunk(self, chunk: bytes) -> None:
        while chunk:
            try:
                chunk = chunk[os.write(self._file, chunk) :]
            except BlockingIOError:  # another process made the file non-blocking, and it is full
                time.sleep(PAUSE_S)
            except OSError:  # no reader is left, or the disk is full; there is no other place to report it
                return

    def _after_fork(self) -> None:
        self._is_forked = True
        self._changed = threading.Condition()
        self._lines.clear()
        self._waiting_bytes = 0


# --- Unexpected exceptions ---


def hidden(error: BaseException, logger: logging.Logger, what: str) -> Internal:
    """Log `error`, and return what a caller may see of it.

    The log has `what` happened and the traceback under the same correlation id.
    """
    correlation_id = uuid.uuid4().hex
    fields = {"correlation_id": correlation_id}
    logger.error("%s; correlation_id=%s", what, correlation_id, exc_info=error, extra={"fields": fields})
    return Internal(f"internal error; quote the correlation id {correlation_id}", metadata=fields)


# --- Frames of all threads ---


def current_frames() -> dict[int, FrameType]:
    """Return the current frame of each thread, by its id.

    Python 3.11 holds its lock of all threads meanwhile and creates objects. A garbage collection that this triggers
    waits forever for that lock (python/cpython#106883), so the collector is disabled.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


# --- Spans ---

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
