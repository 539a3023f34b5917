"""How an exception that nobody expected is told: without its internals, which only the log has."""

from __future__ import annotations

import logging
import uuid

from shared.errors import Internal


def hidden(error: BaseException, logger: logging.Logger, what: str) -> Internal:
    """What a caller may see of `error`; the log has `what` happened and the traceback under the same correlation id."""
    correlation_id = uuid.uuid4().hex
    fields = {"correlation_id": correlation_id}
    logger.error("%s; correlation_id=%s", what, correlation_id, exc_info=error, extra={"fields": fields})
    return Internal(f"internal error; quote the correlation id {correlation_id}", metadata=fields)
