"""Structured logs: one JSON object a line on standard error, each with the identity that its context carries."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

_identity: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("identity", default={})  # noqa: B039


@contextmanager
def identity(**values: str) -> Iterator[None]:
    """Puts ids (request_id, job, model_version, …) on every log line written inside."""
    token = _identity.set({**_identity.get(), **values})
    try:
        yield
    finally:
        _identity.reset(token)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_identity.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(service: str, level: str) -> None:
    """Sends all logs of this process to standard error as JSON lines. Call once, from `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)
