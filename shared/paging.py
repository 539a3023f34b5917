"""Pages of a list that is sorted by name: the token is the last name sent, so a page never repeats or skips one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from shared.errors import invalid_field

DEFAULT_SIZE = 100
MAX_SIZE = 1000
# Most clients accept messages of at most 4 MiB, so a page ends before it exceeds this size.
PAGE_BYTES = 3 * 1024 * 1024 + 512 * 1024


def page(keys: Sequence[str], size: int, token: str) -> tuple[list[str], str]:
    """Return one page of `keys` (sorted here) and the token of the next, empty on the last."""
    size = checked_size(size)
    after = key_of(token)
    wanted = sorted(key for key in keys if key > after) if after else sorted(keys)
    taken = wanted[:size]
    more = len(wanted) > len(taken)
    return taken, token_of(taken[-1]) if more else ""


def checked_size(size: int, default: int = DEFAULT_SIZE, most: int = MAX_SIZE) -> int:
    """Return the `page_size` of a request, or the default if it is 0."""
    if not 0 <= size <= most:
        raise invalid_field("page_size", size, f"use 0 (for {default:,}) to {most:,}")
    return size or default


def token_of(key: str) -> str:
    """Return the token of the page after `key`."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def key_of(token: str) -> str:
    """Return the last key of the previous page. Empty for the first page."""
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise invalid_field("page_token", token, "send a next_page_token as it came, or none") from None
