"""Lists without pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from millrace_client.calls import Caller


def every_page(caller: Caller, method: Any, request: Any, field: str) -> Iterator[Any]:
    """Yields what `field` of the responses holds, asking for the next page when it is needed."""
    while True:
        response: Any = caller.unary(method, request, Message)
        yield from getattr(response, field)
        if not response.next_page_token:
            return
        request.page_token = response.next_page_token
