"""Structured logs: one JSON object a line on standard error, each with the identity that its context carries.

A thread of its own writes the lines, so that nobody who logs waits for whoever reads them.
A pipe that is not read takes some 64 KiB and then blocks each write, for as long as its reader stands still: an event
loop that logs would stand still with it, and health checks with the loop. So lines wait in memory, up to a bound, and
those above it are dropped; how many is said once lines are taken again.

What a caller may see of an exception that nobody expected is `hidden`: its internals are in the log alone.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from shared.errors import Internal

# --- Telemetry ---

# `json.dumps` would make an encoder for each line.
_encode = json.JSONEncoder(default=str).encode
_identity: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("identity", default={})  # noqa: B039


@contextmanager
def identity(**values: str) -> Iterator[None]:
    """Puts ids (request_id, job, model_version, …) on every log line written inside."""
    token = _identity.set({**_identity.get(), **values})
    try:
        yield
    finally:
        _identity.reset(token)


def identify(**values: str) -> None:
    """Puts more ids on every log line of this task from here on, until the `identity` ends that it is in."""
    _identity.set({**_identity.get(), **values})


def log_outcome(
    logger: logging.Logger, what: str, status: str, duration_s: float, why: str = "", **fields: object
) -> None:
    """How a call ended, or a request of a stream, with `fields` besides those that all have; `status` is gRPC's name,
    `why` what is wrong."""
    duration_ms = duration_s * 1000
    told = {"status": status, "duration_ms": round(duration_ms, 3), **fields}
    logger.info("%s %s %.1f ms%s", what, status, duration_ms, f": {why}" if why else "", extra={"fields": told})


class JsonFormatter(logging.Formatter):
    """A record's `fields` (`extra={"fields": …}`) are members of its line, as `always` are of every line."""

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
    """Sends all logs of this process to standard error as JSON lines, each with what is `always` so. Call once, when
    the process starts. Who logs does not wait for whoever reads them, see `BackgroundHandler`; before `os._exit` call
    `flush_logs`."""
    handler: logging.Handler
    try:
        handler = BackgroundHandler(sys.stderr)
    except (OSError, ValueError, AttributeError):  # something of Python's stands there, which is no file
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, **always))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def flush_logs() -> None:
    """Waits, for a short time at the most, until what was logged is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


# --- Writing in the background ---

MAX_WAITING_BYTES = 8 * 1024 * 1024
# Up to so many bytes a write to a pipe is not mixed with those of other processes on the same pipe (POSIX: PIPE_BUF).
WRITE_BYTES = 4096
# Between two looks while lines come: a thread that woke for each of them would take time from those who log.
PAUSE_S = 0.01
# How long the end of a process waits for a reader that stands still.
FLUSH_TIMEOUT_S = 2.0


class BackgroundHandler(logging.Handler):
    """Lines keep the order in which they were logged. `flush`, which `logging.shutdown` calls at the end of a process,
    waits until they are written, for `FLUSH_TIMEOUT_S` seconds at the most. In a forked child, which has no such
    thread, lines are written at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # Below Python's buffers: a thread that waits in a write of theirs holds their lock, and a process that ends
        # meanwhile is aborted for it.
        self._file = stream.fileno()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        # Of the lines in the queue, and of those that are being written.
        self._waiting_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._is_forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def descriptor(self) -> int:
        """Of the file that lines are written to."""
        return self._file

    def write_to(self, descriptor: int) -> None:
        """Lines from here on go there; those that wait are written first, within `FLUSH_TIMEOUT_S` seconds."""
        self.flush()
        self._file = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Here, not in the thread: a line's identity is of the context that logs it.
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
        """Whole lines together, as many as are not mixed with others'; where nobody can read them any more, nothing."""
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
            except BlockingIOError:  # another process had its end of the file not wait, and it is full
                time.sleep(PAUSE_S)
            except OSError:  # nobody has the other end any more, or the disk is full: there is nowhere to say so
                return

    def _after_fork(self) -> None:
        self._is_forked = True
        self._changed = threading.Condition()
        self._lines.clear()
        self._waiting_bytes = 0


# --- Unexpected exceptions ---


def hidden(error: BaseException, logger: logging.Logger, what: str) -> Internal:
    """What a caller may see of `error`; the log has `what` happened and the traceback under the same correlation id."""
    correlation_id = uuid.uuid4().hex
    fields = {"correlation_id": correlation_id}
    logger.error("%s; correlation_id=%s", what, correlation_id, exc_info=error, extra={"fields": fields})
    return Internal(f"internal error; quote the correlation id {correlation_id}", metadata=fields)
