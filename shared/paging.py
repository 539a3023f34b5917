"""Pages of a list that is sorted by name: the token is the last name sent, so a page never repeats or skips one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from shared.errors import invalid_field

DEFAULT_SIZE = 100
MAX_SIZE = 1000


def page(keys: Sequence[str], size: int, token: str) -> tuple[list[str], str]:
    """Returns one page of `keys` (sorted here) and the token of the next, empty on the last."""
    if not 0 <= size <= MAX_SIZE:
        raise invalid_field("page_size", size, f"use 0 (for {DEFAULT_SIZE}) to {MAX_SIZE}")
    after = _decode(token)
    wanted = sorted(key for key in keys if key > after) if after else sorted(keys)
    taken = wanted[: size or DEFAULT_SIZE]
    more = len(wanted) > len(taken)
    return taken, base64.urlsafe_b64encode(taken[-1].encode()).decode() if more else ""


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise invalid_field("page_token", token, "send a next_page_token as it came, or none") from None
