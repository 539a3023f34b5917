"""Structured logs: one JSON object a line on standard error, each with the identity that its context carries."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from shared.background_logging import BackgroundHandler

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
